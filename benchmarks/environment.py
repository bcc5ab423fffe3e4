"""What a result must say about where it was measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")


def describe() -> dict[str, Any]:
    """Return command, versions, commit and hardware as JSON types."""
    return {
        "command": _command(),
        "commit": commit(),
        "is_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": versions(),
        "hardware": _hardware(),
    }


def commit() -> str:
    """Return the commit that is checked out; empty in a copy without git."""
    return _git("rev-parse", "HEAD")


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that a step goes through."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _command() -> str:
    """Return the command as it was typed in the repository, but for where the result goes and for the interpreter's."""
    # Of a module that is run with -m, sys.argv holds a path.
    words = sys.orig_argv[1:]
    while words and words[0] in ("-W", "-u", "-X"):
        words = words[1 if words[0] == "-u" else 2 :]
    if "--out" in words:
        place = words.index("--out")
        words = words[:place] + words[place + 2 :]
    return " ".join(["python", *(word.removeprefix(f"{_ROOT}{os.sep}") for word in words)])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _hardware() -> dict[str, Any]:
    hardware: dict[str, Any] = {"machine": platform.machine(), "num_threads": torch.get_num_threads()}
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        models = [line for line in cpu_info.read_text().splitlines() if line.startswith("model name")]
        hardware["cpu"] = models[0].partition(":")[2].strip() if models else "unknown"
        hardware["num_cpus"] = len(models)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        hardware["gpu"] = properties.name
        hardware["gpu_memory_gib"] = properties.total_memory / 2**30
        query = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader"]
        hardware["power_limit"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return hardware
