"""A predicted step of one rank needs what that of the engine needs: really run by two processes, and followed.

On CPUs the engines run as on GPUs, in the order of the host. What differs by nature is not in the bytes compared:
streams (a GPU's memory that is freed while another stream reads it is of use again a little later), FSDP1's rate
limiter, which holds the host back for it, and copies that gloo makes for itself in C++, which no tensor shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Sharding
from hf_ckpt.simulation.step_memory import Phase, StepMemory
from tests.distributed.deepspeed_on_a_cpu import config, deepspeed_on_a_cpu, ignores_its_warnings
from tests.distributed.following_a_rank import RankRun
from tests.distributed.runs import engine_arguments

pytestmark = ignores_its_warnings

# The Trainer has a few numbers of its own.
TOLERANCE = 1e-3
# Each adapter is a unit of its own, and is predicted to be gathered with its layer.
TOLERANCE_OF_ADAPTERS = 1e-2
# DeepSpeed pads what it shares, has numbers of its own, and gathers and lets go of modules, not of layers.
TOLERANCE_OF_ZERO = 1e-2


def fsdp1(prefetch: str | None = None) -> dict[str, Any]:
    asked = {} if prefetch is None else {"backward_prefetch": prefetch}
    arguments = engine_arguments("fsdp1")
    return {**arguments, "fsdp_config": {**arguments["fsdp_config"], **asked}}


def zero(stage: int, **sizes: int) -> dict[str, Any]:
    """In bfloat16, as DeepSpeed is used, with sizes that a tiny model reaches; ZeRO-3's weights are all sharded."""
    found = config(stage)
    found["zero_optimization"] |= {"reduce_bucket_size": 60_000, **sizes}
    return {"deepspeed": found}


FSDP2 = engine_arguments("fsdp2")
# Two and a half layers of eight.
AHEAD = {
    "stage3_max_live_parameters": 120_000,
    "stage3_max_reuse_distance": 60_000,
    "stage3_prefetch_bucket_size": 20_000,
}
RUNS = {
    "fsdp2": RankRun(layers=4, more=FSDP2),
    "fsdp2, full": RankRun(layers=4, policy="full", more=FSDP2),
    "fsdp2, full, accumulated in bf16": RankRun(layers=4, policy="full", accumulation=2, bf16=True, more=FSDP2),
    "fsdp2, lora": RankRun(adapters=True, more=FSDP2),
    "fsdp2, lora, full": RankRun(adapters=True, policy="full", more=FSDP2),
    "fsdp1": RankRun(layers=4, more=fsdp1("BACKWARD_PRE")),
    "fsdp1, full": RankRun(layers=4, policy="full", more=fsdp1("BACKWARD_PRE")),
    "fsdp1, full, accumulated": RankRun(layers=4, policy="full", accumulation=3, more=fsdp1("BACKWARD_PRE")),
    "fsdp1, full, post": RankRun(layers=4, policy="full", more=fsdp1("BACKWARD_POST")),
    "fsdp1, full, no prefetch": RankRun(layers=4, policy="full", more=fsdp1()),
    "fsdp1, lora, full": RankRun(adapters=True, policy="full", more=fsdp1("BACKWARD_PRE")),
}
PREFETCHES = {"fsdp1, full, post": False, "fsdp1, full, no prefetch": False}


def peaks(memory: StepMemory) -> dict[Phase, int]:
    """Return the most that is held while the step goes backward and while layers run again there."""
    columns = memory.timeline.bytes_by_category.values()
    totals = [sum(each) for each in zip(*columns, strict=True)]
    found = {}
    for place, total in zip(memory.timeline.places, totals, strict=True):
        if place.phase in (Phase.BACKWARD, Phase.RECOMPUTATION):
            found[place.phase] = max(total, found.get(place.phase, 0))
    return found


ZERO_RUNS = {
    "zero1, full": RankRun(layers=4, policy="full", bf16=True, more=zero(1)),
    "zero2": RankRun(layers=4, bf16=True, more=zero(2)),
    "zero2, full": RankRun(layers=4, policy="full", bf16=True, more=zero(2)),
    "zero2, full, accumulated": RankRun(layers=4, policy="full", accumulation=3, bf16=True, more=zero(2)),
    "zero2, lora": RankRun(layers=4, adapters=True, policy="full", bf16=True, more=zero(2)),
    "zero3": RankRun(layers=8, bf16=True, more=zero(3)),
    "zero3, full": RankRun(layers=8, policy="full", bf16=True, more=zero(3)),
    "zero3, ahead": RankRun(layers=8, policy="full", bf16=True, more=zero(3, **AHEAD)),
    "zero3, ahead, accumulated": RankRun(layers=8, policy="full", accumulation=3, bf16=True, more=zero(3, **AHEAD)),
    "zero3, persistent": RankRun(
        layers=8, policy="full", bf16=True, more=zero(3, stage3_param_persistence_threshold=5_000)
    ),
    "zero3, stepped in parts": RankRun(
        layers=8, policy="full", bf16=True, more=zero(3, sub_group_size=50_000, **AHEAD)
    ),
    "zero3, lora": RankRun(layers=8, adapters=True, policy="full", bf16=True, more=zero(3, **AHEAD)),
}


@pytest.mark.parametrize("name", ZERO_RUNS)
def test_predicted_peak_is_that_of_zeros_fullest_rank(name: str) -> None:
    pytest.importorskip("deepspeed")
    run = ZERO_RUNS[name]
    with deepspeed_on_a_cpu():
        _, sharding, memory = run.followed_on_rank()
    assert sharding.engine == name.partition(",")[0]
    fullest = torch.tensor(memory.peak_bytes)
    dist.all_reduce(fullest, dist.ReduceOp.MAX)
    if dist.get_rank():
        return
    policy = None if run.policy is None else Policy.parse(run.policy)
    predicted = simulate_step(run.model(), policy, run.step_of(sharding), CPU)
    assert predicted.peak_bytes == pytest.approx(int(fullest), rel=TOLERANCE_OF_ZERO)


@pytest.mark.parametrize("name", RUNS)
def test_predicted_peak_is_that_of_the_step_that_ran(name: str) -> None:
    run = RUNS[name]
    engine, sharding, memory = run.followed_on_rank()
    assert engine == name.partition(",")[0]
    assert sharding == Sharding(engine=engine, world_size=2, prefetches_in_backward=PREFETCHES.get(name, True))
    if dist.get_rank():
        return
    policy = None if run.policy is None else Policy.parse(run.policy)
    predicted = simulate_step(run.model(), policy, run.step_of(sharding), CPU)
    tolerance = TOLERANCE_OF_ADAPTERS if engine == "fsdp1" and run.adapters else TOLERANCE
    assert predicted.peak_bytes == pytest.approx(memory.peak_bytes, rel=tolerance)
    assert peaks(predicted) == pytest.approx(peaks(memory), rel=tolerance)
