"""What every stage is given, and what a stage is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.journal import NO_FIGURES, Journal

CASES_DONE = "HF_CKPT_CASES_DONE"
"""Variable that leads pytest's workers to a file with the names of the tests that have an entry."""

EAGER = ("today", "elsewhere", "ours")
"""Groups of contenders that are compared by time."""
COMPILED = ("compiled",)
"""Groups that take their time to compile."""
OFFLOADED = ("full", "selective")
"""Policies whose copies to the host are measured."""

MOST_OF_SHARE = 1.3
"""A stage of the lean programme is stopped after so many times its share, so that one that is slow cannot take all."""
IMPORTS_S = 5.0
"""That the imports of a stage take, each of which is a process of its own."""


@dataclass(frozen=True)
class Prepared:
    """Plans and predictions that were made beforehand.

    Args:
        facts: for which card, by which code and versions.
        entries: by key, as `prepare` has them.
        differences: from what runs here, a line each.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)
    differences: tuple[str, ...] = ()

    def get(self, key: str) -> dict[str, Any] | None:
        """Return an entry; None where it could not be made, or was not.

        Args:
            key: of `prepare`.
        """
        found: dict[str, Any] | None = self.entries.get(key)
        return None if found is None or not NO_FIGURES.isdisjoint(found) else found


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how large stages run.

    Args:
        device: `cuda` or `cpu`.
        is_small: small twins in place of models of full size.
        prepared: plans and predictions.
        scratch: a folder for files that nobody needs afterwards.
        is_lean: what a quarter of an hour has room for; all that there is to measure if not.
    """

    device: str
    is_small: bool
    prepared: Prepared = field(default_factory=Prepared)
    scratch: Path = Path()
    is_lean: bool = True


Assembled = Iterable[tuple[str, dict[str, Any]]]
"""Results by the names of their files."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the programme.

    Args:
        name: on the command line and in results.
        question: that it answers.
        collect: measures it all, entry by entry. It takes everything from the journal and the setting.
        assemble: makes results of the entries that are there, on any machine.
        files: the names of these results at full size.
        limit_s: seconds after which it is stopped in one run of the long programme, so that others have their turn.
        share_s: its seconds of the lean programme on an H100, imports left out; None where it is not part of that.
        variables: of the environment, set before a device is touched.
    """

    name: str
    question: str
    collect: Callable[[Journal, Setting], None]
    assemble: Callable[[Journal, Setting], Assembled]
    files: tuple[str, ...]
    limit_s: float
    share_s: float | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def limit_in(self, setting: Setting) -> float:
        """Return the seconds after which it is stopped in one run of the programme.

        Args:
            setting: of the run.
        """
        # A small run is a test of the code: there it is the slow machine that sets the pace.
        if not setting.is_lean or setting.is_small or self.share_s is None:
            return self.limit_s
        return MOST_OF_SHARE * self.share_s + IMPORTS_S
