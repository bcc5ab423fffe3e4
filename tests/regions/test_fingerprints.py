"""Fingerprints of tensors: which differences they see, and what they leave alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ckpt.regions.fingerprints import all_equal, are_equal, bit_sums, checksum, fingerprint, relative_distance

pytestmark = pytest.mark.core


class Kernels(TorchDispatchMode):
    """Counts the operators that do more than give a view."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 700, 600), torch.bfloat16),
        ((2, 3000, 1000), torch.float32),
        ((4000, 300), torch.int64),
        ((5,), torch.float64),
        ((7,), torch.complex64),
        ((9, 3), torch.float16),
        ((), torch.float32),
    ],
)
def test_a_hash_sees_every_bit_and_where_it_is(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    take = fingerprint
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    found = take(values)
    assert are_equal(found, take(values.clone()))
    if values.dim() == 3:
        assert are_equal(found, take(values.transpose(0, 2).contiguous().transpose(0, 2)))
    for position in {0, max(0, values.numel() // 2), values.numel() - 1}:
        changed = values.clone()
        changed.view(-1)[position] += 1
        assert not are_equal(found, take(changed))
    if values.numel() > 1:
        assert not are_equal(found, take(values.roll(1, 0)))
        assert not are_equal(found, take(values.flip(0)))


def test_a_hash_tells_zeros_of_either_sign_and_kinds_of_nan_apart() -> None:
    take = fingerprint
    assert not are_equal(take(torch.tensor([0.0])), take(torch.tensor([-0.0])))
    nan = torch.tensor([float("nan")])
    assert are_equal(take(nan), take(nan.clone()))
    assert not are_equal(take(nan), take(-nan))


@pytest.mark.parametrize("size", [1e-3, 1e-2, 0.3])
def test_a_sketch_tells_the_size_of_a_difference(size: float) -> None:
    take = partial(fingerprint, has_sketch=True)
    values, other = torch.randn(2, 3000, 700, generator=torch.Generator().manual_seed(0))
    for changed in (values + size * other, values * (1 + size)):
        distance = relative_distance(take(values), take(changed))
        # Four standard deviations of the root of a mean of 64 squares.
        assert distance == pytest.approx(size, rel=0.36)


@pytest.mark.parametrize("number", [64, 3000, 100_000, 2_000_000])
def test_a_sketch_tells_the_size_of_differences_that_have_a_pattern(number: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lines = -(-number // 1000)
    patterns = {
        "all alike": torch.ones(number),
        "growing": torch.linspace(0, 1, number),
        "alternating": torch.tensor([1.0, -1.0]).repeat(number // 2),
        "of a column": torch.randn(1, 1000, generator=generator).expand(lines, 1000).reshape(-1)[:number],
        "of a row": torch.randn(lines, 1, generator=generator).expand(lines, 1000).reshape(-1)[:number],
        "one": torch.zeros(number).index_fill_(0, torch.tensor(number // 3), 1.0),
    }
    nothing = fingerprint(torch.zeros(number), has_sketch=True)
    for name, pattern in patterns.items():
        distance = relative_distance(fingerprint(pattern, has_sketch=True), nothing)
        # Four standard deviations where lines are alike.
        assert distance == pytest.approx(1, rel=0.7), name


def test_fingerprints_leave_random_numbers_where_they_are() -> None:
    before = torch.get_rng_state()
    fingerprint(torch.ones(3), has_sketch=True)
    assert torch.equal(before, torch.get_rng_state())


LAYOUTS = [
    (torch.bfloat16, (6, 500, 64)),
    (torch.bfloat16, (3, 501, 67)),
    (torch.bool, (5, 333, 7)),
    (torch.float32, (300, 2, 3001)),
    (torch.float64, (3, 400, 500)),
    (torch.complex64, (2, 3, 1001)),
]


@pytest.mark.parametrize(("dtype", "shape"), LAYOUTS)
def test_how_a_tensor_lies_changes_nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    wider = torch.zeros(*shape[:-1], shape[-1] + 8, dtype=dtype)
    shifted = torch.zeros(values.numel() + 1, dtype=dtype)[1:].view(shape)
    for other in (values.transpose(0, 2).contiguous().transpose(0, 2), wider[..., : shape[-1]], shifted):
        other.copy_(values)
        assert are_equal(fingerprint(values), fingerprint(other))
        assert are_equal(checksum(values), checksum(other))
        if dtype.is_floating_point:
            one, two = (fingerprint(each, has_sketch=True).sketch for each in (values, other))
            assert one is not None
            assert two is not None
            assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4,), (64, 64), (512, 1024)])
def test_a_hash_sees_signs_that_change_together(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert not are_equal(fingerprint(values), fingerprint(-values))
    half = values.clone()
    half[..., ::2] *= -1
    assert not are_equal(fingerprint(values), fingerprint(half))


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 2), (torch.bfloat16, 4), (torch.bfloat16, 2)])
def test_a_hash_sees_signs_that_change_at_every_second_place(dtype: torch.dtype, step: int) -> None:
    values = torch.randn(4, 128, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = values.clone()
    changed[..., ::step] *= -1
    assert not are_equal(fingerprint(values), fingerprint(changed))
    assert not are_equal(checksum(values), checksum(changed))


def test_a_hash_sees_a_conjugate() -> None:
    values = torch.randn(4, 128, 256, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert not are_equal(fingerprint(values), fingerprint(values.conj().clone()))


def test_a_hash_sees_what_trades_places() -> None:
    values = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found, summed = fingerprint(values), checksum(values)
    places = torch.randint(0, values.numel(), (50, 2), generator=torch.Generator().manual_seed(1)).tolist()
    for one, other in [*places, [0, 4], [0, 1024], [0, 4096], [0, 4 * 512]]:
        changed = values.clone().view(-1)
        changed[one], changed[other] = values.view(-1)[other], values.view(-1)[one]
        if not torch.equal(changed, values.view(-1)):
            assert not are_equal(found, fingerprint(changed.view_as(values)))
    for dim in (0, 1):
        assert not are_equal(found, fingerprint(values.roll(1, dim)))
        assert not are_equal(found, fingerprint(values.flip(dim)))
    # Rows that trade places are what a checksum does not see.
    assert are_equal(summed, checksum(values.roll(1, 0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (3, 700, 601)], ids=str)
def test_a_checksum_sees_every_element(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    found = checksum(values)
    assert are_equal(found, checksum(values.clone()))
    for position in {0, values.numel() // 2, values.numel() - 1} if values.numel() else set():
        changed = values.clone()
        changed.view(-1).view(torch.uint8)[position * values.element_size()] ^= 1
        assert not are_equal(found, checksum(changed))


@pytest.mark.parametrize("num_rows", [2**13, 2**15])
def test_the_number_of_kernels_does_not_follow_the_size(num_rows: int) -> None:
    values = torch.zeros(num_rows, 1024, dtype=torch.bfloat16)
    counts = []
    for take in (fingerprint, checksum):
        with Kernels() as kernels:
            take(values)
        counts.append(kernels.number)
    assert counts == [9, 1]


def test_lists_are_equal_if_all_in_them_are() -> None:
    ones = [fingerprint(torch.full((size,), 1.0)) for size in (3, 4, 5)]
    assert all_equal(ones, list(ones))
    assert all_equal([], [])
    assert not all_equal(ones, ones[:2])
    for place in range(3):
        assert not all_equal(
            ones, [fingerprint(torch.full((3 + number,), 1.0 + (number == place))) for number in range(3)]
        )
    assert not all_equal(ones, [fingerprint(torch.full((size, 1), 1.0)) for size in (3, 4, 5)])


# torch says of its CSR format that it is in beta.
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sums_leave_out_what_lies_in_no_piece_of_memory() -> None:
    rows = torch.eye(3)
    assert bit_sums([rows.to_sparse(), rows.to_sparse_csr()], is_whole=False) == []
    crossed, other = torch.arange(6.0).view(2, 3).T, torch.ones(3, 2)
    assert bit_sums([crossed, rows[:, ::2]], is_whole=False) == bit_sums(
        [crossed.clone(), rows[:, ::2]], is_whole=False
    )
    assert bit_sums([crossed], is_whole=False) != bit_sums([other], is_whole=False)
