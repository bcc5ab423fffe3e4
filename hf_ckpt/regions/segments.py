"""Several consecutive layers share one saved input: the first one's.

Each layer runs at its natural place in the model's own forward, with its own keyword arguments; only the saving is
shared. In backward the layers run again in a row, from the saved input. A segment ends early where the model does
something between two layers, as a row of layers would not repeat that.

The layers of a nested segment are checkpointed again, so that only their inputs come back: all at once, or no more than
a number of them at a time (`snapshots`). Then the row runs again from the last input that is there as often as one is
missing, and saves others on the way (`policy.revolve`).

Where an engine shards each layer (FSDP), the outermost module in the layer's place gathers and frees its weights. There
the row goes through that module, whose hooks are `enter` and `leave`. Tensors are recognised as they enter and leave
it, because the engine's hooks pass on other objects inside.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174); nested as in its
section 4.4; with snapshots Griewank and Walther 2000, "Algorithm 799: revolve".
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from hf_ckpt.policy.revolve import saved_on_the_way
from hf_ckpt.regions.arguments import GivenBits
from hf_ckpt.regions.execution_state import (
    AllRecomputed,
    AutocastState,
    ConcurrentRun,
    Function,
    RandomState,
    keeps_activations,
    module_of,
    recomputing,
    refuse_transforms,
    tensors_in,
    untransformed,
)
from hf_ckpt.regions.recompute import Call, holding_if_needed, run_checkpointed, run_watched, split_call
from hf_ckpt.regions.routing import KeptRouting
from hf_ckpt.regions.saved_tensors import (
    GradientInside,
    held_saved_tensors,
    save_inputs,
    saved_behind,
    until_stopped,
)

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import CallProof, RegionProof

# The tensors that a layer returns, by their index; with snapshots only those that the next layer takes.
Outputs = Sequence[Tensor] | Mapping[int, Tensor]


class SegmentRunner(threading.local):
    """Knows which segment of a stack is open while the stack runs. One for each stack; lives on its layers.

    Thread-local: a segment ends where another thread continues.

    Args:
        let_go: frees what an engine has gathered for a module that has run again, and whose backward is not next.
    """

    _open: weakref.ref[_Segment] | None = None
    entered: tuple[int, partial[Any], tuple[Any, ...]] | None = None
    """The call of the outermost module in the place of a layer, and which layer that is."""
    replayed: tuple[_Link, _Collector] | None = None
    """The link whose recomputation the next call of a layer is."""

    def __init__(self, let_go: Callable[[nn.Module], None]) -> None:
        self.let_go = let_go

    def __reduce__(self) -> tuple[Any, ...]:
        # All other state belongs to a running forward or backward, which a copy of the model does not have.
        return SegmentRunner, (self.let_go,)

    def join(self, number: int, layer_idx: int, tensors: list[Tensor], snapshots: int | None) -> _Segment:
        """Return the open segment if a call with these tensors continues it, a new one otherwise."""
        segment = self.open_segment()
        if segment is None or not segment.goes_on_with(number, layer_idx, tensors):
            segment = _Segment(self, number, snapshots)
            # Weak: the graph owns the segment. A forward without a backward must leave nothing behind.
            self._open = weakref.ref(segment)
        return segment

    def open_segment(self) -> _Segment | None:
        """Return the segment that the last layer ran in, if it still exists."""
        return self._open() if self._open is not None else None

    def take_entered(self, layer_idx: int) -> tuple[partial[Any], tuple[Any, ...]] | None:
        """Return the call that led to this layer, if it was noted."""
        entered, self.entered = self.entered, None
        return entered[1:] if entered is not None and entered[0] == layer_idx else None


def enter(runner: SegmentRunner, layer_idx: int, outer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook, the first one, of the outermost module in the place of a layer."""
    if keeps_activations(outer) and runner.replayed is None:
        runner.entered = (layer_idx, partial(outer, **kwargs), args)


