"""Runs that were killed, and go on as if they had not been."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_ckpt.cli.finetune import main
from tests import small_recipes, twins

pytestmark = [pytest.mark.slow, pytest.mark.core]

ROOT = Path(__file__).parents[2]
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
FIGURES = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")


def adapter_recipe(folder: Path, checkpointing: dict[str, str] | None = None) -> Path:
    """A recipe with an adapter, dropout, accumulation and evaluation on the way."""
    folder.mkdir()
    steps = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6, "eval_strategy": "steps", "eval_steps": 4}
    return small_recipes.write(
        folder,
        model=small_recipes.on_weights(twins.model(LLAMA)),
        lora=small_recipes.LORA,
        checkpointing=checkpointing or {},
        training={**steps, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
    )


def history(checkpoint: Path) -> list[dict[str, float]]:
    """The figures of a run up to a checkpoint, those that take time left out."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return [{key: entry[key] for key in FIGURES if key in entry} for entry in state["log_history"]]


def kill_at_step(recipe: Path, step: int) -> None:
    """Start the command, and kill it as soon as it tells the loss of a step."""
    command = [sys.executable, str(ROOT / "scripts" / "finetune.py"), str(recipe)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        num_losses = 0
        while num_losses < step and (line := run.stdout.readline()):
            num_losses += "'loss'" in line
        run.kill()
    assert run.returncode == -signal.SIGKILL


@pytest.mark.parametrize("checkpointing", [{}, {"policy": "full", "weights": "cpu"}], ids=["plain", "weights"])
def test_killed_run_ends_as_one_that_was_not(
    checkpointing: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(adapter_recipe(tmp_path / "whole"))]) == 0
    recipe = adapter_recipe(tmp_path / "killed", checkpointing)
    kill_at_step(recipe, 8)
    killed, whole = tmp_path / "killed" / "run", tmp_path / "whole" / "run"
    assert [path.name for path in killed.glob("checkpoint-*")] == ["checkpoint-6"]
    assert not (killed / "adapter_model.safetensors").exists()
    # What a kill while a checkpoint was written would leave: its state comes last.
    for name, state in (("checkpoint-7", None), ("checkpoint-8", '{"global_step": 8')):
        shutil.copytree(killed / "checkpoint-6", killed / name)
        (killed / name / "trainer_state.json").unlink()
        if state is not None:
            (killed / name / "trainer_state.json").write_text(state)
    capsys.readouterr()

    assert main([str(recipe), "--resume"]) == 0

    assert f"Going on from {killed / 'checkpoint-6'}." in capsys.readouterr().out
    assert history(killed / "checkpoint-12") == history(whole / "checkpoint-12")
    assert [entry["step"] for entry in history(killed / "checkpoint-12") if "loss" in entry] == list(range(1, 13))
    assert_same_weights(killed / "adapter_model.safetensors", whole / "adapter_model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    weights, others = load_file(one), load_file(other)
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


@pytest.mark.sweep
def test_full_fine_tune_goes_on_inside_a_later_epoch(tmp_path: Path) -> None:
    # 77 rows are 7 steps of 4 batches of 3, the last one a smaller one: step 10 lies inside the second epoch.
    steps = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "max_steps": 20, "save_steps": 10}
    recipe = small_recipes.write(tmp_path, training={**steps, "save_strategy": "steps"})
    run = tmp_path / "run"
    assert main([str(recipe)]) == 0
    expected = history(run / "checkpoint-20")
    shutil.move(run / "model.safetensors", tmp_path / "expected.safetensors")
    shutil.rmtree(run / "checkpoint-20")

    assert main([str(recipe), "--resume"]) == 0

    assert history(run / "checkpoint-20") == expected
    assert_same_weights(run / "model.safetensors", tmp_path / "expected.safetensors")


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipes.write(tmp_path)

    assert main([str(recipe), "--resume"]) == 2

    printed = capsys.readouterr()
    assert printed.err == (
        f"--resume: {tmp_path / 'run'} holds no complete checkpoint. Start without --resume, or name the folder of "
        "the run to go on with (training.output_dir=...).\n"
    )
    assert not (tmp_path / "run").exists()


def test_other_plan_is_refused_when_resuming_is_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    recipe = small_recipes.write(tmp_path, training=steps)
    assert main([str(recipe)]) == 0
    capsys.readouterr()
    other = ["checkpointing.policy=full", "training.max_steps=2"]

    assert main([str(recipe), "--resume", *other, "checkpointing.strict_resume=true"]) == 2
    assert "was written under another plan. Use the policy of that run, or leave strict_resume out." in (
        capsys.readouterr().err
    )
    assert main([str(recipe), "--resume", *other]) == 0
