"""What to say when no plan fits: the smallest peak there is, where it lies, and the changes that would fit.

Nothing is advised that was not simulated. Knows the step; what else can be changed, such as the weights' precision, is
handed in by whoever knows the model's origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from hf_ckpt.amounts import format_bytes
from hf_ckpt.errors import BudgetError, HFCkptError
from hf_ckpt.memory.largest import largest
from hf_ckpt.memory.step import Step
from hf_ckpt.memory.timeline import Category, StepMemory

LENGTH_MULTIPLE = 64
"""Lengths that are advised are multiples of it: kernels work on tiles of so many tokens."""

_SMALLER_OPTIMIZERS = ("adamw_8bit", "paged_adamw_8bit")

_SHARES = {
    "weights, gradients and optimizer state": (
        *(Category.PARAMETERS, Category.GATHERED, Category.GRADIENTS, Category.OPTIMIZER),
    ),
    "saved activations": (Category.SAVED,),
    "recomputation and temporary tensors": (Category.RECOMPUTED, Category.TEMPORARY),
    "logits and loss": (Category.LOSS,),
}


@dataclass(frozen=True)
class Change:
    """Something that could be done, and what the step would need then.

    Args:
        text: what to do, in the user's words, such as `4-bit weights (quantization: {load_in_4bit: true})`.
        peak: simulates it, and returns the smallest peak in bytes; an `HFCkptError` means that it cannot be done.
    """

    text: str
    peak: Callable[[], int]


def nothing_fits(
    budget_bytes: int,
    smallest: StepMemory,
    step: Step,
    peak: Callable[[Step], int],
    changes: Sequence[Change] = (),
    say: Callable[[str], None] | None = None,
) -> BudgetError:
    """Return the error for a budget that no plan fits.

    Args:
        budget_bytes: device memory that the whole step may use.
        smallest: the step under the plan with the smallest peak, simulated.
        step: the step that was asked for.
        peak: simulates another step, and returns its smallest peak in bytes.
        changes: what could be done besides changing the step.
        say: is told what is being simulated.
    """
    search = _Search(budget_bytes, step, peak, say or (lambda text: None))
    fitting = [*search.smaller_batches(), *search.other_optimizers(smallest), *search.among(changes)]
    if fitting:
        advice = f"Each of these would fit, as simulated: {'; '.join(fitting)}. Or raise the budget."
    else:
        advice = f"{search.floor_text()}Raise the budget."
    return BudgetError(f"No plan fits memory_budget={format_bytes(budget_bytes)}. {where_it_lies(smallest)} {advice}")


def where_it_lies(smallest: StepMemory) -> str:
    """Return the smallest peak, when it happens and what it is made of, as a sentence."""
    shares = {what: sum(smallest.by_category.get(each, 0) for each in parts) for what, parts in _SHARES.items()}
    sizes = [
        f"{format_bytes(size)} {what}" for what, size in sorted(shares.items(), key=lambda share: -share[1]) if size
    ]
    return (
        f"Lowest predicted peak is {format_bytes(smallest.peak_bytes)}, in the {smallest.peak_at.describe()}: "
        f"{', '.join(sizes)}."
    )


class _Search:
    """Looks for changes of a step that fit.

    Args:
        budget_bytes: the budget.
        step: the step that does not fit.
        peak: simulates another one.
        say: is told what is being simulated.
    """

    def __init__(self, budget_bytes: int, step: Step, peak: Callable[[Step], int], say: Callable[[str], None]) -> None:
        self._budget = budget_bytes
        self._step = step
        self._peak_of = peak
        self._say = say
        self._known: dict[tuple[int, int], int] = {}
        self._floor = _with_rows(replace(step, seq_length=min(step.seq_length, LENGTH_MULTIPLE)), 1)

    def smaller_batches(self) -> Iterator[str]:
        """Yield the longest rows that fit, and the largest micro-batch; where neither does alone, both together."""
        step = self._step
        if self._floor == step or self._floor_peak() > self._budget:
            return
        found = [text for text in (self._shorter(step), self._fewer_rows()) if text]
        if not found and (both := self._shorter(_with_rows(step, 1))):
            found = [f"{_rows_text(_with_rows(step, 1))} and {both}"]
        yield from found

    def other_optimizers(self, smallest: StepMemory) -> Iterator[str]:
        """Yield the first optimizer with less state on the device that fits."""
        optim = self._step.optim or ""
        if not smallest.by_category.get(Category.OPTIMIZER) or not optim.startswith("adamw") or "8bit" in optim:
            return
        steps = {name: replace(self._step, optim=name) for name in _SMALLER_OPTIMIZERS}
        changes = [Change(f"optim={name}", partial(self._peak_of, step)) for name, step in steps.items()]
        yield from islice(self.among(changes), 1)

    def among(self, changes: Sequence[Change]) -> Iterator[str]:
        """Yield the changes that fit."""
        for change in changes:
            self._say(f"Simulating {change.text} ...")
            try:
                found = change.peak()
            except HFCkptError:
                # What cannot be simulated, or not be done here, is no advice.
                continue
            if found <= self._budget:
                yield f"{change.text} ({format_bytes(found)})"

    def floor_text(self) -> str:
        """Return that smaller batches are not enough, where that is so."""
        if self._floor == self._step:
            return ""
        return (
            f"Shorter rows and smaller micro-batches are not enough: one row of {self._floor.seq_length} tokens needs "
            f"{format_bytes(self._floor_peak())}. "
        )

    def _shorter(self, step: Step) -> str:
        most = (step.seq_length - 1) // LENGTH_MULTIPLE * LENGTH_MULTIPLE
        if not most:
            return ""

        def peak(length: int) -> int:
            return self._peak(replace(step, seq_length=length))

        found = largest(peak, self._budget, start=step.seq_length // 2, most=most, multiple=LENGTH_MULTIPLE)
        what = "rows of {} tokens" if step.is_packed else "max_length={}"
        return f"{what.format(found.number)} ({format_bytes(found.peak_bytes)})" if found.number else ""

    def _fewer_rows(self) -> str:
        batch_size = self._step.batch_size
        for rows in range(batch_size - 1, 0, -1):
            # The global batch stays what it is.
            if batch_size % rows == 0 and (found := self._peak(step := _with_rows(self._step, rows))) <= self._budget:
                return f"{_rows_text(step)} ({format_bytes(found)})"
        return ""

    def _floor_peak(self) -> int:
        return self._peak(self._floor)

    def _peak(self, step: Step) -> int:
        key = (step.batch_size, step.seq_length)
        if key not in self._known:
            rows = "1 row" if step.batch_size == 1 else f"{step.batch_size} rows"
            self._say(f"Simulating {rows} of {step.seq_length:,} tokens ...")
            self._known[key] = self._peak_of(step)
        return self._known[key]


def _with_rows(step: Step, rows: int) -> Step:
    """Return the step with a smaller micro-batch and as many more of them."""
    times = step.batch_size // rows
    return replace(step, batch_size=rows, gradient_accumulation_steps=step.gradient_accumulation_steps * times)


def _rows_text(step: Step) -> str:
    return (
        f"per_device_train_batch_size={step.batch_size} with "
        f"gradient_accumulation_steps={step.gradient_accumulation_steps}"
    )
