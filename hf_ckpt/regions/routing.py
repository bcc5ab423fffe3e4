"""The choices of a router, kept from a region's forward for the runs after it: each token goes where it went.

A router scores experts, and takes the best. On a device the same product need not give the same bits the next time
(atomic additions, another split of the sum, a kernel that was chosen by timing). Between scores that are next to equal
the choice then falls otherwise, and what is recomputed is that of another expert: no matter of rounding. So a region
with a router keeps what its forward chose, as a rule a byte for each choice, and each later run of the same call goes
by that. The scores are made again, and the values at the chosen places are taken from them, so that gradients flow
through what belongs to them.

A choice is what an operator returns as places in floating-point scores (`topk`, `argmax`, `sort`, `max`), what it draws
by them (`multinomial`, `bernoulli`), and which of such scores are beyond a threshold, where that has no graph (the
masks of PhiMoE). What is computed of whole numbers follows from those.

Kernels of a CPU repeat themselves, as do all under `torch.use_deterministic_algorithms`: nothing is kept there.
What a compiler runs is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from hf_ckpt.regions.execution_state import Nested, extra_run_depth
from hf_ckpt.regions.selective import dispatch
from hf_ckpt.regions.selective.dispatch import ACTIVE, DispatchMode, KernelInterception
from hf_ckpt.regions.selective.save_rules import OperatorKind, OperatorRole, operator_kind
from hf_ckpt.upstream.torch import num_dispatch_modes, schema_of

_ASSUMED = Nested()


def kernels_vary() -> AbstractContextManager[None]:
    """In the block kernels of a CPU are taken for ones that do not repeat themselves: a device is simulated."""
    return _ASSUMED


def may_vary(tensors: Sequence[Any]) -> bool:
    """Whether kernels on the device of these tensors may give other bits the next time."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    return _ASSUMED.depth > 0 or any(isinstance(each, Tensor) and each.device.type != "cpu" for each in tensors)


class KeptRouting:
    """The choices of one call of a region, in the order in which operators made them."""

    __slots__ = ("choices", "is_complete")

    def __init__(self) -> None:
        self.choices: list[tuple[str, Tensor]] = []
        """Names of operators, and what they returned, in the smallest dtype that holds it."""
        self.is_complete = False

    def run(self, *, is_strict: bool = True) -> AbstractContextManager[Any]:
        """Run the call in the block: the first time its choices are kept, later they are those that were kept.

        With `is_strict`, a later run that comes to other operators raises `CheckpointError`; else it chooses itself.
        """
        begin = partial(_RoutedRun, self, is_strict)
        if num_dispatch_modes() or not dispatch.kernels_are_possible():
            return DispatchMode(begin, _chooses_nothing)
        _register_comparisons()
        return KernelInterception(begin)


