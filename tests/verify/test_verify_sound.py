"""Recipes that are right hold: every policy, adapters, full fine-tunes, 4-bit weights, bfloat16, packing, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_ckpt.errors import PolicyError, RecipeError
from hf_ckpt.recipe.recipe import load_recipe
from hf_ckpt.verify.report import Report
from hf_ckpt.verify.run import verify
from tests import small_recipes, verifying
from tests.verifying import ALL, OF_ADAPTER, OF_FULL, failed, of, report

pytestmark = pytest.mark.slow

GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 8,
}
MOE = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_local_experts": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "router_jitter_noise": 0.1,
}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def check(found: Report, names: set[str], *, skipped: set[str] = frozenset({"hooks"})) -> None:
    assert failed(found) == {}
    assert {check.name for check in found.checks} == names
    assert {check.name for check in found.checks if check.verdict == "skip"} == set(skipped)


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [
        ({"policy": "full"}, 2),
        ({"policy": "full", "every_n_layers": 2}, 2),
        ({"policy": "attention"}, 2),
        ({"policy": "ffn"}, 2),
        ({"policy": "full", "segment_size": 2}, 4),
        ({"policy": "full", "segment_size": 2, "nested": True}, 4),
        ({"policy": "full", "nested": "revolve", "snapshots": 1}, 4),
        ({"policy": [{"layers": "0:2", "mode": "full"}, {"layers": 3, "mode": "ffn"}]}, 3),
    ],
    ids=["full", "every_2", "attention", "ffn", "segments", "nested", "revolve", "mixed"],
)
@pytest.mark.sweep(keep=1)
def test_policy_holds_with_dropout(policy: dict[str, Any], recomputed: int, tmp_path: Path) -> None:
    found = report(tmp_path, checkpointing=policy)
    check(found, ALL | OF_FULL)
    assert of(found, "forward counts").figures["num_layers_recomputed"] == recomputed
    assert of(found, "gradients").figures["num_not_equal"] == 0
    assert (
        of(found, "gradients").detail
        == f"{int(of(found, 'gradients').figures['num_compared'])} gradients equal bit by bit."
    )


@pytest.mark.parametrize("part", ["backward", "forward"])
@pytest.mark.sweep(keep=1)
def test_a_run_that_recovers_from_out_of_memory_holds(part: str, tmp_path: Path) -> None:
    ran: list[nn.Module] = []

    def fail_once(model: nn.Module) -> None:
        layer = model.get_submodule("model.layers.1")

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # Of the run with the plan: in the second micro-batch of its second step.
            if module.training and torch.is_grad_enabled() and "forward" in vars(module.get_submodule("self_attn")):
                ran.append(module)
                if len(ran) == 4 and part == "forward":
                    run_out()
                elif len(ran) == 4:
                    (output if isinstance(output, torch.Tensor) else output[0]).register_hook(run_out)

        layer.register_forward_hook(hook)

    def run_out(gradient: torch.Tensor | None = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    checkpointing = {"policy": "attention", "on_oom": "escalate"}
    training = {"gradient_accumulation_steps": 2}
    found = report(tmp_path, setup=fail_once, checkpointing=checkpointing, training=training)
    check(found, ALL | OF_FULL, skipped={"forward counts", "plan in force", "hooks"})
    assert of(found, "forward counts").detail.startswith("Memory ran out, and the run went on under a leaner plan")
    assert of(found, "loss").detail == "4 losses equal bit by bit."
    assert of(found, "run").figures["num_micro_batches"] == 4


def test_policy_none_is_said_to_recompute_nothing(tmp_path: Path) -> None:
    found = report(tmp_path, checkpointing={"policy": "none"})
    check(found, ALL | OF_FULL, skipped={"hooks", "training flags", "autocast"})
    assert of(found, "forward counts").detail.startswith("Nothing of ")


@pytest.mark.parametrize("more", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.sweep
def test_adapter_holds_with_dropout(more: dict[str, Any], tmp_path: Path) -> None:
    found = report(tmp_path, lora={**small_recipes.LORA, **more}, checkpointing={"policy": "full"})
    check(found, ALL | OF_ADAPTER)
    num_adapters = 2 * 7 * (3 if more else 2)
    assert of(found, "adapter file").figures == {"num_tensors": num_adapters, "num_trained": num_adapters}
    assert (
        of(found, "merge").figures["relative_error"] < 2**-13 < of(found, "merge").figures["relative_effect_of_adapter"]
    )
    assert of(found, "trainable parameters").figures["num_moved"] == num_adapters


def test_qlora_holds(tmp_path: Path) -> None:
    model = {"config": None, "tokenizer": None, "name_or_path": "meta-llama/Llama-2-7b-hf", "dtype": "bfloat16"}
    sections = {"model": model, "quantization": NF4, "lora": small_recipes.LORA, "training": {"bf16": True}}
    found = report(tmp_path, checkpointing={"policy": "full"}, **sections)
    check(found, ALL | OF_ADAPTER)


@pytest.mark.sweep
def test_full_fine_tune_in_bfloat16_holds(tmp_path: Path) -> None:
    found = report(tmp_path, training={"bf16": True}, checkpointing={"policy": "full", "segment_size": "sqrt"})
    check(found, ALL | OF_FULL)


def test_packed_rows_hold_under_accumulation(tmp_path: Path) -> None:
    training = {"gradient_accumulation_steps": 8}
    found = report(tmp_path, data={"packing": True}, training=training, checkpointing={"policy": "full"})
    check(found, ALL | OF_FULL)
    assert of(found, "run").figures == {"num_steps": 2, "num_micro_batches": 4}
    assert ("accumulation", "2 micro-batches a step, of 8 in the recipe") in found.facts


def test_experts_with_a_noisy_router_hold(tmp_path: Path) -> None:
    lora = {**small_recipes.LORA, "target_modules": ["q_proj", "v_proj"]}
    found = report(tmp_path, model={"config": MOE}, lora=lora, checkpointing={"policy": "full"})
    check(found, ALL | OF_ADAPTER)


def test_experts_that_the_trainer_cannot_resume_are_told(tmp_path: Path) -> None:
    # transformers 5.23 saves experts one by one, and its Trainer then looks for them under the names that they have
    # in the model: with or without a plan they start again from their first values, with a warning in the log.
    details = failed(report(tmp_path, model={"config": MOE}, checkpointing={"policy": "full"}))
    assert details.keys() == {"resume"}
    assert "Of these, 6 start again from their first values (model.layers.0.mlp.gate.weight" in details["resume"]
    assert "which has nothing to do with the plan" in details["resume"]


@pytest.mark.sweep
def test_two_kinds_of_layers_hold(tmp_path: Path) -> None:
    rules = [{"layer_type": "full_attention", "mode": "full"}, {"layer_type": "sliding_attention", "mode": "ffn"}]
    check(report(tmp_path, model={"config": GEMMA3}, checkpointing={"policy": rules}), ALL | OF_FULL)


def test_hook_without_state_runs_again_and_is_said(tmp_path: Path) -> None:
    def look(model: nn.Module) -> None:
        model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda module, args: None)

    found = report(tmp_path, setup=look, checkpointing={"policy": "full"})
    check(found, ALL | OF_FULL, skipped=set())
    assert "1 hook of 1 ran again in recomputation" in of(found, "hooks").detail


def test_hook_outside_of_recomputed_regions_may_count(tmp_path: Path) -> None:
    calls: list[int] = []

    def count(model: nn.Module) -> None:
        model.lm_head.register_forward_pre_hook(lambda module, args: calls.append(1))

    found = report(tmp_path, setup=count, checkpointing={"policy": "full"})
    check(found, ALL | OF_FULL, skipped=set())
    assert of(found, "hooks").detail == "1 hook of the user, none in a recomputed region."
    assert calls


def test_one_step_leaves_out_resuming(tmp_path: Path) -> None:
    found = report(tmp_path, num_steps=1, checkpointing={"policy": "full"})
    check(found, ALL | OF_FULL, skipped={"hooks", "resume"})


def test_checkpoints_without_optimizer_state_are_not_resumed(tmp_path: Path) -> None:
    found = report(tmp_path, training={"save_only_model": True}, checkpointing={"policy": "full"})
    check(found, ALL | OF_FULL, skipped={"hooks", "resume"})


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "recipe").mkdir()
    torch.manual_seed(1)
    report(tmp_path / "recipe", num_steps=1, checkpointing={"policy": "full"})
    assert list((tmp_path / "tmp").glob("hf_ckpt-verify-*")) == []
    assert not (tmp_path / "recipe" / "run").exists()


def test_recipe_without_a_policy_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe(small_recipes.write(tmp_path, checkpointing=None))
    with pytest.raises(RecipeError, match="has no checkpointing section, so that there is no plan to verify"):
        verify(recipe)


def test_no_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="0 optimizer steps were asked for"):
        verify(load_recipe(small_recipes.write(tmp_path)), num_steps=0)


def test_policy_that_does_not_suit_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="reaches past the end"):
        verifying.report(tmp_path, checkpointing={"policy": [{"layers": "0:9", "mode": "full"}]})


def test_one_thread_computes_and_the_number_is_put_back(tmp_path: Path) -> None:
    seen: list[int] = []
    found = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        report(tmp_path, setup=lambda model: seen.append(torch.get_num_threads()), num_steps=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(found)
    assert set(seen) == {1}
