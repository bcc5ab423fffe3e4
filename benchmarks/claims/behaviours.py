"""Claims about what happens or does not: under FSDP, to batch norms, to switches of transformers; and time on a CPU."""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_ckpt
from benchmarks.claims.reentrant_fsdp import ENGINES, WAYS
from benchmarks.claims.small import Chain, batch, llama
from benchmarks.step_costs import step

COLLECTIVES = "collectives_llama_tiny.json"
_RESULTS = Path(__file__).parents[1] / "results"
_SCRIPT = Path(__file__).with_name("reentrant_fsdp.py")
HANG_SECONDS = 60
_GATHERING = {
    "none": "none",
    "full": "full",
    "segments_of_2": "full, segment_size=2",
    "transformers_own": "transformers' own",
    "transformers_own_reentrant": "transformers' own, reentrant",
    "wrapper_around_the_shard": "CheckpointWrapper around the shard",
    "wrapper_around_the_shard_reentrant": "CheckpointWrapper around the shard, reentrant",
}
"""Of what `collectives.py` counted, by our name for it."""


# --- FSDP. ---


def fsdp_all_gathers() -> dict[str, Any]:
    """Claim: under FSDP checkpointing needs two all-gathers for each layer. Reads what `collectives.py` counted."""
    counted = json.loads((_RESULTS / COLLECTIVES).read_text())
    return {
        "case": "Llama of 4 layers on two processes, one unit for each layer and one or two for the rest: all-gathers "
        "of a step in forward and in backward, as benchmarks/collectives.py counted them; extra_per_layer: more than "
        "without checkpointing, for each layer",
        "result": COLLECTIVES,
        **{
            engine: {key: _gathers(counted[engine][name], counted[engine]["none"]) for key, name in _GATHERING.items()}
            for engine in ENGINES
        },
    }


def _gathers(row: dict[str, Any], none: dict[str, Any]) -> dict[str, Any]:
    forward, backward = (row[f"all_gathers_{phase}"] for phase in ("forward", "backward"))
    more = forward + backward - none["all_gathers_forward"] - none["all_gathers_backward"]
    return {"forward": forward, "backward": backward, "extra_per_layer": more / len(row["ffn_forwards"])}


def reentrant_fsdp() -> dict[str, Any]:
    """Claim: reentrant checkpointing hangs under FSDP. Two processes really try, under a timeout."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(_SCRIPT)]
    done = _lines_until(command, HANG_SECONDS)
    found = {(line["engine"], line["way"]): line for line in done}
    return {
        "case": "Llama of 4 layers, fully trained, two processes on gloo, two steps with reentrant checkpointing of "
        "every layer; is_equal: the gradients are bitwise those of none. finished is false where a way did not end in "
        "time",
        "timeout_s": HANG_SECONDS,
        **{
            engine: {
                way: {
                    "finished": (engine, way) in found,
                    "is_equal": found.get((engine, way), {}).get("is_equal", False),
                }
                for way in WAYS
            }
            for engine in ENGINES
        },
    }


def _lines_until(command: list[str], seconds: float) -> list[dict[str, Any]]:
    """Run a command for at most so long, and return the lines of JSON that it printed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # The launcher and its workers are a process group of their own.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


# --- Batch norms. ---

_NORM_CALLS: dict[str, Callable[..., Tensor]] = {
    "none": lambda function, hidden: function(hidden),
    "non_reentrant": lambda function, hidden: checkpoint(function, hidden, use_reentrant=False),
    "reentrant": lambda function, hidden: checkpoint(function, hidden, use_reentrant=True),
}


def batch_norm() -> dict[str, Any]:
    """Claim: recomputation updates the statistics of a batch norm twice. One step, and what the norm counted."""
    expected = _batch_norm_step("none")
    rows = {}
    for name in _NORM_CALLS:
        found = _batch_norm_step(name)
        rows[name] = {
            "num_batches_tracked": int(found["tracked"]),
            # The mean starts at 0 and goes a tenth of the way at each update: 0.1, then 0.19 of the batch's mean.
            "running_mean_ratio": round(float(found["mean"] / expected["mean"]), 6),
            "is_gradient_equal": torch.equal(found["gradient"], expected["gradient"]),
        }
    return {
        "case": "Linear, BatchNorm1d, tanh on 32 rows, one forward and backward; running_mean_ratio: the norm's "
        "running mean over that without checkpointing",
        **rows,
    }


def _batch_norm_step(name: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    linear, norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
    hidden = torch.randn(32, 8, requires_grad=True)
    loss: Any = _NORM_CALLS[name](nn.Sequential(linear, norm, nn.Tanh()), hidden).sum()
    loss.backward()
    assert linear.weight.grad is not None
    assert norm.num_batches_tracked is not None
    assert norm.running_mean is not None
    return {"tracked": norm.num_batches_tracked, "mean": norm.running_mean[0], "gradient": linear.weight.grad}


# --- Time. ---

_ROUNDS = 9
_WIDE = (256, 1024)
"""Of the chain: a tensor of 1 MiB, which the allocator of the C library gives back and asks for again."""


def recompute_or_store() -> dict[str, Any]:
    """Claim: recomputing may be faster than storing. Steps by turns on the CPU; time is a ratio only."""
    decoder, inputs = llama(layers=2), batch(1, 256)
    hidden = torch.ones(_WIDE, requires_grad=True)
    stores, recomputes = Chain(8, 24), Chain(8, 24, segment=1)

    def decoder_recomputes() -> None:
        with hf_ckpt.apply(decoder, "full", prove="off"):
            step(decoder, inputs)

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "decoder": (lambda: step(decoder, inputs), decoder_recomputes),
        "chain": (partial(_step_of, stores, hidden), partial(_step_of, recomputes, hidden)),
    }
    return {
        "case": "decoder: Llama of width 256, 2 layers, 1 x 256 tokens, float32, sdpa. chain: 8 layers of 24 times "
        f"relu on {_WIDE[0]} x {_WIDE[1]} numbers. One thread, steps without and with full checkpointing by turns: "
        "CPU time with over time without, and page faults of a step. These differ from run to run; for a GPU see the "
        "predictions",
        **{name: _by_turns(*pair) for name, pair in pairs.items()},
    }


def _step_of(chain: Chain, hidden: Tensor) -> None:
    loss: Any = chain(hidden).sum()
    loss.backward()


def _by_turns(store: Callable[[], object], recompute: Callable[[], object]) -> dict[str, Any]:
    ratios: list[float] = []
    faults: dict[str, list[int]] = {"store": [], "recompute": []}
    for _ in range(_ROUNDS + 1):
        stored, recomputed = _timed(store), _timed(recompute)
        ratios.append(recomputed[0] / stored[0])
        faults["store"].append(stored[1])
        faults["recompute"].append(recomputed[1])
    # The first round warms up.
    quartiles = statistics.quantiles(ratios[1:], n=4)
    return {
        "num_rounds": _ROUNDS,
        "time_ratio": {
            "median": quartiles[1],
            "min": min(ratios[1:]),
            "max": max(ratios[1:]),
            "quartiles": [quartiles[0], quartiles[2]],
        },
        "page_faults": {name: statistics.median(counts[1:]) for name, counts in faults.items()},
    }


def _timed(run: Callable[[], object]) -> tuple[float, int]:
    """Return the CPU seconds and the page faults of a step."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
    run()
    return time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
