"""Fingerprints of tensors: which differences they see, and what they leave alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hf_ckpt.regions.fingerprints import are_equal, fingerprint, relative_distance

pytestmark = pytest.mark.core


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


def test_fingerprints_leave_random_numbers_where_they_are() -> None:
    before = torch.get_rng_state()
    fingerprint(torch.ones(3), has_sketch=True)
    assert torch.equal(before, torch.get_rng_state())
