"""What a list of published points says of our accuracy: counts and quantiles, by what was measured and how."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.published.points import ENGINES, sources
from hf_ckpt.estimate.estimate import Fit
from hf_ckpt.simulation.devices import find_device

Record = dict[str, Any]

_MIB = 2**20
_USED_OF = 4
_WORDS = {2: "two", 4: "four", 8: "eight"}


def group_of(record: Record) -> str:
    """Return what a point counts for: single modules, steps on one GPU, or on more under one engine."""
    if "ranks" not in record:
        return "one module"
    ranks = record["ranks"]
    return (
        "a step on one GPU"
        if ranks == 1
        else f"a step on {_WORDS.get(ranks, ranks)} GPUs, {ENGINES[sources()[record['source']].engine]}"
    )


def summaries(records: Sequence[Record]) -> Iterator[Record]:
    """Yield the accuracy of each group of points, as JSON types: of what is allocated, and of what is reserved."""
    for name, judged in (("ratio", records), ("reserved_ratio", [each for each in records if not each.get("is_used")])):
        measured = [record for record in judged if record.get(name) is not None]
        for group in dict.fromkeys(map(group_of, measured)):
            ratios = [record[name] for record in measured if group_of(record) == group]
            yield {"what": name, "group": group} | _accuracy(ratios)
        if measured:
            yield {"what": name, "group": "all"} | _accuracy([record[name] for record in measured])


def _accuracy(ratios: Sequence[float]) -> Record:
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    return {
        "num_points": len(errors),
        "median_error": median(errors),
        **{
            f"share_within_{percent}_percent": sum(error <= percent / 100 for error in errors) / len(errors)
            for percent in (1, 2, 5)
        },
        "largest_error": errors[-1],
    }


NCCL = "NCCL"


def add_reserved_ratios(records: Sequence[Record]) -> dict[str, int]:
    """Compare what was reserved: with torch's figure, or, with CUDA's context added, with nvidia-smi's.

    Returns that context, in bytes, of each source that does not publish it, and what NCCL takes on top in all rows on
    several GPUs: the medians of what nvidia-smi showed beyond the prediction in some of the rows, chosen by the hash of
    their names (`is_used`), but for those where torch wants more than the card has. Those that are used are not judged.
    """
    shown = [record for record in records if record.get("published_smi_mib") and has_run(record)]
    for record in shown:
        is_chosen = hashlib.sha256(record["name"].encode()).digest()[1] % _USED_OF == 0
        source = sources()[record["source"]]
        has_room = record["wanted_bytes"] <= find_device(source.device).memory_bytes
        record["is_used"] = is_chosen and has_room and source.context_mib is None
    used = [record for record in shown if record["is_used"]]
    found = _medians((sources()[record["source"]].title, _beyond(record)) for record in used if record["ranks"] == 1)
    found |= _medians(
        (NCCL, _beyond(record) - context)
        for record in used
        if record["ranks"] > 1 and (context := found.get(sources()[record["source"]].title)) is not None
    )
    for record in records:
        if record.get("published_reserved_bytes"):
            record["reserved_ratio"] = record["predicted_reserved_bytes"] / record["published_reserved_bytes"]
    for record in shown:
        source = sources()[record["source"]]
        contexts = [found.get(source.title) if source.context_mib is None else source.context_mib * _MIB]
        contexts += [found.get(NCCL)] if record["ranks"] > 1 else []
        if None not in contexts:
            predicted = record["predicted_reserved_bytes"] + sum(filter(None, contexts))
            record["reserved_ratio"] = predicted / (record["published_smi_mib"] * _MIB)
    return found


def _beyond(record: Record) -> int:
    """Return what nvidia-smi showed beyond what torch is predicted to reserve."""
    return int(record["published_smi_mib"] * _MIB - record["predicted_reserved_bytes"])


def _medians(values: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the median of each name's values."""
    found: dict[str, list[int]] = {}
    for name, value in values:
        found.setdefault(name, []).append(value)
    return {name: round(median(each)) for name, each in found.items()}


def has_run(record: Record) -> bool:
    """Whether a step ran, and did not run out of memory: then it has a speed."""
    return record.get("published_tokens_per_second") is not None


def time_ratio(record: Record) -> float | None:
    """Return the predicted time of a step over the published one; None where there is none."""
    published = record["published_tokens_per_second"]
    return None if published is None else float(published / record["predicted_tokens_per_second"])


def time_summaries(records: Sequence[Record]) -> Iterator[Record]:
    """Yield the error of times by card, of points that constants were fitted to and of the others, as JSON types."""
    timed = [record for record in records if record.get("time_ratio") is not None]
    for card in dict.fromkeys(record["card"] for record in timed):
        for is_fitted in (True, False):
            found = [each for each in timed if each["card"] == card and each["is_fitted_time"] is is_fitted]
            if ratios := [record["time_ratio"] for record in found]:
                yield {"card": card, "is_fitted": is_fitted} | _error_of_times(ratios)
    if tested := [record["time_ratio"] for record in timed if not record["is_fitted_time"]]:
        yield {"card": "all", "is_fitted": False} | _error_of_times(tested)


def _error_of_times(ratios: Sequence[float]) -> Record:
    return {
        "num_points": len(ratios),
        "mean_error": fmean(abs(ratio - 1) for ratio in ratios),
        "mean_difference": fmean(ratio - 1 for ratio in ratios),
        "num_too_short": sum(ratio < 1 for ratio in ratios),
        "largest_error": max(abs(ratio - 1) for ratio in ratios),
    }


def answers(records: Iterable[Record]) -> Record:
    """Return how often "does it fit?" was answered right, of all steps."""
    steps = [record for record in records if "fits" in record]
    ran = list(filter(has_run, steps))
    failed = [record for record in steps if not has_run(record)]
    return {
        "num_ran": len(ran),
        "num_ran_but_does_not_fit": sum(record["fits"] == Fit.NO for record in ran),
        "num_ran_and_perhaps": sum(record["fits"] == Fit.PERHAPS for record in ran),
        "num_failed": len(failed),
        "num_failed_but_fits": sum(record["fits"] == Fit.YES for record in failed),
    }
