"""Training under DDP and FSDP2 with each kind of plan: peak memory, step time and the losses, in one run.

A LoRA fine-tune of a 7B model and a full fine-tune of a 1B model, with AdamW. Every plan starts from the same weights
and sees the same batches, so that the losses must be those without a plan.

    torchrun --nproc-per-node 1 benchmarks/engines.py --case llama_7b --lora --engine fsdp2 --device cuda
    torchrun --nproc-per-node 2 benchmarks/engines.py --case llama_tiny --engine ddp
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
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

import hf_ckpt

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.cases import CASES, Case, build
from benchmarks.environment import describe

RESULTS = Path(__file__).parent / "results"
POLICIES = ("none", "full", "attention", "ffn")
LEARNING_RATE = 1e-4


def sharded(model: nn.Module, device: str) -> nn.Module:
    """Make each decoder layer, and the rest, a unit of FSDP2."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    layers = next(module for name, module in model.named_modules() if name.endswith("model.layers"))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    return model


def prepared(case: Case, options: argparse.Namespace) -> nn.Module:
    """Build the model, with adapters if asked for, and put the engine around it."""
    model, _ = build(case, options.device)
    if options.lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear")).to(model.dtype)
    if options.engine == "fsdp2":
        return sharded(model, options.device)
    return DistributedDataParallel(model)


def batches(case: Case, options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Return the batches of this rank, [B, S] each."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(case.vocabulary, (options.steps, case.batch, case.tokens), generator=generator)
    return [{"input_ids": batch, "labels": batch} for batch in ids.to(options.device)]


def trainable(model: nn.Module) -> list[Tensor]:
    """Return what is trained, as this rank holds it."""
    weights = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


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


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train under every policy, each from the same weights."""
    case = CASES[options.case]
    model = prepared(case, options).train()
    data = batches(case, options)
    start = [weight.cpu().clone() for weight in trainable(model)]
    measured: dict[str, dict[str, Any]] = {}
    for policy in POLICIES:
        for weight, value in zip(trainable(model), start, strict=True):
            weight.copy_(value)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with hf_ckpt.apply(model, policy):
            losses, seconds = train(model, data, options.device)
        measured[policy] = over_ranks(losses, seconds, options)
        if dist.get_rank() == 0:
            print(f"{policy}: {measured[policy]}", file=sys.stderr, flush=True)
    return measured


def over_ranks(losses: list[float], seconds: list[float], options: argparse.Namespace) -> dict[str, Any]:
    """Return rank 0's losses, and of time and memory the largest value over ranks."""
    # The first steps pay for compiled kernels, allocations and the optimizer's state.
    kept = seconds[options.warmup :]
    mine = [1e3 * statistics.median(kept), 1e3 * max(kept)]
    if options.device == "cuda":
        mine.append(torch.cuda.max_memory_allocated() / 2**30)
    figures = torch.tensor(mine, dtype=torch.float64, device=options.device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    names = ("step_time_ms_median", "step_time_ms_max", "peak_gib")
    return dict(zip(names, figures.tolist(), strict=False)) | {"losses": losses}


def main() -> None:
    """Measure and write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, default="llama_tiny")
    parser.add_argument("--engine", choices=("ddp", "fsdp2"), default="fsdp2")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.warmup >= options.steps:
        parser.error("--warmup must be less than --steps")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    measured = measure(options)
    if dist.get_rank() == 0:
        write(options, measured)
    dist.barrier()
    dist.destroy_process_group()


def write(options: argparse.Namespace, measured: dict[str, dict[str, Any]]) -> None:
    """Write one JSON, and say what it holds."""
    none = measured["none"]
    for figures in measured.values():
        figures["has_the_losses_without_a_plan"] = figures["losses"] == none["losses"]
        figures["step_time_ratio"] = figures["step_time_ms_median"] / none["step_time_ms_median"]
        if "peak_gib" in figures:
            figures["peak_ratio"] = figures["peak_gib"] / none["peak_gib"]
    asked = {name: getattr(options, name) for name in ("case", "engine", "lora", "device", "steps", "warmup")}
    result = {"environment": describe(), **asked, "world_size": dist.get_world_size(), "policies": measured}
    kind = "lora" if options.lora else "full"
    name = f"engines_{options.case}_{kind}_{options.engine}_{options.device}_{dist.get_world_size()}.json"
    out = options.out or RESULTS / name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    for policy, figures in measured.items():
        peak = f", peak {figures['peak_gib']:.2f} GiB" if "peak_gib" in figures else ""
        same = "the losses without a plan" if figures["has_the_losses_without_a_plan"] else "OTHER LOSSES"
        print(f"{policy:<10} step x {figures['step_time_ratio']:.2f}{peak}, {same}")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
