"""How long until a command answers, here and in another checkout? CPU seconds of user time: to the verdict, and in all.

OMP_NUM_THREADS=1 python -m benchmarks answer_time --against ../before

Each command runs in a process of its own, first with an empty cache, then, here, again. `floor` imports what every
answer needs: torch, a model class and peft.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.environment import describe
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, WrongInputError, add_out, main

_ROOT = Path(__file__).parents[1]
_FLOOR = "import torch, transformers.models.llama.modeling_llama, peft"
COMMANDS = {
    "estimate_7b_lora": "estimate recipes/llama7b_lora.yaml --device rtx4090",
    "quick_7b_lora": "estimate recipes/llama7b_lora.yaml --device rtx4090 --quick",
    "plan_7b_lora": "plan recipes/llama7b_lora.yaml --memory-budget 22GiB",
    "estimate_70b_qlora_fsdp": "estimate recipes/llama70b_qlora_fsdp.yaml",
    "max_length_8b_longctx": "estimate recipes/llama3_8b_qlora_longctx.yaml --max-length",
}
_VERDICT = ("fits on", "does not fit", " fits")
_NO_VERDICT = "Searching what fits"


Seconds = dict[str, float]
"""Wall, user and system time."""


def measured(words: list[str], checkout: Path, cache: str) -> dict[str, Seconds]:
    """Run Python in a checkout; return the seconds until a line with a verdict is written, if any is, and in all."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "HF_CKPT_CACHE": cache, "PYTHONUNBUFFERED": "1"}
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    watched, found = psutil.Process(process.pid), dict[str, Seconds]()
    for line in process.stdout:
        if not found and any(word in line.lower() for word in _VERDICT) and not line.startswith(_NO_VERDICT):
            wall, taken = time.perf_counter() - begun, watched.cpu_times()
            found["until_verdict"] = {"wall": wall, "user": taken.user, "system": taken.system}
    # With what it has forked and waited for.
    _, _, usage = os.wait4(process.pid, 0)
    found["whole"] = {"wall": time.perf_counter() - begun, "user": usage.ru_utime, "system": usage.ru_stime}
    return {name: {kind: round(each, 3) for kind, each in seconds.items()} for name, seconds in found.items()}


def compared(name: str, checkouts: dict[str, Path]) -> dict[str, Any]:
    """Measure one command in each checkout, with an empty cache, and here again."""
    found: dict[str, Any] = {"command": f"hf-ckpt {COMMANDS[name]}"}
    for label, checkout in checkouts.items():
        with tempfile.TemporaryDirectory() as cache:
            words = ["-m", "hf_ckpt", *COMMANDS[name].split()]
            runs = {run: measured(words, checkout, cache) for run in ("cold", "again")[: 2 if label == "here" else 1]}
        found[label] = runs
        print(name, label, runs, flush=True)
    return found


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of this repository")
    parser.add_argument("--only", choices=COMMANDS, action="append", help="measure this command; may be given again")
    add_out(parser, RESULTS / "answer_time.json")


def run(options: Namespace) -> None:
    """Measure all commands and write the result."""
    checkouts = {"here": _ROOT}
    if options.against is not None:
        if not (options.against / "hf_ckpt").is_dir():
            raise WrongInputError(f"--against {options.against} holds no hf_ckpt. Name a checkout of this repository.")
        checkouts["before"] = options.against.resolve()
    floor = measured(["-c", _FLOOR], _ROOT, os.devnull)["whole"]
    print("floor", floor, flush=True)
    commands = {name: compared(name, checkouts) for name in options.only or COMMANDS}
    found = describe() | {"against": None, "seconds": {"floor": floor} | commands}
    if options.against is not None:
        # A result says which commit it was, not where that lay.
        found["command"] = found["command"].replace(str(options.against), "../before")
        git = ["git", "-C", str(options.against), "rev-parse", "HEAD"]
        found["against"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    write(options.out, found)


if __name__ == "__main__":
    sys.exit(main(__name__))
