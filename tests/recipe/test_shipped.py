"""The recipes that come with the package are found by name, from anywhere and however it was installed."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hf_ckpt import RecipeError, load_recipe
from hf_ckpt.recipe import shipped

ROOT = Path(__file__).parents[2]
LORA = "llama7b_lora"
OWN = "model: {name_or_path: some/model}\ndata: {path: rows.jsonl}\ntraining: {output_dir: runs/own}\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", [LORA, f"{LORA}.yaml"])
def test_bare_name_is_that_of_the_shipped_recipe(name: str) -> None:
    assert load_recipe(name).path == ROOT / "recipes" / f"{LORA}.yaml"
    assert shipped.shown(load_recipe(name).path) == LORA


def test_file_that_is_there_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = tmp_path / f"{LORA}.yaml"
    own.write_text(OWN)
    with caplog.at_level(logging.WARNING):
        assert load_recipe(own).model["name_or_path"] == "some/model"
        assert caplog.messages == []
        assert load_recipe(own.name).path.resolve() == own
    assert caplog.messages == [
        f"{own.name} is taken to be {own.name}. There is {ROOT / 'recipes' / own.name} too, which its whole path names."
    ]


def test_name_without_a_suffix_is_the_shipped_one_beside_a_file_of_ones_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{LORA}.yaml").write_text(OWN)
    with caplog.at_level(logging.WARNING):
        assert load_recipe(LORA).path == ROOT / "recipes" / f"{LORA}.yaml"
    assert caplog.messages == [
        f"{LORA} is taken to be {ROOT / 'recipes' / LORA}.yaml. There is {LORA}.yaml too, which its whole path names."
    ]


def test_recipe_extends_a_shipped_one_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(f"extends: {LORA}\ntraining: {{learning_rate: 1.0e-5}}\n")
    recipe = load_recipe("own.yaml")
    assert recipe.model == load_recipe(LORA).model
    assert recipe.training["learning_rate"] == 1e-5


@pytest.mark.parametrize("asked", ["lama7b_lora", "recipes/llama7b_lora.yaml", "gone/llama7b_lora"])
def test_name_that_is_nearly_one_is_refused_with_it(asked: str) -> None:
    with pytest.raises(RecipeError, match=f'there is no file {asked}. Did you mean "{LORA}"'):
        load_recipe(asked)


def test_name_of_a_shipped_configuration_of_accelerate() -> None:
    found = shipped.named(Path("fsdp2_8gpu"), "accelerate")
    assert found == ROOT / "recipes" / "accelerate" / "fsdp2_8gpu.yaml"
    assert shipped.named(Path("fsdp2_8gpu")) is None


def test_headers_are_read() -> None:
    found = {each.name: each for each in shipped.summaries()}
    assert set(found) == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert found[LORA].hardware == "one GPU with 24 GB that computes in bfloat16 (Ampere or later)."
    assert found[LORA].memory.startswith("predicted peak ")
    assert "\n" not in found[LORA].memory
    assert found["llama7b_full_zero3"].gpus == "8 x 40 GB"
    assert {name for name, each in found.items() if not each.gpus} == {name for name in found if "tiny" in name}
    assert all(each.peak in each.memory and each.longest_row in each.memory for each in found.values())
    assert all(each.peak and each.longest_row for each in found.values())


@pytest.mark.parametrize("made_from", ["checkout", "sdist"])
def test_wheel_holds_every_recipe_and_finds_it(tmp_path: Path, made_from: str) -> None:
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    root = tmp_path / "checkout"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "runs", "tests", "benchmarks", "docs"))
    if made_from == "sdist":
        (archive,) = SdistBuilder(str(root)).build(directory=str(tmp_path / "sdist"), versions=["standard"])
        with tarfile.open(archive) as opened:
            # Python 3.11 has filters from 3.11.4 on.
            opened.extractall(tmp_path / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        (root,) = (tmp_path / "unpacked").iterdir()
    (wheel,) = WheelBuilder(str(root)).build(directory=str(tmp_path / "wheel"), versions=["standard"])
    assert Path(wheel).stat().st_size < 2e6
    installed = tmp_path / "installed"
    shutil.unpack_archive(wheel, installed, format="zip")
    code = "import hf_ckpt; from hf_ckpt.recipe import shipped; print(hf_ckpt.__file__, *shipped.names())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    where, *names = run.stdout.split()
    assert Path(where).is_relative_to(installed)
    assert names == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert sorted(path.stem for path in (installed / "hf_ckpt" / "recipes" / "accelerate").iterdir()) == sorted(
        path.stem for path in (ROOT / "recipes" / "accelerate").iterdir()
    )
