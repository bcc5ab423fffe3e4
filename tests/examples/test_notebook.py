"""The notebook runs from a clone, cell after cell, small and in float32 on the CPU; it says what needs a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "qlora_on_a_free_gpu.ipynb"
RUNNER = ROOT / "scripts" / "run_notebook.py"

pytestmark = pytest.mark.slow


def all_cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


def cells(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in all_cells() if cell["cell_type"] == kind]


def shown() -> str:
    """All that the stored outputs say."""
    outputs = [output for cell in all_cells() for output in cell.get("outputs", ())]
    return "".join("".join(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in outputs)


def test_outputs_are_those_of_a_run_on_the_cpu_which_is_said() -> None:
    assert "The outputs below are from that run." in cells("markdown")[0]
    assert [cell["execution_count"] for cell in all_cells() if cell["cell_type"] == "code"] == [*range(1, 10)]
    assert "torch.float32" in shown()
    assert re.search(r"none  predicted peak 1\d\.\d GiB", shown())
    assert "after 2 steps" in shown()
    assert NOTEBOOK.read_text(encoding="utf-8").isascii()
    assert "/work" not in shown()
    assert "/tmp" not in shown()


def test_first_cells_install_assert_versions_and_say_what_was_not_run() -> None:
    assert "**Nothing was run on a T4 yet**" in cells("markdown")[0]
    assert 'URL = os.environ.get("HF_CKPT_URL", "")' in cells("code")[0]
    assert "Then restart the notebook." in cells("code")[1]


def run(folder: Path, python: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the notebook by itself, in a folder and an interpreter that may know nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_CKPT_URL")}
    command = [python, RUNNER, NOTEBOOK]
    return subprocess.run(
        command,
        cwd=folder,
        env={**environment, "HF_CKPT_NOTEBOOK": "small", **variables},
        check=False,
        capture_output=True,
        text=True,
    )


def check_was_run(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 0, done.stderr[-4000:]
    # The tokenizer has no token for padding, and its sequences are of two lengths.
    assert "padding: <end>" in done.stdout
    assert "after 2 steps" in done.stdout
    assert "plain training would need " in done.stdout
    adapter = folder / "runs" / "qlora_on_a_free_gpu" / "adapter"
    assert {path.name for path in adapter.iterdir()} >= {"adapter_model.safetensors", "tokenizer.json"}


def test_notebook_runs_where_the_package_is_installed(tmp_path: Path) -> None:
    check_was_run(run(tmp_path, Path(sys.executable), PYTHONPATH=str(ROOT)), tmp_path)


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """An interpreter that has what the package depends on, and not the package: no gigabytes are installed."""
    folder = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip())
    # Theirs but for this package, and without the files of theirs that lead to this checkout.
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not (path.name.startswith("hf_ckpt") or path.suffix == ".pth" or (site / path.name).exists()):
            (site / path.name).symlink_to(path)
    return python


def test_without_its_address_the_first_cell_says_what_to_set(tmp_path: Path, fresh: Path) -> None:
    refused = run(tmp_path, fresh)
    assert refused.returncode == 1
    assert "Set URL, in this cell, to the address of the repository." in refused.stderr


@pytest.mark.sweep
def test_notebook_installs_itself_from_a_clone_and_runs(tmp_path: Path, fresh: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no repository to clone")
    # No network: what builds the package is there too.
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = run(tmp_path, fresh, HF_CKPT_URL=ROOT.as_uri(), **offline)
    check_was_run(done, tmp_path)
    assert (tmp_path / "hf_ckpt_checkout" / "pyproject.toml").is_file()
    installed = subprocess.run(
        [fresh, "-c", "import hf_ckpt; print(hf_ckpt.__file__)"], capture_output=True, text=True, check=True
    )
    assert str(fresh.parents[1]) in installed.stdout
