"""What several tests of estimates start from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_ckpt import Plan
from hf_ckpt.estimate.estimate import Estimate, estimate
from hf_ckpt.policy.policy import Mode
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step_memory import StepMemory
from tests import steps_by_hand
from tests.estimate.small_estimates import CARD, silent, small_subject
from tests.steps_by_hand import MIB


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Estimate:
    """An estimate of a small recipe."""
    return estimate(small_subject(tmp_path_factory.mktemp("recipe")), [CARD], silent)


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose memory is 1 MiB and 1 KiB for each token; a quarter of that where layers are recomputed."""

    def simulated(simulator: StepSimulator, plan: Plan | None) -> StepMemory:
        step = simulator.step
        held = step.batch_size * step.seq_length * 1024 // (1 if plan is None else 2 * (1 + plan.count(Mode.FULL) // 4))
        return replace(steps_by_hand.step(), peak_bytes=MIB + held, tensor_peak_bytes=MIB + held)

    monkeypatch.setattr(StepSimulator, "_simulated", lambda *asked: (simulated(*asked), 0))
    monkeypatch.setattr(StepSimulator, "reserved_bytes", lambda simulator, plan: simulator.memory(plan).peak_bytes)
