"""Hooks of verify's own on every module of a model, which write a `Record` while training steps run.

Nothing here asks the plan, the callback or the regions what they did: it looks at modules being entered and left, in
forward and in backward, and at gradients coming by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.regions.call import is_in_backward
from hf_ckpt.regions.head import DeferredLogits
from hf_ckpt.structure.layers import Stack
from hf_ckpt.verify.fingerprints import of_tensor, tensors_in
from hf_ckpt.verify.record import MicroBatch, Record, StateChange

_SEAM = ("gradient_checkpointing", "_gradient_checkpointing_func", "forward")
# Attributes that a plan sets, and that it switches for a forward without gradients.
_PLANS_OWN = frozenset(_SEAM)
_PLAIN = (bool, int, float, str, type(None))

State = dict[str, object]


class Recorder:
    """Watches a model from `start` to `stop`, while `step` is entered for each forward and backward.

    Args:
        model: the model as it was built, before any engine wraps it, so that module paths are clean.
        stacks: its stacks of layers.
        record: what is written to.
    """

    def __init__(self, model: nn.Module, stacks: Sequence[Stack], record: Record) -> None:
        self._record = record
        self._paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        self._layers = {self._paths[layer.module] for stack in stacks for layer in stack.layers}
        self._watched = self._layers | {
            self._paths[layer.module.get_submodule(name)]
            for stack in stacks
            for layer in stack.layers
            for name in (*layer.attention, *layer.ffn)
        }
        self._layer_of: dict[str, str] = {
            self._paths[inner]: self._paths[layer.module]
            for stack in stacks
            for layer in stack.layers
            for inner in layer.module.modules()
        }
        self._handles: list[RemovableHandle] = []
        self._micro: MicroBatch | None = None
        self._forward_states: dict[str, list[State]] = {}
        self._seams: dict[str, tuple[object, ...]] = {}
        self._inside: list[str] = []
        self._last_entered = ""
        self.is_recomputing = False
        self.is_looking = False

    def start(self) -> None:
        """Place the hooks, behind those that are there, and note what stands on the layers."""
        for module, path in self._paths.items():
            self._handles += [
                module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True),
                module.register_forward_hook(partial(self._leave, path)),
            ]
            if path in self._watched:
                self._seams[path] = _seam_of(module)

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def step(self) -> Iterator[MicroBatch]:
        """Record what happens inside the block as one more micro-batch."""
        self._micro = MicroBatch()
        self._record.micro_batches.append(self._micro)
        self._forward_states.clear()
        self._inside.clear()
        try:
            yield self._micro
        finally:
            self._micro = None

    @property
    def layer(self) -> str:
        """Path of the layer that the module entered last belongs to; empty outside of the layers."""
        return self._layer_of.get(self._last_entered, "")

    @property
    def inside(self) -> str:
        """Path of the module that runs now; empty where that cannot be told."""
        return self._inside[-1] if self._inside else ""

    def is_inside(self, path: str) -> bool:
        """Whether the forward of a module runs now."""
        return path in self._inside

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if self._micro is None:
            return
        in_backward = is_in_backward()
        self._record.entries[path, in_backward] += 1
        self._last_entered, self.is_recomputing = path, in_backward
        # A recomputation that stopped early never left the modules that it was in.
        while in_backward and self._inside and not path.startswith(f"{self._inside[-1]}."):
            self._inside.pop()
        self._inside.append(path)
        if path in self._layer_of:
            self._note_state(path, module, in_backward)
        if in_backward:
            return
        if path in self._watched:
            self._note_seam(path, module)
        if path in self._layers:
            self._watch_gradient(_hidden_states(args, kwargs), path, "input")

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside and self._inside[-1] == path:
            self._inside.pop()
        if self._micro is None or is_in_backward():
            return
        with self._looking():
            # Logits that were put off are not there; to look at them would compute them.
            there = (x for x in tensors_in(output, depth=1) if not isinstance(x, DeferredLogits))
            digests = tuple(map(of_tensor, there))
            self._micro.outputs.append((path, digests))
        if path in self._layer_of:
            self._forward_states[path].append(_state_of(module))
        if path in self._watched:
            tensor = next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)
            self._watch_gradient(tensor, path, "output")

    def _note_state(self, path: str, module: nn.Module, in_backward: bool) -> None:
        """Note flags and autocast in the forward; in recomputation compare with any of the module's forwards.

        Both ends of a forward are noted, so that what a module changes itself is not taken for a change from outside.
        """
        state = _state_of(module)
        if not in_backward:
            self._forward_states.setdefault(path, []).append(state)
            return
        known = self._forward_states.get(path, [])
        if not known or state in known:
            return
        for name in sorted(state.keys() | known[-1].keys()):
            change = StateChange(path, name, known[-1].get(name), state.get(name))
            if change.in_forward != change.in_recomputation and change not in self._record.state_changes:
                self._record.state_changes.append(change)

    def _note_seam(self, path: str, module: nn.Module) -> None:
        now = _seam_of(module)
        for name, value, found in zip(_SEAM, now, self._seams[path], strict=True):
            if value is not found and path not in self._record.replaced:
                self._record.replaced[path] = f"{name} is now {name_of(value)}"

    def _watch_gradient(self, tensor: Tensor | None, path: str, side: str) -> None:
        if tensor is None or self._micro is None:
            return
        if not tensor.requires_grad:
            if side == "output" and path in self._layers and torch.is_grad_enabled():
                self._record.cut_off.add(path)
            return
        if type(tensor.grad_fn).__name__ == "CheckpointFunctionBackward" and side == "output":
            self._record.reentrant.add(path)
        tensor.register_hook(partial(self._note_gradient, self._micro, path, side))  # type: ignore[no-untyped-call]

    def _note_gradient(self, micro: MicroBatch, path: str, side: str, gradient: Tensor) -> None:
        if side == "output":
            self._record.reached.add(path)
        with self._looking():
            micro.layer_gradients.append(((path, side), of_tensor(gradient)))

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Mark operators that the recorder itself runs, which are not the model's."""
        self.is_looking = True
        try:
            yield
        finally:
            self.is_looking = False


def plain_attributes(module: nn.Module) -> State:
    """Return the plain values on a module, by attribute: flags, counters, names, and dicts of them."""
    found: State = {}
    for name, value in vars(module).items():
        if name in _PLANS_OWN:
            continue
        if isinstance(value, _PLAIN):
            found[name] = value
        elif (
            isinstance(value, dict) and not name.startswith("_") and all(isinstance(v, _PLAIN) for v in value.values())
        ):
            found.update((f"{name}[{key}]", item) for key, item in value.items())
    return found


def name_of(value: object) -> str:
    """Return how a message names a function or a value, looking through `partial`s."""
    while isinstance(value, partial):
        value = value.func
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{module}.{name}" if name else repr(value)


def _state_of(module: nn.Module) -> State:
    state = plain_attributes(module)
    config = getattr(module, "config", None)
    if config is not None:
        plain = ((name, value) for name, value in vars(config).items() if isinstance(value, _PLAIN))
        state.update((f"config.{name}", value) for name, value in plain)
    state["autocast"] = _autocast()
    return state


def _autocast() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    types = dict.fromkeys(("cpu", "cpu" if accelerator is None else accelerator.type))
    on = [f"{kind} {torch.get_autocast_dtype(kind)}" for kind in types if torch.is_autocast_enabled(kind)]
    return ", ".join(on) or "off"


def _seam_of(module: nn.Module) -> tuple[object, ...]:
    return tuple(vars(module).get(name) for name in _SEAM)


def _hidden_states(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    values = (*args, kwargs.get("hidden_states"))
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
