"""The error for a budget that nothing fits, and the search for the largest number that fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from hf_ckpt.errors import BudgetError, PolicyError, UnsupportedError
from hf_ckpt.planner.advice import OptionChange, nothing_fits, where_it_lies
from hf_ckpt.planner.largest_that_fits import Limit, largest
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, Place, StepMemory, Timeline

GIB = 2**30
STEP = Step(batch_size=4, seq_length=2048, gradient_accumulation_steps=2, optim="adamw_torch_fused")


def memory_of(step: Step, states: int = 8 * GIB) -> StepMemory:
    """A step whose activations take 1 GiB for 1,024 tokens, and whose AdamW state is half of all states."""
    optimizer = {"adamw_8bit": states // 8, "paged_adamw_8bit": 0}.get(step.optim or "", states // 2)
    activations = step.batch_size * step.seq_length * 2**20
    sizes = {
        Category.PARAMETERS: states // 2,
        Category.OPTIMIZER: optimizer,
        Category.SAVED: activations // 2,
        Category.RECOMPUTED: activations // 4,
        Category.LOSS: activations // 4,
    }
    place = Place(Phase.BACKWARD, layer_idx=3, part="ffn", operator="aten.mm.default")
    return StepMemory("rtx4090", None, step.tokens, sum(sizes.values()), place, sizes, Timeline((), {}))


def _error(budget: int, smallest: StepMemory, *given: Any, **options: Any) -> BudgetError:
    """As on a CPU, where a step needs what it allocates."""
    return nothing_fits(budget, smallest, smallest.peak_bytes, *given, **options)


def error_of(budget: int, step: Step = STEP, states: int = 8 * GIB, changes: tuple[OptionChange, ...] = ()) -> str:
    """The message, and a check that all it says of the step was simulated within the budget."""
    peak = lambda other: memory_of(other, states).peak_bytes  # noqa: E731
    found = _error(budget, memory_of(step, states), step, peak, changes, device_bytes=24 * GIB)
    assert isinstance(found, BudgetError)
    assert isinstance(found, PolicyError)
    return str(found)


def test_error_says_the_smallest_peak_where_it_lies_and_every_change_that_fits() -> None:
    changes = (
        OptionChange({"head": "chunked", "offload": "cpu"}, lambda: 9 * GIB, host_bytes=3 * GIB),
        OptionChange({"head": "chunked"}, lambda: 13 * GIB),
        OptionChange({"tiles": "auto"}, lambda: raise_unsupported()),
    )
    assert error_of(12 * GIB, changes=changes) == (
        "No plan fits memory_budget=12.0 GiB. Lowest predicted peak is 16.0 GiB, in the backward of layer 3 (ffn), "
        "aten.mm: 8.0 GiB weights, gradients and optimizer state, 4.0 GiB saved activations, 2.0 GiB recomputation and "
        """temporary tensors, 2.0 GiB logits and loss. With each of these lines one fits, as simulated:
  memory_budget="16.0GiB"                                       # 16.0 GiB
  max_length=1024                                               # 12.0 GiB
  per_device_train_batch_size=2, gradient_accumulation_steps=4  # 12.0 GiB
  optim="paged_adamw_8bit"                                      # 12.0 GiB
  head="chunked", offload="cpu"                                 # 9.0 GiB, with 3.0 GiB of host memory"""
    )


def test_budget_that_the_device_does_not_have_is_no_advice() -> None:
    message = error_of(8 * GIB, replace(STEP, batch_size=1, seq_length=64), states=32 * GIB)
    assert message.endswith("16.0 MiB logits and loss. Use shorter sequences, fewer weights, or a larger device.")


def test_where_only_bitwise_plans_were_looked_at_it_says_so() -> None:
    found = _error(GIB, memory_of(STEP), STEP, lambda other: memory_of(other).peak_bytes, is_exact=True)
    assert str(found).startswith("No bitwise plan fits memory_budget=1.0 GiB with exact: true. Lowest predicted peak")


def raise_unsupported() -> int:
    raise UnsupportedError("It cannot be simulated.")


def test_first_smaller_optimizer_that_fits_is_enough() -> None:
    message = error_of(14 * GIB)
    assert 'optim="adamw_8bit"' in message
    assert "paged" not in message


@pytest.mark.parametrize("optim", ["adamw_8bit", "sgd", None])
def test_no_other_optimizer_is_named_for_one_that_is_not_adamw(optim: str | None) -> None:
    assert "optim=" not in error_of(10 * GIB, replace(STEP, optim=optim))


