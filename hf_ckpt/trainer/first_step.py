"""What really ran in the first step, held against the plan.

Hooks on the modules inside each layer count forward entries, those of backward (recomputation) apart; hooks on
outputs note whether a gradient came by at all. Nothing here relies on the regions reporting on themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.patch.tileable_modules import tiled_modules
from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.regions.execution_state import is_in_backward, tensors_in
from hf_ckpt.structure.layers import Layer, Stack
from hf_ckpt.structure.stored import stored

_TILES = "tiles"
"""The region of what runs in tiles besides the ffn: norms and linear projections, with adapters in them."""
_REGIONS = ("layer", "attention", "ffn", _TILES)
_SHOWN = 4
"""Parameters that a message names; more would bury the sentence."""


class FirstStep:
    """Watches one optimizer step of a model, from `start` to `finish`, and holds it against the plan."""

    def __init__(self, model: nn.Module, plan: Plan, stacks: Sequence[Stack]) -> None:
        self._layers = [
            (stack, layer, entry)
            for stack, planned in zip(stacks, plan.stacks, strict=True)
            for layer, entry in zip(stack.layers, planned.layers, strict=True)
        ]
        self._modules = {
            (number, region): _modules_of(layer, region, entry)
            for number, (_, layer, entry) in enumerate(self._layers)
            for region in _REGIONS
        }
        self._owners = _owners_of_trainable(model)
        self._in_tiles = {
            module
            for _, layer, entry in self._layers
            if entry.tiles is not None
            for name in tiled_modules(layer)
            for module in layer.submodule(name).modules()
        }
        self._hooks: list[RemovableHandle] = []
        self._entries: Counter[tuple[int, str, bool]] = Counter()
        self._has_gradient: set[nn.Module] = set()
        self._buffers: dict[int, list[tuple[str, Tensor, int]]] = {}
        self._is_cut_off: set[nn.Module] = set()
        self._accumulated: set[nn.Parameter] = set()

    def start(self) -> None:
        """Place the hooks."""
        for key, modules in self._modules.items():
            # The children, not the part: a part that is recomputed is entered once, its children twice.
            for child in chain.from_iterable(map(_called_children, modules)):
                self._hooks.append(child.register_forward_pre_hook(partial(self._count, key)))
        for number, (_, layer, entry) in enumerate(self._layers):
            if entry.recomputes and any(True for _ in layer.module.buffers()):
                self._hooks.append(layer.module.register_forward_hook(partial(self._note_buffers, number)))
        for module in {*chain.from_iterable(self._modules.values()), *self._owners}:
            self._hooks.append(module.register_forward_hook(self._watch_output))
        for parameter in {parameter for named in self._owners.values() for parameter in named.values()}:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulated.add))  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def finish(self) -> list[str]:
        """Take the hooks off and return a message for each thing that is not as planned."""
        self.stop()
        return [*self._recomputation_faults(), *self._buffer_faults(), *self._gradient_faults()]

    def _count(self, key: tuple[int, str], module: nn.Module, args: Any) -> None:
        if _is_seen():
            self._entries[*key, is_in_backward()] += 1

    def _watch_output(self, module: nn.Module, args: Any, output: Any) -> None:
        # What ran in tiles runs again in a graph of its own, and only that one has a backward.
        if not _is_seen() or (is_in_backward() and module not in self._in_tiles):
            return
        floating = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        for tensor in floating:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._has_gradient.add(module))  # type: ignore[no-untyped-call]
        if floating and not any(tensor.requires_grad for tensor in floating):
            self._is_cut_off.add(module)

    def _note_buffers(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if not is_in_backward():
            self._buffers[number] = [(name, buffer, buffer._version) for name, buffer in module.named_buffers()]

    def _buffer_faults(self) -> Iterator[str]:
        for number, noted in self._buffers.items():
            stack, layer, entry = self._layers[number]
            now = dict(layer.module.named_buffers())
            changed = [
                name for name, buffer, version in noted if now.get(name) is not buffer or buffer._version != version
            ]
            if changed:
                yield (
                    f'Layer {layer.layer_idx} of {stack.path} is set to "{_shown(entry)}", but its recomputation wrote '
                    f"to {_listed(changed[:_SHOWN])} a second time. Leave the layer out of the policy."
                )

    def _recomputation_faults(self) -> Iterator[str]:
        seen: dict[tuple[str, str], list[int]] = {}
        for number, (stack, layer, entry) in enumerate(self._layers):
            for fault in self._faults_of(number, layer, entry):
                seen.setdefault((stack.path, fault), []).append(layer.layer_idx)
        for (path, fault), indices in seen.items():
            several = len(indices) > 1
            yield f"Layer{'s' * several} {_listed(indices)} of {path} {'are' if several else 'is'} {fault}"

    def _faults_of(self, number: int, layer: Layer, entry: LayerPlan) -> Iterator[str]:
        for region, is_planned in _planned(layer, entry):
            forward, backward = (self._entries[number, region, in_backward] for in_backward in (False, True))
            what = "a forward" if region == "layer" else f"the forward of {region}"
            if backward and not is_planned:
                yield (
                    f'set to "{_shown(entry)}", but {what} ran again in the backward of step 1. Another library\'s '
                    "activation checkpointing is on too. Turn it off."
                )
                return
            # Without a gradient at its output a region has no backward, and so no reason to be recomputed.
            reached = not self._has_gradient.isdisjoint(self._modules[number, region])
            if is_planned and forward and not backward and reached:
                yield (
                    f'set to "{_shown(entry)}", but {what} ran once in step 1 (twice expected). Its checkpoint '
                    "function was replaced after the policy was applied. Apply the policy after that call."
                )

    def _gradient_faults(self) -> Iterator[str]:
        lost: dict[str, nn.Parameter] = {}
        for module in self._owners.keys() & (self._has_gradient | self._is_cut_off):
            lost.update((name, p) for name, p in self._owners[module].items() if not self._got_gradient(p))
        if lost:
            names = sorted(lost)
            yield (
                f"{len(lost)} trainable parameter{'s' * (len(lost) > 1)} got no gradient in step 1 although the module "
                f"ran: {_listed(names[:_SHOWN])}{' ...' * (len(lost) > _SHOWN)}. Its output does not depend on "
                f"{'them' if len(lost) > 1 else 'it'}: is an adapter disabled, or something detached?"
            )

    def _got_gradient(self, parameter: nn.Parameter) -> bool:
        # Some engines have taken the gradient away by now; of what FSDP1 leaves to other ranks, none comes here. What
        # ZeRO-3 has emptied is whole in backward, on every rank.
        is_elsewhere = not parameter.numel() and not hasattr(parameter, "ds_id")
        return parameter.grad is not None or parameter in self._accumulated or is_elsewhere


def _called_children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        # Lists have no forward of their own (T5 keeps the parts of a layer in one).
        yield from _called_children(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else (child,)


def _modules_of(layer: Layer, region: str, entry: LayerPlan) -> list[nn.Module]:
    if region == "layer":
        return [layer.module]
    if region == _TILES:
        names = [] if entry.tiles is None else [name for name in tiled_modules(layer) if name not in layer.ffn]
    else:
        names = getattr(layer, region)
    return [layer.submodule(name) for name in names]


def _shown(entry: LayerPlan) -> str:
    return f"{entry.mode}" if entry.tiles is None else f"{entry.mode}, tiles {entry.tiles}"


def _planned(layer: Layer, entry: LayerPlan) -> list[tuple[str, bool]]:
    """Return which regions of a layer should run again in backward, and which should not."""
    if stored(layer.module, "backward_pass") is not None:
        # A reversible layer (Reformer's) recomputes by itself, under any plan.
        return []
    is_tiled = entry.tiles is not None
    in_tiles = [(_TILES, True)] if is_tiled else []
    match entry.mode:
        case Mode.FULL | Mode.SELECTIVE | Mode.SELECTIVE_ATTENTION:
            # The forward of all children is repeated also where the outputs of their operators are kept.
            return [("layer", True), *in_tiles]
        case Mode.NONE:
            return [("layer", False), ("attention", False), ("ffn", is_tiled), *in_tiles]
        case Mode.FFN if layer.ffn_is_inline:
            return [("layer", True), ("attention", False)]
        case _:
            is_ffn = is_tiled or entry.mode is Mode.FFN
            return [("attention", entry.mode is Mode.ATTENTION), ("ffn", is_ffn), *in_tiles]


def _owners_of_trainable(model: nn.Module) -> dict[nn.Module, dict[str, nn.Parameter]]:
    """Return the modules whose output depends on trainable parameters whenever they run, with those parameters.

    These are modules without children, and modules around a frozen one of their own (PEFT's `base_layer`). Of other
    modules with children it is not known: a mixture has idle experts.
    """
    owners: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        if isinstance(stored(module, "base_layer"), nn.Module):
            names = [name for name, _ in module.named_parameters() if not name.startswith("base_layer.")]
        elif not any(True for _ in module.children()):
            names = [name for name, _ in module.named_parameters(recurse=False)]
        else:
            continue
        named = {f"{path}.{name}".lstrip("."): module.get_parameter(name) for name in names}
        if trainable := {name: p for name, p in named.items() if p.requires_grad and p.is_leaf}:
            owners[module] = trainable
    return owners


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _is_seen() -> bool:
    # A compiled graph runs no hooks: there nothing is counted, and so nothing is held against the plan.
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()
