"""Fingerprints of tensors, and of the state that a region may read; samples of values.

A fingerprint has a hash that shows whether two tensors are equal bit by bit, and a sketch that shows how far apart they
are. Both stay on the tensor's device, and are small: tensors can be compared that are never there at the same time.
Meanwhile at most 16 MiB are used, however large a tensor is, and for a small one a few times what it has itself. A
checksum is a hash that reads the tensor once, where it lies, and sees less of where the bits are.

Note [hash]: a tensor is taken as a row of 64-bit words, in the order of its elements, and the row as a matrix about as
wide as high. The sums of its rows and of its columns are weighted by place and added up. Sums are of integers, so that
their order does not matter, and of words as they lie, so that nothing is copied: a handful of kernels for a tensor of
any size. One word that changes, moves or trades places changes the sum of a row or of a column.

Samples are cheap enough for every step: a few values of each weight. So are sums of bits, for which a large tensor is
read in blocks. They are read past torch's dispatcher, or with Python's part of it switched off, so that modes that
follow or count operators do not see it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import c_char
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from hf_ckpt.regions.selective import dispatch
from hf_ckpt.upstream.torch import FakeTensor, hidden_from_dispatch, num_dispatch_modes

# Bytes that are summed as one integer.
_WORD = 8
# Words up to which a tensor is weighted by place without sums.
_DIRECT = 1 << 10
# Words that are taken together where they are copied; a multiple of the width of the matrix.
_PIECE = 1 << 19
# Bytes that are sketched together, at most four for each element.
_SKETCHED_BYTES = 1 << 22
_BINS = 64
# 2**64 over the golden ratio, as a signed number: mixes places.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
# Relative to the norms of the terms: far more than the error of sums in float32, and of their sketches.
_SUM_ERROR = 2.0**-14
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
    real = _as_real(tensor.detach())
    sketch = _sketch(real) if has_sketch and tensor.is_floating_point() else None
    return Fingerprint(tensor.shape, tensor.dtype, _hash(real), sketch)


def checksum(tensor: Tensor) -> Fingerprint:
    """Return the sum of the bits of a tensor that `is_plain`, in place of its hash: one kernel, and no copy.

    It sees any one element that changes, and not where whole words are. Where the words do not lie in rows, they are
    copied piece by piece.
    """
    real = _as_real(tensor)
    if real.element_size() == _WORD or _has_words_in_rows(real):
        # Two operators for the host, where it has no time to lose: one module of a layer after the other.
        total = real.view(torch.int64 if real.element_size() == _WORD else torch.int32).sum()
    else:
        bits = _bits(real.detach())
        sums = [words.view(torch.int32).sum() for words in _words(bits)] or [
            torch.zeros((), dtype=torch.int64, device=bits.device)
        ]
        total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
    return Fingerprint(tensor.shape, tensor.dtype, total, None)


def plain_fingerprints(tensors: Sequence[Tensor], *, has_sketch: bool = False) -> list[Fingerprint]:
    """Return the fingerprints of those tensors that are plain."""
    return [fingerprint(tensor, has_sketch=has_sketch) for tensor in tensors if is_plain(tensor)]


def plain_checksums(tensors: Sequence[Tensor]) -> list[Fingerprint]:
    """Return the checksums of those tensors that are plain."""
    return [checksum(tensor) for tensor in tensors if is_plain(tensor)]


def scratch_bytes(tensor: Tensor, *, has_sketch: bool = False) -> int:
    """Return the most memory that `fingerprint` uses meanwhile."""
    size = tensor.element_size() // (2 if tensor.is_complex() else 1)
    num_elements = tensor.nbytes // size
    num_words = -(-tensor.nbytes // (_WORD // 2 if size == _WORD else _WORD))
    copied = _copied_bytes(tensor)
    if num_words <= _DIRECT:
        # Words and weights, 16 bytes a word each, while or after the weights are made.
        hashed = copied + 32 * num_words
    else:
        width = _width(num_words)
        hashed = copied + 48 * (num_words // width + 4 * width)
    if not (has_sketch and tensor.is_floating_point()):
        return hashed
    width = _line(num_elements)
    period = _BINS * width
    padded = -(-num_elements // period) * period
    together = min(padded, _SKETCHED_BYTES // max(4, size))
    # With their signs, and before that in float32, or filled up.
    num_copies = 1 + (tensor.dtype not in _PROMOTED) + (padded > num_elements)
    pieces = 4 * num_copies * together + (0 if tensor.is_contiguous() else size * min(num_elements, together))
    lines = padded // width
    return max(hashed, 4 * period + max(16 * period, pieces + 4 * lines, 28 * lines))


def checksum_scratch_bytes(tensor: Tensor) -> int:
    """Return the most memory that `checksum` uses meanwhile."""
    size = tensor.element_size() // (2 if tensor.is_complex() else 1)
    return 0 if size == _WORD or _has_words_in_rows(tensor) else _copied_bytes(tensor)


def _copied_bytes(tensor: Tensor) -> int:
    """Return the bytes of the two pieces, at most, of copied words that are there at once."""
    size = tensor.element_size() // (2 if tensor.is_complex() else 1)
    is_in_row = tensor.is_contiguous()
    if size == _WORD:
        return 2 * min(2 * tensor.nbytes, _WORD * _PIECE) + (
            0 if is_in_row else min(tensor.nbytes, _WORD * _PIECE // 2)
        )
    if is_in_row and tensor.storage_offset() % (_WORD // size) == 0:
        return 2 * _WORD
    return min(2 * tensor.nbytes, 2 * _WORD * _PIECE)


def _weights(start: int, size: int, device: torch.device) -> Tensor:
    """Return an odd pseudorandom number for each place, without a generator, so that the user's stay as they are."""
    weights = torch.arange(2 * start + 1, 2 * (start + size) + 1, 2, device=device).mul_(_ODD)
    # Times an odd number that its own upper half makes: four kernels in all, and signs as random as a generator's.
    return weights.addcmul_(weights, weights >> 32, value=2)


