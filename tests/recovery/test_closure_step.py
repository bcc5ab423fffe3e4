"""Steps of loops without a Trainer that ran out of memory run again, to the bit as the lean plan gives them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_ckpt
from hf_ckpt.errors import OutOfMemoryError, PlanMismatchError, PolicyError, UnsupportedError
from hf_ckpt.policy.policy import Mode
from hf_ckpt.recovery.attribute_snapshots import AttributeSnapshots
from hf_ckpt.simulation.devices import CPU
from tests import traces
from tests.recovery.limits import FailingOperators
from tests.recovery.models import WithBatchNorm
from tests.training import VOCAB, changed, llama, rows, weights

NUM_STEPS = 4
BUDGET = {"memory_budget": "1GiB", "batch_size": 2, "seq_length": 8}


class Loop:
    """Trains a model for a few steps, each in a closure, while operators fail.

    Attributes:
        losses: of the steps.
        applied: the plan's handle.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Any,
        mode: FailingOperators,
        *,
        accumulation: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        self.model, self.mode, self.scaler = model, mode, scaler
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.losses: list[float] = []
        self.seen: list[float] = []
        self._accumulation = accumulation
        self._data = rows(2 * accumulation * NUM_STEPS)
        if policy == "auto":
            options = {**BUDGET, "optimizer": self.optimizer, **options}
        self.applied = hf_ckpt.apply(model, policy, **options)

    def batch(self, number: int) -> list[dict[str, Tensor]]:
        at = [2 * (number * self._accumulation + each) for each in range(self._accumulation)]
        return [{name: torch.stack([row[name] for row in self._data[i : i + 2]]) for name in self._data[0]} for i in at]

    def closure(self, batch: list[dict[str, Tensor]]) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        self.seen.append(torch.rand(()).item())
        for inputs in batch:
            self.mode.begin("forward")
            loss = self.model(**inputs).loss / len(batch)
            self.mode.begin("backward")
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.mode.begin(None)
            total += loss.detach()
        if self.scaler is not None:
            self.mode.begin("unscale")
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.mode.begin(None)
        return total

    def train(self) -> Loop:
        torch.manual_seed(1)
        self.model.train()
        for number in range(NUM_STEPS):
            batch = self.batch(number)
            self.mode.begin_step()
            undo = [self.seen] if self.scaler is None else [self.seen, self.scaler]
            with self.mode:
                self.losses.append(self.applied.step(partial(self.closure, batch), batch, undo=undo).item())
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return self


def batch_norm() -> WithBatchNorm:
    torch.manual_seed(0)
    return WithBatchNorm()


def left_by(loop: Loop) -> dict[str, Tensor]:
    state = weights(loop.model) | {name: buffer.clone() for name, buffer in loop.model.named_buffers()}
    if loop.scaler is not None:
        state |= {f"scaler.{name}": torch.tensor(value) for name, value in loop.scaler.state_dict().items()}
    return state


CASES = [
    pytest.param(llama, {}, id="dropout"),
    pytest.param(llama, {"accumulation": 3}, id="accumulation"),
    pytest.param(batch_norm, {}, id="batch norm"),
    pytest.param(llama, {"scaler": True}, id="gradient scaler"),
]


