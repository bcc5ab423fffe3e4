"""Amounts of memory as text: budgets that the user writes, and bytes in messages and tables.

Imports no torch: a budget can be checked before anything heavy is loaded. GiB is 2**30, GB is 10**9.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from hf_ckpt.errors import PolicyError, did_you_mean

UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
"""Bytes of each unit that a budget can be written in."""
ADDRESSABLE_BYTES = 2**63 - 1
"""What an address can reach; a larger amount is a slip."""

_AMOUNT = re.compile(r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(?P<unit>[^\d\s.+-].*)?", re.IGNORECASE)
_EXAMPLES = '"22GiB" (2**30 bytes each), "22GB" (10**9 bytes each), or a fraction of the device such as 0.9'


@dataclass(frozen=True, slots=True)
class Budget:
    """Device memory that a whole step may use; exactly one of the first two is given.

    Args:
        num_bytes: an amount in bytes.
        fraction: a share of the device, above 0 and at most 1.
        text: as the user wrote it.
        key: name of the option that it was written for.

    Example:
        >>> parse_budget("22GiB").bytes_on(24 * 2**30) // 2**30
        22
    """

    num_bytes: int | None
    fraction: float | None
    text: str = field(compare=False)
    key: str = field(default="memory_budget", compare=False)

    def __str__(self) -> str:
        return self.text

    def bytes_on(self, memory_bytes: int | None, *, device: str = "the device") -> int:
        """Return the budget in bytes.

        Args:
            memory_bytes: what the device has; None or 0, as a `Device` has it, where that is not known.
            device: what to call the device in a message.

        Raises:
            PolicyError: the budget is more than the device has, or a fraction of a device that is not known.
        """
        if self.num_bytes is None:
            if not memory_bytes:
                raise PolicyError(
                    f"{self.key} is {self.text}, a fraction, and how much memory {device} has is not known. "
                    'Write an amount such as "22GiB", or name a device.'
                )
            assert self.fraction is not None, "a budget is an amount or a fraction"
            return int(memory_bytes * self.fraction)
        if memory_bytes and self.num_bytes > memory_bytes:
            raise PolicyError(
                f'{self.key} is "{self.text}", but {device} has {format_bytes(memory_bytes)}: '
                f"{format_bytes(self.num_bytes - memory_bytes)} less. Write a smaller amount, or a fraction such as "
                "0.9, or name a larger device."
            )
        return self.num_bytes


def parse_budget(value: object, *, key: str = "memory_budget") -> Budget:
    """Read a budget.

    Args:
        value: text with a unit (`"22GiB"`, `"22 GB"`, `"512MiB"`; `"22G"` is 22 GB, the smaller reading), or a
            fraction of the device, above 0 and at most 1, as number or text (`0.9`). A `Budget` is returned as it is.
        key: name of the option, for messages.

    Raises:
        PolicyError: names the option, the value, and what is missing or nearest.
    """
    if isinstance(value, Budget):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise PolicyError(f"{key} is {_show(value)}. Write {_EXAMPLES}.")
    text = str(value).strip()
    shown = f'"{text}"' if isinstance(value, str) else text
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise PolicyError(f"{key} is {shown}, which starts with no number. Write {_EXAMPLES}.")
    number, unit = float(match["number"]), (match["unit"] or "").strip()
    # Text such as 1e999 is a number to Python, and infinite.
    if not math.isfinite(number) or number <= 0:
        raise PolicyError(f"{key} is {shown}. It must be above 0: write {_EXAMPLES}.")
    if not unit:
        if number > 1:
            raise PolicyError(
                f"{key} is {shown}, without a unit. Write {_with_unit(number)}; only a fraction of the device, "
                "above 0 and at most 1, has none."
            )
        return Budget(None, number, text, key)
    amount = number * _bytes_of(unit, text, key)
    if amount > ADDRESSABLE_BYTES:
        raise PolicyError(f'{key} is "{text}", more than any machine has. Write {_EXAMPLES}.')
    num_bytes = int(amount)
    if not num_bytes:
        raise PolicyError(f'{key} is "{text}", less than one byte. Write {_EXAMPLES}.')
    return Budget(num_bytes, None, text, key)


def format_bytes(num_bytes: float) -> str:
    """Return bytes in the largest binary unit that leaves 1 or more, such as `22.4 GiB`.

    Example:
        >>> format_bytes(24 * 2**30), format_bytes(1536), format_bytes(12)
        ('24.0 GiB', '1.5 KiB', '12 B')
    """
    for unit in ("GiB", "MiB", "KiB"):
        # What would be rounded to 1024 of the next smaller unit is 1 of this one.
        if abs(num_bytes) >= UNITS[unit] * (1 - 0.05 / 1024):
            return f"{num_bytes / UNITS[unit]:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def counted(number: int, noun: str) -> str:
    """Return "1 gradient" or "3 gradients"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def as_budget(num_bytes: int) -> tuple[str, int]:
    """Return the smallest budget of one decimal that holds so many bytes, as a user writes it, and in bytes.

    Example:
        >>> as_budget(24 * 2**30 + 1), as_budget(700)
        (('24.1GiB', 25877177958), ('700B', 700))
    """
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes >= UNITS[unit]:
            text = f"{math.ceil(10 * num_bytes / UNITS[unit]) / 10:.1f}{unit}"
            held = parse_budget(text).num_bytes
            assert held is not None, "it is an amount"
            if held >= num_bytes:
                return text, held
    return f"{num_bytes}B", num_bytes


def _bytes_of(unit: str, text: str, key: str) -> int:
    by_lower_case = {name.lower(): size for name, size in UNITS.items()}
    # A lone letter is written for either; the smaller amount is within both.
    by_lower_case |= {name[0].lower(): size for name, size in UNITS.items() if name in ("KB", "MB", "GB", "TB")}
    if unit.lower() in by_lower_case:
        return by_lower_case[unit.lower()]
    same_letter = [name for name in UNITS if name[0].lower() == unit[0].lower()]
    nearest = did_you_mean(unit, same_letter)
    if same_letter and not nearest:
        nearest = f' Did you mean "{same_letter[0]}"?'
    raise PolicyError(f'{key} is "{text}" with the unknown unit "{unit}". Units are {", ".join(UNITS)}.{nearest}')


def _with_unit(number: float) -> str:
    # Nobody writes a million GiB: such a number is bytes.
    return f'"{number:.0f}B"' if number >= UNITS["MiB"] else f'"{number:g}GiB" or "{number:g}GB"'


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "empty" if value is None else str(value)
