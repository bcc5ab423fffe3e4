"""The one door to private and version-dependent names of other libraries: a file a library, a block a feature of ours.

A block holds what serves one feature, imported under the name that we use::

    with Feature("regions under a transform", seen="torch 2.11 to 2.14", instead="Use backward().") as TRANSFORMS:
        from torch._C._functorch import peek_interpreter_stack

Where the library has a name no more, the block ends there and the feature is off: each name that the block has not
bound is a stand-in, which nothing is an instance of, and which raises an `UnsupportedError` as soon as it is used. So
a file imports its names at the top, calls them without a detour, and costs nobody more than the feature that is off.

What is read off objects stands in functions with the feature as decorator, which turns an `AttributeError` into that
error. What can go on without its feature has another definition behind the block: `if TRANSFORMS.gone: ...`.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from hf_ckpt.errors import UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "deepspeed")
_FEATURES: list[Feature] = []
_CANNOT_IMPORT = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


OLD_NAMES = r".(\w*gradient_checkpointing\w*|past_key_values). is deprecated"
"""What transformers 5.23 and 5.24 tell (FutureWarning) whoever calls them as peft 0.21 and trl 1.16 do."""


@contextmanager
def old_names_untold() -> Iterator[None]:
    """Leave that out of what peft and trl do for us. In a user's own calls it is told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", OLD_NAMES, FutureWarning)
        yield


class Missing(NamedTuple):
    """A feature of ours that is off, as a library lacks a name."""

    feature: str
    name: str
    """With its module: `torch._C._will_engine_execute_node`."""
    reason: str
    """The message that a user gets who asks for the feature."""


class Feature:
    """What names of a library serve. A block that imports them, a decorator of functions that read them.

    Args:
        what: the feature, as the subject of a sentence.
        seen: the versions that the names were seen in.
        instead: what to do, or what happens, without it.
        of: modules whose source has the names that are read off objects. Looked at by `missing` alone.
    """

    def __init__(self, what: str, *, seen: str, instead: str, of: str = "") -> None:
        self.what = what
        self.gone: str | None = None
        """The name that the library has no more, with its module; None where nothing is missing."""
        self._seen = seen
        self._instead = instead
        self._modules = of.split()
        self._reads: set[str] = set()
        self._has_warned = False
        self.line = 0
        _FEATURES.append(self)

    def __enter__(self) -> Feature:
        self.line = sys._getframe(1).f_lineno
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if not isinstance(error, ImportError | AttributeError):
            return False
        self.gone = self.gone or _name_in(error)
        return True

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that raises `UnsupportedError` where an object has no such attribute any more."""
        self._reads |= _names_of(function.__code__)

        @functools.wraps(function)
        def read(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except ImportError as error:
                raise self.error(_name_in(error)) from error
            except AttributeError as error:
                if not _is_private(error.name or ""):
                    raise
                raise self.error(_name_in(error)) from error

        return read

    def attribute(self, name: str) -> str:
        """Return a name that is read off objects by `getattr`, once it is noted that the feature needs it."""
        self._reads.add(name)
        return name

    def error(self, name: str | None = None) -> UnsupportedError:
        return UnsupportedError(self.message(name or self.gone or "a name"))

    def message(self, name: str) -> str:
        """Say which feature needs which name, and what to do."""
        library = self._seen.partition(" ")[0]
        return (
            f"{self.what} needs {name}, which {library} {_version(library)} does not have; hf_ckpt has seen it in "
            f"{self._seen}. {self._instead}"
        )

    def warn(self, name: str | None = None) -> None:
        """Log, once, that something goes on without the feature."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s", self.message(name or self.gone or "a name"))

    def names_gone(self) -> Iterator[str]:
        """Yield the names that are missing, as far as can be told without using them."""
        if self.gone is not None:
            yield self.gone
        if self._modules and _is_installed(self._modules[0]):
            source = "\n".join(map(_source_of, self._modules))
            for name in sorted(self._reads):
                if not re.search(rf"\b{name}\b", source):
                    yield f"{self._modules[0]}: {name}"


def missing() -> list[Missing]:
    """Return what of our features is off with the libraries that are installed. Imports those libraries."""
    for library in LIBRARIES:
        if _is_installed(library) and importlib.util.find_spec(f"{__name__}.{library}") is not None:
            importlib.import_module(f"{__name__}.{library}")
    return [Missing(each.what, name, each.message(name)) for each in _FEATURES for name in each.names_gone()]


# --- Stand-ins. ---


class _StandIn(type):
    """A class in the place of a name that is gone. Nothing is an instance of it, and nobody raises it."""

    feature: Feature

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls.feature.error()

    def __iter__(cls) -> Any:
        raise cls.feature.error()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise cls.feature.error()


def stand_ins(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a file of names: it gives what a block has not bound."""

    def stand_in(name: str) -> Any:
        # Python and others ask a module for much that it has not.
        bound = {} if name.startswith("__") else _names_by_line(module)
        found = [each for each in _FEATURES if each.gone is not None and name in bound.get(each.line, ())]
        if not found:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # An exception, as it may stand behind `except`.
        return _StandIn(name, (Exception,), {"feature": found[0]})

    return stand_in


def _names_by_line(module: str) -> dict[int, set[str]]:
    """Return what the blocks of a file bind, by the line that a block begins on."""
    found: dict[int, set[str]] = {}
    for block in ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")).body:
        if isinstance(block, ast.With):
            inside = [node for statement in block.body for node in ast.walk(statement)]
            names = {
                alias.asname or alias.name
                for node in inside
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            names |= {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            names |= {node.name for node in inside if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            # Which line of its head a block begins on, Python's versions say differently.
            found |= dict.fromkeys(range(block.lineno, block.body[0].lineno), names)
    return found


# --- Names. ---


def _name_in(error: ImportError | AttributeError) -> str:
    """Return the name that an error is about, with where it was looked for."""
    if isinstance(error, AttributeError):
        owner = error.obj if isinstance(error.obj, type) or inspect.ismodule(error.obj) else type(error.obj)
        return f"{getattr(owner, '__name__', owner)}.{error.name}"
    found = _CANNOT_IMPORT.match(str(error))
    return f"{found[2]}.{found[1]}" if found else str(error.name)


def _names_of(code: CodeType) -> set[str]:
    """Return the private names that a function reads, as attributes or by `getattr`, and all that it imports."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    texts = [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]
    imported = {each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_FROM"}
    return imported.union(filter(_is_private, (*code.co_names, *texts)), *map(_names_of, inner))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    return "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
