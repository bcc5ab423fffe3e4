"""Recipes and plans from pipes, from standard input, and from what never ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hf_ckpt.cli import main as cli
from hf_ckpt.cli.finetune import main
from hf_ckpt.errors import RecipeError
from hf_ckpt.policy import text_file
from hf_ckpt.recipe.recipe import load_recipe

pytestmark = pytest.mark.skipif(os.name != "posix", reason="reads devices")

RECIPE = "model: {name_or_path: some/model}\ndata: {path: some/data}\ntraining: {output_dir: runs/x}\n"


@contextmanager
def written(*pieces: str, pause_s: float = 0.0, is_closed: bool = True) -> Iterator[Path]:
    """A pipe as a process substitution gives it, into which pieces of a text are written."""
    reading, writing = os.pipe()

    def write() -> None:
        for piece in pieces:
            try:
                os.write(writing, piece.encode())
            except BrokenPipeError:
                break
            time.sleep(pause_s)
        if is_closed:
            os.close(writing)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield Path(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
        writer.join()
        if not is_closed:
            os.close(writing)


def test_recipe_is_read_from_a_process_substitution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(RECIPE)
    # What it extends is named from where the command runs.
    with written("extends: base.yaml\n", "lora: {r: ", "8}\n", pause_s=0.02) as path:
        recipe = load_recipe(path, ["training.seed=3"])
    assert (recipe.lora, recipe.training) == ({"r": 8}, {"output_dir": "runs/x", "seed": 3})


def test_recipe_is_read_from_standard_input(tmp_path: Path) -> None:
    program = "import sys; from hf_ckpt.cli.finetune import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "/dev/stdin", "--print"]
    ours, theirs = socket.socketpair()
    ours.sendall(RECIPE.encode())
    ours.close()
    whole = {"capture_output": True, "text": True, "cwd": Path(__file__).parents[2]}
    with theirs:
        from_socket = subprocess.run(command, stdin=theirs, check=True, **whole)
    from_pipe = subprocess.run(command, input=RECIPE, check=True, **whole)
    assert from_pipe.stdout == from_socket.stdout
    assert "output_dir: runs/x" in from_pipe.stdout


def test_named_pipe_is_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text(RECIPE))
    writer.start()
    assert load_recipe(path).training == {"output_dir": "runs/x"}
    writer.join()


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(path)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    return said


def test_pipe_from_which_nothing_comes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text_file._SILENCE_S == 5.0
    monkeypatch.setattr(text_file, "_SILENCE_S", 0.2)
    os.mkfifo(tmp_path / "nobody")
    assert "cannot be read: nothing came for 0 s." in refused(tmp_path / "nobody", capsys)
    with written("model: {", is_closed=False) as path:
        assert "cannot be read: nothing came for 0 s." in refused(path, capsys)


def test_pipe_that_drips_for_ever_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text_file._WHOLE_S == 30.0
    monkeypatch.setattr(text_file, "_WHOLE_S", 0.2)
    with written(*["# \n"] * 40, pause_s=0.02) as path:
        assert "cannot be read: it did not end within 0 s." in refused(path, capsys)


def test_what_never_ends_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read: it holds more than 1 MiB." in refused(Path("/dev/zero"), capsys)
    (tmp_path / "link.yaml").symlink_to("/dev/zero")
    assert "cannot be read: it holds more than 1 MiB." in refused(tmp_path / "link.yaml", capsys)
    assert "a recipe is a mapping" in refused(Path("/dev/null"), capsys)
    assert "Is a directory" in refused(tmp_path, capsys)


def test_limit_is_1_mib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE + "#" + "-" * (2**20 - len(RECIPE) - 2) + "\n")
    assert path.stat().st_size == 2**20
    assert load_recipe(path).training == {"output_dir": "runs/x"}
    with path.open("a") as file:
        file.write("\n")
    assert "it holds more than 1 MiB." in refused(path, capsys)


def test_several_processes_do_not_share_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        written(RECIPE) as path,
        pytest.raises(RecipeError, match=r"several processes cannot read one pipe\. Write the recipe to a file\.$"),
    ):
        load_recipe(path)


def test_verify_on_several_processes_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with written(RECIPE + "checkpointing: {policy: full}\n") as path:
        assert cli.main(["verify", str(path), "--processes", "2"]) == 2
    assert capsys.readouterr().err == f"--processes 2: {path} can be read once. Write it to a file.\n"
