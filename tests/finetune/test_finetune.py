"""Recipes carried out from Python: base and adapter, kinds of data, what is written, what goes to the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.trainer
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ckpt import Plan, RecipeError, load_recipe
from hf_ckpt.cli.finetune import main
from hf_ckpt.finetune import train
from hf_ckpt.finetune.run_report import RunSummary
from tests import small_recipes, twins
from tests.byte_tokenizer import CHATML

pytestmark = [pytest.mark.slow, pytest.mark.core]

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_NUM_SAMPLE_TOKENS", 8)


def carry_out(recipe: Path, *overrides: str, **options: bool) -> RunSummary:
    return train.finetune(load_recipe(recipe, overrides), **options)


def assert_same_answers(base: Path, adapter: Path, merged: Path) -> None:
    """Hold that a merged model computes what the base with its adapter does, in float32."""
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
    whole = AutoModelForCausalLM.from_pretrained(merged).eval()
    assert {weight.dtype for weight in whole.parameters()} == {torch.float32}
    ids = torch.tensor([[0, 70, 71, 72, 73]])
    with torch.no_grad():
        expected, got = adapted(input_ids=ids).logits, whole(input_ids=ids).logits
    # W x + B (A x) against (W + B A) x: float32 rounds the sums in another order.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def write_yaml(path: Path, contents: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(contents))
    return path


# --- The two recipes that feed each other. ---


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two tiny recipes as shipped, on a part of their data: what the base has not seen is left to the adapter."""
    folder = tmp_path_factory.mktemp("tiny")
    short = {"num_train_epochs": 1, "logging_steps": 10, "warmup_steps": 5, "use_cpu": True}
    for name, keys in {
        "base": {"data": {"max_examples": 64, "max_length": 128}, "training": short},
        "lora": {
            "model": {"name_or_path": str(folder / "base"), "base_recipe": "base.yaml"},
            "data": {"max_examples": 180, "max_length": 128},
            # Less than shorter rows need without a plan.
            "checkpointing": {"memory_budget": "44MiB"},
            "training": short,
        },
    }.items():
        keys["training"] = {**keys["training"], "output_dir": str(folder / name)}
        write_yaml(folder / f"{name}.yaml", {"extends": str(RECIPES / f"tiny_llama_{name}.yaml"), **keys})
    return folder


# peft 0.18 goes by the names of layers, and takes a model that is not tied for one that is.
untied = pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True. and a tied layer:UserWarning")


@untied
@pytest.mark.sweep
def test_adapter_recipe_trains_its_base_first(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny / "lora.yaml"), "--merge"]) == 0
    printed = capsys.readouterr().out

    first = f"{tiny / 'base'} is not there yet: training it first with {tiny / 'base.yaml'} (1 epoch, random weights)."
    assert f"{first}\nHow long that takes is said once its first steps have run. Ctrl-C stops it.\n" in printed
    tables = [part for part in printed.split("\n") if part.startswith("Recipe ")]
    assert [line.split()[1] for line in tables] == [str(tiny / "base.yaml"), str(tiny / "lora.yaml")]
    for name, saved in (("base", "Model"), ("lora", "Adapter")):
        plan = Plan.from_json((tiny / name / "hf_ckpt_plan.json").read_text())
        assert len({layer.mode for layer in plan.stacks[0].layers}) > 1
        assert f"{saved:<15}  {tiny / name} (" in printed
    falls = re.findall(r"^Evaluation loss  .* \(fell by ([\d.]+)%\)$", printed, re.MULTILINE)
    assert [float(fall) > 3 for fall in falls] == [True, True]
    assert_same_answers(tiny / "base", tiny / "lora", tiny / "lora" / "merged")


@pytest.mark.sweep
@untied
def test_base_that_is_there_is_not_trained_again(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tiny / "base" / "model.safetensors"
    if not weights.exists():
        carry_out(tiny / "base.yaml", "training.max_steps=1", "checkpointing=null")
    written = weights.stat().st_mtime_ns
    short = ["training.max_steps=1", "training.eval_strategy=no", "checkpointing=null"]
    carry_out(tiny / "lora.yaml", *short, f"training.output_dir={tiny / 'again'}")
    assert weights.stat().st_mtime_ns == written
    assert "training it first" not in capsys.readouterr().out


# --- Data and precision. ---


def rows(folder: Path, *rows_: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows_) + "\n")
    return str(path)


def talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_text_is_learned_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rows(tmp_path, *({"text": f"{prompt}{completion}"} for prompt, completion in small_recipes.SENTENCES * 2))
    carry_out(small_recipes.write(tmp_path, data={"path": path}))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("  learned|", "  masked |"))]
    assert [line[:10] for line in shown] == ["  learned|"]


def test_conversations_are_learned_in_the_assistants_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rows(tmp_path, *(talk(prompt, completion) for prompt, completion in small_recipes.SENTENCES * 2))
    carry_out(small_recipes.write(tmp_path, data={"path": path, "chat_template": CHATML, "eval_fraction": 0.25}))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("  learned|", "  masked |"))]
    assert shown[0].startswith("  masked | <s>" if "<s>" in shown[0] else "  masked | <user>")
    assert any(line.startswith("  learned|") and "</assistant>" in line for line in shown)


