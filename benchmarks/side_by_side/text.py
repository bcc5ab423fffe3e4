"""Results as the text of a JSON file that people can read, and whose differences they can."""

from __future__ import annotations

import json
import re
from typing import Any

_PAIR = re.compile(r"\[\s+([-+.\de]+),\s+([-+.\de]+)\s+\]")


def text_of(result: dict[str, Any]) -> str:
    """Return a result as JSON, each point of a timeline on one line.

    Args:
        result: with its environment.
    """
    return _PAIR.sub(r"[\1, \2]", json.dumps(result, indent=1)) + "\n"
