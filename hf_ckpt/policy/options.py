"""The options of a policy: their names and types, spelled once, and what reads the values that users write.

Everything that takes options derives from the `TypedDict`s here: `Policy.parse`, `hf_ckpt.apply`, `HFCkptCallback`, and
the keys of a recipe's `checkpointing` section, which accepts what the annotations say. Knows no model and imports no
torch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Literal, TypedDict, TypeGuard, TypeVar, cast

from hf_ckpt.errors import PolicyError, as_written, did_you_mean
from hf_ckpt.units import ADDRESSABLE_BYTES, parse_budget

Tiles = int | Literal["auto"]
"""Slices of the sequence that the position-wise half of a layer runs in; `auto` chooses by the length."""

Prove = Literal["first_step", "off"] | int
"""`"first_step"`, `"off"`, or n: steps 1, 1 + n, 1 + 2n and so on."""

TO_CPU, TO_DISK = "cpu", "disk"

_MIN_BYTES = 2**20
_MIN_HOST_MEMORY = 4096
_RESIDENT = 2


class RuleOptions(TypedDict, total=False):
    """What a mode name may be completed with to a rule. `Rule` tells what they mean."""

    every_n_layers: int | None
    segment_size: int | Literal["sqrt"] | None
    nested: bool | Literal["revolve"] | None
    snapshots: int | None
    save: str | Sequence[str] | None
    offload: str | Mapping[str, Any] | None
    weights: str | Mapping[str, Any] | None
    tiles: int | Literal["auto"] | None


class PolicyOptions(RuleOptions, total=False):
    """What `Policy.parse` takes besides the policy."""

    head: Literal["plain", "chunked"] | None
    embedding: Literal["cpu", "device"] | None
    skip_frozen: bool


class StructureOptions(TypedDict, total=False):
    """What `find_layers` looks for where structure does not tell."""

    layers: str | Sequence[str] | None
    attention: str | None
    ffn: str | None


class ProofOptions(TypedDict, total=False):
    """Which steps are proven, bit by bit."""

    prove: int | Literal["first_step", "off"]


class AutoOptions(TypedDict, total=False):
    """What only policy `auto` takes."""

    memory_budget: str | float | None
    max_length: int | None
    exact: bool | Literal["prefer"] | None
    fallback: str | None


class RunOptions(TypedDict, total=False):
    """What a run of the Trainer takes besides its policy."""

    input_require_grads: bool | None
    on_mismatch: Literal["error", "warn"]
    strict_resume: bool
    on_oom: Literal["escalate", "error"] | None
    quiet_steps: int


class ApplyOptions(PolicyOptions, StructureOptions, ProofOptions, total=False):
    """What `hf_ckpt.apply` takes."""


class LoopOptions(ApplyOptions, total=False):
    """What `hf_ckpt.apply` takes with `auto`, which plans for a step: its budget, and fields of `Step`."""

    memory_budget: str | float | None
    exact: bool | Literal["prefer"] | None
    batch_size: int | None
    seq_length: int | None
    is_padded: bool | None
    gradient_accumulation_steps: int | None
    autocast: Literal["bfloat16", "float16"] | None
    optimizer: Any
    quiet_steps: int


class CallbackOptions(AutoOptions, PolicyOptions, StructureOptions, RunOptions, ProofOptions, total=False):
    """What `HFCkptCallback` takes, and a recipe's `checkpointing` section."""


DEFAULTS: CallbackOptions = {
    "skip_frozen": False,
    "on_mismatch": "error",
    "strict_resume": False,
    "quiet_steps": 50,
    "prove": "first_step",
}
"""Of the options whose default is not None."""

Function = TypeVar("Function", bound=Callable[..., Any])


def types_of(options: type) -> dict[str, str]:
    """Return the names of options in order, each with its annotation as text.

    Args:
        options: one of the `TypedDict`s above.
    """
    return {name: hint.__forward_arg__ for name, hint in options.__annotations__.items()}


POLICY_OPTIONS = tuple(types_of(PolicyOptions))
"""The names of the options that `Policy.parse` takes besides the policy."""


