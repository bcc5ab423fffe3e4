"""How near are predictions to what others measured on GPUs? Simulated, and compared with their published figures.

Points that ran out of memory are there too: none of them may be predicted to fit.

    python -m benchmarks published --only mistral_7b
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.published import modules
from benchmarks.published.emulations import CHANGES, ENGINE_CHANGES, OPTIMIZERS
from benchmarks.published.models import build
from benchmarks.published.points import (
    ModulePoint,
    Source,
    StepPoint,
    is_fitted_time,
    is_held_out,
    module_points,
    sources,
    step_points,
)
from benchmarks.published.summary import add_reserved_ratios, answers, summaries, time_ratio, time_summaries
from benchmarks.result_files import write_result
from benchmarks.runner import RESULTS, add_out, main
from hf_ckpt.policy.plan import parse
from hf_ckpt.simulation.caching_allocator import Held, held_within, play
from hf_ckpt.simulation.devices import Device, find_device
from hf_ckpt.simulation.fit import Capacity, capacity_of
from hf_ckpt.simulation.simulator import StepSimulator, num_repeats
from hf_ckpt.simulation.step import GivenOptimizer, Sharding, Step, Zero
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.simulation.tape import read_tape

Record = dict[str, Any]

_MICRO_BATCHES = "gradient_accumulation_steps"


class Predicted(NamedTuple):
    """What is predicted of a published step."""

    memory: StepMemory
    reserved_bytes: int
    """What torch reserves for it where there is room."""
    held: Held | None
    """What it holds of the source's card, where that has less."""
    capacity: Capacity
    """Of that card."""


def predicted_step(point: StepPoint) -> Predicted:
    """Return the simulated step of a point, and what torch reserves for it."""
    source = sources()[point.source]
    model, device = build(point), device_of(source)
    options = source.step | point.step
    if source.reduces_always:
        options.pop(_MICRO_BATCHES, None)
    given = OPTIMIZERS.get(options["optim"])
    step = Step(
        batch_size=point.batch,
        seq_length=point.tokens,
        autocast=point.autocast,
        given_optimizer=None if given is None else _given_optimizer(model, given),
        sharding=_sharding(source, point.ranks),
        **options,
    )
    simulator = StepSimulator(model, step, device)
    plan = None if source.policy is None else simulator.plan_of(parse(source.policy))
    with ExitStack() as entered:
        for name in source.changes:
            if name in ENGINE_CHANGES:
                entered.enter_context(ENGINE_CHANGES[name]())
        tape = simulator.trace(plan, changed_by=partial(_changed, point)).tape
    played, capacity = play(tape, expands=source.expands_segments), capacity_of(device, point.ranks)
    memory = read_tape(
        tape,
        device=device.name,
        plan=plan,
        tokens=step.tokens,
        repeats=num_repeats(step),
        blocks=played.blocks,
    )
    wanted = played.reserved_bytes
    # What there is next to the most that the context takes.
    room = capacity.num_bytes - capacity.outside[1]
    # Of expandable segments it is not played which pages are given back.
    is_full = wanted > room and not source.expands_segments
    return Predicted(memory, wanted, held_within(tape, room) if is_full else None, capacity)


def _tokens_per_second(point: StepPoint, memory: StepMemory) -> float:
    """Return what one rank is predicted to train on."""
    source, time = sources()[point.source], memory.time
    repeats = point.step.get(_MICRO_BATCHES, 1) if source.reduces_always else 1
    seconds = repeats * (time.total - time.optimizer) + time.optimizer + source.idle_seconds
    return repeats * memory.tokens / seconds


def _sharding(source: Source, num_ranks: int) -> Sharding:
    if num_ranks == 1:
        return Sharding()
    asked = {**source.sharding, "zero": Zero(**source.sharding.get("zero", {}))}
    return Sharding(**asked, world_size=num_ranks)


def device_of(source: Source) -> Device:
    """Return the card of a source, with the host and the link between ranks of its machine."""
    device = replace(find_device(source.device), **source.device_fields)
    if source.rank_link is not None:
        device = replace(device, rank_link=source.rank_link, link_efficiency=1.0)
    return replace(
        device,
        launch_seconds=device.launch_seconds * source.host_factor,
        unit_seconds=device.unit_seconds * source.host_factor,
    )


