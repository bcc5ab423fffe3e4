"""The loss of a recipe's trainer before there is a run: trl's own trainer, made of a model on `meta` and without data.

Its constructor runs as it will for a training: what it does to the model, and what its loss reads, is there. What
`transformers.Trainer` would do for a device, an optimizer or a data loader is left out.

Where data has images, its largest batch is made of bounds: `data.max_pixels` bounds an image, `data.max_images` the
images of an example, `data.max_length` a row. The tensors are those that a processor of Qwen's makes: every image is a
grid of patches, and a few patches become one token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Trainer

from hf_ckpt.auto.batch_of_forward import forward_names, without_adapter
from hf_ckpt.auto.trainer_loss import ModelInputs, TrainerLoss
from hf_ckpt.auto.trl_trainers import trl_loss
from hf_ckpt.errors import RecipeError, UnsupportedError
from hf_ckpt.loading.images import TOKENS_AROUND, check_images_fit
from hf_ckpt.loading.trainer import arguments_class, implied, is_model, make_trainer, trainer_class
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.trainer_kinds import REWARDS
from hf_ckpt.simulation.fake_model import meta_copy
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.trainer.other_models import weights_and_buffers
from hf_ckpt.units import format_bytes
from hf_ckpt.upstream.accelerate import forget_state, shared_state
from hf_ckpt.upstream.torch import disable_current_modes
from hf_ckpt.upstream.trl import WITHOUT_DATA

# What is of a device, a launch or a report, and no part of a loss.
_WITHOUT: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
    "optim": "adamw_torch",
    "report_to": "none",
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "push_to_hub": False,
}
_OF_ENGINES = ("deepspeed", "fsdp", "fsdp_config", "tf32", "torch_compile", "accelerator_config")
_PRECOMPUTE = "precompute_ref_log_probs"


def own_step(recipe: Recipe, base: Any, sharding: Sharding) -> tuple[nn.Module, TrainerLoss, str]:
    """Return the model of a recipe whose trainer is one of trl, on `meta` with adapters, its loss, and that in words.

    `base`: the model on `meta`, quantised and without adapters. Raises RecipeError where trl refuses the recipe, or its
    step is not simulated.
    """
    images = image_rows_of(recipe, base) if recipe.kind.reads_images else None
    if rewards := [name for name in recipe.reward_funcs if is_model(name)]:
        raise RecipeError(
            f"{REWARDS}: {rewards[0]} is a model. It is on the device with the one that is trained, and is not "
            "counted. Estimate without it, and add what it takes."
        )
    trainer = _unstarted(recipe, base, torch.device("meta"))
    model = meta_copy(trainer.model)
    try:
        loss = trl_loss(trainer, trainer.args, model, sharding, trainer.train_dataset, trainer.data_collator)
    except UnsupportedError as error:
        raise RecipeError(f"trainer {recipe.trainer}: {error}") from error
    if loss is None:
        raise RecipeError(
            f"trainer {recipe.trainer}: its loss is simulated in one process and under DDP, not under "
            f"{sharding.engine}. Write a recipe without trainer for an estimate of the model's own loss."
        )
    if images is not None:
        return model, replace(loss, batch=images), f"{_words(loss, recipe)}; {images.describe()}"
    batch: Any = loss.batch
    if getattr(batch, "kl_lengths", None) is not None:
        # Rows with another example's completion may be as long as those with their own, whatever data there will be.
        loss = replace(loss, batch=replace(batch, kl_lengths=(sys.maxsize, sys.maxsize)))
    return model, loss, _words(loss, recipe)


def running_step(
    recipe: Recipe, base: Any, step: Step, place: torch.device
) -> tuple[nn.Module, dict[str, Tensor], Callable[[dict[str, Tensor]], Tensor]]:
    """Return the step of a recipe whose trainer is one of trl, to be run: model with adapters, inputs, loss of inputs.

    `base`: the model on the device, without adapters. `step`: its sizes, and the loss of `own_step`.
    """
    trainer = _unstarted(recipe, base, place)
    own: Any = step.loss
    others = {name: getattr(trainer, name) for name in own.others}
    stand_in, model = replace(own, trainer=trainer).bound_to(trainer.model, others, is_cuda=False).args
    stand_in.accelerator.device = place
    inputs = {name: value.to(place) for name, value in own.make_inputs(step, model).items()}
    return model, inputs, partial(stand_in.compute_loss, model)


def _words(loss: TrainerLoss, recipe: Recipe) -> str:
    kind = type(loss.trainer).__name__
    if recipe.training.get(_PRECOMPUTE):
        return f"{kind}.compute_loss; what the reference says is computed before training"
    for other in loss.others.values():
        num_bytes = sum(tensor.nbytes for tensor in weights_and_buffers(other))
        return f"{kind}.compute_loss; its reference is a second model, {format_bytes(num_bytes)}"
    asks = hasattr(loss.trainer, "ref_model") and loss.trainer.beta != 0.0
    return f"{kind}.compute_loss" + ("; its reference is the model without its adapter" if asks else "")


# --- A trainer that does not start. ---


class _Unstarted(Trainer):
    """Stands where a trainer of trl has the one of transformers."""

    def __init__(self, model: Any, args: Any, data_collator: Any, train_dataset: Any, **others: Any) -> None:
        self.model = self.model_wrapped = model
        self.args, self.data_collator, self.train_dataset = args, data_collator, train_dataset
        self.eval_dataset = self.compute_metrics = self.compute_loss_func = self.label_smoother = None
        self.processing_class = others["processing_class"]
        self.is_fsdp_enabled = self.is_deepspeed_enabled = False
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self.accelerator = SimpleNamespace(
            parallelism_config=None,
            num_processes=1,
            autocast=nullcontext,
            is_main_process=True,
            device=torch.device("cpu"),
            prepare_model=lambda model, **options: model,
            state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None),
        )

    def add_callback(self, callback: Any) -> None:
        """Leave out what acts between steps only."""

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset

    def _send_telemetry(self) -> None:
        """Tell nobody of what is not run."""


def _unstarted(recipe: Recipe, base: Any, place: torch.device) -> Any:
    of_trl = trainer_class(recipe)
    # After trl's class and its bases, and before the Trainer; what it overrides of those goes first.
    own = {name: vars(_Unstarted)[name] for name in WITHOUT_DATA}
    kind = type(of_trl.__name__, (of_trl, _Unstarted), own)
    data = SimpleNamespace(train=_rows(recipe), evaluation=None, collator=None)
    args = _arguments(recipe)
    is_empty = place.type == "meta"
    with place, _seeded_by_rank() if recipe.kind.generates else nullcontext():
        trainer: Any = make_trainer(
            recipe, base, args, _tokenizer(), data, [], reward_funcs=[_unrewarded], made_of=kind, is_empty=is_empty
        )
    if recipe.training.get(_PRECOMPUTE):
        # Computed in the constructor, of rows that are not there.
        trainer.precompute_ref_logps, trainer.ref_model = True, None
    return trainer


@contextmanager
def _seeded_by_rank() -> Iterator[None]:
    """Let accelerate tell the rank, which GRPO's constructor adds to its seed; it forgets so afterwards."""
    if shared_state(AcceleratorState):
        yield
        return
    Accelerator(cpu=True)
    try:
        yield
    finally:
        forget_state()


