"""A step of the Trainer on two processes, followed on each: real storages of this rank, as the engine makes them."""

from __future__ import annotations

import gc
import logging
import tempfile
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from transformers import Trainer

from hf_ckpt.auto.live_step import live_sharding
from hf_ckpt.measure import track_real_step
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.simulation.step_memory import Category, StepMemory
from hf_ckpt.simulation.tape import Event, MemoryChange, Storage
from hf_ckpt.simulation.tracker import Tracker
from tests.distributed.runs import engine_of, fresh_accelerate
from tests.following import Run


@dataclass(frozen=True, kw_only=True)
class RankRun(Run):
    """A run on two processes, which share the rows."""

    def data(self) -> list[dict[str, Tensor]]:
        return 2 * super().data()

    def step_of(self, sharding: Sharding) -> Step:
        """What the simulation is told of it."""
        return replace(self.step, sharding=sharding)

    def followed_on_rank(self) -> tuple[str, Sharding, StepMemory]:
        """Run it, and return the engine that it really ran under, what is read of the wrapped model, and its step."""
        # FSDP1 is deprecated, which transformers says through its logger.
        quiet = mock.patch.object(logging.getLogger("transformers.training_args"), "disabled", True)
        with fresh_accelerate(), tempfile.TemporaryDirectory() as folder, quiet:
            trainer = self.trainer(Path(folder), self.model())
            memory = followed_here(trainer)
            wrapped = trainer.model_wrapped
            return engine_of(wrapped), live_sharding(trainer.args, wrapped), memory


def followed_here(trainer: Trainer) -> StepMemory:
    """Follow a step of a Trainer whose engine shares weights or gradients, on this rank."""
    with _engines_are_followed(_storages()):
        return track_real_step.follow_trainer(trainer)


def _tensors() -> list[Tensor]:
    return [found for found in gc.get_objects() if isinstance(found, Tensor) and found.device.type != "meta"]


def _storages() -> dict[int, torch.UntypedStorage]:
    """Return what is alive by address. Whoever holds it lets no other storage get the same one."""
    found = [tensor.untyped_storage() for tensor in _tensors()]
    return {storage._cdata: storage for storage in found}


class RankTracker(Tracker):
    """Follows storages that FSDP resizes, and what the engine itself holds.

    `found` are storages from before the run, which are not of the model.
    """

    # As one of the package's: a mode of others that comes after the proven step has each region proven anew.
    __module__ = Tracker.__module__

    def __init__(self, found: Collection[int], **options: Any) -> None:
        super().__init__(**options)
        self._found = found

    def __enter__(self) -> Self:
        gc.collect()
        # What the engine itself holds is in none of the model's modules: flat shares, buckets.
        self.record_existing(((f"engine {number}", x) for number, x in enumerate(self._others())), Category.OPTIMIZER)
        return super().__enter__()

    def _others(self) -> Iterator[Tensor]:
        for tensor in _tensors():
            key = tensor.untyped_storage()._cdata
            # States of random generators are of no engine.
            if tensor.is_floating_point() and key not in self._found and self._storage_of(tensor) is None:
                yield tensor

    def record_resize(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that was filled or emptied in place: weights that are gathered, or no longer."""
        reference, found = self._alive.get(storage._cdata, (self._reference(storage), Storage(0)))
        place = self._current_place("resize_")
        resized = Storage(storage.nbytes(), category=Category.GATHERED)
        self._alive[storage._cdata] = reference, resized
        for each, change in ((found, MemoryChange.FREE), (resized, MemoryChange.ALLOCATE)):
            if each.num_bytes:
                self._append(Event(place, change, each))

    def _reference(self, storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
        key = storage._cdata
        return weakref.ref(storage, lambda _: self._record_free(key))


@contextmanager
def _engines_are_followed(found: Collection[int]) -> Iterator[None]:
    """Let a step be followed by a `RankTracker` that hears of resized storages, which are no operators."""
    trackers: list[RankTracker] = []
    resize = torch.UntypedStorage.resize_

    def make(**options: Any) -> RankTracker:
        trackers.append(RankTracker(found, **options))
        return trackers[-1]

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        for tracker in trackers:
            tracker.record_resize(storage)
        return result

    with (
        mock.patch.object(track_real_step, "Tracker", make),
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
    ):
        yield
