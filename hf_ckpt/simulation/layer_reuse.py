"""Traces equal layers once: the forward of the others is skipped, and their events are copied into the tape afterwards.

A layer's forward and backward may free only its own storages and those of its neighbours. Otherwise
`CannotReuseError` is raised, and every layer has to be traced.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.regions.execution_state import is_in_backward, tensors_of
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
    groups: tuple[tuple[LayerGroup, ...], ...]
    representatives: tuple[Mapping[int, int], ...]
    """For each stack: the group that represents another, both as indices into `groups`."""

    @classmethod
    def choose(cls, stacks: tuple[Stack, ...], plan: Plan | None) -> LayerReuse:
        """Choose the layers that need no tracing under a plan."""
        plans = [None] * len(stacks) if plan is None else plan.stacks
        groups = tuple(group_layers(stack, of_stack) for stack, of_stack in zip(stacks, plans, strict=True))
        return cls(stacks, groups, tuple(choose_traced(of_stack)[0] for of_stack in groups))

    def plan_for_traced(self, plan: Plan) -> Plan:
        """Return the plan with the skipped layers left as they are."""
        stacks = []
        for stack, groups, representatives in zip(plan.stacks, self.groups, self.representatives, strict=True):
            skipped = {idx for number in representatives for idx in groups[number].layers}
            layers = tuple(LayerPlan() if idx in skipped else entry for idx, entry in enumerate(stack.layers))
            stacks.append(replace(stack, layers=layers))
        return replace(plan, stacks=tuple(stacks))

    def skip_layers(self, model: nn.Module, tracker: Tracker) -> None:
        """Replace the forward of the layers that others represent. The model is a copy that is thrown away."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        for number, (stack, groups, representatives) in enumerate(
            zip(self.stacks, self.groups, self.representatives, strict=True)
        ):
            recorded: dict[int, _RecordedCall] = {}
            for group, representative in representatives.items():
                for idx, traced in zip(groups[group].layers, groups[representative].layers, strict=True):
                    if traced not in recorded:
                        recorded[traced] = _RecordedCall.of(stack.layers[traced])
                    skipped = _SkippedLayer(stack.layers[idx], number, recorded[traced], tracker)
                    stack.layers[idx].outer.forward = partial(_skip, skipped)
                    _share_gradients(stack.layers[traced], stack.layers[idx], tracker, names)

    def expand(self, tape: Tape) -> Tape:
        """Return the tape as it would be with every layer traced. Raises `CannotReuseError`."""
        return _TapeExpansion(self, tape).run()


# --- Which layers are alike. ---

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that run, and are recomputed, as one: a layer by itself, or the layers of a segment."""

    layers: tuple[int, ...]
    signature: Hashable
    """Equal for groups that do the same; their neighbours are left out."""

    @property
    def first(self) -> int:
        """The first layer's `layer_idx`."""
        return self.layers[0]


def group_layers(stack: Stack, plan: StackPlan | None) -> tuple[LayerGroup, ...]:
    """Return the groups of a stack, in order. `plan` is None where nothing is checkpointed."""
    entries = plan.layers if plan is not None else (LayerPlan(),) * len(stack.layers)
    groups = []
    for indices in _grouped(entries):
        segment = entries[indices[0]].segment
        # The embeddings' output may stay on the device: the first layer is then unlike the others, to the next one too.
        is_first_to_send = indices[0] == 0 and entries[0].offload is not None
        signature = tuple(
            (
                *(_layer_signature(stack.layers[idx]), entries[idx].alone, segment is None, entries[idx].nested),
                is_first_to_send,
            )
            for idx in indices
        )
        groups.append(LayerGroup(tuple(indices), signature))
    return tuple(groups)


def choose_traced(groups: Sequence[LayerGroup]) -> tuple[dict[int, int], set[int]]:
    """Return the representative of each group that is not traced, and the groups that are traced; all as indices.

    A group represents another where both, and the neighbours of both, are alike; its neighbours are traced too.
    """
    first: dict[Hashable, int] = {}
    keys = list(_with_neighbours(groups))
    for number, key in enumerate(keys):
        first.setdefault(key, number)
    traced = {near for number in first.values() for near in (number - 1, number, number + 1) if 0 <= near < len(groups)}
    while (gap := _gap_with_other_neighbours(groups, traced)) is not None:
        traced.add(gap)
    return {n: first[keys[n]] for n in range(len(groups)) if n not in traced}, traced


def _grouped(entries: Sequence[LayerPlan]) -> Iterator[list[int]]:
    group: list[int] = []
    for idx, entry in enumerate(entries):
        if group and (entry.segment is None or entry.segment != entries[group[0]].segment):
            yield group
            group = []
        group.append(idx)
    if group:
        yield group


