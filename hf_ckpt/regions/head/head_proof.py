"""Whether a loss in chunks, and its gradients, are those of the plain head: checked in one call.

The loss of each chunk is compared with that of the plain head on the same rows, one chunk after another without a
graph, which costs one more forward of the head; the whole loss with the sum of those, summed and divided here. In
backward the gradients of one chunk are compared with those of the plain head; that of the hidden states, row by row,
with what the chunks returned; those of the head's weights with the sums of what the chunks returned.

Note [what chunks may be off by]: the plain head on the rows of a chunk is the same kernels on the same matrices, so
that equal bits are the rule. Where a kernel adds up in another order each time, a sum of losses in float32 is off by a
few units in the last place (`_LOSS`). Logits in half precision then round otherwise here and there: each by 2**-9 of
itself at most, up or down, so that a sum over rows is off by less than half of a thousandth (`_HALF_LOSS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from hf_ckpt.regions.execution_state import Function, RandomState
from hf_ckpt.regions.fingerprints import Fingerprint, are_equal, is_sum, relative_distance
from hf_ckpt.regions.head.chunked_loss import HIDDEN_STATES, LossCall, Parts
from hf_ckpt.regions.head.head_call import LogitsState, compute_logits
from hf_ckpt.regions.module_state import CallState
from hf_ckpt.regions.value_proof import ALLOWED, MOST_RUNS, CallProof
from hf_ckpt.upstream.torch import is_transformed

_LOSS = 1e-5
_HALF_LOSS = 2.0**-11
# Of a gradient's norm, in float32.
_GRADIENT = 2.0**-12
# In half precision, two units in the last place of bfloat16.
_HALF_GRADIENT = 2.0**-6
_OUR_FAULT = "This is a fault of hf_ckpt: please report it, and leave head: chunked out meanwhile."


class HeadProof:
    """Checks one loss, in its forward and in its first backward."""

    def __init__(self, call: CallProof, state: LogitsState, loss: LossCall) -> None:
        self._call = call
        self._loss = loss
        self._head_call = state.head_call
        self._operations = state.operations
        hidden = state.hidden.detach()
        self._hidden = hidden.reshape(-1, hidden.shape[-1])
        self._is_half = state.sample.dtype in (torch.float16, torch.bfloat16)
        lengths = self._head_call.lengths(len(self._hidden))
        self._rows = [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]
        self._fault: str | None = None
        self._random = RandomState.of(hidden)
        # The chunk whose gradients are compared with the plain head's.
        self._chosen = len(lengths) // 2
        # The head's adapters may be switched before the backward: its chunks then still run as in the forward.
        self._state = CallState(self._plain, (self._head_call.head,))
        self._random_of_chosen = self._random
        self._sum: Tensor | None = None
        # What a backward gives.
        self._expected: dict[str, Fingerprint] = {}
        self._given: dict[str, dict[int, Fingerprint]] = {}
        self._awaited: set[str] = set()
        self._is_over = False

    def watch(self, name: str, parts: Parts) -> None:
        """Have the gradients of a weight, or of `HIDDEN_STATES`, checked."""
        self._given[name] = {}
        self._awaited.add(name)
        parts.on_part, parts.on_total = partial(self._check_part, name), partial(self._check_total, name)

    # --- Forward. ---

    def compute(self, compute: Function, function: Function, *operands: Tensor) -> list[Tensor]:
        """Return the losses of the chunks; see `chunked_loss.Compute`."""
        values: list[Tensor] = compute(function, *operands, watch=self.watch)
        if self._rows[-1].stop != len(self._hidden) or len(values) != len(self._rows):
            self._add_fault(f"its chunks do not cover its {len(self._hidden)} rows. {_OUR_FAULT}")
            return values
        expected = self._plain_losses()
        for number, (value, plain, rows) in enumerate(zip(values, expected, self._rows, strict=True)):
            # After a fault nothing needs to be excused.
            again = partial(self._plain_again, number) if self._fault is None else None
            if not self._is_loss(value, plain, again):
                self._add_fault(
                    f"its loss over rows {rows.start} to {rows.stop - 1} is {_figure(value)}, and that of the plain "
                    f"head {_figure(plain)}. {_OUR_FAULT}"
                )
        joined = torch.cat(expected) if self._loss.reduction == "none" else torch.stack(expected).sum()
        self._sum = joined / _divisor(self._loss)
        return values

    def check_loss(self, value: Tensor) -> None:
        """Check the loss that the model gets, and its backward."""
        if self._sum is not None and not self._is_loss(value, self._sum.reshape(value.shape)):
            self._add_fault(
                f"its loss is {_figure(value)}, and that of the plain head {_figure(self._sum)}, from the same losses "
                f"of chunks. {_OUR_FAULT}"
            )
        self._sum = None
        if value.requires_grad:
            value.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]  # upstream

    def _plain_losses(self) -> list[Tensor]:
        """Return the losses of the chunks by the plain head; random numbers are drawn as the chunks drew them."""
        losses = []
        # Detached: a cast that autocast cached here for a weight that needs a gradient would have none.
        weights = {name: weight.detach() for name, weight in self._head_call.trainable_weights().items()}
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
        logits = compute_logits(self._head_call, self._operations, hidden, weights)
        loss, dtype = self._loss, torch.promote_types(logits.dtype, torch.float32)
        return loss.function(
            logits.to(dtype),
            loss.target.reshape(-1)[rows],
            weight=None if loss.weight is None else loss.weight.to(dtype),
            ignore_index=loss.ignore_index,
            reduction="none" if loss.reduction == "none" else "sum",
            **loss.options,
        )

    def _is_loss(self, value: Tensor, plain: Tensor, again: Callable[[], Tensor] | None = None) -> bool:
        with torch.no_grad():
            found = value.detach().double()
            error, size = (found - plain).abs().sum(), plain.abs().sum()
            if not bool(size.isfinite()):
                # As it is without chunks.
                return bool(torch.equal(found.isfinite(), plain.isfinite()))
            if bool(error <= (_HALF_LOSS if self._is_half else _LOSS) * size):
                return True
            if again is None:
                return False
            # One run may happen to give what the first gave, or nearly so.
            runs = [plain]
            for _ in range(MOST_RUNS):
                runs.append(again())
                noise = max(float((runs[-1] - one).abs().sum()) for one in runs)
                if noise and bool(error <= ALLOWED * noise):
                    self._call.note_noise(noise / float(size))
                    return True
            return False

    # --- Backward. ---

    def _begin_backward(self, gradient: Tensor) -> None:
        # A backward with a graph uses no buffers, and the next backward has other gradients. One of several gradients
        # at once is vectorized, which fingerprints cannot be.
        if self._is_over or self._fault is not None or torch.is_grad_enabled() or is_transformed():
            self._finish()
            return
        # An earlier backward may have come to some of them (`torch.autograd.grad`), or have ended in an error.
        self._given = {name: {} for name in self._given}
        # An engine that gathers weights at each call counts the backwards, and does not expect one of the plain head.
        if not self._head_call.is_gathered_by_itself():
            with self._state.as_in_forward():
                self._expected = self._plain_gradients(gradient, self._head_call.trainable_weights())
        if not self._awaited:
            self._finish()

    def _plain_gradients(self, gradient: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Fingerprint]:
        """Return the gradients of one chunk by the plain head. They need as much memory as those of any chunk."""
        rows = self._rows[self._chosen]
        hidden = self._hidden[rows].detach().requires_grad_(HIDDEN_STATES in self._awaited)
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        if self._loss.reduction == "none":
            of_loss = gradient.reshape(-1)[rows]
        else:
            of_loss = gradient / _divisor(self._loss).to(gradient.dtype)
        with self._random_of_chosen.kept(), torch.enable_grad():
            self._random_of_chosen.restore()
            # A view: tools that watch modules cannot follow a leaf in `torch.autograd.grad`.
            loss = self._plain(hidden.view_as(hidden), rows, leaves)
            wanted = {HIDDEN_STATES: hidden, **leaves} if hidden.requires_grad else leaves
            if not wanted:
                return {}
            found = torch.autograd.grad(loss, list(wanted.values()), of_loss.to(loss.dtype), materialize_grads=True)
        return {
            name: self._call.fingerprints([each], has_sketch=True)[0] for name, each in zip(wanted, found, strict=True)
        }

    def _check_part(self, name: str, gradient: Tensor, number: int) -> None:
        if name not in self._awaited or self._is_over:
            return
        (given,) = self._call.fingerprints([gradient], has_sketch=True)
        if number in self._given[name]:
            self._add_fault(f"a chunk ran backward twice. {_OUR_FAULT}")
        self._given[name][number] = given
        expected = self._expected.get(name)
        if number != self._chosen or expected is None or are_equal(expected, given):
            return
        distance = relative_distance(expected, given)
        is_half = self._is_half or gradient.dtype in (torch.float16, torch.bfloat16)
        if distance is None or distance > (_HALF_GRADIENT if is_half else _GRADIENT):
            size = "" if distance is None else f" by {100 * distance:.2g} %"
            self._add_fault(
                f"the gradient of {_named(name)} from a chunk is off{size} from the plain head's. {_OUR_FAULT}"
            )

    def _check_total(self, name: str, total: Tensor | None) -> None:
        if name not in self._awaited or self._is_over:
            return
        given = self._given[name]
        if len(given) != len(self._rows) and self._expected:
            self._add_fault(f"{len(given)} of {len(self._rows)} chunks gave {_named(name)} a gradient. {_OUR_FAULT}")
        elif total is not None and not (
            self._are_rows(given, total) if name == HIDDEN_STATES else self._is_sum(list(given.values()), total)
        ):
            self._add_fault(f"the gradient of {_named(name)} is not what its chunks gave. {_OUR_FAULT}")
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
            self._call.finish(self._fault)

    def _add_fault(self, fault: str) -> None:
        # What comes after the first may follow from it.
        self._fault = self._fault or fault


def _divisor(loss: LossCall) -> Tensor:
    """Return the divisor of the sum over all rows."""
    if loss.reduction != "mean":
        return loss.target.new_ones((), dtype=torch.float64)
    classes = loss.target[loss.target != loss.ignore_index]
    weights = classes.new_ones(classes.shape, dtype=torch.float64) if loss.weight is None else loss.weight[classes]
    return weights.sum(dtype=torch.float64)


def _named(name: str) -> str:
    return "the hidden states" if name == HIDDEN_STATES else name


def _figure(value: Tensor) -> str:
    return f"{float(value.detach().double().sum()):.9g}"
