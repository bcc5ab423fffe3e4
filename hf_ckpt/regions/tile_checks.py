"""Whether slices give what the whole gives: looked at in each call, and proven in a step that is due.

Depends on nothing of how a call is cut and joined: positions are counted from what the slices get, and taken out of the
whole tensors by index.

Note [what is proven of tiles]: bit by bit, that the slices get the inputs, and the gradients of the outputs, position
after position from the first to the last; that in backward they get, and return, what they got and returned in forward;
that the whole outputs and the whole gradients of the inputs hold what the slices returned. Within rounding, that the
gradients of weights are the sums of the slices' own, and that a few positions give the same alone, forward and
backward: by other kernels, as their matrices are smaller. Where hooks on gradients act inside, backward is no slices',
and of it nothing is proven: it runs whole, as without tiles.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.execution_state import Function, RandomState
from hf_ckpt.regions.fingerprints import Fingerprint, all_equal, are_equal, is_sum, plain_tensors
from hf_ckpt.regions.routing import may_vary
from hf_ckpt.regions.value_proof import CallProof, drop, never_unpack
from hf_ckpt.structure.routers import has_router
from hf_ckpt.upstream.torch import FakeTensor, keeps_all_digits, top_saved_tensors_hooks

# --- Each call. ---

_TOLERANCES = {torch.float16: 2.0**-5, torch.bfloat16: 2.0**-4}
"""Relative to a position's norm. A few roundings one after another, of eight bits in bfloat16."""
_TOLERANCE = 2.0**-8
"""In float32 and float64, where TF32 may keep eleven bits, or something inside has fewer."""
_TOLERANCE_IN_FULL = 2.0**-10
"""Where all that computes has 24 bits and more: a millionth is rounding, unless values are rounded to one of 256."""
_IN_FULL = (torch.float32, torch.float64)
_FEWEST_ALONE, _MOST_ALONE = 4, 8
_SHARE_ALONE = 16
"""One of so many positions runs alone: that costs a fifth of a forward, or less."""
_MOST_OFF, _FEW_OFF = 0.5, 0.2
"""A larger share of positions that differ is no rounding; the second where slices run different operators, and in full
precision, where a router sends next to none elsewhere."""


