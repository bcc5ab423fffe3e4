"""What a layer keeps: kinds of operators, the rules that say of which ones the output is kept, and how names match.

Looks at names and schemas of operators, never at data or devices. Operators of other libraries are known by name, so
that none of them has to be imported. Knows no policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.errors import PolicyError, did_you_mean
from hf_ckpt.upstream.torch import WRAPPER_NAMES, schema_of

CallId = tuple[str, int]
"""The name of an operator, and how many times it had run before since the region began."""


class OperatorRole(StrEnum):
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
"""Operators that choose. `max` and `min` only where they return indices with the values."""

_UNDECLARED_VIEWS = frozenset(
    """
    aten._unsafe_view aten._reshape_alias aten.lift_fresh aten.alias
    aten.unsafe_split aten.unsafe_split_with_sizes aten.unsafe_chunk
    """.split()
)
NARROW = 128
"""Columns of the output for each term, from which on a product is narrow: see `is_narrow`."""
_HIGHER_ORDER = "higher_order."


@dataclass(frozen=True, slots=True, eq=False)
class OperatorKind:
    """What the name and the schema of an overload say. There is one for each (`operator_kind`)."""

    name: str
    """With its overload, as `aten.mm.default`."""
    packet: str
    """Without, as `aten.mm`."""
    role: OperatorRole
    function: Any = None
    """The overload, or the higher-order operator."""
    returns_new: bool = True
    """What it returns is new memory; only that can be kept."""
    is_random: bool = False
    """It may draw random numbers."""
    dropout: tuple[tuple[int, str], ...] = ()
    """Places and names of arguments that hold the share of its dropout; it draws nothing if they are 0."""

    @property
    def is_higher_order(self) -> bool:
        """Whether it is run by Python, and not by torch's dispatcher."""
        return self.packet.startswith(_HIGHER_ORDER)

    def draws(self, args: Any, kwargs: Any) -> bool:
        """Whether a call of an operator that may draw random numbers does."""
        shares = [args[index] if index < len(args) else kwargs.get(name) for index, name in self.dropout]
        return not shares or any(shares)


@cache
def operator_kind(function: Any) -> OperatorKind:
    """Return the kind of an overload (such as `torch.ops.aten.mm.default`), or of a higher-order operator."""
    schema = schema_of(function)
    if schema is None:
        name = f"{_HIGHER_ORDER}{function.name()}"
        return OperatorKind(name, name, _role(name, 2), function)
    packet = schema.name.replace("::", ".")
    namespace = packet.partition(".")[0]
    arguments = [(index, argument) for index, argument in enumerate(schema.arguments)]
    # Collectives write into what they are given, and their schemas do not say so.
    is_collective = schema.name.startswith("c10d::") and schema.name.endswith("_")
    is_alias = is_collective or any(result.alias_info is not None for result in schema.returns)
    is_foreign = namespace not in ("aten", "prims", "prim")
    role = role_of(schema)
    return OperatorKind(
        name=f"{packet}.{schema.overload_name or 'default'}",
        packet=packet,
        role=role,
        function=function,
        returns_new=not is_alias and packet not in _UNDECLARED_VIEWS and _returns_tensors(schema),
        # Other libraries do not tag their operators; to bring back a state that nobody touched is harmless. Their
        # products, of which a layer has many, draw nothing.
        is_random=torch.Tag.nondeterministic_seeded in function.tags
        or (is_foreign and role is not OperatorRole.PRODUCT),
        dropout=tuple((index, argument.name) for index, argument in arguments if argument.name in _DROPOUT),
    )


def role_of(schema: Any) -> OperatorRole:
    """Return what the operator of a schema is for."""
    return _role(schema.name.replace("::", "."), len(schema.returns))


def _returns_tensors(schema: Any) -> bool:
    return any("Tensor" in str(result.type) for result in schema.returns)


_DROPOUT = frozenset({"dropout_p", "dropout", "p_dropout"})


def _role(packet: str, num_returns: int) -> OperatorRole:
    if packet in PRODUCTS:
        return OperatorRole.PRODUCT
    if packet in ROUTING and (num_returns > 1 or packet not in ("aten.max", "aten.min", "aten.median")):
        return OperatorRole.ROUTING
    return OperatorRole.ATTENTION if _ATTENTION.fullmatch(packet) else OperatorRole.CHEAP


def is_narrow(packet: str, args: Any) -> bool:
    """Whether a product is over so few terms that running it again costs no more than reading what it returns.

    The second product of an adapter is: [B * S, rank] times [rank, out]. Its output is as large as that of the layer it
    belongs to, and its work is `rank / in` of that: kept, it would double what an adapted layer holds. So is what an
    adapter adds to a parameter, such as all experts of a layer: kept, it would be those experts once more.
    """
    if packet == "aten.baddbmm" and isinstance(args[0], nn.Parameter):
        return True
    place = PLACES_OF_WEIGHTS.get(packet)
    if place is None or len(args) <= place:
        return False
    inner, outer = args[place].shape
    return bool(inner * NARROW <= outer)


