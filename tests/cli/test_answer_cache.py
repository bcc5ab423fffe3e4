"""The key of an answer changes with all that the answer depends on, and an answer is given again under it alone."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_ckpt.cli import answer_cache
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.recipe.recipe import load_recipe
from tests import small_recipes

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "recipes" / "llama7b_lora.yaml"


@pytest.fixture(autouse=True)
def _few_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hash the package's own sources alone, where a test is not about them."""
    monkeypatch.setattr(answer_cache, "_SOURCES", ("hf_ckpt",))
    monkeypatch.setenv("HF_CKPT_CACHE", str(tmp_path / "cache"))


def options_with(**given: Any) -> argparse.Namespace:
    defaults = {"device": ["rtx4090"], "exact": None, "engine": None, "processes": None, "accelerate_config": None}
    return argparse.Namespace(
        **defaults | {"words": [], "json": False, "no_cache": False, "plot": None, "html": None} | given
    )


def key_of(path: Path, *overrides: str, command: str = "estimate", **given: Any) -> str | None:
    environment = given.pop("environment", {})
    return answer_cache.answer_key(command, load_recipe(path, overrides), options_with(**given), environment)


# --- What the key takes to make. ---


def test_key_is_made_without_heavy_imports() -> None:
    code = """
import argparse, os, sys
from hf_ckpt.cli import answer_cache
from hf_ckpt.recipe.recipe import load_recipe
options = argparse.Namespace(device=["rtx4090"], accelerate_config=None)
print(answer_cache.answer_key("estimate", load_recipe("recipes/llama7b_lora.yaml"), options, os.environ))
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy", "peft", "httpx"}))
"""
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    key, heavy = printed.split("\n")[:2]
    assert (len(key), heavy) == (64, "")


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_has_a_key(path: Path) -> None:
    assert key_of(path) is not None


# --- What changes the key. ---


def test_same_question_has_the_same_key(tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path)
    first = key_of(recipe)
    assert first is not None
    assert key_of(recipe, json=True, verbose=True, words=["estimate", "--json"], out=Path("plan.json")) == first


@pytest.mark.parametrize(
    "given",
    [
        {"command": "plan"},
        {"device": ["a100-80gb"]},
        {"device": ["rtx4090", "a100-80gb"]},
        {"exact": "true"},
        {"engine": "fsdp2", "processes": 8},
        {"quick": True},
    ],
)
def test_another_question_has_another_key(given: dict[str, Any], tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path)
    assert key_of(recipe, **given) not in (None, key_of(recipe))


def test_recipe_counts_as_resolved(tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path)
    first = key_of(recipe)
    assert key_of(recipe, "data.max_length=65") not in (None, first)
    assert key_of(recipe, "data.max_length=64") == first
    recipe.write_text("# a comment\n" + recipe.read_text())
    assert key_of(recipe) == first


@pytest.mark.parametrize(
    "changes",
    [
        {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"},
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"ACCELERATE_USE_FSDP": "true"},
        {"FSDP_VERSION": "2"},
        {"WORLD_SIZE": "2"},
        {"USE_HUB_KERNELS": "NO"},
        {"HF_TOKEN": "secret"},
    ],
)
def test_variable_that_counts_changes_the_key(changes: dict[str, str], tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path)
    assert key_of(recipe, environment=changes) not in (None, key_of(recipe))


def test_other_variables_do_not_count(tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path)
    assert len({key_of(recipe, environment={"PAGER": each}) for each in "ab"}) == 1


def test_another_version_is_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipes.write(tmp_path)
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(answer_cache, "_SOURCES", ("library",))
    keys = [key_of(recipe)]
    for version in ("1", "2"):
        (tmp_path / f"kernels-{version}.dist-info").mkdir()
        keys.append(key_of(recipe))
    assert len({None, *keys}) == 4


