"""Regions inside of what torch.compile compiles: left to the compiler if its backend brings back random numbers.

A backend that goes through AOTAutograd does. One that runs the graph as it is, as `eager` and backends for looking at
graphs do, runs torch's checkpoint in it without its random state, so that dropout draws other masks in backward: wrong
gradients at the same loss. There regions run uncompiled, and are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_ckpt.regions.arguments import is_cache
from hf_ckpt.regions.execution_state import Function
from hf_ckpt.upstream.torch import IS_CONSTANT, brings_back_random_numbers
from hf_ckpt.upstream.transformers import READS_CACHE_ONLY


def recompute_compiled(recompute_eagerly: Function, function: Function, *args: Any, **options: Any) -> Any:
    """Let the compiler that traces this recompute `function(*args)`; `recompute_eagerly` does it where it cannot."""
    if not is_exact_when_compiled():
        return run_uncompiled(recompute_eagerly, function, *args)
    # A compiler traces into torch's checkpoint, and takes all that its function closes over for an input.
    if isinstance(function, partial):
        if getattr(type(function.args[0]) if function.args else None, READS_CACHE_ONLY, False):
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **options)
        keywords = {name: None if is_cache(value) else value for name, value in function.keywords.items()}
        function = partial(function.func, *function.args, **keywords)
    args = tuple([None if is_cache(value) else value for value in args])
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def run_uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` eagerly inside of what is compiled."""
    return function(*args)


def is_exact_when_compiled() -> bool:
    """Whether the backend that compiles now brings back random numbers, as far as that is known."""
    # The compiler asks once for each graph: graphs belong to a backend.
    return brings_back_random_numbers()


# `torch.compiler.assume_constant_result`, which imports the compiler.
setattr(is_exact_when_compiled, IS_CONSTANT, True)
