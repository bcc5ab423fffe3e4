"""Figures of the documents: each stands in a result that its block links, or is marked as given.

A *figure* is a number with a unit of measurement (percent, times, bytes, seconds, operations, tokens, and what is per
one of them); in tables also a bare decimal, a bare number with thousands separators, and any number in a column or row
whose label ends in a unit (`peak, GiB`). Code, headings, comments and targets of links hold no figures; a code span
that is nothing but a figure, with a space before its unit, does.

A *block* is a paragraph, a list item, a quote or a table. It links `benchmarks/results/*.json`; for a table the
paragraph right before or after it may do so, and a row that has links of its own is held against those only. One of the
linked files has to hold a number that rounds to what is shown, under a key that names the same kind of unit
(`peak_bytes`, `step_time_ms`, `flops_ratio`); a percentage with a sign may be a ratio less one. Other ratios and
differences are not worked out here: they have to be in the file.

`<!-- given: reason -->` above a block says that its figures are not ours; the block may not link a result then.
`<!-- given 24 GB, 80 GB: reason -->` says so of single figures, `<!-- given "source": reason -->` of a column.

    python -m tests.doc_figures docs/memory.md
"""

from __future__ import annotations

import functools
import html
import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path("benchmarks") / "results"

# --- Units. ---


@dataclass(frozen=True)
class Unit:
    """What a number counts (`ratio`, `bytes`, `seconds`, `operations`, `tokens`), and how many of it one is."""

    kind: str
    factor: float = 1.0


PREFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
UNITS: dict[str, Unit] = {
    **dict.fromkeys(("%", "percent", "per cent"), Unit("ratio", 0.01)),
    **dict.fromkeys(("times", "x", "fold"), Unit("ratio")),
    **dict.fromkeys(("bytes", "byte"), Unit("bytes")),
    **{f"{prefix}B": Unit("bytes", factor) for prefix, factor in (PREFIXES | BINARY).items()},
    **dict.fromkeys(("s", "sec", "seconds", "second"), Unit("seconds")),
    **{name: Unit("seconds", factor) for name, factor in (("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))},
    **dict.fromkeys(("min", "minutes", "minute"), Unit("seconds", 60)),
    **dict.fromkeys(("hours", "hour"), Unit("seconds", 3600)),
    **dict.fromkeys(("days", "day"), Unit("seconds", 86400)),
    **dict.fromkeys(("operations", "operation", "FLOPs", "FLOPS", "FLOP"), Unit("operations")),
    **{
        f"{p}{name}": Unit("operations", factor)
        for p, factor in PREFIXES.items()
        for name in ("FLOPs", "FLOPS", "FLOP")
    },
    **dict.fromkeys(("tokens", "token"), Unit("tokens")),
}
# 64k tokens are 64,000 or 65,536: both are written so.
SCALES = {
    "": (1.0,),
    "k": (1e3, 2.0**10),
    "K": (1e3, 2.0**10),
    "M": (1e6, 2.0**20),
    **{name: (factor,) for name, factor in (("thousand", 1e3), ("million", 1e6), ("billion", 1e9), ("trillion", 1e12))},
}
# At the end of a label these are words rather than units, unless a comma, a bracket or "in" stands before them.
AMBIGUOUS = ("times", "x", "s", "min", "fold", "day", "second", "operations", "operation")

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d|[.,]\d)"
_ELEMENT = rf"(?P<sign>(?<![\w)])[+-])?(?P<number>{_NUMBER})(?P<scale>[kKM](?!\w))?"
_NAMES = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
# "2 x 8 GPUs" and "3 times 4" are products.
_UNIT = rf"(?P<unit>(?:{_NAMES})(?<!x)(?<!times)|x(?!\s*\d)|times(?!\s*\d))(?:(?<=%)|(?!\w))"
_BEFORE = r"(?<![\w#.])(?<!\d\*\*)"
_BETWEEN = r"\*{0,2}\s*(?:,|/|-|to|and|or|against)\s*\*{0,2}"


def _unnamed(pattern: str) -> str:
    return re.sub(r"\?P<\w+>", "?:", pattern)


ELEMENT = re.compile(_BEFORE + _ELEMENT)
FIGURE = re.compile(
    rf"{_BEFORE}(?P<list>(?:{_unnamed(_ELEMENT)}{_BETWEEN})*{_unnamed(_ELEMENT)})"
    rf"(?:\s+(?P<word>thousand|million|billion|trillion)\b)?"
    rf"\*{{0,2}}(?:\s*|-){_UNIT}(?P<per>/s(?:ec|econd)?\b|\s+(?:per|a)\s+second\b)?"
    rf"|(?<![\w.])(?<!\d )x ?(?P<factor>{_NUMBER})"
)
LABEL = re.compile(rf"(?P<before>^|[,(]\s*|\bin\s+|\s){_UNIT}\)?$")


@dataclass(frozen=True)
class Figure:
    """A number as a document shows it; without a unit in tables only."""

    shown: str
    number: str
    unit: Unit | None = None
    scales: tuple[float, ...] = (1.0,)

    @property
    def value(self) -> float:
        return float(self.number.replace(",", ""))

    @property
    def is_signed(self) -> bool:
        return self.number[0] in "+-"

    @property
    def num_decimals(self) -> int:
        return len(self.number.partition(".")[2])

    @property
    def identity(self) -> tuple[object, ...]:
        """What two places that show the same figure have in common."""
        return self.value, self.num_decimals, self.unit, self.scales

    def kinds(self) -> Collection[str]:
        """The kinds of entries of a result that can hold it."""
        if self.unit is None:
            return ("ratio", "plain") if self.num_decimals else KINDS
        return (self.unit.kind, *ALSO.get(self.unit.kind, ()))

    def distance(self, value: float) -> float:
        """How far a number of a result is from what is shown, in units of the last digit; half of one rounds to it."""
        factors = [scale * (self.unit.factor if self.unit else 1.0) for scale in self.scales]
        shown = value if self.is_signed else abs(value)
        return float(min(abs(shown / factor - self.value) for factor in factors) * 10.0**self.num_decimals)


KINDS = ("ratio", "bytes", "seconds", "operations", "tokens", "rate", "count", "plain")
ALSO = {"ratio": ("plain",), "operations": ("count",), "tokens": ("count",)}


def figures_of(text: str) -> Iterator[Figure]:
    """The figures with a unit in plain text, in order; numbers of a list share the unit at its end."""
    for found in FIGURE.finditer(text):
        if found["factor"]:
            yield Figure(found[0], found["factor"], UNITS["x"])
            continue
        name = " ".join(filter(None, (found["word"], found["unit"] + (found["per"] or ""))))
        unit = Unit("rate", UNITS[found["unit"]].factor) if found["per"] else UNITS[found["unit"]]
        elements = list(ELEMENT.finditer(found["list"]))
        for element in elements:
            scale = element["scale"] or elements[-1]["scale"] or found["word"] or ""
            number = (element["sign"] or "") + element["number"]
            yield Figure(f"{number}{element['scale'] or ''} {name}", number, unit, SCALES[scale])


def figures_of_cell(text: str, unit: Unit | None = None) -> Iterator[Figure]:
    """The figures of a cell of a table: those with a unit and, if the cell begins with a number, bare ones.

    Args:
        text: of the cell.
        unit: of its column or row.
    """
    yield from figures_of(text)
    if re.match(r"[\s(~<>=]*[+-]?\d", FIGURE.sub(" ", text)):
        yield from bare_figures_of(text, unit)


def bare_figures_of(text: str, unit: Unit | None = None) -> Iterator[Figure]:
    """The numbers without a unit of their own; a decimal under "tokens" or "FLOPs" is a ratio to another row."""
    for found in ELEMENT.finditer(FIGURE.sub(" _ ", text)):
        number = (found["sign"] or "") + found["number"]
        is_ratio = unit is not None and unit.kind != "seconds" and unit.factor == 1 and "." in number
        if not found.string[found.end() :][:1].isalnum() and (unit or re.search("[.,]", number)):
            yield Figure(number, number, None if is_ratio else unit)


def unit_of_label(text: str) -> Unit | None:
    """The unit that a label of a column or row ends in: `peak, GiB`, `step (ms)`, `tokens`."""
    found = LABEL.search(FIGURE.sub("", text).strip(" *"))
    if found is None or (found["unit"] in AMBIGUOUS and not found["before"].strip()):
        return None
    return UNITS[found["unit"]]


# --- Results. ---

# How a result was come by, and curves: among hundreds of points any figure is found.
NOT_RESULTS = {"environment", "versions", "hardware", "plan", "timeline"}
RATIOS = {"ratio", "ratios", "share", "shares", "fraction", "over", "relative", "percent"}
# In keys, `min` is the least, and `second` the one after the first.
KEY_UNITS: dict[str, Unit] = {
    **{name.lower(): unit for name, unit in UNITS.items() if unit.kind != "ratio" and name not in ("min", "second")},
    "category": Unit("bytes"),
}


@dataclass(frozen=True)
class Entry:
    """A number of a result, of a kind of unit; where no key names one, a `count` if it is whole, and else `plain`."""

    path: str
    value: float
    kind: str
    raw: float

    def holds(self, figure: Figure) -> bool:
        return self.kind in figure.kinds() and self.distance(figure) <= 0.5 + 1e-6

    def distance(self, figure: Figure) -> float:
        if figure.unit is None:
            return figure.distance(self.raw)
        if figure.is_signed and self.kind == "ratio":
            return min(figure.distance(self.value), figure.distance(self.value - 1))
        return figure.distance(self.value)


@functools.cache
def entries_of(path: Path) -> tuple[Entry, ...]:
    """All numbers of a result."""
    return tuple(_entries(json.loads(path.read_text(encoding="utf-8")), ()))


def _entries(node: object, path: tuple[str, ...]) -> Iterator[Entry]:
    children: Iterable[tuple[object, object]] = ()
    if isinstance(node, dict):
        children = node.items()
    elif isinstance(node, list):
        children = enumerate(node)
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield _entry(node, path)
    elif path[-1:] == ("device",) and (size := re.search(r"(\d+)gb$", str(node))):
        yield Entry("device", float(size[1]) * 1e9, "bytes", float(size[1]))
    for key, child in children:
        if key not in NOT_RESULTS:
            yield from _entries(child, (*path, str(key)))


def _entry(number: float, path: tuple[str, ...]) -> Entry:
    """The number of a path; the nearest key that names a unit says of which kind it is."""
    where, words = "/".join(path), [re.split(r"[^a-z0-9']+", part.lower()) for part in path]
    flat = set(itertools.chain(*words))
    if flat & RATIOS and "num" not in flat:
        return Entry(where, number * (0.01 if "percent" in flat else 1.0), "ratio", number)
    for part in reversed(words):
        if named := [KEY_UNITS[word] for word in part if word in KEY_UNITS]:
            unit = named[0] if "per" in part else named[-1]
            kind = "rate" if re.search(r"_per_s(ec|econd)?(?![a-z])", where) else unit.kind
            return Entry(where, number * unit.factor, kind, number)
    return Entry(where, number, "count" if isinstance(number, int) else "plain", number)


# --- Blocks. ---


@dataclass(frozen=True)
class Mark:
    """A comment that says what is given, and why; `text` is what stands between "given" and "-->"."""

    line: int
    text: str

    @property
    def reason(self) -> str:
        return self.text.partition(":")[2].strip()

    @property
    def columns(self) -> list[str]:
        return [plain(name) for name in re.findall(r'"([^"]+)"', self._what)]

    @property
    def figures(self) -> list[Figure]:
        named = re.sub(r'"[^"]+"', " ", self._what)
        return [*figures_of(named), *bare_figures_of(named)]

    @property
    def is_of_the_whole(self) -> bool:
        return not self._what.strip()

    @property
    def _what(self) -> str:
        return self.text.partition(":")[0]


@dataclass(frozen=True)
class Block:
    """Lines that belong together; `kind` is paragraph, item, quote, table, or break for what parts blocks."""

    kind: str
    line: int
    lines: tuple[str, ...]
    marks: tuple[Mark, ...] = ()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


BREAK, COMMENT, FENCE = "break", "comment", "fence"
_STARTS = {
    FENCE: re.compile(r"\s*(`{3,}|~{3,})"),
    COMMENT: re.compile(r"\s*<!--(?!.*-->\s*\S)"),
    BREAK: re.compile(r"#{1,6}\s|\s*([-=*_])\s*(\1\s*){2,}$"),
    "table": re.compile(r"\s*\|"),
    "item": re.compile(r"\s*(?:[-*+]|\d+[.)])\s+"),
    "quote": re.compile(r"\s*>\s?"),
}


COMMENT_OR_CODE = re.compile(r"<!--.*?-->|(?P<ticks>`+)(?P<code>.+?)(?P=ticks)", re.DOTALL)


def kind_of(line: str) -> str:
    return next((kind for kind, start in _STARTS.items() if start.match(line)), "paragraph" if line.strip() else "")


def blocks_of(text: str) -> list[Block]:
    """The blocks of a document with the marks above them; what parts them stays as a break."""
    blocks: list[Block] = []
    marks: list[Mark] = []
    lines = text.splitlines()
    start = 0
    while start < len(lines):
        kind = kind_of(lines[start])
        end = _end(lines, start, kind)
        if kind == COMMENT:
            found = re.match(r"<!--\s*given\b(.*?)-->", " ".join(lines[start:end]).strip())
            marks += [Mark(start + 1, found[1])] if found else []
        elif kind:
            kind = BREAK if kind == FENCE else kind
            blocks.append(Block(kind, start + 1, tuple(lines[start:end]), tuple(marks)))
            marks = []
        start = end
    return blocks if not marks else [*blocks, Block(BREAK, len(lines), (), tuple(marks))]


def _end(lines: Sequence[str], start: int, kind: str) -> int:
    """The line after the last one of what begins at `start`."""
    end = start + 1
    if kind == FENCE:
        fence = re.match(r"\s*(`{3,}|~{3,})", lines[start])
        assert fence is not None
        closing = re.compile(rf"\s*{fence[1]}[`~]*\s*$")
        return next((i + 1 for i in range(end, len(lines)) if closing.match(lines[i])), len(lines))
    if kind == COMMENT:
        last = next((i for i in range(start, len(lines)) if "-->" in lines[i]), len(lines))
        # What follows a comment of several lines in its last one is text.
        return last if lines[last : last + 1] and lines[last].partition("-->")[2].strip() else last + 1
    going_on = {"table": {"table"}, "paragraph": {"paragraph"}, "item": {"paragraph"}, "quote": {"paragraph", "quote"}}
    while end < len(lines) and kind_of(lines[end]) in going_on.get(kind, set()):
        end += 1
    return end


def plain(text: str) -> str:
    """The words of a block: no comments, code, tags, or targets of links."""
    text = COMMENT_OR_CODE.sub(_without_code, text)
    for _ in range(2):  # an image may be the text of a link
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[a-zA-Z/][^>]*>|https?://\S+", " ", text)
    return re.sub(r"\s+", " ", html.unescape(text)).strip()


def _without_code(found: re.Match[str]) -> str:
    code = (found["code"] or "").strip()
    return code if " " in code and FIGURE.fullmatch(code) else " _ " if code else " "


def results_of(text: str, document: Path, root: Path) -> list[Path]:
    """The results that a text links."""
    text = COMMENT_OR_CODE.sub(" ", text)
    targets = [(document.parent / target).resolve() for target in re.findall(r"\]\(([^)\s#]+)", text)]
    return [path for path in targets if path.suffix == ".json" and path.is_relative_to((root / RESULTS).resolve())]


# --- The rule. ---


@dataclass
class Report:
    """What a document shows: how many figures, how many of them given, and what is wrong with the others."""

    num_figures: int = 0
    num_given: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Shown:
    """A figure at its place: with the results that should hold it, and the column of a table."""

    figure: Figure
    line: int
    results: tuple[Path, ...]
    column: str = ""


def check(document: Path, root: Path = ROOT) -> Report:
    """Hold the figures of a document against the results that its blocks link."""
    report = Report()
    blocks = blocks_of(document.read_text(encoding="utf-8"))
    name = document.resolve().relative_to(root.resolve()).as_posix()
    for index, block in enumerate(blocks):
        shown = [] if block.kind == BREAK else _shown(blocks, index, document, root)
        given = [at for at in shown if any(_is_given(at, mark) for mark in block.marks)]
        report.num_figures += len(shown)
        report.num_given += len(given)
        links = {path for at in shown for path in at.results}
        problems = [(mark.line, text) for mark in block.marks for text in _mark_problems(mark, block, shown, links)]
        problems += [(at.line, text) for at in shown if at not in given for text in _figure_problems(at, block.kind)]
        report.failures += [f"{name}:{line}: {text}" for line, text in problems]
    return report


def _shown(blocks: Sequence[Block], index: int, document: Path, root: Path) -> list[Shown]:
    block = blocks[index]
    if block.kind != "table":
        results = tuple(results_of(block.text, document, root))
        text = _STARTS["quote"].sub("", block.text) if block.kind == "quote" else block.text
        text = _STARTS["item"].sub("", text, count=1) if block.kind == "item" else text
        return [Shown(figure, block.line, results) for figure in figures_of(plain(text))]
    around = (blocks[i] for i in (index - 1, index + 1) if 0 <= i < len(blocks) and blocks[i].kind == "paragraph")
    shared = results_of("\n".join([*(other.text for other in around), block.lines[0]]), document, root)
    return list(_shown_in_table(block, tuple(shared), document, root))


def _shown_in_table(block: Block, shared: tuple[Path, ...], document: Path, root: Path) -> Iterator[Shown]:
    header = cells_of(block.lines[0])
    units = [unit_of_label(label) for label in header]
    for number, line in enumerate(block.lines):
        cells = cells_of(line)
        own = tuple(results_of(line, document, root)) if number else ()
        unit_of_row = unit_of_label(cells[0]) if number else None
        for index, cell in enumerate(cells):
            unit = (units[index] if index < len(units) else None) or unit_of_row
            column = header[index] if index < len(header) else ""
            figures = figures_of_cell(cell, unit) if number else figures_of(cell)
            yield from (Shown(figure, block.line + number, own or shared, column) for figure in figures)


def cells_of(line: str) -> list[str]:
    """The plain cells of a row. A pipe in code does not end a cell if it is escaped."""
    return [
        plain(cell).strip("* ") for cell in re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))
    ]


