"""The tables of one case: contenders on the published size and on the small twin, budgets, who could not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.pages.results import CPU, CUDA, PREDICTED, Json, Row, Run, ratio_to
from benchmarks.pages.words import NOT_YET, gib, gpu_command, links, mib, milliseconds, ratio, table

_LONGEST = 180
"""Characters of a reason."""
_WINNING = 1.02
"""Up to here a ratio is noise."""

Runs = Mapping[str, Run]


def published_size(case: str, runs: Runs) -> str:
    """Return the table of the published size: predicted next to measured.

    Args:
        case: of the benchmark.
        runs: by kind; without `cuda` the words for it stand in each row.
    """
    predicted, measured = runs.get(PREDICTED), runs.get(CUDA)
    simulated = ("predicted peak, GiB", "predicted step, ms", "predicted on the host, GiB")
    found = (
        ("measured peak, GiB", "measured step, ms", "measured step over none")
        if measured
        else (f"measured (`{gpu_command(case)}`)",)
    )
    # Plans are numbered in each run anew: two of one number are two plans.
    fixed = dict.fromkeys(name for run in (predicted, measured) if run for name in run.rows if not _is_plan(run, name))
    plans = [(run, name) for run in (predicted, measured) if run for name in run.rows if _is_plan(run, name)]
    rows = [
        (_title(name, predicted, measured), *_predicted(name, predicted), *_measured(name, measured)) for name in fixed
    ]
    rows += [
        (
            _title(name, run),
            *(_predicted(name, run) if run is predicted else (gib(run.rows[name].was_predicted_bytes), "", "")),
            *(_measured(name, run) if run is measured else (NOT_YET, *[""] * (len(found) - 1))),
        )
        for run, name in plans
    ]
    return table(("contender", *simulated, *found), rows)


def _is_plan(run: Run, name: str) -> bool:
    return run.rows[name].group == "auto"


def _title(name: str, *runs: Run | None) -> str:
    found = next(run.rows[name] for run in runs if run and name in run.rows)
    return f"**{found.title}**" if found.group == "auto" else found.title


def _predicted(name: str, run: Run | None) -> tuple[str, str, str]:
    row = run.rows.get(name) if run else None
    if row is None or row.peak_bytes is None:
        return "not predicted", "", ""
    return gib(row.peak_bytes), milliseconds(row.step_time_ms), gib(row.host_bytes) if row.host_bytes else ""


def _measured(name: str, run: Run | None) -> tuple[str, ...]:
    if run is None:
        return (NOT_YET,)
    row = run.rows.get(name)
    if row is None or row.not_run or row.peak_bytes is None:
        return NOT_YET if row is None or not row.not_run else "could not run", "", ""
    return gib(row.peak_bytes), milliseconds(row.step_time_ms), ratio(row.ratios.get("step_time"))


def twin(run: Run) -> str:
    """Return the table of the small twin, measured on the CPU: bytes and operations are exact there."""
    header = (
        *("contender", "measured peak, MiB", "predicted peak, MiB", "peak over none", "held over none"),
        *("operations over none", "time over none"),
    )
    rows = [
        (
            f"**{row.title}**" if row.group == "auto" else row.title,
            mib(row.peak_bytes),
            mib(row.was_predicted_bytes),
            *(ratio(row.ratios.get(name)) for name in ("peak", "held", "flops", "step_time")),
        )
        for row in run.ran
    ]
    return table(header, rows)


def budgets(run: Run) -> str:
    """Return the table of budgets: auto against the best that fits, by time, and on the CPU by operations too."""
    size, unit = (mib, "MiB") if run.kind == CPU else (gib, "GiB")
    word = "predicted" if run.is_predicted else "measured"
    header = [f"budget, {unit}", "set by"]
    columns = [(run.budgets_by_flops, "operations"), (run.budgets, f"{word} time")]
    shown = [(found, what) for found, what in columns if found]
    for _, what in shown:
        header += [f"best fixed, by {what}", "auto over it", "best that Trainer has, by " + what, "auto over it"]
    rows = []
    for at in range(max((len(found) for found, _ in shown), default=0)):
        budget = shown[0][0][at]
        rows.append(
            [size(budget["budget_bytes"]), run.title(budget["set_by"]), *_sides(run, [found[at] for found, _ in shown])]
        )
    return table(header, rows)


def _sides(run: Run, found: Sequence[Json]) -> Iterator[str]:
    for budget in found:
        for whom in ("fixed", "today"):
            yield run.title(budget.get(f"best_{whom}"))
            yield ratio(ratio_to(budget, whom)) or "only auto fits"


def not_run(runs: Sequence[Run]) -> str:
    """Return who could not run and why, reasons that several share once."""
    rows = []
    for run in runs:
        reasons: dict[str, list[str]] = {}
        for row in run.rows.values():
            if row.not_run:
                reasons.setdefault(_short(row.not_run), []).append(row.title)
        where = "predicted" if run.is_predicted else f"measured ({run.kind})"
        rows += [(where, "; ".join(titles), f"`{reason}`") for reason, titles in reasons.items()]
    return table(("run", "contender", "why"), rows) if rows else ""


def _short(reason: str) -> str:
    words = " ".join(reason.replace("`", "'").replace("|", "/").encode("ascii", "replace").decode().split())
    return words if len(words) <= _LONGEST else words[:_LONGEST].rsplit(" ", 1)[0] + " ..."


def no_help(run: Run) -> str:
    """Return, in sentences without figures, what of this library did not help in a run; empty if all of it did."""
    beaten, lost = list(_beaten(run)), list(_lost(run))
    sentences = [f"Beaten in memory and in {_currency(run)}: {', '.join(beaten)}."] if beaten else []
    sentences += [f"`auto` costs more {_currency(run)} than what fits as well: {', '.join(lost)}."] if lost else []
    return " ".join(sentences)


def _beaten(run: Run) -> Iterator[str]:
    """Fixed policies of ours that another eager contender beats in memory and in cost."""
    for row in run.ran:
        better = [other for other in run.ran if row.group == "ours" and _is_better(run, other, row)]
        if better:
            best = min(better, key=lambda other: _cost(run, other) or 0)
            yield f"`{row.title}` by `{best.title}`"


def _is_better(run: Run, other: Row, row: Row) -> bool:
    cost, of_other = _cost(run, row), _cost(run, other)
    if other.group in ("auto", "compiled") or cost is None or of_other is None:
        return False
    # What moves more to the host pays elsewhere.
    if row.peak_bytes is None or other.peak_bytes is None or other.host_bytes > row.host_bytes:
        return False
    if cost < of_other or row.peak_bytes < other.peak_bytes:
        return False
    return cost > _WINNING * of_other or row.peak_bytes > _WINNING * other.peak_bytes


def _cost(run: Run, row: Row) -> float | None:
    return row.ratios.get("flops") if run.kind == CPU else row.step_time_ms


def _currency(run: Run) -> str:
    return "operations" if run.kind == CPU else "time"


def _lost(run: Run) -> Iterator[str]:
    """Budgets at which a fixed contender that fits is faster than the plan."""
    for budget in run.budgets_by_flops if run.kind == CPU else run.budgets:
        over = ratio_to(budget, "fixed")
        if over is not None and over > _WINNING:
            yield f"`{run.title(budget['best_fixed'])}` in the memory of `{run.title(budget['set_by'])}`"


def sources(runs: Runs) -> str:
    """Return the links to all results of a case."""
    return links([name for run in runs.values() for name in run.names])
