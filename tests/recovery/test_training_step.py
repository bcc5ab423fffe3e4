"""Steps that run out of memory run again under a leaner plan, and nothing but the plan has changed afterwards."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import HostMemoryError, OtherProcessError, OutOfMemoryError
from hf_ckpt.recovery import recovery
from hf_ckpt.recovery.attribute_snapshots import AttributeSnapshots
from hf_ckpt.recovery.out_of_memory import Failure, is_out_of_memory
from hf_ckpt.recovery.saved_values import SENT_BUFFERS
from tests import traces
from tests.recovery.limits import FRAGMENTED, FailingOperators, Limit, Phased, PhasedTrainer, Steps
from tests.recovery.models import WithBatchNorm, adapted_mixtral, mixtral
from tests.training import LENGTH, VOCAB, During, arguments, changed, llama, lora, losses, rows, weights

NUM_STEPS = 5
OF_CPU = (
    "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)
MOST_BETWEEN = 6


def batch_norm() -> WithBatchNorm:
    torch.manual_seed(0)
    return WithBatchNorm()


def trained(
    make: Callable[[], nn.Module],
    folder: Path,
    mode: FailingOperators,
    *callbacks: Any,
    kind: type[PhasedTrainer] = PhasedTrainer,
    data: Any = None,
    collate: Any = None,
    optimizer: type[torch.optim.Optimizer] | None = None,
    **changes: Any,
) -> PhasedTrainer:
    """Train for five steps while operators fail."""
    steps = {"max_steps": NUM_STEPS, "max_grad_norm": 1.0, **changes}
    args = TrainingArguments(**arguments(folder, **steps))
    model = make()
    made = None if optimizer is None else optimizer(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    run = kind(
        model=model,
        args=args,
        train_dataset=data or rows(64),
        data_collator=collate,
        optimizers=(made, None),
        callbacks=[*callbacks, Steps(mode)],
    )
    run.mode = mode
    with mode:
        run.train()
    return run


def state(model: nn.Module) -> dict[str, Tensor]:
    return weights(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}


def escalating(policy: Any = "none", **options: Any) -> HFCkptCallback:
    return HFCkptCallback(policy, on_oom="escalate", **options)


# --- Exactness. ---

CASES = [
    pytest.param(llama, 1, id="llama"),
    pytest.param(llama, 4, id="llama, accumulation"),
    pytest.param(partial(lora, target_modules=["q_proj", "down_proj"]), 1, id="lora with dropout"),
    pytest.param(batch_norm, 2, id="batch norm"),
    pytest.param(mixtral, 1, id="mixture"),
]


def points(mode: FailingOperators, offset: int) -> list[int]:
    """The first and the last operator of each phase of the second step, and every 17th, 34th ... between."""
    starts = sorted(set(mode.starts[1]))
    ends = [start - 1 for start in starts[1:]]
    stride = 17 * max(1, starts[-1] // (17 * MOST_BETWEEN))
    return sorted({*starts[:-1], *ends, *range(offset, starts[-1], stride)})


def spread(numbers: list[int]) -> Iterator[dict[int, list[int]]]:
    """One failure in each step but the first: the ladder of four layers has as many rungs."""
    for at in range(0, len(numbers), NUM_STEPS - 1):
        yield {step: [number] for step, number in enumerate(numbers[at : at + NUM_STEPS - 1], start=1)}


@pytest.mark.parametrize(("make", "accumulation"), CASES)
@pytest.mark.sweep(keep=1)
def test_a_step_that_failed_anywhere_gives_what_the_lean_plan_gives(
    make: Callable[[], nn.Module], accumulation: int, tmp_path: Path
) -> None:
    size = {"gradient_accumulation_steps": accumulation}
    lean = trained(make, tmp_path, FailingOperators(), HFCkptCallback("full"), **size)
    expected, logged = state(lean.model), losses(lean)
    counting = FailingOperators()
    trained(make, tmp_path, counting, escalating(prove="off"), **size)
    for number, at in enumerate(spread(points(counting, accumulation))):
        mode = FailingOperators(at, after=number % 2 == 1)
        callback = escalating(prove="off")
        run = trained(make, tmp_path, mode, callback, **size)
        assert mode.raised == len(at) == callback.report()["ckpt/oom_recovered"]
        assert changed(expected, state(run.model)) == []
        assert losses(run) == logged


@pytest.mark.parametrize("is_4bit", [False, True])
def test_adapters_on_experts_count_as_no_write_to_them(is_4bit: bool, tmp_path: Path) -> None:
    # PEFT sets those to themselves in each forward.
    if is_4bit:
        pytest.importorskip("bitsandbytes")
    make = partial(adapted_mixtral, is_4bit=is_4bit)
    lean = trained(make, tmp_path, FailingOperators(), HFCkptCallback("full"))
    counting = FailingOperators()
    trained(make, tmp_path, counting, escalating(prove="off"))
    # The ends of forward and backward.
    mode = FailingOperators({step: [start - 1] for step, start in enumerate(sorted(set(counting.starts[1]))[1:3], 1)})
    callback = escalating(prove="off")
    run = trained(make, tmp_path, mode, callback)
    assert mode.raised == callback.report()["ckpt/oom_recovered"] == 2
    assert changed(state(lean.model), state(run.model)) == []
    assert losses(run) == losses(lean)


@pytest.mark.parametrize("path", ["model.config", "args", "accelerator", "optimizer", "lr_scheduler"])
@pytest.mark.sweep(keep=1)
def test_numbers_on_objects_of_libraries_are_brought_back(path: str, tmp_path: Path) -> None:
    class Annealing(PhasedTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            # Before the forward: no loss is there to tell where that fails.
            holder: Any = attrgetter(path)(self)
            holder.num_calls = getattr(holder, "num_calls", 0) + 1
            return super().compute_loss(*args, **kwargs) * (1 + holder.num_calls / 100)

    size: dict[str, Any] = {"gradient_accumulation_steps": 2, "kind": Annealing}
    lean = trained(llama, tmp_path, FailingOperators(), HFCkptCallback("full"), **size)
    mode = FailingOperators({0: [40], 1: [40], 2: [1700]})
    run = trained(llama, tmp_path, mode, escalating(prove="off"), **size)
    assert mode.raised == 3
    assert changed(state(lean.model), state(run.model)) == []
    assert losses(run) == losses(lean)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("path", ["mlp.gate_proj", "self_attn", "input_layernorm"])
@pytest.mark.sweep(keep=1)
def test_what_modules_get_in_the_first_step_is_brought_back_in_the_second(
    path: str, accumulation: int, tmp_path: Path
) -> None:
    class Counting(PhasedTrainer):
        def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            module: Any = model.get_submodule(f"model.layers.1.{path}")
            module.num_calls = getattr(module, "num_calls", 0) + 1
            return super().compute_loss(model, *args, **kwargs) * (1 + module.num_calls / 100)

    size: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "kind": Counting}
    lean = trained(llama, tmp_path, FailingOperators(), HFCkptCallback("full"), **size)
    mode = FailingOperators({1: [40], 2: [700]})
    run = trained(llama, tmp_path, mode, escalating(prove="off"), **size)
    assert mode.raised == 2
    assert changed(state(lean.model), state(run.model)) == []
    assert losses(run) == losses(lean)


def test_a_plan_on_which_the_step_failed_in_pieces_is_tried_again(tmp_path: Path) -> None:
    expected = trained(llama, tmp_path, FailingOperators(), HFCkptCallback("attention"))
    mode = FailingOperators({step: [300] for step in range(NUM_STEPS)}, message=FRAGMENTED)
    callback = escalating("attention")
    run = trained(llama, tmp_path, mode, callback)
    assert changed(state(expected.model), state(run.model)) == []
    assert callback.report()["ckpt/oom_recovered"] == NUM_STEPS
    assert callback.report()["ckpt/plan_switches"] == 0
    assert callback.report()["ckpt/num_layers_attention"] == 4


def test_what_a_step_counts_on_the_host_is_counted_once(tmp_path: Path) -> None:
    class Counting(PhasedTrainer):
        """Counts and records as trl's trainers do, and draws from numpy and Python."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.tokens = getattr(self, "tokens", 0) + 1
            self.records = vars(self).setdefault("records", {"train": {"total": torch.zeros(())}})
            self.records["train"].setdefault("drawn", []).append((random.random(), float(np.random.rand())))
            loss = super().compute_loss(*args, **kwargs)
            self.records["train"]["total"] += loss.detach()
            return loss

    def counted(at: dict[int, list[int]]) -> tuple[Any, ...]:
        random.seed(0)
        np.random.seed(0)
        run = trained(
            llama,
            tmp_path,
            FailingOperators(at),
            escalating(),
            kind=Counting,
            gradient_accumulation_steps=2,
            include_num_input_tokens_seen="all",
        )
        return run.tokens, run.records, run.state.num_input_tokens_seen, run.state.total_flos, losses(run)

    # In the second micro-batch of the first step twice.
    assert counted({0: [1300, 2700], 2: [700]}) == counted({})


