"""The models of the published steps, on `meta`, with the adapters and the attention that they were measured with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.published.emulations import EMULATIONS
from benchmarks.published.points import StepPoint
from benchmarks.quantize import quantize
from hf_ckpt.simulation.cuda import attention_to_build, restore_attention

# As the config files of mistralai/Mistral-7B-v0.1, NousResearch/Llama-2-70b-hf, ibm/PowerLM-3b and
# bigcode/gpt_bigcode-santacoder have them.
MODELS: dict[str, dict[str, Any]] = {
    "mistral_7b": {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
    "llama2_70b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "powerlm_3b": {
        "model_type": "granite",
        "vocab_size": 49152,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 40,
        "num_attention_heads": 36,
        "num_key_value_heads": 36,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_dropout": 0.1,
    },
    "santacoder": {
        "model_type": "gpt_bigcode",
        "vocab_size": 49280,
        "n_positions": 2048,
        "n_embd": 2048,
        "n_layer": 24,
        "n_head": 16,
        "n_inner": 8192,
        "activation_function": "gelu_pytorch_tanh",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "multi_query": True,
    },
}
_ATTENTION = "flash_attention_2"
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "c_attn")
"""Of the adapters; each model has some of them."""


def build(point: StepPoint) -> nn.Module:
    """Return the model of a published step, with its adapters and as the measured versions ran it."""
    fields = dict(MODELS[point.model])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention_to_build(_ATTENTION)
        )
    restore_attention(model, _ATTENTION)
    if point.method == "qlora":
        quantize(model, {"compress_statistics": True, "quant_type": "nf4"})
    for name in point.emulations:
        EMULATIONS[name](model)
    if point.method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = [name for name in _TARGETS if name in there]
    adapters = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=16, lora_dropout=0.1, target_modules=targets)
    adapted: nn.Module = get_peft_model(model, adapters, low_cpu_mem_usage=True)  # type: ignore[arg-type]
    return adapted
