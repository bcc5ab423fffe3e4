"""Does reentrant checkpointing hang under FSDP? Two processes on gloo train two steps in each way to combine them.

    torchrun --standalone --nproc-per-node 2 benchmarks/claims/reentrant_fsdp.py

Prints one line of JSON when a way is done: a way without a line hung, or never began.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.cases import LLAMAS, build_llama
from benchmarks.collectives import seam, shard, wrapper
from benchmarks.runner import main
from benchmarks.step_costs import step

ENGINES = ("fsdp1", "fsdp2")


def _nothing(model: nn.Module) -> None:
    """Leave a model as it is."""


def _wrap_layers(model: nn.Module) -> None:
    reentrant = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    apply_activation_checkpointing(model, reentrant, lambda module: isinstance(module, LlamaDecoderLayer))


WAYS: dict[str, tuple[Callable[[nn.Module], None], Callable[[nn.Module], None]]] = {
    "none": (_nothing, _nothing),
    "transformers_own": (_nothing, functools.partial(seam, use_reentrant=True)),
    "wrapper_around_the_shard": (_nothing, functools.partial(wrapper, impl=CheckpointImpl.REENTRANT)),
    "wrapper_inside_the_shard": (_wrap_layers, _nothing),
}
"""What is done to the model before and after it is sharded."""


def gradients(engine: str, way: str) -> list[Tensor]:
    """Train two steps and return this rank's part of each gradient."""
    before, after = WAYS[way]
    model, inputs = build_llama(LLAMAS["llama_tiny"], "cpu")
    before(model)
    sharded = shard(model, engine)
    after(sharded)
    for _ in range(2):
        step(sharded, inputs)
    return [_local(parameter.grad) for parameter in sharded.parameters() if parameter.grad is not None]


def _local(gradient: Any) -> Tensor:
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.clone()


def add_arguments(parser: ArgumentParser) -> None:
    """Add nothing: all ways are tried."""


def run(options: Namespace) -> None:
    """Go through all engines and ways; rank 0 prints."""
    dist.init_process_group("gloo")
    for engine in ENGINES:
        expected: list[Tensor] = []
        for way in WAYS:
            found = gradients(engine, way)
            expected = expected or found
            is_equal = torch.tensor(len(found) == len(expected) and all(map(torch.equal, found, expected)))
            dist.all_reduce(is_equal, dist.ReduceOp.MIN)
            if dist.get_rank() == 0:
                line = {"engine": engine, "way": way, "is_equal": bool(is_equal), "num_gradients": len(found)}
                print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(__name__))
