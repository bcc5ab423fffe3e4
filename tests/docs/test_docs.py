"""What README.md, docs/ and the docstrings show is true: code runs, commands and files exist, recipes are valid.

Python blocks of a document run in order, in one namespace, in a folder that has a copy of recipes/. A `diff` block is
run as the script that it leads to. The names `model`, `args` and `data` are there: a tiny Llama, TrainingArguments for
two steps and something to train on. `<!-- not run: reason -->` on the line above a block has it compiled only.
"""

from __future__ import annotations

import doctest
import importlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.small_recipes import can_be_loaded

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("README.md"), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?:<!-- (?P<not_run>not run: .+?) -->\n)?```(?P<language>[\w-]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SHELL = {"sh", "bash", "shell", "console", "powershell"}
# Made by commands, so not in the repository.
MADE_BY_COMMANDS = (".venv", "runs", "my_recipe.yaml")


@dataclass(frozen=True)
class Block:
    """One fenced block of a document; `line` is that of its first line of text."""

    path: Path
    line: int
    language: str
    text: str
    is_run: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT).as_posix()}:{self.line}"

    def code(self) -> str:
        """The Python of this block, put at its line, so that tracebacks point into the document."""
        text = after_diff(self.text) if self.language == "diff" else self.text
        return "\n" * (self.line - 1) + text


def after_diff(text: str) -> str:
    return "".join(line[1:] for line in text.splitlines(keepends=True) if not line.startswith("-"))


def blocks_of(path: Path, languages: set[str]) -> Iterator[Block]:
    text = path.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if found["language"] in languages:
            line = text.count("\n", 0, found.start("text")) + 1
            yield Block(path, line, found["language"], found["text"], found["not_run"] is None)


def blocks_of_all(languages: set[str]) -> list[Any]:
    return [pytest.param(block, id=str(block)) for path in DOCUMENTS for block in blocks_of(path, languages)]


def prepared_names(folder: Path) -> dict[str, object]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=32, num_attention_heads=2
    )
    tokens = list(range(16))
    return {
        "model": LlamaForCausalLM(config),
        "args": TrainingArguments(
            output_dir=str(folder / "runs"), max_steps=2, report_to=[], save_strategy="no", use_cpu=True
        ),
        "data": [{"input_ids": tokens, "labels": tokens}] * 16,
        "batch": {"input_ids": torch.tensor([tokens]), "labels": torch.tensor([tokens])},
    }


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run examples in: the recipes are there, and what examples write is not left behind."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run(path: Path, working_folder: Path) -> None:
    blocks = list(blocks_of(path, {"python", "diff"}))
    if not blocks:
        pytest.skip("no Python in this document")
    namespace = prepared_names(working_folder)
    for block in blocks:
        compiled = compile(block.code(), str(path), "exec")
        if block.is_run:
            exec(compiled, namespace)


def test_readme_shows_code_in_its_first_35_lines() -> None:
    assert min(block.line for block in blocks_of(ROOT / "README.md", {"python", "diff"})) <= 35


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command: without the prompt, comments, quoted text and assignments before it."""
    for line in re.sub(r'[\\`]\n|"[^"\n]*"', " ", block.text).splitlines():
        for command in re.split(r"&&|;|\|", line.split(" #")[0]):
            words = command.strip().removeprefix("$ ").split()
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words and not words[0].startswith("#"):
                yield words


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", text.replace("\\\n", ""), re.MULTILINE)
    assert phony is not None
    return set(phony[1].split())


@pytest.mark.parametrize("block", blocks_of_all(SHELL))
def test_make_targets_exist(block: Block) -> None:
    named = [word for words in commands_of(block) if words[0] == "make" for word in words[1:]]
    targets = {word for word in named if not word.startswith("-") and "=" not in word}
    assert targets <= make_targets()


@pytest.mark.parametrize("block", blocks_of_all(SHELL))
def test_files_in_commands_exist(block: Block) -> None:
    words = [word.replace("\\", "/").removeprefix("./") for words in commands_of(block) for word in words]
    files = [word for word in words if re.fullmatch(r"[\w./-]+\.(md|py|toml|txt|yaml)", word)]
    assert [name for name in files if not name.startswith(MADE_BY_COMMANDS) and not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("block", blocks_of_all({"yaml"}))
def test_yaml_blocks_are_valid(block: Block, tmp_path: Path) -> None:
    import yaml

    import hf_ckpt

    content = yaml.safe_load(block.text)
    if set(content) == {"checkpointing"}:
        hf_ckpt.HFCkptCallback(**content["checkpointing"])
        return
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(block.text, encoding="utf-8")
    if not can_be_loaded(recipe):
        pytest.skip("trl is not installed")
    hf_ckpt.load_recipe(recipe)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


NAMED = re.compile(r"`(\w+(?:/\w+)*\.py): (\w+)`")


@pytest.mark.parametrize(("file", "name"), NAMED.findall((ROOT / "docs" / "development.md").read_text("utf-8")))
@pytest.mark.sweep(keep=100)
def test_what_the_walks_name_is_there(file: str, name: str) -> None:
    source = (ROOT / "hf_ckpt" / file).read_text(encoding="utf-8")
    assert re.search(rf"^(?: {{4}})?(?:def|class) {name}\b", source, re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_ascii(path: Path) -> None:
    assert path.read_text(encoding="utf-8").isascii()


def package_modules() -> list[str]:
    paths = sorted((ROOT / "hf_ckpt").rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize("name", package_modules())
def test_docstring_examples_run(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
