"""Fingerprints of tensors, and of the state that a region may read; samples of values.

A fingerprint has a hash that shows whether two tensors are equal bit by bit, and a sketch that shows how far apart they
are. Both stay on the tensor's device, and are small: tensors can be compared that are never there at the same time.
Meanwhile at most 16 MiB are used, however large a tensor is, and for a small one about as much as it has itself.

Samples are cheap enough for every step: a few values of each weight. They are read past torch's dispatcher, or with
Python's part of it switched off, so that modes that follow or count operators do not see it.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.regions.execution_state import RandomState
from hf_ckpt.regions.selective import dispatch

_MIN_CHUNK, _MAX_CHUNK = 1 << 10, 1 << 19
"""Elements that are hashed together: an eighth of the tensor's, within these bounds."""
_BYTES_PER_ELEMENT = 28
"""Scratch memory for each of them: a weight and the product with it (8 each), a sign (4), a copy (8)."""
_BINS = 64
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 over the golden ratio, as a signed number: combines the hashes of chunks, and mixes places."""
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
"""Of SplitMix64 (Steele, Lea, Flood 2014), as a signed number."""
_SUM_ERROR = 2.0**-14
"""Relative to the norms of the terms: far more than the error of sums in float32, and of their sketches."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one tensor."""

    shape: torch.Size
    dtype: torch.dtype
    hash: Tensor
    """int64, a scalar: of all bits and where they are."""
    sketch: Tensor | None
    """float32 [65]: the squared norm, then 64 sums with random signs; None for integers, or if it was not wanted."""


def fingerprint(tensor: Tensor, *, has_sketch: bool = False) -> Fingerprint:
    """Return the fingerprint of a tensor that `is_plain`; sketched, if its numbers are real ones and `has_sketch`."""
    has_sketch = has_sketch and tensor.is_floating_point()
    size = _chunk_size(tensor)
    # Made anew each time: kept, they would be there at the step's peak.
    weights = _weights(0, size, tensor.device)
    signs = weights.sign().to(torch.float32) if has_sketch else weights
    total: Tensor | None = None
    sums = torch.zeros(1 + _BINS, dtype=torch.float32, device=tensor.device) if has_sketch else None
    for number, chunk in enumerate(_chunks(_as_real(tensor.detach()), size)):
        bits = chunk.view(_INTEGERS[chunk.element_size()]).to(torch.int64, copy=True)
        mixed = bits.mul_(weights if chunk.numel() == size else weights[: chunk.numel()]).sum()
        total = mixed if total is None else total * _ODD + mixed
        del bits, mixed
        if sums is not None:
            sums += _sums(chunk, signs, number)
    assert total is not None, "an empty tensor has a chunk too"
    return Fingerprint(tensor.shape, tensor.dtype, total, sums)


def plain_fingerprints(tensors: Sequence[Tensor], *, has_sketch: bool = False) -> list[Fingerprint]:
    """Return the fingerprints of those tensors that are plain."""
    return [fingerprint(tensor, has_sketch=has_sketch) for tensor in tensors if is_plain(tensor)]


def scratch_bytes(tensor: Tensor) -> int:
    """Return the most memory that `fingerprint` uses meanwhile."""
    return _BYTES_PER_ELEMENT * _chunk_size(tensor)


