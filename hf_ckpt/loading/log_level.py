"""How much a logger says, for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Set the level of a logger while this is entered."""
    logger = logging.getLogger(name)
    found = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(found)
