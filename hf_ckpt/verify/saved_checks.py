"""Checks of what a planned trial saved: complete, loaded again, merged, and resumed from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_ckpt.loading.adapter_targets import unmatched_untold
from hf_ckpt.loading.model import can_be_merged, load_base
from hf_ckpt.units import counted
from hf_ckpt.verify.compare import Trials
from hf_ckpt.verify.record import Record, values_digest
from hf_ckpt.verify.report import Check, listed
from hf_ckpt.verify.trial import TrialInputs, keep_4bit_weights, prompt_logits

_ADAPTER_FILE = "adapter_model.safetensors"
_COMPUTES_AS_ALONE = ("one process", "ddp")
# Merging rounds W + BA to float32 once, 2**-24 of its size; the errors of all products of a layer and of all layers add
# up, at random, to a few hundred times that.
_MERGE_TOLERANCE = 2.0**-13


def check_saved(inputs: TrialInputs, trials: Trials) -> Iterator[Check]:
    """Check what `Trainer.save_model` wrote at the end of the planned trial. On one process only."""
    if inputs.recipe.adapter_section is None:
        yield _guarded("saved model", lambda: _check_model(inputs, trials))
        return
    file = _check_adapter_file(inputs, trials)
    yield file
    if file.verdict == "fail":
        yield from (Check(name, "skip", "The adapter file is not whole.") for name in ("reload", "merge"))
        return
    yield _guarded("reload", lambda: _check_reload(inputs, trials))
    yield _guarded("merge", lambda: _check_merge(inputs, trials.planned))


def _guarded(name: str, check: Any) -> Check:
    try:
        found: Check = check()
    except Exception as error:  # noqa: BLE001  # peft, bitsandbytes or the model: whichever it is, users would meet it
        return Check(name, "fail", f"It ends with {type(error).__name__}: {error}")
    return found


def _check_adapter_file(inputs: TrialInputs, trials: Trials) -> Check:
    """Check that every trained tensor is in the file, bit by bit, under the names of a run without the plan.

    Of virtual tokens PEFT saves what their encoder makes of them; loading it again shows whether that is right.
    """
    name, planned = "adapter file", trials.planned
    saved, expected = _tensors(planned.saved), _tensors(trials.reference.saved)
    figures = {"num_tensors": len(saved), "num_trained": len(planned.trained)}
    missing = [] if inputs.recipe.has_virtual_tokens and saved else _missing(planned, saved)
    if missing:
        what = (
            f"{_ADAPTER_FILE} has {counted(len(saved), 'tensor')}, and of "
            f"{counted(len(planned.trained), 'trained one')} it lacks {len(missing)} ({listed(missing)}). Something "
            "renamed modules, so that PEFT did not find them."
        )
        return Check(name, "fail", what, figures)
    if saved.keys() != expected.keys():
        what = f"Its keys are not those of a run without the plan: {listed(sorted(saved.keys() ^ expected.keys()))}."
        return Check(name, "fail", what, figures)
    what = f"All {len(planned.trained)} trained tensors are in it, bit by bit,"
    if inputs.recipe.has_virtual_tokens:
        what = "The virtual tokens are in it,"
    what += " under the keys of a run without the plan."
    return Check(name, "pass", what, figures)


def _tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / _ADAPTER_FILE
    return load_file(file) if file.is_file() else {}


def _missing(planned: Record, saved: dict[str, Tensor]) -> list[str]:
    """Return the trained parameters whose values are in no tensor of the file, whatever PEFT's names for them."""
    there = Counter(values_digest(tensor) for tensor in saved.values())
    missing = []
    for parameter, digest in planned.trained.items():
        if there[digest]:
            there[digest] -= 1
        else:
            missing.append(parameter)
    return missing


def _check_reload(inputs: TrialInputs, trials: Trials) -> Check:
    from peft import PeftModel

    base = load_base(inputs.recipe, is_quantized=True)
    keep_4bit_weights(base)
    # Virtual tokens that were saved are there to be used, and PEFT trains them no further.
    is_trainable = not inputs.recipe.has_virtual_tokens
    with unmatched_untold():
        model: Any = PeftModel.from_pretrained(base, str(trials.planned.saved), is_trainable=is_trainable)
    if inputs.setup is not None:
        inputs.setup(model)
    return _compare_logits("reload", "The adapter, loaded again onto its base, gives", inputs, trials, model)


def _check_model(inputs: TrialInputs, trials: Trials) -> Check:
    """Load a fully trained model again and compare its parameters and logits."""
    name, planned = "saved model", trials.planned
    where = {**inputs.recipe.model, "name_or_path": str(planned.saved)}
    if planned.engine not in _COMPUTES_AS_ALONE:
        # FSDP trains and saves weights of half precision in float32.
        where["dtype"] = "float32"
    model = load_base(replace(inputs.recipe, model=where), is_quantized=False)
    loaded = {key: values_digest(parameter) for key, parameter in model.named_parameters()}
    if inputs.setup is not None:
        inputs.setup(model)
    # What the user's script adds to the model is in no file that transformers could load.
    added = {key for key, _ in model.named_parameters()} - loaded.keys()
    trained = {key: digest for key, digest in planned.trained.items() if key not in added}
    wrong = sorted(key for key, digest in trained.items() if loaded.get(key) != digest)
    if added:
        what = f"The user's script adds {counted(len(added), 'parameter')} ({listed(sorted(added))}), not compared."
        return Check(name, "fail" if wrong else "skip", what)
    if wrong:
        what = f"{len(wrong)} of {len(trained)} parameters are not what was trained ({listed(wrong)})."
        return Check(name, "fail", what)
    return _compare_logits(name, "All parameters are what was trained, and the model gives", inputs, trials, model)