def _with_neighbours(groups: Sequence[LayerGroup]) -> Iterator[tuple[Hashable, Hashable, Hashable]]:
    signatures: list[Hashable] = [None, *(group.signature for group in groups), None]
    yield from zip(signatures, signatures[1:], signatures[2:], strict=False)


def _gap_with_other_neighbours(groups: Sequence[LayerGroup], traced: set[int]) -> int | None:
    """Return a group to trace too: over its gap others meet than met before the gap was made."""
    ordered = sorted(traced)
    for before, after in itertools.pairwise(ordered):
        if after - before == 1:
            continue
        is_even = (
            groups[before].signature == groups[after - 1].signature
            and groups[after].signature == groups[before + 1].signature
        )
        if not is_even:
            return before + 1
    return None


def _layer_signature(layer: Layer) -> Hashable:
    """Return the layer's modules, sizes and settings, as a value that is equal for layers that do the same."""
    modules = [
        (_NUMBER.sub("#", name), type(module).__name__, tuple(_settings(module)), tuple(_tensors(module)))
        for name, module in layer.module.named_modules()
    ]
    return layer.layer_type, layer.needs_gradient, layer.outer.training, tuple(modules)


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
    def of(cls, layer: Layer) -> _RecordedCall:
        recorded = cls()
        layer.outer.register_forward_hook(recorded._record, with_kwargs=True)
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

    layer: Layer
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
            raise CannotReuseError(f"layer {self.layer.layer_idx} is called in another way than the one like it")
        output = _BackwardMark.apply(hidden, self) if torch.is_grad_enabled() else hidden  # type: ignore[no-untyped-call]
        if self.recorded.form is True:
            return output
        return tuple(output if is_tensor else None for is_tensor in cast(list[bool], self.recorded.form))

    def run_backward(self) -> None:
        self.tracker.mark(Mark(Phase.BACKWARD, self.stack, self.layer.layer_idx, 0, is_copy=True))


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


def _share_gradients(traced: Layer, skipped: Layer, tracker: Tracker, names: Mapping[nn.Parameter, str]) -> None:
    """Give a skipped layer's parameters a gradient as soon as the traced layer's have theirs."""
    pairs = zip(
        traced.outer.named_parameters(remove_duplicate=False),
        skipped.outer.named_parameters(remove_duplicate=False),
        strict=True,
    )
    for (_, parameter), (_, other) in pairs:
        if parameter.requires_grad and other is not parameter:
            hook = partial(_record_copied_gradient, tracker, names[other], other)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _record_copied_gradient(tracker: Tracker, name: str, other: nn.Parameter, parameter: Tensor) -> None:
    if other.grad is None:
        tracker.record_copied_gradient(name, other)


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
"""Forward or backward, micro-batch, number of the stack, number of the group."""
_StorageKey = tuple[Phase, int, int]
"""Forward or backward, micro-batch, and how many storages the section had made before."""


