"""What offloading layer inputs costs: step time beside the same plan without it, and whether any copy can go wrong.

Layers have the shape of Llama 2 7B in bfloat16; there are few of them and the vocabulary is small, so that the head
hides nothing. Each contender takes its steps in a row, because its buffers and its measured share live as long as it
is applied; the plan without offload comes first and last, and its two times tell how far the machine can be trusted.
On the CPU the same code runs on a tiny model: what is copied there is counted, and no time is measured.

    python benchmarks/offload.py --device cuda
    python benchmarks/offload.py --device cuda --tokens 8192 --layers 16 --policy selective
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import hf_ckpt
from hf_ckpt.layers import find_layers
from hf_ckpt.modifiers import Offload
from hf_ckpt.regions.offload.cuda import Cuda, CudaTrip, CudaWire
from hf_ckpt.regions.offload.host import HostLink
from hf_ckpt.regions.offload.limits import HostLimits
from hf_ckpt.regions.offload.plain import PlainWire

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.cases import CASES, Case, build, step
from benchmarks.environment import describe

RESULTS = Path(__file__).parent / "results"
TOKENS = (2048, 4096, 8192, 16384)
SLEEP_CYCLES = 20_000_000
"""About 10 ms: longer than a layer of the models whose copies are checked."""
TO_HOST = Offload(fraction=1.0, min_bytes=0)


def case_of(device: str, tokens: int, num_layers: int) -> Case:
    """Return layers of a 7B model on a GPU, tiny ones on the CPU."""
    if device == "cpu":
        return replace(CASES["llama_tiny"], tokens=min(tokens, 64), layers=num_layers)
    return replace(CASES["llama_7b"], tokens=tokens, layers=num_layers, vocabulary=1024)


def contenders(policy: str) -> dict[str, Callable[[LlamaForCausalLM], AbstractContextManager[Any]]]:
    """Return the plan without offload, with it (all layers, and as many as can be hidden), and transformers' own."""
    return {
        "none": lambda model: nullcontext(),
        "plain": lambda model: hf_ckpt.apply(model, policy),
        "offload": lambda model: hf_ckpt.apply(model, policy, offload=TO_HOST),
        "offload_measured": lambda model: hf_ckpt.apply(model, policy, offload=Offload(min_bytes=0)),
        "transformers_offload": transformers_offload,
        "plain_again": lambda model: hf_ckpt.apply(model, policy),
    }


@contextmanager
def transformers_offload(model: LlamaForCausalLM) -> Iterator[None]:
    """Transformers' own full activation checkpointing with its own offload, which copies on the compute stream."""
    model.activation_checkpointing_enable(offload=True)
    model.disable_input_require_grads()
    try:
        yield
    finally:
        model.activation_checkpointing_disable()


# --- Time. ---


def measure(device: str, tokens: int, num_layers: int, policy: str, num_warmup: int, num_steps: int) -> dict[str, Any]:
    """Step one contender after the other and compare them."""
    model, inputs = build(case_of(device, tokens, num_layers), device)
    found: dict[str, dict[str, Any]] = {}
    for name, contender in contenders(policy).items():
        if name == "transformers_offload" and (
            device == "cpu" or not hasattr(model, "activation_checkpointing_enable")
        ):
            # It has nothing to offload where there is no accelerator, and older versions have none.
            continue
        try:
            found[name] = _one(contender, model, inputs, device, num_warmup, num_steps)
        except torch.OutOfMemoryError:
            found[name] = {"out_of_memory": True}
        print(f"{tokens} tokens, {name}", file=sys.stderr, flush=True)
    return {"tokens": tokens, "num_layers": num_layers, "contenders": found} | _compared(found, device)