def leave(runner: SegmentRunner, layer_idx: int, outer: nn.Module, args: Any, output: Any) -> None:
    """Forward hook, the last one, of the outermost module in the place of a layer."""
    segment = runner.open_segment()
    if keeps_activations(outer) and runner.replayed is None and segment is not None:
        segment.leave(layer_idx, output)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def run_in_segment(
    runner: SegmentRunner,
    number: int,
    layer_idx: int,
    nested: bool,
    function: Function,
    *args: Any,
    snapshots: int | None = None,
    proof: RegionProof | None = None,
) -> Any:
    """Run `function(*args)`, a layer's forward, as a link of the segment `number`; never compiled.

    A segment takes layers in ascending order of `layer_idx` only. With `nested` the layer is checkpointed again while
    its segment is recomputed, which brings back no more than `snapshots` inputs at a time. See `recompute`.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    refuse_transforms()
    call, tensors = split_call(function, args)
    if runner.replayed is not None:
        link, collector = runner.replayed
        return link.recompute(call, tensors, collector)
    entered = runner.take_entered(layer_idx)
    outer = None if entered is None else split_call(*entered)
    if outer is not None:
        # The layer's own call runs now, the outer one in the recomputation.
        outer[0].state, outer[0].has_run = call.state, True
    segment = runner.join(number, layer_idx, tensors if outer is None else outer[1], snapshots)
    module = None if entered is None else module_of(entered[0].func)
    run = partial(segment.run, layer_idx, call, tensors, module, outer, nested)
    return run_watched(proof, function, call, tensors, run)


class _Link:
    """One layer's call in a segment: what it takes from the layer before, and what it takes from elsewhere.

    `call` is the layer's own, or that of the module around it, `outer`; `outputs` are those of the layer before.
    """

    def __init__(
        self,
        call: Call,
        tensors: list[Tensor],
        outer: nn.Module | None,
        outputs: list[weakref.ref[Tensor]],
        nested: bool,
        proof: CallProof | None,
    ) -> None:
        self._call = call
        self._proof = proof
        self._outer = outer
        self._nested = nested
        self._routing: KeptRouting | None = None
        self.random_state = RandomState.of(*tensors, *call.others)
        self._autocast = AutocastState.now()
        # Index in the outputs of the layer before, or None for a tensor from elsewhere.
        self._sources = [_position(tensor, outputs) for tensor in tensors]
        call.made_again = {number for number, source in enumerate(self._sources) if source is not None}
        own = [tensor for tensor, source in zip(tensors, self._sources, strict=True) if source is None]
        self._own_inputs = save_inputs(own)

    def taken_from(self, before: Outputs) -> Outputs:
        """Return the outputs of the layer before that this one takes, without their graph."""
        sources = {source for source in self._sources if source is not None}
        return {source: before[source].detach().requires_grad_(before[source].requires_grad) for source in sources}

    def replay(self, runner: SegmentRunner, before: Outputs, collector: _Collector) -> Any:
        """Run the layer again on the outputs `before` of the layer before it."""
        own = iter(saved_behind(self._own_inputs))
        tensors = [next(own) if source is None else before[source] for source in self._sources]
        if self._outer is None:
            return self.recompute(self._call, tensors, collector)
        runner.replayed = (self, collector)
        try:
            return self._call.run(*tensors)
        finally:
            runner.replayed = None

    def explain(self, error: CheckpointError) -> NoReturn:
        """Raise: the layer does not repeat itself."""
        self._call.state.explain(error, differs_in=None if self._proof is None else self._proof.differs_in)

    def add_error(self, is_written: Tensor) -> None:
        """Have the backward refused, if what a layer returned was written to before the next one took it."""
        self._call.state.add_error(is_written, self._call.refuse_written)

    def let_go(self, runner: SegmentRunner) -> None:
        """Free what an engine has gathered for the layer."""
        if self._outer is not None:
            runner.let_go(self._outer)

    def recompute(self, call: Call, tensors: list[Tensor], collector: _Collector) -> Any:
        """Run the layer's own call again, and collect what it saves."""
        call.routing = self._routing
        self.random_state.restore()
        with self._autocast.restored(), collector.hooks(None if self._nested else self._proof):
            returned = self.run(call, tensors)
        if collector.is_done and collector.may_stop:
            raise AllRecomputed
        return returned

    def run(self, call: Call, tensors: list[Tensor]) -> Any:
        """Run the layer's own call."""
        try:
            if self._nested:
                return run_checkpointed(self._proof, call, call.run, tensors)
            return call.run(*tensors) if self._proof is None else self._proof.run(call.run, *tensors)
        finally:
            # Where the module around it runs again, the layer's own call will be another one.
            self._routing = call.routing


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Placeholder:
    """Stands in the graph for a tensor that is not kept. Owns its segment, and by that the saved input."""

    segment: _Segment
    link: int
    value: Tensor | None = None


