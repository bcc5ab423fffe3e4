"""Policy `auto` without a Trainer: the plan of a step whose sizes are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_ckpt.auto.budgets import budget_bytes, free_host_bytes
from hf_ckpt.auto.coverage import Coverage, check_not_compiled, refuse
from hf_ckpt.auto.largest_batch import Batch, without_adapter
from hf_ckpt.auto.live_step import given_optimizer
from hf_ckpt.auto.replan import RunPlanner
from hf_ckpt.distributed import fsdp, store
from hf_ckpt.patch.apply import make_plan
from hf_ckpt.patch.checks import check_model
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import CPU, this_device
from hf_ckpt.simulation.fake_model import meta_copy
from hf_ckpt.simulation.optimizers import innermost_optimizer
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.units import Budget


def plan_own_step(
    model: nn.Module, step: Step, budget: Budget | None, allowed: Allowed, structure: dict[str, Any], optimizer: Any
) -> RunPlanner:
    """Return the plans of a loop that runs a step, the one for its sizes made already.

    Args:
        model: as it is trained; it is not changed.
        step: the step, without its optimizer.
        budget: None takes the free memory of the GPU less a reserve.
        allowed: what a plan may hold besides modes.
        structure: `layers`, `attention` and `ffn` of `apply`.
        optimizer: of torch; None counts the one that `Step` names.

    Raises:
        BudgetError: no plan fits.
        PolicyError: there is no budget, or it is more than the device has.
        UnsupportedError: the step cannot be simulated.
    """
    check_model(model)
    check_not_compiled(model)
    if store.num_processes() > 1 or fsdp.is_sharded(model):
        raise refuse("in a loop of your own it knows one process that has the whole model")
    step = replace(step, given_optimizer=given_optimizer(optimizer, None, model, Sharding()))
    place = next(model.parameters()).device
    device = this_device() if place.type == "cuda" else CPU
    shape = meta_copy(model)
    any_step = StepSimulator(shape, step, device, structure)
    made = innermost_optimizer(optimizer)
    name = step.optim if made is None else type(made).__name__
    planning = RunPlanner(
        make_plan(shape, Policy.parse("none"), **structure),
        lambda batch: any_step.anew(replace(step, batch_size=batch.rows, seq_length=batch.length)),
        budget_bytes(budget, device, model, optimizer),
        coverage=Coverage((type(without_adapter(model)).__name__, str(name), "one process"), ()),
        allowed=allowed,
        host_bytes=free_host_bytes(allowed.offload),
        place=torch.device(place),
        timeout_s=0,
        is_bounded=True,
    )
    planning.start(Batch(step.batch_size, step.seq_length, step.is_padded))
    return planning
