"""Offloading on a device: exact, also when copies come late and freed memory is written over; the CPU runs it small."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_ckpt
from benchmarks import offload
from benchmarks.journal import FileJournal, ReadJournal
from benchmarks.offload import MEASURED_SHARE, TO_HOST, disturbed, slow_link
from hf_ckpt.policy.options import Offload
from hf_ckpt.regions.offload.cuda import CudaCopy, CudaWire, PinnedPages
from hf_ckpt.regions.offload.host_buffers import HostLink
from hf_ckpt.regions.offload.host_memory import HostLimits
from hf_ckpt.regions.offload.offloader import Offloader
from hf_ckpt.regions.offload.transfer import AsyncCopy, Buffer, Wire
from tests import exactness, zoo
from tests.gpu.test_exact_on_device import DEVICES, on_device

LAYERS = 6


def engine(applied: Any) -> Offloader:
    (only,) = applied.offloaders
    return only


@pytest.fixture(params=DEVICES)
def case(request: pytest.FixtureRequest) -> zoo.Case:
    """A Llama with dropout in its adapters, on a device."""
    on = on_device("llama", request.param, num_layers=LAYERS, attn_implementation="eager")
    case = exactness.lora(on, lora_dropout=0.1)
    case.model.to(request.param)
    return case


@pytest.mark.parametrize("mode", ["full", "selective", "selective_attention"])
def test_gradients_are_the_same_bits(case: zoo.Case, mode: str) -> None:
    expected = exactness.step(case)
    assert exactness.differences(expected, exactness.step(case)) == [], "the step itself is not repeatable"
    with hf_ckpt.apply(case.model, mode, offload=TO_HOST) as applied:
        for _ in range(3):
            assert exactness.differences(expected, exactness.step(case)) == []
        gc.collect()
        stats = engine(applied).stats
        assert stats.bytes_in == stats.bytes_out > 0
        assert stats.num_live == 0


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_late_copies_and_reused_memory_change_nothing(case: zoo.Case, mode: str) -> None:
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, mode, offload=TO_HOST) as applied, disturbed(case.model):
        engine(applied).use_link(slow_link(case.model.device))
        for _ in range(3):
            assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.gpu
def test_without_the_order_of_streams_the_disturbance_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaCopy, "wait_home_stream", lambda copy: None)
    case = on_device("llama", "cuda", num_layers=LAYERS, attn_implementation="eager")
    expected = exactness.step(case)
    # The proof of the first step would see it too, and end the step with an error.
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST, prove="off") as applied, disturbed(case.model):
        engine(applied).use_link(slow_link(case.model.device))
        assert exactness.differences(expected, exactness.step(case)) != []


def test_to_disk_is_exact(case: zoo.Case, tmp_path: Path) -> None:
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=Offload(to="disk", path=str(tmp_path), min_bytes=0)):
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []
    assert list(tmp_path.iterdir()) == []


def test_the_measured_share_changes_no_bit(case: zoo.Case) -> None:
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=MEASURED_SHARE) as applied:
        for _ in range(5):
            assert exactness.differences(expected, exactness.step(case)) == []
        assert 0 < engine(applied).stats.fraction <= 1


@pytest.mark.gpu
def test_the_device_holds_no_layer_inputs_between_forward_and_backward() -> None:
    case = on_device("llama", "cuda", num_layers=LAYERS, attn_implementation="eager")
    hidden = case.inputs["input_ids"].numel() * case.model.config.hidden_size * 4

    def held() -> int:
        before = torch.cuda.memory_allocated()
        loss = zoo.loss(case.model, case.inputs)
        return torch.cuda.memory_allocated() - before - loss.nbytes

    held()
    # What the proof of the first step keeps for its backward is not looked at here.
    with hf_ckpt.apply(case.model, "full", prove="off"):
        plain = held()
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST, prove="off"):
        held()
        offloaded = held()
    # The allocator rounds up to 512 bytes, which these are a multiple of.
    assert plain - offloaded == (LAYERS - 1) * hidden


@pytest.mark.gpu
def test_pages_are_pinned_as_they_are_and_given_back() -> None:
    memory = PinnedPages(3 * mmap.PAGESIZE + 5)
    assert memory.bytes.numel() == 3 * mmap.PAGESIZE + 5
    assert memory.bytes.is_pinned()
    there = torch.arange(200, dtype=torch.uint8, device="cuda")
    memory.bytes[:200].copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory.bytes[:200], there.cpu())
    memory.free()
    assert memory.bytes.numel() == 0


@pytest.mark.gpu
def test_a_refused_pinning_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = torch.cuda.cudart()
    wire = CudaWire()

    class Refusing:
        @staticmethod
        def cudaHostRegister(address: int, size: int, flags: int) -> Any:  # noqa: N802  # the runtime's name
            # Address 0 is refused by the driver itself, which leaves its error behind.
            return cudart.cudaHostRegister(0, size, flags)

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    with pytest.warns(UserWarning, match="rounds up to a power of two"):
        memory = wire.allocate(100)
    monkeypatch.undo()
    assert memory.bytes.is_pinned()
    torch.ones(10, device="cuda").mul_(2)
    torch.cuda.synchronize()


class Disturbing(Wire):
    """Brings back what was written over, as where memory is used again before its copy has begun."""

    def send(self, source: Tensor, buffer: Buffer) -> AsyncCopy:
        sent = super().send(source, buffer)
        buffer.first(source.numel()).fill_(0x7F)
        return sent


def test_the_benchmark_counts_copies_that_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    races = offload.Races(offload.Options(device="cpu", num_steps=2))
    assert races.with_late_copies() == {"num_changed": 0}
    monkeypatch.setattr(offload, "slow_link", lambda device: HostLink(Disturbing(), HostLimits(None)))
    # In each of two steps the gradients of all layers but the last, of the embedding and of nothing else.
    assert races.with_late_copies() == {"num_changed": 2 * (3 * 9 + 1)}


def test_the_benchmark_runs_small() -> None:
    options = offload.Options(device="cpu", tokens=(32, 64), num_layers=3, num_warmup=1, num_steps=2)
    journal = FileJournal()
    offload.collect(journal, options)
    # What is there is not measured again.
    offload.collect(ReadJournal(journal.entries), options)
    result = offload.assemble(ReadJournal(journal.entries), options)
    assert result["races"]["with_late_copies"] == result["races"]["not_repeatable"] == 0
    assert result["races"]["num_gradients"] > 0
    for length in result["lengths"]:
        found = length["contenders"]
        assert list(found) == ["none", "plain", "offload", "offload_measured", "plain_again"]
        # Whatever a plan does with activations, the loss is the same, to the bit.
        assert len({loss for figures in found.values() for loss in figures["losses"]}) == 1
        hidden = 2 * length["tokens"] * 64 * 4
        assert found["offload"]["bytes_out_per_step"] == found["offload"]["bytes_in_per_step"] == 2 * hidden
        assert length["step_time_ratio"] is None
