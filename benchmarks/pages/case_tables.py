"""What the results of all cases say, as rows of CSV: contenders, budgets, runs; and who did not help."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pages.results import CPU, Json, Results, Row, Run, ratio_to
from benchmarks.pages.words import case_title, csv_text, facts_of, installed, kind_words

CONTENDERS, BUDGETS, RUNS = "benchmarks-contenders.csv", "benchmarks-budgets.csv", "benchmarks-runs.csv"
NO_HELP = "benchmarks-what-did-not-help.csv"
"""The tables, in the folder `data` next to the page."""

_LONGEST = 180
"""Characters of a reason."""
_WINNING = 1.02
"""Up to here a ratio is noise."""


def tables(results: Results) -> dict[str, str]:
    """Return the tables next to the page, by the name of their file, as CSV."""
    runs = [run for of_case in results.runs.values() for run in of_case.values()]
    return {
        CONTENDERS: csv_text(row for run in runs for row in contenders(run)),
        BUDGETS: csv_text(row for run in runs for row in budgets(run)),
        RUNS: csv_text(map(_made_on, runs)),
        NO_HELP: csv_text(row for run in runs for row in no_help(run)),
    }


def contenders(run: Run) -> Iterator[Json]:
    """Yield the figures of each contender of a run: predicted or measured, never both but for `auto`'s own prediction.

    Those that could not run are among them, with the reason.
    """
    for row in run.rows.values():
        yield {
            **_of(run),
            "contender": row.title,
            "group": row.group,
            "peak_bytes": row.peak_bytes,
            "step_time_ms": _rounded(row.step_time_ms, 1),
            "host_bytes": row.host_bytes if row.peak_bytes is not None else None,
            # Operations and held bytes are counted on the small twin.
            **{
                f"{name}_over_none": _rounded(row.ratios.get(name), 4)
                for name in ("peak", "held", "flops", "step_time")
            },
            "budget_bytes": row.budget_bytes,
            "was_predicted_peak_bytes": row.was_predicted_bytes,
            "could_not_run": _short(row.not_run or ""),
            "result": row.source,
        }


def _rounded(number: float | None, digits: int) -> float | None:
    return None if number is None else round(number, digits)


def budgets(run: Run) -> Iterator[Json]:
    """Yield what each budget allows: auto against the best that fits, by time, and on the CPU by operations too."""
    for found, what in ((run.budgets_by_flops, "operations"), (run.budgets, "time")):
        for budget in found:
            yield {
                **_of(run),
                "by": what,
                "budget_bytes": budget["budget_bytes"],
                "set_by": run.title(budget["set_by"]),
                "best_fixed": run.title(budget.get("best_fixed")),
                "auto_over_best_fixed": _rounded(ratio_to(budget, "fixed"), 4),
                "best_of_trainer": run.title(budget.get("best_today")),
                "auto_over_best_of_trainer": _rounded(ratio_to(budget, "today"), 4),
                "result": run.names[0],
            }


def _made_on(run: Run) -> Json:
    """Return where a run was made, with which versions and which command."""
    environment = run.read["environment"]
    hardware = environment["hardware"]
    chip = hardware.get("gpu") or f"{hardware.get('cpu', 'CPU')}, {hardware.get('num_threads')} thread"
    step, command = facts_of(run), environment["command"]
    return {
        **_of(run),
        "step": step,
        "made_on": chip,
        "versions": installed(run),
        "command": command,
        "result": run.names[0],
    }


def _of(run: Run) -> Json:
    return {"case": case_title(run), "run": kind_words(run)}


def _short(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= _LONGEST else words[:_LONGEST].rsplit(" ", 1)[0] + " ..."


def no_help(run: Run) -> Iterator[Json]:
    """Yield what of this library did not help in a run."""
    for what, by, where in (*_beaten(run), *_lost(run)):
        yield {**_of(run), "what": what, "beaten_by": by, "in": where, "result": run.names[0]}


def _beaten(run: Run) -> Iterator[tuple[str, str, str]]:
    """Fixed policies of ours that another eager contender beats in memory and in cost."""
    for row in run.ran:
        better = [other for other in run.ran if row.group == "ours" and _is_better(run, other, row)]
        if better:
            best = min(better, key=lambda other: _cost(run, other) or 0)
            yield row.title, best.title, f"memory and {_currency(run)}"


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


def _lost(run: Run) -> Iterator[tuple[str, str, str]]:
    """Budgets at which a fixed contender that fits is faster than the plan."""
    for budget in run.budgets_by_flops if run.kind == CPU else run.budgets:
        over = ratio_to(budget, "fixed")
        if over is not None and over > _WINNING:
            where = f"{_currency(run)}, in the memory of {run.title(budget['set_by'])}"
            yield "auto", run.title(budget["best_fixed"]), where
