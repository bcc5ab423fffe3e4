"""The models and training steps that benchmarks run: published sizes with random weights, and small ones for a CPU.

Three kinds: a `Llama` with a batch, for what needs no more than forward and backward; a `Case`, on which ways to save
memory are compared, with its small twin; and a `Configuration`, whose memory and time are predicted and measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.quantize import quantize
from hf_ckpt.simulation.step import Step

# --- A Llama and a batch. ---


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A Llama and a batch. Proportions are those of Llama 2 7B where the size allows."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int
    dtype: torch.dtype = torch.float32


LLAMAS = {
    "llama_tiny": Llama(hidden=64, ffn=128, layers=4, heads=4, vocabulary=128, batch=2, tokens=32),
    "llama_38m": Llama(hidden=512, ffn=1408, layers=8, heads=4, vocabulary=8192, batch=2, tokens=512),
    "llama_1b": Llama(
        hidden=2048, ffn=5632, layers=22, heads=16, vocabulary=32000, batch=2, tokens=2048, dtype=torch.bfloat16
    ),
    "llama_7b": Llama(
        hidden=4096, ffn=11008, layers=32, heads=32, vocabulary=32000, batch=1, tokens=2048, dtype=torch.bfloat16
    ),
}


def build_llama(
    case: Llama, device: str, attn_implementation: str = "sdpa"
) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """Build the model on the device, and a batch [B, S] that is its own label."""
    config = LlamaConfig(
        hidden_size=case.hidden,
        intermediate_size=case.ffn,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        vocab_size=case.vocabulary,
        max_position_embeddings=case.tokens,
        use_cache=False,
        attn_implementation=attn_implementation,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(case.dtype).train()
        ids = torch.randint(case.vocabulary, (case.batch, case.tokens))
    return model, {"input_ids": ids, "labels": ids}


# --- Published sizes. ---


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


# As the config files of Qwen3 0.6B, Gemma 3 1B, Llama 3.2 1B and 3B, Llama 2 7B, Llama 3.1 8B, Llama 2 13B and OLMoE
# 1B-7B have them.
SHAPES = {
    "qwen3_0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, tie_word_embeddings=True),
    "gemma3_1b": Shape("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, tie_word_embeddings=True),
    "llama_1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, tie_word_embeddings=True),
    "llama_3b": Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, tie_word_embeddings=True),
    "llama_7b": Shape("llama", 4096, 11008, 32, 32, 32, 128, 32000),
    "llama_8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256),
    "llama_13b": Shape("llama", 5120, 13824, 40, 40, 40, 128, 32000),
    "olmoe_1b_7b": Shape("olmoe", 2048, 1024, 16, 16, 16, 128, 50304),
}


def _built(
    config: dict[str, Any],
    tokens: int,
    dtype: str,
    attention: str,
    method: str,
    adapters: dict[str, Any],
    device: str,
) -> nn.Module:
    """Return a model with random weights in training mode.

    Args:
        config: fields of the model's config, `model_type` among them.
        tokens: of the longest row.
        dtype: of the weights that are not quantized.
        attention: `attn_implementation`.
        method: `full`, `lora` or `qlora`.
        adapters: fields of `LoraConfig`; not looked at for `full`.
        device: `cpu`, `cuda` or `meta`.
    """
    torch.manual_seed(0)
    fields = dict(config)
    found = AutoConfig.for_model(fields.pop("model_type"), **fields, max_position_embeddings=tokens)
    found.use_cache = False
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            found, dtype=getattr(torch, dtype), attn_implementation=attention
        )
    if method == "qlora":
        quantize(model, {"compress_statistics": True, "quant_type": "nf4"})
    if method != "full":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(task_type="CAUSAL_LM", **adapters)
        model = get_peft_model(model, lora, low_cpu_mem_usage=device == "meta")  # type: ignore[arg-type]
    if device != "meta":
        model.to(device)
    return model.train()


# --- What ways to save memory are compared on. ---

_TWIN_LAYERS = 8
_TWIN_TOKENS = 512
"""Of a batch."""
_WIDTHS = ("hidden_size", "intermediate_size", "head_dim", "vocab_size")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and one optimizer step of it. Its twin is the same architecture for the CPU: see `twin`.

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
        """Return the same case, small enough for a CPU, in float32.

        Width, vocabulary and row are divided by one number, the heads stay as many, and eight layers remain. So
        attention scores, logits and the inner width of a layer keep their share of its bytes.
        """
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


def _fields(shape: str, **more: Any) -> dict[str, Any]:
    """Return the config's fields of a published size, `model_type` among them."""
    fields = asdict(SHAPES[shape])
    if not fields["tie_word_embeddings"]:
        del fields["tie_word_embeddings"]
    return fields | more


