"""Builds and steps every architecture of the zoo, each a moment, and prints what came of it.

`python -m tests.zoo --sweep` takes everything, `python -m tests.zoo --sweep causal masked` two of the tasks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time

import torch

from tests import zoo

SHOWN, CHUNK, LIMIT_S = 150, 60, 120  # characters of an error, architectures in one process, seconds for them


@dataclasses.dataclass
class Row:
    """What the sweep learned about one architecture."""

    model_type: str
    task: str
    problem: str = ""
    seconds: float = 0.0
    num_parameters: int = 0
    is_repeatable: bool = False


def _step(case: zoo.Case) -> list[torch.Tensor]:
    """Loss and all gradients of one step under a fixed seed."""
    torch.manual_seed(1)
    case.model.zero_grad()
    value = zoo.loss(case.model, case.inputs)
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in case.model.parameters() if p.grad is not None)]


def _try(model_type: str, task: str) -> Row:
    row, start = Row(model_type, task), time.perf_counter()
    try:
        torch.manual_seed(0)
        case = zoo.build(model_type, task=task)
        row.num_parameters = sum(p.numel() for p in case.model.parameters())
        first, second = _step(case), _step(case)
        row.is_repeatable = len(first) == len(second) and all(map(torch.equal, first, second))
        row.problem = "" if first[0].isfinite() else "loss is not finite"
    except Exception as error:  # noqa: BLE001 (a survey: whatever an architecture raises is its result)
        row.problem = f"{type(error).__name__}: {error}".replace("\n", " ")[:SHOWN]
    row.seconds = time.perf_counter() - start
    return row


def _sweep_chunk(pairs: list[str]) -> list[Row]:
    """A process of its own for a few architectures, so that a crash costs no more than them."""
    output, end = _output_of([sys.executable, "-m", "tests.zoo", "--chunk", *pairs])
    rows = [Row(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
    if len(rows) < len(pairs):
        rows.append(Row(*pairs[len(rows)].split(":"), problem=f"process ended: {end}"))
        rows += _sweep_chunk(pairs[len(rows) :]) if len(rows) < len(pairs) else []
    return rows


def _output_of(command: list[str]) -> tuple[str, str]:
    """What a command printed, and why it ended."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode(), f"it took more than {LIMIT_S} s"
    return done.stdout, done.stderr[-SHOWN:]


def sweep(tasks: list[str]) -> None:
    """Build and step everything, and print a table."""
    pairs = [f"{name}:{task}" for task in tasks for name in zoo.names(task)]
    rows = [row for i in range(0, len(pairs), CHUNK) for row in _sweep_chunk(pairs[i : i + CHUNK])]
    for row in rows:
        repeats = "repeatable" if row.is_repeatable else "NOT REPEATABLE" if not row.problem else "-"
        figures = f"{row.seconds:6.2f} s {row.num_parameters:>9,} {repeats:<14}"
        print(f"{row.task:<10} {row.model_type:<28} {figures} {row.problem or 'ok'}")
    for task in tasks:
        mine = [row for row in rows if row.task == task]
        good = [row for row in mine if not row.problem]
        print(f"{task}: {len(good)} of {len(mine)}, {sum(row.seconds for row in mine):.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sweep", nargs="*", choices=[*zoo.TASKS], metavar="TASK", help=f"tasks to sweep, of {[*zoo.TASKS]}"
    )
    parser.add_argument("--chunk", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a second thread makes tiny steps many times slower
    for pair in options.chunk or []:
        print(json.dumps(dataclasses.asdict(_try(*pair.split(":")))), flush=True)
    if options.sweep is not None:
        sweep(options.sweep or [*zoo.TASKS])


if __name__ == "__main__":
    main()
