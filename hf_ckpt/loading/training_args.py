"""A recipe's `training` section as `TrainingArguments`, held against this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.utils.import_utils import is_torch_bf16_gpu_available

from hf_ckpt.errors import RecipeError
from hf_ckpt.loading.sharding_engine import check_one_engine
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.schema import DEFAULT_MAX_LENGTH


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """Make the `TrainingArguments` of a recipe. Nothing is written."""
    check_one_engine(recipe)
    _check_precision(recipe)
    _check_folder(Path(recipe.training["output_dir"]))
    try:
        args: TrainingArguments = arguments_class(recipe)(**{**implied(recipe), **recipe.training})
    # OSError: a file that the section names, such as DeepSpeed's.
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise RecipeError(f"training: {recipe.kind.arguments} refuse it: {error}") from error
    _check_reporters(args)
    if args.device.type == "cpu" and "dataloader_pin_memory" not in recipe.training:
        # Memory is pinned for a device; without one torch warns in each run.
        args.dataloader_pin_memory = False
    return args


def arguments_class(recipe: Recipe) -> type[TrainingArguments]:
    """Return the class of the arguments of a recipe's trainer."""
    if not recipe.kind.of_trl:
        return TrainingArguments
    import trl

    found: type[TrainingArguments] = getattr(trl, recipe.kind.arguments)
    return found


def implied(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of a trainer of trl that a recipe says elsewhere, or that mean what they mean everywhere.

    trl trains in bfloat16 and with activation checkpointing if nothing is said; a recipe does what it says.
    """
    if not recipe.kind.of_trl:
        return {}
    is_text = recipe.kind.is_text
    always = {"bf16": False, "gradient_checkpointing": None}
    if recipe.kind.generates:
        # Longer prompts are left out here, and completions have a length of their own.
        return always
    return {
        **always,
        # What is tokenised here is cut here.
        "max_length": None if is_text else recipe.data.get("max_length", DEFAULT_MAX_LENGTH),
        "dataset_num_proc": recipe.data.get("num_proc"),
        **({"dataset_kwargs": {"skip_prepare_dataset": True}} if is_text else {}),
        **({"assistant_only_loss": recipe.data.get("loss_on") == "assistant"} if recipe.kind.reads_images else {}),
    }


def check_can_be_written(folder: Path) -> None:
    """Make a run's output folder and write to it, and leave no trace of that."""
    made: list[Path] = []
    try:
        for path in reversed([path for path in (folder, *folder.absolute().parents) if not path.exists()]):
            path.mkdir()
            made.append(path)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"x")
    except OSError as error:
        raise RecipeError(
            f"training.output_dir is {folder}, but it cannot be made and written to: {error.strerror}. Name another "
            "folder, or mend this one."
        ) from error
    finally:
        for path in reversed(made):
            # Somebody may have put something there in the meantime.
            with contextlib.suppress(OSError):
                path.rmdir()


def _check_folder(folder: Path) -> None:
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise RecipeError(f"training.output_dir is {folder}: {error.strerror}. Name another folder.") from error
    if not nearest.is_dir():
        raise RecipeError(f"training.output_dir is {folder}, but {nearest} is a file. Name another folder.")
    if not os.access(nearest, os.W_OK):
        raise RecipeError(f"training.output_dir is {folder}, but {nearest} cannot be written to. Name another folder.")


def _check_precision(recipe: Recipe) -> None:
    training = recipe.training
    is_cpu = training.get("use_cpu", False) or not torch.accelerator.is_available()
    if training.get("fp16") and is_cpu:
        raise RecipeError(
            "training.fp16 is true, but there is no GPU to scale gradients on. On a CPU use training.fp16=false, with "
            "training.bf16=true or in float32."
        )
    if not training.get("bf16") or training.get("use_cpu", False):
        return
    if is_cpu:
        raise RecipeError(
            "training.bf16 is true, but there is no GPU. To train on the CPU all the same, slowly, use "
            f"training.use_cpu=true. On a GPU without bfloat16 use float16: {_float16_overrides(recipe)}"
        )
    if not _has_bfloat16():
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "this device"
        raise RecipeError(
            f"training.bf16 is true, but {device} has no bfloat16. Use float16: {_float16_overrides(recipe)}"
        )


def _has_bfloat16() -> bool:
    # Older cards emulate it, at a fraction of their speed.
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(is_torch_bf16_gpu_available())


def _float16_overrides(recipe: Recipe) -> str:
    """Return the overrides that turn a bfloat16 recipe into a float16 one."""
    found = ["training.bf16=false training.fp16=true"]
    if recipe.model.get("dtype") == "bfloat16":
        # Gradients are scaled for float32 weights: adapters are in float32, other weights are as loaded.
        found.append(f"model.dtype={'float32' if recipe.adapter_section is None else 'float16'}")
    if (recipe.quantization or {}).get("bnb_4bit_compute_dtype") == "bfloat16":
        found.append("quantization.bnb_4bit_compute_dtype=float16")
    return " ".join(found)


def _check_reporters(args: TrainingArguments) -> None:
    installed: list[str] = get_available_reporting_integrations()  # type: ignore[no-untyped-call]  # upstream
    missing = [name for name in args.report_to or [] if name not in installed]
    if missing:
        raise RecipeError(
            f"training.report_to names {', '.join(missing)}, which is not installed here. Install it, or use "
            f"{' or '.join(['none', *installed])}."
        )
