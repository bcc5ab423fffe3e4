"""No public entry runs what a model computes when it is looked at: parametrised weights, properties, hooks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

import hf_ckpt
from hf_ckpt import HFCkptCallback
from hf_ckpt.policy.policy import Mode
from tests.training import llama, lora, losses, trainer, weights


class WeightDropout(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.dropout(weight, 0.1, self.training)


class DrawsFromAll(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * (1 + 1e-3 * (random.random() + np.random.rand()))


COUNTED: list[str] = []


def counted(name: str) -> Any:
    def get(self: Any) -> Any:
        COUNTED.append(name)
        raise AttributeError(name)

    return property(get)


NAMES = (
    "weight bias base_layer config gradient_checkpointing layer_type attention_type block_type main_input_name p state "
    "backward_pass peft_config in_features qweight original_module"
).split()


def with_properties(module: nn.Module) -> None:
    """Give a module's class, in a subclass of its own, a property for each name that its instance does not store."""
    places = (vars(module), module._parameters, module._buffers, module._modules, vars(type(module)))
    stored = {name for place in places for name in place}
    found = {name: counted(f"{type(module).__name__}.{name}") for name in NAMES if name not in stored}
    module.__class__ = type(type(module).__name__, (type(module),), found)


def spectral(model: Any) -> None:
    for layer in model.model.layers:
        parametrizations.spectral_norm(layer.mlp.gate_proj)
        parametrizations.spectral_norm(layer.self_attn.q_proj)


def normed(model: Any) -> None:
    for layer in model.model.layers:
        parametrizations.weight_norm(layer.mlp.up_proj)
        # Deprecated, and still there: it stores what it computes on the module, before each forward.
        with pytest.warns(FutureWarning):
            weight_norm(layer.self_attn.o_proj)


def dropped(model: Any) -> None:
    for layer in model.model.layers:
        parametrize.register_parametrization(layer.mlp.down_proj, "weight", WeightDropout())
    parametrize.register_parametrization(model.lm_head, "weight", WeightDropout())
    parametrize.register_parametrization(model.model.embed_tokens, "weight", WeightDropout())
    parametrize.register_parametrization(model.model.layers[0].input_layernorm, "weight", WeightDropout())


def drawn(model: Any) -> None:
    for layer in model.model.layers:
        parametrize.register_parametrization(layer.self_attn.v_proj, "weight", DrawsFromAll(), unsafe=True)


def shown(model: Any) -> None:
    for layer in model.model.layers:
        for module in (layer.mlp, layer.mlp.act_fn, layer.self_attn, layer.input_layernorm):
            with_properties(module)


def hooked(model: Any) -> None:
    for module in model.modules():
        module.register_forward_hook(lambda *_: COUNTED.append("hook"))
        module.register_forward_pre_hook(lambda *_: COUNTED.append("pre-hook"))
    for parameter in model.parameters():
        parameter.register_hook(lambda _: COUNTED.append("gradient"))


MADE = {each.__name__: each for each in (spectral, normed, dropped, drawn, shown, hooked)}

MODES = [str(mode) for mode in Mode]
STEP = {"batch_size": 2, "seq_length": 8}
ENTRIES: dict[str, Callable[[nn.Module], Any]] = {
    "find_layers": hf_ckpt.find_layers,
    **{f"apply {mode}": lambda model, mode=mode: hf_ckpt.apply(model, mode).remove() for mode in MODES},
    "apply tiles": lambda model: hf_ckpt.apply(model, "full", tiles=2).remove(),
    "apply segments": lambda model: hf_ckpt.apply(model, "full", segment_size=2).remove(),
    "apply offload": lambda model: hf_ckpt.apply(model, "full", offload="cpu").remove(),
    "apply head": lambda model: hf_ckpt.apply(model, "full", head="chunked").remove(),
    "apply auto": lambda model: hf_ckpt.apply(model, "auto", memory_budget="1GiB", **STEP).remove(),
    "remove": lambda model: (hf_ckpt.apply(model, "full"), hf_ckpt.remove(model)),
    "simulate": lambda model: hf_ckpt.simulate(model, plan="full", device="rtx4090", **STEP),
    "plan": lambda model: hf_ckpt.plan(model, memory_budget="1GiB", device="rtx4090", **STEP),
    "max_length": lambda model: hf_ckpt.max_length(model, memory_budget="1MiB", device="rtx4090", batch_size=2),
}


def state(model: nn.Module) -> Any:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, tensor._version, tensor.grad, tensor.tolist()) for name, tensor in tensors],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # the global one
    ]


@pytest.mark.parametrize("entry", ENTRIES)
def test_nothing_is_evaluated(entry: str) -> None:
    model = llama(num_hidden_layers=2).train()
    for make in MADE.values():
        make(model)
    COUNTED.clear()
    before = state(model)
    ENTRIES[entry](model)
    assert state(model) == before
    assert not COUNTED


@pytest.mark.parametrize("made", ["spectral", "dropped"])
def test_nothing_is_evaluated_behind_an_adapter(made: str) -> None:
    model = lora().train()
    for layer in model.get_base_model().model.layers:
        inner = layer.mlp.down_proj.base_layer
        if made == "spectral":
            parametrizations.spectral_norm(inner)
        else:
            parametrize.register_parametrization(inner, "weight", WeightDropout())
    before = state(model)
    for policy in MODES:
        hf_ckpt.apply(model, policy).remove()
    assert state(model) == before


@pytest.mark.parametrize("made", ["spectral", "dropped", "drawn"])
@pytest.mark.parametrize("policy", ["none", "auto"])
def test_run_of_a_trainer_is_that_without_the_library(made: str, policy: str, tmp_path: Path) -> None:
    runs = []
    options = {"memory_budget": "1GiB"} if policy == "auto" else {}
    for callbacks in ([], [HFCkptCallback(policy, quiet=True, prove="off", **options)]):
        model = llama(num_hidden_layers=2)
        MADE[made](model)
        run = trainer(model, tmp_path, *callbacks)
        run.train()
        runs.append((losses(run), weights(model), dict(model.named_buffers())))
    (expected, *tensors), (got, *others) = runs
    assert got == expected
    assert all(torch.equal(other[name], of[name]) for of, other in zip(tensors, others, strict=True) for name in of)