def test_modelling_file_edited_by_hand_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    copy = tmp_path / "transformers"
    shutil.copytree(Path(spec.origin).parent / "models" / "llama", copy / "models" / "llama")
    recipe = load_recipe(SHIPPED)
    monkeypatch.setattr(answer_cache, "_SOURCES", ("transformers",))
    edited = ModuleSpec("transformers", None, origin=str(copy / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: edited)
    first = answer_cache.answer_key("estimate", recipe, options_with(), {})
    path = copy / "models" / "llama" / "modeling_llama.py"
    found = path.stat()
    # As many bytes, and as old: content counts.
    path.write_text(path.read_text(encoding="utf-8").replace("hidden_states", "hidden_statez", 1), encoding="utf-8")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert path.stat().st_size == found.st_size
    assert answer_cache.answer_key("estimate", recipe, options_with(), {}) not in (None, first)


def test_our_sources_and_those_of_the_libraries_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert {"hf_ckpt", "transformers", "peft", "accelerate", "bitsandbytes"} <= set(answer_cache._SOURCES)


# --- Files that are named. ---


def plan_of(mode: Mode) -> str:
    return Plan("LlamaForCausalLM", (StackPlan("model.layers", (LayerPlan(mode),) * 4),)).to_json()


def test_plan_that_a_recipe_names_counts_by_content(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(plan_of(Mode.FULL))
    recipe = small_recipes.write(tmp_path, checkpointing={"policy": str(plan)})
    first = key_of(recipe)
    plan.write_text(plan_of(Mode.FFN))
    assert key_of(recipe) not in (None, first)


def test_recipe_and_written_plan_do_not_count_as_files_for_being_named_in_the_command(tmp_path: Path) -> None:
    recipe, out = small_recipes.write(tmp_path), tmp_path / "plan.json"
    words = ["plan", str(recipe), "--out", str(out)]
    first = key_of(recipe, words=words, out=out)
    recipe.write_text("# a comment\n" + recipe.read_text())
    out.write_text("{}")
    assert first is not None
    assert key_of(recipe, words=words, out=out) == first


def test_data_does_not_count(tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path)
    first = key_of(recipe)
    (tmp_path / "sentences.jsonl").write_text("{}\n")
    assert key_of(recipe) == first


def test_accelerates_file_counts_with_what_it_names(tmp_path: Path) -> None:
    recipe, launch, deepspeed = small_recipes.write(tmp_path), tmp_path / "launch.yaml", tmp_path / "zero.json"
    launch.write_text(yaml.safe_dump({"deepspeed_config": {"deepspeed_config_file": str(deepspeed)}}))
    deepspeed.write_text("{}")
    first = key_of(recipe, accelerate_config=launch)
    deepspeed.write_text("[]")
    second = key_of(recipe, accelerate_config=launch)
    launch.write_text(launch.read_text() + "num_processes: 2\n")
    assert len({None, first, second, key_of(recipe, accelerate_config=launch)}) == 4


def test_model_folder_counts_with_its_code(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small_recipes.CONFIG))
    (folder / "modeling_own.py").write_text("A = 1\n")
    where = {"name_or_path": str(folder), "config": None, "tokenizer": None}
    recipe = small_recipes.write(tmp_path, model=where | {"trust_remote_code": True})
    keys = [key_of(recipe)]
    (folder / "modeling_own.py").write_text("A = 2\n")
    keys.append(key_of(recipe))
    (folder / "config.json").write_text(json.dumps(small_recipes.CONFIG | {"num_hidden_layers": 3}))
    assert len({None, *keys, key_of(recipe)}) == 4


def test_recipe_of_the_base_counts(tmp_path: Path) -> None:
    base = small_recipes.write(tmp_path, "base.yaml")
    model = {"name_or_path": str(tmp_path / "run"), "base_recipe": "base.yaml", "config": None, "tokenizer": None}
    recipe = small_recipes.write(tmp_path, model=model)
    first = key_of(recipe)
    base.write_text(base.read_text().replace("num_hidden_layers: 4", "num_hidden_layers: 5"))
    assert key_of(recipe) not in (None, first)


# --- The hub. ---


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(answer_cache.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def fetch(hub: Path, name: str, commit: str, **files: str) -> None:
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(small_recipes.CONFIG))
    for file, text in files.items():
        (snapshot / file.replace("__", ".")).write_text(text)


def of_hub(tmp_path: Path, **model: Any) -> Path:
    return small_recipes.write(tmp_path, model={"name_or_path": "org/it", "config": None, "tokenizer": None} | model)


def test_config_that_has_to_be_fetched_has_no_key(tmp_path: Path, hub: Path) -> None:
    assert key_of(of_hub(tmp_path)) is None
    fetch(hub, "org/it", "a" * 40)
    assert key_of(of_hub(tmp_path)) is not None
    assert key_of(of_hub(tmp_path, revision="v2")) is None
    assert key_of(of_hub(tmp_path, revision="a" * 40)) is not None


def test_config_fetched_meanwhile_is_another_key_than_the_known_one(tmp_path: Path, hub: Path) -> None:
    known = key_of(SHIPPED)
    assert known is not None
    fetch(hub, "meta-llama/Llama-2-7b-hf", "a" * 40)
    fetched = key_of(SHIPPED)
    assert fetched not in (None, known)
    fetch(hub, "meta-llama/Llama-2-7b-hf", "b" * 40, generation_config__json="{}")
    assert key_of(SHIPPED) not in (None, known, fetched)


def test_code_of_another_repository_leaves_no_key(tmp_path: Path, hub: Path) -> None:
    named = json.dumps(small_recipes.CONFIG | {"auto_map": {"AutoConfig": "org/code--configuration.Own"}})
    fetch(hub, "org/it", "a" * 40, config__json=named)
    assert key_of(of_hub(tmp_path, trust_remote_code=True)) is None
    assert key_of(of_hub(tmp_path)) is not None


# --- This machine, and what has no key. ---


def test_processors_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipes.write(tmp_path)
    first = key_of(recipe)
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    assert key_of(recipe) not in (None, first)


def test_answer_about_this_machines_gpu_has_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipes.write(tmp_path)
    monkeypatch.setattr(answer_cache, "may_have_gpu", lambda: True)
    assert key_of(recipe, device=None) is None
    assert key_of(recipe) is not None
    monkeypatch.setattr(answer_cache, "may_have_gpu", lambda: False)
    assert key_of(recipe, device=None) is not None


def test_file_that_cannot_be_read_leaves_no_key(tmp_path: Path) -> None:
    launch = tmp_path / "launch.yaml"
    launch.write_text("a: [")
    assert key_of(small_recipes.write(tmp_path), accelerate_config=launch) is None


# --- Answers given again. ---


def ask(recipe: Path, made: Any, **given: Any) -> tuple[dict[str, Any], bool]:
    return answer_cache.remembered("estimate", load_recipe(recipe), options_with(**given), made)


def never() -> dict[str, Any]:
    raise AssertionError("it was to be remembered")


def test_second_answer_is_the_first_one(tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path)
    first, is_kept = ask(recipe, lambda: {"rows": (1, 2.5), "fits": {1: None}})
    assert (first, is_kept) == ({"rows": [1, 2.5], "fits": {"1": None}}, False)
    assert ask(recipe, never, json=True) == (first, True)


@pytest.mark.parametrize("given", [{"no_cache": True}, {"plot": Path("memory.png")}])
def test_nothing_is_remembered_where_it_is_not_wanted(given: dict[str, Any], tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path)
    assert ask(recipe, lambda: {"number": 1}, **given) == ({"number": 1}, False)
    assert ask(recipe, lambda: {"number": 2}) == ({"number": 2}, False)
    assert ask(recipe, lambda: {"number": 3}, **given) == ({"number": 3}, False)
    assert ask(recipe, never) == ({"number": 2}, True)


def test_what_is_edited_while_it_is_worked_out_is_not_kept(tmp_path: Path, hub: Path) -> None:
    def fetching() -> dict[str, Any]:
        fetch(hub, "meta-llama/Llama-2-7b-hf", "a" * 40)
        return {"number": 1}

    assert ask(SHIPPED, fetching) == ({"number": 1}, False)
    assert ask(SHIPPED, lambda: {"number": 2}) == ({"number": 2}, False)
    assert ask(SHIPPED, never) == ({"number": 2}, True)


def test_variables_that_libraries_set_do_not_hinder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipes.write(tmp_path)

    def setting() -> dict[str, Any]:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        return {"number": 1}

    assert ask(recipe, setting) == ({"number": 1}, False)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    assert ask(recipe, never) == ({"number": 1}, True)


def test_unwritable_cache_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_CKPT_CACHE", os.devnull)
    recipe = small_recipes.write(tmp_path)
    for number in range(2):
        assert ask(recipe, lambda number=number: {"number": number}) == ({"number": number}, False)
