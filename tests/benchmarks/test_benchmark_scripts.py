"""Every script under benchmarks/ starts where the package is not installed, from any folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep

pytest.importorskip("bitsandbytes")

ROOT = Path(__file__).parents[2]
# Started by another script, with arguments that are nobody else's business.
INTERNAL = {Path("benchmarks/on_gpu/stage.py"), Path("benchmarks/on_gpu/host_probe.py")}
SCRIPTS = sorted(
    {
        path.relative_to(ROOT)
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    - INTERNAL
)


def wrong(tmp_path: Path, starts: list[tuple[str, str]]) -> dict[str, str]:
    """Start scripts in a folder of their own; return what went wrong."""
    words = [sys.executable, str(ROOT / "tests" / "script_starts.py"), str(tmp_path)]
    done = subprocess.run(words, input=json.dumps(starts), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_every_script_starts_by_its_path_and_by_its_name(tmp_path: Path) -> None:
    assert len(SCRIPTS) >= 20
    early = tmp_path / "early.py"
    early.write_text("import hf_ckpt\n", encoding="utf-8")
    by_path = [("path", str(script)) for script in SCRIPTS]
    by_name = [("name", ".".join(script.with_suffix("").parts)) for script in SCRIPTS]
    # One that imports the package before its place is on the path shows that this would be found.
    found = wrong(tmp_path, [*by_path, *by_name, ("path", str(early))])
    assert "ModuleNotFoundError: No module named 'hf_ckpt'" in found.pop(f"path {early}")
    assert found == {}


def test_what_measures_on_a_gpu_imports_on_a_bare_machine() -> None:
    # benchmarks/README.md says what such a machine needs: these are not on the list.
    absent = ("datasets", "deepspeed", "liger_kernel", "matplotlib", "scipy", "tensorboard", "trl")
    measuring = ("measurements", "probe", "exactness", "host_probe", "sdpa_probe", "stage")
    names = [f"benchmarks.on_gpu.{name}" for name in measuring]
    names += [f"tests.gpu.{path.stem}" for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))]
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({absent}))\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
