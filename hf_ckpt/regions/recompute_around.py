"""Recompute a layer around its attention: the attention's activations are kept, everything else is recomputed.

This is mode `ffn` for layers whose own forward strings the ffn together (`fc1`, activation, `fc2`), where no module
could be recomputed alone. The kept modules run once; when the layer is recomputed they hand out what they returned.
Costs one more copy of each kept module's output.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.call import Call, Function, take_apart, tensors_of
from hf_ckpt.regions.recompute import original_forward, run_proven
from hf_ckpt.regions.rng_state import RandomState
from hf_ckpt.regions.transforms import refuse_transforms

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import RegionProof


class KeptModules(threading.local):
    """Links a layer with the modules inside it that are kept. One for each layer; lives on the layer.

    By thread: several may run the layer at once, and backward runs in others than forward.

    Attributes:
        outputs: what the kept modules return in the call of the layer that runs now; None outside of one.
    """

    outputs: _Outputs | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model made while a layer runs must not share the running call.
        return KeptModules, ()

    @contextmanager
    def hand_out(self, outputs: _Outputs) -> Iterator[None]:
        """Let the kept modules use `outputs` while the layer runs."""
        found, self.outputs = self.outputs, outputs
        try:
            yield
        finally:
            self.outputs = found


class _Outputs:
    """What the kept modules returned in one call of the layer, in the order in which they ran."""

    def __init__(self) -> None:
        self._returned: list[tuple[Any, RandomState]] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._is_complete = False
        self._next = 0

    def run(self, kept: KeptModules, call: Call, *tensors: Any) -> Any:
        """Run the layer: the first time for real, afterwards with the outputs that were kept."""
        self._next = 0
        with kept.hand_out(self):
            returned = call.run(*tensors)
        if not self._is_complete:
            self._check_untouched()
        self._is_complete = True
        return returned

    def _check_untouched(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            raise UnsupportedError(
                "The layer changes its attention's output in place, so that it cannot be kept for recomputing the "
                'layer around it. Use mode "full" for this layer instead of "ffn".'
            )

    def of(self, forward: Function, args: Any, kwargs: Any) -> Any:
        """Return the output of the kept module that runs now."""
        if self._is_complete:
            output, random_state = self._returned[self._next]
            self._next += 1
            # What follows must see the random numbers that it saw behind the attention's own.
            random_state.restore()
            return output
        with _outside_of_region():
            output = forward(*args, **kwargs)
        detached = _detached(output)
        self._returned.append((detached, RandomState.of(detached)))
        # A detached tensor counts writes together with the one that the layer goes on with.
        self._versions.extend((tensor, tensor._version) for tensor in tensors_of(detached))
        return output


def recompute_around(kept: KeptModules, function: Function, *args: Any, proof: RegionProof | None = None) -> Any:
    """Run `function(*args)`, a layer's forward, and recompute all of it but its kept modules in backward.

    Args:
        kept: the link to the kept modules; their forward must be `run_kept`.
        function: the layer's forward, with its keyword arguments.
        args: positional arguments.
        proof: see `recompute`.
    """
    refuse_transforms()
    call, tensors = take_apart(function, args)
    looked = None if proof is None else proof.watch(function, tensors)
    returned = run_proven(looked, partial(_Outputs().run, kept, call), tensors)
    if looked is not None:
        looked.look_at_graph(function, args, returned)
    return returned


def run_kept(kept: KeptModules, module: nn.Module, found: Function | None, *args: Any, **kwargs: Any) -> Any:
    """Instance `forward` of a kept module.

    Args:
        kept: the link to the layer around it.
        module: the module whose forward this is.
        found: the forward that stood on the instance before, or None for the class's own.
        *args: what the forward takes.
        **kwargs: what the forward takes.
    """
    forward = original_forward(module, found)
    return forward(*args, **kwargs) if kept.outputs is None else kept.outputs.of(forward, args, kwargs)


def _detached(output: Any) -> Any:
    """Return the output without its graph, so that keeping it keeps nothing else."""
    if isinstance(output, Tensor):
        return output.detach().requires_grad_(output.requires_grad)
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(_detached, output))
    if isinstance(output, tuple | list):
        return type(output)(map(_detached, output))
    return output


@contextmanager
def _outside_of_region() -> Iterator[None]:
    """Let what autograd saves in the block be kept as if the innermost region were not there.

    The public `saved_tensors_hooks` can only be stacked: identity hooks on top would hide the tensors from hooks that
    the user placed around the region (offloading, measuring), and switch off autograd's check for in-place changes.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
