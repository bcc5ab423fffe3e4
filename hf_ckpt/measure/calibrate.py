"""Measures in a few seconds what the machine's own device does: rates of products and copies, and the cost of a launch.

The result takes the place of the device table in predictions of time. What the host needs for the rest, as for outputs
that a selective mode keeps, follows from the cost of a launch: it is a difference of two forwards that hardly differ,
which a busy host hides within a few seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ckpt.measure.profile import Clock
from hf_ckpt.simulation.devices import Device, this_device
from hf_ckpt.simulation.op_costs import FREE, operator_cost
from hf_ckpt.upstream.torch import TorchDispatchMode

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NUM_MEASUREMENTS = 8
# The share of the time for warming up: allocations, loading of kernels, and clocks that rise.
_WARM_UP = 0.25
_NUM_ROWS = 5


def calibrate(*, seconds: float = 4.0) -> Device:
    """Measure the current CUDA device, or the CPU where there is none, for about `seconds` in all.

    Returns it with measured rates in place of the table's; its efficiencies are 1.
    """
    device = this_device()
    torch_device = torch.device("cuda" if device.is_cuda else "cpu")
    share = seconds / _NUM_MEASUREMENTS
    rates, kernel_seconds = _matmul_rates(torch_device, share)
    bandwidth = _bandwidth(torch_device, share)
    attention = _attention_rate(torch_device, share) / rates["bfloat16"] if device.is_cuda else None
    launch, backward_launch = _launch_seconds(torch_device, share)
    return replace(
        device.beside_host(launch, backward_launch),
        matmul_flops=rates,
        memory_bandwidth=bandwidth,
        host_link=_host_link(torch_device, share) if device.is_cuda else bandwidth,
        source=f"measured with torch {torch.__version__} ({torch.get_num_threads()} threads)",
        matmul_efficiency=1.0,
        bandwidth_efficiency=1.0,
        link_efficiency=1.0,
        attention_efficiency=attention,
        kernel_seconds=kernel_seconds,
    )


def _matmul_rates(torch_device: torch.device, seconds: float) -> tuple[dict[str, float], float]:
    """Return the rate of large products by dtype, and the time that a bfloat16 product takes besides its work."""
    rates, overhead = {}, 0.0
    for name, dtype in _DTYPES.items():
        # Large enough to fill the device; a CPU takes far longer, most of all without instructions for such products.
        sizes = (4096, 8192) if torch_device.type == "cuda" else (512, 256)
        size = sizes[dtype is not torch.float32]
        large = _product_seconds(torch_device, dtype, size, seconds)
        flops = 2.0 * size**3
        rates[name] = flops / large
        if name == "bfloat16" and torch_device.type == "cuda":
            # Two sizes separate what grows with the work from what does not.
            small = _product_seconds(torch_device, dtype, size // 4, seconds)
            overhead = max(0.0, (small - large / 64) / (1 - 1 / 64))
            rates[name] = flops / max(large - overhead, large / 2)
    return rates, overhead


def _product_seconds(torch_device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    # Random numbers: products of zeros draw less power and run faster.
    a, b = (torch.randn(size, size, device=torch_device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return seconds_of_run(lambda: torch.mm(a, b, out=out), seconds, torch_device)


def _attention_rate(torch_device: torch.device, seconds: float) -> float:
    """Return the FLOPs per second of causal attention, forward and backward, by torch's fused kernel."""
    shape = (1, 32, 2048, 128)
    query, key, value = (
        torch.randn(shape, device=torch_device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn(shape, device=torch_device, dtype=torch.bfloat16)

    def run() -> None:
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    # Seven products, half of each left out.
    return 7 * shape[1] * shape[2] ** 2 * shape[3] / seconds_of_run(run, seconds, torch_device)


def _bandwidth(torch_device: torch.device, seconds: float) -> float:
    """Return bytes per second of copies within memory, read and written."""
    num_bytes = 2**30 if torch_device.type == "cuda" else 2**26
    source = torch.ones(num_bytes // 4, device=torch_device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of_run(lambda: target.copy_(source), seconds, torch_device)


def _host_link(torch_device: torch.device, seconds: float) -> float:
    """Return bytes per second between pinned memory and the device: the slower of the two ways."""
    num_bytes = 2**28
    host = torch.ones(num_bytes // 4, pin_memory=True)
    device = host.to(torch_device)
    slower = max(
        seconds_of_run(lambda: device.copy_(host, non_blocking=True), seconds / 2, torch_device),
        seconds_of_run(lambda: host.copy_(device, non_blocking=True), seconds / 2, torch_device),
    )
    return num_bytes / slower


def _launch_seconds(torch_device: torch.device, seconds: float) -> tuple[float, float]:
    """Return what the host needs for an operator, forward and backward, measured on a model with nothing to compute."""
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        vocab_size=16,
        use_cache=False,
    )
    with torch_device:
        model = LlamaForCausalLM(config)
        ids = torch.zeros(1, 4, dtype=torch.long)

    def forward() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    def step() -> None:
        forward().backward()  # type: ignore[no-untyped-call]

    counter = _Counter()
    with counter:
        loss = forward()
    num_forward = counter.num_operators
    with counter:
        loss.backward()  # type: ignore[no-untyped-call]
    alone, both = (seconds_of_run(run, seconds / 2, torch_device) for run in (forward, step))
    return alone / num_forward, max(both - alone, 0.1 * both) / (counter.num_operators - num_forward)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that are not free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operators = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.num_operators += operator_cost(function, args, kwargs or {}, output) is not FREE
        return output


def seconds_of_run(run: Callable[[], object], seconds: float, torch_device: torch.device) -> float:
    """Return the time of one run, many issued in a row: the median of a few rows that take `seconds` in all."""
    return statistics.median(rows_of_run(run, seconds, torch_device))


def rows_of_run(run: Callable[[], object], seconds: float, torch_device: torch.device) -> list[float]:
    """Return the time of one run in each of a few rows of many runs, which take `seconds` in all."""
    clock = Clock(torch_device)
    clock.synchronize()
    run()
    num_warm, start = 0, time.perf_counter()
    while not num_warm or time.perf_counter() - start < _WARM_UP * seconds:
        run()
        clock.synchronize()
        num_warm += 1
    once = (time.perf_counter() - start) / num_warm
    num_runs = max(1, int((1 - _WARM_UP) * seconds / once / _NUM_ROWS))
    rows = []
    for _ in range(_NUM_ROWS):
        start = time.perf_counter()
        for _ in range(num_runs):
            run()
        clock.synchronize()
        rows.append((time.perf_counter() - start) / num_runs)
    return rows
