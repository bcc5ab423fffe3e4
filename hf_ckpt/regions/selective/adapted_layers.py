"""Linear layers that PEFT has adapted: which can be taken as a whole, and the hooks that report them.

Knows them by the names of their classes, so that no library has to be there. See Note [Sums of adapted layers] in
`kept_outputs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.regions.module_state import is_ours
from hf_ckpt.regions.selective.dispatch import ACTIVE
from hf_ckpt.regions.selective.save_rules import PLACES_OF_WEIGHTS, OperatorKind, rows_of
from hf_ckpt.upstream.torch import (
    CAST,
    UNSAFE_VIEW,
    FakeTensor,
    disabled_torch_function,
    make_wrapper_subclass,
    tree_map_only,
)

_LINEARS = frozenset({"torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D"})
"""Their forward is one product and a bias, and their output the product in another shape."""
_ADAPTED = frozenset({"peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit"})
_PACKED = frozenset({"bitsandbytes.nn.modules.Linear4bit"})
_hooks_of = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def watch_adapted(layer: nn.Module) -> Iterator[RemovableHandle]:
    """Place hooks that tell a region of the adapted layers inside `layer`; yield their handles."""
    for module in filter(is_adapted, layer.modules()):
        # Innermost: others' hooks see what the layer returns, never what stands for its products.
        yield module.register_forward_pre_hook(_enter)
        yield module.register_forward_hook(_leave, prepend=True)


def _enter(module: nn.Module, args: Any) -> None:
    """Forward pre-hook of an adapted layer."""
    if not torch.compiler.is_compiling() and ACTIVE.run is not None:
        ACTIVE.run.enter_module(module, args)


def _leave(module: nn.Module, args: Any, output: Any) -> Tensor | None:
    """Forward hook of an adapted layer."""
    if not torch.compiler.is_compiling() and ACTIVE.run is not None:
        replaced: Tensor | None = ACTIVE.run.leave_module(module, args, output)
        return replaced
    return None


# --- Which are taken as a whole. ---


def is_seen_as_it_is(module: Any) -> bool:
    """Whether the hooks of `watch_linears` are the innermost: others may place theirs inside of them at any time."""
    attributes = module.__dict__
    for hook in reversed(attributes["_forward_pre_hooks"].values()):
        if hook is _enter:
            break
        if not is_ours(hook):
            return False
    for hook in attributes["_forward_hooks"].values():
        if hook is _leave:
            break
        if not is_ours(hook):
            return False
    return True


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a linear layer with adapters around it."""
    return _is_one_of(module, _ADAPTED)


def is_linear(module: Any, hidden: Any) -> bool:
    """Whether a module runs one product on `hidden`, and returns what that returned."""
    attributes = module.__dict__
    parameters = attributes["_parameters"]
    return (
        _is_one_of(module, _LINEARS)
        and "forward" not in attributes
        # Of a tensor that is spread over processes, or packed, the operators are kept.
        and type(parameters.get("weight")) in (nn.Parameter, Tensor, FakeTensor)
        and type(hidden) in (Tensor, FakeTensor)
        # To the product of any other input torch adds the bias in place.
        and (hidden.dim() == 2 or (hidden.dim() > 2 and (parameters.get("bias") is None or _is_flat(hidden))))
    )


def _is_flat(hidden: Tensor) -> bool:
    return hidden.dim() == 3 and hidden.is_contiguous()


def rank_of_sum(module: Any, args: Any) -> int:
    """Return the rank of the adapter whose product an adapted layer adds to its base's, by PEFT's own forward, or 0.

    0 as well where somebody else looks at what is added, and for a rank as large as the layer is wide.
    """
    own = module.__dict__
    if len(args) != 1 or module.disable_adapters or module.merged or "forward" in own:
        return 0
    modules = own["_modules"]
    firsts = modules["lora_A"]._modules
    names = [name for name in module.active_adapters if name in firsts]
    if len(names) != 1 or names[0] in module.lora_variant:
        return 0
    base, first, second = modules["base_layer"], firsts[names[0]], modules["lora_B"]._modules[names[0]]
    hidden = args[0]
    if (
        not all(map(_is_bare, (base, first, second)))
        or not is_linear(first, hidden)
        or not is_linear(second, hidden)
        or not (is_linear(base, hidden) or _is_as_wide(base, hidden))
    ):
        return 0
    rank: int = second.in_features
    return rank if rank < second.out_features else 0


def _is_as_wide(base: Any, hidden: Tensor) -> bool:
    """Whether the base is of 4-bit weights and returns no wider numbers than its product has."""
    if not _is_one_of(base, _PACKED) or "forward" in base.__dict__:
        return False
    dtype = base.compute_dtype
    return dtype is None or hidden.dtype.itemsize <= dtype.itemsize


def _is_bare(module: nn.Module) -> bool:
    """Whether only we see what a module is given and returns."""
    hooks = _hooks_of(module)
    # Hooks of this package count, watch and name; none of them looks at numbers that are recomputed.
    return not any(hooks) or all(is_ours(hook) for each in hooks for hook in each.values())


def _is_one_of(module: nn.Module, names: frozenset[str]) -> bool:
    cls = type(module)
    # Nothing is remembered of a class: parametrizations and engines make some for each module.
    return f"{cls.__module__}.{cls.__qualname__}" in names


# --- What they return. ---


def is_first(kind: OperatorKind, args: Any, rank: int) -> bool:
    """Whether a product inside of a sum is the first one of the adapter, and not as wide as the sum."""
    place = PLACES_OF_WEIGHTS.get(kind.packet)
    return place is not None and bool(args[place].shape[1] == rank)


def placeholder(kind: OperatorKind, args: Any, outer: int) -> Tensor:
    """Return a tensor without memory for a linear layer's product of `outer` columns, by what its operator is given."""
    rows = rows_of(kind, args)
    return Placeholder.of((*rows.shape[:-1], outer), rows.dtype)


_META = torch.device("meta")


class Placeholder(Tensor):
    """A tensor on `meta` that is scaled, added and cast at once: torch computes plain ones' shapes by `torch._refs`."""

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make one."""
        return make_wrapper_subclass(Placeholder, shape, dtype=dtype, device=_META)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # upstream's types leave the class out
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        shape = tensors[0].shape
        if func in _ELEMENTWISE and kwargs.keys() <= {"dtype"} and all(_is_alike(tensor, shape) for tensor in tensors):
            return cls.of(shape, kwargs.get("dtype") or reduce(torch.promote_types, [t.dtype for t in tensors]))
        if func in _VIEWS and -1 not in args[-1]:
            return cls.of(args[-1], args[0].dtype)
        # By what torch knows of the operator; what is not on `meta` raises.
        plain = tree_map_only(Placeholder, _on_meta, (args, kwargs))
        return tree_map_only(Tensor, _stand_in, func(*plain[0], **plain[1]))

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]  # upstream


_ELEMENTWISE = frozenset(
    {
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.mul.Scalar,
        torch.ops.aten.add.Tensor,
        CAST,
        torch.ops.aten.clone.default,
    }
)
_VIEWS = frozenset({torch.ops.aten.view.default, UNSAFE_VIEW})


def _is_alike(tensor: Tensor, shape: torch.Size) -> bool:
    return type(tensor) is Placeholder and tensor.shape == shape


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _stand_in(tensor: Tensor) -> Tensor:
    return Placeholder.of(tensor.shape, tensor.dtype)
