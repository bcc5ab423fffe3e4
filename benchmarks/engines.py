"""Training under DDP and FSDP2 with each kind of plan: peak memory, step time and the losses, in one run.

A LoRA fine-tune of a 7B model and a full fine-tune of a 1B model, with AdamW. Every plan starts from the same weights
and sees the same batches, on kernels that repeat themselves bit by bit, so that the losses must be those without a
plan. Whether they would be by themselves, a second run without a plan tells.

    python benchmarks/engines.py --case llama_7b --lora --engine fsdp2 --device cuda
    torchrun --nproc-per-node 2 benchmarks/engines.py --case llama_tiny --engine ddp
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
import hf_ckpt
from benchmarks.cases import LLAMAS, Llama, build_llama
from benchmarks.journal import NO_FIGURES, Entry, FileJournal, Journal
from benchmarks.repeatable import repeatable_kernels
from benchmarks.result_files import carry_out
from benchmarks.runner import RESULTS, WrongInputError, add_case, add_device, add_out, main
from benchmarks.step_costs import Bench, synchronize

NONE, NONE_AGAIN = "none", "none_again"
POLICIES = {name: name for name in (NONE, "full", "attention", "ffn")} | {NONE_AGAIN: NONE}
"""By the key of the entry. The last one is what differs by itself."""
LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
        device: `cpu` or `cuda`.
        case: of `LLAMAS`.
        engine: `ddp` or `fsdp2`.
        has_lora: train adapters; all weights if not.
        num_steps: of each policy.
        num_warmup: of them, that are not timed.
    """

    device: str
    case: str = "llama_tiny"
    engine: str = "fsdp2"
    has_lora: bool = False
    num_steps: int = 20
    num_warmup: int = 3

    @property
    def name(self) -> str:
        """What tells it from others: the start of its entries' keys."""
        return f"{self.case}_{'lora' if self.has_lora else 'full'}_{self.engine}"


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the group that a launcher has made; without one make a group of this process alone.

    Such a group needs no network, and a rented machine may have none: NCCL is told to take the interface that is
    always there, unless the environment names one.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            store = dist.FileStore(str(Path(folder) / "store"), 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def sharded(model: nn.Module, device: str) -> nn.Module:
    """Make each decoder layer, and the rest, a unit of FSDP2."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    layers = next(module for name, module in model.named_modules() if name.endswith("model.layers"))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    return model


def prepared(case: Llama, options: Options) -> nn.Module:
    """Build the model, with adapters if asked for, and put the engine around it."""
    model, _ = build_llama(case, options.device)
    if options.has_lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear")).to(model.dtype)
    if options.engine == "fsdp2":
        return sharded(model, options.device)
    return DistributedDataParallel(model)


def batches(case: Llama, options: Options) -> list[dict[str, Tensor]]:
    """Return the batches of this rank, [B, S] each."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(case.vocabulary, (options.num_steps, case.batch, case.tokens), generator=generator)
    return [{"input_ids": batch, "labels": batch} for batch in ids.to(options.device)]


def trainable(model: nn.Module) -> list[Tensor]:
    """Return what is trained, as this rank holds it."""
    weights = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]


def train(model: nn.Module, data: list[dict[str, Tensor]], device: str) -> tuple[list[float], list[float]]:
    """Train one epoch; return the loss and the seconds of each step."""
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=LEARNING_RATE, foreach=True
    )
    torch.manual_seed(dist.get_rank())
    losses, seconds = [], []
    for batch in data:
        synchronize(device)
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    return losses, seconds


Built = tuple[nn.Module, list[dict[str, Tensor]], list[Tensor]]
"""A model in its engine, with batches and the weights that every policy starts from."""


def built(options: Options) -> Built:
    """Build what all policies take turns on."""
    case = LLAMAS[options.case]
    model = prepared(case, options).train()
    return model, batches(case, options), [weight.cpu().clone() for weight in trainable(model)]


def train_under(bench: Bench[Built], policy: str, options: Options) -> Entry:
    """Train under a policy, from the weights that every policy starts from."""
    model, data, start = bench.built
    for weight, value in zip(trainable(model), start, strict=True):
        weight.copy_(value)
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with hf_ckpt.apply(model, policy):
            losses, seconds = train(model, data, options.device)
    except BaseException:
        # Who knows what a step that broke off has left of the engine: the next policy gets a new one.
        bench.drop()
        raise
    return over_ranks(losses, seconds, options)


