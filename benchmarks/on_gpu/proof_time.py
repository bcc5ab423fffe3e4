"""Stage: what does the proof of the first step cost, in time and in memory?"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import nn

import hf_ckpt
from benchmarks.cases import CONFIGURATIONS, SHAPES, build_configuration, rows, small_configuration
from benchmarks.journal import Entry, Journal
from benchmarks.on_gpu.setting import Assembled, Setting
from benchmarks.step_costs import Bench, synchronize

_CASE = "llama_7b_lora_full"
_POLICIES = ("full", "selective")
_NUM_STEPS = 4


def collect(journal: Journal, setting: Setting) -> None:
    """Time the first steps of plans with and without their proof.

    Args:
        journal: takes an entry for each plan, with and without.
        setting: see there.
    """
    bench = Bench(partial(_built, setting))
    # What libraries do in their first step is nobody's.
    journal.entry("warm_up", partial(_steps, bench, None, "off", setting))
    for policy in _POLICIES:
        for prove in ("off", "first_step"):
            journal.entry(f"{policy}/{prove}", partial(_steps, bench, policy, prove, setting))


def assemble(journal: Journal, setting: Setting) -> Assembled:
    """Return the steps of each plan, and what the first one takes more with its proof than without."""
    result: dict[str, Any] = {"case": _CASE, "entries": journal.entries, "by_policy": {}}
    for policy in _POLICIES:
        without, proven = (journal.entries.get(f"{policy}/{prove}", {}) for prove in ("off", "first_step"))
        if "seconds" in without and "seconds" in proven:
            forward = min(without["forward_seconds"])
            more = proven["seconds"][0] - min(without["seconds"])
            result["by_policy"][policy] = {
                "forward_seconds": forward,
                "proof_seconds": more,
                "share_of_forward": more / forward,
                "more_peak_bytes": (
                    None if setting.device == "cpu" else proven["peak_bytes"][0] - without["peak_bytes"][0]
                ),
            }
    yield f"proof_{setting.device}.json", result


def _built(setting: Setting) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    configuration, shape = CONFIGURATIONS[_CASE], SHAPES[CONFIGURATIONS[_CASE].shape]
    if setting.is_small:
        configuration, shape = small_configuration(configuration)
    (row,) = rows(configuration, shape, 1)
    batch = {name: ids[None].to(setting.device) for name, ids in row.items()}
    return build_configuration(configuration, shape, setting.device), batch


def _steps(bench: Bench[Any], policy: str | None, prove: Any, setting: Setting) -> Entry:
    model, batch = bench.built
    found: dict[str, list[float]] = {"seconds": [], "forward_seconds": [], "peak_bytes": [], "losses": []}
    applied = None if policy is None else hf_ckpt.apply(model, policy, prove=prove)
    try:
        for _ in range(_NUM_STEPS):
            model.zero_grad(set_to_none=True)
            synchronize(setting.device)
            if setting.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            with torch.autocast(setting.device, torch.bfloat16):
                loss = model(**batch).loss
            synchronize(setting.device)
            found["forward_seconds"].append(time.perf_counter() - began)
            loss.backward()
            synchronize(setting.device)
            found["seconds"].append(time.perf_counter() - began)
            found["losses"].append(float(loss.detach()))
            if setting.device == "cuda":
                found["peak_bytes"].append(torch.cuda.max_memory_allocated())
    finally:
        if applied is not None:
            applied.remove()
    return found
