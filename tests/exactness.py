"""Loss and gradients of one step, with and without a policy, to be compared bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import hf_ckpt
from hf_ckpt.regions.execution_state import is_extra_run, is_in_backward
from hf_ckpt.regions.value_proof import Prove
from tests import traces, zoo

POLICIES: dict[str, tuple[object, dict[str, object]]] = {
    "none": ("none", {}),
    "full": ("full", {}),
    "attention": ("attention", {}),
    "ffn": ("ffn", {}),
    "every_2": ("full", {"every_n_layers": 2}),
    "segments_2": ("full", {"segment_size": 2}),
    "nested": ("full", {"segment_size": 3, "nested": True}),
    "mixed": ([{"layers": "0:1", "mode": "full"}, {"layers": "-1:", "mode": "attention"}], {}),
}
RECOMPUTING = [name for name in POLICIES if name != "none"]


def core_models(*, without: str | None = None) -> list[Any]:
    """Those of `zoo.CORE` as parameters."""
    return [each for each in zoo.CORE if each != without]


every_core_model = pytest.mark.parametrize("model_type", core_models())
every_policy = pytest.mark.parametrize("policy", POLICIES)
every_recomputing_policy = pytest.mark.parametrize("policy", RECOMPUTING)
# One for each way in which a plan stands on a model.
every_kind_of_policy = pytest.mark.parametrize("policy", ["full", "attention", "ffn", "segments_2", "nested", "mixed"])

Result = tuple[Tensor, dict[str, Tensor | None]]


def build(model_type: str, *, seed: int = 0, **options: object) -> zoo.Case:
    """Build a case of the zoo, the same one after the same seed."""
    torch.manual_seed(seed)
    return zoo.build(model_type, **options)


def lora(case: zoo.Case, **options: object) -> zoo.Case:
    """Return the case with adapters in the attention and in the ffn of a Llama."""
    # Adapters that start at zero would give their first matrices no gradient.
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)
    return zoo.Case(case.model_type, get_peft_model(case.model, config), case.inputs)


def apply(model: nn.Module, policy: str, prove: Prove = "first_step") -> hf_ckpt.patch.apply.Applied:
    """Put one of `POLICIES` in force."""
    mode, options = POLICIES[policy]
    return hf_ckpt.apply(model, mode, prove=prove, **options)


def step(case: zoo.Case, seed: int = 0) -> Result:
    """Run forward and backward once and return the loss and the gradients by parameter name."""
    case.model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = zoo.loss(case.model, case.inputs)
    loss.backward()
    return loss.detach(), gradients(case.model)


def under_autocast(case: zoo.Case) -> Result:
    """`step` in bfloat16."""
    case.model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = zoo.loss(case.model, case.inputs)
    loss.backward()
    return loss.detach(), gradients(case.model)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return a copy of the gradients by parameter name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def differences(expected: Result, got: Result) -> list[str]:
    """Name what differs by a bit between two results of `step`."""
    names = [] if torch.equal(expected[0], got[0]) else ["loss"]
    for name, gradient in expected[1].items():
        other = got[1][name]
        same = other is None if gradient is None else other is not None and torch.equal(gradient, other)
        if not same:
            names.append(name)
    return names


def check(case: zoo.Case, policy: str, run: Callable[[zoo.Case], Result] = step) -> list[str]:
    """Return what a policy changes in a step of this case."""
    expected = run(case)
    with apply(case.model, policy):
        return differences(expected, run(case))


def hold(case: zoo.Case, policy: str, expected: Result) -> None:
    """Assert that a policy gives the expected results and leaves nothing behind on the model.

    Args:
        case: as it is before the policy is applied.
        policy: one of `POLICIES`.
        expected: the step without it.
    """
    case.model.zero_grad()
    found = traces.snapshot(case.model)
    with apply(case.model, policy):
        assert differences(expected, step(case)) == []
    case.model.zero_grad()
    assert traces.differences(found, traces.snapshot(case.model)) == []


@contextmanager
def counted_entries(model: nn.Module) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Count the forward entries of every module by its name, those of forward and those of backward apart."""
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()

    def count(name: str) -> Callable[..., None]:
        def counted(*_: object) -> None:
            if not is_extra_run():
                (backward if is_in_backward() else forward).update([name])

        return counted

    hooks = [module.register_forward_pre_hook(count(name)) for name, module in model.named_modules()]
    try:
        yield forward, backward
    finally:
        for hook in hooks:
            hook.remove()


def recomputed(case: zoo.Case) -> list[bool]:
    """Tell which layers of a Llama run again in the backward of a step."""
    with counted_entries(case.model) as (_, backward):
        step(case)
    return [bool(backward[name]) for name, _ in case.model.named_modules() if name.endswith("input_layernorm")]
