"""What messages say about plans: when none fits, what would (`nothing_fits`), and how exact one is (`Exactness`).

Nothing is advised that was not simulated. How the user writes an option, in a recipe or in Python, is handed in
(`Write`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice

from hf_ckpt.errors import BudgetError, HFCkptError
from hf_ckpt.planner.largest_that_fits import largest
from hf_ckpt.policy.options import HeadMode
from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory
from hf_ckpt.units import as_budget, format_bytes

LENGTH_MULTIPLE = 64
"""Lengths that are searched for are multiples of it: kernels work on tiles of so many tokens."""

_SMALLER_OPTIMIZERS = ("adamw_8bit", "paged_adamw_8bit")

_SHARES = {
    "weights, gradients and optimizer state": (
        *(Category.PARAMETERS, Category.GATHERED, Category.GRADIENTS, Category.OPTIMIZER),
    ),
    "reference model": (Category.REFERENCE,),
    "other tensors": (Category.OTHER,),
    "saved activations": (Category.SAVED,),
    "recomputation and temporary tensors": (Category.RECOMPUTED, Category.TEMPORARY, Category.WORKSPACES),
    "logits and loss": (Category.LOSS,),
}


Write = Callable[[Mapping[str, object]], str]
"""Writes options, by the names of `HFCkptCallback` and `TrainingArguments`, as the user would.

