"""Whether slices stand for the whole: each is repeated in backward, cut where it should be and put where it belongs.

Knows nothing of how a call is cut and put together: positions are counted from what the slices are given, and taken out
of the whole tensors by index.

Note [what is proven of tiles]: bit by bit, that the slices are given the inputs, and the gradients of the outputs,
position after position from the first to the last; that in backward they are given, and return, what they were given
and returned in forward; that the whole outputs and the whole gradients of the inputs hold what they gave. Within
rounding, that the gradients of weights are the sums of theirs, and that a few positions give the same alone, forward
and backward: by other kernels, as their matrices are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_ckpt.regions.call import Function
from hf_ckpt.regions.rng_state import RandomState
from hf_ckpt.regions.tensor_hashes import Fingerprint, are_equal, is_sum, plain_tensors
from hf_ckpt.regions.value_proof import CallProof

_TOLERANCES = {torch.float16: 2.0**-5, torch.bfloat16: 2.0**-4}
"""Of a position's norm. A few roundings one after another, of eight bits in bfloat16."""
_TOLERANCE = 2.0**-8
"""In float32, of which TF32 keeps eleven bits, and more."""
_NUM_ALONE = 8
_SHARE_ALONE = 16
"""Of so many positions one runs alone, at most `_NUM_ALONE`: that costs a fifth of a forward, or less."""
_OURS = "This is a fault of hf_ckpt: please report it, and leave tiles out meanwhile."


@dataclass(slots=True)
class _SliceRun:
    """What one slice showed.

    Args:
        start: its first position.
        end: behind its last position.
        look: at its forward and its repetition.
        inputs: that it was given.
        outputs: that it returned.
        input_gradients: that its backward returned.
    """

    start: int
    end: int
    look: CallProof
    inputs: list[Fingerprint]
    outputs: list[Fingerprint]
    input_gradients: list[Fingerprint | None] = field(default_factory=list)

    @property
    def positions(self) -> str:
        """In words."""
        return f"positions {self.start} to {self.end - 1}"


