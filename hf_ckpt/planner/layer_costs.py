"""What each layer costs under each option, from simulated steps: the chain that the planner chooses for.

A step is simulated for each mode, in all layers at once. What can be told from those without another simulation is:
lists of operators to keep (`operator_frontier`), and offload (`offload_costs`). Tiles and the chunked head cannot; they
are simulated where a plan may need them (`with_tiles`, `with_chunked_head`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from hf_ckpt.errors import HFCkptError, UnsupportedError
from hf_ckpt.patch.apply import make_plan
from hf_ckpt.patch.tileable import random_modules, tiled_modules
from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer, Cost
from hf_ckpt.planner.offload_costs import offloaded
from hf_ckpt.planner.save_lists import operator_points
from hf_ckpt.planner.step_reading import LayerKey, Reading
from hf_ckpt.policy.allowances import UNASKED, Allowed
from hf_ckpt.policy.modifiers import HeadMode
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.op_costs import is_kept_selectively
from hf_ckpt.simulation.simulator import trace_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.tape import Region
from hf_ckpt.structure.layers import Layer, find_layers

TILED = (LayerPlan(Mode.FULL, tiles="auto"), LayerPlan(Mode.NONE, tiles="auto"))
"""The options with tiles that are looked at."""

_Options = dict[LayerPlan, Cost]


def chain_of(model: nn.Module, step: Step, device: Device, *, allowed: Allowed = UNASKED, **structure: Any) -> Chain:
    """Return what each layer of a model costs under each option, from one simulated step per mode.

    Args:
        model: see `simulate_step`.
        step: what the Trainer runs.
        device: where.
        allowed: what a plan may hold beside modes.
        structure: `layers`, `attention` and `ffn` of `apply`.
    """
    kept = _read(model, None, step, device, structure)
    # The optimizer does the same under any plan.
    without = replace(step, optim=None)
    costs: dict[LayerKey, _Options] = {key: {NONE: kept.cost(key)} for key in kept.order}
    full: Reading | None = None
    for mode in Mode:
        plan = None if mode is Mode.NONE else _plan_of(model, mode, structure)
        if plan is None:
            continue
        reading = _read(model, plan, without, device, structure)
        _add(costs, reading, plan, LayerPlan(mode))
        full = reading if mode is Mode.FULL else full
    can_join = _plan_of(model, Mode.FULL, structure, segment_size=2) is not None
    layers = []
    for key in kept.order:
        if full is not None and {FULL, LayerPlan(Mode.SELECTIVE)} <= costs[key].keys():
            watched = _watched_seconds(full, key, device)
            points = operator_points(full, key).items()
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


def _watched_seconds(full: Reading, key: LayerKey, device: Device) -> float:
    """Return what it takes to keep outputs of a layer, and to hand them out. See `Device.selective_seconds`."""
    start, end = full.span(Region.FORWARD, key)
    events = (event for event in full.events[start : end + 1] if event.seconds and is_kept_selectively(event))
    return sum(full.weight(event) for event in events) * device.selective_seconds


def with_tiles(
    chain: Chain, model: nn.Module, step: Step, device: Device, *, allowed: Allowed = UNASKED, **structure: Any
) -> Chain:
    """Return a chain with the options of `TILED` too, from one more simulated step for each.

    Args:
        chain: of `chain_of`.
        model: see `chain_of`.
        step: see `chain_of`.
        device: see `chain_of`.
        allowed: see `chain_of`.
        structure: see `chain_of`.
    """
    if allowed.tiles is False:
        return chain
    costs: dict[LayerKey, _Options] = {(layer.stack, layer.layer_idx): dict(layer.costs) for layer in chain.layers}
    for option in TILED:
        plan = _tiled_plan(model, option, allowed, structure)
        if plan is not None:
            reading = _read(model, plan, replace(step, optim=None), device, structure)
            _add(costs, reading, plan, option)
    layers = tuple(replace(layer, costs=costs[layer.stack, layer.layer_idx]) for layer in chain.layers)
    return offloaded(replace(chain, layers=layers), device, allowed.offload_option)


def with_chunked_head(chain: Chain, model: nn.Module, step: Step, device: Device, **structure: Any) -> Chain | None:
    """Return a chain whose head is chunked, from one more simulated step; None where the head cannot be.

    Args:
        chain: of `chain_of`.
        model: see `chain_of`.
        step: see `chain_of`.
        device: see `chain_of`.
        structure: see `chain_of`.
    """
    # Layers in mode full are simulated fastest, and the head is the same.
    plan = _plan_of(model, Mode.FULL, structure, head="chunked") or _plan_of(
        model, Mode.NONE, structure, head="chunked"
    )
    if plan is None:
        return None
    reading = _read(model, plan, replace(step, optim=None), device, structure)
    return replace(
        chain,
        head_bytes=reading.head_bytes,
        head_left_bytes=reading.head_left_bytes,
        head_backward_bytes=reading.head_backward_bytes,
        other_seconds=chain.other_seconds + reading.head_seconds - chain.head_seconds,
        head_seconds=reading.head_seconds,
        head=HeadMode.CHUNKED,
    )


def _read(model: nn.Module, plan: Plan | None, step: Step, device: Device, structure: Any) -> Reading:
    return Reading(trace_step(model, plan, step, device, **structure).tape, step)


def _add(costs: Mapping[LayerKey, _Options], reading: Reading, plan: Plan, option: LayerPlan) -> None:
    """Enter what an option costs in the layers that a plan gives it to."""
    for key, options in costs.items():
        if plan.stacks[key[0]].layers[key[1]] == option:
            options[option] = reading.cost(key)


def _plan_of(model: nn.Module, mode: Mode, structure: Any, **options: Any) -> Plan | None:
    """Return the plan that has one mode everywhere, or None where the model cannot do it."""
    try:
        return make_plan(model, Policy.parse(mode.value, **options), **structure)
    except HFCkptError:
        return None


def _tiled_plan(model: nn.Module, option: LayerPlan, allowed: Allowed, structure: Any) -> Plan | None:
    """Return the plan with an option with tiles wherever it can be; None where that is nowhere."""
    template = _plan_of(model, Mode.NONE, structure)
    if template is None:
        return None
    stacks = tuple(
        StackPlan(of_stack.path, tuple(option if may_tile(layer, allowed) else NONE for layer in stack.layers))
        for of_stack, stack in zip(template.stacks, find_layers(model, **structure), strict=True)
    )
    if all(entry == NONE for stack in stacks for entry in stack.layers):
        return None
    try:
        return make_plan(model, replace(template, stacks=stacks), **structure)
    except HFCkptError:
        return None


def may_tile(layer: Layer, allowed: Allowed) -> bool:
    """Whether a plan may run a layer in tiles: it can be cut, and the step stays the same or another one is allowed.

    Args:
        layer: the layer.
        allowed: what a plan may hold.
    """
    if allowed.tiles is False:
        return False
    try:
        names = tiled_modules(layer)
    except UnsupportedError:
        return False
    # Where masks are drawn for each slice, the step is another one: that has to be allowed.
    return allowed.tiles is True or not random_modules(layer, names)
