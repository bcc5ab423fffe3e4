"""The recipe for ZeRO-3 on two processes, key by key, under the accelerate configuration that it names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from accelerate.commands import launch
from accelerate.utils.launch import prepare_deepspeed_cmd_env

from hf_ckpt.finetune import train
from tests.distributed.deepspeed_on_a_cpu import deepspeed_on_a_cpu, ignores_its_warnings
from tests.distributed.launching import config, made_by_first, share_twins
from tests.distributed.runs import fresh_accelerate
from tests.distributed.test_recipes_on_two import check_words, config_of
from tests.docs.test_shipped_recipes import (
    Run,
    carry_out,
    check_losses,
    check_plan,
    check_weights_are_those_without_the_plan,
)

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install '.[deepspeed]'")

pytestmark = ignores_its_warnings
STEM = "llama7b_full_zero3"


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_NUM_SAMPLE_TOKENS", 4)
    share_twins(monkeypatch)


@contextmanager
def launched() -> Iterator[None]:
    """Set the environment that accelerate gives the processes that it starts under the recipe's configuration."""
    args = launch.launch_command_parser().parse_args(
        ["--config_file", config(config_of(STEM)), "--main_process_port", "0", "script.py"]
    )
    with mock.patch.object(launch, "deepspeed_launcher") as launcher:
        launch.launch_command(args)
    with fresh_accelerate(), deepspeed_on_a_cpu():
        _, given = prepare_deepspeed_cmd_env(launcher.call_args.args[0])
        os.environ.update({key: value for key, value in given.items() if key.startswith("ACCELERATE_")})
        yield


def on_two(folder: Path, *more: str) -> Run:
    with launched():
        return carry_out(STEM, folder, *more)


@pytest.mark.two("it is read that two were there")
def test_recipe_trains_on_two_as_without_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_by_first(lambda: tmp_path)
    run = on_two(folder / "planned")
    printed = capsys.readouterr().out
    plain = on_two(folder / "plain", "checkpointing=null")

    sharded = "DeepSpeed ZeRO-3 on 2 processes; sharded: weights, gradients, optimizer state"
    assert run.summary.engine == plain.summary.engine == sharded
    check_losses(run, plain)
    check_plan(run)
    check_weights_are_those_without_the_plan(run, plain)
    check_words(run, printed)
