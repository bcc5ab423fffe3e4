"""What the value of a field may be: Python's own hints, read for what YAML can hold."""

from __future__ import annotations

import collections.abc
import contextlib
import enum
import json
import math
import re
import types
from typing import Any, Literal, Union, get_args, get_origin

from hf_ckpt.errors import did_you_mean

Hint = Any  # A type as `simplified` returns it.

_UNIONS = (Union, types.UnionType)
_WORDS = {
    Any: "anything",
    type(None): "null",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
    object: "a Python object, which a recipe cannot hold",
}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts", list: "lists", dict: "mappings"}
# YAML 1.1 reads these as true and false. A recipe reads them as text, so that `save_strategy: no` means what it says.
_SPOKEN_BOOLEANS = {"yes": True, "on": True, "y": True, "true": True}
_SPOKEN_BOOLEANS |= {"no": False, "off": False, "n": False, "false": False}


def parts(hint: Hint) -> tuple[Hint, tuple[Hint, ...]]:
    """Return what a hint is of, and its arguments: `list` and `(int,)` for `list[int]`, `int` and `()` for `int`."""
    # To mypy the origin of what may be anything is a ParamSpec.
    origin: Any = get_origin(hint)
    return origin or hint, get_args(hint)


def simplified(hint: Hint, unknown: Hint = object) -> Hint:
    """Return a hint in what YAML can hold: plain types, lists, mappings, `Literal` for the words of an enumeration.

    `unknown` stands in for the rest: `object` is a value that no recipe can hold, `Any` is any value.
    """
    origin, arguments = parts(hint)
    if origin in _UNIONS:
        found = [simplified(member, unknown) for member in arguments]
        if any(map(words, found)):
            # Upstream writes `OptimizerNames | str`: the text has to be one of the words.
            found = [member for member in found if member is not str]
        return Union[tuple(found)]  # noqa: UP007  # as many as there are
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Literal[tuple(member.value for member in hint)]
    if origin in (list, tuple, collections.abc.Sequence):
        return list[simplified(arguments[0], unknown)] if arguments else list  # type: ignore[misc]  # made here
    if origin in (dict, collections.abc.Mapping):
        return dict[str, simplified(arguments[-1], unknown)] if arguments else dict  # type: ignore[misc]  # made here
    return hint if origin is Literal or hint in _WORDS else unknown


def accepts(hint: Hint, value: object) -> bool:
    """Tell whether `value` is of this type. A whole number is a number; `true` is neither."""
    origin, arguments = parts(hint)
    if origin in _UNIONS:
        return any(accepts(member, value) for member in arguments)
    if origin is Literal:
        return any(_is_choice(value, choice) for choice in arguments)
    if origin is list:
        return isinstance(value, list) and all(accepts(element, item) for element in arguments for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(accepts(each, item) for each in arguments[1:] for item in value.values())
    if origin is Any or isinstance(value, bool):
        return origin in (Any, bool)
    if origin is float:
        return isinstance(value, int | float) and not math.isnan(value)
    return origin is not object and isinstance(value, origin)


def words(hint: Hint) -> tuple[str, ...]:
    """Return the words that are valid, if any are listed. `[...]` in a word stands for a number."""
    choices = [choice for origin, listed in map(parts, members(hint)) if origin is Literal for choice in listed]
    return tuple(choice for choice in choices if isinstance(choice, str))


def describe(hint: Hint) -> str:
    """Return the type in words, for "expected ..."."""
    origin, arguments = parts(hint)
    if origin in _UNIONS:
        return " or ".join(map(describe, sorted(arguments, key=lambda member: member is object)))
    if origin is Literal:
        return "one of " + ", ".join(map(show, arguments))
    if origin is list:
        plurals = (_PLURALS.get(parts(element)[0], describe(element)) for element in arguments)
        return "a list" + "".join(f" of {plural}" for plural in plurals)
    return _WORDS[origin]


def members(hint: Hint) -> tuple[Hint, ...]:
    """Return the members of a union, or the type itself."""
    origin, arguments = parts(hint)
    return arguments if origin in _UNIONS else (hint,)


def _is_choice(value: object, choice: object) -> bool:
    if isinstance(value, str) and isinstance(choice, str) and "[" in choice:
        return re.fullmatch(re.sub(r"\\\[.*?\\\]", r"\\d+", re.escape(choice)), value) is not None
    return type(value) is type(choice) and value == choice


def advice(value: object, expected: Hint) -> str:
    """Return what to write instead of `value`, as `" Write 1000."`, or an empty string where nothing is likely."""
    if accepts(expected, [value]):
        return f" Write {show([value])}."
    for meant in _readings(value):
        if accepts(expected, meant):
            return f" Write {show(meant)}."
    if isinstance(value, int | float) and accepts(expected, "text"):
        return " Write it in quotes, as text."
    return did_you_mean(value, words(expected))


def show(value: object) -> str:
    """Return `value` as it stands in a recipe."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _readings(value: object) -> list[object]:
    """Return what else a text may stand for: true, false, null or a number; and 1.0, for 1."""
    if isinstance(value, float) and value.is_integer():
        return [int(value)]
    if not isinstance(value, str):
        return []
    if value.lower() in _SPOKEN_BOOLEANS:
        return [_SPOKEN_BOOLEANS[value.lower()]]
    if value == "None":
        return [None]
    readings: list[object] = []
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            readings.append(convert(value))
    return readings
