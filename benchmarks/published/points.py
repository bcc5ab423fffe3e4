"""The published figures: `steps.csv` and `modules.csv`, and `sources.yaml`, which says where they come from."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
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
    emulations: tuple[str, ...]
    """Names of `emulations.EMULATIONS`: what the measured versions did differently."""
    allocated_bytes: int | None
    """None where the step ran out of memory."""
    smi_mib: int
    """What nvidia-smi showed of one device."""
    tokens_per_second: float | None
    """Of one rank."""

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.source}:{self.file.removesuffix('.csv')}:{self.row}"

    @property
    def title(self) -> str:
        """What was run, in words."""
        where = "1 GPU" if self.ranks == 1 else f"{self.ranks} GPUs, FSDP1"
        return f"{self.model}, {self.method}, {self.batch} x {self.tokens:,}, {where}"


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
    """Whether a point is one of those that are predicted only when the code is final. Decided by its name alone."""
    return hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_OF == 0


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
            emulations=tuple(row["emulations"].split()),
            allocated_bytes=int(row["allocated_bytes"]) if row["allocated_bytes"] else None,
            smi_mib=int(row["smi_mib"]),
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


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)
