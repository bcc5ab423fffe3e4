"""The plans that a user would write instead: one option for all layers, or every n-th, or segments of sqrt(L)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer, rank
from hf_ckpt.planner.peak_formulas import Choice, predict
from hf_ckpt.policy.plan import LayerPlan

_Entries = tuple[LayerPlan, ...]


def fixed_choices(chain: Chain) -> tuple[Choice, ...]:
    """Return what the fixed policies amount to, each kind once, the fastest first, of equally fast ones the smallest.

    A layer that lacks an option does nothing, as when a policy is resolved. Segments are left out where layers in a row
    cannot join.
    """
    ways = dict.fromkeys([*_every_n(chain), *_segments(chain)])
    return tuple(sorted((predict(chain, way) for way in ways), key=lambda choice: (choice.seconds, choice.peak_bytes)))


def _every_n(chain: Chain) -> Iterator[_Entries]:
    # Lists of operators to keep are the planner's own; a user who wrote one would have found it with the planner.
    options = {option for layer in chain.layers for option in layer.costs if not option.save}
    for option in sorted(options, key=rank):
        # Layers that do not offload beside those that do are what the last ones are.
        for every in range(1, 2 if option.offload is not None else len(chain.layers) + 1):
            yield tuple(
                option if option in layer.costs and layer.layer_idx % every == 0 else _without_offload(option, layer)
                for layer in chain.layers
            )


def _without_offload(option: LayerPlan, layer: ChainLayer) -> LayerPlan:
    """Return what a layer does that an option with offload leaves out: the same on the device, where it can."""
    on_device = replace(option, offload=None)
    return on_device if option.offload is not None and on_device in layer.costs else NONE


def _segments(chain: Chain) -> Iterator[_Entries]:
    if any(FULL not in layer.costs or not layer.can_join for layer in chain.layers):
        return
    num_layers = Counter(layer.stack for layer in chain.layers)
    for nested in (False, True):
        entries = []
        for layer in chain.layers:
            size = math.ceil(math.sqrt(num_layers[layer.stack]))
            entries.append(replace(FULL, segment=layer.layer_idx // size * size, nested=nested))
        yield tuple(entries)
