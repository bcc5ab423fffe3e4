"""What `hf-ckpt verify` found, as a table for a person and as JSON for a program."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_ckpt.loading.versions import versions
from hf_ckpt.verify.check import Check, Report

_WORDS = {"pass": "pass", "fail": "FAIL", "skip": "skip"}
_NARROWEST = 60
_LONGEST_NAME = 34


def table(report: Report, *, width: int) -> str:
    """Return a report as text.

    Args:
        report: what was found.
        width: columns of the terminal.
    """
    width = max(width, _NARROWEST)
    parts = [f"hf-ckpt verify {report.title}", *_rows(report.facts, width), ""]
    parts += _rows([(check.name, f"{_WORDS[check.verdict]}  {check.detail}") for check in report.checks], width, hang=6)
    return "\n".join([*parts, "", _verdict(report), *_advice(report, width)])


def to_json(report: Report) -> str:
    """Return a report as JSON text, with the versions that it holds for."""
    return json.dumps({"versions": versions(), **as_json(report)}, indent=1, allow_nan=False)


def as_json(report: Report) -> dict[str, Any]:
    """Return a report as JSON types; `from_json` gives it back."""
    return {
        "recipe": report.title,
        "holds": report.holds,
        "facts": [{"name": name, "text": text} for name, text in report.facts],
        "checks": [
            {"name": check.name, "verdict": check.verdict, "detail": check.detail, "figures": _figures(check.figures)}
            for check in report.checks
        ],
    }


def from_json(read: Mapping[str, Any]) -> Report:
    """Return the report that `as_json` made."""
    return Report(
        title=read["recipe"],
        facts=tuple((fact["name"], fact["text"]) for fact in read["facts"]),
        checks=tuple(Check(**check) for check in read["checks"]),
    )


def _rows(pairs: Sequence[tuple[str, str]], width: int, hang: int = 0) -> Iterator[str]:
    """Yield pairs as two columns, the second one wrapped."""
    first = min(max((len(name) for name, _ in pairs), default=0), _LONGEST_NAME) + 4
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


def _verdict(report: Report) -> str:
    counts = {verdict: sum(check.verdict == verdict for check in report.checks) for verdict in _WORDS}
    skipped = f" ({counts['skip']} skipped: nothing to compare)" if counts["skip"] else ""
    return f"{counts['pass']} of {counts['pass'] + counts['fail']} checks hold{skipped}"


def _advice(report: Report, width: int) -> Iterator[str]:
    failed = [check.name for check in report.checks if check.verdict == "fail"]
    if not failed:
        return
    yield textwrap.fill(
        f"This plan changes what the recipe does: {', '.join(failed)}. Each line above says where it was seen first "
        "and what mends it; docs/verify.md explains each check. Until then train without the plan (checkpointing=null),"
        " or give the named layers mode none.",
        width,
        break_on_hyphens=False,
    )


def _figures(figures: Mapping[str, float]) -> dict[str, float | str]:
    # JSON has no infinity and no NaN.
    return {name: value if math.isfinite(value) else str(value) for name, value in figures.items()}