def _compare_logits(name: str, what: str, inputs: TrialInputs, trials: Trials, model: nn.Module) -> Check:
    planned = trials.planned
    assert planned.logits is not None, "a trial that ended well has logits"
    if planned.engine not in _COMPUTES_AS_ALONE:
        detail = f"It loads. Logits are not compared: {planned.engine} computes in another precision than one process."
        return Check(name, "pass", detail)
    device = "cuda" if torch.cuda.is_available() and not inputs.recipe.training.get("use_cpu") else "cpu"
    got = _logits(inputs, model.to(device), device)
    error = float((got - planned.logits).abs().max())
    figures = {"max_error": error}
    if error == 0.0:
        return Check(name, "pass", f"{what} the same logits, bit by bit.", figures)
    if not trials.is_repeatable:
        return Check(name, "skip", f"{what} other logits, but so does each run.", figures)
    detail = f"{what} other logits: up to {error:.2g} away, of {float(planned.logits.abs().max()):.2g}."
    return Check(name, "fail", detail, figures)


def _logits(inputs: TrialInputs, model: nn.Module, device: str) -> Tensor:
    training = inputs.recipe.training
    dtype = torch.bfloat16 if training.get("bf16") else torch.float16 if training.get("fp16") else None
    autocast = nullcontext() if dtype is None else torch.autocast(device, dtype)
    return prompt_logits(model, inputs.prompt().to(device), autocast)


def _check_merge(inputs: TrialInputs, planned: Record) -> Check:
    """Merge the saved adapter into its base, unquantised and in float32, and compare logits."""
    from peft import PeftModel

    section = inputs.recipe.adapter_section
    assert section is not None, "a recipe without one saves a model"
    if not can_be_merged(section):
        return Check("merge", "skip", f"PEFT merges no adapter of type {section['type']}.")

    plain = inputs.in_float32()
    with unmatched_untold():
        model: Any = PeftModel.from_pretrained(load_base(plain.recipe, is_quantized=False), str(planned.saved))
    adapted = _logits(plain, model, "cpu")
    with model.disable_adapter():
        without = _logits(plain, model, "cpu")
    merged = _logits(plain, model.merge_and_unload(), "cpu")
    error = float((merged - adapted).abs().max() / adapted.abs().max())
    effect = float((without - adapted).abs().max() / adapted.abs().max())
    figures = {"relative_error": error, "relative_effect_of_adapter": effect}
    if error <= _MERGE_TOLERANCE and (error < effect or not effect):
        what = (
            f"Merged, in float32, it gives the same logits within {error:.1g}; without it they are {effect:.1g} away."
        )
        return Check("merge", "pass", what, figures)
    what = f"Merged, in float32, it gives other logits: {error:.2g} away, where rounding makes {_MERGE_TOLERANCE:.1g}."
    return Check("merge", "fail", what, figures)


def check_resume(trials: Trials, resumed: Record, saved_at: int) -> Check:
    """Compare the planned trial with `resumed`, which started from its checkpoint after `saved_at` steps."""
    name, planned = "resume", trials.planned
    if resumed.failure is not None:
        error = resumed.failure.error
        return Check(name, "fail", f"Resuming ends with {type(error).__name__}: {error}")
    before = [micro.loss for micro in planned.micro_batches[-len(resumed.micro_batches) :]]
    after = [micro.loss for micro in resumed.micro_batches]
    differing = [key for key in planned.trained if planned.trained[key] != resumed.trained.get(key)]
    steps = planned.num_steps - saved_at
    figures = {"num_steps_before": saved_at, "num_steps_after": steps, "num_parameters_not_equal": len(differing)}
    if before == after and not differing:
        what = (
            f"Stopped after {counted(saved_at, 'step')} and resumed for {steps}: losses and weights equal bit by bit."
        )
        return Check(name, "pass", what, figures)
    if not trials.is_repeatable:
        return Check(name, "skip", "Not compared: the run does not repeat itself.", figures)
    what = f"Stopped after {counted(saved_at, 'step')} and resumed, "
    what += f"{len(differing)} of {len(planned.trained)} trained parameters differ ({listed(differing)})."
    if not_loaded := _not_loaded(planned, resumed):
        what += (
            f" Of these, {len(not_loaded)} start again from their first values ({listed(not_loaded)}): the Trainer did "
            "not find them in its own checkpoint, which has nothing to do with the plan."
        )
    return Check(name, "fail", what, figures)


def _not_loaded(planned: Record, resumed: Record) -> list[str]:
    """Return the parameters that are at their initial values after resuming although training had moved them."""
    return [
        name
        for name in planned.trained
        if resumed.tensors_before.get(name) == planned.tensors_before[name] != planned.tensors_after[name]
    ]
