"""Which kernel torch's attention really runs for what models ask of it, how fast, and whether it repeats itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.journal import Entry, sentence_of
from hf_ckpt.measure.calibrate import rows_of_run

_NUM_REPEATS = 3
_NUM_KERNELS = 12
"""So many names of kernels are kept; attention itself is one to three."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to ask for attention, in bfloat16.

    Args:
        head_dim: of a head.
        num_heads: of the queries.
        num_kv_heads: of keys and values.
        tokens: of the one row.
        grouping: how fewer heads of keys and values are asked for: `enable_gqa`, or `repeat_kv` as transformers does.
        mask: "" for `is_causal`, "bool" or "float" for a causal mask that is given, "none" for all to all.
        dropout: probability.
        is_deterministic: under `torch.use_deterministic_algorithms`.
    """

    head_dim: int = 128
    num_heads: int = 32
    num_kv_heads: int = 32
    tokens: int = 2048
    grouping: str = ""
    mask: str = ""
    dropout: float = 0.0
    is_deterministic: bool = False


CASES = {
    "causal_64": Case(head_dim=64),
    "causal_128": Case(),
    "causal_256": Case(head_dim=256, num_heads=16, num_kv_heads=16),
    "causal_128_8192": Case(tokens=8192),
    "grouped_enable_gqa": Case(num_kv_heads=8, grouping="enable_gqa"),
    "grouped_repeat_kv": Case(num_kv_heads=8, grouping="repeat_kv"),
    "mask_bool": Case(mask="bool"),
    "mask_float": Case(mask="float"),
    "mask_bool_enable_gqa": Case(num_kv_heads=8, grouping="enable_gqa", mask="bool"),
    "mask_bool_repeat_kv": Case(num_kv_heads=8, grouping="repeat_kv", mask="bool"),
    "all_to_all": Case(mask="none"),
    "dropout": Case(dropout=0.1),
    "deterministic": Case(is_deterministic=True),
    "deterministic_mask_bool": Case(mask="bool", is_deterministic=True),
}
"""By name. Llama 2 7B has heads of 128, its grouped successors four heads to one of keys and values."""


def small(case: Case) -> Case:
    """Return a case of the same kind that a CPU runs at once."""
    return replace(case, num_heads=4, num_kv_heads=min(case.num_kv_heads // 4, 4), tokens=case.tokens // 32)


def measure(case: Case, place: torch.device, seconds: float) -> Entry:
    """Run a case forward and backward, and say what ran.

    Args:
        case: of `CASES`.
        place: where.
        seconds: about how long to time forward, and forward with backward.
    """
    with _deterministic(case.is_deterministic):
        return _measured(case, place, seconds)


def _measured(case: Case, place: torch.device, seconds: float) -> Entry:
    torch.manual_seed(0)
    inputs = _inputs(case, place)
    forward = partial(_attention, case, *inputs, _mask(case, place))
    gradient = torch.randn_like(forward().detach())
    saved: dict[int, dict[str, Any]] = {}
    with _Operators() as forward_operators, _noted(saved, inputs):
        out = forward()
    before = _peak_from_here(place)
    with _Operators() as backward_operators:
        torch.autograd.grad(out, inputs, gradient)
    # Its gradients, and what the kernel works in.
    backward_peak = torch.cuda.max_memory_allocated() - before if place.type == "cuda" else None

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), inputs, gradient)

    return {
        "case": vars(case),
        "forward": forward_operators.names,
        "backward": backward_operators.names,
        "kernels": _kernels(forward, inputs, gradient, place),
        "forward_s": rows_of_run(forward, seconds, place),
        "step_s": rows_of_run(step, seconds, place),
        "forward_repeats": _repeats(lambda: (forward(),)),
        "backward_repeats": _repeats(step),
        "backward_peak_bytes": backward_peak,
        "gradient_bytes": sum(tensor.nbytes for tensor in inputs),
        "saved": list(saved.values()),
        "saved_bytes": sum(tensor["bytes"] for tensor in saved.values()),
    }


def _peak_from_here(place: torch.device) -> int:
    """Begin to watch the peak; return what is allocated now."""
    if place.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


# --- What is asked. ---


def _inputs(case: Case, place: torch.device) -> tuple[Tensor, ...]:
    """Return queries, keys and values [1, H, S, D], in memory as a model's projections leave them."""
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    shapes = [(1, case.tokens, num_heads, case.head_dim) for num_heads in heads]
    leaves = [torch.randn(shape, device=place, dtype=torch.bfloat16).transpose(1, 2) for shape in shapes]
    return tuple(leaf.requires_grad_() for leaf in leaves)


def _mask(case: Case, place: torch.device) -> Tensor | None:
    if case.mask not in ("bool", "float"):
        return None
    allowed = torch.ones(1, 1, case.tokens, case.tokens, dtype=torch.bool, device=place).tril()
    if case.mask == "bool":
        return allowed
    lowest = torch.finfo(torch.bfloat16).min
    return torch.zeros_like(allowed, dtype=torch.bfloat16).masked_fill(~allowed, lowest)


def _attention(case: Case, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    if case.grouping == "repeat_kv":
        key, value = (_repeated(states, case.num_heads) for states in (key, value))
    if case.dropout:
        # Each run draws the same numbers.
        torch.manual_seed(1)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=case.dropout,
        is_causal=not case.mask,
        enable_gqa=case.grouping == "enable_gqa",
    )


def _repeated(states: Tensor, num_heads: int) -> Tensor:
    """Repeat each head of keys or values [1, H, S, D] for the queries that share it."""
    batch, num_kv_heads, tokens, head_dim = states.shape
    repeated = states[:, :, None].expand(batch, num_kv_heads, num_heads // num_kv_heads, tokens, head_dim)
    return repeated.reshape(batch, num_heads, tokens, head_dim)


@contextmanager
def _deterministic(is_wanted: bool) -> Iterator[None]:
    was, warns_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if is_wanted:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns_only)


# --- What ran. ---


class _Operators(TorchDispatchMode):
    """Notes the names of operators, each once: the attention kernel's, or those that it falls apart into."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) not in self.names:
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def _noted(saved: dict[int, dict[str, Any]], inputs: tuple[Tensor, ...]) -> Iterator[None]:
    """Note each storage that is saved for backward, once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in inputs}

    def note(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if tensor.numel() and address not in saved:
            saved[address] = {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "bytes": tensor.untyped_storage().nbytes(),
                "is_input": address in own,
            }
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield


def _kernels(
    forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], gradient: Tensor, place: torch.device
) -> dict[str, Any]:
    """Return the names of the device's kernels, forward and backward, as the profiler has them."""
    if place.type != "cuda":
        return {"skipped": "a CPU has no kernels that the profiler names"}
    try:
        out = forward()
        return {
            "forward": _profiled(forward),
            "backward": _profiled(lambda: torch.autograd.grad(out, inputs, gradient)),
        }
    except RuntimeError as error:
        # A machine may forbid profiling; everything else is known without it.
        return {"failed": sentence_of(error)}


def _profiled(run: Callable[[], object]) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events() if event.device_type == DeviceType.CUDA]
    return [name[:160] for name in dict.fromkeys(names)][:_NUM_KERNELS]


def _repeats(run: Callable[[], tuple[Tensor, ...]]) -> bool:
    """Whether each run gives the same, to the bit."""
    first = [tensor.detach().clone() for tensor in run()]
    return all(
        torch.equal(one, other.detach()) for _ in range(_NUM_REPEATS) for one, other in zip(first, run(), strict=True)
    )
