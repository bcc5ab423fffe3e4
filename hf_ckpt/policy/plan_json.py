"""The JSON of a plan, read and checked: each field's type and range, each field once, and no other fields.

Files of plans are edited by hand, copied and cut short: a value that nobody checked would be ignored without a word,
or end the run somewhere else. The values of options have readers of their own (`options`).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_ckpt.errors import PolicyError, did_you_mean
from hf_ckpt.policy.policy import Mode

PLAN_FORMAT = 2
"""Version of the JSON layout; raised when a reader of the old one would misread the new one."""

_LONGEST_SHOWN = 80


@dataclass(frozen=True)
class _Field:
    allows: Callable[[Any], bool]
    allowed: str
    is_required: bool = False


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


_TEXT = "text without control characters"
_MODES = "one of " + ", ".join(f'"{mode}"' for mode in Mode)
_FORMAT = _Field(lambda value: _is_number(value) and value > 0, f"a whole number, 1 to {PLAN_FORMAT}", is_required=True)
_READ_BY_OPTIONS = _Field(lambda value: True, "")
_PLAN = {
    "format": _FORMAT,
    "model_class": _Field(_is_text, _TEXT, is_required=True),
    "stacks": _Field(lambda value: isinstance(value, list), "a list", is_required=True),
    "head": _READ_BY_OPTIONS,
}
_STACK = {
    "path": _Field(_is_text, _TEXT, is_required=True),
    "layers": _Field(lambda value: isinstance(value, list), "a list", is_required=True),
}
_LAYER = {
    "mode": _Field(lambda value: isinstance(value, str) and value in set(Mode), _MODES, is_required=True),
    "segment": _Field(lambda value: value is None or _is_number(value), "a whole number of 0 or more, or leave it out"),
    "nested": _Field(lambda value: isinstance(value, bool), "true or false"),
    "snapshots": _Field(lambda value: value is None or _is_number(value), "a whole number of 0 or more"),
    "why": _Field(_is_text, _TEXT),
    **dict.fromkeys(("save", "offload", "tiles"), _READ_BY_OPTIONS),
}


def read_document(text: str) -> Mapping[str, Any]:
    """Read the JSON of a plan; raise `PolicyError` for a field or value that is not allowed, or a later format.

    What is no JSON raises `ValueError`, or `RecursionError`.
    """
    document = json.loads(text, object_pairs_hook=_each_once)
    _check_document(document)
    plan: Mapping[str, Any] = document
    return plan


def not_a_plan(problem: str) -> PolicyError:
    """Return the error for a text that is no plan."""
    return PolicyError(f"This is not a plan: {problem}. Write one with Plan.to_json().")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    given = dict(pairs)
    if len(given) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise not_a_plan(f"{json.dumps(twice)} is given twice. Keep one")
    return given


def _check_document(read: object) -> None:
    plan = _mapping("", read)
    _check_field("", "format", _FORMAT, plan)
    if plan["format"] > PLAN_FORMAT:
        # Only a later version knows its fields.
        raise PolicyError(f"The plan has format {plan['format']}, this version reads up to {PLAN_FORMAT}.")
    _check(_PLAN, "", plan)
    for number, stack in enumerate(plan["stacks"]):
        where = f"stacks.{number}"
        _check(_STACK, where, stack)
        for layer_idx, layer in enumerate(stack["layers"]):
            _check(_LAYER, f"{where}.layers.{layer_idx}", layer)
        _check_segments(f"{where}.layers", stack["layers"])


def _check(fields: Mapping[str, _Field], where: str, read: object) -> None:
    given = _mapping(where, read)
    for name in given:
        if name not in fields:
            path = json.dumps(f"{where}.{name}".lstrip("."))[:_LONGEST_SHOWN]
            raise not_a_plan(f"{path} is unknown.{did_you_mean(name, fields)} Fields are {', '.join(fields)}")
    for name, field in fields.items():
        _check_field(where, name, field, given)


def _check_field(where: str, name: str, field: _Field, given: Mapping[str, Any]) -> None:
    path = f"{where}.{name}".lstrip(".")
    if name not in given:
        if field.is_required:
            raise not_a_plan(f"{path} is missing. Use {field.allowed}")
        return
    if not field.allows(given[name]):
        raise not_a_plan(f"{path} is {_shown(given[name])}. Use {field.allowed}")


def _mapping(where: str, read: object) -> Mapping[str, Any]:
    if not isinstance(read, Mapping):
        raise not_a_plan(f"{where or 'it'} is {_shown(read)}. Use a mapping")
    return read


def _check_segments(where: str, layers: list[Mapping[str, Any]]) -> None:
    """Refuse a segment whose layers do not follow each other: each run of them would be one of its own."""
    numbers = [layer.get("segment") for layer in layers]
    _check_snapshots(where, layers)
    seen: set[int] = set()
    position = 0
    for number, run in itertools.groupby(numbers):
        if number is not None and (number in seen or number >= len(layers)):
            raise not_a_plan(
                f"{where}.{position}.segment is {_shown(number)}. Use a number below {len(layers)}, the layers of the "
                "stack, and one number for layers that follow each other"
            )
        seen.update([] if number is None else [number])
        position += len(list(run))


def _check_snapshots(where: str, layers: list[Mapping[str, Any]]) -> None:
    """Refuse snapshots that are not those of a whole nested segment."""
    saved: dict[int, int | None] = {}
    for position, layer in enumerate(layers):
        segment, snapshots = layer.get("segment"), layer.get("snapshots")
        if snapshots is not None and not layer.get("nested"):
            raise not_a_plan(f"{where}.{position}.snapshots is for nested segments. Leave it out")
        if segment is not None and saved.setdefault(segment, snapshots) != snapshots:
            raise not_a_plan(
                f"{where}.{position}.snapshots is {_shown(snapshots)}. Use that of the segment's first layer, "
                f"{_shown(saved[segment])}"
            )


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
