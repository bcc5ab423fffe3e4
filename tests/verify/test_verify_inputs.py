"""What a trial is run on: seeded rows, the training section on this machine, and the engine that is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_ckpt.loading.tokenizer import train_tokenizer
from hf_ckpt.loading.trainer import training_arguments
from hf_ckpt.recipe.checkpointing import Checkpointing
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.verify.processes import with_engine
from hf_ckpt.verify.reduce_model import adapt_to_machine
from hf_ckpt.verify.run import NUM_TOKENS, SampleRows, sample_rows
from hf_ckpt.verify.trial import engine_of
from tests.byte_tokenizer import byte_tokenizer

FSDP1 = {"fsdp": True, "fsdp_config": {"fsdp_version": 1, "reshard_after_forward": "shard_grad_op"}}


def recipe_of(data: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **training: Any) -> Recipe:
    return Recipe(
        model={"name_or_path": "nowhere", **(model or {})},
        data={"path": "nowhere", **(data or {})},
        training={"output_dir": "run", "use_cpu": True, **training},
        checkpointing=Checkpointing({"policy": "full"}),
        path=Path("recipe.yaml"),
    )


def drawn(data: dict[str, Any] | None = None, *, num_steps: int = 3, **training: Any) -> SampleRows:
    recipe = recipe_of(data, per_device_train_batch_size=2, gradient_accumulation_steps=4, **training)
    return sample_rows(recipe, byte_tokenizer(pad_token="<pad>"), training_arguments(recipe), num_steps=num_steps)


# --- Rows. ---


def test_there_are_rows_for_every_micro_batch() -> None:
    assert len(drawn().rows) == 3 * 4 * 2


def test_the_same_seed_draws_the_same_rows_and_another_one_others() -> None:
    assert drawn(seed=1).rows == drawn(seed=1).rows
    assert drawn(seed=1).rows != drawn(seed=2).rows


def test_rows_hold_text_tokens_only() -> None:
    tokenizer = byte_tokenizer(pad_token="<pad>")
    tokens = {token for row in drawn(num_steps=20).rows for token in row["input_ids"]}
    assert tokens.isdisjoint(tokenizer.all_special_ids)
    assert max(tokens) < len(tokenizer)
    assert len(tokens) > 200


def test_rows_are_of_two_lengths_so_that_batches_with_and_without_padding_come_up() -> None:
    batches = drawn()
    assert {len(row["input_ids"]) for row in batches.rows} == {NUM_TOKENS, NUM_TOKENS - 3}
    padded, whole = batches.collator(batches.rows[2:4]), batches.collator(batches.rows[:2])
    assert padded["attention_mask"].sum(dim=1).tolist() == [NUM_TOKENS, NUM_TOKENS - 3]
    assert whole["attention_mask"].all()
    assert (padded["labels"][1, -3:] == -100).all()


@pytest.mark.parametrize(("loss_on", "num_without"), [("all", 1), ("completion", 8), (None, 8)])
def test_loss_is_on_what_the_recipe_learns(loss_on: str | None, num_without: int) -> None:
    row = drawn({"loss_on": loss_on}).rows[0]
    assert row["labels"][:num_without] == [-100] * num_without
    assert row["labels"][num_without:] == row["input_ids"][num_without:]


def test_packed_rows_restart_their_positions() -> None:
    batches = drawn({"packing": True})
    batch = batches.collator(batches.rows[:2])
    assert batch["input_ids"].shape == (1, 2 * NUM_TOKENS)
    assert batch["position_ids"].tolist() == [[*range(NUM_TOKENS), *range(NUM_TOKENS)]]


def test_rows_are_no_longer_than_the_recipe_allows() -> None:
    assert max(len(row["input_ids"]) for row in drawn({"max_length": 12}).rows) == 12


def test_tokenizer_of_bytes_has_no_words(tmp_path: Path) -> None:
    assert (train_tokenizer(["text"], vocab_size=259, cache_dir=tmp_path) / "tokenizer.json").is_file()


# --- The training section here. ---

needs_no_gpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without a GPU")


@needs_no_gpu
def test_a_recipe_for_gpus_runs_on_the_cpu_with_its_own_numbers() -> None:
    own = {"bf16": True, "optim": "paged_adamw_8bit", "learning_rate": 1e-3, "seed": 7, "max_grad_norm": 0.5}
    made, notes = adapt_to_machine(recipe_of(**own, tf32=True, use_cpu=False))
    assert {key: made.training[key] for key in own} == own
    assert (made.training["use_cpu"], "tf32" in made.training, notes) == (True, False, [])


@needs_no_gpu
def test_float16_becomes_bfloat16_and_says_so() -> None:
    made, notes = adapt_to_machine(recipe_of(fp16=True))
    assert (made.training["fp16"], made.training["bf16"]) == (False, True)
    assert notes == ["training.bf16 in place of training.fp16, whose scaled gradients need a GPU"]


@needs_no_gpu
def test_attention_that_needs_a_gpu_becomes_sdpa_and_says_so() -> None:
    made, notes = adapt_to_machine(recipe_of(model={"attn_implementation": "flash_attention_2"}))
    assert made.model["attn_implementation"] == "sdpa"
    assert notes == ["attention sdpa in place of flash_attention_2, which needs a GPU"]


def test_nothing_is_reported_pushed_evaluated_or_kept() -> None:
    made, _ = adapt_to_machine(
        recipe_of(report_to="wandb", push_to_hub=True, hub_model_id="me/mine", eval_strategy="steps", warmup_steps=9)
    )
    kept = {"output_dir", "use_cpu", "push_to_hub", "report_to", "save_strategy", "per_device_train_batch_size"}
    assert set(made.training) == kept
    assert (made.training["report_to"], made.training["push_to_hub"]) == ("none", False)


def test_one_process_leaves_fsdp_out_and_says_so() -> None:
    made, notes = adapt_to_machine(recipe_of(**FSDP1))
    assert made.training.keys().isdisjoint(FSDP1)
    assert notes == ["training.fsdp left out on one process (--processes 2 runs it)"]


def test_several_processes_keep_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    made, notes = adapt_to_machine(recipe_of(fsdp=True))
    assert (made.training["fsdp"], notes) == (True, [])


@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_deepspeed_is_left_out_and_says_so(num_processes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", num_processes)
    made, notes = adapt_to_machine(recipe_of(deepspeed={"zero_optimization": {"stage": 3}}))
    assert "deepspeed" not in made.training
    assert notes == ["training.deepspeed left out (DDP and FSDP are what verify runs)"]


# --- Engines. ---


@pytest.mark.parametrize(
    ("training", "engine", "expected"),
    [
        ({}, None, None),
        ({}, "fsdp2", 2),
        ({}, "fsdp1", 1),
        (FSDP1, None, 1),
        (FSDP1, "fsdp2", 2),
        (FSDP1, "ddp", None),
        ({"fsdp": True}, None, 2),
    ],
)
def test_engine_is_the_one_asked_for_or_else_the_recipes(
    training: dict[str, Any], engine: str | None, expected: int | None
) -> None:
    made = with_engine(recipe_of(**training), engine).training
    assert made.get("fsdp_config", {}).get("version") == expected
    assert made.get("fsdp") == (True if expected else None)


def test_other_settings_of_fsdp_stay() -> None:
    config = with_engine(recipe_of(**FSDP1), "fsdp1").training["fsdp_config"]
    assert config["reshard_after_forward"] == "shard_grad_op"
    assert "fsdp_version" not in config


def test_engine_is_told_by_type() -> None:
    deepspeed = type("DeepSpeedEngine", (nn.Module,), {})
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    assert [engine_of(module) for module in (nn.Linear(1, 1), wrapped, deepspeed())] == [
        "one process",
        "ddp",
        "deepspeed",
    ]


def test_recipe_is_left_as_it_was() -> None:
    recipe = recipe_of(**FSDP1, warmup_steps=3)
    before = dict(recipe.training)
    adapt_to_machine(recipe)
    with_engine(replace(recipe), "ddp")
    assert dict(recipe.training) == before
