"""Late events under plans drawn by chance: equal to training without a plan, bit by bit, or refused with a reason."""

from __future__ import annotations

import pytest

from tests.attack.combinations import Combination
from tests.attack.layer_events import EVENTS
from tests.attack.verdicts import FAULTS, Verdict, outcome_of

NUM_SEEDS, TOGETHER = 3000, 10


@pytest.mark.sweep(keep=15)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, TOGETHER))
def test_late_events_are_exact_or_refused(first: int) -> None:
    outcomes = [outcome_of(Combination.of(seed)) for seed in range(first, first + TOGETHER)]
    assert [
        each.describe() for each in outcomes if each.verdict in (*FAULTS, Verdict.UNPROVEN, Verdict.UNDEFINED)
    ] == []


def test_a_seed_rebuilds_its_combination() -> None:
    assert [Combination.of(seed) for seed in range(50)] == [Combination.of(seed) for seed in range(50)]


def test_every_event_and_each_loop_is_drawn() -> None:
    drawn = [Combination.of(seed) for seed in range(NUM_SEEDS)]
    assert {each.event for each in drawn} == set(EVENTS)
    assert 0.05 < sum(each.by_trainer for each in drawn) / NUM_SEEDS < 0.1
