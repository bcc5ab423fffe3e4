"""What offloading layer inputs costs: step time with and without it, under one plan; and whether any copy can go wrong.

Layers have the shape of Llama 2 7B in bfloat16; there are few of them and the vocabulary is small, so that the head
hides nothing. Each contender takes its steps in a row, because its buffers and its measured share live as long as it
is applied; the plan without offload comes first and last, and its two times tell how far the machine can be trusted.
Copies are checked on kernels that repeat themselves bit by bit, without which a changed gradient would say nothing.
On the CPU the same code runs on a tiny model: what is copied there is counted, and no time is measured.

    python benchmarks/offload.py --device cuda
    python benchmarks/offload.py --device cuda --tokens 8192 --layers 16 --policy selective
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import hf_ckpt
from benchmarks.cases import LLAMAS, Llama, build_llama
from benchmarks.host_limit import MOST_HOST_BYTES, capped
from benchmarks.journal import NO_FIGURES, Entry, Journal
from benchmarks.repeatable import ask_cublas, repeatable_kernels
from benchmarks.result_files import carry_out
from benchmarks.runner import RESULTS, add_device, add_out, main
from benchmarks.side_by_side.theirs.transformers_own import enable, put_back
from benchmarks.step_costs import Bench, step, timed
from hf_ckpt.policy.options import Offload
from hf_ckpt.regions.offload.cuda import CudaCopy, CudaDevice, CudaWire
from hf_ckpt.regions.offload.host_buffers import HostLink
from hf_ckpt.regions.offload.host_memory import HostLimits
from hf_ckpt.regions.offload.transfer import Wire
from hf_ckpt.structure.layers import find_layers

TOKENS = (2048, 4096, 8192, 16384)
SLEEP_CYCLES = 20_000_000
"""About 10 ms: longer than a layer of the models whose copies are checked."""
MEASURED_SHARE = capped(Offload(min_bytes=0))
"""Of layers, as many as can be copied while others compute."""
TO_HOST = replace(MEASURED_SHARE, fraction=1.0)
"""All layers."""
_RACED_LAYERS = 4
_RACED_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
        device: `cpu` or `cuda`.
        policy: with offload and without.
        tokens: lengths of the rows.
        num_layers: of the models that are timed.
        num_warmup: steps before the timed ones; the share is measured in the first three.
        num_steps: timed steps, and steps in which copies are checked.
    """

    device: str
    policy: str = "full"
    tokens: tuple[int, ...] = TOKENS
    num_layers: int = 8
    num_warmup: int = 4
    num_steps: int = 10


def case_of(device: str, tokens: int, num_layers: int) -> Llama:
    """Return layers of a 7B model on a GPU, tiny ones on the CPU."""
    if device == "cpu":
        return replace(LLAMAS["llama_tiny"], tokens=min(tokens, 64), layers=num_layers)
    return replace(LLAMAS["llama_7b"], tokens=tokens, layers=num_layers, vocabulary=1024)


def contenders(policy: str) -> dict[str, Callable[[LlamaForCausalLM], AbstractContextManager[Any]]]:
    """Return the plan without offload, with it (all layers, and as many as can be hidden), and transformers' own."""
    # What is compared are later steps than the one that is proven.
    applied = partial(hf_ckpt.apply, policy=policy, prove="off")
    return {
        "none": lambda model: nullcontext(),
        "plain": applied,
        "offload": partial(applied, offload=TO_HOST),
        "offload_measured": partial(applied, offload=MEASURED_SHARE),
        "transformers_offload": transformers_offload,
        "plain_again": applied,
    }


@contextmanager
def transformers_offload(model: LlamaForCausalLM) -> Iterator[None]:
    """Transformers' own full activation checkpointing with its own offload, which copies on the compute stream."""
    with put_back(model):
        enable(model, offload=True)
        model.disable_input_require_grads()
        yield


# --- Time. ---


Built = tuple[LlamaForCausalLM, dict[str, Tensor]]
"""A model, and what it is called with."""