def fed_tensors(kind: OperatorKind, args: Any) -> list[Tensor]:
    """Return the tensors that an operator works on, without weights."""
    if kind.role is OperatorRole.PRODUCT and kind.packet not in _OF_TWO_INPUTS:
        return [rows_of(kind, args)]
    return [tensor for tensor in nested_tensors_in(args) if not isinstance(tensor, nn.Parameter)]


_OF_TWO_INPUTS = frozenset({"aten.bmm", "aten.baddbmm"})


def rows_of(kind: OperatorKind, args: Any) -> Tensor:
    """Return what a product multiplies with its weight."""
    rows: Tensor = args[1] if kind.packet in _ADDS_FIRST else args[0]
    return rows


_ADDS_FIRST = frozenset({"aten.addmm", "aten.baddbmm", "aten._addmm_activation", "aten.addbmm", "aten.addmv"})


def linear_weight(kind: OperatorKind, args: Any) -> int:
    """Return the address of a product's weight; 0 if it is not known."""
    place = PLACES_OF_WEIGHTS.get(kind.packet)
    return 0 if place is None or type(args[place]) not in (Tensor, nn.Parameter) else args[place].data_ptr()


PLACES_OF_WEIGHTS = {"aten.mm": 1, "aten.addmm": 2}


def nested_tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument or output of an operator, those in its lists and tuples as well."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, Tensor):
                yield item
            elif isinstance(item, list | tuple):
                yield from nested_tensors_in(item)


SELECTIVE = "selective"
SELECTIVE_ATTENTION = "selective_attention"
ATTENTION_OUTPUT = "attention_output"
"""In `save`: what `selective_attention` keeps, whichever kernel the device and the mask of a batch dispatch."""

_PREFIX = "torch.ops."
_KERNELS = ("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention")


