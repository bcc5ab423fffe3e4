"""The suite behind `make bench`: what runs on a CPU, to be compared with the committed results.

Everything runs anew, in ten minutes: what is timed alone, then what is only counted, two at a time.

    python -m benchmarks.side_by_side.suite --out runs/bench
    python -m benchmarks.side_by_side.suite --case llama2_7b_lora_2048
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.cases import CASES
from benchmarks.runner import add_case, add_out, main

ROOT = Path(__file__).parents[2]
TIMED = "llama2_7b_lora_2048"
COUNTED = (
    "llama2_7b_lora_2048_eager",
    "llama31_8b_qlora_8192",
    "llama32_1b_full_2048",
    "olmoe_7b_lora_2048",
)
_RUN = ("-m", "benchmarks.side_by_side.run")
_EAGER = ("today", "elsewhere", "ours")


@dataclass(frozen=True)
class Slice:
    """One process, and the result that it writes.

    Args:
        result: name of the file.
        words: what Python is given, less the place of the result.
        takes_file: whether `--out` is the file; else its folder.
        is_timed: whether it needs the machine for itself.
    """

    result: str
    words: tuple[str, ...]
    takes_file: bool = False
    is_timed: bool = False


def slices_of(case: str | None = None) -> Iterator[Slice]:
    """Yield what `make bench` runs: all that documents quote of what was counted or measured on a CPU.

    Args:
        case: one whose twin alone is measured, times and all; all of it if left out.
    """
    timed = case or TIMED
    yield Slice(f"side_by_side_{timed}_cpu.json", (*_RUN, "--case", timed), is_timed=True)
    if case is not None:
        return
    yield Slice("claims_cpu.json", ("-m", "benchmarks.claims.measure"), takes_file=True)
    for counted in COUNTED:
        # Plans are compared by time: there is none where all is counted.
        words = (*_RUN, "--case", counted, *_chosen(_EAGER), "--rounds", "0", "--budgets", "0")
        yield Slice(f"side_by_side_{counted}_cpu.json", words)
    yield Slice("modes_llama_38m.json", ("benchmarks/modes.py", "--case", "llama_38m"), takes_file=True)
    # --standalone: on a port that is free.
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    yield Slice("collectives_llama_tiny.json", (*launch, "benchmarks/collectives.py"), takes_file=True)


def _chosen(groups: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for group in groups for word in ("--contender", group))


def run_slices(slices: list[Slice], out: Path) -> list[str]:
    """Run slices: the timed ones one after the other, then the others two at a time. Return those that failed.

    Args:
        slices: what to run.
        out: folder of the results.
    """
    out.mkdir(parents=True, exist_ok=True)
    codes = {one.result: _run(one, out) for one in slices if one.is_timed}
    others = [one for one in slices if not one.is_timed]
    with ThreadPoolExecutor(max_workers=2) as pool:
        codes |= zip([one.result for one in others], pool.map(partial(_run, out=out), others), strict=True)
    return [result for result, code in codes.items() if code]


def _run(one: Slice, out: Path) -> int:
    print(f"{one.result}: begins", flush=True)
    began = time.monotonic()
    place = out / one.result if one.takes_file else out
    words = [sys.executable, *one.words, "--out", str(place)]
    code = subprocess.run(words, cwd=ROOT, env=_surroundings(), check=False).returncode
    print(f"{one.result}: {'failed' if code else 'done'} in {time.monotonic() - began:.0f} s", flush=True)
    return code


def _surroundings() -> dict[str, str]:
    """Return the environment of a slice: no hub, and one thread, which is also what results were made with."""
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
    return os.environ | fixed


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_case(parser, CASES, None, help="the usual ones if left out")
    add_out(parser, ROOT / "runs" / "bench", "folder of the results")


def run(options: Namespace) -> int:
    """Run all of it; return 1 if anything failed."""
    failed = run_slices(list(slices_of(options.case)), options.out.resolve())
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(__name__))