def _one(bench: Bench[Built], name: str, options: Options) -> Entry:
    """Step one contender: its buffers and its measured share live as long as it is applied."""
    model, inputs = bench.built
    device, num_all = options.device, options.num_warmup + options.num_steps
    with contenders(options.policy)[name](model) as applied:
        losses = [step(model, inputs) for _ in range(options.num_warmup)]
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps = [timed(model, inputs, device) for _ in range(options.num_steps)]
        losses.extend(loss for loss, _ in steps)
        figures: dict[str, Any] = {
            "losses": sorted(set(losses)),
            "seconds": [seconds for _, seconds in steps],
        }
        if device == "cuda":
            figures["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        for offloader in getattr(applied, "offloaders", ()):
            stats = offloader.stats
            figures |= {
                "bytes_out_per_step": stats.bytes_out / num_all,
                "bytes_in_per_step": stats.bytes_in / num_all,
                "fraction": stats.fraction,
                "peak_host_gib": stats.peak_host_bytes / 2**30,
            }
    return figures


def link_rates(num_bytes: int = 2**28, repeats: int = 10) -> tuple[float, float]:
    """Return bytes per second out of the device and into it, with nothing else going on."""
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


class SlowCuda(CudaDevice):
    """CUDA with copies that begin late."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Let the stream sleep, then copy."""
        torch.cuda._sleep(SLEEP_CYCLES)
        super().copy(target, source)


def slow_link(device: torch.device) -> HostLink:
    """Return a link whose copies are late; on the CPU, where none can be, a plain one."""
    return HostLink(CudaWire(SlowCuda()) if device.type == "cuda" else Wire(), HostLimits(MOST_HOST_BYTES, trusts=True))


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


class Races:
    """A step on kernels that repeat themselves, and how many gradients of it change under what is done to its copies.

    Args:
        options: of the measurement.
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    @cached_property
    def _expected(self) -> tuple[LlamaForCausalLM, dict[str, Tensor], dict[str, Tensor]]:
        case = case_of(self._options.device, _RACED_TOKENS, _RACED_LAYERS)
        # Fused attention has a backward that does not repeat itself.
        model, inputs = build_llama(case, self._options.device, attn_implementation="eager")
        return model, inputs, gradients(model, inputs)

    def not_repeatable(self) -> Entry:
        """Count without a plan: where these change, nothing follows from the others."""
        with repeatable_kernels(warn_only=True):
            model, inputs, expected = self._expected
            steps = range(self._options.num_steps)
            num_changed = sum(_differing(expected, gradients(model, inputs)) for _ in steps)
            return {"num_changed": num_changed, "num_gradients": len(expected)}

    def with_late_copies(self) -> Entry:
        """Count with copies that are late, and memory that is used again at once."""
        with repeatable_kernels(warn_only=True):
            return {"num_changed": _raced(*self._expected, self._options)}

    def control_without_order(self) -> Entry:
        """Count where tensors are let go before their copy too: shows that the disturbance would be seen."""
        order = CudaCopy.wait_home_stream
        CudaCopy.wait_home_stream = lambda copy: None
        try:
            return self.with_late_copies()
        finally:
            CudaCopy.wait_home_stream = order


def _raced(model: LlamaForCausalLM, inputs: dict[str, Tensor], expected: dict[str, Tensor], options: Options) -> int:
    # Counted here, so that a copy that goes wrong is a number: the proof of the first step would end it with an error.
    with hf_ckpt.apply(model, options.policy, offload=TO_HOST, prove="off") as applied, disturbed(model):
        for offloader in applied.offloaders:
            offloader.use_link(slow_link(model.device))
        return sum(_differing(expected, gradients(model, inputs)) for _ in range(options.num_steps))


def _differing(expected: dict[str, Tensor], got: dict[str, Tensor]) -> int:
    return sum(not torch.equal(gradient, got[name]) for name, gradient in expected.items())


# --- Entries and the result. ---


def collect(journal: Journal, options: Options) -> None:
    """Check the copies, and measure every length.

    Args:
        journal: keeps `races/<part>`, `link`, and `tokens_<n>/<contender>`.
        options: what.

    Raises:
        OutOfTimeError: the journal's time is over.
        DeviceFaultError: the device does not answer any more.
    """
    ask_cublas()
    races = Races(options)
    for name in race_parts(options.device):
        journal.entry(f"races/{name}", getattr(races, name))
    del races
    if options.device == "cuda":
        journal.entry("link", lambda: dict(zip(("out", "in"), link_rates(), strict=True)))
    for tokens in options.tokens:
        case = case_of(options.device, tokens, options.num_layers)
        bench = Bench(partial(build_llama, case, options.device))
        for name in _names(options):
            journal.entry(_key(tokens, name), partial(_one, bench, name, options))


def race_parts(device: str) -> tuple[str, ...]:
    """Return what is checked of copies: on the CPU, where none is late, there is nothing to control."""
    return ("not_repeatable", "with_late_copies", *(["control_without_order"] if device == "cuda" else []))


def _names(options: Options) -> list[str]:
    # It has nothing to offload where there is no accelerator.
    has_own = options.device == "cuda"
    return [name for name in contenders(options.policy) if name != "transformers_offload" or has_own]


def _key(tokens: int, name: str) -> str:
    return f"tokens_{tokens}/{name}"


def assemble(journal: Journal, options: Options) -> dict[str, Any]:
    """Return the result of the entries that are there."""
    races = {name: journal.entries.get(f"races/{name}", {}) for name in race_parts(options.device)}
    return {
        "device": options.device,
        "policy": options.policy,
        "num_warmup": options.num_warmup,
        "num_steps": options.num_steps,
        "races": {"num_gradients": races["not_repeatable"].get("num_gradients"), "num_steps": options.num_steps}
        | {name: found.get("num_changed", _reason(found)) for name, found in races.items()},
        "lengths": [_length(journal, tokens, options) for tokens in options.tokens],
    }


def _reason(found: Entry) -> str:
    return next((f"{key}: {found[key]}" for key in NO_FIGURES if key in found), "not measured yet")


def _length(journal: Journal, tokens: int, options: Options) -> dict[str, Any]:
    entries = {name: journal.entries.get(_key(tokens, name)) for name in contenders(options.policy)}
    found = {name: _figures(entry, options.device) for name, entry in entries.items() if entry is not None}
    compared = _compared(found, journal.entries.get("link", {}))
    return {"tokens": tokens, "num_layers": options.num_layers, "contenders": found} | compared


def _figures(entry: Entry, device: str) -> dict[str, Any]:
    figures = {key: figure for key, figure in entry.items() if key not in ("took_s", "seconds", "peak_allocated_bytes")}
    if device == "cuda" and "seconds" in entry:
        milliseconds = [1e3 * second for second in entry["seconds"]]
        figures |= {
            "step_time_ms_median": statistics.median(milliseconds),
            "step_time_ms_min": min(milliseconds),
            "step_time_ms_max": max(milliseconds),
            "peak_allocated_gib": entry["peak_allocated_bytes"] / 2**30,
        }
    return figures


def _compared(found: dict[str, dict[str, Any]], link: Entry) -> dict[str, Any]:
    names = ("plain", "plain_again", "offload", "offload_measured", "transformers_offload")
    times = {name: found.get(name, {}).get("step_time_ms_median") for name in names}
    if times["plain"] is None or times["offload"] is None or "out" not in link:
        return {"step_time_ratio": None, "copy_time_ms": None, "hidden_share": None}
    offload = found["offload"]
    copying = 1e3 * (offload["bytes_out_per_step"] / link["out"] + offload["bytes_in_per_step"] / link["in"])
    base = statistics.mean(time for time in (times["plain"], times["plain_again"]) if time is not None)
    added = times["offload"] - base
    return {
        "step_time_ratio": times["offload"] / base,
        "step_time_ratios": {name: time and time / base for name, time in times.items()},
        "link_gb_per_s": {"out": link["out"] / 1e9, "in": link["in"] / 1e9},
        "copy_time_ms": copying,
        "hidden_share": 1 - max(0.0, added) / copying if copying else None,
    }


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_device(parser)
    parser.add_argument("--policy", choices=("full", "selective", "selective_attention"), default="full")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4, help="the share is measured in the first three")
    parser.add_argument("--steps", type=int, default=10)
    add_out(parser)


def run(asked: Namespace) -> None:
    """Measure and write one JSON."""
    options = Options(
        device=asked.device,
        policy=asked.policy,
        tokens=tuple(asked.tokens),
        num_layers=asked.layers,
        num_warmup=asked.warmup,
        num_steps=asked.steps,
    )
    out = asked.out or RESULTS / f"offload_{options.policy}_{options.device}.json"
    result = carry_out(out, partial(collect, options=options), partial(assemble, options=options))
    print("gradients changed by late copies:", result["races"]["with_late_copies"])
    for length in result["lengths"]:
        if length["step_time_ratio"] is not None:
            print(
                f"{length['tokens']:>6} tokens: step time x {length['step_time_ratio']:.3f}, "
                f"{length['hidden_share']:.0%} of {length['copy_time_ms']:.1f} ms of copies hidden"
            )
    print(f"written to {out}")


if __name__ == "__main__":
    sys.exit(main(__name__))
