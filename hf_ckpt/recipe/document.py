"""The text of a recipe: YAML files, `extends` and overrides, read into values that know where they were written.

Knows nothing of what the keys mean, but that a policy takes along what was said for another one. Whatever the text is,
it is read or refused within a second: size, depth, number of values and number of mistakes have limits, far above what
a recipe needs.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hf_ckpt.errors import RecipeError, did_you_mean, shortened
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.policy.text_file import read_text
from hf_ckpt.recipe import shipped
from hf_ckpt.recipe.checkpointing import OF_AUTO
from hf_ckpt.recipe.field_types import show

_MOST_VALUES = 5_000
_DEEPEST = 64
_LONGEST_KEY = 200
_MOST_MISTAKES = 50
_LONG = 2**16  # Characters up to which a text is read by the slower reader, which explains mistakes better.


@dataclass(frozen=True)
class Location:
    """Where something was written."""

    source: str  # The file, or the override on the command line.
    folder: Path  # What the relative path of another recipe starts from.
    line: int | None = None  # Counted from 1; nothing for a whole file and for an override.
    is_file: bool = True  # False for an override, and for values that were never in a file.
    is_override: bool = False

    def at(self, mark: yaml.Mark) -> Location:
        """Return the place that `mark` points at."""
        return replace(self, line=mark.line + 1) if self.is_file else self

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Entry:
    """A value and its place. Mappings hold entries, lists hold entries, anything else is the value itself."""

    value: Any
    place: Location

    def plain(self) -> Any:
        """Return the value without places, as plain Python."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.plain() for entry in self.value]
        return self.value

    def find(self, path: str) -> Entry | None:
        """Return what is written at a dotted path below; None where nothing is."""
        entry = self
        for key in path.split(".") if path else ():
            if not isinstance(entry.value, dict) or key not in entry.value:
                return None
            entry = entry.value[key]
        return entry


@dataclass
class Mistakes:
    """What is wrong."""

    lines: list[str] = field(default_factory=list)  # One for each mistake.
    unread: set[str] = field(default_factory=set)
    """Key paths of values that could not be read; they are given, though nothing is known of them."""
    is_whole: bool = True  # False once a file could not be read, so that what seems missing may be there.

    def add(self, place: Location, text: str) -> None:
        """Note a mistake."""
        self.extend([_printable(" ".join(f"{place}: {text}".split()))])

    def add_unread_file(self, place: Location, text: str) -> None:
        """Note a file that could not be read."""
        self.is_whole = False
        self.add(place, text)

    def extend(self, lines: Iterable[str]) -> None:
        """Note the mistakes of another recipe, each once."""
        self.lines.extend(line for line in lines if line not in self.lines)
        if len(self.lines) > _MOST_MISTAKES:
            shown = "\n".join(self.lines[:_MOST_MISTAKES])
            raise RecipeError(f"{shown}\nThere are more mistakes than these {_MOST_MISTAKES}. Is this a recipe?")


def _printable(text: str) -> str:
    """Return a text as a terminal may be given it: control characters are escaped as they are in values."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


class _TooMuch(yaml.MarkedYAMLError):
    """The text is more than a recipe can be."""


class _Reader(yaml.SafeLoader):
    """Composes YAML nodes; nothing is constructed from tags.

    YAML 1.1, which PyYAML follows, reads `1e-4` as text, `no` as false and `8:24` as 504. The words and numbers
    here are those of YAML 1.2.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # PyYAML's own name


class _Writer(yaml.SafeDumper):
    """Quotes whatever either version of YAML would not read as text."""


def _set_scalars() -> None:
    number = list("-+.0123456789")
    scalars = (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?[0-9]+", number),
        ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", number),
    )
    for name, pattern, first in scalars:
        for target in (_Reader, _Writer):
            target.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^({pattern})$"), first)


_set_scalars()


class _FastReader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the class is chosen here
    """Composes the same nodes of a long text, 50 times faster where libyaml is installed; its errors say less."""

    yaml_implicit_resolvers = _Reader.yaml_implicit_resolvers


