"""What really ran in the first step, held against the plan.

Hooks on the modules inside each layer count forward entries, those of backward (recomputation) apart; hooks on
outputs tell whether a gradient came by at all. Nothing here relies on the regions reporting on themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.layers import Layer, Stack
from hf_ckpt.plans import LayerPlan, Plan
from hf_ckpt.policy import Mode
from hf_ckpt.regions.call import tensors_of


class FirstStep:
    """Watches one optimizer step, from `start` to `finish`.

    Args:
        model: the model as it is trained.
        plan: what should happen.
        stacks: the stacks that the plan was made for.
    """

    def __init__(self, model: nn.Module, plan: Plan, stacks: Sequence[Stack]) -> None:
        self._model = model
        self._layers = [
            (stack, layer, entry)
            for stack, planned in zip(stacks, plan.stacks, strict=True)
            for layer, entry in zip(stack.layers, planned.layers, strict=True)
        ]
        self._hooks: list[RemovableHandle] = []
        self._entries: Counter[tuple[int, str, bool]] = Counter()
        self._has_gradient: set[nn.Module] = set()
        self._accumulated: set[nn.Parameter] = set()

    def start(self) -> None:
        """Place the hooks."""
        for number, (_, layer, _) in enumerate(self._layers):
            self._hooks.append(layer.module.register_forward_hook(self._watch_output))
            for region, module in _probes(layer):
                self._hooks.append(module.register_forward_pre_hook(partial(self._count, (number, region))))
        for module in _trainable_leaves(self._model):
            self._hooks.append(module.register_forward_hook(self._watch_output))
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulated.add))  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def finish(self) -> list[str]:
        """Take the hooks off and return what is not as planned, in words."""
        self.stop()
        return [*self._recomputation_faults(), *self._gradient_faults()]

    def _count(self, key: tuple[int, str], module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._entries[*key, _in_backward()] += 1

    def _watch_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if _in_backward() or not torch.is_grad_enabled():
            return
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note_gradient, module))  # type: ignore[no-untyped-call]

    def _note_gradient(self, module: nn.Module, gradient: Tensor) -> None:
        self._has_gradient.add(module)

    def _recomputation_faults(self) -> Iterator[str]:
        seen: dict[str, list[str]] = {}
        for number, (stack, layer, entry) in enumerate(self._layers):
            fault = self._fault_of(number, layer, entry) if layer.module in self._has_gradient else None
            if fault is not None:
                seen.setdefault(f"{stack.path}: {fault}", []).append(str(layer.layer_idx))
        for fault, indices in seen.items():
            where, _, what = fault.partition(": ")
            yield f"Layer{'s' if len(indices) > 1 else ''} {', '.join(indices)} of {where} {what}"

    def _fault_of(self, number: int, layer: Layer, entry: LayerPlan) -> str | None:
        for region, is_planned in _planned(layer, entry):
            forward, backward = (self._entries[number, region, in_backward] for in_backward in (False, True))
            if not forward or bool(backward) == is_planned:
                continue
            which = "its forward" if region == "layer" else f"the forward of its {region}"
            if is_planned:
                return (
                    f'set to "{entry.mode}", but {which} ran once in step 1 (twice expected). Its checkpoint '
                    "function was replaced after the policy was applied. Apply the policy after that call."
                )
            return (
                f'set to "{entry.mode}", but {which} ran twice in step 1 (once expected). Another library\'s '
                "activation checkpointing is on beside the plan. Turn it off."
            )
        return None

    def _gradient_faults(self) -> Iterator[str]:
        lost = [
            name
            for module, names in _trainable_leaves(self._model).items()
            if module in self._has_gradient
            for name, parameter in names
            if parameter.grad is None and parameter not in self._accumulated
        ]
        if lost:
            yield (
                f"{len(lost)} trainable parameters got no gradient in step 1 although a gradient reached the output of "
                f"their module: {', '.join(lost[:4])}{' ...' if len(lost) > 4 else ''}. Something between forward and "
                "backward detached or replaced them."
            )
        for stack, layer, _ in self._layers:
            own = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
            reached = layer.module in self._has_gradient
            if own and reached and not any(p.grad is not None or p in self._accumulated for p in own):
                yield (
                    f"Layer {layer.layer_idx} of {stack.path} has {len(own)} trainable parameters, but none got a "
                    "gradient in step 1. Its output does not depend on them: is an adapter disabled or detached?"
                )


def _probes(layer: Layer) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose forward entries tell that the layer, or a part of it, ran.

    The children of a part are asked, not the part: a part that is recomputed is entered once, its children twice.
    """
    for child in layer.module.children():
        yield "layer", child
    for part in ("attention", "ffn"):
        for name in getattr(layer, part):
            for child in layer.module.get_submodule(name).children():
                yield part, child


def _planned(layer: Layer, entry: LayerPlan) -> list[tuple[str, bool]]:
    """Return which regions of a layer should run again in backward, and which should not."""
    match entry.mode:
        case Mode.FULL:
            return [("layer", True)]
        case Mode.NONE:
            return [("layer", False), ("attention", False), ("ffn", False)]
        case Mode.FFN if layer.ffn_is_inline:
            return [("layer", True), ("attention", False)]
        case _:
            return [("attention", entry.mode is Mode.ATTENTION), ("ffn", entry.mode is Mode.FFN)]


def _trainable_leaves(model: nn.Module) -> dict[nn.Module, list[tuple[str, nn.Parameter]]]:
    """Return the modules without children that own trainable parameters, with the parameters' names.

    A module with children may own parameters that it does not use in every forward.
    """
    leaves: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {}
    for path, module in model.named_modules():
        named = [(f"{path}.{name}", p) for name, p in module.named_parameters(recurse=False) if p.requires_grad]
        if named and not any(True for _ in module.children()):
            leaves[module] = named
    return leaves


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
