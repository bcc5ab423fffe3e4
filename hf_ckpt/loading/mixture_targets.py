"""What LoRA is on in a mixture of experts where the user names nothing: the attention, and the experts if asked for.

PEFT's `all-linear` depends on the type of the mixture: of Mixtral, Qwen's and GLM's it takes experts and router too, of
gpt-oss neither, and of Llama 4 a router that it cannot adapt. What is said here is the same for all: the linear layers
of the attention (of the mixer in its place), the experts only if they are asked for, the router never.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from hf_ckpt.errors import HFCkptError
from hf_ckpt.loading.model import find_config, made
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.structure.attention_and_ffn import words_of
from hf_ckpt.structure.experts import names_of_experts
from hf_ckpt.structure.layers import Stack, find_layers


class MixtureTargets(NamedTuple):
    """What LoRA may be on in a mixture."""

    attention: tuple[str, ...]  # Names of linear layers, as `LoraConfig.target_modules` takes them.
    experts: tuple[str, ...]  # Names of parameters, as its `target_parameters` takes them.


def mixture_targets(recipe: Recipe) -> MixtureTargets | None:
    """Return what LoRA may be on in a recipe's model; None where that is no mixture, or its config is not to be had."""
    try:
        found = find_config(recipe)
        with torch.device("meta"):
            model = made(found.config, found.section, recipe)
        stacks = find_layers(model)
    except HFCkptError:
        # Whoever needs the model says what is wrong.
        return None
    experts = names_of_experts(stacks)
    return MixtureTargets(_attention_of(model, stacks), experts) if experts else None


def _attention_of(model: nn.Module, stacks: Iterable[Stack]) -> tuple[str, ...]:
    """Return names that PEFT finds the linear layers of the attention by, and no others."""
    inside: dict[str, str] = {}  # By path in the model: the name below the layer.
    for stack in stacks:
        if not names_of_experts([stack]):
            # A tower of images next to the mixture.
            continue
        for layer in stack.layers:
            for part in layer.attention:
                for path, module in layer.submodule(part).named_modules(prefix=part):
                    # JetMoe's attention has experts, and a router, of its own.
                    if isinstance(module, nn.Linear) and "router" not in words_of(path):
                        inside[f"{stack.path}.{layer.layer_idx}.{path}"] = path
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    others = [f".{path}" for path in linear if path not in inside]
    names: dict[str, None] = {}
    for path, below in inside.items():
        # As short as tells it from layers elsewhere: PEFT compares the ends of paths.
        ways = (below.rpartition(".")[2], below, path)
        names[next(each for each in ways if not any(other.endswith(f".{each}") for other in others))] = None
    return tuple(names)
