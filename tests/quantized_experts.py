"""Mixtures of the zoo with their experts in 4 bits, and the same with those values as plain weights."""

from __future__ import annotations

import copy

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_ckpt.structure.experts import are_experts
from hf_ckpt.structure.four_bit_tensor import FourBitTensor
from tests import exactness, zoo

_OF_FFN = {"gate", "up", "down"}
NF4 = {"quant_type": "nf4", "compress_statistics": True}


def quantize(model: nn.Module) -> int:
    """Put a model's experts into 4 bits, as loading does; return of how many parameters."""
    found = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if are_experts(module, parameter)
    ]
    for module, name, parameter in found:
        module._parameters[name] = nn.Parameter(FourBitTensor.quantized(parameter.data, **NF4), requires_grad=False)
    return len(found)


def mixture(model_type: str, *, on_experts: bool = False) -> zoo.Case:
    """Build one with adapters, on the experts too where asked for, and with dropout elsewhere."""
    case = exactness.build(model_type)
    model = case.model.to(torch.bfloat16)
    assert quantize(model)
    names = {name.rpartition(".")[2] for name, part in model.named_modules() if type(part) is nn.Linear}
    experts = [name for name, part in model.named_parameters() if isinstance(part, FourBitTensor)] if on_experts else []
    config = LoraConfig(
        r=2,
        target_modules=sorted(name for name in names if "proj" in name and not _OF_FFN & set(name.split("_"))),
        target_parameters=experts,
        init_lora_weights=False,
    )
    return zoo.Case(model_type, get_peft_model(model, config).train(), case.inputs)


def dequantized(case: zoo.Case) -> zoo.Case:
    """Return a copy whose experts are plain weights of the same values."""
    model = copy.deepcopy(case.model)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, FourBitTensor):
                module._parameters[name] = nn.Parameter(parameter.values(), requires_grad=False)
    return zoo.Case(case.model_type, model, case.inputs)
