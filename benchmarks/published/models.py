"""The models of the published steps, on `meta`, with the adapters and the attention that they were measured with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.published.emulations import EMULATIONS
from benchmarks.published.llm_foundry import Mpt
from benchmarks.published.points import Source, StepPoint, sources
from benchmarks.quantize import quantize
from hf_ckpt.simulation.cuda import attention_to_build, restore_attention

# As the config files of mistralai/Mistral-7B-v0.1, meta-llama/Llama-2-70b-hf, Llama-2-7b-hf and Meta-Llama-3-8B,
# 01-ai/Yi-34B, ibm/PowerLM-3b, bigcode/gpt_bigcode-santacoder, facebook/opt-1.3b, facebook/opt-350m and
# bert-large-uncased have them.
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
    "llama2_7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "llama3_8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    },
    "yi_34b": {
        "model_type": "llama",
        "vocab_size": 64000,
        "hidden_size": 7168,
        "intermediate_size": 20480,
        "num_hidden_layers": 60,
        "num_attention_heads": 56,
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
    "opt_1_3b": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "word_embed_proj_dim": 2048,
        "dropout": 0.1,
        "attention_dropout": 0.0,
    },
    "opt_350m_reward": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
        "dropout": 0.1,
        "attention_dropout": 0.0,
    },
    "bert_large": {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    # As the README of the example describes it, which has a model of its own.
    "post_norm_7b": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 512,
        "n_embd": 4096,
        "n_layer": 32,
        "n_head": 32,
    },
    # As scripts/train/yamls/pretrain of LLM Foundry; each has as many positions as a row has tokens.
    **{
        f"mpt_{size}": {
            "model_type": "mpt",
            "vocab_size": 50368,
            "d_model": width,
            "n_heads": heads,
            "n_layers": layers,
        }
        for size, width, heads, layers in (
            ("760m", 1536, 12, 24),
            ("1b", 2048, 16, 24),
            ("3b", 2560, 20, 32),
            ("7b", 4096, 32, 32),
            ("13b", 5120, 40, 40),
            ("30b", 7168, 56, 48),
        )
    },
}


class _RewardModel(nn.Module):
    """A score for each token; the loss compares the rows of the first half with those of the second."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__()
        self.config = config
        self.transformer = AutoModel.from_config(config, **options)
        self.v_head = nn.Linear(config.word_embed_proj_dim, 1, bias=False, dtype=options["dtype"])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.transformer(input_ids, attention_mask=attention_mask)[0]
        chosen, rejected = self.v_head(hidden).squeeze(-1).chunk(2)
        losses = [-torch.log(torch.sigmoid(one - other)).mean() for one, other in zip(chosen, rejected, strict=True)]
        return {"loss": torch.stack(losses).mean()}


class _PostNormModel(nn.Module):
    """A stack of attention and a four times wider ffn, each added to its input and then normed; no mask, no dropout."""

    def __init__(self, config: Any, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.tokens, self.positions = (
            nn.Embedding(number, config.n_embd, dtype=dtype) for number in (config.vocab_size, config.n_positions)
        )
        self.layers = nn.ModuleList(_PostNormLayer(config.n_embd, config.n_head, dtype) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, config.vocab_size, dtype=dtype)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]).expand_as(input_ids))
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class _PostNormLayer(nn.Module):
    def __init__(self, width: int, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(width, num_heads, batch_first=True, dtype=dtype)
        self.norm1, self.norm2 = (nn.LayerNorm(width, dtype=dtype) for _ in range(2))
        wide = nn.Linear(width, 4 * width, dtype=dtype)
        self.mlp = nn.Sequential(wide, nn.GELU(), nn.Linear(4 * width, width, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.self_attn(hidden, hidden, hidden)[0]
        hidden = self.norm1(hidden + mixed)
        normed: Tensor = self.norm2(hidden + self.mlp(hidden))
        return normed


_CLASSES: dict[str, Callable[..., nn.Module]] = {
    "opt_350m_reward": _RewardModel,
    "bert_large": AutoModelForSequenceClassification.from_config,
    "post_norm_7b": _PostNormModel,
    **{name: Mpt for name, fields in MODELS.items() if fields["model_type"] == "mpt"},
}
"""Of models that are no language models of transformers."""


def build(point: StepPoint) -> nn.Module:
    """Return the model of a published step, with its adapters and as the measured versions ran it."""
    source = sources()[point.source]
    fields = dict(MODELS[point.model])
    fields["vocab_size"] = source.vocab_sizes.get(point.model, fields["vocab_size"])
    if fields["model_type"] == "mpt":
        fields["max_seq_len"] = point.tokens
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    make = _CLASSES.get(point.model, AutoModelForCausalLM.from_config)
    with torch.device("meta"):
        model: nn.Module = make(
            config, dtype=getattr(torch, source.dtype), attn_implementation=attention_to_build(source.attention)
        )
    restore_attention(model, source.attention)
    if point.method == "qlora":
        quantize(model, {"compress_statistics": True, "quant_type": "nf4"})
    for name in point.emulations:
        if name in EMULATIONS:
            EMULATIONS[name](model)
    return model if point.method == "full" else _with_adapters(model, source)


def _with_adapters(model: nn.Module, source: Source) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = [name for name in source.lora["target_modules"] if name in there]
    adapters = LoraConfig(task_type="CAUSAL_LM", **source.lora | {"target_modules": targets})
    adapted: nn.Module = get_peft_model(model, adapters, low_cpu_mem_usage=True)  # type: ignore[arg-type]
    for parameter in adapted.parameters():
        if source.keeps_adapter_dtype and parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, source.dtype))
    return adapted
