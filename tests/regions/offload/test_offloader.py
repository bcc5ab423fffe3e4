"""Offloading to the host: the same bits come back, nothing is freed early, used early, or left behind."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_ckpt
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.policy.options import Offload
from hf_ckpt.regions.offload import cuda
from hf_ckpt.regions.offload.cuda import CudaWire
from hf_ckpt.regions.offload.eligible_tensors import reason_not_offloaded
from hf_ckpt.regions.offload.host_buffers import HostLink
from hf_ckpt.regions.offload.host_memory import HostLimits
from hf_ckpt.regions.offload.offloader import Offloader, run_offloaded
from hf_ckpt.regions.offload.transfer import Link, TensorLayout
from hf_ckpt.regions.recompute import recompute
from tests import exactness, plain_models, traces, training, zoo
from tests.late_copies import Late
from tests.offloading import LAYERS, TO_HOST, engine, is_empty

# --- Exactness. ---


@pytest.mark.parametrize("fraction", [None, 0.5])
@pytest.mark.parametrize("mode", ["full", "selective", "selective_attention"])
def test_gradients_are_the_same_bits(case: zoo.Case, mode: str, fraction: float | None) -> None:
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, mode, offload=Offload(min_bytes=0, fraction=fraction)) as applied:
        assert exactness.differences(expected, exactness.step(case)) == []
        stats = engine(applied).stats
        assert stats.bytes_in == stats.bytes_out > 0
        assert is_empty(engine(applied))


def test_training_has_the_same_losses(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_steps": 3, "bf16": True}
    without = training.trainer(training.lora(), tmp_path, **settings)
    without.train()
    callback = hf_ckpt.HFCkptCallback("full", offload=Offload(min_bytes=0, fraction=0.7))
    with_offload = training.trainer(training.lora(), tmp_path, callback, **settings)
    with_offload.train()
    assert training.losses(with_offload) == training.losses(without)
    assert training.changed(training.weights(without.model), training.weights(with_offload.model)) == []


def test_each_layer_but_the_last_sends_its_input(case: zoo.Case) -> None:
    hidden = case.inputs["input_ids"].numel() * case.model.config.hidden_size * 4
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST) as applied:
        exactness.step(case)
        stats = engine(applied).stats
    assert (stats.num_tensors, stats.bytes_out) == (LAYERS - 1, (LAYERS - 1) * hidden)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt2", "mixtral", "t5", "jamba"])
def test_other_architectures_are_exact(model_type: str) -> None:
    case = exactness.build(model_type, attn_implementation="eager")
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST) as applied:
        assert exactness.differences(expected, exactness.step(case)) == []
        assert sum(offloader.stats.num_tensors for offloader in applied.offloaders) > 0


def test_bf16_autocast_is_exact(case: zoo.Case) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = exactness.step(case)
        with hf_ckpt.apply(case.model, "full", offload=TO_HOST):
            assert exactness.differences(expected, exactness.step(case)) == []


def accumulated(case: zoo.Case) -> exactness.Result:
    case.model.zero_grad()
    torch.manual_seed(0)
    losses = [zoo.loss(case.model, case.inputs) for _ in range(3) if not _backward(case)]
    return torch.stack(losses).detach(), exactness.gradients(case.model)


def _backward(case: zoo.Case) -> None:
    zoo.loss(case.model, case.inputs).backward()


def two_forwards_then_one_backward(case: zoo.Case) -> exactness.Result:
    case.model.zero_grad()
    torch.manual_seed(0)
    loss = zoo.loss(case.model, case.inputs) + 2 * zoo.loss(case.model, case.inputs)
    loss.backward()
    return loss.detach(), exactness.gradients(case.model)


def two_backwards_of_one_graph(case: zoo.Case) -> exactness.Result:
    case.model.zero_grad()
    torch.manual_seed(0)
    loss = zoo.loss(case.model, case.inputs)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach(), exactness.gradients(case.model)


@pytest.mark.parametrize("run", [accumulated, two_forwards_then_one_backward, two_backwards_of_one_graph])
def test_unusual_steps_are_exact(case: zoo.Case, run: Callable[[zoo.Case], exactness.Result]) -> None:
    expected = run(case)
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST) as applied:
        assert exactness.differences(expected, run(case)) == []
        assert is_empty(engine(applied))


def test_second_derivatives_are_exact() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    given = torch.randn(3, 4, requires_grad=True)

    def second(region: Callable[..., Tensor]) -> Tensor:
        hidden = region(lambda x: torch.tanh(x @ weight), region(lambda x: torch.tanh(x @ weight), given * 1))
        (first,) = torch.autograd.grad(hidden.sum(), weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    offloader = Offloader(TO_HOST, 2)
    assert torch.equal(second(recompute), second(partial(run_offloaded, offloader, 0, recompute)))
    assert offloader.stats.num_tensors == 2
    assert is_empty(offloader)


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, :, ::2],
        lambda x: x.expand(2, *x.shape),
        lambda x: x[1:],
        lambda x: x.to(torch.bfloat16),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: x.sum(),
    ],
)
def test_a_tensor_comes_back_as_it_was(made: Callable[[Tensor], Tensor]) -> None:
    offloader, seen = Offloader(TO_HOST, 1), []
    leaf = torch.randn(8, 16, 64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        seen.append((x.detach().clone(), x.stride(), x.dtype, x.device, x.requires_grad))
        return x.abs().square()

    run_offloaded(offloader, 0, recompute, function, made(leaf * 1)).sum().backward()
    first, again = seen
    assert torch.equal(first[0], again[0])
    assert first[1:] == again[1:]


def test_a_layout_builds_the_same_layout() -> None:
    for tensor in (torch.randn(3, 4).T, torch.randn(6, 8)[::2, ::2], torch.randn(()), torch.randn(2, 1, 3)):
        layout = TensorLayout.of(tensor)
        again, content = layout.empty()
        content.copy_(layout.flat(tensor))
        again = layout.finish(again)
        assert torch.equal(again, tensor)
        assert again.stride() == tensor.stride()


def test_what_is_left_alone_is_said() -> None:
    weight = nn.Parameter(torch.randn(8, 64))
    plain = torch.randn(8, 64)
    assert reason_not_offloaded(plain, 0) is None
    assert reason_not_offloaded(weight * 1, 0) is None
    reasons = {
        "weight": reason_not_offloaded(weight, 0),
        "frozen weight": reason_not_offloaded(nn.Parameter(torch.randn(8), requires_grad=False), 0),
        "view of a weight": reason_not_offloaded(weight.view(-1), 0),
        "leaf": reason_not_offloaded(torch.randn(8, requires_grad=True), 0),
        "small": reason_not_offloaded(plain, 2**20),
        "expanded": reason_not_offloaded(plain[:1].expand(4, 64), 0),
        "sparse": reason_not_offloaded(plain.to_sparse(), 0),
        "odd": reason_not_offloaded(plain[:, 1:], 0),
    }
    assert None not in reasons.values()
    assert reasons["small"] == "smaller than min_bytes=1048576"


def test_the_same_tensor_is_sent_once_and_stays_for_other_layers() -> None:
    offloader = Offloader(TO_HOST, 2)
    given = torch.randn(8, 64)

    def both(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    weight = torch.randn(64, requires_grad=True)
    first = run_offloaded(offloader, 0, recompute, lambda x, y: both(x, y) * weight, given, given)
    second = run_offloaded(offloader, 1, recompute, lambda x, y: both(x, y), first, given)
    second.sum().backward()
    assert torch.equal(weight.grad, (given**3).sum(0))
    stats = offloader.stats
    assert stats.num_tensors == 2
    assert list(stats.num_not_offloaded.values()) == [1]


def test_tensors_below_the_threshold_are_no_silent_success(case: zoo.Case) -> None:
    with hf_ckpt.apply(case.model, "full", offload="cpu") as applied:
        assert engine(applied).faults() == []
        exactness.step(case)
        (fault,) = engine(applied).faults()
    assert fault == (
        f"offload was asked for {LAYERS - 1} layers, but nothing was sent away: "
        f"{LAYERS - 1} smaller than min_bytes=1048576. Lower min_bytes, or leave offload out."
    )


# --- What is left behind. ---


@pytest.mark.sweep
def test_a_hundred_steps_use_the_same_buffers() -> None:
    case = plain_models.case()
    with hf_ckpt.apply(case.model, "full", layers="blocks", offload=TO_HOST) as applied:
        exactness.step(case)
        pool = engine(applied)._link.pool
        made = set(map(id, pool._free))
        for _ in range(100):
            exactness.step(case)
        assert is_empty(engine(applied))
        assert set(map(id, pool._free)) == made
        assert len(made) == 3
        assert pool.held_bytes == pool.free_bytes  # none is lent


def test_a_forward_without_a_backward_leaves_nothing(case: zoo.Case) -> None:
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST) as applied:
        loss = zoo.loss(case.model, case.inputs)
        assert engine(applied).stats.num_live == LAYERS - 1
        del loss
        assert is_empty(engine(applied))


class _FailureError(Exception):
    pass


def _fail(*_: object) -> None:
    raise _FailureError


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layer_idx", [0, 2, 4])
def test_a_failed_step_leaves_nothing(case: zoo.Case, where: str, layer_idx: int) -> None:
    expected = exactness.step(case)
    layer = case.model.base_model.model.model.layers[layer_idx]
    late = Late()
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST) as applied:
        engine(applied).use_link(HostLink(CudaWire(late), HostLimits(None)))
        hook = (
            layer.mlp.register_forward_pre_hook(_fail)
            if where == "forward"
            else layer.mlp.register_full_backward_hook(_fail)
        )
        with pytest.raises(_FailureError):
            exactness.step(case)
        hook.remove()
        assert is_empty(engine(applied))
        assert exactness.differences(expected, exactness.step(case)) == []
        assert late.faults == []


def test_a_write_into_what_is_being_copied_is_refused() -> None:
    offloader = Offloader(TO_HOST, 1)
    offloader.use_link(HostLink(CudaWire(Late()), HostLimits(None)))
    hidden = torch.randn(8, 64, requires_grad=True) * 1
    with pytest.raises(UnsupportedError, match="writes into a tensor that it is given"):
        run_offloaded(offloader, 0, recompute, lambda x: torch.tanh(x.add_(1)), hidden)


class _Captured(Late):
    """Asks torch, as the real device does, whether a graph is captured."""

    def is_capturing(self, device: torch.device) -> bool:
        return cuda.CudaDevice().is_capturing(device)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def set_to(is_on: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_on)

    set_to(False)
    return set_to


def test_a_captured_forward_is_refused_before_anything_is_copied(
    case: zoo.Case, capture: Callable[[bool], None]
) -> None:
    expected = exactness.step(case)
    device = _Captured()
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST) as applied:
        engine(applied).use_link(HostLink(CudaWire(device), HostLimits(None)))
        capture(True)
        with pytest.raises(UnsupportedError) as error:
            exactness.step(case)
        said = str(error.value)
        del error
        pool = engine(applied)._link.pool
        assert (device.log, pool.peak_bytes) == ([], 0)
        assert is_empty(engine(applied))
        capture(False)
        assert exactness.differences(expected, exactness.step(case)) == []
    assert said == (
        "A layer with offload runs while a CUDA graph is captured on cpu, but a graph replays its copies without "
        "asking which buffers are free. Leave offload out of the policy, or capture no graph around the step "
        '(torch.cuda.graph, make_graphed_callables, torch.compile with mode="reduce-overhead").'
    )


def test_a_captured_backward_is_refused_before_anything_is_copied(
    case: zoo.Case, capture: Callable[[bool], None]
) -> None:
    device = _Captured()
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST) as applied:
        engine(applied).use_link(HostLink(CudaWire(device), HostLimits(None)))
        loss = zoo.loss(case.model, case.inputs)
        copied = list(device.log)
        capture(True)
        with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
            loss.backward()
        assert device.log == copied
        capture(False)
        case.model.zero_grad()
        del loss
        assert is_empty(engine(applied))


def test_threads_share_an_engine() -> None:
    offloader = Offloader(TO_HOST, 3)
    late = Late()
    offloader.use_link(HostLink(CudaWire(late), HostLimits(None)))

    def train(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(64, 64, generator=generator, requires_grad=True)
        given = torch.randn(8, 64, generator=generator)
        results = []
        for region in (recompute, None):
            hidden = given
            for position in range(3):
                chosen = region or partial(run_offloaded, offloader, position, recompute)
                hidden = chosen(lambda x: torch.tanh(x @ weight), hidden)
            results.append(torch.autograd.grad(hidden.sum(), weight)[0])
        return torch.equal(*results)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(train, range(40)))
    assert is_empty(offloader)
    assert offloader.stats.num_tensors == 40 * 3
    assert late.faults == []


def test_what_is_out_stays_good_after_removal(case: zoo.Case) -> None:
    expected = exactness.step(case)
    case.model.zero_grad()
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST) as applied:
        offloader = engine(applied)
        torch.manual_seed(0)
        loss = zoo.loss(case.model, case.inputs)
    loss.backward()
    assert exactness.differences(expected, (loss.detach(), exactness.gradients(case.model))) == []
    del loss
    assert is_empty(offloader)
    assert offloader.stats.host_bytes == 0


def test_removal_leaves_no_trace(case: zoo.Case) -> None:
    found = traces.snapshot(case.model)
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST):
        exactness.step(case)
    case.model.zero_grad()
    assert traces.differences(found, traces.snapshot(case.model)) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_the_model_have_engines_of_their_own(
    case: zoo.Case, copied: Callable[[nn.Module], nn.Module]
) -> None:
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST) as applied:
        loss = zoo.loss(case.model, case.inputs)
        before = engine(applied).stats
        other = zoo.Case(case.model_type, copied(case.model), case.inputs)
        assert exactness.differences(expected, exactness.step(other)) == []
        assert engine(applied).stats == before
        loss.backward()


def test_engines_work_on_fake_tensors() -> None:
    class Fakes(Link):
        num_there = 0

        def send(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
            self.num_there += 1
            return tensor.shape, tensor.dtype

        def receive(self, handle: tuple[torch.Size, torch.dtype]) -> Tensor:
            return torch.empty(handle[0], dtype=handle[1])

        def release(self, handle: object) -> None:
            self.num_there -= 1

    offloader, link = Offloader(TO_HOST, 2), Fakes()
    offloader.use_link(link)
    with FakeTensorMode():
        weight = torch.randn(64, 64, requires_grad=True)
        hidden = torch.randn(8, 64)
        for position in range(2):
            hidden = run_offloaded(offloader, position, recompute, lambda x: torch.tanh(x @ weight), hidden)
        assert link.num_there == 2
        hidden.sum().backward()
        assert weight.grad.shape == (64, 64)
    del hidden
    assert is_empty(offloader)
    assert link.num_there == 0
