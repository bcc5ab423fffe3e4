"""Frozen weights that wait on the host, on a device: exact, and an embedding that the device reads where it lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_ckpt
from benchmarks.offload import SlowCuda
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.offload.cuda import CudaDevice, CudaWire
from hf_ckpt.regions.offload.transfer import PageableMemory, Wire
from tests import exactness, zoo
from tests.gpu.test_exact_on_device import DEVICES, on_device


def frozen_case(device: str) -> zoo.Case:
    case = exactness.lora(on_device("llama", device, num_layers=4, attn_implementation="eager"), lora_dropout=0.1)
    case.model.to(device)
    return case


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"weights": "cpu"}, {"embedding": "cpu"}], ids=["layers", "embedding"])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_gradients_are_the_same_bits(mode: str, options: dict[str, str], device: str) -> None:
    case = frozen_case(device)
    expected = exactness.step(case)
    assert exactness.differences(expected, exactness.step(case)) == [], "the step itself is not repeatable"
    with hf_ckpt.apply(case.model, mode, **options) as applied:
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []
        assert applied.waiting is not None
        applied.waiting.use_wire(CudaWire(SlowCuda()) if device == "cuda" else Wire())
        assert exactness.differences(expected, exactness.step(case)) == []
    assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.gpu
def test_without_the_wait_for_a_copy_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = frozen_case("cuda")
    expected = exactness.step(case)
    monkeypatch.setattr(CudaWire, "wait", lambda wire, copy, device: None)
    with hf_ckpt.apply(case.model, "full", weights="cpu", prove="off") as applied:
        applied.waiting.use_wire(CudaWire(SlowCuda()))  # type: ignore[union-attr]  # weights wait
        assert exactness.differences(expected, exactness.step(case)) != []


@pytest.mark.gpu
def test_an_embedding_takes_nothing_of_the_device() -> None:
    model: Any = frozen_case("cuda").model
    weight = model.get_input_embeddings().weight
    values, free = weight.detach().clone(), torch.cuda.memory_allocated()
    applied = hf_ckpt.apply(model, "full", embedding="cpu")
    assert free - torch.cuda.memory_allocated() >= weight.nbytes
    assert model.device == weight.device == values.device
    assert torch.equal(weight, values)
    assert torch.equal(weight.cpu(), values.cpu())
    kept = model.state_dict()["base_model.model.model.embed_tokens.weight"]
    applied.remove()
    for found in (weight, kept):
        assert torch.equal(found, values)


@pytest.mark.gpu
def test_memory_that_is_not_pinned_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cannot read host memory in place"):
        CudaDevice().map(PageableMemory(2**20), torch.device("cuda", 0))
