"""Loss, gradients and weights of three trials, compared: bit by bit, or within a tolerance.

The tolerance is for plans that add up in another order. Tiles and the chunked head compute the same terms, but a
gradient of a weight, a sum over the sequence, becomes a sum of one sum for each slice; and a matrix product over fewer
rows may be blocked otherwise. Where random operators lie inside tiles, each slice draws masks of its own: then the
reference runs in the same tiles, without recomputation, and nothing may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_ckpt.patch.tileable_modules import random_modules, tiled_modules
from hf_ckpt.policy.options import HeadMode, Tiles
from hf_ckpt.policy.plan import Plan
from hf_ckpt.regions.tiling import Tiling, run_tiled
from hf_ckpt.structure.layers import Layer, Stack
from hf_ckpt.units import counted
from hf_ckpt.verify.record import Record, Tolerance, tensor_digest
from hf_ckpt.verify.report import Check, listed

FLOAT32_TOLERANCE = 1e-6  # Relative: a few units in the last place.
HALF_TOLERANCE = 2.0**-6
"""Relative: two units in the last place of bfloat16, to which products and their gradients are rounded."""
IN_FLOAT32_TOLERANCE = 1e-5
"""Relative, where a recipe in half precision is repeated in float32: enough for any shape, and a hundredth of the fault
that this check is for, a loss that is off by a thousandth."""
# Two draws of the same noise: the largest of one may be a few times the largest of the other.
_NOISE_MARGIN = 4.0


@dataclass(frozen=True)
class Trials:
    """Three trials from the same weights, seed and batches."""

    reference: Record  # without the plan
    repeated: Record  # without the plan, again
    planned: Record

    @cached_property
    def noise(self) -> TensorDifferences:
        """How far the reference is from its repetition."""
        return compare_gradients(self.reference, self.repeated)

    @cached_property
    def differences(self) -> TensorDifferences:
        """How far the planned trial is from the reference."""
        return compare_gradients(self.reference, self.planned)

    @cached_property
    def first_step_differences(self) -> TensorDifferences:
        """The same in the first step."""
        return compare_gradients(self.reference, self.planned, 1)

    @cached_property
    def is_within_tolerance(self) -> bool:
        """Whether the gradients differ by no more than the rounding of a plan that adds up in another order."""
        tolerance = self.planned.tolerance
        return (
            tolerance is not None
            and not (self.differences.lost or self.differences.gained)
            and self.first_step_differences.max_scaled_error <= tolerance.first
            and self.differences.max_scaled_error <= tolerance.later
        )

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether the reference repeats itself bit by bit."""
        return self.noise.is_equal and losses_of(self.reference) == losses_of(self.repeated)


def losses_of(record: Record) -> list[float]:
    """Return the losses of the micro-batches that were completed."""
    return [micro.loss for micro in record.micro_batches if micro.random_state]


