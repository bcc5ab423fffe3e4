"""Models with 4-bit and 8-bit weights (bitsandbytes) whose weights have no data: on `meta`, and as fake copies.

The layers are bitsandbytes' own, put in place by transformers' own quantizer; only the numbers are missing. The memory
that bitsandbytes' operators allocate and do not show (a weight's dequantised copy) is known here too: `workspace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.structure.four_bit_tensor import FourBitTensor, state_tensors
from hf_ckpt.structure.quantized_experts import ExpertsQuantizer
from hf_ckpt.upstream.torch import schema_of

Workspace = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of memory that an operator allocates for itself while it runs."""

_NESTED_BLOCK_SIZE = 256
_CODE_SIZE = 256
# What bitsandbytes and PEFT read on a 4-bit weight.
_ATTRIBUTES = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized")


def quantize_on_meta(model: PreTrainedModel, config: BitsAndBytesConfig) -> None:
    """Put 4-bit or 8-bit layers into a model as `from_pretrained(quantization_config=config)` does.

    The model is on `meta`, its parameters in the dtype in which they are loaded. The same modules are skipped, and
    parameters get the shapes, dtypes and constants that loading gives them. PEFT can wrap the model afterwards
    (`low_cpu_mem_usage=True`). Raises `UnsupportedError` when bitsandbytes is missing or cannot quantise the model so.
    """
    weights = ((name, getattr(module, "weight", None)) for name, module in model.named_modules())
    kinds = {name: weight.dtype for name, weight in weights if isinstance(weight, Tensor)}
    try:
        quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
        quantizer.validate_environment(device_map=None)
        quantizer.preprocess_model(model, device_map=None)
        model.tie_weights()
    except (ImportError, ValueError, RuntimeError) as error:
        raise UnsupportedError(f"The quantised model cannot be simulated: {error}") from error
    if isinstance(quantizer, ExpertsQuantizer):
        for name, parameter in list(model.named_parameters()):
            if quantizer.is_experts(model, name):
                path, _, last = name.rpartition(".")
                options = quantizer.quantization_config.of_experts()
                made = FourBitTensor(*_quantized_on_meta(parameter.data, **options))
                model.get_submodule(path)._parameters[last] = nn.Parameter(made, requires_grad=False)
    for name, module in model.named_modules():
        # A head that is tied to the embeddings keeps their weight, whatever layer it is.
        if _is_of_bitsandbytes(module) and _is_of_bitsandbytes(module.weight):
            _pack(module, kinds[name])
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


def constants(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of quantised weights that are no parameters: scales, their scales, and tables.

    A copy of the model needs copies of them. On the device they take memory with the weights.
    """
    for module in model.modules():
        yield from constants_of(module)


def constants_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield those of one module, without its submodules."""
    held: Iterable[Any] = module._parameters.values()
    for parameter in held:
        if isinstance(parameter, FourBitTensor):
            yield from parameter.statistics()
    if _is_quantized(module):
        yield from state_tensors(module.quant_state) if _is_4bit(module) else _scales(module)


def restore_states(modules: Iterable[nn.Module], copies: Mapping[int, Any], *, is_cuda: bool) -> None:
    """Give the weights of deep copies of modules what bitsandbytes' layers expect on a weight.

    `copies`: by the id of a module. With `is_cuda` layers of the copy compute as on CUDA.
    """
    for module in filter(_is_quantized, modules):
        copied: Any = copies[id(module)]
        if _is_4bit(module):
            for attribute in _ATTRIBUTES:
                setattr(copied.weight, attribute, getattr(module.weight, attribute))
            copied.weight.module = copied
            copied.weight.quant_state = copied.quant_state
            if is_cuda:
                # On a CPU with this instruction set, layers pack their weights anew in their first evaluation.
                copied.support_avx512bf16_for_cpu = False
        else:
            scales = _scales(module)[0]
            copied.state.CB = copied.weight.data
            copied.state.SCB = copied.weight.new_empty(scales.shape, dtype=scales.dtype)
            copied.weight.CB = copied.weight.SCB = None
            if is_cuda:
                copied.forward = MethodType(_forward_8bit, copied)


# --- Layers. ---


def _is_quantized(module: Any) -> bool:
    if not _is_of_bitsandbytes(module) or not hasattr(module, "weight"):
        return False
    return module.quant_state is not None if _is_4bit(module) else bool(_scales(module))


def _is_of_bitsandbytes(thing: Any) -> bool:
    # By name: a model without such layers must not need bitsandbytes.
    return type(thing).__module__.startswith("bitsandbytes.")


def _is_4bit(module: nn.Module) -> bool:
    return hasattr(module, "quant_storage")


def _pack(module: Any, dtype: torch.dtype) -> None:
    if module.bias is not None:
        # The layers are made in torch's default dtype.
        module.bias = nn.Parameter(module.bias.data.to(dtype))
    if _is_4bit(module):
        _pack_4bit(module, dtype)
    elif not module.state.has_fp16_weights:
        from bitsandbytes.nn.modules import Int8Params

        weight = Int8Params(module.weight.data.to(torch.int8), requires_grad=False)
        weight.CB = weight.data
        weight.SCB = weight.new_empty(module.weight.shape[0], dtype=torch.float32)
        module.weight = weight


def _pack_4bit(module: Any, dtype: torch.dtype) -> None:
    from bitsandbytes.nn.modules import Params4bit

    weight = module.weight
    options = {name: getattr(weight, name) for name in ("blocksize", "quant_type", "quant_storage")}
    nested = weight.compress_statistics
    packed, state = _quantized_on_meta(weight.data.to(dtype), compress_statistics=nested, **options)
    module.weight = Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        compress_statistics=weight.compress_statistics,
        module=module,
        bnb_quantized=True,
        **options,
    )
    module.quant_state = state


