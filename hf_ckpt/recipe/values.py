"""What a value of a recipe may be: types read from annotations, and the words that errors use for them.

Knows nothing of recipes and of the libraries that the annotations come from.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hf_ckpt.errors import did_you_mean

Kind = Literal["any", "null", "bool", "int", "float", "str", "list", "dict", "choice", "union", "object"]

_WORDS: dict[Kind, str] = {
    "any": "anything",
    "null": "null",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "dict": "a mapping",
    "object": "a Python object, which a recipe cannot hold",
}
_SIMPLE: dict[str, Kind] = {
    "Any": "any",
    "None": "null",
    "bool": "bool",
    "int": "int",
    "float": "float",
    "str": "str",
    "list": "list",
    "tuple": "list",
    "dict": "dict",
}
# YAML 1.1 reads these as true and false. A recipe reads them as text, so that `save_strategy: no` means what it says.
_SPOKEN_BOOLEANS = {"yes": True, "on": True, "y": True, "true": True}
_SPOKEN_BOOLEANS |= {"no": False, "off": False, "n": False, "false": False}


@dataclass(frozen=True)
class Type:
    """What one value may be.

    Args:
        kind: what it is.
        parts: of a union its members, of a list its element, of a dict its value.
        choices: the words that are valid, of kind `choice`. `[...]` in a word stands for a number.
    """

    kind: Kind
    parts: tuple[Type, ...] = ()
    choices: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """Tell whether `value` is of this type. A whole number is a number; `true` is neither."""
        if self.kind == "union":
            return any(part.accepts(value) for part in self.parts)
        if self.kind == "choice":
            return any(_is_choice(value, choice) for choice in self.choices)
        if self.kind == "list":
            return isinstance(value, list) and all(part.accepts(item) for part in self.parts for item in value)
        if self.kind == "dict":
            return isinstance(value, dict) and all(part.accepts(v) for part in self.parts for v in value.values())
        return _is_simple(value, self.kind)

    def members(self) -> tuple[Type, ...]:
        """Return the members of a union, or the type itself."""
        return self.parts if self.kind == "union" else (self,)

    def words(self) -> tuple[str, ...]:
        """Return the words that are valid, if any are listed."""
        return tuple(str(word) for member in self.members() for word in member.choices if isinstance(word, str))

    def describe(self) -> str:
        """Return the type in words, for "expected ..."."""
        if self.kind == "union":
            return " or ".join(part.describe() for part in sorted(self.parts, key=lambda part: part.kind == "object"))
        if self.kind == "choice":
            return "one of " + ", ".join(show(choice) for choice in self.choices)
        if self.kind == "list":
            return "a list" + "".join(f" of {_plural(part)}" for part in self.parts)
        return _WORDS[self.kind]


def parse_type(
    annotation: ast.expr | str, enums: Mapping[str, Sequence[str]] | None = None, unknown: Kind = "object"
) -> Type:
    """Read an annotation.

    Args:
        annotation: such as `int | None`, as text or as parsed.
        enums: words of the enumerations that the annotation may name.
        unknown: what to take any other name for.
    """
    node = ast.parse(annotation, mode="eval").body if isinstance(annotation, str) else annotation
    members = [_parse_member(member, enums or {}, unknown) for member in _union_members(node)]
    if any(isinstance(word, str) for member in members for word in member.choices):
        # Upstream writes `OptimizerNames | str`: the text has to be one of the words.
        members = [member for member in members if member.kind != "str"]
    unique = tuple(dict.fromkeys(members))
    return unique[0] if len(unique) == 1 else Type("union", unique)


def advice(value: object, expected: Type) -> str:
    """Return what to write instead of `value`, as `" Write 1000."`, or an empty string where nothing is likely."""
    candidate = _intended(value, expected)
    if candidate is not None:
        return f" Write {candidate}."
    return did_you_mean(value, expected.words())


def show(value: object) -> str:
    """Return `value` as it stands in a recipe."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _union_members(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union_members(node.left) + _union_members(node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _union_members(ast.parse(node.value, mode="eval").body)
    name, arguments = _subscript(node)
    if name == "Optional":
        return [*_union_members(arguments[0]), ast.Constant(None)]
    if name == "Union":
        return [member for argument in arguments for member in _union_members(argument)]
    return [node]


def _subscript(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """Return name and arguments of `name[arguments]`."""
    if not isinstance(node, ast.Subscript):
        return "", []
    arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return ast.unparse(node.value).removeprefix("typing."), arguments


def _parse_member(node: ast.expr, enums: Mapping[str, Sequence[str]], unknown: Kind) -> Type:
    name, arguments = _subscript(node)
    if name == "Literal":
        return Type("choice", choices=tuple(ast.literal_eval(argument) for argument in arguments))
    if name in ("list", "List", "Sequence", "tuple"):
        return Type("list", (parse_type(arguments[0], enums, unknown),))
    if name in ("dict", "Dict", "Mapping"):
        return Type("dict", (parse_type(arguments[-1], enums, unknown),))
    plain = ast.unparse(node)
    if plain in enums:
        return Type("choice", choices=tuple(enums[plain]))
    return Type(_SIMPLE.get(plain, unknown))


def _is_simple(value: object, kind: Kind) -> bool:
    if kind == "any":
        return True
    if kind == "null":
        return value is None
    if isinstance(value, bool):
        return kind == "bool"
    if kind == "float":
        return isinstance(value, int | float) and not math.isnan(value)
    return (kind == "int" and isinstance(value, int)) or (kind == "str" and isinstance(value, str))


def _is_choice(value: object, choice: object) -> bool:
    if isinstance(value, str) and isinstance(choice, str) and "[" in choice:
        return re.fullmatch(re.sub(r"\\\[.*?\\\]", r"\\d+", re.escape(choice)), value) is not None
    return type(value) is type(choice) and value == choice


def _plural(element: Type) -> str:
    words = {"int": "whole numbers", "float": "numbers", "str": "texts", "list": "lists", "dict": "mappings"}
    return words.get(element.kind, element.describe())


def _intended(value: object, expected: Type) -> str | None:
    """Return what the user probably meant, as YAML."""
    if expected.accepts([value]):
        return show([value])
    if isinstance(value, str):
        return next((show(meant) for meant in _readings(value) if expected.accepts(meant)), None)
    if isinstance(value, float) and value.is_integer() and expected.accepts(int(value)):
        return show(int(value))
    if isinstance(value, int | float) and expected.accepts("text"):
        return "it in quotes, as text"
    return None


def _readings(text: str) -> list[object]:
    """Return what else `text` may stand for: true, false, null or a number."""
    if text.lower() in _SPOKEN_BOOLEANS:
        return [_SPOKEN_BOOLEANS[text.lower()]]
    if text == "None":
        return [None]
    readings: list[object] = []
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            readings.append(convert(text))
    return readings
