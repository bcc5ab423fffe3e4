"""A small Llama whose ffn runs in tiles, and the same whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from hf_ckpt import find_layers
from hf_ckpt.patch.tileable_modules import tiled_modules
from hf_ckpt.regions.tiling import Tiling, run_tiled
from tests import exactness, zoo

LENGTH = 16


def llama() -> zoo.Case:
    """Two layers, one of them behind the other: what tiles do to one they do to all."""
    return exactness.build("llama", num_layers=2)


@contextmanager
def tiled(model: nn.Module, tiles: int, *, recomputes: bool = True) -> Iterator[None]:
    """Run what is position-wise in tiles, without the rest of a plan."""
    modules = [
        layer.submodule(name) for stack in find_layers(model) for layer in stack.layers for name in tiled_modules(layer)
    ]
    for module in modules:
        module.forward = partial(run_tiled, Tiling(tiles, recomputes=recomputes), module, None)
    try:
        yield
    finally:
        for module in modules:
            del module.forward