def _quantized_on_meta(values: Tensor, *, compress_statistics: bool, **options: Any) -> tuple[Tensor, Any]:
    """Return what bitsandbytes' `quantize_4bit` returns, which cannot quantise statistics without data."""
    from bitsandbytes.functional import QuantState, quantize_4bit

    packed, state = quantize_4bit(values, compress_statistics=False, **options)
    if compress_statistics:
        # bitsandbytes keeps the table of the nested scales for the whole process, on the first device that needs it.
        absmax = state.absmax
        state.absmax = absmax.new_empty(absmax.shape, dtype=torch.uint8)
        state.offset = absmax.new_empty(())
        state.state2 = QuantState(  # type: ignore[no-untyped-call]  # upstream
            absmax=absmax.new_empty(-(-absmax.numel() // _NESTED_BLOCK_SIZE)),
            code=absmax.new_empty(_CODE_SIZE),
            blocksize=_NESTED_BLOCK_SIZE,
            dtype=absmax.dtype,
        )
        state.nested = True
    return packed, state


def _scales(module: Any) -> list[Tensor]:
    # Before the first forward they lie on the weight, afterwards on the layer.
    return [each for each in (getattr(module.weight, "SCB", None), module.state.SCB) if each is not None]


# --- 8-bit layers as CUDA computes them: the CPU computes with a dequantised copy of the weight instead. ---


def _forward_8bit(module: Any, inputs: Tensor) -> Tensor:
    output: Tensor = _Matmul8bit.apply(inputs, module.state.CB, module.state.SCB, module.bias)  # type: ignore[no-untyped-call]
    return output


class _Matmul8bit(torch.autograd.Function):
    """What `bitsandbytes.MatMul8bitLt` allocates and keeps, without outliers: their number depends on values."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        quantized, row_scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(rows.to(torch.float16))
        output: Tensor = torch.ops.bitsandbytes.int8_scaled_mm.default(
            quantized, weight, row_scales, scales, bias=bias, dtype=rows.dtype
        )
        # bitsandbytes keeps the input although only the columns of outliers are used.
        ctx.kept = rows, weight, scales
        ctx.shape = inputs.shape
        return output.reshape(*inputs.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scales = ctx.kept
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1]).contiguous()
        of_bias = gradient.sum(0) if ctx.needs_input_grad[3] else None
        of_inputs = None
        if ctx.needs_input_grad[0]:
            dequantized = weight.to(rows.dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
            of_inputs = torch.matmul(gradient.to(rows.dtype), dequantized).view(ctx.shape)
        return of_inputs, None, None, of_bias


# --- What operators allocate for themselves. ---


def workspace(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Workspace]:
    """Return what an operator in the namespace `bitsandbytes` allocates while it runs, and does not show."""
    schema = schema_of(function)
    if schema.name not in _WORKSPACES:
        return []
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    return _WORKSPACES[schema.name](named)


def _gemm_4bit(args: Mapping[str, Any]) -> list[Workspace]:
    # The weight, dequantised. For a few dozen rows there are kernels on CUDA that need none.
    needed: list[Workspace] = [(tuple(args["shapeB"]), args["A"].dtype)]
    nested = args.get("absmax_8bit")
    return needed if nested is None else [(tuple(nested.shape), torch.float32), *needed]


def _int8_scaled_mm(args: Mapping[str, Any]) -> list[Workspace]:
    shape = (*args["A"].shape[:-1], args["B"].shape[0])
    # The products, and then the output in float16 before it is converted.
    is_converted = args.get("dtype") not in (None, torch.float16)
    return [(shape, torch.int32), *([(shape, torch.float16)] if is_converted else [])]


_WORKSPACES: Mapping[str, Callable[[Mapping[str, Any]], list[Workspace]]] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "bitsandbytes::int8_scaled_mm": _int8_scaled_mm,
}
