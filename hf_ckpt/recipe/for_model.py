"""A recipe for a model by its name, of which nothing is known but the model and the way to train it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_ckpt.policy.policy import AUTO
from hf_ckpt.recipe.recipe import Recipe, recipe_of
from hf_ckpt.recipe.trainer_kinds import IMAGES

METHODS = ("lora", "qlora", "full")
DEFAULT_RANK = 16
_DATA = "rows.jsonl"
_4BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


# As in the recipe qwen3_vl_8b_lora: all-linear would reach into the tower of images.
_OF_TEXT = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


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
    classes: int = 0
    """Of which each sequence gets one; 0 for a model that writes."""
    is_reward: bool = False
    """Whether each sequence gets a score, learnt from pairs."""
    images: int = 0
    """Of an example."""
    pixels: int = 2**20
    """Of the largest image."""
    dtype: str = "bfloat16"
    """Of matrix products: bfloat16, or float16 where the GPU has no matrix units for the other."""

    def recipe_values(self, model: str) -> dict[str, Any]:
        """Return the recipe for a model: an id on the hub, or a folder."""
        # The gradient scaler that float16 needs takes no gradients of float16: what is trained is in float32.
        stored = "float32" if self.dtype == "float16" and self.method == "full" else self.dtype
        values: dict[str, Any] = {"model": {"name_or_path": model, "dtype": stored, "attn_implementation": "sdpa"}}
        if self.method != "full":
            targets = _OF_TEXT if self.images else "all-linear"
            rank = {"r": self.rank, "lora_alpha": 2 * self.rank, "target_modules": targets}
            values["lora"] = rank
        if self.method == "qlora":
            values["quantization"] = {**_4BIT, "bnb_4bit_compute_dtype": self.dtype}
        values["data"] = {"path": self.data, "max_length": self.length}
        if self.images:
            values["trainer"] = "sft"
            values["data"] |= {"format": IMAGES, "max_images": self.images, "max_pixels": self.pixels}
        elif self.is_reward:
            values["trainer"] = "reward"
        elif self.classes:
            values["trainer"] = "classification"
            values["model"]["num_labels"] = self.classes
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
