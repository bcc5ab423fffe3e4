"""Bytes of all tensors that are alive, whoever holds them: autograd, a module, or Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_ckpt.structure.four_bit_tensor import FourBitTensor


class LiveStorages(TorchDispatchMode):
    """Follows the storages that operators make while this is entered.

    Args:
        known: tensors whose storages do not count, such as parameters.

    Attributes:
        peak_bytes: the most that was alive after any operator.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        # A weak reference keeps the address of its storage from being used again.
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if FourBitTensor in types:
            # Its operators on what it holds come here again.
            return NotImplemented
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.num_bytes())
        return output

    def num_bytes(self) -> int:
        """Return the bytes of the storages that are alive now."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(num_bytes for _, num_bytes in self._made.values())

    def restart_peak(self) -> None:
        """Take the peak from here on."""
        self.peak_bytes = self.num_bytes()


def of(model: torch.nn.Module, inputs: Iterable[Tensor]) -> LiveStorages:
    """Follow storages but those of the parameters, buffers and inputs."""
    return LiveStorages([*model.parameters(), *model.buffers(), *inputs])
