"""The file of plans and predictions that were made beforehand: where it lies, and what it says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.identity import ROOT, differences
from benchmarks.on_gpu.setting import Prepared
from benchmarks.runner import WrongInputError

FOLDER = ROOT / "runs" / "prepared"


def path_of(card: str, *, is_small: bool) -> Path:
    """Return where what was prepared lies, unless another place is named.

    Args:
        card: in the words of the device table.
        is_small: whether it is for small twins.
    """
    return FOLDER / f"{'small' if is_small else card}.json"


def path_for_another() -> Path | None:
    """Return what was prepared last, for whichever card at full size; None where nothing was."""
    found = [path for path in FOLDER.glob("*.json") if path.stem != "small"]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


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
