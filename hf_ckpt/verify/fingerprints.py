"""Bitwise equality of things too many to keep: tensors, generator states and small values as short digests."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_DIGEST_BYTES = 8


def of_tensor(tensor: Tensor) -> str:
    """Return a digest of a tensor's shape, dtype and bits. Of a sharded tensor, that of this process's shard."""
    kept = local(tensor).detach()
    if kept.is_meta:
        return f"meta {kept.dtype} {tuple(kept.shape)}"
    head = f"{kept.dtype} {tuple(kept.shape)} ".encode()
    return hashlib.blake2b(head + _bytes(kept), digest_size=_DIGEST_BYTES).hexdigest()


def of_values(tensor: Tensor) -> str:
    """Return a digest of a whole tensor's values, whatever its dtype; shards are gathered, on all processes at once."""
    full_tensor = getattr(tensor, "full_tensor", None)
    whole = tensor if full_tensor is None else full_tensor()
    return of_tensor(whole.detach().float() if whole.is_floating_point() else whole)


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor, any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _bytes(tensor: Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    flat = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()


def of_random_state() -> dict[str, str]:
    """Return digests of the states of all random number generators that training may draw from."""
    states = {"torch": of_tensor(torch.get_rng_state()), "python": _of_object(random.getstate())}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = _of_object(numpy.random.get_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Only this process's device: the others' belong to other processes.
        states["cuda"] = of_tensor(torch.cuda.get_rng_state())
    return states


def _of_object(value: object) -> str:
    return hashlib.blake2b(pickle.dumps(value), digest_size=_DIGEST_BYTES).hexdigest()


def tensors_in(value: Any, depth: int = 3) -> Iterable[Tensor]:
    """Yield the tensors of an argument or an output, looking into tuples, lists and dicts (a ModelOutput is one)."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item, depth - 1)
