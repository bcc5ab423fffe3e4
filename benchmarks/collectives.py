"""Forward passes and collectives of one training step under FSDP1 and FSDP2, with and without each kind of plan.

Counted on two processes, the same on every machine; times are not measured.

    torchrun --nproc-per-node 2 benchmarks/collectives.py
"""

from __future__ import annotations

import functools
import os
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
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
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

sys.path.insert(0, str(Path(__file__).parents[1]))
import hf_ckpt
from benchmarks.cases import LLAMAS, build_llama
from benchmarks.result_files import write_result
from benchmarks.runner import RESULTS, add_case, add_out, main

POLICIES: dict[str, tuple[object, dict[str, Any]]] = {
    "none": ("none", {}),
    "full": ("full", {}),
    "attention": ("attention", {}),
    "ffn": ("ffn", {}),
    "full, every_n_layers=2": ("full", {"every_n_layers": 2}),
    "full, segment_size=2": ("full", {"segment_size": 2}),
    "full, segment_size=4": ("full", {"segment_size": 4}),
    "full, segment_size=2, nested": ("full", {"segment_size": 2, "nested": True}),
    "full on 0:2, ffn on 2:4": ([{"layers": "0:2", "mode": "full"}, {"layers": "2:4", "mode": "ffn"}], {}),
}


def seam(model: nn.Module, use_reentrant: bool) -> None:
    """Switch on transformers' own: the checkpoint lies inside the shard."""
    bare = model.module if isinstance(model, FullyShardedDataParallel) else model
    bare.activation_checkpointing_enable({"use_reentrant": use_reentrant})


def wrapper(model: nn.Module, impl: CheckpointImpl) -> None:
    """Put torch's CheckpointWrapper around each layer's shard, as tutorials have it."""
    apply_activation_checkpointing(
        model, functools.partial(checkpoint_wrapper, checkpoint_impl=impl), lambda module: is_layer(module, model)
    )


def is_layer(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module is what stands in the list of layers: FSDP1's wrapper, or the layer itself."""
    if isinstance(model, FullyShardedDataParallel):
        return isinstance(module, FullyShardedDataParallel) and isinstance(module.module, LlamaDecoderLayer)
    return isinstance(module, LlamaDecoderLayer)


OTHERS: dict[str, Callable[[nn.Module], None]] = {
    "transformers' own": functools.partial(seam, use_reentrant=False),
    "transformers' own, reentrant": functools.partial(seam, use_reentrant=True),
    "CheckpointWrapper around the shard": functools.partial(wrapper, impl=CheckpointImpl.NO_REENTRANT),
    "CheckpointWrapper around the shard, reentrant": functools.partial(wrapper, impl=CheckpointImpl.REENTRANT),
}


@dataclass(frozen=True)
class Counts:
    """What one step does on each rank.

    Args:
        attention_forwards: how often each layer's attention runs.
        ffn_forwards: how often each layer's ffn runs.
        all_gathers_forward: of sharded weights, in the forward.
        all_gathers_backward: the same in the backward.
        reduce_scatters: of gradients.
    """

    attention_forwards: list[int]
    ffn_forwards: list[int]
    all_gathers_forward: int
    all_gathers_backward: int
    reduce_scatters: int


def shard(model: LlamaForCausalLM, engine: str) -> nn.Module:
    """Shard a model in the units that accelerate makes of it: each decoder layer, and what is left."""
    if engine == "fsdp1":
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, backward_prefetch=None, device_id=device
        )
    for module in (*model.model.layers, model.get_input_embeddings()):
        fully_shard(module, reshard_after_forward=True)
    # Their forward ends where their backward begins.
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    fully_shard(model)
    return model