def select(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return those of the options that are of one kind, in its order.

    Args:
        options: all that a function with `takes` was given.
        kind: one of the `TypedDict`s above.
    """
    return {name: options[name] for name in types_of(kind)}


def takes(kind: type) -> Callable[[Function], Function]:
    """Give a function with `**options: Unpack[kind]` the signature that spells the options out.

    `inspect.signature` and `help` show each option with its default, the function gets all of them, and another keyword
    is refused in Python's own words, with the nearest one.

    Args:
        kind: one of the `TypedDict`s above.
    """
    defaults: dict[str, Any] = {name: DEFAULTS.get(name) for name in types_of(kind)}

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        known = {*defaults, *(each.name for each in own)}

        @functools.wraps(function)
        def with_defaults(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in known:
                    known_as = f"{function.__qualname__}() got an unexpected keyword argument '{name}'"
                    near = did_you_mean(name, sorted(known))
                    raise TypeError(f"{known_as}.{near}" if near else known_as)
            return function(*args, **{**defaults, **given})

        spelled = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
            for name, annotation in types_of(kind).items()
        ]
        with_defaults.__signature__ = signature.replace(parameters=[*own, *spelled])  # type: ignore[attr-defined]
        return cast("Function", with_defaults)

    return decorate


class HeadMode(StrEnum):
    """How the language-model head and the loss run."""

    PLAIN = "plain"
    """As the model does it: all logits at once."""
    CHUNKED = "chunked"
    """Some tokens at a time, each chunk computed again in backward: the logits are never held."""


class EmbeddingPlace(StrEnum):
    """Where a frozen input embedding lies."""

    DEVICE = "device"
    """As the model has it."""
    CPU = "cpu"
    """In host memory, where the device reads the rows that it looks up."""


class Moved:
    """What waits elsewhere. Dataclasses derive from it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, and `to`, as JSON types."""
        return to_json_types(self, always="to")


@dataclass(frozen=True, kw_only=True)
class Offload(Moved):
    """Where what a layer keeps waits for its backward.

    Args:
        to: `cpu` (host memory) or `disk`.
        path: directory for `disk`, which must be writable; a private one is made in it.
        fraction: share of the layers that do so, spread evenly. None takes as many as can be copied while others
            compute, as measured in the first steps; all where nothing can be measured. Torch's peak of the device is
            read for that and never reset: where loading took more memory than a step, fewer layers keep theirs.
        host_memory: bytes of host memory that may be used in all. None takes what the machine has free.
        trust_host_memory: do not ask how much the machine has free, only the limits of control groups.
        min_bytes: smaller tensors stay on the device.
    """

    to: str = TO_CPU
    path: str | None = None
    fraction: float | None = None
    host_memory: int | None = None
    trust_host_memory: bool = False
    min_bytes: int = _MIN_BYTES

    def describe(self) -> str:
        """Return what is asked for as one short phrase, such as `offload to cpu`."""
        share = "" if self.fraction is None else f", fraction {self.fraction:g}"
        return f"offload to {self.to}{share}"


@dataclass(frozen=True, kw_only=True)
class Weights(Moved):
    """Where a layer's frozen weights wait while other layers run.

    Args:
        to: `cpu` (host memory).
        resident: layers whose weights are on the device at a time, 1 or more: the one that runs, and those after it,
            whose weights are copied meanwhile.
        host_memory: bytes of host memory that may be used in all. None takes what the machine has free.
        trust_host_memory: do not ask how much the machine has free, only the limits of control groups.
    """

    to: str = TO_CPU
    resident: int = _RESIDENT
    host_memory: int | None = None
    trust_host_memory: bool = False

    def describe(self) -> str:
        """Return what is asked for as one short phrase, such as `weights on cpu`."""
        return f"weights on {self.to}" + ("" if self.resident == _RESIDENT else f", {self.resident} resident")


def to_json_types(entry: Any, *, always: str) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults as JSON types.

    Args:
        entry: a rule, an entry of a plan, an `Offload` or a `Weights`.
        always: name of the field that is returned whatever its value is.
    """
    return {
        field.name: _plain(getattr(entry, field.name))
        for field in fields(entry)
        if field.name == always or getattr(entry, field.name) != field.default
    }


def _plain(value: object) -> object:
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Moved):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def parse_offload(value: object) -> Offload | None:
    """Read what a user writes for `offload`: `cpu`, or a mapping with the fields of `Offload`.

    Raises:
        PolicyError: names the key, the value, and the nearest valid word.
    """
    if value is None or isinstance(value, Offload):
        return value
    value = _mapping("offload", value, Offload, such_as="{to: disk, path: /scratch}")
    min_bytes = _parse_amount("min_bytes", value.get("min_bytes"))
    fraction = _checked("fraction", value, _is_fraction, "a number above 0 and at most 1")
    trusts = _checked("trust_host_memory", value, *_YES_OR_NO)
    parsed = Offload(
        to=_parse_to(value.get("to", TO_CPU)),
        path=_checked("path", value, lambda it: isinstance(it, str) and it.strip(), "the name of a directory"),
        fraction=None if fraction is None else float(fraction),
        host_memory=_parse_host_memory(value.get("host_memory")),
        trust_host_memory=bool(trusts),
        min_bytes=_MIN_BYTES if min_bytes is None else min_bytes,
    )
    _check_path(parsed, value)
    return parsed


