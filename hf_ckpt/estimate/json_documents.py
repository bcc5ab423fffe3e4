"""An estimate as a document: JSON types, for programs, and for `tables`, which prints it without torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hf_ckpt.estimate.estimate import Estimate, Row, capacity_of_subject
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject
from hf_ckpt.estimate.weights import as_json as weights_as_json
from hf_ckpt.planner.advice import Exactness
from hf_ckpt.regions.offload import host_memory
from hf_ckpt.simulation.devices import Device, this_device
from hf_ckpt.simulation.fit import Capacity, Fit, judge
from hf_ckpt.simulation.step_memory import StepMemory


def estimate_as_json(found: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON types."""
    verdicts = [verdict_as_json(found.predictor, device, row, found.evaluation) for device, row in found.deciding()]
    return {
        "recipe": found.subject.title,
        # On at least one of the devices.
        "fits": any(verdict["fits"] == Fit.YES for verdict in verdicts),
        "decides": found.decides,
        "verdicts": verdicts,
        **facts_as_json(found.subject),
        "devices": [
            {
                **device_as_json(
                    device.running(found.subject.attention),
                    found.predictor.capacity(device),
                    found.subject.computes_in,
                ),
                "budget_bytes": capacity_of_subject(found.predictor, device).num_bytes,
            }
            for device in found.devices
        ],
        "rows": [row_as_json(row) for row in found.rows],
        "evaluation": None if found.evaluation is None else memory_as_json(found.evaluation),
        "host": [
            {"device": device.name, "needed_bytes": needed, "free_bytes": _free_host_bytes(found, device)}
            for device, row in found.deciding()
            if row.memory is not None and (needed := row.memory.host_bytes)
        ],
    }


def facts_as_json(subject: Subject) -> dict[str, Any]:
    """Return what was taken for what: as text, and the weights as numbers."""
    weights = None if subject.weights is None else weights_as_json(subject.weights)
    return {"facts": [{"name": name, "text": text} for name, text in subject.facts], "weights": weights}


def row_as_json(row: Row) -> dict[str, Any]:
    """Return a row of an estimate as JSON types."""
    read: dict[str, Any] = {"name": row.name, "refusal": row.refusal}
    if row.device is not None:
        read["device"] = row.device.name
    if row.exactness is not None:
        read["exactness"] = exactness_as_json(row.exactness)
    if row.memory is not None:
        read |= memory_as_json(row.memory)
        # On a device where not even the peak has room the allocator is not played.
        read["reserved_bytes"] = max(verdict.reserved_bytes for verdict in row.verdicts.values())
        read["fits"] = {name: str(verdict.fit) for name, verdict in row.verdicts.items()}
        read["plan"] = None if row.memory.plan is None else json.loads(row.memory.plan.to_json())
    return read


def verdict_as_json(
    predictor: Predictor, device: Device, row: Row, evaluation: StepMemory | None = None
) -> dict[str, Any]:
    """Return whether a run fits on a device: its steps, and its evaluation between them."""
    read: dict[str, Any] = {
        "device": device.name,
        "fits": str(Fit.NO),
        "peak_bytes": None,
        "is_evaluation": False,
        "refusal": row.refusal,
    }
    if row.memory is None:
        return read
    capacity, step = predictor.capacity(device), row.verdicts[device.name]
    more = 0 if evaluation is None else evaluation.peak_bytes
    verdict = judge(max(step.peak_bytes, more), step.reserved_bytes, capacity)
    read |= {
        "fits": str(verdict.fit),
        "peak_bytes": verdict.peak_bytes,
        "needed_bytes": verdict.needed_bytes,
        "is_evaluation": more > step.peak_bytes,
    }
    if device.is_cuda:
        smi = [verdict.reserved_bytes + outside for outside in capacity.outside]
        read |= {"reserved_bytes": verdict.reserved_bytes, "nvidia_smi_bytes": smi}
    if (cached := row.cached.get(device.name)) is not None:
        read |= asdict(cached)
    return read


def memory_as_json(memory: StepMemory) -> dict[str, Any]:
    """Return what a step needs as JSON types, without the timeline and the ledger."""
    return {
        "peak_bytes": memory.peak_bytes,
        "peak_at": memory.peak_at.describe(),
        "by_category": {str(category): num_bytes for category, num_bytes in memory.by_category.items()},
        "host_bytes": memory.host_bytes,
        "tokens": memory.tokens,
        # None where the device's rates are not known.
        "seconds": {**asdict(memory.time), "total": memory.time.total} if memory.time.total else None,
        "num_flops": {str(phase): flops for phase, flops in memory.num_flops.items()},
    }


def exactness_as_json(exactness: Exactness) -> dict[str, Any]:
    """Return how exact a plan is as JSON types."""
    return {
        "is_bitwise": exactness.is_bitwise,
        "inexact": list(exactness.inexact),
        "of_none": exactness.of_none,
        "inexact_of_none": exactness.inexact_of_none,
        "text": exactness.describe(),
    }


def device_as_json(device: Device, capacity: Capacity, computes_in: str | None = None) -> dict[str, Any]:
    """Return a device as JSON types, with what it has besides a step, and what to know of it.

    `computes_in`: the dtype of the step's matrix products.
    """
    return {
        "name": device.name,
        "title": device.title,
        "memory_bytes": device.memory_bytes,
        "outside_bytes": list(capacity.outside),
        "outside": "CUDA's context" if device.is_cuda else "the process",
        "margin_bytes": capacity.margin_bytes,
        "attention": device.describe_attention(),
        "remarks": device.remarks(computes_in),
    }


def _free_host_bytes(found: Estimate, device: Device) -> int | None:
    """Return the free host memory where the device is this machine's; None elsewhere, and where it is not known."""
    offload = found.subject.allowed.offload
    trusts = offload is not None and offload.trust_host_memory
    return host_memory.available_bytes(trusts=trusts) if device.is_cuda and device == this_device() else None
