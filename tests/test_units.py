"""Budgets as the user writes them, and bytes as messages show them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_ckpt.errors import PolicyError
from hf_ckpt.units import Budget, format_bytes, parse_budget

GIB = 2**30
UNITS = "B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
WRITE = 'rite "22GiB" (2**30 bytes each), "22GB" (10**9 bytes each), or a fraction of the device such as 0.9.'


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("22GiB", 22 * GIB),
        ("22 GiB", 22 * GIB),
        ("  22gib ", 22 * GIB),
        ("22 GB", 22 * 10**9),
        ("22.5GiB", 45 * GIB // 2),
        ("512MiB", 2**29),
        ("64KiB", 2**16),
        ("1e3MB", 10**9),
        (".5TiB", 2**39),
        ("1TB", 10**12),
        # The smaller reading.
        ("22G", 22 * 10**9),
        ("512 m", 512 * 10**6),
        ("123456789B", 123456789),
        ("0.5GiB", GIB // 2),
    ],
)
def test_amount_is_read(written: str, num_bytes: int) -> None:
    assert parse_budget(written) == Budget(num_bytes, None, written.strip())
    assert parse_budget(written).bytes_on(2 * 10**12) == num_bytes
    assert parse_budget(written).bytes_on(None) == num_bytes


@pytest.mark.parametrize(("written", "fraction"), [(0.9, 0.9), ("0.9", 0.9), (1, 1.0), ("1.0", 1.0), (".25", 0.25)])
def test_fraction_is_of_the_device(written: object, fraction: float) -> None:
    assert parse_budget(written).fraction == fraction
    assert parse_budget(written).bytes_on(10 * GIB) == int(10 * GIB * fraction)


@pytest.mark.parametrize("written", ["22GiB", "22 GB", 0.9, "0.9", 1, "22.5gib"])
def test_text_of_a_budget_reads_as_the_same_budget(written: object) -> None:
    budget = parse_budget(written)
    assert parse_budget(str(budget)) == budget
    assert parse_budget(budget) is budget


@pytest.mark.parametrize(
    ("written", "message"),
    [
        # A bare number that is no fraction.
        (
            "22",
            'memory_budget is "22", without a unit. Write "22GiB" or "22GB"; only a fraction of the device, above 0 '
            "and at most 1, has none.",
        ),
        (
            22,
            'memory_budget is 22, without a unit. Write "22GiB" or "22GB"; only a fraction of the device, above 0 '
            "and at most 1, has none.",
        ),
        (
            1.5,
            'memory_budget is 1.5, without a unit. Write "1.5GiB" or "1.5GB"; only a fraction of the device, above 0 '
            "and at most 1, has none.",
        ),
        (
            23622320128,
            'memory_budget is 23622320128, without a unit. Write "23622320128B"; only a fraction of the device, '
            "above 0 and at most 1, has none.",
        ),
        # Units.
        (
            "22GX",
            f'memory_budget is "22GX" with the unknown unit "GX". Units are {UNITS}. Did you mean "GiB"?',
        ),
        (
            "22gigs",
            f'memory_budget is "22gigs" with the unknown unit "gigs". Units are {UNITS}. Did you mean "GiB"?',
        ),
        ("90%", f'memory_budget is "90%" with the unknown unit "%". Units are {UNITS}.'),
        # No amount of memory.
        ("-22GiB", f'memory_budget is "-22GiB". It must be above 0: w{WRITE}'),
        (-0.5, f"memory_budget is -0.5. It must be above 0: w{WRITE}"),
        (0, f"memory_budget is 0. It must be above 0: w{WRITE}"),
        ("0GiB", f'memory_budget is "0GiB". It must be above 0: w{WRITE}'),
        ("1e999GiB", f'memory_budget is "1e999GiB". It must be above 0: w{WRITE}'),
        ("0.1B", f'memory_budget is "0.1B", less than one byte. W{WRITE}'),
        (float("nan"), f"memory_budget is nan, which starts with no number. W{WRITE}"),
        (float("inf"), f"memory_budget is inf, which starts with no number. W{WRITE}"),
        ("", f'memory_budget is "", which starts with no number. W{WRITE}'),
        ("GiB", f'memory_budget is "GiB", which starts with no number. W{WRITE}'),
        ("1.2.3GiB", f'memory_budget is "1.2.3GiB", which starts with no number. W{WRITE}'),
        (None, f"memory_budget is empty. W{WRITE}"),
        (True, f"memory_budget is true. W{WRITE}"),
        ([22], f"memory_budget is [22]. W{WRITE}"),
    ],
)
def test_what_cannot_be_read_is_refused(written: object, message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        parse_budget(written)
    assert str(raised.value) == message


def test_message_names_the_option() -> None:
    with pytest.raises(PolicyError, match=r'^--memory-budget is "22", without a unit\.'):
        parse_budget("22", key="--memory-budget")


def test_more_than_the_device_has_is_refused() -> None:
    budget = parse_budget("30GiB")
    with pytest.raises(PolicyError) as raised:
        budget.bytes_on(24 * GIB, device="NVIDIA GeForce RTX 4090")
    assert str(raised.value) == (
        'memory_budget is "30GiB", but NVIDIA GeForce RTX 4090 has 24.0 GiB: 6.0 GiB less. Write a smaller amount, '
        "or a fraction such as 0.9, or name a larger device."
    )
    assert parse_budget("24GiB").bytes_on(24 * GIB) == 24 * GIB


def test_fraction_of_an_unknown_device_is_refused() -> None:
    with pytest.raises(PolicyError) as raised:
        parse_budget(0.9).bytes_on(None)
    assert str(raised.value) == (
        "memory_budget is 0.9, a fraction, and how much memory the device has is not known. Write an amount such "
        'as "22GiB", or name a device.'
    )


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**20, "1.0 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (int(22.4 * GIB), "22.4 GiB"),
        (2048 * GIB, "2,048.0 GiB"),
        (-3 * GIB, "-3.0 GiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_reading_a_budget_needs_no_torch() -> None:
    program = "import sys, hf_ckpt.units, hf_ckpt.simulation.devices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