def _one(
    contender: Callable[[LlamaForCausalLM], AbstractContextManager[Any]],
    model: LlamaForCausalLM,
    inputs: dict[str, Tensor],
    device: str,
    num_warmup: int,
    num_steps: int,
) -> dict[str, Any]:
    """Step one contender: its buffers and its measured share live as long as it is applied."""
    with contender(model) as applied:
        losses = [step(model, inputs) for _ in range(num_warmup)]
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [_timed(model, inputs, device, losses) for _ in range(num_steps)]
        figures: dict[str, Any] = {"losses": sorted(set(losses))}
        if device == "cuda":
            figures |= {
                "step_time_ms_median": 1e3 * statistics.median(seconds),
                "step_time_ms_min": 1e3 * min(seconds),
                "step_time_ms_max": 1e3 * max(seconds),
                "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
        for offloader in getattr(applied, "offloaders", ()):
            stats = offloader.stats
            figures |= {
                "bytes_out_per_step": stats.bytes_out / (num_warmup + num_steps),
                "bytes_in_per_step": stats.bytes_in / (num_warmup + num_steps),
                "fraction": stats.fraction,
                "peak_host_gib": stats.peak_host_bytes / 2**30,
            }
    return figures


def _timed(model: nn.Module, inputs: dict[str, Tensor], device: str, losses: list[float]) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    # Reading the loss waits for the device.
    losses.append(step(model, inputs))
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _compared(found: dict[str, dict[str, Any]], device: str) -> dict[str, Any]:
    plain, offload = found.get("plain", {}), found.get("offload", {})
    if device == "cpu" or "step_time_ms_median" not in plain or "step_time_ms_median" not in offload:
        return {"step_time_ratio": None, "copy_time_ms": None, "hidden_share": None}
    out, back = link_rates()
    copying = 1e3 * (offload["bytes_out_per_step"] / out + offload["bytes_in_per_step"] / back)
    names = ("plain", "plain_again", "offload", "offload_measured", "transformers_offload")
    times = {name: found.get(name, {}).get("step_time_ms_median") for name in names}
    base = statistics.mean(time for time in (times["plain"], times["plain_again"]) if time is not None)
    added = offload["step_time_ms_median"] - base
    return {
        "step_time_ratio": offload["step_time_ms_median"] / base,
        "step_time_ratios": {name: time and time / base for name, time in times.items()},
        "link_gb_per_s": {"out": out / 1e9, "in": back / 1e9},
        "copy_time_ms": copying,
        "hidden_share": 1 - max(0.0, added) / copying if copying else None,
    }


def link_rates(num_bytes: int = 2**28, repeats: int = 10) -> tuple[float, float]:
    """Return bytes per second out of the device and into it, with nothing beside."""
    device, host = torch.empty(num_bytes, dtype=torch.uint8, device="cuda"), torch.empty(num_bytes, dtype=torch.uint8)
    host = host.pin_memory()
    rates = []
    for target, source in ((host, device), (device, host)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(repeats * num_bytes / (time.perf_counter() - start))
    return rates[0], rates[1]


# --- Races. ---


class SlowCuda(Cuda):
    """CUDA with copies that begin late."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Let the stream sleep, then copy."""
        torch.cuda._sleep(SLEEP_CYCLES)
        super().copy(target, source)


def slow_link(device: torch.device) -> HostLink:
    """Return a link whose copies are late; on the CPU, where none can be, a plain one."""
    return HostLink(CudaWire(SlowCuda()) if device.type == "cuda" else PlainWire(), HostLimits(None))


@contextmanager
def disturbed(model: nn.Module) -> Iterator[None]:
    """Write over memory of the size of each layer's output, right behind its forward and right before its backward.

    Whatever was freed too early is written over while its copy has not begun.
    """
    layers = [layer.module for stack in find_layers(model) for layer in stack.layers]
    hooks = [layer.register_forward_hook(_disturb) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _disturb(module: nn.Module, args: Any, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    _write_over(hidden)
    if hidden.requires_grad:
        hidden.register_hook(_write_over)


def _write_over(like: Tensor) -> None:
    garbage = [torch.full_like(like, float("nan")) for _ in range(4)]
    del garbage


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Step once and return the gradients."""
    step(model, inputs)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def races(device: str, policy: str, num_layers: int, num_steps: int) -> dict[str, Any]:
    """Count gradients that late copies and reused memory change; and again with the order of streams taken out."""
    model, inputs = build(case_of(device, 512, num_layers), device)
    expected = gradients(model, inputs)
    repeated = gradients(model, inputs)
    found = {"num_gradients": len(expected), "num_steps": num_steps, "not_repeatable": _differing(expected, repeated)}
    found["with_late_copies"] = _raced(model, inputs, policy, expected, num_steps)
    if device == "cuda":
        found["control_without_order"] = _without_order(model, inputs, policy, expected, num_steps)
    return found


def _without_order(*given: Any) -> int:
    """The same where tensors are let go before their copy: shows that the disturbance would be seen."""
    order = CudaTrip.order
    CudaTrip.order = lambda trip: None  # type: ignore[method-assign]
    try:
        return _raced(*given)
    finally:
        CudaTrip.order = order  # type: ignore[method-assign]


def _raced(
    model: LlamaForCausalLM, inputs: dict[str, Tensor], policy: str, expected: dict[str, Tensor], num_steps: int
) -> int:
    with hf_ckpt.apply(model, policy, offload=TO_HOST) as applied, disturbed(model):
        for offloader in applied.offloaders:
            offloader.use_link(slow_link(model.device))
        return sum(_differing(expected, gradients(model, inputs)) for _ in range(num_steps))


def _differing(expected: dict[str, Tensor], got: dict[str, Tensor]) -> int:
    return sum(not torch.equal(gradient, got[name]) for name, gradient in expected.items())


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every length, and check the copies."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    checked = races(options.device, options.policy, num_layers=4, num_steps=options.steps)
    torch.use_deterministic_algorithms(False)
    given = (options.layers, options.policy, options.warmup, options.steps)
    return {
        "device": options.device,
        "policy": options.policy,
        "num_warmup": options.warmup,
        "num_steps": options.steps,
        "races": checked,
        "lengths": [measure(options.device, tokens, *given) for tokens in options.tokens],
    }


def main() -> None:
    """Measure and write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--policy", choices=("full", "selective", "selective_attention"), default="full")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4, help="the share is measured in the first three")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {"environment": describe()} | run(options)
    out = options.out or RESULTS / f"offload_{options.policy}_{options.device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print("gradients changed by late copies:", result["races"]["with_late_copies"])
    for length in result["lengths"]:
        if length["step_time_ratio"] is not None:
            print(
                f"{length['tokens']:>6} tokens: step time x {length['step_time_ratio']:.3f}, "
                f"{length['hidden_share']:.0%} of {length['copy_time_ms']:.1f} ms of copies hidden"
            )
    print(f"written to {out}")


if __name__ == "__main__":
    main()
