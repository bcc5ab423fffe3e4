"""A recipe's `checkpointing` section, parsed once: the policy, what goes with it, and what policy `auto` may use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hf_ckpt.policy.allowances import ALLOWANCES, Allowed, allowed_by
from hf_ckpt.policy.options import POLICY_OPTIONS, AutoOptions, RunOptions, StructureOptions, types_of
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.units import Budget, parse_budget

OF_RECIPES = ("micro_batch",)  # The keys of `checkpointing` that `HFCkptCallback` does not take.

OF_AUTO = (*types_of(AutoOptions), *OF_RECIPES)  # The keys of `checkpointing` that belong to policy `auto`.

_OF_STRUCTURE = tuple(types_of(StructureOptions))
_OF_RUNS = tuple(types_of(RunOptions))


@dataclass(frozen=True, eq=False, repr=False)
class Checkpointing(Mapping[str, Any]):
    """The section: a mapping of what was written, with what it means as attributes."""

    written: Mapping[str, Any]  # Keys and values of the recipe, which are known to be right.

    def __getitem__(self, key: str) -> Any:
        return self.written[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.written)

    def __len__(self) -> int:
        return len(self.written)

    @property
    def policy(self) -> Any:
        """As `Policy.parse` takes it; None without a section."""
        return self.written.get("policy")

    @property
    def is_auto(self) -> bool:
        """Whether the plan is left to the planner."""
        return bool(self.policy == AUTO)

    @cached_property
    def policy_options(self) -> dict[str, Any]:
        """What `Policy.parse` takes besides the policy."""
        return self._only(POLICY_OPTIONS)

    @cached_property
    def structure(self) -> dict[str, Any]:
        """What `find_layers` takes besides the model."""
        return self._only(_OF_STRUCTURE)

    @cached_property
    def apply_options(self) -> dict[str, Any]:
        """What `hf_ckpt.apply` takes besides the model; a policy `auto` is not among it."""
        return self._without(*_OF_RUNS, *OF_AUTO)

    @cached_property
    def callback_options(self) -> dict[str, Any]:
        """What `HFCkptCallback` takes."""
        return self._without(*OF_RECIPES)

    @cached_property
    def allowed(self) -> Allowed:
        """What policy `auto` may choose among; nothing beyond modes under another policy."""
        return allowed_by(self.written) if self.is_auto else Allowed()

    @property
    def lets_weights_wait(self) -> bool:
        """Whether frozen weights may wait on the host, under the policy or in one of its rules."""
        rules = self.policy if isinstance(self.policy, list) else [self.policy]
        written = (self.written, *(rule for rule in rules if isinstance(rule, Mapping)))
        return any(each.get("weights") is not None for each in written)

    @cached_property
    def budget(self) -> Budget | None:
        """The bytes that a step may use, where the recipe says so."""
        written = self.written.get("memory_budget")
        return None if written is None else parse_budget(written)

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest row to plan for, where the recipe says so."""
        return self.written.get("max_length")

    @property
    def fallback(self) -> Any:
        """The policy in force where none can be planned, as `Policy.parse` takes it; None refuses to train."""
        return self.written.get("fallback")

    @property
    def chooses_micro_batch(self) -> bool:
        """Whether rows and number of micro-batches are chosen with the plan."""
        return bool(self.written.get("micro_batch") == AUTO)

    @property
    def input_require_grads(self) -> bool | None:
        """As `HFCkptCallback` takes it."""
        return self.written.get("input_require_grads")

    @property
    def is_proven(self) -> bool:
        """Whether a run holds recomputed values against the first ones."""
        return self.written.get("prove") != "off"

    def with_policy(self, policy: Any, **options: Any) -> Checkpointing:
        """Return the section with another policy in place of this one and its options."""
        return Checkpointing({**self._without(*POLICY_OPTIONS), "policy": policy, **options})

    def with_plan(self, plan: Any) -> Checkpointing:
        """Return the section with the plan that policy `auto` chose."""
        return Checkpointing({**self._without(*OF_AUTO, *ALLOWANCES), "policy": plan})

    def with_options(self, **options: Any) -> Checkpointing:
        """Return the section with these options in it, or in place of those that it has."""
        return Checkpointing({**self.written, **options})

    def _only(self, keys: tuple[str, ...]) -> dict[str, Any]:
        return {key: self.written[key] for key in keys if key in self.written}

    def _without(self, *keys: str) -> dict[str, Any]:
        return {key: value for key, value in self.written.items() if key not in keys}


NO_CHECKPOINTING = Checkpointing({})  # Stands in where a recipe has no such section.
