"""What became of a combination: it is run with its plan and without, and compared bit by bit after each step."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from hf_ckpt.errors import HFCkptError
from tests.attack.combinations import Combination
from tests.attack.training import Left, Training

_CLOSE, _NOTHING = 1e-5, 1e-6
"""Of the norm, where sums are added in another order; float32, over five steps. Some gradients are all rounding."""


class Verdict(StrEnum):
    """What a plan made of a training."""

    EQUAL = "equal"
    """All that was compared is the same, to the bit; with tiles and the chunked head, within rounding."""
    REFUSED = "refused"
    """An error of ours said so, and everything before it was equal."""
    UNSUITABLE = "unsuitable"
    """The same before the event: the plan suits the model as little without it."""
    NEEDLESS = "needless"
    """Refused, though torch's own checkpointing of every layer is exact: for a look, no fault by itself."""
    SILENT = "silent"
    """Something else, and nothing was said."""
    UNPROVEN = "unproven"
    """The same, but a proof of each step (`prove=1`) sees it: what the plan does not look at in later steps."""
    RAW = "raw"
    """An error that is none of ours, where training without a plan has none."""
    UNDEFINED = "undefined"
    """Training without a plan ends in an error."""


FAULTS = (Verdict.SILENT, Verdict.RAW)


@dataclass(frozen=True)
class Outcome:
    """A verdict, and why."""

    combination: Combination
    verdict: Verdict
    why: str = ""

    def describe(self) -> str:
        """Return it as one line."""
        return f"{self.verdict.upper()} {self.combination.describe()}: {self.why}"


def outcome_of(combination: Combination) -> Outcome:
    """Run a combination and judge it."""
    expected, failure = _ran(combination, lambda training: training.run(None))
    if failure is not None:
        return Outcome(combination, Verdict.UNDEFINED, _text(failure))
    got, error = _ran(combination, lambda training: training.run(combination.asked))
    different = _difference(expected, got, is_bitwise=combination.asked.is_bitwise)
    if different is not None:
        proven, _ = _ran(combination, lambda training: training.run(combination.asked.proven))
        is_seen = _difference(expected, proven, is_bitwise=combination.asked.is_bitwise) is None
        return Outcome(combination, Verdict.UNPROVEN if is_seen else Verdict.SILENT, different)
    if error is None:
        return Outcome(combination, Verdict.EQUAL)
    if isinstance(error, HFCkptError) and len(got) < combination.step:
        return Outcome(combination, Verdict.UNSUITABLE, _text(error))
    by_torch, failed = _ran(combination, Training.run_torch)
    if not isinstance(error, HFCkptError):
        # Loud, and known to who uses torch's checkpointing: a tensor that was written to, saved tensors read twice.
        is_torchs = failed is not None and _text(failed)[:80] == _text(error)[:80] and bool(str(error))
        # Autograd says so of attention alone too, where torch's checkpointing, of whole layers, has no reason to.
        is_torchs |= "modified by an inplace operation" in str(error)
        return Outcome(combination, Verdict.REFUSED if is_torchs else Verdict.RAW, _text(error))
    is_exact = failed is None and _difference(expected, by_torch, is_bitwise=True) is None
    return Outcome(combination, Verdict.NEEDLESS if is_exact else Verdict.REFUSED, _text(error))


def _ran(combination: Combination, run: Callable[[Training], None]) -> tuple[list[Left], Exception | None]:
    """Return what each step left, and the error that ended the training."""
    with _quiet():
        training = Training(combination)
        try:
            run(training)
        except Exception as error:  # noqa: BLE001  (any error is a finding)
            return training.left, error
    return training.left, None


@contextmanager
def _quiet() -> Iterator[None]:
    level = (logger := logging.getLogger("hf_ckpt")).level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _difference(expected: list[Left], got: list[Left], *, is_bitwise: bool) -> str | None:
    """Return what differs first; None if nothing does, as far as the second training came."""
    for step, (ours, theirs) in enumerate(zip(expected, got, strict=False), start=1):
        # The last step may have ended in the middle.
        names = [name for name in ours if name in theirs and not _is_same(ours[name], theirs[name], is_bitwise)]
        if names:
            amount = _amount(ours[names[0]], theirs[names[0]])
            return f"step {step}: {names[0]}{amount}, and {len(names) - 1} more"
    return None


def _is_same(ours: object, theirs: object, is_bitwise: bool) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float) and not is_bitwise:
        return math.isclose(ours, theirs, rel_tol=_CLOSE, abs_tol=_NOTHING)
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return type(ours) is type(theirs) and ours == theirs
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if is_bitwise or not ours.is_floating_point():
        return torch.equal(ours, theirs)
    return bool((ours - theirs).norm() <= _CLOSE * ours.norm() + _NOTHING)


def _amount(ours: object, theirs: object) -> str:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        is_comparable = ours.is_floating_point() and ours.shape == theirs.shape
        return f" by {float((ours - theirs).norm() / ours.norm()):.2g} of its norm" if is_comparable else ""
    return "" if isinstance(ours, list | tuple | str) else f" is {theirs} for {ours}"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
