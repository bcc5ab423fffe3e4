"""The published figures: `steps.csv` and `modules.csv`, and `sources.yaml`, which says where they come from."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
ENGINES = {"none": "whole on each", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
"""How more than one rank shares a model, in words."""
_HELD_OUT_OF = 4


@dataclass(frozen=True)
class Source:
    """Who measured, with what, and what exactly."""

    name: str
    title: str
    repository: str
    commit: str
    folder: str
    hardware: str
    versions: str
    measured: str
    configuration: str
    device: str = ""
    """Of `hf_ckpt.find_device`; empty where points name their own."""
    device_fields: dict[str, Any] = field(default_factory=dict)
    """Fields of `Device` in which the card differs from that."""
    context_mib: int | None = None
    """What CUDA's context takes there, where that is published."""
    is_held_out: bool = False
    """Whether all of its points are held out."""
    blind_ratios: tuple[float, ...] = ()
    """Predicted by published, while they were held out; the code was changed since."""
    dtype: str = "bfloat16"
    """Of the model."""
    attention: str = "sdpa"
    """`attn_implementation` of the model."""
    step: dict[str, Any] = field(default_factory=dict)
    """Fields of `Step` that are the same in all rows; `optim` may also be a name of `emulations.OPTIMIZERS`."""
    sharding: dict[str, Any] = field(default_factory=dict)
    """Fields of `Sharding`, where there is more than one rank."""
    vocab_sizes: dict[str, int] = field(default_factory=dict)
    """Of models whose embeddings the measured code resized, by name of `models.MODELS`."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Fields of peft's `LoraConfig`."""
    keeps_adapter_dtype: bool = False
    """Whether adapters have the dtype of the model, as before peft 0.11; since then they are float32."""
    policy: str | list[dict[str, Any]] | None = None
    """Of `apply`; None for no checkpointing but that of `changes`."""
    changes: tuple[str, ...] = ()
    """Names of `emulations.CHANGES`: what the code that was measured does around a step."""
    reduces_always: bool = False
    """Whether ranks exchange gradients in every micro-batch, so that each takes as long as one alone."""
    expands_segments: bool = False
    """Whether it ran under `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`."""
    rank_link: float | None = None
    """Bytes per second that collectives reach between the ranks of this machine, fitted to points of `is_fitted_time`;
    None for those of the card."""
    host_factor: float = 1.0
    """How many times as long as usual the host takes to run Python; fitted to points of `is_fitted_time`."""
    idle_seconds: float = 0.0
    """Of each step, in which the device has nothing to do; fitted to points of `is_fitted_time`."""

    @property
    def engine(self) -> str:
        """How ranks share the model, where there is more than one: a key of `ENGINES`."""
        return str(self.sharding.get("engine", "none"))

    def link(self, file: str) -> str:
        """Return the address of a file as it was when it was read."""
        return f"{self.repository}/blob/{self.commit}/{self.folder}/{file}"


@dataclass(frozen=True)
class StepPoint:
    """One training step, as somebody ran it."""

    source: str
    file: str
    row: int
    """Line of the file."""
    model: str
    """A name of `models.MODELS`."""
    method: str
    """`full`, `lora` or `qlora`."""
    ranks: int
    batch: int
    """Rows on each rank."""
    tokens: int
    """Of a row."""
    autocast: str | None
    step: dict[str, Any]
    """Fields of `Step` that differ from those of the source."""
    emulations: tuple[str, ...]
    """Names of `emulations.EMULATIONS` and `CHANGES`: what the measured versions did differently."""
    allocated_bytes: int | None
    """Peak of `max_memory_allocated`; None where it is not published, and where the step ran out of memory."""
    reserved_bytes: int | None
    """Peak of `max_memory_reserved`."""
    smi_mib: int | None
    """What nvidia-smi showed of one device."""
    tokens_per_second: float | None
    """Of one rank; None where the step ran out of memory."""

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.source}:{self.file.removesuffix('.csv')}:{self.row}"

    @property
    def engine(self) -> str:
        """How ranks share the model: a key of `ENGINES`."""
        return "none" if self.ranks == 1 else sources()[self.source].engine

    @property
    def title(self) -> str:
        """What was run, in words."""
        where = "1 GPU" if self.ranks == 1 else f"{self.ranks} GPUs, {ENGINES[self.engine]}"
        more = [f"{name} {value}" for name, value in self.step.items()]
        more += [name.replace("_", " ") for name in self.emulations if name.endswith("checkpointing")]
        return ", ".join([self.model, self.method, f"{self.batch} x {self.tokens:,}", where, *more])


@dataclass(frozen=True)
class ModulePoint:
    """Forward and backward of one module, as somebody ran them."""

    source: str
    file: str
    row: int
    kernel: str
    """A name of `modules.MODULES`."""
    size: int
    gpu: str
    published_mib: float

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.source}:{self.row}"

    @property
    def title(self) -> str:
        """What was run, in words."""
        return f"{self.kernel}, {self.size:,}"


def is_held_out(name: str) -> bool:
    """Whether a point is one of those that are predicted only when the code is final. Decided by its name alone.

    It begins with its source, and some sources are held out as a whole.
    """
    return (
        sources()[name.partition(":")[0]].is_held_out or hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_OF == 0
    )


def is_fitted_time(name: str) -> bool:
    """Whether constants of time may be fitted to a point: half of them, by their names, of sources never held out."""
    source = sources()[name.partition(":")[0]]
    is_known = not source.is_held_out and not source.blind_ratios
    return is_known and hashlib.sha256(name.encode()).digest()[2] % 2 == 0


@cache
def sources() -> dict[str, Source]:
    """Return the sources by name."""
    read = yaml.safe_load((FOLDER / "sources.yaml").read_text(encoding="utf-8"))
    return {name: Source(name, **fields) for name, fields in read.items()}


def step_points() -> Iterator[StepPoint]:
    """Yield the points of `steps.csv`."""
    for row in _rows("steps.csv"):
        yield StepPoint(
            source=row["source"],
            file=row["file"],
            row=int(row["row"]),
            model=row["model"],
            method=row["method"],
            ranks=int(row["ranks"]),
            batch=int(row["batch"]),
            tokens=int(row["tokens"]),
            autocast=row["autocast"] or None,
            step=dict(map(_option, row["step"].split())),
            emulations=tuple(row["emulations"].split()),
            allocated_bytes=_whole(row["allocated_bytes"]),
            reserved_bytes=_whole(row["reserved_bytes"]),
            smi_mib=_whole(row["smi_mib"]),
            tokens_per_second=float(row["tokens_per_second"]) if row["tokens_per_second"] else None,
        )


def module_points() -> Iterator[ModulePoint]:
    """Yield the points of `modules.csv`."""
    for row in _rows("modules.csv"):
        yield ModulePoint(
            source=row["source"],
            file=row["file"],
            row=int(row["row"]),
            kernel=row["kernel"],
            size=int(row["size"]),
            gpu=row["gpu"],
            published_mib=float(row["published_mib"]),
        )


def _option(text: str) -> tuple[str, Any]:
    """Read `optim=adafactor`."""
    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)


def _whole(text: str) -> int | None:
    return int(text) if text else None


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)