def over_ranks(losses: list[float], seconds: list[float], options: Options) -> Entry:
    """Return rank 0's losses, and of time and memory the largest value over ranks."""
    # The first steps pay for compiled kernels, allocations and the optimizer's state.
    kept = seconds[options.num_warmup :]
    mine = [1e3 * statistics.median(kept), 1e3 * max(kept)]
    if options.device == "cuda":
        mine.append(torch.cuda.max_memory_allocated() / 2**30)
    figures = torch.tensor(mine, dtype=torch.float64, device=options.device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    names = ("step_time_ms_median", "step_time_ms_max", "peak_gib")
    return dict(zip(names, figures.tolist(), strict=False)) | {"losses": losses}


# --- Entries and the result. ---


def collect(journal: Journal, options: Options) -> None:
    """Train under every policy, each from the same weights, in the process group that is there.

    Args:
        journal: keeps `<case>_<method>_<engine>/<policy>`. With several processes each has one of its own, without
            entries: all make all of them.
        options: what.

    Raises:
        OutOfTimeError: the journal's time is over.
        DeviceFaultError: the device does not answer any more.
    """
    bench = Bench(partial(built, options))
    # Operators may fail that do not repeat themselves: only so does fused attention.
    with repeatable_kernels(warn_only=False):
        for name, policy in POLICIES.items():
            journal.entry(f"{options.name}/{name}", partial(train_under, bench, policy, options))


def assemble(journal: Journal, options: Options, world_size: int = 1) -> dict[str, Any]:
    """Return the result of the entries that are there.

    Args:
        journal: with them.
        options: those of `collect`.
        world_size: number of processes.
    """
    entries = {name: journal.entries.get(f"{options.name}/{name}") for name in POLICIES}
    none = entries[NONE] or {}
    measured = {name: _compared(entry, none) for name, entry in entries.items() if entry is not None}
    again = measured.get(NONE_AGAIN, {})
    return {
        "case": options.case,
        "engine": options.engine,
        "lora": options.has_lora,
        "device": options.device,
        "steps": options.num_steps,
        "warmup": options.num_warmup,
        "world_size": world_size,
        "is_repeatable": again.get("has_the_losses_without_a_plan"),
        "policies": measured,
    }


def _compared(entry: Entry, none: Entry) -> dict[str, Any]:
    figures = {key: figure for key, figure in entry.items() if key != "took_s"}
    if "losses" in entry and "losses" in none:
        figures["has_the_losses_without_a_plan"] = entry["losses"] == none["losses"]
        figures["step_time_ratio"] = entry["step_time_ms_median"] / none["step_time_ms_median"]
        if "peak_gib" in entry:
            figures["peak_ratio"] = entry["peak_gib"] / none["peak_gib"]
    return figures


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_case(parser, LLAMAS, "llama_tiny")
    parser.add_argument("--engine", choices=("ddp", "fsdp2"), default="fsdp2")
    parser.add_argument("--lora", action="store_true")
    add_device(parser)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    add_out(parser)


def run(asked: Namespace) -> None:
    """Measure and write one JSON."""
    if asked.warmup >= asked.steps:
        raise WrongInputError("--warmup must be less than --steps")
    options = Options(
        device=asked.device,
        case=asked.case,
        engine=asked.engine,
        has_lora=asked.lora,
        num_steps=asked.steps,
        num_warmup=asked.warmup,
    )
    with process_group(options.device):
        out = asked.out or RESULTS / f"engines_{options.name}_{options.device}_{dist.get_world_size()}.json"
        result = _carried_out(out, options)
    if result is not None:
        print(_table(result), f"written to {out}", sep="\n")


def _carried_out(out: Path, options: Options) -> dict[str, Any] | None:
    """Measure, and write the result; return it on rank 0."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return carry_out(out, partial(collect, options=options), partial(assemble, options=options))
    # Of several processes none may leave out what another one makes.
    journal, result = FileJournal(), None
    collect(journal, options)
    if dist.get_rank() == 0:
        result = carry_out(out, lambda kept: None, lambda kept: assemble(journal, options, world_size))
    dist.barrier()
    return result


def _table(result: dict[str, Any]) -> str:
    lines = []
    for policy, figures in result["policies"].items():
        if "step_time_ratio" not in figures:
            lines.append(f"{policy:<10} {next((figures[key] for key in NO_FIGURES if key in figures), '')}")
            continue
        peak = f", peak {figures['peak_gib']:.2f} GiB" if "peak_gib" in figures else ""
        same = "the losses without a plan" if figures["has_the_losses_without_a_plan"] else "OTHER LOSSES"
        lines.append(f"{policy:<10} step x {figures['step_time_ratio']:.2f}{peak}, {same}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(__name__))
