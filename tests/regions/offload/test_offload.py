"""Offloading to the host: the same bits come back, nothing is freed early, used early, or left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import mmap
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_ckpt
from hf_ckpt.errors import HostMemoryError, UnsupportedError
from hf_ckpt.policy.modifiers import Offload
from hf_ckpt.regions.offload import Link, Offloader, announced, cuda, offloaded, pinned
from hf_ckpt.regions.offload.cuda import CudaArrival, CudaTrip, CudaWire
from hf_ckpt.regions.offload.host import HostLink
from hf_ckpt.regions.offload.host_memory import HostMemory
from hf_ckpt.regions.offload.limits import HostLimits
from hf_ckpt.regions.offload.link import DeviceMemory
from hf_ckpt.regions.offload.pace import Pace
from hf_ckpt.regions.offload.pinned import PinnedPages
from hf_ckpt.regions.offload.plain import PlainMemory, PlainWire
from hf_ckpt.regions.offload.pool import Pool
from hf_ckpt.regions.offload.schedule import Group, Order, is_offloaded, num_offloaded
from hf_ckpt.regions.offload.tensors import Layout, why_left_alone
from hf_ckpt.regions.recompute import recompute
from tests import exactness, plain_models, traces, training, zoo
from tests.late_copies import Late, Stream

pytestmark = pytest.mark.core

TO_HOST = Offload(min_bytes=0)
LAYERS = 5


@pytest.fixture(autouse=True)
def _fresh_memory_holds_nonsense() -> Iterator[None]:
    # torch fills what `empty` makes with NaN then, so that a copy which never came cannot look right by chance.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def case() -> zoo.Case:
    """A Llama with adapters and dropout."""
    return exactness.lora(exactness.build("llama", num_layers=LAYERS, attn_implementation="eager"), lora_dropout=0.1)


def engine(applied: Any) -> Offloader:
    (only,) = applied.offloaders
    return only


def is_empty(offloader: Offloader) -> bool:
    """Whether nothing is out any more."""
    gc.collect()
    stats = offloader.stats
    return (stats.num_live, stats.live_bytes) == (0, 0) and not (offloader._flights or offloader._sent)


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
    assert torch.equal(second(recompute), second(partial(offloaded, offloader, 0, recompute)))
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

    offloaded(offloader, 0, recompute, function, made(leaf * 1)).sum().backward()
    first, again = seen
    assert torch.equal(first[0], again[0])
    assert first[1:] == again[1:]


def test_a_layout_builds_the_same_layout() -> None:
    for tensor in (torch.randn(3, 4).T, torch.randn(6, 8)[::2, ::2], torch.randn(()), torch.randn(2, 1, 3)):
        layout = Layout.of(tensor)
        again, content = layout.empty()
        content.copy_(layout.flat(tensor))
        again = layout.finish(again)
        assert torch.equal(again, tensor)
        assert again.stride() == tensor.stride()


def test_what_is_left_alone_is_said() -> None:
    weight = nn.Parameter(torch.randn(8, 64))
    plain = torch.randn(8, 64)
    assert why_left_alone(plain, 0) is None
    assert why_left_alone(weight * 1, 0) is None
    reasons = {
        "weight": why_left_alone(weight, 0),
        "frozen weight": why_left_alone(nn.Parameter(torch.randn(8), requires_grad=False), 0),
        "view of a weight": why_left_alone(weight.view(-1), 0),
        "leaf": why_left_alone(torch.randn(8, requires_grad=True), 0),
        "small": why_left_alone(plain, 2**20),
        "expanded": why_left_alone(plain[:1].expand(4, 64), 0),
        "sparse": why_left_alone(plain.to_sparse(), 0),
        "odd": why_left_alone(plain[:, 1:], 0),
    }
    assert None not in reasons.values()
    assert reasons["small"] == "smaller than min_bytes=1048576"


def test_the_same_tensor_is_sent_once_and_stays_for_other_layers() -> None:
    offloader = Offloader(TO_HOST, 2)
    given = torch.randn(8, 64)

    def both(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    weight = torch.randn(64, requires_grad=True)
    first = offloaded(offloader, 0, recompute, lambda x, y: both(x, y) * weight, given, given)
    second = offloaded(offloader, 1, recompute, lambda x, y: both(x, y), first, given)
    second.sum().backward()
    assert torch.equal(weight.grad, (given**3).sum(0))
    stats = offloader.stats
    assert stats.num_tensors == 2
    assert list(stats.num_left_alone.values()) == [1]


def test_tensors_below_the_threshold_are_no_silent_success(case: zoo.Case) -> None:
    with hf_ckpt.apply(case.model, "full", offload="cpu") as applied:
        assert engine(applied).faults() == []
        exactness.step(case)
        (fault,) = engine(applied).faults()
    assert fault == (
        f"offload was asked for {LAYERS - 1} layers, but nothing was sent away: "
        f"{LAYERS - 1} smaller than min_bytes=1048576. Lower min_bytes, or leave offload out."
    )


# --- Late copies: whoever does not wait is found out. ---


def late_link(case: zoo.Case, mode: str, fraction: float | None = None) -> tuple[list[str], Late]:
    """Step twice over copies that come as late as they may; return what differs, and the device."""
    expected = exactness.step(case)
    late = Late()
    with hf_ckpt.apply(case.model, mode, offload=Offload(min_bytes=0, fraction=fraction), prove="off") as applied:
        engine(applied).use_link(HostLink(CudaWire(late), HostLimits(None)))
        changed = [name for _ in range(2) for name in exactness.differences(expected, exactness.step(case))]
        assert engine(applied).stats.num_tensors > 0
    return changed, late


@pytest.mark.parametrize("fraction", [None, 0.5])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_late_copies_change_nothing(case: zoo.Case, mode: str, fraction: float | None) -> None:
    changed, late = late_link(case, mode, fraction)
    assert (changed, late.faults) == ([], [])


def test_a_source_that_is_freed_early_is_found(case: zoo.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaTrip, "order", lambda trip: None)
    changed, late = late_link(case, "full")
    assert changed
    assert set(late.faults) == {"the source was freed"}


def test_a_tensor_that_is_used_early_is_found(case: zoo.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaArrival, "take", lambda arrival: arrival._layout.finish(arrival._tensor))
    changed, _ = late_link(case, "full")
    assert changed


def test_each_copy_starts_behind_what_it_needs() -> None:
    late, offloader = Late(), Offloader(TO_HOST, 2)
    offloader.use_link(HostLink(CudaWire(late), HostLimits(None)))
    weight = torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        hidden = torch.randn(8, 64)
        for position in range(2):
            hidden = offloaded(offloader, position, recompute, lambda x: torch.tanh(x @ weight), hidden)
        hidden.sum().backward()
    forward = [
        ["out waits for compute", "out copies", "compute waits for out"],
        ["out waits for compute", "out copies", "compute waits for out"],
    ]
    # The memory of what comes back may still be in use, and the bytes have to be on the host.
    back = ["into waits for compute", "into waits for out", "into copies"]
    backward = [[*back, "compute waits for into", *back], ["compute waits for into"]]
    first = [line.rstrip(" 0123456789") for line in late.log]
    expected = [line for lines in (*forward, *backward) for line in lines]
    assert first[: len(expected)] == expected
    # The second step uses the buffers of the first again, behind the copies out of them.
    again = ["out waits for compute", "out waits for into", "out copies", "compute waits for out"]
    assert first[len(expected) : len(expected) + 8] == again * 2


def test_what_a_region_made_is_copied_beside_the_next_region() -> None:
    late, offloader = Late(), Offloader(TO_HOST, 3)
    offloader.use_link(HostLink(CudaWire(late), HostLimits(None)))
    kept = []

    def keep(position: int, function: Any, *args: Any) -> Any:
        output = function(*args)
        kept.append(offloader.keeper(position).put(output.clone()))
        return output

    hidden = torch.randn(8, 64)
    for position in range(2):
        hidden = offloaded(offloader, position, partial(keep, position), torch.tanh, hidden)
    copy = ["out waits for compute", "out copies"]
    lines = [line.rstrip(" 0123456789") for line in late.log]
    assert lines == [*copy, *copy, "compute waits for out"]
    # A layer that sends nothing is the last that hides a copy.
    offloader.announce(hidden)
    assert len(late.log) == len(lines) + 1
    kept.clear()
    assert is_empty(offloader)
    assert late.faults == []


def test_a_tensor_that_is_fetched_for_nothing_is_let_go_behind_its_copy() -> None:
    late, offloader = Late(), Offloader(TO_HOST, 2)
    offloader.use_link(HostLink(CudaWire(late), HostLimits(None)))
    weight = torch.randn(64, 64, requires_grad=True)
    first = offloaded(offloader, 0, recompute, lambda x: torch.tanh(x @ weight), torch.randn(8, 64))
    second = offloaded(offloader, 1, recompute, lambda x: torch.tanh(x @ weight), first.detach())
    second.sum().backward()
    assert late.log[-1] == "into copies"
    del first, second
    assert is_empty(offloader)
    assert late.log[-1].startswith("compute waits for into")
    assert late.faults == []


def test_streams_are_those_in_force_when_a_tensor_is_sent_and_when_it_is_asked_for() -> None:
    late, offloader = Late(), Offloader(TO_HOST, 2)
    offloader.use_link(HostLink(CudaWire(late), HostLimits(None)))
    weight = torch.randn(64, 64, requires_grad=True)
    other = Stream("other", late.log, computes=True)
    # As autograd does, each backward has the stream of its forward; the second's foresees the first.
    with late.on(other):
        first = offloaded(offloader, 0, recompute, lambda x: torch.tanh(x @ weight), torch.randn(8, 64))
    second = offloaded(offloader, 1, recompute, lambda x: torch.tanh(x @ weight), first.detach())
    forward = [line.rstrip(" 0123456789") for line in late.log]
    assert forward == [
        *("out waits for other", "out copies", "other waits for out"),
        *("out waits for compute", "out copies", "compute waits for out"),
    ]
    second.sum().backward()
    late.log.clear()
    with late.on(other):
        first.sum().backward()
    # Its memory was made on the stream that foresaw it, and must not go back there while the other uses it.
    assert [line.rstrip(" 0123456789") for line in late.log] == ["other waits for into", "other has memory lent"]
    assert is_empty(offloader)
    assert late.faults == []


def test_the_first_copy_back_starts_when_the_layer_behind_begins_its_backward() -> None:
    late, offloader = Late(), Offloader(TO_HOST, 1)
    offloader.use_link(HostLink(CudaWire(late), HostLimits(None)))
    weight = torch.randn(64, 64, requires_grad=True)

    def layer(name: str, x: Tensor) -> Tensor:
        late.log.append(name)
        return torch.tanh(x @ weight)

    hidden = offloaded(offloader, 0, recompute, partial(layer, "first"), torch.randn(8, 64))
    hidden = announced(offloader, recompute, partial(layer, "last"), hidden)
    late.log.clear()
    hidden.sum().backward()
    assert [line for line in late.log if line in ("first", "last", "into copies")] == ["into copies", "last", "first"]
    assert is_empty(offloader)


def test_layers_that_keep_what_they_save_announce_those_that_do_not(case: zoo.Case) -> None:
    late = Late()
    with hf_ckpt.apply(case.model, "full", offload=Offload(min_bytes=0, fraction=0.5)) as applied:
        engine(applied).use_link(HostLink(CudaWire(late), HostLimits(None)))
        layers = case.model.base_model.model.model.layers
        hooks = [
            layer.register_forward_pre_hook(lambda module, args, idx=idx: late.log.append(f"layer {idx}"))
            for idx, layer in enumerate(layers)
        ]
        for idx, layer in enumerate(layers):
            hooks.append(
                layer.mlp.register_forward_pre_hook(lambda module, args, idx=idx: late.log.append(f"mlp {idx}"))
            )
        exactness.step(case)
        for hook in hooks:
            hook.remove()
    # Layers 0 and 2 of the four send; layer 3 keeps its input, and layer 4 is the last.
    backward = [line for line in late.log[late.log.index("mlp 4") + 1 :] if line.startswith(("mlp", "into copies"))]
    assert backward == ["into copies", "mlp 4", "mlp 3", "into copies", "mlp 2", "mlp 1", "mlp 0"]


# --- What is left behind. ---


def test_a_hundred_steps_use_the_same_buffers() -> None:
    case = plain_models.case()
    with hf_ckpt.apply(case.model, "full", layers="blocks", offload=TO_HOST) as applied:
        exactness.step(case)
        pool = engine(applied)._link.pool
        made = pool.num_made, pool.held_bytes, pool.num_free
        for _ in range(100):
            exactness.step(case)
        assert is_empty(engine(applied))
        assert (pool.num_made, pool.held_bytes, pool.num_free) == made
        assert made[0] == made[2] == 3
        assert pool.num_lent == 0


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
        offloaded(offloader, 0, recompute, lambda x: torch.tanh(x.add_(1)), hidden)


class _Captured(Late):
    """Asks torch, as the real device does, whether a graph is captured."""

    def is_capturing(self, device: torch.device) -> bool:
        return cuda.Cuda().is_capturing(device)


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
        assert (device.log, pool.num_made) == ([], 0)
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
                chosen = region or partial(offloaded, offloader, position, recompute)
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

        def receive(self, parcel: tuple[torch.Size, torch.dtype]) -> Tensor:
            return torch.empty(parcel[0], dtype=parcel[1])

        def release(self, parcel: object) -> None:
            self.num_there -= 1

    offloader, link = Offloader(TO_HOST, 2), Fakes()
    offloader.use_link(link)
    with FakeTensorMode():
        weight = torch.randn(64, 64, requires_grad=True)
        hidden = torch.randn(8, 64)
        for position in range(2):
            hidden = offloaded(offloader, position, recompute, lambda x: torch.tanh(x @ weight), hidden)
        assert link.num_there == 2
        hidden.sum().backward()
        assert weight.grad.shape == (64, 64)
    del hidden
    assert is_empty(offloader)
    assert link.num_there == 0


# --- Order and share. ---


@pytest.mark.parametrize(
    ("num_layers", "fraction", "expected"),
    [
        (4, None, "xxxx"),
        (4, 1.0, "xxxx"),
        (4, 0.5, "x.x."),
        (4, 0.75, "xxx."),
        (4, 0.01, "x..."),
        (7, 0.5, "xx.x.x."),
        (8, 0.25, "x...x..."),
        (3, 0.0, "..."),
        (1, 0.5, "x"),
    ],
)
def test_layers_that_send_are_spread_evenly(num_layers: int, fraction: float | None, expected: str) -> None:
    flags = [is_offloaded(position, num_layers, fraction) for position in range(num_layers)]
    assert "".join("x" if flag else "." for flag in flags) == expected
    assert sum(flags) == num_offloaded(num_layers, fraction)


class _Item:
    pass


def test_backward_is_foreseen() -> None:
    order: Order[_Item] = Order()
    items = [[_Item(), _Item()] for _ in range(3)]
    groups: list[Group[_Item]] = []
    for row in items:
        groups.append(order.new_group())
        for item in row:
            groups[-1].add(item)
    assert order.next_items(items[2][0], groups[2], 1) == [items[2][1], *items[1]]
    assert order.next_items(items[2][0], groups[2], 2) == [items[2][1], *items[1], *items[0]]
    assert order.next_items(items[0][1], groups[0], 1) == []
    items[1].clear()
    assert order.next_items(items[2][1], groups[2], 1) == items[0]


class _Foreseen(Link):
    """Keeps what is sent, and notes what is foreseen."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def send(self, tensor: Tensor) -> Tensor:
        return tensor

    def prefetch(self, parcel: Tensor) -> None:
        self.log.append(f"{parcel.device.type} starts")

    def cancel(self, parcel: Tensor) -> None:
        self.log.append(f"{parcel.device.type} was for nothing")

    def receive(self, parcel: Tensor) -> Tensor:
        self.log.append(f"{parcel.device.type} is asked for")
        return parcel


