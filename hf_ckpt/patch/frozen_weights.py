"""Which layers of a plan have their frozen weights wait on the host, and what of the model knows of it.

The copies, and their order, are `regions.waiting_weights`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.distributed import deepspeed
from hf_ckpt.errors import PolicyError, UnsupportedError
from hf_ckpt.patch.stack_patch import StackPatch
from hf_ckpt.policy.options import EmbeddingPlace, Weights
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import Policy
from hf_ckpt.regions.waiting_weights import (
    LayerWeights,
    Table,
    WaitingWeights,
    has_no_values,
    owners_of,
    tables_of,
    waiting_tensors,
)
from hf_ckpt.structure.four_bit_tensor import holder_of
from hf_ckpt.structure.layers import Layer, Stack, class_name, is_sharded
from hf_ckpt.structure.stored import stored
from hf_ckpt.upstream.bitsandbytes import move_statistics
from hf_ckpt.upstream.torch import COMPILED_CALL, COMPILED_INSIDE, DDP_IGNORES

logger = logging.getLogger(__name__)

# On a layer, between two plans of which one takes the other's place: what waits of it.
_HANDED_OVER = "_hf_ckpt_waiting_weights"
_APPLY = "_apply"


def layers_that_wait(plan: Plan, stacks: Sequence[Stack]) -> list[tuple[str, Layer, Weights]]:
    """Return the layers whose weights wait, each once, with their paths, in the order of stacks and layers."""
    found: dict[nn.Module, tuple[str, Layer, Weights]] = {}
    for stack_plan, stack in zip(plan.stacks, stacks, strict=True):
        for entry, layer in zip(stack_plan.layers, stack.layers, strict=True):
            if entry.weights is not None:
                found.setdefault(layer.module, (f"{stack.path}.{layer.layer_idx}", layer, entry.weights))
    return list(found.values())


def check_weights(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> None:
    """Refuse weights that cannot wait on the host.

    Raises:
        PolicyError: two rules want it differently.
        UnsupportedError: an engine shards the weights, or a compiler has the layers.
    """
    waiting = layers_that_wait(plan, stacks)
    if not waiting and plan.embedding is EmbeddingPlace.DEVICE:
        return
    settings = list(dict.fromkeys(each for _, _, each in waiting))
    if len(settings) > 1:
        raise PolicyError(
            f"Rules differ in weights: {', '.join(str(each.to_dict()) for each in settings)}. One engine moves the "
            "weights of all layers: write the same in each rule."
        )
    if is_sharded(model) or deepspeed.is_sharded(model):
        engine, its_own = ("FSDP", "fsdp_offload_params: true") if is_sharded(model) else ("ZeRO-3", "offload_param")
        raise UnsupportedError(
            f"The policy lets frozen weights wait on the host (weights or embedding: cpu), but {engine} shards them "
            f"over the ranks and gathers them by itself. Leave that out. {engine} has an offload of its own: {its_own}."
        )
    for path, layer, _ in waiting:
        if any(COMPILED_INSIDE in each._modules or stored(each, COMPILED_CALL) for each in layer.module.modules()):
            raise UnsupportedError(
                f"{path} is compiled, and a compiled layer reads its weights where they were when it was compiled: "
                "they cannot wait on the host (weights: cpu). Leave weights out there, or do not compile."
            )


def with_embedding(plan: Plan, policy: Policy | Plan, model: nn.Module, stacks: Sequence[Stack]) -> Plan:
    """Return the plan with the embedding where it can be: on the device where it cannot wait and nobody asked for it.

    Raises:
        UnsupportedError: it cannot wait, and is to by name.
    """
    if plan.embedding is EmbeddingPlace.DEVICE:
        return plan
    tables = tables_outside(model, stacks)
    if any(table.reason_to_stay is None for table in tables):
        return plan
    if policy.embedding is not EmbeddingPlace.CPU:
        return replace(plan, embedding=EmbeddingPlace.DEVICE)
    why = "; ".join(f"{table.path} is {table.reason_to_stay}" for table in tables)
    raise UnsupportedError(
        "The policy lets the input embedding wait on the host (embedding: cpu), but it cannot: "
        f"{why or f'{class_name(model)} does not name one'}. Leave embedding out."
    )


def tables_outside(model: nn.Module, stacks: Sequence[Stack]) -> list[Table]:
    """Return the embeddings outside of the layers, see `tables_of`."""
    return tables_of(model, (module for stack in stacks for layer in stack.layers for module in layer.module.modules()))


def let_weights_wait(
    model: nn.Module, patches: Sequence[StackPatch], plan: Plan, stacks: Sequence[Stack], *, proves: bool
) -> None:
    """Move frozen weights of the plan's layers, and embeddings, to the host, and hook them. `proves`: see `pack`."""
    waiting = layers_that_wait(plan, stacks)
    if not (waiting or plan.embedding is EmbeddingPlace.CPU) or has_no_values(model):
        return
    owners, layers, staying = owners_of(model), list[LayerWeights](), dict[str, str]()
    for path, layer, _ in waiting:
        found = _taken_over(layer.module)
        if found is None:
            tensors, reasons = waiting_tensors(layer.module, owners)
            staying.update({f"{path}.{name}": reason for name, reason in reasons.items()})
            found = LayerWeights(path, tensors, _device_of(tensors))
        layers.append(found)
    if waiting and not any(each.names for each in layers):
        why = "; ".join(f"{name} is {reason}" for name, reason in staying.items())
        raise UnsupportedError(
            f"The policy lets frozen weights wait on the host (weights: cpu), but the {len(layers)} layers that it "
            f"reaches have none that could: {why or 'their weights are trained'}. Leave weights out."
        )
    tables = _tables(model, plan, stacks, staying)
    if staying:
        why = "; ".join(f"{name} ({reason})" for name, reason in list(staying.items())[:3])
        logger.info("%d weights stay on the device: %s%s", len(staying), why, "; ..." if len(staying) > 3 else ".")
    engine = WaitingWeights(waiting[0][2] if waiting else Weights(), layers, tables)
    engine.modules = tuple(layer.module for _, layer, _ in waiting)
    patches[0].waiting = engine
    engine.pack(proves=proves)
    moved = {id(tensor) for each in engine.weights for tensor in each.tensors()}
    # DDP refuses parameters on two kinds of devices. These do not train. Each by all of its names.
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if id(each) in moved]
    patches[0].set("", model, DDP_IGNORES, [*getattr(model, DDP_IGNORES, ()), *names])
    for each, (path, layer, _) in zip(layers, waiting, strict=True):
        patches[0].set(path, layer.module, _APPLY, partial(_apply_to_others, each, layer.module))
    for each, modules in tables:
        for module in modules:
            patches[0].set(each.name, module, _APPLY, partial(_apply_to_others, each, module, pack=engine.pack_one))
    patches[0].hooks.extend(engine.place_hooks())