`row_length` is the length of a row of packed examples; it has no name of its own there.
"""


@dataclass(frozen=True)
class OptionChange:
    """Options that could be set."""

    options: Mapping[str, object]
    needed: Callable[[], int]
    """Simulates the step with them. The least that it needs in bytes; an `HFCkptError` means that it cannot be done."""
    host_bytes: int = 0
    """Host memory that they take."""


def as_keywords(options: Mapping[str, object]) -> str:
    """Return options as keyword arguments, such as `memory_budget="22GiB"`."""
    return ", ".join(
        f"sequences of {value} tokens"
        if name == "row_length"
        else f'{name}="{value}"'
        if isinstance(value, str)
        else f"{name}={value}"
        for name, value in options.items()
    )


def nothing_fits(
    budget_bytes: int,
    smallest: StepMemory,
    smallest_bytes: int,
    step: Step,
    needed: Callable[[Step], int],
    changes: Sequence[OptionChange] = (),
    *,
    write: Write = as_keywords,
    device_bytes: int | None = None,
    is_exact: bool = False,
    say: Callable[[str], None] | None = None,
) -> BudgetError:
    """Return the error for a budget that no plan fits.

    Args:
        budget_bytes: device memory that the whole step may use.
        smallest: the step under the plan that needs least, simulated.
        smallest_bytes: what that needs, with what torch and CUDA hold besides its tensors.
        step: the step that does not fit.
        needed: simulates another step, and returns the same of it.
        changes: what could be done besides changing the step.
        write: how the user would write options.
        device_bytes: what the device has; a budget above it is no advice. None where that is not known.
        is_exact: only bitwise plans were considered.
        say: gets progress messages.
    """
    search = _FittingChanges(budget_bytes, step, needed, write, say or (lambda text: None))
    budget, num_bytes = as_budget(smallest_bytes)
    is_in_device = device_bytes is None or num_bytes <= device_bytes
    lines = [_FittingChange({"memory_budget": budget}, smallest_bytes)] if is_in_device else []
    optimizers = search.other_optimizers(smallest, smallest_bytes)
    lines += [*search.smaller_batches(), *optimizers, *search.among(changes)]
    which = "bitwise plan" if is_exact else "plan"
    asked = f"memory_budget={format_bytes(budget_bytes)}{' with exact: true' if is_exact else ''}"
    advice = "Use shorter sequences, fewer weights, or a larger device."
    if lines:
        width = max(len(write(line.options)) for line in lines)
        rows = [f"  {write(line.options):<{width}}  # {line.comment()}" for line in lines]
        advice = "\n".join(["With each of these lines one fits, as simulated:", *rows])
    where = where_it_lies(smallest, smallest_bytes)
    return BudgetError(f"No {which} fits {asked}. {where} {search.floor_text()}{advice}")


def cannot_prepare(step: Step, memory: StepMemory, budget_bytes: int) -> BudgetError:
    """Return the error about a budget below what comes before the first micro-batch."""
    return BudgetError(
        f"No plan fits memory_budget={format_bytes(budget_bytes)}: the {step.prepares} needs "
        f"{format_bytes(memory.peak_bytes)} as predicted, and activation checkpointing does not change it. Generate "
        "fewer at a time (per_device_train_batch_size, steps_per_generation) or shorter ones (max_completion_length), "
        "or raise the budget."
    )


@dataclass(frozen=True)
class _FittingChange:
    """Options that would make a plan fit, as simulated."""

    options: Mapping[str, object]
    needed_bytes: int
    host_bytes: int = 0

    def comment(self) -> str:
        host = f", with {format_bytes(self.host_bytes)} of host memory" if self.host_bytes else ""
        return f"{format_bytes(self.needed_bytes)}{host}"


def where_it_lies(smallest: StepMemory, needed_bytes: int) -> str:
    """Return the smallest peak, when it happens, what it is made of and what it needs besides, as a sentence."""
    shares = {what: sum(smallest.by_category.get(each, 0) for each in parts) for what, parts in _SHARES.items()}
    sizes = [
        f"{format_bytes(size)} {what}" for what, size in sorted(shares.items(), key=lambda share: -share[1]) if size
    ]
    more = needed_bytes - smallest.peak_bytes
    besides = f" Torch's cache, CUDA and a margin take {format_bytes(more)} more." if more > 0 else ""
    return (
        f"Lowest predicted peak is {format_bytes(smallest.peak_bytes)}, in the {smallest.peak_at.describe()}: "
        f"{', '.join(sizes)}.{besides}"
    )


@dataclass
class _FittingChanges:
    """Looks for changes that make a step fit. See `nothing_fits`."""

    _budget: int
    _step: Step
    _needed_by: Callable[[Step], int]
    _write: Write
    _say: Callable[[str], None]
    _known: dict[tuple[int, int], int] = field(default_factory=dict)

    @cached_property
    def _floor(self) -> Step:
        """The smallest batch."""
        if self._step.tensors:
            # How many images a smaller one has is not known.
            return self._step
        return _with_rows(replace(self._step, seq_length=min(self._step.seq_length, LENGTH_MULTIPLE)), 1)

    def smaller_batches(self) -> Iterator[_FittingChange]:
        """Yield the longest rows that fit, and the largest micro-batch; where neither does alone, both together."""
        step = self._step
        if not self._floor_fits():
            return
        found = [line for line in (self._shorter(step), self._fewer_rows()) if line]
        yield from found
        if not found and (both := self._shorter(single := _with_rows(step, 1))):
            yield replace(both, options={**_rows_of(single), **both.options})

    def other_optimizers(self, smallest: StepMemory, smallest_bytes: int) -> Iterator[_FittingChange]:
        """Yield the first optimizer that fits, of those with less state on the device."""
        optim = self._step.optim or ""
        state_bytes = smallest.by_category.get(Category.OPTIMIZER, 0)
        if not state_bytes or not optim.startswith("adamw") or "8bit" in optim:
            return
        # Forward and backward are the same under any optimizer.
        if smallest.peak_at.phase is not Phase.OPTIMIZER and smallest_bytes - state_bytes > self._budget:
            return
        steps = {name: replace(self._step, optim=name) for name in _SMALLER_OPTIMIZERS}
        changes = [OptionChange({"optim": name}, partial(self._needed_by, step)) for name, step in steps.items()]
        yield from islice(self.among(changes), 1)

    def among(self, changes: Sequence[OptionChange]) -> Iterator[_FittingChange]:
        """Yield the changes that fit."""
        for change in changes:
            self._say(f"Simulating {self._write(change.options)} ...")
            try:
                found = change.needed()
            except HFCkptError:
                # What cannot be simulated, or not be done here, is no advice.
                continue
            if found <= self._budget:
                yield _FittingChange(change.options, found, change.host_bytes)

    def floor_text(self) -> str:
        """Return that smaller batches are not enough, where that is so."""
        if self._floor == self._step or self._floor_fits():
            return ""
        return (
            "Shorter sequences and smaller micro-batches are not enough: one sequence of "
            f"{self._floor.seq_length} tokens needs {format_bytes(self._needed(self._floor))}. "
        )

    def _floor_fits(self) -> bool:
        return self._floor != self._step and self._needed(self._floor) <= self._budget

    def _shorter(self, step: Step) -> _FittingChange | None:
        most = (step.seq_length - 1) // LENGTH_MULTIPLE * LENGTH_MULTIPLE
        if not most:
            return None

        def needed(length: int) -> int:
            return self._needed(replace(step, seq_length=length))

        found = largest(needed, self._budget, start=step.seq_length // 2, most=most, multiple=LENGTH_MULTIPLE)
        name = "row_length" if step.is_packed else "max_length"
        return _FittingChange({name: found.number}, found.needed_bytes) if found.number else None

    def _fewer_rows(self) -> _FittingChange | None:
        batch_size = self._step.batch_size
        for rows in range(batch_size - 1, 0, -1):
            # The global batch stays what it is.
            if batch_size % rows == 0 and (found := self._needed(step := _with_rows(self._step, rows))) <= self._budget:
                return _FittingChange(_rows_of(step), found)
        return None

    def _needed(self, step: Step) -> int:
        key = (step.batch_size, step.seq_length)
        if key not in self._known:
            rows = "1 sequence" if step.batch_size == 1 else f"{step.batch_size} sequences"
            self._say(f"Simulating {rows} of {step.seq_length:,} tokens ...")
            self._known[key] = self._needed_by(step)
        return self._known[key]


def _with_rows(step: Step, rows: int) -> Step:
    """Return the step with a smaller micro-batch and as many more of them."""
    times = step.batch_size // rows
    return replace(step, batch_size=rows, gradient_accumulation_steps=step.gradient_accumulation_steps * times)


def _rows_of(step: Step) -> dict[str, object]:
    return {
        "per_device_train_batch_size": step.batch_size,
        "gradient_accumulation_steps": step.gradient_accumulation_steps,
    }


# --- How exact a plan is. ---

TILES, CHUNKED_HEAD = "tiles", "chunked head"
"""Parts of a plan that add sums in another order than the model does."""

_WITHIN = "within 1e-6 in float32"


@dataclass(frozen=True, slots=True)
class Exactness:
    """How exact a plan is, and its predicted time, as a share of that of the step without a plan."""

    inexact: tuple[str, ...]
    """See `inexact_parts`; a plan without any is bitwise."""
    of_none: float | None
    """The plan's time; None where times are not known."""
    inexact_of_none: float | None = None
    """The time of the fastest plan with `exact: false`, where that is faster; None elsewhere."""
    is_only_choice: bool = False
    """No bitwise plan fits, though one would have been taken."""
    is_same_step: bool = True
    """False where tiles may lie around dropout, whose masks they draw per slice."""

    @property
    def is_bitwise(self) -> bool:
        """Whether loss and gradients are those of a run without a plan, to the bit."""
        return not self.inexact

    def describe(self) -> str:
        """Return it as text, such as `same gradients, bit for bit; 21 % slower than without checkpointing`."""
        slower = "" if self.of_none is None else f"; {slower_by(self.of_none)} than without checkpointing"
        if not self.is_bitwise:
            within = (
                f"gradients {_WITHIN}"
                if self.is_same_step
                else "not the same gradients, as dropout may draw other masks"
            )
            only = "; no plan with the same bits fits" if self.is_only_choice else ""
            return f"{within} ({' and '.join(self.inexact)}){slower}{only}"
        text = f"same gradients, bit for bit{slower}"
        if (
            self.of_none is None
            or self.inexact_of_none is None
            or slower_by(self.inexact_of_none) == slower_by(self.of_none)
        ):
            return text
        return f"{text}. With exact: false {slower_by(self.inexact_of_none)}, {_WITHIN}"


def slower_by(of_none: float) -> str:
    """Return a time as a share of that without a plan in words, such as `21 % slower`."""
    percent = round(100 * (of_none - 1))
    return f"{abs(percent)} % {'faster' if percent < 0 else 'slower'}"


def inexact_parts(plan: Plan) -> tuple[str, ...]:
    """Return those of `TILES` and `CHUNKED_HEAD` that a plan has."""
    has_tiles = any(entry.tiles is not None for stack in plan.stacks for entry in stack.layers)
    return (*([TILES] if has_tiles else []), *([CHUNKED_HEAD] if plan.head is HeadMode.CHUNKED else []))
