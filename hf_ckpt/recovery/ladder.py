"""Plans from the one that a run begins with to leaner ones, and which of them is in force for a batch of which size."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_ckpt.errors import HFCkptError
from hf_ckpt.patch.checks import check_exact
from hf_ckpt.patch.tileable_modules import random_modules, tiled_modules
from hf_ckpt.policy.options import HeadMode
from hf_ckpt.policy.plan import LayerPlan, Plan, with_entries
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.policy.resolve_rules import binomial, resolve
from hf_ckpt.policy.revolve import fewest_snapshots
from hf_ckpt.structure.layers import Stack
from hf_ckpt.structure.lm_head import find_head, governed_by_other
from hf_ckpt.trainer.device_peak import DevicePeak

if TYPE_CHECKING:
    from hf_ckpt.auto.replan import RunPlanner
    from hf_ckpt.trainer.batch import Batch

# Layers are set to full in so many steps.
_QUARTERS = 4
_NESTED = Policy.parse({"mode": "full", "segment_size": "sqrt", "nested": True})
# So often a layer runs under the last of the exact rungs.
_MOST_RUNS = 4
# Up to so many layers segments within segments keep no less than one input for each.
_FEW_LAYERS = 4


@dataclass(frozen=True)
class Rung:
    """A plan, and what it does that the one before it does not."""

    plan: Plan
    change: str = ""
    is_exact: bool = True


@dataclass(frozen=True)
class Size:
    """Of a batch, by the shapes of its tensors: of each its name, its elements, and these times its longest dimension.

    Memory grows with the elements and, where attention keeps its scores, with the latter. Bytes would not tell few
    long rows from many short ones, and would tell two dtypes of one text apart.
    """

    tensors: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> Size:
        return cls(tuple((name, each.numel(), each.numel() * max(each.shape, default=1)) for name, each in named))

    @property
    def total(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(numbers for _, *numbers in self.tensors), strict=True)))

    def is_within(self, other: Size, share: float = 0.0) -> bool:
        """Whether another batch has all these tensors, as large or larger: as large as they are without a share."""
        return all((1 - share) * mine <= its for pair in self._beside(other) for mine, its in zip(*pair, strict=True))

    def is_below(self, other: Size, share: float) -> bool:
        """Whether another batch has all these tensors, none smaller, and more elements without a share of them."""
        others = [(mine, its) for mine, its in self._beside(other) if mine != its]
        are_none_larger = all(mine <= its for pair in others for mine, its in zip(*pair, strict=True))
        return are_none_larger and sum(mine[0] for mine, _ in others) < (1 - share) * sum(its[0] for _, its in others)

    def _beside(self, other: Size) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        there = {name: numbers for name, *numbers in other.tensors}
        for name, *numbers in self.tensors:
            # Fewer than none of a tensor that the other one has not.
            yield numbers, there.get(name, (-1, -1))


class Room:
    """What there is for a step of one run: by what failed, by the budget, and by what was measured."""

    # Without `planning`, the planner of policy `auto`, nothing is predicted.

    def __init__(self, planning: RunPlanner | None, peak: DevicePeak) -> None:
        self._planning = planning
        self._peak = peak

    def needed(self, plan: Plan, batch: Batch | None) -> int | None:
        """Return the bytes that torch is predicted to reserve for a step; None where that is not known."""
        held = self._held(plan, batch)
        return None if held is None else held[1]

    def _held(self, plan: Plan, batch: Batch | None) -> tuple[int, int] | None:
        # Values of images and the like are gone when this is asked.
        if self._planning is None or batch is None or batch.tensors:
            return None
        try:
            return self._planning.held_by(plan, batch)
        except HFCkptError:
            return None

    def begin_window(self, plans: Iterable[Plan]) -> None:
        """Steps begin that run under some of these plans, and are to be measured."""
        if self._measures(plans):
            self._peak.begin_window()

    def bytes(self, failed_bytes: int | None, ran: Collection[tuple[Plan, Batch | None]]) -> int | None:
        """Return the bytes that torch may be predicted to reserve for a step; None where nothing is predicted.

        `failed_bytes` is the predicted need of a step that failed, less what was missing; `ran` are the largest batches
        since `begin_window`, and under which plans.
        """
        if self._planning is None:
            return None
        found = [self._planning.capacity.reserved_bytes]
        if failed_bytes is not None:
            found.append(failed_bytes)
        memory = self._peak.in_window() if self._measures(plan for plan, _ in ran) else None
        allocated = [held[0] for plan, batch in ran if (held := self._held(plan, batch)) is not None]
        if memory is not None and allocated:
            # By as much as these steps allocated more than predicted, others will.
            margin = self._planning.capacity.with_bytes(memory.capacity).margin_bytes
            found.append(memory.capacity - margin - (memory.peak - max(allocated)))
        return min(found)

    def _measures(self, plans: Iterable[Plan]) -> bool:
        # An offload that measures itself reads the device's count too, which is not for us to begin anew then.
        offloads = (entry.offload is not None for plan in plans for entry in _entries(plan))
        return self._planning is not None and not any(offloads)


class Ladder:
    """The rungs of one run that were needed so far, and the `level` of the one on which it stands."""

    # After each so many steps without trouble a faster plan returns for batches up to the largest of these steps' that
    # it would have had room for. Where nothing is predicted that is: for all that are smaller than what it failed for.

    def __init__(self, plan: Plan, quiet_steps: int, room: Room) -> None:
        self.rungs = [Rung(plan)]
        self.level = 0
        self._quiet_steps = quiet_steps
        self._room = room
        self._steps_since = 0
        # By level, the batches that it failed for, and the shares of them that were missing.
        self._failed: dict[int, list[tuple[Size, float]]] = {}
        # Predicted need of the smallest step that failed, less what was missing.
        self._failed_bytes: int | None = None
        # By level, what it runs again: batches within one of these; None where all that are smaller than failed.
        self._cleared: dict[int, list[Size] | None] = {}
        # Those since the first failure, by size.
        self._batches: dict[Size, Batch | None] = {}
        # By level, the size of the largest batch since the last look.
        self._ran: dict[int, Size] = {}
        # By level, what batches of some sizes are predicted to need.
        self._needed: dict[int, dict[Size, int]] = {}

    @property
    def rung(self) -> Rung:
        return self.rungs[self.level]

    def fail(
        self,
        size: Size,
        # Makes the rung after a plan.
        next_rung: Callable[[Plan], Rung | None],
        *,
        # The one of this size, to be simulated.
        batch: Batch | None = None,
        # Share of what the step needed that was missing; of what it needed for its batch, besides weights and the like.
        of_step: float = 0.0,
        of_batch: float = 0.0,
        # Stand on the last one, where `next_rung` makes the leanest of all.
        to_leanest: bool = False,
    ) -> bool:
        """Note that the rung in force failed for a batch, and stand on the next one. Returns whether there is one."""
        if (needed := self._room.needed(self.rung.plan, batch)) is not None:
            needed = int((1 - of_step) * needed)
            self._failed_bytes = min(needed, self._failed_bytes or needed)
        for level in range(self.level + 1):
            # What needs more memory would have failed too.
            self._failed.setdefault(level, []).append((size, of_batch))
            self._cleared.pop(level, None)
        self._begin_look()
        leanest = len(self.rungs) - 1
        if to_leanest or self.level == leanest:
            rung = next_rung(self.rungs[leanest].plan)
            if rung is not None:
                self.rungs.append(rung)
            elif self.level == leanest:
                return False
        self.level = len(self.rungs) - 1 if to_leanest else self.level + 1
        return True

    def passed(self, size: Size, batch: Batch | None = None) -> None:
        # Until something fails nothing is noted.
        if self._failed:
            self._batches[size] = batch
            self._ran[self.level] = max(size, self._ran.get(self.level, size), key=lambda each: each.total)

    def end_step(self) -> None:
        """A step has ended: after some quiet ones find, for each rung but the leanest, what it may run again."""
        if not self._failed:
            return
        self._steps_since += 1
        if self._steps_since < self._quiet_steps:
            return
        ran = [(self.rungs[level].plan, self._batches.get(size)) for level, size in self._ran.items()]
        room = self._room.bytes(self._failed_bytes, ran)
        known: list[Size] = []
        for level in range(len(self.rungs) - 1):
            if room is not None:
                known += self._fitting(level, room, without=known)
            self._cleared[level] = None if room is None else [*known]
        self._begin_look()

    def level_for(self, size: Size) -> int:
        """Return the rung for a batch: the first that is cleared for one as large, or else the leanest."""
        for level in range(len(self.rungs) - 1):
            cleared = self._cleared.get(level, [])
            if cleared is None:
                is_cleared = all(size.is_below(failed, share) for failed, share in self._failed[level])
            else:
                is_cleared = any(map(size.is_within, cleared))
            if is_cleared:
                return level
        return len(self.rungs) - 1

    def _begin_look(self) -> None:
        self._steps_since = 0
        self._ran.clear()
        self._room.begin_window(rung.plan for rung in self.rungs)

    def _fitting(self, level: int, room: int, *, without: Sequence[Size]) -> list[Size]:
        """Return the sizes of batches, of those so far and without some, for which there is room under a rung."""
        failed = self._failed[level]
        sizes = [size for size in self._batches if not any(map(size.is_within, without))]
        sizes = [size for size in sizes if not any(each.is_within(size, share) for each, share in failed)]
        sizes.sort(key=lambda size: size.total)
        # The largest first: if it fits, so do the others.
        if sizes and not self._fits(level, room, sizes[-1]):
            del sizes[bisect_left(sizes, True, key=lambda size: not self._fits(level, room, size)) :]
        return sizes

    def _fits(self, level: int, room: int, size: Size) -> bool:
        known = self._needed.setdefault(level, {})
        if any(needed <= room and size.is_within(other) for other, needed in known.items()):
            return True
        if any(needed > room and other.is_within(size) for other, needed in known.items()):
            return False
        needed = self._room.needed(self.rungs[level].plan, self._batches[size])
        if needed is None:
            # Then its size decides.
            return True
        known[size] = needed
        return needed <= room

    def to_json(self) -> dict[str, Any]:
        """Return the rungs and where the ladder stands as JSON types; see `resume`."""
        return {
            "rungs": [[rung.plan.to_json(), rung.change, rung.is_exact] for rung in self.rungs],
            "level": self.level,
            "failed": [
                [level, [[list(size.tensors), share] for size, share in failed]]
                for level, failed in self._failed.items()
            ],
            "failed_bytes": self._failed_bytes,
            "cleared": [
                [level, None if sizes is None else [list(size.tensors) for size in sizes]]
                for level, sizes in self._cleared.items()
            ],
            "steps_since": self._steps_since,
        }

    def resume(self, document: dict[str, Any]) -> bool:
        """Stand where the ladder of another run stood. Returns whether that had begun with the same plan."""

        def size(tensors: list[list[Any]]) -> Size:
            return Size(tuple((name, elements, pairs) for name, elements, pairs in tensors))

        rungs = [Rung(Plan.from_json(text), change, is_exact) for text, change, is_exact in document["rungs"]]
        if rungs[0].plan != self.rungs[0].plan:
            return False
        failed = {level: [(size(each), share) for each, share in found] for level, found in document["failed"]}
        cleared = {level: None if sizes is None else list(map(size, sizes)) for level, sizes in document["cleared"]}
        # Nothing is set before all of the document is read.
        self._failed_bytes, self._steps_since = document["failed_bytes"], document["steps_since"]
        self.rungs, self.level, self._failed, self._cleared = rungs, document["level"], failed, cleared
        return True


# --- Leaner plans. ---


def next_rung(
    plan: Plan,
    stacks: Sequence[Stack],
    model: nn.Module,
    *,
    # Forbid what adds sums in another order: the chunked head and tiles, which come last.
    is_exact: bool,
    # Layers that are set to full keep their inputs on the device, for the host has no memory left.
    drops_offload: bool = False,
    # Of the layers that can be set to full and are not, so many at once; a quarter of all layers if None.
    share: float | None = None,
    # So many times as many layers.
    growth: float = 1.0,
) -> Rung | None:
    """Return the plan that is leaner than the one in force on a model; None if there is none."""
    # More layers are recomputed in full, then layers in segments and again within them, and as often as the binomial
    # schedule says.
    makers: list[Callable[[Plan, Sequence[Stack], nn.Module], Rung | None]]
    makers = [partial(_more_layers, share=share, growth=growth), _nested_segments, _binomial_segments]
    if not is_exact:
        makers += [_chunked_head, _tiles]
    if drops_offload:
        makers.insert(0, _without_offload)
    for make in makers:
        # Something in the model may not allow it.
        with suppress(HFCkptError):
            rung = make(plan, stacks, model)
            if rung is not None and rung.plan != plan:
                check_exact(rung.plan, stacks, model)
                return rung
    return None


def leanest_rung(
    plan: Plan, stacks: Sequence[Stack], model: nn.Module, *, is_exact: bool, drops_offload: bool = False
) -> Rung | None:
    """Return the last of the plans that `next_rung` gives one after the other; None if there is none."""
    found: Rung | None = None
    while rung := next_rung(plan, stacks, model, is_exact=is_exact, drops_offload=drops_offload, share=1.0):
        plan, is_same = rung.plan, rung.is_exact and (found is None or found.is_exact)
        found = Rung(plan, f"the leanest plan there is, with {rung.change}", is_same)
    return found


def _entries(plan: Plan) -> list[LayerPlan]:
    return [entry for stack in plan.stacks for entry in stack.layers]


def _without_offload(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> Rung | None:
    if all(entry.offload is None for entry in _entries(plan)):
        return None
    changed = with_entries(plan, lambda entry: replace(entry, mode=Mode.FULL, save=(), offload=None))
    return Rung(changed, "all layers are recomputed in full, and none offloads")


def _more_layers(
    plan: Plan, stacks: Sequence[Stack], model: nn.Module, *, share: float | None, growth: float
) -> Rung | None:
    """Set more layers to full, of those that can be and are not. See `next_rung`."""

    def with_full(places: Sequence[int]) -> Plan | None:
        """Set layers to full, by their places among those of all stacks; None where that is not possible."""
        numbers = count()
        changed = with_entries(
            plan, lambda entry: replace(entry, mode=Mode.FULL, save=(), why="") if next(numbers) in places else entry
        )
        try:
            check_exact(changed, stacks, model)
        except HFCkptError:
            return None
        return changed

    entries, layers = _entries(plan), [layer for stack in stacks for layer in stack.layers]
    left = [
        place
        for place, (entry, layer) in enumerate(zip(entries, layers, strict=True))
        if entry.mode is not Mode.FULL and layer.needs_gradient
    ]
    # A module that layers share can only be treated alike in all of them.
    if with_full(left) is None:
        left = [place for place in left if with_full([place])]
    if not left:
        return None
    number = math.ceil(len(entries) / _QUARTERS) if share is None else math.ceil(len(left) * share)
    chosen = left[: math.ceil(growth * max(1, number))]
    changed = with_full(chosen)
    if changed is None:
        chosen, changed = left, with_full(left)
    return (
        None
        if changed is None
        else Rung(changed, f"{len(chosen)} more layer{'s' * (len(chosen) > 1)} recomputed in full")
    )


def _nested_segments(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> Rung | None:
    chosen = [
        nested
        if len(stack.layers) > _FEW_LAYERS and all(_is_plain_full(e) and not e.nested for e in stack.layers)
        else stack
        for stack, nested in zip(plan.stacks, resolve(_NESTED, stacks, plan.model_class).stacks, strict=True)
    ]
    return Rung(replace(plan, stacks=tuple(chosen)), "layers recomputed in segments, and again within them (nested)")


def _binomial_segments(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> Rung | None:
    """Save the fewest inputs with which no layer runs more than a few times, where segments are nested."""
    chosen = []
    for stack in plan.stacks:
        layers = stack.layers
        saved = fewest_snapshots(len(layers), _MOST_RUNS)
        # Layers of a schedule that saves more of them stand in it too; those that it ends with are no segment.
        saves_more = any(entry.nested and (entry.snapshots is None or entry.snapshots > saved) for entry in layers)
        if len(layers) > _FEW_LAYERS and saves_more and all(map(_is_plain_full, layers)):
            layers = tuple(entry for _, entry in binomial(saved, list(range(len(layers)))))
        chosen.append(replace(stack, layers=layers))
    return Rung(replace(plan, stacks=tuple(chosen)), f"layers run up to {_MOST_RUNS} times, from fewer saved inputs")


def _is_plain_full(entry: LayerPlan) -> bool:
    return entry.mode is Mode.FULL and entry.offload is None and entry.tiles is None


def _chunked_head(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> Rung | None:
    if plan.head is HeadMode.CHUNKED or governed_by_other(model) is not None:
        return None
    find_head(model)
    return Rung(replace(plan, head=HeadMode.CHUNKED), "head and loss in chunks", is_exact=False)


def _tiles(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> Rung | None:
    layers = iter([layer for stack in stacks for layer in stack.layers])

    def tiled(entry: LayerPlan) -> LayerPlan:
        layer = next(layers)
        is_whole = entry.tiles is None and entry.segment is None
        # Slices would draw masks of dropout of their own.
        can_be = is_whole and not random_modules(layer, tiled_modules(layer))
        return replace(entry, tiles="auto") if can_be else entry

    return Rung(with_entries(plan, tiled), "layers in tiles", is_exact=False)
