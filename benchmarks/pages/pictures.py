"""Which pictures there are: the file of each, its data and what draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages import front, frontier, lengths, over_step
from benchmarks.pages.results import CPU, CUDA, PREDICTED, Json, Results

HEADLINE = "llama2_7b_lora_2048"
"""The case of the README's picture, and of memory over the step."""
FRONT = "readme-frontier.png"
CONTEXT = "benchmarks-context.png"


@dataclass(frozen=True)
class Picture:
    """One PNG.

    Args:
        name: of the file.
        data: all that is drawn, as JSON types.
        draw: takes data and path.
    """

    name: str
    data: Json
    draw: Callable[[Json, Path], None]


def pictures(results: Results) -> Iterator[Picture]:
    """Yield the pictures that the results are enough for."""
    for case, runs in results.runs.items():
        for kind, run in runs.items():
            if data := frontier.data_of(run):
                yield Picture(frontier_name(case, kind), data, frontier.draw)
    headline = results.runs.get(HEADLINE, {})
    for kind, run in headline.items():
        if data := over_step.data_of(run):
            yield Picture(memory_name(kind), data, over_step.draw)
    # Measured on a GPU as soon as it is; never on the twin, whose times say nothing.
    if shown := headline.get(CUDA, headline.get(PREDICTED)):
        yield Picture(FRONT, front.data_of(shown), front.draw)
    if results.lengths:
        yield Picture(CONTEXT, lengths.data_of(results.lengths), lengths.draw)


def frontier_name(case: str, kind: str) -> str:
    """Return the file of the frontier of a case."""
    return f"benchmarks-{case.replace('_', '-')}-{_kind(kind)}.png"


def memory_name(kind: str) -> str:
    """Return the file of memory over the step."""
    return f"benchmarks-memory-{_kind(kind)}.png"


def _kind(kind: str) -> str:
    return {PREDICTED: "predicted", CPU: "cpu", CUDA: "gpu"}[kind]
