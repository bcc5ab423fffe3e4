"""What the planner may choose in addition to modes: offload, tiles, the chunked head. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from hf_ckpt.errors import PolicyError, as_written, did_you_mean
from hf_ckpt.policy.options import (
    TO_CPU,
    EmbeddingPlace,
    HeadMode,
    Offload,
    Weights,
    parse_embedding,
    parse_head,
    parse_offload,
    parse_tiles,
    parse_weights,
)
from hf_ckpt.policy.plan import Plan, with_entries
from hf_ckpt.policy.policy import AUTO

Moved = TypeVar("Moved", Offload, Weights)

Exact = bool | Literal["prefer"]
"""Whether a plan has to be bitwise: loss and gradients those of a run without a plan, to the bit."""

PREFER: Literal["prefer"] = "prefer"


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What a plan that is chosen for a budget may hold."""

    offload: Offload | None = None
    """Where layers may offload to. None forbids it: it takes memory of the host, which the user has to grant.

    `host_memory` bounds what all layers may take; without it any amount is granted.
    """
    tiles: bool | None = None
    """Whether layers may run in tiles, whatever `exact` says.

    None leaves it to `exact`, and allows it only where nothing random lies inside of what is tiled: there the masks of
    dropout are drawn per slice, and the step is another one than without tiles.
    """
    head: bool | None = None
    """Whether the chunked head may be chosen, whatever `exact` says; None leaves it to `exact`."""
    weights: Weights | None = None
    """Where frozen weights may wait; None forbids it, for the same reason."""
    embedding: EmbeddingPlace | None = None
    """Where frozen input embeddings may lie; None leaves it to `weights`."""
    exact: Exact = PREFER
    """True takes no tiles and no chunked head, which add sums in another order; `prefer` only where nothing fits
    without; False wherever they are faster."""

    @property
    def offload_option(self) -> Offload | None:
        """The offload of the entries of a plan: which layers offload is the planner's choice, not the engine's."""
        return None if self.offload is None else replace(self.offload, fraction=1.0)

    @property
    def moves_embedding(self) -> bool:
        """Whether a frozen input embedding may lie in host memory."""
        return self.embedding is EmbeddingPlace.CPU or (self.embedding is None and self.weights is not None)

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


DEFAULT_ALLOWED = Allowed()
"""What is allowed where the user said nothing."""


ALLOWANCES = ("offload", "weights", "embedding", "tiles", "head", "exact")
"""Options that allow or forbid something under `auto`; `exact` belongs to no other policy."""


def allowed_by(options: Mapping[str, Any]) -> Allowed:
    """Read `ALLOWANCES` from what the user wrote; raise `PolicyError` where one says what only the planner can say."""
    head = parse_head(options.get("head"))
    return Allowed(
        offload=_offload(options.get("offload")),
        weights=parse_weights(options.get("weights")),
        embedding=parse_embedding(options.get("embedding")),
        tiles=_tiles(options.get("tiles")),
        head=None if head is None else head is HeadMode.CHUNKED,
        exact=parse_exact(options.get("exact")),
    )


def check_no_rule(options: Mapping[str, object]) -> None:
    """Refuse options of a policy that say what layers do, which `auto` chooses."""
    given = [name for name, value in options.items() if value not in (None, False) and name not in ALLOWANCES]
    if given:
        raise PolicyError(
            f'{", ".join(given)} was given with policy "{AUTO}", which chooses for each layer. Leave it out.'
        )


def parse_exact(value: object) -> Exact:
    """Read what a user writes for `exact`: `prefer`, true or false. None is `prefer`."""
    if value is None or value == PREFER:
        return PREFER
    if isinstance(value, bool):
        return value
    raise PolicyError(
        f'exact is {as_written(value)}. Use "prefer" (a plan that changes no bit, if one fits), true (such a plan or '
        f"none) or false (the fastest one; sums may be added in another order).{did_you_mean(value, [PREFER])}"
    )


def cap_to_free_memory(allowed: Allowed, free_bytes: int | None) -> Allowed:
    """Return what is allowed where so much host memory is free; None where that is not known."""
    if free_bytes is None:
        return allowed
    free = free_bytes

    def capped(asked: Moved | None) -> Moved | None:
        if asked is None or asked.to != TO_CPU:
            return asked
        granted = free if asked.host_memory is None else asked.host_memory
        return replace(asked, host_memory=min(free, granted))

    return replace(allowed, offload=capped(allowed.offload), weights=capped(allowed.weights))


def restore_user_cap(plan: Plan, allowed: Allowed) -> Plan:
    """Return a plan made for `cap_to_free_memory` with the user's own cap: what is free is no part of a plan."""

    def restored(planned: Moved | None, asked: Moved | None) -> Moved | None:
        return None if planned is None else replace(planned, host_memory=None if asked is None else asked.host_memory)

    return with_entries(
        plan,
        lambda entry: replace(
            entry, offload=restored(entry.offload, allowed.offload), weights=restored(entry.weights, allowed.weights)
        ),
    )


def allowed_in(plan: Plan) -> Allowed:
    """Return what another plan may hold where the user's own policy made this one: what this one holds."""
    entries = [entry for stack in plan.stacks for entry in stack.layers]
    offload = next((entry.offload for entry in entries if entry.offload is not None), None)
    weights = next((entry.weights for entry in entries if entry.weights is not None), None)
    return Allowed(
        offload=offload,
        weights=weights,
        embedding=None if weights is None and plan.embedding is EmbeddingPlace.DEVICE else plan.embedding,
        tiles=True if any(entry.tiles is not None for entry in entries) else None,
        head=True if plan.head is HeadMode.CHUNKED else None,
    )


def _offload(value: object) -> Offload | None:
    offload = parse_offload(value)
    if offload is not None and offload.fraction is not None:
        raise PolicyError(
            f'offload {as_written(value)} has a fraction with policy "{AUTO}", which chooses the layers that offload '
            "for the budget and the time. Leave fraction out."
        )
    return offload


def _tiles(value: object) -> bool | None:
    tiles = parse_tiles(value)
    if tiles not in (None, 1, "auto"):
        raise PolicyError(
            f'tiles is {tiles} with policy "{AUTO}", which chooses where layers run in tiles, and tiles choose '
            'their number. Use "auto" to allow tiles where dropout lies inside them too, 1 to forbid them, or leave it '
            "out."
        )
    return None if tiles is None else tiles == "auto"
