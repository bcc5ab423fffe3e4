"""Every number that an adapter is announced to train gets a gradient in the first step, or the run stops.

PEFT says how many numbers train, and nobody notices that some of them never do: behind a forward that detaches, or in
an adapter of a parameter that something else has replaced. The gradient may be zero, as that of LoRA's A is while B is
zero, and as that of experts is that no token reached: they are rows of one parameter, which has a gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_ckpt.errors import RecipeError
from hf_ckpt.trainer.first_step import got_gradient
from hf_ckpt.upstream.peft import ACTIVATED_VARIANT

_SHOWN = 4  # Names in a message; more would bury the sentence.


class AdapterGradients(TrainerCallback):
    """Looks at the first step of a run.

    A module that ran with its adapter in force and gave it no gradient, though others of its decoder layer got theirs,
    ends the run. What did not run may run in a later step: experts of a list that no token reached, layers that are
    dropped at random, a tower without an image. That is only said. With `torch_compile` no module tells that it runs.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._hooks: list[RemovableHandle] | None = None  # None before the first step.
        self._has_run: set[str] = set()
        self._accumulated: set[nn.Parameter] = set()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Place hooks before the first step: the model is wrapped and sharded by now."""
        if self._hooks is not None:
            return
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated.add)
            for parameter in model.parameters()
            if parameter.requires_grad and parameter.is_leaf
        ]
        if not args.torch_compile:
            for path, layer in _adapted_layers(model):
                self._hooks.append(layer.register_forward_pre_hook(partial(self._note, path)))

    def _note(self, path: str, layer: Any, args: Any) -> None:
        # An adapter that is off, as for the reference of DPO, or merged adds nothing; one that acts behind certain
        # tokens adds nothing where these do not come.
        variants = getattr(layer, "lora_variant", {})
        is_activated = any(type(each).__name__ == ACTIVATED_VARIANT for each in variants.values())
        if torch.is_grad_enabled() and not (layer.disable_adapters or layer.merged or is_activated):
            self._has_run.add(path)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Hold the first step's gradients against what is trained."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        without = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.is_leaf and not got_gradient(parameter, self._accumulated)
        }
        if not without:
            return
        by_layer = {name: path for path, layer in _adapted_layers(model) for name in _own_parameters(path, layer)}
        # Of a decoder layer that nothing asks, such as the last one of LLaVA's tower, no adapter gets one.
        reached = {_block_of(name) for name in by_layer if name not in without}
        lost = [name for name in without if by_layer.get(name) in self._has_run and _block_of(name) in reached]
        if lost:
            raise RecipeError(
                f"{_counted(lost, without)} got no gradient in step 1, though what they are on ran: they would never "
                "train. Something behind it detaches, or has replaced what the adapter is on. Leave these out of "
                "target_modules or target_parameters."
            )
        self._say(
            f"{_counted(list(without), without)} got no gradient in step 1: what they belong to did not run, or "
            "nothing asked for it. That is usual for experts that no token reached, and for layers that are left out."
        )


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return ((path, each) for path, each in model.named_modules() if isinstance(each, BaseTunerLayer))


def _own_parameters(path: str, layer: Any) -> Iterator[str]:
    """Yield the names of the parameters that an adapter in force adds to a layer."""
    active = layer.active_adapters
    for group in layer.adapter_layer_names:
        added = getattr(layer, group, None)
        if not isinstance(added, nn.ModuleDict | nn.ParameterDict):
            continue
        for name, _ in added.named_parameters():
            if name.partition(".")[0] in active:
                yield f"{path}.{group}.{name}"


def _block_of(name: str) -> str:
    """Return the path of the decoder layer that a parameter belongs to, which has a number; else of what it is on."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name.rpartition(".lora_")[0]


def _counted(names: list[str], parameters: dict[str, nn.Parameter]) -> str:
    numbers = sum(parameters[name].numel() for name in names)
    shown = ", ".join(sorted(names)[:_SHOWN]) + " ..." * (len(names) > _SHOWN)
    return f"{len(names)} trained parameter{'s' * (len(names) > 1)} with {numbers:,} numbers ({shown})"
