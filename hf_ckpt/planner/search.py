"""The plan that suits a budget.

The planner adds up layers. What it chooses is simulated whole, and the budget corrected until the whole fits. Tiles and
the chunked head come in where a plan without them does not fit, or, if plans need not be bitwise, might be faster with
them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

from torch import nn

from hf_ckpt.errors import BudgetError
from hf_ckpt.patch.apply import make_plan
from hf_ckpt.planner.advice import Change, Write, as_keywords, nothing_fits
from hf_ckpt.planner.bounds import best_case
from hf_ckpt.planner.chain import NONE, Chain
from hf_ckpt.planner.exactness import TILES, Exactness, inexact_parts
from hf_ckpt.planner.fixed import fixed_choices
from hf_ckpt.planner.layer_costs import chain_of, with_chunked_head, with_tiles
from hf_ckpt.planner.offload_costs import offloaded, with_gaps
from hf_ckpt.planner.pareto import Planner, smallest_peak
from hf_ckpt.planner.peak_formulas import Choice, predict, to_plan
from hf_ckpt.policy.allowances import PREFER, UNASKED, Allowed
from hf_ckpt.policy.modifiers import HeadMode, Offload
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import StepMemory

_MOST_TRIES = 6
"""Of simulating a chosen plan whole."""
_MOST_FIXED = 4
"""Of simulating plans that a user would write."""
_CLOSE = 0.001
"""Of the budget: plans that are nearer to each other are not worth another try."""
_WRONG_BY = 0.01
"""The share by which the chain may take a plan for larger than it is."""
_FAR = 0.05
"""The share by which it is never wrong: where the smallest plan needs so much more, nothing is simulated."""
_SAME_TIME = 1 - 1e-6
"""Share of the time from which on another plan is no faster."""
_LITTLE = 0.999
"""Share of the time from which on another plan of the same chain is not worth a simulation."""
_WORTH = 0.98
"""Share of the time that tiles or a chunked head must promise to be looked at where a plan fits without."""
_MOST_SMALLEST = 3
"""Of simulating plans that need least by the chain, of which one needs least."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan for a budget.

    Args:
        plan: the plan.
        memory: the step under it, simulated whole.
        chain: what the planner saw.
        choice: what it chose.
        exactness: whether it is bitwise, and the time that takes; None where nobody asked.
    """

    plan: Plan
    memory: StepMemory
    chain: Chain
    choice: Choice
    exactness: Exactness | None = None


def plan_for(
    model: nn.Module,
    step: Step,
    device: Device,
    budget_bytes: int,
    *,
    allowed: Allowed = UNASKED,
    chain: Chain | None = None,
    compare: bool = False,
    write: Write = as_keywords,
    say: Callable[[str], None] | None = None,
    **structure: Any,
) -> Planned:
    """Return the fastest plan whose simulated step stays within a budget, a bitwise one as far as that is asked for.

    Args:
        model: see `simulate_step`.
        step: what the Trainer runs.
        device: where.
        budget_bytes: device memory that the whole step may use.
        allowed: what the plan may hold beside modes.
        chain: of `chain_of` with the same arguments, where it is there already.
        compare: look, where the plan is bitwise, for a faster one that is not, and say so in `Planned.exactness`.
        write: puts options into the words that the user would write, for the lines of what would fit.
        say: is told what goes on where nothing fits.
        structure: `layers`, `attention` and `ffn` of `apply`.

    Raises:
        BudgetError: nothing fits; says by how much, where the memory is, and what would fit.
    """
    plans = Plans(model, step, device, allowed=allowed, chain=chain, **structure)
    return plans.within(budget_bytes, compare=compare, write=write, say=say)


class Plans:
    """Plans of one step for one budget after the other: what was simulated for one of them serves the others.

    Args:
        model: see `plan_for`, as all others.
        step: what the Trainer runs.
        device: where.
        allowed: what plans may hold beside modes.
        chain: of `chain_of` with the same arguments, where it is there already.
        structure: `layers`, `attention` and `ffn` of `apply`.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        device: Device,
        *,
        allowed: Allowed = UNASKED,
        chain: Chain | None = None,
        **structure: Any,
    ) -> None:
        self._subject = _Subject(model, step, device, structure)
        self._allowed = allowed
        self._base = Planner(chain or chain_of(model, step, device, allowed=allowed, **structure))

    def within(
        self,
        budget_bytes: int,
        *,
        compare: bool = False,
        write: Write = as_keywords,
        say: Callable[[str], None] | None = None,
    ) -> Planned:
        """Return the fastest plan whose simulated step stays within a budget. See `plan_for`.

        Args:
            budget_bytes: device memory that the whole step may use.
            compare: see there.
            write: see there.
            say: see there.

        Raises:
            BudgetError: nothing fits.
        """
        for allowed in self._allowed.in_turn:
            search = _Search(self._subject, budget_bytes, allowed, self._base)
            found = search.found() or search.smallest_within()
            if found is not None:
                return self._compared(found, budget_bytes, allowed) if compare else found
        smallest = search.smallest()
        raise nothing_fits(
            budget_bytes,
            smallest.memory,
            self._subject.step,
            lambda other: self._subject.peak_of(smallest.plan, other),
            search.further(self._allowed),
            write=write,
            device_bytes=self._subject.device.memory_bytes or None,
            is_exact=self._allowed.exact is True,
            say=say,
        )

    def _compared(self, found: Planned, budget_bytes: int, allowed: Allowed) -> Planned:
        inexact, fastest = inexact_parts(found.plan), found
        if not inexact and self._allowed.can_be_faster:
            search = _Search(self._subject, budget_bytes, self._allowed.widest, self._base)
            fastest = search.found(found) or found
        without = predict(self._base.chain, [NONE] * len(self._base.chain.layers)).seconds
        exactness = Exactness(
            inexact,
            found.memory.time.total / without,
            None if fastest is found else fastest.memory.time.total / without,
            is_only_choice=allowed not in self._allowed.in_turn[:1],
            is_same_step=self._allowed.tiles is not True or TILES not in inexact,
        )
        return replace(found, exactness=exactness)


