"""The ways to differentiate that a region cannot go through: refused where they come, with one message.

A region's backward runs its forward again. What torch.func and forward-mode derivatives attach to the tensors of the
first run is gone by then: torch raises from somewhere inside, and outputs that are kept would lose their tangents
without a word. A backward of the backward (`create_graph=True`) goes through all regions but tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from hf_ckpt.errors import UnsupportedError

_BATCHED_BACKWARD = torch._C._dispatch_key_parse("VmapMode")
"""Is set in a thread while `is_grads_batched=True` vectorizes a backward there; `torch.vmap` has an interpreter."""


def refuse_transforms() -> None:
    """Refuse to begin a region inside of a transform.

    Raises:
        UnsupportedError: torch.func or forward-mode derivatives are at work.
    """
    if is_transformed():
        inside = "a transform of torch.func (grad, vjp, jvp, jacrev, hessian, vmap)"
    elif forward_ad._current_level >= 0:
        inside = "forward-mode derivatives (torch.autograd.forward_ad)"
    else:
        return
    raise UnsupportedError(
        f"A model under a plan is called inside of {inside}, and what is recomputed in backward cannot go through "
        "that. Use backward() or torch.autograd.grad, with create_graph=True for second derivatives, or take the plan "
        "off the model meanwhile: remove()."
    )


def refuse_in_tiles() -> None:
    """Refuse a backward of tiles that is to be more than one backward.

    Raises:
        UnsupportedError: it is to be differentiated again, or runs for several gradients at once.
    """
    if torch.is_grad_enabled():
        asked = "create_graph=True asks for a backward that can be differentiated again"
    elif is_transformed():
        asked = "is_grads_batched=True, vectorize=True or torch.vmap asks for a backward of several gradients at once"
    else:
        return
    raise UnsupportedError(
        f"{asked}, and tiles compute one backward, slice by slice, without a graph. Leave tiles out: everything else "
        "in a plan can be differentiated so."
    )


def untransformed() -> AbstractContextManager[Any]:
    """Let a region run outside of the transform that its backward runs in.

    Where torch vectorizes a backward over several gradients, what is recomputed is the same for all of them, and
    inside of the transform it could not draw random numbers.
    """
    return _outside() if is_transformed() else nullcontext()


@contextmanager
def _outside() -> Iterator[None]:
    batched = torch._C.DispatchKeySet(_BATCHED_BACKWARD)
    with temporarily_clear_interpreter_stack(), torch._C._ExcludeDispatchKeyGuard(batched):
        yield


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work, or a backward of several gradients at once."""
    return torch._C._functorch.peek_interpreter_stack() is not None or (
        bool(torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_BACKWARD))
        and not torch._C._dispatch_tls_is_dispatch_key_excluded(_BATCHED_BACKWARD)
    )
