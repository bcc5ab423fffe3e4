"""Errors that hang on what a device is still computing: the host asks it for all of them at once.

A region that asked its device right away would have the host wait in each backward of each layer. So the answers stay
there until the backward has ended, or until somebody asks who knows when the weights are to change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hf_ckpt.regions.arguments import SharedSums
from hf_ckpt.regions.execution_state import is_in_backward
from hf_ckpt.regions.fingerprints import unobserved
from hf_ckpt.upstream.torch import current_graph_task_id, queue_callback

# Answers that wait at most after a backward: a MiB of the device, where each takes 512 bytes.
_MAX_HELD = 2048


@dataclass(slots=True, frozen=True)
class _PendingError:
    is_wrong: Tensor
    """A boolean, on its device. Kept until the host has waited for it, whichever stream computes it."""
    refuse: Callable[[], None]
    """Raises the error."""


class PendingErrors:
    """Those of one plan's regions, which it lives on; a copy of the model begins with none.

    Several backwards may run at once, in threads or one inside of another: each has its own. One that ends in an
    exception, as when memory runs out, takes them along: autograd drops its callbacks, and nobody else holds them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._backwards: WeakValueDictionary[int, list[_PendingError]] = WeakValueDictionary()
        self._held: list[_PendingError] = []
        self._is_holding = False
        self.shared_sums = SharedSums()

    def __reduce__(self) -> tuple[Callable[[], PendingErrors], tuple[()]]:
        return PendingErrors, ()

    def add(self, is_wrong: Tensor, refuse: Callable[[], None]) -> None:
        """Have `refuse` called if a boolean of a device is true: when the backward that is running has ended."""
        error = _PendingError(is_wrong, refuse)
        if not is_in_backward():
            _raise_first([error])
            return
        number = current_graph_task_id()
        with self._lock:
            errors = self._backwards.get(number)
            if errors is None:
                errors = self._backwards[number] = _OfBackward()
                queue_callback(partial(self._end_backward, errors))
            errors.append(error)

    def _end_backward(self, errors: list[_PendingError]) -> None:
        with self._lock:
            self._held += errors
            if self._is_holding and len(self._held) <= _MAX_HELD:
                return
            found, self._held = self._held, []
        _raise_first(found)

    # --- For who knows when the weights change. ---

    def hold(self) -> None:
        """From now on do not ask the device when a backward ends, but in `read`."""
        self._is_holding = True

    def read(self) -> None:
        """Raise the first of the errors that were held back, if there is one, and hold back no more."""
        with self._lock:
            self._is_holding = False
            found, self._held = self._held, []
        _raise_first(found)

    def hand_over(self, other: PendingErrors) -> None:
        """Let the regions of another plan go on in the place of these ones, between two backwards."""
        other._is_holding, other._held = self._is_holding, self._held
        self.clear()

    def clear(self) -> None:
        """Forget what was held back, and hold back no more."""
        self._is_holding, self._held = False, []


class _OfBackward(list[_PendingError]):
    """Those of one backward. A class, as a plain list cannot be held weakly."""

    __slots__ = ("__weakref__",)


def _raise_first(errors: list[_PendingError]) -> None:
    """Wait for the devices, once for each, and raise the first of the errors that has come true."""
    for device in dict.fromkeys(error.is_wrong.device for error in errors):
        there = [error for error in errors if error.is_wrong.device == device]
        with unobserved():
            are_wrong = torch.stack([error.is_wrong for error in there]).tolist()
        for error, is_wrong in zip(there, are_wrong, strict=True):
            if is_wrong:
                error.refuse()