def test_backwards_of_two_devices_do_not_cancel_each_other() -> None:
    offloader, link = Offloader(TO_HOST, 2), _Foreseen()
    offloader.use_link(link)
    ends = []
    for device in ("cpu", "meta"):
        weight = torch.randn(64, 64, requires_grad=True, device=device)
        hidden = torch.randn(8, 64, device=device)
        for position in range(2):
            hidden = offloaded(offloader, position, recompute, partial(torch.matmul, other=weight), hidden.detach())
            ends.append(hidden)
    # Both second layers, then both first ones, as two threads of autograd can come to them.
    for end in (ends[1], ends[3], ends[0], ends[2]):
        end.sum().backward()
    foreseen = ["cpu is asked for", "cpu starts", "meta is asked for", "meta starts"]
    assert link.log == [*foreseen, "cpu is asked for", "meta is asked for"]


class _Marks(Link):
    """Regions of one second, copies of `copying` seconds."""

    def __init__(self, copying: float, memory: Any) -> None:
        self._copying = copying
        self._memory = memory
        self._now = 0.0

    def mark(self, device: torch.device) -> Any:
        self._now += 1.0
        return _At(self._now)

    def marks(self, parcel: object) -> Any:
        return _At(0.0), _At(self._copying)

    def memory(self, device: torch.device) -> Any:
        return self._memory


