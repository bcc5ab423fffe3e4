"""Which rung a step that ran out of memory goes on with, where several of its micro-batches fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_ckpt.errors import OutOfMemoryError
from hf_ckpt.recovery.escalation import Escalation, Failed
from hf_ckpt.recovery.ladder import Ladder, Rung, Size
from hf_ckpt.recovery.out_of_memory import Failure, Figures, Part

NUM_RUNGS = 6
PASSES_ON = {100: 5, 300: 5}
"""The first rung on which a micro-batch of so many bytes fits."""


def plan(number: int) -> Any:
    return SimpleNamespace(stacks=[], number=number)


def tokens(number: int) -> Size:
    return Size((("input_ids", number, number),))


def failed(number: int) -> Failed:
    failure = Failure(RuntimeError("out of memory"), Part.BACKWARD, Figures())
    return Failed(failure, 1, tokens(number), f"{number} tokens")


@pytest.fixture
def escalation() -> Escalation:
    """One that stands on the leanest rung, after a step in which others failed for what is larger."""
    room: Any = SimpleNamespace(needed=lambda *given: None, begin_window=lambda *given: None, bytes=lambda *given: None)
    ladder = Ladder(plan(0), 1, room)
    ladder.rungs = [Rung(plan(number), f"rung {number}") for number in range(NUM_RUNGS)]
    ladder.level = NUM_RUNGS - 1
    ladder._failed = {level: [(tokens(400 if level == 4 else 200), 0.0)] for level in range(NUM_RUNGS - 1)}
    ladder.end_step()
    made = Escalation(ladder, lambda *given, rerun: None, lambda rung: None)
    made.begin_step()
    return made


def run(size: int, escalation: Escalation) -> int:
    """Run a micro-batch on the rung that is cleared for it; return the rung on which it passes."""

    def once() -> tuple[int, Failed | None]:
        level = escalation.ladder.level
        return level, None if level >= PASSES_ON[size] else failed(size)

    escalation.stand_on(escalation.ladder.level_for(tokens(size)))
    level, failure = once()
    return level if failure is None else escalation.recover(failure, lambda: None, once)


def test_a_later_micro_batch_gets_the_leanest_rung_that_another_one_has_jumped_to(escalation: Escalation) -> None:
    assert run(100, escalation) == 5
    assert escalation.ladder.level_for(tokens(300)) < 5
    assert run(300, escalation) == 5


def test_the_leanest_rung_is_the_last(escalation: Escalation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASSES_ON, 100, NUM_RUNGS)
    with pytest.raises(OutOfMemoryError, match="There is no leaner plan"):
        run(100, escalation)
