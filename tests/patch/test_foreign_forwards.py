"""What other libraries put on the instances of a model keeps working under a plan, and is there again after it.

Liger binds its forwards to instances, and accelerate's hooks stand in the forward of theirs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import hf_ckpt
from hf_ckpt.errors import PlanMismatchError
from tests import exactness, modes, traces, zoo
from tests.exactness import POLICIES

core = pytest.mark.core
every_policy = pytest.mark.parametrize("policy", POLICIES)

# How often a module inside attention, and inside the ffn, of each of four layers runs in a step.
ONCE, TWICE = [1, 1, 1, 1], [2, 2, 2, 2]
LAYER_RUNS = {"none": ONCE, "full": TWICE, "every_2": [2, 1, 2, 1]}
LAYER_RUNS |= {"segments_2": TWICE, "nested": [3, 3, 2, 2]}
ATTENTION_RUNS = {**LAYER_RUNS, "attention": TWICE, "ffn": ONCE, "mixed": [2, 1, 1, 2]}
FFN_RUNS = {**LAYER_RUNS, "attention": ONCE, "ffn": TWICE, "mixed": [2, 1, 1, 1]}


def llama() -> zoo.Case:
    return exactness.build("llama", attn_implementation="eager")


def check(case: zoo.Case, policy: str) -> None:
    """Hold a policy against the same model without it: results, and what is left."""
    exactness.hold(case, policy, exactness.step(case))


# --- Forwards bound to instances. ---

# The modules whose bound forward was called; what a module holds itself would show as a trace.
calls: list[nn.Module] = []


def counting_forward(self: nn.Module, x: Tensor) -> Tensor:
    """A forward unlike that of the class, as a kernel library would bind it."""
    calls.append(self)
    return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


def bound(case: zoo.Case) -> zoo.Case:
    """Bind the forward to each ffn as Liger does."""
    for layer in case.model.model.layers:
        layer.mlp.__dict__["forward"] = counting_forward.__get__(layer.mlp, layer.mlp.__class__)
    return case


def runs(case: zoo.Case, policy: str) -> list[int]:
    """Return how often the bound forward of each layer is called in a step under the policy."""
    with exactness.apply(case.model, policy, prove="off"):
        calls.clear()
        exactness.step(case)
    return [calls.count(layer.mlp) for layer in case.model.model.layers]


@core
@every_policy
def test_forward_bound_to_an_ffn_is_called_and_recomputed(policy: str) -> None:
    case = bound(llama())
    assert exactness.differences(exactness.step(llama()), exactness.step(case)) != []
    check(case, policy)
    assert runs(case, policy) == FFN_RUNS[policy]


@core
def test_forward_bound_to_an_ffn_is_there_again_after_the_plan() -> None:
    case = bound(llama())
    forwards = [layer.mlp.__dict__["forward"] for layer in case.model.model.layers]
    with hf_ckpt.apply(case.model, "ffn"):
        assert all(layer.mlp.forward.__name__ == "counting_forward" for layer in case.model.model.layers)
    assert [layer.mlp.__dict__["forward"] for layer in case.model.model.layers] == forwards


@core
@pytest.mark.parametrize("policy", ["ffn", "full", "segments_2"])
def test_copy_calls_the_bound_forward_with_its_own_weights(policy: str) -> None:
    case = bound(llama())
    expected = exactness.step(case)
    with exactness.apply(case.model, policy):
        other = zoo.Case("llama", copy.deepcopy(case.model), case.inputs)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.zero_()
    calls.clear()
    assert exactness.differences(expected, exactness.step(other)) == []
    assert {id(module) for module in calls} == {id(layer.mlp) for layer in other.model.model.layers}
    hf_ckpt.remove(other.model)
    assert isinstance(other.model.model.layers[0].mlp.__dict__["forward"], MethodType)
    assert exactness.differences(expected, exactness.step(other)) == []


@core
def test_forward_bound_during_the_plan_raises() -> None:
    case = llama()
    with hf_ckpt.apply(case.model, "ffn"):
        bound(case)
        with pytest.raises(PlanMismatchError, match=r"The forward of model\.layers\.0\.mlp was replaced by .*counting"):
            exactness.step(case)
    assert [layer.mlp.__dict__["forward"].__func__ for layer in case.model.model.layers] == [counting_forward] * 4


class SiluMul(torch.autograd.Function):
    """What Liger's kernel computes. Like it, backward writes the gradients over the saved inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, *options: object) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.num_options = len(options)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            again = gate.detach().requires_grad_()
            (gate_gradient,) = torch.autograd.grad(nn.functional.silu(again), again, gradient * up)
        up_gradient = gradient * nn.functional.silu(gate)
        with torch.no_grad():
            gate.detach().copy_(gate_gradient), up.detach().copy_(up_gradient)
        return gate, up, *[None] * ctx.num_options


