"""Several consecutive layers share one saved input: the first one's.

Each layer runs at its natural place in the model's own forward, with its own keyword arguments; only the saving is
shared. In backward the layers are run again in a row, from the saved input. A segment ends early where the model does
something between two layers, because a row of layers would not repeat that.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174); nested as in its
section 4.4.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_ckpt.regions.call import Call, Function, take_apart, tensors_of
from hf_ckpt.regions.random_state import AutocastState, RandomState
from hf_ckpt.regions.recompute import recompute


class SegmentRunner:
    """Knows which segment of a stack is open while the stack runs. One for each stack; lives on its layers."""

    def __init__(self) -> None:
        self._open: weakref.ref[_Segment] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The open segment belongs to a running forward, which a copy of the model has not.
        return {"_open": None}

    def join(self, number: int, layer_idx: int, tensors: list[Tensor]) -> _Segment:
        """Return the open segment if a call with these tensors continues it, a new one otherwise."""
        segment = self._open() if self._open is not None else None
        if segment is None or not segment.goes_on_with(number, layer_idx, tensors):
            segment = _Segment(number)
            # Weak: the graph owns the segment. A forward without a backward must leave nothing behind.
            self._open = weakref.ref(segment)
        return segment


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def run_in_segment(
    runner: SegmentRunner, number: int, layer_idx: int, nested: bool, function: Function, *args: Any
) -> Any:
    """Run `function(*args)`, a layer's forward, as a link of the segment `number`; never compiled.

    Args:
        runner: the state shared by the layers of one stack.
        number: the segment that the layer belongs to.
        layer_idx: the layer's position; a segment takes layers in ascending order only.
        nested: checkpoint the layer again while its segment is recomputed.
        function: the layer's forward, with its keyword arguments.
        args: positional arguments.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    call, tensors = take_apart(function, args)
    return runner.join(number, layer_idx, tensors).run(layer_idx, call, tensors, nested)


class _AllRecomputed(Exception):  # noqa: N818  # a signal, not an error
    """Stops a recomputation once the last tensor that backward needs is there."""


