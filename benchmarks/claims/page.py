"""docs/claims.md, written from claims.yaml and from the results that it refers to.

    python -m benchmarks.claims.page

A figure in claims.yaml is never typed. It is a reference: file, JSON pointer, and how the value is shown, which is a
format of Python, with a unit behind it if it has one.

    {claims_cpu.json /extra_forward/lora/flops_ratio .2f}        1.47
    {claims_cpu.json /full_saves/sdpa/2048/held_ratio .0f%}      13 %
    {claims_predicted.json /lora_7b/peak_bytes .1fGiB}           14.4 GiB
    {claims_cpu.json /reentrant_fsdp/hangs hangs/finishes}       finishes
    {claims_cpu.json /switches/auto/error code}                  a text, as code

Knows files and text only: what is measured, and how, is in measure.py and predicted.py.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.pages.words import folded
from benchmarks.runner import RESULTS, main

ROOT = Path(__file__).parents[2]
CLAIMS = Path(__file__).with_name("claims.yaml")
DOCUMENT = ROOT / "docs" / "claims.md"

VERDICTS = ("holds", "holds only when", "does not hold", "not yet measured on a GPU")
"""What a verdict begins with."""
_ORDER = ("does not hold", "holds only when", "holds", "not yet measured on a GPU")
"""The order in which they are listed."""

_GIVEN = "<!-- given: what the sources say -->"
_LINKED = "../benchmarks/results"
_KEYS = r"/[^{}]*(?:\{[^{}]*\}[^{}]*)*"  # a key may have braces of its own
_REFERENCE = re.compile(rf"\{{(?P<file>[\w.-]+\.json) (?P<pointer>{_KEYS}) (?P<shown>[^\s{{}}]+)\}}")
_BRACES = re.compile(r"\{[^{}]*\}?")
_UNITS = {"%": (0.01, " %"), "GiB": (2**30, " GiB"), "MiB": (2**20, " MiB"), "GB": (10**9, " GB")}
"""What a value is divided by, and what is written behind it."""


class ClaimsError(ValueError):
    """Raised when claims.yaml cannot be read, or refers to what there is not."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the literature, with our figures."""

    id: str
    claim: str
    """In our words, short."""
    sources: tuple[Mapping[str, str], ...] = ()
    """`title`, `url`, and what it `says`, in our words."""
    no_source: str = ""
    """That no page was found which states the claim; `sources` are then near it."""
    ours: str
    case: str
    """What `ours` is of; and what else a reader should know."""
    verdict: str

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The results that this claim refers to."""
        found = _REFERENCE.finditer(f"{self.ours} {self.case} {self.verdict}")
        return tuple(dict.fromkeys(reference["file"] for reference in found))


@dataclass(frozen=True)
class Group:
    """Claims about one subject."""

    title: str
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Claims:
    """All of claims.yaml."""

    introduction: str
    groups: tuple[Group, ...]
    reading: str = ""
    """How the page is read, and made: behind what was found."""

    def __iter__(self) -> Iterator[Claim]:
        return (claim for group in self.groups for claim in group.claims)


# --- Reading. ---


def read(path: Path = CLAIMS) -> Claims:
    """Return what claims.yaml says.

    Raises:
        ClaimsError: an entry is not whole.
    """
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    groups = tuple(Group(group["title"], tuple(map(_claim, group["claims"]))) for group in written["groups"])
    claims = Claims(written["introduction"], groups, written.get("reading", ""))
    ids = [claim.id for claim in claims]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ClaimsError(f'Two claims have the id "{twice[0]}". Give each its own.')
    return claims


def _claim(written: Mapping[str, Any]) -> Claim:
    name = written.get("id", "without an id")
    fields = Claim.__dataclass_fields__
    needed = [key for key in ("id", "claim", "ours", "case", "verdict") if not written.get(key)]
    if needed:
        raise ClaimsError(f'Claim "{name}" lacks "{needed[0]}". Each claim needs it.')
    if unknown := [key for key in written if key not in fields]:
        raise ClaimsError(f'Claim "{name}" has an unknown key "{unknown[0]}". Keys are {_listed(fields)}.')
    claim = Claim(**{**written, "sources": tuple(written.get("sources", ()))})
    if not re.match(rf"({'|'.join(VERDICTS)})\b", claim.verdict):
        raise ClaimsError(
            f'Claim "{name}" has the verdict "{claim.verdict}". A verdict begins with one of {_listed(VERDICTS)}.'
        )
    if not claim.sources and not claim.no_source:
        raise ClaimsError(f'Claim "{name}" has no source. Add "sources", or say in "no_source" that none was found.')
    for source in claim.sources:
        if set(source) != {"title", "url", "says"} or not source["url"].startswith("https://"):
            raise ClaimsError(
                f'Claim "{name}" has a source {dict(source)}. It needs "title", "url" (https) and "says".'
            )
    if not claim.files:
        raise ClaimsError(f'Claim "{name}" refers to no result. Write one as {{file.json /pointer format}}.')
    return claim


# --- Figures. ---


class Results:
    """A folder of results, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, Any] = {}

    def written(self, text: str, claim: str) -> str:
        """Return a text of a claim with its references replaced by figures.

        Raises:
            ClaimsError: a reference leads nowhere.
        """
        text = " ".join(text.split())
        for braces in _BRACES.findall(_REFERENCE.sub("", text)):
            raise ClaimsError(
                f'Claim "{claim}" has "{braces}", which is no reference. Write {{file.json /pointer format}}.'
            )
        return _REFERENCE.sub(lambda found: self._figure(claim, **found.groupdict()), text)

    def _figure(self, claim: str, file: str, pointer: str, shown: str) -> str:
        where = f'Claim "{claim}" refers to {pointer} of {file}'
        value = self._file(claim, file)
        so_far = ""
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                raise ClaimsError(f"{where}, but {so_far or 'it'} has {_entries(value, key)}")
            so_far += f"/{part}"
        try:
            return _shown(value, shown)
        except (TypeError, ValueError) as error:
            raise ClaimsError(f'{where}, which is {_short(value)}: it cannot be shown as "{shown}".') from error

    def _file(self, claim: str, name: str) -> Any:
        if name not in self._read:
            path = self.folder / name
            if not path.is_file():
                there = sorted(path.name for path in self.folder.glob("*.json"))
                raise ClaimsError(
                    f'Claim "{claim}" refers to {name}, which is not in {self.folder}. Files are {_listed(there)}.'
                    + _did_you_mean(name, there)
                )
            self._read[name] = json.loads(path.read_text(encoding="utf-8"))
        return self._read[name]