class _At:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds_to(self, later: _At) -> float:
        return later._seconds - self._seconds


def run_passes(pace: Pace, link: Link, num_passes: int, num_bytes: int = 100) -> list[float]:
    fractions = []
    for _ in range(num_passes):
        pace.begin(link)
        fractions.append(pace.fraction)
        for _ in range(10):
            pace.sent(link, None, torch.device("cpu"), num_bytes, is_first=True)
            pace.leave(link, torch.device("cpu"))
    return fractions


def test_the_share_follows_the_link() -> None:
    plenty = DeviceMemory(capacity=10**6, allocated=0, peak=0)
    assert run_passes(Pace(None, 10), _Marks(0.5, plenty), 4) == [1.0, 1.0, 1.0, 1.0]
    assert run_passes(Pace(None, 10), _Marks(2.0, plenty), 4) == [1.0, 1.0, 0.475, 0.475]
    assert run_passes(Pace(0.25, 10), _Marks(2.0, plenty), 4) == [0.25] * 4


def test_the_share_leaves_room_on_the_device() -> None:
    # 950 - 600 - 0 bytes are free: 3.5 of 10 layers of 100 bytes may stay.
    tight = DeviceMemory(capacity=1000, allocated=600, peak=600)
    assert run_passes(Pace(None, 10), _Marks(2.0, tight), 4)[-1] == pytest.approx(0.65)


