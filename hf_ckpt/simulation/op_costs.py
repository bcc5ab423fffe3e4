"""What one dispatched operator costs: floating-point operations, bytes read and written, and seconds on a device.

Reads shapes, dtypes and schemas, never data, so that fake tensors serve as well as real ones. FLOPs are those of
`torch.utils.flop_counter.FlopCounterMode`: matrix products, attention and convolutions, two for each multiply-add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hf_ckpt.regions.selective.save_rules import OperatorRole
from hf_ckpt.regions.selective.save_rules import operator_kind as selective_kind_of
from hf_ckpt.simulation.attention_rates import AttentionKernel, share_of_rate
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.step_memory import Phase, Place
from hf_ckpt.simulation.tracker import is_without_memory
from hf_ckpt.upstream.torch import OperatorBase, schema_of

Formula = Callable[[Any, Any, Any], int]  # FLOPs of an operator's arguments, named arguments and output.


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """What one operator does."""

    num_flops: int  # As torch's `FlopCounterMode` counts them.
    num_bytes: int  # Read and written in the device's memory.
    dtype: str = ""  # Of its products, such as `bfloat16`; empty where it has none.
    num_effective_flops: int = 0  # Those really computed: a causal attention kernel leaves out half.
    is_attention: bool = False  # Whether it is a fused attention kernel, which runs at a rate of its own.
    is_cudnn: bool = False  # Whether that kernel is cuDNN's.
    product: tuple[int, int, int] = (0, 0, 0)
    """Matrices, and rows and columns of each, that a product computes; zeros where it is none."""


FREE = OperatorCost(0, 0)  # The cost of a view, or of allocating memory.


def operator_cost(function: Any, args: Any, kwargs: Any, output: Any) -> OperatorCost:
    """Return what a dispatched overload, such as `aten.mm.default`, costs with these arguments and output."""
    kind = _kind(function)
    if kind.is_free or any(map(is_without_memory, _tensors((output,)))):
        return FREE
    num_bytes = _traffic(kind, args, kwargs, output)
    if kind.formula is None:
        return OperatorCost(0, num_bytes)
    num_flops = kind.formula(args, kwargs, output)
    effective = num_flops // 2 if kind.causal >= 0 and _argument(kind.causal, "is_causal", args, kwargs) else num_flops
    # Reading `dtype` of a fake tensor is slow: only once, and only for products.
    first = next(_tensors(args), None)
    dtype = "" if first is None else str(first.dtype).removeprefix("torch.")
    product = kind.product_of(output)
    return OperatorCost(num_flops, num_bytes, dtype, effective, kind.is_attention, kind.is_cudnn, product)


def busy_seconds(cost: OperatorCost, device: Device) -> float:
    """Return the seconds that a device is busy with an operator that was issued long before.

    The longer of computing and of moving bytes (a roofline), plus what any kernel takes (`Device.kernel_seconds`).
    """
    if cost is FREE:
        return 0.0
    computing = 0.0
    if cost.num_effective_flops:
        share = device.matmul_efficiency * busy_share(cost.product, device.num_multiprocessors)
        if cost.is_attention:
            share = attention_efficiency(device, is_cudnn=cost.is_cudnn)
        # Eight-bit products run at least at the rate of float16; float64 is left to those who train with it.
        dtype = "float16" if "8" in cost.dtype else cost.dtype
        rate = device.matmul_flops.get(dtype, device.matmul_flops["float32"])
        computing = cost.num_effective_flops / (rate * share)
    moving = cost.num_bytes / (device.memory_bandwidth * device.bandwidth_efficiency)
    return device.kernel_seconds + max(computing, moving)


@lru_cache(maxsize=4096)
def role_of_operator(operator: str) -> OperatorRole:
    """Return an operator's role by its name, such as `aten.mm.default`."""
    function: Any = torch.ops
    for part in operator.split("."):
        function = getattr(function, part, None)
    return selective_kind_of(function).role if isinstance(function, OperatorBase) else OperatorRole.CHEAP


def is_kept_selectively(place: Place) -> bool:
    """Whether an operator of a forward is one whose output, or that of its module, a selective region keeps."""
    return place.phase is Phase.FORWARD and role_of_operator(place.operator) is not OperatorRole.CHEAP


def copy_seconds(num_bytes: int, device: Device, *, between_ranks: bool = False) -> float:
    """Return the seconds of copying bytes one way, between device and host or between a device and its peers."""
    link = device.rank_link if between_ranks else device.host_link
    return num_bytes / (link * device.link_efficiency) if link else 0.0


# Rows and columns, or columns and rows, of the blocks in which cuBLAS computes products, largest first.
_TILES = ((256, 128), (128, 128), (128, 64), (64, 64))