def _given_optimizer(model: nn.Module, kind: type[torch.optim.Optimizer]) -> GivenOptimizer:
    names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return GivenOptimizer(kind, ((names, {}),))


@contextmanager
def _changed(point: StepPoint, model: nn.Module) -> Iterator[nn.Module]:
    with ExitStack() as entered:
        for name in (*sources()[point.source].changes, *point.emulations):
            if name in CHANGES:
                entered.enter_context(CHANGES[name](model, point))
        yield model


def step_record(point: StepPoint) -> Record:
    """Return a published step with its prediction, as JSON types."""
    memory, wanted, held, capacity = predicted_step(point)
    device = device_of(sources()[point.source])
    first = wanted if held is None else held.num_bytes
    record = _record(point) | {
        "ranks": point.ranks,
        "emulations": list(point.emulations),
        "published_bytes": point.allocated_bytes,
        "predicted_bytes": memory.peak_bytes,
        "ratio": None if point.allocated_bytes is None else memory.peak_bytes / point.allocated_bytes,
        # nvidia-smi is read once a second: what only the first step holds, for a moment, it does not see.
        "predicted_reserved_bytes": (held.settled_bytes if held is not None and point.smi_mib is not None else first),
        "first_reserved_bytes": first,
        "wanted_bytes": wanted,
        "retries_per_step": 0 if held is None else held.retries_per_step,
        "fits": str(capacity.fit(memory.peak_bytes, max(memory.peak_bytes, wanted))),
        "peak_at": memory.peak_at.describe(),
        "by_category": {str(category): num_bytes for category, num_bytes in memory.by_category.items()},
        "published_reserved_bytes": point.reserved_bytes,
        "published_smi_mib": point.smi_mib,
        "published_tokens_per_second": point.tokens_per_second,
        "predicted_tokens_per_second": _tokens_per_second(point, memory),
        "is_fitted_time": is_fitted_time(point.name),
        "card": device.title,
    }
    return record | {"time_ratio": time_ratio(record)}


def module_record(point: ModulePoint) -> Record:
    """Return a published module with its prediction, as JSON types."""
    predicted = modules.peak_bytes(point)
    published = round(point.published_mib * 2**20)
    return _record(point) | {
        "gpu": point.gpu,
        "published_bytes": published,
        "predicted_bytes": predicted,
        "ratio": predicted / published,
    }


def _record(point: StepPoint | ModulePoint) -> Record:
    return {
        "name": point.name,
        "source": point.source,
        "file": point.file,
        "row": point.row,
        "title": point.title,
        "is_held_out": is_held_out(point.name),
    }


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--only", default="", help="points whose name or title holds this")
    parser.add_argument("--known", action="store_true", help="leave out the points that are held out")
    add_out(parser, RESULTS / "published.json")


def run(options: Namespace) -> None:
    """Predict the points and write the result."""
    records = []
    for point in (*step_points(), *module_points()):
        if options.only not in f"{point.name} {point.title}" or (options.known and is_held_out(point.name)):
            continue
        began = time.process_time()
        record = step_record(point) if isinstance(point, StepPoint) else module_record(point)
        records.append(record)
        print(_line(record), f"{time.process_time() - began:.1f} s", flush=True)
    contexts = add_reserved_ratios(records)
    found = {
        "context_bytes": contexts,
        "summary": list(summaries(records)),
        "times": list(time_summaries(records)),
        "answers": answers(records),
    }
    write_result(options.out, {**found, "points": records})


def _line(record: Record) -> str:
    published, predicted = record["published_bytes"], record["predicted_bytes"]
    peak = "no peak" if published is None else f"{published / 2**30:.3f} GiB, ratio {record['ratio']:.4f}"
    ratio = record.get("time_ratio")
    took = "" if ratio is None else f"; time, ratio {ratio:.3f}"
    return f"{record['name']} {record['title']}: {predicted / 2**30:.3f} GiB; published {peak}{took}"


if __name__ == "__main__":
    sys.exit(main(__name__))