class _Counting(_Marks):
    """A device of 1,000 bytes, 100 of them in use between passes and `step` at most in a pass; loading took 900."""

    def __init__(self, copying: float, step: int) -> None:
        super().__init__(copying, None)
        self._step = step
        self._peak = 900
        self.num_forgotten = 0

    def memory(self, device: torch.device) -> Any:
        # A pass lies behind each question.
        self._peak = max(self._peak, self._step)
        return DeviceMemory(capacity=1000, allocated=100, peak=self._peak)

    def forget_peak(self, device: torch.device) -> None:
        self._peak = 100
        self.num_forgotten += 1


def test_what_loading_took_is_not_taken_for_a_step() -> None:
    link = _Counting(2.0, step=200)
    pace = Pace(None, 10)
    # 950 - 900 bytes would let half a layer of 100 stay; 950 - 200 let seven, and the link asks for half of them.
    assert run_passes(pace, link, 5, num_bytes=100) == [1.0, 1.0, 1.0, 0.475, 0.475]
    assert (link.num_forgotten, pace.forgotten_peak) == (1, 900)


def test_the_count_of_the_device_is_left_alone_where_nothing_depends_on_it() -> None:
    fast, roomy = _Counting(0.5, step=200), _Counting(2.0, step=200)
    roomy._peak = 300
    assert run_passes(Pace(None, 10), fast, 4)[-1] == 1.0
    assert run_passes(Pace(None, 10), roomy, 4)[-1] == 0.475
    assert (fast.num_forgotten, roomy.num_forgotten) == (0, 0)


