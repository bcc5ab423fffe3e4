"""Limits and contradictions of a recipe's `checkpointing` section: the policy, the budget, and who else checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hf_ckpt.errors import PolicyError
from hf_ckpt.policy.allowances import ALLOWANCES, allowed_by
from hf_ckpt.policy.modifiers import parse_head, parse_offload, parse_prove, parse_save, parse_tiles
from hf_ckpt.policy.plan import PLAN_SUFFIX, parse
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.recipe.document import beside
from hf_ckpt.recipe.field_checks import Draft
from hf_ckpt.recipe.schema import OF_AUTO, POLICY_OPTIONS
from hf_ckpt.units import parse_budget

_READERS: Mapping[str, Callable[[object], object]] = {
    "save": parse_save,
    "offload": parse_offload,
    "tiles": parse_tiles,
    "head": parse_head,
}
"""What reads the options whose values have a form of their own, so that a mistake is told at its key."""


def _policy_can_be_read(draft: Draft) -> None:
    policy = draft.get("checkpointing.policy")
    if policy is None:
        return
    options = {name: value for name in POLICY_OPTIONS if (value := draft.get(f"checkpointing.{name}")) is not None}
    readable = {name: value for name, value in options.items() if _can_be_read(draft, name, value)}
    if policy == AUTO:
        _check_auto(draft, [name for name, value in options.items() if name not in ALLOWANCES and value is not False])
        _check_allowances(draft, readable)
        return
    for name in OF_AUTO:
        if draft.has(f"checkpointing.{name}"):
            draft.refuse(
                f"checkpointing.{name}", "belongs to policy: auto, which plans for a budget. Remove it, or use that."
            )
    try:
        parse(_with_whole_path(draft, policy), **readable)
    except PolicyError as error:
        draft.refuse("checkpointing.policy", str(error))


def _prove_can_be_read(draft: Draft) -> None:
    prove = draft.get("checkpointing.prove")
    try:
        parse_prove("first_step" if prove is None else prove)
    except PolicyError as error:
        draft.refuse("checkpointing.prove", str(error))


def _can_be_read(draft: Draft, name: str, value: object) -> bool:
    if name not in _READERS:
        return True
    try:
        _READERS[name](value)
    except PolicyError as error:
        draft.refuse(f"checkpointing.{name}", str(error))
        return False
    return True


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


def _check_allowances(draft: Draft, readable: Mapping[str, object]) -> None:
    for name in ALLOWANCES:
        try:
            allowed_by({name: readable.get(name)})
        except PolicyError as error:
            draft.refuse(f"checkpointing.{name}", str(error))


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


CHECKPOINTING_RULES: tuple[Callable[[Draft], None], ...] = (_policy_can_be_read, _prove_can_be_read, _one_plan_governs)
"""The rules; each notes what is wrong in the draft."""
