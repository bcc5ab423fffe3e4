"""What offload changes in the cost of an option: told from the option's cost on the device, without a simulation.

Note [Offload in the chain]. What a layer keeps goes to the host while the next one that offloads computes, and comes
back while the one behind it runs backward. So each moment has the kept bytes of one neighbour beside those of the
layers that do not offload: the one on its way. A copy takes time only as far as it is longer than the layer beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate

from hf_ckpt.memory.chain import Chain, ChainLayer, Cost
from hf_ckpt.memory.devices import Device
from hf_ckpt.memory.operators import copy_seconds
from hf_ckpt.modifiers import Offload
from hf_ckpt.plans import LayerPlan
from hf_ckpt.policy import WHOLE_LAYER_MODES

_Costs = dict[LayerPlan, Cost]


def offloaded(chain: Chain, device: Device, offload: Offload | None) -> Chain:
    """Return a chain whose layers may offload, as far as the host has room.

    Args:
        chain: its options do not offload, or those that do are replaced.
        device: has the link.
        offload: the entry of a layer that offloads; its `host_memory` is for all layers together. None for none.
    """
    if offload is None:
        return chain
    lasts = {layer.stack: layer.layer_idx for layer in chain.layers}
    sending = [
        dict(_with_offload(chain, layer, device, offload)) if layer.layer_idx != lasts[layer.stack] else {}
        for layer in chain.layers
    ]
    if offload.host_memory is not None:
        sending = _within(sending, offload.host_memory)
    layers = (
        replace(layer, costs={**{option: cost for option, cost in layer.costs.items() if not option.offload}, **sent})
        for layer, sent in zip(chain.layers, sending, strict=True)
    )
    return replace(chain, layers=tuple(layers))


def _within(sending: list[_Costs], host_memory: int) -> list[_Costs]:
    """Return options of which any choice fits the host: those that send least; for the first layers, if not for all."""
    totals = Counter[LayerPlan]()
    for costs in sending:
        totals.update({option: cost.host_bytes for option, cost in costs.items()})
    ordered = sorted(totals, key=lambda option: totals[option])
    for count in range(len(ordered), 0, -1):
        kept = [{option: cost for option, cost in costs.items() if option in ordered[:count]} for costs in sending]
        if sum(map(_most, kept)) <= host_memory:
            return kept
    least = [{option: cost for option, cost in costs.items() if option in ordered[:1]} for costs in sending]
    taken = accumulate(map(_most, least))
    return [costs if total <= host_memory else {} for costs, total in zip(least, taken, strict=True)]


def _most(costs: _Costs) -> int:
    return max((cost.host_bytes for cost in costs.values()), default=0)


def _offloading(options: Iterable[LayerPlan]) -> Iterator[LayerPlan]:
    for option in options:
        if option.mode in WHOLE_LAYER_MODES and option.offload is None and not option.save:
            yield option


def _with_offload(
    chain: Chain, layer: ChainLayer, device: Device, offload: Offload
) -> Iterator[tuple[LayerPlan, Cost]]:
    for option in _offloading(layer.costs):
        cost = layer.costs[option]
        sent = cost.kept_bytes
        if sent < max(1, offload.min_bytes):
            continue
        excess = _excess(chain, layer, option, device)
        yield (
            replace(option, offload=offload),
            replace(
                cost,
                kept_bytes=0,
                forward_bytes=cost.forward_bytes + sent,
                backward_bytes=cost.backward_bytes + sent,
                seconds=cost.seconds + excess,
                host_bytes=sent,
            ),
        )


def _excess(chain: Chain, layer: ChainLayer, option: LayerPlan, device: Device) -> float:
    """Return the seconds of copies that nothing hides."""
    cost, times = layer.costs[option], chain.num_micro_batches
    forward = layer.forward_seconds or cost.seconds / 3
    copying = copy_seconds(cost.kept_bytes, device) * times
    return max(0.0, copying - forward) + max(0.0, copying - (cost.seconds - forward))