class _SaveForBackward(torch.autograd.Function):
    """Hands tensors to autograd, so that saved-tensor hooks see them and in-place changes are noticed."""

    @staticmethod
    def forward(ctx: Any, node_maker: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise AssertionError("the output of _SaveForBackward is in no graph")


class _SavedInputs:
    """Tensors that a segment starts from."""

    def __init__(self, tensors: list[Tensor]) -> None:
        # The first argument brings about a node that holds the others, even if none of them needs a gradient.
        self._kept: Any = _SaveForBackward.apply(torch.empty((), requires_grad=True), *tensors)  # type: ignore[no-untyped-call]

    def get(self) -> list[Tensor]:
        return list(self._kept.grad_fn.saved_tensors)


class _Link:
    """One layer's call in a segment: what it takes from the layer before, and what it takes from elsewhere."""

    def __init__(self, call: Call, tensors: list[Tensor], outputs: list[weakref.ref[Tensor]], nested: bool) -> None:
        self.call = call
        self.nested = nested
        self.random_state = RandomState.of(*tensors)
        self.autocast = AutocastState.now()
        # Index into the outputs of the layer before, or None for a tensor from elsewhere.
        self.sources = [_position(tensor, outputs) for tensor in tensors]
        own = [tensor for tensor, source in zip(tensors, self.sources, strict=True) if source is None]
        self.own_inputs = _SavedInputs(own)

    def replay(self, before: list[Tensor]) -> Any:
        """Run the layer again on the outputs `before` of the layer before it."""
        own = iter(self.own_inputs.get())
        tensors = [next(own) if source is None else before[source] for source in self.sources]
        self.random_state.restore()
        with self.autocast.restored():
            return self.run(tensors)

    def run(self, tensors: list[Tensor]) -> Any:
        return recompute(self.call.run, *tensors) if self.nested else self.call.run(*tensors)


class _Placeholder:
    """Stands in the graph for a tensor that is not kept. Owns its segment: graph, placeholder, segment, inputs."""

    __slots__ = ("__weakref__", "segment", "value")

    def __init__(self, segment: _Segment) -> None:
        self.segment = segment
        self.value: Tensor | None = None


class _Segment:
    """One saved input and the calls of the layers that follow from it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._layer_idx = -1
        self._links: list[_Link] = []
        self._outputs: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []
        self._placeholders: list[weakref.ref[_Placeholder]] = []
        self._meta: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._thread = threading.get_ident()

    def goes_on_with(self, number: int, layer_idx: int, tensors: list[Tensor]) -> bool:
        """Whether a call with these tensors takes the last layer's output as it is, not written to since."""
        if number != self._number or layer_idx <= self._layer_idx or self._thread != threading.get_ident():
            return False
        position = _position(tensors[0], self._outputs) if tensors else None
        return position is not None and tensors[0]._version == self._versions[position]

    def run(self, layer_idx: int, call: Call, tensors: list[Tensor], nested: bool) -> Any:
        """Run a layer for the first time."""
        self._layer_idx = layer_idx
        link = _Link(call, tensors, self._outputs, nested)
        self._links.append(link)
        with self._hooks():
            output = link.run(tensors)
        returned = tensors_of(output)
        self._outputs = [weakref.ref(tensor) for tensor in returned]
        self._versions = [tensor._version for tensor in returned]
        return output

    def _hooks(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self._leave_out, _bring_back)

    def _leave_out(self, tensor: Tensor) -> _Placeholder:
        placeholder = _Placeholder(self)
        self._placeholders.append(weakref.ref(placeholder))
        self._meta.append((tensor.shape, tensor.dtype, tensor.device))
        return placeholder

    def recompute(self) -> None:
        """Run all layers again and fill the placeholders that are still needed."""
        collector = _Collector(self._placeholders, self._meta)
        state = self._links[0].random_state
        with state.kept(), torch.enable_grad(), saved_tensors_hooks(collector.take, _as_it_is):
            try:
                outputs: list[Tensor] = []
                for link in self._links:
                    outputs = tensors_of(link.replay(outputs))
            except _AllRecomputed:
                pass
        collector.check()


class _Collector:
    """Takes the tensors that a recomputation saves, in the order of the forward."""

    def __init__(self, placeholders: list[weakref.ref[_Placeholder]], meta: list[Any]) -> None:
        self._placeholders = placeholders
        self._meta = meta
        self._taken = 0
        alive = [number for number, placeholder in enumerate(placeholders) if placeholder() is not None]
        self._needed = alive[-1] + 1

    def take(self, tensor: Tensor) -> Tensor:
        # Without its graph: a node that holds its own output would hold itself, for ever.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if self._taken < len(self._meta):
            self._compare(tensor)
            placeholder = self._placeholders[self._taken]()
            if placeholder is not None:
                placeholder.value = tensor
        self._taken += 1
        if self._taken == self._needed:
            raise _AllRecomputed
        return tensor

    def _compare(self, tensor: Tensor) -> None:
        meta = (tensor.shape, tensor.dtype, tensor.device)
        if meta != self._meta[self._taken]:
            raise RuntimeError(
                f"Recomputing a segment gave a tensor of {meta} where the forward gave {self._meta[self._taken]}: its "
                "layers do not repeat themselves (a branch taken differently, a changed flag, a router). "
                'Use mode "full" without segment_size for them, or leave them out of the policy.'
            )

    def check(self) -> None:
        if self._taken < self._needed:
            raise RuntimeError(
                f"Recomputing a segment saved {self._taken} tensors where the forward saved {len(self._meta)}: its "
                "layers do not repeat themselves. Leave them out of the policy."
            )


def _bring_back(placeholder: _Placeholder) -> Tensor:
    # Empty in the first backward, and whenever a tensor is asked for again: each value is handed out once, so that it
    # is freed as soon as it has been used.
    if placeholder.value is None:
        placeholder.segment.recompute()
    value, placeholder.value = placeholder.value, None
    assert value is not None, "a placeholder that asks is alive, so it was filled"
    return value


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _position(tensor: Tensor, outputs: list[weakref.ref[Tensor]]) -> int | None:
    return next((number for number, output in enumerate(outputs) if output() is tensor), None)
