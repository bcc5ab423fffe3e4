"""Commands asked twice: the second answer is the first one, and nothing of torch is loaded for it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from hf_ckpt import Plan
from hf_ckpt.cli import answer_cache
from hf_ckpt.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

ROOT = Path(__file__).parents[2]
ASKED = ("recipes/tiny_llama_base.yaml", "model.config.num_hidden_layers=2", "--device", "rtx4090")
# The command, and on the last line of standard error what it has loaded.
CODE = """
import sys
from hf_ckpt.cli.main import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers", "numpy", "accelerate", "peft", "datasets"}
print(*sorted({name.partition(".")[0] for name in sys.modules} & heavy), file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Done:
    """What a command printed and returned."""

    code: int
    out: str
    err: str
    loaded: str


def run(cache: Path, *words: str, path: str = "", first: str = "") -> Done:
    """Run a command in a process of its own. `path`: where packages are looked for first; `first`: code that runs."""
    paths = [each for each in (path, str(ROOT), os.environ.get("PYTHONPATH")) if each]
    environment = {**os.environ, "HF_CKPT_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(
        [sys.executable, "-c", first + CODE, words[0], *ASKED, *words[1:]],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    *said, loaded = ended.stderr.splitlines()
    return Done(ended.returncode, ended.stdout, "\n".join(said), loaded)


def run_here(cache: Path, *words: str) -> Done:
    """Run a command in this process, which has loaded everything: for an answer that is made."""
    out, err = io.StringIO(), io.StringIO()
    own = mock.patch.dict(os.environ, {"HF_CKPT_CACHE": str(cache)})
    with own, contextlib.chdir(ROOT), redirect_stdout(out), redirect_stderr(err):
        code = main([words[0], *ASKED, *words[1:]])
    return Done(code, out.getvalue(), err.getvalue().rstrip("\n"), "torch")


def kept_files(cache: Path) -> dict[str, tuple[int, bytes]]:
    """Return the answers in a cache: when each was used, and what it is."""
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in cache.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Return a cache with one plan, and what was printed when it was made."""
    cache = tmp_path_factory.mktemp("answered")
    return cache, run_here(cache, "plan")


@pytest.fixture
def planned(answered: tuple[Path, Done], tmp_path: Path) -> tuple[Path, Done]:
    """Return a copy of `answered` for one test."""
    cache, first = answered
    return shutil.copytree(cache, tmp_path / "planned"), first


@pytest.mark.parametrize(
    ("words", "code"),
    [
        # 4096 rows do not fit.
        (["estimate", "--quick", "training.per_device_train_batch_size=4096"], 1),
        (["estimate", "--grid"], 0),
        (["estimate", "--max-length"], 0),
        (["plan"], 0),
    ],
    ids=["too large", "grid", "max-length", "plan"],
)
@pytest.mark.sweep(keep=1)
def test_second_answer_is_the_first_one_without_torch(words: list[str], code: int, tmp_path: Path) -> None:
    first = run_here(tmp_path, *words)
    assert first.code == code
    second = run(tmp_path, *words)
    assert second == Done(code, first.out, "", "")
    # JSON comes from the same answer.
    read = run(tmp_path, *words, "--json")
    assert (read.code, read.err, read.loaded) == (code, "", "")
    document = json.loads(read.out)
    assert document["command"].endswith("--json")
    assert "torch" in document["versions"]
    assert len(kept_files(tmp_path)) == 1
    ((_, content),) = kept_files(tmp_path).values()
    (kept,) = json.loads(content).values()
    assert {"command", "versions"} & kept.keys() == set()


@pytest.mark.sweep
def test_text_comes_from_the_answer_that_json_was_printed_of(tmp_path: Path) -> None:
    first = run_here(tmp_path, "estimate", "--quick", "--json")
    rows = json.loads(first.out)["rows"]
    text = run(tmp_path, "estimate", "--quick", "-v")
    assert (text.code, text.err, text.loaded) == (first.code, "From cache.", "")
    printed = [line.split()[0] for line in text.out.splitlines() if line.startswith("  ")]
    assert [name for name in printed if name in {row["name"] for row in rows}] == [row["name"] for row in rows]
    # What fills the peak, and when.
    assert "saved activations" in text.out


@pytest.mark.sweep
def test_no_cache_neither_reads_nor_writes(planned: tuple[Path, Done], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, first = planned
    before = kept_files(cache)
    assert len(before) == 1
    asked: list[str] = []
    monkeypatch.setattr(answer_cache, "read_answer", asked.append)
    without = run_here(cache, "plan", "--no-cache")
    assert (without.code, without.out, asked) == (0, first.out, [])
    assert kept_files(cache) == before


@pytest.mark.sweep
def test_plan_is_written_of_a_kept_answer_too(planned: tuple[Path, Done], tmp_path: Path) -> None:
    cache, _ = planned
    out = tmp_path / "plan.json"
    # The second time the file is there, which does not count.
    for _ in range(2):
        done = run(cache, "plan", "-v", "--out", str(out))
        assert (done.loaded, f"checkpointing.policy={out}" in done.err) == ("", True)
        assert done.err.startswith("From cache.\n")
    assert out.read_text() == Plan.from_json(out.read_text()).to_json() + "\n"


@pytest.mark.sweep
def test_that_nothing_fits_is_kept_too(tmp_path: Path) -> None:
    first, second = (each(tmp_path, "plan", "--memory-budget", "1MiB") for each in (run_here, run))
    assert (first.code, second.code, second.out, second.loaded) == (1, 1, "", "")
    assert second.err.startswith("No plan fits memory_budget=1.0 MiB.")
    assert first.err.endswith(second.err)


def test_another_option_makes_the_answer_anew(planned: tuple[Path, Done]) -> None:
    cache, _ = planned
    assert run_here(cache, "plan", "--exact", "true").code == 0
    assert len(kept_files(cache)) == 2


def test_edited_modelling_file_makes_the_answer_anew(planned: tuple[Path, Done], tmp_path: Path) -> None:
    cache, first = planned
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    # Links are enough: what is edited becomes a file of its own.
    shutil.copytree(Path(spec.origin).parent, tmp_path / "path" / "transformers", copy_function=os.symlink)
    path = str(tmp_path / "path")
    assert run(cache, "plan", path=path) == Done(0, first.out, "", "")
    modelling = tmp_path / "path" / "transformers" / "models" / "llama" / "modeling_llama.py"
    text = modelling.read_text(encoding="utf-8")
    modelling.unlink()
    modelling.write_text(text + "# edited\n", encoding="utf-8")
    # Without torch no answer can be made, and the kept one is not it.
    edited = run(cache, "plan", path=path, first="import sys; sys.modules['torch'] = None")
    assert (edited.code, edited.out) != (0, first.out)
    assert "torch" in edited.err