_SCALARS: dict[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:str": str,
    "tag:yaml.org,2002:null": lambda _: None,
    "tag:yaml.org,2002:bool": lambda text: text.lower() == "true",
    "tag:yaml.org,2002:int": int,
    "tag:yaml.org,2002:float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
}
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def read_document(path: Path, overrides: Iterable[str], mistakes: Mistakes) -> Entry:
    """Read a recipe's file, the files it extends, and overrides.

    `mistakes`: where to note what is wrong. the merged top-level mapping; empty where a file cannot be read.
    """
    return _overridden(_read_extended(path, (), mistakes), overrides, mistakes)


def document_of(values: Mapping[str, Any], name: str, overrides: Iterable[str], mistakes: Mistakes) -> Entry:
    """Return `values` as `read_document` returns those of a file."""
    place = Location(name, Path(), is_file=False)
    document = _parse(write_yaml(dict(values)), place, mistakes) or Entry({}, place)
    return _overridden(document, overrides, mistakes)


def _overridden(document: Entry, overrides: Iterable[str], mistakes: Mistakes) -> Entry:
    for override in overrides:
        document = _override(document, override, mistakes)
    return document


def write_yaml(values: dict[str, Any]) -> str:
    """Return `values` as YAML that reads back as the same."""
    return yaml.dump(values, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120)


def resolve_path(place: Location, path: str) -> Path:
    """Return where the recipe `path`, written at `place`, lies: in the same folder, or among the shipped ones."""
    found = Path(os.path.normpath(place.folder / Path(path).expanduser()))
    named = shipped.named(Path(path))
    return found if named is None or found.is_file() else named


