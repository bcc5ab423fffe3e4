"""What torch's caching allocator holds: rule by rule, and of whole steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_ckpt.policy.options import HeadMode
from hf_ckpt.policy.plan import parse
from hf_ckpt.simulation.caching_allocator import CachingAllocator, Held, held_within, play
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.rank_tape import weights_of
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import Event, FlatParameter, MemoryChange, Storage, Stream, Tape

KIB, MIB = 2**10, 2**20


def reserved_bytes(tape: Tape) -> int:
    return play(tape).reserved_bytes


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2),
        ([512] * 4096, 2),
        ([512] * 4097, 4),
        ([MIB, MIB], 2),
        ([MIB + 1], 20),
        ([5 * MIB] * 4, 20),
        ([5 * MIB] * 5, 40),
        ([10 * MIB - 512] * 2, 20),
        ([10 * MIB], 10),
        ([10 * MIB + 512], 12),
        ([100 * MIB, MIB], 102),
    ],
)
def test_segments_that_are_asked_for(sizes: Sequence[int], reserved: int) -> None:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    assert allocator.reserved_bytes == reserved * MIB


def test_what_was_freed_serves_again() -> None:
    allocator = CachingAllocator()
    for _ in range(3):
        blocks = [allocator.allocate(size * MIB) for size in (30, 40, 50)]
        for block in blocks:
            allocator.free(block)
    assert allocator.reserved_bytes == 120 * MIB


@pytest.mark.parametrize(("limit", "reserved"), [(None, 130), (130, 130), (129, 70), (60, 90)])
def test_where_there_is_no_room_what_is_wholly_free_is_given_back(limit: int | None, reserved: int) -> None:
    allocator = CachingAllocator(limit_bytes=limit and limit * MIB)
    blocks = [allocator.allocate(size * MIB) for size in (30, 40)]
    for block in blocks:
        allocator.free(block)
    # Part of a segment that is in use stays, and so does the rest of it.
    if limit == 60:
        allocator.allocate(20 * MIB)
    allocator.allocate(60 * MIB)
    assert allocator.reserved_bytes == reserved * MIB


def test_where_there_is_no_room_what_other_streams_read_is_waited_for() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    read = allocator.allocate(80 * MIB)
    allocator.wait_for_streams = lambda: allocator.free(read)
    allocator.allocate(70 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def test_the_smallest_block_that_suffices_is_taken() -> None:
    allocator = CachingAllocator()
    for block in [allocator.allocate(size * MIB) for size in (80, 30, 50)]:
        allocator.free(block)
    allocator.allocate(30 * MIB)
    allocator.allocate(45 * MIB)
    allocator.allocate(80 * MIB)
    assert allocator.reserved_bytes == 160 * MIB


def test_a_large_block_keeps_what_is_left_over_up_to_one_mebibyte() -> None:
    for left_over, reserved in ((MIB, 60), (MIB + 512, 40)):
        allocator = CachingAllocator()
        allocator.free(allocator.allocate(40 * MIB))
        allocator.allocate(40 * MIB - left_over)
        # Where it was cut off, it serves what is as large, and else a new segment does.
        allocator.allocate(left_over if left_over > MIB else MIB + 512)
        assert allocator.reserved_bytes == reserved * MIB


def test_blocks_are_allocated_whole() -> None:
    # A segment of 12 MiB serves 11 MiB, and its rest, 1 MiB, is too little to be cut off; one of 14 MiB has 1 MiB and
    # 512 bytes left of it, which are. Small blocks are cut to size.
    sizes = (11 * MIB, 13 * MIB - 512, 512)
    tape = Tape([Storage(size, category=Category.PARAMETERS) for size in sizes], [])
    assert play(tape).blocks.before.tolist() == [12 * MIB, 13 * MIB - 512, 512]
    assert play(tape, expands=True).blocks.before.tolist() == list(sizes)


def test_free_neighbours_are_joined_and_segments_are_not() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for index in (1, 3, 0, 2):
        allocator.free(blocks[index])
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    for block in [allocator.allocate(10 * MIB) for _ in range(2)]:
        allocator.free(block)
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_streams_share_no_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(50 * MIB, Stream.GATHER))
    allocator.allocate(50 * MIB)
    assert allocator.reserved_bytes == 100 * MIB
    allocator.allocate(50 * MIB, Stream.GATHER)
    assert allocator.reserved_bytes == 100 * MIB


def test_an_expandable_segment_grows_by_what_is_missing() -> None:
    allocator = CachingAllocator(expands=True)
    first = allocator.allocate(50 * MIB)
    allocator.free(allocator.allocate(50 * MIB))
    assert allocator.reserved_bytes == 100 * MIB
    allocator.allocate(80 * MIB)
    assert allocator.reserved_bytes == 140 * MIB
    allocator.free(first)
    # 512 bytes more than the hole.
    allocator.allocate(50 * MIB + 512)
    assert allocator.reserved_bytes == 200 * MIB


def test_freed_expandable_blocks_are_joined_up_to_the_end() -> None:
    allocator = CachingAllocator(expands=True)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
        for index in order:
            allocator.free(blocks[index])
        allocator.free(allocator.allocate(60 * MIB))
        assert allocator.reserved_bytes == 60 * MIB


# --- Steps. ---


def events(*changes: tuple[Storage, MemoryChange], phase: Phase = Phase.FORWARD) -> list[Event]:
    return [Event(Place(phase), change, storage) for storage, change in changes]


COME, GO = MemoryChange.ALLOCATE, MemoryChange.FREE


def test_the_optimizer_makes_its_state_of_what_the_first_step_has_left() -> None:
    state = Storage(60 * MIB, category=Category.OPTIMIZER)
    weight, saved, scratch = Storage(20 * MIB, category=Category.PARAMETERS), Storage(60 * MIB), Storage(2 * MIB)
    step = events((saved, COME), (saved, GO))
    tape = Tape([weight, state], [*step, *events((scratch, COME), (scratch, GO), phase=Phase.OPTIMIZER)])
    # In the second step the activations need a segment of their own.
    assert reserved_bytes(tape) == (20 + 60 + 20 + 60) * MIB


def one_after_another(*sizes: Sequence[int]) -> Tape:
    """A step in which storages of so many MiB come and go, those of a list together."""
    groups = [[Storage(size * MIB) for size in together] for together in sizes]
    return Tape([], events(*((each, change) for group in groups for change in (COME, GO) for each in group)))


@pytest.mark.parametrize(
    ("limit", "held"),
    [
        (130, 130),
        # The segment of 30 is given back once; from then on 30 are cut out of another one.
        (129, 100),
        (100, 100),
        # Two of 50 have no room.
        (99, 100),
    ],
)
def test_what_a_full_device_gives_back_is_not_missed_later(limit: int, held: int) -> None:
    tape = one_after_another([30], [50, 50])
    assert reserved_bytes(tape) == 130 * MIB
    assert held_within(tape, limit * MIB) == Held(held * MIB, held * MIB, retries_per_step=0)


def test_what_a_full_device_gives_back_in_every_step_is_counted() -> None:
    # Small blocks and large ones share no segments.
    tape = one_after_another([1] * 40, [80])
    assert reserved_bytes(tape) == 120 * MIB
    assert held_within(tape, 100 * MIB) == Held(100 * MIB, 100 * MIB, retries_per_step=2)
    assert held_within(tape, 120 * MIB) == Held(120 * MIB, 120 * MIB, retries_per_step=0)


def test_a_full_device_may_settle_on_less_than_its_first_step_held() -> None:
    tape = one_after_another([40], [60], [70])
    # 100 are held when 70 are asked for. They are given back, and all that follows is cut out of the 70.
    assert held_within(tape, 150 * MIB) == Held(100 * MIB, 70 * MIB, retries_per_step=0)


def test_what_the_engine_gathers_is_still_read_for_a_while() -> None:
    layers = [Storage(30 * MIB, stream=Stream.GATHER) for _ in range(5)]
    one_at_a_time = [change for layer in layers for change in ((layer, COME), (layer, GO))]
    # Two that were freed wait for the device; the third is gathered when the first one is over.
    assert reserved_bytes(Tape([], events(*one_at_a_time))) == 60 * MIB
    for layer in layers:
        layer.stream = Stream.COMPUTE
    assert reserved_bytes(Tape([], events(*one_at_a_time))) == 30 * MIB


def test_a_buffer_of_gradients_is_still_read_until_the_next_one_is_made() -> None:
    buffers = [Storage(30 * MIB, is_sent=True) for _ in range(3)]
    between = [Storage(30 * MIB) for _ in buffers]
    pairs = zip(buffers, between, strict=True)
    step = [change for each in pairs for one in each for change in ((one, COME), (one, GO))]
    assert reserved_bytes(Tape([], events(*step))) == 60 * MIB
    for buffer in buffers:
        buffer.is_sent = False
    assert reserved_bytes(Tape([], events(*step))) == 30 * MIB


def unit_of(*weights: int, share: int, is_broadcast: bool = False, loaded: int | None = None) -> Storage:
    """The share of a unit of FSDP1, in MiB, as it was loaded and as it is kept."""
    flat = FlatParameter(
        tuple(weight * MIB for weight in weights), is_broadcast, (loaded or share) * MIB, share * MIB, emptied=()
    )
    return Storage(share * MIB, category=Category.PARAMETERS, flat_parameter=flat)


def test_a_share_is_cut_out_of_flattened_weights_which_leave_their_memory() -> None:
    share = unit_of(30, 10, share=20)
    # The weights, the flat tensor; the share lies where the first weight was.
    assert reserved_bytes(Tape([share], [])) == (30 + 10 + 40) * MIB
    # A step is served from what they leave.
    activations = Storage(40 * MIB)
    assert reserved_bytes(Tape([share], events((activations, COME), (activations, GO)))) == 80 * MIB


def test_weights_are_sent_in_buckets_of_250_mib_which_are_copies_where_they_hold_several() -> None:
    weights = (100, 100, 100, 50, 20)
    alone = reserved_bytes(Tape([unit_of(*weights, share=100)], []))
    # 250 MiB are reached with the third weight; the copies are there until the unit is done.
    first = reserved_bytes(Tape([unit_of(*weights, share=100, is_broadcast=True)], []))
    assert first == alone + (300 + 70) * MIB
    # The next unit finds some of their memory.
    units = [unit_of(*weights, share=100, is_broadcast=True) for _ in range(2)]
    assert reserved_bytes(Tape(units, [])) < 1.5 * first
    one = unit_of(300, share=150, is_broadcast=True)
    assert reserved_bytes(Tape([one], [])) == reserved_bytes(Tape([unit_of(300, share=150)], []))


def test_shares_are_cast_when_all_units_are_made() -> None:
    kept = [unit_of(40, share=20) for _ in range(3)]
    cast = [unit_of(40, share=40, loaded=20) for _ in range(3)]
    # The three shares leave a piece of 40 MiB, which one of the casts fits into.
    assert reserved_bytes(Tape(kept, [])) == 3 * 40 * MIB
    assert reserved_bytes(Tape(cast, [])) == (3 + 2) * 40 * MIB


def test_what_units_gather_into_is_made_and_emptied_before_the_first_forward() -> None:
    unit = unit_of(40, share=20)
    assert unit.flat_parameter is not None
    emptied = replace(unit.flat_parameter, emptied=(20 * MIB, 90 * MIB))
    before = Storage(20 * MIB, category=Category.PARAMETERS, flat_parameter=emptied)
    assert reserved_bytes(Tape([before], [])) == reserved_bytes(Tape([unit], [])) + 90 * MIB


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=16,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(torch.bfloat16)


def fused_loss(model: Any, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
    """Compute head and loss as Liger does, without a call of the head."""
    hidden = model.model(input_ids, **kwargs).last_hidden_state
    logits = hidden.flatten(0, 1) @ model.lm_head.weight.T
    return CausalLMOutputWithPast(loss=functional.cross_entropy(logits.float(), labels.flatten()))


def test_a_head_that_another_library_governs_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "__module__", "liger_kernel.transformers")
    model = llama()
    model.forward = MethodType(fused_loss, model)
    simulator = StepSimulator(model, STEP, find_device("a100-80gb"))
    plain = simulator.plan_of(parse("full"))
    chunked = replace(plain, head=HeadMode.CHUNKED)
    assert simulator.memory(chunked).peak_bytes == simulator.memory(plain).peak_bytes
    assert simulator.reserved_bytes(chunked) == simulator.reserved_bytes(plain)
    assert simulator.held_within(chunked, 2**30) == simulator.held_within(plain, 2**30)


STEP = Step(batch_size=4, seq_length=1024, optim="adamw_torch")


@pytest.mark.parametrize("policy", [None, "full", "selective"])
@pytest.mark.parametrize("engine", ["none", "fsdp1", "fsdp2", "zero3"])
def test_a_whole_step(policy: str | None, engine: str) -> None:
    sharding = Sharding(engine=engine, world_size=1 if engine == "none" else 2)
    simulator = StepSimulator(llama(), replace(STEP, sharding=sharding), find_device("a100-80gb"))
    plan = None if policy is None else simulator.plan_of(parse(policy))
    peak, reserved = simulator.memory(plan).peak_bytes, simulator.reserved_bytes(plan)
    assert peak < reserved < 2 * peak
    assert reserved % (2 * MIB) == 0
    assert peak < simulator.reserved_bytes(plan, expands=True) < 2 * peak
    assert reserved == simulator.reserved_bytes(plan), "the tape is as it was"


def test_flash_attention_makes_gradients_before_what_it_needs_to_add_them_up() -> None:
    tape = StepSimulator(llama(), STEP, find_device("a100-80gb")).trace(None).tape
    made = [event for event in tape.events if event.change is COME and event.place.phase is Phase.BACKWARD]
    operators = [event.place.operator.split(".")[1] for event in made]
    first = operators.index("_scaled_dot_product_flash_attention_backward")
    assert operators[first : first + 5] == ["_scaled_dot_product_flash_attention_backward"] * 3 + ["empty"] * 2
    rows, heads, head_dim = STEP.batch_size * STEP.seq_length, 16, 2048 // 16
    assert [event.storage.num_bytes for event in made[first + 3 : first + 5] if event.storage is not None] == [
        rows * heads * 4,
        rows * heads * head_dim * 4,
    ]


def test_layers_are_flattened_one_after_the_other_and_then_what_is_around_them() -> None:
    step = replace(STEP, sharding=Sharding(engine="fsdp1", world_size=2))
    units = units_of(llama(), step)
    assert len(units) == 8 + 1
    # Each weight of a layer, and the embeddings, the last norm and the head; a rank has half.
    assert [len(unit.weights) for unit in units] == [9] * 8 + [3]
    assert all(0 <= 2 * unit.share_bytes - sum(unit.weights) < 2 * 512 for unit in units)
    assert all(unit.emptied == (sum(unit.weights),) and unit.loaded_bytes == unit.share_bytes for unit in units)


def test_shares_of_weights_that_train_in_mixed_precision_are_cast_to_float32() -> None:
    step = replace(STEP, autocast="bfloat16", sharding=Sharding(engine="fsdp1", world_size=2))
    for unit in units_of(llama(), step):
        whole = sum(unit.weights)
        assert (2 * unit.loaded_bytes, unit.share_bytes) == (whole, whole)
        assert unit.emptied == (whole // 2, whole, 2 * whole)


def test_an_adapter_is_a_unit_of_its_own_and_what_is_frozen_is_not_cast() -> None:
    step = replace(STEP, autocast="bfloat16", sharding=Sharding(engine="fsdp1", world_size=2))
    adapted = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"]), low_cpu_mem_usage=True)  # type: ignore[arg-type]
    units = units_of(adapted, step)
    # A layer's seven products and two norms; its two adapters.
    assert Counter(len(unit.weights) for unit in units) == {9: 8, 1: 2 * 8, 3: 1}
    assert all(unit.share_bytes == unit.loaded_bytes for unit in units if len(unit.weights) > 1)


def units_of(model: nn.Module, step: Step) -> list[FlatParameter]:
    tape = StepSimulator(model, step, find_device("a100-80gb")).trace(None).tape
    return [storage.flat_parameter for storage in tape.before if storage.flat_parameter is not None]


def test_the_optimizers_state_is_cut_as_the_last_ranks_share_is() -> None:
    """FSDP1 cuts a unit into equal parts, not each weight: a rank's state comes in few, large pieces."""
    step = replace(STEP, sharding=Sharding(engine="fsdp1", world_size=4))
    simulator = StepSimulator(llama(), step, find_device("a100-80gb"))
    weights = weights_of(simulator.model, simulator.stacks, step)
    state = dict.fromkeys(weights, 0)
    for each in simulator.trace(None).tape.before:
        if each.parameter in weights and len(each.shape) > 0:
            state[each.parameter] = max(state[each.parameter], each.num_bytes)
    layer = {name.rpartition("layers.3.")[2]: held for name, held in state.items() if ".layers.3." in name}
    whole = sum(weight.numel for weight in weights.values() if weight.unit == (0, 3))
    # The last rank has the norms, the last product, and the end of that before it, in bfloat16.
    down = 5632 * 2048
    assert layer["self_attn.q_proj.weight"] == 0
    assert layer["mlp.down_proj.weight"] == 2 * down
    assert layer["mlp.up_proj.weight"] == 2 * (-(-whole // 4) - down - 2 * 2048)
    assert sum(layer.values()) == pytest.approx(2 * whole / 4, abs=512)
