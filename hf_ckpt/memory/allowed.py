"""What the planner may choose beside modes: offload, tiles, the chunked head. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_ckpt.modifiers import Offload


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What a plan that is chosen for a budget may hold.

    Args:
        offload: where layers may offload to; None forbids it: it takes memory of the host, which the user has to grant.
            `host_memory` bounds what all layers together may take; without it any amount is granted.
        tiles: whether layers may run in tiles. None allows it where nothing random lies inside of what is tiled: there
            the masks of dropout are drawn per slice, and the step is another one than without tiles.
        head: whether the chunked head may be chosen.
    """

    offload: Offload | None = None
    tiles: bool | None = None
    head: bool = True

    @property
    def offload_option(self) -> Offload | None:
        """The offload of the entries of a plan: which layers offload is the planner's choice, not the engine's."""
        return None if self.offload is None else replace(self.offload, fraction=1.0)


UNASKED = Allowed()
"""What is allowed where the user said nothing."""