def test_a_step_that_fills_the_device_keeps_all_layers_sending() -> None:
    assert run_passes(Pace(None, 10), _Counting(2.0, step=950), 5) == [1.0] * 5


def test_longer_batches_are_measured_anew() -> None:
    plenty = DeviceMemory(capacity=10**6, allocated=0, peak=0)
    pace, link = Pace(None, 10), _Marks(2.0, plenty)
    assert run_passes(pace, link, 4)[-1] == 0.475
    run_passes(pace, link, 1, num_bytes=1000)
    assert pace.fraction == 1.0


# --- Host memory. ---


def test_a_cap_that_is_too_small_is_refused_in_the_first_layer(case: zoo.Case) -> None:
    size = case.inputs["input_ids"].numel() * case.model.config.hidden_size * 4
    with hf_ckpt.apply(case.model, "full", offload=Offload(min_bytes=0, host_memory=2 * size)) as applied:
        with pytest.raises(HostMemoryError) as error:
            exactness.step(case)
        said = str(error.value)
        # What is on its way up holds the graph of the first layer.
        del error
        assert engine(applied).stats.num_tensors == 1
        assert is_empty(engine(applied))
    assert said == (
        "Offloading to the host needs 32.0 KiB of host memory, but host_memory allows 16.0 KiB. Raise host_memory, "
        "lower fraction, shorten the sequence, offload fewer layers, or write to disk with offload: {to: disk, "
        "path: /scratch}."
    )
    with hf_ckpt.apply(case.model, "full", offload=Offload(min_bytes=0, host_memory=4 * size)):
        exactness.step(case)
        exactness.step(case)


