"""The most that tiles and a chunked head could bring, before either is simulated. Pure data.

Where not even this is faster, or fits, the real thing need not be looked at.
"""

from __future__ import annotations

from dataclasses import replace

from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer, Cost
from hf_ckpt.policy.plan import LayerPlan
from hf_ckpt.policy.policy import Mode

_FFN = LayerPlan(Mode.FFN)


def best_case(chain: Chain, *, tiles: bool, head: bool) -> Chain:
    """Return a chain that is at least as good as one with tiles, or with a chunked head, can be.

    Args:
        chain: without them.
        tiles: let layers run in tiles that take no memory and no time.
        head: let the head take no memory.
    """
    if head:
        chain = replace(chain, head_bytes=0, head_backward_bytes=0)
    if tiles:
        chain = replace(chain, layers=tuple(map(_tiled, chain.layers)))
    return chain


def _tiled(layer: ChainLayer) -> ChainLayer:
    costs = dict(layer.costs)
    for option, like in ((FULL, FULL), (NONE, _FFN)):
        if like in costs:
            costs[replace(option, tiles="auto")] = _weightless(costs[like], costs[option].seconds)
    if FULL in costs:
        costs.update(
            (replace(option, tiles="auto"), _weightless(cost, cost.seconds))
            for option, cost in layer.costs.items()
            if option.offload is not None and option.mode is Mode.FULL
        )
    return replace(layer, costs=costs)


def _weightless(cost: Cost, seconds: float) -> Cost:
    kept = cost.kept_bytes
    return replace(cost, forward_bytes=kept, backward_bytes=kept + cost.left_bytes, seconds=seconds)