class PositionsAlone:
    """A few positions of one call, which run once more without the others; `dim` is that of the positions.

    `before` is the random state when the call began. Nothing is compared where random numbers are drawn, or where there
    are no values (simulation).
    """

    def __init__(self, dim: int, inputs: Sequence[Tensor], before: RandomState) -> None:
        # Holds no tensors: it lives as long as the graph of the step, which is longer than backward.
        self._dim = dim
        self._leading = tuple(inputs[0].shape[: dim + 1])
        self._before = before
        self._is_in_full = False
        self._most_off = _MOST_OFF
        self.has_hooks = False
        """Whether hooks were placed inside while the module ran, on gradients or in their way."""
        self.draws = False
        """Whether it drew random numbers."""

    def at(self, whole: Tensor, index: Tensor | None = None) -> Tensor:
        """Return some positions of a tensor that has them all, apart or flattened; an empty tensor if it does not.

        Without an index: from the last to the first, so that neither is where it was among the others.
        """
        index = _spread(self._leading[-1]) if index is None else index
        whole = whole.detach()
        if tuple(whole.shape[: self._dim + 1]) != self._leading:
            if not whole.dim() or whole.shape[0] != math.prod(self._leading):
                return whole.new_empty(0)
            whole = whole.reshape(*self._leading, *whole.shape[1:])
        return whole.index_select(self._dim, index.to(whole.device, non_blocking=True))

    def outputs_differ(
        self,
        run: Function,
        inputs: Sequence[Tensor],
        need_gradients: Sequence[bool],
        wholes: Sequence[Tensor],
        operators: Sequence[set[str]],
        modules: Iterable[nn.Module],
    ) -> Tensor | None:
        """Return whether the positions give other values alone than `wholes` have, on the device; None: not known.

        `operators` are those of each slice, which run `modules`. They differ where a module branches on the first value
        of what it gets. The positions then all take one branch.
        """
        if self._leading[-1] < 2 or any(isinstance(x, FakeTensor) or x.is_meta for x in inputs):
            return None
        expected, now = [self.at(whole) for whole in wholes], RandomState.of(inputs)
        alone = [self.at(x).requires_grad_(needs) for x, needs in zip(inputs, need_gradients, strict=True)]
        # With a graph, as hooks may go by that; nothing is saved for it.
        drops = saved_tensors_hooks(drop, never_unpack)
        number = RemovableHandle.next_id
        with torch.enable_grad(), drops, now.kept():
            outputs = plain_tensors(run(*(x.view_as(x) for x in alone)))
            self.draws = not now.is_same(self._before) or not RandomState.of(inputs).is_same(now)
        # Those of modules are placed on nodes when the modules run; others by forwards, and by hooks on those.
        self.has_hooks = RemovableHandle.next_id != number
        if self.draws:
            return None
        modules = list(modules)
        # Between scores that are next to equal the positions alone may be sent elsewhere.
        may_go_elsewhere = may_vary(inputs) and has_router(modules)
        used = set[str]().union(*operators)
        self._is_in_full = not may_go_elsewhere and _computes_in_full(inputs[0].device.type, modules, used)
        has_branches = any(found != operators[0] for found in operators)
        self._most_off = _FEW_OFF if has_branches or self._is_in_full else _MOST_OFF
        return self._any_differ(expected, outputs)

    def gradients_differ(
        self,
        run: Function,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        of_inputs: Sequence[Tensor | None],
    ) -> Tensor | None:
        """Return whether the positions give the inputs other gradients alone than `of_inputs`; see `outputs_differ`.

        `gradients` are those of the outputs; `of_inputs` has None for an input that needs none.
        """
        before = RandomState.of(inputs)
        alone = [self.at(x).requires_grad_(of is not None) for x, of in zip(inputs, of_inputs, strict=True)]
        with before.kept(), torch.enable_grad():
            # Views: tools that watch modules cannot follow a leaf in `torch.autograd.grad`.
            outputs = plain_tensors(run(*(x.view_as(x) for x in alone)))
            if not RandomState.of(inputs).is_same(before):
                return None
        found = [x for x in gradients if x is not None]
        floating = [output for output in outputs if output.requires_grad]
        wholes = [whole for whole in of_inputs if whole is not None]
        # If some of its outputs were not used, it is not known which.
        if not wholes or not floating or len(floating) != len(found):
            return None
        parts = [self.at(x).reshape(y.shape) for x, y in zip(found, floating, strict=True)]
        wanted = [x for x in alone if x.requires_grad]
        got: Sequence[Tensor | None] = torch.autograd.grad(floating, wanted, parts, allow_unused=True)
        expected = [self.at(whole) for whole in wholes]
        return self._any_differ(
            expected, [torch.zeros_like(x) if y is None else y for x, y in zip(expected, got, strict=True)]
        )

    @torch.no_grad()
    def _any_differ(self, expected: Sequence[Tensor], got: Sequence[Tensor]) -> Tensor | None:
        if len(expected) != len(got):
            return None
        found = [self._differ(*pair) for pair in zip(expected, got, strict=True) if pair[0].is_floating_point()]
        return torch.stack(found).any() if found else None

    def _differ(self, expected: Tensor, got: Tensor) -> Tensor:
        """Return whether many positions differ by more than rounding, for which a router may send one elsewhere.

        `expected` is [..., n, F...]; the norm is that of the last dimension. `got` has as many elements.
        """
        if not expected.numel() or expected.numel() != got.numel():
            return torch.tensor(expected.numel() != got.numel(), device=got.device)
        kinds = (expected.dtype, _autocast_dtype(expected))
        least = _TOLERANCE_IN_FULL if self._is_in_full else _TOLERANCE
        tolerance = max(_TOLERANCES.get(kind, least) for kind in kinds)
        one, other = expected.float(), got.detach().reshape(expected.shape).float()
        norms = one.norm(dim=-1)
        # A position whose norm is next to nothing need not agree in any digit.
        scale = norms + 0.1 * norms.mean()
        is_off = ((one - other).norm(dim=-1) > tolerance * scale) & scale.isfinite()
        many: Tensor = is_off.sum() > max(1.0, self._most_off * is_off.numel())
        return many


