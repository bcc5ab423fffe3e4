"""The file of plans and predictions that were made beforehand: where it lies, and what it says of itself.

Those for cards are committed, so that whoever has a card for an hour can begin. One that was made by other code or
versions is used all the same, and figures say so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.identity import ROOT
from benchmarks.on_gpu.setting import Prepared
from benchmarks.runner import WrongInputError

FOLDER = ROOT / "benchmarks" / "prepared"
SMALL = ROOT / "runs" / "prepared" / "small.json"
_BY_MINOR = ("torch", "transformers")
"""Packages whose versions a plan or a prediction may depend on, by the first two numbers."""


def path_of(card: str, *, is_small: bool) -> Path:
    """Return where what was prepared lies, unless another place is named.

    Args:
        card: in the words of the device table.
        is_small: whether it is for small twins.
    """
    return SMALL if is_small else FOLDER / f"{card}.json"


def path_for_another() -> Path | None:
    """Return what was prepared for whichever card; None where nothing was."""
    return next(iter(sorted(FOLDER.glob("*.json"))), None)


def read(path: Path, identity: dict[str, Any], card: str) -> Prepared:
    """Read what was prepared.

    Args:
        path: of the file.
        identity: of this run.
        card: the device's name in the words of the device table.

    Raises:
        WrongInputError: the file holds nothing that was prepared.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        facts, entries = document["facts"], document["entries"]
    except FileNotFoundError:
        raise WrongInputError(f"{path} does not exist. Make it with --prepare, or leave --prepared out.") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise WrongInputError(f"{path} holds no plans and predictions: make it with --prepare.") from None
    return Prepared(facts, entries, tuple(differences(facts, identity | {"device": card})))


def facts_of(identity: dict[str, Any]) -> dict[str, Any]:
    """Return what plans and predictions depend on: the code that makes them, and versions by minor.

    Args:
        identity: of `identity.identity_of`.
    """
    versions = {name: _minor(identity["versions"].get(name)) for name in _BY_MINOR}
    return {key: identity[key] for key in ("predicting_code", "device", "is_small")} | {"versions": versions}


def differences(facts: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """Return, a line each, in what a file of plans was made for something else than runs here.

    Args:
        facts: of the file.
        identity: of this process.
    """
    here = facts_of(identity)
    lines = []
    if facts.get("predicting_code") != here["predicting_code"]:
        lines.append("other code")
    if facts.get("device") != here["device"]:
        lines.append(f"device {facts.get('device')}, here {here['device']}")
    if facts.get("is_small") != here["is_small"]:
        lines.append(f"{'small twins' if facts.get('is_small') else 'full size'}, here the other")
    theirs = facts.get("versions", {})
    return lines + [
        f"{name} {_minor(theirs.get(name))}, here {version}"
        for name, version in here["versions"].items()
        if _minor(theirs.get(name)) != version
    ]


def _minor(version: str | None) -> str | None:
    return None if version is None else ".".join(version.split(".")[:2])