@dataclass(frozen=True)
class SaveRules:
    """What is kept of a layer's forward; everything else is recomputed. Routing decisions are kept in any case.

    `preset` is `selective` (matrix products and attention) or `selective_attention` (attention only); empty if `names`
    say what is kept: operators (`aten.mm`, `aten.mm.default`, `mm`, `torch.ops.aten.mm`, `bitsandbytes.gemm_4bit`),
    `attention_output`, and globs of module paths below the layer (`self_attn.*`, `mlp.down_proj`). The outputs of an
    operator are kept wherever it runs; of a module those of the matrix products and attention kernels inside. So
    `self_attn` takes in the kernel, which runs in its own forward, and `self_attn.*` the projections alone.
    """

    preset: str = ""
    names: tuple[str, ...] = ()

    @staticmethod
    def of(mode: str, save: Sequence[str] = ()) -> SaveRules:
        """Return what a selective mode keeps: the user's list, or the mode's own choice if that is empty."""
        # One object for all layers that keep the same: compiled layers share a graph only then.
        return _only("", tuple(save)) if save else _only(str(mode), ())

    @property
    def required(self) -> tuple[str, ...]:
        """What has to occur."""
        return self.names or (self.preset,)

    @cached_property
    def attention(self) -> str:
        """Which of `required` stands for all ways to compute attention; empty if none does."""
        return next((name for name in (SELECTIVE_ATTENTION, ATTENTION_OUTPUT) if name in self.required), "")

    @property
    def globs(self) -> tuple[str, ...]:
        """The names that stand for modules."""
        return _globs(self)

    def for_operator(self, kind: OperatorKind, args: Any) -> tuple[str, ...]:
        """Return which of `required` keep the output of this call, wherever it runs; empty if none does."""
        is_kept = kind.role is OperatorRole.ATTENTION
        if self.names:
            named = _naming(self, kind.name, kind.packet)
            return (*named, ATTENTION_OUTPUT) if is_kept and ATTENTION_OUTPUT in self.names else named
        if self.preset == SELECTIVE:
            is_kept = is_kept or (kind.role is OperatorRole.PRODUCT and not is_narrow(kind.packet, args))
        return (self.preset,) if is_kept else ()

    def ignores(self, function: Any) -> bool:
        """Whether no output of an operator can be kept."""
        return not may_keep(self)[operator_kind(function)]

    def matching(self, layer: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
        """Yield the modules below a layer that globs match, each with those globs."""
        for path, module in _modules(layer):
            found = tuple(glob for glob in self.globs if fnmatchcase(path, glob))
            if found:
                yield module, found


@lru_cache(maxsize=256)
def _only(preset: str, names: tuple[str, ...]) -> SaveRules:
    return SaveRules(preset, names)


def is_kept_in_modules(kind: OperatorKind, args: Any) -> bool:
    """Whether an operator's output is kept where it runs in a module that was named."""
    return kind.role is OperatorRole.ATTENTION or (
        kind.role is OperatorRole.PRODUCT and not is_narrow(kind.packet, args)
    )


def check_save_rules(saves: SaveRules, *layers: nn.Module) -> None:
    """Refuse names that torch does not know and that match no module in any of the layers, all of one stack.

    Raises:
        PolicyError: names it, and the nearest name that there is.
    """
    paths = dict.fromkeys(path for layer in layers for path, _ in _modules(layer))
    for name in saves.names:
        if name == ATTENTION_OUTPUT:
            continue
        operators = _operators(name)
        if any(fnmatchcase(path, name) for path in paths):
            continue
        if not operators:
            near = did_you_mean(name.removeprefix(_PREFIX), [*paths, *sorted(PRODUCTS), *_KERNELS, ATTENTION_OUTPUT])
            raise PolicyError(
                f'save: "{name}" is no operator that torch knows, and no module of the layer matches it. Name an '
                "operator as torch dispatches it (aten.mm; of another library once that is imported), or a module "
                f"by its path below the layer, * for any characters ({_some(paths)}).{near}"
            )
        if not any(operator_kind(operator).returns_new for operator in operators):
            raise PolicyError(
                f'save: "{name}" makes no tensor of its own: it returns a view of its input or writes into it. Name '
                "the operator that made that input, such as aten.mm."
            )


def _some(paths: Sequence[str] | dict[str, None]) -> str:
    leaves = [path for path in paths if not any(other.startswith(path + ".") for other in paths)]
    return ", ".join(leaves[:8]) + (", ..." if len(leaves) > 8 else "")


def _modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for raw, module in layer.named_modules():
        # Engines and compilers put modules of their own around others, which a plan does not name.
        names = [name for name in raw.split(".") if name not in WRAPPER_NAMES]
        if names and names[0]:
            yield ".".join(names), module


@lru_cache(maxsize=256)
def is_by_modules(saves: SaveRules) -> bool:
    """Whether it does not matter by which operators a linear layer computes its product."""
    return not any(_operators(name) for name in saves.names)


@lru_cache(maxsize=256)
def may_keep(saves: SaveRules) -> Mapping[OperatorKind, bool]:
    """Return of which operators the output can be kept at all, somewhere in the layer."""
    return _MayKeep(saves)


class _MayKeep(dict[OperatorKind, bool]):
    """See `may_keep`; found out on first use."""

    def __init__(self, saves: SaveRules) -> None:
        super().__init__()
        self._saves = saves

    def __missing__(self, kind: OperatorKind) -> bool:
        is_named = bool(self._saves.names) and bool(_naming(self._saves, kind.name, kind.packet))
        self[kind] = kind.returns_new and (is_named or kind.role is not OperatorRole.CHEAP)
        return self[kind]


@lru_cache(maxsize=256)
def _globs(saves: SaveRules) -> tuple[str, ...]:
    # A word may be both, as `conv1d`: then it stands for both.
    return tuple(
        name for name in saves.names if name != ATTENTION_OUTPUT and (not _is_certain(name) or not _operators(name))
    )


def _is_certain(name: str) -> bool:
    return name.startswith(("aten.", "aten::", _PREFIX, "prims.")) or "::" in name


@lru_cache(maxsize=4096)
def _naming(saves: SaveRules, name: str, packet: str) -> tuple[str, ...]:
    return tuple(given for given in saves.names if {name, packet} & _full_names(given))


@lru_cache(maxsize=1024)
def _full_names(name: str) -> frozenset[str]:
    """Return what a name can mean, as `OperatorKind` has it: `aten.mm` for `mm`."""
    plain = name.removeprefix(_PREFIX).replace("::", ".")
    full = {plain, f"aten.{plain}"}
    return frozenset(full | {f"higher_order.{plain}"} if "." not in plain else full)


def _operators(name: str) -> list[Any]:
    """Return the overloads that a name means; none if torch knows no such operator."""
    found: list[Any] = []
    for full in _full_names(name):
        parts = full.split(".")
        if not all(part.isidentifier() for part in parts) or len(parts) not in (2, 3):
            continue
        packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
        if packet is None:
            continue
        if not hasattr(packet, "overloads"):
            found += [packet] if len(parts) == 2 else []
        else:
            wanted = parts[2:] or packet.overloads()
            found += [getattr(packet, overload) for overload in wanted if hasattr(packet, overload)]
    return found


_SOFTMAX = frozenset({"aten._softmax", "aten._safe_softmax"})
_BATCHED = frozenset({"aten.bmm", "aten.baddbmm"})


class ProbabilityTracker:
    """Finds the output of attention that is computed step by step: the product of its probabilities and the values.

    It is computed so by eager attention, and by `scaled_dot_product_attention` where no kernel fits (dropout on a CPU).
    There are no statistics then, and recomputation makes the scores and the probabilities again, up to that last
    product: the next batched one behind a softmax. That of a router is over tokens, which have no batches of queries.
    """

    def __init__(self) -> None:
        self._is_next = False

    def take(self, kind: OperatorKind, args: Any, output: Any) -> bool:
        """Note an operator that has run; return whether it multiplied probabilities with something."""
        if kind.packet in _SOFTMAX:
            self._is_next = output.dim() > 2
        elif self._is_next and kind.packet in _BATCHED:
            self._is_next = False
            return True
        return False
