"""Ways to save activation memory, compared: one case, all contenders in turn in one process, one JSON.

python -m benchmarks.side_by_side.run --case llama2_7b_lora_2048 --device cuda
python -m benchmarks.side_by_side.run --case llama2_7b_lora_2048             # its small twin, on the CPU
python -m benchmarks.side_by_side.run --list
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.cases import CASES
from benchmarks.result_files import carry_out
from benchmarks.runner import RESULTS, WrongInputError, add_case, add_device, add_out, main
from benchmarks.side_by_side.contender import Contender
from benchmarks.side_by_side.contenders import CONTENDERS, chosen
from benchmarks.side_by_side.measure import Effort, assemble, collect

# Read by glibc at start: memory that was let go stays mapped, so that no step pays for fresh pages.
_WARM_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_case(parser, CASES, "llama2_7b_lora_2048")
    add_device(parser)
    parser.add_argument(
        "--contender", action="append", default=[], help="a name or a group; repeat it; all if left out"
    )
    parser.add_argument("--small", action="store_true", help="the twin of the case, which the CPU always runs")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender; 0 times nothing")
    parser.add_argument("--warmup", type=int, default=1, help="steps of a turn that are not timed")
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a turn")
    parser.add_argument("--budgets", type=int, default=6, help="for how many budgets to plan")
    parser.add_argument("--limit", type=float, help="seconds after which nothing new begins; the same command goes on")
    parser.add_argument("--suffix", default="", help="of the file's name, such as _compiled")
    add_out(parser, RESULTS, "folder of the result")
    parser.add_argument("--list", action="store_true", help="name cases and contenders")


def run(options: Namespace) -> None:
    """Measure one case and write its result."""
    contenders = _chosen(options.contender)
    if options.list:
        print("cases:", *CASES, sep="\n  ")
        print("contenders:", *CONTENDERS, sep="\n  ")
        return
    if options.device == "cpu" and any(name not in os.environ for name in _WARM_MEMORY):
        os.environ.update(_WARM_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    case = CASES[options.case]
    effort = Effort(
        num_rounds=options.rounds,
        num_warmup=options.warmup,
        num_steps=options.steps,
        num_budgets=options.budgets,
    )
    is_small = options.small or options.device == "cpu"
    given = case.twin() if is_small else case, options.device, contenders, effort
    path = options.out / f"side_by_side_{case.name}_{options.device}{options.suffix}.json"
    result = carry_out(
        path,
        lambda journal: collect(journal, *given, _say),
        lambda journal: assemble(journal, *given),
        options.limit,
    )
    print(_table(result), f"written to {path}", sep="\n")


def _chosen(names: Sequence[str]) -> tuple[Contender, ...]:
    try:
        return chosen(names)
    except ValueError as error:
        raise WrongInputError(str(error)) from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['title']}{', small twin' if result['is_small'] else ''}, on {result['device']}"]
    for name, record in result["contenders"].items():
        if record["not_run"]:
            lines.append(f"  {name:<24} not run: {record['not_run']}")
            continue
        ratios = record["ratios"]
        lines.append(
            f"  {name:<24} peak {record['peak_bytes'] / 2**20:>10,.1f} MiB  "
            + "  ".join(f"{figure} x {ratio:.3f}" for figure, ratio in ratios.items())
        )
    verdicts = ("verdict", "verdict_by_flops")
    lines.extend(f"{key}: {json.dumps(result[key])}" for key in verdicts if key in result)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(__name__))
