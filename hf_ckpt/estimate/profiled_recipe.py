"""`hf-ckpt profile`: a recipe's step really run on this machine's device, next to what was predicted.

Weights are random: what a step takes does not depend on them. Quantised ones are the recipe's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_ckpt.errors import RecipeError
from hf_ckpt.estimate.estimate import device_as_json, facts_as_json, memory_as_json
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject, random_base, random_model, subject_of
from hf_ckpt.estimate.tables import columns, facts, facts_of, format_seconds
from hf_ckpt.loading.model import find_config
from hf_ckpt.loading.tokenizer import load_tokenizer
from hf_ckpt.loading.trainer import build_trained_model, check_reads_text
from hf_ckpt.measure.calibrate import calibrate
from hf_ckpt.measure.profile import Profile, profile_step
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.fit import capacity_of
from hf_ckpt.simulation.optimizers import make_optimizer
from hf_ckpt.simulation.step import make_inputs
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.units import format_bytes

_NUM_WARMUP = 2
_PHASES = ("forward", "recomputation", "backward", "optimizer")


@dataclass(frozen=True)
class Measured:
    """A step as it was run and as it was predicted."""

    subject: Subject  # The recipe's model and step; one micro-batch of it was run.
    device: Device  # With the rates that were measured.
    profile: Profile  # What was measured.
    predicted: StepMemory  # What was predicted with these rates.


def measure(
    recipe: Recipe, say: Callable[[str], None], *, num_steps: int, trace: Path | None, folder: Path
) -> Measured:
    """Run a recipe's step with one micro-batch, under its plan. `trace`: the file to write a trace to, if any."""
    check_reads_text(recipe, "profile")
    subject = subject_of(recipe)
    subject = replace(subject, step=replace(subject.step, gradient_accumulation_steps=1))
    say("Measuring the device ...")
    device = calibrate()
    predictor = Predictor(subject, device)
    predicted = predictor.memory(subject.plan)
    _check_room(predictor, predicted)
    say(f"Building {subject.class_name} ...")
    place = torch.device("cuda" if device.is_cuda else "cpu")
    model, inputs, loss_of = _running(recipe, subject, place, folder)
    model.train()
    # As the Trainer sets it.
    model.config.use_cache = False
    seconds = (num_steps + _NUM_WARMUP) * predicted.time.total
    say(f"Running {num_steps} steps: about {format_seconds(seconds)} ...")
    profile = profile_step(
        model,
        inputs,
        loss_of=loss_of,
        plan=subject.plan,
        autocast=None if subject.step.autocast is None else getattr(torch, subject.step.autocast),
        optimizer=make_optimizer(model, subject.step, is_cuda=device.is_cuda),
        num_warmup=_NUM_WARMUP,
        num_steps=num_steps,
        trace_path=trace,
    )
    return Measured(subject, device, profile, predicted)


def text(found: Measured) -> str:
    """Return what was measured and predicted as text."""
    device, time = found.device, found.predicted.time
    rates = ", ".join(f"{name} {flops / 1e12:.3g}" for name, flops in device.matmul_flops.items())
    measured = (
        f"products {rates} TFLOP/s; memory {device.memory_bandwidth / 1e9:.3g} GB/s; host link "
        f"{device.host_link / 1e9:.3g} GB/s; {1e6 * device.launch_seconds:.3g} us for the host to start an operator"
    )
    named = [*found.subject.facts, *facts_of(device_as_json(device, capacity_of(device))), ("measured", measured)]
    rows = [(name, format_seconds(getattr(time, name))) for name in _PHASES if getattr(time, name)]
    rows += [("step", format_seconds(time.total)), ("peak", format_bytes(found.predicted.peak_bytes))]
    lines = [f"hf-ckpt profile {found.subject.title}", *facts(named), "", found.profile.table(), ""]
    lines += ["Predicted with these rates", *columns(rows, (1,))]
    if found.profile.is_resident:
        lines.append(
            "Resident memory of a process has the interpreter and its libraries in it, and what was freed and kept."
        )
    return "\n".join(lines)


def profile_as_json(found: Measured) -> dict[str, Any]:
    """Return what was measured and predicted as JSON types."""
    device = found.device
    return {
        "recipe": found.subject.title,
        **facts_as_json(found.subject),
        "device": {
            "name": device.name,
            "title": device.title,
            "matmul_flops": dict(device.matmul_flops),
            "memory_bandwidth": device.memory_bandwidth,
            "host_link": device.host_link,
            "launch_seconds": device.launch_seconds,
            "source": device.source,
        },
        "measured": found.profile.to_dict(),
        "predicted": memory_as_json(found.predicted),
    }


def _check_room(predictor: Predictor, predicted: StepMemory) -> None:
    subject, device = predictor.subject, predictor.device
    free = device.memory_bytes // 2
    if device.is_cuda:
        free = predictor.capacity(device).allocated_bytes
    elif "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        # What nobody uses, as far as the system tells.
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if predicted.peak_bytes > free:
        raise RecipeError(
            f"A step of {subject.title} needs {format_bytes(predicted.peak_bytes)}, and {device.title} has "
            f"{format_bytes(free)} for it: it cannot be run here. Predict it instead (hf-ckpt estimate), shorten the "
            "sequences (data.max_length=512), or take another plan (checkpointing.policy=full)."
        )


def _running(
    recipe: Recipe, subject: Subject, place: torch.device, folder: Path
) -> tuple[Any, dict[str, Tensor], Callable[[dict[str, Tensor]], Tensor] | None]:
    """Return the model, what it is given, and the trainer's loss of that; None for the model's own."""
    model = _model(recipe, place, folder)
    if not recipe.kind.of_trl:
        return model, _inputs(subject, place), None
    from hf_ckpt.estimate.own_loss import running_step

    return running_step(recipe, model, subject.step, place)


def _model(recipe: Recipe, place: torch.device, folder: Path) -> Any:
    """Return the model as the recipe's trainer takes it."""
    if recipe.quantization is None:
        return (random_base if recipe.kind.of_trl else random_model)(recipe, place)
    if not find_config(recipe).has_weights:
        raise RecipeError(
            "quantization: weights are quantised as they are loaded, and those of "
            f"{recipe.model.get('name_or_path')} are not here. Profile without it (quantization=null), or load them "
            "first."
        )
    return build_trained_model(recipe, load_tokenizer(recipe.model, recipe.data, cache_dir=folder)).to(place)


def _inputs(subject: Subject, place: torch.device) -> dict[str, Tensor]:
    step = subject.step
    if subject.recipe is not None and subject.recipe.kind.scores_rows:
        return {name: value.to(place) for name, value in make_inputs(step, subject.model).items()}
    vocab_size: int = subject.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (step.batch_size, step.seq_length), generator=generator).to(place)
    inputs = {"input_ids": ids, "labels": ids}
    if step.is_padded:
        # A row that is shorter than the others is what makes a mask.
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        inputs["attention_mask"] = mask
    if step.is_packed:
        inputs["position_ids"] = torch.arange(step.seq_length, device=place)[None] % max(1, step.seq_length // 2)
    return inputs
