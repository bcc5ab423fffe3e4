"""Plans from the one that a run begins with to leaner ones, and which of them is in force for a batch of which size."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_ckpt.errors import HFCkptError
from hf_ckpt.patch.checks import check_exact
from hf_ckpt.patch.tileable_modules import random_modules, tiled_modules
from hf_ckpt.policy.options import HeadMode
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan, with_entries
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.policy.resolve_rules import binomial, resolve
from hf_ckpt.policy.revolve import fewest_snapshots
from hf_ckpt.structure.layers import Layer, Stack
from hf_ckpt.structure.lm_head import find_head, governed_by_other
from hf_ckpt.trainer.device_peak import DevicePeak

if TYPE_CHECKING:
    from hf_ckpt.auto.replan import RunPlanner
    from hf_ckpt.trainer.batch import Batch

_QUARTERS = 4
"""Steps in which layers are set to full."""
_NESTED = Policy.parse({"mode": "full", "segment_size": "sqrt", "nested": True})
_MOST_RUNS = 4
"""Of a layer under the last of the exact rungs."""
_FEW_LAYERS = 4
"""Layers up to which segments within segments keep no less than one input for each."""


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
        """Return the size of a batch with these tensors."""
        return cls(tuple((name, each.numel(), each.numel() * max(each.shape, default=1)) for name, each in named))

    @property
    def total(self) -> tuple[int, ...]:
        """What orders sizes among each other."""
        return tuple(map(sum, zip(*(numbers for _, *numbers in self.tensors), strict=True)))

    def is_within(self, other: Size, share: float = 0.0) -> bool:
        """Whether another batch has all these tensors, as large or larger: as large as they are without a share."""
        return all(
            (1 - share) * mine <= its for numbers in self._beside(other) for mine, its in zip(*numbers, strict=True)
        )

    def is_below(self, other: Size, share: float) -> bool:
        """Whether another batch has all these tensors, none smaller, and more elements without a share of them."""
        others = [each for each in self._beside(other) if each[0] != each[1]]
        are_none_larger = all(mine <= its for numbers in others for mine, its in zip(*numbers, strict=True))
        return are_none_larger and sum(mine[0] for mine, _ in others) < (1 - share) * sum(its[0] for _, its in others)

    def _beside(self, other: Size) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
        """Yield the numbers of each tensor and those of the other batch's; fewer than none of one that it has not."""
        there = {name: (elements, pairs) for name, elements, pairs in other.tensors}
        for name, elements, pairs in self.tensors:
            yield (elements, pairs), there.get(name, (-1, -1))


class Room:
    """What there is for a step of one run: by what failed, by the budget, and by what was measured.

    Args:
        planning: of policy `auto`; None predicts nothing.
        peak: of the device.
    """

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

        Args:
            failed_bytes: predicted need of a step that failed, less what was missing.
            ran: largest batches since `begin_window`, and under which plans.
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
        """Whether the device's count is for us to begin anew: an offload that measures itself reads it too."""
        return self._planning is not None and not any(
            entry.offload is not None for plan in plans for stack in plan.stacks for entry in stack.layers
        )


