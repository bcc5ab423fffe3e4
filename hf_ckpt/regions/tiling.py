"""Run a position-wise module in slices of the sequence, each recomputed in backward: its transient memory shrinks too.

Only the module's inputs are kept. They are saved before it runs, so that the recomputation of a region around it stops
there. Forward and backward write slice by slice into whole tensors that are made once.

Note [what tiles change]: a slice is computed as the whole would be, except for the order of sums. Gradients of weights
are sums over the sequence, here of one sum for each slice; and a matrix product over fewer rows may be blocked
differently. In float32 that is about 1e-6 relative for most weights, and more for those whose gradient nearly cancels
(biases of keys, routers, decays of linear attention): the distance to the result in float64 is about that of the
whole. Half-precision gradients of weights are summed in float32. Random operators draw one mask for each slice.

Source: Liu and Abbeel 2023, "Blockwise Parallel Transformer for Large Context Models" (arXiv 2305.19370), for the ffn;
Bekman et al. 2025, "Arctic Long Sequence Training" (arXiv 2506.13996), for modules at large.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.policy.options import Tiles
from hf_ckpt.regions.arguments import GivenBits
from hf_ckpt.regions.execution_state import (
    AutocastState,
    ConcurrentRun,
    Function,
    RandomState,
    extra_run,
    keeps_activations,
    recomputing,
    refuse_in_tiles,
    refuse_transforms,
)
from hf_ckpt.regions.module_state import gradient_hooks_away, gradient_hooks_put_back
from hf_ckpt.regions.recompute import Call, original_forward, recompute
from hf_ckpt.regions.routing import KeptRouting, may_vary
from hf_ckpt.regions.saved_tensors import save_inputs, saved_behind
from hf_ckpt.regions.tile_checks import (
    DroppedGraph,
    PositionsAlone,
    TileProof,
    check_nothing_escapes,
    not_position_wise,
    weights_used,
)
from hf_ckpt.structure.stored import weight_shape
from hf_ckpt.upstream.torch import FakeTensor, keeps_graph_of_backward

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import RegionProof

logger = logging.getLogger(__name__)

SlicesToRun = Callable[[Sequence[tuple[int, int]], Sequence[Tensor]], Iterable[tuple[int, int]]]
"""Returns which slices of a call run, from the start and length of each and the whole inputs.