def test_layers_that_are_trained_only_later_are_undone_too(tmp_path: Path) -> None:
    def unfreezing(callback: HFCkptCallback, at: dict[int, list[int]]) -> PhasedTrainer:
        def make() -> nn.Module:
            model = llama(num_hidden_layers=2)
            model.model.layers[0].requires_grad_(requires_grad=False)
            return model

        unfreeze = During("on_step_begin", lambda model: model.requires_grad_(requires_grad=True), step=1)
        steps = FailingOperators(at), callback, unfreeze
        return trained(make, tmp_path, *steps, optimizer=torch.optim.SGD, gradient_accumulation_steps=2)

    expected = unfreezing(HFCkptCallback("full"), {})
    # In the second micro-batch.
    got = unfreezing(escalating(), {2: [700]})
    assert changed(state(expected.model), state(got.model)) == []


def test_what_a_module_notes_beside_its_buffers_is_brought_back(tmp_path: Path) -> None:
    """A rotary embedding that stretches with the longest row so far, of which it knows the length."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10.0}
    make = partial(llama, num_hidden_layers=1, max_position_embeddings=4, rope_parameters=rope)
    # Longer ones from row to row.
    data = [
        {name: row[:length] for name, row in each.items()} for each, length in zip(rows(8), range(1, 9), strict=True)
    ]

    def stretched(callback: HFCkptCallback, at: dict[int, list[int]]) -> PhasedTrainer:
        changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "kind": InOrder, "max_steps": 4}
        return trained(make, tmp_path, FailingOperators(at), callback, data=data, **changes)

    expected = stretched(HFCkptCallback("full"), {})
    got = stretched(escalating(), {3: [400]})
    assert changed(state(expected.model), state(got.model)) == []
    assert losses(got) == losses(expected)


def test_under_ddp_a_buffer_that_is_another_one_is_seen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    snapshots = AttributeSnapshots(("", model), buffers=SENT_BUFFERS)
    for _ in range(2):
        assert snapshots.now().changed_buffers() == []
    model[0].register_buffer("running_mean", torch.zeros(2))
    assert snapshots.now().changed_buffers() == ["running_mean"]


class InOrder(PhasedTrainer):
    """Trains on the rows as they come."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def test_a_window_that_the_end_of_a_stream_cut_short_goes_on(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return iter(rows(6))

    def streamed(callback: HFCkptCallback, at: dict[int, list[int]]) -> PhasedTrainer:
        make = partial(llama, num_hidden_layers=2)
        changes = {"gradient_accumulation_steps": 2, "data": Stream()}
        return trained(make, tmp_path, FailingOperators(at), callback, **changes)

    expected = streamed(HFCkptCallback("full"), {})
    callback = escalating()
    got = streamed(callback, {2: [300]})
    assert callback.report()["ckpt/oom_recovered"] == 1
    assert changed(state(expected.model), state(got.model)) == []
    assert losses(got) == losses(expected)


