"""How much host memory benchmarks let offload take."""

from __future__ import annotations

from typing import Any

import pytest

import hf_ckpt
from benchmarks import longctx, offload
from benchmarks.host_limit import MOST_HOST_BYTES, capped, with_capped_offload
from benchmarks.side_by_side import ours
from hf_ckpt.errors import HostMemoryError
from hf_ckpt.patch.apply import offloaders_of
from hf_ckpt.policy.options import Offload
from hf_ckpt.policy.plan import Plan
from hf_ckpt.regions.offload.host_memory import HostLimits, HostMemory
from tests import exactness

pytestmark = pytest.mark.sweep

GIB = 2**30


@pytest.mark.parametrize(("own", "allowed"), [(None, 48 * GIB), (2 * GIB, 2 * GIB), (99 * GIB, 48 * GIB)])
def test_a_lower_cap_of_its_own_stays(own: int | None, allowed: int) -> None:
    assert capped(Offload(host_memory=own, min_bytes=0)) == Offload(
        host_memory=allowed, trust_host_memory=True, min_bytes=0
    )


def plan() -> Plan:
    rules = [{"layers": "0:2", "mode": "full", "offload": "cpu"}, {"layers": "2:", "mode": "full"}]
    with hf_ckpt.apply(exactness.build("llama").model, rules) as applied:
        return applied.plan


def test_a_plan_changes_in_nothing_else() -> None:
    found = plan()
    entries = with_capped_offload(found).stacks[0].layers
    assert [entry.offload and entry.offload.host_memory for entry in entries[:3]] == [48 * GIB, 48 * GIB, None]
    assert with_capped_offload(found).to_json() != found.to_json()
    assert with_capped_offload(with_capped_offload(found)) == with_capped_offload(found)


@pytest.mark.parametrize("kind", ["policy", "plan"])
def test_contenders_that_offload_run_under_the_cap(kind: str) -> None:
    given = plan() if kind == "plan" else "full"
    options = {} if kind == "plan" else {"offload": ours.POLICIES["full_offload"][1]["offload"]}
    model = exactness.build("llama").model
    with ours.applied(given, options, model):
        (offloader,) = offloaders_of(model)
        assert offloader.settings.trust_host_memory
        assert offloader.settings.host_memory == MOST_HOST_BYTES


def test_rows_of_the_longest_context_run_under_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Plan] = []

    def stop(found: Plan, **options: Any) -> None:
        given.append(found)
        raise KeyboardInterrupt

    monkeypatch.setattr(longctx, "build", lambda recipe, place: None)
    monkeypatch.setattr(longctx, "HFCkptCallback", stop)
    with pytest.raises(KeyboardInterrupt):
        longctx.train(longctx.Trial(64, 0, plan().to_json(), is_small=True), "cpu")
    assert given == [with_capped_offload(plan())]


def test_a_machine_that_says_it_has_nothing_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = HostMemory(0, None, 1)
    monkeypatch.setattr(HostLimits.__init__, "__defaults__", (lambda: nothing,))
    case = exactness.build("llama")
    with hf_ckpt.apply(case.model, "full", offload=Offload(min_bytes=0)), pytest.raises(HostMemoryError):
        exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=offload.TO_HOST):
        exactness.step(case)