def test_shorter_rows_and_fewer_of_them_together_where_neither_is_enough() -> None:
    step = replace(STEP, optim=None)
    # 1 sequence of 2,048 tokens needs 2 GiB, 4 sequences of 64 tokens a quarter.
    message = error_of(8 * GIB + GIB // 5, step)
    line = "  per_device_train_batch_size=1, gradient_accumulation_steps=8, max_length=192  # 8.2 GiB"
    assert message.endswith(line)
    assert message.count("max_length") == 1


def test_rows_of_packed_examples_are_counted_in_tokens() -> None:
    step = replace(STEP, batch_size=1, seq_length=8192, is_packed=True, optim=None)
    assert re.search(r"\n  sequences of 4096 tokens +# 12\.0 GiB", error_of(12 * GIB, step))


def test_smaller_batches_are_not_advised_where_the_states_alone_are_too_much() -> None:
    tried: list[Step] = []

    def peak(step: Step) -> int:
        tried.append(step)
        return memory_of(step).peak_bytes

    step = replace(STEP, optim=None)
    message = str(_error(6 * GIB, memory_of(step), step, peak))
    assert message.endswith(
        "2.0 GiB logits and loss. Shorter sequences and smaller micro-batches are not enough: one sequence of 64 "
        'tokens needs 8.1 GiB. With each of these lines one fits, as simulated:\n  memory_budget="16.0GiB"  # 16.0 GiB'
    )
    assert [(each.batch_size, each.seq_length, each.gradient_accumulation_steps) for each in tried] == [(1, 64, 8)]


def test_smallest_batch_there_is_gets_no_advice_on_batches() -> None:
    step = replace(STEP, batch_size=1, seq_length=64, optim=None)
    assert error_of(GIB, step).endswith('as simulated:\n  memory_budget="8.1GiB"  # 8.1 GiB')


def test_each_step_is_simulated_once_and_told_of() -> None:
    told: list[str] = []
    tried: list[Step] = []

    def peak(step: Step) -> int:
        tried.append(step)
        return memory_of(step).peak_bytes

    _error(12 * GIB, memory_of(STEP), STEP, peak, [OptionChange({"head": "chunked"}, lambda: 0)], say=told.append)
    assert len(tried) == len(set(map(repr, tried))) == len(told) - 1
    assert told[0] == "Simulating 1 sequence of 64 tokens ..."
    assert told[-2:] == ['Simulating optim="paged_adamw_8bit" ...', 'Simulating head="chunked" ...']


def test_what_takes_nothing_is_not_listed() -> None:
    memory = replace(memory_of(STEP), by_category={Category.SAVED: 3 * GIB, Category.LOSS: 0}, peak_bytes=3 * GIB)
    assert where_it_lies(memory, memory.peak_bytes) == (
        "Lowest predicted peak is 3.0 GiB, in the backward of layer 3 (ffn), aten.mm: 3.0 GiB saved activations."
    )


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("start", [1, 1000, 5000])
@pytest.mark.parametrize(
    "growth", [lambda n: 100 + 3 * n, lambda n: n * n, lambda n: n**0.5, lambda n: 10 * (n // 1000)]
)
def test_largest_is_what_trying_all_finds(growth, start: int, multiple: int) -> None:  # type: ignore[no-untyped-def]
    numbers = range(multiple, 5001, multiple)
    for reached in (0, 63, 64, 700, 2112, 4991, 5000):
        budget = growth(reached)
        expected = max((number for number in numbers if growth(number) <= budget), default=0)
        tried: list[int] = []

        def peak(number: int, tried: list[int] = tried) -> Any:
            tried.append(number)
            return growth(number)

        found = largest(peak, budget, start=start, most=5000, multiple=multiple)
        assert found == Limit(expected, growth(expected or multiple), is_bound=expected == numbers[-1])
        assert len(tried) == len(set(tried)) <= 40


@pytest.mark.parametrize("start", [64, 2048, 16384, 131072])
def test_largest_asks_seldom_where_memory_grows_in_proportion(start: int) -> None:
    tried: list[int] = []

    def peak(length: int) -> int:
        tried.append(length)
        return 14 * GIB + length * 2**19

    assert largest(peak, 22 * GIB, start=start, most=131072, multiple=64).number == 16384
    assert len(tried) <= 4


def test_largest_tells_ahead_what_it_will_ask_next() -> None:
    asked: list[int] = []
    told: list[tuple[int, int]] = []

    @contextmanager
    def ahead(number: int) -> Iterator[None]:
        told.append((len(asked), number))
        yield

    def peak(length: int) -> int:
        asked.append(length)
        # A little more than on the line between the first two.
        return 14 * GIB + length * 2**19 + (12288 < length < 24576) * 2**24

    assert largest(peak, 22 * GIB, start=12288, most=131072, multiple=64, ahead=ahead).number == 16320
    assert asked == [12288, 24576, 16384, 16320]
    # By how much had been asked: twice the first, which fits, and the one before what lies on the line.
    assert told == [(0, 24576), (2, 16320)]
