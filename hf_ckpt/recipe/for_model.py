"""A recipe for a model by its name, of which nothing is known but the model and the way to train it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_ckpt.policy.policy import AUTO
from hf_ckpt.recipe.recipe import Recipe, recipe_of

METHODS = ("lora", "qlora", "full")
DEFAULT_RANK = 16
_DATA = "rows.jsonl"
_4BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@dataclass(frozen=True)
class Training:
    """How a model is trained, under policy `auto`."""

    method: str = "lora"
    """One of `METHODS`."""
    rank: int = DEFAULT_RANK
    """Of LoRA's matrices."""
    length: int = 2048
    """Tokens of the longest row."""
    batch: int = 1
    """Rows of a micro-batch."""
    data: str = _DATA
    dtype: str = "bfloat16"
    """Of matrix products: bfloat16, or float16 where the GPU has no matrix units for the other."""

    def recipe_values(self, model: str) -> dict[str, Any]:
        """Return the recipe for a model: an id on the hub, or a folder."""
        # The gradient scaler that float16 needs takes no gradients of float16: what is trained is in float32.
        stored = "float32" if self.dtype == "float16" and self.method == "full" else self.dtype
        values: dict[str, Any] = {"model": {"name_or_path": model, "dtype": stored, "attn_implementation": "sdpa"}}
        if self.method != "full":
            rank = {"r": self.rank, "lora_alpha": 2 * self.rank, "target_modules": "all-linear"}
            values["lora"] = rank
        if self.method == "qlora":
            values["quantization"] = {**_4BIT, "bnb_4bit_compute_dtype": self.dtype}
        values["data"] = {"path": self.data, "max_length": self.length}
        values["checkpointing"] = {"policy": AUTO}
        values["training"] = {
            "output_dir": f"runs/{Path(model).name.lower()}_{self.method}",
            "per_device_train_batch_size": self.batch,
            "learning_rate": 1e-5 if self.method == "full" else 2e-4,
            "optim": "adamw_torch_fused",
            ("bf16" if self.dtype == "bfloat16" else "fp16"): True,
        }
        return values

    def recipe_for(self, model: str, overrides: Iterable[str] = ()) -> Recipe:
        """Return the recipe, checked as any other. Raises `RecipeError`."""
        return recipe_of(self.recipe_values(model), model, overrides)
