"""All contenders by name, in the order of tables."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.side_by_side import ours
from benchmarks.side_by_side.contender import Contender
from benchmarks.side_by_side.theirs import (
    accelerate_fsdp,
    axolotl_offload,
    compiled,
    torchtitan_like,
    transformers_own,
    trl_offload,
    unsloth_offload,
)

_ORIGINS = (
    transformers_own,
    accelerate_fsdp,
    trl_offload,
    unsloth_offload,
    axolotl_offload,
    torchtitan_like,
    ours,
    compiled,
)
CONTENDERS: dict[str, Contender] = {ours.NONE.name: ours.NONE} | {
    contender.name: contender for origin in _ORIGINS for contender in origin.CONTENDERS
}


def chosen(names: Sequence[str]) -> tuple[Contender, ...]:
    """Return contenders by their names or groups; all of them for no names. `none` is always the first.

    Raises:
        ValueError: there is none of that name; the message lists those that there are.
    """
    unknown = [name for name in names if name not in CONTENDERS and name not in _groups()]
    if unknown:
        raise ValueError(
            f"Unknown contender {unknown[0]!r}. Contenders are {', '.join(CONTENDERS)}; groups of them are "
            f"{', '.join(_groups())}."
        )
    wanted = set(names) or set(CONTENDERS)
    return tuple(one for name, one in CONTENDERS.items() if wanted & {name, one.group} or name == ours.NONE.name)


def _groups() -> list[str]:
    return sorted({contender.group for contender in CONTENDERS.values()} - {ours.NONE.group})
