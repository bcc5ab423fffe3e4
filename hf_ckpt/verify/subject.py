"""What all trials of one verification share: a recipe, a tokenizer, batches, and what the user does to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed

from hf_ckpt.loading.model import build_model
from hf_ckpt.loading.training_args import training_arguments
from hf_ckpt.recipe.recipe import Recipe

MAX_ACCUMULATION = 2
"""Micro-batches of an optimizer step; two show that gradients add up, more only take longer."""
_PROMPT_TOKENS = 6
_ADAPTER_SCALE = 0.02


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One recipe as its trials run it.

    Args:
        recipe: with weights in `model.name_or_path`.
        tokenizer: the model's.
        rows: training rows with `input_ids` and `labels`.
        collator: turns rows into a batch.
        setup: what the user's own script does to the model once it is built.
    """

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    rows: Sequence[Mapping[str, Any]]
    collator: Any
    setup: Callable[[nn.Module], None] | None = None

    def build(self, seed: int) -> Any:
        """Build the model as the recipe says, the same one at each call."""
        set_seed(seed)
        model = build_model(self.recipe, self.tokenizer)
        keep_4bit_weights(model)
        _wake_adapters(model)
        if self.setup is not None:
            self.setup(model)
        return model

    def arguments(self, folder: Path, num_steps: int, *, save_at: int | None, is_planned: bool) -> TrainingArguments:
        """Return the recipe's own `TrainingArguments`, but for folder, length, saving and reporters."""
        own = dict(self.recipe.training)
        changed: dict[str, Any] = {
            "output_dir": str(folder),
            "max_steps": num_steps,
            "gradient_accumulation_steps": min(int(own.get("gradient_accumulation_steps", 1)), MAX_ACCUMULATION),
            # A warm-up is longer than the trial, and its first step has a learning rate of zero.
            "warmup_steps": 0,
            "save_strategy": "no" if save_at is None else "steps",
            "save_steps": save_at or 1,
            "save_total_limit": None,
            "logging_strategy": "no",
            "eval_strategy": "no",
            "eval_on_start": False,
            "load_best_model_at_end": False,
            "push_to_hub": False,
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_num_workers": 0,
        }
        for name in ("warmup_ratio", "logging_steps", "eval_steps"):
            own.pop(name, None)
        if not is_planned:
            own.pop("gradient_checkpointing", None)
            own.pop("activation_checkpointing", None)
        return training_arguments(replace(self.recipe, training={**own, **changed}))

    def in_float32(self) -> Subject:
        """Return the same in float32."""
        recipe, quantization = self.recipe, self.recipe.quantization
        if quantization is not None:
            quantization = {**quantization, "bnb_4bit_compute_dtype": "float32"}
        training = {**recipe.training, "bf16": False, "fp16": False}
        model = {**recipe.model, "dtype": "float32"}
        return replace(self, recipe=replace(recipe, model=model, training=training, quantization=quantization))

    def prompt(self) -> torch.Tensor:
        """Return the first tokens of the first row, [1, S]."""
        return torch.tensor([list(self.rows[0]["input_ids"][:_PROMPT_TOKENS])])


def keep_4bit_weights(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights anew in evaluation, as it does on a CPU with AVX512-BF16.

    It rounds their scales to bfloat16 in place, so that a run which was evaluated or sampled from trains on other
    weights afterwards. On a GPU nothing of this happens.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # an attribute of Linear4bit


@torch.no_grad()
def _wake_adapters(model: nn.Module) -> None:
    """Give adapters that start as zeros small random values.

    A LoRA matrix B of zeros hides faults: its matrix A gets no gradient before the second step, and an adapter that
    was never loaded gives the same logits as one that was.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dim() >= 2 and not parameter.any():
            parameter.normal_(std=_ADAPTER_SCALE)
