"""An estimate as a table for a person and as JSON for a program."""

from __future__ import annotations

import json
import platform
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hf_ckpt.estimate.estimate import Estimate, Fit, Row, budget_of, fit_of
from hf_ckpt.planner.advice import Exactness
from hf_ckpt.regions.offload import host_memory
from hf_ckpt.simulation.devices import Device, reserve, this_device
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.units import format_bytes

_SHOWN_CATEGORIES = 2
_WIDTH = 120


def table(found: Estimate) -> str:
    """Return an estimate as text."""
    lines = [f"hf-ckpt estimate {found.subject.title}", *facts(found.subject.facts), *_devices(found), ""]
    header = ("plan", "peak", "most of it", "when", *_time_header(found), *_host_header(found), *_fit_headers(found))
    lines += columns([header, *(_cells(found, row) for row in found.rows)], numeric=(1, 4, *_host_column(found)))
    return "\n".join(
        [*lines, "", *_refusals(found), *_exactness(found), *_evaluation(found), verdict(found), *_host(found)]
    )


def facts(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield (name, text) rows as two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        yield textwrap.fill(
            text,
            _WIDTH,
            initial_indent=f"  {name:<{width}}  ",
            subsequent_indent=" " * (width + 4),
            break_on_hyphens=False,
            break_long_words=False,
        )


def columns(rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> Iterator[str]:
    """Yield rows as lines with aligned columns; those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if at in numeric else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def verdict(found: Estimate) -> str:
    """Return whether the recipe fits, in a sentence for each device."""
    rows = [row for row in found.rows if row.name == found.decides]
    what = "The recipe's plan" if found.decides == "recipe" else "The planner's choice"
    if found.subject.plan is None and found.decides == "recipe":
        what = "The recipe, which has no plan,"
    return "\n".join(
        _sentence(what, found, row, device) for device in found.devices for row in _of_device(rows, device)
    )


def as_json(found: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON types."""
    return {
        "recipe": found.subject.title,
        "fits": found.fits,
        "decides": found.decides,
        "facts": [{"name": name, "text": text} for name, text in found.subject.facts],
        "devices": [_device_as_json(found, device) for device in found.devices],
        "rows": [_row_as_json(found, row) for row in found.rows],
        "evaluation": None if found.evaluation is None else memory_as_json(found.evaluation),
        "host": [
            {"device": device.name, "needed_bytes": needed, "free_bytes": _free_host_bytes(found, device)}
            for device, needed in _needed_of_host(found)
        ],
    }


def to_json(read: Mapping[str, Any], words: Sequence[str]) -> str:
    """Return JSON text, with the command that made it and the versions that it holds for."""
    command = shlex.join(["hf-ckpt", *words])
    return json.dumps({"command": command, "versions": versions(), **read}, indent=1, allow_nan=False)


def memory_as_json(memory: StepMemory) -> dict[str, Any]:
    """Return what a step needs as JSON types, without the timeline and the ledger."""
    time = memory.time
    return {
        "peak_bytes": memory.peak_bytes,
        "peak_at": memory.peak_at.describe(),
        "by_category": {str(category): num_bytes for category, num_bytes in memory.by_category.items()},
        "host_bytes": memory.host_bytes,
        "tokens": memory.tokens,
        "seconds": {
            "forward": time.forward,
            "backward": time.backward,
            "recomputation": time.recomputation,
            "optimizer": time.optimizer,
            "copies": time.copies,
            "total": time.total,
        },
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


# --- The table. ---


def _devices(found: Estimate) -> Iterator[str]:
    width = max((len(name) for name, _ in found.subject.facts), default=0)
    rows = [row for device in found.devices for row in facts_of(device)]
    yield from facts([(name.ljust(width), text) for name, text in rows])


def facts_of(device: Device) -> list[tuple[str, str]]:
    """Return rows of `facts`: a device in words, with what it has beside a step, and which attention it runs."""
    attention = device.describe_attention()
    rows = [("device", describe_device(device))]
    return rows if attention is None else [*rows, ("attention", f"{device.name}: {attention}")]


def describe_device(device: Device) -> str:
    """Return a device in words, with what it has beside a step."""
    kept = reserve(device)
    names = ", ".join(item.name for item in kept.items)
    return (
        f"{device.title}, {format_bytes(device.memory_bytes)}, of which {format_bytes(kept.low_bytes)} to "
        f"{format_bytes(kept.high_bytes)} are left for {names}"
    )


def format_seconds(seconds: float) -> str:
    """Return seconds with three digits, in milliseconds below one."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _time_header(found: Estimate) -> tuple[str]:
    return ("step" if len(found.devices) == 1 else f"step, {found.devices[0].name}",)


def _host_header(found: Estimate) -> tuple[str, ...]:
    """Return the header of what waits on the host, where something does under one of the plans."""
    return ("host",) if any(row.memory is not None and row.memory.host_bytes for row in found.rows) else ()


def _host_column(found: Estimate) -> tuple[int, ...]:
    return (5,) if _host_header(found) else ()


def _fit_headers(found: Estimate) -> tuple[str, ...]:
    return ("fits",) if len(found.devices) == 1 else tuple(device.name for device in found.devices)


def _cells(found: Estimate, row: Row) -> tuple[str, ...]:
    memory = row.memory
    name = row.name if row.device is None or len(found.devices) == 1 else f"{row.name}, {row.device.name}"
    if memory is None:
        fits = ("no" if row.device in (None, device) else "" for device in found.devices)
        return name, "-", "", "", "", *("" for _ in _host_header(found)), *fits
    fits = (_fit(memory, device) if row.device in (None, device) else "" for device in found.devices)
    is_timed = row.device in (None, found.devices[0])
    time = format_seconds(memory.time.total) if is_timed else ""
    largest = _largest(memory, _SHOWN_CATEGORIES if len(found.devices) == 1 else 1)
    host = ((format_bytes(memory.host_bytes) if memory.host_bytes else "") for _ in _host_header(found))
    return name, format_bytes(memory.peak_bytes), largest, _when(memory), time, *host, *fits


def _largest(memory: StepMemory, number: int) -> str:
    ordered = sorted(memory.by_category.items(), key=lambda item: -item[1])[:number]
    return ", ".join(f"{category} {format_bytes(num_bytes)}" for category, num_bytes in ordered)


def _when(memory: StepMemory) -> str:
    place = memory.peak_at
    # Outside the layers the operator is all that tells.
    return place.describe().replace("aten.", "") if place.layer_idx is None else place.describe().partition(", ")[0]


def _fit(memory: StepMemory, device: Device) -> str:
    fit = fit_of(memory.peak_bytes, device)
    if fit is not Fit.NO:
        return str(fit)
    return f"no, {format_bytes(_missing(memory, device))} too much"


def _missing(memory: StepMemory, device: Device) -> int:
    return memory.peak_bytes + reserve(device).low_bytes - device.memory_bytes


def _refusals(found: Estimate) -> Iterator[str]:
    for row in found.rows:
        if row.refusal:
            said, *lines = f"{row.name}: {row.refusal}".split("\n")
            yield "\n".join([textwrap.fill(said, _WIDTH, break_on_hyphens=False), *lines])
    if any(row.refusal for row in found.rows):
        yield ""


def _exactness(found: Estimate) -> Iterator[str]:
    for row in found.rows:
        if row.exactness is not None:
            where = f" for {row.device.name}" if row.device is not None and len(found.devices) > 1 else ""
            yield f"The planner's choice{where} is {row.exactness.describe()}."


def _of_device(rows: Sequence[Row], device: Device) -> list[Row]:
    return [row for row in rows if row.device in (None, device)]


def _evaluation(found: Estimate) -> Iterator[str]:
    if found.evaluation is not None:
        peak, largest = found.evaluation.peak_bytes, _largest(found.evaluation, _SHOWN_CATEGORIES)
        yield f"A batch of its evaluation needs {format_bytes(peak)}: {largest}."


def _host(found: Estimate) -> Iterator[str]:
    """Yield what the plan that decides needs of the host, and what is free where it would run on this machine."""
    for device, needed in _needed_of_host(found):
        free = _free_host_bytes(found, device)
        if free is None:
            yield f"It needs {format_bytes(needed)} of host memory beside {device.name}."
        else:
            fits = "fits" if needed <= free else "does not fit: offload fewer layers (fraction), or to disk"
            yield f"It needs {format_bytes(needed)} of host memory; {format_bytes(free)} are free here: it {fits}."


def _needed_of_host(found: Estimate) -> Iterator[tuple[Device, int]]:
    for device in found.devices:
        for row in _of_device([row for row in found.rows if row.name == found.decides], device):
            if row.memory is not None and row.memory.host_bytes:
                yield device, row.memory.host_bytes


def _free_host_bytes(found: Estimate, device: Device) -> int | None:
    """Return the free host memory where the device is this machine's; None elsewhere, and where it cannot be told."""
    offload = found.subject.allowed.offload
    trusts = offload is not None and offload.trust_host_memory
    return host_memory.available_bytes(trusts=trusts) if device.is_cuda and device == this_device() else None


def _sentence(what: str, found: Estimate, row: Row, device: Device) -> str:
    if row.memory is None:
        return f"{what} does not fit on {device.name}: {row.refusal.partition('. ')[0]}."
    kept, peak = reserve(device), found.peak_with_evaluation(row.memory)
    words = {Fit.YES: "fits", Fit.PERHAPS: "may fit, with nothing to spare,", Fit.NO: "does not fit"}
    return (
        f"{what} {words[fit_of(peak, device)]} on {device.name}: {format_bytes(peak)} and "
        f"{format_bytes(kept.low_bytes)} to {format_bytes(kept.high_bytes)} beside it, of "
        f"{format_bytes(device.memory_bytes)}."
    )


# --- JSON. ---


def _device_as_json(found: Estimate, device: Device) -> dict[str, Any]:
    kept = reserve(device)
    return {
        "name": device.name,
        "title": device.title,
        "memory_bytes": device.memory_bytes,
        "reserve_bytes": [kept.low_bytes, kept.high_bytes],
        "attention": device.describe_attention(),
        "budget_bytes": budget_of(found.subject, device),
    }


def _row_as_json(found: Estimate, row: Row) -> dict[str, Any]:
    read: dict[str, Any] = {"name": row.name, "refusal": row.refusal}
    if row.device is not None:
        read["device"] = row.device.name
    if row.exactness is not None:
        read["exactness"] = exactness_as_json(row.exactness)
    if row.memory is not None:
        devices = [device for device in found.devices if row.device in (None, device)]
        read |= memory_as_json(row.memory)
        read["fits"] = {device.name: str(fit_of(row.memory.peak_bytes, device)) for device in devices}
        read["plan"] = None if row.memory.plan is None else json.loads(row.memory.plan.to_json())
    return read


_PACKAGES = ("hf_ckpt", "torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed, by name."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
