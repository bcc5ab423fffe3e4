"""What `hf-ckpt verify` found, as a table for a person and as JSON for a program."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_ckpt.estimate.tables import versions

Verdict = Literal["pass", "fail", "skip"]
_VERDICT_TEXTS = {"pass": "pass", "fail": "FAIL", "skip": "skip"}
_MIN_WIDTH = 60
_MAX_NAME_WIDTH = 34
_SHOWN = 3


@dataclass(frozen=True)
class Check:
    """One comparison and its verdict: one line of the table."""

    name: str  # as in the table and in docs/verify.md
    verdict: Verdict  # "skip" where the recipe has nothing to compare
    detail: str  # what was seen; for a failure the likely cause and what to do
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All checks of one recipe."""

    title: str  # the recipe, as the user named it
    checks: tuple[Check, ...]  # in the order of the table
    facts: tuple[tuple[str, str], ...] = ()  # what was run, as (name, text) rows for the top of the report

    @property
    def holds(self) -> bool:
        """Whether no check failed."""
        return all(check.verdict != "fail" for check in self.checks)

    def table(self, *, width: int) -> str:
        """Return the report as text for a terminal of `width` columns."""
        width = max(width, _MIN_WIDTH)
        parts = [f"hf-ckpt verify {self.title}", *_rows(self.facts, width), ""]
        parts += _rows(
            [(check.name, f"{_VERDICT_TEXTS[check.verdict]}  {check.detail}") for check in self.checks], width, hang=6
        )
        counts = {verdict: sum(check.verdict == verdict for check in self.checks) for verdict in _VERDICT_TEXTS}
        skipped = f" ({counts['skip']} skipped: nothing to compare)" if counts["skip"] else ""
        parts += ["", f"{counts['pass']} of {counts['pass'] + counts['fail']} checks hold{skipped}"]
        if failed := [check.name for check in self.checks if check.verdict == "fail"]:
            advice = (
                f"This plan changes what the recipe does: {', '.join(failed)}. Each line above says where it was seen "
                "first and what mends it; docs/verify.md explains each check. Until then train without the plan "
                "(checkpointing=null), or give the named layers mode none."
            )
            parts.append(textwrap.fill(advice, width, break_on_hyphens=False))
        return "\n".join(parts)

    def to_json(self) -> str:
        """Return the report as JSON text, with the versions that it holds for."""
        return json.dumps({"versions": versions(), **self.as_json()}, indent=1, allow_nan=False)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON types; `from_json` gives it back."""
        # JSON has no infinity and no NaN.
        figures = (
            {name: value if math.isfinite(value) else str(value) for name, value in check.figures.items()}
            for check in self.checks
        )
        return {
            "recipe": self.title,
            "holds": self.holds,
            "facts": [{"name": name, "text": text} for name, text in self.facts],
            "checks": [{**vars(check), "figures": shown} for check, shown in zip(self.checks, figures, strict=True)],
        }

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> Report:
        """Return the report that `as_json` made."""
        return cls(
            title=read["recipe"],
            facts=tuple((fact["name"], fact["text"]) for fact in read["facts"]),
            checks=tuple(Check(**check) for check in read["checks"]),
        )


# --- Parts of the table and of the JSON. ---


def _rows(pairs: Sequence[tuple[str, str]], width: int, hang: int = 0) -> Iterator[str]:
    """Yield pairs as two columns, the second one wrapped."""
    first = min(max((len(name) for name, _ in pairs), default=0), _MAX_NAME_WIDTH) + 4
    for name, text in pairs:
        margin = f"  {name}".ljust(first)
        if len(margin) > first:
            yield margin
            margin = " " * first
        yield textwrap.fill(
            text,
            width,
            initial_indent=margin,
            subsequent_indent=" " * (first + hang),
            break_on_hyphens=False,
            break_long_words=False,
        )


# --- Phrases of verdicts. ---


def listed(values: Iterable[object]) -> str:
    """Return the first few values, and how many there are beyond."""
    shown = [str(value) for value in values]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def numbered(indices: Sequence[int]) -> str:
    """Return "layer 3", "layers 0 to 3" or "layers 0, 2, 4 and 3 more"."""
    if len(indices) == 1:
        return f"layer {indices[0]}"
    is_range = list(indices) == list(range(indices[0], indices[-1] + 1))
    return f"layers {indices[0]} to {indices[-1]}" if is_range else f"layers {listed(indices)}"
