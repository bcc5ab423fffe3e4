"""Where checkpoints lie is the Trainer's business: trials of a search, runs that go on elsewhere, pushes, moves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HPSearchBackend

import hf_ckpt
from hf_ckpt import AlreadyAppliedError, Plan, PlanMismatchError, Policy
from hf_ckpt.patch.apply import make_plan
from hf_ckpt.recovery.ladder import Ladder, Room, Rung, Size
from hf_ckpt.recovery.recovery import RUNGS_FILE
from hf_ckpt.trainer.device_peak import DevicePeak
from tests.training import PLAN_FILE, During, arguments, callback, llama, lora, rows, trainer

pytestmark = pytest.mark.core

SAVING = {"save_strategy": "steps", "save_steps": 1}


# --- Trials of a search. ---


def search(run: Trainer) -> Trainer:
    """Let `train(trial=...)` be that of a search with optuna, which need not be installed."""
    run.hp_search_backend, run.hp_name, run.compute_objective = HPSearchBackend.OPTUNA, None, len
    run.hp_space = lambda trial: {}
    return run


def plan_in(folder: Path) -> str:
    return Plan.from_json((folder / PLAN_FILE).read_text()).describe()


def test_each_trial_of_a_search_has_its_plan_and_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.integrations.hp_params", vars)
    ranks = iter([2, 2, 4])
    run = search(trainer(None, tmp_path, callback("ffn"), model_init=lambda: lora(r=next(ranks)), **SAVING))
    for number in range(2):
        run.train(trial=SimpleNamespace(number=number, params={}))
        folder = tmp_path / f"run-{number}"
        assert plan_in(folder) == plan_in(folder / "checkpoint-1") == plan_in(folder / "checkpoint-2")
    assert not (tmp_path / PLAN_FILE).exists()


# --- Runs that go on. ---


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The folder of a run under "ffn" that has saved each of its steps."""
    trainer(lora(), tmp_path / "first", callback("ffn"), **SAVING).train()
    return tmp_path / "first"


def named_plainly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return str(folder / "checkpoint-1")


def with_a_slash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return f"{folder / 'checkpoint-1'}/"


def relative_after_a_chdir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)
    return "checkpoint-1"


def as_a_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return folder / "checkpoint-1"


def under_another_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # As the hub names it.
    (folder / "checkpoint-1").rename(folder / "last-checkpoint")
    return str(folder / "last-checkpoint")


