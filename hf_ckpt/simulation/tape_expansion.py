"""Fills up the tape of a step in which equal layers were skipped: with the events of the layers that represent them.

A layer's forward and backward may free only its own storages and those of its neighbours, within a segment those of the
whole segment. Otherwise `CannotReuseError` is raised, and every layer has to be traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tape import (
    ALLOCATED,
    FREED,
    Columns,
    IntColumn,
    Mark,
    Places,
    Storage,
    Tape,
    Transfer,
    TransferKind,
    moved_path,
)


class CannotReuseError(Exception):
    """Equal layers do not do the same in this model. Caught where every layer can be traced instead.

    `unlike`: layers that are like no other, each as the number of its stack and its `layer_idx`; others may be alike.
    """

    def __init__(self, reason: str, unlike: Collection[tuple[int, int]] = ()) -> None:
        super().__init__(reason)
        self.unlike = frozenset(unlike)


def expand(tape: Tape, stacks: Sequence[PartlyTraced]) -> Tape:
    """Return the tape as it would be with every layer traced. Raises `CannotReuseError`.

    The tape is of a step with `Mark`s where layers begin and end, skipped ones too.
    """
    return _Expansion(tape, stacks).run()


@dataclass(frozen=True)
class PartlyTraced:
    """A stack of layers of which some are skipped, because a traced one represents them."""

    number: int
    path: str
    segments: Sequence[int | None]  # For each layer: its segment, if any.
    representatives: Mapping[int, int]  # The layer that represents another, both by `layer_idx`.
    kinds: Sequence[Hashable] = ()
    """For each layer, what is equal for layers that do the same, where segments are cut: some of a segment's layers are
    skipped. Empty where segments are traced whole."""

    @property
    def has_parts(self) -> bool:
        """Whether parts of segments were traced."""
        return bool(self.kinds) and any(segment is not None for segment in self.segments)

    def in_backward(self) -> Iterator[tuple[Phase, int]]:
        """Yield the layers as they run backward, and again where a segment does."""
        for layer in reversed(range(len(self.segments))):
            yield Phase.BACKWARD, layer
            yield from ((Phase.RECOMPUTATION, each) for each in self.run_again_in(layer))

    def run_again_in(self, layer: int) -> range:
        """Return the layers that run again in the backward of one: of the last layer of a segment, the segment's."""
        segment = self.segments[layer]
        is_last = segment is not None and segment not in self.segments[layer + 1 :]
        return range(self.segments.index(segment), layer + 1) if is_last else range(0)

    def traced_behind(self, layer: int) -> list[int]:
        """Return the traced layers behind a traced one until one begins another segment."""
        found = []
        for idx in range(layer + 1, len(self.segments)):
            if idx not in self.representatives:
                if self.segments[idx] is None or self.segments[idx] != self.segments[idx - 1]:
                    break
                found.append(idx)
        return found

    def far_behind(self, layer: int) -> list[int]:
        """Return the layers of the same segment that come later, but for the next one."""
        segment = self.segments[layer]
        far = range(layer + 2, len(self.segments))
        return [] if segment is None else [each for each in far if self.segments[each] == segment]

    def ranks(self) -> IntColumn:
        """Return the place of each traced layer among them; -1 for skipped ones."""
        is_traced = np.array([idx not in self.representatives for idx in range(len(self.segments))])
        return np.where(is_traced, np.cumsum(is_traced) - 1, -1)

    def end_of_gap(self, layer: int) -> int:
        """Return the last of the skipped layers that follow a traced one; the layer itself where none does."""
        while layer + 1 in self.representatives:
            layer += 1
        return layer


# Forward, recomputation or backward, micro-batch, number of the stack, `layer_idx`.
_Section = tuple[Phase, int, int, int]


@dataclass(frozen=True)
class _Copied:
    """The events of a traced layer's section, as a skipped layer repeats them."""

    rows: IntColumn
    steps: IntColumn  # For each event: which neighbour made its storage, counted in layers from this one.
    slots: IntColumn  # Its storage, among those that a layer makes; -1 for none.
    far: _FarFrees | None = None  # What it frees for its whole segment.


