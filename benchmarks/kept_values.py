"""What looking in every step at what is kept and held costs: the host in later steps, the device in a predicted step.

The host: the layer of a 7B with tiny tensors (`host_time`) under each mode, in this tree and in another one of the same
repository, in pairs of processes that take turns. `on_device`: as on a device, whose answers are read late.
The device: a step of Llama 2 7B with LoRA at 8,192 tokens, simulated as it is and without the sums of bits.

    python benchmarks/kept_values.py --before ../worktree_of_another_commit
    python benchmarks/kept_values.py --before ../worktree_of_another_commit --only full_lora --only tiles_lora
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, os.environ.get("KEPT_VALUES_TREE", str(Path(__file__).parents[1])))

import torch

import hf_ckpt
from benchmarks.cases import CASES
from benchmarks.cases import build as build_case
from benchmarks.environment import describe
from benchmarks.host_time import ADAPTERS, NUM_LAYERS, NUM_TOKENS, build, spread
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, add_out, main
from hf_ckpt.policy.policy import Policy
from hf_ckpt.regions import fingerprints
from hf_ckpt.regions.selective import kept_outputs
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.simulator import simulate_step

_NUM_WARMUP = 8
_STEPS = 20
"""Of one turn."""
_PAIRS = 4
"""Of processes: two of the same tree differ by up to 6 %, by where things came to lie in memory."""
_DEVICES = ("a100-80gb", "h100-80gb", "rtx4090")
_CASE = "llama2_7b_lora_8192"
_MODES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "ffn": {"policy": "ffn"},
    "selective": {"policy": "selective"},
    "selective_attention": {"policy": "selective_attention"},
    "segments": {"policy": "full", "segment_size": 2},
    "tiles": {"policy": "full", "tiles": 2},
}
_WAYS = {
    f"{mode}_{name}" + "_on_device" * is_late: (mode, name, is_late)
    for mode in _MODES
    for name in ADAPTERS
    for is_late in (False, True)
    if mode == "selective" or not is_late
}


# Functions, as a mock would hold what it is called with.
def _always(tensor: torch.Tensor) -> bool:
    return True


def _no_sums(tensors: Sequence[torch.Tensor], **options: bool) -> list[Any]:
    return []


def _simulated_sums(tensors: Sequence[torch.Tensor], *, is_sparse: bool = False, **options: bool) -> list[Any]:
    # A simulated step otherwise counts the host's time and the memory of them, not the device's time.
    if not options.get("reads_late", True):
        return []
    return [fingerprints._in_blocks(each.detach(), is_sparse).sum() for each in tensors]


def child(way: str) -> None:
    """Run a turn of steps for each line of the input, and print the host's microseconds per layer."""
    mode, name, is_late = _WAYS[way]
    torch.set_num_threads(1)
    tokens = torch.arange(NUM_TOKENS)[None]
    model = build(ADAPTERS[name], "cpu", NUM_LAYERS)
    hf_ckpt.apply(model, **_MODES[mode])
    # A tree that sums nothing does not ask.
    with mock.patch.object(fingerprints, "is_read_late", _always, create=True) if is_late else nullcontext():
        for _ in range(_NUM_WARMUP):
            _step(model, tokens)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(statistics.median(_step(model, tokens) for _ in range(_STEPS)) / NUM_LAYERS, flush=True)


def _step(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    start = time.process_time()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    taken = time.process_time() - start
    model.zero_grad(set_to_none=True)
    return 1e6 * taken


class _Turns:
    """A process that runs `child` on one tree."""

    def __init__(self, tree: Path, way: str) -> None:
        environment = {**os.environ, "KEPT_VALUES_TREE": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--child", way]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree
        )
        while "ready" not in self._answer():
            pass

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a child has ended")
        return line

    def take(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def host(before: Path, way: str, num_rounds: int) -> dict[str, Any]:
    """Return the host's microseconds per layer and step in both trees, and the ratio of neighbouring turns."""
    found: list[list[float]] = [[], []]
    for pair in range(_PAIRS):
        trees = [_Turns(tree, way) for tree in (before.resolve(), Path(__file__).resolve().parents[1])]
        for number in range(pair, num_rounds, _PAIRS):
            for at in (0, 1) if number % 2 else (1, 0):
                found[at].append(trees[at].take())
        for tree in trees:
            tree.end()
    ratios = [now / was for was, now in zip(*found, strict=True)]
    return {
        "before_us_per_layer": spread(found[0]),
        "after_us_per_layer": spread(found[1]),
        "after_over_before": spread(ratios),
    }


def predicted(device: str) -> dict[str, Any]:
    """Return step time and peak with the sums of bits, and without."""
    found: dict[str, dict[str, Any]] = {}
    for name, sums in (("with", _simulated_sums), ("without", _no_sums)):
        with mock.patch.object(kept_outputs, "bit_sums", sums):
            case = CASES[_CASE]
            memory = simulate_step(build_case(case, "meta"), Policy.parse("selective"), case.step, find_device(device))
        found[name] = {"step_time_ms": 1e3 * memory.timeline.seconds[-1], "peak_bytes": memory.peak_bytes}
    share = found["with"]["step_time_ms"] / found["without"]["step_time_ms"] - 1
    return {
        **found,
        "share_of_step": share,
        "more_peak_bytes": found["with"]["peak_bytes"] - found["without"]["peak_bytes"],
    }


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--before", type=Path, help="another tree of this repository")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", choices=list(_WAYS), action="append", help="of the host's times")
    parser.add_argument("--child", choices=list(_WAYS), help="be one of the two processes")
    add_out(parser, what=None)


def run(options: Namespace) -> None:
    """Measure and write one JSON."""
    if options.child:
        child(options.child)
        return
    result: dict[str, Any] = {"case": _CASE, "predicted": {device: predicted(device) for device in _DEVICES}}
    for device, found in result["predicted"].items():
        print(f"{device}: {100 * found['share_of_step']:.2f} % of a step, {found['more_peak_bytes']} bytes of its peak")
    if options.before is not None:
        result |= {"num_layers": NUM_LAYERS, "num_tokens": NUM_TOKENS, "num_rounds": options.rounds, "host": {}}
        for way in options.only or _WAYS:
            found = result["host"][way] = host(options.before, way, options.rounds)
            print(f"{way}: {found['after_over_before']['median']:.3f} of before", flush=True)
    environment = describe()
    if options.before is not None:
        # A result says which commit it was, not where that lay.
        environment["command"] = environment["command"].replace(str(options.before), "../before")
        git = ["git", "-C", str(options.before), "rev-parse", "HEAD"]
        result["before"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    path = options.out or RESULTS / "kept_values_cpu.json"
    write(path, {"environment": environment} | result)
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main(__name__))
