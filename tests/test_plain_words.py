"""What the package says is plain: no phrase that has to be read twice, and short status lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_ckpt.cli.main import _COMMANDS

PACKAGE = Path(__file__).parents[1] / "hf_ckpt"
FILES = sorted(PACKAGE.rglob("*.py"))
BANNED = re.compile(
    r"\bof which\b|\bto be had\b|\bcan(?:not)? be had\b|\blet(?:s|ting)? go of\b|\btold\b|\bwhat\b[^.]*\bamounts? to\b"
)
# Torch's own words, which are searched for.
QUOTED = ("of which X is free",)
MAX_WORDS = 20
# What `finetune` and `estimate` say while they work.
STATUS = [
    *sorted((PACKAGE / "finetune").glob("*.py")),
    PACKAGE / "cli" / "estimate.py",
    PACKAGE / "cli" / "finetune.py",
]
SAYING = {"say", "_say", "print", "info", "warning"}


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of the strings that stand by themselves: docstrings, and those below a name."""
    bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
    return {id(one.value) for body in bodies for one in body if isinstance(one, ast.Expr)}


def text_of(node: ast.AST) -> str | None:
    """A string as it is read, with X in the place of each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join("X" if isinstance(each, ast.FormattedValue) else text_of(each) or "" for each in node.values)
    return None


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    left_out = docstrings(tree)
    parts = {id(each) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for each in node.values}
    for node in ast.walk(tree):
        text = text_of(node)
        if text is not None and " " in text and id(node) not in left_out | parts:
            yield getattr(node, "lineno", 0), text


def num_words(sentence: str) -> int:
    """Words of a sentence; figures, names in code and what stands in for values are none."""
    return len(re.findall(r"(?<![\w./%])[A-Za-z][A-Za-z'-]+(?![\w/(=])", re.sub(r"`[^`]*`|%[sd]", " ", sentence)))


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?:])\s+|\n+", text)


def test_banned_phrases_are_in_no_message() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {hit[0]}: {text[:100]}"
        for path in FILES
        for line, text in strings(ast.parse(path.read_text(encoding="utf-8")))
        if (hit := BANNED.search(text)) and not any(quote in text for quote in QUOTED)
    ]
    assert found == []


@pytest.mark.parametrize("path", STATUS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_status_lines_are_short(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    names = [(getattr(call.func, "attr", getattr(call.func, "id", "")), call) for call in calls]
    said = [text for name, call in names if name in SAYING for each in call.args if (text := text_of(each))]
    long = [sentence for text in said for sentence in sentences(text) if num_words(sentence) > MAX_WORDS]
    assert long == []


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_is_plain_and_speaks_of_gpus_and_sequences(command: str) -> None:
    parser = _COMMANDS[command].parser()
    texts = [
        " ".join(text.split()) for text in (parser.description or "", *(each.help or "" for each in parser._actions))
    ]
    assert [text for text in texts if BANNED.search(text)] == []
    assert [text for text in texts if re.search(r"\b(?:rows?|cards?)\b", text)] == []
    # A clause ends at a semicolon: the help of an option is a list of them.
    clauses = [each for text in texts for each in re.split(r"[.;:]\s+", text)]
    assert [each for each in clauses if num_words(each) > 30] == []