def _shown(value: Any, shown: str) -> str:
    if isinstance(value, bool):
        yes, no = shown.split("/")
        return yes if value else no
    if isinstance(value, str):
        return {"s": value, "code": f"`{value}`"}.get(shown) or format(value, shown)
    if not isinstance(value, int | float):
        raise TypeError(value)
    unit = next((unit for unit in _UNITS if shown.endswith(unit)), "")
    divisor, behind = _UNITS.get(unit, (1, ""))
    return format(value / divisor if unit else value, shown.removesuffix(unit)) + behind


def _entries(value: Any, key: str) -> str:
    if isinstance(value, dict):
        return f'no "{key}": it has {_listed(value)}.{_did_you_mean(key, value)}'
    if isinstance(value, list):
        return f'no "{key}": it is a list of {len(value)}.'
    return f'no "{key}": it is {_short(value)}.'


def _short(value: Any) -> str:
    return f"a mapping of {_listed(value)}" if isinstance(value, dict) else repr(value)[:80]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _did_you_mean(word: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(choices), n=1)
    return f' Did you mean "{near[0]}"?' if near else ""


# --- Writing. ---


def render(claims: Claims, folder: Path = RESULTS) -> str:
    """Return docs/claims.md.

    Args:
        claims: of `read`.
        folder: where the results are.

    Raises:
        ClaimsError: a claim refers to what there is not.
    """
    results = Results(folder)
    parts = [
        "<!-- Written by benchmarks/claims/page.py from benchmarks/claims/claims.yaml: change that, and run it. -->",
        claims.introduction.strip(),
        *_summary(claims, results),
    ]
    for group in claims.groups:
        parts += [f"## {group.title}", f'<!-- given "claim": what the sources say -->\n{_table(group, results)}']
        parts += [f"{_GIVEN}\n{folded(claim.claim, *_derived(claim, results))}" for claim in group.claims]
    return "\n\n".join(filter(None, [*parts, claims.reading.strip()])) + "\n"


def _summary(claims: Claims, results: Results) -> Iterator[str]:
    """Yield what was found: how many claims hold, and each with its verdict, those that do not hold first."""
    # Longest first: "holds only when" also begins with "holds".
    words = sorted(VERDICTS, key=len, reverse=True)
    found: dict[str, list[Claim]] = {word: [] for word in _ORDER}
    for claim in claims:
        found[next(word for word in words if claim.verdict.startswith(word))].append(claim)
    counts = ", ".join(f"{word}: {len(those)}" for word, those in found.items() if those)
    yield f"{len(list(claims))} claims; {counts}."
    rows = [(claim.claim, results.written(claim.verdict, claim.id)) for those in found.values() for claim in those]
    yield f'<!-- given "claim": what the sources say -->\n{_rows(("claim", "verdict"), rows)}'


def _table(group: Group, results: Results) -> str:
    rows = [
        (
            f"{claim.claim} {_cited(claim)}",
            results.written(claim.ours, claim.id),
            f"**{results.written(claim.verdict, claim.id)}**",
            " ".join(f"[{_short_name(file)}]({_LINKED}/{file})" for file in claim.files),
        )
        for claim in group.claims
    ]
    return _rows(("claim", "ours", "verdict", "result"), rows)


def _rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in line)} |" for line in lines)


def _short_name(file: str) -> str:
    return file.removesuffix(".json").removeprefix("claims_")


def _cited(claim: Claim) -> str:
    links = ", ".join(f"[{source['title']}]({source['url']})" for source in claim.sources)
    if not claim.no_source:
        return f"({links})"
    return f"(no source found; near it: {links})" if links else "(no source found)"


def _derived(claim: Claim, results: Results) -> Iterator[str]:
    yield f"{_GIVEN}\n{_said(claim)}"
    yield _case(claim, results)


def _said(claim: Claim) -> str:
    said = [f"{source['title']}: {source['says']}" for source in claim.sources]
    return " ".join(" ".join([*said, claim.no_source]).split())


def _case(claim: Claim, results: Results) -> str:
    links = ", ".join(f"[{file}]({_LINKED}/{file})" for file in claim.files)
    return f"{results.written(claim.case, claim.id)} ({links})"


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--claims", type=Path, default=CLAIMS, help="the claims; claims.yaml next to this file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results")
    parser.add_argument("--out", type=Path, default=DOCUMENT)


def run(options: Namespace) -> int:
    """Write docs/claims.md."""
    try:
        text = render(read(options.claims), options.results)
    except ClaimsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.out.write_text(text, encoding="utf-8")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(__name__))