class _Segment:
    """One saved input and the calls of the layers that follow from it."""

    def __init__(self, runner: SegmentRunner, number: int, snapshots: int | None) -> None:
        self._runner = runner
        self._number = number
        self._num_snapshots = snapshots
        self._snapshots: dict[int, Outputs] = {}
        self._firsts: list[int] = []
        self._layer_idx = -1
        # The call of a layer whose first run goes on.
        self._running: Call | None = None
        self._links: list[_Link] = []
        self._outputs: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []
        self._bits = GivenBits(())
        # Whether outputs were written to before the next layer took them, if only a device knows.
        self._late: list[Tensor] = []
        self._placeholders: list[weakref.ref[_Placeholder]] = []
        self._meta: list[tuple[torch.Size, torch.dtype, torch.device]] = []

    def goes_on_with(self, number: int, layer_idx: int, tensors: list[Tensor]) -> bool:
        """Whether a call takes the last layer's output first, and nothing that it takes of it was written to since."""
        if number != self._number or layer_idx <= self._layer_idx:
            return False
        sources = [_position(tensor, self._outputs) for tensor in tensors]
        if sources[:1] in ([], [None]) or any(
            source is not None and tensor._version != self._versions[source]
            for tensor, source in zip(tensors, sources, strict=True)
        ):
            return False
        outputs = [each() for each in self._outputs]
        # Past the versions too, see `GivenBits`.
        differ = self._bits.differ([torch.empty(0) if each is None else each for each in outputs])
        if isinstance(differ, Tensor):
            self._late.append(differ)
        return isinstance(differ, Tensor) or not differ

    def run(
        self,
        layer_idx: int,
        call: Call,
        tensors: list[Tensor],
        module: nn.Module | None,
        outer: tuple[Call, list[Tensor]] | None,
        nested: bool,
        proof: CallProof | None,
    ) -> Any:
        """Run a layer for the first time; `outer` is the call of `module` around it, if the row goes through that."""
        self._layer_idx = layer_idx
        replayed = (call, tensors) if outer is None else outer
        with ConcurrentRun():
            link = _Link(*replayed, module, self._outputs, nested, proof)
            self._links.append(link)
            self._firsts.append(len(self._placeholders))
            self._running = call
            try:
                output = holding_if_needed(call, partial(self._run_link, link, call, tensors, nested))
            finally:
                self._running = None
        self.leave(layer_idx, output)
        return output

    def _run_link(self, link: _Link, call: Call, tensors: list[Tensor], nested: bool) -> Any:
        # Where the forward starts again, what it has saved so far is not needed.
        del self._placeholders[self._firsts[-1] :], self._meta[self._firsts[-1] :]
        # What is checkpointed again holds what it saves by itself.
        holds = call.state.takes_gradients and not nested
        with saved_tensors_hooks(self._pack, _unpack), held_saved_tensors() if holds else nullcontext():
            return link.run(call, tensors)

    def leave(self, layer_idx: int, output: Any) -> None:
        """Note what a layer returns: first its own output, then that of the module around it."""
        if layer_idx == self._layer_idx:
            returned = tensors_in(output)
            self._outputs = [weakref.ref(tensor) for tensor in returned]
            self._versions = [tensor._version for tensor in returned]
            self._bits = GivenBits(returned)

    def _pack(self, tensor: Tensor) -> _Placeholder:
        placeholder = _Placeholder(self, len(self._links) - 1)
        self._placeholders.append(weakref.ref(placeholder))
        self._meta.append((tensor.shape, tensor.dtype, tensor.device))
        return placeholder

    def recompute(self, trigger: int) -> None:
        """Run layers again, for the backward of link `trigger`, and fill the placeholders that are to be filled now."""
        late, self._late = self._late, []
        for differ in late:
            self._links[0].add_error(differ)
        start = max((link for link in self._snapshots if link <= trigger), default=0)
        outputs = self._snapshots.get(start, {})
        saved = self._saved_on_the_way(start, trigger)
        collector = _Collector(self._placeholders, self._meta, self._firsts[start], saved)
        with recomputing(), untransformed(), self._links[0].random_state.kept(), torch.enable_grad():
            try:
                with until_stopped(collector):
                    for number, link in enumerate(self._links[start:], start):
                        if self._num_snapshots is not None:
                            # What the layer before has made of its graph goes here.
                            outputs = link.taken_from(outputs)
                            if number in collector.links and number not in (start, trigger):
                                self._snapshots[number] = outputs
                        # An engine must see the end of each layer's forward, except for the one in its backward.
                        collector.may_stop = number == trigger
                        outputs = tensors_in(link.replay(self._runner, outputs, collector))
                        if self._num_snapshots is not None and number + 1 < trigger:
                            # The next one's turn comes next.
                            link.let_go(self._runner)
                        if collector.is_done:
                            break
            except CheckpointError as error:
                link.explain(error)
        if (missing := collector.missing()) is not None:
            self._links[trigger].explain(missing)

    def _saved_on_the_way(self, start: int, trigger: int) -> Container[int]:
        """Return the links whose placeholders are filled while the layers from `start` run again."""
        if self._num_snapshots is None:
            return range(len(self._links))
        free = max(0, self._num_snapshots - len(self._snapshots))
        return {trigger, *(start + each for each in saved_on_the_way(trigger - start + 1, free))}

    def take(self, placeholder: _Placeholder) -> Tensor:
        """Return the value of a placeholder, for which layers run again if it has none."""
        if self._running is not None and not self._running.state.takes_gradients:
            raise GradientInside(self._links[-1].random_state)
        if placeholder.value is None:
            self.recompute(placeholder.link)
        self._snapshots.pop(placeholder.link, None)
        value, placeholder.value = placeholder.value, None
        assert value is not None, "a placeholder that asks is alive, so it was filled"
        return value


