"""Traces equal layers once: the forward of the others is skipped, and their events are copied into the tape afterwards.

A layer's forward and backward may free only its own storages and those of its neighbours. Otherwise
`CannotReuseError` is raised, and every layer has to be traced.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.regions.execution_state import is_in_backward, tensors_of
from hf_ckpt.simulation.fake_model import FakeCopy
from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import Event, Mark, MemoryChange, Storage, Tape
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.structure.layers import Layer, Stack


class CannotReuseError(Exception):
    """Equal layers do not do the same in this model. Caught where every layer can be traced instead."""


@dataclass(frozen=True)
class LayerReuse:
    """Which layers of a model are skipped, because a traced layer represents them."""

    stacks: tuple[Stack, ...]
    """Of the model."""
    segments: tuple[tuple[int | None, ...], ...]
    """For each layer of each stack: its segment, if any."""
    representatives: tuple[Mapping[int, int], ...]
    """For each stack: the layer that represents another, both by `layer_idx`."""

    @classmethod
    def choose(cls, stacks: tuple[Stack, ...], plan: Plan | None, signature_of: SignatureFunction) -> LayerReuse:
        """Choose the layers that need no tracing under a plan. `signature_of`: see `layer_signature`."""
        segments, representatives = [], []
        for number, stack in enumerate(stacks):
            entries = (LayerPlan(),) * len(stack.layers) if plan is None else plan.stacks[number].layers
            segments.append(tuple(entry.segment for entry in entries))
            representatives.append(choose_traced(kinds_of(stack, entries, signature_of), segments[-1])[0])
        return cls(stacks, tuple(segments), tuple(representatives))

    def plan_for_traced(self, plan: Plan) -> Plan:
        """Return the plan with the skipped layers left as they are."""
        stacks = []
        for stack, skipped in zip(plan.stacks, self.representatives, strict=True):
            layers = tuple(LayerPlan() if idx in skipped else entry for idx, entry in enumerate(stack.layers))
            stacks.append(replace(stack, layers=layers))
        return replace(plan, stacks=tuple(stacks))

    def pairs(self) -> Iterator[tuple[int, Layer, Layer]]:
        """Yield the number of the stack, each skipped layer and the traced one that represents it."""
        for number, (stack, representatives) in enumerate(zip(self.stacks, self.representatives, strict=True)):
            for idx, traced in representatives.items():
                yield number, stack.layers[idx], stack.layers[traced]

    def stand_ins(self) -> dict[nn.Module, nn.Module]:
        """Return, for each skipped layer, the traced one; as `fake_copy` takes them."""
        return {skipped.outer: traced.outer for _, skipped, traced in self.pairs()}

    def skip_layers(self, fake: FakeCopy, names: Mapping[nn.Parameter, str], tracker: Tracker) -> None:
        """Let the layers of a copy that others represent pass on what they are given.

        `names`: of the parameters of the model, whose gradients and weights the tracker is told.
        """
        tracker.marks_recomputation = any(segment is not None for of_stack in self.segments for segment in of_stack)
        recorded: dict[nn.Module, _RecordedCall] = {}
        for number, skipped, traced in self.pairs():
            if traced.outer not in recorded:
                recorded[traced.outer] = _RecordedCall.of(fake.copy_of(traced.outer))
            call = _SkippedLayer(skipped.layer_idx, number, recorded[traced.outer], tracker)
            fake.copy_of(skipped.outer).forward = partial(_skip, call)
            pairs = zip(
                traced.outer.named_parameters(remove_duplicate=False),
                skipped.outer.named_parameters(remove_duplicate=False),
                strict=True,
            )
            for (_, parameter), (_, other) in pairs:
                if parameter.requires_grad:
                    hook = partial(tracker.record_copied_gradient, names[other])
                    fake.copy_of(parameter).register_post_accumulate_grad_hook(hook)

    def expand(self, tape: Tape) -> Tape:
        """Return the tape as it would be with every layer traced. Raises `CannotReuseError`."""
        return _TapeExpansion(self, tape).run()


SignatureFunction = Callable[[Layer], Hashable]


# --- Which layers are alike. ---

_NUMBER = re.compile(r"\d+")


def kinds_of(stack: Stack, entries: Sequence[LayerPlan], signature_of: SignatureFunction) -> list[Hashable]:
    """Return, for each layer, what is equal for layers that do the same; their neighbours are left out."""
    kinds: list[Hashable] = []
    segments = [None, *(entry.segment for entry in entries), None]
    for idx, (layer, entry) in enumerate(zip(stack.layers, entries, strict=True)):
        # The embeddings' output may stay on the device: the first layer is then unlike the others, to the next one too.
        is_first_to_send = idx == 0 and entry.offload is not None
        begins, ends = (entry.segment is not None and entry.segment != segments[near] for near in (idx, idx + 2))
        of_entry = entry.alone, entry.segment is None, entry.nested, begins, ends
        kinds.append((signature_of(layer), *of_entry, is_first_to_send))
    return kinds


def choose_traced(kinds: Sequence[Hashable], segments: Sequence[int | None]) -> tuple[dict[int, int], set[int]]:
    """Return the representative of each layer that is not traced, and the layers that are traced; all by `layer_idx`.

    A layer represents another where both, and the neighbours of both, are alike; its neighbours are traced too. Over a
    gap traced layers meet what is like their own neighbours. A segment is traced whole, or not at all, and its layers
    represent those at the same place in segments as long.
    """
    around = [None, *kinds, None]
    keys = list(zip(around, around[1:], around[2:], _places_in_segments(segments), strict=False))
    first: dict[Hashable, int] = {}
    for idx, key in enumerate(keys):
        first.setdefault(key, idx)
    counts = Counter[Hashable](keys)
    represented = {idx for key, idx in first.items() if counts[key] > 1}
    neighbours = {near for idx in represented for near in (idx - 1, idx + 1) if 0 <= near < len(kinds)}
    traced = {*first.values(), *neighbours}
    while further := _in_segments(segments, traced) or _over_gap(kinds, traced):
        traced |= further
    return {idx: first[key] for idx, key in enumerate(keys) if idx not in traced}, traced


def _places_in_segments(segments: Sequence[int | None]) -> Iterator[tuple[int, int] | None]:
    """Yield, for each layer, its place in its segment and the segment's length."""
    for idx, segment in enumerate(segments):
        yield None if segment is None else (idx - segments.index(segment), segments.count(segment))