HALF_OFFLOADED = {"layers": "0:2", "mode": "full", "offload": {"to": "cpu", "min_bytes": 0}}


@pytest.mark.parametrize(
    ("policy", "num_layers"),
    [pytest.param(HALF_OFFLOADED, 4, id="from offload"), pytest.param("full", 5, id="to nested segments")],
)
@pytest.mark.sweep(keep=1)
def test_other_plans_are_left_and_come_to_as_exactly(policy: Any, num_layers: int, tmp_path: Path) -> None:
    make = partial(llama, num_hidden_layers=num_layers)
    expected = trained(make, tmp_path, FailingOperators(), HFCkptCallback("none"))
    mode, callback = FailingOperators({1: [700]}), escalating(policy)
    run = trained(make, tmp_path, mode, callback)
    assert mode.raised == callback.report()["ckpt/plan_switches"] == 1
    assert changed(state(expected.model), state(run.model)) == []


def test_what_the_failed_step_held_is_free_before_it_runs_again(tmp_path: Path) -> None:
    class Measured(PhasedTrainer):
        alive: list[int]

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.alive.append(everything.alive_bytes())
            return super().training_step(*args, **kwargs)

    def alive(at: dict[int, list[int]]) -> list[int]:
        Measured.alive = []
        with everything:
            trained(llama, tmp_path, FailingOperators(at), escalating(prove="off"), kind=Measured)
        return Measured.alive

    everything = Limit()
    before = alive({})
    everything = Limit()
    after = alive({2: [600], 3: [200]})
    assert before[0] > 0
    more = [got - known for got, known in zip(after, [*before[:3], *before[2:4], *before[3:]], strict=True)]
    # No activation: at most the rows of a batch, a loss and a number of tokens.
    assert max(more) <= 2 * 2 * LENGTH * 8 + 4 + 8


@pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.sweep(keep=1)
def test_a_trainer_of_trl_reports_what_it_does_without_a_failure(kind: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", minversion="1.16")
    from tests import trl_trainers

    class Failing(Phased, getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
        pass

    def logged(at: dict[int, list[int]]) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
        mode = FailingOperators(at)
        case = "adapters off" if kind == "DPO" else "whole"
        callbacks = escalating("none", prove="off"), Steps(mode)
        steps = {"max_steps": 3, "gradient_accumulation_steps": 2}
        run = trl_trainers.trainer(kind, case, tmp_path, *callbacks, derived=Failing, **steps)
        run.mode = mode  # type: ignore[attr-defined]
        with mode:
            run.train()
        assert mode.raised == len(at)
        return [
            {name: entry[name] for name in entry if "_per_s" not in name and "runtime" not in name}
            for entry in run.state.log_history
        ], weights(run.model)

    expected, trained_weights = logged({})
    got, got_weights = logged({1: [1600], 2: [30]})
    assert got == expected
    assert any("num_tokens" in entry for entry in got)
    assert changed(trained_weights, got_weights) == []


# --- Where it is not in force. ---


def test_in_several_processes_and_under_engines_the_reason_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def why(trainer: Any, planning: Any = None, **changes: Any) -> str:
        args = SimpleNamespace(**{"auto_find_batch_size": False, "deepspeed": None, "torch_compile": False, **changes})
        return recovery.why_not(trainer, args, planning) or "in force"  # type: ignore[arg-type]

    trainer = SimpleNamespace(is_fsdp_enabled=False, optimizer=object())
    assert why(trainer) == "in force"
    assert "callback.attach(trainer)" in why(None)
    assert "no optimizer" in why(SimpleNamespace(is_fsdp_enabled=False, optimizer=None))
    assert "auto_find_batch_size" in why(trainer, auto_find_batch_size=True)
    assert "sharded by an engine" in why(trainer, deepspeed="zero.json")
    assert "sharded by an engine" in why(SimpleNamespace(is_fsdp_enabled=True, optimizer=object()))
    assert "compiled" in why(trainer, torch_compile=True)
    monkeypatch.setattr(recovery.store, "num_processes", lambda: 2)
    assert "several processes share the model" in why(trainer)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapper = DistributedDataParallel(nn.Linear(2, 2))
        assert why(plain_trainer(wrapper)) == "in force"
        assert "compute_loss_func may send" in why(plain_trainer(wrapper, compute_loss_func=print))
        assert "PhasedTrainer.training_step and PhasedTrainer.compute_loss may send" in why(
            plain_trainer(wrapper, PhasedTrainer)
        )
        assert "compare their batches" in why(plain_trainer(wrapper), SimpleNamespace(compares_batches=True))
    finally:
        dist.destroy_process_group()


def plain_trainer(wrapper: nn.Module, kind: type[Trainer] = Trainer, **attributes: Any) -> Trainer:
    """A Trainer that was not made: only what decides is there."""
    trainer = kind.__new__(kind)
    vars(trainer).update(
        {"is_fsdp_enabled": False, "optimizer": object(), "model_wrapped": wrapper, "compute_loss_func": None}
    )
    vars(trainer).update(attributes)
    return trainer


def test_a_trainer_that_is_not_found_can_be_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_ckpt.callback.running_trainer", lambda: None)
    mode, callback = FailingOperators({1: [5]}), escalating()
    run = PhasedTrainer(
        model=llama(),
        args=TrainingArguments(**arguments(tmp_path)),
        train_dataset=rows(),
        callbacks=[callback, Steps(mode)],
    )
    run.mode = mode
    callback.attach(run)
    with mode:
        run.train()
    assert callback.report()["ckpt/oom_recovered"] == 1


# --- Nothing is left. ---


@pytest.mark.sweep
def test_after_200_recoveries_everything_is_as_after_none(tmp_path: Path) -> None:
    def left(at: dict[int, list[int]], num_steps: int = 2) -> tuple[Any, ...]:
        model = llama(num_hidden_layers=1, hidden_size=4, intermediate_size=4)
        before = traces.snapshot(model)
        callback = escalating()
        mode = FailingOperators(at, message=FRAGMENTED)
        settings = {"max_steps": num_steps, "logging_strategy": "no"}
        run = trained(lambda: model, tmp_path, mode, callback, **settings)
        assert callback.report()["ckpt/oom_recovered"] == mode.raised == len(at)
        gc.collect()
        alive = {each.untyped_storage()._cdata: each.nbytes for each in gc.get_objects() if isinstance(each, Tensor)}
        found = traces.differences(before, traces.snapshot(model))
        owners = (run, run.optimizer, run.optimizer.optimizer, *model.modules())
        return found, len(alive), sum(alive.values()), [sorted(vars(owner)) for owner in owners]

    # What torch makes once in a process is there.
    left({0: [3]})
    none = left({})
    assert left({step: [step % 300] for step in range(200)}, 201) == none
    assert "training_step" not in none[3][0]


def test_an_error_that_ends_training_leaves_no_method_behind(tmp_path: Path) -> None:
    def fail(model: nn.Module) -> None:
        raise RuntimeError("on purpose")

    model = llama()
    handle = model.lm_head.register_forward_pre_hook(lambda module, args: fail(module))
    run = PhasedTrainer(
        model=model, args=TrainingArguments(**arguments(tmp_path)), train_dataset=rows(), callbacks=[escalating()]
    )
    run.mode = FailingOperators()
    with pytest.raises(RuntimeError, match="on purpose"):
        run.train()
    assert "training_step" not in vars(run)
    handle.remove()
    run.add_callback(During("on_step_end", fail, step=1))
    with pytest.raises(RuntimeError, match="on purpose"):
        run.train()
    # No event and no method of the Trainer's saw that one: the next use of the model or of the method does.
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))
    assert "training_step" not in vars(run)


