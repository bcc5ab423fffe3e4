"""How far a run with the plan may be from one without it: by no bit, but where the plan adds up in another order.

Tiles and the chunked head compute the same terms. A gradient of a weight is a sum over the sequence, there a sum of one
sum for each slice; and a matrix product over fewer rows may be blocked otherwise. Where random operators lie inside
tiles each slice draws masks of its own: then the reference runs in the same tiles, without recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import TrainingArguments

from hf_ckpt.patch.tileable import random_modules, tiled_modules
from hf_ckpt.policy.modifiers import HeadMode, Tiles
from hf_ckpt.policy.plan import Plan
from hf_ckpt.regions.tiling import Tiling, run_tiled
from hf_ckpt.structure.layers import Layer, Stack

FLOAT32 = 1e-6
"""Relative: a few units in the last place."""
HALF = 2.0**-6
"""Relative: two units in the last place of bfloat16, to which products and their gradients are rounded."""


REPEATED = 1e-5
"""Relative, where a recipe in half precision is repeated in float32: enough for any shape, and a hundredth of what is
looked for there, a loss that is off by a thousandth."""


@dataclass(frozen=True)
class Leeway:
    """Relative errors that are no fault.

    Args:
        first: of losses and gradients in the first optimizer step, which begins with the same weights.
        what: what in the plan adds up in another order.
    """

    first: float
    what: str

    @property
    def later(self) -> float:
        """Errors of what follows: half of the digits, as the optimizer magnifies the last of them."""
        return float(self.first**0.5)


def leeway_of(plan: Plan, stacks: Sequence[Stack], model: nn.Module, args: TrainingArguments) -> Leeway | None:
    """Return what a plan is allowed; None where it is exact.

    Args:
        plan: what is in force.
        stacks: the layers.
        model: tells the dtype.
        args: tell whether half precision is used beside it.
    """
    what = ["the chunked head"] if plan.head is HeadMode.CHUNKED else []
    if any(True for _ in _in_tiles(plan, stacks)) and not draws_in_tiles(plan, stacks):
        what.insert(0, "tiles")
    if not what:
        return None
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    is_half = args.bf16 or args.fp16 or not dtypes.isdisjoint({torch.bfloat16, torch.float16})
    return Leeway(HALF if is_half else FLOAT32, " and ".join(what))


def draws_in_tiles(plan: Plan, stacks: Sequence[Stack]) -> bool:
    """Tell whether random operators lie inside what runs in tiles."""
    return any(random_modules(layer, tiled_modules(layer)) for layer, _ in _in_tiles(plan, stacks))


def slice_alike(plan: Plan, stacks: Sequence[Stack]) -> None:
    """Let a model without the plan run in its tiles, without recomputing anything."""
    modules = {
        layer.submodule(name): tiles for layer, tiles in _in_tiles(plan, stacks) for name in tiled_modules(layer)
    }
    for module, tiles in modules.items():
        found = module.__dict__.get("forward")
        module.forward = partial(run_tiled, Tiling(tiles, recomputes=False), module, found)


def _in_tiles(plan: Plan, stacks: Sequence[Stack]) -> Iterator[tuple[Layer, Tiles]]:
    """Yield the layers that run in more than one slice."""
    for planned, stack in zip(plan.stacks, stacks, strict=True):
        for entry, layer in zip(planned.layers, stack.layers, strict=True):
            if entry.tiles not in (None, 1):
                yield layer, entry.tiles