def not_position_wise(module: nn.Module, what: str) -> UnsupportedError:
    """Return the error of a module whose positions give something else alone."""
    return UnsupportedError(
        f"{type(module).__name__} is to run in tiles, but it is not position-wise: some positions give other {what} "
        "alone than among others. Leave tiles out for its layer."
    )


def _spread(num_positions: int) -> Tensor:
    """Return some positions, from the last to the first."""
    number = max(min(_FEWEST_ALONE, num_positions), min(_MOST_ALONE, num_positions // _SHARE_ALONE))
    return torch.linspace(num_positions - 1, 0, number).long()


def _computes_in_full(kind: str, modules: Iterable[nn.Module], operators: set[str]) -> bool:
    """Whether what runs on such a device computes in float32 or float64, and keeps all digits."""
    weights = (weight for module in modules for weight in module._parameters.values() if weight is not None)
    if "ToCopyBackward0" in operators or any(weight.dtype not in _IN_FULL for weight in weights):
        return False
    return keeps_all_digits(kind, convolutions="ConvolutionBackward0" in operators)


def _autocast_dtype(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


class DroppedGraph:
    """The graph of a slice that runs for its output alone: takes the place of whatever autograd saves for it.

    Lives as long as any node that has saved something. Nodes that save nothing lead to the inputs of the slice.

    The hooks must not keep it: a collective that starts in the slice (ZeRO-3 gathers weights) takes a copy of the
    thread's hooks, and the backend's own thread drops that copy a moment after the collective has ended.
    """

    __slots__ = ("__weakref__", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def pack(self) -> Callable[[Tensor], DroppedGraph | None]:
        """Return the hook that puts this in the place of a tensor that autograd saves."""
        graph = weakref.ref(self)
        return lambda tensor: graph()

    def unpack(self) -> Tensor:
        """Raise: something runs backward through the graph while the slice still runs."""
        raise _escape(self._module)


def check_nothing_escapes(module: nn.Module, graph: Sequence[weakref.ref[Any]]) -> None:
    """Raise `UnsupportedError` if something other than a module's outputs is still used: it would get no gradient.

    `graph` refers to what lives as long as anything of the graph of a slice: a `DroppedGraph`, and inputs with a
    gradient.
    """
    # What only waits for the garbage collector does not count; the youngest generation takes a moment.
    for generation in range(3):
        if all(part() is None for part in graph):
            return
        gc.collect(generation)
    if any(part() is not None for part in graph):
        raise _escape(module)


def _escape(module: nn.Module) -> UnsupportedError:
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            # Made of `weight_orig`, or of `weight_g` and `weight_v`.
            is_made = any(other.startswith(f"{name}_") for other in inner._parameters)
            if isinstance(value, Tensor) and value.grad_fn is not None and is_made:
                return UnsupportedError(
                    f"{type(module).__name__} is to run in tiles, but {f'{path}.{name}'.lstrip('.')} is computed anew "
                    "each time that it runs, as by torch.nn.utils.prune and weight_norm in a forward pre-hook: each "
                    "slice would make one of its own. Make it permanent (prune.remove, remove_weight_norm), use "
                    "torch.nn.utils.parametrizations, or leave tiles out for its layer."
                )
    return UnsupportedError(
        f"{type(module).__name__} is to run in tiles, but something that is computed inside it is used outside "
        "too (a router's logits for an auxiliary loss, a hook that keeps outputs, a weight that parametrize.cached() "
        "keeps), which slices would cut off from its gradient. Set output_router_logits=False, take the hook off, or "
        "leave cached() or tiles out for its layer."
    )


def weights_used(
    module: nn.Module, outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[set[int], set[str]]:
    """Return which weights a slice's outputs were computed with, by position, and by which operators.

    The weights of an idle expert are not among them.

    Raises `UnsupportedError` if the module computes with a trainable tensor that it neither holds nor takes as an
    argument, and that would not train.
    """
    # Tensors at which the graph of the slice ends: leaves, or what an engine that shards has put in their place.
    leaves = {id(tensor) for tensor in inputs}
    positions = {id(weight): position for position, weight in enumerate(weights)}
    ends = {weight.grad_fn: position for position, weight in enumerate(weights) if weight.grad_fn is not None}
    found: set[int] = set()
    seen: set[Any] = set()
    operators: set[str] = set()
    waiting: list[Any] = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        operators.add(node.name())
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
    return found, operators


# --- The proof of a step. ---

_OUR_FAULT = "This is a fault of hf_ckpt: please report it, and leave tiles out meanwhile."


@dataclass(slots=True)
class _SliceRun:
    """What one slice got and returned; its last position is `end` - 1."""

    start: int
    end: int
    call_proof: CallProof
    """Of its forward and of its recomputation."""
    inputs: list[Fingerprint]
    outputs: list[Fingerprint]
    input_gradients: list[Fingerprint | None] = field(default_factory=list)

    @property
    def positions(self) -> str:
        """For messages."""
        return f"positions {self.start} to {self.end - 1}"


class TileProof:
    """Checks the slices of one call, in forward and in the first backward. `dim` is that of the positions."""

    def __init__(self, call: CallProof, alone: PositionsAlone, dim: int, inputs: Sequence[Tensor]) -> None:
        self._call = call
        self._dim = dim
        self._leading = tuple(inputs[0].shape[: dim + 1])
        # What the hooks of a region around this one recompute or copy back is checked there.
        self._is_inside = top_saved_tensors_hooks(True) is not None
        self._slices: list[_SliceRun] = []
        self._fault: str | None = None
        self._alone = alone
        # Of the outputs that have one; None before backward.
        self._gradients: list[Tensor] | None = None
        self._number = 0
        self._weight_gradients: list[list[Fingerprint | None]] = []

    def run(self, function: Function, inputs: Sequence[Tensor], pieces: Sequence[Tensor]) -> Any:
        """Run a slice: `function(*pieces)`, where `pieces` are cut from the whole `inputs`."""
        run = self._run if self._gradients is None else self._run_again
        return run(function, inputs, pieces)

    # --- Forward. ---

    def _run(self, function: Function, inputs: Sequence[Tensor], pieces: Sequence[Tensor]) -> Any:
        start = self._slices[-1].end if self._slices else 0
        end = start + pieces[0].shape[self._dim]
        given = self._check_pieces(inputs, pieces, start, end)
        call_proof = self._call.part_proof()
        returned, _ = call_proof.run_and_compare(function, *pieces)
        self._slices.append(_SliceRun(start, end, call_proof, given, self._take(plain_tensors(returned))))
        return returned

    @property
    def has_fault(self) -> bool:
        """Whether something wrong was found."""
        return self._fault is not None

    def check_outputs(self, returned: Any) -> None:
        """Check the outputs of the whole call."""
        self._check_covered("forward", len(self._slices))
        wholes = plain_tensors(returned)
        for part in self._slices:
            if not self._holds(wholes, part.outputs, part.start, part.end):
                self._add_fault(f"its output at {part.positions} is not what their slice returned. {_OUR_FAULT}")

    # --- Backward. ---

    def begin_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """The backward begins, with these gradients of the outputs."""
        self._gradients = [gradient for gradient in gradients if gradient is not None]

    def end(self) -> None:
        """Report what forward has shown; the backward runs whole, as without tiles."""
        self._call.finish(self._fault)

    def _run_again(self, function: Function, inputs: Sequence[Tensor], pieces: Sequence[Tensor]) -> Any:
        number, self._number = self._number, self._number + 1
        if number >= len(self._slices):
            self._add_fault(f"backward runs more slices than forward. {_OUR_FAULT}")
            return function(*pieces)
        part = self._slices[number]
        given = self._check_pieces(inputs, pieces, part.start, part.end)
        if not all_equal(part.inputs, given):
            if not self._is_inside:
                self._add_fault(f"its inputs at {part.positions} are other ones in backward than in forward.")
            return function(*pieces)
        returned, fault = part.call_proof.run_and_compare(function, *pieces)
        if fault is not None:
            self._add_fault(fault)
        return returned

    def check_gradients(
        self,
        parts: Sequence[Tensor | None],
        of_inputs: Sequence[Tensor | None],
        of_weights: Sequence[Tensor | None],
    ) -> None:
        """Check the backward of the slice that ran last.

        `parts` are the slice's of the gradients of the outputs; the others are those that it returned for each input
        and weight that needs a gradient.
        """
        if not 0 < self._number <= len(self._slices):
            return
        part = self._slices[self._number - 1]
        given = self._take([piece for piece in parts if piece is not None])
        if not self._holds(self._gradients or [], given, part.start, part.end):
            self._add_fault(f"the gradient of its output at {part.positions} is cut elsewhere. {_OUR_FAULT}")
        part.input_gradients = [None if x is None else self._take([x])[0] for x in of_inputs]
        self._weight_gradients.append([None if x is None else self._take([x], has_sketch=True)[0] for x in of_weights])

    def finish(
        self,
        function: Function,
        inputs: Sequence[Tensor],
        of_inputs: Sequence[Tensor | None],
        of_weights: Sequence[Tensor | None],
    ) -> None:
        """Check what the whole backward returns, and report.

        `of_inputs` has None for an input that needs no gradient.
        """
        self._check_covered("backward", self._number)
        wholes = [whole for whole in of_inputs if whole is not None]
        for part in self._slices[: self._number]:
            if not self._holds(wholes, self._gradients_of(part, wholes), part.start, part.end):
                self._add_fault(
                    f"the gradient of its input at {part.positions} is not that of their slice. {_OUR_FAULT}"
                )
        for number, total in enumerate(of_weights):
            if not self._is_sum([terms[number] for terms in self._weight_gradients], total):
                self._add_fault(f"the gradient of a weight is not the sum over its slices. {_OUR_FAULT}")
        if self._fault is None:
            differ = self._alone.gradients_differ(function, inputs, self._gradients or [], of_inputs)
            if differ is not None and bool(differ):
                self._add_fault(
                    "some of its positions give their inputs other gradients alone than in slices: what it gives back "
                    "at a position depends on more than its input and gradient there."
                )
        self._gradients = None
        self._call.finish(self._fault)

    # --- Inside. ---

    def _check_pieces(
        self, inputs: Sequence[Tensor], pieces: Sequence[Tensor], start: int, end: int
    ) -> list[Fingerprint]:
        given = self._take(pieces)
        if not self._holds(inputs, given, start, end):
            self._add_fault(f"a slice is not given what belongs to positions {start} to {end - 1}. {_OUR_FAULT}")
        return given

    def _check_covered(self, which: str, num_slices: int) -> None:
        end = self._slices[num_slices - 1].end if 0 < num_slices <= len(self._slices) else 0
        if end != self._leading[-1]:
            self._add_fault(f"the slices of its {which} cover {end} positions of {self._leading[-1]}. {_OUR_FAULT}")

    def _holds(self, wholes: Sequence[Tensor], parts: Sequence[Fingerprint], start: int, end: int) -> bool:
        """Whether whole tensors hold at some positions what slices did."""
        if len(wholes) != len(parts):
            return False
        with self._call.unobserved():
            index = torch.arange(start, min(end, self._leading[-1]))
            found = [self._alone.at(whole, index) for whole in wholes]
        return all(
            at.numel() == part.shape.numel() and are_equal(self._take([at.reshape(part.shape)])[0], part)
            for at, part in zip(found, parts, strict=True)
        )

    def _gradients_of(self, part: _SliceRun, wholes: Sequence[Tensor]) -> list[Fingerprint]:
        """Return what a slice's gradients of inputs should leave in the whole ones: zeros where it has none."""
        found = []
        for gradient, whole in zip(part.input_gradients, wholes, strict=False):
            if gradient is None:
                size = (*self._leading[:-1], part.end - part.start, *whole.shape[self._dim + 1 :])
                with self._call.unobserved():
                    zeros = whole.new_zeros(size)
                (gradient,) = self._take([zeros])
            found.append(gradient)
        return found

    def _is_sum(self, terms: Sequence[Fingerprint | None], total: Tensor | None) -> bool:
        found = [term for term in terms if term is not None]
        if total is None or not found:
            return total is None and not found
        return is_sum(found, self._take([total], has_sketch=True)[0])

    def _take(self, tensors: Sequence[Tensor], *, has_sketch: bool = False) -> list[Fingerprint]:
        return self._call.fingerprints(tensors, has_sketch=has_sketch)

    def _add_fault(self, fault: str) -> None:
        # What comes after the first may follow from it.
        self._fault = self._fault or fault