class TileProof:
    """Looks at the slices of one call, in forward and in the first backward.

    Args:
        call: the call that is due.
        dim: the dimension of the positions.
        inputs: of the call, whole.
    """

    def __init__(self, call: CallProof, dim: int, inputs: Sequence[Tensor]) -> None:
        self._call = call
        self._dim = dim
        self._leading = tuple(inputs[0].shape[: dim + 1])
        # What is recomputed, or brought back from elsewhere, is looked at there.
        self._is_inside = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        self._slices: list[_SliceRun] = []
        self._fault: str | None = None
        self._alone = _spread(self._leading[-1])
        self._outputs_alone: list[Tensor] = []
        # Of the outputs, None before backward.
        self._gradients: list[Tensor | None] | None = None
        self._number = 0
        self._weight_gradients: list[list[Fingerprint | None]] = []

    def run(self, function: Function, inputs: Sequence[Tensor], pieces: Sequence[Tensor]) -> Any:
        """Run a slice: `function(*pieces)`.

        Args:
            function: the module's forward.
            inputs: of the whole call.
            pieces: of them.
        """
        run = self._run if self._gradients is None else self._run_again
        return run(function, inputs, pieces)

    # --- Forward. ---

    def _run(self, function: Function, inputs: Sequence[Tensor], pieces: Sequence[Tensor]) -> Any:
        start = self._slices[-1].end if self._slices else 0
        end = start + pieces[0].shape[self._dim]
        given = self._check_pieces(inputs, pieces, start, end)
        look = self._call.part()
        returned, _ = look.compared(function, *pieces)
        self._slices.append(_SliceRun(start, end, look, given, self._take(plain_tensors(returned))))
        return returned

    def joined(self, returned: Any) -> None:
        """Look at the outputs of the whole call."""
        self._check_covered("forward", len(self._slices))
        wholes = plain_tensors(returned)
        for part in self._slices:
            if not self._holds(wholes, part.outputs, part.start, part.end):
                self._add_fault(f"its output at {part.positions} is not what their slice returned. {_OURS}")
        with self._call.unseen():
            self._outputs_alone = [self._at(whole, self._alone) for whole in wholes]

    # --- Backward. ---

    def begin_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """The backward begins.

        Args:
            gradients: of the outputs.
        """
        self._gradients = list(gradients)

    def _run_again(self, function: Function, inputs: Sequence[Tensor], pieces: Sequence[Tensor]) -> Any:
        number, self._number = self._number, self._number + 1
        if number >= len(self._slices):
            self._add_fault(f"backward runs more slices than forward. {_OURS}")
            return function(*pieces)
        part = self._slices[number]
        given = self._check_pieces(inputs, pieces, part.start, part.end)
        if not _all_equal(part.inputs, given):
            if not self._is_inside:
                self._add_fault(f"its inputs at {part.positions} are other ones in backward than in forward.")
            return function(*pieces)
        returned, fault = part.look.compared(function, *pieces)
        if fault is not None:
            self._add_fault(fault)
        return returned

    def gave(
        self,
        parts: Sequence[Tensor | None],
        of_inputs: Sequence[Tensor | None],
        of_weights: Sequence[Tensor | None],
    ) -> None:
        """Look at the backward of the slice that ran last.

        Args:
            parts: of the gradients of the outputs, that the slice was given.
            of_inputs: what it returned for each input that needs a gradient.
            of_weights: likewise for each weight.
        """
        if not 0 < self._number <= len(self._slices):
            return
        part = self._slices[self._number - 1]
        given = self._take([piece for piece in parts if piece is not None])
        if not self._holds(self._given_gradients(), given, part.start, part.end):
            self._add_fault(f"the gradient of its output at {part.positions} is cut elsewhere. {_OURS}")
        part.input_gradients = [None if x is None else self._take([x])[0] for x in of_inputs]
        self._weight_gradients.append([None if x is None else self._take([x], has_sketch=True)[0] for x in of_weights])

    def finish(
        self,
        function: Function,
        inputs: Sequence[Tensor],
        of_inputs: Sequence[Tensor | None],
        of_weights: Sequence[Tensor | None],
    ) -> None:
        """Look at what the whole backward returns, and report.

        Args:
            function: the module's forward.
            inputs: of the whole call.
            of_inputs: gradient of each input, None where it needs none.
            of_weights: gradient of each weight.
        """
        self._check_covered("backward", self._number)
        wholes = [whole for whole in of_inputs if whole is not None]
        for part in self._slices[: self._number]:
            if not self._holds(wholes, self._gradients_of(part, wholes), part.start, part.end):
                self._add_fault(f"the gradient of its input at {part.positions} is not that of their slice. {_OURS}")
        for number, total in enumerate(of_weights):
            if not self._is_sum([terms[number] for terms in self._weight_gradients], total):
                self._add_fault(f"the gradient of a weight is not the sum over its slices. {_OURS}")
        if self._fault is None and not self._are_same_alone(function, inputs, of_inputs):
            self._add_fault(
                "some of its positions give other values, or gradients, alone than in slices: its output at a position "
                "depends on more than its input there."
            )
        self._gradients = None
        self._call.report(self._fault)

    # --- Inside. ---

    def _check_pieces(
        self, inputs: Sequence[Tensor], pieces: Sequence[Tensor], start: int, end: int
    ) -> list[Fingerprint]:
        given = self._take(pieces)
        if not self._holds(inputs, given, start, end):
            self._add_fault(f"a slice is not given what belongs to positions {start} to {end - 1}. {_OURS}")
        return given

    def _check_covered(self, which: str, num_slices: int) -> None:
        end = self._slices[num_slices - 1].end if 0 < num_slices <= len(self._slices) else 0
        if end != self._leading[-1]:
            self._add_fault(f"the slices of its {which} cover {end} positions of {self._leading[-1]}. {_OURS}")

    def _holds(self, wholes: Sequence[Tensor], parts: Sequence[Fingerprint], start: int, end: int) -> bool:
        """Whether whole tensors are at some positions what slices were."""
        if len(wholes) != len(parts):
            return False
        with self._call.unseen():
            index = torch.arange(start, min(end, self._leading[-1]))
            found = [self._at(whole, index) for whole in wholes]
        return all(
            at.numel() == part.shape.numel() and are_equal(self._take([at.reshape(part.shape)])[0], part)
            for at, part in zip(found, parts, strict=True)
        )

    def _at(self, whole: Tensor, index: Tensor) -> Tensor:
        """Return some positions of a tensor that has them all, in dimensions apart or flattened; nothing of another."""
        whole = whole.detach()
        if tuple(whole.shape[: self._dim + 1]) != self._leading:
            if not whole.dim() or whole.shape[0] != math.prod(self._leading):
                return whole.new_empty(0)
            whole = whole.reshape(*self._leading, *whole.shape[1:])
        return whole.index_select(self._dim, index.to(whole.device))

    def _given_gradients(self) -> list[Tensor]:
        return [gradient for gradient in self._gradients or () if gradient is not None]

    def _gradients_of(self, part: _SliceRun, wholes: Sequence[Tensor]) -> list[Fingerprint]:
        """Return what a slice's gradients of inputs should leave in the whole ones: zeros where it has none."""
        found = []
        for gradient, whole in zip(part.input_gradients, wholes, strict=False):
            if gradient is None:
                size = (*self._leading[:-1], part.end - part.start, *whole.shape[self._dim + 1 :])
                with self._call.unseen():
                    zeros = whole.new_zeros(size)
                (gradient,) = self._take([zeros])
            found.append(gradient)
        return found

    def _is_sum(self, terms: Sequence[Fingerprint | None], total: Tensor | None) -> bool:
        found = [term for term in terms if term is not None]
        if total is None or not found:
            return total is None and not found
        return is_sum(found, self._take([total], has_sketch=True)[0])

    def _are_same_alone(self, function: Function, inputs: Sequence[Tensor], of_inputs: Sequence[Tensor | None]) -> bool:
        """Whether a few positions give the same without the others. Nothing is asked where random numbers are drawn."""
        before = RandomState.of(list(inputs))
        alone = [
            self._at(x, self._alone).requires_grad_(of is not None) for x, of in zip(inputs, of_inputs, strict=True)
        ]
        with before.kept(), torch.enable_grad():
            # Tools that watch modules cannot follow a leaf in `torch.autograd.grad`.
            outputs = plain_tensors(function(*(x.view_as(x) for x in alone)))
            draws = not RandomState.of(list(inputs)).is_same(before)
        if draws or len(outputs) != len(self._outputs_alone):
            return draws
        if not all(map(_are_near, self._outputs_alone, outputs)):
            return False
        gradients = self._given_gradients()
        floating = [output for output in outputs if output.requires_grad]
        wholes = [whole for whole in of_inputs if whole is not None]
        if not wholes or not floating or len(floating) != len(gradients):
            # Some of its outputs were not used: which, is not told here.
            return True
        parts = [self._at(x, self._alone).reshape(y.shape) for x, y in zip(gradients, floating, strict=True)]
        wanted = [x for x in alone if x.requires_grad]
        found: Sequence[Tensor | None] = torch.autograd.grad(floating, wanted, parts, allow_unused=True)
        with self._call.unseen():
            expected = [self._at(whole, self._alone) for whole in wholes]
            return all(
                _are_near(x, torch.zeros_like(x) if y is None else y) for x, y in zip(expected, found, strict=True)
            )

    def _take(self, tensors: Sequence[Tensor], *, has_sketch: bool = False) -> list[Fingerprint]:
        return self._call.fingerprints(tensors, has_sketch=has_sketch)

    def _add_fault(self, fault: str) -> None:
        # What comes after the first may follow from it.
        self._fault = self._fault or fault


