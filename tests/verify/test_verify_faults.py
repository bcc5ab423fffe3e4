"""Faults, planted through real library code: each fails `verify`, under the right name and with the right cause."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ckpt.callback import HFCkptCallback
from hf_ckpt.regions import segments, tiling
from hf_ckpt.regions.execution_state import AutocastState, is_in_backward
from hf_ckpt.regions.head import chunked_loss
from hf_ckpt.regions.held_state import HeldState
from hf_ckpt.verify import localize
from hf_ckpt.verify.compare import HALF_TOLERANCE
from tests import small_recipes, verifying, zoo
from tests.planted import in_place_of_checkpoint, not_checkpointed
from tests.verifying import failed

pytestmark = pytest.mark.slow

# A fault shows in the first step.
report = partial(verifying.report, num_steps=1)
FULL = {"checkpointing": {"policy": "full"}}
LORA = {**FULL, "lora": small_recipes.LORA}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]


def checkpoint_with(**changed: Any) -> Callable[..., Any]:
    """torch's checkpoint, called as the regions call it but for some arguments."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **{**kwargs, **changed})

    return run


def with_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Put a forward on an instance, as scripts do; it is given the module and its class's forward."""
    module.forward = partial(forward, module, partial(type(module).forward, module))  # type: ignore[method-assign]


# --- The random state, gradients. ---


def test_random_state_that_is_not_preserved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_place_of_checkpoint(monkeypatch, checkpoint_with(preserve_rng_state=False))
    details = failed(report(tmp_path, **LORA))
    assert details.keys() >= {"gradients", "weights", "random numbers", "first difference"}
    assert "the torch generator is in another state" in details["random numbers"]
    assert "layers.1 is the first layer" in details["first difference"]
    assert "aten.bernoulli_.float in base_model.model.model.layers.1.self_attn.q_proj" in details["first difference"]
    assert localize.RANDOM in details["first difference"]


def test_gradient_that_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_place_of_checkpoint(monkeypatch, checkpoint_with(use_reentrant=True))
    policy = {"policy": [{"layers": 0, "mode": "full"}], "input_require_grads": False}
    details = failed(report(tmp_path, lora=small_recipes.LORA, checkpointing=policy))
    assert details["gradients"].startswith("14 parameters lost the gradient (base_model.model.model.layers.0.")
    assert "Without the plan they get one: recomputation loses the gradient." in details["trainable parameters"]
    assert localize.NO_OUTPUT_GRADIENT in details["first difference"]


def test_gradients_that_are_all_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_place_of_checkpoint(monkeypatch, checkpoint_with(use_reentrant=True))
    policy = {"policy": "full", "input_require_grads": False}
    details = failed(report(tmp_path, lora=small_recipes.LORA, checkpointing=policy))
    assert details.keys() == {"run", "trainable parameters"}
    assert details["trainable parameters"].startswith("With the plan nothing trains")


def test_adapter_that_is_disabled(tmp_path: Path) -> None:
    details = failed(report(tmp_path, setup=lambda model: model.disable_adapter_layers(), **LORA))
    assert details.keys() == {"trainable parameters"}
    assert details["trainable parameters"].startswith("Nothing trains, without the plan either")