def test_layers_without_a_gradient_hold_nothing_on_the_host() -> None:
    offloader = Offloader(Offload(min_bytes=0, host_memory=2 * 8 * 64 * 4), 8)
    weight = torch.randn(64, 64)
    hidden = torch.randn(8, 64)
    for position in range(8):
        weight.requires_grad_(position >= 6)
        hidden = offloaded(offloader, position, recompute, lambda x: torch.tanh(x @ weight), hidden)
    assert offloader.stats.num_live == 2
    hidden.sum().backward()
    assert is_empty(offloader)


def test_a_machine_without_room_is_refused() -> None:
    limits = HostLimits(None, lambda: HostMemory(machine_bytes=2**30, group_bytes=2**29))
    limits.check(0, held_bytes=2**40)
    with pytest.raises(HostMemoryError, match=r"needs 1.0 GiB more .* 512.0 MiB are free \(limit of the control group"):
        limits.check(2**30, held_bytes=0)
    HostLimits(None, lambda: HostMemory(None, None)).check(2**50, held_bytes=0)


LOW = HostMemory(machine_bytes=2**30, group_bytes=None, total_bytes=2**31)
TRUST = (
    " Where the machine's figures are too low (a virtual machine that is given memory when it is touched), set "
    "trust_host_memory: true."
)


def test_the_figures_of_a_machine_can_be_left_out() -> None:
    for num_bytes, held_bytes in ((2**30, 0), (2**29, 2**31)):
        with pytest.raises(HostMemoryError) as error:
            HostLimits(None, lambda: LOW).check(num_bytes, held_bytes)
        assert str(error.value).endswith(TRUST)
        HostLimits(None, lambda: LOW, trusts=True).check(num_bytes, held_bytes)


def test_a_machine_that_is_trusted_keeps_to_the_cap_and_to_its_control_groups() -> None:
    with pytest.raises(HostMemoryError, match=r"host_memory allows 1\.0 GiB"):
        HostLimits(2**30, lambda: LOW, trusts=True).check(2**31, held_bytes=0)
    grouped = HostMemory(2**40, group_bytes=2**30, total_bytes=2**32, group_total_bytes=2**32)
    for limits in (HostLimits(None, lambda: grouped), HostLimits(None, lambda: grouped, trusts=True)):
        for num_bytes, held_bytes in ((2**30, 0), (2**29, 2**32)):
            with pytest.raises(HostMemoryError) as error:
                limits.check(num_bytes, held_bytes)
            assert "trust_host_memory" not in str(error.value)


def test_a_plan_says_that_the_machine_is_trusted(case: zoo.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    low = HostMemory(machine_bytes=0, group_bytes=None, total_bytes=1)
    monkeypatch.setattr(HostLimits.__init__, "__defaults__", (lambda: low, None))
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST), pytest.raises(HostMemoryError, match="trust_host_memory"):
        exactness.step(case)
    case.model.zero_grad()
    with hf_ckpt.apply(case.model, "full", offload={"to": "cpu", "min_bytes": 0, "trust_host_memory": True}):
        assert exactness.differences(expected, exactness.step(case)) == []


def test_processes_of_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = HostMemory(2**40, None, total_bytes=2**34)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    HostLimits(None, lambda: machine).check(2**31, held_bytes=2**31)
    with pytest.raises(HostMemoryError, match=r"needs 4.5 GiB in each of 4 processes, but this machine has 16.0 GiB"):
        HostLimits(None, lambda: machine).check(2**31, held_bytes=2**31 + 2**29)


