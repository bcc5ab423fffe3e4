"""The reference pages: they are what the code says, and every option and command is on them."""

from __future__ import annotations

import argparse
import re

import pytest

from hf_ckpt.cli.main import _COMMANDS
from hf_ckpt.policy.options import CallbackOptions, LoopOptions, Offload, types_of
from hf_ckpt.policy.policy import Rule
from hf_ckpt.recipe.schema import _CHECKPOINTING
from scripts import reference_pages


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_page_is_what_the_code_says(name: str) -> None:
    committed = (reference_pages.FOLDER / name).read_text(encoding="utf-8")
    assert committed == reference_pages.PAGES[name](), "run: make bench-pages"


def test_every_option_has_a_row_with_its_meaning() -> None:
    page = (reference_pages.FOLDER / "options.md").read_text(encoding="utf-8")
    known = {*types_of(CallbackOptions), *types_of(LoopOptions), *_CHECKPOINTING}
    known |= {*Rule.__dataclass_fields__, *Offload.__dataclass_fields__}
    rows = {row[1]: row[2] for row in re.finditer(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page, re.MULTILINE)}
    assert known <= rows.keys()
    assert [name for name, meaning in rows.items() if len(meaning) < 10 or "see `Rule`" in meaning] == []


def test_what_excludes_each_other_is_tried() -> None:
    page = (reference_pages.FOLDER / "options.md").read_text(encoding="utf-8")
    assert '| `every_n_layers=2` | `segment_size="sqrt"` | Rule {' in page
    assert '| `nested=True` | no | with `segment_size="sqrt"` | no |' in page
    assert '| `memory_budget="22GiB"` | no | no | no | no | no | no | yes |' in page


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_argument_of_a_command_has_a_row(command: str) -> None:
    page = (reference_pages.FOLDER / "cli.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    for action in _COMMANDS[command].parser()._actions:
        if action.dest != "help" and action.help != argparse.SUPPRESS:
            assert [word for word in action.option_strings if f"`{word}`" not in section] == []
