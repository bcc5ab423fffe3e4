"""Which known model a user may have meant: one of the same family and size, or none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

_SIZE = re.compile(r"[ae]?\d+(\.\d+)?[bm]|\d+x\d+b|tiny|mini|small|medium|large|turbo|nano|air|scout")
_VARIANTS = frozenset("instruct chat it pt hf base meta v0.1 v0.2 v0.3 2407 2501 1025 16e uncased cased".split())
"""Words of a name that change neither family nor size."""
_LEAST_LIKE = 0.8


def suggested(name: str, known: Iterable[str]) -> str:
    """Return ``' Did you mean "owner/model"?'`` for the known model of the same family and size, or an empty string.

    A name without its owner is completed.
    """
    near = _similar(name, list(known))
    return f' Did you mean "{near}"?' if near else ""


def completed(name: str, known: Iterable[str]) -> str | None:
    """Return the known id of a model whose name was given without its owner, in any case."""
    return next((each for each in known if _own_name(each) == name.lower()), None)


def _similar(name: str, known: list[str]) -> str | None:
    if "/" not in name and (exact := completed(name, known)) is not None:
        return exact
    own = _Name.of(name)
    scored = []
    for each in known:
        other = _Name.of(each)
        if other.sizes == own.sizes and _digits(other.family) == _digits(own.family):
            like = difflib.SequenceMatcher(None, own.family, other.family).ratio()
            scored.append((like, -len(own.variants ^ other.variants), each))
    best = max(scored, default=None)
    return best[2] if best is not None and best[0] >= _LEAST_LIKE else None


def _own_name(hub_id: str) -> str:
    return hub_id.rpartition("/")[2].lower()


def _digits(family: str) -> list[str]:
    return re.findall(r"\d+", family)


@dataclass(frozen=True)
class _Name:
    """The words of a model's name."""

    sizes: frozenset[str]
    variants: frozenset[str]
    family: str  # With its version.

    @classmethod
    def of(cls, name: str) -> _Name:
        words = re.split(r"[-_\s]+", _own_name(name))
        sizes = frozenset(word for word in words if _SIZE.fullmatch(word))
        if not sizes:
            # As in bert-base; next to a number of parameters it says that nothing was tuned.
            sizes = frozenset(words) & {"base"}
        variants = frozenset(words) & _VARIANTS - sizes
        return cls(sizes, variants, "-".join(word for word in words if word not in sizes | variants))