def _is_given(at: Shown, mark: Mark) -> bool:
    if mark.is_of_the_whole:
        return True
    return at.column in mark.columns or at.figure.identity in {figure.identity for figure in mark.figures}


def _mark_problems(mark: Mark, block: Block, shown: Sequence[Shown], links: Collection[Path]) -> Iterator[str]:
    if not mark.reason:
        yield "the mark has no reason. Write <!-- given: reason -->."
    if block.kind == BREAK:
        yield "the mark stands above no paragraph, list item, quote or table. Put it right above one."
    elif mark.is_of_the_whole and links:
        yield (
            f"the mark gives away a whole {block.kind} that links {_names(links)}. Name what is given: "
            '<!-- given 24 GB: reason -->, or columns of a table: <!-- given "source": reason -->.'
        )
    elif not mark.is_of_the_whole:
        yield from _mark_names_nothing(mark, block, shown)


def _mark_names_nothing(mark: Mark, block: Block, shown: Sequence[Shown]) -> Iterator[str]:
    columns = cells_of(block.lines[0]) if block.kind == "table" else []
    there = {at.figure.identity for at in shown}
    unknown = [f'column "{name}"' for name in mark.columns if name not in columns]
    unknown += [figure.shown for figure in mark.figures if figure.identity not in there]
    if unknown:
        yield f"the mark names {', '.join(unknown)}, and the {block.kind} has none. Name what is shown there."
    elif not mark.columns and not mark.figures:
        yield "the mark names neither a figure nor a column in quotes before its colon."


