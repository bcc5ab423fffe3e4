"""Whether a window that runs again computes what it computed before memory ran out. Nothing runs for that alone.

Of each micro-batch its inputs and, once its forward has ended, its loss are noted, on the device. The replay is held
against them bit by bit, and the state that it begins in against that which was noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.policy.plan import Plan
from hf_ckpt.regions.fingerprints import (
    Fingerprint,
    Samples,
    are_equal,
    checksum,
    fingerprint,
    is_plain,
    plain_tensors,
    unobserved,
)
from hf_ckpt.upstream.torch import keeps_all_digits

# So many units of rounding of float32 is 1e-6, which tiles and the chunked head keep to.
_ROUNDINGS = 8


@dataclass(slots=True)
class _Noted:
    inputs: list[tuple[str, Fingerprint]]
    plan: Plan
    losses: list[Tensor | Samples] = field(default_factory=list)


# Note [Rounding]. Plans give the same bits, but for tiles and the chunked head, which add sums in another order. And
# some kernels of accelerators add in the order in which their threads end (`index_add_`, `scatter_add_`, sums of
# experts), for as long as `torch.use_deterministic_algorithms` does not forbid it: then no two runs have the same bits.
# In both cases losses may differ by what rounding makes of that, and all else is still held bit by bit.
@dataclass
class ReplayProof:
    """Of one window, whose step and micro-batches messages call as they are given."""

    _step: str
    _micro_batch: str
    # Their precision says how far off rounding may be; see Note [Rounding].
    _parameters: Callable[[], Iterable[Tensor]]
    # What a user can do about a difference.
    _to_do: str
    # Whether forwards run under autocast, where that is not seen when they begin.
    is_mixed: bool = field(default=False, kw_only=True)
    _noted: list[_Noted] = field(default_factory=list)
    _num_begun: int = 0
    _num_losses: int = 0
    _allowed: float = 0.0

    def begin_replay(self, first: int = 0) -> None:
        self._num_begun = first
        # Those before it stay as they are.
        self._num_losses = len(self._noted[first - 1].losses) if first else 0

    def check_start(self, generators: Sequence[str], gradients: Sequence[str] = ()) -> None:
        """Raise where what runs again begins with other generators than before, or with gradients that were not."""
        if generators:
            self._refuse(f"begins in another state of {' and '.join(generators)} random numbers")
        if gradients:
            self._refuse(f"begins with gradients of the attempt before it ({', '.join(gradients[:4])})")

    def begin_micro_batch(self, inputs: Iterable[tuple[str, Tensor]], plan: Plan) -> None:
        self._check_whole()
        with unobserved():
            found = [(name, checksum(tensor)) for name, tensor in inputs if is_plain(tensor)]
        number, self._num_begun, self._num_losses = self._num_begun, self._num_begun + 1, 0
        if number == len(self._noted):
            self._noted.append(_Noted(found, plan))
            return
        self.is_mixed |= torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        noted = self._noted[number]
        changed = ["others were given"]
        if [name for name, _ in noted.inputs] == [name for name, _ in found]:
            pairs = zip(noted.inputs, found, strict=True)
            changed = [name for (name, one), (_, other) in pairs if not are_equal(one, other)]
        if changed:
            self._refuse(f"has other inputs in {self._micro_batch} {number + 1} ({', '.join(changed[:4])})")
        self._allowed = self._rounding(noted.plan, plan)
        noted.plan = plan

    def note_loss(self, loss: Any) -> None:
        """The forward of the micro-batch has ended, with a loss, or with an output that has one."""
        if not self._num_begun:
            return
        noted, number = self._noted[self._num_begun - 1], self._num_losses
        self._num_losses += 1
        found = loss.get("loss") if isinstance(loss, Mapping) else loss
        if not (isinstance(found, Tensor) and is_plain(found) and found.numel() == 1):
            found = plain_tensors(loss)
        if number < len(noted.losses):
            if difference := _difference(noted.losses[number], found, self._allowed):
                self._refuse(f"has another loss in {self._micro_batch} {self._num_begun}{difference}")
            return
        # A copy, as whoever holds the loss may add to it. Of outputs without a loss a few values have to do.
        with unobserved():
            noted.losses.append(found.detach().clone() if isinstance(found, Tensor) else Samples(found))

    def end_micro_batch(self, returned: Any) -> None:
        """A micro-batch is through, and has returned its loss: what is known of it where no backward has told."""
        if not self._num_losses and isinstance(returned, Tensor):
            self.note_loss(returned)
        self._check_whole()

    def end_replay(self) -> None:
        self._check_whole()
        if self._num_begun < len(self._noted):
            self._refuse(f"has run {self._num_begun} of {len(self._noted)} {self._micro_batch}s that had begun")

    def _check_whole(self) -> None:
        """Raise where a micro-batch that ran again has had fewer forwards than before."""
        if self._num_begun and self._num_losses < len(self._noted[self._num_begun - 1].losses):
            self._refuse(f"has not run the whole of {self._micro_batch} {self._num_begun}")

    def _rounding(self, before: Plan, now: Plan) -> float:
        """Return how far off the loss may be, relative to itself."""
        parameters = [each for each in self._parameters() if each.is_floating_point()]
        is_repeated = torch.are_deterministic_algorithms_enabled() or all(each.is_cpu for each in parameters)
        # Tiles and the head are what of a plan adds sums in another order.
        sums = [
            [plan.head, *(layer.tiles for stack in plan.stacks for layer in stack.layers)] for plan in (before, now)
        ]
        if is_repeated and sums[0] == sums[1]:
            return 0.0
        is_float32 = (
            not self.is_mixed
            and {each.dtype for each in parameters} <= {torch.float32, torch.float64}
            and all(keeps_all_digits(kind) for kind in {each.device.type for each in parameters})
        )
        return _ROUNDINGS * torch.finfo(torch.float32).eps if is_float32 else torch.finfo(torch.bfloat16).eps

    def _refuse(self, what: str) -> NoReturn:
        raise PlanMismatchError(
            f"{self._step} ran out of memory and runs again under a leaner plan, but {what}. It is not the same "
            "computation: something that the step reads was not undone, and its gradients would be others. "
            f"{self._to_do}"
        )


def _difference(noted: Tensor | Samples, found: Tensor | list[Tensor], allowed: float) -> str | None:
    """Say how two losses differ; None where they do not. Waits for the device."""
    if isinstance(noted, Samples):
        is_other = isinstance(found, Tensor) or (not allowed and bool(noted.differ(found)))
        return ", as samples of its output show" if is_other else None
    if not isinstance(found, Tensor):
        return ", which is none"
    if are_equal(fingerprint(noted), fingerprint(found.detach())):
        return None
    before, now = float(noted), float(found.detach())
    are_nan = before != before and now != now
    if allowed and (are_nan or abs(before - now) <= allowed * max(abs(before), abs(now))):
        return None
    return f" ({now!r}, and {before!r} before)"
