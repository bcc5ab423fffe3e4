"""Policies with selective modes, offload, tiles and the chunked head, and how far results may be from no plan's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hf_ckpt
from tests import exactness, zoo
from tests.exactness import Result
from tests.zoo_tables import VOCAB

LAYERS = 3
CLOSE = 2.0**-24 * (2 * VOCAB * LAYERS) ** 0.5
"""Relative, in float32, of sums that are added up in another order: 1.7e-6. The longest have as many terms as there are
words, each rounded by up to 2**-24. Such errors add up as the root of their number, here in two orders and in three
layers. Which order a product takes differs from CPU to CPU; what is wrong is off by far more."""
TILES = 3
"""Slices of 16 positions: of 6, 5 and 5."""

# min_bytes: tensors of tiny models are far below what is worth moving.
CPU = {"to": "cpu", "min_bytes": 0}
# One of each kind of region.
REGIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": ("full", {}),
    "segments": ("full", {"segment_size": 2}),
    "nested": ("full", {"segment_size": 3, "nested": True}),
    "revolve": ("full", {"nested": "revolve", "snapshots": 1}),
    "attention": ("attention", {}),
    "ffn": ("ffn", {}),
    "selective": ("selective", {}),
    "selective_attention": ("selective_attention", {}),
    "offload": ("full", {"offload": CPU}),
}
MODES: dict[str, tuple[object, dict[str, Any]]] = {
    "selective": ("selective", {}),
    "selective_attention": ("selective_attention", {}),
    "save_operators": ("selective", {"save": ["aten.mm"]}),
    "save_modules": ("selective", {"save": ["self_attn.*_proj"]}),
    "offload": ("full", {"offload": CPU}),
    "offload_half": ("full", {"offload": {**CPU, "fraction": 0.5}}),
    "selective_offload": ("selective", {"offload": CPU}),
    "disk": ("full", {"offload": {"to": "disk", "min_bytes": 0}}),
    "full_tile": ("full", {"tiles": 1}),
    "full_tiles": ("full", {"tiles": TILES}),
    "none_tiles": ("none", {"tiles": TILES}),
    "attention_tiles": ("attention", {"tiles": TILES}),
    "ffn_tiles": ("ffn", {"tiles": TILES}),
    "head": ("none", {"head": "chunked"}),
    "full_head": ("full", {"head": "chunked"}),
    "selective_head": ("selective", {"head": "chunked"}),
    "all": ("full", {"offload": CPU, "tiles": TILES, "head": "chunked"}),
}


def in_tiles(mode: str) -> bool:
    return MODES[mode][1].get("tiles") == TILES


def is_bitwise(mode: str) -> bool:
    return not in_tiles(mode) and "head" not in MODES[mode][1]


@contextmanager
def in_force(case: zoo.Case, mode: str, folder: Path) -> Iterator[hf_ckpt.patch.apply.Applied]:
    """Put one of `MODES` in force; a disk is a folder."""
    policy, options = MODES[mode]
    if mode == "disk":
        options = {"offload": {**options["offload"], "path": str(folder)}}
    with hf_ckpt.apply(case.model, policy, **options) as applied:
        yield applied


def build(model_type: str, **options: Any) -> zoo.Case:
    return exactness.build(model_type, num_layers=LAYERS, **options)


def llama(**options: Any) -> zoo.Case:
    return build("llama", **options)


def apart(expected: Result, got: Result) -> dict[str, float]:
    """Return how far two results are apart, by name: the length of the difference over that of the tensor."""
    # Where terms cancel, as in the gradients of small adapters, a step without a plan is itself more than 1e-6 away
    # from the same step in float64: what is small is held against a tenth of the longest gradient.
    floor = 0.1 * max(float(gradient.norm()) for gradient in expected[1].values() if gradient is not None)
    errors = {"loss": float((expected[0] - got[0]).norm() / expected[0].norm())}
    for name, gradient in expected[1].items():
        other = got[1][name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            errors[name] = float((gradient - other).norm()) / max(float(gradient.norm()), floor)
    return errors


def worst(errors: dict[str, float]) -> tuple[float, str]:
    return max((error, name) for name, error in errors.items())
