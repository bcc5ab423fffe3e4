"""Errors that say that memory has run out: how they are recognised, what they say, and what they hold."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from traceback import clear_frames, walk_tb
from types import TracebackType
from typing import Any

import torch

from hf_ckpt.errors import DiskFullError, HostMemoryError, cause_chain
from hf_ckpt.units import format_bytes
from hf_ckpt.upstream.torch import OF_HOST, RUNS_BACKWARD_NAME, is_out_of_memory

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_AMOUNT = r"([\d.]+) (bytes|KiB|MiB|GiB)"


class Part(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTATION = "recomputation in backward"
    OPTIMIZER = "optimizer step"
    EVALUATION = "evaluation"
    ELSEWHERE = "run, outside of its steps"


@dataclass(frozen=True, slots=True)
class Figures:
    """What the allocator said when it gave up, in bytes; None where it did not say."""

    wanted: int | None = None  # What was asked for last.
    capacity: int | None = None
    allocated: int | None = None  # What tensors have.
    unused: int | None = None  # What the allocator holds besides that.
    free: int | None = None  # What nobody holds.
    allowed: int | None = None  # What the allocator may hold, where it is capped.

    @classmethod
    def of(cls, message: str) -> Figures:
        """Read them off the message of `torch.OutOfMemoryError`."""
        return cls(
            wanted=_amount(rf"Tried to allocate {_AMOUNT}", message),
            capacity=_amount(rf"total capacity of {_AMOUNT}", message),
            allocated=_amount(rf"{_AMOUNT} is allocated by PyTorch", message),
            unused=_amount(rf"{_AMOUNT} is reserved by PyTorch but unallocated", message),
            free=_amount(rf"of which {_AMOUNT} is free", message),
            allowed=_amount(rf"{_AMOUNT} allowed;", message),
        )

    @property
    def missing_share(self) -> float | None:
        """Share of what was needed when memory ran out that was not there; None where the allocator did not say."""
        if self.missing_bytes is None or self.wanted is None or self.allocated is None:
            return None
        needed = self.allocated + self.wanted
        return self.missing_bytes / needed if needed else None

    @property
    def missing_bytes(self) -> int | None:
        """What was not there when memory ran out; None where the allocator did not say."""
        if self.wanted is None or self.free is None:
            return None
        # What it holds unused is in pieces, of which none was large enough: it is not to be had.
        usable = self.free
        if self.allowed is not None and self.allocated is not None:
            usable = min(usable, max(0, self.allowed - self.allocated - (self.unused or 0)))
        return max(0, self.wanted - usable)

    @property
    def is_fragmented(self) -> bool:
        """Whether what the allocator holds without using it would have been enough, but in pieces."""
        return self.unused is not None and self.unused > max(self.wanted or 0, MUCH * (self.allocated or 0))

    def describe(self) -> str:
        if self.allocated is None:
            return "The allocator gave no figures."
        unused = f" and {format_bytes(self.unused)} reserved without being used" if self.unused is not None else ""
        of = f", of {format_bytes(self.capacity)}" if self.capacity is not None else ""
        if self.allowed is not None:
            of += f"; {format_bytes(self.allowed)} of it are allowed"
        more = f"; {format_bytes(self.wanted)} more were asked for" if self.wanted is not None else ""
        return f"{format_bytes(self.allocated)} were allocated{unused}{of}{more}."


MUCH = 0.05
"""Share of what is allocated from which on fragments, growth and errors of a prediction are worth a word."""


def _amount(pattern: str, message: str) -> int | None:
    found = re.search(pattern, message)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def part_of(traceback: TracebackType | None) -> Part:
    frames = [(str(frame.f_globals.get("__name__", "")), frame.f_code.co_name) for frame, _ in walk_tb(traceback)]
    modules = [module for module, _ in frames]
    if any(module == "transformers.trainer" and name == "prediction_step" for module, name in frames):
        return Part.EVALUATION
    backward = next((at for at, frame in enumerate(frames) if frame == RUNS_BACKWARD_NAME), None)
    if backward is not None:
        again = any(module.startswith(("torch.utils.checkpoint", "hf_ckpt.regions")) for module in modules[backward:])
        return Part.RECOMPUTATION if again else Part.BACKWARD
    if any(module.startswith(_OF_OPTIMIZER) for module in modules):
        return Part.OPTIMIZER
    if any(module == "transformers.trainer" and name == "training_step" for module, name in frames):
        return Part.FORWARD
    return Part.ELSEWHERE


_OF_OPTIMIZER = ("torch.optim", "bitsandbytes.optim", "torch.nn.utils.clip_grad", "hf_ckpt.recovery.optimizer_recovery")


# --- An error that was caught. ---


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that said that memory has run out. It holds no tensor any longer."""

    error: BaseException
    part: Part
    figures: Figures

    @classmethod
    def caught(cls, error: BaseException) -> Failure:
        """Read an error, and let go of all that the frames of its traceback hold: activations, above all."""
        found = cls(error, part_of(error.__traceback__), Figures.of(str(error)))
        for each in cause_chain(error):
            clear_frames(each.__traceback__)
        if error.__traceback__ is not None:
            # The frame that catches it, which still runs, holds all that it is given.
            error.__traceback__ = error.__traceback__.tb_next
        return found

    @property
    def is_of_host(self) -> bool:
        """Whether it was memory of the host, or a disk, that ran out."""
        if isinstance(self.error, HostMemoryError | DiskFullError | MemoryError):
            return True
        return torch.accelerator.is_available() and re.search(OF_HOST, str(self.error)) is not None


def attempt(function: Callable[[], Any]) -> tuple[Any, Failure | None]:
    """Return what a function returns, or, where memory ran out in it, the failure, which holds no tensor of it."""
    try:
        return function(), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, Failure.caught(error)


def allocated_bytes() -> int | None:
    """Return the bytes that tensors hold on the device of this process; None where there is none that counts them."""
    return torch.accelerator.memory_allocated() if torch.accelerator.is_available() else None


def release_memory() -> None:
    """Free what only cycles of references keep, and give what the device's allocator holds unused back to the device.

    Takes a tenth of a second and more: for after a failure only.
    """
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
