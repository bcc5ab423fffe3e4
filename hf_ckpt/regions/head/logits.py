"""Logits that are not there: a tensor that remembers how to compute them, and hands out what is asked of it.

The model's own code goes on with it as with any logits. What treats each row alone is remembered (`following`) or
computed in chunks (`computing`), what only moves rows is done to the hidden states; anything else gets the whole
logits, with a warning. `answers` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_ckpt.regions.head.source import State, unsupported


class DeferredLogits(Tensor):
    """Logits [..., V] of hidden states [..., H]; made by `put_off`.

    `requires_grad` says whether a gradient flows through what is computed from it: a detached copy has none.

    Attributes:
        state: what they are computed from.
        whole: the logits, where somebody needed all of them.
        has_relatives: whether the logits would share their memory with others.
    """

    state: State
    whole: Tensor | None
    has_relatives: bool

    @staticmethod
    def __new__(cls, state: State) -> DeferredLogits:
        """Make one that no gradient flows through. See `put_off`."""
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            cls, state.shape, dtype=state.sample.dtype, device=state.sample.device
        )
        made.state = state
        made.whole = None
        made.has_relatives = False
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # upstream has no types
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # It makes logits of this class, and so cannot be imported before the class is there.
        from hf_ckpt.regions.head.answers import answer

        return answer(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # upstream's types leave the class out
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Asked for by torch's own C++: autograd makes a second object of what a function hands on.
        if function in _ALIASES:
            return DeferredLogits(args[0].state)
        raise unsupported(str(function))


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)


class _PutOff(torch.autograd.Function):
    """Gives logits their place in the graph, behind what they are made of.

    No gradient comes this way: a loss that is computed from logits has its own way to the hidden states. But engines
    look into the graph (DDP for parameters without a gradient), and put functions of their own into it, which are to be
    called in backward (`passed_through`).
    """

    @staticmethod
    def forward(ctx: Any, state: State, *sources: Tensor) -> DeferredLogits:
        ctx.set_materialize_grads(False)
        ctx.num_sources = len(sources)
        ctx.is_made_of_logits = isinstance(sources[0], DeferredLogits)
        return DeferredLogits(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, ...]:
        if gradient is not None:
            raise unsupported("A backward")
        nothing: tuple[None, ...] = (None,) * (1 + ctx.num_sources)
        return nothing


_OURS: Any = _PutOff._backward_cls


class _PassedThrough(torch.autograd.Function):
    """A number that was computed from logits, behind them in the graph."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, logits: DeferredLogits) -> Tensor:
        # No view, which could not be written to.
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def put_off(state: State, *sources: Tensor) -> DeferredLogits:
    """Return logits that are computed when a loss or another number is asked of them.

    Args:
        state: what from.
        sources: what they come from in the graph; if none of them needs a gradient, none flows.
    """
    if not torch.is_grad_enabled():
        return DeferredLogits(state)
    made: DeferredLogits = _PutOff.apply(state, *sources)  # type: ignore[no-untyped-call]  # upstream
    return made


def passed_through(value: Tensor, logits: DeferredLogits) -> Tensor:
    """Return a number that was computed from logits, so that engines see its backward as one of the logits.

    Args:
        value: computed from the hidden states.
        logits: of which it was asked.
    """
    if not value.requires_grad:
        return value
    if _OF_DDP in _functions_around(logits):
        value = _PassedThrough.apply(value, logits)  # type: ignore[no-untyped-call]  # upstream
    for hook in logits.state.source.hooks.values():
        value.register_hook(hook)  # type: ignore[no-untyped-call]  # upstream
    return value


_OF_DDP = "_DDPSinkBackward"
"""DDP's, around what the model returns: with a static graph its backward is what reduces the gradients."""

_OF_ZERO = "PreBackwardFunctionForModuleBackward"
"""ZeRO-3's, around what each module returns: it gathers the module's weight, which each chunk's own call does too. Its
backward would be given zeros of the size of the logits."""

_AROUND = frozenset({_OF_DDP, _OF_ZERO})


def _functions_around(logits: DeferredLogits) -> set[str]:
    """Return the names of the nodes in the graph between these logits and what the head returned, but for ours."""
    names: set[str] = set()
    node, place = logits.grad_fn, logits.output_nr
    while node is not None:
        if isinstance(node, _OURS):
            # Behind the first logits are the hidden states.
            node, place = node.next_functions[0] if node.is_made_of_logits else (None, 0)
            continue
        names.add(node.name())
        befores = [before for before in node.next_functions if before[0] is not None]
        node, place = befores[min(place, len(befores) - 1)] if befores else (None, 0)
    return names


def allows_gradient(logits: DeferredLogits) -> bool:
    """Whether a gradient is to flow through what is computed from logits now.

    Raises:
        UnsupportedError: somebody else's function stands around the logits in the graph: its backward would be missed.
    """
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return False
    for name in _functions_around(logits) - _AROUND:
        raise unsupported(f"A backward through {name}, which somebody put around them,")
    return True
