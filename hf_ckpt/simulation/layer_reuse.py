"""Traces equal layers once: the others are passed through, and the tape is filled up with what stands for them.

Whatever a layer's forward or backward lets go must be its own, or a neighbour's: else every layer has to be traced,
and `CannotCopyError` says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.regions.call import is_in_backward, tensors_of
from hf_ckpt.simulation.likeness import Unit, traced_units, units_of
from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import Change, Event, Mark, Region, Storage, Tape
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.structure.layers import Layer, Stack


class CannotCopyError(Exception):
    """Equal layers do not do the same in this model. Caught where every layer can be traced instead."""


@dataclass(frozen=True)
class Copies:
    """Which layers of a model are passed through.

    Args:
        stacks: the stacks of the model.
        units: of each stack.
        stand_ins: for each stack: which unit stands for another, by their numbers.
    """

    stacks: tuple[Stack, ...]
    units: tuple[tuple[Unit, ...], ...]
    stand_ins: tuple[Mapping[int, int], ...]

    @classmethod
    def choose(cls, stacks: tuple[Stack, ...], plan: Plan | None) -> Copies:
        """Choose the layers of a model that need no tracing under a plan."""
        plans = [None] * len(stacks) if plan is None else plan.stacks
        units = tuple(units_of(stack, of_stack) for stack, of_stack in zip(stacks, plans, strict=True))
        return cls(stacks, units, tuple(traced_units(of_stack)[0] for of_stack in units))

    def without(self, plan: Plan) -> Plan:
        """Return a plan that leaves alone what is passed through."""
        stacks = []
        for stack, units, stand_ins in zip(plan.stacks, self.units, self.stand_ins, strict=True):
            passed = {idx for number in stand_ins for idx in units[number].layers}
            layers = tuple(LayerPlan() if idx in passed else entry for idx, entry in enumerate(stack.layers))
            stacks.append(replace(stack, layers=layers))
        return replace(plan, stacks=tuple(stacks))

    def pass_through(self, model: nn.Module, tracker: Tracker) -> None:
        """Replace the forward of the layers that others stand for. The model is a copy that is thrown away."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        for number, (stack, units, stand_ins) in enumerate(zip(self.stacks, self.units, self.stand_ins, strict=True)):
            seen: dict[int, _Seen] = {}
            for unit, stand_in in stand_ins.items():
                for idx, like in zip(units[unit].layers, units[stand_in].layers, strict=True):
                    if like not in seen:
                        seen[like] = _Seen.of(stack.layers[like])
                    passed = _Passed(stack.layers[idx], number, seen[like], tracker)
                    stack.layers[idx].outer.forward = partial(_pass_through, passed)
                    _share_gradients(stack.layers[like], stack.layers[idx], tracker, names)

    def fill_up(self, tape: Tape) -> Tape:
        """Return the tape as it would be with every layer traced.

        Raises:
            CannotCopyError: when a layer lets go of what is neither its own nor a neighbour's.
        """
        return _Filling(self, tape).filled()


# --- While the model runs. ---


@dataclass
class _Seen:
    """What went into a layer and came out of it."""

    signature: object = None
    form: object = None

    @classmethod
    def of(cls, layer: Layer) -> _Seen:
        seen = cls()
        layer.outer.register_forward_hook(seen._note, with_kwargs=True)
        return seen

    def _note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_in_backward() or self.form is not None:
            return
        hidden = _hidden(args, kwargs)
        tensors = tensors_of(output)
        is_same = len(tensors) == 1 and hidden is not None and _facts(tensors[0]) == _facts(hidden)
        if not is_same:
            raise CannotCopyError(
                f"{type(module).__name__} returns more than hidden states like those that it is given"
            )
        self.signature = _signature(args, kwargs)
        self.form = [isinstance(each, Tensor) for each in output] if isinstance(output, tuple | list) else True