def _chunk_size(tensor: Tensor) -> int:
    size = tensor.numel() * (2 if tensor.is_complex() else 1)
    return min(size, max(_MIN_CHUNK, min(_MAX_CHUNK, -(-size // 8))))


def _weights(start: int, size: int, device: torch.device) -> Tensor:
    """Return an odd pseudorandom number for each place, without a generator, so that the user's stay as they are."""
    weights = torch.arange(start + 1, start + 1 + size, device=device).mul_(_ODD)
    weights ^= weights >> 32
    return weights.mul_(_MIX).bitwise_or_(1)


def is_plain(tensor: Tensor) -> bool:
    """Whether the bits of a tensor can be read."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
    )


def are_equal(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two tensors are equal bit by bit. Waits for the device."""
    return one.shape == other.shape and one.dtype == other.dtype and bool(one.hash == other.hash)


def relative_distance(one: Fingerprint, other: Fingerprint) -> float | None:
    """Return about how far apart two tensors are, relative to the norm of the first; None if that is not known.

    The distance between the sums with random signs is that of the tensors up to a factor of 1 ± 0.18 (two standard
    deviations of 64 squares: 0.35, of the root).
    """
    if one.sketch is None or other.sketch is None or one.shape != other.shape:
        return None
    norm = one.sketch[0].sqrt()
    distance = (one.sketch[1:] - other.sketch[1:]).norm()
    return float(distance / norm) if norm else float(distance)


def all_equal(ones: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> bool:
    """Whether two lists of tensors were equal bit by bit. Waits for the device."""
    return len(ones) == len(others) and all(map(are_equal, ones, others))


def largest_distance(ones: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> float | None:
    """Return the largest distance of tensors, relative to their norm; None if one of them is not known."""
    if len(ones) != len(others):
        return None
    unequal = [(one, other) for one, other in zip(ones, others, strict=True) if not are_equal(one, other)]
    distances = [relative_distance(one, other) for one, other in unequal]
    known = [distance for distance in distances if distance is not None]
    return max(known, default=0.0) if len(known) == len(distances) else None


def rounding_of(outputs: Sequence[Fingerprint]) -> float:
    """Return the unit of rounding of the least precise of floating-point tensors; 0 if there is none."""
    floating = [torch.finfo(output.dtype).eps for output in outputs if output.dtype.is_floating_point]
    return max(floating, default=0.0)


def is_sum(terms: Sequence[Fingerprint], total: Fingerprint) -> bool:
    """Whether a tensor, rounded to its dtype once, is the sum of others. Waits for the device.

    Compares their sketches, which add up as the tensors do.
    """
    sketches = [term.sketch for term in terms if term.sketch is not None]
    if total.sketch is None or not sketches:
        return total.sketch is None and not sketches
    stacked = torch.stack(sketches)
    distance = (stacked[:, 1:].sum(0) - total.sketch[1:]).norm()
    size = stacked[:, 0].sqrt().sum()
    allowed = torch.finfo(total.dtype).eps * total.sketch[0].sqrt() + _SUM_ERROR * size
    # A term that is not finite makes the comparison meaningless.
    return bool((distance <= allowed) | ~size.isfinite())


def _sums(chunk: Tensor, signs: Tensor, number: int) -> Tensor:
    size = chunk.numel()
    signed = chunk.to(torch.float32, copy=True).mul_(signs[:size])
    rest = size % _BINS
    bins = signed[: size - rest].view(_BINS, size // _BINS).sum(1)
    bins[:rest] += signed[size - rest :]
    # Other signs in each chunk, so that equal differences in two of them do not always cancel or always add up.
    bins *= _weights((1 + number) * _BINS, _BINS, chunk.device).sign()
    return torch.cat([signed.square_().sum().view(1), bins])


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()


def _chunks(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the elements in order, flat, the same for every layout; copied only where they do not lie in a row."""
    if tensor.numel() <= size:
        yield tensor.reshape(-1)
        return
    rows = size // (tensor.numel() // tensor.shape[0])
    for part in torch.split(tensor, max(1, rows)):
        yield from [part.reshape(-1)] if rows else _chunks(part[0], size)


def plain_tensors(value: Any) -> list[Tensor]:
    """Return the plain tensors in an output: itself, or those in its tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return [value] if is_plain(value) else []
    if isinstance(value, dict):
        value = list(value.values())
    return [each for item in value for each in plain_tensors(item)] if isinstance(value, tuple | list) else []


# --- The state that a region may read. ---

_MAX_STATE = 1 << 20
"""Elements of the largest tensor that is part of a state."""


@dataclass(slots=True)
class StateFingerprint:
    """What a region may read apart from its inputs and weights, at one moment."""

    random: RandomState
    python: object
    """State of Python's `random`; None if it was not read."""
    numpy: object
    """State of `numpy.random`; None if it was not read, or numpy not imported."""
    values: dict[str, Any] = field(default_factory=dict)
    """Plain attributes of the modules inside, by name."""
    tensors: dict[str, list[Fingerprint]] = field(default_factory=dict)
    """Of their buffers and of tensors that they hold otherwise, by name."""

    @classmethod
    def of(cls, module: nn.Module | None, tensors: Sequence[Any], *, reads_python: bool) -> StateFingerprint:
        """Read the state; `reads_python` asks for the generators that are not torch's."""
        values: dict[str, Any] = {}
        held: dict[str, list[Fingerprint]] = {}
        for path, inner in () if module is None else module.named_modules():
            prefix = f"{path}." if path else ""
            for name, value in vars(inner).items():
                if isinstance(value, bool | int | float | str):
                    values[prefix + name] = value
            held.update((prefix + name, plain_fingerprints([tensor])) for name, tensor in tensors_held(inner))
        python, numpy = (random.getstate(), _numpy_state()) if reads_python else (None, None)
        return cls(RandomState.of(list(tensors)), python, numpy, values, held)


def tensors_held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module, without those inside, and the tensors that it holds otherwise."""
    yield from ((name, value) for name, value in (*vars(module).items(), *module._buffers.items()) if _is_state(value))


def _is_state(value: object) -> bool:
    # A larger tensor may be a weight, which an engine has put there as a plain attribute.
    return isinstance(value, Tensor) and not value.requires_grad and value.numel() <= _MAX_STATE


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), tuple(rest)


# --- Samples, and fingerprints that modes do not see. ---

_NUM_BYTES = 64
"""Of a sample on the CPU."""
_NUM_ELEMENTS = 256
"""Of a sample on a device."""
_PLAIN = (Tensor, nn.Parameter)


class Samples:
    """A few values of some tensors: on the CPU their bytes; on a device a copy there, which nobody waits for."""

    __slots__ = ("_on_device", "_on_host")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._on_host = [_bytes_of(tensor) for tensor in tensors]
        self._on_device = _elements_of(tensors)

    def differ(self, tensors: Sequence[Tensor]) -> bool | Tensor:
        """Whether the values of these tensors differ from the samples; a tensor on the device if not known yet."""
        if [_bytes_of(tensor) for tensor in tensors] != self._on_host:
            return True
        if self._on_device is None:
            return False
        now = _elements_of(tensors)
        if now is None or now.shape != self._on_device.shape:
            return False
        with unobserved():
            return (now != self._on_device).any()


def is_read_late(tensor: Tensor) -> bool:
    """Whether the host would have to wait for a tensor's values."""
    return not tensor.is_cpu


def _bytes_of(tensor: Tensor) -> bytes | None:
    """Return bytes from the middle of a tensor on the CPU; None where they cannot be read."""
    if is_read_late(tensor) or type(tensor) not in _PLAIN or not tensor.is_contiguous():
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        # A wrapper of torch.func, which has no memory.
        return None
    size = tensor.nbytes
    # No memory: an engine has freed it.
    if not address:
        return None
    if size <= _NUM_BYTES:
        return ctypes.string_at(address, size)
    return ctypes.string_at(address + (size - _NUM_BYTES >> 1), _NUM_BYTES)


def _elements_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a copy of elements spread over the first and the last of the tensors on a device; None without any."""
    there = [tensor for tensor in tensors if is_read_late(tensor) and tensor.is_contiguous() and tensor.numel()]
    there = [tensor for tensor in there if is_plain(tensor) and tensor.dtype == there[0].dtype]
    if not there or (there[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    with unobserved():
        return torch.cat([_spread(tensor) for tensor in (there if len(there) == 1 else (there[0], there[-1]))])


def _spread(tensor: Tensor) -> Tensor:
    size = tensor.numel()
    return tensor.as_strided((min(size, _NUM_ELEMENTS),), (max(size // _NUM_ELEMENTS, 1),))


def fingerprint_of(tensor: Tensor) -> Fingerprint | None:
    """Return the fingerprint of a tensor; None where it has no values."""
    if not is_plain(tensor):
        return None
    with unobserved():
        return fingerprint(tensor)


def have_other_values(one: Fingerprint | None, other: Fingerprint | None) -> bool | Tensor:
    """Whether two tensors differ; a tensor on the device if not known yet. No values are taken for unchanged ones."""
    if one is None or other is None:
        return False
    if is_read_late(one.hash) and (one.shape, one.dtype) == (other.shape, other.dtype):
        with unobserved():
            return one.hash != other.hash
    with unobserved():
        return not are_equal(one, other)


@contextmanager
def unobserved(
    hidden: Callable[[], AbstractContextManager[Any]] = torch._C._DisableTorchDispatch,
) -> Iterator[None]:
    """Run what is in the block without a graph, unseen by the region's own selection, and inside of `hidden()`."""
    setting = dispatch.pause_interception()
    try:
        with torch.no_grad(), hidden():
            yield
    finally:
        dispatch.restore_interception(setting)
