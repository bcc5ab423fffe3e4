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

from hf_ckpt.regions.arguments import READS_CACHE_ONLY, is_cache
from hf_ckpt.regions.execution_state import Function

_AOT_BACKENDS = ("aot_eager", "aot_eager_decomp_partition", "aot_eager_decomp_partition_with_mode", "cudagraphs")
"""Of `torch._dynamo.backends`."""


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
    """Whether the backend that compiles now brings back random numbers, as far as that is known.

    The compiler asks once for each graph: graphs belong to a backend.
    """
    # At import time it takes seconds.
    from torch._dynamo.backends.common import AotAutograd
    from torch._dynamo.eval_frame import innermost_backend
    from torch._dynamo.symbolic_convert import tls

    # Private names, in torch 2.11 and 2.13. Where the graph breaks on the way, this runs when nothing is traced.
    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return False
    outer: Any = innermost_backend(translator.output.compiler_fn)
    backend = getattr(outer, "compiler_fn", outer)
    if type(outer).__name__ == "_TorchCompileInductorWrapper" or isinstance(backend, AotAutograd):
        return True
    module, name = getattr(backend, "__module__", "") or "", getattr(backend, "__name__", "")
    is_known = module.startswith("torch._dynamo.backends.") and name in _AOT_BACKENDS
    return is_known or (module, name) == ("torch._inductor.compile_fx", "compile_fx")


# `torch.compiler.assume_constant_result`, which imports the compiler (torch 2.11 and 2.13).
is_exact_when_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
