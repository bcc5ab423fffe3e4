"""Run a position-wise module in slices of the sequence, each recomputed in backward: its transient shrinks with them.

Of the module only its inputs are kept; they are saved before it runs, so that a region around it that is recomputed
too stops there. Forward and backward write slice by slice into whole tensors that are made once.

Note [what tiles change]: a slice is computed as the whole would be, but for the order of sums. Gradients of weights
are sums over the sequence, here of one sum for each slice; and a matrix product over fewer rows may be blocked
otherwise. In float32 that is about 1e-6 relative for most weights, and more for those whose gradient nearly cancels
(biases of keys, routers, decays of linear attention): the distance to the result in float64 is about that of the
whole. Half-precision gradients of weights are added up in float32. Random operators draw one mask for each slice.

Source: Liu and Abbeel 2023, "Blockwise Parallel Transformer for Large Context Models" (arXiv 2305.19370), for the ffn;
Bekman et al. 2025, "Arctic Long Sequence Training" (arXiv 2506.13996), for modules at large.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.policy.modifiers import Tiles
from hf_ckpt.regions.call import Call, Function, keeps_activations
from hf_ckpt.regions.independence import DroppedGraph, check_alone, check_nothing_escapes, used
from hf_ckpt.regions.recompute import original_forward, recompute
from hf_ckpt.regions.rng_state import AutocastState, RandomState
from hf_ckpt.regions.saved_inputs import SavedInputs, saved_behind
from hf_ckpt.regions.slices import Cut, Joined, arguments_to_cut, outputs_of
from hf_ckpt.regions.threads import OneOfSeveral
from hf_ckpt.regions.tile_proof import TileProof
from hf_ckpt.regions.transforms import refuse_in_tiles, refuse_transforms

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import RegionProof


class Tiling:
    """How one module runs in tiles.

    Args:
        tiles: slices of the sequence, or `auto`; see `Cut.of`.
        recomputes: recompute each slice in backward. False keeps what all slices save: the same numbers with more
            memory, to compare with.
        proof: looks at whether backward repeats the slices, and at where they come from and go to.
    """

    def __init__(self, tiles: Tiles, *, recomputes: bool = True, proof: RegionProof | None = None) -> None:
        self.tiles = tiles
        self.recomputes = recomputes
        self.proof = proof
        # The first call shows whether slices can stand for the whole.
        self.is_checked = False

    def __repr__(self) -> str:
        return f"Tiling({self.tiles!r}, recomputes={self.recomputes})"


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def run_tiled(tiling: Tiling, module: nn.Module, found: Function | None, *args: Any, **kwargs: Any) -> Any:
    """Instance `forward` of a module that runs in tiles; never compiled.

    A call that cannot be cut is recomputed whole. Costs one more forward of the module, and smaller matrix products.

    Args:
        tiling: how.
        module: the module whose forward this is; each position of its output depends on that of its inputs alone.
        found: the forward that stood on the instance before, or None for the class's own.
        *args: what the forward takes.
        **kwargs: what the forward takes.

    Raises:
        UnsupportedError: slices do not give what the whole would.
    """
    forward = original_forward(module, found)
    if not keeps_activations(module):
        return forward(*args, **kwargs)
    refuse_transforms()
    cutting = arguments_to_cut(module, args, kwargs, tiling.tiles)
    if cutting is None or len(cutting[0].bounds) == 1:
        if not tiling.recomputes:
            return forward(*args, **kwargs)
        return recompute(partial(forward, **kwargs), *args, proof=tiling.proof)
    cut, places = cutting
    rest = [None if place in places else value for place, value in enumerate(args)]
    keywords = {key: None if key in places else value for key, value in kwargs.items()}
    inputs = [kwargs[place] if isinstance(place, str) else args[place] for place in places]
    with OneOfSeveral():
        return _Slices(tiling, module, Call(forward, rest, keywords, places), cut, inputs).run(inputs)


class _Slices:
    """One call of a module in slices.

    Args:
        tiling: how.
        module: that is called.
        call: its forward, without the tensors that are cut.
        cut: how they are cut.
        inputs: those tensors, whole; not kept.
    """

    def __init__(self, tiling: Tiling, module: nn.Module, call: Call, cut: Cut, inputs: Sequence[Tensor]) -> None:
        self._tiling = tiling
        self._module = module
        self._call = call
        self._cut = cut
        self._joined = Joined(cut, module)
        self._kept: list[_Slice] = []
        self._needs_gradient = [tensor.requires_grad for tensor in inputs]
        # By name: engines that shard put other tensors in the place of the same weight.
        self._weights = list(_trainable(module))
        # A cast of a weight that autocast keeps would belong to the graph of one slice, and be used by the next.
        self._autocast = AutocastState.now().without_cache()
        self._random_state = RandomState.of(inputs)
        # None in a recomputation: the backward that follows is that of the slices that ran first.
        looked = tiling.proof.watch(module, inputs) if tiling.proof is not None and tiling.recomputes else None
        self._proof = None if looked is None or looked.is_simulated else TileProof(looked, cut.dim, inputs)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Run all slices and return what the module returns for the whole."""
        # Before anything runs: a region around this one that is being recomputed may need no more than that.
        saved = SavedInputs(inputs if any(self._needs_gradient) or self._weights else ())
        if not self._tiling.is_checked:
            check_alone(self._module, self._call, self._cut, inputs)
        outputs = self._forward(inputs)
        # The token keeps the inputs by its node, which the hooks of a region around this one would take away.
        with saved_tensors_hooks(_as_it_is, _as_it_is):
            outputs = _Tiled.apply(self, saved, outputs, *inputs, *self._weights_now())  # type: ignore[no-untyped-call]
        returned = self._joined.as_returned(outputs)
        if self._proof is not None:
            self._proof.joined(returned)
        return returned

    def _forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Run all slices and return the whole outputs; what the slices save is dropped, or kept to compare with."""
        weights = self._weights_now()
        parts: set[int] = set()
        for start, length in self._cut.bounds:
            # The first slice of each call shows what is computed with; the others are asked only for weights that
            # were idle so far (experts).
            asks = not start or len(parts) < len(weights)
            if self._tiling.recomputes:
                graph, found = self._run_and_drop(inputs, weights if asks else None, start, length)
                # Costs a few weak references while nothing is wrong; what keeps outputs may come in any step.
                check_nothing_escapes(self._module, graph)
            else:
                self._kept.append(self._run(inputs, start, length))
                found = self._put(self._kept[-1], weights if asks else None, start, length)
            parts |= found
        self._tiling.is_checked = True
        # Of the others autograd must not know: hooks on the gradients of idle experts would be told of nothing.
        self._weights = [self._weights[position] for position in sorted(parts)]
        return self._joined.take()

    def _run_and_drop(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor] | None, start: int, length: int
    ) -> tuple[list[weakref.ref[Any]], set[int]]:
        """Run one slice for its output alone.

        Returns:
            What is alive while anything of its graph is, and which of the weights that are given had a part in it.
        """
        # With a graph, though nothing is saved for it: without one some modules would take another kernel.
        graph = DroppedGraph(self._module)
        with saved_tensors_hooks(graph.drop, DroppedGraph.bring_back):
            piece = self._run(inputs, start, length)
        found = self._put(piece, weights, start, length)
        return [weakref.ref(graph), *(weakref.ref(tensor) for tensor in piece.inputs if tensor.requires_grad)], found

    def _put(self, piece: _Slice, weights: Sequence[Tensor] | None, start: int, length: int) -> set[int]:
        self._joined.put(piece.returned, start, length)
        if weights is None:
            return set()
        outputs = [output for output in outputs_of(piece.returned) if output is not None]
        return used(self._module, outputs, piece.inputs, weights)

    def backward(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs and of the weights, slice by slice.

        Args:
            inputs: of the whole call.
            gradients: of its outputs.
        """
        wholes = [
            x.new_empty(x.shape) if needs else None for x, needs in zip(inputs, self._needs_gradient, strict=True)
        ]
        sums = [_Sum(weight, len(self._cut.bounds)) for weight in self._weights_now()]
        # The first backward alone is looked at.
        proof = self._proof
        if proof is not None:
            proof.begin_backward(gradients)
        # Around the gradients too: weights that have been frozen since had a part in this loss.
        with self._random_state.kept(), self._call.state.as_in_forward():
            self._random_state.restore()
            with OneOfSeveral():
                for number, (start, length) in enumerate(self._cut.bounds):
                    piece = self._kept[number] if self._kept else self._run(inputs, start, length)
                    parts = self._joined.parts(gradients, start, length)
                    self._add_gradients(piece, parts, [self._narrow(whole, start, length) for whole in wholes], sums)
                    del piece, parts
        totals = [total.take() for total in sums]
        if proof is not None:
            self._proof = None
            with self._autocast.restored(), self._call.state.as_in_forward():
                proof.finish(self._call.run, inputs, wholes, totals)
        return [*wholes, *totals]

    def _add_gradients(
        self, piece: _Slice, gradients: Sequence[Tensor | None], places: Sequence[Tensor | None], sums: Sequence[_Sum]
    ) -> None:
        """Put the gradients of one slice where they belong."""
        weights = self._weights_now()
        outputs = outputs_of(piece.returned)
        reached = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output is not None and output.requires_grad and gradient is not None
        ]
        wanted = [tensor for tensor in piece.inputs if tensor.requires_grad]
        all_found = _gradients(reached, [*wanted, *weights])
        if self._proof is not None:
            self._proof.gave(gradients, all_found[: len(wanted)], all_found[len(wanted) :])
        found = iter(all_found)
        for place in places:
            if place is not None:
                _fill(place, next(found))
        for total in sums:
            total.add(next(found))

    def _run(self, inputs: Sequence[Tensor], start: int, length: int) -> _Slice:
        """Run one slice, in a graph of its own."""
        pieces = [
            self._cut.piece(x.detach(), start, length).requires_grad_(needs)
            for x, needs in zip(inputs, self._needs_gradient, strict=True)
        ]
        versions = [piece._version for piece in pieces]
        with torch.enable_grad(), self._autocast.restored():
            proof, run = self._proof, self._call.run
            returned = run(*pieces) if proof is None else proof.run(run, inputs, pieces)
        if [piece._version for piece in pieces] != versions:
            raise UnsupportedError(
                f"{type(self._module).__name__} is to run in tiles, but it writes into its input, which its "
                "recomputation needs. Leave tiles out for its layer."
            )
        return _Slice(pieces, returned)

    def _narrow(self, whole: Tensor | None, start: int, length: int) -> Tensor | None:
        return None if whole is None else whole.narrow(self._cut.dim, start, length)

    def _weights_now(self) -> list[Tensor]:
        return [getattr(owner, name) for owner, name in self._weights]


