"""The part of CUDA's autocast that the CPU's lacks: operators that run in float32, and what libraries ask of it.

The lists are those of torch's `autocast_mode.h`. A simulated step runs under the CPU's autocast, which knows which
operators run in the lower precision, and has few that run in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_ckpt.upstream.torch import tree_map_only

# Their floating-point arguments are converted to float32.
_IN_FLOAT32 = frozenset(
    [
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
        *("sinh", "tan", "pow", "__rpow__", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm"),
        *("norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "kl_div", "l1_loss"),
        *("hinge_embedding_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "dist", "pdist"),
        *("multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "cdist", "renorm"),
        *("binary_cross_entropy_with_logits", "logsumexp", "interpolate"),
    ]
)

# They return float32 where the call names no dtype.
_WITH_FLOAT32_OUTPUT = frozenset(
    ["prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum"]
)


_CROSS_ENTROPY = "cross_entropy"  # In neither list, but made of operators that are.

_CHANGED = _IN_FLOAT32 | _WITH_FLOAT32_OUTPUT | {_CROSS_ENTROPY}


def is_on() -> bool:
    """Whether a simulated step runs under autocast here."""
    return torch.is_autocast_enabled("cpu")


@contextmanager
def found_by_libraries() -> Iterator[None]:
    """Let `torch.is_autocast_enabled()`, which without an argument asks about CUDA, tell of the simulated step."""
    # PEFT's layers over quantised weights then leave their input in its dtype.
    asked = torch.is_autocast_enabled

    def is_enabled(device_type: str | None = None) -> bool:
        return asked(device_type or "cpu")

    setattr(torch, asked.__name__, is_enabled)
    try:
        yield
    finally:
        setattr(torch, asked.__name__, asked)


def in_lower_precision(tensors: Any) -> Any:
    """Convert floating-point tensors as an operator of the lower precision does."""
    dtype = torch.get_autocast_dtype("cpu")
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if _is_eligible(tensor) else tensor, tensors)


def changes(name: str) -> bool:
    """Whether CUDA's autocast changes calls of the function of torch with this name."""
    return name in _CHANGED


def call_with_autocast(function: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call the function of torch with this name, one that it changes, as CUDA's autocast does while it is on."""
    if "out" in kwargs:
        return function(*args, **kwargs)
    if name in _IN_FLOAT32:
        args, kwargs = tree_map_only(Tensor, _in_float32, (args, kwargs))
    elif name == _CROSS_ENTROPY:
        function = partial(_cross_entropy, function)
    elif (
        # Where the call names a dtype, that is what it returns.
        kwargs.get("dtype") is None
        and not any(isinstance(each, torch.dtype) for each in args)
        and isinstance(args[0], Tensor)
        and _is_eligible(args[0])
    ):
        kwargs = {**kwargs, "dtype": torch.float32}
    with torch.autocast("cpu", enabled=False):
        return function(*args, **kwargs)


def _cross_entropy(
    function: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *args: Any,
    label_smoothing: float = 0.0,
    **options: Any,
) -> Tensor:
    """Make logarithms of probabilities in the dtype of the logits, which it asks for, and copy them into float32."""
    # As `cross_entropy_loss` in `aten/src/ATen/native/LossNLL.cpp` calls `log_softmax`, with a dtype, and `nll_loss`.
    if target.is_floating_point():
        return function(input, target, weight, *args, label_smoothing=label_smoothing, **options)
    dim = min(1, input.dim() - 1)
    logs = functional.log_softmax(input, dim, dtype=input.dtype)
    widened = None if weight is None else _in_float32(weight)
    loss = functional.nll_loss(_in_float32(logs), target, widened, *args, **options)
    if not label_smoothing:
        return loss
    weighted = logs if weight is None else logs * weight.view(-1, *[1] * (input.dim() - dim - 1))
    smooth = -weighted.sum(dim, dtype=torch.float32).mean()
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / input.shape[dim])


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if _is_eligible(tensor) else tensor


def _is_eligible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64
