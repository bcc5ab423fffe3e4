"""What a device knows first is read once for all regions, and raised before weights change.

There is no device here: the CPU's tensors are treated as one's.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_ckpt
from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions import fingerprints, pending_errors
from hf_ckpt.regions.execution_state import is_in_backward
from hf_ckpt.regions.module_state import STATE
from tests import modes, plain_models, training, zoo
from tests.exactness import POLICIES
from tests.modes import MODES

pytestmark = pytest.mark.core

WRITTEN = "since its forward weights were written to"


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "is_read_late", lambda tensor: True)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each moment at which the host asks for values of booleans; masks are looked at in forward only."""
    found: list[str] = []

    def noting(name: str, read: Any, tensor: Tensor) -> Any:
        if tensor.dtype is torch.bool and (name != "__bool__" or is_in_backward()):
            found.append(name)
        return read(tensor)

    for name in ("item", "tolist", "__bool__"):
        read = getattr(Tensor, name)
        # A function, as a `partial` is not bound to the tensor.
        monkeypatch.setattr(Tensor, name, lambda tensor, name=name, read=read: noting(name, read, tensor))
    return found


def in_force(model: nn.Module, way: str) -> hf_ckpt.patch.apply.Applied:
    policy, options = MODES[way] if way in MODES else POLICIES[way]
    return hf_ckpt.apply(model, policy, **options, prove="off")


def loss_of(case: zoo.Case) -> Tensor:
    torch.manual_seed(0)
    return zoo.loss(case.model, case.inputs)


def write(model: nn.Module, by: float = 1.0) -> None:
    """Write to all weights so that only their values tell."""
    for parameter in model.parameters():
        parameter.data.add_(by)


@contextmanager
def written(model: nn.Module) -> Iterator[None]:
    found = [parameter.detach().clone() for parameter in model.parameters()]
    write(model)
    yield
    for parameter, values in zip(model.parameters(), found, strict=True):
        parameter.data.copy_(values)


@pytest.mark.parametrize("way", ["full", "attention", "ffn", "segments_2", "nested", "selective", "offload"])
def test_the_device_is_asked_once_in_each_backward(way: str, reads: list[str]) -> None:
    case = modes.llama()
    with in_force(case.model, way):
        for num_backwards in (1, 2):
            loss = loss_of(case)
            reads.clear()
            for _ in range(num_backwards):
                loss.backward(retain_graph=True)
            assert reads == ["tolist"] * num_backwards
        gradients = torch.autograd.grad(loss_of(case), list(case.model.parameters()), allow_unused=True)
        assert gradients
        assert reads == ["tolist"] * 3


@pytest.mark.parametrize("way", ["full", "attention", "segments_2", "nested", "selective", "offload", "none_tiles"])
def test_the_first_region_that_was_changed_is_named(way: str) -> None:
    case = modes.llama()
    with in_force(case.model, way):
        loss = loss_of(case)
        write(case.model.model.layers[1])
        with pytest.raises(UnsupportedError, match=rf"model\.layers\.1\S* is recomputed in backward, but {WRITTEN}"):
            loss.backward()
        # It is said once.
        loss_of(case).backward()


def test_a_buffer_with_other_values_is_named() -> None:
    class Adding(plain_models.Block):
        def __init__(self) -> None:
            super().__init__()
            # Larger than what is copied before each forward.
            self.register_buffer("table", torch.arange(8192.0) / 8192)

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden + self.table[: plain_models.WIDTH])

    case = plain_models.case(plain_models.Decoder([Adding() for _ in range(3)]))
    with in_force(case.model, "full"):
        loss = loss_of(case)
        for block in case.model.blocks:
            block.table.add_(0)
        loss.backward()
        loss = loss_of(case)
        case.model.blocks[1].table.add_(1)
        with pytest.raises(UnsupportedError, match=r"blocks\.1 .* buffers have got other values: table\. "):
            loss.backward()


