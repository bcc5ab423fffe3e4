"""The trainer that a recipe names: its arguments, held against this machine, and itself, with what rewards its model.

A recipe gives functions that reward the names that trl's own command gives them: one of trl's functions, such as
`think_format_reward`, or where a function lies, as `module.function` or `module:function`. What has a slash is a model
that scores rows, by its hub id or folder.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.utils.import_utils import is_torch_bf16_gpu_available

from hf_ckpt.errors import RecipeError, did_you_mean
from hf_ckpt.loading.adapter_targets import unmatched_untold
from hf_ckpt.loading.model import adapter_config, base_model, build_model
from hf_ckpt.loading.sharding_engine import check_one_engine
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.schema import DEFAULT_MAX_LENGTH
from hf_ckpt.recipe.trainer_kinds import REWARDS


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
    installed: list[str] = get_available_reporting_integrations()  # type: ignore[no-untyped-call]  # upstream
    if missing := [name for name in args.report_to or [] if name not in installed]:
        raise RecipeError(
            f"training.report_to names {', '.join(missing)}, which is not installed here. Install it, or use "
            f"{' or '.join(['none', *installed])}."
        )
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
    # Older cards emulate it, at a fraction of their speed.
    is_cuda = torch.cuda.is_available()
    if not (torch.cuda.is_bf16_supported(including_emulation=False) if is_cuda else is_torch_bf16_gpu_available()):
        device = torch.cuda.get_device_name() if is_cuda else "this device"
        raise RecipeError(
            f"training.bf16 is true, but {device} has no bfloat16. Use float16: {_float16_overrides(recipe)}"
        )


def _float16_overrides(recipe: Recipe) -> str:
    """Return the overrides that turn a bfloat16 recipe into a float16 one."""
    found = ["training.bf16=false training.fp16=true"]
    if recipe.model.get("dtype") == "bfloat16":
        # Gradients are scaled for float32 weights: adapters are in float32, other weights are as loaded.
        found.append(f"model.dtype={'float32' if recipe.adapter_section is None else 'float16'}")
    if (recipe.quantization or {}).get("bnb_4bit_compute_dtype") == "bfloat16":
        found.append("quantization.bnb_4bit_compute_dtype=float16")
    return " ".join(found)


# --- The trainer. ---


_FEW_PARAMETERS = 1 << 22  # A model with fewer of them is tiny: its operators take microseconds.


def use_one_thread_if_tiny(model: torch.nn.Module) -> None:
    """Compute in one thread where more would only wait for each other, unless the user has said how many.

    On a machine that does something else meanwhile, or a container with fewer cores than it sees, they make tiny steps
    slower many times over.
    """
    if "OMP_NUM_THREADS" not in os.environ and sum(each.numel() for each in model.parameters()) < _FEW_PARAMETERS:
        torch.set_num_threads(1)


def build_trained_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Build the model that a recipe's trainer takes: trl puts the adapter on it, so that it knows what is beneath."""
    if recipe.kind.of_trl:
        return base_model(recipe, tokenizer)
    model: Any = build_model(recipe, tokenizer)
    if recipe.kind.scores_rows:
        # The score is that of the last token that is no padding.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model


def make_trainer(
    recipe: Recipe,
    model: Any,
    args: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    data: Any,
    callbacks: list[TrainerCallback],
    *,
    reward_funcs: Sequence[Any] = (),
    made_of: type[Trainer] | None = None,
    is_empty: bool = False,
) -> Trainer:
    """Make the trainer of a recipe; refuse what trl refuses.

    `model`: of `build_trained_model`. `data`: has `train`, `evaluation` and `collator`. `reward_funcs`: functions and
    names of models that reward completions, where they are generated. `made_of`: the trainer's class, if not that of
    transformers or the one that trl has. `is_empty`: whether the model has no weights.
    """
    given = {
        "model": model,
        "args": args,
        "train_dataset": data.train,
        "eval_dataset": data.evaluation,
        "data_collator": data.collator,
        "processing_class": tokenizer,
        "callbacks": callbacks,
    }
    if not recipe.kind.of_trl:
        return (made_of or Trainer)(**given)
    given |= {"peft_config": adapter_config(recipe, is_empty=is_empty)}
    if recipe.kind.generates:
        given |= {"reward_funcs": list(reward_funcs)}
        del given["data_collator"]
    if recipe.adapter_section is None and not getattr(args, "precompute_ref_log_probs", True):
        # It asks a second model; with an adapter it would ask the model without it. trl would load it by its name,
        # without what the recipe says of dtype, quantisation and code.
        given["ref_model"] = copy.deepcopy(model)
    kind = made_of or trainer_class(recipe)
    try:
        with unmatched_untold():
            return kind(**given)
    except (ValueError, NotImplementedError) as error:
        raise RecipeError(f"trainer {recipe.trainer}: trl refuses the recipe: {error}") from error
    except OSError as error:
        models = ", ".join(filter(is_model, recipe.reward_funcs))
        if not models:
            raise
        what = str(error).partition("\n")[0].rstrip(".")
        raise RecipeError(f"{REWARDS}: of the models {models} one cannot be loaded: {what}.") from error