class _Slice:
    """What one slice was given, and what it returned."""

    __slots__ = ("inputs", "returned")

    def __init__(self, inputs: list[Tensor], returned: Any) -> None:
        self.inputs = inputs
        self.returned = returned


class _Tiled(torch.autograd.Function):
    """The slices of one call as a single node: hooks on weights see one gradient, as they do of the whole."""

    @staticmethod
    def forward(
        ctx: Any, slices: _Slices, saved: SavedInputs, outputs: tuple[Tensor | None, ...], *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.slices = slices
        ctx.save_for_backward(saved.token)
        ctx.mark_non_differentiable(*(x for x in outputs if x is not None and not x.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # `once_differentiable` would not raise where the second backward is asked for the gradients of given tensors:
        # those would silently lack what comes through here.
        refuse_in_tiles()
        (token,) = ctx.saved_tensors
        return None, None, None, *ctx.slices.backward(saved_behind(token), gradients)


class _Sum:
    """The gradient of one weight, added up over slices.

    Args:
        weight: the weight.
        num_slices: how many gradients will come.
    """

    def __init__(self, weight: Tensor, num_slices: int) -> None:
        self._dtype = weight.dtype
        # Each sum in half precision would round anew.
        self._adds_in = torch.promote_types(weight.dtype, torch.float32) if num_slices > 1 else weight.dtype
        self._total: Tensor | None = None

    def add(self, gradient: Tensor | None) -> None:
        """Add the gradient of a slice that the weight had a part in."""
        if gradient is None:
            return
        if self._total is None:
            # A copy: what autograd returns may be the gradient of something else too.
            self._total = gradient.to(self._adds_in, copy=True)
        else:
            self._total += gradient

    def take(self) -> Tensor | None:
        """Return the sum in the weight's own dtype."""
        return None if self._total is None else self._total.to(self._dtype)


def _gradients(reached: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    if not reached or not wanted:
        return [None] * len(wanted)
    outputs, gradients = zip(*reached, strict=True)
    keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
    return torch.autograd.grad(outputs, wanted, gradients, allow_unused=True, retain_graph=keeps_graph)


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


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