def _figure_problems(at: Shown, kind: str) -> Iterator[str]:
    shown, names = at.figure.shown, _names(at.results)
    given = f"If it is not ours, write <!-- given {shown}: reason --> above the {kind}."
    missing = [path for path in at.results if not path.is_file()]
    if missing:
        yield f"{shown} is said to be in {_names(missing)}, which is not there."
    elif not at.results:
        where = "neither this table nor a paragraph next to it" if kind == "table" else f"no part of this {kind}"
        yield f"{shown} has no result behind it: {where} links a file of {RESULTS.as_posix()}/. Link one. {given}"
    elif not any(entry.holds(at.figure) for path in at.results for entry in entries_of(path)):
        yield f"{shown} is not in {names}{_nearest(at)}. Show what is there, or link what holds it. {given}"


def _nearest(at: Shown) -> str:
    kinds = at.figure.kinds()
    entries = [entry for path in at.results for entry in entries_of(path) if entry.kind in kinds]
    if not entries:
        return f", where no key names a number of {' or '.join(kinds)}"
    nearest = min(entries, key=lambda entry: entry.distance(at.figure))
    return f"; nearest is {_in_unit_of(at.figure, nearest)} ({nearest.path})"


def _in_unit_of(figure: Figure, entry: Entry) -> str:
    if figure.unit is None:
        return f"{entry.raw:,.10g}"
    name = figure.shown.partition(" ")[2]
    return f"{entry.value / figure.unit.factor / figure.scales[0]:,.6g} {name}".strip()


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(sorted({path.name for path in paths}))


def main(names: Sequence[str]) -> int:
    """Print what is wrong in documents; without names, in all that the tests look at."""
    reports = {path: check(path.resolve()) for path in (map(Path, names) if names else documents())}
    for path, report in reports.items():
        counts = f"{os.path.relpath(path)}: {report.num_figures} figures, {report.num_given} of them given"
        print(*report.failures, counts, sep="\n")
    return int(any(report.failures for report in reports.values()))


def documents(root: Path = ROOT) -> list[Path]:
    """The documents whose figures are held against results."""
    return [root / "README.md", root / "benchmarks" / "README.md", *sorted((root / "docs").rglob("*.md"))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
