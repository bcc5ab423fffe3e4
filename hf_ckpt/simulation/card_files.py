"""A card as a JSON object, in units that people write: those of `cards.json`, and one of a user's own.

`{"title": "My card", "memory_gib": 23.6}` is enough for memory. With `bfloat16_tflops`, `float32_tflops` and
`bandwidth_gb_per_s` its times are predicted too. `cards.json` holds cards that many have, each with its source, by the
name that `--device` takes. Of its memory what is allocated by programs is known from their messages where the source
says so, and else taken from a card with the same kind of memory: it lacks as large a share of the size on the box.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_ckpt.errors import PolicyError, did_you_mean

CARDS = Path(__file__).with_name("cards.json")
LEFT_OUT = {
    "H100 96GB": "no data sheet was found; --device h100-nvl has 94 GB, and --device 96GiB predicts its memory",
    "RTX 5050": "no figure of its bandwidth was found in two places that agree",
}
"""Cards that people ask for and that have no figures here, with why."""

_RATES = ("bfloat16_tflops", "float32_tflops", "bandwidth_gb_per_s")
_NUMBERS = (
    *("memory_gib", *_RATES, "float16_tflops"),
    *("host_link_gb_per_s", "rank_link_gb_per_s", "multiprocessors", "blas_workspace_mib"),
)
_OTHERS = ("title", "capability", "shares_host_memory", "source")
_GIB = 2**30
# The balance of an A100's data sheet for each GiB that it has: what orders the plans of a card whose rates are unknown.
_UNKNOWN_RATES = {"bfloat16_tflops": 312.0, "float32_tflops": 19.5, "bandwidth_gb_per_s": 2039.0}
_UNKNOWN_LINK = 31.5
_DATA_CENTRE = 40 * _GIB


def memory_only(name: str, num_bytes: int) -> dict[str, Any]:
    """Return the fields of a `Device` of which only the memory is known."""
    text = f"{num_bytes / _GIB:.4g} GiB"
    return _fields(name, {"title": f"a GPU with {text}", "memory_gib": num_bytes / _GIB, "source": "the command"})


def apple(name: str, num_bytes: int) -> dict[str, Any]:
    """Return the fields of a `Device` that stands for an Apple chip with so much memory."""
    written = {
        "title": f"an Apple chip with {num_bytes / _GIB:.4g} GiB",
        "memory_gib": num_bytes / _GIB,
        "shares_host_memory": True,
        "source": "the command",
    }
    return _fields(name, written) | {"is_cuda": False, "capability": None}


def read_cards(path: Path = CARDS) -> dict[str, dict[str, Any]]:
    """Return the fields of the devices of a file like `cards.json`, by name."""
    return {name: _fields(name, card) for name, card in json.loads(path.read_text(encoding="utf-8")).items()}


def read_card(path: Path) -> dict[str, Any]:
    """Return the fields of a `Device` that a JSON file describes.

    Raises:
        PolicyError: names the file, the key and what is wrong with it.
    """
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"--device {path} cannot be read: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise PolicyError(f"--device {path} is not valid JSON: {error}. Mend the file.") from error
    _check(path, card)
    return _fields(path.stem, {"title": path.stem, "source": str(path)} | card)


def _check(path: Path, card: object) -> None:
    if not isinstance(card, Mapping):
        raise PolicyError(f'--device {path} holds no object. Write {{"title": "My card", "memory_gib": 23.6}}.')
    for key, value in card.items():
        if key not in (*_NUMBERS, *_OTHERS):
            known = (*_NUMBERS, *_OTHERS)
            raise PolicyError(
                f"--device {path}: a card has no {key}. Its keys are {', '.join(known)}.{did_you_mean(key, known)}"
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in _NUMBERS and not (is_number and 0 < value < 1e9):
            raise PolicyError(f"--device {path}: {key} is {json.dumps(value)}. Write a number above 0.")
    if "memory_gib" not in card:
        raise PolicyError(f"--device {path} does not say memory_gib, what programs can allocate. Add it.")
    if (given := [key for key in _RATES if key in card]) and len(given) < len(_RATES):
        missing = ", ".join(key for key in _RATES if key not in card)
        raise PolicyError(
            f"--device {path} says {', '.join(given)} and not {missing}. Times need all three: add what is missing, or "
            "leave all out for memory alone."
        )
    if "capability" in card and not _is_capability(card["capability"]):
        written = json.dumps(card["capability"])
        raise PolicyError(f'--device {path}: capability is {written}. Write CUDA\'s, such as "8.9", or leave it out.')


def _is_capability(value: object) -> bool:
    return isinstance(value, str) and len(parts := value.split(".")) == 2 and all(map(str.isdecimal, parts))


def _fields(name: str, card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Device`."""
    memory = int(card["memory_gib"] * _GIB)
    rates = card if all(key in card for key in _RATES) else _UNKNOWN_RATES
    half = 1e12 * rates["bfloat16_tflops"]
    capability = card.get("capability")
    if capability is None and rates is _UNKNOWN_RATES:
        # Of a card of which nothing is known: the older generation keeps more, and large cards have large contexts.
        capability = "8.0" if memory >= _DATA_CENTRE else "8.6"
    host_link = 1e9 * card.get("host_link_gb_per_s", _UNKNOWN_LINK)
    return {
        "name": name,
        "title": card["title"],
        "memory_bytes": memory,
        "matmul_flops": {
            "bfloat16": half,
            "float16": 1e12 * card.get("float16_tflops", rates["bfloat16_tflops"]),
            "float32": 1e12 * rates["float32_tflops"],
        },
        "memory_bandwidth": 1e9 * rates["bandwidth_gb_per_s"],
        "host_link": host_link,
        "rank_link": 1e9 * card["rank_link_gb_per_s"] if "rank_link_gb_per_s" in card else host_link,
        "source": card["source"],
        "capability": None if capability is None else tuple(map(int, capability.split("."))),
        "num_multiprocessors": int(card.get("multiprocessors", 0)),
        "cublas_workspace": 2**20 * int(card["blas_workspace_mib"]) if "blas_workspace_mib" in card else None,
        "is_timed": rates is card,
        "shares_host_memory": bool(card.get("shares_host_memory", False)),
    }