class _RoutedRun:
    """One run of a call. See `dispatch.RegionRun`."""

    def __init__(self, routing: KeptRouting, is_strict: bool) -> None:
        # A selective region, or one that runs in tiles inside of another, is given its operators as before.
        self.outer = ACTIVE.run
        self.modules = [] if self.outer is None else self.outer.modules
        # Dispatch modes are given them by torch, one after the other.
        self._receiver = ACTIVE.interception.receiver
        self._routing = routing
        self._is_strict = is_strict
        self._is_first = not routing.is_complete
        self._next = 0
        # What runs in here for a check only, on other tokens, is no part of the call.
        self._depth = extra_run_depth()
        self._shapes: set[torch.Size] = set()
        if self._is_first:
            # A forward may start again, where it takes a gradient inside of itself.
            routing.choices.clear()

    def run(self, kind: OperatorKind, args: Any, kwargs: dict[str, Any], call: Any) -> Any:
        """See `RegionRun`."""
        given_to = self._receiver
        output = call(*args, **kwargs) if given_to is None else given_to.run(kind, args, kwargs, call)
        if not _may_choose(kind) or extra_run_depth() != self._depth or not self._is_choice(kind, args):
            return output
        chosen = output if isinstance(output, Tensor) else output[1]
        if self._is_first:
            # A copy: the region may write into its own.
            self._routing.choices.append((kind.name, chosen.to(_smallest(kind, args, kwargs), copy=True)))
        elif (kept := self._take(kind, chosen)) is not None:
            chosen.copy_(kept)
            if chosen is not output:
                _fill_values(output[0], args[0], chosen, _dim(kind, args, kwargs))
        return output

    def _is_choice(self, kind: OperatorKind, args: Any) -> bool:
        scores = args[0] if args else None
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            return False
        if kind.packet in _COMPARISONS:
            # With a graph it is a branch of an activation, which is continuous.
            return scores.shape in self._shapes and not torch.is_grad_enabled()
        # Attention that is computed step by step takes the largest of each row too, to scale by it.
        is_choice = kind.packet not in _LARGEST or scores.dim() <= _MOST_DIMS
        if is_choice:
            self._shapes.add(scores.shape)
        return is_choice

    def _take(self, kind: OperatorKind, chosen: Tensor) -> Tensor | None:
        place, self._next = self._next, self._next + 1
        choices = self._routing.choices
        name, kept = choices[place] if place < len(choices) else ("none", None)
        if kept is not None and name == kind.name and kept.shape == chosen.shape:
            return kept
        if self._is_strict:
            there = "none" if kept is None else f"{name} of {list(kept.shape)}"
            raise CheckpointError(
                f"{kind.name} returns {list(chosen.shape)} as choice number {place + 1} of a router, where the "
                f"forward had {there}"
            )
        return None

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """See `RegionRun`."""
        if self.outer is not None:
            self.outer.enter_module(module, args)

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> Any:
        """See `RegionRun`."""
        return None if self.outer is None else self.outer.leave_module(module, args, output)

    def end(self, raised: type[BaseException] | None) -> None:
        """See `RegionRun`."""
        if raised is None:
            self._routing.is_complete = True


# --- Which operators choose. ---

_COMPARISONS = frozenset({"aten.gt", "aten.ge", "aten.lt", "aten.le"})
_LARGEST = frozenset({"aten.max", "aten.min"})
_MOST_DIMS = 3  # Scores of a router are [B, S, E], or [T, E].


@cache
def _register_comparisons() -> None:
    packets = (getattr(torch.ops.aten, name.removeprefix("aten.")) for name in _COMPARISONS)
    dispatch.register_kernels(getattr(packet, overload) for packet in packets for overload in ("Scalar", "Tensor"))


@cache
def _may_choose(kind: OperatorKind) -> bool:
    return kind.returns_new and (kind.role is OperatorRole.ROUTING or kind.packet in _COMPARISONS)


def _chooses_nothing(function: Any) -> bool:
    return not _may_choose(operator_kind(function))


@cache
def _dim_argument(kind: OperatorKind) -> tuple[int, Any]:
    """Return the place of the argument that says along which dimension an operator chooses, and its default."""
    for place, argument in enumerate(schema_of(kind.function).arguments):
        if argument.name == "dim":
            return place, argument.default_value
    return -1, -1


def _dim(kind: OperatorKind, args: Any, kwargs: dict[str, Any]) -> int | None:
    """Return the dimension; None if it is the flattened tensor."""
    place, default = _dim_argument(kind)
    found: int | None = args[place] if 0 <= place < len(args) else kwargs.get("dim", default)
    return found


def _smallest(kind: OperatorKind, args: Any, kwargs: dict[str, Any]) -> torch.dtype:
    """Return the smallest dtype that holds what an operator chooses."""
    if kind.packet in _COMPARISONS or kind.packet == "aten.bernoulli":
        return torch.bool
    scores, dim = args[0], _dim(kind, args, kwargs)
    size = scores.numel() if dim is None or not scores.dim() else scores.shape[dim]
    return next((dtype for dtype in (torch.uint8, torch.int16) if size <= torch.iinfo(dtype).max + 1), torch.int64)


def _fill_values(values: Tensor, scores: Tensor, places: Tensor, dim: int | None) -> None:
    """Write into `values` the scores at these places."""
    dim = -1 if dim is None else dim
    # Some operators leave the dimension out.
    leaves_out = places.dim() < scores.dim()
    found = scores.gather(dim, places.unsqueeze(dim) if leaves_out else places)
    values.copy_(found.squeeze(dim) if leaves_out else found)
