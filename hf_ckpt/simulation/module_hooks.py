"""Hooks on modules that report to the tracker which layer, part and module runs, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.regions.execution_state import is_in_backward, tensors_in
from hf_ckpt.simulation.step_memory import Phase, Place
from hf_ckpt.simulation.tape import Mark
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.structure.attention_and_ffn import PARTS
from hf_ckpt.structure.layers import Layer, Stack
from hf_ckpt.upstream.torch import DisableTorchFunction


@contextmanager
def track_modules(model: nn.Module, stacks: Sequence[Stack], tracker: Tracker) -> Iterator[None]:
    """Let a tracker know which layer, part and module runs, while this is entered.

    A module whose forward is left by an exception (recomputation stops early) counts as left too.
    """
    with ExitStack() as hooks:
        places = _places(model, stacks)
        parts = {part for stack in stacks for layer in stack.layers for part, _ in _parts(layer)}
        for number, stack in enumerate(stacks):
            tracker.stack_numbers[stack.path] = number
            for layer in stack.layers:
                mark = Mark(Phase.FORWARD, number, layer.layer_idx, 0)
                begin, end = partial(_enter_layer, tracker, mark), partial(_track_output, tracker, places[layer.module])
                hooks.enter_context(layer.outer.register_forward_pre_hook(begin, prepend=True))
                hooks.enter_context(layer.outer.register_forward_hook(partial(end, mark)))
        for module, place in places.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(tracker.enter_module, place), prepend=True))
            hooks.enter_context(module.register_forward_hook(tracker.leave_module, always_call=True))
            if module in parts:
                hooks.enter_context(module.register_forward_hook(partial(_track_output, tracker, place, None)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = partial(tracker.name_gradient, name)
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        yield


@contextmanager
def track_references(model: nn.Module, others: Iterable[nn.Module], tracker: Tracker) -> Iterator[None]:
    """Let a tracker know, while this is entered, when other models run, or the trained one without gradients.

    To be entered with gradients on, around training steps.
    """
    with ExitStack() as hooks:
        for module in (model, *others):
            # By module: hooks of one that is left by an exception run too.
            entered: list[bool] = []
            is_other = module is not model
            enter = partial(_enter_reference, tracker, entered, is_other)
            hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True))
            leave = partial(_leave_reference, tracker, entered)
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield


def _enter_reference(tracker: Tracker, entered: list[bool], is_other: bool, module: nn.Module, args: Any) -> None:
    entered.append(is_other or not torch.is_grad_enabled())
    if entered[-1]:
        tracker.num_reference_forwards += 1


def _leave_reference(tracker: Tracker, entered: list[bool], module: nn.Module, args: Any, output: Any) -> None:
    if entered.pop():
        tracker.num_reference_forwards -= 1


def _places(model: nn.Module, stacks: Sequence[Stack]) -> dict[nn.Module, Place]:
    """Return the place of every module: its path, layer and part."""
    inside: dict[nn.Module, Place] = {}
    for stack in stacks:
        for layer in stack.layers:
            of_layer = Place(Phase.FORWARD, stack=stack.path, layer_idx=layer.layer_idx)
            inside |= dict.fromkeys((layer.outer, *layer.module.modules()), of_layer)
            for module, part in _parts(layer):
                inside |= dict.fromkeys(module.modules(), of_layer._replace(part=part))
    outside = Place(Phase.FORWARD)
    return {module: inside.get(module, outside)._replace(module=path) for path, module in model.named_modules() if path}


def _parts(layer: Layer) -> Iterator[tuple[nn.Module, str]]:
    for part in PARTS:
        yield from ((layer.submodule(name), part) for name in getattr(layer, part))


def _enter_layer(tracker: Tracker, mark: Mark, module: nn.Module, args: Any) -> None:
    if not is_in_backward():
        tracker.mark(mark)
    elif tracker.marks_recomputation:
        tracker.mark(replace(mark, phase=Phase.RECOMPUTATION))


def _track_output(tracker: Tracker, place: Place, mark: Mark | None, module: nn.Module, args: Any, output: Any) -> None:
    if is_in_backward():
        return
    if mark is not None:
        tracker.mark(Mark(Phase.FORWARD, mark.stack, mark.layer_idx, 0, is_end=True))
        if (mark.stack, mark.layer_idx) in tracker.without_backward:
            return
    if not torch.is_grad_enabled():
        return
    # The first output is the hidden states; where there are others, their backward may come later.
    with DisableTorchFunction():
        for tensor in tensors_in(output)[:1]:
            if tensor.requires_grad:
                tensor.register_hook(partial(_enter_backward, tracker, place, mark))  # type: ignore[no-untyped-call]


def _enter_backward(tracker: Tracker, place: Place, mark: Mark | None, gradient: Tensor) -> None:
    tracker.enter_backward(place)
    if mark is not None:
        tracker.mark(Mark(Phase.BACKWARD, mark.stack, mark.layer_idx, 0))