def parse_weights(value: object) -> Weights | None:
    """Read what a user writes for `weights`: `cpu`, or a mapping with the fields of `Weights`.

    Raises:
        PolicyError: names the key, the value, and the nearest valid word.
    """
    if value is None or isinstance(value, Weights):
        return value
    value = _mapping("weights", value, Weights, such_as="{to: cpu, resident: 3}")
    if (to := value.get("to", TO_CPU)) != TO_CPU:
        raise PolicyError(
            f'weights go to {as_written(to)}. Use "cpu": they are read in each step, which a disk is too slow for.'
            f"{did_you_mean(to, [TO_CPU])}"
        )
    return Weights(
        resident=parse_count("resident", value.get("resident", _RESIDENT)),
        host_memory=_parse_host_memory(value.get("host_memory"), "weights"),
        trust_host_memory=bool(_checked("trust_host_memory", value, *_YES_OR_NO, "weights")),
    )


def _mapping(key: str, value: object, kind: type[Moved], *, such_as: str) -> Mapping[str, Any]:
    """Return what a user writes for something that waits elsewhere, with the fields of its kind: `cpu` is its `to`."""
    if isinstance(value, str):
        value = {"to": value}
    if not isinstance(value, Mapping):
        raise PolicyError(f"{key} is {as_written(value)}. Use cpu, or a mapping such as {such_as}.")
    check_keys(key, value, [field.name for field in fields(cast("Any", kind))])
    return value


def check_keys(what: str, value: Mapping[Any, Any], known: Sequence[str]) -> None:
    """Refuse a mapping with a key that is not known.

    Args:
        what: the mapping's name, for messages.
        value: the mapping.
        known: the keys that it may have.

    Raises:
        PolicyError: names the key, and the nearest known one.
    """
    for key in value:
        if key not in known:
            raise PolicyError(
                f'Unknown key "{key}" in {what} {as_written(value)}. Keys are {", ".join(known)}.'
                f"{did_you_mean(key, known)}"
            )


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Whether a value is a whole number of at least so much; `true`, an `int` to Python, is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def parse_tiles(value: object) -> Tiles | None:
    """Read what a user writes for `tiles`: a whole number of 1 or more, or `auto`.

    Raises:
        PolicyError: it is something else.
    """
    return None if value is None else parse_count("tiles", value, "auto")


def parse_count(key: str, value: object, *words: str) -> Any:
    """Read a whole number of 1 or more, or one of the words that may stand in its place.

    Raises:
        PolicyError: it is something else; names the key.
    """
    if value in words or is_whole(value, 1):
        return value
    instead = "".join(f', or "{word}"' for word in words)
    raise PolicyError(
        f"{key} is {as_written(value)}. Use a whole number of 1 or more{instead}.{did_you_mean(value, words)}"
    )


def parse_save(value: object) -> tuple[str, ...]:
    """Read what a user writes for `save`: names of operators, and globs of modules below the layer.

    Raises:
        PolicyError: it is no list of names.
    """
    names = (value,) if isinstance(value, str) else value
    if isinstance(names, Sequence) and names and all(isinstance(name, str) and name.strip() for name in names):
        return tuple(dict.fromkeys(names))
    raise PolicyError(
        f"save is {as_written(value)}. Use a list of operators (aten.mm) and of modules below the layer "
        "(mlp.down_proj, *.q_proj)."
    )


def parse_prove(value: Prove) -> Prove:
    """Return what says which steps are proven.

    Raises:
        PolicyError: it is something else.
    """
    if value in ("first_step", "off") or is_whole(value, 1):
        return value
    raise PolicyError(
        f'prove is {value!r}. Use "first_step", "off", or a number n for steps 1, 1 + n, 1 + 2n and so on.'
    )