def first_module_changed_by_plan(trials: Trials) -> str | None:
    """Return the first module whose output differs although its weights are still those of the reference."""
    if not trials.is_repeatable or trials.planned.tolerance is not None:
        return None
    micro_batches = trials.planned.micro_batches
    per_step = max(len(micro_batches) // max(trials.planned.num_steps, 1), 1)
    # Up to the end of the first step whose gradients differ, weights are those of the reference.
    until = (trials.differences.first_step or trials.planned.num_steps) * per_step
    return first_differing_module(trials.reference, trials.planned, until)


def first_differing_module(first: Record, second: Record, until: int | None = None) -> str | None:
    """Return the first module whose output differs in the forward of the first `until` micro-batches."""
    for expected, got in zip(first.micro_batches[:until], second.micro_batches[:until], strict=False):
        for (path, digest), (other_path, other) in zip(expected.outputs, got.outputs, strict=False):
            if (path, digest) != (other_path, other):
                return path or "the model"
    return None


# --- Checks. ---


def check_repeatability(trials: Trials) -> Check:
    """Check that the reference repeats itself; if not, name the first module that does not."""
    name = "repeatability"
    if trials.is_repeatable:
        return Check(name, "pass", "Without the plan, two runs are equal bit by bit.")
    module = first_differing_module(trials.reference, trials.repeated)
    where = (
        f"The first module whose output differs is {module}: a non-deterministic kernel, or code that draws from "
        "somewhere else than torch's seeded generators"
        if module
        else "All modules return the same in forward: a kernel of the backward is non-deterministic, first in "
        f"{next(iter(trials.noise.differing), '')}"
    )
    return Check(
        name,
        "fail",
        f"Without the plan, two runs from the same weights, seed and batches differ. {where}. "
        "training.full_determinism=true makes torch choose kernels that repeat themselves.",
        _figures(trials.noise),
    )


def check_loss(trials: Trials) -> Check:
    """Compare the loss of every micro-batch."""
    name, tolerance = "loss", trials.planned.tolerance
    expected, got = losses_of(trials.reference), losses_of(trials.planned)
    expected = expected[: len(got)]
    if not all(math.isfinite(loss) for loss in expected):
        return Check(name, "fail", "The loss is not finite even without the plan.")
    if not got:
        return Check(name, "skip", "No forward and backward was completed with the plan.")
    pairs = list(zip(expected, got, strict=True))
    differing = [number for number, (a, b) in enumerate(pairs) if a != b]
    error = _error_of(pairs)
    figures: dict[str, float] = {"num_losses": len(got), "num_not_equal": len(differing), "max_relative_error": error}
    if not differing:
        what = f"{counted(len(got), 'loss')[:-1] + 'es' if len(got) > 1 else '1 loss'} equal bit by bit."
        return Check(name, "pass", what, figures)
    if tolerance is not None and _are_within(tolerance, pairs, len(pairs) // max(trials.planned.num_steps, 1)):
        return Check(name, "pass", _within_tolerance(tolerance, error), figures)
    noise = _error_of(zip(losses_of(trials.reference), losses_of(trials.repeated), strict=False))
    if not trials.is_repeatable and error <= _NOISE_MARGIN * noise:
        return Check(name, "pass", _within_noise(error, noise), figures)
    first = differing[0]
    detail = (
        f"{len(differing)} of {len(got)} losses differ, the first in micro-batch {first + 1}: {expected[first]!r} "
        f"without and {got[first]!r} with the plan."
    )
    return Check(name, "fail", detail, figures)


def _are_within(tolerance: Tolerance, pairs: Sequence[tuple[float, float]], per_step: int) -> bool:
    return all(
        abs(a - b) <= (tolerance.first if number < per_step else tolerance.later) * abs(a)
        for number, (a, b) in enumerate(pairs)
    )


def _error_of(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the largest relative error of losses; infinity where one is not a number."""
    errors = [abs(a - b) / abs(a or 1.0) for a, b in pairs]
    return max(errors, default=0.0) if all(map(math.isfinite, errors)) else math.inf


def check_gradients(trials: Trials) -> Check:
    """Compare every gradient of every step."""
    name, diff = "gradients", trials.differences
    if not diff.num_compared:
        return Check(name, "skip", "No optimizer step was reached with the plan.")
    figures = _figures(diff)
    if diff.is_equal:
        return Check(name, "pass", f"{counted(diff.num_compared, 'gradient')} equal bit by bit.", figures)
    if trials.planned.tolerance is not None and trials.is_within_tolerance:
        what = _within_tolerance(trials.planned.tolerance, trials.first_step_differences.max_scaled_error)
        return Check(name, "pass", what, figures)
    noise = trials.noise.max_relative_error
    is_noise = not diff.lost and diff.max_relative_error <= _NOISE_MARGIN * noise
    if not trials.is_repeatable and is_noise:
        return Check(name, "pass", _within_noise(diff.max_relative_error, noise), figures)
    return Check(name, "fail", _difference(diff), figures)


def _difference(diff: TensorDifferences) -> str:
    parts = []
    if diff.lost:
        parts.append(f"{counted(len(diff.lost), 'parameter')} lost the gradient ({listed(diff.lost)}).")
    if diff.gained:
        parts.append(f"{counted(len(diff.gained), 'parameter')} got one only with the plan ({listed(diff.gained)}).")
    if diff.differing:
        parts.append(
            f"{counted(len(diff.differing), 'parameter')} got another gradient, from step {diff.first_step} on: "
            f"relative error up to {diff.max_relative_error:.2g} ({diff.worst}), cosine down to "
            f"{diff.min_cosine:.3f}."
        )
    return " ".join(parts)


def _figures(diff: TensorDifferences) -> dict[str, float]:
    return {
        "num_compared": diff.num_compared,
        "num_not_equal": len(diff.differing) + len(diff.lost) + len(diff.gained),
        "max_relative_error": diff.max_relative_error,
        "min_cosine": diff.min_cosine,
    }


def _within_tolerance(tolerance: Tolerance, error: float) -> str:
    return (
        f"Relative error up to {error:.2g}; {tolerance.first:.2g} is allowed in the first step "
        f"({tolerance.later:.2g} in later ones): with {tolerance.what}, the same terms are added up in another order."
    )


def _within_noise(error: float, noise: float) -> str:
    return (
        f"Relative error up to {error:.2g}, within what the reference itself varies from run to run ({noise:.2g}). "
        "Bitwise equality cannot be asked for here."
    )


def check_trainable(trials: Trials) -> Check:
    """Check that whatever should train gets a gradient, and that training moves it."""
    name, planned = "trainable parameters", trials.planned
    figures: dict[str, float] = {"num_trainable": len(planned.trainable)}
    if not planned.trainable:
        return Check(name, "fail", "Nothing trains: no parameter requires a gradient.")
    if planned.failure is not None and "does not require grad" in str(planned.failure.error):
        what = "With the plan nothing trains: the loss no longer depends on any trainable parameter."
        return Check(name, "fail", what, figures)
    if planned.num_steps == 0:
        return Check(name, "skip", "No optimizer step was reached with the plan.", figures)
    here = [parameter for parameter in planned.trainable if parameter not in planned.on_other_ranks]
    if not here:
        return Check(name, "skip", "This process holds no part of what trains.", figures)
    steps = map(planned.gradients, range(planned.num_steps))
    with_gradient = {name for step in steps for name, gradient in step.items() if gradient is not None}
    without = [parameter for parameter in here if parameter not in with_gradient]
    lost = [parameter for parameter in without if _has_run(planned, parameter)]
    if lost:
        return Check(name, "fail", _without_gradient(trials, lost), figures)
    still = _fault_of_movement(planned, here) if planned.failure is None else None
    if still is not None:
        return Check(name, "fail", still, figures)
    idle = f" {counted(len(without), 'other')} belong to modules that never ran." if without else ""
    got, num_moved = len(here) - len(without), len(_moved(planned, here))
    figures |= {"num_with_gradient": got, "num_moved": num_moved}
    what = f"{counted(got, 'trainable parameter')} got gradients, and training moved them."
    if planned.failure is None and num_moved < got:
        what = (
            f"{counted(got, 'trainable parameter')} got gradients; training moved {num_moved} of them, "
            "the others by less than their dtype can hold."
        )
    return Check(name, "pass", what + idle, figures)


def _without_gradient(trials: Trials, lost: list[str]) -> str:
    of_reference = trials.reference.gradients(0) if trials.reference.num_steps else {}
    is_ours = any(of_reference.get(name) is not None for name in lost)
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
    """Whether the module ran that uses a parameter; for a parameter of an adapter, the adapted module."""
    owner = parameter.rpartition(".")[0]
    modules = {name.removeprefix("module ") for name in record.names["before"] if name.startswith("module ")}
    around = owner
    while around:
        if f"{around}.base_layer" in modules:
            owner = around
        around = around.rpartition(".")[0]
    return record.forwards[owner] > 0


def check_weights(trials: Trials) -> Check:
    """Compare all parameters after the last step, frozen ones too."""
    name, reference, planned = "weights", trials.reference, trials.planned
    names = reference.tensors_after.keys() | planned.tensors_after.keys()
    differing = [key for key in names if reference.tensors_after.get(key) != planned.tensors_after.get(key)]
    figures: dict[str, float] = {"num_parameters": len(names), "num_not_equal": len(differing)}
    if not differing:
        what = f"{counted(len(names), 'parameter')} equal bit by bit after {counted(planned.num_steps, 'step')}."
        return Check(name, "pass", what, figures)
    frozen = [key for key in differing if key not in planned.trainable]
    diff = compare_weights(reference, planned)
    figures["max_relative_error"] = diff.max_relative_error
    tolerance = planned.tolerance
    if tolerance is not None and not frozen and diff.max_scaled_error <= tolerance.later:
        what = (
            f"After {counted(planned.num_steps, 'step')}, relative error up to {diff.max_scaled_error:.2g}, where "
            f"{tolerance.later:.2g} is allowed: the optimizer magnifies rounding that is another one with "
            f"{tolerance.what}."
        )
        return Check(name, "pass", what, figures)
    noise = compare_weights(reference, trials.repeated).max_relative_error
    if not trials.is_repeatable and not frozen and diff.max_relative_error <= _NOISE_MARGIN * noise:
        what = _within_noise(diff.max_relative_error, noise)
        return Check(name, "pass", what, figures)
    what = f"{len(differing)} of {len(names)} parameters differ after {counted(planned.num_steps, 'step')}"
    if frozen:
        what += f", frozen ones among them ({listed(sorted(frozen))})"
    what += f": relative error up to {diff.max_relative_error:.2g} ({diff.worst})." if diff.worst else "."
    return Check(name, "fail", what, figures)


def check_in_float32(expected: Record, got: Record) -> Check:
    """Compare losses and gradients of a first step in float32, without the plan and with it.

    It shows what half precision would hide.
    """
    name = "in float32"
    if expected.failure is not None:
        return Check(name, "skip", f"Without the plan, the recipe does not run in float32: {expected.failure.error!r}")
    if got.failure is not None:
        return Check(name, "fail", f"With the plan, the run ends in float32: {got.failure.error!r}")
    pairs = list(zip(losses_of(expected), losses_of(got), strict=True))
    of_loss = _error_of(pairs)
    diff = compare_gradients(expected, got)
    error = max(of_loss, diff.max_scaled_error)
    figures = {**_figures(diff), "max_relative_error_of_loss": of_loss, "max_scaled_error": diff.max_scaled_error}
    if error <= IN_FLOAT32_TOLERANCE and not (diff.lost or diff.gained):
        what = f"Relative error up to {error:.2g} in the first step, where {IN_FLOAT32_TOLERANCE:.2g} is allowed."
        return Check(name, "pass", what, figures)
    what = (
        f"The loss of the first step is off by {of_loss:.2g}, and gradients by up to {diff.max_scaled_error:.2g}, "
        f"where {IN_FLOAT32_TOLERANCE:.2g} is allowed for rounding. Half precision may hide it. This is a fault of "
        "tiles or of the chunked head: please report it, and leave them out."
    )
    return Check(name, "fail", what, figures)


# --- How far tensors of two trials are apart. ---


@dataclass
class TensorDifferences:
    """How far the gradients or weights of two trials are apart, by name. Names are the keys of dicts, in order."""

    num_compared: int = 0  # tensors that at least one of them has, counted once for each step
    differing: dict[str, None] = field(default_factory=dict)  # not equal bit by bit
    lost: dict[str, None] = field(default_factory=dict)  # only the first trial has them
    gained: dict[str, None] = field(default_factory=dict)  # only the second trial has them
    max_relative_error: float = 0.0  # Largest difference over the largest value of its tensor.
    max_scaled_error: float = 0.0
    """The same, where a tensor with small values only is measured by a tenth of the largest value of all.

    What is left of terms that cancel has an error of its own, also in a run without the plan.
    """
    min_cosine: float = 1.0
    worst: str = ""  # the name with the largest relative error
    first_step: int = 0  # the first step, from 1, with a difference; 0 without one

    @property
    def is_equal(self) -> bool:
        """Bit by bit."""
        return not (self.differing or self.lost or self.gained)

    def add(self, first: Mapping[str, Tensor | None], second: Mapping[str, Tensor | None], step: int) -> None:
        """Compare the tensors of one more step."""
        for name in sorted(first.keys() | second.keys()):
            is_lost, is_gained = second.get(name) is None, first.get(name) is None
            self.num_compared += not (is_lost and is_gained)
            if is_lost is not is_gained:
                (self.lost if is_lost else self.gained)[name] = None
        floor = 0.1 * max((_largest(tensor) for tensor in first.values() if tensor is not None), default=0.0)
        for name, expected in first.items():
            got = second.get(name)
            if expected is None or got is None or tensor_digest(expected) == tensor_digest(got):
                continue
            self.differing[name] = None
            self.min_cosine = min(self.min_cosine, _cosine(expected, got))
            error = _relative_error(expected, got)
            scaled = error * min(_largest(expected) / floor, 1.0) if floor else error
            self.max_scaled_error = max(self.max_scaled_error, scaled)
            if error > self.max_relative_error:
                self.max_relative_error, self.worst = error, name
        self.first_step = self.first_step or (0 if self.is_equal else step)


def compare_gradients(first: Record, second: Record, num_steps: int | None = None) -> TensorDifferences:
    """Compare every gradient of every step that both trials have done, or of the first `num_steps` of them."""
    diff = TensorDifferences()
    for step in range(min(first.num_steps, second.num_steps, num_steps or first.num_steps)):
        diff.add(first.gradients(step), second.gradients(step), step + 1)
    return diff


def compare_weights(first: Record, second: Record) -> TensorDifferences:
    """Compare the trainable parameters after the last step."""
    diff = TensorDifferences()
    diff.add(first.weights(), second.weights(), first.num_steps)
    return diff


def _relative_error(expected: Tensor, got: Tensor) -> float:
    if expected.shape != got.shape:
        return math.inf
    largest = expected.double().abs().max()
    error = float((expected.double() - got.double()).abs().max() / largest)
    # NaN compares as false with everything, and would pass as no error.
    return error if math.isfinite(error) else math.inf


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _cosine(expected: Tensor, got: Tensor) -> float:
    if expected.shape != got.shape:
        return 0.0
    first, second = expected.double().flatten(), got.double().flatten()
    norms = first.norm() * second.norm()
    # By rounding, the cosine of two close vectors may be a little more than one.
    cosine = float(torch.clamp(first @ second / norms, -1, 1)) if norms > 0 else 0.0
    return cosine if math.isfinite(cosine) else 0.0


# --- Tolerance: what tiles and the chunked head may change. ---


def tolerance_of(plan: Plan, stacks: Sequence[Stack], model: nn.Module, args: TrainingArguments) -> Tolerance | None:
    """Return the errors that a plan may cause; None where it is exact. Half precision is that of `args` or `model`."""
    what = ["the chunked head"] if plan.head is HeadMode.CHUNKED else []
    if any(True for _ in _in_tiles(plan, stacks)) and not draws_in_tiles(plan, stacks):
        what.insert(0, "tiles")
    if not what:
        return None
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    is_half = args.bf16 or args.fp16 or not dtypes.isdisjoint({torch.bfloat16, torch.float16})
    return Tolerance(HALF_TOLERANCE if is_half else FLOAT32_TOLERANCE, " and ".join(what))


def draws_in_tiles(plan: Plan, stacks: Sequence[Stack]) -> bool:
    """Whether random operators lie inside what runs in tiles."""
    return any(random_modules(layer, tiled_modules(layer)) for layer, _ in _in_tiles(plan, stacks))


def run_in_same_tiles(plan: Plan, stacks: Sequence[Stack]) -> None:
    """Let a model without the plan run in the plan's tiles, without recomputing anything."""
    modules = {
        layer.submodule(name): tiles for layer, tiles in _in_tiles(plan, stacks) for name in tiled_modules(layer)
    }
    for module, tiles in modules.items():
        found = module.__dict__.get("forward")
        module.forward = partial(run_tiled, Tiling(tiles, recomputes=False), module, found)


def _in_tiles(plan: Plan, stacks: Sequence[Stack]) -> Iterator[tuple[Layer, Tiles]]:
    """Yield the layers that run in more than one slice."""
    for planned, stack in zip(plan.stacks, stacks, strict=True):
        for entry, layer in zip(planned.layers, stack.layers, strict=True):
            if entry.tiles not in (None, 1):
                yield layer, entry.tiles