def test_the_pool_makes_no_more_buffers_than_are_out_at_once() -> None:
    pool = Pool(PlainMemory, lambda num_bytes: None)
    for sizes in ([100, 200, 50], [60, 150, 40], [300, 70, 70], [100, 200, 50]):
        buffers = [pool.take(size) for size in sizes]
        assert all(buffer.num_bytes >= size for buffer, size in zip(buffers, sizes, strict=True))
        assert pool.num_lent == 3
        for buffer in buffers:
            pool.give_back(buffer)
        assert pool.num_free == 3
        assert pool.held_bytes == pool.free_bytes
    assert pool.take(200).num_bytes == 300
    pool.close()
    assert pool.num_free == 0


def lend_all(pool: Pool, num_buffers: int, num_bytes: int, most_bytes: int | None = None) -> int:
    """Take and give back so many buffers; return the bytes that were made anew."""
    made: list[int] = []
    found = pool._allocate
    pool._allocate = lambda size: (made.append(size), found(size))[1]
    for buffer in [pool.take(num_bytes, most_bytes) for _ in range(num_buffers)]:
        pool.give_back(buffer)
    pool._allocate = found
    return sum(made)


def test_slightly_longer_batches_find_room_in_the_buffers_that_there_are() -> None:
    pool = Pool(PlainMemory, lambda num_bytes: None)
    assert lend_all(pool, 3, 1000) == 3 * 1000
    # Those that were too small are replaced, one for one, by some that are a quarter larger.
    assert lend_all(pool, 3, 1001) == pool.held_bytes == 3 * 1250
    for num_bytes in range(1010, 1260, 10):
        assert lend_all(pool, 3, num_bytes) == 0
    assert lend_all(pool, 3, 5000) == pool.held_bytes == 3 * 5000


@pytest.mark.parametrize("cap", [3300, 3500, 3700])
def test_room_to_grow_is_taken_from_nobody(cap: int) -> None:
    limits = HostLimits(cap, lambda: HostMemory(None, None))
    pool = Pool(PlainMemory, lambda num_bytes: limits.check(num_bytes, pool.held_bytes))
    lend_all(pool, 3, 1000)
    for num_bytes in (1010, 1060, 1099):
        lend_all(pool, 3, num_bytes)
        assert pool.held_bytes <= cap


def test_buffers_are_made_for_the_longest_batch_at_once() -> None:
    pool = Pool(PlainMemory, lambda num_bytes: None)
    assert lend_all(pool, 3, 100, most_bytes=1000) == 3000
    assert lend_all(pool, 3, 1000, most_bytes=1000) == 0
    # What was not foreseen is made as it comes.
    assert lend_all(pool, 1, 1200, most_bytes=1000) == 1200


def run_batches(offloader: Offloader, most_tokens: int, lengths: list[int]) -> list[int]:
    """Run forward and backward of four layers for each length; return how many buffers were made so far after each."""
    weight = torch.randn(16, 16, requires_grad=True)
    made = []
    for length in lengths:
        offloader.foresee(length, most_tokens)
        hidden = torch.randn(1, length, 16)
        for position in range(4):
            hidden = offloaded(offloader, position, recompute, lambda x: torch.tanh(x @ weight), hidden)
        hidden.sum().backward()
        made.append(offloader._link.pool.num_made)
    return made


def test_layers_behind_the_first_reserve_for_the_longest_batch() -> None:
    offloader = Offloader(TO_HOST, 4)
    offloader.use_link(HostLink(PlainWire(), HostLimits(None, lambda: HostMemory(None, None))))
    # The first layer says what all of them need; its own buffer alone is made anew.
    assert run_batches(offloader, 100, [10, 40, 100, 70, 100]) == [4, 5, 5, 5, 5]
    assert offloader.stats.host_bytes == offloader.stats.peak_host_bytes == 4 * 100 * 16 * 4
    assert is_empty(offloader)


def test_nothing_is_reserved_that_there_is_no_room_for() -> None:
    cap = 4 * 60 * 16 * 4
    offloader = Offloader(TO_HOST, 4)
    offloader.use_link(HostLink(PlainWire(), HostLimits(cap, lambda: HostMemory(None, None))))
    run_batches(offloader, 100, [10])
    assert offloader.stats.host_bytes == 4 * 10 * 16 * 4
    run_batches(offloader, 100, [60])
    with pytest.raises(HostMemoryError, match="host_memory allows"):
        run_batches(offloader, 100, [100])