class _Collector:
    """Collects the tensors that a recomputation saves, in the order of the forward, from the placeholder `first` on.

    `links` are those whose tensors are kept, as far as anything still needs them.
    """

    def __init__(
        self, placeholders: list[weakref.ref[_Placeholder]], meta: list[Any], first: int, links: Container[int]
    ) -> None:
        self._placeholders = placeholders
        self._meta = meta
        self._taken = first
        alive = [(number, found.link) for number, each in enumerate(placeholders) if (found := each()) is not None]
        self._wanted = {number for number, link in alive if link in links}
        self._needed = max(self._wanted) + 1
        self.links = {link for _, link in alive if link in links}
        self.may_stop = False
        self._may_be_noise = False
        self._proof: CallProof | None = None

    @property
    def is_done(self) -> bool:
        """Whether the last tensor that is needed has been saved."""
        return self._taken >= self._needed

    def hooks(self, proof: CallProof | None) -> AbstractContextManager[Any]:
        """Collect what autograd saves in the block; `proof` may want it to run to its end."""
        self._proof = proof
        return saved_tensors_hooks(self.take, _identity)

    @property
    def stops(self) -> bool:
        """See `Collector`."""
        return self.is_done and self.may_stop and (self._proof is None or not self._proof.runs_to_end)

    def take(self, tensor: Tensor) -> Tensor:
        if self.stops:
            # Whatever ran has caught it, and goes on.
            raise AllRecomputed
        if self._taken + 2 == self._needed:
            self._may_be_noise = not tensor.requires_grad
        elif self._taken + 1 == self._needed and self._may_be_noise and tensor.requires_grad:
            # See the note on noise in `saved_tensors`.
            self.may_stop &= self._meta[self._taken] != self._meta[self._taken - 1]
        # Detached: a node that holds its own output would keep itself alive for ever.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if self._taken < len(self._meta):
            self._compare(tensor)
            placeholder = self._placeholders[self._taken]()
            if placeholder is not None and self._taken in self._wanted:
                placeholder.value = tensor
        self._taken += 1
        if self.stops:
            raise AllRecomputed
        if self._proof is not None and self.is_done and self.may_stop:
            self._proof.after_last_needed()
        return tensor

    def _compare(self, tensor: Tensor) -> None:
        meta = (tensor.shape, tensor.dtype, tensor.device)
        if meta != self._meta[self._taken]:
            raise CheckpointError(
                f"a tensor of {meta} is saved where the forward saved one of {self._meta[self._taken]}"
            )

    def missing(self) -> CheckpointError | None:
        """Return what to raise if too little was saved."""
        if self._taken >= self._needed:
            return None
        return CheckpointError(f"{self._taken} tensors are saved where the forward saved {len(self._meta)}")


def _unpack(placeholder: _Placeholder) -> Tensor:
    # Empty in the first backward, and when a tensor is unpacked again: each value is returned once, so that it is freed
    # as soon as it has been used.
    return placeholder.segment.take(placeholder)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _position(tensor: Tensor, outputs: list[weakref.ref[Tensor]]) -> int | None:
    return next((number for number, output in enumerate(outputs) if output() is tensor), None)
