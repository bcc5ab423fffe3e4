"""Tensors that ranks share (`DTensor`), as tensor parallelism makes them: what of them a simulated rank holds.

An operator on one becomes operators on this rank's part, which is what is followed. Nothing is sent: operators of
collectives on fake tensors return fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_ckpt.upstream.torch import (
    FINDS_SHAPES,
    AsyncCollectiveTensor,
    disable_current_modes,
    local_tensor,
    shape_finder,
)


def is_shared(types: Iterable[type]) -> bool:
    """Whether an operator got a shared tensor, or one that is still being sent."""
    return any(map(_is_shared, types))


@cache
def _is_shared(kind: type) -> bool:
    return issubclass(kind, DTensor | AsyncCollectiveTensor)


def has_shared(model: nn.Module) -> bool:
    """Whether ranks share a parameter of a model as it is."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def like(tensor: DTensor, make: Callable[[Tensor], Tensor]) -> DTensor:
    """Return a tensor that is shared in the same way, whose memory is what `make` returns for that of `tensor`."""
    # A part may be a view of what was loaded, all of which it keeps.
    local = local_tensor(tensor).detach()
    held = make(torch.empty(local_bytes(tensor) // local.itemsize, dtype=local.dtype, device="meta"))
    return DTensor.from_local(
        held.as_strided(local.shape, local.stride(), local.storage_offset()),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local_bytes(tensor: DTensor) -> int:
    """Return the bytes of memory that this rank's part lies in."""
    return local_tensor(tensor).untyped_storage().nbytes()


@contextmanager
def shapes_found_apart() -> Iterator[None]:
    """Let torch find the shapes of whole tensors without the modes of a simulation."""
    # It runs operators on fake tensors for that, once for each, which are none of the step.
    propagator, name = shape_finder(DTensor), FINDS_SHAPES
    found = dict(vars(propagator))
    setattr(propagator, name, partial(_apart, getattr(propagator, name)))
    try:
        yield
    finally:
        delattr(propagator, name)
        # One simulation may be inside another.
        vars(propagator).update({name: found[name]} if name in found else {})


def _apart(find: Callable[[Any], Any], schema: Any) -> Any:
    with disable_current_modes():
        return find(schema)
