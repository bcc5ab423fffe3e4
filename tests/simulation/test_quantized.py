"""Quantised models without data: what loading would give, adapters around it, and a step on a fake copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, LlamaConfig, PretrainedConfig

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.simulation import quantized
from hf_ckpt.simulation.constant_folding import fold
from hf_ckpt.simulation.cuda import emulate_cuda
from hf_ckpt.simulation.devices import CPU, DEVICES, Device
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.tracker import Tracker
from tests.live_storages import LiveStorages

bnb = pytest.importorskip("bitsandbytes")

A100 = next(device for device in DEVICES.values() if device.capability == (8, 0))
BF16 = torch.bfloat16
NF4: dict[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": BF16,
}
# Neither size is a multiple of a block of 64 times 256.
LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=136,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=40,
    attention_bias=True,
)
GPT2 = GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=40)


def on_meta(config: PretrainedConfig, options: Mapping[str, Any]) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=BF16)
    quantized.quantize_on_meta(model, BitsAndBytesConfig(**options))
    return model


def described(thing: Any) -> Any:
    """What can be said of a parameter, a quantisation state or a value without looking at numbers."""
    if isinstance(thing, Tensor):
        own = {
            key: described(value) for key, value in vars(thing).items() if key not in ("module", "_is_hf_initialized")
        }
        size = thing.untyped_storage().nbytes()
        return type(thing).__name__, tuple(thing.shape), thing.dtype, thing.requires_grad, size, own
    if type(thing).__name__ == "QuantState":
        return {key: described(value) for key, value in vars(thing).items()}
    return thing


def all_described(model: nn.Module) -> dict[str, Any]:
    return {name: described(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LLAMA, NF4),
        (LLAMA, {"load_in_4bit": True}),
        (LLAMA, {**NF4, "bnb_4bit_quant_storage": BF16, "llm_int8_skip_modules": ["q_proj", "lm_head"]}),
        (LLAMA, {"load_in_8bit": True}),
        (GPT2, NF4),
        (GPT2, {"load_in_8bit": True}),
        # The head is tied to the embeddings, and asked for.
        (GPT2, {**NF4, "llm_int8_skip_modules": ["c_attn"]}),
    ],
)
def test_parameters_are_those_of_a_loaded_model(
    config: PretrainedConfig, options: dict[str, Any], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=BF16).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=BF16, quantization_config=BitsAndBytesConfig(**options)
    )
    made = on_meta(config, options)

    assert all_described(made) == all_described(loaded)
    assert list(all_described(made)) == list(all_described(loaded))
    assert {parameter.device.type for parameter in made.parameters()} == {"meta"}
    for name in ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method"):
        assert getattr(made, name, None) == getattr(loaded, name, None)


def test_constants_are_the_scales_their_scales_and_the_tables() -> None:
    made = on_meta(LLAMA, NF4)
    of_one = list(quantized.constants(made.model.layers[0].mlp.up_proj))
    num_blocks = -(-64 * 136 // 64)
    assert sorted((tuple(each.shape), each.dtype) for each in of_one) == sorted(
        [
            ((num_blocks,), torch.uint8),
            ((16,), torch.float32),
            ((), torch.float32),
            ((1,), torch.float32),
            ((256,), torch.float32),
        ],
        key=lambda each: (each[0], str(each[1])),
    )
    assert sum(1 for _ in quantized.constants(made)) == 2 * 7 * 5
    assert not list(quantized.constants(nn.Linear(2, 2)))


def test_making_one_leaves_the_tables_of_bitsandbytes_as_they_are() -> None:
    on_meta(LLAMA, NF4)
    weight = bnb.nn.Params4bit(torch.randn(64, 64), compress_statistics=True, quant_type="nf4").to("cpu")
    assert weight.quant_state.state2.code.device.type == "cpu"


def test_what_cannot_be_quantised_so_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LLAMA)
    config = BitsAndBytesConfig(load_in_4bit=True)
    config.quant_method = "unheard_of"
    with pytest.raises(UnsupportedError, match="The quantised model cannot be simulated: Unknown quantization type"):
        quantized.quantize_on_meta(model, config)


# --- A step on a fake copy. ---


def fake_copy(model: nn.Module, *, is_cuda: bool) -> tuple[nn.Module, FakeTensorMode]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    with mode:
        for parameter in model.parameters():
            made = torch.empty(parameter.shape, dtype=parameter.dtype)
            memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
        for tensor in [*model.buffers(), *quantized.constants(model)]:
            memo[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
        twin = copy.deepcopy(model, memo)
        quantized.restore_states(list(model.modules()), memo, is_cuda=is_cuda)
    return twin, mode


def two_layers(options: Mapping[str, Any]) -> nn.Module:
    """Two linear layers, 64 to 256 to 64, in a model that transformers' quantizer takes."""
    model = on_meta(
        LlamaConfig(hidden_size=64, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, vocab_size=40),
        options,
    )
    mlp = model.model.layers[0].mlp
    return nn.Sequential(mlp.up_proj, mlp.down_proj)