def test_packed_run_has_no_padding(tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path, data={"packing": True})
    summary = carry_out(recipe, "training.max_steps=2")
    assert len([entry for entry in summary.log_history if "loss" in entry]) == 2


def test_model_that_mixes_packed_documents_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    opt = {"config": {"model_type": "opt", "word_embed_proj_dim": 16, **sizes}}
    recipe = small_recipes.write(tmp_path, model=opt, data={"packing": True})
    with pytest.raises(ValueError, match=r"data.packing: OPTForCausalLM cannot keep packed documents apart"):
        carry_out(recipe)
    assert not (tmp_path / "run").exists()


def test_same_recipe_gives_the_same_weights(tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        carry_out(recipe, f"training.output_dir={folder}")
    one, two = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_bfloat16_trains_on_the_cpu_where_the_recipe_says_so(tmp_path: Path) -> None:
    summary = carry_out(small_recipes.write(tmp_path), "training.bf16=true", "training.max_steps=2")
    assert len([entry for entry in summary.log_history if "loss" in entry]) == 2


# --- What is loaded, what is written. ---


def test_folder_holds_model_tokenizer_and_plan(tmp_path: Path) -> None:
    summary = carry_out(small_recipes.write(tmp_path))
    run = tmp_path / "run"
    assert summary.saved == run
    assert {path.name for path in run.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert Plan.from_json((run / "hf_ckpt_plan.json").read_text()) == summary.plan
    assert [path.name for path in run.rglob("*.bin")] == ["training_args.bin"]
    # What the user had is saved, not what a training step needs.
    assert json.loads((run / "config.json").read_text())["use_cache"] is True
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)


def test_merged_model_answers_as_the_adapter_does(tmp_path: Path) -> None:
    weights = twins.model(LLAMA)
    recipe = small_recipes.write(tmp_path, model=small_recipes.on_weights(weights), lora=small_recipes.LORA)
    summary = carry_out(recipe, is_merged=True)
    assert summary.merged == tmp_path / "run" / "merged"
    assert_same_answers(weights, summary.saved, summary.merged)


def test_run_without_a_policy_writes_no_plan(tmp_path: Path) -> None:
    summary = carry_out(small_recipes.write(tmp_path, checkpointing=None))
    assert summary.plan is None
    assert not (tmp_path / "run" / "hf_ckpt_plan.json").exists()


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(twins.model(LLAMA))
    pickled = tmp_path / "pickled"
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    AutoTokenizer.from_pretrained(twins.model(LLAMA)).save_pretrained(pickled)
    recipe = small_recipes.write(tmp_path, model=small_recipes.on_weights(pickled))
    with pytest.raises(RecipeError, match="safetensors"):
        carry_out(recipe)
    assert not (tmp_path / "run").exists()


_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path(__file__).with_name("ran").touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    """A folder with a model that brings code."""
    folder = tmp_path / "own"
    AutoModelForCausalLM.from_pretrained(twins.model(LLAMA)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(twins.model(LLAMA)).save_pretrained(folder)
    (folder / "own.py").write_text(_CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_code_of_a_model_does_not_run_unasked(own_code: Path, tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path, model=small_recipes.on_weights(own_code))
    with pytest.raises(RecipeError) as refused:
        carry_out(recipe)
    assert str(refused.value) == (
        f"model.name_or_path: {own_code} brings code of its own, which would run here. Read it, and set "
        "model.trust_remote_code=true if you trust it."
    )
    assert not (tmp_path / "run").exists()


def test_code_of_a_model_runs_where_the_recipe_trusts_it(own_code: Path, tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path, model=small_recipes.on_weights(own_code))
    summary = carry_out(recipe, "model.trust_remote_code=true", "training.max_steps=1")
    assert summary.plan is not None
    assert summary.plan.model_class == "OwnModel"


# --- The hub. ---


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What the Trainer would send to the hub: repository, and the files of the folder."""
    sent: list[tuple[str, list[str]]] = []

    def upload(*, repo_id: str, folder_path: str, **_: Any) -> None:
        sent.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))

    repository = SimpleNamespace(repo_id="someone/their-run")
    hub = SimpleNamespace(create_repo=lambda *_args, **_kwargs: repository, upload_folder=upload)
    if hasattr(transformers.trainer, "hf_api"):
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    else:  # before transformers 5.2x
        monkeypatch.setattr(transformers.trainer, "create_repo", hub.create_repo)
        monkeypatch.setattr(transformers.trainer, "upload_folder", hub.upload_folder)
    return sent


def test_push_to_hub_sends_the_adapter_with_its_plan(
    tmp_path: Path, uploads: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_recipes.on_weights(twins.model(LLAMA))
    recipe = small_recipes.write(tmp_path, model=model, lora=small_recipes.LORA)
    carry_out(recipe, "training.push_to_hub=true", "training.hub_model_id=someone/their-run")
    repositories, files = zip(*uploads, strict=True)
    assert set(repositories) == {"someone/their-run"}
    assert {"adapter_model.safetensors", "adapter_config.json", "hf_ckpt_plan.json", "README.md"} <= set(files[-1])


def test_nothing_is_sent_unasked(tmp_path: Path, uploads: list[Callable[..., None]]) -> None:
    carry_out(small_recipes.write(tmp_path))
    assert uploads == []