def _unrewarded(completions: list[Any], **others: Any) -> list[float]:
    """Stand where functions are that reward completions."""
    return [0.0] * len(completions)


def _arguments(recipe: Recipe) -> Any:
    written = {name: value for name, value in recipe.training.items() if name not in _OF_ENGINES}
    # Its devices stay as they are: a run may be going on in this process.
    if not shared_state(PartialState):
        PartialState(cpu=True)
    changed = {**_WITHOUT, "accelerator_config": {"use_configured_state": True}}
    # All tokens have a label: as many, or more.
    changed |= {"assistant_only_loss": False} if recipe.kind.reads_images else {}
    changed |= {_PRECOMPUTE: False} if _PRECOMPUTE in written else {}
    try:
        return arguments_class(recipe)(**{**implied(recipe), **written, **changed})
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(f"training: {recipe.kind.arguments} refuse it: {error}") from error


def _rows(recipe: Recipe) -> Dataset:
    """Return one example of every column that trl makes, so that none is made."""
    names = ("prompt", "chosen", "rejected", "completion", "text")
    tokens = {
        name: [[0, 0]] for name in (*(f"{name}_ids" for name in names), "KL_completion_ids", "input_ids", "labels")
    }
    kind = recipe.kind
    # Images are the collator's: the trainer is the same without them.
    columns = ("text",) if kind.reads_images else (*kind.columns, *kind.more_columns)
    texts = {name: ["a"] for name in columns if name not in ("label", "margin")}
    return Dataset.from_dict({**texts, **tokens, "label": [True]})


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "</s>": 1, "a": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")  # type: ignore[no-untyped-call]  # upstream


