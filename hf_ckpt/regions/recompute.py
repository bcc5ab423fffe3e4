"""Recompute a whole region in backward: keep its inputs, drop everything else.

A region is a layer (through the seam of transformers, or an instance forward) or a part of one (instance forward).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_ckpt.regions.call import Function, keeps_activations, take_apart
from hf_ckpt.regions.threads import OneOfSeveral
from hf_ckpt.regions.transforms import refuse_transforms

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import CallProof, RegionProof


def recompute(function: Function, *args: Any, proof: RegionProof | None = None) -> Any:
    """Run `function(*args)` and recompute it in backward.

    Non-reentrant, and the random state of the forward is brought back: with dropout anything else gives wrong
    gradients and the same loss. Costs one more forward of the region.

    Args:
        function: a callable, or a `partial` that carries the keyword arguments, as the seam of transformers hands it.
        args: positional arguments.
        proof: looks at whether the recomputation gives what the forward gave.
    """
    if torch.compiler.is_compiling():
        # A compiler looks into torch's checkpoint, and takes all that its function closes over for an input. It brings
        # back random numbers by itself, but under its backend "eager" (`refusals.check_compiler`).
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True)
    refuse_transforms()
    call, tensors = take_apart(function, args)
    looked = None if proof is None else proof.watch(function, tensors)
    returned = run_proven(looked, call.run, tensors)
    if looked is not None:
        looked.look_at_graph(function, args, returned)
    return returned


def run_proven(proof: CallProof | None, run: Function, tensors: Sequence[Any], **options: Any) -> Any:
    """Run `run(*tensors)` under torch's checkpoint; to the end in recomputation too, where that is looked at.

    Args:
        proof: looks at it.
        run: the region.
        tensors: that it is given.
        options: of torch's checkpoint.
    """
    # From where the state of the generators is read.
    with OneOfSeveral():
        if proof is None:
            return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=True, **options)
        stops = not proof.runs_to_end
        run = partial(proof.run, run)
        return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=True, early_stop=stops, **options)


def run_region(region: Function, module: nn.Module, found: Function | None, *args: Any, **kwargs: Any) -> Any:
    """Instance `forward` of a module that becomes a region.

    Args:
        region: `recompute`, or another function with its signature.
        module: the module whose forward this is.
        found: the forward that stood on the instance before, or None for the class's own.
        *args: what the forward takes.
        **kwargs: what the forward takes.
    """
    forward = original_forward(module, found)
    if not keeps_activations(module):
        return forward(*args, **kwargs)
    return region(partial(forward, **kwargs), *args)


def original_forward(module: nn.Module, found: Function | None) -> Function:
    """Return the forward that the module had: looked up on the class at each call, so that a copy runs itself."""
    return found if found is not None else partial(type(module).forward, module)
