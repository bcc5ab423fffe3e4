"""Mixtures whose experts are quantised too: transformers' quantizer of bitsandbytes, for 3-D parameters as well.

bitsandbytes quantises linear layers. Since transformers 5 the experts of a layer are one 3-D parameter of a module of
their own, which stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_ckpt.structure.experts import are_experts
from hf_ckpt.structure.four_bit_tensor import FourBitTensor

_METHOD = "hf_ckpt_bitsandbytes_experts"


@register_quantization_config(_METHOD)
class ExpertsBitsAndBytesConfig(BitsAndBytesConfig):
    """A config of bitsandbytes whose 4 bits hold for experts too.

    `reads_mxfp4`: the experts are stored in MXFP4, as those of gpt-oss. Each layer's are dequantised as they are read.
    """

    def __init__(self, *, quantizes_experts: bool = True, reads_mxfp4: bool = False, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]  # upstream
        self.quant_method: Any = _METHOD
        self.quantizes_experts = quantizes_experts
        self.reads_mxfp4 = reads_mxfp4

    def to_diff_dict(self) -> dict[str, Any]:
        """Return all options: upstream compares with the fields of its own class."""
        options: dict[str, Any] = self.to_dict()
        return options

    def of_experts(self) -> dict[str, Any]:
        """Return the options of `bitsandbytes.functional.quantize_4bit` for experts."""
        return {
            "quant_type": self.bnb_4bit_quant_type,
            "compress_statistics": self.bnb_4bit_use_double_quant,
            "quant_storage": self.bnb_4bit_quant_storage,
        }


@register_quantizer(_METHOD)
class ExpertsQuantizer(Bnb4BitHfQuantizer):
    """Quantises the experts of a layer as soon as transformers has put them together, and drops what it read."""

    quantization_config: ExpertsBitsAndBytesConfig

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Tell whether a weight that was read is to be quantised."""
        return self.is_experts(model, param_name) or super().param_needs_quantization(model, param_name, **kwargs)

    def is_experts(self, model: nn.Module, param_name: str) -> bool:
        """Tell whether a parameter is the experts of a layer, and of one that is not left out."""
        path, _, name = param_name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module._parameters.get(name)
        if not self.quantization_config.quantizes_experts or parameter is None or not are_experts(module, parameter):
            return False
        is_converted: bool = should_convert_module(path, self.modules_to_not_convert)
        return is_converted

    def get_quantize_ops(self) -> Any:
        """Return what quantises a weight that was read."""
        return _Quantize(self)  # type: ignore[no-untyped-call]  # upstream

    def get_weight_conversions(self) -> Any:
        """Return how weights that are stored otherwise become those of the model."""
        conversions = super().get_weight_conversions()  # type: ignore[no-untyped-call]  # upstream
        if not self.quantization_config.reads_mxfp4:
            return conversions
        from transformers.core_model_loading import WeightConverter
        from transformers.integrations.mxfp4 import Mxfp4Dequantize

        dequantize: Any = Mxfp4Dequantize
        stored = {name: [f"{name}_blocks", f"{name}_scales"] for name in ("gate_up_proj", "down_proj")}
        return [*conversions, *(WeightConverter(both, name, [dequantize(self)]) for name, both in stored.items())]

    def is_serializable(self) -> bool:
        """Tell that the base cannot be saved: no loader would know its experts."""
        return False


class _Quantize(Bnb4bitQuantize):
    def convert(  # type: ignore[override]  # as it is called
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        quantizer: ExpertsQuantizer = self.hf_quantizer
        found: dict[str, Tensor] = {}
        for key, value in input_dict.items():
            # Older versions have one parameter here, under another name.
            name = key if len(input_dict) > 1 else full_layer_name
            if quantizer.is_experts(model, name):
                values = value[0] if isinstance(value, list) else value
                quantized = FourBitTensor.quantized(values, **quantizer.quantization_config.of_experts())
                found[name] = nn.Parameter(quantized, requires_grad=False)
            else:
                found |= super().convert({name: value}, full_layer_name=name, model=model, **kwargs)
        return found


def experts_in_4_bits(model: nn.Module) -> Iterator[tuple[str, FourBitTensor]]:
    """Yield the experts of a model that are quantised, with their names."""
    for name, parameter in model.named_parameters():
        tensor: Tensor = parameter
        if isinstance(tensor, FourBitTensor):
            yield name, tensor


@contextmanager
def without_experts_in_4_bits(model: nn.Module) -> Iterator[None]:
    """Hide them in the block, from who casts all weights of a model."""
    found = [(model.get_submodule(name.rpartition(".")[0]), name, each) for name, each in experts_in_4_bits(model)]
    for module, name, _ in found:
        module._parameters[name.rpartition(".")[2]] = None
    try:
        yield
    finally:
        for module, name, experts in found:
            module._parameters[name.rpartition(".")[2]] = experts  # type: ignore[assignment]  # a parameter
