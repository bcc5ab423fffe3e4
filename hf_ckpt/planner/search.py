"""The fastest plan within a budget.

`dynamic_programming` adds up layers. What it chooses is simulated whole and played through torch's allocator, and the
budget is lowered by what that reserves beyond the peak until the whole fits (`simulation.fit`). Tiles and the chunked
head come in where a plan without them does not fit, or, if plans need not be bitwise, might be faster with them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, islice
from typing import Any

from hf_ckpt.errors import BudgetError
from hf_ckpt.planner.advice import (
    TILES,
    Exactness,
    OptionChange,
    Write,
    as_keywords,
    cannot_prepare,
    inexact_parts,
    nothing_fits,
)
from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer, Cost, rank
from hf_ckpt.planner.dynamic_programming import ChainPlanner
from hf_ckpt.planner.layer_costs import (
    chain_of,
    offloaded,
    plans_to_read,
    with_chunked_head,
    with_gaps,
    with_tiles,
)
from hf_ckpt.planner.peak_formulas import Choice, predict, to_plan
from hf_ckpt.planner.waiting_weights import WeightsPlanner
from hf_ckpt.policy.allowances import DEFAULT_ALLOWED, PREFER, Allowed
from hf_ckpt.policy.options import EmbeddingPlace, Offload, Weights
from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.policy.resolve_rules import binomial
from hf_ckpt.policy.revolve import most_runs
from hf_ckpt.simulation.fit import Capacity, Fit, Verdict
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.simulation.waiting_weights import without_waiting_weights

_MAX_TRIES = 6
"""Simulations of plans that one chain chooses."""
_MAX_FIXED = 4
"""Simulations of plans that a user would write."""
_CLOSE = 0.015
"""Of what there is: what lies nearer to it, or two plans that are nearer to each other, are not worth another try."""
_WRONG_BY = 0.01
"""The share by which the chain may take a plan for larger than it is."""
_AS_WRONG = 10
"""Times the error of a plan that was simulated: by more it is not wrong for the next larger plan of the chain."""
_FAR = 0.05
"""The share by which it is never wrong: where the smallest plan needs so much more, nothing is simulated."""
_SAME_TIME = 1 - 1e-6
"""Share of the time from which on another plan is no faster."""
_LITTLE = 0.999
"""Share of the time from which on another plan of the same chain is not worth a simulation."""
_NEARLY = 1.002
"""Times the time of a plan: up to it the chain may take a faster one for a slower one."""
_WORTH = 0.98
"""Share of the time that tiles or a chunked head must promise to be tried where a plan fits without."""
_MOST_RUNS = 6
"""Of a layer under a binomial schedule: with more there is hardly an input left to save."""
_SAVES = 0.98
"""Of the peak: what a binomial schedule must come below to be worth its time."""
_MAX_SMALLEST = 3
"""Simulations of the plans that need least as the chain sees it: one of them does need least."""


@dataclass(frozen=True)
class Planned:
    """A plan for what there is for a step."""

    plan: Plan
    memory: StepMemory
    """The step under the plan, simulated whole."""
    chain: Chain
    """What each layer costs under each option that there was."""
    choice: Choice
    """The plan as the chain sees it."""
    verdict: Verdict
    """Whether it fits. Of what `plan_for` returns `perhaps` only where no plan fits for certain."""
    exactness: Exactness | None = None
    """None unless plans were compared (`compare`)."""


class StepPlanner:
    """Plans one step for one capacity after the other: what was simulated for one of them serves the others.

    `allowed` says what plans may hold besides modes; `chain` is that of `chain_of`, where it is there already.
    """

    def __init__(
        self, simulator: StepSimulator, *, allowed: Allowed = DEFAULT_ALLOWED, chain: Chain | None = None
    ) -> None:
        self._simulator = simulator
        # Where the device's memory is the host's, offload frees nothing.
        self._allowed = replace(allowed, offload=None) if simulator.device.shares_host_memory else allowed
        self._given = chain
        # What the plan that needs least becomes, for messages: one whose weights wait.
        self._leanest: Callable[[Plan], Plan] = lambda plan: plan

    @cached_property
    def chain(self) -> Chain:
        """What each layer costs under each option."""
        return self._given or chain_of(self._simulator, self._allowed)

    def plan_for(
        self,
        capacity: Capacity,
        *,
        compare: bool = False,
        write: Write = as_keywords,
        say: Callable[[str], None] | None = None,
    ) -> Planned:
        """Return the fastest plan that fits, a bitwise one as far as that is allowed.

        Where none fits for certain, that is the plan that needs least, if it fits perhaps.

        Args:
            capacity: what the whole step may use.
            compare: look, where the plan is bitwise, for a faster one that is not, and say so in `Planned.exactness`.
            write: how the user would write options, for the lines of what would fit.
            say: gets progress messages where nothing fits.

        Raises:
            BudgetError: nothing fits; says by how much, where the memory is, and what would fit.
        """
        with self._simulator.ahead(self.plans_to_read()):
            if self._allowed.weights is not None or self._allowed.moves_embedding:
                return self._with_weights(capacity, compare=compare, write=write, say=say)
            return self._plan_for(capacity, compare=compare, write=write, say=say)

    def plans_to_read(self) -> Iterable[Plan | None]:
        """Return the plans that are simulated whatever the capacity is. See the function."""
        return () if self._given else plans_to_read(self._simulator, self._allowed)

    def _plan_for(
        self, capacity: Capacity, *, compare: bool, write: Write, say: Callable[[str], None] | None
    ) -> Planned:
        before = self._simulator.prepare()
        if before is not None and before.peak_bytes > capacity.allocated_bytes:
            raise cannot_prepare(self._simulator.step, before, capacity.num_bytes)
        searches = [(allowed, _Search(self._chains, capacity, allowed)) for allowed in self._allowed.in_turn]
        for allowed, search in searches:
            found = search.found() or search.smallest_if(Fit.YES)
            if found is not None:
                return self._compared(found, capacity, allowed) if compare else found
        for allowed, search in searches:
            found = search.smallest_if(Fit.PERHAPS)
            if found is not None:
                return self._compared(found, capacity, allowed) if compare else found
        search = searches[-1][1]
        smallest = self._leanest((found := search.smallest()).plan)
        changes = search.further(self._allowed)
        raise nothing_fits(
            capacity.num_bytes,
            self._simulator.memory(smallest),
            self._simulator.verdict(smallest, capacity).needed_bytes,
            self._simulator.step,
            lambda other: self._simulator.with_step(other).verdict(smallest, capacity).needed_bytes,
            changes if smallest is not found.plan else [*self._weights_change(smallest, capacity), *changes],
            write=write,
            device_bytes=self._simulator.device.memory_bytes or None,
            is_exact=self._allowed.exact is True,
            say=say,
        )

    def _with_weights(self, capacity: Capacity, **options: Any) -> Planned:
        """Return the fastest plan that fits where frozen weights may wait on the host. See `plan_for`."""
        allowed = replace(self._allowed, weights=None, embedding=EmbeddingPlace.DEVICE)
        plain = StepPlanner(self._simulator, allowed=allowed, chain=self.chain)
        made: dict[Plan, Planned] = {}

        def plan_for(other: Capacity) -> Plan:
            planned = plain.plan_for(other, **{**options, "say": None})
            return made.setdefault(planned.plan, planned).plan

        moving = WeightsPlanner(self._simulator, self._allowed, plan_for)
        if moving.can_wait:
            plain._leanest = moving.with_all
        try:
            found, error = plain.plan_for(capacity, **options), None
        except BudgetError as problem:
            found, error = None, problem
        # Nothing is faster than a plan that does nothing.
        moved = moving.fastest(capacity) if moving.can_wait and not (found and found.plan.does_nothing) else None
        if moved is not None:
            plan, memory, verdict = moved
            is_sure = found is not None and found.verdict.fit is Fit.YES
            if not is_sure or memory.time.total < _seconds_of(found) * _SAME_TIME:
                # Of a plan with segments their options alone: those of the chain.
                known = made.get(without_waiting_weights(plan)) or next(reversed(made.values()))
                return replace(known, plan=plan, memory=memory, verdict=verdict)
        if found is None:
            assert error is not None, "there is a plan or an error"
            raise error
        return found

    def _weights_change(self, smallest: Plan, capacity: Capacity) -> Iterator[OptionChange]:
        """Yield what it would bring to let frozen weights wait, where that was not allowed."""
        weights = Weights()
        moving = WeightsPlanner(self._simulator, replace(self._allowed, weights=weights), lambda other: smallest)
        if moving.can_wait:
            verdict = partial(self._simulator.verdict, moving.with_all(smallest), capacity)
            yield OptionChange({"weights": weights.to}, lambda: verdict().needed_bytes, moving.host_bytes)

    @cached_property
    def _chains(self) -> _Chains:
        return _Chains(self._simulator, ChainPlanner(self.chain))

    def _compared(self, found: Planned, capacity: Capacity, allowed: Allowed) -> Planned:
        inexact, fastest = inexact_parts(found.plan), found
        if not inexact and self._allowed.can_be_faster and found.verdict.fit is Fit.YES:
            fastest = _Search(self._chains, capacity, self._allowed.widest, found=found).found() or found
        without = predict(self.chain, [NONE] * len(self.chain.layers)).seconds
        exactness = Exactness(
            inexact,
            found.memory.time.total / without,
            None if fastest is found else fastest.memory.time.total / without,
            is_only_choice=allowed not in self._allowed.in_turn[:1],
            is_same_step=self._allowed.tiles is not True or TILES not in inexact,
        )
        return replace(found, exactness=exactness)


@dataclass(frozen=True)
class _Chains:
    """The chains of a step that plans are chosen from, and the simulator for what is chosen."""

    simulator: StepSimulator
    base: ChainPlanner
    """Of the chain without tiles, with the plain head."""
    _tiled: dict[tuple[ChainPlanner, bool | None], ChainPlanner] = field(default_factory=dict)
    _chunked: dict[ChainPlanner, ChainPlanner | None] = field(default_factory=dict)
    _gapped: dict[ChainPlanner, tuple[ChainPlanner, ...]] = field(default_factory=dict)
    _fixed: dict[ChainPlanner, tuple[Choice, ...]] = field(default_factory=dict)
    _best_cases: dict[tuple[bool, bool], ChainPlanner] = field(default_factory=dict)

    @cached_property
    def template(self) -> Plan:
        return self.simulator.plan_of(Policy.parse("none"))

    def planned(self, chain: Chain, choice: Choice, capacity: Capacity) -> Planned:
        """Return a choice as a plan, with its whole step simulated."""
        plan = to_plan(choice, chain, self.template)
        return Planned(plan, self.simulator.memory(plan), chain, choice, self.simulator.verdict(plan, capacity))

    def tiled(self, planner: ChainPlanner, allowed: Allowed) -> ChainPlanner:
        """Return the planner with tiles among its options."""
        # What may be offloaded is the same in all chains of a planner.
        key = planner, allowed.tiles
        if key not in self._tiled:
            self._tiled[key] = ChainPlanner(with_tiles(planner.chain, self.simulator, allowed))
        return self._tiled[key]

    def chunked(self, planner: ChainPlanner) -> ChainPlanner | None:
        """Return the planner with the head in chunks; None where it cannot be."""
        if planner not in self._chunked:
            chain = with_chunked_head(planner.chain, self.simulator)
            self._chunked[planner] = None if chain is None else ChainPlanner(chain)
        return self._chunked[planner]

    def gapped(self, planner: ChainPlanner, offload: Offload | None) -> tuple[ChainPlanner, ...]:
        """Return planners whose layers offload with gaps."""
        if planner not in self._gapped:
            chains = with_gaps(planner.chain, self.simulator.device, offload)
            self._gapped[planner] = tuple(map(ChainPlanner, chains))
        return self._gapped[planner]

    def fixed(self, planner: ChainPlanner) -> tuple[Choice, ...]:
        """Return the fixed policies as choices. See `fixed_choices` and `binomial_choices`."""
        if planner not in self._fixed:
            choices = [*fixed_choices(planner.chain), *binomial_choices(planner.chain)]
            self._fixed[planner] = tuple(sorted(choices, key=_order))
        return self._fixed[planner]

    def best_case(self, *, tiles: bool, head: bool) -> ChainPlanner:
        """Return the planner of the best that tiles and a chunked head could bring. See the function."""
        key = tiles, head
        if key not in self._best_cases:
            self._best_cases[key] = ChainPlanner(best_case(self.base.chain, tiles=tiles, head=head))
        return self._best_cases[key]


class _Search:
    """Looks for the fastest plan that fits, with few simulations. `allowed` is one of `Allowed.in_turn`.

    Where the fastest one without tiles, with the plain head, is known (`found`), how much faster another is will do.

    Chains know what tensors take, which is bounded here (`_most`) by what torch may reserve. How much it reserves
    beyond that (`_excess`) is taken from the plan that came nearest to that bound.
    """

    def __init__(self, chains: _Chains, capacity: Capacity, allowed: Allowed, *, found: Planned | None = None) -> None:
        self._chains = chains
        self._capacity = capacity
        self._most = capacity.reserved_bytes
        self._allowed = allowed
        self._planners = [chains.base]
        self._known = found
        self._excess, self._nearest = 0, self._most
        if found is not None:
            self._note_excess(found)

    def found(self) -> Planned | None:
        """Return the fastest plan that fits; None where the chains show none."""
        base, found = self._planners[0], self._known
        if found is None:
            found = self._uniform(base)
            if found is None or set(found.choice.entries) != {NONE}:
                found = self._among_fixed(base, self._faster(found, self._in(base)))
        self._extend(found)
        further = sorted(self._planners[1:], key=self._promise)
        for planner in further:
            if self._promise(planner) < _seconds_of(found) * _SAME_TIME:
                found = self._faster(found, self._in(planner))
        for planner in further:
            # Its own choices may turn out a little too large.
            found = self._among_fixed(planner, found) if found is None else found
        # One of them: each takes simulations, and they are much alike.
        ends = dict.fromkeys((base, self._planners[-1]))
        gaps = [each for end in ends for each in self._chains.gapped(end, self._allowed.offload_option)]
        gapped = min(gaps, key=self._promise, default=None)
        if gapped is not None and self._promise(gapped) < _seconds_of(found) * _WORTH:
            found = self._faster(found, self._in(gapped))
        return found

    def smallest_if(self, fit: Fit) -> Planned | None:
        """Return the plan that needs least if it fits so; None where it does not, or cannot by far."""
        self._extend_with_all()
        most = (self._most if fit is Fit.YES else self._capacity.allocated_bytes) * (1 + _FAR)
        if not any(_has_within(planner, most) or self._fixed_within(planner, most) for planner in self._planners):
            return None
        smallest = self.smallest()
        return smallest if smallest.verdict.fit is fit else None

    def smallest(self) -> Planned:
        """Return the plan that needs least of all that are allowed."""
        self._extend_with_all()
        choices = [(planner.chain, planner.smallest_peak) for planner in self._planners]
        choices += [(planner.chain, choice) for planner in self._planners for choice in self._chains.fixed(planner)]
        choices.sort(key=lambda found: found[1].peak_bytes)
        # The chain may have taken one for a little smaller than it is.
        most = choices[0][1].peak_bytes * (1 + _WRONG_BY)
        near = {(chain.head, choice.entries): (chain, choice) for chain, choice in choices if choice.peak_bytes <= most}
        planned = [self._planned(*found) for found in islice(near.values(), _MAX_SMALLEST)]
        return min(planned, key=lambda found: (found.verdict.needed_bytes, found.memory.time.total))

    def _planned(self, chain: Chain, choice: Choice) -> Planned:
        return self._chains.planned(chain, choice, self._capacity)

    def _fits(self, planned: Planned) -> bool:
        if planned.memory.peak_bytes > self._most:
            return False
        self._note_excess(planned)
        return planned.verdict.fit is Fit.YES

    def _note_excess(self, planned: Planned) -> None:
        reserved = planned.verdict.reserved_bytes
        if (distance := abs(reserved - self._most)) < self._nearest:
            self._excess, self._nearest = reserved - planned.memory.tensor_peak_bytes, distance

    def _uniform(self, planner: ChainPlanner) -> Planned | None:
        """Return the fastest plan with one option for all layers: their steps were traced for the chain."""
        for choice in self._chains.fixed(planner):
            if len(set(choice.entries)) == 1 and choice.peak_bytes <= self._most * (1 + _WRONG_BY):
                planned = self._planned(planner.chain, choice)
                if self._fits(planned):
                    return planned
        return None

    def _fixed_within(self, planner: ChainPlanner, most: float) -> bool:
        return any(choice.peak_bytes <= most for choice in self._chains.fixed(planner))

    def further(self, granted: Allowed) -> list[OptionChange]:
        """Return what could be chosen if the user allowed more, each option by itself and all together."""
        base = min(self._planners, key=lambda planner: planner.smallest_peak.peak_bytes)
        most = self._most * (1 + _WRONG_BY)
        sent = offloaded(base.chain, self._chains.simulator.device, self._allowed.offload_option or Offload())
        if not _has_within(ChainPlanner(best_case(sent, tiles=True, head=True)), most):
            return []
        grown: list[tuple[dict[str, object], ChainPlanner]] = []
        together, options = base, dict[str, object]()
        for option, grow in self._forbidden(base.chain, granted):
            by_itself = grow(base)
            if by_itself.chain == base.chain:
                continue
            grown.append((option, by_itself))
            together = by_itself if together is base else grow(together)
            options |= option
        if len(options) > 1:
            grown.append((options, together))
        return [self._change(option, planner) for option, planner in grown if _has_within(planner, most)]

    def _forbidden(
        self, chain: Chain, granted: Allowed
    ) -> Iterator[tuple[dict[str, object], Callable[[ChainPlanner], ChainPlanner]]]:
        """Yield options that the user did not allow, as the user would set them, with what adds them to a planner."""
        if granted.exact is True and granted.can_be_faster:
            yield {"exact": PREFER}, partial(self._widened, allowed=granted.widest)
        # Where it is `exact` that forbids them, that is the option to change.
        elif granted.tiles is False or (granted.tiles is None and not _has_tiles(chain)):
            yield {"tiles": "auto"}, partial(self._widened, allowed=Allowed(tiles=True, head=False))
        if granted.head is False:
            yield {"head": "chunked"}, partial(self._widened, allowed=Allowed(tiles=False, head=True))
        if granted.offload is None and not self._chains.simulator.device.shares_host_memory:
            yield {"offload": "cpu"}, self._with_offload

    def _widened(self, planner: ChainPlanner, allowed: Allowed) -> ChainPlanner:
        """Return a planner with the tiles and the head that are allowed."""
        if allowed.tiles is not False:
            planner = self._chains.tiled(planner, replace(allowed, offload=self._allowed.offload))
        return (self._chains.chunked(planner) if allowed.head else None) or planner

    def _with_offload(self, planner: ChainPlanner) -> ChainPlanner:
        return ChainPlanner(offloaded(planner.chain, self._chains.simulator.device, Offload(fraction=1.0)))

    def _change(self, options: dict[str, object], planner: ChainPlanner) -> OptionChange:
        chain, choice = planner.chain, planner.smallest_peak
        return OptionChange(options, lambda: self._planned(chain, choice).verdict.needed_bytes, choice.host_bytes)

    def _extend(self, found: Planned | None) -> None:
        """Simulate tiles and the chunked head where they might make a plan faster, or make one fit."""
        allowed, may_tile = self._allowed, self._allowed.tiles is not False
        tiles = may_tile and self._may_help(found, tiles=True, head=False)
        head = bool(allowed.head) and self._may_help(found, tiles=False, head=True)
        if not (tiles or head) and may_tile and allowed.head:
            # Each alone may be of no use where both are needed.
            tiles = head = self._may_help(found, tiles=True, head=True)
        self._add(tiles=tiles, head=head)

    def _extend_with_all(self) -> None:
        """Simulate tiles and the chunked head as far as they are allowed."""
        self._add(tiles=self._allowed.tiles is not False, head=bool(self._allowed.head))

    def _add(self, *, tiles: bool, head: bool) -> None:
        base = self._planners[0]
        tiled = self._chains.tiled(base, self._allowed) if tiles else base
        chunked = self._chains.chunked(tiled) if head else None
        for planner in (tiled if _has_tiles(tiled.chain) else None, chunked):
            if planner is not None and planner not in self._planners:
                self._planners.append(planner)

    def _may_help(self, found: Planned | None, *, tiles: bool, head: bool) -> bool:
        best, limit = self._chains.best_case(tiles=tiles, head=head), _seconds_of(found) * _WORTH
        return best.least_seconds(int(self._likely * (1 + _WRONG_BY))) < limit and self._promise(best) < limit

    @property
    def _likely(self) -> int:
        """What may be allocated if torch reserves as much beyond it as for the plan that came nearest to the bound."""
        return self._most - self._excess

    def _promise(self, planner: ChainPlanner) -> float:
        """Return the time of what a planner would choose; infinite where nothing fits."""
        most = int(self._likely * (1 + _WRONG_BY))
        if not planner.may_fit(most):
            return math.inf
        try:
            return planner.choose(most).seconds
        except BudgetError:
            return math.inf

    def _among_fixed(self, planner: ChainPlanner, found: Planned | None) -> Planned | None:
        num_tries = 0
        # The chain may have taken one for a little too large, and torch may reserve less beyond it.
        most = min(self._most * (1 + _WRONG_BY), self._likely * (1 + _FAR))
        for choice in self._chains.fixed(planner):
            may_fit = choice.peak_bytes <= most and len(set(choice.entries)) > 1
            if may_fit and (found is None or choice.seconds < found.memory.time.total * _NEARLY):
                planned = self._planned(planner.chain, choice)
                found = self._faster(found, planned)
                if planned.verdict.fit is not Fit.YES:
                    most = min(most, choice.peak_bytes * (1 - _CLOSE / 3))
                num_tries += 1
            if num_tries == _MAX_FIXED:
                break
        return found

    def _in(self, planner: ChainPlanner) -> Planned | None:
        """Return the fastest plan of a chain: between one that fits and one that does not, fewer bytes each time."""
        most = self._most * (1 + _FAR)
        if not planner.may_fit(most):
            return None
        best: Planned | None = None
        # What needs least of all takes long to find, and mostly lies far below.
        # What torch reserves is no straight line of what is allocated.
        spared = self._most * _CLOSE / 2 if self._excess else 0
        peaks, target = planner.peaks_without_casts, self._likely - spared
        # Places in the peaks: of a plan that fits, and of one that does not.
        fits, fails, limit = -1, len(peaks), math.inf
        for _ in range(_MAX_TRIES):
            place = min(max(bisect_right(peaks, target) - 1, fits + 1), fails - 1)
            if place <= fits:
                break
            try:
                choice = planner.choose(peaks[place])
            except BudgetError:
                # Nothing has fitted yet, or this would.
                failed = math.inf if fails == len(peaks) else peaks[fails]
                peaks = planner.peaks
                fails = bisect_left(peaks, failed)
                place = min(max(bisect_right(peaks, target) - 1, 0), fails - 1)
                if peaks[0] > most or place < 0:
                    break
                choice = planner.choose(peaks[place])
            if best is not None and (choice.peak_bytes > limit or choice.seconds > best.choice.seconds * _LITTLE):
                break
            planned = self._planned(planner.chain, choice)
            if self._fits(planned):
                fits = place
                best = self._faster(best, planned)
                if self._known is not None or planned.verdict.reserved_bytes > self._most * (1 - _CLOSE):
                    break
            else:
                fails = place
            if fits >= 0 and fails < len(peaks) and peaks[fails] - peaks[fits] < self._most * _CLOSE:
                break
            # The planner is wrong by about as much for a plan of about that size, and torch reserves as much beyond it.
            wrong_by = planned.memory.tensor_peak_bytes - planned.choice.peak_bytes
            target = self._likely - wrong_by - spared
            limit = target + spared + min(_AS_WRONG * abs(wrong_by), self._most * _WRONG_BY)
        return best

    def _faster(self, found: Planned | None, other: Planned | None) -> Planned | None:
        if other is None or (found is not None and other.memory.time.total >= found.memory.time.total):
            return found
        return other if self._fits(other) else found


def _has_within(planner: ChainPlanner, most: float) -> bool:
    """Whether a planner has a choice within so many bytes."""
    return planner.may_fit(most) and planner.smallest_peak.peak_bytes <= most


def _seconds_of(found: Planned | None) -> float:
    return math.inf if found is None else found.choice.seconds


def _has_tiles(chain: Chain) -> bool:
    return any(option.tiles is not None for layer in chain.layers for option in layer.costs)


# --- The most that tiles and a chunked head could bring. Where not even that helps, neither is simulated. ---

_FFN = LayerPlan(Mode.FFN)


def best_case(chain: Chain, *, tiles: bool, head: bool) -> Chain:
    """Return a chain at least as good as any with tiles, which take no memory and no time here, or a chunked head."""
    if head:
        chain = replace(chain, head_bytes=0, head_backward_bytes=0)
    if tiles:
        chain = replace(chain, layers=tuple(map(_tiled, chain.layers)))
    return chain


def _tiled(layer: ChainLayer) -> ChainLayer:
    costs = dict(layer.costs)
    for option, like in ((FULL, FULL), (NONE, _FFN)):
        if like in costs:
            costs[replace(option, tiles="auto")] = _weightless(costs[like], costs[option].seconds)
    if FULL in costs:
        costs.update(
            (replace(option, tiles="auto"), _weightless(cost, cost.seconds))
            for option, cost in layer.costs.items()
            if option.offload is not None and option.mode is Mode.FULL
        )
    return replace(layer, costs=costs)


def _weightless(cost: Cost, seconds: float) -> Cost:
    kept = cost.kept_bytes
    return replace(cost, forward_bytes=kept, backward_bytes=kept + cost.left_bytes, seconds=seconds)


# --- The plans that a user would write: one option for all layers, or every n-th, or segments of sqrt(L). ---

_Entries = tuple[LayerPlan, ...]


def fixed_choices(chain: Chain) -> tuple[Choice, ...]:
    """Return the fixed policies as choices, each kind once, the fastest first, of equally fast ones the smallest.

    A layer that lacks an option does nothing, as when a policy is resolved. Segments are left out where layers in a row
    cannot join.
    """
    ways = dict.fromkeys([*_every_nth(chain), *_segments(chain)])
    return tuple(sorted((predict(chain, way) for way in ways), key=_order))


def _order(choice: Choice) -> tuple[float, int]:
    return choice.seconds, choice.peak_bytes


def _every_nth(chain: Chain) -> Iterator[_Entries]:
    # Lists of operators to keep are the planner's own; a user who wrote one would have found it with the planner.
    options = {option for layer in chain.layers for option in layer.costs if not option.save}
    for option in sorted(options, key=rank):
        # Offload is tried for all layers only. Those that cannot, the last ones, keep the same on the device.
        for every in range(1, 2 if option.offload is not None else len(chain.layers) + 1):
            yield tuple(
                option if option in layer.costs and layer.layer_idx % every == 0 else _without_offload(option, layer)
                for layer in chain.layers
            )


def _without_offload(option: LayerPlan, layer: ChainLayer) -> LayerPlan:
    """Return what a layer does that an option with offload leaves out: the same on the device, where it can."""
    on_device = replace(option, offload=None)
    return on_device if option.offload is not None and on_device in layer.costs else NONE


def _segments(chain: Chain) -> Iterator[_Entries]:
    if any(FULL not in layer.costs or not layer.can_join for layer in chain.layers):
        return
    num_layers = Counter(layer.stack for layer in chain.layers)
    for nested in (False, True):
        entries = []
        for layer in chain.layers:
            size = math.ceil(math.sqrt(num_layers[layer.stack]))
            entries.append(replace(FULL, segment=layer.layer_idx // size * size, nested=nested))
        yield tuple(entries)


# --- Binomial schedules: fewer saved inputs than any cut into segments, for more forwards. ---


def binomial_choices(chain: Chain) -> tuple[Choice, ...]:
    """Return the binomial schedules that save much of what `full` needs, each much of what the faster ones need.

    So there are none where the inputs of layers are little next to the rest: with short rows, or few layers.
    """
    if any(FULL not in layer.costs or not layer.can_join for layer in chain.layers):
        return ()
    found = [predict(chain, [FULL] * len(chain.layers))]
    for snapshots in reversed(range(1, max(_stack_sizes(chain), default=0) - 1)):
        entries = _scheduled(chain, snapshots)
        if entries is None:
            break
        choice = predict(chain, entries)
        if choice.peak_bytes < found[-1].peak_bytes * _SAVES:
            found.append(choice)
    return tuple(found[1:])


def _stack_sizes(chain: Chain) -> Iterable[int]:
    return Counter(layer.stack for layer in chain.layers).values()


def _scheduled(chain: Chain, snapshots: int) -> _Entries | None:
    """Return the entries of a schedule for each stack; None where a layer would run too often."""
    if max(most_runs(size, snapshots) for size in _stack_sizes(chain)) > _MOST_RUNS:
        return None
    entries: list[LayerPlan] = []
    for _, stack in groupby(chain.layers, key=lambda layer: layer.stack):
        entries += [entry for _, entry in binomial(snapshots, [layer.layer_idx for layer in stack])]
    return tuple(entries)
