"""What one rank holds under ZeRO: its bucket, its share of the gradients, what it gathers ahead, and its step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Sharding, Step, Zero
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory
from hf_ckpt.simulation.tape import Tape, TransferKind
from tests.simulation.test_sharding import (
    DEVICE,
    END_BYTES,
    ROUNDING,
    SMALL,
    WORLD_SIZE,
    largest_layer,
    model,
    most,
    num_bytes,
    simulated,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

SHARE = num_bytes(model()) / WORLD_SIZE
BUCKET_BYTES = 4 * SMALL.reduce_bucket_size
LARGEST_WEIGHT = max(parameter.numel() for parameter in model().parameters()) * 4
HALF: dict[str, object] = {"dtype": torch.bfloat16, "autocast": "bfloat16"}


def held(memory: StepMemory, category: Category, *phases: Phase) -> list[int]:
    """Return what a category takes while the phases run."""
    column = memory.timeline.bytes_by_category[category]
    return [num for num, place in zip(column, memory.timeline.places, strict=True) if place.phase in phases]


# --- Gradients. ---


@pytest.mark.parametrize("engine", ["zero1", "zero2"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_the_bucket_is_there_from_the_first_gradient_of_a_micro_batch_on(engine: str, num_micro_batches: int) -> None:
    memory = simulated(engine, num_micro_batches=num_micro_batches)
    assert set(held(memory, Category.GATHERED, Phase.RECOMPUTATION)) == {BUCKET_BYTES}
    assert held(memory, Category.GATHERED, Phase.BACKWARD)[0] == 0
    assert set(held(memory, Category.GATHERED, Phase.OPTIMIZER)) <= {0, BUCKET_BYTES}
    assert held(memory, Category.GATHERED, Phase.OPTIMIZER)[-1] == 0


def test_zero_3_has_its_bucket_and_room_for_its_gradients_all_the_time() -> None:
    timeline = simulated("zero3").timeline
    assert min(timeline.bytes_by_category[Category.GATHERED]) == BUCKET_BYTES
    assert min(timeline.bytes_by_category[Category.GRADIENTS]) == pytest.approx(SHARE, rel=0.01)


@pytest.mark.parametrize(("num_micro_batches", "num_rooms"), [(1, 1), (4, 2)])
def test_zero_2_keeps_what_its_share_is_cut_out_of(num_micro_batches: int, num_rooms: int) -> None:
    memory = simulated("zero2", num_micro_batches=num_micro_batches)
    gradients = max(held(memory, Category.GRADIENTS, Phase.RECOMPUTATION))
    # A share ends within a weight at each end.
    assert num_rooms * SHARE < gradients < num_rooms * (SHARE + 2 * LARGEST_WEIGHT)
    assert memory.timeline.bytes_by_category[Category.GRADIENTS][-1] == 0


def test_a_gradient_that_no_bucket_takes_waits_for_the_next_one() -> None:
    without, within = (simulated("zero2", zero=replace(SMALL, reduce_bucket_size=size)) for size in (0, 2**20))
    more = [max(held(each, Category.GRADIENTS, Phase.BACKWARD)) for each in (without, within)]
    assert 0 < more[0] - more[1] <= LARGEST_WEIGHT + 512


def test_two_buckets_take_twice_as_much() -> None:
    one, two = (
        most(simulated("zero2", zero=replace(SMALL, num_buckets=number)), Category.GATHERED) for number in (1, 2)
    )
    assert (one, two) == (BUCKET_BYTES, 2 * BUCKET_BYTES)


# --- Weights. ---


def whole_in_forward(zero: Zero) -> list[int]:
    """Return what is gathered in the forward of ZeRO-3."""
    memory = simulated("zero3", zero=zero)
    places = [place.phase for place in memory.timeline.places]
    column = memory.timeline.bytes_by_category[Category.GATHERED][: places.index(Phase.BACKWARD)]
    return [num - 4 * zero.reduce_bucket_size for num in column]


def test_zero_3_lets_go_of_a_layer_before_the_next_one_where_it_may_keep_none() -> None:
    assert max(whole_in_forward(SMALL)) == pytest.approx(largest_layer(model()), abs=9 * ROUNDING)


@pytest.mark.parametrize("num_layers", [2.5, 4])
def test_zero_3_gathers_ahead_until_so_many_weights_are_whole(num_layers: float) -> None:
    num_live = int(num_layers * largest_layer(model()) / 4)
    most_whole = max(whole_in_forward(replace(SMALL, max_live_parameters=num_live))) / 4
    assert num_live <= most_whole < num_live + LARGEST_WEIGHT / 4 + 9 * ROUNDING


def test_zero_3_keeps_what_is_used_again_soon() -> None:
    # From the forward of the last layer to its backward, the head runs twice.
    distance = 2 * END_BYTES // 4 + 1
    at_end = [whole_in_forward(replace(SMALL, max_reuse_distance=elements))[-1] for elements in (0, distance)]
    assert at_end[1] - at_end[0] == pytest.approx(largest_layer(model()), abs=9 * ROUNDING)


def test_zero_3_keeps_small_weights_whole_but_for_the_step() -> None:
    threshold = 100_000
    small = sum(each.nbytes for each in model().parameters() if each.numel() <= threshold)
    memory = simulated("zero3", zero=replace(SMALL, param_persistence_threshold=threshold))
    gathered = [num - BUCKET_BYTES for num in memory.timeline.bytes_by_category[Category.GATHERED]]
    assert gathered[0] >= small > 0
    assert gathered[-1] == pytest.approx(small, abs=512)
    assert 0 in (num - BUCKET_BYTES for num in held(memory, Category.GATHERED, Phase.OPTIMIZER))


# --- The step. ---


@pytest.mark.parametrize(("engine", "tolerance"), [("zero2", 0.2), ("zero3", 0.02)])
def test_the_step_has_gradients_in_float32_beside_those_in_half_precision(engine: str, tolerance: float) -> None:
    in_step = max(held(simulated(engine, **HALF), Category.GRADIENTS, Phase.OPTIMIZER))
    # Of a share: those kept and their row, of two bytes, and four bytes for the optimizer. ZeRO-2 keeps more.
    assert in_step == pytest.approx(SHARE / 2 + SHARE / 2 + SHARE, rel=tolerance)


def test_zero_3_steps_so_many_weights_at_a_time() -> None:
    whole, parts = (
        max(held(simulated("zero3", zero=zero, **HALF), Category.GRADIENTS, Phase.OPTIMIZER))
        for zero in (SMALL, replace(SMALL, sub_group_size=50_000))
    )
    # A part ends with the weight that reaches the size.
    at_once = (parts - SHARE / 2) / 6
    assert 50_000 <= at_once < 50_000 + LARGEST_WEIGHT / 4 / WORLD_SIZE
    assert whole > 2 * parts


def test_the_optimizer_steps_weights_in_float32() -> None:
    shared = simulated("zero1", **HALF)
    half = num_bytes(model(torch.bfloat16))
    assert most(shared, Category.PARAMETERS) == pytest.approx(half, rel=0.02)
    # Weights and two moments, four bytes each, against two of a weight in half precision.
    assert most(shared, Category.OPTIMIZER) == pytest.approx(6 * half / WORLD_SIZE, rel=0.02)


def step_tape(engine: str, device: Device, master_bytes: int = 4) -> Tape:
    """Return the tape of a step in half precision that clips nothing."""
    sharding = Sharding(engine=engine, world_size=WORLD_SIZE, zero=replace(SMALL, master_bytes=master_bytes))
    step = Step(batch_size=2, seq_length=32, autocast="bfloat16", max_grad_norm=0, optim="sgd", sharding=sharding)
    return StepSimulator(model(torch.bfloat16), step, device).trace(None).tape


# Bytes of an element: of the norm (2 and twice 8), the row (4), the row in float32 (6), divided (8), copied back (6).
@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("master_bytes", "num_bytes"), [(4, 18 + 4 + 6 + 8 + 6), (2, 18 + 4 + 4 + 4)])
def test_the_device_handles_gradients_and_weights_around_the_step(
    engine: str, master_bytes: int, num_bytes: int
) -> None:
    # So slow a memory hides the host.
    device = replace(DEVICE, memory_bandwidth=1e6, bandwidth_efficiency=1.0)
    tape = step_tape(engine, device, master_bytes)
    at_step = [event for event in tape.events if event.place.phase is Phase.OPTIMIZER and not event.is_copy]
    around = sum(event.seconds for event in at_step if not event.place.operator)
    assert around == pytest.approx(SHARE / 4 * num_bytes / 1e6, rel=0.02)


@pytest.mark.parametrize(("engine", "num_gathered"), [("zero1", 1), ("zero2", 1), ("zero3", 0)])
def test_stepped_weights_are_gathered_where_each_rank_has_all(engine: str, num_gathered: int) -> None:
    gathers = [
        event.transfer
        for event in step_tape(engine, DEVICE).events
        if event.transfer is not None
        and event.transfer.kind is TransferKind.GATHER
        and event.place.phase is Phase.OPTIMIZER
    ]
    assert len(gathers) == num_gathered
    whole = num_bytes(model(torch.bfloat16)) * (WORLD_SIZE - 1) / WORLD_SIZE
    assert all(each.num_bytes == pytest.approx(whole, rel=0.01) for each in gathers)


def test_the_host_handles_each_gradient_of_zero_3() -> None:
    sent = {
        engine: [
            event.transfer
            for event in step_tape(engine, DEVICE).events
            if event.transfer is not None and event.transfer.kind is TransferKind.REDUCE
        ]
        for engine in ("zero2", "zero3")
    }
    num_gradients = sum(1 for _ in model().parameters())
    assert sum(each.num_calls for each in sent["zero3"]) == 12 * num_gradients + 5 * len(sent["zero3"])
    assert not any(each.num_calls for each in sent["zero2"])


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_the_optimizer_may_step_weights_in_half_precision(engine: str) -> None:
    narrow = most(simulated(engine, zero=replace(SMALL, master_bytes=2), **HALF), Category.OPTIMIZER)
    # Weights, which are a copy of the model's own, and two moments. Each tensor is rounded to a block, and so is the
    # number of steps.
    rounding = 3 * 512 * len(list(model().parameters()))
    assert narrow == pytest.approx(3 * num_bytes(model(torch.bfloat16)) / WORLD_SIZE, abs=rounding)
