"""What offload changes in the cost of an option: told from the option's cost on the device, without a simulation.

Note [Offload in the chain]. What a layer keeps goes to the host while the next one that offloads computes, and comes
back while the one behind it runs backward. So each moment has the kept bytes of one neighbour beside those of the
layers that do not offload: the one on its way. A copy takes time only as far as it is longer than the layer beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate

from hf_ckpt.planner.chain import NONE, Chain, ChainLayer, Cost
from hf_ckpt.policy.modifiers import Offload
from hf_ckpt.policy.plan import LayerPlan
from hf_ckpt.policy.policy import WHOLE_LAYER_MODES, Mode
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.op_costs import copy_seconds

_Costs = dict[LayerPlan, Cost]
_GAPPED = (LayerPlan(Mode.SELECTIVE), LayerPlan(Mode.SELECTIVE_ATTENTION))
_GAPS = (2, 3, 4)


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


def with_gaps(chain: Chain, device: Device, offload: Offload | None) -> Iterator[Chain]:
    """Yield chains in which every second, third or fourth layer may offload what a selective mode keeps.

    See Note [Offload with gaps].

    Args:
        chain: see `offloaded`.
        device: has the link.
        offload: see `offloaded`.
    """
    if offload is None:
        return
    for option in _GAPPED:
        sent = max((layer.costs[option].kept_bytes for layer in chain.layers if option in layer.costs), default=0)
        if sent < max(1, offload.min_bytes):
            continue
        for every in _GAPS:
            if (found := _with_gap(chain, device, offload, option, every, sent)) is not None:
                yield found


def _with_gap(chain: Chain, device: Device, offload: Offload, option: LayerPlan, every: int, sent: int) -> Chain | None:
    room = math.inf if offload.host_memory is None else offload.host_memory
    lasts = {layer.stack: layer.layer_idx for layer in chain.layers}
    layers = []
    for layer in chain.layers:
        costs = {
            entry: replace(cost, forward_bytes=cost.forward_bytes + sent, backward_bytes=cost.backward_bytes + sent)
            for entry, cost in layer.costs.items()
            if not entry.offload
        }
        sends = layer.layer_idx % every == 0 and layer.layer_idx != lasts[layer.stack] and option in costs
        if sends and (num_bytes := layer.costs[option].kept_bytes) <= room:
            room -= num_bytes
            seconds = costs[option].seconds + _excess(chain, layer, option, device, every)
            sending = replace(costs[option], kept_bytes=0, seconds=seconds, host_bytes=num_bytes)
            costs[replace(option, offload=offload)] = sending
        layers.append(replace(layer, costs=costs))
    if not any(entry.offload for layer in layers for entry in layer.costs):
        return None
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


def _excess(chain: Chain, layer: ChainLayer, option: LayerPlan, device: Device, every: int = 1) -> float:
    """Return the seconds of copies that nothing hides.

    Args:
        chain: the step.
        layer: that offloads.
        option: what it keeps.
        device: has the link.
        every: the layers between do nothing, at least.
    """
    cost, times = layer.costs[option], chain.num_micro_batches
    forward = layer.forward_seconds or cost.seconds / 3
    between = (every - 1) * max(0.0, layer.costs[NONE].seconds - forward)
    copying = copy_seconds(cost.kept_bytes, device) * times
    return max(0.0, copying - every * forward) + max(0.0, copying - (cost.seconds - forward) - between)
