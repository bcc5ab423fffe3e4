"""The tracker sees what lives: each storage once, from the operator that makes it to whoever holds it last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hf_ckpt.simulation.constant_folding import fold
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory
from hf_ckpt.simulation.tape import read_tape, sort_frees
from hf_ckpt.simulation.tracker import Tracker, parameters_and_buffers

KIB = 1024


def told(tracker: Tracker) -> list[tuple[str, int]]:
    """What came and went, in bytes."""
    return [(event.change.value, event.storage.num_bytes) for event in tracker.tape.events if event.storage is not None]


def memory_of(tracker: Tracker) -> StepMemory:
    return read_tape(tracker.tape, device="cpu", plan=None, tokens=1)


def test_a_storage_counts_once_however_many_views_it_has() -> None:
    with Tracker() as tracker:
        tensor = torch.zeros(256)
        views = [tensor.view(16, 16), tensor[3:], tensor.detach()]
        del tensor, views[1:]
        assert told(tracker) == [("allocate", KIB)]
        views.clear()
    assert told(tracker) == [("allocate", KIB), ("free", KIB)]


def test_blocks_are_rounded_up_as_the_allocator_does() -> None:
    with Tracker(rounding=512) as tracker:
        held = [torch.zeros(1), torch.zeros(128), torch.zeros(129)]
        assert told(tracker) == [("allocate", 512), ("allocate", 512), ("allocate", 1024)]
    assert len(held) == 3


def test_what_was_there_before_is_no_event() -> None:
    model = nn.Linear(16, 16, bias=False)
    with Tracker() as tracker:
        tracker.record_existing(parameters_and_buffers(model), Category.PARAMETERS)
        view = model.weight.t()
        assert told(tracker) == []
    assert [(storage.num_bytes, storage.parameter) for storage in tracker.tape.before] == [(KIB, "weight")]
    assert view.shape == (16, 16)


def test_nothing_is_written_after_the_step() -> None:
    with Tracker() as tracker:
        tensor = torch.zeros(256)
    del tensor
    assert told(tracker) == [("allocate", KIB)]


def test_phases_are_told_apart_by_what_autograd_does() -> None:
    def region(inputs: Tensor) -> Tensor:
        return inputs.exp().exp()

    inputs = torch.zeros(256, requires_grad=True)
    with Tracker() as tracker:
        tracker.record_existing([("inputs", inputs)], Category.TEMPORARY)
        loss = checkpoint(region, inputs, use_reentrant=False).sum()
        loss.backward()
    made = [(event.place.phase, event.place.operator) for event in tracker.tape.events if event.change == "allocate"]
    exps = [phase for phase, operator in made if operator == "aten.exp.default"]
    assert exps == [Phase.FORWARD, Phase.FORWARD, Phase.RECOMPUTATION, Phase.RECOMPUTATION]
    assert (Phase.BACKWARD, "aten.mul.Tensor") in made


def test_held_for_backward_is_saved_and_what_is_let_go_is_temporary() -> None:
    inputs = torch.zeros(256, requires_grad=True)
    with Tracker() as tracker:
        tracker.record_existing([("inputs", inputs)], Category.TEMPORARY)
        held = inputs.exp()
        loss = (held + 1.0).sum()
        del held
        loss.backward()
        memory = memory_of(tracker)
    large = [(tensor.place.operator, tensor.num_bytes) for tensor in memory.ledger if tensor.num_bytes > 4]
    assert large == [("aten.exp.default", KIB)]


def test_what_is_let_go_at_once_is_put_in_the_order_in_which_it_was_made() -> None:
    with Tracker() as tracker:
        held = [torch.zeros(size) for size in (1, 2, 3)]
        held.reverse()
        while held:
            held.pop(0)
    assert [size for change, size in told(tracker) if change == "free"] == [12, 8, 4]
    sort_frees(tracker.tape)
    assert [size for change, size in told(tracker) if change == "free"] == [4, 8, 12]


def test_a_function_mode_does_not_see_what_is_read_of_tensors() -> None:
    seen: list[object] = []

    class Counting(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with FakeTensorMode() as mode:
        weight = torch.ones(8, 8, requires_grad=True)
    engine: Any = torch.autograd.Variable._execution_engine
    for _ in range(3):
        # What ran once is remembered: the last time, as the gradient is there as in the one before, no operator runs.
        seen.clear()
        with mode, Tracker(run=fold) as tracker:
            loss = (weight @ weight).exp().sum()
            gradients = (torch.ones_like(loss),)
            with Counting():
                engine.run_backward((loss,), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert len(tracker.tape.events) > 10
    assert seen == []
