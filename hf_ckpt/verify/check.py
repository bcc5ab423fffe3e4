"""One line of the table of `hf-ckpt verify`. Knows nothing of how it came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["pass", "fail", "skip"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was compared, and how it came out.

    Args:
        name: short name of the check, as in the table and in docs/verify.md.
        verdict: "pass", "fail", or "skip" where the recipe has nothing to compare.
        detail: one or two sentences: what was seen; for a failure the likely cause and what to do.
        figures: numbers behind the verdict, by names that carry their unit.
    """

    name: str
    verdict: Verdict
    detail: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All checks of one recipe.

    Args:
        title: the recipe, as the user named it.
        checks: in the order of the table.
        facts: what was run, as (name, text) rows for the top of the report.
    """

    title: str
    checks: tuple[Check, ...]
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def holds(self) -> bool:
        """Whether no check failed."""
        return all(check.verdict != "fail" for check in self.checks)
