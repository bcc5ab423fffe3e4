"""4-bit layers of bitsandbytes in the place of a model's linear ones, without a file to load them from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def quantize(model: Any, options: dict[str, Any]) -> None:
    """Put 4-bit layers in the place of the linear ones below the head, one after the other.

    Args:
        model: of transformers: with its weights on the device where it trains, or on `meta`.
        options: `compress_statistics` and `quant_type` of `Linear4bit`.
    """
    if next(model.parameters()).is_meta:
        _quantize_on_meta(model, options)
        return
    from bitsandbytes.nn import Linear4bit, Params4bit

    for parent, name, linear in list(_linears(model.get_decoder())):
        weight = linear.weight.data
        sizes = linear.in_features, linear.out_features
        with torch.device("meta"):
            packed = Linear4bit(*sizes, bias=False, compute_dtype=weight.dtype, **options)
        packed.weight = Params4bit(weight, requires_grad=False, module=packed, **options).to(weight.device)
        setattr(parent, name, packed)
    # What PEFT looks at to choose its layers.
    model.is_loaded_in_4bit = True


def _quantize_on_meta(model: Any, options: dict[str, Any]) -> None:
    from transformers import BitsAndBytesConfig

    from hf_ckpt.simulation.quantized import quantize_on_meta

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=options["quant_type"],
        bnb_4bit_use_double_quant=options["compress_statistics"],
        bnb_4bit_compute_dtype=next(model.parameters()).dtype,
    )
    quantize_on_meta(model, config)


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child