@dataclass(frozen=True)
class _FarFrees:
    """What the first layer of a segment frees that far ones of the segment have made, all in one place."""

    at: int  # Where among the events of the section: they are taken out there.
    row: int  # Of the tape that was traced.
    section: tuple[Phase, int, int]  # Phase, micro-batch and stack.
    # For each kind of far layer, the slots of its storages, and a traced storage of each. Shared by the first layers
    # that are alike: few of their segments were traced with layers of each kind.
    of_kinds: Mapping[Hashable, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class _Part:
    """Rows of the tape that was traced, with what is changed in them."""

    rows: IntColumn
    place: IntColumn
    storage: IntColumn
    note: IntColumn


class _Expansion:
    def __init__(self, tape: Tape, stacks: Sequence[PartlyTraced]) -> None:
        self._tape = tape
        self._traced = columns = tape.columns
        self._places: Places = columns.places
        self._stacks = stacks
        self._ranks = [stack.ranks() for stack in stacks]
        self._storages: list[Storage] = list(columns.storages)
        self._notes: list[Mark | Transfer] = list(columns.notes)
        self._transfers = columns.transfers()
        self._sections = [(section, np.arange(start, end)) for section, start, end in self._split()]
        self._rows: dict[_Section, IntColumn] = {}
        for section, rows in self._sections:
            if section in self._rows:
                raise CannotReuseError("a layer runs more than once")
            if section is not None:
                self._rows[section] = rows
        # By storage: the stack and the layer that made it, and as the how many-th (its slot).
        self._owner = np.full((3, len(self._storages)), -1, dtype=np.int64)
        # By stack, layer and slot: the storage.
        self._made = [self._made_by_traced(stack) for stack in stacks]
        # By storage: equal where one is to its layer what the other is to another.
        self._looks = [-1] * len(self._storages)
        self._looks_of = np.empty(0, dtype=np.int64)
        self._copied: dict[_Section, _Copied] = {}
        # By phase, micro-batch, stack and kind of layer: see `_FarFrees.of_kinds`.
        self._far_frees: dict[Hashable, dict[Hashable, tuple[tuple[int, int], ...]]] = {}
        # By phase, micro-batch, stack and layer: what is freed of it besides that, of what only it has made.
        self._extra_far_frees: dict[Hashable, list[tuple[int, int]]] = {}
        self._freed_outside = set[tuple[int, int, int]]()

    def run(self) -> Tape:
        if unlike := list(self._unlike()):
            raise CannotReuseError("a layer does, or lies next to, what no other does", unlike)
        for stack in self._stacks:
            self._copy_storages(stack)
        self._looks_of = np.array(self._looks, dtype=np.int64)
        outside = [rows for section, rows in self._sections if section is None]
        for section, rows in self._rows.items():
            self._without_far_frees(section, rows)
        if outside:
            freed = np.concatenate(outside)
            storages = self._traced.storage[freed[self._traced.change[freed] == FREED]]
            self._freed_outside = set(map(tuple, self._owner[:, storages].T.tolist()))
        parts = [part for section, rows in self._arranged() for part in self._expanded(section, rows)]
        rows, place, storage, note = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("rows", "place", "storage", "note")
        )
        found = self._traced.take(rows)
        found.storages, found.notes = self._storages, self._notes
        found.place, found.storage, found.note = place, storage, note
        self._check_frees(found)
        # Only here it matters where a layer of a segment runs again.
        runs_again = [isinstance(each, Mark) and each.phase is Phase.RECOMPUTATION for each in self._notes]
        expanded = Tape(self._tape.before, places=self._places)
        expanded.columns = found.take(~np.array([*runs_again, False])[note])
        return expanded

    # --- What was traced. ---

    def _split(self) -> Iterator[tuple[_Section | None, int, int]]:
        """Yield the tape in pieces: the forward or backward of a layer, with what follows, or what lies outside."""
        columns, last = self._traced, [len(stack.segments) - 1 for stack in self._stacks]
        section: _Section | None = None
        start = 0
        for row, (place, number) in enumerate(zip(columns.place.tolist(), columns.note.tolist(), strict=True)):
            note = columns.notes[number] if number >= 0 else None
            mark = note if isinstance(note, Mark) else None
            begun = self._section_at(place, mark, section)
            if begun != section:
                begin = self._begin(begun, row, start)
                yield section, start, begin
                section, start = begun, begin
            if mark is not None and mark.is_end and mark.phase is Phase.FORWARD and mark.layer_idx == last[mark.stack]:
                yield section, start, row + 1
                section, start = None, row + 1
        yield section, start, len(columns)

    def _begin(self, section: _Section | None, row: int, start: int) -> int:
        """Return where a section begins that was noticed in `row`; the one before it began in `start`."""
        # transformers before 5.23 runs a layer's hooks, and so marks its forward, once the layer's input has been sent.
        if section is not None and section[0] is Phase.FORWARD:
            while row > start and (transfer := self._transfers.get(row - 1)) and transfer.kind is TransferKind.SEND:
                row -= 1
        return row

    def _section_at(self, number: int, mark: Mark | None, section: _Section | None) -> _Section | None:
        if mark is not None and not mark.is_end:
            # A layer that runs again by itself does so within its own backward.
            is_same = section is not None and section[2:] == (mark.stack, mark.layer_idx)
            if not is_same or mark.phase is not Phase.RECOMPUTATION:
                return mark.phase, mark.micro_batch, mark.stack, mark.layer_idx
        if section is not None:
            place = self._places.all[number]
            is_over = place.phase is Phase.OPTIMIZER or place.micro_batch != section[1]
            turned = section[0] is Phase.FORWARD and place.phase in (Phase.BACKWARD, Phase.RECOMPUTATION)
            if is_over or turned:
                return None
        return section

    def _unlike(self) -> Iterator[tuple[int, int]]:
        """Yield layers that were taken for one like others, and are not."""
        for (phase, _, number, layer), rows in self._rows.items():
            storages, representatives = self._traced.storage[rows], self._stacks[number].representatives
            is_foreign = (storages >= 0) & (self._owner[0, storages] != number)
            if layer in representatives.values() and is_foreign.any():
                # The first that uses what no layer has made, such as a mask, frees it.
                yield number, layer
            elif layer in representatives and (
                (storages >= 0).any() or not self._transfers.keys().isdisjoint(rows.tolist())
            ):
                # Something comes or goes between layers, such as features that are added: forward behind this one.
                yield from ((number, layer), (number, layer + 1 if phase is Phase.FORWARD else layer - 1))

    def _allocated(self, section: _Section) -> IntColumn:
        rows = self._rows[section]
        made: IntColumn = self._traced.storage[rows[self._traced.change[rows] == ALLOCATED]]
        # Last: the others are then in the same slots as in layers that make no more than these.
        is_extra = np.array([self._storages[number].is_extra for number in made.tolist()], dtype=bool)
        return np.concatenate([made[~is_extra], made[is_extra]])

    def _made_by_traced(self, stack: PartlyTraced) -> IntColumn:
        """Return the storages that each layer makes [layers, slots]; -1 for none."""
        sections = [section for section in self._rows if section[2] == stack.number]
        counts: dict[tuple[Phase, int], int] = {}
        for section in sections:
            kind = section[:2]
            counts[kind] = max(counts.get(kind, 0), len(self._allocated(section)))
        begins = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))
        made = np.full((len(stack.segments), sum(counts.values())), -1, dtype=np.int64)
        for section in sections:
            storages = self._allocated(section)
            slots = begins[section[:2]] + np.arange(len(storages))
            made[section[3], slots] = storages
            self._owner[0, storages], self._owner[1, storages] = stack.number, section[3]
            self._owner[2, storages] = slots
        return made

    def _arranged(self) -> Iterator[tuple[_Section | None, IntColumn]]:
        """Yield the sections in their order: where parts of segments were traced, as all layers would run backward."""
        for backward, run in itertools.groupby(self._sections, lambda found: self._backward_of_parts(found[0])):
            if backward is None:
                yield from run
                continue
            micro_batch, number = backward
            rows = dict(run)
            for phase, layer in self._stacks[number].in_backward():
                section = phase, micro_batch, number, layer
                if section not in rows and layer not in self._stacks[number].representatives:
                    raise CannotReuseError("a segment has no backward like that of an equal one")
                yield section, rows.pop(section, np.empty(0, dtype=np.int64))
            if rows:
                raise CannotReuseError("layers run backward in another order than forward")

    def _backward_of_parts(self, section: _Section | None) -> tuple[int, int] | None:
        """Return micro-batch and stack of a backward in which parts of segments were traced."""
        if section is None or section[0] is Phase.FORWARD or not self._stacks[section[2]].has_parts:
            return None
        return section[1], section[2]

    # --- What skipped layers would make. ---

    def _copy_storages(self, stack: PartlyTraced) -> None:
        """Make the storages of skipped layers."""
        made, path = self._made[stack.number], stack.path
        rows = self._traced.rows_of_storages(ALLOCATED)
        known: dict[object, int] = {}
        for layer in np.flatnonzero(self._ranks[stack.number] >= 0).tolist():
            of_layer = made[layer][made[layer] >= 0]
            # As if in layer 0.
            places = self._places.moved(self._traced.place[rows[of_layer]], path, -layer).tolist()
            for number, place in zip(of_layer.tolist(), places, strict=True):
                storage = self._storages[number]
                of_place = None if storage.category is Category.GRADIENTS else place
                look = (of_place, storage.num_bytes, storage.shape, storage.dtype)
                self._looks[number] = known.setdefault(look, len(known))
        storages, looks = self._storages, self._looks
        numbers = {storage: number for number, storage in enumerate(storages)}
        for layer, representative in stack.representatives.items():
            slots = np.flatnonzero(made[representative] >= 0)
            copies: list[int] = []
            for original in made[representative, slots].tolist():
                storage, number = storages[original], len(storages)
                if storage.parameter:
                    copy = self._copied_gradient(storage, path, layer - representative)
                    number = numbers.get(copy, number)
                else:
                    copy = Storage(storage.num_bytes, storage.shape, storage.dtype, storage.category, storage.why)
                copies.append(number)
                if number == len(storages):
                    storages.append(copy)
                    looks.append(looks[original])
                else:
                    looks[number] = looks[original]
            made[layer, slots] = copies

    def _copied_gradient(self, storage: Storage, path: str, shift: int) -> Storage:
        """Return what the tracker has made for the gradient of a skipped layer."""
        name = moved_path(storage.parameter, path, shift)
        found = self._tape.copied_gradients.get(name)
        if found is None or found.num_bytes != storage.num_bytes:
            raise CannotReuseError(f"{name} has no gradient like that of {storage.parameter}")
        return found

    # --- The whole step. ---

    def _expanded(self, section: _Section | None, rows: IntColumn) -> Iterator[_Part]:
        if section is None:
            yield self._outside(rows)
            return
        phase, micro_batch, number, layer = section
        stack = self._stacks[number]
        if layer not in stack.representatives:
            yield self._traced_part(section, rows)
            return
        yield self._part(rows[(self._traced.seconds[rows] > 0) | (self._traced.num_flops[rows] > 0)])
        yield self._copied_part(section)
        if phase is Phase.BACKWARD and not stack.has_parts:
            for each in stack.run_again_in(layer):
                yield self._copied_part((Phase.RECOMPUTATION, micro_batch, number, each))

    def _part(self, rows: IntColumn, storage: IntColumn | None = None) -> _Part:
        columns = self._traced
        storage = columns.storage[rows] if storage is None else storage
        return _Part(rows, columns.place[rows], storage, columns.note[rows])

    def _traced_part(self, section: _Section, rows: IntColumn) -> _Part:
        """Return the events of a traced layer. Storages from beyond a gap are replaced by those of real neighbours."""
        _, _, number, layer = section
        rows, far = self._without_far_frees(section, rows)
        storages, (freed,) = self._traced.storage[rows].copy(), np.nonzero(self._traced.change[rows] == FREED)
        stack, owner, slot = self._owner[:, storages[freed]]
        # What another stack has made is no neighbour's.
        owner = np.where(stack == number, owner, layer)
        ranks = self._ranks[number]
        steps = ranks[owner] - ranks[layer]
        is_over_gap = (stack == number) & (owner - layer != steps)
        freed, slot, steps = freed[is_over_gap], slot[is_over_gap], steps[is_over_gap]
        if (abs(steps) > 1).any():
            raise CannotReuseError("a layer frees what a far one has made")
        storages[freed] = self._of_neighbours(number, storages[freed], layer + steps, slot)
        part = self._part(rows, storages)
        return part if far is None else self._with_far_frees(part, far, number, layer)

    def _copied_part(self, section: _Section) -> _Part:
        """Return the events of a skipped layer."""
        phase, micro_batch, number, layer = section
        stack = self._stacks[number]
        representative = stack.representatives[layer]
        copied = self._as_copied((phase, micro_batch, number, representative))
        columns, shift = self._traced, layer - representative
        storages = np.full(len(copied.rows), -1, dtype=np.int64)
        (has_one,) = np.nonzero(copied.slots >= 0)
        storages[has_one] = self._of_neighbours(
            number, columns.storage[copied.rows[has_one]], layer + copied.steps[has_one], copied.slots[has_one]
        )
        note = columns.note[copied.rows].copy()
        for at in np.flatnonzero(note >= 0).tolist():
            each = self._notes[note[at]]
            if isinstance(each, Mark):
                note[at] = len(self._notes)
                self._notes.append(replace(each, layer_idx=each.layer_idx + shift))
        place = self._places.moved(columns.place[copied.rows], stack.path, shift)
        part = _Part(copied.rows, place, storages, note)
        return part if copied.far is None else self._with_far_frees(part, copied.far, number, layer, shift)

    def _as_copied(self, section: _Section) -> _Copied:
        """Return what a skipped layer repeats of a traced one's section."""
        if section in self._copied:
            return self._copied[section]
        phase, _, number, representative = section
        # Where the whole layer runs again in its own backward, it has no section of its own for that.
        rows = np.empty(0, dtype=np.int64) if phase is Phase.RECOMPUTATION else None
        rows = self._rows.get(section, rows)
        if rows is None:
            raise CannotReuseError("a layer has no backward like that of an equal one")
        rows, far_frees = self._without_far_frees(section, rows)
        storages = self._traced.storage[rows]
        _, owner, slot = np.where(storages >= 0, self._owner[:, storages], -1)
        ranks = self._ranks[number]
        steps = np.where(storages >= 0, ranks[owner] - ranks[representative], 0)
        stack, far = self._stacks[number], owner[abs(steps) > 1].tolist()
        segment = None if stack.has_parts else stack.segments[representative]
        if far and (segment is None or any(stack.segments[each] != segment for each in far)):
            raise CannotReuseError("a layer frees what a far one has made")
        copied = self._copied[section] = _Copied(rows, steps, slot, far_frees)
        return copied

    # --- What a layer frees for its whole segment, of which parts were traced. ---

    def _without_far_frees(self, section: _Section, rows: IntColumn) -> tuple[IntColumn, _FarFrees | None]:
        """Take that out of a traced layer's section."""
        _, _, number, layer = section
        stack, storages, ranks = self._stacks[number], self._traced.storage[rows], self._ranks[number]
        if not stack.has_parts or stack.segments[layer] is None:
            return rows, None
        of_stack, owner, slot = np.where(storages >= 0, self._owner[:, storages], -1)
        is_far = (of_stack == number) & (owner >= 0) & (ranks[owner] - ranks[layer] > 1)
        if not is_far.any():
            return rows, None
        (at,) = np.nonzero(is_far)
        around = rows[at[0] : at[-1] + 1]
        is_one_place = len(np.unique(self._traced.place[around])) == 1
        if not is_one_place or (self._traced.change[around] != FREED).any():
            raise CannotReuseError("a layer frees what far ones have made, at several times")
        of_kinds = self._far_frees.setdefault((*section[:3], stack.kinds[layer]), {})
        for other in stack.traced_behind(layer)[1:]:
            of_other = is_far & (owner == other)
            freed = sorted(zip(slot[of_other].tolist(), storages[of_other].tolist(), strict=True))
            self._extra_far_frees[*section[:3], other] = [each for each in freed if self._storages[each[1]].is_extra]
            found = tuple(each for each in freed if not self._storages[each[1]].is_extra)
            known = of_kinds.setdefault(stack.kinds[other], found)
            if [each for each, _ in known] != [each for each, _ in found]:
                raise CannotReuseError("a layer frees other things of equal far ones")
        if (owner[is_far] > stack.traced_behind(layer)[-1]).any():
            raise CannotReuseError("a layer frees what another segment has made")
        return rows[~is_far], _FarFrees(int(at[0]), int(rows[at[0]]), section[:3], of_kinds)

    def _with_far_frees(self, part: _Part, far: _FarFrees, number: int, layer: int, shift: int = 0) -> _Part:
        """Put it into the section of that layer, or of one that it represents."""
        stack = self._stacks[number]
        try:
            frees = [
                (other, *free)
                for other in stack.far_behind(layer)
                for free in (*far.of_kinds[stack.kinds[other]], *self._extra_far_frees.get((*far.section, other), ()))
            ]
        except KeyError:
            raise CannotReuseError("segments of equal layers differ") from None
        layers, slots, like = np.array(frees, dtype=np.int64).reshape(-1, 3).T
        storages = self._of_neighbours(number, like, layers, slots)
        row = np.array([far.row])
        place = self._places.moved(self._traced.place[row], stack.path, shift)
        return _Part(
            np.insert(part.rows, far.at, np.repeat(row, len(layers))),
            np.insert(part.place, far.at, np.repeat(place, len(layers))),
            np.insert(part.storage, far.at, storages),
            np.insert(part.note, far.at, np.full(len(layers), -1)),
        )

    # --- Where storages are. ---

    def _of_neighbours(self, number: int, storages: IntColumn, layers: IntColumn, slots: IntColumn) -> IntColumn:
        """Return the storages that are to layers what `storages` are to their owners."""
        made = self._made[number]
        is_layer = (layers >= 0) & (layers < len(made))
        found: IntColumn = np.where(is_layer, made[np.where(is_layer, layers, 0), slots], -1)
        differs = (found < 0) | (self._looks_of[found] != self._looks_of[storages])
        if differs.any():
            owners = self._owner[1, storages[differs]].tolist()
            raise CannotReuseError("neighbours of equal layers differ", [(number, owner) for owner in owners])
        return found

    def _outside(self, rows: IntColumn) -> _Part:
        """Return events outside of all layers. Where they free a storage of a layer, they free its copies too."""
        columns = self._traced
        found: list[int] = []
        storages: list[int] = []
        for row, change, storage in zip(
            rows.tolist(), columns.change[rows].tolist(), columns.storage[rows].tolist(), strict=True
        ):
            freed = [storage]
            if change == FREED and self._owner[0, storage] >= 0:
                freed = list(self._freed_with(storage))
            found.extend([row] * len(freed))
            storages.extend(freed)
        return self._part(np.array(found, dtype=np.int64), np.array(storages, dtype=np.int64))

    def _freed_with(self, storage: int) -> Iterator[int]:
        number, layer, slot = self._owner[:, storage].tolist()
        stack, made = self._stacks[number], self._made[number]
        if self._storages[storage].category is Category.GRADIENTS:
            yield storage
            return
        last = stack.end_of_gap(layer)
        if last != layer and not self._is_freed_of_all(stack, layer, last, slot):
            # What follows the layers frees what the last but one of them has made.
            yield from self._of_neighbours(number, np.array([storage]), np.array([last]), np.array([slot])).tolist()
            return
        yield storage
        for copy, representative in stack.representatives.items():
            if representative == layer:
                yield int(made[copy, slot])

    def _is_freed_of_all(self, stack: PartlyTraced, layer: int, last: int, slot: int) -> bool:
        """Whether what follows the layers frees a storage of each layer, and not that of the last but one only."""
        representative = stack.representatives[last]
        other = representative if representative != layer else layer - 1
        return (stack.number, other, slot) in self._freed_outside

    def _check_frees(self, expanded: Columns) -> None:
        """Check that of traced and of skipped layers the same is freed."""
        was, now = (
            np.bincount(columns.storage[columns.change == FREED], minlength=len(self._storages)) > 0
            for columns in (self._traced, expanded)
        )
        for stack, made in zip(self._stacks, self._made, strict=True):
            traced = [stack.representatives.get(layer, layer) for layer in range(len(made))]
            if (was[made[traced]] != now[made])[made >= 0].any():
                raise CannotReuseError("equal layers do not free the same")
