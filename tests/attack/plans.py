"""Plans to train under, drawn by chance: every mode with what may be added to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A policy and its options, as a user hands them to `hf_ckpt.apply` or to `HFCkptCallback`."""

    policy: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_bitwise(self) -> bool:
        """Whether sums are added in the same order as without a plan."""
        return "tiles" not in self.options and self.options.get("head") != "chunked"

    @property
    def proven(self) -> Asked:
        """The same with a proof of every step."""
        return replace(self, options=self.options | {"prove": 1})


_MODES = ("full", "full", "attention", "ffn", "selective", "selective", "selective", "selective_attention", "none")
_SEGMENTS: tuple[dict[str, Any], ...] = (
    {"segment_size": 2},
    {"segment_size": "sqrt"},
    {"segment_size": 2, "nested": True},
    {"nested": "revolve", "snapshots": 1},
)
_OFFLOADS: tuple[Any, ...] = ("cpu", {"to": "cpu", "min_bytes": 1}, {"to": "cpu", "min_bytes": 256, "fraction": 1.0})
_MIXED: tuple[Any, ...] = (
    [{"layers": "0:1", "mode": "full"}, {"layers": "1:", "mode": "selective"}],
    [{"layers": "0:1", "mode": "attention"}, {"layers": "1:", "mode": "full", "offload": "cpu"}],
    [{"layers": "::2", "mode": "selective_attention"}, {"layers": "1::2", "mode": "ffn"}],
)


def drawn(rng: random.Random, *, saves: tuple[str, ...], may_tile: bool, may_chunk: bool) -> Asked:
    """Draw a plan.

    Args:
        saves: operators and modules that a selective plan may keep.
        may_tile: whether layers may run in tiles.
        may_chunk: whether the head may be chunked.
    """
    mode = rng.choice(_MODES)
    if rng.random() < 0.1:
        return Asked(rng.choice(_MIXED))
    is_whole_layer = mode not in ("none", "attention", "ffn")
    options: dict[str, Any] = {}
    if mode == "full" and rng.random() < 0.5:
        options |= rng.choice(_SEGMENTS)
    elif is_whole_layer and rng.random() < 0.3:
        options["offload"] = rng.choice(_OFFLOADS)
    if mode != "none" and not options and rng.random() < 0.25:
        options["every_n_layers"] = 2
    if mode == "selective" and rng.random() < 0.25:
        options["save"] = list(rng.sample(saves, rng.randrange(1, 3)))
    # What runs in tiles is recomputed, and no selective mode keeps it.
    if may_tile and mode in ("none", "full", "attention", "ffn") and not options and rng.random() < 0.5:
        options["tiles"] = rng.choice((2, 3))
    if may_chunk and rng.random() < (0.5 if mode == "none" else 0.15):
        options["head"] = "chunked"
    if rng.random() < 0.2:
        options["prove"] = rng.choice(("off", 2))
    return Asked(mode, options)
