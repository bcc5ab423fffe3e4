"""Values of tensors, read to tell whether they have changed: a few of each weight in every step, all of a buffer once.

Read past torch's dispatcher or with Python's part of it switched off, so that modes that follow or count operators see
none of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_ckpt.regions.tensor_hashes import Fingerprint, are_equal, fingerprint, is_plain

_NUM_BYTES = 64
_NUM_ELEMENTS = 256
_PLAIN = (Tensor, nn.Parameter)


class Samples:
    """A few values of some tensors: on the CPU their bytes; on a device a copy there, which nobody waits for.

    Args:
        tensors: they.
    """

    __slots__ = ("_on_device", "_on_host")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._on_host = [_bytes_of(tensor) for tensor in tensors]
        self._on_device = _elements_of(tensors)

    def differ(self, tensors: Sequence[Tensor]) -> bool | Tensor:
        """Tell whether the values of these tensors are others; a tensor on the device where it is not known yet."""
        if [_bytes_of(tensor) for tensor in tensors] != self._on_host:
            return True
        if self._on_device is None:
            return False
        now = _elements_of(tensors)
        if now is None or now.shape != self._on_device.shape:
            return False
        with _unseen():
            return (now != self._on_device).any()


def when_known(differs: Tensor, refuse: Callable[[], None]) -> None:
    """Call `refuse` if a tensor of a device turns out to be true: at the end of the backward that is running."""

    def look() -> None:
        if differs.item():
            refuse()

    if torch._C._current_graph_task_id() == -1:
        look()
    else:
        # By then the host waits for the device anyway, and only the first of these waits.
        torch.autograd.Variable._execution_engine.queue_callback(look)


def _bytes_of(tensor: Tensor) -> bytes | None:
    """Return bytes from the middle of a tensor on the CPU; None where they cannot be read."""
    if not tensor.is_cpu or type(tensor) not in _PLAIN or not tensor.is_contiguous():
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        # A wrapper of torch.func, which has no memory.
        return None
    size = tensor.nbytes
    # Without memory: an engine has let go of it.
    if not address:
        return None
    if size <= _NUM_BYTES:
        return ctypes.string_at(address, size)
    return ctypes.string_at(address + (size - _NUM_BYTES >> 1), _NUM_BYTES)


def _elements_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a copy of elements spread over the first and the last of tensors on a device; None without any."""
    there = [tensor for tensor in tensors if not tensor.is_cpu and tensor.is_contiguous() and tensor.numel()]
    there = [tensor for tensor in there if is_plain(tensor) and tensor.dtype == there[0].dtype]
    if not there or (there[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    with _unseen():
        return torch.cat([_spread(tensor) for tensor in (there if len(there) == 1 else (there[0], there[-1]))])


def _spread(tensor: Tensor) -> Tensor:
    size = tensor.numel()
    return tensor.as_strided((min(size, _NUM_ELEMENTS),), (max(size // _NUM_ELEMENTS, 1),))


def fingerprint_of(tensor: Tensor) -> Fingerprint | None:
    """Return the fingerprint of a tensor; None where it has no values."""
    if not is_plain(tensor):
        return None
    with _unseen():
        return fingerprint(tensor)


def have_same_values(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    """Compare two fingerprints; what has no values is taken for unchanged."""
    if one is None or other is None:
        return True
    with _unseen():
        return are_equal(one, other)


@contextmanager
def _unseen() -> Iterator[None]:
    # It imports the module that this one is imported by.
    from hf_ckpt.regions.selective import kernels

    setting = kernels.pause()
    try:
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            yield
    finally:
        kernels.leave(setting)
