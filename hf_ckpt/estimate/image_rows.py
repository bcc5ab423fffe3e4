"""The largest batch of a recipe whose data has images, made of bounds instead of data.

`data.max_pixels` bounds an image, `data.max_images` the images of an example, `data.max_length` a row. The tensors are
those that a processor of Qwen's makes: every image is a grid of patches, and a few patches become one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hf_ckpt.auto.largest_batch_in_data import forward_names, without_adapter
from hf_ckpt.auto.trainer_loss import ModelInputs
from hf_ckpt.errors import RecipeError
from hf_ckpt.loading.images import TOKENS_AROUND, check_images_fit
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.step import Step

_TOKEN = 5
_OF_PATCHES = ("patch_size", "spatial_merge_size", "temporal_patch_size")
_MOST_OBLONG = 200
"""The processor refuses images whose sides differ by more."""


@dataclass(frozen=True)
class ImageRows(ModelInputs):
    """Rows that each hold as many images as an example may have, of the most pixels, and a text up to their end."""

    max_images: int = 1
    tokens_per_image: int = 1

    def make(self, step: Step, model: nn.Module) -> dict[str, Tensor]:
        """Return a micro-batch of the step's size. In rows that are too short for it an image is smaller."""
        config: Any = without_adapter(model).config
        vision, length = config.vision_config, step.seq_length
        fitting = length // self.max_images - TOKENS_AROUND
        height, width = largest_grid(max(1, min(self.tokens_per_image, fitting)))
        num_images, merge = step.rows * self.max_images, vision.spatial_merge_size
        start, end = (getattr(config, f"vision_{name}_token_id", _TOKEN) for name in ("start", "end"))
        image = [start, *[config.image_token_id] * (height * width), end]
        with _disable_current_modes():
            ids = torch.full((step.rows, length), _TOKEN)
            ids[:, : len(image) * self.max_images] = torch.tensor(image * self.max_images)
            mask = torch.ones_like(ids)
            # For code that checks whether there is any padding.
            mask[0, -1] = int(not step.is_padded)
            grid = torch.tensor([[1, merge * height, merge * width]] * num_images)
            made = {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask, "image_grid_thw": grid}
            if "mm_token_type_ids" in forward_names(model):
                made["mm_token_type_ids"] = (ids == config.image_token_id).long()
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        patches = num_images * height * width * merge**2
        return made | {"pixel_values": next(model.parameters()).new_empty((patches, patch), dtype=torch.float32)}

    def describe(self) -> str:
        """Return the bounds of a row in words."""
        images = "1 image" if self.max_images == 1 else f"{self.max_images} images"
        return f"each row with {images} of {self.tokens_per_image:,} tokens"


def largest_grid(most: int) -> tuple[int, int]:
    """Return height and width of the largest image of at most so many tokens, the squarest of those."""
    heights = range(max(1, isqrt(most // _MOST_OBLONG)), isqrt(most) + 1)
    height = max(heights, key=lambda height: (height * (most // height), height))
    return height, most // height


def image_rows_of(recipe: Recipe, model: nn.Module) -> ImageRows:
    """Return what a recipe whose data has images trains on at most.

    Raises:
        RecipeError: it names no bounds, or the model makes something else of images.
    """
    data, config = recipe.data, getattr(model, "config", None)
    if not {"max_pixels", "max_images"} <= data.keys():
        raise RecipeError(
            "data.format = images: how large a batch is, is not known before images are read. Bound them by "
            "data.max_pixels and data.max_images, or train under policy: auto with a memory_budget, which plans for "
            "the largest batch when the run begins."
        )
    vision: Any = getattr(config, "vision_config", None)
    if not (hasattr(config, "image_token_id") and all(hasattr(vision, name) for name in _OF_PATCHES)):
        raise RecipeError(
            f"data.max_pixels = {data['max_pixels']}: how many tokens an image becomes is known of models that read it "
            f"as a grid of patches, such as Qwen3-VL, and not of {type(model).__name__}. Train under policy: auto with "
            "a memory_budget, which plans for the largest batch when the run begins."
        )
    tokens = data["max_pixels"] // (vision.patch_size * vision.spatial_merge_size) ** 2
    check_images_fit(data, tokens)
    return ImageRows(max_images=data["max_images"], tokens_per_image=max(1, tokens))
