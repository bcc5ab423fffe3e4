"""Options of a plan and of a step as a user of a recipe writes them: overrides, to be copied behind a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hf_ckpt.estimate.subject import Subject, is_auto
from hf_ckpt.planner.advice import as_keywords
from hf_ckpt.policy.allowances import ALLOWANCES
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.recipe.schema import DEFAULT_MAX_LENGTH, OF_AUTO, POLICY_OPTIONS

_OF_TRAINING = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim")
_OF_STEPS = {"max_length": "seq_length", "row_length": "seq_length", "per_device_train_batch_size": "batch_size"}
"""Names of the fields of `Step`, which a model without a recipe is asked about with."""


def written(subject: Subject, options: Mapping[str, object]) -> str:
    """Return options as overrides of a subject's recipe, such as `checkpointing.memory_budget=22GiB`.

    Args:
        subject: of a recipe; for that of a model, keyword arguments are returned.
        options: by the names of `hf_ckpt.planner.advice.Write`.
    """
    if subject.recipe is None:
        return as_keywords({_OF_STEPS.get(name, name): value for name, value in options.items()})
    return " ".join(_parts(subject, options))


def _parts(subject: Subject, options: Mapping[str, object]) -> Iterator[str]:
    given = subject.command_options
    if any(name in (*OF_AUTO, *ALLOWANCES) and name not in ("max_length", *given) for name in options):
        yield from _policy_auto(subject)
    for name, value in options.items():
        if name in given:
            yield f"{given[name]} {value}"
        elif name == "row_length":
            assert isinstance(value, int), "tokens are counted"
            yield f"data.max_length={value // _rows(subject)}"
        else:
            section = "data" if name == "max_length" else "training" if name in _OF_TRAINING else "checkpointing"
            yield f"{section}.{name}={value}"


def _policy_auto(subject: Subject) -> Iterator[str]:
    """Yield what leaves the plan to the planner, where the recipe has a policy of its own."""
    assert subject.recipe is not None, "a model has no overrides"
    if is_auto(subject.recipe):
        return
    yield f"checkpointing.policy={AUTO}"
    for name in POLICY_OPTIONS:
        if name not in ALLOWANCES and (subject.recipe.checkpointing or {}).get(name):
            yield f"checkpointing.{name}={'false' if name == 'skip_frozen' else 'null'}"


def _rows(subject: Subject) -> int:
    """Return how many examples are packed into a row."""
    assert subject.recipe is not None, "a model has no overrides"
    return max(1, subject.step.seq_length // int(subject.recipe.data.get("max_length", DEFAULT_MAX_LENGTH)))
