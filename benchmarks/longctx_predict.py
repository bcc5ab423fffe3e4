"""The longest context of recipes/llama3_8b_qlora_longctx.yaml on cards of several sizes, predicted. Needs no GPU.

Beside this library stand transformers' own full activation checkpointing, without and with its `offload`, and figures
that others published. `scripts/long_context_table.py` writes docs/long_context.md from the result.

    python benchmarks/longctx_predict.py
"""

from __future__ import annotations

import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.environment import describe
from benchmarks.longctx_cases import GIB, recipe_of, subject
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, add_out, main
from hf_ckpt.estimate.max_length_and_batch import largest_of_all, leanest_plans, with_length
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject
from hf_ckpt.planner.advice import LENGTH_MULTIPLE
from hf_ckpt.planner.largest_that_fits import Limit
from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.step_memory import Phase, Place, StepMemory
from hf_ckpt.simulation.tape import MemoryChange, Storage, Tape, assign_categories
from hf_ckpt.units import format_bytes

NAME = "longctx_predicted.json"
CARD = "rtx4090"
"""A real card of 24 GB."""
DEVICE = "a100-80gb"
"""Whose kernels and speed are taken, whatever the budget."""
BUDGETS_GIB = (8, 12, 16, 24, 40, 48, 80)
_SHORT = 8192
_ABOVE = "base_model.model.model."
_NUMBER = re.compile(r"\.\d+\.")
_CLOSE = 0.001
"""Share of a row by which a longer one may still fit."""

PUBLISHED: dict[str, Any] = {
    "source": "https://unsloth.ai/blog/llama3-3 and README.md of github.com/unslothai/unsloth: Llama 3.1 8B Instruct, "
    "QLoRA in 4 bits, rank 32, all linear layers, batch size 1, on cards of so many GB",
    "unsloth": {"8": 2972, "12": 21848, "16": 40724, "24": 78475, "40": 153977, "48": 191728, "80": 342733},
    "transformers_fa2": {"8": None, "12": 932, "16": 2551, "24": 5789, "40": 12264, "48": 15502, "80": 28454},
}
"""Longest rows by the card's memory in GB; None where not even the smallest one fits."""

STAGES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "full, head": {"policy": "full", "head": "chunked"},
    "full, head, tiles": {"policy": "full", "head": "chunked", "tiles": "auto"},
    "full, head, tiles, offload": {"policy": "full", "head": "chunked", "tiles": "auto", "offload": "cpu"},
}
"""What is added to full checkpointing, one after the other."""
STAGES_GIB = 24
STAGES_LENGTH = 16384
"""Tokens of the row whose step is timed under each stage."""


@dataclass(frozen=True)
class Found:
    """The longest row of one contender in one budget.

    Args:
        limit: the length, and its peak.
        memory: of the step at that length.
        host_bytes: that it needs on the host.
    """

    limit: Limit
    memory: StepMemory
    host_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON types; the bytes of all categories together are the peak."""
        return {
            "length": self.limit.number,
            "peak_bytes": self.limit.needed_bytes,
            "peak_at": self.memory.peak_at.describe(),
            "by_category": {str(category): size for category, size in self.memory.by_category.items()},
            "host_bytes": self.host_bytes,
            "seconds": self.memory.time.total,
        }


# --- transformers' own. ---


def with_synchronous_offload(memory: StepMemory, num_layers: int, input_bytes: int) -> tuple[int, int]:
    """Return peak and host bytes of a step under full checkpointing, had transformers' `offload` been on.

    It saves each layer's input under `save_on_cpu`, on the compute stream: on the device is the input of the layer that
    runs, and no other. Pinned memory is allocated in powers of two.

    Args:
        memory: of the step with every layer in mode `full`, and the head as transformers has it.
        num_layers: layers of the model.
        input_bytes: of one layer's input.
    """
    peak = 0
    for total, num_away in zip(memory.timeline.total_bytes(), _num_away(memory, num_layers), strict=True):
        peak = max(peak, total - num_away * input_bytes)
    return peak, num_layers * (1 << (input_bytes - 1).bit_length())


def _num_away(memory: StepMemory, num_layers: int) -> Iterator[int]:
    """Yield, for each event of a step, how many layers have their input on the host."""
    num_away = 0
    for place in memory.timeline.places:
        if place.layer_idx is not None:
            num_away = place.layer_idx
        elif place.phase is Phase.FORWARD and num_away == num_layers - 1:
            # After the last layer. Its own input is away too.
            num_away = num_layers
        elif place.phase is Phase.OPTIMIZER:
            num_away = 0
        yield num_away


def _input_bytes(subject_: Subject, length: int) -> int:
    # Hidden states are in the weights' dtype, bfloat16.
    return length * int(subject_.model.config.get_text_config().hidden_size) * 2


# --- The table. ---


class Contenders:
    """What is compared: each with the search for its longest row.

    Args:
        predictor: of the case.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self.plan, self._full = next(leanest_plans(predictor.subject)), predictor.subject.resolve("full")
        self._ours = Search(partial(_peak, predictor, self.plan))
        self._plain = Search(partial(_peak, predictor, self._full))
        self._sent = Search(lambda length: self._without_inputs(length)[0])

    def longest(self, budget_bytes: int) -> dict[str, Found]:
        """Return the longest row of each.

        Args:
            budget_bytes: all of it is the step's.
        """
        predictor = self._predictor
        ours, plain = self._ours.longest(budget_bytes), self._plain.longest(budget_bytes)
        sent = self._sent.longest(budget_bytes)
        memory = _memory(predictor, self.plan, ours.number)
        host = self._without_inputs(sent.number)[1] if sent.number else 0
        return {
            "hf_ckpt": Found(ours, memory, memory.host_bytes),
            "transformers": Found(plain, _memory(predictor, self._full, plain.number), 0),
            "transformers_offload": Found(sent, _memory(predictor, self._full, sent.number), host),
        }

    def _without_inputs(self, length: int) -> tuple[int, int]:
        case = self._predictor.subject
        memory = _memory(self._predictor, self._full, length)
        return with_synchronous_offload(memory, _num_layers(case), _input_bytes(case, length))


