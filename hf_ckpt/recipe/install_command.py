"""What to type where a package is missing: it works where it is read, from a checkout too."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def install_command(*extras: str) -> str:
    """Return the command that installs this package with extras, from where it was installed."""
    names = f"[{','.join(sorted(extras))}]"
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f'pip install "{checkout}{names}"'
    found = _installed_from()
    address = found.get("url", "")
    if "vcs_info" in found:
        return f'pip install "hf_ckpt{names} @ {found["vcs_info"]["vcs"]}+{address}"'
    folder = Path(unquote(urlsplit(address).path))
    if address.startswith("file:") and (folder / "pyproject.toml").is_file():
        return f'pip install "{folder}{names}"'
    return f'pip install "hf_ckpt{names}"'


def _installed_from() -> dict[str, Any]:
    """Return where pip took the package from, which it notes where that is no index."""
    try:
        text = importlib.metadata.distribution("hf_ckpt").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    found: dict[str, Any] = json.loads(text) if text else {}
    return found