def test_a_backward_that_is_abandoned_leaves_nothing_behind() -> None:
    case = modes.llama()

    def run_out(gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("planted")

    with in_force(case.model, "full") as applied:
        handle = case.model.model.embed_tokens.register_forward_hook(
            lambda module, args, output: output.register_hook(run_out) and None
        )
        loss = loss_of(case)
        handle.remove()
        with written(case.model), pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        assert not list(applied.pending_errors._backwards)
        loss_of(case).backward()


def test_a_backward_inside_of_another_has_its_own(reads: list[str]) -> None:
    outer, inner = modes.llama(), modes.llama()
    with in_force(outer.model, "full"), in_force(inner.model, "full"):
        loss, nested = loss_of(outer), loss_of(inner)
        outer.model.model.layers[1].mlp.down_proj.weight.register_hook(lambda gradient: nested.backward())
        reads.clear()
        loss.backward()
        assert reads == ["tolist", "tolist"]
        loss, nested = loss_of(outer), loss_of(inner)
        with written(inner.model), pytest.raises(UnsupportedError, match=WRITTEN):
            loss.backward()


def test_a_backward_inside_of_another_of_the_same_model_has_its_own() -> None:
    case = modes.llama()
    with in_force(case.model, "full"):
        loss, nested = loss_of(case), loss_of(case)
        case.model.lm_head.weight.register_hook(lambda gradient: inside.pop().backward() if inside else None)
        inside = [nested]
        write(case.model.model.layers[0])
        with pytest.raises(UnsupportedError, match=r"model\.layers\.0 "):
            loss.backward()


def test_two_threads_get_their_own_errors() -> None:
    raised: dict[str, str] = {}
    barrier = threading.Barrier(2, timeout=30)

    def run(name: str, loss: Tensor) -> None:
        barrier.wait()
        try:
            loss.backward()
        except UnsupportedError as error:
            raised[name] = str(error)

    case = plain_models.case(plain_models.Decoder())
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            # Threads do not share random numbers.
            module.p = 0.0
    with in_force(case.model, "full"):
        before = loss_of(case)
        write(case.model.blocks[1])
        losses = {"changed": before, "unchanged": loss_of(case)}
        threads = [threading.Thread(target=run, args=each) for each in losses.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert list(raised) == ["changed"]
    assert "blocks.1 " in raised["changed"]


# --- Held back. ---


def test_errors_that_are_held_back_are_raised_when_asked_for(reads: list[str]) -> None:
    case = modes.llama()
    with in_force(case.model, "full") as applied:
        applied.pending_errors.hold()
        reads.clear()
        loss = loss_of(case)
        with written(case.model.model.layers[1]):
            loss.backward()
        loss_of(case).backward()
        assert reads == []
        with pytest.raises(UnsupportedError, match=r"model\.layers\.1 "):
            applied.pending_errors.read()
        assert reads == ["tolist"]
        applied.pending_errors.read()
        # From then on each backward asks for itself.
        loss_of(case).backward()
        assert reads == ["tolist"] * 2


def test_no_more_are_held_back_than_a_mebibyte_takes(monkeypatch: pytest.MonkeyPatch, reads: list[str]) -> None:
    case = modes.llama()
    num_layers = len(case.model.model.layers)
    monkeypatch.setattr(pending_errors, "_MAX_HELD", 4 * num_layers)
    with in_force(case.model, "full") as applied:
        applied.pending_errors.hold()
        reads.clear()
        for expected in (0, 0, 1, 1, 1, 2):
            loss_of(case).backward()
            assert len(reads) == expected


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_holds_nothing_back(make_copy: Any) -> None:
    case = modes.llama()
    with in_force(case.model, "full") as applied:
        applied.pending_errors.hold()
        loss = loss_of(case)
        with written(case.model):
            loss.backward()
        copied = make_copy(case.model)
        of_regions = [vars(module)[STATE].errors for module in copied.modules() if STATE in vars(module)]
        assert len({id(errors) for errors in of_regions}) == 1
        assert of_regions[0] is not applied.pending_errors
        of_regions[0].read()
        loss = zoo.loss(copied, case.inputs)
        write(copied)
        with pytest.raises(UnsupportedError, match=WRITTEN):
            loss.backward()


# --- Under the Trainer. ---


class Writing(Trainer):
    """Writes to the weights between a forward and its backward; brings them back after."""

    at_micro_batch = -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_micro_batches = 0
        self.before: dict[str, Tensor] = {}
        self.steps = 0

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if self.num_micro_batches == self.at_micro_batch:
            self.before = training.weights(model)
            write(model.model.layers[1], 0.5)
        return found

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        returned = super().training_step(model, *args, **kwargs)
        for name, values in self.before.items():
            model.get_parameter(name).data.copy_(values)
        self.num_micro_batches += 1
        return returned


def run_of(folder: Path, at: int, callback: HFCkptCallback, *others: TrainerCallback, **changes: Any) -> Writing:
    args = TrainingArguments(**training.arguments(folder, gradient_accumulation_steps=3, max_steps=2, **changes))
    run = Writing(model=training.llama(), args=args, train_dataset=training.rows(), callbacks=[callback, *others])
    run.at_micro_batch = at
    return run


class Steps(TrainerCallback):
    """Counts optimizer steps, and how often the device was asked in each."""

    def __init__(self, reads: list[str]) -> None:
        self.reads = reads
        self.counts: list[int] = []
        self.num_steps = 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.reads.clear()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.num_steps += 1
        self.counts.append(self.reads.count("tolist"))


def test_the_trainer_asks_once_in_a_step(tmp_path: Path, reads: list[str]) -> None:
    steps = Steps(reads)
    run_of(tmp_path, -1, HFCkptCallback("full", prove="off"), steps).train()
    assert steps.counts == [1, 1]


@pytest.mark.parametrize("at", [0, 2, 4])
def test_no_weight_changes_by_a_gradient_that_was_refused(tmp_path: Path, at: int, reads: list[str]) -> None:
    steps = Steps(reads)
    callback = HFCkptCallback("full", prove="off")
    run = run_of(tmp_path, at, callback, steps)
    with pytest.raises(UnsupportedError, match=rf"model\.layers\.1 .* {WRITTEN}"):
        run.train()
    assert steps.num_steps == at // 3
    # The micro-batches of the step have run to their end.
    assert run.num_micro_batches == 3 * (at // 3) + 3
    assert training.changed(run.before, training.weights(run.model)) == []
    assert not hf_ckpt.remove(run.model)


def test_deepspeed_changes_weights_in_backward_and_so_each_asks(tmp_path: Path, reads: list[str]) -> None:
    steps = Steps(reads)
    run = run_of(tmp_path, 1, HFCkptCallback("full", prove="off"), steps)
    # As with the plugin of a configuration, or of accelerate's launcher; the Trainer has looked already.
    run.args.deepspeed_plugin = SimpleNamespace(deepspeed_config={})
    with pytest.raises(UnsupportedError, match=WRITTEN):
        run.train()
    assert run.num_micro_batches == 1


def test_another_plan_in_a_step_forgets_nothing(tmp_path: Path) -> None:
    callback = HFCkptCallback("full", prove="off")

    class Changing(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            running = callback._run
            assert running is not None
            running.change_plan(running.applied.plan, is_alone=True)

    run = run_of(tmp_path, 0, callback, Changing())
    with pytest.raises(UnsupportedError, match=WRITTEN):
        run.train()
    assert run.num_micro_batches == 3


def test_what_nobody_asked_for_is_raised_when_the_next_step_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HFCkptCallback, "on_pre_optimizer_step", lambda *args, **kwargs: None)
    run = run_of(tmp_path, 1, HFCkptCallback("full", prove="off"))
    with pytest.raises(UnsupportedError, match=WRITTEN):
        run.train()
    assert run.num_micro_batches == 3


def test_a_backward_that_ran_out_of_memory_leaves_no_error_in_the_step_that_is_recovered(tmp_path: Path) -> None:
    failed: list[dict[str, Tensor]] = []

    class Failing(Writing):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            is_failing = self.num_micro_batches == 1 and not failed
            hook = model.model.layers[0].register_forward_hook(self.watch) if is_failing else None
            found = super().compute_loss(model, inputs, *args, **kwargs)
            if hook is not None:
                hook.remove()
                failed.append(training.weights(model))
                write(model.model.layers[3])
            return found

        def watch(self, module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(self.fail)

        def fail(self, gradient: Tensor) -> None:
            for name, values in failed[0].items():
                self.model.get_parameter(name).data.copy_(values)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    callback = HFCkptCallback({"layers": "1:", "mode": "full"}, prove="off", on_oom="escalate")
    args = TrainingArguments(**training.arguments(tmp_path, gradient_accumulation_steps=3, max_steps=2))
    run = Failing(model=training.llama(), args=args, train_dataset=training.rows(), callbacks=[callback])
    run.train()
    assert len(failed) == 1
    assert callback.report()["ckpt/oom_recovered"] == 1
