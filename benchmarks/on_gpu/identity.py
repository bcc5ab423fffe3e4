"""What must be the same for figures to be compared: code, versions, device."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import commit, versions

ROOT = Path(__file__).parents[2]
_PREDICTING = ("hf_ckpt/**/*.py", "hf_ckpt/**/*.json", "benchmarks/**/*.py")
_CODE = ("hf_ckpt/**/*.py", "hf_ckpt/**/*.json", "benchmarks/**/*.py", "recipes/*.yaml", "tests/*.py", "tests/gpu/*.py")


def identity_of(device: str, *, is_small: bool) -> dict[str, Any]:
    """Return code, versions and device as JSON types.

    Args:
        device: its name.
        is_small: whether everything is run as small twins.
    """
    return {
        "code": digest_of_code(),
        "predicting_code": digest_of_code(_PREDICTING),
        "commit": commit(),
        # Builds of one version differ in what comes behind the plus, and in nothing that is measured here.
        "versions": {name: version and version.partition("+")[0] for name, version in versions().items()},
        "device": device,
        "is_small": is_small,
    }


def digest_of_code(patterns: Sequence[str] = _CODE, root: Path = ROOT) -> str:
    """Return a digest of what is run: the same sources give the same, also in a copy without git.

    Args:
        patterns: of the files.
        root: of a checkout.
    """
    digest = hashlib.sha256()
    found = (path for pattern in patterns for path in root.glob(pattern))
    for path in sorted(found):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


_MOST_COMMITS = 100


def commit_with(digest: str) -> str | None:
    """Return the newest commit of this checkout whose code has a digest; None where none of the last hundred has it.

    Args:
        digest: of `digest_of_code`.
    """
    listed = subprocess.run(
        ["git", "rev-list", f"-n{_MOST_COMMITS}", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    for one in listed.stdout.split():
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", one], cwd=ROOT, capture_output=True, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
            if digest_of_code(root=Path(folder)) == digest:
                return one
    return None


def gpu_name() -> str | None:
    """Return the name of the first GPU, as its driver has it; None without one. Leaves CUDA alone."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = done.stdout.strip().splitlines()
    return names[0].strip() if done.returncode == 0 and names else None


def differences(found: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return, a line each, in what two identities differ; the commit is named by the code.

    Args:
        found: of a file.
        here: of this process.
    """
    lines = []
    if found.get("code") != here["code"]:
        lines.append(f"code {found.get('code')} ({_short(found)}), here {here['code']} ({_short(here)})")
    if found.get("device") != here["device"]:
        lines.append(f"device {found.get('device')}, here {here['device']}")
    if found.get("is_small") != here["is_small"]:
        lines.append(f"{_size(found)}, here {_size(here)}")
    theirs = found.get("versions", {})
    lines += [
        f"{name} {theirs.get(name)}, here {version}"
        for name, version in here["versions"].items()
        if theirs.get(name) != version
    ]
    return lines


def _short(identity: dict[str, Any]) -> str:
    return f"commit {(identity.get('commit') or 'unknown')[:7]}"


def _size(identity: dict[str, Any]) -> str:
    return "small twins" if identity.get("is_small") else "full size"