@pytest.mark.parametrize("name", [named_plainly, with_a_slash, relative_after_a_chdir, as_a_path, under_another_name])
def test_strict_resume_reads_the_plan_of_the_checkpoint_that_is_resumed(
    name: Callable[..., Any], first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = name(first, monkeypatch)
    trainer(lora(), tmp_path / "same", callback("ffn", strict_resume=True)).train(resume_from_checkpoint=checkpoint)
    other = trainer(lora(), tmp_path / "other", callback("full", strict_resume=True))
    with pytest.raises(PlanMismatchError, match=r"checkpoint(-1)?/hf_ckpt_plan.json was written under another"):
        other.train(resume_from_checkpoint=checkpoint)


def test_last_checkpoint_of_the_folder_is_found_by_the_trainer(tmp_path: Path) -> None:
    trainer(lora(), tmp_path, callback("ffn"), **SAVING).train()
    # transformers looks for the last one there, whatever its number.
    (tmp_path / "checkpoint-2" / PLAN_FILE).unlink()
    with pytest.raises(PlanMismatchError, match=r"There is no .*checkpoint-2/hf_ckpt_plan.json"):
        trainer(lora(), tmp_path, callback("ffn", strict_resume=True), max_steps=4).train(resume_from_checkpoint=True)


def test_ladder_of_another_run_goes_on(tmp_path: Path) -> None:
    model = llama()
    trainer(model, tmp_path / "first", callback("none"), **SAVING).train()
    plans = [make_plan(model, Policy.parse(mode)) for mode in ("none", "full")]
    ladder = Ladder(plans[0], 100, Room(None, DevicePeak(torch.device("cpu"))))
    ladder.fail(Size(), lambda plan: Rung(plans[1]))
    checkpoint = tmp_path / "first" / "checkpoint-1"
    (checkpoint / RUNGS_FILE).write_text(json.dumps(ladder.to_json()))
    begun: list[Plan | None] = []
    ours = callback("none", on_oom="escalate")
    look = During("on_step_begin", lambda model: begun.append(ours.plan))
    trainer(llama(), tmp_path / "second", ours, look).train(resume_from_checkpoint=f"{checkpoint}/")
    assert begun == plans[1:]


# --- Saves. ---


class Pushing(Trainer):
    """Notes what would be pushed to the hub, which transformers does before anybody is told of the checkpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.push_to_hub = True
        self.pushed: list[set[str]] = []

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.pushed.append(set(os.listdir(checkpoint_folder)))

    def _finish_current_push(self) -> None:
        pass


def test_a_push_to_the_hub_has_the_plan(tmp_path: Path) -> None:
    args = TrainingArguments(**arguments(tmp_path, **SAVING))
    run = Pushing(lora(), args=args, train_dataset=rows(), callbacks=[callback("ffn")])
    run.train()
    assert len(run.pushed) == 2
    assert all(PLAN_FILE in names for names in run.pushed)
    assert not {"save_model", "_push_from_checkpoint"} & vars(run).keys()


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end", "on_save"])
def test_a_folder_is_found_when_the_directory_is_another_one(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def move(model: nn.Module) -> None:
        monkeypatch.chdir(tmp_path / "elsewhere")

    trainer(lora(), Path("out"), During(event, move), callback("ffn"), **SAVING).train()
    folders = [path.parent for path in tmp_path.rglob("adapter_model.safetensors")]
    assert len(folders) == 2
    assert all((folder / PLAN_FILE).is_file() for folder in folders)


def test_a_trainer_that_saves_elsewhere_is_no_fault(tmp_path: Path) -> None:
    class Elsewhere(Trainer):
        def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
            self.save_model(str(tmp_path / "own"))

    args = TrainingArguments(**arguments(tmp_path / "out", **SAVING))
    Elsewhere(lora(), args=args, train_dataset=rows(), callbacks=[callback("ffn")]).train()
    assert (tmp_path / "own" / "adapter_model.safetensors").is_file()


# --- One callback on two Trainers. ---


def test_one_callback_on_two_trainers_looks_at_the_files_of_each(tmp_path: Path) -> None:
    ours = callback("ffn")
    runs = [trainer(lora(r=rank), tmp_path / str(rank), ours, **SAVING) for rank in (2, 4)]
    for run in [*runs, *runs]:
        run.train()
        assert not hf_ckpt.remove(run.model)


def test_a_trainer_within_the_run_of_another_one_with_the_same_callback_is_refused(tmp_path: Path) -> None:
    ours = callback("ffn")
    inner = trainer(llama(), tmp_path / "inner", ours)
    outer = trainer(llama(), tmp_path / "outer", During("on_step_end", lambda model: inner.train()), ours)
    with pytest.raises(AlreadyAppliedError, match="Give each of them a callback of its own"):
        outer.train()
    inner.train()
    assert not hf_ckpt.remove(inner.model)


def test_accelerates_setting_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    prepare = Accelerator.prepare

    def noted(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        seen.append(plugin.activation_checkpointing)
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(Accelerator, "prepare", noted)
    with monkeypatch.context() as sharding:
        ours = callback("full")
        runs = [trainer(llama(), tmp_path, ours) for _ in range(2)]
        plain = trainer(llama(), tmp_path)
        sharding.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
        # As if built now: on a CPU accelerate shards nothing.
        for run in (*runs, plain):
            run.__init__(run.model, run.args, train_dataset=rows(), callbacks=[ours] if run in runs else [])
            assert plugin.activation_checkpointing is True
            run.accelerator.prepare(run.get_train_dataloader())
        removed = runs[1]
        removed.remove_callback(ours)
        removed.accelerator.prepare(removed.get_train_dataloader())
    assert plugin.activation_checkpointing is True
    assert seen[::2] == [False, False, True, True]
