"""Training steps whose memory and time are predicted and measured: models of published sizes, with random weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from benchmarks.quantize import quantize

LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
SEGMENTS = {"mode": "full", "segment_size": "sqrt", "nested": True}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, in the words of its config."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False


# As the config files of Qwen3 0.6B, Gemma 3 1B, Llama 3.2 1B and 3B, Llama 2 7B and Llama 3.1 8B have them.
SHAPES = {
    "qwen3_0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, tie_word_embeddings=True),
    "gemma3_1b": Shape("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, tie_word_embeddings=True),
    "llama_1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, tie_word_embeddings=True),
    "llama_3b": Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, tie_word_embeddings=True),
    "llama_7b": Shape("llama", 4096, 11008, 32, 32, 32, 128, 32000),
    "llama_8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256),
}


@dataclass(frozen=True)
class Configuration:
    """One training step. Runs under bfloat16 autocast, with fused AdamW.

    Args:
        shape: of `SHAPES`.
        method: `full`, `lora` or `qlora`.
        policy: what the plugin is given; None trains without it.
        tokens: of a row.
        batch: rows of a micro-batch.
        accumulation: micro-batches of a step.
        dtype: of the weights.
    """

    shape: str
    method: str
    policy: Any
    tokens: int
    batch: int = 1
    accumulation: int = 1
    dtype: str = "bfloat16"


CONFIGURATIONS = {
    "llama_7b_lora_none": Configuration("llama_7b", "lora", None, 2048),
    "llama_7b_lora_full": Configuration("llama_7b", "lora", "full", 2048),
    "llama_7b_lora_selective": Configuration("llama_7b", "lora", "selective", 2048),
    "llama_7b_lora_ffn": Configuration("llama_7b", "lora", "ffn", 4096),
    "llama_8b_qlora_full": Configuration("llama_8b", "qlora", "full", 8192),
    "llama_1b_full_none": Configuration("llama_1b", "full", None, 2048, dtype="float32"),
    "qwen3_0.6b_full_none": Configuration("qwen3_0.6b", "full", None, 1024, batch=4, dtype="float32"),
    "llama_1b_full_full": Configuration("llama_1b", "full", "full", 2048, batch=2, dtype="float32"),
    "llama_1b_full_attention": Configuration("llama_1b", "full", "attention", 4096, accumulation=2, dtype="float32"),
    "llama_1b_full_segments": Configuration("llama_1b", "full", SEGMENTS, 8192, dtype="float32"),
    "qwen3_0.6b_lora_none": Configuration("qwen3_0.6b", "lora", None, 4096),
    "gemma3_1b_lora_full": Configuration("gemma3_1b", "lora", "full", 2048),
    "llama_3b_lora_ffn": Configuration("llama_3b", "lora", "ffn", 4096),
    "llama_3b_full_full": Configuration("llama_3b", "full", "full", 2048, batch=2),
    "llama_7b_lora_segments": Configuration("llama_7b", "lora", SEGMENTS, 8192),
    "llama_8b_lora_attention": Configuration("llama_8b", "lora", "attention", 2048),
    "llama_8b_lora_full": Configuration("llama_8b", "lora", "full", 8192, accumulation=2),
    "llama_8b_full_full": Configuration("llama_8b", "full", "full", 2048),
}
"""In the order of their value where time is short."""


def small(configuration: Configuration) -> tuple[Configuration, Shape]:
    """Return a configuration of the same kind that a CPU runs in a second, and its model's shape."""
    found = SHAPES[configuration.shape]
    shape = Shape(found.model_type, 64, 160, 4, 4, 2, 16, 512, found.tie_word_embeddings)
    return replace(configuration, tokens=configuration.tokens // 64), shape


def config_of(shape: Shape, tokens: int) -> PreTrainedConfig:
    """Return a model's config."""
    fields = asdict(shape)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, max_position_embeddings=tokens)
    config.use_cache = False
    return config


def build(configuration: Configuration, shape: Shape, device: str) -> nn.Module:
    """Build the model on a device, `meta` among them, with adapters if the method asks for them."""
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config_of(shape, configuration.tokens),
            dtype=getattr(torch, configuration.dtype),
            attn_implementation="sdpa",
        )
    if configuration.method == "qlora":
        quantize(model, {"compress_statistics": True, "quant_type": "nf4"})
    if configuration.method != "full":
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(task_type="CAUSAL_LM", **LORA)
        model = get_peft_model(model, adapter, low_cpu_mem_usage=device == "meta")
        if device != "meta":
            model.to(device)
    return model.train()


def rows(configuration: Configuration, shape: Shape, num_steps: int) -> list[dict[str, Tensor]]:
    """Return the data of so many steps: random token ids [S], which are their own labels."""
    count = num_steps * configuration.batch * configuration.accumulation
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (count, configuration.tokens), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]
