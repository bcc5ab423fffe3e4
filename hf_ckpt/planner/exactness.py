"""How exact a plan is that was chosen for a budget, and the time that it costs. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from hf_ckpt.policy.modifiers import HeadMode
from hf_ckpt.policy.plan import Plan

TILES, CHUNKED_HEAD = "tiles", "chunked head"
"""What adds sums in another order than the model does."""

_WITHIN = "within 1e-6 in float32"


@dataclass(frozen=True, slots=True)
class Exactness:
    """What a plan computes, and its predicted time as a share of that of the step without a plan.

    Args:
        inexact: what `inexact_parts` says of the plan; one with none is bitwise.
        of_none: the plan's time.
        inexact_of_none: that of the fastest plan with `exact: false`, where that is faster; None elsewhere.
        is_only_choice: no bitwise plan fits, though one would have been taken.
        is_same_step: False where tiles may lie around dropout, whose masks they draw per slice.
    """

    inexact: tuple[str, ...]
    of_none: float
    inexact_of_none: float | None = None
    is_only_choice: bool = False
    is_same_step: bool = True

    @property
    def is_bitwise(self) -> bool:
        """Whether loss and gradients are those of a run without a plan, to the bit."""
        return not self.inexact

    def describe(self) -> str:
        """Return it in words, such as `bitwise: 1.21 of none; 1.08 with exact: false, within 1e-6 in float32`."""
        if not self.is_bitwise:
            within = _WITHIN if self.is_same_step else "not bitwise"
            only = "; no bitwise plan fits" if self.is_only_choice else ""
            return f"{within} ({' and '.join(self.inexact)}): {self.of_none:.2f} of none{only}"
        text = f"bitwise: {self.of_none:.2f} of none"
        if self.inexact_of_none is None or f"{self.inexact_of_none:.2f}" == f"{self.of_none:.2f}":
            return text
        return f"{text}; {self.inexact_of_none:.2f} with exact: false, {_WITHIN}"


def inexact_parts(plan: Plan) -> tuple[str, ...]:
    """Return what of a plan adds sums in another order than the model does: of `TILES` and `CHUNKED_HEAD`."""
    has_tiles = any(entry.tiles is not None for stack in plan.stacks for entry in stack.layers)
    return (*([TILES] if has_tiles else []), *([CHUNKED_HEAD] if plan.head is HeadMode.CHUNKED else []))
