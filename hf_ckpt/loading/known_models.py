"""The shapes of models that people fine-tune, for where the hub cannot be reached or a model is gated.

Each file of `known_models/` says by which ids a model is known, where its shape was read, how many parameters others
count and where, and its config: `model_type`, and what differs from transformers' defaults.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("known_models")


def documents() -> list[dict[str, Any]]:
    """Return what every file says."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]


@functools.cache
def known_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of every known config, by id on the hub."""
    return {hub_id: document["config"] for document in documents() for hub_id in document["ids"]}
