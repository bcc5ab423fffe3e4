"""The parts of a run: each gets the Trainer's events, in the order of the callback's list.

A part that is of another house of the package (policy `auto`, recovery from running out of memory) is found here by
name, where a policy or an option asks for it. The plugin imports neither, and trains without them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.policy.options import Prove
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import Policy
from hf_ckpt.trainer.batch import Batch, largest_text_batch

if TYPE_CHECKING:
    # Importing it brings in the Trainer, and peft and bitsandbytes with it, which a loop of one's own has no use for.
    from transformers import TrainerState, TrainingArguments


def load(name: str, asked: str) -> Any:
    """Return a module of another house of the package, which `asked` asks for, by its name below `hf_ckpt`."""
    try:
        return importlib.import_module(f"hf_ckpt.{name}")
    except ModuleNotFoundError as error:
        # Another library that is missing speaks for itself.
        if not (error.name or "").startswith("hf_ckpt."):
            raise
        raise UnsupportedError(
            f"{asked} needs {error.name}, which is not there: this is hf_ckpt's plugin for the Trainer alone. Install "
            "the whole of hf_ckpt, or leave that out."
        ) from error


class Part:
    """What takes part in a run, and does nothing at an event that it has no method of its own for."""

    changes_plans = False
    """Whether it may put another plan in force."""
    is_alone = False
    """Whether it does so without the other processes, with plans that are known to suit the model."""

    def place_hooks(self, model: nn.Module, change_plan: ChangePlan) -> Iterable[RemovableHandle]:
        """Place hooks that stand until the plan is removed, on what the Trainer or an engine's wrapper calls."""
        return ()

    def change_plan(self, plan: Plan) -> None:
        """Another plan is in force, which another part has asked for."""

    def begin_step(self) -> None:
        """An optimizer step begins, before its first micro-batch."""

    def end_micro_batch(self) -> None:
        """Forward and backward of a micro-batch have ended, and the weights are still those of before."""

    def faults_of_step(self) -> Iterable[str]:
        """Return what ran otherwise than planned. The step's gradients are there, its weights not yet changed."""
        return ()

    def end_optimizer_step(self) -> None:
        """The optimizer has stepped."""

    def end_step(self) -> None:
        """What comes between steps begins: evaluation, generation, saving."""

    def save(self, folder: Path) -> None:
        """Write into a checkpoint. Only the first process is asked."""

    def figures(self) -> dict[str, float]:
        """Return what the reporters get, by `ckpt/...` names."""
        return {}


# Puts another plan in force that a part asks for, while no layer runs, and lets all other parts know.
ChangePlan = Callable[[Part, Plan], None]


class ProvenPlans:
    """Under which plans a step has been proven: under these none is again, unless each n-th step is."""

    def __init__(self, prove: Prove) -> None:
        self._prove = prove
        self._plans: list[Plan] = []

    def note(self, plan: Plan) -> None:
        if plan not in self._plans:
            self._plans.append(plan)

    def prove_under(self, plan: Plan) -> Prove:
        """Return which steps under a plan are to be proven."""
        return "off" if self._prove == "first_step" and plan in self._plans else self._prove


class Planning(Part):
    """What is known of the batches of a run, and of what its steps need: with a given policy nothing but lengths."""

    # The largest one that was planned for.
    batch: Batch | None = None
    # The highest predicted peak of the steps so far; 0 before one is predicted.
    predicted_bytes: int = 0

    def describe(self) -> str | None:
        return None

    def longest_batch(self, num_rows: int, dataloader: Any) -> Batch | None:
        """Return the largest batch of text that can come to this process; None where that is not known."""
        return largest_text_batch(
            getattr(dataloader, "dataset", None), getattr(dataloader, "collate_fn", None), num_rows
        )


class PolicySource:
    """Where the plan of each run comes from: here it is resolved from what the user gave."""

    def __init__(self, policy: Policy | Plan | None) -> None:
        # None where it depends on the run.
        self.policy = policy

    def describe(self) -> str:
        if isinstance(self.policy, Plan):
            return f"a plan for {self.policy.model_class}"
        assert self.policy is not None, "what has none describes itself"
        return self.policy.describe()

    def keep_shape(self, model: nn.Module) -> None:
        """A Trainer is being built. Its engine may shard the model next."""

    def begin_run(
        self, model: nn.Module, args: TrainingArguments, state: TrainerState, **given: Any
    ) -> tuple[Planning, Policy | Plan, bool | None]:
        """Return the planning of a run, the policy to apply, and whether input gradients are asked for.

        `given` are `dataloader` and `optimizer` of the Trainer, and `input_gradients` as the user says.
        """
        assert self.policy is not None, "it was given"
        return Planning(), self.policy, given["input_gradients"]
