"""What a run shows in a script without any logging set up: a line or two as it begins, one as it ends, and when not."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from hf_ckpt import HFCkptCallback
from hf_ckpt.trainer.overruled_checkpointing import hold_off_accelerates_checkpointing
from hf_ckpt.units import format_bytes
from hf_ckpt.upstream import accelerate
from tests.training import llama, trainer

AUTO: dict[str, Any] = {"policy": "auto", "memory_budget": "1GiB"}


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of ours on standard error, without what bars leave before them.

    A bar writes over itself. Below a second one, such as one that an interrupted run never closed, it also moves up.
    """
    lines = re.split(r"[\r\n]|\x1b\[A", capsys.readouterr().err)
    return [line for line in lines if line.startswith("hf_ckpt: ")]


@pytest.mark.sweep(keep=1)
def test_a_plain_script_shows_plan_prediction_and_measurement(tmp_path: Path) -> None:
    script = """
    from hf_ckpt import HFCkptCallback
    from tests.training import llama, trainer
    run = trainer(llama(num_hidden_layers=2), "out", HFCkptCallback("auto", memory_budget="1GiB"), disable_tqdm=False)
    run.train()
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.startswith("hf_ckpt")]
    assert len(lines) == 3, done.stderr
    plan, prediction, end = lines
    assert plan == f"hf_ckpt: layers: 2 none (layer by layer in {Path('out', 'hf_ckpt_plan.json')})"
    assert prediction.startswith("hf_ckpt: predicted peak ")
    assert prediction.endswith(" of 1.0 GiB, for 2 sequences of 8 tokens")
    assert end.startswith("hf_ckpt: Predicted peak ")
    assert end.endswith("; a CPU does not count what is allocated.")
    assert "hf_ckpt" not in done.stdout


@pytest.mark.core
def test_what_is_shown_is_found_below_a_bar_that_was_never_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tqdm(total=3):
        trainer(llama(num_hidden_layers=2), tmp_path, HFCkptCallback("full"), disable_tqdm=False).train()
        assert len(shown(capsys)) == 2


@pytest.mark.core
def test_a_fixed_policy_shows_its_plan_and_the_measured_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        trainer(llama(), tmp_path, HFCkptCallback("full", every_n_layers=2), disable_tqdm=False).train()
    begin, end = shown(capsys)
    assert begin == f"hf_ckpt: layers: 2 full, 2 none (layer by layer in {tmp_path / 'hf_ckpt_plan.json'})"
    assert end.startswith("hf_ckpt: Peak memory of the ")
    assert end.endswith(' GiB; only policy "auto" predicts one.')
    assert "Activation checkpointing is in force.\nmodel.layers: 4 layers" in caplog.text


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "arguments", "verbosity"),
    [
        ({"quiet": True}, {"disable_tqdm": False}, logging.WARNING),
        ({}, {"disable_tqdm": True}, logging.WARNING),
        ({}, {"disable_tqdm": False}, logging.ERROR),
    ],
    ids=["quiet", "disable_tqdm", "verbosity"],
)
def test_nothing_is_shown_where_it_is_switched_off(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    arguments: dict[str, Any],
    verbosity: int,
) -> None:
    found = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(verbosity)
    try:
        trainer(llama(), tmp_path, HFCkptCallback("full", **options), **arguments).train()
    finally:
        transformers_logging.set_verbosity(found)
    assert shown(capsys) == []


@pytest.mark.core
def test_a_search_for_hyperparameters_shows_its_first_trial_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It reads what it searches with by the library that searches, of which none is installed.
    monkeypatch.setattr("transformers.integrations.hp_params", dict)
    run = trainer(None, tmp_path, HFCkptCallback("full"), model_init=lambda: llama(), disable_tqdm=False)
    for count in (2, 0):
        # As each trial of `hyperparameter_search` does.
        run.train(trial={"learning_rate": 1e-3})
        assert len(shown(capsys)) == count
    # Another training is no trial.
    run.train()
    assert len(shown(capsys)) == 2


@pytest.mark.sweep
def test_a_plan_that_is_made_again_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.auto.test_auto import Stream, between, run

    budget = between("full fine-tune", 0.4)
    run(
        llama(), tmp_path, HFCkptCallback("auto", memory_budget=budget), data=Stream((8, 8, 64, 64)), disable_tqdm=False
    )
    begin, unknown, again, end = shown(capsys)
    assert begin.startswith("hf_ckpt: layers: 4 none (")
    assert unknown.startswith("hf_ckpt: how large batches are is not known: planned for as they come, within ")
    assert again.startswith("hf_ckpt: planned again, for larger batches: layers: ")
    assert "plain training would need " in again
    assert f", your budget is {format_bytes(int(budget[:-1]))}. This plan needs " in again
    assert ", predicted for 2 sequences of 64 tokens: same gradients, bit for bit; " in again
    assert again.endswith(" % slower than without checkpointing")
    assert end.startswith("hf_ckpt: Predicted peak ")


@pytest.mark.parametrize(("is_quiet", "level"), [(False, logging.WARNING), (True, logging.INFO)])
def test_checkpointing_of_accelerate_is_overruled_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_quiet: bool, level: int
) -> None:
    monkeypatch.setattr(accelerate, "fsdp_plugin", lambda: SimpleNamespace(activation_checkpointing=True))
    built = SimpleNamespace(
        args=SimpleNamespace(process_index=0),
        accelerator=SimpleNamespace(prepare=None),
        callback_handler=SimpleNamespace(),
    )
    with caplog.at_level(logging.INFO, logger="hf_ckpt"):
        hold_off_accelerates_checkpointing(built, None, is_quiet=is_quiet)
        # Said by one process.
        built.args.process_index = 1
        hold_off_accelerates_checkpointing(built, None, is_quiet=is_quiet)
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    text = "fsdp_activation_checkpointing of accelerate is overruled: the policy of HFCkptCallback governs."
    assert said == [(level, text)]
