"""The suites behind `make bench` and `make bench-gpu`: what to run, one process after the other, and what is left.

On the CPU everything runs anew, in ten minutes, and is compared with the committed results. On a GPU each part of a
case is a slice of less than eight minutes with a result of its own; what has a result is skipped, so that the suite
goes on where it stopped.

    python -m benchmarks.side_by_side.suite --device cpu --out runs/bench
    python -m benchmarks.side_by_side.suite --device cuda --case llama2_7b_lora_2048
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.side_by_side.cases import CASES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ON_CPU = (
    "llama2_7b_lora_2048",
    "llama2_7b_lora_2048_eager",
    "llama31_8b_qlora_8192",
    "llama32_1b_full_2048",
    "olmoe_7b_lora_2048",
)
_RUN = ("-m", "benchmarks.side_by_side.run")
_SLICE_S = 420
"""After so many seconds of a slice no further round begins."""
_PARTS = {
    # Eager contenders and plans in one run: only there are their times compared.
    "": ("today", "elsewhere", "ours"),
    "_compiled": ("compiled",),
}
"""By the end of a result's name: groups of contenders. `none` is in all of them."""


@dataclass(frozen=True)
class Slice:
    """One process, and the result that it writes.

    Args:
        result: name of the file.
        words: what Python is given, less the place of the result.
        takes_file: whether `--out` is the file; else its folder.
    """

    result: str
    words: tuple[str, ...]
    takes_file: bool = False


def cpu_slices(cases: tuple[str, ...] = ON_CPU) -> Iterator[Slice]:
    """Yield what `make bench` runs: all that documents quote of what was counted or measured on a CPU.

    Args:
        cases: whose twins are compared.
    """
    for case in cases:
        yield Slice(f"side_by_side_{case}_cpu.json", (*_RUN, "--case", case))
    yield Slice("claims_cpu.json", ("-m", "benchmarks.claims.measure"), takes_file=True)
    yield Slice("modes_llama_38m.json", ("benchmarks/modes.py", "--case", "llama_38m"), takes_file=True)
    # --standalone: on a port that is free.
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    yield Slice("collectives_llama_tiny.json", (*launch, "benchmarks/collectives.py"), takes_file=True)


def gpu_slices(cases: tuple[str, ...]) -> Iterator[Slice]:
    """Yield what `make bench-gpu` runs.

    Args:
        cases: at their real size.
    """
    for case in cases:
        for suffix, groups in _PARTS.items():
            chosen = [word for group in groups for word in ("--contender", group)]
            limits = ("--limit", str(_SLICE_S), "--suffix", suffix)
            budgets = () if not suffix else ("--budgets", "0")
            words = (*_RUN, "--device", "cuda", "--case", case, *chosen, *limits, *budgets)
            yield Slice(f"side_by_side_{case}_cuda{suffix}.json", words)


def left(slices: list[Slice], out: Path) -> list[Slice]:
    """Return the slices that have no result yet.

    Args:
        slices: of a suite.
        out: folder of the results.
    """
    return [one for one in slices if not (out / one.result).is_file()]


def run(slices: list[Slice], out: Path) -> list[str]:
    """Run slices one after the other; return the names of those that failed.

    Args:
        slices: what to run.
        out: folder of the results.
    """
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for number, one in enumerate(slices, 1):
        print(f"[{number} of {len(slices)}] {one.result}", flush=True)
        began = time.monotonic()
        place = out / one.result if one.takes_file else out
        done = subprocess.run(
            [sys.executable, *one.words, "--out", str(place)], cwd=ROOT, env=_surroundings(), check=False
        )
        print(f"    {'failed' if done.returncode else 'done'} in {time.monotonic() - began:.0f} s", flush=True)
        if done.returncode:
            failed.append(one.result)
    return failed


def _surroundings() -> dict[str, str]:
    """Return the environment of a slice: no hub, and one thread, which is also what results were made with."""
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
    return os.environ | fixed


def main() -> None:
    """Run a suite; exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", action="append", choices=CASES, help="repeat it; the usual ones if left out")
    parser.add_argument("--out", type=Path, help="folder; of a GPU's results benchmarks/results if left out")
    parser.add_argument("--slices", type=int, help="stop after so many")
    options = parser.parse_args()
    if options.device == "cpu":
        out = options.out or ROOT / "runs" / "bench"
        slices = list(cpu_slices(tuple(options.case or ON_CPU)))
    else:
        out = options.out or RESULTS
        slices = left(list(gpu_slices(tuple(options.case or CASES))), out)
    failed = run(slices[: options.slices], out.resolve())
    for one in slices[len(slices) if options.slices is None else options.slices :]:
        print(f"still to run: {one.result}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
