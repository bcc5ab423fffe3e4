"""Fingerprints of tensors: a hash that tells whether two are equal bit by bit, a sketch that tells how far apart.

Both stay on the tensor's device, and are small: tensors can be compared that are never there at the same time.
Meanwhile at most 16 MiB are used, however large a tensor is, and of a small one about as much as it has itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LEAST, _MOST = 1 << 10, 1 << 19
"""Elements that are looked at together: an eighth of the tensor's, but not fewer or more than these."""
_BYTES = 28
"""What is used meanwhile for each of them: a weight and the product with it (8 each), a sign (4), a copy (8)."""
_BINS = 64
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 over the golden ratio, as a signed number: combines the hashes of chunks, and mixes places."""
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
"""Of SplitMix64 (Steele, Lea, Flood 2014), as a signed number."""
_SUM_ERROR = 2.0**-14
"""Of the norms of terms: far more than sums in float32, and their sketches, are off by."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one tensor.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        hash: int64, without dimensions: of all bits and where they are.
        sketch: float32 [65]: the squared norm, then 64 sums with random signs; None of integers.
    """

    shape: torch.Size
    dtype: torch.dtype
    hash: Tensor
    sketch: Tensor | None


def fingerprint(tensor: Tensor, *, has_sketch: bool = False) -> Fingerprint:
    """Return the fingerprint of a tensor whose bits can be looked at (`is_plain`).

    Args:
        tensor: any shape, layout and dtype.
        has_sketch: sketch it as well, if its numbers are real ones.
    """
    has_sketch = has_sketch and tensor.is_floating_point()
    size = _chunk_size(tensor)
    # Made anew each time: kept, they would be there at the step's peak.
    weights = _weights(0, size, tensor.device)
    signs = weights.sign().to(torch.float32) if has_sketch else weights
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    sums = torch.zeros(1 + _BINS, dtype=torch.float32, device=tensor.device) if has_sketch else None
    for number, chunk in enumerate(_chunks(_as_real(tensor.detach()), size)):
        bits = chunk.view(_INTEGERS[chunk.element_size()]).to(torch.int64, copy=True)
        total = total * _ODD + bits.mul_(weights[: chunk.numel()]).sum()
        del bits
        if sums is not None:
            sums += _sums(chunk, signs, number)
    return Fingerprint(tensor.shape, tensor.dtype, total, sums)


def scratch_bytes(tensor: Tensor) -> int:
    """Return the most that `fingerprint` uses meanwhile."""
    return _BYTES * _chunk_size(tensor)


def _chunk_size(tensor: Tensor) -> int:
    size = tensor.numel() * (2 if tensor.is_complex() else 1)
    return min(size, max(_LEAST, min(_MOST, -(-size // 8))))


def _weights(start: int, size: int, device: torch.device) -> Tensor:
    """Return an odd number for each place, as good as random. No generator draws: the user's numbers stay in place."""
    weights = torch.arange(start + 1, start + 1 + size, device=device).mul_(_ODD)
    weights ^= weights >> 32
    return weights.mul_(_MIX).bitwise_or_(1)


def is_plain(tensor: Tensor) -> bool:
    """Whether the bits of a tensor are there to be looked at."""
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
    """Return about how far apart two tensors are, relative to the norm of the first; None where that is not known.

    The distance between the sums with random signs is that of the tensors but for a factor of 1 ± 0.18 (two standard
    deviations of 64 squares: 0.35, of the root).
    """
    if one.sketch is None or other.sketch is None or one.shape != other.shape:
        return None
    norm = one.sketch[0].sqrt()
    distance = (one.sketch[1:] - other.sketch[1:]).norm()
    return float(distance / norm) if norm else float(distance)


def is_sum(terms: Sequence[Fingerprint], total: Fingerprint) -> bool:
    """Whether a tensor is the sum of others, by their sketches, which add up as they do. Waits for the device.

    Args:
        terms: with sketches.
        total: of the sum; rounded to its dtype once.
    """
    sketches = [term.sketch for term in terms if term.sketch is not None]
    if total.sketch is None or not sketches:
        return total.sketch is None and not sketches
    stacked = torch.stack(sketches)
    distance = (stacked[:, 1:].sum(0) - total.sketch[1:]).norm()
    size = stacked[:, 0].sqrt().sum()
    allowed = torch.finfo(total.dtype).eps * total.sketch[0].sqrt() + _SUM_ERROR * size
    # What is not finite in a term is not in the sum.
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