# --- Rows with images, made of bounds instead of data. ---

_TOKEN = 5
_OF_PATCHES = ("patch_size", "spatial_merge_size", "temporal_patch_size")
_MOST_OBLONG = 200  # The processor refuses images whose sides differ by more.


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
        with disable_current_modes():
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
        return f"each sequence with {images} of {self.tokens_per_image:,} tokens"


def largest_grid(most: int) -> tuple[int, int]:
    """Return height and width of the largest image of at most so many tokens, the squarest of those."""
    heights = range(max(1, isqrt(most // _MOST_OBLONG)), isqrt(most) + 1)
    height = max(heights, key=lambda height: (height * (most // height), height))
    return height, most // height


@dataclass(frozen=True)
class FixedImageRows(ModelInputs):
    """Rows with images that are all read at one size, and become as many tokens each."""

    max_images: int = 1
    tokens_per_image: int = 1
    sides: int = 1

    def make(self, step: Step, model: nn.Module) -> dict[str, Tensor]:
        """Return a micro-batch of the step's size. In rows that are too short for all images there are fewer."""
        config: Any = without_adapter(model).config
        image_token = _image_token(config)
        count = min(self.max_images, step.seq_length // (self.tokens_per_image + TOKENS_AROUND))
        image = [_TOKEN, *[image_token] * self.tokens_per_image, _TOKEN]
        with disable_current_modes():
            ids = torch.full((step.rows, step.seq_length), _TOKEN)
            ids[:, : len(image) * count] = torch.tensor(image * count, dtype=torch.long)
            mask = torch.ones_like(ids)
            # For code that checks whether there is any padding.
            mask[0, -1] = int(not step.is_padded)
            made = {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}
            for name in ("token_type_ids", "mm_token_type_ids"):
                if name in forward_names(model):
                    made[name] = (ids == image_token).long()
        if not count:
            return made
        pixels = (step.rows * count, config.vision_config.num_channels, self.sides, self.sides)
        return made | {"pixel_values": next(model.parameters()).new_empty(pixels, dtype=torch.float32)}

    def describe(self) -> str:
        """Return the bounds of a row in words."""
        images = "1 image" if self.max_images == 1 else f"{self.max_images} images"
        read = f"read at {self.sides} x {self.sides} pixels"
        return f"each sequence with {images} of {self.tokens_per_image:,} tokens, {read}"


def _image_token(config: Any) -> int:
    found = getattr(config, "image_token_id", None)
    return int(config.image_token_index if found is None else found)


def _fixed_rows_of(recipe: Recipe, config: Any) -> FixedImageRows | None:
    """Return the rows of a model that reads every image at one size, as Gemma 3 and LLaVA do; None of another."""
    vision: Any = getattr(config, "vision_config", None)
    sides = getattr(vision, "image_size", None)
    tokens = getattr(config, "mm_tokens_per_image", getattr(config, "image_seq_length", None))
    if isinstance(sides, int) and getattr(config, "model_type", None) == "llava":
        # `image_seq_length` is not read by the model, and a config may leave it at its default. CLIP's class token is
        # in front of the patches, and "default" leaves out what comes first.
        patches, is_cut = (sides // vision.patch_size) ** 2, config.vision_feature_select_strategy == "default"
        tokens = patches + (vision.model_type == "clip_vision_model") - is_cut
    if not isinstance(tokens, int) or not isinstance(sides, int) or hasattr(config, "image_grid_pinpoints"):
        return None
    check_images_fit(recipe.data, tokens)
    return FixedImageRows(max_images=recipe.data["max_images"], tokens_per_image=tokens, sides=sides)


def image_rows_of(recipe: Recipe, model: nn.Module) -> ImageRows | FixedImageRows:
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
    if (fixed := _fixed_rows_of(recipe, config)) is not None:
        return fixed
    if not (hasattr(config, "image_token_id") and all(hasattr(vision, name) for name in _OF_PATCHES)):
        raise RecipeError(
            f"data.max_pixels = {data['max_pixels']}: how many tokens an image becomes is known of models that read it "
            f"as a grid of patches, such as Qwen3-VL, or at one size, such as Gemma 3, and not of "
            f"{type(model).__name__}. Train under policy: auto with "
            "a memory_budget, which plans for the largest batch when the run begins."
        )
    tokens = data["max_pixels"] // (vision.patch_size * vision.spatial_merge_size) ** 2
    check_images_fit(data, tokens)
    return ImageRows(max_images=data["max_images"], tokens_per_image=max(1, tokens))