def check_reads_text(recipe: Recipe, command: str) -> None:
    """Refuse a recipe whose batches a command cannot make."""
    if recipe.kind.generates:
        raise RecipeError(
            f"trainer {recipe.trainer} trains on what it generates, and {command} makes its batches itself. Write a "
            f"recipe without trainer with the same model, adapter and checkpointing, and {command} that."
        )
    if recipe.kind.reads_images:
        raise RecipeError(
            f"data.format = images: {command} makes its batches of text. Write a recipe on text with the same model, "
            f"adapter and checkpointing, and {command} that."
        )


def trainer_class(recipe: Recipe) -> type[Trainer]:
    """Return the class of trl's trainer."""
    import trl

    found: type[Trainer] = getattr(trl, f"{recipe.kind.of_trl}Trainer")
    return found


# --- The functions that reward what a model writes, found by the names that a recipe gives them. ---


_OF_TRL: dict[str, dict[str, Any]] = {
    "accuracy_reward": {},
    "reasoning_accuracy_reward": {},
    "think_format_reward": {},
    # Makes a function: with what trl's command gives it.
    "get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256},
}
_NEED_MATH_VERIFY = ("accuracy_reward", "reasoning_accuracy_reward")


def reward_functions(names: Sequence[str], folder: Path) -> list[Any]:
    """Return what each name of `reward_funcs` stands for; of a model its name, which trl loads it by.

    `folder`: of the recipe; modules are looked for there too, and where the command runs.
    """
    with _importable(folder, Path.cwd()):
        return [_reward(name) for name in names]


def _reward(name: str) -> Any:
    if is_model(name):
        return name
    if name in _OF_TRL:
        function = _function("trl.rewards", name, name)
        return function(**_OF_TRL[name]) if _OF_TRL[name] else function
    module, separator, attribute = name.rpartition(":" if ":" in name else ".")
    if not separator:
        near = did_you_mean(name, _OF_TRL)
        raise _no_reward(
            name, f"trl has no such function.{near} It has {', '.join(_OF_TRL)}; yours is written module:function."
        )
    return _function(module, attribute, name)


def is_model(name: str) -> bool:
    """Whether a name is that of a model, and of no function."""
    return "/" in name


def _function(module: str, attribute: str, name: str) -> Callable[..., Any]:
    try:
        holder = importlib.import_module(module)
    # Whatever it raises while it is imported; an empty name is a ValueError.
    except Exception as error:
        what = str(error).partition("\n")[0].rstrip(".")
        raise _no_reward(name, f"module {module} cannot be imported ({type(error).__name__}: {what}).") from error
    found = getattr(holder, attribute, None)
    if not callable(found):
        near = did_you_mean(attribute, [each for each in vars(holder) if not each.startswith("_")])
        raise _no_reward(name, f"module {module} has no function {attribute}.{near}")
    if getattr(found, "__module__", "").startswith("trl.") and attribute in _NEED_MATH_VERIFY:
        _check_math_verify(name)
    made: Callable[..., Any] = found
    return made


def _check_math_verify(name: str) -> None:
    """Refuse now what trl would refuse when the first completions are there."""
    from trl.import_utils import is_math_verify_available

    if not is_math_verify_available():
        raise _no_reward(name, "needs math_verify, which is not installed. Run: pip install math-verify")


def _no_reward(name: str, what: str) -> RecipeError:
    return RecipeError(f'{REWARDS}: "{name}": {what}')


@contextmanager
def _importable(*folders: Path) -> Iterator[None]:
    """Let modules in these folders be imported, where nothing installed has their name."""
    found = list(sys.path)
    sys.path.extend(str(folder.resolve()) for folder in folders)
    try:
        yield
    finally:
        sys.path[:] = found
