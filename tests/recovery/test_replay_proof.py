"""A step that ran again is the same computation: what it changes is undone, and any difference stops the run."""

from __future__ import annotations

import random
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import OutOfMemoryError, PlanMismatchError
from hf_ckpt.policy.options import HeadMode
from hf_ckpt.policy.plan import Plan
from hf_ckpt.recovery.accumulation_window import Gradients
from hf_ckpt.recovery.escalation import Escalation
from hf_ckpt.recovery.replay_proof import ReplayProof
from hf_ckpt.regions.execution_state import RandomState
from tests.training import During, arguments, changed, llama, losses, rows, weights

NUM_STEPS = 4


def fail_in_backward(model: nn.Module, after: int = 0) -> None:
    """Let the backward of a later forward of a model run out of memory, once; the first of them if `after` is 0."""
    seen: list[int] = []

    def raise_error(gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(1)
        if len(seen) > after:
            handle.remove()
            output.register_hook(raise_error)

    handle = model.get_submodule("model.norm").register_forward_hook(hook)


def run(
    folder: Path,
    *,
    fails: bool,
    kind: type[Trainer] = Trainer,
    model: nn.Module | None = None,
    prepare: Callable[[Trainer], object] = lambda trainer: None,
    optimizer: torch.optim.Optimizer | None = None,
    policy: str = "none",
    **options: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    """Train in windows of two micro-batches, of which the second of step 2 runs out of memory in its backward."""
    model = model or llama(num_hidden_layers=2)
    fault = [During("on_step_begin", partial(fail_in_backward, after=1), step=1)] if fails else []
    settings = {"max_steps": NUM_STEPS, "gradient_accumulation_steps": 2, **options}
    callback = HFCkptCallback(policy, on_oom="escalate", prove="off")
    trainer = kind(
        model=model,
        args=TrainingArguments(**arguments(folder, **settings)),
        train_dataset=rows(32),
        callbacks=[callback, *fault],
        optimizers=(optimizer, None),
    )
    prepare(trainer)
    trainer.train()
    assert callback.report()["ckpt/oom_recovered"] == fails
    return weights(model), losses(trainer)


# --- What a step changes is undone. ---


@dataclass
class Meter:
    mean: float = 1.0
    records: list[float] = field(default_factory=list)


class Slotted:
    __slots__ = ("__count", "inner")

    def __init__(self) -> None:
        self.__count = 0
        self.inner = Meter()

    def next(self) -> int:
        self.__count += 1
        self.inner.mean += 1
        return self.__count


@dataclass(frozen=True, slots=True)
class Frozen:
    counts: dict[str, list[int]]


class History(list[float]):
    """A container with attributes of its own."""

    total = 0.0


class Scale(nn.Module):
    """A loss with a buffer, a number, and a weight that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.times = 0
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self) -> Tensor:
        self.seen += 1
        self.times += 1
        return self.seen + self.times + self.weight * 0


class Callee:
    """A function that counts on itself, a partial of one, and a bound method."""

    def __init__(self) -> None:
        def count() -> float:
            count.number += 1  # type: ignore[attr-defined]
            return float(count.number)  # type: ignore[attr-defined]

        count.number = 0  # type: ignore[attr-defined]
        self.function = count
        self.of_list = partial(_grown, [0.0])
        self.method = Slotted().next

    def __call__(self) -> float:
        return self.function() + self.of_list() + self.method()


def _grown(items: list[float]) -> float:
    items.append(items[-1] + 1)
    return items[-1]


def _metered(meter: Meter) -> float:
    meter.mean *= 1.5
    meter.records.append(meter.mean)
    return sum(meter.records)


def _twice(pair: tuple[Meter, dict[str, Meter]]) -> float:
    first, named = pair
    assert named["same"] is first
    named["same"].mean += 1
    return _metered(first)


def _counted(counts: Any) -> float:
    counts["seen"] += 1
    counts["first"] = counts.get("first", 0) or counts["seen"]
    return float(sum(counts.values()))


def _queued(queue: deque[float]) -> float:
    queue.append(queue[0] + 1)
    return queue[-1]


def _bytes(row: Any) -> float:
    row[0] += 1
    return float(row[0])


def _past_versions(tensor: Tensor) -> Tensor:
    tensor.data.add_(1)
    return tensor.clone()


def _recorded(history: History) -> float:
    history.total += 1
    history.append(history.total)
    return sum(history)


def _listed(frozen: Frozen) -> float:
    frozen.counts.setdefault("all", []).append(1)
    return float(len(frozen.counts["all"]))


def _array(values: Any) -> float:
    values += 1
    return float(values.sum())


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "object": (Meter, _metered),
    "slots": (Slotted, Slotted.next),
    "frozen class": (lambda: Frozen({}), _listed),
    "namespace in a list": (lambda: [SimpleNamespace(meter=Meter())], lambda state: _metered(state[0].meter)),
    "by two names": (lambda: (meter := Meter(), {"same": meter}), _twice),
    "dict of floats": (lambda: {"seen": 0.5}, _counted),
    "counter": (lambda: Counter(seen=1), _counted),
    "ordered": (lambda: OrderedDict(seen=1), _counted),
    "default dict": (lambda: defaultdict(int, seen=1), _counted),
    "deque": (lambda: deque([1.0], maxlen=3), _queued),
    "bytes": (lambda: bytearray(8), _bytes),
    "array": (lambda: array("d", [0.0]), _bytes),
    "list with attributes": (History, _recorded),
    "numpy array": (lambda: np.zeros(3), _array),
    "tensor past its version": (lambda: torch.zeros(2), lambda state: _past_versions(state).sum()),
    "generator of torch": (lambda: torch.Generator().manual_seed(0), lambda state: torch.rand((), generator=state)),
    "generator of Python": (lambda: random.Random(0), lambda state: state.random()),
    "generator of numpy": (lambda: np.random.default_rng(0), lambda state: float(state.random())),
    "old generator of numpy": (lambda: np.random.RandomState(0), lambda state: float(state.rand())),
    "module": (Scale, lambda state: state()),
    "functions": (Callee, lambda state: state()),
    "number": (lambda: None, lambda state: None),
}


class Stateful(Trainer):
    """Scales the loss by what a state of its own gives, and counts."""

    state_of_loss: Any
    read: Callable[[Any], Any]
    number = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.number += 1
        value = type(self).read(self.state_of_loss)
        return super().compute_loss(*args, **kwargs) * (1 + 0.1 * (self.number if value is None else value))


@pytest.mark.parametrize("name", STATES)
def test_state_on_the_trainer_is_undone(name: str, tmp_path: Path) -> None:
    make, read = STATES[name]
    kind = type("Reading", (Stateful,), {"read": staticmethod(read)})

    def prepare(trainer: Trainer) -> None:
        trainer.state_of_loss = make()

    expected = run(tmp_path, fails=False, kind=kind, prepare=prepare)
    got = run(tmp_path, fails=True, kind=kind, prepare=prepare)
    assert changed(expected[0], got[0]) == []
    assert got[1] == expected[1]


class Reads(nn.Module):
    """Has no buffer, and scales by a state and a number of its own, and by one that it makes when it first runs."""

    def __init__(self, state: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.state, self._read, self._number = state, [read], 0
        self.linear = nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden
        self._number += 1
        self.late = getattr(self, "late", 0) + 1
        self.linear.calls = getattr(self.linear, "calls", 0) + 1
        value = self._read[0](self.state)
        return hidden * (1 + 0.01 * (self._number + self.late + self.linear.calls + (0 if value is None else value)))


def with_state(name: str) -> nn.Module:
    model = llama(num_hidden_layers=2)
    make, read = STATES[name]
    # Outside of the layers, where nothing is recomputed.
    model.model.embed_tokens = nn.Sequential(model.model.embed_tokens, Reads(make(), read))
    return model


@pytest.mark.parametrize("name", STATES)
def test_state_of_modules_is_undone(name: str, tmp_path: Path) -> None:
    expected = run(tmp_path, fails=False, model=with_state(name))
    got = run(tmp_path, fails=True, model=with_state(name))
    assert changed(expected[0], got[0]) == []
    assert got[1] == expected[1]


def looped(*, fails: bool, name: str, in_undo: bool, plant: Callable[[], object] = lambda: None) -> dict[str, Tensor]:
    """Train in a loop of one's own, whose second step runs out of memory in the backward of its second forward."""
    torch.manual_seed(1)
    make, read = STATES[name]
    model, state = (llama(num_hidden_layers=2), make()) if in_undo else (with_state(name), None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with hf_ckpt.apply(model, "none", prove="off") as applied:
        for step in range(NUM_STEPS):
            batches = [{name: row[None] for name, row in each.items()} for each in rows(8)[2 * step : 2 * step + 2]]

            def closure(batches: list[dict[str, Tensor]] = batches) -> None:
                optimizer.zero_grad()
                for batch in batches:
                    value = read(state) if in_undo else None
                    (model(**batch).loss * (1 + 0.1 * (0 if value is None else value))).backward()

            if fails and step == 1:
                fail_in_backward(model, after=1)
                plant()
            applied.step(closure, batches, undo=[state] if in_undo else [])
            optimizer.step()
        assert applied.num_recovered == fails
    return weights(model)


@pytest.mark.parametrize("in_undo", [True, False], ids=["undo", "module"])
@pytest.mark.parametrize("name", [name for name in STATES if name != "number"])
@pytest.mark.sweep(keep=6)
def test_state_of_a_loop_is_undone(name: str, in_undo: bool) -> None:
    expected = looped(fails=False, name=name, in_undo=in_undo)
    assert changed(expected, looped(fails=True, name=name, in_undo=in_undo)) == []


class Weighted(Trainer):
    """Has weights in its loss: of a module, and one that is of none."""

    weighting: nn.Module
    offset: nn.Parameter

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return self.weighting(super().compute_loss(*args, **kwargs)[None]).sum() + self.offset


@pytest.mark.parametrize("in_optimizer", [True, False])
def test_gradients_of_weights_that_are_not_the_models_are_undone(in_optimizer: bool, tmp_path: Path) -> None:
    def trained(*, fails: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(0)
        model, weighting = llama(num_hidden_layers=2), nn.Linear(1, 1)
        offset = nn.Parameter(torch.zeros(()))
        own = [*weighting.parameters(), offset] if in_optimizer else []
        optimizer = torch.optim.SGD([*model.parameters(), *own], lr=0.1)

        def prepare(trainer: Trainer) -> None:
            trainer.weighting, trainer.offset = weighting, offset

        got, _ = run(tmp_path, fails=fails, kind=Weighted, model=model, optimizer=optimizer, prepare=prepare)
        own_gradients = {name: weight.grad for name, weight in weighting.named_parameters() if weight.grad is not None}
        return got, weights(weighting) | {"gradient of offset": offset.grad} | own_gradients  # type: ignore[dict-item]

    (expected, of_loss), (got, of_loss_got) = trained(fails=False), trained(fails=True)
    assert changed(expected, got) == []
    assert changed(of_loss, of_loss_got) == []


# --- What cannot be undone ends the run, by name. ---


class Batches:
    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("make", "read"),
    [
        pytest.param(lambda: (number for number in range(100)), next, id="generator"),
        pytest.param(lambda: {"inner": iter(range(100))}, lambda state: next(state["inner"]), id="iterator within"),
        pytest.param(Batches, next, id="iterator of one's own"),
        pytest.param(lambda: np.zeros(1000), _array, id="large array"),
        pytest.param(
            lambda: dict.fromkeys(range(10_000), 0), lambda state: state.setdefault(-len(state), 1), id="long"
        ),
    ],
)
def test_what_is_not_undone_ends_the_run_by_name(make: Any, read: Any, tmp_path: Path) -> None:
    kind = type("Reading", (Stateful,), {"read": staticmethod(read)})

    def prepare(trainer: Trainer) -> None:
        trainer.state_of_loss = make()

    with pytest.raises(OutOfMemoryError, match="cannot be undone: nothing brings back state_of_loss"):
        run(tmp_path, fails=True, kind=kind, prepare=prepare)


# --- A replay that is another computation stops the run. ---


def lose_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first micro-batch of a replay be left out."""
    found = Escalation.attempt
    left = [True, False]

    def attempted(self: Escalation, function: Callable[[], Any]) -> Any:
        return found(self, function) if self._num_reruns == 0 or not left.pop(0) else (None, None)

    monkeypatch.setattr(Escalation, "attempt", attempted)


def keep_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gradients, "restore", lambda self: None)


def keep_random_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomState, "restore", lambda self: None)


FAULTS = [
    pytest.param(keep_random_states, "begins in another state of torch's random numbers", id="random state"),
    pytest.param(lose_a_micro_batch, "has other inputs in micro-batch 1", id="dropped micro-batch"),
    pytest.param(keep_gradients, r"begins with gradients of the attempt before it \(\w+", id="kept gradients"),
]


@pytest.mark.parametrize(("plant", "message"), FAULTS)
def test_a_planted_fault_stops_the_run(
    plant: Callable[[pytest.MonkeyPatch], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(PlanMismatchError, match=f"Step 2 ran out of memory and runs again.*but {message}"):
        run(tmp_path, fails=True)


@pytest.mark.parametrize(
    ("plant", "message"),
    [FAULTS[0], FAULTS[2]],
)
def test_a_planted_fault_stops_a_loop(
    plant: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(PlanMismatchError, match=message):
        looped(fails=True, name="number", in_undo=False)


COUNT = [0]


class Hidden(Trainer):
    """Reads what nobody undoes."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        COUNT[0] += 1
        return super().compute_loss(*args, **kwargs) * (1 + 0.1 * COUNT[0])


def test_a_loss_that_is_another_one_stops_the_run(tmp_path: Path) -> None:
    message = r"has another loss in micro-batch 1 \([\d.]+, and [\d.]+ before\).*Keep it as an attribute of the Trainer"
    with pytest.raises(PlanMismatchError, match=message) as caught:
        run(tmp_path, fails=True, kind=Hidden)
    assert "was not undone" in str(caught.value)


def test_a_closure_that_differs_is_stopped() -> None:
    def stepped(change: Callable[[list[Tensor], int], list[Tensor]]) -> None:
        model = llama(num_hidden_layers=2)
        fail_in_backward(model, after=2)
        calls: list[int] = []

        def closure() -> None:
            calls.append(1)
            model.zero_grad()
            for tokens in change([row["input_ids"][None] for row in rows(3)], len(calls)):
                model(tokens).logits.float().sum().backward()

        with hf_ckpt.apply(model, "none", prove="off") as applied:
            applied.step(closure)

    stepped(lambda batches, call: batches)
    with pytest.raises(PlanMismatchError, match="has run 2 of 3 forwards that had begun"):
        stepped(lambda batches, call: batches[: 4 - call])
    with pytest.raises(PlanMismatchError, match="has other inputs in forward 1"):
        stepped(lambda batches, call: batches[call - 1 :])
    with pytest.raises(PlanMismatchError, match="has other inputs in forward 3"):
        stepped(lambda batches, call: [*batches[:2], batches[2] * (2 - call)])


@pytest.fixture(params=["none", "tf32"])
def _precision(request: pytest.FixtureRequest) -> Iterator[None]:
    """The newer setting, behind which `torch.get_float32_matmul_precision` raises."""
    products: Any = torch.backends.cuda.matmul
    found, products.fp32_precision = products.fp32_precision, request.param
    yield
    products.fp32_precision = found


@pytest.mark.usefixtures("_precision")
def test_a_plan_that_adds_in_another_order_may_round_otherwise() -> None:
    def replayed(head: HeadMode, loss: float) -> None:
        proof = ReplayProof("Step 1", "micro-batch", lambda: [torch.zeros(1)], "")
        proof.begin_micro_batch([], Plan("Llama", ()))
        proof.note_loss(torch.tensor(2.0))
        proof.begin_replay()
        proof.begin_micro_batch([], Plan("Llama", (), head))
        proof.note_loss(torch.tensor(loss))

    off = float(torch.tensor(2.0).nextafter(torch.tensor(3.0)))
    replayed(HeadMode.CHUNKED, off)
    replayed(HeadMode.PLAIN, 2.0)
    for head, loss in ((HeadMode.PLAIN, off), (HeadMode.CHUNKED, 2.001)):
        with pytest.raises(PlanMismatchError, match="has another loss"):
            replayed(head, loss)


def test_a_replay_of_the_last_micro_batch_alone_holds_that_one() -> None:
    """As one process of several runs it again: the gradients of those before it are sums already."""
    proof, plan = ReplayProof("Step 1", "micro-batch", lambda: [torch.zeros(1)], ""), Plan("Llama", ())
    for loss in (1.0, 2.0):
        proof.begin_micro_batch([], plan)
        proof.note_loss(torch.tensor(loss))
    for loss, raises in ((2.0, False), (1.0, True)):
        proof.begin_replay(1)
        proof.begin_micro_batch([], plan)
        with pytest.raises(PlanMismatchError, match="micro-batch 2") if raises else nullcontext():
            proof.note_loss(torch.tensor(loss))
            proof.end_micro_batch(None)
            proof.end_replay()
