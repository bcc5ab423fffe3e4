"""A plugin of pytest for each of its worker processes: leaves out the cases that were run before, and sorts the others.

A worker whose device has failed ends: all further cases would fail with it. xdist starts another one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from benchmarks.children import die_with_parent
from benchmarks.journal import is_device_fault
from benchmarks.on_gpu.setting import CASES_DONE


def pytest_configure(config: pytest.Config) -> None:
    """Let a worker of xdist die with its parent."""
    if hasattr(config, "workerinput"):
        die_with_parent(os.getppid())
        config.pluginmanager.register(_EndsAfterFault())


class _EndsAfterFault:
    """Ends a worker of xdist behind a case in which its device has failed."""

    def __init__(self) -> None:
        self._has_failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, object, object]:
        """Look at the exception of a phase."""
        if call.excinfo is not None and is_device_fault(call.excinfo.value):
            self._has_failed = True
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """The case has been reported."""
        if self._has_failed:
            os._exit(1)


_COMPILED = ("liger", "flex")
"""In the names of cases whose kernels are compiled, which takes as long as many others: whoever cuts the time loses
these. The longest one is the last."""


# The last to be asked: other plugins sort too.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has an entry, and run last what is compiled."""
    done = set(json.loads(Path(os.environ[CASES_DONE]).read_text(encoding="utf-8")))
    left_out = [item for item in items if item.nodeid in done]
    if left_out:
        items[:] = [item for item in items if item.nodeid not in done]
        config.hook.pytest_deselected(items=left_out)
    items.sort(
        key=lambda item: max((1 + place for place, word in enumerate(_COMPILED) if word in item.name), default=0)
    )
