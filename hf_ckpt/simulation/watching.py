"""Hooks that tell a tracker which layer, part and module runs, forward and backward.

Knows no plan. A module whose forward is left by an exception (recomputation stops early) is left all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.regions.call import is_in_backward, tensors_of
from hf_ckpt.simulation.step_memory import Phase, Place
from hf_ckpt.simulation.tape import Mark, Region
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.structure.layers import Layer, Stack
from hf_ckpt.structure.parts import PARTS


@contextmanager
def watch(model: nn.Module, stacks: Sequence[Stack], tracker: Tracker) -> Iterator[None]:
    """Tell a tracker what runs, as long as this is entered.

    Args:
        model: the model.
        stacks: its layers.
        tracker: who is told.
    """
    handles: list[Any] = []
    try:
        places = _places(model, stacks)
        parts = set(_parts(stacks))
        for number, stack in enumerate(stacks):
            for layer in stack.layers:
                handles.extend(_watch_layer(layer, number, places[layer.module], tracker))
        for module, place in places.items():
            handles.append(module.register_forward_pre_hook(partial(_enter, tracker, place), prepend=True))
            handles.append(module.register_forward_hook(partial(_leave, tracker), always_call=True))
            if module in parts:
                handles.append(module.register_forward_hook(partial(_watch_output, tracker, place, None)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                told = partial(_tell_gradient, tracker, name)
                handles.append(parameter.register_post_accumulate_grad_hook(told))  # type: ignore[no-untyped-call]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _places(model: nn.Module, stacks: Sequence[Stack]) -> dict[nn.Module, Place]:
    """Return the place of every module: its path, and of what layer and part it is."""
    of_layer: dict[nn.Module, Place] = {}
    for stack in stacks:
        for layer in stack.layers:
            for module, part in _modules_of(layer):
                of_layer[module] = Place(Phase.FORWARD, stack=stack.path, layer_idx=layer.layer_idx, part=part)
    outside = Place(Phase.FORWARD)
    return {module: _at(of_layer.get(module, outside), path) for path, module in model.named_modules() if path}


def _at(place: Place, path: str) -> Place:
    return Place(place.phase, 0, place.stack, place.layer_idx, place.part, path)


def _modules_of(layer: Layer) -> Iterator[tuple[nn.Module, str]]:
    yield layer.outer, ""
    yield from ((module, "") for module in layer.module.modules())
    for part in PARTS:
        for name in getattr(layer, part):
            yield from ((module, part) for module in layer.submodule(name).modules())


def _parts(stacks: Sequence[Stack]) -> Iterator[nn.Module]:
    for stack in stacks:
        for layer in stack.layers:
            for part in PARTS:
                yield from (layer.submodule(name) for name in getattr(layer, part))


def _watch_layer(layer: Layer, number: int, place: Place, tracker: Tracker) -> Iterator[Any]:
    mark = Mark(Region.FORWARD, number, layer.layer_idx, 0)
    yield layer.outer.register_forward_pre_hook(partial(_enter_layer, tracker, mark), prepend=True)
    yield layer.outer.register_forward_hook(partial(_watch_output, tracker, place, mark))


def _enter(tracker: Tracker, place: Place, module: nn.Module, args: Any) -> None:
    tracker.enter_module(place)


def _leave(tracker: Tracker, module: nn.Module, args: Any, output: Any) -> None:
    tracker.leave_module()


def _enter_layer(tracker: Tracker, mark: Mark, module: nn.Module, args: Any) -> None:
    if not is_in_backward():
        tracker.mark(mark)


def _watch_output(tracker: Tracker, place: Place, mark: Mark | None, module: nn.Module, args: Any, output: Any) -> None:
    if is_in_backward():
        return
    if mark is not None:
        tracker.mark(Mark(Region.FORWARD, mark.stack, mark.layer_idx, 0, is_end=True))
    if not torch.is_grad_enabled():
        return
    # The first output is the hidden states; where there are others, their backward may come later.
    for tensor in tensors_of(output)[:1]:
        if tensor.requires_grad:
            tensor.register_hook(partial(_enter_backward, tracker, place, mark))  # type: ignore[no-untyped-call]


def _enter_backward(tracker: Tracker, place: Place, mark: Mark | None, gradient: Tensor) -> None:
    tracker.enter_backward(place)
    if mark is not None:
        tracker.mark(Mark(Region.BACKWARD, mark.stack, mark.layer_idx, 0))


def _tell_gradient(tracker: Tracker, name: str, parameter: Tensor) -> None:
    tracker.name_gradient(name, parameter.grad)
