"""The plans that a user would write instead: one mode for all layers, for every n-th, or segments of sqrt(L)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from hf_ckpt.memory.chain import Chain
from hf_ckpt.memory.choices import Choice, predict
from hf_ckpt.plans import LayerPlan
from hf_ckpt.policy import Mode

_Entries = tuple[LayerPlan, ...]


def fixed_choices(chain: Chain) -> tuple[Choice, ...]:
    """Return what the fixed policies amount to, each kind once, the fastest first, of equally fast ones the smallest.

    A layer that lacks a mode does nothing, as when a policy is resolved. Segments are left out where layers in a row
    cannot join.
    """
    ways = dict.fromkeys([*_every_n(chain), *_segments(chain)])
    return tuple(sorted((predict(chain, way) for way in ways), key=lambda choice: (choice.seconds, choice.peak_bytes)))


def _every_n(chain: Chain) -> Iterator[_Entries]:
    modes = {mode for layer in chain.layers for mode in layer.costs}
    for mode in Mode:
        for every in range(1, len(chain.layers) + 1) if mode in modes else ():
            yield tuple(
                LayerPlan(mode) if mode in layer.costs and layer.layer_idx % every == 0 else LayerPlan()
                for layer in chain.layers
            )


def _segments(chain: Chain) -> Iterator[_Entries]:
    if any(Mode.FULL not in layer.costs or not layer.can_join for layer in chain.layers):
        return
    num_layers = Counter(layer.stack for layer in chain.layers)
    for nested in (False, True):
        entries = []
        for layer in chain.layers:
            size = math.ceil(math.sqrt(num_layers[layer.stack]))
            entries.append(LayerPlan(Mode.FULL, layer.layer_idx // size * size, nested))
        yield tuple(entries)
