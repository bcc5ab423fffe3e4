"""Recipes that name a trainer, carried out: each trains under its plan as without it, and saves what it trained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_ckpt import DataError, RecipeError, load_recipe
from hf_ckpt.finetune import train
from hf_ckpt.finetune.run_report import RunSummary
from tests import small_recipes, twins

pytestmark = pytest.mark.slow
RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
OF_TRL = ("sft", "dpo", "kto", "reward", "grpo")
MORE = {"kto": ["training.per_device_train_batch_size=4"]}


def carry_out(recipe: Path, *overrides: str, **options: bool) -> RunSummary:
    return train.finetune(load_recipe(recipe, overrides), **options)


def losses(summary: RunSummary) -> list[float]:
    return [entry["loss"] for entry in summary.log_history if "loss" in entry]


def needs_trl(trainer: str) -> None:
    if trainer in OF_TRL:
        pytest.importorskip("trl", minversion="1.16")


@pytest.mark.parametrize("trainer", small_recipes.ROWS)
def test_trainer_trains_as_without_its_plan(trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs_trl(trainer)
    recipe = small_recipes.of_trainer(tmp_path, trainer)
    plain = carry_out(recipe, "checkpointing=null", *MORE.get(trainer, []))
    without = load_file(tmp_path / "run" / "adapter_model.safetensors")
    capsys.readouterr()
    planned = carry_out(recipe, *MORE.get(trainer, []))
    printed = capsys.readouterr().out

    assert planned.plan is not None
    assert [layer.mode for layer in planned.plan.stacks[0].layers] == ["full", "full", "ffn", "none"]
    assert len(losses(planned)) == 4
    assert losses(planned) == losses(plain)
    weights = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert {name for name in weights if ".score" in name} == (
        {"base_model.model.score.weight"} if trainer in ("reward", "classification") else set()
    )
    assert [name for name in without if not torch.equal(weights[name], without[name])] == []
    assert [name for name, weight in weights.items() if ".lora_B." in name and not weight.any()] == []
    assert any(line.startswith("Training data: ") for line in printed.splitlines())
    assert ("Sample, " in printed) == (trainer in ("sft", "dpo", "kto", "grpo"))


def test_arguments_are_those_of_trl_and_precision_is_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16")
    from hf_ckpt.loading.trainer import training_arguments

    path = small_recipes.of_trainer(tmp_path, "dpo")
    args: Any = training_arguments(load_recipe(path, ["training.beta=0.3", "training.loss_type=ipo"]))
    assert (type(args).__name__, args.beta, args.loss_type) == ("DPOConfig", 0.3, ["ipo"])
    assert (args.max_length, args.bf16, args.gradient_checkpointing) == (64, False, False)
    with pytest.raises(RecipeError, match=r"training: DPOConfig refuse it: .*loss_weights"):
        training_arguments(load_recipe(path, ["training.loss_weights=[1.0, 2.0]"]))


@pytest.mark.parametrize("trainer", ["dpo", "reward"])
def test_whole_model_is_trained_where_no_adapter_is(trainer: str, tmp_path: Path) -> None:
    needs_trl(trainer)
    summary = carry_out(small_recipes.of_trainer(tmp_path, trainer, lora=None))
    assert not summary.is_adapter
    assert losses(summary)[-1] < losses(summary)[0]


def test_reference_is_the_model_before_training(tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16")
    recipe = small_recipes.of_trainer(tmp_path, "dpo", lora=None)
    # trl switches off modules of dropout, and that of Llama's attention is none.
    common = ["model.config.attention_dropout=0.0", f"training.output_dir={tmp_path}/run"]
    now, before = (
        carry_out(recipe, f"training.precompute_ref_log_probs={value}", *common) for value in ("false", "true")
    )
    assert losses(now)[0] == pytest.approx(math.log(2), rel=1e-5)
    # Computed in batches, and for all rows beforehand: padding may differ, sums do not.
    assert losses(now) == pytest.approx(losses(before), rel=1e-5)


def test_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16")
    recipe = small_recipes.of_trainer(tmp_path, "dpo", training={"save_strategy": "steps", "save_steps": 2})
    whole = carry_out(recipe)
    (tmp_path / "run" / "checkpoint-4" / "trainer_state.json").unlink()
    assert losses(carry_out(recipe, is_resumed=True)) == losses(whole)


def test_reward_model_is_merged_and_scores(tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16")
    weights = twins.model(LLAMA)
    recipe = small_recipes.of_trainer(tmp_path, "reward", model=small_recipes.on_weights(weights))
    summary = carry_out(recipe, is_merged=True)
    tokenizer = AutoTokenizer.from_pretrained(summary.saved)
    base = AutoModelForSequenceClassification.from_pretrained(weights, num_labels=1, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, summary.saved).eval()
    merged = AutoModelForSequenceClassification.from_pretrained(summary.merged).eval()
    rows = tokenizer(["Water boils."], return_tensors="pt")
    with torch.no_grad():
        expected, got = adapted(**rows).logits, merged(**rows).logits
    assert got.shape == (1, 1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_built_in_data_serves_every_trainer(tmp_path: Path) -> None:
    from hf_ckpt.loading.columns import load_columns
    from hf_ckpt.recipe.trainer_kinds import TRAINERS

    for kind in TRAINERS.values():
        if not kind.is_text:
            raw = load_columns({"path": "pydoc_topics", "max_examples": 4}, kind)
            assert set(kind.columns) <= set(raw.train.column_names)
            if "chosen" in kind.columns:
                row = raw.train[0]
                assert row["chosen"] != row["rejected"]
                assert sorted(row["chosen"].split()) == sorted(row["rejected"].split())


@pytest.mark.sweep
def test_tiny_recipe_learns_to_prefer_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16")
    # A part of the data, and of the base's training.
    for name, keys in {
        "base": {"data": {"max_examples": 24, "max_length": 64}},
        "dpo_lora": {
            "model": {"name_or_path": str(tmp_path / "base"), "base_recipe": "base.yaml"},
            "data": {"max_examples": 96, "max_length": 64, "eval_split": "test[:32]"},
        },
    }.items():
        training = {"output_dir": str(tmp_path / name), "use_cpu": True, "warmup_steps": 2, "logging_steps": 10}
        training |= {"eval_on_start": name == "dpo_lora", "eval_strategy": "epoch" if name == "dpo_lora" else "no"}
        shipped = str(RECIPES / f"tiny_llama_{name}.yaml")
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"extends": shipped, **keys, "training": training}))
    summary = carry_out(tmp_path / "dpo_lora.yaml")
    found = [entry["eval_rewards/accuracies"] for entry in summary.log_history if "eval_loss" in entry]
    # Without training, the reference is the model itself: no row is liked better.
    assert len(found) == 2
    assert found[0] == 0.0
    assert found[1] > 0.7


# --- What is refused. ---


def test_missing_columns_are_named(tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "a", "chosen": "b", "rejectd": "c"}) + "\n")
    recipe = small_recipes.of_trainer(tmp_path, "dpo", data={"path": str(rows), "eval_fraction": None})
    with pytest.raises(DataError) as refused:
        carry_out(recipe, "model.tokenizer=null", f"model.tokenizer={twins.model(LLAMA)}")
    assert str(refused.value) == (
        "trainer dpo reads the columns chosen, rejected, and the data set has question, chosen, rejectd. Did you mean "
        '"rejectd"? Map what is missing in data.columns: {rejected: NAME}.'
    )
    assert not (tmp_path / "run").exists()
    mapped = ["data.columns={rejected: rejectd, prompt: question}", "training.max_steps=1"]
    carry_out(recipe, f"model.tokenizer={twins.model(LLAMA)}", *mapped)


def test_labels_beyond_their_number_are_refused(tmp_path: Path) -> None:
    recipe = small_recipes.of_trainer(tmp_path, "classification", model={"num_labels": 2})
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": "a b c", "label": label}) for label in (0, 1, 2)) + "\n")
    with pytest.raises(
        DataError, match="1 of 3 examples have no label that can be learned, such as 2: expected a whole"
    ):
        carry_out(recipe, f"data.path={rows}", "data.eval_fraction=null")


def test_number_is_learned_where_there_is_one_label(tmp_path: Path) -> None:
    recipe = small_recipes.of_trainer(tmp_path, "classification", model={"num_labels": 1})
    assert losses(carry_out(recipe, "training.max_steps=2"))[0] > 0


def test_what_trl_refuses_is_a_message(tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16")
    recipe = small_recipes.of_trainer(tmp_path, "dpo", lora={**small_recipes.LORA, "target_modules": ["lm_head"]})
    with pytest.raises(RecipeError, match=r"trainer dpo: trl refuses the recipe: .*lm_head"):
        carry_out(recipe)


def test_prompts_that_leave_no_room_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl", minversion="1.16")
    path = small_recipes.of_trainer(tmp_path, "grpo", data={"max_length": 64, "eval_fraction": None})
    rows = [{"prompt": prompt, "wanted": "a"} for prompt in ("Say a.", "Say the letter a. " * 20)]
    (tmp_path / "grpo.jsonl").write_text("\n".join(map(json.dumps, rows * 4)))
    carry_out(path, "training.max_steps=1")
    assert "4 prompts; left out: 4 that are longer than data.max_length allows" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"None of the 8 prompts has 2 tokens or fewer, which is what data\.max_length"):
        carry_out(path, "data.max_length=10")


def test_model_that_rewards_and_cannot_be_had_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16")
    with pytest.raises(RecipeError, match=r"^reward_funcs: of the models nobody/rewards one cannot be loaded: [^\n]*$"):
        carry_out(small_recipes.of_trainer(tmp_path, "grpo"), "reward_funcs=[nobody/rewards]")
