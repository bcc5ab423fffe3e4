"""The plan in the output folder and in each checkpoint, and runs that are resumed under another."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_ckpt import Plan, PlanMismatchError
from tests.traces import differences, snapshot
from tests.training import PLAN_FILE, callback, llama, losses, trainer

pytestmark = pytest.mark.core


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint in the middle of a run under "full"."""
    trainer(llama(), tmp_path, callback("full"), max_steps=4, save_strategy="steps", save_steps=2).train()
    return tmp_path / "checkpoint-2"


def test_plan_is_written_to_the_output_and_into_each_checkpoint(checkpoint: Path) -> None:
    folders = [checkpoint.parent, checkpoint, checkpoint.with_name("checkpoint-4")]
    plans = [Plan.from_json((folder / PLAN_FILE).read_text()) for folder in folders]
    assert plans[0].summary() == "model.layers: 4 layers\n  0 to 3       full"
    assert plans[0] == plans[1] == plans[2]
    assert [path.name for path in checkpoint.parent.glob("*.part")] == []


def test_resuming_under_another_plan_says_so_and_gives_the_same_losses(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trainer(llama(), checkpoint.parent / "whole", max_steps=4)
    expected.train()
    run = trainer(llama(), checkpoint.parent, callback("attention"), max_steps=4)
    with caplog.at_level(logging.INFO, logger="hf_ckpt"):
        run.train(resume_from_checkpoint=str(checkpoint))
    assert f"{checkpoint / PLAN_FILE} was written under another plan. Results do not change, memory does." in (
        caplog.messages
    )
    assert losses(run) == losses(expected)


def test_resuming_under_the_same_plan_says_nothing(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trainer(llama(), checkpoint.parent, callback("full", strict_resume=True), max_steps=4)
    with caplog.at_level(logging.INFO, logger="hf_ckpt"):
        run.train(resume_from_checkpoint=str(checkpoint))
    assert "another plan" not in caplog.text


def test_strict_resume_refuses_another_plan_and_leaves_the_model_clean(checkpoint: Path) -> None:
    model = llama()
    before = snapshot(model)
    run = trainer(model, checkpoint.parent, callback("attention", strict_resume=True), max_steps=4)
    with pytest.raises(PlanMismatchError, match=r"was written under another plan\. Use the policy of that run, or"):
        run.train(resume_from_checkpoint=str(checkpoint))
    assert [trace for trace in differences(before, snapshot(model)) if trace != ": _is_accelerate_prepared"] == []


def test_strict_resume_refuses_a_checkpoint_without_a_plan(checkpoint: Path) -> None:
    (checkpoint / PLAN_FILE).unlink()
    run = trainer(llama(), checkpoint.parent, callback("full", strict_resume=True), max_steps=4)
    with pytest.raises(PlanMismatchError, match=r"There is no .*checkpoint-2/hf_ckpt_plan.json"):
        run.train(resume_from_checkpoint=str(checkpoint))


def _is_cut_short(written: Path) -> None:
    written.write_text(written.read_text()[:200])


def _is_of_a_later_version(written: Path) -> None:
    written.write_text('{"format": 99, "layers": "in another layout"}')


def _is_endless(written: Path) -> None:
    written.unlink()
    written.symlink_to("/dev/zero")


BAD_PLANS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda written: written.write_text(""), "This is not a plan: "),
    "truncated": (_is_cut_short, "This is not a plan: "),
    "foreign": (lambda written: written.write_text('{"epoch": 1.0}'), "This is not a plan: format is missing"),
    "no text": (lambda written: written.write_bytes(b"\xff\xfe\x00"), "no plan can be read there: 'utf-8' codec"),
    "future": (_is_of_a_later_version, "The plan has format 99, this version reads up to 2."),
    "endless": (_is_endless, "no plan can be read there: it holds more than 1 MiB"),
}


@pytest.mark.parametrize("kind", BAD_PLANS)
def test_resuming_beside_a_file_that_is_no_plan_ends_the_run_only_if_strict(
    checkpoint: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, message = BAD_PLANS[kind]
    written = checkpoint / PLAN_FILE
    spoil(written)
    model = llama()
    before = snapshot(model)
    run = trainer(model, checkpoint.parent, callback("full", strict_resume=True), max_steps=4)
    with pytest.raises(PlanMismatchError, match=re.escape(f"{written}: {message}")):
        run.train(resume_from_checkpoint=str(checkpoint))
    assert [trace for trace in differences(before, snapshot(model)) if trace != ": _is_accelerate_prepared"] == []
    run = trainer(model, checkpoint.parent, callback("full"), max_steps=4)
    with caplog.at_level(logging.WARNING, logger="hf_ckpt"):
        run.train(resume_from_checkpoint=str(checkpoint))
    assert caplog.messages[0].startswith(f"{written}: {message}")
    assert len(losses(run)) == 4


def test_no_plan_is_left_where_its_file_cannot_be_written(tmp_path: Path) -> None:
    model = llama()
    before = snapshot(model)
    (tmp_path / PLAN_FILE).mkdir()
    with pytest.raises(OSError, match=PLAN_FILE):
        trainer(model, tmp_path, callback("mixed")).train()
    assert [trace for trace in differences(before, snapshot(model)) if trace != ": _is_accelerate_prepared"] == []


def test_strict_resume_reads_the_plan_of_the_folder_named_in_the_arguments(checkpoint: Path, tmp_path: Path) -> None:
    named = {"resume_from_checkpoint": str(checkpoint), "max_steps": 4}
    run = trainer(llama(), tmp_path / "elsewhere", callback("attention", strict_resume=True), **named)
    with pytest.raises(PlanMismatchError, match="was written under another plan"):
        run.train(resume_from_checkpoint=run.args.resume_from_checkpoint)