def test_memory_that_the_system_does_not_give_is_said() -> None:
    offloader = Offloader(TO_HOST, 1)
    wire = PlainWire()
    wire.allocate = lambda num_bytes: PlainMemory(2**62)
    offloader.use_link(HostLink(wire, HostLimits(None, lambda: LOW, trusts=True)))
    with pytest.raises(HostMemoryError) as error:
        offloaded(offloader, 0, recompute, torch.tanh, torch.randn(5, 64, requires_grad=True) * 1)
    said = str(error.value)
    del error
    assert said.startswith(
        "Offloading to the host needs 1.2 KiB more of host memory beside the 0 B that it holds, which the system does "
        "not give: "
    )
    assert said.endswith(
        "; 1.0 GiB are free (MemAvailable of the machine), which trust_host_memory says not to look at. "
        "Raise the limit of locked memory (ulimit -l), set host_memory to what there is, lower fraction, shorten the "
        "sequence, offload fewer layers, or write to disk with offload: {to: disk, path: /scratch}."
    )
    assert is_empty(offloader)


def test_buffers_have_the_size_of_the_tensor() -> None:
    offloader = Offloader(TO_HOST, 1)
    weight = torch.randn(64, requires_grad=True)
    kept = offloaded(offloader, 0, recompute, lambda x: x * weight, torch.randn(5, 64))
    assert offloader.stats.host_bytes == 5 * 64 * 4
    kept.sum().backward()
    offloader.use_link(HostLink(PlainWire(), HostLimits(None)))
    assert offloader.stats.host_bytes == 0


# --- Pinned pages, without a device. ---


class _Driver:
    """Stands in for CUDA's runtime: notes what is pinned."""

    def __init__(self, told: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self._told = told

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802  # the runtime's name
        if not self._told:
            self.pinned[address] = size
        return self._told

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # the runtime's name
        del self.pinned[address]
        return 0


@pytest.mark.skipif(sys.platform != "linux", reason="pages are pinned on Linux")
def test_pages_are_pinned_whole_and_unpinned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kept, dropped = PinnedPages(mmap.PAGESIZE + 1), PinnedPages(5)
    address = kept.bytes.data_ptr()
    assert driver.pinned == {address: 2 * mmap.PAGESIZE, dropped.bytes.data_ptr(): mmap.PAGESIZE}
    assert address % mmap.PAGESIZE == 0
    assert (kept.bytes.numel(), dropped.bytes.numel()) == (mmap.PAGESIZE + 1, 5)
    del dropped
    assert list(driver.pinned) == [address]
    kept.free()
    kept.free()
    assert driver.pinned == {}


@pytest.mark.skipif(sys.platform != "linux", reason="pages are pinned on Linux")
def test_pages_that_nobody_freed_wait_for_every_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, waited = _Driver(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 2**20 if index in (0, 2) else 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index=3: waited.append((index, len(driver.pinned))))
    dropped = PinnedPages(5)
    assert len(driver.pinned) == 1
    del dropped
    # Device 1 has no memory, and so no context: to wait for it would make one.
    assert waited == [(0, 1), (2, 1), (3, 1)]
    assert driver.pinned == {}


@pytest.mark.skipif(sys.platform != "linux", reason="pages are pinned on Linux")
def test_pages_that_are_not_pinned_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Driver(told=2))
    monkeypatch.setattr(pinned, "_take_error_away", lambda: None)
    monkeypatch.setattr(cuda, "PinnedByTorch", PlainMemory)
    wire = CudaWire()
    with pytest.warns(UserWarning, match="rounds up to a power of two: cudaHostRegister returned error 2"):
        assert wire.allocate(100).bytes.numel() == 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wire.allocate(100).bytes.numel() == 100


def test_memory_that_nobody_pins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> PlainMemory:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Driver(told=2))
    monkeypatch.setattr(pinned, "_take_error_away", lambda: None)
    monkeypatch.setattr(cuda, "PinnedByTorch", refuse)
    link = HostLink(CudaWire(), HostLimits(None, lambda: LOW))
    with (
        pytest.warns(UserWarning, match="pinned"),
        pytest.raises(
            HostMemoryError, match=r"1\.0 MiB more .* does not give: CUDA error: out of memory; 1\.0 GiB are free"
        ),
    ):
        link.pool.take(2**20)
    assert (link.pool.held_bytes, link.pool.num_lent) == (0, 0)