def is_plain(tensor: Tensor) -> bool:
    """Whether the bits of a tensor can be read."""
    return (
        (type(tensor) is Tensor or type(tensor) is nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
    )


def are_equal(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two tensors are equal bit by bit. Waits for the device."""
    return one.shape == other.shape and one.dtype == other.dtype and bool(_all(one.hash == other.hash))


def relative_distance(one: Fingerprint, other: Fingerprint) -> float | None:
    """Return about how far apart two tensors are, relative to the norm of the first; None if that is not known.

    The distance between the sums with random signs is that of the tensors up to a factor of 1 ± 0.18 (two standard
    deviations of 64 squares: 0.35, of the root), and of 1 ± 0.35 where its lines are alike: see `_sketch`.
    """
    if one.sketch is None or other.sketch is None or one.shape != other.shape:
        return None
    norm = one.sketch[0].sqrt()
    distance = (one.sketch[1:] - other.sketch[1:]).norm()
    return float(distance / norm) if norm else float(distance)


def all_equal(ones: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> bool:
    """Whether two lists of tensors were equal bit by bit. Waits for the device, once if all were on the same."""
    if [(one.shape, one.dtype) for one in ones] != [(other.shape, other.dtype) for other in others]:
        return False
    if len(ones) > 1 and len({each.hash.device for each in (*ones, *others)}) == 1:
        ones, others = [_joined(ones)], [_joined(others)]
    return all(map(are_equal, ones, others))


def _all(are_same: Tensor) -> Tensor:
    return are_same.all() if are_same.dim() else are_same


def _joined(found: Sequence[Fingerprint]) -> Fingerprint:
    hashes = torch.stack([each.hash for each in found])
    return Fingerprint(hashes.shape, hashes.dtype, hashes, None)


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
    """Whether a tensor, rounded to its dtype once, is the sum of others. Waits for the device."""
    sketches = [term.sketch for term in terms if term.sketch is not None]
    if total.sketch is None or not sketches:
        return total.sketch is None and not sketches
    # Compares their sketches, which add up as the tensors do.
    stacked = torch.stack(sketches)
    distance = (stacked[:, 1:].sum(0) - total.sketch[1:]).norm()
    size = stacked[:, 0].sqrt().sum()
    allowed = torch.finfo(total.dtype).eps * total.sketch[0].sqrt() + _SUM_ERROR * size
    # A term that is not finite makes the comparison meaningless.
    return bool((distance <= allowed) | ~size.isfinite())


def _hash(tensor: Tensor) -> Tensor:
    """Return the hash of a real tensor: see Note [hash]."""
    bits = _bits(tensor)
    num_words = _num_words(bits)
    if num_words <= _DIRECT:
        return _weighted_sum(list(_words(bits)), bits.device)
    width = _width(num_words)
    rows: list[Tensor] = []
    rest: list[Tensor] = []
    columns: Tensor | None = None
    for words in _words(bits):
        # By halves: in the sum of whole words, the signs of two of them would cancel.
        matrix = words[: words.numel() // width * width].view(torch.int32).view(-1, 2 * width)
        rows.append(matrix.sum(1))
        columns = matrix.sum(0) if columns is None else columns.add_(matrix.sum(0))
        if matrix.numel() < 2 * words.numel():
            rest.append(words[matrix.numel() // 2 :])
    assert columns is not None, "there are more than `_DIRECT` words"
    return _weighted_sum([*rows, columns, *rest], bits.device)


def _weighted_sum(words: Sequence[Tensor], device: torch.device) -> Tensor:
    if not words:
        return torch.zeros((), dtype=torch.int64, device=device)
    joined = words[0] if len(words) == 1 else torch.cat(list(words))
    # By halves: times an odd number, the topmost bit of a word would be the topmost bit again, and two would cancel.
    weights = _weights(0, 2 * joined.numel(), device)
    return (joined.view(torch.int32) * weights).sum()


def _width(num_words: int) -> int:
    """Return the width of the matrix: a power of two, up to twice the root of the number of words."""
    return 1 << (num_words.bit_length() + 1) // 2


def _num_words(bits: Tensor) -> int:
    # Of 8 bytes each half is a word: see `_words`.
    return -(-bits.nbytes // (_WORD // 2 if bits.element_size() == _WORD else _WORD))


def _words(bits: Tensor) -> Iterator[Tensor]:
    """Yield the elements in order, as flat words; all but the last two tensors have `_PIECE` words, or are all."""
    # Elements of 8 bytes are two words each: as one, the signs of two numbers in a row would cancel in its sum.
    if bits.element_size() == _WORD:
        for piece in _pieces(bits, _PIECE // 2):
            yield piece.view(torch.int32).to(torch.int64)
        return
    ratio = _WORD // bits.element_size()
    is_in_place = bits.is_contiguous() and bits.storage_offset() % ratio == 0
    for piece in [bits.view(-1)] if is_in_place else _pieces(bits, _PIECE * ratio, copies=True):
        whole = piece.numel() // ratio * ratio
        if whole:
            yield piece[:whole].view(torch.int64)
        if whole < piece.numel():
            last = piece.new_zeros(ratio)
            last[: piece.numel() - whole] = piece[whole:]
            yield last.view(torch.int64)


def _has_words_in_rows(bits: Tensor) -> bool:
    """Whether words can be read where they lie, row by row, as in a part of a wider tensor."""
    ratio = _WORD // bits.element_size()
    return bool(
        bits.dim()
        and bits.shape[-1] % ratio == 0
        and bits.stride(-1) == 1
        and all(stride % ratio == 0 for stride in (*bits.stride()[:-1], bits.storage_offset()))
    )


def _sketch(tensor: Tensor) -> Tensor:
    """Return the squared norm of a floating-point tensor, and 64 sums with random signs."""
    width, device = _line(tensor.numel()), tensor.device
    signs = _weights(0, _BINS * width, device).sign().to(torch.float32).view(_BINS, width)
    pieces = _pieces(tensor, _SKETCHED_BYTES // max(4, tensor.element_size()))
    found = list(map(partial(_signed_sums, signs), pieces))
    if not found:
        return torch.zeros(1 + _BINS, device=device)
    norms, sums = zip(*found, strict=True)
    # The tensor is cut into lines, and every 64th line belongs to one sum. A sign is that of a place in the line, other
    # ones for each sum, times that of the line.
    lines = torch.cat(sums)
    lines *= _weights(_BINS * width, lines.numel(), device).sign().view_as(lines)
    return torch.cat([torch.stack(norms).square_().sum().view(1), lines.sum(0)])


def _signed_sums(signs: Tensor, piece: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of a piece, and the sums of its lines."""
    if piece.dtype not in _PROMOTED:
        piece = piece.to(torch.float32)
    num_groups = -(-piece.numel() // signs.numel())
    if piece.numel() < num_groups * signs.numel():
        padded = torch.zeros(num_groups * signs.numel(), device=piece.device)
        padded[: piece.numel()] = piece
        piece = padded
    signed = piece.view(-1, *signs.shape) * signs
    return torch.linalg.vector_norm(signed), signed.sum(2)


# The kernel that multiplies by float32 reads these itself.
_PROMOTED = (torch.float32, torch.bfloat16, torch.float16)


def _line(num_elements: int) -> int:
    """Return how many elements a line has: 8 or more lines for each sum, if there are as many elements."""
    return min(1 << 12, 1 << max(0, num_elements.bit_length() - 10))


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _pieces(tensor: Tensor, size: int, *, copies: bool = False) -> Iterator[Tensor]:
    """Yield the elements in order, flat, the same for every layout; copied if they do not lie in a row, or always."""
    is_in_row = tensor.is_contiguous() and not copies
    for start in range(0, tensor.numel(), size):
        stop = min(start + size, tensor.numel())
        # Kept in no variable, as the next one would be made beside it.
        yield tensor.view(-1)[start:stop] if is_in_row else _copy_of(tensor, start, stop)


def _copy_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    copy, end = tensor.new_empty(stop - start), 0
    for part in _parts(tensor, start, stop):
        begin, end = end, end + part.numel()
        copy[begin:end].view(part.shape).copy_(part)
    return copy


def _parts(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield views that hold, in order, the elements from `start` up to `stop`."""
    if tensor.dim() <= 1:
        yield tensor[start:stop]
        return
    size = tensor.numel() // tensor.shape[0]
    first, last = -(-start // size), stop // size
    if first > last:
        yield from _parts(tensor[last], start - last * size, stop - last * size)
        return
    if start < first * size:
        yield from _parts(tensor[first - 1], start - (first - 1) * size, size)
    if first < last:
        yield tensor[first:last]
    if last * size < stop:
        yield from _parts(tensor[last], 0, stop - last * size)


def plain_tensors(value: Any) -> list[Tensor]:
    """Return the plain tensors in an output: itself, or those in its tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return [value] if is_plain(value) else []
    if isinstance(value, dict):
        value = list(value.values())
    return [each for item in value for each in plain_tensors(item)] if isinstance(value, tuple | list) else []


# --- Samples, and fingerprints that modes do not see. ---

# Of a sample on the CPU.
_NUM_BYTES = 64
_Bytes = c_char * _NUM_BYTES
# Of a sample on a device.
_NUM_ELEMENTS = 256
_PLAIN = (Tensor, nn.Parameter)


class Samples:
    """A few values of some tensors: on the CPU their bytes; on a device a copy there, which nobody waits for."""

    __slots__ = ("_on_device", "_on_host")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._on_host = list(map(bytes_of, tensors))
        self._on_device = _elements_of(tensors) if None in self._on_host else None

    def differ(self, tensors: Sequence[Tensor]) -> bool | Tensor:
        """Whether the values of these tensors differ from the samples; a tensor on the device if not known yet."""
        if list(map(bytes_of, tensors)) != self._on_host:
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


def bytes_of(tensor: Tensor, most: int = _NUM_BYTES) -> bytes | None:
    """Return bytes of a tensor on the CPU, from its middle if there are more; None where they cannot be read."""
    if type(tensor) not in _PLAIN or is_read_late(tensor) or not tensor.is_contiguous():
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        # A wrapper of torch.func, which has no memory.
        return None
    # No memory: an engine has freed it.
    if not address:
        return None
    rest = tensor.nbytes - most
    if rest >= 0 and most == _NUM_BYTES:
        # A quarter of the time of `string_at`.
        return _Bytes.from_address(address + (rest >> 1)).raw
    return ctypes.string_at(address + max(rest >> 1, 0), min(most, rest + most))


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
    hidden: Callable[[], AbstractContextManager[Any]] = hidden_from_dispatch,
) -> Iterator[None]:
    """Run what is in the block without a graph, unseen by the region's own selection, and inside of `hidden()`."""
    setting = dispatch.pause_interception()
    try:
        with torch.no_grad(), hidden():
            yield
    finally:
        dispatch.restore_interception(setting)


# --- Sums of bits, in every step. ---

# Tells the bits of a tensor, and where they are, from others; on a device a tensor, for which nobody waits.
BitSum = int | bytes | Tensor

# Bytes of a tensor on the CPU up to which to hold them takes half the time of summing them.
_AS_THEY_ARE = 1 << 12

# Bytes up to which a tensor on the CPU is read past torch.
_AS_BYTES = 1 << 16
# Elements up to which each is weighted by its place.
_WEIGHTED = 1 << 15
# Elements that are read in a row of a larger tensor.
_BLOCK = 64
# From one block to the next: a quarter is read. A prime, and no divisor of usual widths: each column is read in every
# few rows. What is written to so many elements in a row, or to a column of some rows, is seen.
_PERIOD = 257
# Elements from which on a sixteenth is read.
_LARGE = 1 << 22
_LARGE_PERIOD = 1031
# Of a sparse sum, which is for differences that are all over a tensor: a MiB or two.
_MAX_BLOCKS = 1 << 13


def bit_sums(
    tensors: Sequence[Tensor], *, is_whole: bool, is_sparse: bool = False, reads_late: bool = True
) -> list[BitSum]:
    """Return the sums of those tensors that are plain. `is_whole` reads all of each, in some more kernels.

    Of a large one some blocks are read otherwise, and fewer if `is_sparse`. Without `reads_late` there are none if the
    host would have to wait for one.
    """
    found: list[BitSum] = []
    for tensor in tensors:
        is_late = is_read_late(tensor)
        if is_late and not reads_late:
            return []
        # First what there is most of where the host has no time to lose.
        if (
            type(tensor) is Tensor
            and not is_late
            and tensor.layout is torch.strided
            and (size := tensor.nbytes) <= _AS_BYTES
            and (tensor.is_contiguous() or _fill_a_piece(tensor.shape, tensor.stride()))
        ):
            if not (address := tensor.data_ptr()):
                found.append(0)
                continue
            memory = _array_of(size).from_address(address)
            found.append(memory.raw if size <= _AS_THEY_ARE else crc32(memory))
        elif is_plain(tensor):
            # Without modes there is nobody to hide it from: no kernel of ours stands for these operators.
            with unobserved() if num_dispatch_modes() else nullcontext():
                found.append(_bit_sum(tensor, is_whole, is_sparse))
        elif type(tensor) is FakeTensor and not tensor.is_meta:
            # A simulated step has no values. What takes time here is in `Device.selective_seconds`.
            found.append(tensor.new_empty((), dtype=torch.int64) if is_late else 0)
    return found


@lru_cache(maxsize=256)
def _array_of(size: int) -> Any:
    # ctypes makes a class for each size, and forgets it as soon as cycles are collected.
    return c_char * size


def _bit_sum(tensor: Tensor, is_whole: bool, is_sparse: bool) -> BitSum:
    is_late = is_read_late(tensor)
    if not is_late and tensor.nbytes <= _AS_BYTES:
        return bit_sums([tensor.detach().contiguous()], is_whole=is_whole)[0]
    if tensor.requires_grad:
        tensor = tensor.detach()
    bits = _bits(_as_real(tensor) if tensor.is_complex() or tensor.is_neg() else tensor)
    if is_whole:
        total = _hash(bits)
    elif bits.numel() <= _WEIGHTED:
        total = bits.mul(_weights_of_places(bits.shape, bits.device)).sum()
    else:
        total = _in_blocks(bits, is_sparse).sum()
    return total if is_late else int(total)


@lru_cache(maxsize=256)
def _weights_of_places(shape: torch.Size, device: torch.device) -> Tensor:
    return _all_weights(device)[: shape.numel()].view(shape)


@lru_cache(maxsize=16)
def _all_weights(device: torch.device) -> Tensor:
    # Never one that only inference mode, or a mode that makes other tensors, could use.
    with torch.inference_mode(False), unobserved():
        return _weights(0, _WEIGHTED, device)


def _in_blocks(bits: Tensor, is_sparse: bool) -> Tensor:
    """Return a view of blocks of a tensor, or the tensor where it does not fill a piece of memory."""
    size = bits.numel()
    if size <= _PERIOD or not (bits.is_contiguous() or _fill_a_piece(bits.shape, bits.stride())):
        return bits
    period = _PERIOD if size < _LARGE else _LARGE_PERIOD
    if is_sparse:
        period = max(period, size // _MAX_BLOCKS | 1)
    return bits.as_strided(((size - _BLOCK) // period + 1, _BLOCK), (period, 1), bits.storage_offset())


@lru_cache(maxsize=1024)
def _fill_a_piece(shape: torch.Size, strides: Sequence[int]) -> bool:
    """Whether elements fill a piece of memory."""
    return sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1 == shape.numel()


def sums_differ(before: Sequence[BitSum], now: Sequence[BitSum]) -> bool | Tensor:
    """Whether tensors are others than before; a tensor on their device if that is not known yet."""
    (hosts, lates), (hosts_now, lates_now) = _apart(before), _apart(now)
    if hosts != hosts_now or len(lates) != len(lates_now):
        return True
    if not lates:
        return False
    with unobserved():
        if len({each.device for each in lates}) > 1:
            return any(bool(one != other) for one, other in zip(lates, lates_now, strict=True))
        return (torch.stack(lates) != torch.stack(lates_now)).any()


def _apart(sums: Sequence[BitSum]) -> tuple[list[int | bytes], list[Tensor]]:
    lates = [each for each in sums if type(each) is Tensor]
    return ([] if len(lates) == len(sums) else [each for each in sums if isinstance(each, int | bytes)]), lates
