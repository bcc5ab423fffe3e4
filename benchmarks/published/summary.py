"""What a list of published points says of our accuracy: counts and quantiles, by what was measured and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from hf_ckpt.estimate.estimate import Fit

Record = dict[str, Any]


def group_of(record: Record) -> str:
    """Return what a point counts for: single modules, steps on one GPU, or sharded steps."""
    if "ranks" not in record:
        return "one module"
    return "a step on one GPU" if record["ranks"] == 1 else "a step on two GPUs, FSDP1"


def summaries(records: Sequence[Record]) -> Iterator[Record]:
    """Yield the accuracy of each group of points, as JSON types."""
    measured = [record for record in records if record["ratio"] is not None]
    for group in dict.fromkeys(map(group_of, measured)):
        yield {"group": group} | _accuracy(record for record in measured if group_of(record) == group)
    yield {"group": "all"} | _accuracy(measured)


def _accuracy(records: Iterable[Record]) -> Record:
    errors = sorted(abs(record["ratio"] - 1) for record in records)
    return {
        "num_points": len(errors),
        "median_error": median(errors),
        "share_within_1_percent": sum(error <= 0.01 for error in errors) / len(errors),
        "share_within_2_percent": sum(error <= 0.02 for error in errors) / len(errors),
        "largest_error": errors[-1],
    }


def answers(records: Iterable[Record]) -> Record:
    """Return how often "does it fit?" was answered right, of all steps."""
    steps = [record for record in records if "fits" in record]
    ran = [record for record in steps if record["published_bytes"] is not None]
    failed = [record for record in steps if record["published_bytes"] is None]
    return {
        "num_ran": len(ran),
        "num_ran_but_does_not_fit": sum(record["fits"] == Fit.NO for record in ran),
        "num_ran_and_perhaps": sum(record["fits"] == Fit.PERHAPS for record in ran),
        "num_failed": len(failed),
        "num_failed_but_fits": sum(record["fits"] == Fit.YES for record in failed),
    }