_ALL = (
    Case(
        name="llama2_7b_lora_2048",
        title="Llama 2 7B, LoRA, 4 x 2,048 tokens",
        config=_fields("llama_7b"),
        method="lora",
        batch=4,
        tokens=2048,
        scale=16,
    ),
    Case(
        name="llama2_7b_lora_4096",
        title="Llama 2 7B, LoRA, 2 x 4,096 tokens",
        config=_fields("llama_7b"),
        method="lora",
        batch=2,
        tokens=4096,
        scale=16,
    ),
    Case(
        name="llama2_7b_lora_8192",
        title="Llama 2 7B, LoRA, 8,192 tokens",
        config=_fields("llama_7b"),
        method="lora",
        batch=1,
        tokens=8192,
        scale=16,
    ),
    Case(
        name="llama2_7b_lora_2048_eager",
        title="Llama 2 7B, LoRA, 2 x 2,048 tokens, eager attention",
        config=_fields("llama_7b"),
        method="lora",
        batch=2,
        tokens=2048,
        scale=16,
        attention="eager",
    ),
    Case(
        name="llama31_8b_qlora_8192",
        title="Llama 3.1 8B, QLoRA, 8,192 tokens",
        config=_fields("llama_8b"),
        method="qlora",
        batch=1,
        tokens=8192,
        scale=16,
    ),
    Case(
        name="llama31_8b_qlora_32768",
        title="Llama 3.1 8B, QLoRA, 32,768 tokens",
        config=_fields("llama_8b"),
        method="qlora",
        batch=1,
        tokens=32768,
        scale=16,
    ),
    Case(
        name="qwen3_06b_full_2048",
        title="Qwen3 0.6B, full fine-tune, 4 x 2,048 tokens",
        config=_fields("qwen3_0.6b"),
        method="full",
        batch=4,
        tokens=2048,
        scale=4,
        dtype="float32",
    ),
    Case(
        name="llama32_1b_full_2048",
        title="Llama 3.2 1.2B, full fine-tune, 4 x 2,048 tokens",
        config=_fields("llama_1b"),
        method="full",
        batch=4,
        tokens=2048,
        scale=8,
        dtype="float32",
    ),
    Case(
        name="llama2_13b_lora_2048",
        title="Llama 2 13B, LoRA, 2,048 tokens",
        config=_fields("llama_13b"),
        method="lora",
        batch=1,
        tokens=2048,
        scale=16,
    ),
    Case(
        name="olmoe_7b_lora_2048",
        title="OLMoE 1B-7B (64 experts, 8 of them), LoRA, 4 x 2,048 tokens",
        config=_fields("olmoe_1b_7b", num_experts=64, num_experts_per_tok=8),
        method="lora",
        batch=4,
        tokens=2048,
        scale=8,
        targets=_ATTENTION,
    ),
)
CASES = {case.name: case for case in _ALL}


def build(case: Case, device: str) -> nn.Module:
    """Return the model of a case or a twin in training mode, on `cpu`, `cuda` or `meta`, with its adapters."""
    # No dropout: compilers that recompute get it wrong, and are compared too.
    targets = list(case.targets) if isinstance(case.targets, tuple) else case.targets
    adapters = {"target_modules": targets, "r": case.rank, "lora_alpha": 2 * case.rank}
    return _built(case.config, case.tokens, case.dtype, case.attention, case.method, adapters, device)


def batch_of(case: Case, device: str) -> dict[str, Tensor]:
    """Return random tokens [B, S] that are their own labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(case.config["vocab_size"], (case.batch, case.tokens), generator=generator).to(device)
    # As a collator makes them: two tensors.
    return {"input_ids": ids, "labels": ids.clone()}


# --- What is predicted and measured. ---

LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
SEGMENTS = {"mode": "full", "segment_size": "sqrt", "nested": True}


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


def small_configuration(configuration: Configuration) -> tuple[Configuration, Shape]:
    """Return a configuration of the same kind that a CPU runs in a second, and its model's shape."""
    found = SHAPES[configuration.shape]
    shape = Shape(found.model_type, 64, 160, 4, 4, 2, 16, 512, found.tie_word_embeddings)
    return replace(configuration, tokens=configuration.tokens // 64), shape


def build_configuration(configuration: Configuration, shape: Shape, device: str) -> nn.Module:
    """Return the model in training mode on a device, `meta` among them, with adapters if the method asks for them."""
    sizes = configuration.tokens, configuration.dtype, "sdpa"
    return _built(asdict(shape), *sizes, configuration.method, LORA, device)


def rows(configuration: Configuration, shape: Shape, num_steps: int) -> list[dict[str, Tensor]]:
    """Return the data of so many steps: random token ids [S], which are their own labels."""
    count = num_steps * configuration.batch * configuration.accumulation
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (count, configuration.tokens), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]
