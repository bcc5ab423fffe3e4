"""What kind of operator an overload is: a matrix product, an attention kernel, a routing decision, or something cheap.

Looks at names and schemas, never at data or devices. Operators of other libraries are known by name, so that none of
them has to be imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

Number = tuple[str, int]
"""The name of an operator, and how many times it had run before since the region began."""


class Role(StrEnum):
    """What an operator is for, as far as keeping its output goes."""

    PRODUCT = "product"
    """Multiplies matrices: dense, batched, grouped, quantized, or a convolution. Costly to run again."""
    ATTENTION = "attention"
    """A fused attention kernel: returns the output and what its backward needs (statistics, seeds)."""
    ROUTING = "routing"
    """Decides where tokens go. Always kept: falling otherwise the second time would be a wrong gradient."""
    CHEAP = "cheap"
    """Everything else: norms, activations, rotary embeddings, casts, dropout, copies."""


PRODUCTS = frozenset(
    """
    aten.mm aten.addmm aten.bmm aten.baddbmm aten.addbmm aten.mv aten.addmv aten.dot aten.linear aten.matmul
    aten._addmm_activation aten._grouped_mm aten._scaled_mm aten._scaled_mm_v2 aten._scaled_grouped_mm
    aten._scaled_grouped_mm_v2 aten._int_mm aten._weight_int4pack_mm aten._weight_int4pack_mm_for_cpu
    aten._weight_int4pack_mm_with_scales_and_zeros aten._weight_int8pack_mm aten._dyn_quant_matmul_4bit
    aten._sparse_semi_structured_mm aten._sparse_semi_structured_linear aten._cslt_sparse_mm aten._mixed_dtypes_linear
    aten.mkldnn_linear aten.convolution aten._convolution aten.convolution_overrideable aten.cudnn_convolution
    aten.cudnn_convolution_transpose aten.mkldnn_convolution aten.miopen_convolution aten.miopen_convolution_transpose
    aten.miopen_depthwise_convolution aten._conv_depthwise2d aten.conv_depthwise3d aten._slow_conv2d_forward
    aten.slow_conv3d_forward aten.slow_conv_dilated2d aten.slow_conv_dilated3d aten.slow_conv_transpose2d
    aten.slow_conv_transpose3d aten._nnpack_spatial_convolution aten.conv_tbc aten._mps_convolution
    aten._mps_convolution_transpose aten._trilinear mkl._mkl_linear mkldnn._linear_pointwise
    mkldnn._convolution_pointwise transformers.grouped_mm_fallback bitsandbytes.gemm_4bit bitsandbytes.gemv_4bit
    bitsandbytes.int8_linear_matmul bitsandbytes.int8_mixed_scaled_mm bitsandbytes.int8_scaled_mm
    """.split()
)
"""Operators that multiply matrices. Of a quantized weight the product is kept, never the weight made dense again."""

_ATTENTION = re.compile(
    r"aten\._scaled_dot_product_\w*attention(?!\w*backward)\w*"
    r"|aten\._(flash|efficient|cudnn)_attention_forward\w*"
    r"|aten\._triton_(scaled_dot|multi_head)_attention"
    r"|higher_order\.(flex_attention|flex_decoding)"
    # Kernels of other packages: `flash_attn._flash_attn_forward`, `flash_attn_3.fwd`, `xformers_flash.flash_fwd`.
    r"|(?!aten\.|prims\.|higher_order\.)(?=.*(flash|attn|attention|atten\b|sageattn))(?!.*(bwd|backward|combine|cache|quant|rotary|rope))"
    r"[\w.]*"
)

ROUTING = frozenset(
    """
    aten.topk aten.sort aten.argsort aten.argmax aten.argmin aten.kthvalue aten.multinomial aten.bernoulli
    aten.max aten.min aten.mode aten.median
    """.split()
)
"""Operators that choose. `max` and `min` only where they return indices beside values."""

_VIEWS_WITHOUT_A_WORD = frozenset({"aten._unsafe_view", "aten._reshape_alias", "aten.lift_fresh", "aten.alias"})
NARROW = 128
_HIGHER_ORDER = "higher_order."


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What the name and the schema of an overload tell. There is one for each (`kind_of`).

    Args:
        name: with its overload, as `aten.mm.default`.
        function: the overload, or the higher-order operator.
        packet: without, as `aten.mm`.
        role: see `Role`.
        written: places and names of the arguments that it writes to.
        returns_new: whether what it returns is new memory; only that can be kept.
        is_random: whether it may draw random numbers.
        dropout: places and names of arguments that tell the share of its dropout; it draws none where they are 0.
    """

    name: str
    packet: str
    role: Role
    function: Any = None
    written: tuple[tuple[int, str], ...] = ()
    returns_new: bool = True
    is_random: bool = False
    dropout: tuple[tuple[int, str], ...] = ()

    @property
    def is_higher_order(self) -> bool:
        """Whether it is run by Python, and not by torch's dispatcher."""
        return self.packet.startswith(_HIGHER_ORDER)

    def written_tensors(self, args: Any, kwargs: Any) -> Iterator[Tensor]:
        """Yield the tensors that a call writes to."""
        for index, name in self.written:
            yield from tensors_in(args[index] if index < len(args) else kwargs.get(name))

    def draws(self, args: Any, kwargs: Any) -> bool:
        """Whether a call draws random numbers."""
        if not self.is_random:
            return False
        shares = [args[index] if index < len(args) else kwargs.get(name) for index, name in self.dropout]
        return not shares or any(shares)


