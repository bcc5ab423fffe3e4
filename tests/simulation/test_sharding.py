"""What one rank holds under DDP, FSDP and ZeRO: shares, gathered layers, and gradients between micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.sharding import weights_of
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory
from hf_ckpt.structure.layers import find_layers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

WORLD_SIZE = 8
DEVICE = find_device("a100-80gb")
# Odd sizes: nothing divides evenly among eight ranks. Large enough for the blocks of the allocator not to matter.
CONFIG = LlamaConfig(
    vocab_size=1003, hidden_size=140, intermediate_size=503, num_hidden_layers=6, num_attention_heads=5, head_dim=30
)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = LlamaForCausalLM(CONFIG)
    return made.to(dtype)


def simulated(
    engine: str, *, dtype: torch.dtype = torch.float32, num_micro_batches: int = 1, **step: object
) -> StepMemory:
    sharding = Sharding(engine=engine, world_size=1 if engine == "none" else WORLD_SIZE)
    settings = Step(
        batch_size=2,
        seq_length=32,
        gradient_accumulation_steps=num_micro_batches,
        sharding=sharding,
        **step,  # type: ignore[arg-type]
    )
    return simulate_step(model(dtype), "full", settings, DEVICE)


def most(memory: StepMemory, category: Category) -> int:
    return max(memory.timeline.bytes_by_category.get(category, (0,)))


def num_bytes(of: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in of.parameters())


def largest_layer(of: nn.Module) -> int:
    return max(num_bytes(layer.module) for layer in find_layers(of)[0].layers)


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_ranks")
def test_fsdp2_shards_are_as_large_as_torch_makes_them() -> None:
    whole = LlamaForCausalLM(CONFIG)
    step = Step(sharding=Sharding(engine="fsdp2", world_size=WORLD_SIZE))
    predicted = {name: weight.shard_bytes for name, weight in weights_of(whole, find_layers(whole), step).items()}
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in whole.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    local = {}
    for name, parameter in whole.named_parameters():
        assert isinstance(parameter, DTensor)
        local[name] = parameter.to_local().nbytes
    assert predicted == local


def test_ddp_holds_everything_and_buckets_as_large_as_the_gradients() -> None:
    alone, shared = simulated("none"), simulated("ddp")
    assert shared.peak_bytes - alone.peak_bytes == most(shared, Category.GATHERED)
    assert most(shared, Category.GATHERED) == pytest.approx(num_bytes(model()), abs=512)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero3"])
def test_sharded_engines_hold_a_share_of_weights_gradients_and_state(engine: str) -> None:
    shared = simulated(engine)
    share = num_bytes(model()) / WORLD_SIZE
    # FSDP2 pads each tensor to a multiple of the ranks, in its first dimension.
    assert most(shared, Category.PARAMETERS) == pytest.approx(share, rel=0.06)
    num_copies = 3 if engine == "zero3" else 2
    assert most(shared, Category.OPTIMIZER) == pytest.approx(num_copies * share, rel=0.06)
    at_end = {category: column[-1] for category, column in shared.timeline.bytes_by_category.items()}
    assert at_end[Category.GATHERED] == at_end[Category.GRADIENTS] == 0


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero3"])
def test_two_layers_and_the_rest_of_the_model_are_whole_at_a_time(engine: str) -> None:
    timeline = simulated(engine).timeline
    phases = [place.phase for place in timeline.places]
    forward = timeline.bytes_by_category[Category.GATHERED][: phases.index(Phase.BACKWARD)]
    whole = model()
    layers = sum(num_bytes(layer.module) for layer in find_layers(whole)[0].layers)
    # Each of the three is rounded to a block of the allocator.
    assert max(forward) == pytest.approx(num_bytes(whole) - layers + 2 * largest_layer(whole), abs=3 * 512)


@pytest.mark.parametrize(("engine", "is_there"), [("fsdp1", True), ("fsdp2", True), ("zero2", False)])
def test_fsdp_gathers_the_last_layer_while_the_loss_runs_backward(engine: str, is_there: bool) -> None:
    timeline = simulated(engine).timeline
    at_loss = next(index for index, place in enumerate(timeline.places) if place.phase is Phase.BACKWARD)
    gathered = timeline.bytes_by_category.get(Category.GATHERED)
    whole = model()
    rest = num_bytes(whole) - sum(num_bytes(layer.module) for layer in find_layers(whole)[0].layers)
    # Each of the two is rounded to a block of the allocator.
    expected = pytest.approx(rest + largest_layer(whole), abs=2 * 512) if is_there else 0
    assert (gathered[at_loss + 1] if gathered else 0) == expected


def test_fsdp_keeps_whole_gradients_until_the_last_micro_batch() -> None:
    once, often = (simulated("fsdp2", num_micro_batches=number) for number in (1, 4))
    assert most(once, Category.GRADIENTS) < num_bytes(model())
    assert most(often, Category.GRADIENTS) == pytest.approx(num_bytes(model()), rel=0.05)


def test_zero_sends_gradients_in_each_micro_batch() -> None:
    once, often = (most(simulated("zero2", num_micro_batches=number), Category.GRADIENTS) for number in (1, 4))
    assert once == often < num_bytes(model())


def test_zero_trains_in_half_precision_with_weights_in_float32_for_the_optimizer() -> None:
    shared = simulated("zero1", dtype=torch.bfloat16, autocast="bfloat16")
    half = num_bytes(model(torch.bfloat16))
    assert most(shared, Category.PARAMETERS) == pytest.approx(half, rel=0.02)
    assert most(shared, Category.GRADIENTS) == pytest.approx(half, rel=0.2)
    # Weights and two moments, four bytes each, against two of a weight in half precision.
    assert most(shared, Category.OPTIMIZER) == pytest.approx(6 * half / WORLD_SIZE, rel=0.02)


def test_fsdp_keeps_what_is_trained_in_float32_under_mixed_precision() -> None:
    shared = simulated("fsdp2", dtype=torch.bfloat16, autocast="bfloat16")
    assert most(shared, Category.PARAMETERS) == pytest.approx(num_bytes(model()) / WORLD_SIZE, rel=0.06)


def test_ranks_that_are_slowly_connected_wait_for_one_another() -> None:
    fast, slow = find_device("h100"), find_device("rtx4090")
    step = Step(batch_size=2, seq_length=32, sharding=Sharding(engine="fsdp2", world_size=WORLD_SIZE))
    waits = [simulate_step(model(), "full", step, device).time.copies for device in (fast, slow)]
    assert 0 < waits[0] < waits[1]
