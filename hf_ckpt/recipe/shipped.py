"""The recipes that come with the package: where they lie, by which names they are found, and what their headers say."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_SUFFIX = ".yaml"
HEADER_ITEM = re.compile(r"^# (?P<key>\w+): +(?P<text>.*(?:\n#  +.*)*)", re.MULTILINE)


def folder() -> Path:
    """Return where the shipped recipes lie: inside of an installed package, next to it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def named(name: Path, below: str = "") -> Path | None:
    """Return the shipped file that a bare name, such as `llama7b_lora`, stands for; None where there is none.

    `below`: the folder among the recipes, `accelerate` for the configurations that they are launched with.
    """
    if name.name != str(name) or name.suffix not in ("", _SUFFIX):
        return None
    return folder() / below / f"{name.stem}{_SUFFIX}" if name.stem in names(below) else None


def find(name: Path) -> Path:
    """Return the recipe that a user names: a file that is there, else a shipped one, else what was given."""
    shipped = named(name)
    if shipped is None:
        return name
    taken, other = (name, shipped) if name.is_file() else (shipped, name.with_suffix(_SUFFIX))
    if other.is_file() and other.resolve() != taken.resolve():
        logger.warning("%s is taken to be %s. There is %s too, which its whole path names.", name, taken, other)
    return taken


def shown(path: Path) -> str:
    """Return a recipe's path as the user would write it here."""
    here, whole = Path.cwd(), path.absolute()
    if whole.is_relative_to(here):
        return whole.relative_to(here).as_posix()
    return path.stem if whole.parent == folder() else path.as_posix()


def names(below: str = "") -> list[str]:
    """Return the names of the shipped recipes. `below`: see `named`."""
    return sorted(path.stem for path in (folder() / below).glob(f"*{_SUFFIX}"))


@dataclass(frozen=True)
class Summary:
    """What the header of a shipped recipe says."""

    name: str
    purpose: str
    hardware: str
    memory: str
    gpus: str  # Such as `8 x 40 GB`; empty where it needs none.
    peak: str  # Predicted, of each device: such as `21.6 GiB`.
    longest_row: str  # In tokens: such as `4,096`.


_GPUS = re.compile(r"(?:one|(?P<eight>eight)) GPUs? with (?P<size>\d+ GB)")
_PEAK = re.compile(r"predicted peak ([\d.]+ \wiB)")
_LONGEST_ROW = re.compile(r"sequences of up to ([\d,]+) tokens")


def header(text: str) -> Mapping[str, str]:
    """Return the items of a recipe's header by their key, such as `Hardware`, each on one line."""
    return {found["key"]: " ".join(found["text"].replace("\n#", " ").split()) for found in HEADER_ITEM.finditer(text)}


def summaries() -> Iterator[Summary]:
    """Yield what the headers of all shipped recipes say, by name."""
    for name in names():
        items = header((folder() / f"{name}{_SUFFIX}").read_text(encoding="utf-8"))
        hardware, memory = items["Hardware"], items["Memory"]
        gpus = _GPUS.match(hardware)
        yield Summary(
            name,
            items["Purpose"],
            hardware,
            memory,
            gpus="" if gpus is None else f"{8 if gpus['eight'] else 1} x {gpus['size']}",
            peak="".join(_PEAK.findall(memory)),
            longest_row="".join(_LONGEST_ROW.findall(memory)),
        )