@cache
def kind_of(function: Any) -> Kind:
    """Return the kind of an overload, or of a higher-order operator.

    Args:
        function: what a dispatch mode is given, such as `torch.ops.aten.mm.default`.
    """
    schema = getattr(function, "_schema", None)
    if schema is None:
        name = f"{_HIGHER_ORDER}{function.name()}"
        return Kind(name, name, _role(name, 2), function)
    packet = schema.name.replace("::", ".")
    namespace = packet.partition(".")[0]
    arguments = [(index, argument) for index, argument in enumerate(schema.arguments)]
    written = tuple((index, argument.name) for index, argument in arguments if _is_written(schema, argument))
    is_alias = any(result.alias_info is not None for result in schema.returns) or _is_collective(schema)
    is_foreign = namespace not in ("aten", "prims", "prim")
    role = role_of(schema)
    return Kind(
        name=f"{packet}.{schema.overload_name or 'default'}",
        packet=packet,
        role=role,
        function=function,
        written=written,
        returns_new=not is_alias and packet not in _VIEWS_WITHOUT_A_WORD and _returns_tensors(schema),
        # Other libraries do not tag their operators; to bring back a state that nobody touched is harmless.
        is_random=torch.Tag.nondeterministic_seeded in function.tags or (is_foreign and role is Role.ATTENTION),
        dropout=tuple((index, argument.name) for index, argument in arguments if argument.name in _DROPOUT),
    )


def role_of(schema: Any) -> Role:
    """Return what the operator of a schema is for."""
    return _role(schema.name.replace("::", "."), len(schema.returns))


def _is_written(schema: Any, argument: Any) -> bool:
    return _is_collective(schema) or (argument.alias_info is not None and bool(argument.alias_info.is_write))


def _is_collective(schema: Any) -> bool:
    # Collectives write into what they are given, and their schemas do not say so.
    return bool(schema.name.startswith("c10d::") and schema.name.endswith("_"))


def _returns_tensors(schema: Any) -> bool:
    return any("Tensor" in str(result.type) for result in schema.returns)


_DROPOUT = frozenset({"dropout_p", "dropout", "p_dropout"})


def _role(packet: str, num_returns: int) -> Role:
    if packet in PRODUCTS:
        return Role.PRODUCT
    if packet in ROUTING and (num_returns > 1 or packet not in ("aten.max", "aten.min", "aten.median")):
        return Role.ROUTING
    return Role.ATTENTION if _ATTENTION.fullmatch(packet) else Role.CHEAP


def is_narrow(packet: str, args: Any) -> bool:
    """Whether a product is over so few terms that running it again costs no more than reading what it returns.

    So is the second product of an adapter: [B * S, rank] times [rank, out]. Its output is as large as that of the
    layer it belongs to, and its work is `rank / in` of that: kept, it would double what an adapted layer holds.
    """
    place = {"aten.mm": 1, "aten.addmm": 2}.get(packet)
    if place is None or len(args) <= place:
        return False
    inner, outer = args[place].shape
    return bool(inner * NARROW <= outer)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument or output of an operator, those in its lists and tuples as well."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, Tensor):
                yield item
            elif isinstance(item, list | tuple):
                yield from tensors_in(item)


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages that a tensor lies in; of a wrapper, such as a DTensor, those of the tensors inside."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:
        yield tensor.untyped_storage()
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        # A DTensor names its mesh among them.
        for inner in tensors_in([getattr(tensor, name) for name in flatten()[0]]):
            yield from storages_of(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