def test_copies_and_pickles_of_a_running_trainer_run_their_own_steps(tmp_path: Path) -> None:
    found: list[Any] = []

    def look(model: nn.Module) -> None:
        recovery = vars(run)["training_step"].args[0]
        copies = pickle.loads(pickle.dumps(recovery)), copy.deepcopy(recovery)
        found.extend(each.is_over() for each in (recovery, *copies))

    run = PhasedTrainer(
        model=llama(),
        args=TrainingArguments(**arguments(tmp_path)),
        train_dataset=rows(),
        callbacks=[escalating(), During("on_step_begin", look, step=1)],
    )
    run.mode = FailingOperators()
    run.train()
    assert found == [False, True, True]


# --- The ladder. ---


def test_when_no_plan_is_leaner_the_error_says_what_was_tried(tmp_path: Path) -> None:
    mode = FailingOperators({1: [5, 6, 7, 8, 9]})
    message = (
        r"Out of memory in the forward of step 2, with input_ids \(2, 8\), labels \(2, 8\)\. The allocator gave no "
        r"figures\. There is no leaner plan\. Tried: 1 more layer recomputed in full\..* There is no checkpoint to go "
        r"on from: 1 step is lost\."
    )
    with pytest.raises(OutOfMemoryError, match=message) as caught:
        trained(lambda: llama(num_hidden_layers=2), tmp_path, mode, escalating([{"layers": "0:1", "mode": "full"}]))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert mode.raised == 2


