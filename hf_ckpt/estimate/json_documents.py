"""An estimate as a document: JSON types, for programs, and for `tables`, which prints it without torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hf_ckpt.estimate.estimate import Estimate, Fit, Row, budget_of, fit_of
from hf_ckpt.estimate.predict import Reserved
from hf_ckpt.planner.advice import Exactness
from hf_ckpt.regions.offload import host_memory
from hf_ckpt.simulation.devices import Device, this_device
from hf_ckpt.simulation.reserve import context, reserve
from hf_ckpt.simulation.step_memory import StepMemory


def estimate_as_json(found: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON types."""
    verdicts = [
        verdict_as_json(device, row.memory, found.evaluation, row.reserved, row.refusal)
        for device, row in found.deciding()
    ]
    return {
        "recipe": found.subject.title,
        # On at least one of the devices, whatever the reserve is.
        "fits": any(verdict["fits"] == Fit.YES for verdict in verdicts),
        "decides": found.decides,
        "verdicts": verdicts,
        "facts": [{"name": name, "text": text} for name, text in found.subject.facts],
        "devices": [
            {**device_as_json(device), "budget_bytes": budget_of(found.subject, device)} for device in found.devices
        ],
        "rows": [row_as_json(found, row) for row in found.rows],
        "evaluation": None if found.evaluation is None else memory_as_json(found.evaluation),
        "host": [
            {"device": device.name, "needed_bytes": needed, "free_bytes": _free_host_bytes(found, device)}
            for device, row in found.deciding()
            if row.memory is not None and (needed := row.memory.host_bytes)
        ],
    }


def row_as_json(found: Estimate, row: Row) -> dict[str, Any]:
    """Return a row of an estimate as JSON types."""
    read: dict[str, Any] = {"name": row.name, "refusal": row.refusal}
    if row.device is not None:
        read["device"] = row.device.name
    if row.exactness is not None:
        read["exactness"] = exactness_as_json(row.exactness)
    if row.memory is not None:
        devices = [device for device in found.devices if row.device in (None, device)]
        read |= memory_as_json(row.memory)
        read["reserved_bytes"] = None if row.reserved is None else row.reserved.num_bytes
        read["fits"] = {device.name: str(fit_of(row.memory.peak_bytes, device, row.reserved)) for device in devices}
        read["plan"] = None if row.memory.plan is None else json.loads(row.memory.plan.to_json())
    return read


def verdict_as_json(
    device: Device,
    memory: StepMemory | None,
    evaluation: StepMemory | None,
    reserved: Reserved | None = None,
    refusal: str = "",
) -> dict[str, Any]:
    """Return whether a run fits on a device: its steps, and its evaluation between them."""
    read: dict[str, Any] = {
        "device": device.name,
        "fits": str(Fit.NO),
        "peak_bytes": None,
        "is_evaluation": False,
        "refusal": refusal,
    }
    if memory is None:
        return read
    peak = max(memory.peak_bytes, 0 if evaluation is None else evaluation.peak_bytes)
    read |= {
        "fits": str(fit_of(peak, device, reserved)),
        "peak_bytes": peak,
        "is_evaluation": peak > memory.peak_bytes,
    }
    if reserved is not None:
        outside = context(device, reserved.num_processes)
        held = max(peak, reserved.bytes_on(device))
        read |= {
            "reserved_bytes": max(peak, reserved.num_bytes),
            "expandable_bytes": reserved.expandable_bytes,
            "nvidia_smi_bytes": [held + outside.low_bytes, held + outside.high_bytes],
        }
        if device.name in reserved.within:
            read["retries_per_step"] = reserved.within[device.name].retries_per_step
    return read


def memory_as_json(memory: StepMemory) -> dict[str, Any]:
    """Return what a step needs as JSON types, without the timeline and the ledger."""
    return {
        "peak_bytes": memory.peak_bytes,
        "peak_at": memory.peak_at.describe(),
        "by_category": {str(category): num_bytes for category, num_bytes in memory.by_category.items()},
        "host_bytes": memory.host_bytes,
        "tokens": memory.tokens,
        "seconds": {**asdict(memory.time), "total": memory.time.total},
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


def device_as_json(device: Device) -> dict[str, Any]:
    """Return a device as JSON types, with what it has besides a step."""
    kept = reserve(device)
    return {
        "name": device.name,
        "title": device.title,
        "memory_bytes": device.memory_bytes,
        "reserve_bytes": [kept.low_bytes, kept.high_bytes],
        "reserve_for": [item.name for item in kept.items],
        "attention": device.describe_attention(),
    }


def _free_host_bytes(found: Estimate, device: Device) -> int | None:
    """Return the free host memory where the device is this machine's; None elsewhere, and where it is not known."""
    offload = found.subject.allowed.offload
    trusts = offload is not None and offload.trust_host_memory
    return host_memory.available_bytes(trusts=trusts) if device.is_cuda and device == this_device() else None