def _tables(
    model: nn.Module, plan: Plan, stacks: Sequence[Stack], staying: dict[str, str]
) -> list[tuple[LayerWeights, tuple[nn.Module, ...]]]:
    """Return the embeddings that wait under a plan, and their modules; `staying` gets the reasons of others."""
    tables = []
    for table in tables_outside(model, stacks):
        if table.reason_to_stay is not None:
            staying[table.path] = table.reason_to_stay
        elif plan.embedding is EmbeddingPlace.CPU:
            left = [_taken_over(module) for module in table.modules]
            tables.append((next(filter(None, left), None) or table.weights(), table.modules))
    return tables


def let_wait_until_planned(model: nn.Module, stacks: Sequence[Stack], device: torch.device) -> None:
    """Leave the frozen weights of a model's layers, and embeddings, on the host when the model is moved to a device.

    For a model that was loaded onto the host, as there may be no room for it on the device. The plan that is put in
    force next lets them wait, or brings them to the device.
    """
    owners = owners_of(model)
    for stack in stacks:
        for layer in stack.layers:
            tensors, _ = waiting_tensors(layer.module, owners)
            weights = LayerWeights(f"{stack.path}.{layer.layer_idx}", tensors, _device_of(tensors))
            setattr(layer.module, _HANDED_OVER, weights)
            setattr(layer.module, _APPLY, partial(_apply_to_others, weights, layer.module))
    pack = WaitingWeights(Weights(), ()).pack_one
    for table in tables_outside(model, stacks):
        if table.reason_to_stay is None:
            weights = table.weights()
            for module in table.modules:
                setattr(module, _HANDED_OVER, weights)
                # Others take the device of a model from it: it is not left for the plan to pack.
                setattr(module, _APPLY, partial(_apply_to_others, weights, module, pack=pack))
    model.to(device)


