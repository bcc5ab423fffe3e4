"""The versions that a result holds for."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("hf_ckpt", "torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed, by name."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