class Ladder:
    """The rungs of one run, and on which it stands.

    After each so many steps without trouble a faster plan returns for batches up to the largest of these steps' that
    it would have had room for. Where nothing is predicted that is: for all that are smaller than what it failed for.

    Args:
        plan: that the run begins with.
        quiet_steps: the number of these steps.
        room: says what a step needs and what there is.

    Attributes:
        level: the number of the rung in force.
        rungs: those that were needed so far.
    """

    def __init__(self, plan: Plan, quiet_steps: int, room: Room) -> None:
        self.rungs = [Rung(plan)]
        self.level = 0
        self._quiet_steps = quiet_steps
        self._room = room
        self._steps_since = 0
        self._failed: dict[int, list[tuple[Size, float]]] = {}
        """By level, the batches that it failed for, and the shares of them that were missing."""
        self._failed_bytes: int | None = None
        """Predicted need of the smallest step that failed, less what was missing."""
        self._cleared: dict[int, list[Size] | None] = {}
        """By level, what it runs again: batches within one of these; None where all that are smaller than failed."""
        self._batches: dict[Size, Batch | None] = {}
        """Those since the first failure, by size."""
        self._ran: dict[int, Size] = {}
        """By level, the size of the largest batch since the last look."""
        self._needed: dict[int, dict[Size, int]] = {}
        """By level, what batches of some sizes are predicted to need."""

    @property
    def rung(self) -> Rung:
        """The one in force."""
        return self.rungs[self.level]

    def fail(
        self,
        size: Size,
        next_rung: Callable[[Plan], Rung | None],
        *,
        batch: Batch | None = None,
        of_step: float = 0.0,
        of_batch: float = 0.0,
        to_leanest: bool = False,
    ) -> bool:
        """Note that the rung in force failed for a batch, and stand on the next one. Returns whether there is one.

        Args:
            size: of the batch.
            next_rung: makes the rung after a plan.
            batch: the same, to be simulated.
            of_step: share of what the step needed that was missing.
            of_batch: share of what it needed for its batch, besides weights and the like, that was missing.
            to_leanest: stand on the last one, where `next_rung` makes the leanest of all.
        """
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
        """A batch has run through."""
        # Until something fails nothing is noted.
        if self._failed:
            self._batches[size] = batch
            self._ran[self.level] = max(size, self._ran.get(self.level, size), key=lambda each: each.total)

    def end_step(self) -> None:
        """A step has ended."""
        if not self._failed:
            return
        self._steps_since += 1
        if self._steps_since >= self._quiet_steps:
            self._clear()
            self._begin_look()

    def level_for(self, size: Size) -> int:
        """Return the rung for a batch: the first that is cleared for one as large, or else the leanest."""
        leanest = len(self.rungs) - 1
        return next((level for level in range(leanest) if self._is_cleared(level, size)), leanest)

    def _is_cleared(self, level: int, size: Size) -> bool:
        cleared = self._cleared.get(level, [])
        if cleared is None:
            return all(size.is_below(failed, share) for failed, share in self._failed[level])
        return any(map(size.is_within, cleared))

    def _begin_look(self) -> None:
        self._steps_since = 0
        self._ran.clear()
        self._room.begin_window(rung.plan for rung in self.rungs)

    def _clear(self) -> None:
        """Find, for each rung but the leanest, which batches it may run again."""
        ran = [(self.rungs[level].plan, self._batches.get(size)) for level, size in self._ran.items()]
        room = self._room.bytes(self._failed_bytes, ran)
        known: list[Size] = []
        for level in range(len(self.rungs) - 1):
            if room is not None:
                known += self._fitting(level, room, without=known)
            self._cleared[level] = None if room is None else [*known]

    def _fitting(self, level: int, room: int, *, without: Sequence[Size]) -> list[Size]:
        """Return the sizes of batches, of those so far and without some, for which there is room under a rung."""
        failed = self._failed[level]
        sizes = [size for size in self._batches if not any(map(size.is_within, without))]
        sizes = [size for size in sizes if not any(each.is_within(size, share) for each, share in failed)]
        sizes.sort(key=lambda size: size.total)
        # The largest first: if it fits, so do the others.
        if sizes and not self._fits(level, room, sizes[-1]):
            fits = partial(self._fits, level, room)
            del sizes[bisect_left(sizes, True, key=lambda size: not fits(size)) :]
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
        rungs = [Rung(Plan.from_json(text), change, is_exact) for text, change, is_exact in document["rungs"]]
        if rungs[0].plan != self.rungs[0].plan:
            return False
        failed = {level: [(_size(each), share) for each, share in found] for level, found in document["failed"]}
        cleared = {level: None if sizes is None else list(map(_size, sizes)) for level, sizes in document["cleared"]}
        self._failed, self._cleared = failed, cleared
        self._failed_bytes, self._steps_since = document["failed_bytes"], document["steps_since"]
        self.rungs, self.level = rungs, document["level"]
        return True


def _size(tensors: list[list[Any]]) -> Size:
    return Size(tuple((name, elements, pairs) for name, elements, pairs in tensors))


# --- Leaner plans. ---


def next_rung(
    plan: Plan,
    stacks: Sequence[Stack],
    model: nn.Module,
    *,
    is_exact: bool,
    drops_offload: bool = False,
    share: float | None = None,
    growth: float = 1.0,
) -> Rung | None:
    """Return the next leaner plan; None if there is none.

    More layers are recomputed in full, then layers in segments and again within them, and as often as the binomial
    schedule says.

    Args:
        plan: in force.
        stacks: of the model.
        model: that the plan is in force on.
        is_exact: forbid what adds sums in another order: the chunked head and tiles, which come last.
        drops_offload: layers that are set to full keep their inputs on the device, for the host has no memory left.
        share: of the layers that can be set to full and are not, so many at once; a quarter of all layers if None.
        growth: so many times as many layers.
    """
    makers: list[Callable[[Plan, Sequence[Stack], nn.Module], Rung | None]]
    makers = [partial(_more_layers, share=share, growth=growth), _nested_segments, _binomial_segments]
    if not is_exact:
        makers += [_chunked_head, _tiles]
    if drops_offload:
        makers.insert(0, _without_offload)
    for make in makers:
        try:
            rung = make(plan, stacks, model)
        except HFCkptError:
            # Something in the model does not allow it.
            continue
        if rung is not None and rung.plan != plan and _is_possible(rung.plan, stacks, model):
            return rung
    return None


