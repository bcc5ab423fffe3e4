"""What several processes say together; with one process everything stands as it is."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import distributed

from hf_ckpt.verify.check import Check


def gathered(value: Any) -> list[Any]:
    """Return every process's value, in the order of their ranks."""
    if not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def is_first() -> bool:
    """Whether this is the process that speaks for all."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def is_one_to_speak(is_able: bool) -> bool:
    """Whether this is the first process that is able to; the first of all where none is."""
    able = [rank for rank, is_able in enumerate(gathered(is_able)) if is_able]
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return rank == (able[0] if able else 0)


def temporary_folder() -> Path:
    """Return a new folder, one for all processes; the first makes it and is to remove it."""
    folder: Path = gathered(Path(tempfile.mkdtemp(prefix="hf_ckpt-verify-")) if is_first() else None)[0]
    return folder


def combined(checks: Sequence[Check]) -> tuple[Check, ...]:
    """Return one table of all processes': a check holds only where it holds on each of them.

    Args:
        checks: this process's.

    Returns:
        The same on every process, in the order in which names first come up.
    """
    tables: list[dict[str, Check]] = gathered({check.name: check for check in checks})
    names = dict.fromkeys(name for table in tables for name in table)
    return tuple(_of_all([table.get(name) for table in tables]) for name in names)


def _of_all(checks: Sequence[Check | None]) -> Check:
    there = [(rank, check) for rank, check in enumerate(checks) if check is not None]
    rank, worst = min(there, key=lambda pair: (_ORDER[pair[1].verdict], pair[0]))
    where = f"[process {rank}] " if worst.verdict == "fail" and len(checks) > 1 else ""
    return Check(
        name=worst.name,
        verdict=worst.verdict,
        detail=where + worst.detail,
        figures=_worst_figures([check.figures for _, check in there]),
    )


_ORDER = {"fail": 0, "pass": 1, "skip": 2}


def _worst_figures(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for values in figures for name in values)
    # Of a cosine the lowest value is the worst, of everything else the highest.
    return {
        name: (min if "cosine" in name else max)(values[name] for values in figures if name in values) for name in names
    }
