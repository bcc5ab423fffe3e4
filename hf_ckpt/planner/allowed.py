"""What the planner may choose beside modes: offload, tiles, the chunked head. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hf_ckpt.policy.modifiers import Offload

Exact = bool | Literal["prefer"]
"""Whether a plan has to be bitwise: loss and gradients those of a run without a plan, to the bit."""

PREFER: Literal["prefer"] = "prefer"


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What a plan that is chosen for a budget may hold.

    Args:
        offload: where layers may offload to; None forbids it: it takes memory of the host, which the user has to grant.
            `host_memory` bounds what all layers together may take; without it any amount is granted.
        tiles: whether layers may run in tiles, whatever `exact` says. None leaves it to `exact`, and allows it only
            where nothing random lies inside of what is tiled: there the masks of dropout are drawn per slice, and the
            step is another one than without tiles.
        head: whether the chunked head may be chosen, whatever `exact` says; None leaves it to `exact`.
        exact: True takes no tiles and no chunked head, which add sums in another order; `prefer` takes them only where
            nothing fits without; False wherever they are faster.
    """

    offload: Offload | None = None
    tiles: bool | None = None
    head: bool | None = None
    exact: Exact = PREFER

    @property
    def offload_option(self) -> Offload | None:
        """The offload of the entries of a plan: which layers offload is the planner's choice, not the engine's."""
        return None if self.offload is None else replace(self.offload, fraction=1.0)

    @property
    def bitwise(self) -> Allowed:
        """What is left where nobody asked for tiles and the chunked head."""
        return replace(self, tiles=self.tiles is True, head=self.head is True, exact=True)

    @property
    def widest(self) -> Allowed:
        """What is allowed where a plan need not be bitwise."""
        return replace(self, head=self.head is not False, exact=False)

    @property
    def in_turn(self) -> tuple[Allowed, ...]:
        """What to look for a plan with, one after the other until there is one; each says whether the head may."""
        if self.exact is True:
            return (self.bitwise,)
        return (self.bitwise, self.widest) if self.exact == PREFER and self.can_be_faster else (self.widest,)

    @property
    def can_be_faster(self) -> bool:
        """Whether giving up on bitwise plans allows anything more."""
        return self.tiles is None or self.head is None


UNASKED = Allowed()
"""What is allowed where the user said nothing."""
