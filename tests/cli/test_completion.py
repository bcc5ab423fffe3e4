"""What shells complete: commands, their options, and recipes by name."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_ckpt.cli.main import main


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Path:
    assert main(["completion", request.param]) == 0
    path = tmp_path / f"completion.{request.param}"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["est"], ["estimate"]),
        (["completion", "f"], ["fish"]),
        (["estimate", "llama7b_lora"], ["llama7b_lora", "llama7b_lora_ddp"]),
        (["plan", "--memory"], ["--memory-budget"]),
        (["estimate", "x", "--exact", "pre"], ["prefer"]),
        (["recipes", "tiny_llama_l"], []),
    ],
)
def test_bash_completes(script: Path, words: list[str], expected: list[str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    line = f"COMP_WORDS=(hf-ckpt {' '.join(words)}); COMP_CWORD={len(words)}"
    code = f'source {script.name}; {line}; _hf_ckpt; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], cwd=script.parent, capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (expected, "")


@pytest.mark.parametrize("script", ["bash", "zsh", "fish"], indirect=True)
def test_script_is_one_that_its_shell_reads(script: Path) -> None:
    shell = script.suffix[1:]
    text = script.read_text(encoding="utf-8")
    assert "llama7b_lora" in text
    assert "--memory-budget" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", script], check=True)


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_that_nobody_has_set_up_completes(script: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    code = f"source {script.name}; print $_comps[hf-ckpt]"
    # Where the home is, zsh keeps what it has found.
    done = subprocess.run(
        ["zsh", "-f", "-c", code],
        cwd=script.parent,
        env=os.environ | {"HOME": str(script.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.split(), done.stderr) == (["_bash_complete", "-F", "_hf_ckpt"], "")


@pytest.mark.parametrize("script", ["fish"], indirect=True)
@pytest.mark.parametrize(
    ("line", "expected"),
    [("hf-ckpt est", "estimate"), ("hf-ckpt plan --mem", "--memory-budget"), ("hf-ckpt plan --exact pre", "prefer")],
)
def test_fish_completes(line: str, expected: str, script: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    code = f"source {script.name}; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code],
        cwd=script.parent,
        env=os.environ | {"HOME": str(script.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [expected]


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err
