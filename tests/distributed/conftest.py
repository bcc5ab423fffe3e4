"""One launch for the whole folder: every process runs the same tests, and a test fails on all when it fails on one.

Only rank 0 prints; where a test fails on another rank, its report stands in rank 0's. Tests marked `distributed` run in
plain pytest: they start processes of their own, or need none; all others need the launch.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
from _pytest._io import TerminalWriter
from accelerate.state import AcceleratorState

from tests.distributed.ranks import Ranks

COMMAND = "torchrun --nproc-per-node 2 -m pytest tests/distributed"
TEST_TIMEOUT_S = 120

RANKS = Ranks() if "TORCHELASTIC_RUN_ID" in os.environ else None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if RANKS is None:
        return
    RANKS.connect()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if RANKS.rank and reporter is not None:
        # Its standard error stays: what a crash leaves there is nowhere else.
        reporter._tw = TerminalWriter(io.StringIO())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent):
            continue
        starts_its_own = item.get_closest_marker("distributed") is not None
        if not starts_its_own:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
        if RANKS is None and not starts_its_own:
            item.add_marker(pytest.mark.skip(reason=f"needs two processes: {COMMAND}"))
        elif RANKS is not None and starts_its_own:
            item.add_marker(pytest.mark.skip(reason="starts processes of its own: pytest tests/distributed"))
        elif RANKS is not None and RANKS.size != 2 and (two := item.get_closest_marker("two")):
            item.add_marker(pytest.mark.skip(reason=f"needs two processes: {two.args[0]}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return report if RANKS is None else _agreed(RANKS, report)


def _agreed(ranks: Ranks, report: pytest.TestReport) -> pytest.TestReport:
    """Return the report as it is on all ranks: failed when it failed on one."""
    mine = {"test": f"{report.nodeid} ({report.when})", "failed": report.failed, "text": report.longreprtext}
    reports = [json.loads(text) for text in ranks.exchange(json.dumps(mine))]
    if len({other["test"] for other in reports}) > 1:
        pytest.exit(f"The ranks run different tests: {[other['test'] for other in reports]}", returncode=1)
    failed = {rank: other["text"] for rank, other in enumerate(reports) if other["failed"]}
    if failed:
        ranks.reconnect()
    if failed and not report.failed:
        report.outcome = "failed"
        report.longrepr = "\n".join(f"failed on rank {rank}:\n{text}" for rank, text in failed.items())
    else:
        report.sections += [(f"rank {rank}", text) for rank, text in failed.items() if rank != ranks.rank]
    return report


@pytest.fixture(autouse=True, scope="session")
def _no_rank_is_ended_by_another() -> Iterator[None]:
    """Leave it to the reports to tell of a failure on another rank: the watch would end the tests of this one.

    In one process there is no other rank, and tests of the watch follow in the same session.
    """
    with nullcontext() if RANKS is None else mock.patch("hf_ckpt.distributed.watchdog.Watchdog._end"):
        yield


@pytest.fixture(autouse=True)
def _state_of_accelerate_is_put_back() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


_exit_status = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_exit_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if RANKS is not None:
        RANKS.leave(config.stash.get(_exit_status, 1))