@dataclass(frozen=True)
class _Subject:
    """A step, and where it runs: what is simulated under one plan after the other."""

    model: nn.Module
    step: Step
    device: Device
    structure: dict[str, Any]
    _known: dict[Plan, StepMemory] = field(default_factory=dict)
    # By the id of a chain, which is kept beside so that no other one gets it, and by what was added to it.
    _grown: dict[tuple[int, str], tuple[Chain, Planner | None]] = field(default_factory=dict)

    _gapped: dict[int, tuple[Chain, tuple[Planner, ...]]] = field(default_factory=dict)

    @cached_property
    def template(self) -> Plan:
        return make_plan(self.model, Policy.parse("none"), **self.structure)

    def planned(self, chain: Chain, choice: Choice) -> Planned:
        """Return a choice as a plan, with its whole step simulated."""
        plan = to_plan(choice, chain, self.template)
        if plan not in self._known:
            self._known[plan] = simulate_step(self.model, plan, self.step, self.device, **self.structure)
        return Planned(plan, self._known[plan], chain, choice)

    def peak_of(self, plan: Plan, step: Step) -> int:
        """Return the peak of another step under a plan."""
        return simulate_step(self.model, plan, step, self.device, **self.structure).peak_bytes

    def tiled(self, planner: Planner, allowed: Allowed) -> Planner:
        """Return the planner with tiles among its options."""
        # What may be offloaded is the same in all chains of a subject.
        key = id(planner.chain), f"tiles {allowed.tiles}"
        if key not in self._grown:
            arguments = (planner.chain, self.model, self.step, self.device)
            chain = with_tiles(*arguments, allowed=allowed, **self.structure)
            self._grown[key] = planner.chain, Planner(chain)
        found = self._grown[key][1]
        assert found is not None, "where tiles are of no use the chain is as it was"
        return found

    def chunked(self, planner: Planner) -> Planner | None:
        """Return the planner with the head in chunks; None where it cannot be."""
        key = id(planner.chain), HeadMode.CHUNKED
        if key not in self._grown:
            chain = with_chunked_head(planner.chain, self.model, self.step, self.device, **self.structure)
            self._grown[key] = planner.chain, None if chain is None else Planner(chain)
        return self._grown[key][1]

    def gapped(self, planner: Planner, offload: Offload | None) -> Iterator[Planner]:
        """Yield planners whose layers offload with gaps."""
        key = id(planner.chain)
        if key not in self._gapped:
            chains = with_gaps(planner.chain, self.device, offload)
            self._gapped[key] = planner.chain, tuple(map(Planner, chains))
        yield from self._gapped[key][1]


