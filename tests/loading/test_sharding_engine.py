"""Which engine runs a recipe, and what is refused because of it, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations import deepspeed as transformers_deepspeed
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_ckpt import RecipeError, load_recipe
from hf_ckpt.loading.sharding_engine import (
    Engine,
    asked_engine,
    check_engine_runs,
    check_engine_suits,
    describe_engine,
    num_parameters,
)
from hf_ckpt.loading.trainer import training_arguments
from hf_ckpt.upstream.transformers import on_one_process
from tests import small_recipes, training

FSDP1 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
FULL = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
SHARDED = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}


def arguments(**changes: Any) -> Any:
    found = {"world_size": 2, "fsdp": None, "fsdp_plugin_args": None, "deepspeed": None, "optim": "adamw_torch"}
    return SimpleNamespace(**{**found, "save_only_model": False, "load_best_model_at_end": False, **changes})


def environment(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("launched", "given", "engine"),
    [
        ({}, {"world_size": 1}, Engine.NONE),
        ({}, {}, Engine.DDP),
        (FSDP1, {}, Engine.FSDP1),
        (FSDP2, {}, Engine.FSDP2),
        # What accelerate takes where nothing is said.
        ({"ACCELERATE_USE_FSDP": "true"}, {}, Engine.FSDP1),
        ({"ACCELERATE_USE_FSDP": "false"}, {}, Engine.DDP),
        ({}, {"fsdp": True, "fsdp_plugin_args": {"fsdp_version": 2}}, Engine.FSDP2),
        ({}, {"fsdp": True, "fsdp_plugin_args": {"fsdp_version": 1}}, Engine.FSDP1),
        ({}, {"deepspeed": "zero3.json"}, Engine.DEEPSPEED),
        (DEEPSPEED, {}, Engine.DEEPSPEED),
    ],
)
def test_engine_is_what_launcher_or_recipe_asks_for(
    launched: dict[str, str], given: dict[str, Any], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, launched)
    assert asked_engine(arguments(**given)) is engine


# --- What is refused. ---

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"load_in_8bit": True}
BF16_STORAGE = {**NF4, "bnb_4bit_quant_storage": "bfloat16"}

REFUSED = {
    "4-bit weights that stay whole": (
        FSDP2,
        NF4,
        {},
        "quantization.bnb_4bit_quant_storage is uint8, but FSDP2 shards floating-point weights only: 4-bit weights "
        "would stay whole on each device, or fail. Use quantization.bnb_4bit_quant_storage=bfloat16 and "
        "model.dtype=bfloat16.",
    ),
    "4-bit weights of another dtype in FSDP1": (
        FSDP1,
        {**NF4, "bnb_4bit_quant_storage": "float32"},
        {},
        "quantization.bnb_4bit_quant_storage is float32, but FSDP1 shards floating-point weights only of one dtype: "
        "4-bit weights would stay whole on each device, or fail. Use quantization.bnb_4bit_quant_storage=bfloat16 and "
        "model.dtype=bfloat16.",
    ),
    "8-bit weights": (
        FSDP2,
        INT8,
        {},
        "quantization.load_in_8bit: bitsandbytes' 8-bit weights cannot be sharded by FSDP2. Use load_in_4bit with "
        "bnb_4bit_quant_storage, or launch with DDP.",
    ),
    "experts in 4 bits": (
        FSDP2,
        {**BF16_STORAGE, "quantize_experts": True},
        {},
        "quantization.quantize_experts: FSDP2 cannot shard experts in 4 bits. Remove it, and they are sharded as they "
        "were loaded; or launch one process, or DDP.",
    ),
    "bitsandbytes' optimizer": (
        FSDP2,
        BF16_STORAGE,
        {"optim": "paged_adamw_8bit"},
        "training.optim is paged_adamw_8bit, but bitsandbytes' optimizers have no step for weights that FSDP2 shards. "
        "Use training.optim=adamw_torch_fused: FSDP2 shards its state.",
    ),
    "checkpoints of the model only, in shards": (
        FSDP2 | SHARDED,
        None,
        {"save_only_model": True},
        "training.save_only_model is true, but with fsdp_state_dict_type: SHARDED_STATE_DICT checkpoints hold shards, "
        "which are for resuming only. Use FULL_STATE_DICT, or training.save_only_model=false.",
    ),
    "best model from what cannot be resumed": (
        FSDP2 | FULL,
        None,
        {"save_only_model": True, "load_best_model_at_end": True},
        "training.load_best_model_at_end: FSDP2 loads the best model from a checkpoint that can be resumed. Use "
        "training.save_only_model=false.",
    ),
}


def recipe_with(quantization: dict[str, Any] | None, tmp_path: Path) -> Any:
    lora = small_recipes.LORA
    model = {"config": None, "tokenizer": None, "name_or_path": "some/model", "dtype": "bfloat16"}
    return load_recipe(small_recipes.write(tmp_path, model=model, lora=lora, quantization=quantization))


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_the_engine_cannot_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, quantization, given, says = REFUSED[name]
    environment(monkeypatch, launched)
    with pytest.raises(RecipeError) as refused:
        check_engine_suits(recipe_with(quantization, tmp_path), arguments(**given))
    assert str(refused.value) == says


@pytest.mark.parametrize(
    ("launched", "quantization", "given"),
    [
        ({}, NF4, {"optim": "paged_adamw_8bit", "save_only_model": True, "load_best_model_at_end": True}),
        ({}, INT8, {}),
        (FSDP2, BF16_STORAGE, {}),
        (FSDP1, BF16_STORAGE, {"optim": "paged_adamw_8bit"}),
        (FSDP2, {**NF4, "bnb_4bit_quant_storage": "float32"}, {}),
        (FSDP2 | FULL, None, {"save_only_model": True}),
        (FSDP1, None, {"save_only_model": True}),
        (FSDP2, None, {"load_best_model_at_end": True}),
    ],
)
def test_takes_what_the_engine_can_do(
    launched: dict[str, str],
    quantization: dict[str, Any] | None,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment(monkeypatch, launched)
    check_engine_suits(recipe_with(quantization, tmp_path), arguments(**given))


@pytest.mark.parametrize(("launched", "name"), [(FSDP2, "FSDP"), (DEEPSPEED, "DeepSpeed")])
@pytest.mark.parametrize("key", ["fsdp", "deepspeed"])
def test_two_ways_to_shard_are_refused(
    launched: dict[str, str], name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, launched)
    recipe = load_recipe(small_recipes.write(tmp_path), [f"training.{key}={'true' if key == 'fsdp' else 'zero3.json'}"])
    with pytest.raises(RecipeError) as refused:
        training_arguments(recipe)
    assert str(refused.value) == (
        f"training.{key} asks to shard the model, but it was launched with {name} already (accelerate's "
        f"configuration). Use training.{key}=null, or a launch without it."
    )


def test_launcher_whose_processes_share_matrices_or_rows_is_refused(tmp_path: Path) -> None:
    # The oldest accelerate has none.
    from accelerate import ParallelismConfig

    for name in ("tp_size", "cp_size"):
        args = arguments()
        # accelerate refuses these sizes for one process.
        args.parallelism_config = ParallelismConfig(**{name: 2})
        with pytest.raises(RecipeError, match=f"The launcher asks for {name}=2, and a recipe's model is loaded whole"):
            check_engine_suits(recipe_with(None, tmp_path), args)


def test_zero3_that_saves_no_weights_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    settings = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    config = {"zero_optimization": settings, "train_micro_batch_size_per_gpu": "auto"}
    (tmp_path / "zero3.json").write_text(json.dumps(config))
    recipe = load_recipe(small_recipes.write(tmp_path), [f"training.deepspeed={tmp_path / 'zero3.json'}"])
    with pytest.raises(RecipeError, match="stage3_gather_16bit_weights_on_model_save is false"):
        check_engine_suits(recipe, training_arguments(recipe))


def test_fsdp_that_does_not_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = training.trainer(training.llama(), tmp_path)
    check_engine_runs(trainer)
    environment(monkeypatch, FSDP2)
    with pytest.raises(RecipeError) as refused:
        check_engine_runs(trainer)
    assert str(refused.value) == (
        "FSDP2 was asked for, but accelerate shards on GPUs only and would go on with one process here without a word. "
        "Launch without FSDP on this machine: recipes/accelerate/ddp_8gpu.yaml, or no --config_file."
    )


# --- What came of it. ---


def test_one_process_is_called_so(tmp_path: Path) -> None:
    assert describe_engine(training.trainer(training.llama(), tmp_path)) == "one process"


def test_partitioned_parameters_are_counted_whole() -> None:
    model = training.lora()
    found = num_parameters(model), num_parameters(model, only_trainable=True)
    for parameter in model.parameters():
        # As ZeRO-3 does.
        parameter.ds_numel = parameter.numel()
        parameter.data = torch.empty(0)
    assert found[1] < found[0]
    assert (num_parameters(model), num_parameters(model, only_trainable=True)) == found


def test_model_of_one_process_is_not_partitioned(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    config = transformers_deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert is_deepspeed_zero3_enabled()
    with on_one_process():
        assert not is_deepspeed_zero3_enabled()
        model: nn.Module = training.llama()
    assert is_deepspeed_zero3_enabled()
    assert config.is_zero3()
    assert all(parameter.numel() for parameter in model.parameters())
    transformers_deepspeed.unset_hf_deepspeed_config()
