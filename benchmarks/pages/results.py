"""The results of the side by side runs, read into one shape for measured and predicted ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREDICTED, CPU, CUDA = "predicted", "cpu", "cuda"
_MEASURED = re.compile(r"side_by_side_(?P<case>\w+?)_(?P<kind>cpu|cuda)(?P<part>_\w+)?\.json")
_PREDICTED = re.compile(r"predicted_(?P<case>\w+)\.json")

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender in one run. What a run does not know is None.

    Args:
        name: of the contender.
        title: in tables and pictures.
        group: one of `contender.GROUPS`.
        not_run: why there are no figures.
        budget_bytes: what a planned contender was given.
        peak_bytes: on the device.
        host_bytes: moved off the device.
        held_bytes: between forward and backward, beyond weights, optimizer state and inputs.
        step_time_ms: the median, or the predicted one.
        total_flops: of the step, optimizer included.
        ratios: to no checkpointing, as the result states them.
        timeline: (seconds, bytes) of a predicted step; of one on the CPU (share of its events, bytes).
        source: name of the file.
        was_predicted_bytes: the peak that was predicted for a measured step.
    """

    name: str
    title: str
    group: str
    not_run: str | None
    budget_bytes: int | None
    peak_bytes: int | None
    host_bytes: int
    held_bytes: int | None
    step_time_ms: float | None
    total_flops: int | None
    ratios: Json
    timeline: Sequence[tuple[float, int]]
    source: str
    was_predicted_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The results of a case on one kind of device: one JSON, and others for what needs an environment of its own.

    Args:
        names: of the files, the main one first.
        case: of the benchmark.
        kind: `predicted`, `cpu` or `cuda`.
        read: the main file.
        rows: by contender, in the order of the files.
    """

    names: tuple[str, ...]
    case: str
    kind: str
    read: Json
    rows: Mapping[str, Row]

    @property
    def is_predicted(self) -> bool:
        """Whether nothing of it was measured."""
        return self.kind == PREDICTED

    @property
    def ran(self) -> list[Row]:
        """The contenders that have figures."""
        return [row for row in self.rows.values() if row.not_run is None and row.peak_bytes is not None]

    @property
    def budgets(self) -> Sequence[Json]:
        """What each budget allows by time, by rising budget."""
        return _rising(self.read.get("budgets"))

    @property
    def budgets_by_flops(self) -> Sequence[Json]:
        """The same by counted operations, where the run has it."""
        return _rising(self.read.get("budgets_by_flops"))

    def title(self, name: str | None) -> str:
        """Return the title of a contender or of what is "just below" one, or its name where it has none here."""
        if name is None:
            return "none fits"
        below, _, contender = name.rpartition(" ")
        return f"{below} {self.rows[contender].title}".strip() if contender in self.rows else name


@dataclass(frozen=True, kw_only=True)
class Results:
    """Everything that the page is written from.

    Args:
        runs: all that are there, by case and kind.
        lengths: the result of `longctx_predict`, where it is there.
    """

    runs: Mapping[str, Mapping[str, Run]]
    lengths: Json | None


LENGTHS = "longctx_predicted.json"


def read_all(folder: Path, order: Sequence[str] = ()) -> Results:
    """Read a folder of results.

    Args:
        folder: of the JSONs.
        order: of the cases, where it matters; others follow by name.
    """
    found: dict[str, dict[str, list[Path]]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        if name := _MEASURED.fullmatch(path.name):
            found.setdefault(name["case"], {}).setdefault(name["kind"], []).append(path)
        elif name := _PREDICTED.fullmatch(path.name):
            found.setdefault(name["case"], {}).setdefault(PREDICTED, []).append(path)
    known = [*order, *(case for case in sorted(found) if case not in order)]
    runs = {
        case: {kind: run_of(paths, case, kind) for kind, paths in found[case].items()}
        for case in known
        if case in found
    }
    lengths = folder / LENGTHS
    return Results(runs=runs, lengths=json.loads(lengths.read_text(encoding="utf-8")) if lengths.is_file() else None)


def run_of(paths: Sequence[Path], case: str, kind: str) -> Run:
    """Read the files of a case and a kind of device.

    Args:
        paths: the main one first; the others add what could not run there.
        case: of the benchmark.
        kind: `predicted`, `cpu` or `cuda`.
    """
    read = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    rows: dict[str, Row] = {}
    for path, result in zip(paths, read, strict=True):
        for name, entry in result["contenders"].items():
            if name not in rows or rows[name].not_run:
                rows[name] = _row(name, entry, kind, path.name)
    return Run(names=tuple(path.name for path in paths), case=case, kind=kind, read=read[0], rows=rows)


def _rising(budgets: Sequence[Json] | None) -> Sequence[Json]:
    return sorted(budgets or (), key=lambda budget: int(budget["budget_bytes"]))


def ratio_to(budget: Json, whom: str) -> float | None:
    """Return how auto compares with the best contender at a budget.

    Args:
        budget: of a run.
        whom: `fixed` or `today`.
    """
    predicted = {"fixed": "step_time_ratio", "today": "step_time_ratio_today"}
    found = budget.get(f"ratio_to_{whom}", budget.get(predicted[whom]))
    return None if found is None else float(found)


def _row(name: str, entry: Json, kind: str, source: str) -> Row:
    figures = (entry.get("predicted") or {}) if kind == PREDICTED else entry
    return Row(
        name=name,
        title=entry["title"],
        group=entry["group"],
        not_run=entry.get("not_run"),
        budget_bytes=entry.get("budget_bytes"),
        peak_bytes=figures.get("peak_bytes"),
        host_bytes=figures.get("host_bytes") or 0,
        held_bytes=figures.get("held_bytes"),
        step_time_ms=_time(figures.get("step_time_ms")),
        total_flops=figures.get("total_flops") or sum((figures.get("num_flops") or {}).values()) or None,
        ratios=entry.get("ratios") or {},
        timeline=[(float(at), int(size)) for at, size in figures.get("timeline") or ()],
        source=source,
        was_predicted_bytes=None if kind == PREDICTED else (entry.get("predicted") or {}).get("peak_bytes"),
    )


def _time(found: float | Json | None) -> float | None:
    """Return the median of a measured time, or the predicted one."""
    if isinstance(found, Mapping):
        return found.get("median")
    return found
