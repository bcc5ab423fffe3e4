"""The training steps that contenders are compared on: published sizes, random weights, and a small twin of each.

A twin is the same architecture for the CPU: width, vocabulary and row are divided by one number, the heads stay as
many, and eight layers remain. So attention scores, logits and the inner width of a layer keep their share of its bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.quantize import quantize
from hf_ckpt.simulation.step import Step

_TWIN_LAYERS = 8
_TWIN_TOKENS = 512
"""Of a batch."""
_WIDTHS = ("hidden_size", "intermediate_size", "head_dim", "vocab_size")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and one optimizer step of it.

    Args:
        name: in results and on the command line.
        title: in tables and pictures.
        config: fields of the model's config, `model_type` among them.
        method: `full`, `lora` or `qlora`.
        batch: rows.
        tokens: of a row.
        scale: what the twin's sizes are divided by.
        attention: `attn_implementation`.
        dtype: of the weights that are not quantized.
        autocast: as `TrainingArguments(bf16=True)` runs; None without.
        targets: `target_modules` of the adapters.
        rank: of the adapters.
        is_small: whether it is a twin.
    """

    name: str
    title: str
    config: dict[str, Any] = field(repr=False)
    method: str
    batch: int
    tokens: int
    scale: int
    attention: str = "sdpa"
    dtype: str = "bfloat16"
    autocast: str | None = "bfloat16"
    targets: str | tuple[str, ...] = "all-linear"
    rank: int = 16
    is_small: bool = False

    @property
    def step(self) -> Step:
        """The step in the words of the prediction."""
        return Step(batch_size=self.batch, seq_length=self.tokens, autocast=self.autocast, optim="adamw_torch_fused")

    def twin(self) -> Case:
        """Return the same case, small enough for a CPU, in float32."""
        divided = {key: value // self.scale for key, value in self.config.items() if key in _WIDTHS}
        tokens = self.tokens // self.scale
        return replace(
            self,
            config=self.config | divided | {"num_hidden_layers": _TWIN_LAYERS},
            batch=max(1, min(self.batch, _TWIN_TOKENS // tokens)),
            tokens=tokens,
            dtype="float32",
            autocast=None,
            rank=max(1, self.rank // self.scale),
            is_small=True,
        )

    def facts(self) -> dict[str, Any]:
        """Return what a result says about the case, as JSON types."""
        facts = asdict(self)
        for name in ("name", "is_small", "scale"):
            del facts[name]
        return facts


def _config(
    model_type: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
    } | more


# As the config files of the models have them.
_LLAMA2_7B = _config("llama", 4096, 11008, 32, 32, 32, 128, 32000)
_LLAMA2_13B = _config("llama", 5120, 13824, 40, 40, 40, 128, 32000)
_LLAMA31_8B = _config("llama", 4096, 14336, 32, 32, 8, 128, 128256)
_LLAMA32_1B = _config("llama", 2048, 8192, 16, 32, 8, 64, 128256, tie_word_embeddings=True)
_QWEN3_06B = _config("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, tie_word_embeddings=True)
_OLMOE = _config("olmoe", 2048, 1024, 16, 16, 16, 128, 50304, num_experts=64, num_experts_per_tok=8)

_ALL = (
    Case(
        name="llama2_7b_lora_2048",
        title="Llama 2 7B, LoRA, 4 x 2,048 tokens",
        config=_LLAMA2_7B,
        method="lora",
        batch=4,
        tokens=2048,
        scale=16,
    ),
    Case(
        name="llama2_7b_lora_4096",
        title="Llama 2 7B, LoRA, 2 x 4,096 tokens",
        config=_LLAMA2_7B,
        method="lora",
        batch=2,
        tokens=4096,
        scale=16,
    ),
    Case(
        name="llama2_7b_lora_8192",
        title="Llama 2 7B, LoRA, 8,192 tokens",
        config=_LLAMA2_7B,
        method="lora",
        batch=1,
        tokens=8192,
        scale=16,
    ),
    Case(
        name="llama2_7b_lora_2048_eager",
        title="Llama 2 7B, LoRA, 2 x 2,048 tokens, eager attention",
        config=_LLAMA2_7B,
        method="lora",
        batch=2,
        tokens=2048,
        scale=16,
        attention="eager",
    ),
    Case(
        name="llama31_8b_qlora_8192",
        title="Llama 3.1 8B, QLoRA, 8,192 tokens",
        config=_LLAMA31_8B,
        method="qlora",
        batch=1,
        tokens=8192,
        scale=16,
    ),
    Case(
        name="llama31_8b_qlora_32768",
        title="Llama 3.1 8B, QLoRA, 32,768 tokens",
        config=_LLAMA31_8B,
        method="qlora",
        batch=1,
        tokens=32768,
        scale=16,
    ),
    Case(
        name="qwen3_06b_full_2048",
        title="Qwen3 0.6B, full fine-tune, 4 x 2,048 tokens",
        config=_QWEN3_06B,
        method="full",
        batch=4,
        tokens=2048,
        scale=4,
        dtype="float32",
    ),
    Case(
        name="llama32_1b_full_2048",
        title="Llama 3.2 1.2B, full fine-tune, 4 x 2,048 tokens",
        config=_LLAMA32_1B,
        method="full",
        batch=4,
        tokens=2048,
        scale=8,
        dtype="float32",
    ),
    Case(
        name="llama2_13b_lora_2048",
        title="Llama 2 13B, LoRA, 2,048 tokens",
        config=_LLAMA2_13B,
        method="lora",
        batch=1,
        tokens=2048,
        scale=16,
    ),
    Case(
        name="olmoe_7b_lora_2048",
        title="OLMoE 1B-7B (64 experts, 8 of them), LoRA, 4 x 2,048 tokens",
        config=_OLMOE,
        method="lora",
        batch=4,
        tokens=2048,
        scale=8,
        targets=_ATTENTION,
    ),
)
CASES = {case.name: case for case in _ALL}


def build(case: Case, device: str) -> nn.Module:
    """Return the model of a case in training mode, with random weights, and with its adapters if it has any.

    Args:
        case: or its twin.
        device: `cpu`, `cuda` or `meta`.
    """
    torch.manual_seed(0)
    fields = dict(case.config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, max_position_embeddings=case.tokens)
    config.use_cache = False
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, case.dtype), attn_implementation=case.attention
        )
    if case.method == "qlora":
        quantize(model, {"compress_statistics": True, "quant_type": "nf4"})
    if case.method != "full":
        model = _adapted(model, case)
    if device != "meta":
        model.to(device)
    return model.train()


def _adapted(model: nn.Module, case: Case) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = list(case.targets) if isinstance(case.targets, tuple) else case.targets
    # No dropout: compilers that recompute get it wrong, and are compared too.
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=case.rank, lora_alpha=2 * case.rank)
    is_meta = next(model.parameters()).is_meta
    adapted: nn.Module = get_peft_model(model, adapters, low_cpu_mem_usage=is_meta)  # type: ignore[arg-type]
    return adapted


def batch_of(case: Case, device: str) -> dict[str, Tensor]:
    """Return random tokens [B, S] that are their own labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(case.config["vocab_size"], (case.batch, case.tokens), generator=generator).to(device)
    # As a collator makes them: two tensors.
    return {"input_ids": ids, "labels": ids.clone()}