def with_liger(case: zoo.Case, monkeypatch: pytest.MonkeyPatch) -> zoo.Case:
    """Patch the ffns as Liger's own monkey patch does; only its kernel, which needs a GPU, is another."""
    swiglu = pytest.importorskip("liger_kernel.transformers.swiglu")
    from liger_kernel.transformers import monkey_patch

    monkeypatch.setattr(swiglu, "LigerSiLUMulFunction", SiluMul)
    for layer in case.model.model.layers:
        monkey_patch._patch_swiglu_module(layer.mlp, swiglu.LigerSwiGLUMLP)
    return case


@every_policy
def test_ligers_instance_patch_is_exact(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_liger(llama(), monkeypatch)
    check(case, policy)
    kernel, num_calls = SiluMul.apply, iter(range(1000))

    def counted(*args: object) -> Tensor:
        next(num_calls)
        return kernel(*args)

    monkeypatch.setattr(SiluMul, "apply", counted)
    with exactness.apply(case.model, policy, prove="off"):
        exactness.step(case)
    assert next(num_calls) == sum(FFN_RUNS[policy])


@pytest.mark.parametrize(
    "mode", ["selective", "selective_attention", "selective_offload", "offload", "none_tiles", "all"]
)
def test_ligers_instance_patch_is_exact_in_finer_modes(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = with_liger(llama(), monkeypatch)
    expected = exactness.step(case)
    found = traces.snapshot(case.model)
    with modes.in_force(case, mode, tmp_path):
        for got in (exactness.step(case), exactness.step(case)):
            if modes.is_bitwise(mode):
                assert exactness.differences(expected, got) == []
            else:
                assert modes.worst(modes.apart(expected, got))[0] <= modes.CLOSE
    assert traces.differences(found, traces.snapshot(case.model)) == []


# --- accelerate's hooks. ---


class CountingHook(ModelHook):
    """Counts, and changes the output so that a hook left out shows in the loss."""

    def __init__(self) -> None:
        self.num_runs = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.num_runs += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5


def hooked(case: zoo.Case, part: str) -> list[CountingHook]:
    hooks = [CountingHook() for _ in case.model.model.layers]
    for layer, hook in zip(case.model.model.layers, hooks, strict=True):
        add_hook_to_module(layer.get_submodule(part), hook)
    return hooks


@core
@every_policy
@pytest.mark.parametrize(("part", "expected_runs"), [("self_attn", ATTENTION_RUNS), ("mlp", FFN_RUNS)])
def test_hook_of_a_part_is_called_and_recomputed(part: str, expected_runs: dict[str, list[int]], policy: str) -> None:
    case = llama()
    hooks = hooked(case, part)
    assert exactness.differences(exactness.step(llama()), exactness.step(case)) != []
    check(case, policy)
    for hook in hooks:
        hook.num_runs = 0
    with exactness.apply(case.model, policy, prove="off"):
        exactness.step(case)
    assert [hook.num_runs for hook in hooks] == expected_runs[policy]


@core
@every_policy
def test_hook_of_a_layer_is_called(policy: str) -> None:
    case = llama()
    hooked(case, "")
    assert exactness.differences(exactness.step(llama()), exactness.step(case)) != []
    check(case, policy)


@core
def test_hooks_can_be_taken_off_after_the_plan() -> None:
    case = llama()
    exactness.step(case)
    case.model.zero_grad()
    found = traces.snapshot(case.model)
    hooked(case, "mlp")
    with hf_ckpt.apply(case.model, "ffn"):
        exactness.step(case)
    case.model.zero_grad()
    remove_hook_from_submodules(case.model)
    # accelerate leaves the bound forward of the class on the instance.
    left = traces.differences(found, traces.snapshot(case.model))
    assert left == [f"model.layers.{idx}.mlp: forward" for idx in range(4)]
    assert exactness.differences(exactness.step(llama()), exactness.step(case)) == []


@core
def test_second_hook_of_a_part_is_called_too() -> None:
    case = llama()
    mlp = case.model.model.layers[1].mlp
    add_hook_to_module(mlp, CountingHook())
    add_hook_to_module(mlp, CountingHook(), append=True)
    assert isinstance(mlp._hf_hook, SequentialHook)
    check(case, "ffn")


@core
@pytest.mark.parametrize("change", ["added", "removed"])
def test_hooks_changed_during_the_plan_raise(change: str) -> None:
    case = llama()
    if change == "removed":
        hooked(case, "mlp")
    with hf_ckpt.apply(case.model, "ffn"):
        if change == "removed":
            remove_hook_from_module(case.model.model.layers[3].mlp)
        else:
            add_hook_to_module(case.model.model.layers[3].mlp, CountingHook())
        with pytest.raises(PlanMismatchError, match=r"^The forward of model\.layers\.3\.mlp was replaced by "):
            exactness.step(case)


def device_map(model: nn.Module, *, in_parts: bool) -> dict[str, str]:
    """Place everything on the CPU, layer by layer or part by part."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    for idx, layer in enumerate(model.model.layers):
        children = [f".{name}" for name, _ in layer.named_children()] if in_parts else [""]
        places |= {f"model.layers.{idx}{child}": "cpu" for child in children}
    return places


@core
@every_policy
@pytest.mark.parametrize("in_parts", [False, True])
def test_dispatched_model_is_exact(in_parts: bool, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = llama()
    dispatch_model(case.model, device_map(case.model, in_parts=in_parts), force_hooks=True)
    part = case.model.model.layers[0].mlp if in_parts else case.model.model.layers[0]
    assert isinstance(part._hf_hook, AlignDevicesHook)
    assert exactness.differences(exactness.step(llama()), exactness.step(case)) == []
    check(case, policy)

    served: list[nn.Module] = []
    original = AlignDevicesHook.pre_forward

    def noting(self: AlignDevicesHook, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        served.append(module)
        return original(self, module, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", noting)
    with exactness.apply(case.model, policy, prove="off"):
        exactness.step(case)
    if in_parts:
        assert [served.count(layer.mlp) for layer in case.model.model.layers] == FFN_RUNS[policy]
        assert [served.count(layer.self_attn) for layer in case.model.model.layers] == ATTENTION_RUNS[policy]
    else:
        assert all(layer in served for layer in case.model.model.layers)


@core
@every_policy
def test_offloaded_model_with_lora_is_exact(policy: str) -> None:
    expected_case, case = lora_case(llama()), lora_case(llama())
    for name, module in case.model.named_modules():
        if name.endswith("base_layer"):
            cpu_offload(module, execution_device="cpu")
            assert module.weight.is_meta
    expected = exactness.step(expected_case)
    with exactness.apply(case.model, policy):
        assert exactness.differences(expected, exactness.step(case)) == []
    assert exactness.differences(expected, exactness.step(case)) == []


def lora_case(case: zoo.Case) -> zoo.Case:
    config = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    return zoo.Case("llama", get_peft_model(case.model, config), case.inputs)
