"""Another library nests with ours: whatever comes and goes first, nothing of ours is left, or runs any more."""

from __future__ import annotations

import copy
import functools
import pickle
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


class ForwardObject:
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
    return put(module, ForwardObject(module.forward))


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

    def unwrap() -> None:
        for handle in handles:
            handle.remove()

    return unwrap


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


class Nesting:
    """A model on which plans and wrappers come and go; those of one library in the order of a stack."""

    def __init__(self, wrap: Callable[[nn.Module], Callable[[], None]], seed: int) -> None:
        self.case = exactness.build("llama")
        self.expected = exactness.step(self.case)
        self._wrap = wrap
        self._drawn = random.Random(seed)
        self._wrapped: dict[nn.Module, list[Callable[[], None]]] = {module: [] for module in places(self.case.model)}
        self._applied: AppliedInLoop | None = None

    def act(self) -> None:
        """Do one thing, drawn by chance."""
        self._drawn.choice([self._change_plan, self._wrap_one, self._unwrap_one, self._step])()

    def _change_plan(self) -> None:
        if self._applied is None:
            self._applied = hf_ckpt.apply(self.case.model, **self._drawn.choice(POLICIES))
        else:
            self._applied.remove()
            self._applied = None

    def _wrap_one(self) -> None:
        module = self._drawn.choice(list(self._wrapped))
        if len(self._wrapped[module]) < (1 if self._wrap is by_accelerate else 3):
            self._wrapped[module].append(self._wrap(module))

    def _unwrap_one(self) -> None:
        wrapped = self._drawn.choice(list(self._wrapped.values()))
        if wrapped:
            wrapped.pop()()

    def _step(self) -> None:
        try:
            torch.testing.assert_close(exactness.step(self.case)[0], self.expected[0])
        except PlanMismatchError:
            # What was put in the place of a region's forward is told.
            assert self._applied is not None

    def end(self) -> None:
        """Take off what is left."""
        if self._applied is not None:
            self._applied.remove()
        for wrapped in self._wrapped.values():
            while wrapped:
                wrapped.pop()()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("wrap", LIBRARIES)
@pytest.mark.sweep(keep=8)
def test_nothing_is_left_of_plans_and_wrappers_in_any_order(
    wrap: Callable[[nn.Module], Callable[[], None]], seed: int
) -> None:
    nesting = Nesting(wrap, seed)
    case = nesting.case
    found = traces.snapshot(case.model)
    for _ in range(NUM_OPERATIONS):
        nesting.act()
    nesting.end()
    if wrap is by_object:
        # It shows nobody when it goes: what it has put back goes when it is called.
        exactness.step(case)
    assert traces.differences(found, traces.snapshot(case.model)) == []
    assert runs_of(case) == 1
    assert exactness.differences(nesting.expected, exactness.step(case)) == []


# --- Single orders. ---


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sweep(keep=3)
def test_what_was_kept_of_a_plan_is_dead(policy: dict[str, Any]) -> None:
    case = exactness.build("llama")
    expected = exactness.step(case)
    names = ("forward", "_gradient_checkpointing_func", "gradient_checkpointing")
    hooks = [name for name in vars(case.model) if name.startswith("_forward_") and name.endswith(("hooks", "kwargs"))]
    with hf_ckpt.apply(case.model, **policy):
        exactness.step(case)
        kept = {
            module: {name: vars(module)[name] for name in names if name in vars(module)}
            for module in case.model.modules()
        }
        kept_hooks = {module: {name: vars(module)[name].copy() for name in hooks} for module in kept}
    for module, of_module in kept_hooks.items():
        for name, found in of_module.items():
            vars(module)[name].update(found)
    for module, attributes in kept.items():
        vars(module).update(attributes)
    assert runs_of(case) == 1
    assert exactness.differences(expected, exactness.step(case)) == []
    assert not any("forward" in vars(module) for module in case.model.modules())


def test_a_copy_of_what_was_kept_is_dead_too() -> None:
    case = exactness.build("llama")
    applied = hf_ckpt.apply(case.model, "ffn")
    mlp = case.model.get_submodule("model.layers.1.mlp")
    unwrap = by_partial(mlp)
    applied.remove()
    for other in (copy.deepcopy(case.model), pickle.loads(pickle.dumps(case.model))):
        # The wrapper of the copy calls the copy's forward.
        assert runs_of(zoo.Case("llama", other, case.inputs)) == 1
    unwrap()
    assert "forward" not in vars(mlp)


# --- Undos that fail. ---


def failing(text: str) -> Callable[[], None]:
    def fail() -> None:
        raise RuntimeError(text)

    return fail


@pytest.mark.parametrize("by_handle", [True, False])
def test_every_undo_runs_though_one_fails(by_handle: bool) -> None:
    case = exactness.build("llama")
    found = traces.snapshot(case.model)
    applied = hf_ckpt.apply(case.model, "full", segment_size=2)
    ran: list[int] = []
    for undo in (failing("one"), lambda: ran.append(1)):
        applied.on_remove(undo)
    with pytest.raises(RuntimeError, match=r"^one$"):
        applied.remove() if by_handle else hf_ckpt.remove(case.model)
    assert ran == [1]
    assert traces.differences(found, traces.snapshot(case.model)) == []
    applied.remove()
    assert not hf_ckpt.remove(case.model)


def test_all_undos_that_fail_are_told_of() -> None:
    applied = hf_ckpt.apply(exactness.build("llama").model, "ffn")
    for text in ("one", "two"):
        applied.on_remove(failing(text))
    with pytest.raises(
        ExceptionGroup, match=r"2 undos of a plan failed.*RuntimeError: one; RuntimeError: two"
    ) as raised:
        applied.remove()
    assert list(map(str, raised.value.exceptions)) == ["one", "two"]