def there_is_no(path: Path) -> str:
    """Return that there is no file `path`, and which recipe in its folder, or shipped, has nearly its name."""
    neighbours = sorted(other.name for other in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    meant = did_you_mean(path.name, neighbours) or did_you_mean(path.stem, shipped.names())
    return f"there is no file {path}.{meant}"


def _read_extended(path: Path, extending: tuple[Path, ...], mistakes: Mistakes) -> Entry:
    document = _read_file(path, mistakes)
    base = document.value.pop("extends", None)
    if base is None:
        return document
    if not isinstance(base.value, str):
        mistakes.add_unread_file(base.place, f"extends = {show(base.plain())}: expected the path of one recipe.")
        return document
    try:
        target, chain = resolve_path(base.place, base.value), (*extending, path.resolve())
        is_circle = target.resolve() in chain
        is_file = target.is_file()
    except (OSError, ValueError) as error:
        mistakes.add_unread_file(
            base.place,
            f"extends = {show(shortened(base.value, _LONGEST_KEY))}: no file has this name: {_why(error)}.",
        )
        return document
    if is_circle:
        names = " -> ".join(link.name for link in (*chain, target))
        mistakes.add_unread_file(base.place, f"extends = {show(base.value)}: a circle, {names}. Break it.")
    elif not is_file:
        mistakes.add_unread_file(base.place, f"extends = {show(base.value)}: {there_is_no(target)}")
    else:
        return _laid_on(_read_extended(target, chain, mistakes), document)
    return document


def _read_file(path: Path, mistakes: Mistakes) -> Entry:
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
        is_pipe = not is_file
    except FileNotFoundError:
        is_file = is_pipe = False
    # A name that is too long, or holds a null character.
    except (OSError, ValueError) as error:
        place = Location(_printable(shortened(str(path), _LONGEST_KEY)), Path())
        mistakes.add_unread_file(place, f"no file can be read by this name: {_why(error)}.")
        return Entry({}, place)
    # Other recipes are looked for in the folder of a file, but not in that of a pipe, which is /dev.
    place = Location(str(path), path.parent if is_file else Path())
    if is_pipe and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        mistakes.add_unread_file(place, "several processes cannot read one pipe. Write the recipe to a file.")
        return Entry({}, place)
    try:
        entry = _parse(read_text(path), place, mistakes)
    except FileNotFoundError:
        mistakes.add_unread_file(place, there_is_no(path))
    except (OSError, UnicodeDecodeError) as error:
        mistakes.add_unread_file(place, f"a recipe is a YAML file in UTF-8, and this cannot be read: {error}.")
    else:
        if entry is not None and isinstance(entry.value, dict):
            return entry
        mistakes.is_whole = False
        if entry is not None:
            mistakes.add(place, "a recipe is a mapping with the sections model, data and training.")
    return Entry({}, place)


def _parse(text: str, place: Location, mistakes: Mistakes, path: str = "") -> Entry | None:
    """Return what `text`, the value at `path`, holds, or nothing where it cannot be read."""
    try:
        _check_size(text)
        # The reader refuses unprintable characters as soon as it is made.
        root = (_Reader if len(text) <= _LONG else _FastReader)(text).get_single_node()
        return Entry(None, place) if root is None else _Walk(place, mistakes).entry(root, path, ())
    except _TooMuch as error:
        mistakes.add_unread_file(place.at(error.problem_mark) if error.problem_mark else place, f"{error.problem}.")
    except yaml.YAMLError as error:
        _add_syntax_mistake(error, place, mistakes)
    return None


def _check_size(text: str) -> None:
    """Refuse a text that would take long to read, before nodes are made of it."""
    try:
        _count(yaml.parse(text, Loader=_FastReader))
    except _TooMuch:
        raise
    except yaml.YAMLError as error:
        # libyaml stops at 1,000, on its way to the first of them (PyYAML 6.0.4).
        if getattr(error, "problem", "") == "exceeded maximum nesting depth":
            raise _too_deep(getattr(error, "problem_mark", None)) from error
        # The other reader tells it in better words, where that does not take long.
        if len(text) <= _LONG:
            _count(yaml.parse(text, Loader=_Reader))
        raise


def _count(events: Iterable[yaml.Event]) -> None:
    num_values = depth = 0
    for event in events:
        num_values += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if num_values > _MOST_VALUES:
            raise _too_many(event.start_mark)
        if depth > _DEEPEST:
            raise _too_deep(event.start_mark)


def _too_deep(mark: Any) -> _TooMuch:
    return _TooMuch(problem=f"nested deeper than {_DEEPEST}, which no recipe is", problem_mark=mark)


def _too_many(mark: Any) -> _TooMuch:
    return _TooMuch(problem=f"more than {_MOST_VALUES:,} keys and values, which no recipe has", problem_mark=mark)


def _add_syntax_mistake(error: yaml.YAMLError, place: Location, mistakes: Mistakes) -> None:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    advice = ""
    if "mapping values are not allowed" in problem or "':'" in problem:
        advice = ' Put a value that holds ":" in quotes, and a space after the ":" of a key.'
    elif "'\\t'" in problem:
        advice = " Indent with spaces, not with tabs."
    mistakes.add_unread_file(place.at(mark) if mark else place, f"not valid YAML: {problem}.{advice}")


class _Walk:
    """Turns nodes into entries. What cannot be read is noted and left out."""

    def __init__(self, place: Location, mistakes: Mistakes) -> None:
        self._place = place
        self._mistakes = mistakes
        self._num_values = 0

    def entry(self, node: yaml.Node, path: str, above: tuple[yaml.Node, ...]) -> Entry | None:
        # An alias counts for all that it stands for.
        self._num_values += 1
        if self._num_values > _MOST_VALUES or len(above) > _DEEPEST:
            raise _too_many(node.start_mark)
        place = self._place.at(node.start_mark)
        if any(node is other for other in above):
            self._refuse(node, path, "refers to itself. Write the value out.")
        elif isinstance(node, yaml.MappingNode) and node.tag in _COLLECTIONS:
            return Entry(dict(self._pairs(node, path, (*above, node))), place)
        elif isinstance(node, yaml.SequenceNode) and node.tag in _COLLECTIONS:
            return Entry(list(self._items(node, path, (*above, node))), place)
        elif isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            return self._scalar(node, path)
        else:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(node, path, f"a recipe holds plain values only, and this has the tag {tag}.")
        return None

    def _items(self, node: yaml.SequenceNode, path: str, above: tuple[yaml.Node, ...]) -> Iterator[Entry]:
        for index, item in enumerate(node.value):
            entry = self.entry(item, f"{path}.{index}", above)
            if entry is not None:
                yield entry

    def _pairs(self, node: yaml.MappingNode, path: str, above: tuple[yaml.Node, ...]) -> Iterator[tuple[Any, Entry]]:
        first: dict[Any, Location] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            key_path, place = f"{path}.{key.value}" if path else str(key.value), key.place
            if key.value in first:
                self._mistakes.add(place, f"{key_path}: given twice, first at {first[key.value]}. Keep one.")
            first.setdefault(key.value, place)
            entry = self.entry(value_node, key_path, above)
            if entry is not None:
                yield key.value, Entry(entry.value, place)

    def _key(self, node: yaml.Node, path: str) -> Entry | None:
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS and len(node.value) <= _LONGEST_KEY:
            return self._scalar(node, path)
        self._refuse(node, path, "a key has to be a plain word.")
        return None

    def _scalar(self, node: yaml.ScalarNode, path: str) -> Entry | None:
        if node.value == "" and node.style is None:
            problem = "has no value. Write null if there is to be none."
        elif "\0" in node.value:
            problem = "holds a null character, which no name or path can."
        else:
            try:
                return Entry(_SCALARS[node.tag](node.value), self._place.at(node.start_mark))
            # A tag that does not fit, as in `!!int ten`.
            except ValueError as error:
                problem = f"{error}."
        self._refuse(node, path, problem)
        return None

    def _refuse(self, node: yaml.Node, path: str, text: str) -> None:
        self._mistakes.unread.add(path)
        self._mistakes.add(self._place.at(node.start_mark), f"{path or 'top level'}: {text}")


def _laid_on(base: Entry, over: Entry) -> Entry:
    """Return one recipe with another laid on it, whose policy takes along what belonged to policy `auto` only.

    What an override said stays, to be refused with that policy, whichever of the two comes first.
    """
    section, policy = base.find("checkpointing"), over.find("checkpointing.policy")
    if policy is not None and policy.value != AUTO and section is not None and isinstance(section.value, dict):
        kept = {key: entry for key, entry in section.value.items() if key not in OF_AUTO or entry.place.is_override}
        base = replace(base, value={**base.value, "checkpointing": replace(section, value=kept)})
    return _merge(base, over)


def _merge(base: Entry, over: Entry) -> Entry:
    """Return `base` with `over` laid on it: mappings key by key, anything else whole."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, entry in over.value.items():
        merged[key] = _merge(merged[key], entry) if key in merged else entry
    return Entry(merged, over.place if over.place.is_file else base.place)


def _override(document: Entry, override: str, mistakes: Mistakes) -> Entry:
    shown = show(shortened(override, _LONGEST_KEY))
    place = Location(f"override {shown}", Path(), is_file=False, is_override=True)
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        mistakes.add(place, "expected key.path=value, such as training.learning_rate=1e-4.")
        return document
    if len(keys) > _DEEPEST:
        mistakes.add(place, f"nested deeper than {_DEEPEST}, which no recipe is.")
        return document
    if (listed := _list_on_the_way(document, keys)) is not None:
        mistakes.add(place, f"{listed} is a list. Give the whole list, in YAML.")
        return document
    if not text.strip():
        mistakes.add(place, f"{path}: has no value. Write null if there is to be none.")
        return document
    value = _parse(text, place, mistakes, path)
    if value is None:
        return document
    for key in reversed(keys):
        value = Entry({key: value}, place)
    return _laid_on(document, value)


def _list_on_the_way(document: Entry, keys: list[str]) -> str | None:
    entry = document
    for depth, key in enumerate(keys):
        if isinstance(entry.value, list):
            return ".".join(keys[:depth])
        if not isinstance(entry.value, dict) or key not in entry.value:
            return None
        entry = entry.value[key]
    return None