The next slice is asked for when one has run, and nothing of it is held.
"""


def _all_slices(bounds: Sequence[tuple[int, int]], inputs: Sequence[Tensor]) -> Iterable[tuple[int, int]]:
    return bounds


class Tiling:
    """How one module runs in tiles; for `tiles` see `Cut.of`.

    Without `recomputes`, what all slices save is kept: the same numbers with more memory, to compare with.
    """

    def __init__(self, tiles: Tiles, *, recomputes: bool = True, proof: RegionProof | None = None) -> None:
        self.tiles = tiles
        self.recomputes = recomputes
        self.proof = proof
        # Whether a call has shown that its positions depend on no others.
        self.is_checked = False
        self.has_said_whole = False
        # The sets of differentiable operators that the module was proven with.
        self.proven_operators: set[frozenset[str]] = set()
        # A simulation runs some of them only, of a tiling that recomputes: it knows what the others would do.
        self.slices_to_run: SlicesToRun = _all_slices

    def __repr__(self) -> str:
        return f"Tiling({self.tiles!r}, recomputes={self.recomputes})"


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def run_tiled(tiling: Tiling, module: nn.Module, found: Function | None, *args: Any, **kwargs: Any) -> Any:
    """Instance `forward` of a module that runs in tiles; never compiled. For `found` see `recompute.run_region`.

    Each position of the module's output must depend on that of its inputs alone. A call that cannot be cut is
    recomputed whole. Costs one more forward of the module, and smaller matrix products.
    """
    forward = original_forward(module, found)
    if not keeps_activations(module):
        return forward(*args, **kwargs)
    refuse_transforms()
    arguments = dict[int | str, Any](enumerate(args)) | kwargs
    cutting = arguments_to_cut(module, arguments, tiling.tiles)
    if cutting is None or len(cutting[0].bounds) == 1:
        if not tiling.recomputes:
            return forward(*args, **kwargs)
        return recompute(partial(forward, **kwargs), *args, proof=tiling.proof)
    cut, places = cutting
    inputs = [arguments[place] for place in places]
    with ConcurrentRun():
        return _Slices(tiling, module, Call(forward, arguments, places, in_parts=True), cut, inputs).run(inputs)


class _Slices:
    """One call of a module in slices. `inputs` are the whole tensors that are cut; `call` is without them."""

    def __init__(self, tiling: Tiling, module: nn.Module, call: Call, cut: Cut, inputs: Sequence[Tensor]) -> None:
        self._tiling = tiling
        self._module = module
        self._call = call
        self._cut = cut
        self._joined = Joined(cut, module)
        self._kept: list[_Slice] = []
        # Whether a slice has written to its inputs, if only the device knows.
        self._written: list[Tensor] = []
        self._needs_gradient = [tensor.requires_grad for tensor in inputs]
        # Which inputs a slice has given a gradient: the others get none, as they do of the whole. An optimizer that
        # decays weights steps where a gradient is zero, and not where there is none.
        self._are_reached = [False] * len(inputs)
        # By owner and name: engines that shard put other tensors in the place of the same weight.
        self._weights = list(_trainable(module))
        # A cast of a weight that autocast caches would belong to the graph of one slice, and be used by the next.
        self._autocast = AutocastState.now().without_cache()
        self._random_state = RandomState.of(inputs)
        self._bits = GivenBits(inputs)
        # None in a recomputation, as the backward that follows is that of the slices that ran first.
        call_proof = tiling.proof.start_call(module, inputs) if tiling.proof is not None and tiling.recomputes else None
        self._alone = PositionsAlone(cut.dim, inputs, self._random_state)
        # Whether positions give other values alone, if only the device knows.
        self._differ: Tensor | None = None
        # By slice that ran forward, the differentiable operators in its graph.
        self._operators: list[set[str]] = []
        # By the start of a slice, what routers chose in it.
        self._routings: dict[int, KeptRouting] | None = None
        if tiling.recomputes and may_vary(inputs) and self._call.state.has_router:
            self._routings = {}
        self._is_unproven = False
        self._proof = None
        if call_proof is not None and not call_proof.is_simulated:
            self._proof = TileProof(call_proof, self._alone, cut.dim, inputs)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Run all slices and return what the module returns for the whole."""
        # Before anything runs: the recomputation of a region around this one may need nothing more, and stop here.
        token = save_inputs(inputs if any(self._needs_gradient) or self._weights else ())
        outputs = self._forward(inputs)
        # The token's node keeps the inputs; the hooks of a region around this one would replace the token. In a tuple
        # it is no input of the slices, which get no gradient through it.
        with saved_tensors_hooks(_identity, _identity):
            outputs = _Tiled.apply(self, (token,), outputs, *inputs, *self._weights_now())  # type: ignore[no-untyped-call]
        return self._joined.as_returned(outputs)

    def _forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Run all slices and return the whole outputs; what the slices save is dropped if `recomputes`."""
        weights = self._weights_now()
        parts: set[int] = set()
        # The first slice writes what the whole would. What comes after it is to write nothing for later.
        with self._call.state.as_in_forward(), ExitStack() as after_first:
            for number, (start, length) in enumerate(self._tiling.slices_to_run(self._cut.bounds, inputs)):
                if number == 1:
                    after_first.enter_context(self._call.state.unwritten())
                    # Hooks that each places on a weight see its gradient once.
                    after_first.enter_context(gradient_hooks_put_back(weights))
                if self._tiling.recomputes:
                    graph, found = self._run_and_drop(inputs, weights, start, length)
                    # In every call, as a hook that keeps outputs may come at any time; costs a few weak references.
                    check_nothing_escapes(self._module, graph)
                else:
                    self._kept.append(self._run(inputs, start, length))
                    found = self._put(self._kept[-1], weights, start, length)
                # Each slice may use others (experts).
                parts |= found
            outputs = self._joined.take()
            if self._proof is not None:
                self._proof.check_outputs(self._joined.as_returned(outputs))
            # If slices are not what they should be, the module is not to blame.
            if self._proof is None or not self._proof.has_fault:
                self._compare_alone(inputs, outputs)
        operators = frozenset(chain.from_iterable(self._operators))
        if self._tiling.proof is not None and operators not in self._tiling.proven_operators:
            # The module takes this branch for the first time. It may mix positions by less than shows in its outputs.
            self._tiling.proven_operators.add(operators)
            self._is_unproven = not any(isinstance(tensor, FakeTensor) for tensor in inputs)
        # The others must not be in the graph: hooks on the gradients of idle experts would be called for nothing.
        self._weights = [self._weights[position] for position in sorted(parts)]
        return outputs

    def _compare_alone(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> None:
        """Raise if positions give other values alone: in every call, as hooks and switches may come at any time."""
        if type(self._module) is nn.Linear and self._call.runs(nn.Linear.forward):
            # One product: nothing inside of it could change.
            return
        wholes = [output for output in outputs if output is not None]
        with self._autocast.restored(), extra_run():
            differ = self._alone.outputs_differ(
                self._call.run,
                inputs,
                self._needs_gradient,
                wholes,
                self._operators,
                self._call.state.modules_of(self._module),
            )
        is_first, self._tiling.is_checked = not self._tiling.is_checked, True
        if differ is None or (differ.device.type != "cpu" and not is_first):
            # The host does not wait for a device: the backward asks.
            self._differ = differ
        elif bool(differ):
            self._refuse("values")

    def _refuse(self, what: str) -> NoReturn:
        raise not_position_wise(self._module, what)

    def _run_and_drop(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], start: int, length: int
    ) -> tuple[list[weakref.ref[Any]], set[int]]:
        """Run one slice for its output alone.

        Returns references to what is alive while anything of its graph is, and which of the given weights it used.
        """
        # With a graph, though nothing is saved for it: without a graph some modules would run another kernel.
        graph = DroppedGraph(self._module)
        with saved_tensors_hooks(graph.pack(), DroppedGraph.unpack):
            piece = self._run(inputs, start, length)
        found = self._put(piece, weights, start, length)
        return [weakref.ref(graph), *(weakref.ref(tensor) for tensor in piece.inputs if tensor.requires_grad)], found

    def _put(self, piece: _Slice, weights: Sequence[Tensor], start: int, length: int) -> set[int]:
        self._joined.put(piece.returned, start, length)
        outputs = [output for output in outputs_of(piece.returned) if output is not None]
        found, operators = weights_used(self._module, outputs, piece.inputs, weights)
        self._operators.append(operators)
        return found

    def backward(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs and of the weights, from those of the outputs, slice by slice."""
        wholes = [
            x.new_empty(x.shape) if needs else None for x, needs in zip(inputs, self._needs_gradient, strict=True)
        ]
        bounds = ((0, self._cut.leading[-1]),) if (is_whole := self._has_gradient_hooks()) else self._cut.bounds
        sums = [_Sum(weight, len(bounds)) for weight in self._weights_now()]
        self._check_forward(inputs)
        # Only the first backward is proven.
        proof = self._proof
        if proof is not None and is_whole:
            proof.end()
            self._proof = proof = None
        elif proof is not None:
            proof.begin_backward(gradients)
        # Around the gradients too: weights that have been frozen since contributed to this loss.
        with self._random_state.kept(), self._call.state.as_in_forward():
            self._random_state.restore()
            with ConcurrentRun():
                for number, (start, length) in enumerate(self._tiling.slices_to_run(bounds, inputs)):
                    is_kept = self._kept and not is_whole
                    piece = self._kept[number] if is_kept else self._run_again(inputs, start, length)
                    parts = self._joined.parts(gradients, start, length)
                    self._add_gradients(piece, parts, [self._narrow(whole, start, length) for whole in wholes], sums)
                    del piece, parts
        totals = [total.take() for total in sums]
        if proof is not None or (self._is_unproven and not is_whole):
            self._proof = None
            with self._autocast.restored(), self._call.state.as_in_forward(), extra_run():
                if proof is not None:
                    proof.finish(self._call.run, inputs, wholes, totals)
                elif (differ := self._alone.gradients_differ(self._call.run, inputs, gradients, wholes)) is not None:
                    self._call.state.add_error(differ, partial(self._refuse, "gradients"))
        reached = [whole if is_reached else None for whole, is_reached in zip(wholes, self._are_reached, strict=True)]
        return [*reached, *totals]

    def _check_forward(self, inputs: Sequence[Tensor]) -> None:
        """Ask a device what it has seen in forward, and whether the inputs are what they were there."""
        if self._differ is not None:
            self._call.state.add_error(self._differ, partial(self._refuse, "values"))
        for written in (*self._written, self._bits.differ(inputs)):
            if isinstance(written, Tensor):
                self._call.state.add_error(written, self._refuse_write)
            elif written:
                self._refuse_write()
        self._written = []

    def _has_gradient_hooks(self) -> bool:
        """Whether hooks on gradients act inside of the module: they are to run once, and may look at all positions.

        Backward then runs as a single slice: without tiles. Where random numbers are drawn it cannot, as that would
        draw others: the hooks run for each slice.
        """
        # Those of the module itself are around the whole. In a simulation nothing has run alone.
        inside = (each for each in self._call.state.modules_of(self._module) if each is not self._module)
        has_hooks = self._alone.has_hooks or any(each._backward_hooks or each._backward_pre_hooks for each in inside)
        if not has_hooks or self._alone.draws:
            return False
        if not self._tiling.has_said_whole:
            self._tiling.has_said_whole = True
            logger.info(
                "%s: hooks on gradients act inside of it. Its backward runs whole, without tiles, and needs the memory "
                "for that.",
                type(self._module).__name__,
            )
        return True

    def _add_gradients(
        self, piece: _Slice, gradients: Sequence[Tensor | None], places: Sequence[Tensor | None], sums: Sequence[_Sum]
    ) -> None:
        """Write the gradients of one slice into the whole ones, and add those of the weights."""
        weights = self._weights_now()
        outputs = outputs_of(piece.returned)
        reached = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output is not None and output.requires_grad and gradient is not None
        ]
        wanted = [tensor for tensor in piece.inputs if tensor.requires_grad]
        all_found = _gradients(reached, wanted, weights)
        if self._proof is not None:
            self._proof.check_gradients(gradients, all_found[: len(wanted)], all_found[len(wanted) :])
        found = iter(all_found)
        for number, place in enumerate(places):
            if place is not None:
                gradient = next(found)
                self._are_reached[number] |= gradient is not None
                _fill(place, gradient)
        for total in sums:
            total.add(next(found))

    def _run(self, inputs: Sequence[Tensor], start: int, length: int) -> _Slice:
        """Run one slice, in a graph of its own."""
        pieces = [
            self._cut.piece(x.detach(), start, length).requires_grad_(needs)
            for x, needs in zip(inputs, self._needs_gradient, strict=True)
        ]
        versions, bits = [piece._version for piece in pieces], GivenBits(pieces)
        with torch.enable_grad(), self._autocast.restored():
            proof, run = self._proof, self._call.run
            if self._routings is not None:
                self._call.routing = self._routings.setdefault(start, KeptRouting())
            # What the module is given is no leaf, as the whole is none: hooks are placed on its node.
            views = [piece.view_as(piece) for piece in pieces]
            try:
                returned = run(*views) if proof is None else proof.run(run, inputs, views)
            except RuntimeError as error:
                # In torch 2.11 to 2.13: a slice, unlike the whole, is a view of one.
                if "leaf Variable that requires grad is being used in an in-place" in str(error):
                    self._refuse_write(error)
                raise
            finally:
                # What else runs of the call, for a check, has other tokens.
                self._call.routing = None
        written = bits.differ(pieces)
        if isinstance(written, Tensor):
            self._written.append(written)
        elif written or [piece._version for piece in pieces] != versions:
            self._refuse_write()
        return _Slice(pieces, returned)

    def _refuse_write(self, cause: Exception | None = None) -> NoReturn:
        raise UnsupportedError(
            f"{type(self._module).__name__} is to run in tiles, but it, or another module, writes into its "
            "input, which its recomputation needs. Leave tiles out for its layer."
        ) from cause

    def _run_again(self, inputs: Sequence[Tensor], start: int, length: int) -> _Slice:
        with recomputing():
            return self._run(inputs, start, length)

    def _narrow(self, whole: Tensor | None, start: int, length: int) -> Tensor | None:
        return None if whole is None else whole.narrow(self._cut.dim, start, length)

    def _weights_now(self) -> list[Tensor]:
        return [getattr(owner, name) for owner, name in self._weights]