class _TapeExpansion:
    def __init__(self, reuse: LayerReuse, tape: Tape) -> None:
        self._reuse = reuse
        self._tape = tape
        self._group_of = [
            {idx: number for number, group in enumerate(groups) for idx in group.layers} for groups in reuse.groups
        ]
        self._sections = list(self._split())
        self._owner: dict[int, tuple[int, int, _StorageKey]] = {}
        # By stack and group: the storages that a traced group made, and the copies for a skipped one.
        self._made: dict[tuple[int, int], dict[_StorageKey, Storage]] = defaultdict(dict)
        self._places: dict[tuple[Place, int], Place] = {}

    def run(self) -> Tape:
        events: dict[_Section, list[Event]] = {}
        for section, of_section in self._sections:
            if section is not None:
                events[section] = of_section
                self._record_owners(section, of_section)
        expanded = Tape(list(self._tape.before))
        for section, of_section in self._sections:
            expanded.events.extend(self._expanded(section, of_section, events))
        return expanded

    def _split(self) -> Iterator[tuple[_Section | None, list[Event]]]:
        """Yield the tape in pieces: the forward or backward of a group, with what follows, or what lies outside."""
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
            group = self._group_of[mark.stack][mark.layer_idx]
            layers = self._reuse.groups[mark.stack][group].layers
            if mark.layer_idx == (layers[0] if mark.phase is Phase.FORWARD else layers[-1]):
                return mark.phase, mark.micro_batch, mark.stack, group
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
        phase, micro_batch, stack, group = section
        count = 0
        for event in events:
            if event.change is not MemoryChange.ALLOCATE:
                continue
            assert event.storage is not None
            key = (phase, micro_batch, count)
            self._owner[id(event.storage)] = stack, group, key
            self._made[stack, group][key] = event.storage
            count += 1

    def _expanded(
        self, section: _Section | None, events: list[Event], all_events: Mapping[_Section, list[Event]]
    ) -> Iterator[Event]:
        if section is None:
            yield from self._outside(events)
            return
        phase, micro_batch, stack, group = section
        representative = self._reuse.representatives[stack].get(group)
        if representative is None:
            yield from (self._traced_event(event, stack, group) for event in events)
            return
        if any(event.storage is not None for event in events):
            raise CannotReuseError("something comes or goes between layers that are passed through")
        yield from (event for event in events if event.seconds or event.num_flops)
        yield from self._copied_events(all_events[phase, micro_batch, stack, representative], section, representative)

    def _outside(self, events: list[Event]) -> Iterator[Event]:
        """Yield events outside of all layers. Where they free a storage of a group, they free its copies too."""
        for event in events:
            yield event
            owner = self._owner.get(id(event.storage)) if event.change is MemoryChange.FREE else None
            if owner is None or event.storage is None or event.storage.category is Category.GRADIENTS:
                continue
            stack, group, key = owner
            for copy, representative in self._reuse.representatives[stack].items():
                if representative == group:
                    yield replace(event, storage=self._made[stack, copy][key])

    def _traced_event(self, event: Event, stack: int, group: int) -> Event:
        """Return an event of a traced group. A storage from beyond a gap is replaced by that of the real neighbour."""
        owner = self._owner.get(id(event.storage)) if event.change is MemoryChange.FREE else None
        if owner is None or owner[0] != stack:
            return event
        between = range(min(group, owner[1]) + 1, max(group, owner[1]))
        num_copies = sum(number in self._reuse.representatives[stack] for number in between)
        if not num_copies:
            return event
        if num_copies < len(between):
            raise CannotReuseError("a layer lets go of what a far one has made")
        return replace(event, storage=self._neighbour_storage(stack, group + (1 if owner[1] > group else -1), owner[2]))

    def _copied_events(self, events: list[Event], section: _Section, representative: int) -> Iterator[Event]:
        phase, micro_batch, stack, group = section
        shift = self._shift(stack, group, representative)
        count = 0
        for event in events:
            storage = event.storage
            if event.change is MemoryChange.ALLOCATE and storage is not None:
                storage = self._copied_storage(storage, stack, shift)
                self._made[stack, group][phase, micro_batch, count] = storage
                count += 1
            elif event.change is MemoryChange.FREE and storage is not None:
                owner = self._owner.get(id(storage))
                if owner is None or owner[0] != stack or abs(owner[1] - representative) > 1:
                    raise CannotReuseError("a layer lets go of what is not its own")
                storage = self._neighbour_storage(stack, group + owner[1] - representative, owner[2])
            mark = event.mark
            if mark is not None:
                mark = replace(mark, layer_idx=mark.layer_idx + shift)
            place = self._moved(event.place, stack, shift)
            yield replace(event, place=place, storage=storage, mark=mark)

    def _neighbour_storage(self, stack: int, group: int, key: _StorageKey) -> Storage:
        storage = self._made[stack, group].get(key)
        if storage is None:
            raise CannotReuseError("neighbours of equal layers differ")
        return storage

    def _copied_storage(self, storage: Storage, stack: int, shift: int) -> Storage:
        assert storage.made is not None
        if storage.parameter:
            return self._copied_gradient(storage, stack, shift)
        return replace(storage, made=self._moved(storage.made, stack, shift))

    def _copied_gradient(self, storage: Storage, stack: int, shift: int) -> Storage:
        """Return the gradient that the tracker has made for the skipped layer."""
        name = _shifted(storage.parameter, self._reuse.stacks[stack].path, shift)
        found = self._tape.copied_gradients.get(name)
        if found is None or found.num_bytes != storage.num_bytes:
            raise CannotReuseError(f"{name} has no gradient like that of {storage.parameter}")
        return found

    def _shift(self, stack: int, group: int, representative: int) -> int:
        groups = self._reuse.groups[stack]
        return groups[group].first - groups[representative].first

    def _moved(self, place: Place, stack: int, shift: int) -> Place:
        moved = self._places.get((place, shift))
        if moved is None:
            path = self._reuse.stacks[stack].path
            moved = place
            if place.stack == path and place.layer_idx is not None:
                module = _shifted(place.module, path, shift)
                moved = replace(place, layer_idx=place.layer_idx + shift, module=module)
            self._places[place, shift] = moved
        return moved


def _shifted(path: str, stack: str, shift: int) -> str:
    """Return the path of the module or parameter in the layer `shift` further on."""
    if not path.startswith(f"{stack}."):
        return path
    number, _, rest = path[len(stack) + 1 :].partition(".")
    return f"{stack}.{int(number) + shift}.{rest}".rstrip(".")
