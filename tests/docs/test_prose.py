"""Pages for users are short, and their sentences are understood at the first reading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
# Written by scripts, generated from the code, an appendix, or for developers.
NOT_FOR_USERS = {"accuracy.md", "benchmarks.md", "claims.md", "api.md", "development.md"}
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.glob("*.md")) if page.name not in NOT_FOR_USERS),
    *sorted((DOCS / "how_to").glob("*.md")),
]
MOST_WORDS = 18_000
LONGEST, MEDIAN = 40, 18

# Literal phrases, in small letters, each with what to write in its place.
BANNED = {
    "of which": "start a second sentence",
    "to be had": "available",
    "let go of": "freed",
    "lets go of": "frees",
    "told": "names, reports, or warns",
    "amounts to": "is",
    "beside": "next to, or compared with",
    "governs": "applies",
    "long rows": "long sequences",
    "longest row": "longest sequence",
    "row of text": "sequence",
    "card": "GPU",
    "cards": "GPUs",
    "to no avail": "without effect",
    "of one's own": "your own",
    "all the same": "anyway",
    "is held against": "is compared with",
    "without a word": "silently",
    "gives away": "wastes",
}

# What a script writes into a page stands between two such comments.
WRITTEN = re.compile(
    r"<!-- (?:gpu:[\w-]+|(?P<name>[\w-]+): written by .*?) -->.*?<!-- (?:/gpu|end of (?P=name)) -->", re.DOTALL
)
NOT_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->|<div.*?>|</div>|!\[[^\]]*\]\([^)]*\)", re.MULTILINE | re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?])[)*\"]*\s+(?=[A-Z\[(*\"@])")


def written_by_hand(page: Path) -> str:
    return WRITTEN.sub("\n", page.read_text(encoding="utf-8"))


def num_words_of(page: Path) -> int:
    """The words of a page, in its code and tables too; bars and dashes of tables are none."""
    text = re.sub(r"<!--.*?-->", "", written_by_hand(page), flags=re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def blocks_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield `item` or `cell`, and the words of each paragraph, list item and cell of a table."""
    text = NOT_PROSE.sub("\n", written_by_hand(page))
    text = re.sub(r"`[^`]+`", "@code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)|\n(?=#)", text):
        block = block.strip()
        if block.startswith("|"):
            yield from (("cell", cell.strip()) for cell in block.strip("|").split("|") if re.search(r"\w", cell))
        elif block and not block.startswith("#"):
            yield "item", re.sub(r"^(?:[-*]|\d+\.) ", "", " ".join(block.split()))


def sentences_of(page: Path) -> Iterator[tuple[str, str]]:
    for kind, block in blocks_of(page):
        yield from ((kind, sentence) for sentence in SENTENCE_END.split(block) if re.search(r"\w", sentence))


def num_words(sentence: str) -> int:
    return len(re.findall(r"@code|[\w][\w'.,%/+-]*", sentence))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_pages_for_users_are_short() -> None:
    counts = {name_of(page): num_words_of(page) for page in PAGES}
    assert sum(counts.values()) <= MOST_WORDS, counts


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.sweep(keep=100)
def test_no_sentence_is_long(page: Path) -> None:
    assert [sentence for _, sentence in sentences_of(page) if num_words(sentence) > LONGEST] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.sweep(keep=100)
def test_most_sentences_are_short(page: Path) -> None:
    assert median(num_words(sentence) for kind, sentence in sentences_of(page) if kind == "item") <= MEDIAN


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.sweep(keep=100)
def test_no_phrase_is_banned(page: Path) -> None:
    found = [
        f"{phrase!r} (write: {instead}) in: {sentence}"
        for _, sentence in sentences_of(page)
        for phrase, instead in BANNED.items()
        if re.search(rf"\b{phrase}\b", sentence.lower())
    ]
    assert found == []


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title of which\n\nOne `a b` two. A [third](x.md) sentence,\nthe longest row.\n\n"
        "| a | five of which |\n| --- | --- |\n\n```text\nof which\n```\n\n"
        "<!-- gpu:x -->\nof which\n<!-- /gpu -->\n\n- an item\n  goes on\n",
        encoding="utf-8",
    )
    assert list(sentences_of(page)) == [
        ("item", "One @code two."),
        ("item", "A third sentence, the longest row."),
        ("cell", "a"),
        ("cell", "five of which"),
        ("item", "an item goes on"),
    ]
    assert [num_words(sentence) for _, sentence in sentences_of(page)] == [3, 6, 1, 3, 4]
