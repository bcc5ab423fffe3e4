"""How near are predictions to what others measured on GPUs? Simulated, beside their published figures.

Points that ran out of memory are there too: none of them may be predicted to fit.

    python -m benchmarks published --only mistral_7b
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.published import modules
from benchmarks.published.emulations import reentrant_checkpointing
from benchmarks.published.models import build
from benchmarks.published.points import ModulePoint, StepPoint, is_held_out, module_points, sources, step_points
from benchmarks.published.summary import answers, summaries
from benchmarks.result_files import write_result
from benchmarks.runner import RESULTS, add_out, main
from hf_ckpt.estimate.estimate import fit_of
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.simulation.step_memory import StepMemory

Record = dict[str, Any]


def predicted_step(point: StepPoint) -> StepMemory:
    """Return the simulated step of a point."""
    is_sharded = point.ranks > 1
    step = Step(
        batch_size=point.batch,
        seq_length=point.tokens,
        autocast=point.autocast,
        optim="adamw_torch",
        optim_arguments={"weight_decay": 0.01},
        sharding=Sharding(
            engine="fsdp1" if is_sharded else "none", world_size=point.ranks, prefetches_in_backward=False
        ),
    )
    device = find_device(sources()[point.source].device)
    checkpointing = partial(reentrant_checkpointing, keeps_inputs=is_sharded and point.method != "full")
    return simulate_step(build(point), None, step, device, changed_by=checkpointing)


def step_record(point: StepPoint) -> Record:
    """Return a published step with its prediction, as JSON types."""
    memory = predicted_step(point)
    return _record(point) | {
        "ranks": point.ranks,
        "emulations": list(point.emulations),
        "published_bytes": point.allocated_bytes,
        "predicted_bytes": memory.peak_bytes,
        "ratio": None if point.allocated_bytes is None else memory.peak_bytes / point.allocated_bytes,
        "fits": str(fit_of(memory.peak_bytes, find_device(memory.device))),
        "peak_at": memory.peak_at.describe(),
        "by_category": {str(category): num_bytes for category, num_bytes in memory.by_category.items()},
        "published_smi_mib": point.smi_mib,
        "published_tokens_per_second": point.tokens_per_second,
        "predicted_tokens_per_second": memory.tokens / memory.time.total,
    }


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
    write_result(options.out, {"summary": list(summaries(records)), "answers": answers(records), "points": records})


def _line(record: Record) -> str:
    published, predicted = record["published_bytes"], record["predicted_bytes"]
    told = "out of memory" if published is None else f"{published / 2**30:.3f} GiB, ratio {record['ratio']:.4f}"
    return f"{record['name']} {record['title']}: {predicted / 2**30:.3f} GiB; published {told}"


if __name__ == "__main__":
    sys.exit(main(__name__))