@dataclass(frozen=True)
class _Passed:
    """A layer that another one stands for."""

    layer: Layer
    stack: int
    seen: _Seen
    tracker: Tracker

    def returned(self, args: Any, kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        if hidden is None or self.seen.form is None or _signature(args, kwargs) != self.seen.signature:
            raise CannotCopyError(f"layer {self.layer.layer_idx} is called in another way than the one like it")
        output = _Marked.apply(hidden, self) if torch.is_grad_enabled() else hidden  # type: ignore[no-untyped-call]
        if self.seen.form is True:
            return output
        return tuple(output if is_tensor else None for is_tensor in cast(list[bool], self.seen.form))

    def run_backward(self) -> None:
        self.tracker.mark(Mark(Region.BACKWARD, self.stack, self.layer.layer_idx, 0, is_copy=True))


class _Marked(torch.autograd.Function):
    """Hands on hidden states and their gradient, and says so."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, passed: _Passed) -> Tensor:
        ctx.passed = passed
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.passed.run_backward()
        return gradient, None


def _share_gradients(like: Layer, layer: Layer, tracker: Tracker, names: Mapping[nn.Parameter, str]) -> None:
    """Let what has a gradient in a layer have one in a layer that it stands for."""
    pairs = zip(
        like.outer.named_parameters(remove_duplicate=False),
        layer.outer.named_parameters(remove_duplicate=False),
        strict=True,
    )
    for (_, parameter), (_, other) in pairs:
        if parameter.requires_grad and other is not parameter:
            told = partial(_tell_gradient, tracker, names[other], other)
            parameter.register_post_accumulate_grad_hook(told)  # type: ignore[no-untyped-call]


def _tell_gradient(tracker: Tracker, name: str, other: nn.Parameter, parameter: Tensor) -> None:
    if other.grad is None:
        tracker.know_gradient(name, other)


def _pass_through(passed: _Passed, *args: Any, **kwargs: Any) -> Any:
    return passed.returned(args, kwargs)


def _hidden(args: Any, kwargs: Any) -> Tensor | None:
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, Tensor) else None


def _facts(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _signature(args: Any, kwargs: Any) -> object:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return [_facts(leaf) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]


# --- Afterwards. ---

_Section = tuple[Region, int, int, int]
"""Region, micro-batch, number of the stack, number of the unit."""
_Key = tuple[Region, int, int]
"""Region, micro-batch, and how many storages the section had made before."""


class _Filling:
    """Fills up one tape."""

    def __init__(self, copies: Copies, tape: Tape) -> None:
        self._copies = copies
        self._tape = tape
        self._unit_of = [
            {idx: number for number, unit in enumerate(units) for idx in unit.layers} for units in copies.units
        ]
        self._sections = list(self._split())
        self._owner: dict[int, tuple[int, int, _Key]] = {}
        # What each unit has made, by stack and unit: its own of those that ran, new ones of the others.
        self._made: dict[tuple[int, int], dict[_Key, Storage]] = defaultdict(dict)
        self._places: dict[tuple[Place, int], Place] = {}

    def filled(self) -> Tape:
        events: dict[_Section, list[Event]] = {}
        for section, of_section in self._sections:
            if section is not None:
                events[section] = of_section
                self._note(section, of_section)
        filled = Tape(list(self._tape.before))
        for section, of_section in self._sections:
            filled.events.extend(self._written(section, of_section, events))
        return filled

    def _split(self) -> Iterator[tuple[_Section | None, list[Event]]]:
        """Yield the tape in pieces: the forward or backward of a unit, with what follows, or what lies outside."""
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
            unit = self._unit_of[mark.stack][mark.layer_idx]
            layers = self._copies.units[mark.stack][unit].layers
            if mark.layer_idx == (layers[0] if mark.region is Region.FORWARD else layers[-1]):
                return mark.region, mark.micro_batch, mark.stack, unit
        if section is not None:
            is_over = place.phase is Phase.OPTIMIZER or place.micro_batch != section[1]
            turned = section[0] is Region.FORWARD and place.phase in (Phase.BACKWARD, Phase.RECOMPUTATION)
            if is_over or turned:
                return None
        return section

    def _ends_stack(self, event: Event) -> bool:
        mark = event.mark
        if mark is None or not mark.is_end or mark.region is not Region.FORWARD:
            return False
        return mark.layer_idx == len(self._copies.stacks[mark.stack].layers) - 1

    def _note(self, section: _Section, events: list[Event]) -> None:
        """Remember who made what in a section that ran."""
        region, micro_batch, stack, unit = section
        count = 0
        for event in events:
            if event.change is not Change.ALLOCATE:
                continue
            assert event.storage is not None
            key = (region, micro_batch, count)
            self._owner[id(event.storage)] = stack, unit, key
            self._made[stack, unit][key] = event.storage
            count += 1

    def _written(
        self, section: _Section | None, events: list[Event], all_events: Mapping[_Section, list[Event]]
    ) -> Iterator[Event]:
        if section is None:
            yield from self._outside(events)
            return
        region, micro_batch, stack, unit = section
        stand_in = self._copies.stand_ins[stack].get(unit)
        if stand_in is None:
            yield from (self._of_traced(event, stack, unit) for event in events)
            return
        if any(event.storage is not None for event in events):
            raise CannotCopyError("something comes or goes between layers that are passed through")
        yield from (event for event in events if event.seconds or event.num_flops)
        yield from self._copied(all_events[region, micro_batch, stack, stand_in], section, stand_in)

    def _outside(self, events: list[Event]) -> Iterator[Event]:
        """Yield events outside of all layers; what they let go of a unit, those that it stands for let go too."""
        for event in events:
            yield event
            owner = self._owner.get(id(event.storage)) if event.change is Change.FREE else None
            if owner is None or event.storage is None or event.storage.category is Category.GRADIENTS:
                continue
            stack, unit, key = owner
            for copy, stand_in in self._copies.stand_ins[stack].items():
                if stand_in == unit:
                    yield replace(event, storage=self._made[stack, copy][key])

    def _of_traced(self, event: Event, stack: int, unit: int) -> Event:
        """Return an event of a unit that ran: a neighbour over a gap is put in the place of who seemed to be one."""
        owner = self._owner.get(id(event.storage)) if event.change is Change.FREE else None
        if owner is None or owner[0] != stack:
            return event
        between = range(min(unit, owner[1]) + 1, max(unit, owner[1]))
        num_copies = sum(number in self._copies.stand_ins[stack] for number in between)
        if not num_copies:
            return event
        if num_copies < len(between):
            raise CannotCopyError("a layer lets go of what a far one has made")
        return replace(event, storage=self._of_neighbour(stack, unit + (1 if owner[1] > unit else -1), owner[2]))

    def _copied(self, events: list[Event], section: _Section, stand_in: int) -> Iterator[Event]:
        region, micro_batch, stack, unit = section
        shift = self._shift(stack, unit, stand_in)
        count = 0
        for event in events:
            storage = event.storage
            if event.change is Change.ALLOCATE and storage is not None:
                storage = self._copy(storage, stack, shift)
                self._made[stack, unit][region, micro_batch, count] = storage
                count += 1
            elif event.change is Change.FREE and storage is not None:
                owner = self._owner.get(id(storage))
                if owner is None or owner[0] != stack or abs(owner[1] - stand_in) > 1:
                    raise CannotCopyError("a layer lets go of what is not its own")
                storage = self._of_neighbour(stack, unit + owner[1] - stand_in, owner[2])
            mark = event.mark
            if mark is not None:
                mark = replace(mark, layer_idx=mark.layer_idx + shift)
            place = self._moved(event.place, stack, shift)
            yield replace(event, place=place, storage=storage, mark=mark)

    def _of_neighbour(self, stack: int, unit: int, key: _Key) -> Storage:
        storage = self._made[stack, unit].get(key)
        if storage is None:
            raise CannotCopyError("neighbours of equal layers differ")
        return storage

    def _copy(self, storage: Storage, stack: int, shift: int) -> Storage:
        assert storage.made is not None
        if storage.parameter:
            return self._gradient(storage, stack, shift)
        return replace(storage, made=self._moved(storage.made, stack, shift))

    def _gradient(self, storage: Storage, stack: int, shift: int) -> Storage:
        """Return the gradient that the step has made for the layer that was passed through."""
        name = _shifted(storage.parameter, self._copies.stacks[stack].path, shift)
        found = self._tape.copied_gradients.get(name)
        if found is None or found.num_bytes != storage.num_bytes:
            raise CannotCopyError(f"{name} has no gradient like that of {storage.parameter}")
        return found

    def _shift(self, stack: int, unit: int, stand_in: int) -> int:
        units = self._copies.units[stack]
        return units[unit].first - units[stand_in].first

    def _moved(self, place: Place, stack: int, shift: int) -> Place:
        moved = self._places.get((place, shift))
        if moved is None:
            path = self._copies.stacks[stack].path
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
