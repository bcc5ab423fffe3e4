"""`hf-ckpt finetune` trains in this process, or becomes the launcher of accelerate."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from hf_ckpt.cli import finetune
from hf_ckpt.cli.main import main
from tests import small_recipes

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """What accelerate makes of the command that would take this process's place, on a machine with four GPUs."""
    found = []

    def become(program: str, command: list[str]) -> Any:
        assert program == sys.executable == command[0]
        assert command[1:3] == ["-m", "accelerate.commands.launch"]
        found.append(_validate_launch_command(launch_command_parser().parse_args(command[3:]))[0])
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    return found


@pytest.mark.parametrize("options", [[], ["--processes", "1"]])
def test_one_process_is_this_one(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[argparse.Namespace] = []
    monkeypatch.setattr(finetune, "_run", lambda options: ran.append(options) or 5)
    assert main(["finetune", "llama7b_lora", "training.seed=3", *options]) == 5
    assert (ran[0].recipe, ran[0].overrides) == ("llama7b_lora", ["training.seed=3"])


def test_recipe_is_read_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipes.write(tmp_path)
    assert main(["finetune", str(recipe), "--print"]) == 0
    assert "model:" in capsys.readouterr().out
    assert main(["finetune", str(recipe), "training.learning_rat=1"]) == 2
    assert 'Did you mean "learning_rate"?' in capsys.readouterr().err


def test_processes_get_the_same_words(launched: list[argparse.Namespace]) -> None:
    with pytest.raises(SystemExit):
        main(["finetune", "llama7b_lora", "training.seed=3", "--processes", "3", "--resume"])
    (args,) = launched
    assert (args.num_processes, args.num_machines, args.mixed_precision) == (3, 1, "no")
    assert (args.module, args.training_script) == (True, "hf_ckpt.cli.finetune")
    assert args.training_script_args == ["llama7b_lora", "training.seed=3", "--resume"]


@pytest.mark.parametrize("named", ["fsdp2_8gpu", str(RECIPES / "accelerate" / "fsdp2_8gpu.yaml")])
def test_configuration_is_that_of_accelerate(named: str, launched: list[argparse.Namespace]) -> None:
    with pytest.raises(SystemExit):
        main(["finetune", "llama7b_full_fsdp", "--config-file", named])
    (args,) = launched
    assert (args.num_processes, args.use_fsdp, args.fsdp_version) == (8, True, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "5"], "--processes 5: each has a GPU of its own, and this machine has 4."),
        (["--config-file", "fsdp3_8gpu"], "--config-file: there is no file fsdp3_8gpu. Name one or one of ddp_2x8gpu,"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    options: list[str], message: str, launched: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", "llama7b_lora", *options]) == 2
    assert message in capsys.readouterr().err
    assert launched == []


@pytest.mark.sweep
def test_launched_module_runs_the_same_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipes.write(tmp_path)
    # Not through `os.execv`, which would be the end of the tests.
    options = argparse.Namespace(config_file=None, processes=None)
    command = [sys.executable, "-m", "accelerate.commands.launch", *finetune._launch_options(options), "--cpu"]
    assert (
        os.spawnv(os.P_WAIT, sys.executable, [*command, "--module", "hf_ckpt.cli.finetune", str(recipe), "--print"])
        == 0
    )
    assert capfd.readouterr().out.startswith("model:")


@pytest.mark.sweep
def test_missing_library_is_told_with_the_extra_that_brings_it(tmp_path: Path) -> None:
    code = "import sys; sys.modules['datasets'] = None; from hf_ckpt.cli.main import main; sys.exit(main())"

    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    recipe = str(small_recipes.write(tmp_path))
    asked = f'hf-ckpt needs datasets, which is not installed. Run: pip install "{ROOT}[finetune]"\n'
    assert run("finetune", recipe) == (2, asked)
    assert run("plan", recipe, "--memory-budget", "1GiB")[0] == 0