def peaks(options: Mapping[str, Any], device: Device, *, rows: int = 32) -> tuple[int, int, int]:
    """Bytes of 2 layers: the most in forward, what is kept (both without the outputs), the most in backward."""
    twin, mode = fake_copy(two_layers(options), is_cuda=device.is_cuda)
    with mode:
        inputs = torch.empty(rows, 64, dtype=BF16, requires_grad=True)
        live = LiveStorages([inputs, *twin.parameters(), *twin.buffers(), *quantized.constants(twin)])
        with live, Tracker() as tracker, emulate_cuda(Step(), device, tracker):
            output = twin(inputs)
            forward, kept = live.peak_bytes, live.num_bytes()
            live.restart_peak()
            torch.autograd.backward(output, torch.empty_like(output))
    return forward, kept, live.peak_bytes


@pytest.mark.parametrize("device", [A100, CPU], ids=["cuda", "cpu"])
def test_a_4_bit_layer_makes_a_copy_of_its_weight_in_forward_and_again_in_backward(device: Device) -> None:
    forward, kept, backward = peaks(NF4, device)
    weight, scales, wide, narrow = 64 * 256 * 2, 64 * 256 // 64, 32 * 256 * 2, 32 * 64 * 2
    # The scales are dequantised to float32 for as long as that takes; nothing is kept but the output.
    assert forward == wide + narrow + weight + scales * 4
    assert kept == narrow
    # The first layer's: output and its gradient, what comes from the second layer, the copy, and what goes out.
    assert backward == narrow + narrow + wide + weight + narrow


def test_an_evaluation_on_cuda_leaves_4_bit_weights_as_they_are_whatever_this_cpu_can_do() -> None:
    model = two_layers(NF4)
    for layer in model:
        layer.support_avx512bf16_for_cpu = True
    twin, mode = fake_copy(model.eval(), is_cuda=True)
    with mode, torch.no_grad():
        live = LiveStorages([*twin.parameters(), *quantized.constants(twin)])
        with live, Tracker() as tracker, emulate_cuda(Step(), A100, tracker):
            output = twin(torch.empty(32, 64, dtype=BF16))
            # The output only.
            assert live.num_bytes() == output.nbytes


def test_an_8_bit_layer_keeps_its_inputs_on_cuda_and_makes_no_copy_of_its_weight_in_forward() -> None:
    forward, kept, _ = peaks({"load_in_8bit": True}, A100)
    wide, narrow, rows = 32 * 256 * 2, 32 * 64 * 2, 32
    assert kept == wide + narrow
    # First layer: inputs in int8 with their scales, the products in int32, in float16, and the output.
    assert forward == 32 * 64 + rows * 4 + 32 * 256 * 4 + wide + wide
    on_cpu, kept_on_cpu, _ = peaks({"load_in_8bit": True}, CPU)
    assert kept_on_cpu == wide + narrow
    assert on_cpu >= 64 * 256 * 2 + wide


@pytest.mark.parametrize("options", [NF4, {"load_in_4bit": True}, {"load_in_8bit": True}])
@pytest.mark.parametrize("is_cuda", [True, False])
def test_adapters_around_it_get_gradients_in_a_fake_step(options: dict[str, Any], is_cuda: bool) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(on_meta(LLAMA, options), config, low_cpu_mem_usage=True)
    kind = "Linear8bitLt" if "load_in_8bit" in options else "Linear4bit"
    assert type(model.base_model.model.model.layers[0].mlp.up_proj).__name__ == kind

    twin, mode = fake_copy(model.train(), is_cuda=is_cuda)
    with mode, Tracker() as tracker, emulate_cuda(Step(), A100 if is_cuda else CPU, tracker):
        input_ids = torch.zeros(1, 8, dtype=torch.long)
        with torch.autocast("cpu", BF16):
            loss = twin(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        loss.backward()
    trained = {name for name, parameter in twin.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}


def followed(model: nn.Module) -> tuple[int, int, int]:
    """Bytes of a step: the most in forward, what is kept, the most in backward."""
    input_ids = torch.zeros(2, 32, dtype=torch.long)
    known = [*model.parameters(), *model.buffers(), *quantized.constants(model)]
    live = LiveStorages([*known, input_ids])
    with live, Tracker() as tracker, emulate_cuda(Step(), CPU, tracker):
        with torch.autocast("cpu", BF16):
            loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        forward, kept = live.peak_bytes, live.num_bytes()
        live.restart_peak()
        loss.backward()
    return forward, kept, live.peak_bytes


@pytest.mark.parametrize("options", [NF4, {"load_in_8bit": True}])
def test_a_fake_step_needs_what_a_real_one_needs(options: dict[str, Any], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(copy.deepcopy(LLAMA), dtype=BF16).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=BF16, quantization_config=BitsAndBytesConfig(**options)
    )
    adapter = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    real = peft.get_peft_model(loaded, peft.LoraConfig(**adapter)).train()
    made = peft.get_peft_model(on_meta(LLAMA, options), peft.LoraConfig(**adapter), low_cpu_mem_usage=True).train()

    simulated = []
    for model in (made, real):
        twin, mode = fake_copy(model, is_cuda=False)
        with mode, Tracker(run=fold):
            simulated.append(followed(twin))
    assert simulated == [followed(real)] * 2
