"""What an adapter is announced to train gets a gradient in the first step, or the run stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_ckpt import RecipeError, load_recipe
from hf_ckpt.finetune import train
from tests import small_recipes

pytestmark = pytest.mark.slow

LORA = {"r": 4, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
EXPERTS = {**small_recipes.MIXTURE, "num_experts": 16, "num_experts_per_tok": 1}
ON_EXPERTS = {**LORA, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def layer(model: nn.Module, name: str) -> Any:
    return model.get_submodule(f"base_model.model.model.layers.1.{name}")


def detached(model: nn.Module) -> None:
    layer(model, "self_attn.v_proj").register_forward_hook(lambda module, args, output: output.detach())


def replaced(model: nn.Module) -> None:
    """Compute with the weights that the experts have without their adapter, as what replaces them on loading does."""
    experts = layer(model, "mlp.experts")
    inside = experts.get_base_layer()
    plain = type(inside).forward
    kept = {name: getattr(inside, name).detach() for name in ("gate_up_proj", "down_proj")}

    class Namespace:
        def __getattr__(self, name: str) -> Any:
            return kept[name] if name in kept else getattr(inside, name)

    inside.forward = lambda *args, **kwargs: plain(Namespace(), *args, **kwargs)


def switched_off(model: nn.Module) -> None:
    layer(model, "self_attn.v_proj").enable_adapters(False)
    for parameter in layer(model, "self_attn.v_proj").parameters():
        parameter.requires_grad_("lora" in "".join(layer(model, "self_attn.v_proj").adapter_layer_names))
    layer(model, "self_attn.v_proj").base_layer.requires_grad_(False)


def skipped(model: nn.Module) -> None:
    """Leave a layer out, as random depth does in some steps."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    model.get_submodule("base_model.model.model.layers.1").forward = forward


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], None] | None, **sections: Any
) -> Any:
    build = train.build_trained_model

    def changed(*args: Any) -> nn.Module:
        model = build(*args)
        if change is not None:
            change(model)
        return model

    monkeypatch.setattr(train, "build_trained_model", changed)
    recipe = small_recipes.write(folder, **{"lora": LORA, "checkpointing": None, **sections})
    return train.finetune(load_recipe(recipe, ["training.max_steps=2"]))


@pytest.mark.parametrize(
    ("change", "sections", "said"),
    [
        (detached, {}, "2 trained parameters with 256 numbers (base_model.model.model.layers.1.self_attn.v_proj"),
        (detached, {"checkpointing": {"policy": "full"}}, "2 trained parameters with 256 numbers"),
        (detached, {"training": {"gradient_accumulation_steps": 2}}, "2 trained parameters with 256 numbers"),
        (
            replaced,
            {"model": {"config": EXPERTS}, "lora": ON_EXPERTS},
            "4 trained parameters with 7,168 numbers (base_model.model.model.layers.1.mlp.experts.base_layer.lora_A",
        ),
    ],
    ids=["detached", "detached, recomputed", "detached, accumulated", "replaced"],
)
def test_adapter_that_gets_no_gradient_stops_the_run(
    change: Callable[[nn.Module], None],
    sections: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RecipeError) as stopped:
        run(tmp_path, monkeypatch, change, **sections)
    assert said in str(stopped.value)
    assert "got no gradient in step 1, though what they are on ran" in str(stopped.value)
    assert not (tmp_path / "run" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("change", [switched_off, skipped])
def test_adapter_that_did_not_run_is_said_and_the_run_goes_on(
    change: Callable[[nn.Module], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = run(tmp_path, monkeypatch, change)
    assert len([entry for entry in summary.log_history if "loss" in entry]) == 2
    told = [line for line in capsys.readouterr().out.splitlines() if "got no gradient in step 1" in line]
    assert len(told) == 1
    assert "what they belong to did not run" in told[0]


@pytest.mark.parametrize(
    "sections",
    [
        {"lora": {**LORA, "use_dora": True}},
        {"lora": {**LORA, "modules_to_save": ["lm_head"]}},
        {"lora": {**LORA, "alora_invocation_tokens": [5]}, "checkpointing": None},
        # More experts than tokens are sent to: those that none reaches are rows of a parameter that has a gradient.
        {"lora": ON_EXPERTS, "model": {"config": EXPERTS}},
        {"lora": ON_EXPERTS, "model": {"config": EXPERTS}, "checkpointing": {"policy": "selective"}},
        {"lora": None, "adapter": {"type": "prompt_tuning", "num_virtual_tokens": 4}},
        {"lora": None, "adapter": {"type": "loha", "r": 2, "target_modules": ["q_proj"]}},
        {"lora": None, "adapter": {"type": "trainable_tokens", "token_indices": [3, 4]}},
    ],
    ids=["DoRA", "whole head", "aLoRA", "experts", "experts, selective", "prompt", "LoHa", "tokens"],
)
def test_nothing_is_said_where_all_get_one(
    sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run(tmp_path, monkeypatch, None, **sections)
    assert len([entry for entry in summary.log_history if "loss" in entry]) == 2
    assert "got no gradient" not in capsys.readouterr().out


@pytest.mark.parametrize("trainer", ["dpo", "grpo", "reward"])
@pytest.mark.sweep(keep=1)
def test_nothing_is_said_where_trl_runs_the_model_without_its_adapter(
    trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipes.of_trainer(tmp_path, trainer, lora={**small_recipes.LORA, "lora_dropout": 0.0})
    train.finetune(load_recipe(recipe, ["training.max_steps=2"]))
    assert "got no gradient" not in capsys.readouterr().out
    assert torch.is_grad_enabled()