def leanest_rung(
    plan: Plan, stacks: Sequence[Stack], model: nn.Module, *, is_exact: bool, drops_offload: bool = False
) -> Rung | None:
    """Return the last of the plans that `next_rung` gives one after the other; None if there is none.

    For the arguments see there.
    """
    found: Rung | None = None
    options: dict[str, Any] = {"is_exact": is_exact, "drops_offload": drops_offload, "share": 1.0}
    rung = next_rung(plan, stacks, model, **options)
    while rung is not None:
        is_same = rung.is_exact and (found is None or found.is_exact)
        found = Rung(rung.plan, f"the leanest plan there is, with {rung.change}", is_same)
        rung = next_rung(rung.plan, stacks, model, **options)
    return found


def _is_possible(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> bool:
    try:
        check_exact(plan, stacks, model)
    except HFCkptError:
        return False
    return True


def _without_offload(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> Rung | None:
    entries = [entry for stack in plan.stacks for entry in stack.layers]
    if not any(entry.offload is not None for entry in entries):
        return None
    changed = with_entries(plan, lambda entry: replace(entry, mode=Mode.FULL, save=(), offload=None))
    return Rung(changed, "all layers are recomputed in full, and none offloads")


def _more_layers(
    plan: Plan, stacks: Sequence[Stack], model: nn.Module, *, share: float | None, growth: float
) -> Rung | None:
    """Set more layers to full, of those that can be and are not. See `next_rung`."""
    entries = [entry for stack in plan.stacks for entry in stack.layers]
    layers = [layer for stack in stacks for layer in stack.layers]
    left = [
        place
        for place, (entry, layer) in enumerate(zip(entries, layers, strict=True))
        if entry.mode is not Mode.FULL and layer.needs_gradient
    ]
    # A module that layers share can only be treated alike in all of them.
    if not _is_possible(_with_full(plan, left), stacks, model):
        left = [place for place in left if _is_possible(_with_full(plan, [place]), stacks, model)]
    if not left:
        return None
    number = math.ceil(len(entries) / _QUARTERS) if share is None else math.ceil(len(left) * share)
    chosen = left[: math.ceil(growth * max(1, number))]
    if not _is_possible(_with_full(plan, chosen), stacks, model):
        chosen = left
    return Rung(_with_full(plan, chosen), f"{len(chosen)} more layer{'s' * (len(chosen) > 1)} recomputed in full")


def _with_full(plan: Plan, places: Sequence[int]) -> Plan:
    """Set layers to full, by their places among those of all stacks."""
    numbers = count()
    return with_entries(
        plan, lambda entry: replace(entry, mode=Mode.FULL, save=(), why="") if next(numbers) in places else entry
    )


def _nested_segments(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> Rung | None:
    pairs = zip(plan.stacks, resolve(_NESTED, stacks, plan.model_class).stacks, strict=True)
    chosen = tuple(nested if _is_longer_full(stack) else stack for stack, nested in pairs)
    return Rung(replace(plan, stacks=chosen), "layers recomputed in segments, and again within them (nested)")


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


def _is_longer_full(stack: StackPlan) -> bool:
    is_plain = all(_is_plain_full(entry) and not entry.nested for entry in stack.layers)
    return is_plain and len(stack.layers) > _FEW_LAYERS


def _is_plain_full(entry: LayerPlan) -> bool:
    return entry.mode is Mode.FULL and entry.offload is None and entry.tiles is None


def _chunked_head(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> Rung | None:
    if plan.head is HeadMode.CHUNKED or governed_by_other(model) is not None:
        return None
    find_head(model)
    return Rung(replace(plan, head=HeadMode.CHUNKED), "head and loss in chunks", is_exact=False)


def _tiles(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> Rung | None:
    layers = iter([layer for stack in stacks for layer in stack.layers])
    tiled = with_entries(
        plan, lambda entry: replace(entry, tiles="auto") if _can_be_tiled(entry, next(layers)) else entry
    )
    return Rung(tiled, "layers in tiles", is_exact=False)


def _can_be_tiled(entry: LayerPlan, layer: Layer) -> bool:
    # Slices would draw masks of dropout of their own.
    return entry.tiles is None and entry.segment is None and not random_modules(layer, tiled_modules(layer))
