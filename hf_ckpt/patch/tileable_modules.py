"""What of a layer is position-wise, so that it can run in slices of the sequence; by structure, no list of models.

The norms of a layer, its ffn as a whole, and the norms and linear projections inside its attention. Knows no policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules import padding, pooling, rnn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.structure.attention_and_ffn import unwrapped, words_of
from hf_ckpt.structure.layers import Layer, is_unit
from hf_ckpt.structure.stored import stored
from hf_ckpt.upstream.peft import ACTIVATED_VARIANT
from hf_ckpt.upstream.torch import ConvNd, DropoutNd, NormBase

_OTHER_NORMS = frozenset("batch group instance weight spectral".split())
_DRAWS = frozenset("dropout drop droppath jitter noise".split())


def tiled_modules(layer: Layer) -> list[str]:
    """Return what of a layer runs in tiles: dotted names below the layer, in the order of its modules."""
    # These are its ffn modules, each as a whole, all norms over features, and the linear projections of its attention
    # or of the mixer in its place (a LoRA layer with what it is around). Raises `UnsupportedError` where its ffn is not
    # position-wise, or is no module.
    _check_ffn(layer)
    return list(_tiled_names(layer, layer.module, "", inside_attention=False))


def random_modules(layer: Layer, names: Sequence[str]) -> list[str]:
    """Return the names of modules, of those that `tiled_modules` named and inside them, that draw random numbers."""
    # Tiles draw one mask for each slice, so that there the numbers differ from those of the whole.
    return [
        f"{name}.{inner}".rstrip(".")
        for name in names
        for inner, module in layer.submodule(name).named_modules()
        if _draws(module)
    ]


def _tiled_names(layer: Layer, module: nn.Module, path: str, *, inside_attention: bool) -> Iterator[str]:
    for child_name, raw in module.named_children():
        child, name = unwrapped(raw), f"{path}.{child_name}".lstrip(".")
        is_attention = inside_attention or name in layer.attention
        if name in layer.ffn or _is_norm(child) or (is_attention and _is_linear(child)):
            # Its ffn has been checked; of the rest, what an engine gathers inside cannot run slice by slice.
            if name in layer.ffn or not _holds_units(child):
                yield name
        else:
            yield from _tiled_names(layer, child, name, inside_attention=is_attention)


def _check_ffn(layer: Layer) -> None:
    where = f"Layer {layer.layer_idx} ({type(layer.module).__name__}) is to run in tiles, but"
    if stored(layer.module, "backward_pass") is not None:
        raise UnsupportedError(f"{where} it computes its own backward (a reversible layer). Leave tiles out for it.")
    if layer.ffn_is_inline:
        raise UnsupportedError(
            f"{where} its ffn is written out in the layer's own forward: no module could be cut, and cutting its "
            'halves apart would keep what lies between them. Leave tiles out for it, or use mode "full" alone.'
        )
    for name in layer.ffn:
        for inner, module in layer.submodule(name).named_modules():
            if reason := _why_not(module):
                raise UnsupportedError(
                    f"{where} its ffn is not position-wise: {f'{name}.{inner}'.rstrip('.')} ({type(module).__name__}) "
                    f"{reason}. Leave tiles out for it."
                )
        if _holds_units(layer.submodule(name)):
            raise UnsupportedError(
                f"{where} FSDP shards modules inside {name} as units of their own, which would be gathered and reduced "
                "for each slice. Let FSDP wrap whole layers (fsdp_version: 2), or leave tiles out."
            )


def _why_not(module: nn.Module) -> str:
    """Return why a module is not position-wise, or the empty string."""
    if isinstance(module, ConvNd) and any(size > 1 for size in module.kernel_size):
        return f"is a convolution over {' x '.join(map(str, module.kernel_size))} positions"
    if isinstance(module, rnn.RNNBase | rnn.RNNCellBase):
        return "carries a state along the sequence"
    if type(module).__module__ in (pooling.__name__, padding.__name__):
        return "pools or shifts positions"
    if isinstance(module, NormBase | nn.GroupNorm):
        return "takes its statistics over positions"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) > 1:
        return f"normalises over the last {len(module.normalized_shape)} dimensions"
    if _looks_for_outliers(module):
        return "looks for outliers over all tokens of a call (LLM.int8; llm_int8_threshold=0 does not)"
    if _counts_from_the_end(module):
        return "adapts the last tokens of a call alone (aLoRA)"
    values = _settings(module)
    if capacity := next((name for name in values if "capacity" in words_of(name)), None):
        return f"drops tokens beyond a capacity that is counted over a call ({capacity}={values[capacity]})"
    if jitter := next((name for name in values if "jitter" in words_of(name)), None):
        return f"multiplies its input by noise in place ({jitter}={values[jitter]}; 0 does not)"
    return ""


def _is_norm(module: nn.Module) -> bool:
    words = words_of(type(module).__name__)
    if not any(word.endswith("norm") for word in words) or _OTHER_NORMS.intersection(words):
        return False
    has_children = any(True for _ in module.children())
    return not has_children and all(p.dim() <= 1 for p in module.parameters()) and not _why_not(module)


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is one matrix product over the last dimension, adapters and quantisation included."""
    base = stored(module, "base_layer")
    if isinstance(base, nn.Module):
        return _is_linear(unwrapped(base)) and not _counts_from_the_end(module)
    words = words_of(type(module).__name__)
    # transformers' own Conv1D is a linear layer, written as one of GPT-2's.
    is_one = isinstance(module, nn.Linear) or type(module).__module__ == "transformers.pytorch_utils"
    is_alike = "linear" in "".join(words) and None not in (
        stored(module, "in_features"),
        stored(module, "out_features"),
    )
    return (is_one or is_alike) and not _looks_for_outliers(module) and "float8" not in "".join(words)


def _looks_for_outliers(module: nn.Module) -> bool:
    return type(module).__name__ == "Linear8bitLt" and bool(getattr(stored(module, "state"), "threshold", 0.0))


def _counts_from_the_end(module: nn.Module) -> bool:
    variants = stored(module, "lora_variant") or {}
    return any(type(each).__name__ == ACTIVATED_VARIANT for each in variants.values())


def _holds_units(module: nn.Module) -> bool:
    return any(is_unit(inner) for inner in module.modules() if inner is not module)


def _draws(module: nn.Module) -> bool:
    if isinstance(module, DropoutNd):
        return module.p > 0
    return isinstance(module, nn.RReLU) or any(_DRAWS.intersection(words_of(name)) for name in _settings(module))


def _settings(module: nn.Module) -> dict[str, float]:
    """Return the numbers above 0 that stand on a module, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    }
