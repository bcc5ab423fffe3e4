"""What pages show of commands is true: each is one that the command line takes; and what they quote was found."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from hf_ckpt.cli.main import _COMMANDS
from hf_ckpt.recipe import shipped
from tests.docs.test_docs import DOCUMENTS, ROOT, SHELL, blocks_of

ESTIMATE = ROOT / "benchmarks" / "results" / "estimate_llama7b_lora.json"


def commands() -> list[list[str]]:
    """The words of each `hf-ckpt` command that a document shows."""
    found = []
    for path in DOCUMENTS:
        for block in blocks_of(path, SHELL):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                found += [words[1:]] if words[:1] == ["hf-ckpt"] else []
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
@pytest.mark.sweep(keep=39)
def test_command_is_understood(words: list[str]) -> None:
    command, *rest = words
    options = _COMMANDS[command].parser().parse_intermixed_args(rest, argparse.Namespace(words=words))
    recipe = getattr(options, "recipe", None)
    if recipe is not None and "/" not in recipe and not recipe.startswith("my_"):
        assert shipped.named(Path(recipe)) is not None, recipe


def test_start_page_quotes_the_result() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(\w+) +([\d.]+) GiB +([\d.]+) s ", text, re.MULTILINE)
    found = {row["name"]: row for row in json.loads(ESTIMATE.read_text(encoding="utf-8"))["rows"]}
    assert [name for name, *_ in rows] == ["auto", "none", "full"]
    for name, peak, seconds in rows:
        assert float(peak) == round(found[name]["peak_bytes"] / 2**30, 1)
        assert float(seconds) == float(f"{found[name]['seconds']['total']:.3g}")