def _in_segments(segments: Sequence[int | None], traced: set[int]) -> set[int]:
    """Return the layers that are not traced, but share a segment with one that is."""
    begun = {segments[idx] for idx in traced} - {None}
    return {idx for idx, segment in enumerate(segments) if segment in begun} - traced


def _over_gap(kinds: Sequence[Hashable], traced: set[int]) -> set[int]:
    """Return a layer to trace too: over its gap others meet than met before the gap was made."""
    for before, after in itertools.pairwise(sorted(traced)):
        if after - before > 1 and (kinds[before] != kinds[after - 1] or kinds[after] != kinds[before + 1]):
            return {before + 1}
    return set()


def layer_signature(layer: Layer) -> Hashable:
    """Return the layer's modules, sizes and settings, as a value that is equal for layers that do the same."""
    modules = [
        (_NUMBER.sub("#", name), type(module).__name__, tuple(_settings(module)), tuple(_tensors(module)))
        for name, module in layer.module.named_modules()
    ]
    return layer.layer_type, layer.needs_gradient, tuple(modules)


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


def _settings(module: nn.Module) -> Iterator[Hashable]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name == "layer_idx":
            continue
        if value is None or isinstance(value, bool | int | float | str):
            yield name, _NUMBER.sub("#", value) if isinstance(value, str) else value


def _tensors(module: nn.Module) -> Iterator[Hashable]:
    for kind in (module._parameters, module._buffers):
        for name, tensor in kind.items():
            if tensor is not None:
                yield name, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


# --- While the model runs. ---


@dataclass
class _RecordedCall:
    """The arguments and output of a traced layer, by their properties."""

    call_signature: object = None
    form: object = None

    @classmethod
    def of(cls, layer: nn.Module) -> _RecordedCall:
        recorded = cls()
        layer.register_forward_hook(recorded._record, with_kwargs=True)
        return recorded

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_in_backward() or self.form is not None:
            return
        hidden = _hidden(args, kwargs)
        tensors = tensors_of(output)
        is_same = (
            len(tensors) == 1 and hidden is not None and _tensor_properties(tensors[0]) == _tensor_properties(hidden)
        )
        if not is_same:
            raise CannotReuseError(
                f"{type(module).__name__} returns more than hidden states like those that it is given"
            )
        self.call_signature = _call_signature(args, kwargs)
        self.form = [isinstance(each, Tensor) for each in output] if isinstance(output, tuple | list) else True


