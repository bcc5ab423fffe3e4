"""Limits and contradictions of a recipe's `checkpointing` section: the policy, the budget, and who else checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from hf_ckpt.amounts import parse_budget
from hf_ckpt.errors import PolicyError
from hf_ckpt.finetune.checks import Draft
from hf_ckpt.finetune.document import beside
from hf_ckpt.finetune.schema import OF_AUTO, POLICY_OPTIONS
from hf_ckpt.plans import PLAN_SUFFIX, parse
from hf_ckpt.policy import AUTO


def _policy_can_be_read(draft: Draft) -> None:
    policy = draft.get("checkpointing.policy")
    if policy is None:
        return
    options = {name: draft.get(f"checkpointing.{name}") for name in POLICY_OPTIONS}
    if policy == AUTO:
        _check_auto(draft, [name for name, value in options.items() if value is not None])
        return
    for name in OF_AUTO:
        if draft.has(f"checkpointing.{name}"):
            draft.refuse(
                f"checkpointing.{name}", "belongs to policy: auto, which plans for it. Remove it, or use that."
            )
    try:
        parse(_with_whole_path(draft, policy), **{name: value for name, value in options.items() if value is not None})
    except PolicyError as error:
        draft.refuse("checkpointing.policy", str(error))


def _check_auto(draft: Draft, options: list[str]) -> None:
    for name in options:
        draft.refuse(f"checkpointing.{name}", "given beside policy: auto, which chooses for each layer. Remove it.")
    budget = draft.get("checkpointing.memory_budget")
    if budget is None:
        return
    try:
        parse_budget(budget)
    except PolicyError as error:
        draft.refuse("checkpointing.memory_budget", str(error))


def _with_whole_path(draft: Draft, policy: object) -> object:
    """Return a policy; the file of a plan, which is named from the recipe's folder, as a whole path there too."""
    if not isinstance(policy, str) or not policy.endswith(PLAN_SUFFIX):
        return policy
    path = str(beside(draft.place("checkpointing.policy"), policy).absolute())
    draft.sections["checkpointing"]["policy"] = path
    return path


def _one_plan_governs(draft: Draft) -> None:
    if not draft.has("checkpointing"):
        return
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if draft.get(f"training.{name}"):
            draft.refuse(
                f"training.{name}", "given beside a checkpointing section, which governs. Remove one of the two."
            )
        if draft.get(f"training.{name}_kwargs"):
            draft.refuse(f"training.{name}_kwargs", "has no effect beside a checkpointing section. Remove it.")
    for name in ("activation_checkpointing", "fsdp_activation_checkpointing"):
        if draft.get(f"training.fsdp_config.{name}"):
            draft.refuse(
                f"training.fsdp_config.{name}", "given beside a checkpointing section, which governs. Remove one."
            )


CHECKPOINTING_RULES: tuple[Callable[[Draft], None], ...] = (_policy_can_be_read, _one_plan_governs)
"""The rules; each notes what is wrong in the draft."""
