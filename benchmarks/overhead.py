"""Policy "full" beside transformers' own full activation checkpointing: step time and peak memory, in one run.

The two do the same work, so that the ratio of their step times is what going through hf_ckpt costs, and their peaks
are equal. Contenders take turns, step by step, in one process; each pair of neighbouring steps gives one ratio.

    python benchmarks/overhead.py --case llama_38m
    python benchmarks/overhead.py --case llama_1b --device cuda
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM

import hf_ckpt

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.cases import CASES, build, step
from benchmarks.counts import flops
from benchmarks.environment import describe

RESULTS = Path(__file__).parent / "results"


@contextmanager
def transformers_full(model: LlamaForCausalLM):
    """Transformers' own full activation checkpointing, by the name that the installed version has."""
    new = hasattr(model, "activation_checkpointing_enable")
    enable = model.activation_checkpointing_enable if new else model.gradient_checkpointing_enable
    disable = model.activation_checkpointing_disable if new else model.gradient_checkpointing_disable
    enable()
    # It also asks for input gradients, which a full fine-tune has no use for; the plugin does not.
    model.disable_input_require_grads()
    try:
        yield
    finally:
        disable()


CONTENDERS: dict[str, Callable[[LlamaForCausalLM], AbstractContextManager[Any]]] = {
    "none": lambda model: nullcontext(),
    "transformers_full": transformers_full,
    "hf_ckpt_full": lambda model: hf_ckpt.apply(model, "full"),
}


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(model: nn.Module, inputs: dict[str, torch.Tensor], device: str) -> float:
    """Return the seconds of one step."""
    synchronize(device)
    start = time.perf_counter()
    step(model, inputs)
    synchronize(device)
    return time.perf_counter() - start


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


def measure(case: str, device: str, num_warmup: int, num_steps: int) -> dict[str, Any]:
    """Measure all contenders, in turn, in this process."""
    model, inputs = build(CASES[case], device)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    peaks: dict[str, list[int]] = {name: [] for name in CONTENDERS}
    facts: dict[str, dict[str, Any]] = {}
    for number in range(num_warmup + num_steps):
        # Back and forth, so that no contender always finds the caches as the same other one leaves them.
        for name in list(CONTENDERS)[:: 1 if number % 2 == 0 else -1]:
            with CONTENDERS[name](model):
                if not number:
                    facts[name] = {"flops": flops(model, inputs), "loss": step(model, inputs)}
                with Peak(device) as peak:
                    taken = timed(model, inputs, device)
            if number >= num_warmup:
                seconds[name].append(taken)
                peaks[name].append(peak.bytes)
        print(f"round {number + 1} of {num_warmup + num_steps}", file=sys.stderr, flush=True)
    contenders = {
        name: facts[name]
        | {
            "step_time_ms_median": 1e3 * statistics.median(seconds[name]),
            "step_time_ms_min": 1e3 * min(seconds[name]),
            "step_time_ms_max": 1e3 * max(seconds[name]),
            "peak_gib_median": statistics.median(peaks[name]) / 2**30,
        }
        for name in CONTENDERS
    }
    ratios = [ours / theirs for ours, theirs in zip(seconds["hf_ckpt_full"], seconds["transformers_full"], strict=True)]
    return {
        "case": case,
        "device": device,
        "num_warmup": num_warmup,
        "num_steps": num_steps,
        "contenders": contenders,
        "step_time_ratio_median": statistics.median(ratios),
        "step_time_ratio_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
        "peak_ratio": contenders["hf_ckpt_full"]["peak_gib_median"]
        / max(contenders["transformers_full"]["peak_gib_median"], 1e-9),
    }


def main() -> None:
    """Measure and write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, default="llama_38m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cpu" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        # glibc reads it at start: freed tensors go back at once, so that the process's peak is that of the tensors.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    result = {"environment": describe()} | measure(options.case, options.device, options.warmup, options.steps)
    out = options.out or RESULTS / f"overhead_{options.case}_{options.device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"step time over transformers': {result['step_time_ratio_median']:.3f}; peak: {result['peak_ratio']:.3f}")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
