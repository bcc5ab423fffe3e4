"""The data set that needs no network: passages of Python's own documentation, `pydoc_topics`."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

NAME = "pydoc_topics"
EVAL_SHARE = 0.1
PASSAGE_CHARS = 480
MIN_PASSAGE_CHARS = 120
PROMPT_SHARE = 0.3

_UNDERLINE = re.compile(r"[*=\-~^]{3,}")


@dataclass(frozen=True)
class Passage:
    """A few consecutive paragraphs under one heading."""

    topic: str
    heading: str
    text: str


def splits() -> dict[str, list[dict[str, str]]]:
    """Return the data set's two splits, `train` and `test`, as rows of `prompt` and `completion`.

    The test rows come from topics of their own (about a tenth of the text). The documentation repeats whole paragraphs
    in several topics; each paragraph is used once, so no paragraph is in both splits. Rows are in a fixed random order.
    """
    from pydoc_data.topics import topics

    passages = list(_passages(topics))
    test_topics = _held_out(passages)
    rows: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for passage in passages:
        rows["test" if passage.topic in test_topics else "train"].append(_pair(passage))
    for split in rows.values():
        random.Random(0).shuffle(split)
    return rows


def _passages(topics: Mapping[str, str]) -> Iterator[Passage]:
    seen: set[str] = set()
    # Short topics first: the long ones quote them, and it is the quotation that has to go.
    for topic in sorted(topics, key=lambda name: (len(topics[name]), name)):
        yield from _cut(topic, _new_blocks(topics[topic], seen))


def _new_blocks(text: str, seen: set[str]) -> Iterator[tuple[bool, str]]:
    """Yield (is it a heading, block) for the blocks of a topic that no earlier topic had."""
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.split("\n")
        if len(lines) == 2 and _UNDERLINE.fullmatch(lines[1]):
            yield True, lines[0].strip()
        elif (words := " ".join(block.split())) not in seen and not words.startswith("Related help topics"):
            seen.add(words)
            yield False, block


def _cut(topic: str, blocks: Iterator[tuple[bool, str]]) -> Iterator[Passage]:
    heading, parts = topic, list[str]()
    for is_heading, block in blocks:
        for part in [] if is_heading else _pieces(block):
            if parts and len("\n\n".join([*parts, part])) > PASSAGE_CHARS:
                yield from _passage(topic, heading, parts)
                parts = []
            parts.append(part)
        if is_heading:
            yield from _passage(topic, heading, parts)
            heading, parts = block, []
    yield from _passage(topic, heading, parts)


def _pieces(block: str) -> Iterator[str]:
    """Cut a paragraph longer than a passage between two lines."""
    lines: list[str] = []
    for line in block.split("\n"):
        if lines and len("\n".join([*lines, line])) > PASSAGE_CHARS:
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def _passage(topic: str, heading: str, parts: list[str]) -> Iterator[Passage]:
    text = "\n\n".join(parts)
    if len(text) >= MIN_PASSAGE_CHARS:
        yield Passage(topic=topic, heading=heading, text=text)


def _held_out(passages: list[Passage]) -> set[str]:
    """Choose the test topics by a hash of their names, so that another Python version chooses nearly the same."""
    sizes: Counter[str] = Counter()
    for passage in passages:
        sizes[passage.topic] += len(passage.text)
    room = EVAL_SHARE * sum(sizes.values())
    chosen: set[str] = set()
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        if sizes[name] <= room:
            chosen.add(name)
            room -= sizes[name]
    return chosen


def _pair(passage: Passage) -> dict[str, str]:
    """Split a passage after about a third, before a space: the space begins the completion, as it begins tokens."""
    spaces = [match.start() for match in re.finditer(r"(?<=\S)\s", passage.text)]
    cut = min(spaces, key=lambda at: abs(at - PROMPT_SHARE * len(passage.text)))
    return {"prompt": f"{passage.heading}\n\n{passage.text[:cut]}", "completion": passage.text[cut:]}
