"""Another library nests with ours: whatever comes and goes first, nothing of ours is left, or runs any more."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

import hf_ckpt
from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.own_loop import AppliedInLoop
from tests import exactness, traces, zoo

NUM_OPERATIONS = 50
POLICIES: list[dict[str, Any]] = [
    {"policy": "full"},
    {"policy": "ffn"},
    {"policy": "attention"},
    {"policy": "selective"},
    {"policy": "full", "segment_size": 2},
    {"policy": "full", "tiles": 2},
    {"policy": "full", "offload": "cpu"},
    {"policy": "none", "head": "chunked"},
]


class Callable_:
    """A forward as an object: it lets itself neither be watched nor compared."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def put(module: nn.Module, forward: Any) -> Callable[[], None]:
    """Set a forward on an instance; what is returned puts back what was found, whatever stands there by then."""
    found = vars(module).get("forward")
    module.forward = forward

    def unwrap() -> None:
        if found is None:
            vars(module).pop("forward", None)
        else:
            module.forward = found

    return unwrap


def by_wrapper(module: nn.Module) -> Callable[[], None]:
    inner = module.forward
    return put(module, functools.wraps(inner)(lambda *args, **kwargs: inner(*args, **kwargs)))


def by_partial(module: nn.Module) -> Callable[[], None]:
    return put(module, functools.partial(module.forward))


def by_method(module: nn.Module) -> Callable[[], None]:
    inner = module.forward
    return put(module, MethodType(lambda self, *args, **kwargs: inner(*args, **kwargs), module))


def by_object(module: nn.Module) -> Callable[[], None]:
    return put(module, Callable_(module.forward))


def by_class(module: nn.Module) -> Callable[[], None]:
    kind = type(module)
    found = kind.forward
    kind.forward = functools.wraps(found)(lambda self, *args, **kwargs: found(self, *args, **kwargs))
    return functools.partial(setattr, kind, "forward", found)


def by_hooks(module: nn.Module) -> Callable[[], None]:
    handles = [
        module.register_forward_pre_hook(lambda *_: None),
        module.register_forward_hook(lambda *_: None, prepend=True),
    ]
    return lambda: [handle.remove() for handle in handles][0]


def by_accelerate(module: nn.Module) -> Callable[[], None]:
    had_own = "forward" in vars(module)
    add_hook_to_module(module, ModelHook(), append=True)

    def unwrap() -> None:
        remove_hook_from_module(module)
        if not had_own and vars(module).get("forward") == MethodType(type(module).forward, module):
            # It leaves the method of the class on the instance.
            del module.forward

    return unwrap


LIBRARIES = [by_wrapper, by_partial, by_method, by_object, by_class, by_hooks, by_accelerate]


def places(model: nn.Module) -> list[nn.Module]:
    """Return what is wrapped: a layer, its parts, and the head."""
    layer = model.get_submodule("model.layers.1")
    return [layer, layer.get_submodule("mlp"), layer.get_submodule("self_attn"), model.get_submodule("lm_head"), model]


def runs_of(case: zoo.Case) -> int:
    """Return how often a module inside an ffn runs in a step."""
    counted: list[int] = []
    inner = case.model.get_submodule("model.layers.1.mlp.down_proj")
    handle = inner.register_forward_pre_hook(lambda *_: counted.append(1))
    exactness.step(case)
    handle.remove()
    return len(counted)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("wrap", LIBRARIES)
@pytest.mark.sweep(keep=14)
def test_nothing_is_left_of_plans_and_wrappers_in_any_order(wrap: Callable[..., Any], seed: int) -> None:
    case = exactness.build("llama")
    expected, found = exactness.step(case), traces.snapshot(case.model)
    drawn = random.Random(seed)
    wrapped: dict[nn.Module, list[Callable[[], None]]] = {module: [] for module in places(case.model)}
    most = 1 if wrap is by_accelerate else 3
    applied: AppliedInLoop | None = None
    for _ in range(NUM_OPERATIONS):
        module = drawn.choice(list(wrapped))
        match drawn.choice(["plan", "wrap", "unwrap", "step"]):
            case "plan" if applied is None:
                applied = hf_ckpt.apply(case.model, **drawn.choice(POLICIES))
            case "plan":
                applied.remove()
                applied = None
            case "wrap" if len(wrapped[module]) < most:
                wrapped[module].append(wrap(module))
            case "unwrap" if wrapped[module]:
                wrapped[module].pop()()
            case "step":
                try:
                    torch.testing.assert_close(exactness.step(case)[0], expected[0])
                except PlanMismatchError:
                    # What was put in the place of a region's forward is told.
                    assert applied is not None
    if applied is not None:
        applied.remove()
    for unwraps in wrapped.values():
        while unwraps:
            unwraps.pop()()
    if wrap is by_object:
        # It shows nobody when it goes: what it has put back goes when it is called.
        exactness.step(case)
    assert traces.differences(found, traces.snapshot(case.model)) == []
    assert runs_of(case) == 1
    assert exactness.differences(expected, exactness.step(case)) == []
