"""Whether slices of the sequence can stand for the whole, asked of a module while it runs for the first time.

What can be told from its structure is refused before; this is for what only shows in a call.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.call import Call
from hf_ckpt.regions.rng_state import RandomState
from hf_ckpt.regions.slices import Cut, outputs_of

_NUM_TOKENS = 8
"""Positions that are run together, and half of them alone."""
_NUM_TRIALS = 2
"""A router may send a token elsewhere for a rounding error, but not in each of several places."""
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Of the largest value. Mixing positions changes values by about as much as they are."""


def check_alone(module: nn.Module, call: Call, cut: Cut, inputs: Sequence[Tensor]) -> None:
    """Run a few positions among others and alone, and compare.

    Nothing is asked where random numbers are drawn, or where there are no values (simulation).

    Args:
        module: that is called, for messages.
        call: without the tensors that are cut.
        cut: how they are cut.
        inputs: those tensors, whole.

    Raises:
        UnsupportedError: positions depend on others.
    """
    num_positions = cut.leading[cut.dim]
    if num_positions < 2 or any(isinstance(x, FakeTensor) or x.is_meta for x in inputs):
        return
    length = min(_NUM_TOKENS, num_positions)
    # As many trials on every rank: modules inside may gather their weights.
    starts = [(num_positions - length) * trial // (_NUM_TRIALS - 1) for trial in range(_NUM_TRIALS)]
    trials = [_depends_on_others(call, cut, inputs, start, length) for start in starts]
    if all(trials):
        raise UnsupportedError(
            f"{type(module).__name__} is to run in tiles, but it is not position-wise: {length // 2} positions give "
            f"other values alone than among {length}. Leave tiles out for its layer."
        )


def _depends_on_others(call: Call, cut: Cut, inputs: Sequence[Tensor], start: int, length: int) -> bool:
    def run(begin: int, end: int) -> list[Tensor]:
        pieces = [cut.piece(x.detach(), begin, end - begin) for x in inputs]
        return [cut.as_leading(x, end - begin) for x in outputs_of(call.run(*pieces)) if x is not None]

    middle, end = start + length // 2, start + length
    before = RandomState.of(inputs)
    with torch.no_grad(), before.kept():
        together, first, second = run(start, end), run(start, middle), run(middle, end)
        if not RandomState.of(inputs).is_same(before):
            return False
    return not all(
        _are_close(whole.narrow(cut.dim, 0, middle - start), left)
        and _are_close(whole.narrow(cut.dim, middle - start, end - middle), right)
        for whole, left, right in zip(together, first, second, strict=True)
        # What has no value for each position is refused when the slices are put together.
        if whole.dim() > cut.dim
    )


def _are_close(expected: Tensor, got: Tensor) -> bool:
    if not expected.is_floating_point():
        # Which experts a token goes to; their outputs tell.
        return True
    tolerance = max(_TOLERANCES.get(dtype, 0.1) for dtype in (expected.dtype, *_autocast_dtypes(expected)))
    scale = expected.abs().max()
    return bool((expected - got).abs().max() <= tolerance * scale) or not bool(scale.isfinite())


def _autocast_dtypes(tensor: Tensor) -> Iterable[torch.dtype]:
    kind = tensor.device.type
    return [torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else []


class DroppedGraph:
    """The graph of a slice that runs for its output alone: takes the place of whatever autograd saves for it.

    Lives as long as a node that has saved something. What nodes that save nothing lead to are the inputs of the slice.

    Args:
        module: that runs.
    """

    __slots__ = ("__weakref__", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def drop(self, tensor: Tensor) -> DroppedGraph:
        """Take the place of a tensor."""
        return self

    def bring_back(self) -> Tensor:
        """Somebody goes back through the graph while the slice still runs.

        Raises:
            UnsupportedError: always.
        """
        raise _escape(self._module)


def check_nothing_escapes(module: nn.Module, graph: Sequence[weakref.ref[Any]]) -> None:
    """Refuse a module of which something is used beside its outputs: no gradient would come from there.

    Args:
        module: that ran.
        graph: what lives as long as anything of the graph of a slice: a `DroppedGraph`, and inputs with a gradient.

    Raises:
        UnsupportedError: something of the graph is still there.
    """
    # Not what only awaits the collector, which finds what is new in a moment.
    for generation in range(3):
        if all(part() is None for part in graph):
            return
        gc.collect(generation)
    if any(part() is not None for part in graph):
        raise _escape(module)


def _escape(module: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"{type(module).__name__} is to run in tiles, but something that is computed inside it is used outside "
        "too (a router's logits for an auxiliary loss, a hook that keeps outputs), which slices would cut off from "
        "its gradient. Set output_router_logits=False, take the hook off, or leave tiles out for its layer."
    )


def used(module: nn.Module, outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> set[int]:
    """Return which weights had a part in outputs, by position. Those of an idle expert have none.

    Args:
        module: that ran.
        outputs: of a slice.
        inputs: of the slice.
        weights: the module's own.

    Raises:
        UnsupportedError: the module computes with a trainable tensor that it neither holds nor is given, and that
            would not train.
    """
    # Tensors at which the graph of the slice ends: leaves, or what an engine that shards has put in their place.
    leaves = {id(tensor) for tensor in inputs}
    positions = {id(weight): position for position, weight in enumerate(weights)}
    ends = {weight.grad_fn: position for position, weight in enumerate(weights) if weight.grad_fn is not None}
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if node in ends:
            found.add(ends[node])
        elif leaf is None:
            waiting.extend(function for function, _ in node.next_functions)
        elif id(leaf) in positions:
            found.add(positions[id(leaf)])
        elif id(leaf) not in leaves:
            raise UnsupportedError(
                f"{type(module).__name__} is to run in tiles, but it computes with a trainable tensor of shape "
                f"{list(leaf.shape)} that is neither its own parameter nor its argument, and that would get no "
                "gradient. Leave tiles out for its layer."
            )
    return found