def bring_what_is_left(model: nn.Module) -> None:
    """Bring weights to the device that were to wait until a plan is in force, and that the plan does not let wait."""
    for module in () if has_no_values(model) else model.modules():
        weights = _taken_over(module)
        if weights is not None:
            weights.bring_back()


def _taken_over(module: nn.Module) -> LayerWeights | None:
    """Return what waits of a layer from before the plan, with all else of the layer on the device that it runs on."""
    weights: LayerWeights | None = vars(module).pop(_HANDED_OVER, None)
    if weights is not None and not weights.is_packed:
        # Adapters that came since were made where their weights are. By the layer's own, which leaves what waits.
        module._apply(partial(Tensor.to, device=weights.device))  # type: ignore[no-untyped-call]  # torch's
    if weights is not None:
        vars(module).pop(_APPLY, None)
    return weights


@contextmanager
def handed_over(waiting: WaitingWeights | None) -> Iterator[None]:
    """Let the plan that is put in force in the block find the weights where they wait: there may be no room for them.

    What it does not let wait is brought back. The plan before it is removed in the block.
    """
    if waiting is None:
        yield
        return
    waiting.is_handed_over = True
    found = dict(zip(waiting.modules, waiting.layers, strict=True))
    found |= {module: table for table, modules in waiting.tables for module in modules}
    for module, weights in found.items():
        setattr(module, _HANDED_OVER, weights)
    try:
        yield
    finally:
        left = {vars(module).pop(_HANDED_OVER, None): None for module in found}
        for weights in filter(None, left):
            weights.bring_back()


def _device_of(tensors: Sequence[tuple[str, list[Tensor]]]) -> torch.device:
    return tensors[0][1][0].device if tensors else torch.device("cpu")


def _apply_to_others(
    weights: LayerWeights,
    layer: nn.Module,
    fn: Callable[[Tensor], Tensor],
    recurse: bool = True,
    *,
    pack: Callable[[LayerWeights], None] | None = None,
) -> nn.Module:
    """`_apply` of a layer, which `to` and the like call: what waits stays on the host, for the layer's new device.

    `pack` packs it anew if need be, which else happens when it is next used.
    """
    before = weights.device
    weights.convert(fn)
    if pack is not None:
        pack(weights)
    waiting = {id(tensor) for tensor in weights.tensors()}
    found = [
        (module, name, parameter)
        for module in layer.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and id(holder_of(parameter)) in waiting
    ]
    if weights.device != before:
        for module, _, parameter in found:
            move_statistics(module, parameter, weights.device)
    # In place of each for a while, so that the parameters keep their order.
    for module, name, _ in found:
        module._parameters[name] = None
    try:
        _apply(layer, fn, recurse)
    finally:
        for module, name, parameter in found:
            module._parameters[name] = parameter
    return layer


def _apply(module: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> None:
    """Run the `_apply` of a module's class: `to` and the like."""
    type(module)._apply(module, fn, recurse)