def check_run_options(options: RunOptions) -> None:
    """Check what a run of the Trainer takes besides its policy.

    Raises:
        PolicyError: one of them is none of its values.
    """
    on_mismatch, input_gradients = options["on_mismatch"], options["input_require_grads"]
    strict, on_oom = options["strict_resume"], options["on_oom"]
    if on_mismatch not in ("error", "warn"):
        raise PolicyError(f'on_mismatch is "{on_mismatch}". Use "error" or "warn".')
    if input_gradients not in (None, True, False):
        raise PolicyError(f"input_require_grads is {as_written(input_gradients)}. Use true or false.")
    if strict not in (True, False):
        raise PolicyError(f"strict_resume is {as_written(strict)}. Use true or false.")
    if on_oom not in (None, "escalate", "error"):
        raise PolicyError(f'on_oom is "{on_oom}". Use "escalate" or "error".')
    parse_count("quiet_steps", options["quiet_steps"])


def parse_head(value: object) -> HeadMode | None:
    """Read what a user writes for `head`.

    Raises:
        PolicyError: it is no `HeadMode`.
    """
    if value is None:
        return None
    if isinstance(value, str) and value in set(HeadMode):
        return HeadMode(value)
    names = ", ".join(f'"{mode}"' for mode in HeadMode)
    raise PolicyError(f"head is {as_written(value)}. Use one of {names}.{did_you_mean(value, HeadMode)}")


def parse_embedding(value: object) -> EmbeddingPlace | None:
    """Read what a user writes for `embedding`.

    Raises:
        PolicyError: it is no `EmbeddingPlace`.
    """
    if value is None:
        return None
    if isinstance(value, str) and value in set(EmbeddingPlace):
        return EmbeddingPlace(value)
    raise PolicyError(
        f'embedding is {as_written(value)}. Use "cpu" (host memory) or "device".{did_you_mean(value, EmbeddingPlace)}'
    )


READERS: Mapping[str, Callable[[Any], Any]] = {
    "save": parse_save,
    "offload": parse_offload,
    "weights": parse_weights,
    "tiles": parse_tiles,
    "head": parse_head,
    "embedding": parse_embedding,
}
"""What reads the options whose values have a form of their own."""


def _parse_to(value: object) -> str:
    if value in (TO_CPU, TO_DISK):
        return str(value)
    raise PolicyError(
        f'offload goes to {as_written(value)}. Use "cpu" (host memory) or "disk".{did_you_mean(value, ["cpu", "disk"])}'
    )


def _checked(
    key: str, given: Mapping[str, Any], is_allowed: Callable[[Any], Any], allowed: str, of: str = "offload"
) -> Any:
    value = given.get(key)
    if value is None or is_allowed(value):
        return value
    raise PolicyError(f"{key} of {of} is {as_written(value)}. Use {allowed}.")


_YES_OR_NO = (lambda value: isinstance(value, bool), "true or false")


def _is_fraction(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _check_path(offload: Offload, value: Mapping[str, Any]) -> None:
    if offload.to == TO_DISK and offload.path is None:
        raise PolicyError(
            f"offload {as_written(value)} has no path. Name a directory on a fast local disk: "
            "{to: disk, path: /scratch}."
        )
    if offload.to == TO_CPU and offload.path is not None:
        raise PolicyError(
            f"offload {as_written(value)} has a path, which only disk uses. Write to: disk, or leave it out."
        )


def _parse_host_memory(value: object, of: str = "offload") -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value < _MIN_HOST_MEMORY:
        # A few bytes are an amount that lacks its unit.
        return parse_budget(value, key="host_memory").num_bytes
    return _parse_amount("host_memory", value, of)


def _parse_amount(key: str, value: object, of: str = "offload") -> int | None:
    if value is None or (is_whole(value, 0) and value <= ADDRESSABLE_BYTES):
        return value
    is_too_much = isinstance(value, int) and value > ADDRESSABLE_BYTES
    amount = None if isinstance(value, float) or is_too_much else parse_budget(value, key=key).num_bytes
    if amount is None:
        shown = "more than any machine has" if is_too_much else as_written(value)
        raise PolicyError(f'{key} of {of} is {shown}. Write an amount, such as "64GiB".')
    return amount
