"""Whether a loss in chunks, and its gradients, are those of the plain head: looked at in one call.

The loss of each chunk is held against that of the plain head on the same rows, one chunk after another without a
graph, which costs one more forward of the head; the whole against the sum of those, added up and divided here. In
backward the gradients of one chunk are held against those of the plain head; that of the hidden states, row by row,
against what the chunks gave; those of the head's weights against the sums of what the chunks gave.

Note [what chunks may be off by]: the plain head on the rows of a chunk is the same kernels on the same matrices, so
that equal bits are the rule. Where a kernel adds up in another order each time, a sum of losses in float32 is off by a
few units in the last place (`_LOSS`). Logits in half precision then round otherwise here and there: each by 2**-9 of
itself at most, up or down, so that a sum over rows is off by less than half of a thousandth (`_HALF_LOSS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hf_ckpt.regions.call import Function
from hf_ckpt.regions.head.gradients import Parts
from hf_ckpt.regions.head.logits import DeferredLogits
from hf_ckpt.regions.module_state import CallState
from hf_ckpt.regions.rng_state import RandomState
from hf_ckpt.regions.tensor_hashes import Fingerprint, are_equal, is_sum, relative_distance
from hf_ckpt.regions.transforms import is_transformed
from hf_ckpt.regions.value_proof import CallProof

_LOSS = 1e-5
_HALF_LOSS = 2.0**-11
_GRADIENT = 2.0**-12
"""Of a gradient's norm, in float32."""
_HALF_GRADIENT = 2.0**-6
"""In half precision, two units in the last place of bfloat16."""
_OURS = "This is a fault of hf_ckpt: please report it, and leave head: chunked out meanwhile."
_ROWS = ""
"""The hidden states among the names of weights."""


