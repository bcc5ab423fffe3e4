"""A memory limit that the CPU does not have: operators fail as they would on a device that is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainerCallback

FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.00 GiB. Of the allocated memory "
    "20.00 GiB is allocated by PyTorch, and 40.00 GiB is reserved by PyTorch but unallocated."
)
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


class FailingOperators(TorchDispatchMode):
    """Raises `torch.OutOfMemoryError` at operators of training steps, counted from 0 in each optimizer step.

    Args:
        at: optimizer steps, counted from 0, with the numbers of the operators that are to fail, once each.
        after: fail once the operator has written, and not before it.
        message: of the error.

    Attributes:
        step: the optimizer step that runs.
        phase: of it; operators outside of any are not counted.
        starts: of each step, the numbers that phases began with.
        raised: how often an operator has failed.
    """

    def __init__(self, at: dict[int, list[int]] | None = None, *, after: bool = False, message: str = FULL) -> None:
        super().__init__()
        self.step = -1
        self.phase: str | None = None
        self.starts: dict[int, list[int]] = {}
        self.raised = 0
        self.number = 0
        self._at = {step: sorted(numbers) for step, numbers in (at or {}).items()}
        self._after = after
        self._message = message

    def begin_step(self) -> None:
        """An optimizer step begins."""
        self.step += 1
        self.number = 0

    def begin(self, phase: str | None) -> None:
        """A phase begins, or none."""
        self.phase = phase
        self.starts.setdefault(self.step, []).append(self.number)

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        fails = self._is_next()
        if fails and not self._after:
            self._fail()
        output = function(*args, **(kwargs or {}))
        if fails:
            self._fail()
        return output

    def _is_next(self) -> bool:
        if self.phase is None:
            return False
        number, self.number = self.number, self.number + 1
        due = self._at.get(self.step, [])
        if not due or number < due[0]:
            return False
        due.pop(0)
        return True

    def _fail(self) -> None:
        self.raised += 1
        raise torch.OutOfMemoryError(self._message)


class Limit(TorchDispatchMode):
    """Raises `torch.OutOfMemoryError` where the storages that operators have made would exceed a number of bytes.

    Storages that are there already do not count, and neither do gradients of parameters.

    Attributes:
        num_bytes: the limit; None only measures.
        peak_bytes: the most that was alive.
        raised: how often the limit was met.
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.peak_bytes = 0
        self.raised = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._made_bytes = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        asked = 0
        for tensor in _tensors(output):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                _, replaced = self._made.get(storage._cdata, (None, 0))
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self._made_bytes += storage.nbytes() - replaced
                asked += storage.nbytes()
        # Those that have gone are looked for only where that can matter: there are thousands of them.
        if self._made_bytes <= (self.peak_bytes if self.num_bytes is None else min(self.peak_bytes, self.num_bytes)):
            return output
        alive = self.alive_bytes()
        self.peak_bytes = max(self.peak_bytes, alive)
        if self.num_bytes is not None and alive > self.num_bytes:
            self.raised += 1
            before = alive - asked
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {asked} bytes. GPU 0 has a total capacity of "
                f"{self.num_bytes} bytes of which {self.num_bytes - before} bytes is free. Of the allocated memory "
                f"{before} bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
            )
        return output

    def alive_bytes(self) -> int:
        """Return the bytes of the storages that are alive."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self._made_bytes = sum(num_bytes for _, num_bytes in self._made.values())
        return self._made_bytes


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Phased:
    """Part of a Trainer's class: tells a mode, which is the attribute `mode`, what part of a step runs."""

    mode: FailingOperators

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.mode.begin("forward")
        try:
            return super().training_step(*args, **kwargs)  # type: ignore[misc,no-any-return]
        finally:
            self.mode.begin(None)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        if self.mode.phase is not None:
            self.mode.begin("backward")
        return found


class LimitedTrainer(Trainer):
    """Trains in order, under the memory limit of its attribute `limit`; `peaks` are those of its steps."""

    limit: int | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with Limit(self.limit) as mode:
            try:
                return super().training_step(*args, **kwargs)
            finally:
                vars(self).setdefault("peaks", []).append(mode.peak_bytes)

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class PhasedTrainer(Phased, Trainer):
    """A plain Trainer that tells it."""


class Steps(TrainerCallback):
    """Tells a mode when an optimizer step begins, and what of it the optimizer runs."""

    def __init__(self, mode: FailingOperators, *, counts_optimizer: bool = False) -> None:
        self._mode = mode
        self._counts_optimizer = counts_optimizer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mode.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mode.number = 0
        self._mode.begin("optimizer" if self._counts_optimizer else None)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mode.begin(None)
