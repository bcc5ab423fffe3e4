"""What can go wrong, as types.

Every message has three parts: what was asked for, what is true, what to do. Knows nothing of the rest of the package.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class HFCkptError(Exception):
    """Base of all errors that this package raises on purpose. Objects are named without their address."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_ADDRESS.sub("", each) if isinstance(each, str) else each for each in args))


class PolicyError(HFCkptError, ValueError):
    """Raised when a policy cannot be read, or does not suit the model that it is resolved for."""


class BudgetError(PolicyError):
    """Raised when no plan for the model keeps a training step within the memory budget."""


class SmallerBatchError(BudgetError, RuntimeError):
    """Raised in its place where `auto_find_batch_size` is to try smaller batches: that goes by type and text."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}\nauto_find_batch_size tries fewer sequences, as where a device is out of memory.")


class StructureError(HFCkptError, ValueError):
    """Raised when decoder layers, or a part of them, cannot be found in a model."""


class UnsupportedError(HFCkptError, ValueError):
    """Raised when a mode could not keep loss and gradients exact, or the engine at hand cannot carry it."""


class ChangedSinceForwardError(UnsupportedError, RuntimeError):
    """Raised in a step where what a region reads is not what its forward read. Autograd does so for what it saves."""


class RecomputationError(UnsupportedError, RuntimeError):
    """Raised where a region raises what its forward did not when it is recomputed, or does something else.

    `path` is that of the layer or module; what was raised there is the cause.
    """

    path: str | None = None


class AlreadyAppliedError(HFCkptError, RuntimeError):
    """Raised when a plan is applied to a model that already carries one."""


class PlanMismatchError(HFCkptError, RuntimeError):
    """Raised when what runs is not what was planned."""


class OtherProcessError(HFCkptError, RuntimeError):
    """Raised in a process in which nothing went wrong, when another process of the run failed."""


class SavedFilesError(HFCkptError, RuntimeError):
    """Raised when what was saved is not the whole adapter or model."""


class DiskFullError(HFCkptError, OSError):
    """Raised when a run cannot write because a disk is full, or its quota used up."""


class OutOfMemoryError(HFCkptError, RuntimeError):
    """Raised when a run goes out of memory; says where, why, and what would fit."""


class HostMemoryError(HFCkptError, RuntimeError):
    """Raised when offloading would need more host memory or disk than there is, or than it may take."""


class OffloadError(HFCkptError, RuntimeError):
    """Raised when what was offloaded to disk cannot be read back as it was written."""


class RecipeError(HFCkptError, ValueError):
    """Raised when a recipe cannot be read; lists every mistake found, up to fifty."""


class DataError(HFCkptError, ValueError):
    """Raised when a data set, a tokenizer or a chat template cannot be used."""


def error_text(error: Exception) -> str:
    """Return the text of an error for another process: of this package's the message, of others the type too."""
    return str(error) if isinstance(error, HFCkptError) else f"{type(error).__name__}: {error}"


def cause_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """Return ``' Did you mean "x"?'`` for the choice nearest to ``word`` in any case, or an empty string."""
    in_lower_case = {str(choice).lower(): choice for choice in choices}
    near = difflib.get_close_matches(str(word).lower(), in_lower_case, n=1)
    return f' Did you mean "{in_lower_case[near[0]]}"?' if near else ""


def shortened(text: str, most: int) -> str:
    """Return a text that a user wrote for a message, cut after so many characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def as_written(value: object) -> str:
    """Return a value of an option as a user writes it in YAML, for messages."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