@dataclass(frozen=True, eq=False)
class PlainLoss:
    """A loss as it was asked for.

    Args:
        function: `cross_entropy` or `nll_loss` of torch.
        target: class indices.
        weight: of the classes.
        ignore_index: as the function takes it.
        reduction: likewise.
        options: what else the function takes.
    """

    function: Callable[..., Tensor]
    target: Tensor
    weight: Tensor | None
    ignore_index: int
    reduction: str
    options: Mapping[str, Any]

    def of(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the loss of some rows: each, or their sum.

        Args:
            logits: of them, [n, V].
            rows: which.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return self.function(
            logits.to(dtype),
            self.target.reshape(-1)[rows],
            weight=None if self.weight is None else self.weight.to(dtype),
            ignore_index=self.ignore_index,
            reduction="none" if self.reduction == "none" else "sum",
            **self.options,
        )

    def divisor(self) -> Tensor:
        """Return what the sum over all rows is divided by."""
        if self.reduction != "mean":
            return self.target.new_ones((), dtype=torch.float64)
        classes = self.target[self.target != self.ignore_index]
        weights = classes.new_ones(classes.shape, dtype=torch.float64) if self.weight is None else self.weight[classes]
        return weights.sum(dtype=torch.float64)


class HeadProof:
    """Looks at one loss, its forward and its first backward.

    Args:
        call: the call that is due.
        logits: of which it is asked.
        loss: what is asked.
    """

    def __init__(self, call: CallProof, logits: DeferredLogits, loss: PlainLoss) -> None:
        self._call = call
        self._loss = loss
        self._source = logits.state.source
        self._steps = logits.state.steps
        hidden = logits.state.hidden.detach()
        self._hidden = hidden.reshape(-1, hidden.shape[-1])
        self._is_half = logits.dtype in (torch.float16, torch.bfloat16)
        lengths = self._source.lengths(len(self._hidden))
        self._rows = [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]
        self._fault: str | None = None
        self._random = RandomState.of(hidden)
        # Of the chunk whose gradients are looked at.
        self._chosen = len(lengths) // 2
        # Adapters of the head may be switched before the backward: its chunks then run as in the forward, too.
        self._state = CallState(self._plain, (self._source.head,))
        self._random_of_chosen = self._random
        self._sum: Tensor | None = None
        # Of a backward.
        self._expected: dict[str, Fingerprint] = {}
        self._given: dict[str, dict[int, Fingerprint]] = {}
        self._awaited: set[str] = set()
        self._is_over = False

    def parts(self, name: str, parts: Parts) -> Parts:
        """Return what looks at the gradients of a weight, or of the hidden states (`_ROWS`), while they come."""
        self._given[name] = {}
        self._awaited.add(name)
        return _WatchedParts(parts, partial(self._gave, name), partial(self._total, name))

    def rows(self, parts: Parts) -> Parts:
        """See `parts`."""
        return self.parts(_ROWS, parts)

    # --- Forward. ---

    def compute(self, compute: Function, function: Function, *operands: Tensor) -> list[Tensor]:
        """Return the losses of the chunks; see `losses.Compute`."""
        values: list[Tensor] = compute(function, *operands, proof=self)
        if self._rows[-1].stop != len(self._hidden) or len(values) != len(self._rows):
            self._add_fault(f"its chunks do not cover its {len(self._hidden)} rows. {_OURS}")
            return values
        expected = self._plain_losses()
        for number, (value, plain) in enumerate(zip(values, expected, strict=True)):
            if not self._is_loss(value, plain, partial(self._plain_again, number)):
                rows = self._rows[number]
                self._add_fault(
                    f"its loss over rows {rows.start} to {rows.stop - 1} is {_figure(value)}, and that of the plain "
                    f"head {_figure(plain)}. {_OURS}"
                )
        joined = torch.cat(expected) if self._loss.reduction == "none" else torch.stack(expected).sum()
        self._sum = joined / self._loss.divisor()
        return values

    def look_at(self, value: Tensor) -> None:
        """Look at the loss that is handed out, and at its backward."""
        if self._sum is not None and not self._is_loss(value, self._sum.reshape(value.shape)):
            self._add_fault(
                f"its loss is {_figure(value)}, and that of the plain head {_figure(self._sum)}, from the same losses "
                f"of chunks. {_OURS}"
            )
        self._sum = None
        if value.requires_grad:
            value.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]  # upstream

    def _plain_losses(self) -> list[Tensor]:
        """Return the losses of the chunks by the plain head; random numbers are drawn as the chunks drew them."""
        losses = []
        # Casts that autocast keeps for a weight that needs a gradient would have none.
        weights = {name: weight.detach() for name, weight in self._source.trainable_weights().items()}
        with self._random.kept(), torch.no_grad(), self._state.as_in_forward():
            self._random.restore()
            for number, rows in enumerate(self._rows):
                if number == self._chosen:
                    self._random_of_chosen = RandomState.of(self._hidden)
                losses.append(self._plain(self._hidden[rows], rows, weights).double())
        torch.clear_autocast_cache()
        return losses

    def _plain_again(self, number: int) -> Tensor:
        return self._plain_losses()[number]

    def _plain(self, hidden: Tensor, rows: slice, weights: Mapping[str, Tensor]) -> Tensor:
        logits = self._source.run(hidden, weights)
        for step in self._steps:
            logits = step.run(logits)
        return self._loss.of(logits, rows)

    def _is_loss(self, value: Tensor, plain: Tensor, again: Callable[[], Tensor] | None = None) -> bool:
        with torch.no_grad():
            found = value.detach().double()
            error, size = (found - plain).abs().sum(), plain.abs().sum()
            if not bool(size.isfinite()):
                # As it is without chunks.
                return bool(torch.equal(found.isfinite(), plain.isfinite()))
            if bool(error <= (_HALF_LOSS if self._is_half else _LOSS) * size):
                return True
            noise = None if again is None else (again() - plain).abs().sum()
            if noise is None or not bool(noise) or not bool(error <= 4 * noise):
                return False
            self._call.note_noise(float(noise / size))
            return True

    # --- Backward. ---

    def _begin_backward(self, gradient: Tensor) -> None:
        # One that is to be differentiated again has no buffers to look at, and the next one has other gradients.
        # And one for several gradients at once is vectorized, which fingerprints cannot be.
        if self._is_over or self._fault is not None or torch.is_grad_enabled() or is_transformed():
            self._finish()
            return
        # What is gathered at each call has its backward counted by the engine, which knows nothing of this one.
        if not self._source.is_gathered_by_itself():
            with self._state.as_in_forward():
                self._expected = self._plain_gradients(gradient, self._source.trainable_weights())
        if not self._awaited:
            self._finish()

    def _plain_gradients(self, gradient: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Fingerprint]:
        """Return the gradients of one chunk by the plain head: no larger for a moment than those of the next chunk."""
        rows = self._rows[self._chosen]
        hidden = self._hidden[rows].detach().requires_grad_(_ROWS in self._awaited)
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        if self._loss.reduction == "none":
            of_loss = gradient.reshape(-1)[rows]
        else:
            of_loss = gradient / self._loss.divisor().to(gradient.dtype)
        with self._random_of_chosen.kept(), torch.enable_grad():
            self._random_of_chosen.restore()
            # Tools that watch modules cannot follow a leaf in `torch.autograd.grad`.
            loss = self._plain(hidden.view_as(hidden), rows, leaves)
            wanted = {_ROWS: hidden, **leaves} if hidden.requires_grad else leaves
            if not wanted:
                return {}
            found = torch.autograd.grad(loss, list(wanted.values()), of_loss.to(loss.dtype), materialize_grads=True)
        return {
            name: self._call.fingerprints([each], has_sketch=True)[0] for name, each in zip(wanted, found, strict=True)
        }

    def _gave(self, name: str, gradient: Tensor, number: int) -> None:
        """A chunk gave a gradient."""
        if self._is_over:
            return
        (given,) = self._call.fingerprints([gradient], has_sketch=True)
        if number in self._given[name]:
            self._add_fault(f"a chunk ran backward twice. {_OURS}")
        self._given[name][number] = given
        expected = self._expected.get(name)
        if number != self._chosen or expected is None or are_equal(expected, given):
            return
        distance = relative_distance(expected, given)
        is_half = self._is_half or gradient.dtype in (torch.float16, torch.bfloat16)
        if distance is None or distance > (_HALF_GRADIENT if is_half else _GRADIENT):
            size = "" if distance is None else f" by {100 * distance:.2g} %"
            self._add_fault(f"the gradient of {_named(name)} from a chunk is off{size} from the plain head's. {_OURS}")

    def _total(self, name: str, total: Tensor | None) -> None:
        """All chunks have given their gradients."""
        if self._is_over:
            return
        given = self._given[name]
        if len(given) != len(self._rows) and self._expected:
            self._add_fault(f"{len(given)} of {len(self._rows)} chunks gave {_named(name)} a gradient. {_OURS}")
        elif total is not None and not (
            self._are_rows(given, total) if name == _ROWS else self._is_sum(list(given.values()), total)
        ):
            self._add_fault(f"the gradient of {_named(name)} is not what its chunks gave. {_OURS}")
        self._awaited.discard(name)
        if not self._awaited:
            self._finish()

    def _are_rows(self, given: Mapping[int, Fingerprint], total: Tensor) -> bool:
        if len(total) != len(self._hidden):
            return False
        found = self._call.fingerprints([total[self._rows[number]] for number in given])
        return all(map(are_equal, given.values(), found))

    def _is_sum(self, given: Sequence[Fingerprint], total: Tensor) -> bool:
        (found,) = self._call.fingerprints([total], has_sketch=True)
        return is_sum(given, found)

    def _finish(self) -> None:
        if not self._is_over:
            self._is_over = True
            # The loss outlives its backward.
            self._hidden = self._hidden.new_empty(0)
            self._call.report(self._fault)

    def _add_fault(self, fault: str) -> None:
        # What comes after the first may follow from it.
        self._fault = self._fault or fault


class _WatchedParts:
    """Gradients that come in parts, looked at.

    Args:
        parts: takes them in.
        gave: is told of each part and its number.
        total: is told of the whole.
    """

    def __init__(
        self, parts: Parts, gave: Callable[[Tensor, int], None], total: Callable[[Tensor | None], None]
    ) -> None:
        self._parts = parts
        self._gave = gave
        self._total = total

    def part_of(self, tensor: Tensor, number: int) -> Tensor:
        return self._parts.part_of(tensor, number)

    def add(self, gradient: Tensor, number: int) -> None:
        self._gave(gradient, number)
        self._parts.add(gradient, number)

    def total(self) -> Tensor | None:
        total = self._parts.total()
        self._total(total)
        return total

    def spread(self, gradient: Tensor, number: int) -> Tensor:
        return self._parts.spread(gradient, number)


def _named(name: str) -> str:
    return "the hidden states" if name == _ROWS else name


def _figure(value: Tensor) -> str:
    return f"{float(value.detach().double().sum()):.9g}"
