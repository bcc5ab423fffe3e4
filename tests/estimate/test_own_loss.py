"""Recipes that name a trainer of trl: what is predicted before a run is what the run predicts, and what it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_ckpt import BudgetError, RecipeError, load_recipe
from hf_ckpt.estimate.launch_config import Launch
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject, evaluation_step_of, subject_of
from hf_ckpt.finetune import train
from hf_ckpt.loading.training_args import training_arguments
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.simulation.devices import CPU, find_device
from hf_ckpt.simulation.fit import Capacity
from tests import small_recipes

pytest.importorskip("trl", minversion="1.16")

from tests import trl_trainers as runs
from tests import twins
from tests.auto.test_trl_trainers import assert_alike, auto, planning_of

# trl 1.16 uses the names that transformers 5.23 gives up.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"),
]
LENGTH = 64


def subject(folder: Path, trainer: str, *overrides: str, **sections: Any) -> Subject:
    return subject_of(load_recipe(small_recipes.of_trainer(folder, trainer, **sections), overrides))


def as_run(kind: str, case: str, folder: Path, **changes: Any) -> Subject:
    """Return the recipe of a run of `trl_trainers`, whose rows are all as long as can be."""
    model: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 256}
    model |= {"num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": len(runs.TOKENIZER)}
    model |= {"attention_dropout": 0.1} if kind == "Reward" else vars_of_llama()
    has_adapter = case.startswith("adapters")
    training = {"per_device_train_batch_size": 2, **runs.KINDS[kind][1], **runs.CASES[case]()[1], **changes}
    training.pop("dataset_text_field", None)
    return subject(
        folder,
        kind.lower(),
        model={"config": model, "dtype": "float32", "tokenizer": {"train": {"vocab_size": 259}}},
        lora={**runs.ADAPTER} if has_adapter else None,
        data={"max_length": LENGTH, "eval_fraction": None},
        checkpointing={"policy": "none", "prove": "off"},
        training=training,
    )


def vars_of_llama() -> dict[str, Any]:
    config = runs.model().config
    return {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "attention_dropout")}


def long_rows(kind: str) -> Dataset:
    """Return the columns of a run with rows of so many tokens: one begins a text, and one ends it."""
    half = LENGTH // 2
    columns: dict[str, list[Any]] = {
        "SFT": {"text": runs.column(0, lambda _: LENGTH - 2)},
        "KTO": {
            "prompt": runs.column(0, lambda _: half),
            "completion": runs.column(100, lambda _: half - 2),
            "label": [number % 2 == 0 for number in range(16)],
        },
    }.get(
        kind,
        {
            "prompt": runs.column(0, lambda _: half),
            "chosen": runs.column(100, lambda _: half - 2),
            "rejected": runs.column(200, lambda number: half - 2 - number % 2),
        },
    )
    return Dataset.from_dict(columns)


@pytest.mark.parametrize(
    ("kind", "case", "changes"),
    [
        ("SFT", "whole", {}),
        ("DPO", "separate", {}),
        ("DPO", "adapters off", {"bf16": True, "gradient_accumulation_steps": 2}),
        ("DPO", "computed before", {}),
        ("DPO", "adapters off", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        ("KTO", "separate", {}),
        ("KTO", "adapters off", {}),
        ("Reward", "whole", {"center_rewards_coefficient": 0.01}),
    ],
)
@pytest.mark.sweep(keep=1)
def test_step_of_a_recipe_is_that_of_the_run(tmp_path: Path, kind: str, case: str, changes: dict[str, Any]) -> None:
    callback = auto()
    run = runs.trainer(kind, case, tmp_path, callback, data=long_rows(kind), **changes)
    followed = follow_trainer(run)
    found = as_run(kind, case, tmp_path, **changes)
    planned = planning_of(callback).batch
    assert planned is not None
    predicted = found.simulator(CPU).memory(None)
    assert (found.step.rows, found.step.seq_length) == (planned.rows, planned.length)
    assert_alike(predicted, followed)
    live = planning_of(callback).simulator(planned)
    # A run proves its first step, which takes memory too.
    live = live.with_step(replace(live.step, is_proven=False))
    assert predicted.peak_bytes == pytest.approx(live.memory(None).peak_bytes, rel=1e-3)


@pytest.mark.parametrize(
    ("trainer", "overrides"),
    [
        ("sft", []),
        ("sft", ["data.packing=true", "training.bf16=true"]),
        ("dpo", []),
        ("reward", []),
        ("classification", ["training.gradient_accumulation_steps=2"]),
    ],
)
@pytest.mark.sweep(keep=1)
def test_recipe_takes_what_is_predicted_of_it(trainer: str, overrides: list[str], tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if trainer == "dpo":
        pytest.importorskip("bitsandbytes")
        more = {
            "model": small_recipes.on_weights(twins.model("meta-llama/Llama-3.1-8B-Instruct")),
            "quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        }
    # Every row is cut there.
    path = small_recipes.of_trainer(
        tmp_path, trainer, data={"max_length": 24, "eval_fraction": None}, checkpointing={"prove": "off"}, **more
    )
    if trainer == "reward":
        # That are as long as can be, as longer ones are left out.
        words = "abcdefghijklmnopqrstuv"
        (tmp_path / "reward.jsonl").write_text(json.dumps({"chosen": words, "rejected": words[::-1]}) * 16)
    small = ["model.tokenizer.train.vocab_size=259"] if "model" not in more else []
    recipe = load_recipe(path, [*small, *overrides])
    tokenizer, data = train._tokenizer_and_data(recipe)
    run, _, _ = train._trainer(recipe, training_arguments(recipe), tokenizer, data)
    found = subject_of(recipe)
    followed = follow_trainer(run)
    assert found.simulator(CPU).memory(found.plan).peak_bytes == pytest.approx(followed.peak_bytes, rel=0.01)


# Rows of 16 letters and of 15, for completions of 8: each generation has both.
GENERATING: dict[str, Any] = {
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "max_completion_length": 8,
    "generation_kwargs": {"min_new_tokens": 8},
    "shuffle_dataset": False,
}
MANY = {"steps_per_generation": 64, "num_generations": 32, "max_steps": 1, "optim": "sgd", "max_completion_length": 50}
MANY |= {"generation_kwargs": {"min_new_tokens": 50}}


@pytest.mark.parametrize(
    ("training", "lora"),
    [
        ({}, small_recipes.LORA),
        ({"bf16": True, "beta": 0.1, "gradient_accumulation_steps": 2}, small_recipes.LORA),
        # Many are generated for one micro-batch.
        (MANY, None),
    ],
)
@pytest.mark.sweep
def test_generation_and_the_step_after_it_take_what_is_predicted(
    training: dict[str, Any], lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    path = small_recipes.of_trainer(
        tmp_path,
        "grpo",
        lora=lora,
        model={
            "config": {**small_recipes.CONFIG, "hidden_size": 128, "num_hidden_layers": 4},
            "tokenizer": {"train": {"vocab_size": 259}},
        },
        data={"max_length": 16 + training.get("max_completion_length", 8), "eval_fraction": None},
        checkpointing={"policy": "full", "prove": "off"},
        training={**GENERATING, **training},
    )
    rows = [{"prompt": letters, "wanted": "a"} for letters in ("abcdefghijklmno", "abcdefghijklmn")]
    (tmp_path / "grpo.jsonl").write_text("\n".join(map(json.dumps, rows * 32)))
    recipe = load_recipe(path)
    tokenizer, data = train._tokenizer_and_data(recipe)
    run, _, _ = train._trainer(recipe, training_arguments(recipe), tokenizer, data)
    found = subject_of(recipe)
    followed = follow_trainer(run, at_step=training.get("max_steps", 2))
    predictor = Predictor(found, CPU)
    predicted = predictor.memory(found.plan).peak_bytes
    assert predicted == pytest.approx(followed.peak_bytes, rel=0.01)
    training_alone = found.simulator(CPU).memory(found.plan).peak_bytes
    assert (training_alone < 0.9 * predicted) == ("max_steps" in training)
    if "max_steps" in training:
        with pytest.raises(BudgetError, match=r"the generation of 256 completions of 50 tokens at a time needs"):
            predictor.planned(Capacity(training_alone))


def test_what_comes_before_a_generating_step_is_told(tmp_path: Path) -> None:
    facts = dict(subject(tmp_path, "grpo", "training.eval_strategy=steps").facts)
    assert facts["loss"] == "GRPOTrainer.compute_loss"
    assert facts["before"] == "generation of 2 completions of 8 tokens at a time, scoring"
    assert "what functions take that reward completions" in facts["not counted"]
    asked = subject(tmp_path, "grpo", "training.beta=0.1").facts
    assert dict(asked)["loss"].endswith("its reference is the model without its adapter")


def test_model_that_rewards_completions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"reward_funcs: trl/rewards is a model. It is on the device with the one"):
        subject(tmp_path, "grpo", "reward_funcs=[trl/rewards]")


def test_reference_is_told(tmp_path: Path) -> None:
    told = [
        dict(subject(tmp_path, "dpo", *overrides, lora=lora).facts)["loss"]
        for overrides, lora in (
            ((), small_recipes.LORA),
            ((), None),
            (("training.precompute_ref_log_probs=true",), None),
        )
    ]
    assert told == [
        "DPOTrainer.compute_loss; its reference is the model without its adapter",
        "DPOTrainer.compute_loss; its reference is a second model, 212.2 KiB",
        "DPOTrainer.compute_loss; what the reference says is computed before training",
    ]


def test_adapters_over_4_bit_weights_are_in_bfloat16_as_trl_has_them(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    recipe = small_recipes.of_trainer(
        tmp_path,
        "dpo",
        model=small_recipes.on_weights(twins.model("meta-llama/Llama-3.1-8B-Instruct")),
        quantization={"load_in_4bit": True},
    )
    model = subject_of(load_recipe(recipe)).model
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {torch.bfloat16}


def test_evaluation_has_the_rows_of_its_examples(tmp_path: Path) -> None:
    found = subject(tmp_path, "dpo", training={"eval_strategy": "steps", "per_device_eval_batch_size": 3})
    assert found.recipe is not None
    step = evaluation_step_of(found.recipe, found.step)
    assert step is not None
    assert (step.batch_size, step.rows, step.is_padded) == (3, 6, True)
    memory = Predictor(found, CPU).evaluation()
    assert memory is not None


def test_engine_whose_loss_is_not_simulated_is_refused(tmp_path: Path) -> None:
    for trainer in ("sft", "dpo"):
        recipe = load_recipe(small_recipes.of_trainer(tmp_path, trainer))
        with pytest.raises(RecipeError, match=f"trainer {trainer}: .*fsdp2"):
            subject_of(recipe, Launch(engine="fsdp2", num_processes=2))


def test_step_on_a_card_runs_the_kernels_of_cuda(tmp_path: Path) -> None:
    found = subject(tmp_path, "dpo")
    on_cpu, on_card = (found.simulator(device).memory(found.plan) for device in (CPU, find_device("rtx4090")))
    operators = [{place.operator for place in memory.timeline.places} for memory in (on_cpu, on_card)]
    assert ["aten.exp.default" in each for each in operators] == [True, False]