def _memory(predictor: Predictor, plan: Plan | None, length: int) -> StepMemory:
    return predictor.memory(plan, with_length(predictor.subject.step, max(length, LENGTH_MULTIPLE)))


def _num_layers(subject_: Subject) -> int:
    return sum(len(stack.layers) for stack in subject_.stacks)


def _peak(predictor: Predictor, plan: Plan, length: int) -> int:
    return _memory(predictor, plan, length).peak_bytes


class Search:
    """Looks for the longest row that fits, one budget after the other, with few simulations.

    Memory grows nearly in proportion, so that each guess lies on the line through the two nearest rows that are known.

    Args:
        peak: bytes for a length.
        short: tokens of a row that is quick to simulate.
    """

    def __init__(self, peak: Callable[[int], int], short: int = _SHORT) -> None:
        self._peak = peak
        self._short = short
        self._known: dict[int, int] = {}

    def longest(self, budget_bytes: int) -> Limit:
        """Return a row that fits, in steps of `LENGTH_MULTIPLE`, and within `_CLOSE` the longest that does.

        Args:
            budget_bytes: that the step may use.
        """
        for length in (self._short // 2, self._short):
            self._ask(length)
        while True:
            fits = max((length for length, peak in self._known.items() if peak <= budget_bytes), default=0)
            fails = min((length for length, peak in self._known.items() if peak > budget_bytes), default=0)
            guess = self._guess(budget_bytes)
            if fails:
                guess = min(guess, fails - LENGTH_MULTIPLE)
            if guess - fits <= max(LENGTH_MULTIPLE, _CLOSE * fits) and (fits or guess <= 0):
                return Limit(fits, self._known.get(fits, 0))
            self._ask(max(guess, fits + LENGTH_MULTIPLE))

    def _guess(self, budget_bytes: int) -> int:
        near = sorted(self._known, key=lambda length: abs(self._known[length] - budget_bytes))[:2]
        first, second = min(near), max(near)
        slope = (self._known[second] - self._known[first]) / (second - first)
        return int(first + (budget_bytes - self._known[first]) / slope) // LENGTH_MULTIPLE * LENGTH_MULTIPLE

    def _ask(self, length: int) -> None:
        if length not in self._known:
            self._known[length] = self._peak(length)


def on_card(case: Subject) -> dict[str, Any]:
    """Return what `hf-ckpt estimate --max-length` answers on a card, with offload and without."""
    card = find_device(CARD)
    found: dict[str, Any] = {"device": CARD, "memory_bytes": card.memory_bytes}
    for name, offload in (("offload", case.allowed.offload), ("no_offload", None)):
        predictor = Predictor(replace(case, allowed=replace(case.allowed, offload=offload)), card)
        limit = largest_of_all(predictor, predictor.capacity(card), is_length=True)
        found[name] = {"length": limit.number, "needed_bytes": limit.needed_bytes}
    return found


def stages(predictor: Predictor, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield what each stage reaches in one budget, and what it costs at one length."""
    for name, options in STAGES.items():
        plan = predictor.subject.resolve(**options)
        limit = Search(partial(_peak, predictor, plan)).longest(STAGES_GIB * GIB)
        memory = _memory(predictor, plan, STAGES_LENGTH)
        say(f"{STAGES_GIB} GiB, {name}: {limit.number:,} tokens; {memory.time.total:.1f} s at {STAGES_LENGTH:,}")
        yield {
            "stage": name,
            "longest": Found(limit, _memory(predictor, plan, limit.number), 0).as_json(),
            "at_length": STAGES_LENGTH,
            "peak_bytes": memory.peak_bytes,
            "host_bytes": memory.host_bytes,
            "seconds": memory.time.total,
            "seconds_by_phase": asdict(memory.time),
        }


# --- Every byte. ---


def ledger(predictor: Predictor, plan: Plan, length: int) -> dict[str, Any]:
    """Return all storages that are alive at the peak of a step, alike ones together, the largest first.

    Args:
        predictor: of the case.
        plan: in force.
        length: tokens of the row.
    """
    case = predictor.subject
    step = with_length(case.step, length)
    tape = case.simulator(predictor.device).with_step(step).trace(plan).tape
    assign_categories(tape)
    alive = _alive_at_peak(tape)
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for storage, place in alive:
        key = str(storage.category), _made_by(storage, place), f"{storage.dtype} {list(storage.shape)}".strip()
        counts[key] += 1
        sizes[key] += storage.num_bytes
    return {
        "length": length,
        "peak_bytes": sum(storage.num_bytes for storage, _ in alive),
        "storages": [
            {"num_bytes": size, "count": counts[key], "category": key[0], "made_by": key[1], "each": key[2]}
            for key, size in sorted(sizes.items(), key=lambda item: -item[1])
        ],
    }


def _alive_at_peak(tape: Tape) -> list[tuple[Storage, Place | None]]:
    """Return what is alive at the peak, and where each was made; None for what was there before the step."""
    alive: dict[int, tuple[Storage, Place | None]] = {id(storage): (storage, None) for storage in tape.before}
    now = most = sum(storage.num_bytes for storage in tape.before)
    at_peak = dict(alive)
    for event in tape.events:
        if event.storage is None:
            continue
        if event.change is MemoryChange.ALLOCATE:
            alive[id(event.storage)] = event.storage, event.place
            now += event.storage.num_bytes
        else:
            del alive[id(event.storage)]
            now -= event.storage.num_bytes
        if now > most:
            most, at_peak = now, dict(alive)
    return list(at_peak.values())


def _made_by(storage: Storage, place: Place | None) -> str:
    """Return what made a storage, without the number of the layer: the parameter that it is, or an operator."""
    if storage.parameter or place is None:
        return _NUMBER.sub(".#.", storage.parameter.removeprefix(_ABOVE))
    module = _NUMBER.sub(".#.", f"{place.module}.").removeprefix(_ABOVE).strip(".")
    return f"{place.operator.removesuffix('.default')}, {place.phase}, {module}".rstrip(", ")


def predict(budgets_gib: tuple[int, ...] = BUDGETS_GIB, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Predict all of it, the smallest budget first.

    Args:
        budgets_gib: in GiB.
        say: is called with what was found.
    """
    case = subject(recipe_of())
    predictor = Predictor(case, find_device(DEVICE))
    contenders = Contenders(predictor)
    rows, longest = [], {}
    for budget in budgets_gib:
        began = time.perf_counter()
        found = contenders.longest(budget * GIB)
        rows.append({"budget_gib": budget} | {name: one.as_json() for name, one in found.items()})
        longest[budget] = found["hf_ckpt"].limit.number
        lengths = ", ".join(f"{name} {one.limit.number:,}" for name, one in found.items())
        host = format_bytes(found["hf_ckpt"].host_bytes)
        say(f"{budget} GiB: {lengths}; {host} of host memory ({time.perf_counter() - began:.0f} s)")
    return {
        "environment": describe(),
        "recipe": "recipes/llama3_8b_qlora_longctx.yaml",
        "facts": [list(fact) for fact in case.facts],
        "device": DEVICE,
        "is_predicted": True,
        "budgets": rows,
        "card": on_card(case),
        "stages_gib": STAGES_GIB,
        "stages": list(stages(predictor, say)),
        "ledger": ledger(
            predictor,
            contenders.plan,
            longest.get(STAGES_GIB, _SHORT),
        ),
        "published": PUBLISHED,
    }


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_out(parser, RESULTS / NAME, None)


def run(options: Namespace) -> None:
    """Predict and write the result."""
    write(options.out, predict())
    print(options.out)


if __name__ == "__main__":
    sys.exit(main(__name__))
