"""What is estimated of a recipe: its model on `meta`, its step and its engine, as fine-tuning would have them."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from transformers import TrainingArguments

from hf_ckpt import PolicyError, RecipeError, load_recipe
from hf_ckpt.auto.live_step import zero_of
from hf_ckpt.estimate.launch_config import Launch
from hf_ckpt.estimate.launch_sharding import describe_sharding, sharding_of
from hf_ckpt.estimate.step_of_recipe import Subject, step_of, subject_of
from hf_ckpt.loading.sources import log_level
from hf_ckpt.simulation.step import Sharding, Zero
from tests import small_recipes

pytestmark = pytest.mark.usefixtures("remembered_simulations")

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


def subject(folder: Path, *overrides: str, **sections: Any) -> Subject:
    return subject_of(load_recipe(small_recipes.write(folder, **sections), overrides))


# --- The model. ---


def test_model_lies_on_meta_and_trains() -> None:
    model = subject_of(load_recipe(RECIPES / "llama7b_lora.yaml")).model
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.training


def test_weights_are_loaded_in_bfloat16_and_adapters_trained_in_float32() -> None:
    model = subject_of(load_recipe(RECIPES / "llama7b_lora.yaml")).model
    kinds = Counter((parameter.dtype, parameter.requires_grad) for parameter in model.parameters())
    assert kinds == {(torch.bfloat16, False): 291, (torch.float32, True): 2 * 7 * 32}


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ([], torch.float32),
        (["model.dtype=bfloat16"], torch.bfloat16),
    ],
)
def test_model_made_from_a_config_is_float32_if_nothing_is_said(
    overrides: list[str], dtype: torch.dtype, tmp_path: Path
) -> None:
    assert {parameter.dtype for parameter in subject(tmp_path, *overrides).model.parameters()} == {dtype}


def test_dtype_auto_is_that_of_the_saved_weights() -> None:
    model = subject_of(load_recipe(RECIPES / "llama7b_lora.yaml", ["model.dtype=auto", "lora=null"])).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_vocabulary_is_the_tokenizers(tmp_path: Path) -> None:
    assert subject(tmp_path).model.config.vocab_size == 300


def test_dropout_of_adapters_is_kept(tmp_path: Path) -> None:
    model = subject(tmp_path, lora=small_recipes.LORA).model
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.1}


def test_kernel_that_needs_a_gpu_has_a_stand_in(tmp_path: Path) -> None:
    found = subject(tmp_path, "model.attn_implementation=flash_attention_2")
    assert found.model.config._attn_implementation == "sdpa"
    assert ("changed", "attention sdpa in place of flash_attention_2") in [
        (name, text.partition(":")[0]) for name, text in found.facts
    ]


def test_weights_of_a_foreign_quantisation_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    sections = {"model": {"config": None, "tokenizer": None, "name_or_path": str(tmp_path)}, "lora": small_recipes.LORA}
    with pytest.raises(RecipeError, match="quantised by gptq, which cannot be simulated"):
        subject(tmp_path, **sections)


@pytest.mark.parametrize(
    ("overrides", "is_on"),
    [([], True), (["checkpointing.input_require_grads=false"], False), (["checkpointing=null"], None)],
)
def test_embeddings_need_gradients_as_under_the_callback(
    overrides: list[str], is_on: bool | None, tmp_path: Path
) -> None:
    model = subject(tmp_path, *overrides, lora=small_recipes.LORA).model
    hooks = list(model.get_input_embeddings()._forward_hooks.values())
    assert [hook.args for hook in hooks] == ([] if is_on is None else [(is_on,)])


def test_plan_of_the_recipe_is_resolved_for_its_model(tmp_path: Path) -> None:
    plan = subject(tmp_path).plan
    assert plan is not None
    assert [str(layer.mode) for layer in plan.stacks[0].layers] == ["full", "full", "ffn", "none"]


def test_plan_that_was_made_for_another_adapter_or_depth_is_refused(tmp_path: Path) -> None:
    plain, adapted = subject(tmp_path), subject(tmp_path, lora=small_recipes.LORA)
    assert plain.plan is not None
    assert adapted.plan is not None
    with pytest.raises(PolicyError, match=r"made with LoRA or another adapter .* has none: .*`hf-ckpt plan` again"):
        plain.resolve(adapted.plan)
    with pytest.raises(PolicyError, match=r"made without an adapter .* has an adapter \(LORA\): "):
        adapted.resolve(plain.plan)
    deeper = replace(plain.plan, stacks=(replace(plain.plan.stacks[0], layers=plain.plan.stacks[0].layers * 2),))
    with pytest.raises(PolicyError, match=r"with 8 layers in model\.layers, but LlamaForCausalLM has 4 layers"):
        plain.resolve(deeper)


def test_trainers_own_checkpointing_is_full(tmp_path: Path) -> None:
    plan = subject(tmp_path, "training.gradient_checkpointing=true", checkpointing=None).plan
    assert plan is not None
    assert plan.count(plan.stacks[0].layers[0].mode) == 4


def test_recipe_without_a_policy_has_no_plan(tmp_path: Path) -> None:
    assert subject(tmp_path, checkpointing=None).plan is None


def test_facts_say_what_was_taken_for_what(tmp_path: Path) -> None:
    *_, weights, trained, batch, training, engine, versions = subject(tmp_path, lora=small_recipes.LORA).facts
    assert (weights, batch, training, engine) == (
        ("weights", "54,304 parameters in float32"),
        ("batch", "2 sequences of 64 tokens, padded; 1 micro-batch in each step"),
        ("training", "no autocast, adamw_torch_fused"),
        ("engine", "one process"),
    )
    assert trained[1].endswith(
        ": LoRA of rank 4 on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj (4 each)"
    )
    assert versions[1].startswith("transformers ")


# --- The step. ---


def test_step_has_the_sizes_of_the_recipe() -> None:
    step = step_of(load_recipe(RECIPES / "llama7b_qlora_24gb.yaml"), Sharding())
    assert (step.batch_size, step.seq_length, step.gradient_accumulation_steps) == (4, 2048, 4)
    assert (step.is_padded, step.is_packed, step.autocast) == (True, False, "bfloat16")
    assert (step.optim, step.optim_arguments) == ("paged_adamw_8bit", {"learning_rate": 2e-4})


def test_what_the_recipe_leaves_out_is_as_training_arguments_have_it(tmp_path: Path) -> None:
    recipe = load_recipe(small_recipes.write(tmp_path, data={"max_length": None}))
    training = {key: recipe.training[key] for key in ("output_dir", "use_cpu")}
    step = step_of(replace(recipe, training=training), Sharding())
    assert (step.batch_size, step.seq_length, step.gradient_accumulation_steps) == (8, 1024, 1)
    assert (step.max_grad_norm, step.optim) == (1.0, "adamw_torch_fused")


def test_packed_examples_are_one_row(tmp_path: Path) -> None:
    subject = subject_of(load_recipe(small_recipes.write(tmp_path, data={"packing": True})))
    step = subject.step
    assert (step.batch_size, step.seq_length, step.is_padded, step.is_packed) == (1, 128, False, True)
    assert dict(subject.facts)["batch"] == "1 sequence of 128 tokens, packed; 1 micro-batch in each step"


def test_single_row_is_not_padded(tmp_path: Path) -> None:
    recipe = load_recipe(small_recipes.write(tmp_path), ["training.per_device_train_batch_size=1"])
    assert not step_of(recipe, Sharding()).is_padded


@pytest.mark.parametrize(
    ("override", "without"),
    [
        ("training.torch_compile=true", "training.torch_compile=false"),
        ("training.label_smoothing_factor=0.1", "training.label_smoothing_factor=0"),
        ("training.neftune_noise_alpha=5.0", "training.neftune_noise_alpha=null"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(override: str, without: str, tmp_path: Path) -> None:
    path = small_recipes.write(tmp_path)
    with pytest.raises(RecipeError, match=rf"\S+ = \S+ cannot be simulated: .* Simulate without it \({without}\)"):
        step_of(load_recipe(path, [override]), Sharding())
    assert step_of(load_recipe(path, [override, without]), Sharding()).batch_size == 2


# --- The engine. ---


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ddp_8gpu", "DDP on 8 processes"),
        ("ddp_2x8gpu", "DDP on 16 processes"),
        ("fsdp1_8gpu", "FSDP1 on 8 processes"),
        ("fsdp2_8gpu", "FSDP2 on 8 processes"),
        ("fsdp2_2x8gpu", "FSDP2 on 16 processes"),
        ("zero3_8gpu", "DeepSpeed ZeRO-3 on 8 processes"),
    ],
)
def test_engine_is_read_from_accelerates_file(name: str, words: str, tmp_path: Path) -> None:
    recipe = load_recipe(small_recipes.write(tmp_path))
    launch = Launch(config=RECIPES / "accelerate" / f"{name}.yaml")
    assert describe_sharding(sharding_of(recipe, launch)) == words


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (Launch(), ("none", 1)),
        (Launch(num_processes=4), ("ddp", 4)),
        (Launch(engine="zero2", num_processes=4), ("zero2", 4)),
        (Launch(config=RECIPES / "accelerate" / "fsdp2_8gpu.yaml", num_processes=4), ("fsdp2", 4)),
        (Launch(config=RECIPES / "accelerate" / "ddp_8gpu.yaml", engine="fsdp1"), ("fsdp1", 8)),
    ],
)
def test_options_go_before_the_file(launch: Launch, expected: tuple[str, int], tmp_path: Path) -> None:
    found = sharding_of(load_recipe(small_recipes.write(tmp_path)), launch)
    assert (found.engine, found.world_size) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": False}}, ("fsdp2", False)),
        ({"fsdp": True, "fsdp_config": {"fsdp_version": 1}}, ("fsdp1", True)),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, ("zero2", True)),
    ],
)
def test_engine_of_the_recipe_is_taken(keys: dict[str, Any], expected: tuple[str, bool], tmp_path: Path) -> None:
    recipe = load_recipe(small_recipes.write(tmp_path, training=keys))
    found = sharding_of(recipe, Launch(num_processes=2))
    assert (found.engine, found.reshards_after_forward) == expected


@pytest.mark.parametrize("version", [None, 1, 2])
@pytest.mark.parametrize("words", [True, "full_shard auto_wrap", "shard_grad_op", ["shard_grad_op", "auto_wrap"]])
def test_fsdp_of_the_recipe_is_what_transformers_makes_of_it(
    words: bool | str | list[str], version: int | None, tmp_path: Path
) -> None:
    keys = {"fsdp": words} | ({} if version is None else {"fsdp_config": {"version": version}})
    found = sharding_of(load_recipe(small_recipes.write(tmp_path, training=keys)), Launch(num_processes=2))
    # Words are deprecated, and transformers says so.
    with mock.patch.dict(os.environ), log_level("transformers", logging.ERROR):
        made = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **copy.deepcopy(keys)).fsdp_plugin_args
    assert found.engine == f"fsdp{made.get('fsdp_version', 1)}"
    # Before transformers 5.10, of version 1.
    strategy = made.get("sharding_strategy") if found.engine == "fsdp1" else None
    asked = str(strategy or made["reshard_after_forward"]).lower()
    assert found.reshards_after_forward == (asked == "true" or asked.endswith("full_shard"))


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 2}, Zero()),
        ({"stage": 1, "reduce_bucket_size": 5e7}, Zero(reduce_bucket_size=50_000_000)),
        # The Trainer makes of `auto` less than most weights have.
        ({"stage": 2, "reduce_bucket_size": "auto"}, Zero(reduce_bucket_size=0)),
        # They hold one while the other is sent.
        ({"stage": 2, "overlap_comm": True}, Zero(num_buckets=2)),
        ({"stage": 3, "overlap_comm": True}, Zero()),
        (
            {"stage": 3, "stage3_max_live_parameters": 3e8, "stage3_max_reuse_distance": 2, "sub_group_size": 1e8},
            Zero(max_live_parameters=300_000_000, max_reuse_distance=2, sub_group_size=100_000_000),
        ),
        (
            {"stage": 3, "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": "auto"},
            Zero(max_live_parameters=0, param_persistence_threshold=0),
        ),
    ],
)
def test_sizes_of_deepspeed_are_taken(zero: dict[str, Any], expected: Zero, tmp_path: Path) -> None:
    config: dict[str, Any] = {"zero_optimization": zero}
    recipe = load_recipe(small_recipes.write(tmp_path, training={"deepspeed": config}))
    assert sharding_of(recipe, Launch(num_processes=2)).zero == expected
    assert zero_of(config) == expected


@pytest.mark.parametrize("section", ["bf16", "bfloat16"])
def test_state_of_the_optimizer_in_bfloat16_is_taken_of_deepspeed(section: str) -> None:
    narrow = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert zero_of({"zero_optimization": {"stage": 3}, section: narrow}) == Zero(master_bytes=2)
    assert zero_of({"zero_optimization": {"stage": 3}, section: {"enabled": True}}) == Zero()


def test_an_engine_that_is_named_has_the_defaults_of_its_own(tmp_path: Path) -> None:
    keys = {"deepspeed": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 10}}}
    recipe = load_recipe(small_recipes.write(tmp_path, training=keys))
    found = sharding_of(recipe, Launch(engine="zero2", num_processes=2))
    assert (found.engine, found.zero) == ("zero2", Zero())


FSDP1_FILE = {"distributed_type": "FSDP", "num_processes": 8}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"fsdp_backward_prefetch": None}, False),
        ({"fsdp_backward_prefetch": "NO_PREFETCH"}, False),
        ({"fsdp_backward_prefetch": "BACKWARD_POST"}, False),
        ({"fsdp_backward_prefetch": "BACKWARD_PRE"}, True),
        ({"fsdp_backward_prefetch": "backward_pre"}, True),
        ({"fsdp_backward_prefetch": 1}, True),
        # accelerate no longer reads its old name.
        ({"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}, False),
        # FSDP2 always does, and accelerate says that it ignores the field.
        ({"fsdp_version": 2, "fsdp_backward_prefetch": "NO_PREFETCH"}, True),
    ],
)
def test_prefetch_in_backward_is_what_accelerate_makes_of_its_file(
    fields: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({**FSDP1_FILE, "fsdp_config": fields}))
    found = sharding_of(load_recipe(small_recipes.write(tmp_path)), Launch(config=path))
    assert found.prefetches_in_backward == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # The defaults of `accelerate launch`.
        ({}, True),
        ({"fsdp_sync_module_states": True}, True),
        ({"fsdp_sync_module_states": False}, False),
        ({"fsdp_sync_module_states": "false"}, False),
        # accelerate sets the other one then.
        ({"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": True}, True),
    ],
)
def test_weights_are_broadcast_where_accelerate_does(fields: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({**FSDP1_FILE, "fsdp_config": fields}))
    of_file = sharding_of(load_recipe(small_recipes.write(tmp_path)), Launch(config=path))
    keys = {"fsdp": True, "fsdp_config": {"version": 1, **fields}}
    of_recipe = sharding_of(load_recipe(small_recipes.write(tmp_path, training=keys)), Launch(num_processes=2))
    assert (of_file.broadcasts_weights, of_recipe.broadcasts_weights) == (expected, expected)


@pytest.mark.parametrize(("fields", "expected"), [({}, False), ({"backward_prefetch": "backward_pre"}, True)])
def test_prefetch_in_backward_is_what_the_recipe_says(fields: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    keys = {"fsdp": True, "fsdp_config": {"version": 1, **fields}}
    recipe = load_recipe(small_recipes.write(tmp_path, training=keys))
    assert sharding_of(recipe, Launch(num_processes=2)).prefetches_in_backward == expected


def test_another_engine_than_the_files_prefetches(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(FSDP1_FILE))
    found = sharding_of(load_recipe(small_recipes.write(tmp_path)), Launch(config=path, engine="fsdp2"))
    assert found == Sharding(engine="fsdp2", world_size=8)


@pytest.mark.parametrize(
    ("launch", "keys", "message"),
    [
        (Launch(engine="fsdp2"), {}, "how many there are is not said. Add --processes 8"),
        (Launch(), {"fsdp": True}, "how many there are is not said"),
        (Launch(engine="pp", num_processes=2), {}, 'engine is "pp". Engines are ddp, fsdp1, fsdp2, zero1'),
        (Launch(config=RECIPES / "accelerate" / "fsdp2_8gpu.yaml"), {"deepspeed": {}}, ""),
    ],
)
def test_engine_that_cannot_be_simulated_is_refused(
    launch: Launch, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    recipe = load_recipe(small_recipes.write(tmp_path, training=keys))
    if not message:
        assert sharding_of(recipe, launch).engine == "fsdp2"
        return
    with pytest.raises(RecipeError) as raised:
        sharding_of(recipe, launch)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"distributed_type": "TPU", "num_processes": 8}, "distributed_type TPU cannot be simulated"),
        (
            {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_offload_params": True}},
            "offloading of parameters to the host cannot be simulated",
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}},
            "HYBRID_SHARD shards within each machine",
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_backward_prefetch": "PRE"}},
            'backward_prefetch is "PRE". It is BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH, which is what leaving it',
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "num_processes": 8,
                "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
            },
            "DeepSpeed's offloading to the host cannot be simulated",
        ),
        (
            {
                "distributed_type": "FSDP",
                "num_processes": 8,
                "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_cp_size": 4},
            },
            "cp_size = 4 in parallelism_config cannot be simulated. What can is DDP, and FSDP and DEEPSPEED",
        ),
        (
            {
                "distributed_type": "MULTI_GPU",
                "num_processes": 2,
                "parallelism_config": {"parallelism_config_tp_size": 2},
            },
            "tp_size = 2 in parallelism_config cannot be simulated.",
        ),
        (
            {
                "distributed_type": "FSDP",
                "num_processes": 8,
                "parallelism_config": {
                    "parallelism_config_dp_replicate_size": 2,
                    "parallelism_config_dp_shard_size": 4,
                },
            },
            "dp_replicate_size = 2 in parallelism_config cannot be simulated.",
        ),
    ],
)
def test_file_that_asks_for_more_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(fields))
    with pytest.raises(RecipeError) as raised:
        sharding_of(load_recipe(small_recipes.write(tmp_path)), Launch(config=path))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_two_engines_are_refused(tmp_path: Path) -> None:
    keys = {"deepspeed": {"zero_optimization": {"stage": 3}}}
    recipe = load_recipe(small_recipes.write(tmp_path, training=keys))
    launch = Launch(config=RECIPES / "accelerate" / "fsdp2_8gpu.yaml")
    with pytest.raises(RecipeError, match=r"training asks for zero3, and \S+ for fsdp2. Keep one"):
        sharding_of(recipe, launch)
