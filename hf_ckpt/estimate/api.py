"""What Python code asks: what a step needs, which plan fits a budget, and how long a row may be."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from hf_ckpt.errors import PolicyError, RecipeError
from hf_ckpt.estimate.estimate import capacity_of_subject
from hf_ckpt.estimate.max_length_and_batch import largest_fitting, largest_of_all
from hf_ckpt.estimate.predict import Predictor, devices_for, usual_device_with
from hf_ckpt.estimate.step_of_recipe import Subject, is_auto, subject_of, subject_of_model
from hf_ckpt.policy.allowances import ALLOWANCES, allowed_by
from hf_ckpt.policy.options import POLICY_OPTIONS
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.recipe.recipe import Recipe, load_recipe
from hf_ckpt.simulation.devices import Device, find_device
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.units import parse_budget

Asked = Recipe | str | os.PathLike[str] | nn.Module  # A recipe, the path of one, or a model: live, or on `meta`.


def simulate(
    recipe_or_model: Asked, *, plan: object = None, device: str | Device | None = None, **options: Any
) -> StepMemory:
    """Predict what an optimizer step needs: peak, timeline, bytes by category and layer, time. Runs nothing.

    Args:
        recipe_or_model: a recipe, the path of one, or a model.
        plan: a plan, or a policy as `HFCkptCallback` takes it; None takes the recipe's own, and no plan for a model.
        device: name of a device, such as `rtx4090`; this machine's GPU, or a card of 24 GB, if left out.
        options: what `HFCkptCallback` takes besides a policy, such as `offload="cpu"` and `head="chunked"`; and fields
            of `hf_ckpt.simulation.step.Step`, such as `batch_size` and `seq_length`, in place of the recipe's.

    Returns:
        Peak and moments in bytes, time in seconds; shown as tables and pictures in a notebook.

    Raises:
        RecipeError: the recipe cannot be simulated, or a step has no such field.
        PolicyError: the plan or the device cannot be read.
        StructureError: the layers cannot be found.
        UnsupportedError: the step cannot be simulated.

    Example:
        >>> memory = simulate("recipes/tiny_llama_base.yaml", plan="full", device="rtx4090")
        >>> memory.peak_bytes < simulate("recipes/tiny_llama_base.yaml", plan="none", device="rtx4090").peak_bytes
        True
    """
    of_policy, step = _apart(options)
    subject = _subject(recipe_or_model, step)
    return Predictor(subject, _device(subject, device)).memory(_chosen(subject, plan, of_policy))


def plan(
    recipe_or_model: Asked, *, memory_budget: object = None, device: str | Device | None = None, **options: Any
) -> Plan:
    """Choose, layer by layer, the fastest way to checkpoint that fits a budget.

    Args:
        recipe_or_model: a recipe, the path of one, or a model.
        memory_budget: `"22GiB"`, or a fraction of the device; the recipe's own, or the whole device, if left
            out.
        device: see `simulate`.
        options: `offload`, `tiles`, `head` and `exact`, which say what a plan may hold, as with policy `"auto"`; the
            recipe's if left out. Fields of a step: see `simulate`.

    Returns:
        The plan, for `HFCkptCallback` or `apply`.

    Raises:
        BudgetError: no plan fits; says what would.
        HFCkptError: what `simulate` raises.
    """
    of_policy, step = _apart(options)
    subject = _allowing(_subject(recipe_or_model, step), of_policy)
    where = _device(subject, device, memory_budget)
    predictor = Predictor(subject, where)
    chosen: Plan = predictor.planned(_capacity(predictor, memory_budget)).plan
    return chosen


def max_length(
    recipe_or_model: Asked,
    *,
    memory_budget: object = None,
    plan: object = None,
    device: str | Device | None = None,
    **options: Any,
) -> int:
    """Return the longest row that fits a budget, in tokens, in steps of 64; 0 where none does.

    It is not longer than the model has positions for, where its config says how many.

    Args:
        recipe_or_model: a recipe, the path of one, or a model.
        memory_budget: see `plan`.
        plan: see `simulate`; `"auto"` takes, for each length, the plan that needs least, as a recipe with that policy
            does.
        device: see `simulate`.
        options: see `simulate`; besides `"auto"` they say what a plan may hold.

    Raises:
        HFCkptError: what `simulate` raises.
    """
    of_policy, step = _apart(options)
    subject = _subject(recipe_or_model, step)
    where = _device(subject, device, memory_budget)
    if plan == AUTO or (plan is None and is_auto(subject.recipe)):
        predictor = Predictor(_allowing(subject, of_policy), where)
        return largest_of_all(predictor, _capacity(predictor, memory_budget), is_length=True).number
    chosen, predictor = _chosen(subject, plan, of_policy), Predictor(subject, where)
    return largest_fitting(predictor, chosen, _capacity(predictor, memory_budget), is_length=True).number


def _apart(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a policy, and the fields of a step."""
    names = {*POLICY_OPTIONS, *ALLOWANCES}
    of_policy = {name: value for name, value in options.items() if name in names and value is not None}
    return of_policy, {name: value for name, value in options.items() if name not in names}


def _chosen(subject: Subject, plan: object, of_policy: dict[str, Any]) -> Plan | None:
    if "exact" in of_policy:
        raise PolicyError(
            f'exact was given, but only policy "{AUTO}" chooses a plan. Leave it out, or ask hf_ckpt.plan.'
        )
    if plan is not None:
        return subject.resolve(plan, **of_policy)
    if of_policy:
        raise PolicyError(
            f'{", ".join(of_policy)} was given without a policy that it belongs to. Write one, such as plan="full".'
        )
    return subject.plan


def _allowing(subject: Subject, of_policy: dict[str, Any]) -> Subject:
    others = [name for name in of_policy if name not in ALLOWANCES]
    if others:
        raise PolicyError(
            f"{', '.join(others)} was given where a plan is chosen for each layer. Leave it out; what may be given are "
            f"{', '.join(ALLOWANCES)}."
        )
    return replace(subject, allowed=allowed_by(of_policy)) if of_policy else subject


def _subject(asked: Asked, fields: dict[str, Any]) -> Subject:
    try:
        if isinstance(asked, nn.Module):
            # As `apply` and the callback prove it by default.
            return subject_of_model(asked, Step(**{"is_proven": True, **fields}))
        recipe = asked if isinstance(asked, Recipe) else load_recipe(Path(asked))
        subject = subject_of(recipe)
        return replace(subject, step=replace(subject.step, **fields))
    except TypeError as error:
        names = ", ".join(Step.__dataclass_fields__)
        raise RecipeError(f"A step has no such field: {error}. Its fields are {names}.") from error


def _device(subject: Subject, device: str | Device | None, memory_budget: object = None) -> Device:
    if isinstance(device, Device):
        return device
    if device is not None:
        return find_device(device)
    found = devices_for(subject.recipe, ())[0]
    amount = None if memory_budget is None else parse_budget(memory_budget).num_bytes
    return found if amount is None or amount <= found.memory_bytes else usual_device_with(amount)


def _capacity(predictor: Predictor, memory_budget: object) -> Capacity:
    if memory_budget is None:
        return capacity_of_subject(predictor, predictor.device)
    return predictor.capacity(predictor.device, parse_budget(memory_budget))
