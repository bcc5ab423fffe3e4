"""Steps of the Trainer on a tiny model: followed while they run, and simulated from what was asked for."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_ckpt import HFCkptCallback
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.structure.quantized_experts import ExpertsBitsAndBytesConfig

VOCAB = 512
LENGTH = 64
_MIXTURE: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
_SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 2},
    "gemma3_text": {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 16},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": _MIXTURE,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"sliding_window": 16},
    "qwen3_next": {
        **_MIXTURE,
        "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "deepseek_v3": {
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "moe_intermediate_size": 8,
    },
}
_GPT2 = {"n_embd": 64, "n_head": 4, "n_positions": LENGTH}
_TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of the Trainer.

    Args:
        model_type: of the model.
        layers: how many it has.
        policy: what the callback is given; None trains without it.
        options: of the policy.
        adapters: whether LoRA with dropout is trained, or everything; or the PEFT config of what is trained.
        is_4bit: whether the weights are quantised.
        quantizes_experts: whether those of a mixture are too, where the others are.
        attention: `sdpa` or `eager`.
        dtype: of the weights.
        bf16: autocast.
        accumulation: micro-batches.
        batch_size: rows of one.
        length: of a row, in tokens.
        rows: `full`, `padded` or `packed`.
        more: further arguments of the Trainer.
    """

    model_type: str = "llama"
    layers: int = 3
    policy: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    adapters: bool | PeftConfig = False
    is_4bit: bool = False
    quantizes_experts: bool = False
    attention: str = "sdpa"
    dtype: str = "float32"
    bf16: bool = False
    accumulation: int = 1
    batch_size: int = 2
    length: int = LENGTH
    rows: str = "full"
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "per_device_train_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "bf16": self.bf16,
            **self.more,
        }

    @property
    def step(self) -> Step:
        """What the simulation is told of it."""
        optimizer = {key: value for key, value in self.more.items() if key.startswith("optim_")}
        return Step(
            batch_size=self.batch_size,
            seq_length=self.length,
            is_padded=self.rows == "padded",
            is_packed=self.rows == "packed",
            autocast="bfloat16" if self.bf16 else None,
            gradient_accumulation_steps=self.accumulation,
            max_grad_norm=self.more.get("max_grad_norm", 1.0),
            optim=self.more.get("optim", "adamw_torch_fused"),
            optim_arguments=optimizer,
        )

    def model(self) -> nn.Module:
        """Build it, always the same one."""
        torch.manual_seed(0)
        sizes = _GPT2 if self.model_type == "gpt2" else {**_COMMON, **_SIZES.get(self.model_type, {})}
        config = CONFIG_MAPPING[self.model_type](**_TOKENS, **sizes, num_hidden_layers=self.layers)
        options = {"attn_implementation": self.attention, "dtype": getattr(torch, self.dtype)}
        model = AutoModelForCausalLM.from_config(config, **options)
        if self.is_4bit:
            model = _in_4_bit(model, options, quantizes_experts=self.quantizes_experts)
        if not self.adapters:
            return model
        if isinstance(self.adapters, PeftConfig):
            # PEFT writes into it.
            return get_peft_model(model, copy.deepcopy(self.adapters))
        targets: dict[str, Any] = {"fan_in_fan_out": True} if self.model_type == "gpt2" else {}
        targets["target_modules"] = ["q_proj", "v_proj"] if self.model_type == "mixtral" else "all-linear"
        return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, **targets))

    def data(self) -> list[dict[str, Tensor]]:
        """Return the rows of three steps."""
        count = 3 * self.batch_size * self.accumulation
        generator = torch.Generator().manual_seed(0)
        return [self._row(tokens) for tokens in torch.randint(3, VOCAB, (count, self.length), generator=generator)]

    def _row(self, tokens: Tensor) -> dict[str, Tensor]:
        row = {"input_ids": tokens, "labels": tokens.clone()}
        if self.rows == "padded":
            row["attention_mask"] = torch.ones_like(tokens)
            row["attention_mask"][-self.length // 4 :] = 0
            row["labels"][-self.length // 4 :] = -100
        if self.rows == "packed":
            row["position_ids"] = torch.arange(self.length) % (self.length // 2)
        return row

    def trainer(self, folder: Path, model: nn.Module) -> Trainer:
        given = {"output_dir": str(folder), "use_cpu": True, "save_strategy": "no", "report_to": "none"}
        args = TrainingArguments(**given, disable_tqdm=True, logging_steps=1, max_steps=3, **self.arguments)
        callbacks: list[TrainerCallback] = []
        if self.policy is not None:
            callbacks.append(HFCkptCallback(self.policy, input_require_grads=False, **self.options))
        return Trainer(model=model, args=args, train_dataset=self.data(), callbacks=callbacks)  # type: ignore[arg-type]

    def followed(self, folder: Path) -> StepMemory:
        """Run it for real, and follow the second step."""
        return follow_trainer(self.trainer(folder, self.model()))

    def simulated(self, **options: Any) -> StepMemory:
        """Predict its second step."""
        policy = None if self.policy is None else Policy.parse(self.policy, **self.options)
        return simulate_step(self.model(), policy, self.step, CPU, **options)


def _in_4_bit(model: PreTrainedModel, options: dict[str, Any], *, quantizes_experts: bool) -> PreTrainedModel:
    kind = ExpertsBitsAndBytesConfig if quantizes_experts else BitsAndBytesConfig
    config = kind(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded: PreTrainedModel = type(model).from_pretrained(folder, quantization_config=config, **options)
    return loaded


def differences(simulated: StepMemory, followed: StepMemory) -> dict[str, float]:
    """Return by which fraction a prediction is off: of the peak, and of each category that has over 1 % of it."""
    found = {"peak": simulated.peak_bytes / followed.peak_bytes - 1}
    for category in {*simulated.by_category, *followed.by_category}:
        bytes_of = [memory.by_category.get(category, 0) for memory in (simulated, followed)]
        if max(bytes_of) > followed.peak_bytes / 100:
            found[category.value] = bytes_of[0] / bytes_of[1] - 1 if bytes_of[1] else float("inf")
    return found