@dataclass(frozen=True)
class _SkippedLayer:
    """A layer that another one represents."""

    layer_idx: int
    stack: int
    recorded: _RecordedCall
    tracker: Tracker

    def call(self, args: Any, kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        if (
            hidden is None
            or self.recorded.form is None
            or _call_signature(args, kwargs) != self.recorded.call_signature
        ):
            raise CannotReuseError(f"layer {self.layer_idx} is called in another way than the one like it")
        output = _BackwardMark.apply(hidden, self) if torch.is_grad_enabled() else hidden  # type: ignore[no-untyped-call]
        if self.recorded.form is True:
            return output
        return tuple(output if is_tensor else None for is_tensor in cast(list[bool], self.recorded.form))

    def run_backward(self) -> None:
        self.tracker.mark(Mark(Phase.BACKWARD, self.stack, self.layer_idx, 0, is_copy=True))


class _BackwardMark(torch.autograd.Function):
    """Passes hidden states and their gradient on, and marks the layer's backward on the tape."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, skipped: _SkippedLayer) -> Tensor:
        ctx.skipped = skipped
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.skipped.run_backward()
        return gradient, None


def _skip(skipped: _SkippedLayer, *args: Any, **kwargs: Any) -> Any:
    return skipped.call(args, kwargs)


def _hidden(args: Any, kwargs: Any) -> Tensor | None:
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, Tensor) else None


def _tensor_properties(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _call_signature(args: Any, kwargs: Any) -> object:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return [_tensor_properties(leaf) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]


# --- After the run. ---

_Section = tuple[Phase, int, int, int]
"""Forward, recomputation or backward, micro-batch, number of the stack, `layer_idx`."""
_StorageKey = tuple[Phase, int, int]
"""Forward, recomputation or backward, micro-batch, and how many storages the section had made before."""


class _TapeExpansion:
    def __init__(self, reuse: LayerReuse, tape: Tape) -> None:
        self._reuse = reuse
        self._tape = tape
        self._sections = list(self._split())
        # By stack: the place of each traced layer among them.
        self._ranks = [
            {idx: rank for rank, idx in enumerate(idx for idx in range(len(stack.layers)) if idx not in skipped)}
            for stack, skipped in zip(reuse.stacks, reuse.representatives, strict=True)
        ]
        self._owner: dict[int, tuple[int, int, _StorageKey]] = {}
        self._freed_outside = set[tuple[int, int, _StorageKey] | None]()
        # By stack and layer: the storages that a traced layer made, and the copies for a skipped one.
        self._made: dict[tuple[int, int], dict[_StorageKey, Storage]] = defaultdict(dict)
        self._places: dict[tuple[int, int], Place] = {}

    def run(self) -> Tape:
        events: dict[_Section, list[Event]] = {}
        for section, of_section in self._sections:
            if section is not None:
                events[section] = of_section
                self._record_owners(section, of_section)
        outside = (event for section, of_section in self._sections if section is None for event in of_section)
        self._freed_outside = {self._owner_of_freed(event) for event in outside}
        expanded = Tape(list(self._tape.before))
        for section, of_section in self._sections:
            expanded.events.extend(filter(_is_of_tape, self._expanded(section, of_section, events)))
        return expanded

    def _split(self) -> Iterator[tuple[_Section | None, list[Event]]]:
        """Yield the tape in pieces: the forward or backward of a layer, with what follows, or what lies outside."""
        section: _Section | None = None
        piece: list[Event] = []
        for event in self._tape.events:
            starts = self._section_at(event, section)
            if starts != section:
                yield section, piece
                section, piece = starts, []
            piece.append(event)
            if self._ends_stack(event):
                yield section, piece
                section, piece = None, []
        yield section, piece

    def _section_at(self, event: Event, section: _Section | None) -> _Section | None:
        mark, place = event.mark, event.place
        if mark is not None and not mark.is_end:
            # A layer that runs again by itself does so within its own backward.
            is_same = section is not None and section[2:] == (mark.stack, mark.layer_idx)
            if not is_same or mark.phase is not Phase.RECOMPUTATION:
                return mark.phase, mark.micro_batch, mark.stack, mark.layer_idx
        if section is not None:
            is_over = place.phase is Phase.OPTIMIZER or place.micro_batch != section[1]
            turned = section[0] is Phase.FORWARD and place.phase in (Phase.BACKWARD, Phase.RECOMPUTATION)
            if is_over or turned:
                return None
        return section

    def _ends_stack(self, event: Event) -> bool:
        mark = event.mark
        if mark is None or not mark.is_end or mark.phase is not Phase.FORWARD:
            return False
        return mark.layer_idx == len(self._reuse.stacks[mark.stack].layers) - 1

    def _record_owners(self, section: _Section, events: list[Event]) -> None:
        """Remember which section made each storage, and as the how many-th."""
        phase, micro_batch, stack, layer = section
        count = 0
        for event in events:
            if event.change is not MemoryChange.ALLOCATE:
                continue
            assert event.storage is not None
            key = (phase, micro_batch, count)
            self._owner[id(event.storage)] = stack, layer, key
            self._made[stack, layer][key] = event.storage
            count += 1

    def _expanded(
        self, section: _Section | None, events: list[Event], all_events: Mapping[_Section, list[Event]]
    ) -> Iterator[Event]:
        if section is None:
            yield from self._outside(events)
            return
        phase, micro_batch, stack, layer = section
        representative = self._reuse.representatives[stack].get(layer)
        if representative is None:
            yield from (self._traced_event(event, stack, layer) for event in events)
            return
        if any(event.storage is not None for event in events):
            raise CannotReuseError("something comes or goes between layers that are passed through")
        yield from (event for event in events if event.seconds or event.num_flops)
        yield from self._copied_events(all_events[phase, micro_batch, stack, representative], section, representative)
        segments = self._reuse.segments[stack]
        if phase is Phase.BACKWARD and segments[layer] is not None and segments[layer] not in segments[layer + 1 :]:
            yield from self._recomputed_segment(section, all_events)

    def _recomputed_segment(self, section: _Section, all_events: Mapping[_Section, list[Event]]) -> Iterator[Event]:
        """Yield how a skipped segment runs again, in the backward of its last layer."""
        _, micro_batch, stack, last = section
        segments = self._reuse.segments[stack]
        for layer in range(segments.index(segments[last]), last + 1):
            again, representative = Phase.RECOMPUTATION, self._reuse.representatives[stack][layer]
            events = all_events.get((again, micro_batch, stack, representative), [])
            yield from self._copied_events(events, (again, micro_batch, stack, layer), representative)

    def _outside(self, events: list[Event]) -> Iterator[Event]:
        """Yield events outside of all layers. Where they free a storage of a layer, they free its copies too."""
        for event in events:
            owner = self._owner_of_freed(event)
            if owner is None or event.storage is None or event.storage.category is Category.GRADIENTS:
                yield event
                continue
            stack, layer, key = owner
            last = self._end_of_gap(stack, layer)
            if last != layer and (stack, self._reuse.representatives[stack][last], key) not in self._freed_outside:
                # What follows the layers frees what the last but one of them has made.
                yield replace(event, storage=self._neighbour_storage(event.storage, stack, last, owner))
                continue
            yield event
            for copy, representative in self._reuse.representatives[stack].items():
                if representative == layer:
                    yield replace(event, storage=self._made[stack, copy][key])

    def _owner_of_freed(self, event: Event) -> tuple[int, int, _StorageKey] | None:
        return self._owner.get(id(event.storage)) if event.change is MemoryChange.FREE else None

    def _end_of_gap(self, stack: int, layer: int) -> int:
        """Return the last of the skipped layers that follow a traced one; the layer itself where none does."""
        while layer + 1 in self._reuse.representatives[stack]:
            layer += 1
        return layer

    def _traced_event(self, event: Event, stack: int, layer: int) -> Event:
        """Return an event of a traced layer. A storage from beyond a gap is replaced by that of the real neighbour."""
        owner = self._owner_of_freed(event)
        if owner is None or owner[0] != stack:
            return event
        ranks = self._ranks[stack]
        steps = ranks[owner[1]] - ranks[layer]
        if owner[1] - layer == steps:
            return event
        if abs(steps) > 1:
            raise CannotReuseError("a layer lets go of what a far one has made")
        return replace(event, storage=self._neighbour_storage(event.storage, stack, layer + steps, owner))

    def _copied_events(self, events: list[Event], section: _Section, representative: int) -> Iterator[Event]:
        phase, micro_batch, stack, layer = section
        shift = layer - representative
        path, ranks, made = self._reuse.stacks[stack].path, self._ranks[stack], self._made[stack, layer]
        segments = self._reuse.segments[stack]
        count = 0
        for event in events:
            storage = event.storage
            if event.change is MemoryChange.ALLOCATE and storage is not None:
                storage = self._copied_storage(storage, stack, shift)
                made[phase, micro_batch, count] = storage
                count += 1
            elif event.change is MemoryChange.FREE and storage is not None:
                owner = self._owner.get(id(storage))
                if owner is None or owner[0] != stack:
                    raise CannotReuseError("a layer lets go of what is not its own")
                steps = ranks[owner[1]] - ranks[representative]
                if abs(steps) > 1 and (
                    segments[representative] is None or segments[owner[1]] != segments[representative]
                ):
                    raise CannotReuseError("a layer lets go of what a far one has made")
                storage = self._neighbour_storage(storage, stack, layer + steps, owner)
            mark = event.mark
            if mark is not None:
                mark = replace(mark, layer_idx=mark.layer_idx + shift)
            place = self._moved(event.place, path, shift)
            # `replace` takes five times as long.
            yield Event(
                place, event.change, storage, event.seconds, event.num_flops, mark, event.is_copy, event.transfer
            )

    def _neighbour_storage(
        self, freed: Storage | None, stack: int, layer: int, owner: tuple[int, int, _StorageKey]
    ) -> Storage:
        """Return the storage of a layer that is to it what `freed` is to its owner."""
        storage = self._made[stack, layer].get(owner[2])
        if storage is None or freed is None or not self._is_alike(freed, storage, stack, owner[1], layer):
            raise CannotReuseError("neighbours of equal layers differ")
        return storage

    def _is_alike(self, one: Storage, other: Storage, stack: int, of_one: int, of_other: int) -> bool:
        if one is other:
            return True
        assert one.made is not None
        assert other.made is not None
        made = self._moved(one.made, self._reuse.stacks[stack].path, of_other - of_one)
        is_same_place = made == other.made or one.category is Category.GRADIENTS
        return is_same_place and (one.num_bytes, one.shape, one.dtype) == (other.num_bytes, other.shape, other.dtype)

    def _copied_storage(self, storage: Storage, stack: int, shift: int) -> Storage:
        assert storage.made is not None
        if storage.parameter:
            return self._copied_gradient(storage, stack, shift)
        made = self._moved(storage.made, self._reuse.stacks[stack].path, shift)
        return Storage(storage.num_bytes, made, storage.shape, storage.dtype, storage.category, storage.why)

    def _copied_gradient(self, storage: Storage, stack: int, shift: int) -> Storage:
        """Return the gradient that the tracker has made for the skipped layer."""
        name = _shifted(storage.parameter, self._reuse.stacks[stack].path, shift)
        found = self._tape.copied_gradients.get(name)
        if found is None or found.num_bytes != storage.num_bytes:
            raise CannotReuseError(f"{name} has no gradient like that of {storage.parameter}")
        return found

    def _moved(self, place: Place, path: str, shift: int) -> Place:
        """Return the same place in the layer `shift` further on in the stack at `path`."""
        # By identity: to hash a place takes longer than all else here, and the tape keeps them alive.
        key = id(place), shift
        moved = self._places.get(key)
        if moved is None:
            moved = place
            if place.stack == path and place.layer_idx is not None:
                module = _shifted(place.module, path, shift)
                moved = replace(place, layer_idx=place.layer_idx + shift, module=module)
            self._places[key] = moved
        return moved


def _is_of_tape(event: Event) -> bool:
    """Whether an event is one for others too: only here it matters where a layer of a segment runs again."""
    return event.mark is None or event.mark.phase is not Phase.RECOMPUTATION


def _shifted(path: str, stack: str, shift: int) -> str:
    """Return the path of the module or parameter in the layer `shift` further on."""
    if not path.startswith(f"{stack}."):
        return path
    number, _, rest = path[len(stack) + 1 :].partition(".")
    return f"{stack}.{int(number) + shift}.{rest}".rstrip(".")
