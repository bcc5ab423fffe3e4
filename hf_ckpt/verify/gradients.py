"""Gradients of two trials, compared; loss and weights beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_ckpt.verify.fingerprints import of_tensor
from hf_ckpt.verify.record import Record


@dataclass(frozen=True)
class Spread:
    """How far two trials are apart.

    Args:
        num_compared: tensors that both have, or one of them, counted once for each step.
        differing: names of those that are not equal bit by bit.
        lost: names of those that only the first trial has.
        gained: names of those that only the second trial has.
        max_relative_error: largest difference over the largest value of its tensor.
        max_scaled_error: the same, where a tensor with small values only is measured by a tenth of the largest value of
            all. What is left of terms that cancel has an error of its own, also in a run without the plan.
        min_cosine: lowest cosine between two twins.
        worst: the name to which the error belongs.
        first_step: the first step, from 1, with a difference; 0 without one.
    """

    num_compared: int = 0
    differing: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    gained: tuple[str, ...] = ()
    max_relative_error: float = 0.0
    max_scaled_error: float = 0.0
    min_cosine: float = 1.0
    worst: str = ""
    first_step: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether everything is equal bit by bit."""
        return not (self.differing or self.lost or self.gained)


def between_gradients(first: Record, second: Record, num_steps: int | None = None) -> Spread:
    """Compare every gradient of every step that both trials have done, or of the first of them."""
    spread = Spread()
    for step in range(min(first.num_steps, second.num_steps, num_steps or first.num_steps)):
        spread = _with_step(spread, _between(first.gradients(step), second.gradients(step)), step + 1)
    return spread


def between_weights(first: Record, second: Record) -> Spread:
    """Compare the trainable parameters after the last step."""
    return _between(dict(first.weights()), dict(second.weights()))


def _between(first: Mapping[str, Tensor | None], second: Mapping[str, Tensor | None]) -> Spread:
    names = first.keys() | second.keys()
    lost = sorted(name for name in names if first.get(name) is not None and second.get(name) is None)
    gained = sorted(name for name in names if first.get(name) is None and second.get(name) is not None)
    differing, error, scaled, cosine, worst = [], 0.0, 0.0, 1.0, ""
    floor = 0.1 * max((_largest(tensor) for tensor in first.values() if tensor is not None), default=0.0)
    for name in first:
        expected, got = first[name], second.get(name)
        if expected is None or got is None or of_tensor(expected) == of_tensor(got):
            continue
        differing.append(name)
        cosine = min(cosine, _cosine(expected, got))
        own = _relative_error(expected, got)
        scaled = max(scaled, own * min(_largest(expected) / floor, 1.0) if floor else own)
        if own > error:
            error, worst = own, name
    num_there = sum(1 for name in names if first.get(name) is not None or second.get(name) is not None)
    names_of = tuple(differing), tuple(lost), tuple(gained)
    return Spread(num_there, *names_of, error, scaled, cosine, worst, 1 if differing else 0)


def _with_step(so_far: Spread, step: Spread, number: int) -> Spread:
    worse = step if step.max_relative_error > so_far.max_relative_error else so_far
    return Spread(
        num_compared=so_far.num_compared + step.num_compared,
        differing=tuple(dict.fromkeys((*so_far.differing, *step.differing))),
        lost=tuple(dict.fromkeys((*so_far.lost, *step.lost))),
        gained=tuple(dict.fromkeys((*so_far.gained, *step.gained))),
        max_relative_error=worse.max_relative_error,
        max_scaled_error=max(so_far.max_scaled_error, step.max_scaled_error),
        min_cosine=min(so_far.min_cosine, step.min_cosine),
        worst=worse.worst,
        first_step=so_far.first_step or (0 if step.is_equal else number),
    )


def _relative_error(expected: Tensor, got: Tensor) -> float:
    if expected.shape != got.shape:
        return math.inf
    largest = expected.double().abs().max()
    error = float((expected.double() - got.double()).abs().max() / largest)
    # What is not a number is smaller than nothing, and larger than nothing.
    return error if math.isfinite(error) else math.inf


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _cosine(expected: Tensor, got: Tensor) -> float:
    if expected.shape != got.shape:
        return 0.0
    first, second = expected.double().flatten(), got.double().flatten()
    norms = first.norm() * second.norm()
    # Rounding could make the cosine of two close vectors a little more than one.
    cosine = float(torch.clamp(first @ second / norms, -1, 1)) if norms > 0 else 0.0
    return cosine if math.isfinite(cosine) else 0.0