@lru_cache(maxsize=4096)
def busy_share(product: tuple[int, int, int], num_multiprocessors: int) -> float:
    """Return the share of the multiprocessors that are busy during a product, of `OperatorCost.product`.

    Each computes a tile at a time, so that the last round leaves some idle. Tiles are the largest of `_TILES` of which
    there is one for each multiprocessor. 1 where a side is smaller than a tile (the sum is split then) or where the
    number of multiprocessors is not known.
    """
    matrices, rows, columns = product
    if not num_multiprocessors or min(rows, columns) < _TILES[0][1]:
        return 1.0
    for sides in _TILES:
        counts = [matrices * -(-rows // high) * -(-columns // wide) for high, wide in (sides, sides[::-1])]
        rounds = [count / num_multiprocessors for count in counts if count >= num_multiprocessors]
        if rounds:
            return max(each / math.ceil(each) for each in rounds)
    return 1.0


def attention_efficiency(device: Device, *, is_cudnn: bool) -> float:
    """Return the share of the dense matrix rate that a fused attention kernel reaches, causal work left out.

    Where it was not measured: that of the kernel on cards like it. torch's own is FlashAttention-2.
    """
    if device.attention_efficiency is not None:
        return device.attention_efficiency
    if not device.is_cuda:
        return device.matmul_efficiency
    kernel = AttentionKernel.CUDNN if is_cudnn else device.attention_kernel or AttentionKernel.FLASH_2
    return share_of_rate(device.capability, kernel)


# --- What kind of operator it is. ---


@dataclass(frozen=True, slots=True)
class _OperatorKind:
    """What the schema of an overload says, found once."""

    is_free: bool = True  # Whether it moves no bytes.
    formula: Formula | None = None  # FLOPs of its arguments and output.
    causal: int = -1  # Index of its argument `is_causal`, or -1.
    is_attention: bool = False  # Whether it is a fused attention kernel.
    is_cudnn: bool = False  # Whether that kernel is cuDNN's.
    written: tuple[tuple[int, str], ...] = ()  # Indices and names of the arguments that it writes to.
    overwritten: bool = False  # Whether it writes them without reading them.
    returns_new: bool = True  # Whether what it returns is new memory.
    partly: tuple[int, int] | None = None  # Where it reads and writes a part only: see `_PARTLY`.
    is_batched: bool = False  # Whether its first dimension counts products, and its last two are those of each.
    is_product: bool = False  # Whether it multiplies matrices, and is no kernel of attention or convolution.

    def product_of(self, output: Any) -> tuple[int, int, int]:
        """Return `OperatorCost.product` of what it returned."""
        if not self.is_product or not isinstance(output, Tensor) or output.dim() < 2:
            return 0, 0, 0
        *outer, columns = output.shape
        matrices = int(outer[0]) if self.is_batched else 1
        return matrices, math.prod(map(int, outer)) // max(1, matrices), int(columns)


# `_unsafe_view` is a view whose schema does not say so.
_FREE_NAMES = frozenset(
    """_unsafe_view _reshape_alias lift lift_fresh empty empty_strided empty_like new_empty new_empty_strided resize_
    resize_as_ set_ _local_scalar_dense is_same_size sym_size sym_stride sym_numel sym_storage_offset record_stream
    is_pinned _has_compatible_shallow_copy_type""".split()
)
_FREE_NAMESPACES = frozenset({"prim", "profiler", "inductor"})
_OVERWRITING = frozenset(
    """copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ _foreach_copy_ _foreach_zero_""".split()
)
_ONLY_MADE = (0, 1)
# How often as many bytes are read or written as the arguments but the first have, and as the output has.
_PARTLY = {
    # They read as many rows of their first argument as they return, not all of it.
    **dict.fromkeys("embedding index index_select gather slice_copy select_copy nll_loss_forward".split(), (1, 2)),
    # They read only the shape of their arguments.
    **dict.fromkeys("nll_loss_backward new_zeros new_ones new_full".split(), _ONLY_MADE),
    # Indices and values are read, and as many rows of the first argument are read and written.
    **dict.fromkeys("index_put_ _index_put_impl_ index_add_ scatter_ scatter_add_ index_copy_".split(), (3, 0)),
}


@lru_cache(maxsize=4096)
def _kind(function: Any) -> _OperatorKind:
    schema = schema_of(function)
    if schema is None:
        # A higher-order operator has no schema. The operators inside of it are dispatched by themselves.
        return _OperatorKind()
    namespace, _, name = schema.name.partition("::")
    aliases = [result.alias_info for result in schema.returns if result.alias_info is not None]
    is_view = any(not alias.is_write for alias in aliases)
    if is_view or namespace in _FREE_NAMESPACES or name in _FREE_NAMES:
        return _OperatorKind()
    names = [argument.name for argument in schema.arguments]
    # Fused optimizers write to the gradients only to take off the scale of a gradient scaler.
    written = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
    )
    is_attention = name.startswith(("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_"))
    return _OperatorKind(
        is_free=False,
        formula=_formula(schema.name, function),
        causal=names.index("is_causal") if "is_causal" in names else -1,
        is_attention=is_attention,
        is_cudnn=is_attention and "cudnn" in name,
        written=written,
        overwritten=name in _OVERWRITING or name.endswith("out") or "out" in schema.overload_name.split("_"),
        returns_new=not aliases,
        partly=_PARTLY.get(name, _ONLY_MADE if name.endswith("_like") else None),
        is_batched="bmm" in name,
        is_product=not is_attention and "conv" not in name,
    )


def _argument(index: int, name: str, args: Any, kwargs: Any) -> Any:
    return args[index] if index < len(args) else kwargs.get(name)


# --- Bytes. ---


def _traffic(kind: _OperatorKind, args: Any, kwargs: Any, output: Any) -> int:
    """Return the bytes that are moved: all that is given is read once, all that is made or changed is written once."""
    if kind.partly is not None:
        per_given, per_made = kind.partly
        return per_given * _num_bytes(args[1:]) + per_made * _num_bytes((output,))
    num_bytes = _num_bytes(args) + _num_bytes(kwargs.values())
    if kind.returns_new:
        num_bytes += _num_bytes((output,))
    if not kind.overwritten:
        num_bytes += _num_bytes(_argument(index, name, args, kwargs) for index, name in kind.written)
    return num_bytes


def _num_bytes(values: Iterable[Any]) -> int:
    # An expanded tensor has more elements than memory.
    return sum(min(each.numel() * each.itemsize, each.untyped_storage().nbytes()) for each in _tensors(values))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


# --- FLOPs. ---


def _formula(name: str, function: Any) -> Formula | None:
    if (own := _FORMULAS.get(name)) is not None:
        return own
    counted = flop_registry.get(getattr(function, "overloadpacket", None))
    return None if counted is None else lambda args, kwargs, output: int(counted(*args, **kwargs, out_val=output))


def _mm(args: Any, kwargs: Any, output: Any) -> int:
    return 2 * int(args[0].numel()) * int(args[1].shape[-1])


def _addmm(args: Any, kwargs: Any, output: Any) -> int:
    return _mm(args[1:], kwargs, output)


def _mv(args: Any, kwargs: Any, output: Any) -> int:
    return 2 * int(args[0].numel())


def _linear(args: Any, kwargs: Any, output: Any) -> int:
    # The second matrix is [out, in], that of an 8-bit layer too.
    return 2 * int(args[0].numel()) * int(args[1].shape[0])


def _grouped_mm(args: Any, kwargs: Any, output: Any) -> int:
    # Each row, or each inner index, belongs to one group: all groups make up one product. Only where both sides have a
    # dimension of groups is each of them a product of its own.
    first, second = args[0], args[1]
    groups = first.shape[0] if first.dim() == 3 and second.dim() == 3 else 1
    return 2 * int(groups) * int(first.shape[-2]) * int(first.shape[-1]) * int(second.shape[-1])


def _product_4bit(args: Any, kwargs: Any, output: Any) -> int:
    # The packed weight's shape is an argument of its own: [out, in].
    return 2 * int(args[0].numel()) * int(_argument(2, "shapeB", args, kwargs)[0])


def _attention(args: Any, kwargs: Any, output: Any) -> int:
    return _attention_flops(args[0], args[1], args[2], 1, 1)


def _attention_backward(args: Any, kwargs: Any, output: Any) -> int:
    # Scores again, and the gradients of queries and keys from those of the scores: three products over the width of
    # keys. Gradients of the scores and of values: two over the width of values.
    return _attention_flops(args[1], args[2], args[3], 3, 2)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, num_key: int, num_value: int) -> int:
    batch, heads, rows, width = query.shape
    # Several query heads may share one of keys; each computes its own scores.
    return 2 * batch * heads * rows * key.shape[2] * (num_key * width + num_value * value.shape[3])


# The common ones, which torch computes by walking over trees of arguments, and those that it lacks.
_FORMULAS: dict[str, Formula] = {
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::addmm_": _addmm,
    "aten::bmm": _mm,
    "aten::baddbmm": _addmm,
    "aten::mv": _mv,
    "aten::addmv": lambda args, kwargs, output: _mv(args[1:], kwargs, output),
    "aten::dot": _mv,
    "aten::linear": _linear,
    "aten::_grouped_mm": _grouped_mm,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "bitsandbytes::gemm_4bit": _product_4bit,
    "bitsandbytes::int8_linear_matmul": _linear,
    "bitsandbytes::int8_scaled_mm": _linear,
}
