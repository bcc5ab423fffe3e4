"""Lets the API page show options as options: an extension of griffe, which reads the sources for mkdocstrings.

The package spells its options in `TypedDict`s, and its functions take `**options: Unpack[...]`. Here each becomes a
parameter with its default, as `hf_ckpt.policy.options.takes` gives it to `inspect.signature`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe

_DEFAULTS = "hf_ckpt.policy.options.DEFAULTS"


class Options(griffe.Extension):
    """Puts the options into the signatures of the functions that take them."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the functions of a package, once all of it has been read: options are inherited across modules."""
        if pkg.name != "hf_ckpt":
            return
        defaults = _defaults(pkg.modules_collection[_DEFAULTS])
        for function in _functions(pkg):
            for parameter in [each for each in function.parameters if each.kind is griffe.ParameterKind.var_keyword]:
                kind = _unpacked(parameter)
                if kind is not None:
                    del function.parameters[parameter.name]
                    for name in _names(pkg.modules_collection[kind]):
                        function.parameters.add(_option(name, defaults.get(name, "None")))


def _functions(module: griffe.Object) -> Iterator[griffe.Function]:
    for member in module.members.values():
        if isinstance(member, griffe.Function):
            yield member
        elif isinstance(member, griffe.Class | griffe.Module):
            yield from _functions(member)


def _unpacked(parameter: griffe.Parameter) -> str | None:
    """Return the path of the `TypedDict` in `Unpack[...]`."""
    annotation = parameter.annotation
    if isinstance(annotation, griffe.ExprSubscript) and annotation.canonical_path == "typing.Unpack":
        return str(annotation.slice.canonical_path) if isinstance(annotation.slice, griffe.Expr) else None
    return None


def _names(kind: griffe.Object) -> list[str]:
    """Return the keys of a `TypedDict` in the order of `types_of`: those of its last base first."""
    assert isinstance(kind, griffe.Class), kind
    names: dict[str, None] = {}
    for base in reversed(kind.bases):
        path = base.canonical_path if isinstance(base, griffe.Expr) else base
        if not path.startswith("typing."):
            names = {**dict.fromkeys(_names(kind.modules_collection[path])), **names}
    return list(names | dict.fromkeys(kind.attributes))


def _option(name: str, default: str) -> griffe.Parameter:
    return griffe.Parameter(name, kind=griffe.ParameterKind.keyword_only, default=default)


def _defaults(attribute: griffe.Object) -> dict[str, str]:
    """Return the defaults that are not None, as they are written."""
    value = attribute.value if isinstance(attribute, griffe.Attribute) else None
    assert isinstance(value, griffe.ExprDict), attribute
    return {str(key).strip("'\""): str(default) for key, default in zip(value.keys, value.values, strict=True)}
