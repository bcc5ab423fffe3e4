"""The step that is proven stays within what is predicted for it; the predicted time is that of later steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.planner.search import StepPlanner
from hf_ckpt.policy.policy import Policy
from hf_ckpt.regions import value_proof
from hf_ckpt.regions.fingerprints import (
    are_equal,
    checksum,
    checksum_scratch_bytes,
    fingerprint,
    relative_distance,
    scratch_bytes,
)
from hf_ckpt.regions.selective import dispatch
from hf_ckpt.simulation.devices import CPU, DEVICES
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.simulation.simulator import StepSimulator, simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Phase, StepMemory
from tests import live_storages
from tests.following import Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

# The optimizer keeps no state, which the first step has not.
SGD = {"optim": "sgd", "max_grad_norm": 0.0}
SMALL = {"to": "cpu", "min_bytes": 1}
RUNS = {
    "full": Run(policy="full", more=SGD),
    "full-lora-bf16": Run(policy="full", adapters=True, bf16=True, more=SGD),
    "attention-eager": Run(policy="attention", attention="eager", more=SGD),
    "ffn-experts": Run(model_type="mixtral", policy="ffn", more=SGD),
    "selective": Run(policy="selective", more=SGD),
    "selective-lora": Run(policy="selective", adapters=True, more=SGD),
    "selective-attention": Run(policy="selective_attention", more=SGD),
    "segments": Run(policy="full", options={"segment_size": 2}, layers=4, more=SGD),
    "nested": Run(policy="full", options={"segment_size": 2, "nested": True}, layers=4, adapters=True, more=SGD),
    "offload": Run(policy="full", options={"offload": SMALL}, layers=4, more=SGD),
    "tiles-chunked-head": Run(policy="full", options={"tiles": 2, "head": "chunked"}, more=SGD),
}
# Scratch memory is counted for the worst dtype and layout.
SLACK = 0.02
# Of 8 bytes each: sums by which writes into kept outputs are noticed, totals of gradients, the Trainer's own numbers.
SMALL_NUMBERS = 4096
# What looks at slices and chunks is not simulated: a few positions, and one chunk, run once more beside the others.
IN_PARTS = {"tiles-chunked-head": 0.02}


def simulated(run: Run, *, is_proven: bool) -> StepMemory:
    return simulate_step(
        run.model(), Policy.parse(run.policy, **run.options), replace(run.step, is_proven=is_proven), CPU
    )


@contextmanager
def _seen() -> Iterator[None]:
    """What `value_proof` keeps from modes, shown to them."""
    setting = dispatch.pause_interception()
    try:
        with torch.no_grad():
            yield
    finally:
        dispatch.restore_interception(setting)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.sweep(keep=1)
def test_the_first_step_needs_what_is_predicted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RUNS[name]
    predicted = simulated(run, is_proven=True)
    monkeypatch.setattr(value_proof, "_unobserved", _seen)
    first = follow_trainer(run.trainer(tmp_path, run.model()), at_step=1)
    # A fingerprint of what was recomputed records no graph, and so looks like backward.
    for phases in ((Phase.FORWARD,), (Phase.RECOMPUTATION, Phase.BACKWARD)):
        needed, told = (max(map(memory.peak_of, phases)) for memory in (first, predicted))
        assert needed <= told * (1 + IN_PARTS.get(name, 0.0)) + SMALL_NUMBERS
        assert told <= needed * (1 + SLACK)
    # Or nothing was proven.
    assert first.peak_of(Phase.RECOMPUTATION) > simulated(run, is_proven=False).peak_of(Phase.RECOMPUTATION)


@pytest.mark.parametrize("name", RUNS)
def test_the_proof_takes_no_time_and_no_memory_from_later_steps(name: str) -> None:
    run = RUNS[name]
    proven, later = simulated(run, is_proven=True), simulated(run, is_proven=False)
    assert (proven.time, proven.num_flops) == (later.time, later.num_flops)
    assert proven.peak_bytes >= later.peak_bytes


def test_only_the_first_micro_batch_is_proven() -> None:
    run = replace(RUNS["full"], accumulation=2)
    proven, later = simulated(run, is_proven=True), simulated(run, is_proven=False)

    def most(memory: StepMemory, micro_batch: int) -> int:
        pairs = zip(memory.timeline.places, memory.timeline.total_bytes(), strict=True)
        recomputed = (total for at, total in pairs if at.phase is Phase.RECOMPUTATION and at.micro_batch == micro_batch)
        return max(recomputed)

    assert most(proven, 0) > most(later, 0)
    assert most(proven, 1) == most(later, 1)


@pytest.mark.sweep
def test_a_plan_for_a_budget_keeps_it_in_the_step_that_is_proven() -> None:
    run = RUNS["segments"]
    model, step = run.model(), replace(run.step, is_proven=True)
    none, full = (simulate_step(model, Policy.parse(mode), step, CPU).peak_bytes for mode in ("none", "full"))
    budget = (none + full) // 2
    found = StepPlanner(StepSimulator(model, step, CPU)).plan_for(Capacity(budget))
    assert found.memory.peak_bytes <= budget
    assert simulate_step(model, found.plan, step, CPU).peak_bytes == found.memory.peak_bytes


def test_a_step_of_7b_needs_no_more_when_it_is_proven() -> None:
    # What backward holds beside the recomputed layer is more than the layer's output and 16 MiB.
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=512)).to(torch.bfloat16)
    step = Step(batch_size=1, seq_length=4096)
    card = next(device for device in DEVICES.values() if device.capability == (8, 0))
    peaks = [
        simulate_step(model, Policy.parse("full"), replace(step, is_proven=is_proven), card).peak_bytes
        for is_proven in (False, True)
    ]
    # But for the fingerprints of a layer, of 512 bytes each on a card.
    assert 0 <= peaks[1] - peaks[0] <= 2**16


# --- Fingerprints. ---


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize(
    "shape", [(), (0,), (3,), (40, 50), (7, 33), (5, 3, 1000), (1100, 1003), (3_000_000,)], ids=str
)
def test_scratch_memory_of_a_fingerprint_is_what_is_told(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.ones(shape).to(dtype)
    for each in (tensor, tensor.t() if tensor.dim() == 2 else tensor, tensor[..., 1:] if tensor.dim() else tensor):
        for take, told in (
            (partial(fingerprint, has_sketch=True), scratch_bytes(each, has_sketch=True)),
            (fingerprint, scratch_bytes(each)),
            (checksum, checksum_scratch_bytes(each)),
        ):
            with live_storages.LiveStorages([tensor]) as alive:
                found = take(each)
            held = found.hash.nbytes + (0 if found.sketch is None else found.sketch.nbytes)
            # Numbers of a few bytes beside the pieces.
            assert alive.peak_bytes <= told + held + 4096
            assert alive.peak_bytes <= 2**24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_scratch_memory_has_a_limit(dtype: torch.dtype, is_transposed: bool) -> None:
    tensor = torch.ones(4100, 4097, dtype=dtype)
    each = tensor.t() if is_transposed else tensor
    with live_storages.LiveStorages([tensor]) as alive:
        fingerprint(each, has_sketch=True)
        checksum(each)
    assert alive.peak_bytes <= scratch_bytes(each, has_sketch=True) + 4096 <= 2**24


def test_a_fingerprint_tells_each_bit_and_each_place() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(7, 900)
    found = fingerprint(tensor, has_sketch=True)
    assert are_equal(found, fingerprint(tensor.t().contiguous().t(), has_sketch=True))
    others: list[Tensor] = [tensor.roll(1), tensor.flip(1), tensor.roll(1, 0), -tensor]
    for place in (0, 3000, 6299):
        changed = tensor.clone().view(-1)
        changed.view(torch.int32)[place] ^= 1
        others.append(changed.view_as(tensor))
    assert not any(are_equal(found, fingerprint(other)) for other in others)
    assert not are_equal(fingerprint(torch.zeros(3)), fingerprint(-torch.zeros(3)))


@pytest.mark.parametrize("size", [40, 3000, 100_000])
def test_a_sketch_tells_the_distance(size: int) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(size)
    found = fingerprint(tensor, has_sketch=True)
    for share in (1e-3, 1e-1):
        for other in (tensor * (1 + share), tensor + share * torch.randn(size)):
            distance = relative_distance(found, fingerprint(other, has_sketch=True))
            # Of 64 sums with random signs: four standard deviations.
            assert distance == pytest.approx(share, rel=0.4)
