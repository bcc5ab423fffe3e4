"""Stage: the tests of tests/gpu, each case an entry that is there when the case ends."""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks.journal import Journal
from benchmarks.on_gpu.identity import ROOT
from benchmarks.on_gpu.setting import CASES_DONE, Assembled, Setting

NUM_WORKERS = 8
"""Cases are small: a device has room for several, and most of their time is the host's, which has 16 cores."""
CASE_LIMIT_S = 120
_NUM_TRIES = 4
# A worker whose device fails takes along the case that it was given next.

_CRASHED = "???"
# What xdist has in the place of a phase where a worker ended in the middle of a case.


def collect(journal: Journal, setting: Setting) -> None:
    """Run the tests that have no entry yet.

    Args:
        journal: takes an entry for each case.
        setting: a few cases on the CPU where it is small.

    Raises:
        RuntimeError: pytest could not run them.
    """
    done = setting.scratch / "cases_done.json"
    os.environ[CASES_DONE] = str(done)
    os.chdir(ROOT)
    # A machine may have plugins of which nobody here knows what they do.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for _ in range(_NUM_TRIES):
        done.write_text(json.dumps(list(journal.entries)), encoding="utf-8")
        reporter = _Reporter(journal)
        code = pytest.main(_words(setting), plugins=[reporter])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"pytest ended with {pytest.ExitCode(code).name}")
        if not reporter.num_not_begun:
            break


def _words(setting: Setting) -> list[str]:
    """Return pytest's command line."""
    plugins = ["benchmarks.on_gpu.cases_left", "no:cacheprovider"]
    words = ["-q"]
    if setting.device == "cuda":
        # Versions of drivers and libraries may warn of what nobody here has seen: it is printed, and fails no case.
        words += ["-W", "default"]
    if find_spec("pytest_timeout"):
        plugins.append("pytest_timeout")
        words += [f"--timeout={CASE_LIMIT_S}", "--timeout-method=thread"]
    if setting.device != "cuda":
        words += ["-m", "not gpu", "-k", "llama and nested or dropout_draws", "tests/gpu/test_exact_on_device.py"]
    else:
        words += ["-m", "gpu", "tests/gpu"]
        if find_spec("xdist"):
            plugins.append("xdist.plugin")
            words += ["-n", str(NUM_WORKERS)]
    return words + [word for name in plugins for word in ("-p", name)]


def assemble(journal: Journal, setting: Setting) -> Assembled:
    """Return how many cases passed, and why others did not."""
    outcomes = Counter("failed" if "died" in found else found["outcome"] for found in journal.entries.values())
    wanting = {
        name: found.get("died") or found.get("text", "")
        for name, found in journal.entries.items()
        if found.get("outcome") != "passed"
    }
    result = {"num_cases": len(journal.entries), "outcomes": dict(outcomes), "cases_that_did_not_pass": wanting}
    yield f"exactness_{setting.device}.json", result


class _Reporter:
    """Makes an entry of each case, in the process that hears from all workers.

    Args:
        journal: takes them.

    Attributes:
        num_not_begun: how many cases were lost with a worker that ended before it began them.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._found: dict[str, dict[str, Any]] = {}
        self.num_not_begun = 0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A case begins."""
        self._found[nodeid] = {"outcome": "passed", "took_s": 0.0}
        self._journal.begin(nodeid, 2.0 * CASE_LIMIT_S)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of it has ended."""
        if report.when == _CRASHED and report.nodeid not in self._found:
            self.num_not_begun += 1
            return
        found = self._found.setdefault(report.nodeid, {"outcome": "passed", "took_s": 0.0})
        found["took_s"] = round(found["took_s"] + report.duration, 3)
        if report.outcome != "passed" and found["outcome"] != "failed":
            found |= {"outcome": report.outcome, "text": _text(report)}
        if report.when == _CRASHED:
            self._end(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """It has ended."""
        self._end(nodeid)

    def _end(self, nodeid: str) -> None:
        if nodeid in self._found:
            self._journal.end(nodeid, self._found.pop(nodeid))


def _text(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return report.longreprtext[-4000:]