@pytest.mark.parametrize(("make", "options"), CASES)
def test_a_closure_that_failed_anywhere_gives_what_the_lean_plan_gives(
    make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    def trained(policy: Any, at: dict[int, list[int]], *, after: bool = False) -> Loop:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if "scaler" in options else None
        mode = FailingOperators(at, after=after)
        loop = Loop(make(), policy, mode, **{**options, "scaler": scaler}, prove="off").train()
        assert mode.raised == loop.applied.num_recovered == len(at)
        loop.applied.remove()
        return loop

    expected = trained("full", {})
    starts = sorted(set(trained("none", {}).mode.starts[1]))
    numbers = sorted({*starts[:-1], *(start - 1 for start in starts[1:]), *range(17, starts[-1], starts[-1] // 3)})
    for number in range(0, len(numbers), 3):
        at = {step: [each] for step, each in enumerate(numbers[number : number + 3], start=1)}
        got = trained("none", at, after=number % 2 == 1)
        assert changed(left_by(expected), left_by(got)) == []
        assert (got.losses, got.seen) == (expected.losses, expected.seen)


def test_gradients_that_are_there_while_the_forward_runs_are_no_hindrance() -> None:
    class Late(Loop):
        """Drops gradients between forward and backward."""

        def closure(self, batch: list[dict[str, Tensor]]) -> Tensor:
            self.mode.begin("forward")
            loss = self.model(**batch[0]).loss
            self.optimizer.zero_grad()
            self.mode.begin("backward")
            loss.backward()
            self.mode.begin(None)
            return loss.detach()

    expected = Late(llama(), "none", FailingOperators()).train()
    mode = FailingOperators({1: [30], 2: [700]})
    got = Late(llama(), "none", mode).train()
    assert mode.raised == 2
    assert changed(weights(expected.model), weights(got.model)) == []


# --- What cannot be undone, and what is no lack of memory. ---


def failing(error: Exception, before: Callable[[Loop], object] = lambda loop: None) -> Loop:
    """A loop whose second backward ends in an error."""

    class Failing(Loop):
        def closure(self, batch: list[dict[str, Tensor]]) -> Tensor:
            if len(self.losses) < 1:
                return super().closure(batch)
            loss = self.model(**batch[0]).loss
            loss.backward()
            before(self)
            raise error

    return Failing(llama(), "none", FailingOperators())


def test_other_errors_pass_through() -> None:
    loop = failing(RuntimeError("on purpose"))
    with pytest.raises(RuntimeError, match="on purpose"):
        loop.train()
    assert loop.applied.num_recovered == 0


OUT = torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("before", "why"),
    [
        pytest.param(lambda loop: None, "it has added to gradients that were there before", id="gradients"),
        pytest.param(
            lambda loop: (loop.optimizer.step(), loop.optimizer.zero_grad()),
            r"before the end of applied\.step\(\)",
            id="step",
        ),
    ],
)
def test_what_cannot_be_undone_is_refused(before: Callable[[Loop], object], why: str) -> None:
    with pytest.raises(OutOfMemoryError, match=f"The step cannot be undone: .*{why}"):
        failing(OUT, before).train()


def test_a_batch_that_was_written_to_is_no_longer_the_same() -> None:
    model = llama()
    applied = hf_ckpt.apply(model, "none")
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}

    def closure() -> None:
        batch["input_ids"] += 1
        raise OUT

    with pytest.raises(OutOfMemoryError, match="it has written to its inputs: input_ids"):
        applied.step(closure, batch)


def test_after_removal_there_is_nothing_to_step_under() -> None:
    model = llama()
    before = traces.snapshot(model)
    loop = Loop(model, "none", FailingOperators({1: [40]})).train()
    loop.applied.remove()
    loop.optimizer.zero_grad()
    trained = {"values of parameters", "parameters"}
    assert [each for each in traces.differences(before, traces.snapshot(model)) if each not in trained] == []
    with pytest.raises(PlanMismatchError, match=r"step\(\) was called, but the plan was removed"):
        loop.applied.step(lambda: None)


def test_a_compiled_model_says_that_its_steps_run_once(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    applied = hf_ckpt.apply(model, "none")
    model.model.layers[0].mlp.compile(backend="eager")

    def closure() -> None:
        raise OUT

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            applied.step(closure)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("calls its closure once: the model is compiled" in line for line in lines) == 1


def test_containers_and_counters_are_brought_back() -> None:
    class Metric:
        total = torch.zeros(())

    metric, many = Metric(), {number: number for number in range(20_000)}
    metric.total = torch.ones(())
    noted = AttributeSnapshots(("metric", metric), ("many", many)).now()
    metric.total += 1
    many[0] = 7
    noted.restore()
    assert (metric.total.item(), many[0]) == (1.0, 0)


# --- Plans. ---


def test_large_batches_run_lean_and_small_ones_fast() -> None:
    """Without a batch the lean plan stays."""
    model = llama()
    applied = hf_ckpt.apply(model, "none", quiet_steps=2)
    raised: list[int] = []

    def step(length: int, *, is_told: bool = True) -> int:
        batch = {"input_ids": torch.randint(VOCAB, (1, length))}

        def closure() -> None:
            model.zero_grad()
            if length > 8 and applied.plan.count(Mode.FULL) == 0:
                raised.append(length)
                raise OUT
            model(**batch, labels=batch["input_ids"]).loss.backward()

        applied.step(closure, batch if is_told else None)
        return applied.plan.count(Mode.FULL)

    assert [step(length) for length in (4, 16, 4, 4, 4, 16, 8)] == [0, 1, 1, 0, 0, 1, 0]
    assert raised == [16]
    assert [step(4, is_told=False) for _ in range(3)] == [0, 0, 0]


@pytest.mark.sweep
def test_auto_takes_the_plan_that_hf_ckpt_plan_returns() -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    sizes = {"memory_budget": "3MiB", "batch_size": 8, "seq_length": 64}
    made = hf_ckpt.plan(model, device=CPU, optim="adamw_torch", **sizes)
    applied = hf_ckpt.apply(model, "auto", optimizer=optimizer, **sizes)
    assert applied.plan.count(Mode.NONE) < 4
    assert applied.plan.stacks == made.stacks
    applied.remove()


@pytest.mark.sweep
def test_with_auto_the_planner_gives_the_leaner_plan(caplog: pytest.LogCaptureFixture) -> None:
    expected = Loop(llama(), "none", FailingOperators()).train()
    got = Loop(llama(), "auto", FailingOperators({1: [40], 2: [600]})).train()
    assert changed(weights(expected.model), weights(got.model)) == []
    assert got.applied.plan.count(Mode.NONE) < 4
    words = re.compile(r"the plan for 10\.0% less memory, predicted to take \d\.\d\d of the time")
    assert sum(words.search(record.getMessage()) is not None for record in caplog.records) >= 1


@pytest.mark.parametrize(
    ("policy", "options", "error", "message"),
    [
        ("auto", {"memory_budget": "1GiB"}, PolicyError, "no step is known here"),
        ("auto", {**BUDGET, "memory_budget": None}, PolicyError, "has no memory_budget"),
        ("auto", {**BUDGET, "every_n_layers": 2}, PolicyError, "every_n_layers was given with policy"),
        ("auto", {**BUDGET, "quiet_steps": 0}, PolicyError, "quiet_steps is 0"),
        ("full", {"batch_size": 2}, PolicyError, r'batch_size was given, but only policy "auto" plans for a step'),
    ],
)
def test_wrong_words_are_refused(policy: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = llama()
    with pytest.raises(error, match=message):
        hf_ckpt.apply(model, policy, **options)
    hf_ckpt.apply(model, "full").remove()


def test_an_optimizer_that_is_not_simulated_is_refused() -> None:
    model = llama()
    with pytest.raises(UnsupportedError, match=r"and the optimizer, torch\.optim\.lbfgs\.LBFGS, cannot be simulated"):
        hf_ckpt.apply(model, "auto", optimizer=torch.optim.LBFGS(model.parameters()), **BUDGET)
