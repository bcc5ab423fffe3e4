"""Traces equal layers, and equal slices of a tiled module, once: the tape gets the events of one for the others too.

The forward of equal layers is skipped, and their events are copied into the tape afterwards. A layer's forward and
backward may free only its own storages and those of its neighbours. Otherwise `CannotReuseError` is raised, and every
layer has to be traced.

Equal slices run until two in a row do the same, which then stands for those of the same length that follow.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_ckpt.patch.layer_settings import kinds_of_modules
from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.regions.execution_state import RandomState, is_in_backward, tensors_in
from hf_ckpt.simulation.fake_model import FakeCopy
from hf_ckpt.simulation.layer_likeness import (
    Answer,
    NotedIndex,
    Place,
    number_at,
    places_of_numbers,
    says_otherwise,
)
from hf_ckpt.simulation.step_memory import Phase
from hf_ckpt.simulation.tape import Event, Mark, MemoryChange, Storage, Tape, copied_events, moved_path
from hf_ckpt.simulation.tape_expansion import CannotReuseError, PartlyTraced, expand
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.structure.layers import Layer, Stack
from hf_ckpt.upstream.torch import DisableTorchFunction, FakeTensor, tree_flatten


@dataclass(frozen=True, kw_only=True)
class _StackReuse(PartlyTraced):
    """Which layers of a stack are skipped."""

    layers: tuple[Layer, ...]
    # As `representatives`, of layers that are not even copied. What torch reserves depends on the order of the
    # weights, and that on which layers are copied: it is the same whether segments are cut or not.
    left_out: Mapping[int, int]

    def traced_segments(self) -> list[int | None]:
        """Return the segments of the traced layers, and, for a skipped one, that of the traced one before it.

        Over a gap a segment goes on until a traced layer begins another one.
        """
        found: list[int | None] = []
        current: int | None = None
        for idx, segment in enumerate(self.segments):
            if idx not in self.representatives:
                begins = segment is not None and (idx == 0 or self.segments[idx - 1] != segment)
                current = segment if begins or segment is None else current
            found.append(current)
        return found

    def within_segments(self) -> Iterator[int]:
        """Yield the skipped layers between traced ones of one segment."""
        segments = self.traced_segments()
        ahead: int | None = None
        for idx in reversed(range(len(segments))):
            if idx not in self.representatives:
                ahead = segments[idx]
            elif ahead is not None and segments[idx] == ahead:
                yield idx


@dataclass(frozen=True)
class LayerReuse:
    """Which layers of a model are skipped, because a traced layer represents them."""

    stacks: tuple[_StackReuse, ...]
    # By layer that represents others, by the name of a module in it, and where that has its index: what was asked.
    _answers: dict[nn.Module, dict[tuple[str, Place], list[Answer]]] = field(default_factory=dict)

    @classmethod
    def choose(
        cls,
        stacks: tuple[Stack, ...],
        plan: Plan | None,
        signatures: Mapping[nn.Module, Hashable],
        *,
        unlike: Collection[tuple[int, int]] = (),
        held: Collection[tuple[int, int]] = (),
        cuts: bool = False,
    ) -> LayerReuse:
        """Choose the layers that need no tracing under a plan. Raises `CannotReuseError`.

        `signatures`: by layer, as it stands in its list, see `layer_likeness`. `unlike`: of `CannotReuseError`. `held`:
        see `held_to_original`. `cuts`: whether to trace parts of segments; else each is traced whole, or not at all.
        """
        chosen = []
        for number, stack in enumerate(stacks):
            if isinstance(stack.home, nn.ModuleDict):
                raise CannotReuseError(f"the layers of {stack.path} have names instead of numbers")
            entries = (LayerPlan(),) * len(stack.layers) if plan is None else plan.stacks[number].layers
            segments = [entry.segment for entry in entries]
            kinds = kinds_of(stack, entries, signatures, _in_stack(number, unlike))
            apart = _in_stack(number, held)
            whole = represented(kinds, segments, apart)
            parts = represented(kinds, (), apart) if any(each is not None for each in segments) else whole
            reuse = _StackReuse(
                number=number,
                path=stack.path,
                segments=segments,
                representatives=parts if cuts else whole,
                kinds=kinds if cuts else (),
                layers=stack.layers,
                left_out={idx: like for idx, like in whole.items() if idx in parts},
            )
            chosen.append(reuse)
        if not any(reuse.representatives for reuse in chosen):
            # Layers under a binomial schedule, say: they run more than once, which shows only after they are traced.
            raise CannotReuseError("no layer is like another")
        return cls(tuple(chosen))

    def plan_for_traced(self, plan: Plan) -> Plan:
        """Return the plan with the skipped layers left as they are."""
        stacks = []
        for reuse, stack in zip(self.stacks, plan.stacks, strict=True):
            layers = tuple(
                LayerPlan() if idx in reuse.representatives else replace(entry, segment=segment)
                for idx, (entry, segment) in enumerate(zip(stack.layers, reuse.traced_segments(), strict=True))
            )
            stacks.append(replace(stack, layers=layers))
        return replace(plan, stacks=tuple(stacks))

    def _pairs(self) -> Iterator[tuple[_StackReuse, Layer, Layer]]:
        """Yield, with its stack, each skipped layer and the traced one that represents it."""
        for stack in self.stacks:
            for idx, traced in stack.representatives.items():
                yield stack, stack.layers[idx], stack.layers[traced]

    def stand_ins(self) -> dict[nn.Module, nn.Module]:
        """Return, for each layer that is not copied, the traced one; as `fake_copy` takes them."""
        return {
            stack.layers[idx].outer: stack.layers[traced].outer
            for stack in self.stacks
            for idx, traced in stack.left_out.items()
        }

    def skip_layers(self, fake: FakeCopy, names: Mapping[nn.Parameter, str], tracker: Tracker) -> None:
        """Let the layers of a copy that others represent pass on what they are given.

        `names`: of the parameters of the model, whose gradients and weights the tracker has to know.
        """
        tracker.marks_recomputation = any(segment is not None for stack in self.stacks for segment in stack.segments)
        tracker.without_backward = {(stack.number, idx) for stack in self.stacks for idx in stack.within_segments()}
        recorded: dict[nn.Module, _RecordedCalls] = {}
        for stack, skipped, traced in self._pairs():
            if traced.outer not in recorded:
                recorded[traced.outer] = _RecordedCalls(fake.copy_of(traced.outer), tracker)
            passing_on = _SkippedLayer(skipped.layer_idx, stack.number, recorded[traced.outer], tracker)
            fake.copy_of(skipped.outer).forward = passing_on.call
        for parameter, copies in self._copied_gradients(names).items():
            hook = partial(tracker.record_copied_gradients, copies)
            fake.copy_of(parameter).register_post_accumulate_grad_hook(hook)

    def _copied_gradients(self, names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, list[str]]:
        """Return, by trained parameter of a traced layer, those of the layers that it represents."""
        trained: dict[nn.Module, list[nn.Parameter]] = {}
        copies: dict[nn.Parameter, list[str]] = {}
        for stack, skipped, traced in self._pairs():
            if traced.outer not in trained:
                trained[traced.outer] = [each for each in traced.outer.parameters() if each.requires_grad]
            for parameter in trained[traced.outer]:
                name = moved_path(names[parameter], stack.path, skipped.layer_idx - traced.layer_idx)
                if name == names[parameter]:
                    raise CannotReuseError(f"{name} does not lie in {stack.path}")
                copies.setdefault(parameter, []).append(name)
        return copies

    def note_indices(self, fake: FakeCopy) -> None:
        """Note what layers of a copy that represent others make of their index."""
        for _, _, traced in self._pairs():
            if traced.outer in self._answers:
                continue
            answers = self._answers[traced.outer] = {}
            for name, module in fake.copy_of(traced.outer).named_modules():
                for holder, key, place in list(places_of_numbers(traced, module)):
                    holder[key] = NotedIndex(holder[key], answers.setdefault((name, place), []))

    @property
    def has_indices(self) -> bool:
        """Whether there are any, which code may not take in the place of a number."""
        return any(self._answers.values())

    def expanded(self, tape: Tape) -> Tape:
        """Return the tape as it would be with every layer traced. Raises `CannotReuseError`."""
        unlike = [
            (stack.number, skipped.layer_idx)
            for stack, skipped, traced in self._pairs()
            for (name, place), answers in self._answers.get(traced.outer, {}).items()
            if answers and says_otherwise(number_at(skipped.outer.get_submodule(name), place), answers)
        ]
        if unlike:
            raise CannotReuseError("what a layer does follows from its layer_idx", unlike)
        return expand(tape, self.stacks)


# --- Which layers are alike. ---


def kinds_of(
    stack: Stack,
    entries: Sequence[LayerPlan],
    signatures: Mapping[nn.Module, Hashable],
    unlike: Collection[int],
) -> list[Hashable]:
    """Return, for each layer, what is equal for layers that do the same; their neighbours are left out.

    `unlike`: the `layer_idx` of layers that are like no other.
    """
    kinds: list[Hashable] = []
    segments = [None, *(entry.segment for entry in entries), None]
    for idx, (layer, entry) in enumerate(zip(stack.layers, entries, strict=True)):
        # The embeddings' output may stay on the device: the first layer is then unlike the others, to the next one too.
        is_first_to_send = idx == 0 and entry.offload is not None
        begins, ends = (entry.segment is not None and entry.segment != segments[near] for near in (idx, idx + 2))
        # With snapshots it matters where in its segment a layer is, and which others run again with it.
        alike = None if entry.snapshots is None and idx not in unlike else idx
        of_entry = entry.alone, entry.segment is None, entry.nested, alike, begins, ends
        kinds.append((signatures[layer.outer], *of_entry, is_first_to_send))
    return kinds


def held_to_original(
    stacks: Sequence[Stack], plan: Plan, signatures: Mapping[nn.Module, Hashable]
) -> set[tuple[int, int]]:
    """Return the layers that a proven plan holds to the original: the last one of each kind does more than the others.

    By number of the stack and `layer_idx`. Segments are left out.
    """
    found: dict[Hashable, tuple[int, int]] = {}
    kinds: dict[Hashable, Hashable] = {}
    for number, (stack, planned) in enumerate(zip(stacks, plan.stacks, strict=True)):
        for idx, (layer, entry) in enumerate(zip(stack.layers, planned.layers, strict=True)):
            if entry.mode is not Mode.NONE and entry.segment is None:
                signature = signatures[layer.outer]
                kinds.setdefault(signature, kinds_of_modules(layer.module))
                found[number, entry.alone, kinds[signature]] = number, idx
    return set(found.values())


def _in_stack(number: int, layers: Collection[tuple[int, int]]) -> set[int]:
    return {layer_idx for other, layer_idx in layers if other == number}


def represented(
    kinds: Sequence[Hashable], segments: Sequence[int | None], apart: Collection[int] = ()
) -> dict[int, int]:
    """Return the representative of each layer that is not traced, both by `layer_idx`.

    A layer represents another where both, and the neighbours of both, are alike. The one before it is traced too, and
    the one after it unless all three are alike. Over a gap traced layers meet what is like their own neighbours. Of the
    given segments, each is traced whole, or not at all, and its layers represent those at the same place in segments as
    long.

    `apart`: layers that do more than others like them, all of it inside of themselves: no neighbour does otherwise.
    """
    segments = segments or (None,) * len(kinds)
    around = [None, *kinds, None]
    own = [idx if idx in apart else None for idx in range(len(kinds))]
    # Of each layer, its place in its segment and the segment's length.
    placed = [
        None if segment is None else (idx - segments.index(segment), segments.count(segment))
        for idx, segment in enumerate(segments)
    ]
    keys = list(zip(around, around[1:], around[2:], own, placed, strict=False))
    first: dict[Hashable, int] = {}
    for idx, key in enumerate(keys):
        first.setdefault(key, idx)
    counts = Counter[Hashable](keys)
    representing = {idx for key, idx in first.items() if counts[key] > 1}
    # `around[idx]` is the layer before.
    before = {idx - 1 for idx in representing if idx > 0}
    after = {idx + 1 for idx in representing if idx + 1 < len(kinds) and around[idx] != kinds[idx]}
    traced = {*first.values(), *before, *after}
    while further := _in_segments(segments, traced) or _over_gap(kinds, traced):
        traced |= further
    return {idx: first[key] for idx, key in enumerate(keys) if idx not in traced}


def _in_segments(segments: Sequence[int | None], traced: set[int]) -> set[int]:
    """Return the layers that are not traced, but share a segment with one that is."""
    begun = {segments[idx] for idx in traced} - {None}
    return {idx for idx, segment in enumerate(segments) if segment in begun} - traced


def _over_gap(kinds: Sequence[Hashable], traced: set[int]) -> set[int]:
    """Return the fewest layers to trace too, at the ends of a gap over which others meet than met before."""
    for before, after in itertools.pairwise(sorted(traced)):
        start, end = next(
            (before + ahead, after - count + ahead)
            for count in range(after - before)
            for ahead in reversed(range(count + 1))
            if _meet(kinds, before + ahead, after - count + ahead)
        )
        if (start, end) != (before, after):
            return {*range(before + 1, start + 1), *range(end, after)}
    return set()


def _meet(kinds: Sequence[Hashable], before: int, after: int) -> bool:
    """Whether two layers, if they meet over a gap, meet what is like their own neighbours."""
    return after - before == 1 or (kinds[before] == kinds[after - 1] and kinds[after] == kinds[before + 1])


def shared_layers(model: nn.Module, stacks: Sequence[Stack]) -> set[nn.Module]:
    """Return the layers of which a part is in another place of the model as well: no other layer is like them."""
    times = Counter[object](module for _, module in model.named_modules(remove_duplicate=False))
    times.update(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        layer.outer
        for stack in stacks
        for layer in stack.layers
        if any(times[each] > 1 for each in (*layer.outer.modules(), *layer.outer.parameters()))
    }


# --- While the model runs. ---


@dataclass
class _Call:
    """A call of a traced layer: its arguments and its output by their properties, and its events on the tape."""

    start: int
    end: int = 0
    signature: object = None
    form: list[bool] | None = None  # Which items of its output are tensors; None where that is the tensor itself.


class _RecordedCalls:
    """The last call of a traced layer in the forward that is trained, and in one as a reference."""

    def __init__(self, layer: nn.Module, tracker: Tracker) -> None:
        self._tracker = tracker
        self._calls: dict[bool, _Call] = {}
        layer.register_forward_pre_hook(self._begin, prepend=True)
        layer.register_forward_hook(self._end, with_kwargs=True)

    @property
    def current(self) -> _Call | None:
        """The call that one of a layer like it has to equal now."""
        return self._calls.get(self._tracker.is_reference)

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not is_in_backward():
            self._calls[self._tracker.is_reference] = _Call(len(self._tracker.tape.events))

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self.current
        if is_in_backward() or call is None:
            return
        if _call_signature(tensors_in(output), {}) != _call_signature([_hidden(args, kwargs)], {}):
            raise CannotReuseError(
                f"{type(module).__name__} returns more than hidden states like those that it is given"
            )
        call.end, call.signature = len(self._tracker.tape.events), _call_signature(args, kwargs)
        call.form = [isinstance(each, Tensor) for each in output] if isinstance(output, tuple | list) else None


@dataclass(frozen=True)
class _SkippedLayer:
    """A layer that another one represents."""

    layer_idx: int
    stack: int
    recorded: _RecordedCalls
    tracker: Tracker

    def call(self, *args: Any, **kwargs: Any) -> Any:
        hidden, like = _hidden(args, kwargs), self.recorded.current
        if hidden is None or like is None or _call_signature(args, kwargs) != like.signature:
            raise CannotReuseError(f"layer {self.layer_idx} is called in another way than the one like it")
        if self.tracker.is_reference:
            # It keeps nothing, and needs what the one like it needs: only its time comes on top.
            for event in self.tracker.tape.events[like.start : like.end]:
                if event.seconds or event.num_flops:
                    self.tracker.record_cost(event)
        output = hidden
        # Where the traced layers before and after it share a segment, that goes on with the tensor itself only.
        is_within_segment = (self.stack, self.layer_idx) in self.tracker.without_backward
        if torch.is_grad_enabled() and not is_within_segment:
            output = _BackwardMark.apply(hidden, self)  # type: ignore[no-untyped-call]
        if like.form is None:
            return output
        return tuple(output if is_tensor else None for is_tensor in like.form)


class _BackwardMark(torch.autograd.Function):
    """Passes hidden states and their gradient on, and marks the layer's backward on the tape."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, skipped: _SkippedLayer) -> Tensor:
        ctx.skipped = skipped
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        skipped = ctx.skipped
        skipped.tracker.mark(Mark(Phase.BACKWARD, skipped.stack, skipped.layer_idx, 0))
        return gradient, None