class WithTeacher(nn.Module):
    """A Llama beside a frozen one, to which each forward adds of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = llama(num_hidden_layers=1), llama(num_hidden_layers=1).requires_grad_(False)
        self.config = self.student.config

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            for own, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.lerp_(theirs, 0.1)
        return self.student(input_ids=input_ids, labels=labels)


class WithQueue(PhasedTrainer):
    """Keeps something large, and writes to it."""

    queue = torch.zeros(2000)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["queue"] = self.queue.add_(1)
        return super().compute_loss(*args, **kwargs)


class WritesToInputs(PhasedTrainer):
    """Writes to a tensor within its inputs."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["batch"]["input_ids"].add_(1).remainder_(VOCAB)
        return super().compute_loss(model, inputs["batch"], *args, **kwargs)


def nested(batch: list[dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {"batch": {name: torch.stack([row[name] for row in batch]) for name in batch[0]}}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"make": WithTeacher},
            r"weights have changed since it began \(.*an average that forwards update",
        ),
        ({"kind": WithQueue}, "has written to large tensors: queue"),
        (
            {"kind": WritesToInputs, "collate": nested, "remove_unused_columns": False},
            r"forward of step 2, with input_ids \(2, 8\), .* has written to its inputs: input_ids",
        ),
    ],
    ids=["teacher", "queue", "inputs"],
)
def test_what_cannot_be_brought_back_ends_the_run(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    make = partial(llama, num_hidden_layers=1)
    settings = {"make": make, "folder": tmp_path, "mode": FailingOperators({1: [100]}), **options}
    with pytest.raises(OutOfMemoryError, match=why):
        trained(settings.pop("make"), settings.pop("folder"), settings.pop("mode"), escalating(), **settings)


def test_errors_that_mention_memory_are_not_taken_for_its_want(monkeypatch: pytest.MonkeyPatch) -> None:
    # As the watch says it of another process.
    assert not is_out_of_memory(OtherProcessError("its process is gone (killed, or out of memory)"))
    assert not is_out_of_memory(ValueError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("the replay is out of memory slots"))
    said = (
        "NCCL error: Cuda failure 2 'out of memory'",
        "CUDA error: out of memory\nCUDA kernel errors might be",
        OF_CPU,
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(&handle)`",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    )
    # A handle that there is not is another fault, once it has been made.
    gone = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle, opa, opb, m, n, k)`"
    assert not is_out_of_memory(RuntimeError(gone))
    assert all(is_out_of_memory(RuntimeError(text)) for text in said)
    assert is_out_of_memory(HostMemoryError("no room"))
    # Of a run on the CPU it is the device's.
    of_cpu = Failure.caught(RuntimeError(OF_CPU))
    for is_available in (False, True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda is_available=is_available: is_available)
        assert of_cpu.is_of_host is is_available


def test_weights_that_change_in_backward_are_not_stepped_twice(tmp_path: Path) -> None:
    @torch.no_grad()
    def step(weight: Tensor) -> None:
        weight.sub_(1e-2 * weight.grad)

    model = llama()
    model.lm_head.weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(OutOfMemoryError, match=r"cannot be undone: weights have changed since it began"):
        trained(lambda: model, tmp_path, FailingOperators({1: [600]}), escalating())


def test_each_escalation_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(llama, tmp_path, FailingOperators({1: [5], 2: [600]}), escalating())
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line for line in lines if line.startswith("Out of memory")] == [
        "Out of memory in the forward of step 2 (input_ids (2, 8), labels (2, 8)). The allocator gave no figures. The "
        "step runs again: 1 more layer recomputed in full (1 of 4 layers recomputed, 0 before).",
        "Out of memory in the backward of step 3 (input_ids (2, 8), labels (2, 8)). The allocator gave no figures. The "
        "step runs again: 1 more layer recomputed in full (2 of 4 layers recomputed, 1 before).",
    ]
