"""The loss of a recipe's trainer before there is a run: trl's own trainer, made of a model on `meta` and without data.

Its constructor runs as it will for a training: what it does to the model, and what its loss reads, is there. What
`transformers.Trainer` would do for a device, an optimizer or a data loader is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Trainer

from hf_ckpt.auto.trainer_loss import TrainerLoss
from hf_ckpt.auto.trl_trainers import trl_loss
from hf_ckpt.errors import RecipeError, UnsupportedError
from hf_ckpt.estimate.image_rows import image_rows_of
from hf_ckpt.loading.rewards import is_model
from hf_ckpt.loading.trainer import make_trainer, trainer_class
from hf_ckpt.loading.training_args import arguments_class, implied
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.trainer_kinds import REWARDS
from hf_ckpt.simulation.fake_model import meta_copy
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.trainer.other_models import weights_and_buffers
from hf_ckpt.units import format_bytes

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


@dataclass(frozen=True)
class OwnStep:
    """What a trainer of trl makes of a model, and its loss."""

    model: nn.Module  # On `meta`, with adapters.
    loss: TrainerLoss
    what: str  # Whose loss it is and whom it asks, in words.


def own_step(recipe: Recipe, base: Any, sharding: Sharding) -> OwnStep:
    """Return the model and the loss of a recipe whose trainer is one of trl.

    Args:
        recipe: the recipe.
        base: the model on `meta`, quantised and without adapters.
        sharding: the engine.

    Raises:
        RecipeError: trl refuses the recipe, or its step is not simulated.
    """
    images = image_rows_of(recipe, base) if recipe.kind.reads_images else None
    _check_rewards(recipe)
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
        return OwnStep(model, replace(loss, batch=images), f"{_words(loss, recipe)}; {images.describe()}")
    return OwnStep(model, _of_any_length(loss), _words(loss, recipe))


def _check_rewards(recipe: Recipe) -> None:
    models = [name for name in recipe.reward_funcs if is_model(name)]
    if models:
        raise RecipeError(
            f"{REWARDS}: {models[0]} is a model. It is on the device with the one that is trained, and is not counted. "
            "Estimate without it, and add what it takes."
        )


def running_step(
    recipe: Recipe, base: Any, step: Step, place: torch.device
) -> tuple[nn.Module, dict[str, Tensor], Callable[[dict[str, Tensor]], Tensor]]:
    """Return the step of a recipe whose trainer is one of trl, to be run: model with adapters, inputs, loss of inputs.

    Args:
        recipe: the recipe.
        base: the model on the device, without adapters.
        step: its sizes, and the loss of `own_step`.
        place: the device.
    """
    trainer = _unstarted(recipe, base, place)
    own: Any = step.loss
    others = {name: getattr(trainer, name) for name in own.others}
    stand_in, model = replace(own, trainer=trainer).bound_to(trainer.model, others, is_cuda=False).args
    stand_in.accelerator.device = place
    inputs = {name: value.to(place) for name, value in own.make_inputs(step, model).items()}
    return model, inputs, partial(stand_in.compute_loss, model)


def _of_any_length(loss: TrainerLoss) -> TrainerLoss:
    """Let rows with another example's completion be as long as those with their own, whatever data there will be."""
    batch: Any = loss.batch
    if getattr(batch, "kl_lengths", None) is None:
        return loss
    return replace(loss, batch=replace(batch, kl_lengths=(sys.maxsize, sys.maxsize)))


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
            prepare_model=_as_it_is,
            state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None),
        )

    def add_callback(self, callback: Any) -> None:
        """Leave out what acts between steps only."""

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset

    def _send_telemetry(self) -> None:
        """Tell nobody of what is not run."""


def _as_it_is(model: Any, **options: Any) -> Any:
    return model


def _unstarted(recipe: Recipe, base: Any, place: torch.device) -> Any:
    of_trl = trainer_class(recipe)
    # After trl's class and its bases, and before the Trainer; what it overrides of those goes first.
    own = {name: vars(_Unstarted)[name] for name in ("_prepare_dataset", "_send_telemetry")}
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
    if AcceleratorState._shared_state:
        yield
        return
    Accelerator(cpu=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state()
        GradientState._reset_state()


def _unrewarded(completions: list[Any], **others: Any) -> list[float]:
    """Stand where functions are that reward completions."""
    return [0.0] * len(completions)


def _arguments(recipe: Recipe) -> Any:
    written = {name: value for name, value in recipe.training.items() if name not in _OF_ENGINES}
    # Its devices stay as they are: a run may be going on in this process.
    if not PartialState._shared_state:
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
