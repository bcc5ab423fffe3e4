"""What each layer costs under each option, from simulated steps: the chain that the planner chooses for.

A step is simulated for each mode, in all layers at once. Two kinds of options follow from those steps: lists of
operators to keep (`save_lists`), and offload. Tiles and the chunked head do not. They are simulated where a plan may
need them (`with_tiles`, `with_chunked_head`).

Note [Offload in the chain]. What a layer keeps goes to the host while the next one that offloads computes, and comes
back while the one behind it runs backward. So at each moment, the kept bytes of one neighbour, which are on their way,
come on top of those of the layers that do not offload. A copy takes time only as far as it is longer than the layer
that computes meanwhile.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from hf_ckpt.errors import HFCkptError, RecomputationError, UnsupportedError
from hf_ckpt.garbage_collection import no_cycles_collected
from hf_ckpt.patch.tileable_modules import random_modules, tiled_modules
from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer, Cost
from hf_ckpt.planner.costs_from_tape import LayerKey, StepReading
from hf_ckpt.planner.save_lists import save_list_options
from hf_ckpt.policy.allowances import DEFAULT_ALLOWED, Allowed
from hf_ckpt.policy.options import HeadMode, Offload
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import WHOLE_LAYER_MODES, Mode, Policy
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.op_costs import copy_seconds, is_kept_selectively
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step_memory import Phase
from hf_ckpt.structure.layers import Layer
from hf_ckpt.units import counted

logger = logging.getLogger(__name__)

TILED = (LayerPlan(Mode.FULL, tiles="auto"), LayerPlan(Mode.NONE, tiles="auto"))
"""The options with tiles that are tried."""

_Options = dict[LayerPlan, Cost]


def chain_of(simulator: StepSimulator, allowed: Allowed = DEFAULT_ALLOWED) -> Chain:
    """Return what each layer costs under each option that is allowed, from one simulated step per mode."""
    step, device = simulator.step, simulator.device
    kept = _read(simulator, None)
    costs: dict[LayerKey, _Options] = {key: {NONE: kept.cost(key)} for key in kept.order}
    full: StepReading | None = None
    for mode in Mode:
        if mode is not Mode.NONE:
            reading = _add(costs, simulator, _plan_of(simulator, mode), LayerPlan(mode))
            full = reading if mode is Mode.FULL else full
    can_join = _plan_of(simulator, Mode.FULL, segment_size=2) is not None
    layers = []
    for key in kept.order:
        if full is not None and {FULL, LayerPlan(Mode.SELECTIVE)} <= costs[key].keys():
            watched = _watched_seconds(full, key, device)
            points = save_list_options(full, key).items()
            costs[key].update((option, replace(cost, seconds=cost.seconds + watched)) for option, cost in points)
        layers.append(ChainLayer(*key, costs[key], can_join, kept.forward_seconds[key]))
    inputs = [layer.costs[FULL].kept_bytes for layer in layers if FULL in layer.costs]
    chain = Chain(
        layers=tuple(layers),
        base_bytes=kept.base_bytes,
        head_bytes=kept.head_bytes,
        fixed_peak_bytes=kept.fixed_peak_bytes,
        other_seconds=kept.other_seconds,
        input_bytes=max(0, min(inputs, default=0)),
        num_micro_batches=step.gradient_accumulation_steps,
        head_left_bytes=kept.head_left_bytes,
        head_backward_bytes=kept.head_backward_bytes,
        head_seconds=kept.head_seconds,
    )
    return offloaded(chain, device, allowed.offload_option)


def plans_to_read(simulator: StepSimulator, allowed: Allowed = DEFAULT_ALLOWED) -> Iterator[Plan | None]:
    """Yield the plans whose steps a chain is made of, in the order in which they are read.

    Before them, for whoever begins with the last, comes one that may be read when the chain is there.
    """
    if allowed.widest.head and (plan := _chunked_plan(simulator)) is not None:
        yield plan
    yield None
    yield from (plan for mode in Mode if mode is not Mode.NONE and (plan := _plan_of(simulator, mode)) is not None)


def _watched_seconds(full: StepReading, key: LayerKey, device: Device) -> float:
    """Return what it takes to keep outputs of a layer, and to hand them out. See `Device.selective_seconds`."""
    events = full.events[full.span(Phase.FORWARD, key)]
    num_kept = sum(1 for event in events if event.seconds and is_kept_selectively(event.place))
    return num_kept * full.num_micro_batches * device.selective_seconds


def with_tiles(chain: Chain, simulator: StepSimulator, allowed: Allowed = DEFAULT_ALLOWED) -> Chain:
    """Return a chain of `chain_of` with the options of `TILED` too, from one more simulated step for each."""
    if allowed.tiles is False:
        return chain
    costs: dict[LayerKey, _Options] = {(layer.stack, layer.layer_idx): dict(layer.costs) for layer in chain.layers}
    for option in TILED:
        _add(costs, simulator, _tiled_plan(simulator, option, allowed), option)
    layers = tuple(replace(layer, costs=costs[layer.stack, layer.layer_idx]) for layer in chain.layers)
    return offloaded(replace(chain, layers=layers), simulator.device, allowed.offload_option)


def with_chunked_head(chain: Chain, simulator: StepSimulator) -> Chain | None:
    """Return a chain of `chain_of` whose head is chunked, from one more simulated step; None where it cannot be."""
    plan = _chunked_plan(simulator)
    if plan is None:
        return None
    reading, _ = _read_what_works(simulator, plan)
    return replace(
        chain,
        head_bytes=reading.head_bytes,
        head_left_bytes=reading.head_left_bytes,
        head_backward_bytes=reading.head_backward_bytes,
        other_seconds=chain.other_seconds + reading.head_seconds - chain.head_seconds,
        head_seconds=reading.head_seconds,
        head=HeadMode.CHUNKED,
    )


def _read(simulator: StepSimulator, plan: Plan | None) -> StepReading:
    with no_cycles_collected():
        return StepReading(simulator.trace(plan).tape, simulator.step)


def _add(
    costs: Mapping[LayerKey, _Options], simulator: StepSimulator, plan: Plan | None, option: LayerPlan
) -> StepReading | None:
    """Enter what an option costs in the layers that a plan, where there is one, gives it to; return the reading."""
    if plan is None:
        return None
    reading, plan = _read_what_works(simulator, plan)
    for key, options in costs.items():
        if plan.stacks[key[0]].layers[key[1]] == option:
            options[option] = reading.cost(key)
    return reading


def _read_what_works(simulator: StepSimulator, plan: Plan) -> tuple[StepReading, Plan]:
    """Return the reading of a plan, without what cannot be recomputed in layers that do not allow it, and that plan."""
    while True:
        try:
            return _read(simulator, plan), plan
        except RecomputationError as error:
            failed = _layer_at(plan, error.path or "")
            if failed is None:
                raise
            # What one layer raises, those that are like it do.
            alike = simulator.layers_like(failed)
            mode = plan.stacks[failed[0]].layers[failed[1]].mode
            logger.info('Mode "%s" is left out for %s: %s', mode, counted(len(alike), "layer"), error)
            stacks = [list(stack.layers) for stack in plan.stacks]
            for stack, layer_idx in alike:
                stacks[stack][layer_idx] = NONE
            plan = replace(
                plan,
                stacks=tuple(replace(old, layers=tuple(new)) for old, new in zip(plan.stacks, stacks, strict=True)),
            )


def _layer_at(plan: Plan, path: str) -> LayerKey | None:
    """Return the layer that a path leads to or into, if the plan does something there."""
    for number, stack in enumerate(plan.stacks):
        if path.startswith(f"{stack.path}."):
            layer_idx = int(path[len(stack.path) + 1 :].partition(".")[0])
            return (number, layer_idx) if stack.layers[layer_idx] != NONE else None
    return None


def _plan_of(simulator: StepSimulator, mode: Mode, **options: Any) -> Plan | None:
    """Return the plan that has one mode everywhere, or None where the model cannot do it."""
    try:
        return simulator.plan_of(Policy.parse(mode.value, **options))
    except HFCkptError:
        return None


def _chunked_plan(simulator: StepSimulator) -> Plan | None:
    """Return the plan whose chunked head is read; None where the model has none."""
    # Layers in mode full are simulated fastest, and the head is the same.
    return _plan_of(simulator, Mode.FULL, head="chunked") or _plan_of(simulator, Mode.NONE, head="chunked")


def _tiled_plan(simulator: StepSimulator, option: LayerPlan, allowed: Allowed) -> Plan | None:
    """Return the plan with an option with tiles wherever it can be; None where that is nowhere."""
    template = simulator.plan_of(Policy.parse("none"))
    stacks = tuple(
        StackPlan(of_stack.path, tuple(option if may_tile(layer, allowed) else NONE for layer in stack.layers))
        for of_stack, stack in zip(template.stacks, simulator.stacks, strict=True)
    )
    if all(entry == NONE for stack in stacks for entry in stack.layers):
        return None
    try:
        return simulator.plan_of(replace(template, stacks=stacks))
    except HFCkptError:
        return None


def may_tile(layer: Layer, allowed: Allowed) -> bool:
    """Whether a plan may run a layer in tiles: it can be cut, and the step stays the same or another one is allowed."""
    if allowed.tiles is False:
        return False
    try:
        names = tiled_modules(layer)
    except UnsupportedError:
        return False
    # Where masks are drawn for each slice, the step is another one: that has to be allowed.
    return allowed.tiles is True or not random_modules(layer, names)


_GAPPED = (LayerPlan(Mode.SELECTIVE), LayerPlan(Mode.SELECTIVE_ATTENTION))
_GAPS = (2, 3, 4)


def offloaded(chain: Chain, device: Device, offload: Offload | None) -> Chain:
    """Return a chain whose layers may offload, as far as the host has room. See Note [Offload in the chain].

    Options that offload already are replaced. `offload.host_memory` is for all layers together.
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

    A copy that is longer than one layer then has the layers between for its time. See `offloaded`.
    """
    if offload is None:
        return
    for option in _GAPPED:
        sent = max((layer.costs[option].kept_bytes for layer in chain.layers if option in layer.costs), default=0)
        if sent >= max(1, offload.min_bytes):
            gapped = (_with_gap(chain, device, offload, option, every, sent) for every in _GAPS)
            yield from (found for found in gapped if found is not None)


def _with_gap(chain: Chain, device: Device, offload: Offload, option: LayerPlan, every: int, sent: int) -> Chain | None:
    room = math.inf if offload.host_memory is None else offload.host_memory
    lasts = {layer.stack: layer.layer_idx for layer in chain.layers}
    layers = []
    for layer in chain.layers:
        costs = {entry: _beside(cost, sent) for entry, cost in layer.costs.items() if not entry.offload}
        sends = layer.layer_idx % every == 0 and layer.layer_idx != lasts[layer.stack] and option in costs
        if sends and (num_bytes := layer.costs[option].kept_bytes) <= room:
            room -= num_bytes
            costs[replace(option, offload=offload)] = _beside(_sent(chain, layer, option, device, every), sent)
        layers.append(replace(layer, costs=costs))
    if not any(entry.offload for layer in layers for entry in layer.costs):
        return None
    return replace(chain, layers=tuple(layers))


def _within(sending: list[_Options], host_memory: int) -> list[_Options]:
    """Return options of which any choice fits the host: those that send least; for the first layers, if not for all."""
    totals = Counter[LayerPlan]()
    for costs in sending:
        totals.update({option: cost.host_bytes for option, cost in costs.items()})
    ordered = sorted(totals, key=lambda option: totals[option])
    for count in range(len(ordered), 0, -1):
        sending = [{option: cost for option, cost in costs.items() if option in ordered[:count]} for costs in sending]
        if sum(map(_most, sending)) <= host_memory:
            return sending
    taken = accumulate(map(_most, sending))
    return [costs if total <= host_memory else {} for costs, total in zip(sending, taken, strict=True)]


def _most(costs: _Options) -> int:
    return max((cost.host_bytes for cost in costs.values()), default=0)


def _with_offload(
    chain: Chain, layer: ChainLayer, device: Device, offload: Offload
) -> Iterator[tuple[LayerPlan, Cost]]:
    for option, cost in layer.costs.items():
        sent = cost.kept_bytes
        can_offload = option.mode in WHOLE_LAYER_MODES and option.offload is None and not option.save
        if can_offload and sent >= max(1, offload.min_bytes):
            yield replace(option, offload=offload), _beside(_sent(chain, layer, option, device), sent)


def _beside(cost: Cost, num_bytes: int) -> Cost:
    """Return a cost with so many bytes of a neighbour on their way."""
    return replace(cost, forward_bytes=cost.forward_bytes + num_bytes, backward_bytes=cost.backward_bytes + num_bytes)


def _sent(chain: Chain, layer: ChainLayer, option: LayerPlan, device: Device, every: int = 1) -> Cost:
    """Return what an option costs if what it keeps is sent to the host.

    A copy takes the seconds that nothing hides, where every n-th layer offloads and those between do nothing.
    """
    cost, times = layer.costs[option], chain.num_micro_batches
    forward = layer.forward_seconds or cost.seconds / 3
    between = (every - 1) * max(0.0, layer.costs[NONE].seconds - forward)
    copying = copy_seconds(cost.kept_bytes, device) * times
    excess = max(0.0, copying - every * forward) + max(0.0, copying - (cost.seconds - forward) - between)
    return replace(cost, kept_bytes=0, seconds=cost.seconds + excess, host_bytes=cost.kept_bytes)
