"""When operators run: a device that works while the host issues, and that waits for units and for other ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_ckpt.simulation.devices import Device, find_device
from hf_ckpt.simulation.host_and_link_time import LaunchQueue

pytestmark = pytest.mark.core

H200 = find_device("h200")
# 100 microseconds for a unit; a collective of 1 MB takes 10.
SHARED = replace(H200, unit_seconds=1e-4, rank_link=1e11, link_efficiency=1.0)


def issued(device: Device, busy: list[float], *, records_graph: bool = True) -> list[float]:
    """Return the microseconds of operators that keep the device busy for so many."""
    queue = LaunchQueue(device)
    return [round(1e6 * queue.take(1e-6 * us, records_graph=records_graph), 3) for us in busy]


def test_device_waits_for_a_host_that_is_slower() -> None:
    # 10 microseconds to issue, 1 to run.
    assert issued(H200, [1, 1, 1]) == [11.0, 10.0, 10.0]


def test_host_runs_ahead_of_a_device_that_is_slower() -> None:
    # 10 microseconds to issue, 30 to run: only the first is waited for.
    assert issued(H200, [30, 30, 30]) == [40.0, 30.0, 30.0]


def test_small_operators_behind_a_large_one_are_issued_while_it_runs() -> None:
    # 100 microseconds of work hide the issuing of ten small operators and some.
    assert issued(H200, [100, *[1] * 12]) == [110.0, *[1.0] * 11, 10.0]


def test_backward_is_issued_faster() -> None:
    assert issued(H200, [1, 1, 1], records_graph=False) == [7.0, 6.0, 6.0]


def test_times_add_up_to_what_the_slower_of_host_and_device_needs() -> None:
    busy = [3.0, 25.0, 1.0, 40.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert sum(issued(H200, busy)) == pytest.approx(max(10 * 10 + 2, 10 + sum(busy)))


def test_operators_that_are_taken_at_once_take_what_they_take_one_by_one() -> None:
    busy = [3e-6, 25e-6, 1e-6, 40e-6, *[2e-6] * 12]
    kinds = [{"records_graph": number % 3 > 0, "is_intercepted": number % 5 == 0} for number in range(len(busy))]
    single, several = LaunchQueue(H200), LaunchQueue(H200)
    one_by_one = [single.take(each, **kind) for each, kind in zip(busy, kinds, strict=True)]
    hosts = [several.issue_seconds(**kind) for kind in kinds]
    halves = [several.take_all(hosts[part], busy[part]) for part in (slice(0, 7), slice(7, None))]
    assert [*halves[0], *halves[1]] == one_by_one


def test_cpu_issues_and_works_in_turn() -> None:
    assert issued(replace(H200, is_cuda=False), [30, 30]) == [40.0, 40.0]


# --- Units and other ranks. ---


def us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def test_the_host_needs_time_for_each_unit() -> None:
    queue = LaunchQueue(SHARED)
    assert us(queue.gather(10**6)) == 110.0
    # Work that was issued before hides it, and not what is sent.
    queue.take(500e-6, records_graph=True)
    assert us(queue.gather(10**6)) == 10.0
    assert us(LaunchQueue(replace(SHARED, is_cuda=False)).gather(10**6)) == 10.0


def passed(*, limits_units: bool) -> list[float]:
    """Return the microseconds of an operator of 1,000 in each of four units."""
    queue, taken = LaunchQueue(SHARED, limits_units=limits_units), []
    for _ in range(4):
        waited = queue.gather(0)
        taken.append(us(waited + queue.take(1e-3, records_graph=True)))
        queue.let_go()
    return taken


def test_a_limited_host_is_never_more_than_two_units_ahead() -> None:
    assert passed(limits_units=False) == [1110.0, 1000.0, 1000.0, 1000.0]
    # It waits for the first unit, while the second runs: that hides the third's 100.
    assert passed(limits_units=True) == [1110.0, 1000.0, 1000.0, 1000.0]
    # Units without work hide nothing: the host waits for all that runs before it goes on.
    queue = LaunchQueue(SHARED, limits_units=True)
    queue.take(1e-3, records_graph=True)
    waits = []
    for _ in range(4):
        waits.append(us(queue.gather(0)))
        queue.let_go()
    assert waits == [0.0, 0.0, 100.0, 100.0]


def test_gradients_are_sent_while_the_device_goes_on() -> None:
    queue = LaunchQueue(SHARED)
    queue.reduce(10**7)
    assert us(queue.take(40e-6, records_graph=False)) == 46.0
    assert us(queue.finish_reducing()) == 54.0
    assert us(queue.finish_reducing()) == 0.0


def test_device_waits_for_a_host_that_handles_gradients_in_python() -> None:
    queue = LaunchQueue(SHARED)
    queue.take(40e-6, records_graph=False)
    # 6 microseconds a call: the first 40 are hidden.
    assert us(queue.reduce(0, num_calls=10)) == 20.0
    assert us(queue.reduce(0)) == 0.0
