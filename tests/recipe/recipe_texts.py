"""Recipes as text, each with a section written out, and the mistakes found in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe import upstream_fields
from hf_ckpt.recipe.recipe import load_recipe

MINIMAL = {"model": "{name_or_path: some/model}", "data": "{path: some/data}", "training": "{output_dir: runs/x}"}
# A name that exists in one of the two and is new or gone in the other.
CHECKPOINTING = "activation_checkpointing"
if CHECKPOINTING not in upstream_fields.training_keys():
    CHECKPOINTING = "gradient_checkpointing"


def text_of(**sections: str) -> str:
    """A recipe, one section on each line: what is minimal, and what is given instead or besides."""
    return "".join(f"{name}: {value}\n" for name, value in {**MINIMAL, **sections}.items())


def model(keys: str) -> str:
    return text_of(model=f"{{name_or_path: some/model, {keys}}}")


def made(keys: str = "", tokenizer: str = "some/tokenizer", more: str = "") -> str:
    return text_of(model=f"{{config: {{model_type: llama, {keys}}}, tokenizer: {tokenizer}, {more}}}")


def data(keys: str) -> str:
    return text_of(data=f"{{path: some/data, {keys}}}")


def training(keys: str, more: str = "{path: some/data}") -> str:
    return text_of(training=f"{{output_dir: runs/x, {keys}}}", data=more)


def evaluated(keys: str) -> str:
    return training(keys, more="{path: some/data, eval_fraction: 0.1}")


def lora(keys: str) -> str:
    return text_of(lora=f"{{{keys}}}")


def adapter(keys: str) -> str:
    return text_of(adapter=f"{{{keys}}}")


def quantized(keys: str) -> str:
    return text_of(lora="{r: 8}", quantization=f"{{{keys}}}")


def checkpointed(keys: str) -> str:
    return text_of(checkpointing=f"{{{keys}}}")


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def mistakes_in(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).splitlines()


def of_trainer(name: str, keys: str = "output_dir: x", more: str = "path: x", **sections: str) -> str:
    return text_of(trainer=name, training=f"{{{keys}}}", data=f"{{{more}}}", **sections)
