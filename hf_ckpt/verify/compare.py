"""Loss, gradients and weights of three trials, compared."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hf_ckpt.verify.check import Check
from hf_ckpt.verify.gradients import Spread, between_gradients, between_weights
from hf_ckpt.verify.record import Record
from hf_ckpt.verify.tolerance import REPEATED, Leeway
from hf_ckpt.verify.trials import Trials, first_module, losses_of
from hf_ckpt.verify.words import counted, listed

# Two draws of the same noise: the largest of one may be a few times the largest of the other.
_NOISE_MARGIN = 4.0


def check_repeatability(trials: Trials) -> Check:
    """Tell whether the reference repeats itself, and if not, which module is the first that does not."""
    name = "repeatability"
    if trials.is_repeatable:
        return Check(name=name, verdict="pass", detail="Without the plan, two runs are equal bit by bit.")
    module = first_module(trials.reference, trials.repeated)
    where = (
        f"The first module whose output differs is {module}: a non-deterministic kernel, or code that draws from "
        "somewhere else than torch's seeded generators"
        if module
        else "All modules return the same in forward: a kernel of the backward is non-deterministic, first in "
        f"{listed(trials.noise.differing[:1])}"
    )
    return Check(
        name=name,
        verdict="fail",
        detail=f"Without the plan, two runs from the same weights, seed and batches differ. {where}. "
        "training.full_determinism=true makes torch choose kernels that repeat themselves.",
        figures=_figures(trials.noise),
    )


def check_loss(trials: Trials) -> Check:
    """Compare the loss of every micro-batch."""
    name = "loss"
    expected, got = losses_of(trials.reference), losses_of(trials.planned)
    expected = expected[: len(got)]
    if not all(math.isfinite(loss) for loss in expected):
        return Check(name=name, verdict="fail", detail="The loss is not finite even without the plan.")
    if not got:
        return Check(name=name, verdict="skip", detail="No forward and backward was completed with the plan.")
    differing = [number for number, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]]
    error = _error_of(zip(expected, got, strict=True))
    figures: dict[str, float] = {"num_losses": len(got), "num_not_equal": len(differing), "max_relative_error": error}
    if not differing:
        what = f"{counted(len(got), 'loss')[:-1] + 'es' if len(got) > 1 else '1 loss'} equal bit by bit."
        return Check(name=name, verdict="pass", detail=what, figures=figures)
    if trials.planned.leeway is not None and _losses_are_near(trials, expected, got):
        return Check(name=name, verdict="pass", detail=_near(trials.planned.leeway, error), figures=figures)
    if not trials.is_repeatable and error <= _NOISE_MARGIN * _loss_noise(trials):
        return Check(name=name, verdict="pass", detail=_within_noise(error, _loss_noise(trials)), figures=figures)
    first = differing[0]
    detail = (
        f"{len(differing)} of {len(got)} losses differ, the first in micro-batch {first + 1}: {expected[first]!r} "
        f"without and {got[first]!r} with the plan."
    )
    return Check(name=name, verdict="fail", detail=detail, figures=figures)


def check_gradients(trials: Trials) -> Check:
    """Compare every gradient of every step."""
    name, spread = "gradients", trials.spread
    if not spread.num_compared:
        return Check(name=name, verdict="skip", detail="No optimizer step was reached with the plan.")
    figures = _figures(spread)
    if spread.is_equal:
        what = f"{counted(spread.num_compared, 'gradient')} equal bit by bit."
        return Check(name=name, verdict="pass", detail=what, figures=figures)
    if trials.planned.leeway is not None and trials.is_within_leeway:
        what = _near(trials.planned.leeway, trials.first_spread.max_scaled_error)
        return Check(name=name, verdict="pass", detail=what, figures=figures)
    noise = trials.noise.max_relative_error
    is_noise = not spread.lost and spread.max_relative_error <= _NOISE_MARGIN * noise
    if not trials.is_repeatable and is_noise:
        return Check(name=name, verdict="pass", detail=_within_noise(spread.max_relative_error, noise), figures=figures)
    return Check(name=name, verdict="fail", detail=_difference(spread), figures=figures)


def _difference(spread: Spread) -> str:
    parts = []
    if spread.lost:
        parts.append(f"{counted(len(spread.lost), 'parameter')} lost the gradient ({listed(spread.lost)}).")
    if spread.gained:
        parts.append(
            f"{counted(len(spread.gained), 'parameter')} got one only with the plan ({listed(spread.gained)})."
        )
    if spread.differing:
        parts.append(
            f"{counted(len(spread.differing), 'parameter')} got another gradient, from step {spread.first_step} on: "
            f"relative error up to {spread.max_relative_error:.2g} ({spread.worst}), cosine down to "
            f"{spread.min_cosine:.3f}."
        )
    return " ".join(parts)


def check_trainable(trials: Trials) -> Check:
    """See that whatever should train gets a gradient, and that training moves it."""
    name, planned = "trainable parameters", trials.planned
    figures: dict[str, float] = {"num_trainable": len(planned.trainable)}
    if not planned.trainable:
        return Check(name=name, verdict="fail", detail="Nothing trains: no parameter requires a gradient.")
    if planned.failure is not None and "does not require grad" in str(planned.failure.error):
        what = "With the plan nothing trains: the loss no longer depends on any trainable parameter."
        return Check(name=name, verdict="fail", detail=what, figures=figures)
    if planned.num_steps == 0:
        return Check(name=name, verdict="skip", detail="No optimizer step was reached with the plan.", figures=figures)
    here = [parameter for parameter in planned.trainable if parameter not in planned.elsewhere]
    if not here:
        return Check(name=name, verdict="skip", detail="This process holds no part of what trains.", figures=figures)
    without = [
        parameter
        for parameter in here
        if all(planned.gradients(step).get(parameter) is None for step in range(planned.num_steps))
    ]
    lost = [parameter for parameter in without if _has_run(planned, parameter)]
    if lost:
        return Check(name=name, verdict="fail", detail=_without_gradient(trials, lost), figures=figures)
    still = _fault_of_movement(planned, here) if planned.failure is None else None
    if still is not None:
        return Check(name=name, verdict="fail", detail=still, figures=figures)
    idle = f" {counted(len(without), 'other')} belong to modules that never ran." if without else ""
    got = len(here) - len(without)
    figures |= {"num_with_gradient": got, "num_moved": len(_moved(planned, here))}
    what = f"{counted(got, 'trainable parameter')} got gradients, and training moved them."
    if planned.failure is None and figures["num_moved"] < got:
        what = (
            f"{counted(got, 'trainable parameter')} got gradients; training moved {int(figures['num_moved'])} of them, "
            "the others by less than their dtype can hold."
        )
    return Check(name=name, verdict="pass", detail=what + idle, figures=figures)


def _without_gradient(trials: Trials, lost: list[str]) -> str:
    reference = trials.reference
    is_ours = bool(reference.num_steps) and any(reference.gradients(0).get(name) is not None for name in lost)
    if len(lost) == len(trials.planned.trainable):
        head = "Nothing trains: no trainable parameter got a gradient although its module ran"
    else:
        head = f"{counted(len(lost), 'trainable parameter')} got no gradient although the module ran: {listed(lost)}"
    if is_ours:
        return f"{head}. Without the plan they get one: recomputation loses the gradient."
    return f"{head}. They get none without the plan either: an adapter is disabled or frozen, or something is detached."


def _fault_of_movement(planned: Record, here: list[str]) -> str | None:
    if not _moved(planned, here):
        return (
            "Nothing trains: no trainable parameter moved in any step. Is the learning rate zero, or were the "
            "parameters frozen or replaced after the optimizer was made?"
        )
    adapter = [name for name in here if "lora_" in name]
    if adapter and not _moved(planned, adapter):
        return "The adapter does not move: other parameters train, but none of the adapter changed in any step."
    return None


def _moved(record: Record, names: list[str]) -> list[str]:
    return [name for name in names if record.tensors_before.get(name) != record.tensors_after.get(name)]


def _has_run(record: Record, parameter: str) -> bool:
    """Whether the module ran whose output depends on a parameter: around an adapter, the adapted module."""
    owner = parameter.rpartition(".")[0]
    modules = {name.removeprefix("module ") for name in record.names["before"] if name.startswith("module ")}
    around = owner
    while around:
        if f"{around}.base_layer" in modules:
            owner = around
        around = around.rpartition(".")[0]
    return record.entries[owner, False] > 0


def check_weights(trials: Trials) -> Check:
    """Compare all parameters after the last step, frozen ones too."""
    name, reference, planned = "weights", trials.reference, trials.planned
    names = reference.tensors_after.keys() | planned.tensors_after.keys()
    differing = [key for key in names if reference.tensors_after.get(key) != planned.tensors_after.get(key)]
    figures: dict[str, float] = {"num_parameters": len(names), "num_not_equal": len(differing)}
    if not differing:
        what = f"{counted(len(names), 'parameter')} equal bit by bit after {counted(planned.num_steps, 'step')}."
        return Check(name=name, verdict="pass", detail=what, figures=figures)
    frozen = [key for key in differing if key not in planned.trainable]
    spread = between_weights(reference, planned)
    figures["max_relative_error"] = spread.max_relative_error
    leeway = planned.leeway
    if leeway is not None and not frozen and spread.max_scaled_error <= leeway.later:
        what = (
            f"After {counted(planned.num_steps, 'step')}, relative error up to {spread.max_scaled_error:.2g}, where "
            f"{leeway.later:.2g} is allowed: the optimizer magnifies rounding that is another one with {leeway.what}."
        )
        return Check(name=name, verdict="pass", detail=what, figures=figures)
    noise = between_weights(reference, trials.repeated).max_relative_error
    if not trials.is_repeatable and not frozen and spread.max_relative_error <= _NOISE_MARGIN * noise:
        what = _within_noise(spread.max_relative_error, noise)
        return Check(name=name, verdict="pass", detail=what, figures=figures)
    what = f"{len(differing)} of {len(names)} parameters differ after {counted(planned.num_steps, 'step')}"
    if frozen:
        what += f", frozen ones among them ({listed(sorted(frozen))})"
    what += f": relative error up to {spread.max_relative_error:.2g} ({spread.worst})." if spread.worst else "."
    return Check(name=name, verdict="fail", detail=what, figures=figures)


def check_in_float32(expected: Record, got: Record) -> Check:
    """Compare losses and gradients of a first step in float32: what half precision would hide shows there.

    Args:
        expected: without the plan.
        got: with it.
    """
    name = "in float32"
    if expected.failure is not None:
        what = f"Without the plan, the recipe does not run in float32: {expected.failure.error!r}"
        return Check(name=name, verdict="skip", detail=what)
    if got.failure is not None:
        what = f"With the plan, the run ends in float32: {got.failure.error!r}"
        return Check(name=name, verdict="fail", detail=what)
    pairs = list(zip(losses_of(expected), losses_of(got), strict=True))
    of_loss = _error_of(pairs)
    spread = between_gradients(expected, got)
    error = max(of_loss, spread.max_scaled_error)
    figures = {**_figures(spread), "max_relative_error_of_loss": of_loss, "max_scaled_error": spread.max_scaled_error}
    if error <= REPEATED and not (spread.lost or spread.gained):
        what = f"Relative error up to {error:.2g} in the first step, where {REPEATED:.2g} is allowed."
        return Check(name=name, verdict="pass", detail=what, figures=figures)
    what = (
        f"The loss of the first step is off by {of_loss:.2g}, and gradients by up to {spread.max_scaled_error:.2g}, "
        f"where {REPEATED:.2g} is allowed for rounding. Half precision may hide it. This is a fault of tiles or of the "
        "chunked head: please report it, and leave them out."
    )
    return Check(name=name, verdict="fail", detail=what, figures=figures)


def _losses_are_near(trials: Trials, expected: list[float], got: list[float]) -> bool:
    leeway = trials.planned.leeway
    if leeway is None:
        return False
    per_step = len(got) // max(trials.planned.num_steps, 1)
    return all(
        abs(a - b) <= (leeway.first if number < per_step else leeway.later) * abs(a)
        for number, (a, b) in enumerate(zip(expected, got, strict=True))
    )


def _near(leeway: Leeway, error: float) -> str:
    return (
        f"Relative error up to {error:.2g}; {leeway.first:.2g} is allowed in the first step ({leeway.later:.2g} in "
        f"later ones): with {leeway.what}, the same terms are added up in another order."
    )


def _loss_noise(trials: Trials) -> float:
    pairs = zip(losses_of(trials.reference), losses_of(trials.repeated), strict=False)
    return _error_of(pairs)


def _within_noise(error: float, noise: float) -> str:
    return (
        f"Relative error up to {error:.2g}, within what the reference itself varies from run to run ({noise:.2g}). "
        "Bitwise equality cannot be asked for here."
    )


def _figures(spread: Spread) -> dict[str, float]:
    return {
        "num_compared": spread.num_compared,
        "num_not_equal": len(spread.differing) + len(spread.lost) + len(spread.gained),
        "max_relative_error": spread.max_relative_error,
        "min_cosine": spread.min_cosine,
    }


def _error_of(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the largest relative error of losses; infinity where one is not a number."""
    errors = [abs(a - b) / abs(a or 1.0) for a, b in pairs]
    return max(errors, default=0.0) if all(map(math.isfinite, errors)) else math.inf
