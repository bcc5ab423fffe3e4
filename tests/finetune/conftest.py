"""What tests of fine-tuning start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_ckpt import load_recipe
from hf_ckpt.finetune import train
from tests import small_recipes


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_NUM_SAMPLE_TOKENS", 4)


@pytest.fixture(scope="module")
def bases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a base for each of the module's `MIXTURES`, with its tokenizer."""
    folders = {}
    for name, config in request.module.MIXTURES.items():
        folder = tmp_path_factory.mktemp(name)
        recipe = small_recipes.write(folder, model={"config": config}, checkpointing=None)
        train.finetune(load_recipe(recipe, ["training.max_steps=1"]))
        folders[name] = folder / "run"
    return folders