class _Search:
    """Looks for the fastest plan that fits, with as few simulations as may do.

    Args:
        subject: what is planned for.
        budget_bytes: the budget.
        allowed: what the plan may hold: one of `Allowed.in_turn`.
        base: of the chain without tiles, with the plain head.
    """

    def __init__(self, subject: _Subject, budget_bytes: int, allowed: Allowed, base: Planner) -> None:
        self._subject = subject
        self._budget = budget_bytes
        self._allowed = allowed
        self._planners = [base]
        self._gapped = list[Planner]()

    def found(self, found: Planned | None = None) -> Planned | None:
        """Return the fastest plan that fits; None where the chains show none.

        Args:
            found: the fastest one without tiles, with the plain head, where that is known.
        """
        planner = self._planners[0]
        if found is None:
            found = self._among_fixed(planner.chain, self._in(planner))
        self._extend(found)
        further = sorted(self._planners[1:], key=self._promise)
        for planner in further:
            if self._promise(planner) < _seconds_of(found) * _SAME_TIME:
                found = self._faster(found, self._in(planner))
        for planner in further:
            # Its own choices may turn out a little too large.
            found = self._among_fixed(planner.chain, found) if found is None else found
        # One of them: each takes simulations, and they are much alike.
        gapped = min(self._gapped, key=self._promise, default=None)
        if gapped is not None and self._promise(gapped) < _seconds_of(found) * _WORTH:
            found = self._faster(found, self._in(gapped))
        return found

    def smallest_within(self) -> Planned | None:
        """Return the plan with the smallest peak if that fits; None where it does not, or cannot by far."""
        self._extend_with_all()
        least = min(planner.smallest_peak().peak_bytes for planner in self._planners)
        if least > self._budget * (1 + _FAR):
            return None
        smallest = self.smallest()
        return smallest if smallest.memory.peak_bytes <= self._budget else None

    def smallest(self) -> Planned:
        """Return the plan with the smallest peak of all that are allowed."""
        self._extend_with_all()
        choices = [(planner.chain, planner.smallest_peak()) for planner in self._planners]
        choices += [(planner.chain, choice) for planner in self._planners for choice in fixed_choices(planner.chain)]
        choices.sort(key=lambda found: found[1].peak_bytes)
        # The chain may have taken one for a little smaller than it is.
        most = choices[0][1].peak_bytes * (1 + _WRONG_BY)
        near = {(chain.head, choice.entries): (chain, choice) for chain, choice in choices if choice.peak_bytes <= most}
        planned = [self._subject.planned(*found) for found in islice(near.values(), _MOST_SMALLEST)]
        return min(planned, key=lambda found: (found.memory.peak_bytes, found.memory.time.total))

    def further(self, asked: Allowed) -> list[Change]:
        """Return what could be chosen if it were allowed, each by itself and all together.

        Args:
            asked: what the user allows.
        """
        base = min((planner.chain for planner in self._planners), key=lambda chain: smallest_peak(chain).peak_bytes)
        sent = offloaded(base, self._subject.device, self._allowed.offload_option or Offload())
        if not self._may_fit(best_case(sent, tiles=True, head=True)):
            return []
        grown: list[tuple[dict[str, object], Chain]] = []
        together, options = base, dict[str, object]()
        for option, grow in self._forbidden(base, asked):
            by_itself = grow(base)
            if by_itself is None or by_itself == base:
                continue
            grown.append((option, by_itself))
            together = by_itself if together is base else grow(together) or together
            options |= option
        if len(options) > 1:
            grown.append((options, together))
        return [self._change(option, chain) for option, chain in grown if self._may_fit(chain)]

    def _may_fit(self, chain: Chain) -> bool:
        return smallest_peak(chain).peak_bytes <= self._budget * (1 + _WRONG_BY)

    def _forbidden(
        self, chain: Chain, asked: Allowed
    ) -> Iterator[tuple[dict[str, object], Callable[[Chain], Chain | None]]]:
        """Yield what a plan was not allowed to hold, as options of the user's, and what adds it to a chain."""
        if asked.exact is True and asked.can_be_faster:
            yield {"exact": PREFER}, partial(self._widened, allowed=asked.widest)
        # Where it is `exact` that forbids them, that is the option to change.
        elif asked.tiles is False or (asked.tiles is None and not _has_tiles(chain)):
            yield {"tiles": "auto"}, partial(self._widened, allowed=Allowed(tiles=True, head=False))
        if asked.head is False:
            yield {"head": "chunked"}, partial(self._widened, allowed=Allowed(tiles=False, head=True))
        if asked.offload is None:
            offload = Offload(fraction=1.0)
            yield {"offload": "cpu"}, partial(offloaded, device=self._subject.device, offload=offload)

    def _widened(self, chain: Chain, allowed: Allowed) -> Chain:
        """Return a chain with the tiles and the head that are allowed."""
        planner = Planner(chain)
        if allowed.tiles is not False:
            planner = self._subject.tiled(planner, replace(allowed, offload=self._allowed.offload))
        chunked = self._subject.chunked(planner) if allowed.head else None
        return (chunked or planner).chain

    def _change(self, options: dict[str, object], chain: Chain) -> Change:
        choice = smallest_peak(chain)
        return Change(options, lambda: self._subject.planned(chain, choice).memory.peak_bytes, choice.host_bytes)

    def _extend(self, found: Planned | None) -> None:
        """Simulate tiles and the chunked head where they might make a plan faster, or make one fit."""
        base, allowed = self._planners[0], self._allowed
        may_tile = allowed.tiles is not False
        tiles = may_tile and self._may_help(found, tiles=True, head=False)
        head = bool(allowed.head) and self._may_help(found, tiles=False, head=True)
        if not (tiles or head) and may_tile and allowed.head:
            # Each alone may be of no use where both are needed.
            tiles = head = self._may_help(found, tiles=True, head=True)
        self._add(tiles=tiles, head=head)
        for planner in dict.fromkeys((base, self._planners[-1])):
            self._gapped.extend(self._subject.gapped(planner, allowed.offload_option))

    def _extend_with_all(self) -> None:
        """Simulate tiles and the chunked head as far as they are allowed."""
        self._add(tiles=self._allowed.tiles is not False, head=bool(self._allowed.head))

    def _add(self, *, tiles: bool, head: bool) -> None:
        base = self._planners[0]
        tiled = self._subject.tiled(base, self._allowed) if tiles else base
        chunked = self._subject.chunked(tiled) if head else None
        for planner in (tiled if _has_tiles(tiled.chain) else None, chunked):
            if planner is not None and planner not in self._planners:
                self._planners.append(planner)

    def _may_help(self, found: Planned | None, *, tiles: bool, head: bool) -> bool:
        best = Planner(best_case(self._planners[0].chain, tiles=tiles, head=head))
        return self._promise(best) < _seconds_of(found) * _WORTH

    def _promise(self, planner: Planner) -> float:
        """Return the time of what a planner would choose; infinite where nothing fits."""
        try:
            return planner.choose(int(self._budget * (1 + _WRONG_BY))).seconds
        except BudgetError:
            return math.inf

    def _among_fixed(self, chain: Chain, found: Planned | None) -> Planned | None:
        num_tries = 0
        for choice in fixed_choices(chain):
            # The chain may have taken one for a little too large.
            may_fit = choice.peak_bytes <= self._budget * (1 + _WRONG_BY)
            if may_fit and (found is None or choice.seconds < found.memory.time.total * _SAME_TIME):
                found = self._faster(found, self._subject.planned(chain, choice))
                num_tries += 1
            if num_tries == _MOST_FIXED:
                break
        return found

    def _in(self, planner: Planner) -> Planned | None:
        """Return the fastest plan of a chain: between one that fits and one that does not, fewer bytes each time."""
        best: Planned | None = None
        # Places in the planner's peaks: of a plan that fits, and of one that does not.
        fits, fails, limit = -1, len(planner.peaks), math.inf
        place = _place_of(planner, self._budget)
        if planner.peaks[0] > self._budget * (1 + _FAR):
            return None
        for _ in range(_MOST_TRIES):
            place = min(max(place, fits + 1), fails - 1)
            if place <= fits or (best is not None and planner.peaks[place] > limit):
                break
            choice = planner.choose(planner.peaks[place])
            if best is not None and choice.seconds > best.choice.seconds * _LITTLE:
                break
            planned = self._subject.planned(planner.chain, choice)
            wrong_by = planned.memory.peak_bytes - planned.choice.peak_bytes
            if planned.memory.peak_bytes <= self._budget:
                fits = place
                best = self._faster(best, planned)
            else:
                fails = place
            has_both = fits >= 0 and fails < len(planner.peaks)
            if has_both and planner.peaks[fails] - planner.peaks[fits] < self._budget * _CLOSE:
                break
            # The planner is wrong by about as much for a plan of about that size.
            place = _place_of(planner, self._budget - wrong_by)
            limit = (self._budget - wrong_by) * (1 + _WRONG_BY)
        return best

    def _faster(self, found: Planned | None, other: Planned | None) -> Planned | None:
        if other is None or other.memory.peak_bytes > self._budget:
            return found
        return other if found is None or other.memory.time.total < found.memory.time.total else found


def _seconds_of(found: Planned | None) -> float:
    return math.inf if found is None else found.choice.seconds


def _has_tiles(chain: Chain) -> bool:
    return any(option.tiles is not None for layer in chain.layers for option in layer.costs)


def _place_of(planner: Planner, budget_bytes: int) -> int:
    """Return the place of the last of the planner's peaks that is within a budget; -1 where none is."""
    return bisect_right(planner.peaks, budget_bytes) - 1