class _Slice(NamedTuple):
    """The inputs and the result of one slice."""

    inputs: list[Tensor]
    returned: Any


class _Tiled(torch.autograd.Function):
    """The slices of one call as a single node: hooks on weights see one gradient, as they do of the whole."""

    @staticmethod
    def forward(
        ctx: Any, slices: _Slices, tokens: tuple[Tensor], outputs: tuple[Tensor | None, ...], *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.slices = slices
        ctx.save_for_backward(*tokens)
        ctx.mark_non_differentiable(*(x for x in outputs if x is not None and not x.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # `once_differentiable` would not raise if the second backward computes gradients of given tensors only: those
        # would silently lack what comes through here.
        refuse_in_tiles()
        (token,) = ctx.saved_tensors
        return None, None, None, *ctx.slices.backward(saved_behind(token), gradients)


class _Sum:
    """The gradient of one weight, summed over `num_slices` slices."""

    def __init__(self, weight: Tensor, num_slices: int) -> None:
        self._dtype = weight.dtype
        # In half precision each addition would round again.
        self._adds_in = torch.promote_types(weight.dtype, torch.float32) if num_slices > 1 else weight.dtype
        self._total: Tensor | None = None

    def add(self, gradient: Tensor | None) -> None:
        """Add the gradient of a slice; None if the slice does not use the weight."""
        if gradient is None:
            return
        if self._total is None:
            # A copy, as autograd may return the same tensor as the gradient of something else.
            self._total = gradient.to(self._adds_in, copy=True)
        else:
            self._total += gradient

    def take(self) -> Tensor | None:
        """Return the sum in the weight's own dtype."""
        return None if self._total is None else self._total.to(self._dtype)


def _gradients(
    reached: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor], weights: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    if not reached or not (wanted or weights):
        return [None] * (len(wanted) + len(weights))
    outputs, gradients = zip(*reached, strict=True)
    keeps_graph = keeps_graph_of_backward()
    # Hooks on a weight see its gradient once, which is the sum over the slices; see `_Tiled`.
    with gradient_hooks_away(weights):
        return torch.autograd.grad(outputs, [*wanted, *weights], gradients, allow_unused=True, retain_graph=keeps_graph)


def _fill(place: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        place.zero_()
    else:
        place.copy_(gradient)


def _trainable(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the tensors that train in a module, each once, as owner and name."""
    seen: set[int] = set()
    for owner in module.modules():
        # FSDP1 leaves views of its flat parameter as plain attributes while a module runs.
        for name, value in (*owner._parameters.items(), *owner._buffers.items(), *vars(owner).items()):
            if isinstance(value, Tensor) and value.requires_grad and id(value) not in seen:
                seen.add(id(value))
                yield owner, name


def _identity(tensor: Tensor) -> Tensor:
    return tensor


# --- Cutting a call, and joining what its slices return. Knows shapes only. ---

_MAX_TILES = 16
"""A slice then needs a small part of what the rest of a layer needs; more slices save next to nothing."""
_MIN_TOKENS = 2048
"""Matrix products over fewer tokens than this no longer fill a device."""


@dataclass(frozen=True)
class Cut:
    """How tensors that share their leading dimensions are cut."""

    leading: tuple[int, ...]
    """Sizes of the dimensions up to the one that is cut: [B, S], or [T] if the batch is flattened."""
    bounds: tuple[tuple[int, int], ...]
    """Start and length of each slice."""

    @classmethod
    def of(cls, hidden: Tensor, tiles: Tiles) -> Cut:
        """Choose for hidden states [B, S, H], [T, H], or with more dimensions, of which the longest is then cut.

        `auto` takes slices of 2,048 tokens and more, at most 16: fewer tokens would not fill a device, and more slices
        would save next to nothing compared to what attention needs. A number is limited to that of the positions.
        """
        sizes = tuple(hidden.shape[:-1])
        dim = len(sizes) - 1 if len(sizes) <= 2 else max(range(len(sizes)), key=sizes.__getitem__)
        leading = sizes[: dim + 1]
        num_tiles = min(_MAX_TILES, math.prod(leading) // _MIN_TOKENS) if tiles == "auto" else tiles
        return cls(leading, _bounds(leading[dim], int(num_tiles)))

    @property
    def dim(self) -> int:
        """The dimension that is cut."""
        return len(self.leading) - 1

    def shares(self, tensor: Tensor) -> bool:
        """Whether a tensor has a value for each position."""
        return tuple(tensor.shape[: len(self.leading)]) == self.leading

    def piece(self, tensor: Tensor, start: int, length: int) -> Tensor:
        """Return some positions of a tensor that `shares` them: contiguous, as modules that flatten them need it."""
        # A view if the slice is contiguous already, as it is for one row.
        return tensor.narrow(self.dim, start, length).contiguous()

    def leading_of(self, length: int) -> tuple[int, ...]:
        """Return the leading dimensions of a slice."""
        return (*self.leading[:-1], length)


def _bounds(num_positions: int, tiles: int) -> tuple[tuple[int, int], ...]:
    """Return start and length of slices that differ by at most one position."""
    tiles = max(1, min(tiles, num_positions))
    length, longer = divmod(num_positions, tiles)
    lengths = [length + (number < longer) for number in range(tiles)]
    starts = [sum(lengths[:number]) for number in range(tiles)]
    return tuple(zip(starts, lengths, strict=True))


def arguments_to_cut(
    module: nn.Module, arguments: dict[int | str, Any], tiles: Tiles
) -> tuple[Cut, list[int | str]] | None:
    """Return how to cut a call and the places of the arguments that are cut; None if it can only run whole.

    The first tensor is taken for the hidden states. Any other one must have a value for each position, or be a single
    number.
    """
    tensors = {place: value for place, value in arguments.items() if isinstance(value, Tensor)}
    hidden = next(iter(tensors.values()), None)
    if hidden is None or not hidden.is_floating_point() or hidden.dim() < 2 or not hidden.numel():
        return None
    if any(_holds_tensors(value) for value in arguments.values()) or not _works_on_last_dim(module, hidden):
        return None
    cut = Cut.of(hidden, tiles)
    places = [place for place, tensor in tensors.items() if tensor.dim()]
    return (cut, places) if all(cut.shares(tensors[place]) for place in places) else None


def _holds_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(item, Tensor) or _holds_tensors(item) for item in values)


def _works_on_last_dim(module: nn.Module, hidden: Tensor) -> bool:
    """Whether a vector of weights is one for each feature, and not one for each head and feature."""
    shape = weight_shape(module)
    if shape is None or len(shape) != 1 or shape.numel() == 1:
        return True
    return hidden.dim() <= 3 or shape.numel() == hidden.shape[-1]


class Joined:
    """Copies what the slices of a call return into whole tensors that are made once."""

    def __init__(self, cut: Cut, module: nn.Module) -> None:
        self._cut = cut
        self._module = module
        self._kind: type = Tensor
        self._wholes: list[Tensor | None] = []
        self._is_flat: list[bool] = []

    def put(self, returned: Any, start: int, length: int) -> None:
        """Copy what a slice returned into its place."""
        values = outputs_of(returned)
        if not self._wholes:
            self._kind = type(returned)
            self._is_flat = [value is not None and self._is_flattened(value, length) for value in values]
            self._wholes = [
                None if value is None else self._whole(value, is_flat)
                for value, is_flat in zip(values, self._is_flat, strict=True)
            ]
        kinds = [[None if each is None else each.dtype for each in found] for found in (values, self._wholes)]
        if kinds[0] != kinds[1]:
            raise UnsupportedError(
                f"{type(self._module).__name__} is to run in tiles, but its slices return different things: {kinds[0]} "
                f"after {kinds[1]}. Leave tiles out for its layer."
            )
        for value, whole, is_flat in zip(values, self._wholes, self._is_flat, strict=True):
            if value is not None and whole is not None:
                place = self._apart(whole, is_flat).narrow(self._cut.dim, start, length)
                place.copy_(value.detach().reshape(place.shape))

    def take(self) -> tuple[Tensor | None, ...]:
        """Return the outputs of the call; they are not kept."""
        wholes, self._wholes = self._wholes, []
        return tuple(wholes)

    def as_returned(self, outputs: Sequence[Tensor | None]) -> Any:
        """Return the outputs as the module returns them: alone, in a tuple or in a list."""
        return self._kind(outputs) if self._kind in (tuple, list) else outputs[0]

    def parts(self, wholes: Sequence[Tensor | None], start: int, length: int) -> list[Tensor | None]:
        """Return the part of one slice of tensors that are shaped as the outputs of the call: of their gradients."""
        return [
            None if whole is None else self._part(whole, is_flat, start, length)
            for whole, is_flat in zip(wholes, self._is_flat, strict=True)
        ]

    def _part(self, whole: Tensor, is_flat: bool, start: int, length: int) -> Tensor:
        part = self._apart(whole, is_flat).narrow(self._cut.dim, start, length)
        return (part.flatten(0, self._cut.dim) if is_flat else part).contiguous()

    def _apart(self, whole: Tensor, is_flat: bool) -> Tensor:
        """Return a tensor with its leading dimensions apart."""
        return whole.reshape(*self._cut.leading, *whole.shape[1:]) if is_flat else whole

    def _is_flattened(self, value: Tensor, length: int) -> bool:
        leading = self._cut.leading_of(length)
        if tuple(value.shape[: len(leading)]) == leading:
            return False
        if value.dim() and value.shape[0] == math.prod(leading):
            return True
        raise UnsupportedError(
            f"{type(self._module).__name__} is to run in tiles, but for {math.prod(leading)} positions it returns a "
            f"tensor of shape {list(value.shape)}: something over all positions (an auxiliary loss, a statistic), "
            "which slices would change. Leave tiles out for this layer."
        )

    def _whole(self, value: Tensor, is_flat: bool) -> Tensor:
        leading = self._cut.leading
        return value.new_empty(
            (math.prod(leading), *value.shape[1:]) if is_flat else (*leading, *value.shape[len(leading) :])
        )


def outputs_of(returned: Any) -> list[Tensor | None]:
    """Return the tensors, or None in their place, in what a module returned; raise if it is something else."""
    values = list(returned) if type(returned) in (tuple, list) else [returned]
    if all(value is None or isinstance(value, Tensor) for value in values):
        return values
    kinds = ", ".join(sorted({type(value).__name__ for value in values}))
    raise UnsupportedError(
        f"A module that is to run in tiles returns {kinds}, not tensors: what slices return cannot be put together. "
        "Leave tiles out for its layer."
    )
