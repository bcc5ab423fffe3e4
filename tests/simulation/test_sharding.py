"""What one rank holds under DDP, FSDP and ZeRO-3: shares, gathered layers, and gradients between micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ckpt.policy.policy import Policy
from hf_ckpt.policy.revolve import replays, segment_starts
from hf_ckpt.simulation.caching_allocator import BLOCK_BYTES
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.rank_tape import weights_of
from hf_ckpt.simulation.simulator import StepSimulator, simulate_step
from hf_ckpt.simulation.step import Sharding, Step, Zero
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory
from hf_ckpt.simulation.tape import MemoryChange, Stream, TransferKind
from hf_ckpt.structure.layers import find_layers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

WORLD_SIZE = 8
DEVICE = find_device("a100-80gb")
# Odd sizes: nothing divides evenly among eight ranks. Large enough for the blocks of the allocator not to matter.
CONFIG = LlamaConfig(
    vocab_size=1003, hidden_size=140, intermediate_size=503, num_hidden_layers=6, num_attention_heads=5, head_dim=30
)

# So that each layer of such a model is shared, and let go of at once.
SMALL = Zero(reduce_bucket_size=2**20, max_live_parameters=0, max_reuse_distance=0, param_persistence_threshold=0)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = LlamaForCausalLM(CONFIG)
    return made.to(dtype)


def simulated(
    engine: str,
    *,
    dtype: torch.dtype = torch.float32,
    num_micro_batches: int = 1,
    prefetches: bool = True,
    zero: Zero = SMALL,
    world_size: int = WORLD_SIZE,
    syncs_each_batch: bool = False,
    **step: object,
) -> StepMemory:
    sharding = Sharding(
        engine=engine,
        world_size=1 if engine == "none" else world_size,
        prefetches_in_backward=prefetches,
        syncs_each_batch=syncs_each_batch,
        zero=zero,
    )
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
    # ZeRO steps a copy of the weights.
    is_zero = engine == "zero3"
    assert most(shared, Category.OPTIMIZER) == pytest.approx((2 + is_zero) * share, rel=0.06)
    at_end = {category: column[-1] for category, column in shared.timeline.bytes_by_category.items()}
    # ZeRO-3 has its bucket, and room for its share of the gradients, all the time.
    assert at_end[Category.GATHERED] == 4 * SMALL.reduce_bucket_size * is_zero
    assert at_end[Category.GRADIENTS] == pytest.approx(share * is_zero, rel=0.06)


# Each unit is rounded to a block of the allocator, and the norm is small. Embeddings and head have one size.
ROUNDING = 3 * 512 + 4 * CONFIG.hidden_size
END_BYTES = 4 * CONFIG.vocab_size * CONFIG.hidden_size


@pytest.mark.parametrize(
    ("engine", "num_layers", "num_ends"),
    [
        # The rest of the model is one unit. A layer is freed before the next one is gathered.
        ("fsdp1", 1, 2),
        # The buffer that a layer arrived in lives as long as its weights.
        ("fsdp2", 2, 0),
    ],
)
def test_units_that_are_whole_in_forward(engine: str, num_layers: int, num_ends: int) -> None:
    timeline = simulated(engine).timeline
    phases = [place.phase for place in timeline.places]
    forward = timeline.bytes_by_category[Category.GATHERED][: phases.index(Phase.BACKWARD)]
    expected = num_layers * largest_layer(model()) + num_ends * END_BYTES
    if engine == "fsdp2":
        # What it is copied out into has a block for each weight.
        layer = find_layers(model())[0].layers[0].module
        expected += sum(-weight.nbytes % BLOCK_BYTES for weight in layer.parameters())
    assert max(forward) == pytest.approx(expected, abs=ROUNDING)


def test_fsdp2_gathers_into_a_buffer_of_one_stream_and_copies_into_weights_of_another() -> None:
    """As torch has it: the allocator serves neither out of what the other has left."""
    step = Step(
        batch_size=2, seq_length=32, autocast="bfloat16", sharding=Sharding(engine="fsdp2", world_size=WORLD_SIZE)
    )
    tape = StepSimulator(model(), step, DEVICE).trace(None).tape
    made = [event.storage for event in tape.events if event.change is MemoryChange.ALLOCATE and event.storage]
    layer = [weight.numel() * 2 for weight in find_layers(model())[0].layers[0].module.parameters()]
    shares = sum(layer) // WORLD_SIZE
    gathered = Counter((each.stream, each.num_bytes) for each in made if each.category is Category.GATHERED)
    # In forward and in backward of each of the layers.
    num_times = 2 * CONFIG.num_hidden_layers
    assert gathered[Stream.COPY_IN, in_blocks(sum(layer))] == num_times
    # A rank's share is cast before it is sent.
    assert gathered[Stream.COPY_IN, in_blocks(shares)] == num_times
    for num_bytes_of_weight, number in Counter(map(in_blocks, layer)).items():
        assert gathered[Stream.COMPUTE, num_bytes_of_weight] >= num_times * number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_that_keep_their_dtype_are_not_cast_whatever_their_size(dtype: torch.dtype) -> None:
    # Nothing can be divided by it: the share of each weight is rounded.
    sharding = Sharding(engine="fsdp1", world_size=11)
    step = Step(batch_size=2, seq_length=32, autocast="bfloat16", sharding=sharding)
    before = StepSimulator(model(dtype), step, DEVICE).trace(None).tape.before
    units = [storage.flat_parameter for storage in before if storage.flat_parameter is not None]
    is_cast = dtype is torch.bfloat16
    assert [unit.loaded_bytes != unit.share_bytes for unit in units] == [is_cast] * (CONFIG.num_hidden_layers + 1)


@pytest.mark.parametrize(("dtype", "is_cast"), [("bfloat16", True), (None, False)])
def test_gradients_arrive_in_the_dtype_that_they_are_computed_in(dtype: str | None, is_cast: bool) -> None:
    sharding = Sharding(engine="fsdp1", world_size=WORLD_SIZE)
    step = Step(batch_size=2, seq_length=32, autocast=dtype, sharding=sharding)
    events = StepSimulator(model(), step, DEVICE).trace(None).tape.events
    made = [event.storage for event in events if event.change is MemoryChange.ALLOCATE and event.storage]
    layer = sum(weight.numel() for weight in find_layers(model())[0].layers[0].module.parameters())
    # Bytes of each number of a unit's share: the rest of the model is about as large as a layer.
    shares = [round(each.num_bytes / (layer / WORLD_SIZE)) for each in made if each.stream is Stream.REDUCE]
    num_units = CONFIG.num_hidden_layers + 1
    assert Counter(filter(None, shares)) == {4: num_units, **({2: num_units} if is_cast else {})}


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_all_that_was_gathered_is_gone_when_the_optimizer_makes_its_state(engine: str) -> None:
    step = Step(batch_size=2, seq_length=32, sharding=Sharding(engine=engine, world_size=WORLD_SIZE))
    events = StepSimulator(model(), step, DEVICE).trace(None).tape.events
    in_optimizer = [event for event in events if event.place.phase is Phase.OPTIMIZER]
    gathered = [each.storage for each in in_optimizer if each.storage and each.storage.category is Category.GATHERED]
    assert gathered == []
    sent = [each for each in events if each.transfer is not None and each.transfer.kind is TransferKind.REDUCE]
    # Of each layer, and of the units around them.
    assert len(sent) == CONFIG.num_hidden_layers + (3 if engine == "fsdp2" else 1)
    assert {each.place.phase for each in sent} == {Phase.BACKWARD}


def in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


@pytest.mark.parametrize(
    ("engine", "prefetches", "num_layers", "num_ends"),
    [
        # The hook of the root module gathers the last layer, as soon as the loss has a gradient.
        ("fsdp1", True, 1, 2),
        ("fsdp1", False, 0, 2),
        # That of the head does, and the embeddings are sharded again.
        ("fsdp2", True, 0, 1),
    ],
)
def test_units_that_are_whole_while_the_loss_runs_backward(
    engine: str, prefetches: bool, num_layers: int, num_ends: int
) -> None:
    timeline = simulated(engine, prefetches=prefetches).timeline
    at_loss = next(index for index, place in enumerate(timeline.places) if place.phase is Phase.BACKWARD)
    gathered = timeline.bytes_by_category.get(Category.GATHERED)
    expected = num_layers * largest_layer(model()) + num_ends * END_BYTES
    assert (gathered[at_loss + 1] if gathered else 0) == pytest.approx(expected, abs=ROUNDING)


# Under FSDP1 the embeddings and the head are gathered all the while.
@pytest.mark.parametrize(("engine", "num_layers", "num_ends"), [("fsdp1", 1, 2), ("fsdp2", 2, 0)])
def test_fsdp1_gathers_one_layer_in_backward_where_adapters_are_units_of_their_own(
    engine: str, num_layers: int, num_ends: int
) -> None:
    adapters = LoraConfig(r=1, target_modules=["q_proj"])
    adapted = get_peft_model(model(), adapters, low_cpu_mem_usage=True)  # type: ignore[arg-type]
    step = Step(batch_size=2, seq_length=32, sharding=Sharding(engine=engine, world_size=WORLD_SIZE))
    timeline = simulate_step(adapted, "full", step, DEVICE).timeline
    gathered = timeline.bytes_by_category[Category.GATHERED]
    in_layers = max(
        held
        for held, place in zip(gathered, timeline.places, strict=True)
        if place.phase is Phase.RECOMPUTATION and place.layer_idx == 3
    )
    layers = [num_bytes(layer.module) for layer in find_layers(adapted)[0].layers]
    # Beside them what was reduced last: a few gradients.
    assert in_layers == pytest.approx(num_layers * max(layers) + num_ends * END_BYTES, rel=0.01)


def test_fsdp_keeps_whole_gradients_until_the_last_micro_batch() -> None:
    once, often = (simulated("fsdp2", num_micro_batches=number) for number in (1, 4))
    assert most(once, Category.GRADIENTS) < num_bytes(model())
    assert most(often, Category.GRADIENTS) == pytest.approx(num_bytes(model()), rel=0.05)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_fsdp_keeps_shares_of_gradients_only_where_each_micro_batch_is_synced(engine: str) -> None:
    once = simulated(engine)
    often = simulated(engine, num_micro_batches=4, syncs_each_batch=True)
    assert most(often, Category.GRADIENTS) == most(once, Category.GRADIENTS)
    # From the second micro-batch on all shares are there from the beginning, and no whole gradient lasts longer.
    share = num_bytes(model()) / WORLD_SIZE
    assert once.peak_bytes < often.peak_bytes <= once.peak_bytes + 1.02 * share


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero3"])
def test_one_process_keeps_what_is_trained_in_float32_too(engine: str) -> None:
    alone = simulated(engine, dtype=torch.bfloat16, autocast="bfloat16", world_size=1)
    kept = Category.OPTIMIZER if engine == "zero3" else Category.PARAMETERS
    assert most(alone, kept) >= num_bytes(model()) * (3 if engine == "zero3" else 1)


def test_fsdp_keeps_what_is_trained_in_float32_under_mixed_precision() -> None:
    shared = simulated("fsdp2", dtype=torch.bfloat16, autocast="bfloat16")
    assert most(shared, Category.PARAMETERS) == pytest.approx(num_bytes(model()) / WORLD_SIZE, rel=0.06)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_optimizer_of_fsdp_works_in_float32_under_mixed_precision(engine: str) -> None:
    memory = simulated(engine, dtype=torch.bfloat16, autocast="bfloat16", optim="adamw_torch")
    # It works on all weights at once, and makes a tensor as large as a rank's share of them.
    assert most(memory, Category.TEMPORARY) == pytest.approx(num_bytes(model()) / WORLD_SIZE, rel=0.06)


# An optimizer in float32 reads and writes twice as many bytes as one in bfloat16. So slow a memory hides the host.
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero3"])
def test_the_optimizer_takes_the_time_of_the_dtype_that_it_works_in(engine: str) -> None:
    device = replace(DEVICE, memory_bandwidth=1e6)

    def seconds(dtype: torch.dtype, autocast: str | None) -> float:
        zero = replace(SMALL, master_bytes=4 if autocast or dtype == torch.float32 else 2)
        sharding = Sharding(engine=engine, world_size=WORLD_SIZE, zero=zero)
        step = Step(batch_size=2, seq_length=32, max_grad_norm=0, autocast=autocast, sharding=sharding)
        tape = StepSimulator(model(dtype), step, device).trace(None).tape
        stepping = [each.seconds for each in tape.events if each.place.operator.startswith("aten._fused")]
        return sum(stepping)

    mixed, wide, narrow = (
        seconds(*options) for options in ((torch.bfloat16, "bfloat16"), (torch.float32, None), (torch.bfloat16, None))
    )
    assert mixed == pytest.approx(wide, rel=0.01)
    assert mixed == pytest.approx(2 * narrow, rel=0.01)


def test_ranks_that_are_slowly_connected_wait_for_one_another() -> None:
    fast, slow = find_device("h100"), find_device("rtx4090")
    step = Step(batch_size=2, seq_length=32, sharding=Sharding(engine="fsdp2", world_size=WORLD_SIZE))
    waits = [simulate_step(model(), "full", step, device).time.copies for device in (fast, slow)]
    assert 0 < waits[0] < waits[1]


def test_gathering_to_recompute_takes_time_and_no_memory() -> None:
    once, twice = (
        simulate_step(
            model(),
            "full",
            Step(
                batch_size=2,
                seq_length=32,
                sharding=Sharding(engine="fsdp1", world_size=WORLD_SIZE, gathers_to_recompute=more),
            ),
            DEVICE,
        )
        for more in (False, True)
    )
    assert once.timeline.bytes_by_category == twice.timeline.bytes_by_category
    assert once.time.copies < twice.time.copies


# Of each layer, modules with weights in forward, and those with gradients in backward: PEFT's two adapters under FSDP1;
# under ZeRO-3 also seven products and two norms, which are frozen.
# The rest of the model is gathered once; ZeRO-3 gathers the embeddings and the head apart.
@pytest.mark.parametrize(("engine", "num_others", "num_modules"), [("fsdp1", 1, 2 + 2), ("zero3", 3, 11 + 2)])
def test_the_host_needs_time_for_each_unit_within_a_layer(engine: str, num_others: int, num_modules: int) -> None:
    adapted = get_peft_model(model(), LoraConfig(r=1, target_modules=["q_proj"]), low_cpu_mem_usage=True)  # type: ignore[arg-type]
    step = Step(batch_size=2, seq_length=32, sharding=Sharding(engine=engine, world_size=WORLD_SIZE, zero=SMALL))
    # So slow that the device always waits for it.
    slow = [simulate_step(adapted, None, step, replace(DEVICE, unit_seconds=seconds)).time.total for seconds in (1, 2)]
    # Each layer is gathered in forward and in backward.
    assert slow[1] - slow[0] == pytest.approx(num_others + CONFIG.num_hidden_layers * (2 + num_modules))


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_a_layer_is_gathered_again_for_each_run_of_a_binomial_schedule(engine: str) -> None:
    step = Step(batch_size=1, seq_length=16, optim="sgd", sharding=Sharding(engine=engine, world_size=WORLD_SIZE))
    simulator = StepSimulator(model(), step, DEVICE)

    def num_gathers(**options: object) -> int:
        events = simulator.trace(simulator.plan_of(Policy.parse("full", **options))).tape.events
        return sum(event.transfer is not None and event.transfer.kind is TransferKind.GATHER for event in events)

    full = num_gathers()
    # As tests/distributed/test_collectives.py counts for the engines themselves.
    starts = [*segment_starts(6, 1), (6, 0)]
    rows = [row for (start, free), (end, _) in pairwise(starts) for row in replays(end - start, free)]
    extra = sum(layer - start for start, _, layer in rows)
    is_next = sum(start < layer for start, _, layer in rows) if engine == "fsdp2" else 0
    assert num_gathers(nested="revolve", snapshots=1) - full == extra - is_next