class Collectives(TorchDispatchMode):
    """Counts the collective operators that run, those of forward and those of backward apart."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, bool]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operator and run it."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen[func.name(), torch._C._current_graph_task_id() != -1] += 1
        return func(*args, **(kwargs or {}))

    def num(self, word: str, in_backward: bool) -> int:
        """Return how many operators with this word in their name have run."""
        return sum(times for (name, when), times in self.seen.items() if word in name and when == in_backward)


def count(model: nn.Module, inputs: dict[str, Tensor]) -> Counts:
    """Run one step and count."""
    forwards: dict[str, Counter[int]] = {"self_attn": Counter(), "mlp": Counter()}
    hooks = []
    for name, module in model.named_modules():
        part = name.rpartition(".")[2]
        if part in forwards:
            layer_idx = int(name.rpartition(".layers.")[2].partition(".")[0])
            # A child of the part: a part that is a region of its own is entered once, its children are entered twice.
            child = next(module.children())
            hooks.append(child.register_forward_pre_hook(functools.partial(_tally, forwards[part], layer_idx)))
    with Collectives() as collectives:
        model(**inputs).loss.backward()
    for hook in hooks:
        hook.remove()
    return Counts(
        *([counts[layer_idx] for layer_idx in sorted(counts)] for counts in forwards.values()),
        collectives.num("gather", in_backward=False),
        collectives.num("gather", in_backward=True),
        collectives.num("reduce_scatter", in_backward=True),
    )


def _tally(counts: Counter[int], layer_idx: int, module: nn.Module, args: Any) -> None:
    counts[layer_idx] += 1


def measure(case: str, engine: str, put_on: Callable[[nn.Module], object]) -> Counts:
    """Build, shard, put a plan or another's checkpointing on, and count the second step.

    In the first step FSDP sets itself up.
    """
    model, inputs = build_llama(LLAMAS[case], "cuda" if torch.cuda.is_available() else "cpu")
    model = shard(model, engine)
    put_on(model)
    count(model, inputs)
    return count(model, inputs)


def contenders() -> dict[str, Callable[[nn.Module], object]]:
    """Everything that is counted, by its name in the table: our plans, then others' ways."""
    plans = {
        name: functools.partial(hf_ckpt.apply, policy=policy, prove="off", **options)
        for name, (policy, options) in POLICIES.items()
    }
    return plans | OTHERS


def table(counts: dict[str, dict[str, Counts]]) -> str:
    """Format the counts of all engines as Markdown; all-gathers as those of forward plus those of backward."""
    engines = list(counts)
    heads = [f"{what}, {engine.upper()}" for what in ("all-gathers", "reduce-scatters") for engine in engines]
    lines = [_row("", "attention forwards", "ffn forwards", *heads), _row(*["---"] * (3 + len(heads)))]
    for name in counts[engines[0]]:
        rows = [counts[engine][name] for engine in engines]
        forwards = (_said_once(getattr(row, f"{part}_forwards") for row in rows) for part in ("attention", "ffn"))
        gathers = (f"{row.all_gathers_forward} + {row.all_gathers_backward}" for row in rows)
        lines.append(_row(name, *forwards, *gathers, *(str(row.reduce_scatters) for row in rows)))
    return "\n".join(lines)


def _said_once(forwards: Iterable[list[int]]) -> str:
    return " / ".join(dict.fromkeys(" ".join(map(str, layers)) for layers in forwards))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def report(counts: dict[str, dict[str, Counts]], case: str, out: Path) -> None:
    """Print the table and write the JSON."""
    rows = {engine: {name: asdict(row) for name, row in found.items()} for engine, found in counts.items()}
    print(table(counts))
    write_result(out, {"case": case, "num_processes": dist.get_world_size(), **rows})


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_case(parser, LLAMAS, "llama_tiny")
    add_out(parser, what=None)


def run(options: Namespace) -> None:
    """Count on all ranks; rank 0 writes one JSON and prints the table."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    counts = {
        engine: {name: measure(options.case, engine, put_on) for name, put_on in contenders().items()}
        for engine in ("fsdp1", "fsdp2")
    }
    if dist.get_rank() == 0:
        report(counts, options.case, options.out or RESULTS / f"collectives_{options.case}.json")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(__name__))