def test_adapter_that_does_not_move(tmp_path: Path) -> None:
    def still(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.register_hook(torch.zeros_like)

    section = {**small_recipes.LORA, "modules_to_save": ["lm_head"]}
    details = failed(report(tmp_path, setup=still, **{**LORA, "lora": section}))
    assert details.keys() == {"trainable parameters"}
    assert details["trainable parameters"].startswith("The adapter does not move")


def test_adapter_that_is_left_out_of_the_forward(tmp_path: Path) -> None:
    def disable(model: nn.Module) -> None:
        for module in model.modules():
            if type(module).__name__ == "Linear" and hasattr(module, "base_layer"):
                module._disable_adapters = True

    section = {**small_recipes.LORA, "modules_to_save": ["lm_head"]}
    details = failed(report(tmp_path, setup=disable, **{**LORA, "lora": section}))
    assert "28 trainable parameters got no gradient although the module ran" in details["trainable parameters"]
    assert "They get none without the plan either" in details["trainable parameters"]


# --- The plan. ---


def test_plan_that_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_place_of_checkpoint(monkeypatch, not_checkpointed)
    details = failed(report(tmp_path, **FULL))
    assert details.keys() == {"forward counts", "plan in force"}
    assert details["forward counts"].startswith("The plan did nothing on layers 0 to 1 of model.layers")
    assert details["plan in force"].startswith("The run itself would stop in its first step: Layers 0, 1")


def test_plan_that_another_library_overwrites(tmp_path: Path) -> None:
    def round_trip(model: nn.Module) -> None:
        def off_and_on(module: nn.Module, args: Any) -> None:
            # As trl does around a generation: whatever is on is switched off, and on again.
            if any(getattr(other, "gradient_checkpointing", False) for other in model.modules()):
                model.gradient_checkpointing_disable()
                model.gradient_checkpointing_enable()

        model.get_input_embeddings().register_forward_pre_hook(off_and_on)

    details = failed(report(tmp_path, setup=round_trip))
    assert details.keys() >= {"forward counts", "plan in force"}
    assert "although the plan keeps the activations there" in details["forward counts"]
    assert "_gradient_checkpointing_func is now torch.utils.checkpoint.checkpoint" in details["plan in force"]


def test_checkpointing_that_is_on_without_the_plan(tmp_path: Path) -> None:
    details = failed(report(tmp_path, setup=lambda model: model.gradient_checkpointing_enable()))
    # Before 5.23 transformers runs a layer's own hooks again too.
    has_layers = "__call__" in vars(GradientCheckpointingLayer)
    modules = "model.layers.3 and 51" if has_layers else "model.layers.3.input_layernorm and 47"
    assert f"Without the plan, {modules} more modules" in details["forward counts"]
    assert "ran again in backward all the same" in details["forward counts"]


def test_wrapper_that_empties_the_adapter_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def on_train_begin(self: HFCkptCallback, *args: Any, **kwargs: Any) -> None:
        found(self, *args, **kwargs)
        own = {id(layer) for layer in layers(kwargs["model"])}
        apply_activation_checkpointing(
            kwargs["model"], check_fn=lambda module: id(module) in own, checkpoint_wrapper_fn=checkpoint_wrapper
        )

    found = HFCkptCallback.on_train_begin
    monkeypatch.setattr(HFCkptCallback, "on_train_begin", on_train_begin)
    details = failed(report(tmp_path, **LORA))
    assert details.keys() >= {"names", "adapter file"}
    assert "layers.0._checkpoint_wrapped_module" in details["names"]
    assert details["adapter file"].startswith(
        "adapter_model.safetensors has 0 tensors, and of 28 trained ones it lacks 28"
    )


# --- What recomputation starts from. ---


def test_in_place_write_behind_a_kept_matmul(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    in_place_of_checkpoint(monkeypatch, checkpoint_with(context_fn=keep))

    def scale_in_place(model: nn.Module) -> None:
        for layer in layers(model):
            layer.mlp.gate_proj.register_forward_hook(lambda module, args, output: output.mul_(1.5))

    details = failed(report(tmp_path, setup=scale_in_place, **FULL))
    assert (
        "aten._unsafe_view.default in model.layers.1.mlp.gate_proj, behind aten.mm.default"
        in (details["first difference"])
    )
    assert localize.IN_PLACE in details["first difference"]


def test_selective_checkpointing_without_such_a_write_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    in_place_of_checkpoint(monkeypatch, checkpoint_with(context_fn=keep))
    assert failed(report(tmp_path, **FULL)) == {}


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
@pytest.mark.sweep(keep=1)
def test_reentrant_checkpoint_with_shared_keys_and_values(
    model_type: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_place_of_checkpoint(monkeypatch, checkpoint_with(use_reentrant=True))
    config = zoo.config(model_type, "causal", dropout=0.0).to_diff_dict()
    fields = {key: value for key, value in config.items() if key not in ("transformers_version", "dtype")}
    vocabulary = {"vocab_size": 320, "vocab_size_per_layer_input": 320}
    model = {"config": {**fields, **vocabulary, "model_type": model_type}}
    details = failed(report(tmp_path, model=model, **FULL))
    # A recomputation is handed aliases, by which a reentrant one gets no gradients back: the run ends.
    assert details.keys() >= {"run", "first difference"}
    assert localize.REENTRANT in details["first difference"]


def test_router_that_routes_differently(tmp_path: Path) -> None:
    def turn_about(model: nn.Module) -> None:
        calls = dict.fromkeys(layers(model), 0)

        def turn(layer: nn.Module, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            calls[layer] += 1
            return (args[0] * (1 if calls[layer] % 2 else -1),)

        for layer in layers(model):
            layer.mlp.gate.register_forward_pre_hook(partial(turn, layer))

    details = failed(report(tmp_path, setup=turn_about, model={"config": MOE}, **FULL))
    assert localize.ROUTER in details["first difference"]
    assert "aten.mul.Tensor in model.layers.1.mlp" in details["first difference"]


def test_branch_that_is_taken_differently(tmp_path: Path) -> None:
    def alternate(model: nn.Module) -> None:
        calls = [0]

        def forward(module: nn.Module, own: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
            calls[0] += 1
            return own(hidden_states.sin() if calls[0] % 2 else hidden_states)

        with_forward(layers(model)[1].mlp, forward)

    details = failed(report(tmp_path, setup=alternate, **FULL))
    assert details["run"].startswith(
        "With the plan the run ends after 0 steps while recomputing model.layers.1: Recomputation"
    )
    assert "Recomputation left out aten.sin.default" in details["first difference"]
    assert localize.BRANCH in details["first difference"]


def test_branch_that_saves_as_much(tmp_path: Path) -> None:
    def alternate(model: nn.Module) -> None:
        calls = [0]

        def forward(module: nn.Module, own: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
            calls[0] += 1
            return own(hidden_states.sin() if calls[0] % 2 else hidden_states.cos())

        with_forward(layers(model)[1].mlp, forward)

    details = failed(report(tmp_path, setup=alternate, **FULL))
    assert "the forward ran aten.sin.default in model.layers.1.mlp" in details["first difference"].replace("The", "the")
    assert localize.BRANCH in details["first difference"]


def test_autocast_that_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(AutocastState, "restored", lambda self: nullcontext())
    policy = {"policy": "full", "segment_size": 2}
    details = failed(report(tmp_path, training={"bf16": True}, checkpointing=policy))
    assert details["autocast"].startswith("Autocast was lost in recomputation: cpu torch.bfloat16 in the forward of")
    assert localize.AUTOCAST in details["first difference"]


# --- Whatever recomputation does otherwise, in float32 and in half precision. ---


def drop_mask(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if is_in_backward():
        length = kwargs["hidden_states"].shape[1]
        kwargs = {**kwargs, "attention_mask": kwargs["hidden_states"].new_zeros(1, 1, length, length)}
    return own(*args, **kwargs)


def roll(module: nn.Module, own: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
    return own(hidden_states).roll(int(is_in_backward()), 1)


_GENERATOR = numpy.random.default_rng(0)


def draw_from_numpy(module: nn.Module, own: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
    # The module does not hold it.
    return own(hidden_states) * float(_GENERATOR.uniform(0.5, 1.5))


# One that a module holds is brought back.
HIDDEN_GENERATOR = torch.Generator()


def draw_from_a_hidden_generator(module: Any, own: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
    return own(hidden_states) * torch.rand((), generator=HIDDEN_GENERATOR)


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "forward", [drop_mask, roll, draw_from_numpy, draw_from_a_hidden_generator], ids=lambda each: each.__name__
)
@pytest.mark.sweep(keep=1)
def test_recomputation_that_is_another(forward: Callable[..., Any], is_half: bool, tmp_path: Path) -> None:
    def plant(model: nn.Module) -> None:
        layer = layers(model)[1]
        HIDDEN_GENERATOR.manual_seed(0)
        with_forward(layer.self_attn if forward is drop_mask else layer.mlp, forward)

    details = failed(report(tmp_path, setup=plant, training={"bf16": is_half}, **FULL))
    # Of an output that nothing saves, gradients do not tell.
    assert "its recomputation returns something else than its forward" in details["plan in force"]


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.sweep(keep=1)
def test_segment_that_goes_on_from_another_input(
    is_half: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def replay(self: Any, runner: Any, before: list[Tensor], collector: Any) -> Any:
        return found(self, runner, [1.01 * tensor for tensor in before], collector)

    found = segments._Link.replay
    monkeypatch.setattr(segments._Link, "replay", replay)
    policy = {"policy": "full", "segment_size": 2}
    details = failed(report(tmp_path, training={"bf16": is_half}, checkpointing=policy))
    assert {"plan in force", "gradients"} <= details.keys()


# --- Tiles and the chunked head. ---

HEAD = {"checkpointing": {"policy": "none", "head": "chunked"}}


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [1.001, 1.01])
@pytest.mark.sweep(keep=1)
def test_loss_of_chunks_that_is_off(
    factor: float, is_half: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def scaled(*args: Any) -> Any:
        return found(*args) * factor

    found = chunked_loss._run
    monkeypatch.setattr(chunked_loss, "_run", scaled)
    section = {**HEAD["checkpointing"], "prove": "off"}
    details = failed(report(tmp_path, training={"bf16": is_half}, checkpointing=section))
    if is_half:
        # In half precision as much is allowed for rounding.
        assert ("loss" in details) == (factor - 1 > HALF_TOLERANCE)
        assert details["in float32"].startswith(f"The loss of the first step is off by {factor - 1:.2g}")
    else:
        assert {"loss", "gradients"} <= details.keys()


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.sweep(keep=1)
def test_run_would_stop_for_a_loss_of_chunks_that_is_off(
    is_half: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = chunked_loss._run
    monkeypatch.setattr(chunked_loss, "_run", lambda *args: found(*args) * 1.001)
    details = failed(report(tmp_path, training={"bf16": is_half}, **HEAD))
    assert details["plan in force"].startswith(
        "The run itself would stop in its first step: lm_head: its loss over rows"
    )


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.sweep(keep=1)
def test_tile_that_is_cut_one_position_early_in_backward(
    is_half: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def narrow(self: Any, whole: Any, start: int, length: int) -> Any:
        return found(self, whole, max(start - 1, 0), length)

    found = tiling._Slices._narrow
    monkeypatch.setattr(tiling._Slices, "_narrow", narrow)
    details = failed(report(tmp_path, training={"bf16": is_half}, checkpointing={"policy": "none", "tiles": 2}))
    assert "the gradient of its input at positions" in details["plan in force"]
    assert "gradients" in details


@pytest.mark.sweep
def test_half_precision_is_repeated_in_float32(tmp_path: Path) -> None:
    # A large step of Adam magnifies the rounding of gradients that nearly vanish.
    found = report(tmp_path, training={"bf16": True, "learning_rate": 1e-4}, **HEAD)
    assert failed(found) == {}
    assert verifying.of(found, "in float32").detail.startswith("Relative error up to ")
    assert verifying.of(found, "in float32").figures["max_relative_error_of_loss"] < 1e-6


# --- What happens between forward and backward. ---


def test_eval_between_forward_and_backward(tmp_path: Path) -> None:
    def leave_training_mode(model: nn.Module) -> None:
        def evaluate(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                model.eval()

        model.get_output_embeddings().register_forward_hook(evaluate)

    # Brought back for the recomputation.
    assert failed(report(tmp_path, setup=leave_training_mode, **FULL)) == {}


def test_flag_that_changes_between_forward_and_backward_is_brought_back(tmp_path: Path) -> None:
    def change_a_flag(model: nn.Module) -> None:
        mlp = layers(model)[1].mlp

        def forward(module: Any, own: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
            return own(hidden_states * module.scale)

        def set_to(value: float, *args: Any) -> None:
            mlp.scale = value

        with_forward(mlp, forward)
        model.register_forward_pre_hook(partial(set_to, 1.0))
        model.get_output_embeddings().register_forward_hook(partial(set_to, 2.0))

    # The plan brings it back for the recomputation.
    assert failed(report(tmp_path, setup=change_a_flag, **FULL)) == {}


def test_hook_that_counts_twice(tmp_path: Path) -> None:
    def count_calls(model: nn.Module) -> None:
        seen = {"calls": 0}

        def count(module: nn.Module, args: Any) -> None:
            seen["calls"] += 1

        layers(model)[0].self_attn.q_proj.register_forward_pre_hook(count)

    details = failed(report(tmp_path, setup=count_calls, **FULL))
    assert details.keys() == {"hooks"}
    assert "count on model.layers.0.self_attn.q_proj left other values behind" in details["hooks"]


def with_batch_norm(model: nn.Module) -> None:
    mlp = layers(model)[1].mlp
    mlp.norm = nn.BatchNorm1d(mlp.down_proj.out_features)

    def forward(module: Any, own: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
        output = own(hidden_states)
        return module.norm(output.flatten(0, -2)).view_as(output)

    with_forward(mlp, forward)


def with_counter(model: nn.Module) -> None:
    mlp = layers(model)[1].mlp
    mlp.calls = 0

    def forward(module: Any, own: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
        module.calls += 1
        return own(hidden_states)

    with_forward(mlp, forward)


def test_counter_in_tiles_is_refused_and_the_refusal_is_the_verdict(tmp_path: Path) -> None:
    details = failed(report(tmp_path, setup=with_counter, checkpointing={"policy": "full", "tiles": 2}))
    assert details.keys() == {"run"}
    assert "is to run in tiles, but it writes calls for later" in details["run"]


def test_batch_norm_that_is_updated_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(HeldState, "as_in_forward", lambda *_, **__: nullcontext())
    details = failed(report(tmp_path, setup=with_batch_norm, **FULL))
    assert details["buffers"].startswith("3 buffers differ (model.layers.1.mlp.norm.num_batches_tracked")
    assert "recomputation wrote a second time" in details["buffers"]


def test_kernel_that_is_not_deterministic(tmp_path: Path) -> None:
    def add_noise(model: nn.Module) -> None:
        generator = torch.Generator()
        generator.seed()
        layers(model)[1].mlp.register_forward_hook(
            lambda module, args, output: output + 1e-3 * torch.randn(output.shape, generator=generator)
        )

    details = failed(report(tmp_path, setup=add_noise, checkpointing={"policy": "attention"}))
    assert "The first module whose output differs is model.layers.1.mlp" in details["repeatability"]
