"""How long each stage of the lean programme takes: summed from what was prepared, and its share where nothing was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import longctx
from benchmarks.on_gpu.measurements import (
    LEAN_COMPARED,
    LEAN_PREDICTED,
    LEAN_STEPS,
    LEAN_WARMUP,
    lean_effort,
    longest_keys,
    longest_options,
)
from benchmarks.on_gpu.setting import IMPORTS_S, Prepared, Stage
from benchmarks.side_by_side.contenders import chosen
from benchmarks.side_by_side.ours import warmup_of
from hf_ckpt.policy.plan import Plan

SLOWER = 1.2
"""Steps take up to so many times the predicted time: so did published ones on one A100 (`results/published.json`)."""
BUILD_S = 3.0
"""Weights of 7B drawn on the card, and adapters made."""
START_S = 15.0
"""Wheels unpacked, torch imported from a cold disk."""
CALIBRATION_S = 3.0
TRIAL_S = 14.0
"""A process of its own: imports, a context, weights in 4 bits."""


def planned(stages: Sequence[Stage], prepared: Prepared) -> dict[str, tuple[float, str]]:
    """Return seconds, imports included, and what they are from, by the names of stages of the lean programme.

    Args:
        stages: that there are.
        prepared: plans and predictions.
    """
    found = {"(start)": (START_S, "its share")}
    for stage in stages:
        if stage.share_s is not None:
            counted = _counted(stage.name, prepared)
            seconds = stage.share_s if counted is None else counted
            found[stage.name] = seconds + IMPORTS_S, "its share" if counted is None else "predictions"
    return found


def _counted(name: str, prepared: Prepared) -> float | None:
    """Return the seconds of a stage by its predictions; None where it has none."""
    if name == "predicted":
        return _of_predicted(prepared)
    case = name.removeprefix("side_by_side_")
    if case in LEAN_COMPARED:
        return _of_compared(case, prepared)
    if name.startswith("bracket_"):
        return _of_bracket(float(name.removeprefix("bracket_").removesuffix("gib")), prepared)
    return None


def _of_predicted(prepared: Prepared) -> float | None:
    found = [prepared.get(f"predicted/{name}") for name in LEAN_PREDICTED]
    if None in found:
        return None
    steps = sum(one["step_time_ms"] / 1e3 for one in found if one)
    return CALIBRATION_S + len(found) * BUILD_S + SLOWER * (LEAN_WARMUP + LEAN_STEPS) * steps


def _of_compared(case: str, prepared: Prepared) -> float | None:
    found = prepared.get(f"side_by_side/{case}")
    if found is None:
        return None
    return BUILD_S + SLOWER * sum(_turns(case, found["contenders"]))


def _turns(case: str, records: dict[str, Any]) -> Iterator[float]:
    """Yield the seconds of each contender: of its first look, and of its rounds."""
    effort = lean_effort()
    warmups = {one.name: one.num_warmup for one in chosen(LEAN_COMPARED[case].contenders)}
    for name, record in records.items():
        if "predicted" in record:
            warmup = warmups[name] if name in warmups else warmup_of(Plan.from_json(json.dumps(record["plan"])))
            num_steps = (warmup + 1) + effort.num_rounds * (max(effort.num_warmup, warmup) + effort.num_steps)
            yield num_steps * record["predicted"]["step_time_ms"] / 1e3


def _of_bracket(cap_gib: float, prepared: Prepared) -> float | None:
    options = longest_options(cap_gib, "bracket", device="cuda", is_small=False)
    found = [prepared.get(f"longest/{key}") for key in longest_keys(options)]
    if None in found:
        return None
    trials = [one["run_seconds"] * percent / 100 for one in found if one for percent in longctx.BRACKET]
    return len(trials) * TRIAL_S + SLOWER * sum(trials)
