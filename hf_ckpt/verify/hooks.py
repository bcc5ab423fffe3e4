"""Hooks and replaced forwards that the user's own script put on a model, and what can be seen of their state.

A hook inside a recomputed region runs again in backward. Whether that matters depends on what it does; what it can
have written to is looked at: closure cells, the object that it is bound to, arguments of a `partial`, its defaults and
attributes, and the globals that its code names.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.verify.fingerprints import of_tensor
from hf_ckpt.verify.record import UserHook
from hf_ckpt.verify.recorder import name_of

_LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "hf_ckpt",
    "trl",
    "liger_kernel",
    "deepspeed",
)
_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_DEPTH = 4
_LONGEST = 10_000
"""Items of a container that are looked at; of a longer one (a vocabulary, a data set) only the length is."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NEVER_STATE = (torch.dtype, torch.device, types.ModuleType, type)


@dataclass
class _Found:
    path: str
    kind: str
    function: Callable[..., Any]
    state_before: Any


class UserHooks:
    """The hooks of the user that are on a model when this is made, and the state that they have then.

    Args:
        model: the model, before any hook of verify or of the plan is on it.
    """

    def __init__(self, model: nn.Module) -> None:
        # Their state is compared by itself; a hook that holds a module of the model has not written it.
        self._known = {id(module) for module in model.modules()} | {
            id(module.config) for module in model.modules() if hasattr(module, "config")
        }
        self._found = [
            _Found(path, kind, function, visible_state(function, self._known))
            for path, module in model.named_modules()
            for kind, function in _functions_on(module)
            if not _is_a_librarys(function)
        ]

    def finish(self, entries: Counter[tuple[str, bool]]) -> list[UserHook]:
        """Return the hooks with what their visible state gained since.

        Args:
            entries: forward entries of modules by (path, whether in backward).
        """
        return [
            UserHook(
                path=found.path,
                kind=found.kind,
                name=name_of(found.function),
                change=_gained(found.state_before, visible_state(found.function, self._known)),
                runs_again=0 if "backward" in found.kind else entries[found.path, True],
            )
            for found in self._found
        ]


def _functions_on(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    for attribute, kind in _KINDS.items():
        for function in getattr(module, attribute, {}).values():
            yield kind, function
    if (forward := vars(module).get("forward")) is not None:
        yield "forward", forward


def _is_a_librarys(function: Callable[..., Any]) -> bool:
    return name_of(function).startswith(tuple(f"{name}." for name in _LIBRARIES))


def visible_state(function: Callable[..., Any], known: set[int]) -> Any:
    """Return, in comparable form, what a function can have written to; None if nothing of that can be seen.

    Args:
        function: a hook or a forward.
        known: ids of objects that are left out.
    """
    state: dict[str, Any] = {}
    see = _Sight(known).see
    while isinstance(function, partial):
        state["arguments"] = see((*function.args, *function.keywords.values()))
        function = function.func
    bound = getattr(function, "__self__", None)
    if bound is not None:
        state["bound object"] = see(bound)
    elif not isinstance(function, types.FunctionType) and hasattr(function, "__dict__"):
        state["callable object"] = see(function)
    plain = getattr(function, "__func__", function)
    if isinstance(plain, types.FunctionType):
        state.update(_of_function(plain, see))
    return {name: value for name, value in state.items() if value not in ((), None, {})} or None


def _of_function(function: types.FunctionType, see: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, see(cell.cell_contents)
        except ValueError:  # a cell that was never filled
            continue
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if not isinstance(value, types.ModuleType | type) and not callable(value):
            yield name, see(value)
    yield "attributes", see(vars(function))
    yield "defaults", see(function.__defaults__ or ())


class _Sight:
    """Turns values into plain ones, in containers; tensors into digests, and what cannot be compared into None."""

    def __init__(self, known: set[int]) -> None:
        self._known = known

    def see(self, value: Any, depth: int = _DEPTH) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Tensor):
            return value.item() if value.numel() == 1 and not value.is_meta else of_tensor(value)
        if depth == 0 or id(value) in self._known or isinstance(value, _NEVER_STATE):
            return None
        if hasattr(value, "__len__") and len(value) > _LONGEST:
            return len(value)
        return self._inside(value, depth - 1)

    def _inside(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return {str(key): self.see(item, depth) for key, item in value.items()}
        if isinstance(value, set | frozenset):
            return sorted(repr(item) for item in value)
        if hasattr(value, "__iter__") and hasattr(value, "__len__"):  # lists, tuples, deques, arrays
            return [self.see(item, depth) for item in value]
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        if isinstance(value, nn.Module):
            attributes = {name: item for name, item in attributes.items() if not name.startswith("_")}
        return {name: self.see(item, depth) for name, item in attributes.items()} or None


def _gained(before: Any, after: Any) -> Any:
    """Return what came to a state: differences of numbers, new items of lists, other new values as they are.

    A hook's counter may be a global that all trials share: each trial is asked what it added.
    """
    if isinstance(after, bool) or not isinstance(before, type(after)):
        return None if before == after else after
    if isinstance(after, int | float | complex):
        return after - before or None
    if isinstance(after, dict):
        gained = {key: _gained(before.get(key), value) for key, value in after.items()}
        return {key: value for key, value in gained.items() if value is not None} or None
    if isinstance(after, list) and after[: len(before)] == before:
        return after[len(before) :] or None
    return None if before == after else after