def _spread(num_positions: int) -> Tensor:
    """Return some positions, the first and the last among them."""
    number = max(2, min(_NUM_ALONE, num_positions // _SHARE_ALONE))
    return torch.linspace(0, num_positions - 1, number).long()


@torch.no_grad()
def _are_near(expected: Tensor, got: Tensor) -> bool:
    """Whether most positions are the same within rounding; a router may send one elsewhere for that.

    Args:
        expected: [..., n, F...], or with other dimensions; by the last one is measured.
        got: as many elements.
    """
    if not expected.is_floating_point() or not expected.numel():
        return expected.numel() == got.numel()
    if expected.numel() != got.numel():
        return False
    kinds = (expected.dtype, _autocast_dtype(expected))
    tolerance = max(_TOLERANCES.get(kind, _TOLERANCE) for kind in kinds)
    one, other = expected.float(), got.detach().reshape(expected.shape).float()
    norms = one.norm(dim=-1)
    # Of a position that has next to nothing no digit is asked.
    scale = norms + 0.1 * norms.mean()
    is_off = ((one - other).norm(dim=-1) > tolerance * scale) & scale.isfinite()
    return bool(is_off.float().mean() <= 0.5)


def _autocast_dtype(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _all_equal(ones: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> bool:
    return len(ones) == len(others) and all(map(are_equal, ones, others))