def _hidden(args: Any, kwargs: Any) -> Tensor | None:
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, Tensor) else None


_ATOMS = frozenset({bool, int, float, str})


def _call_signature(args: Any, kwargs: Any) -> object:
    leaves, form = tree_flatten((args, kwargs))
    # No function mode is to see what is read here: see `run_once`.
    with DisableTorchFunction():
        return form, [
            (leaf.shape, leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (type(leaf), leaf if type(leaf) in _ATOMS else None)
            for leaf in leaves
        ]


# --- Slices of a tiled module. ---

_Actions = list[tuple[object, ...]]


def run_unlike(
    tracker: Tracker, bounds: Sequence[tuple[int, int]], inputs: Sequence[Tensor]
) -> Iterator[tuple[int, int]]:
    """Yield the slices that have to run, and write the events of the others. See `regions.tiling.SlicesToRun`."""
    # What a module does may depend on values.
    is_fake = all(isinstance(tensor, FakeTensor) for tensor in inputs)
    last: tuple[int, _Actions | None] = 0, None
    repeated: list[Event] | None = None
    for start, length in bounds:
        if repeated is not None and length == last[0]:
            tracker.tape.events.extend(copied_events(repeated, partial(_copy, tracker)))
            continue
        begin, random_state = len(tracker.tape.events), RandomState.of()
        yield start, length
        # Here the slice has run.
        with tracker.on_host():
            draws = not RandomState.of().is_same(random_state)
        events = tracker.tape.events[begin:]
        actions = _actions(tracker, events) if is_fake and not draws else None
        repeated = events if actions is not None and last == (length, actions) else None
        last = length, actions


def _actions(tracker: Tracker, events: Sequence[Event]) -> _Actions | None:
    """Return what is equal for slices that do the same; None if a slice cannot be repeated."""
    actions: _Actions = []
    slots: dict[Storage, int] = {}
    freed = set[Storage]()
    for event in events:
        storage, look = event.storage, tuple[object, ...]()
        if storage is not None and event.change is MemoryChange.ALLOCATE:
            slots[storage] = len(slots)
        if event.mark is not None or event.transfer is not None or (storage is not None and storage not in slots):
            return None
        if storage is not None:
            look = (storage.num_bytes, storage.shape, storage.dtype, storage.category, storage.why, storage.parameter)
            look = slots[storage], *look
            if event.change is MemoryChange.FREE:
                freed.add(storage)
        actions.append((event.place, event.change, look, event.seconds, event.num_flops, event.is_copy))
    # What it allocates it has to free, or to leave to an object that is there for all slices.
    owners = {slot: tracker.owner_of(storage) for storage, slot in slots.items() if storage not in freed}
    if any(owner is None for owner in owners.values()):
        return None
    return [*actions, *((slot, id(owner)) for slot, owner in owners.items())]


def _copy(tracker: Tracker, storage: Storage) -> Storage:
    copy = replace(storage)
    owner = tracker.owner_of(storage)
    if owner is not None:
        tracker.free_with(owner, copy)
    return copy
