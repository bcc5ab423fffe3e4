"""Policy "full" against transformers' own full activation checkpointing: step time and peak memory, in one run.

The two do the same work, so that the ratio of their step times is what going through hf_ckpt costs, and their peaks
are equal. Contenders take turns in one process, each with a step to warm up before the one that is timed; the two of a
round give one ratio. Peaks are measured in a pass of their own: it empties the allocator's cache before each step,
which a timed step would pay for.

    python benchmarks/overhead.py --case llama_38m
    python benchmarks/overhead.py --case llama_1b --device cuda
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import hf_ckpt
from benchmarks.cases import LLAMAS, build_llama
from benchmarks.journal import NO_FIGURES, Entry, Journal
from benchmarks.result_files import carry_out
from benchmarks.runner import RESULTS, add_case, add_device, add_out, main
from benchmarks.side_by_side.theirs.transformers_own import enable, put_back
from benchmarks.step_costs import Bench, flops, step, timed

_NUM_PEAKS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
        device: `cpu` or `cuda`.
        case: of `LLAMAS`.
        num_warmup: steps of a turn before the timed one.
        num_rounds: timed steps of each contender.
    """

    device: str
    case: str = "llama_38m"
    num_warmup: int = 1
    num_rounds: int = 20


@contextmanager
def transformers_full(model: LlamaForCausalLM) -> Iterator[None]:
    """Transformers' own full activation checkpointing."""
    with put_back(model):
        enable(model)
        # It also asks for input gradients, which a full fine-tune has no use for; the plugin does not.
        model.disable_input_require_grads()
        yield


CONTENDERS: dict[str, Callable[[LlamaForCausalLM], AbstractContextManager[Any]]] = {
    "none": lambda model: nullcontext(),
    "transformers_full": transformers_full,
    "hf_ckpt_full": lambda model: hf_ckpt.apply(model, "full", prove="off"),
}


class Peak:
    """Highest memory of a block over what was there before: of the allocator on CUDA, resident on the CPU."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.bytes = 0

    def __enter__(self) -> Peak:
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            # Writing 5 makes the kernel forget the highest resident size so far (man 5 proc).
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _resident("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        highest = torch.cuda.max_memory_allocated() if self._device == "cuda" else _resident("VmHWM")
        self.bytes = highest - self._before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


# --- Entries and the result. ---


Built = tuple[LlamaForCausalLM, dict[str, Tensor]]
"""A model, and what it is called with."""


def peak(bench: Bench[Built], name: str, options: Options) -> Entry:
    """Return what a step of a contender needs, counted and as the highest memory of a few steps."""
    model, inputs = bench.built
    peaks = []
    with CONTENDERS[name](model):
        found = {"flops": flops(model, inputs), "loss": step(model, inputs)}
        for _ in range(_NUM_PEAKS):
            with Peak(options.device) as highest:
                step(model, inputs)
            peaks.append(highest.bytes)
    return found | {"peaks": peaks}


def turn(bench: Bench[Built], name: str, options: Options) -> Entry:
    """Return the seconds of a step that comes after others of the same contender."""
    model, inputs = bench.built
    with CONTENDERS[name](model):
        for _ in range(options.num_warmup):
            step(model, inputs)
        _, seconds = timed(model, inputs, options.device)
    return {"seconds": seconds}


def collect(journal: Journal, options: Options) -> None:
    """Measure all contenders, in turn.

    Args:
        journal: keeps `peak/<contender>` and `round_<n>/<contender>`.
        options: what.

    Raises:
        OutOfTimeError: the journal's time is over.
        DeviceFaultError: the device does not answer any more.
    """
    bench = Bench(partial(build_llama, LLAMAS[options.case], options.device))
    for name in CONTENDERS:
        journal.entry(f"peak/{name}", partial(peak, bench, name, options))
    for number in range(1, options.num_rounds + 1):
        # There and back, so that no contender always finds the caches as the same other one leaves them.
        for name in list(CONTENDERS)[:: 1 if number % 2 else -1]:
            if "peaks" in journal.entries[f"peak/{name}"]:
                journal.entry(f"round_{number}/{name}", partial(turn, bench, name, options))


def assemble(journal: Journal, options: Options) -> dict[str, Any]:
    """Return the result of the entries that are there."""
    seconds = {name: _seconds(journal, name, options) for name in CONTENDERS}
    contenders = {name: _figures(journal, name, list(seconds[name].values())) for name in CONTENDERS}
    ours, theirs = seconds["hf_ckpt_full"], seconds["transformers_full"]
    ratios = [ours[number] / theirs[number] for number in ours if number in theirs]
    our_peak, their_peak = (contenders[name].get("peak_gib_median") for name in ("hf_ckpt_full", "transformers_full"))
    return {
        "case": options.case,
        "device": options.device,
        "num_warmup": options.num_warmup,
        "num_steps": len(ratios),
        "contenders": contenders,
        "step_time_ratio_median": statistics.median(ratios) if ratios else None,
        "step_time_ratio_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
        # Of a tiny model on the CPU nothing shows in the process.
        "peak_ratio": our_peak / their_peak if our_peak is not None and (their_peak or 0) > 0 else None,
    }


def _seconds(journal: Journal, name: str, options: Options) -> dict[int, float]:
    """Return the seconds of each round in which a contender could be timed."""
    keys = {number: f"round_{number}/{name}" for number in range(1, options.num_rounds + 1)}
    entries = {number: journal.entries.get(key, {}) for number, key in keys.items()}
    return {number: entry["seconds"] for number, entry in entries.items() if "seconds" in entry}


def _figures(journal: Journal, name: str, seconds: list[float]) -> dict[str, Any]:
    entry = journal.entries.get(f"peak/{name}", {})
    figures = {key: entry[key] for key in ("flops", "loss", *NO_FIGURES) if key in entry}
    if seconds:
        figures |= {
            "step_time_ms_median": 1e3 * statistics.median(seconds),
            "step_time_ms_min": 1e3 * min(seconds),
            "step_time_ms_max": 1e3 * max(seconds),
        }
    if "peaks" in entry:
        figures["peak_gib_median"] = statistics.median(entry["peaks"]) / 2**30
    return figures


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_case(parser, LLAMAS, "llama_38m")
    add_device(parser)
    parser.add_argument("--warmup", type=int, default=1, help="steps of a turn before the timed one")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each contender")
    add_out(parser)


def run(asked: Namespace) -> None:
    """Measure and write one JSON."""
    if asked.device == "cpu" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        # glibc reads it at start: freed tensors go back at once, so that the process's peak is that of the tensors.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    options = Options(device=asked.device, case=asked.case, num_warmup=asked.warmup, num_rounds=asked.steps)
    out = asked.out or RESULTS / f"overhead_{options.case}_{options.device}.json"
    result = carry_out(out, partial(collect, options=options), partial(assemble, options=options))
    if result["step_time_ratio_median"] is not None:
        print(f"step time over transformers': {result['step_time_ratio_median']:.3f}; peak: {result['peak_ratio']}")
    print(f"written to {out}")


if __name__ == "__main__":
    sys.exit(main(__name__))
