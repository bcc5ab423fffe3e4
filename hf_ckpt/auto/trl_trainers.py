"""The steps of trl's trainers as `auto` simulates them: whose loss is run, on what batch, with which second model.

trl is not imported: its trainers are known by the modules of their classes, its batches by their columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_ckpt.auto.simulation_coverage import refuse
from hf_ckpt.auto.trainer_loss import ModelInputs, TrainerLoss
from hf_ckpt.auto.trl_generation import generation_loss
from hf_ckpt.simulation.fake_model import meta_copy
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.trainer.batch import Batch
from hf_ckpt.trainer.largest_text_batch import lengths_in, rounded, stored_columns, tables
from hf_ckpt.trainer.other_models import weights_and_buffers
from hf_ckpt.upstream.trl import OWN_STEP

_TOKEN = 5
_MODULE = "trl.trainer.{}_trainer"
_LOSSES = ("compute_loss", *OWN_STEP)
_REFERENCE, _PROMPT = "ref_model", "prompt_ids"
_IDS, _MASK, _COMPLETION = "input_ids", "attention_mask", "completion_mask"
_KL = "KL_"


def trl_loss(
    trainer: Any, args: TrainingArguments, model: nn.Module, sharding: Sharding, dataset: Any, collator: Any
) -> TrainerLoss | None:
    """Return the loss of a trainer of trl; None of any other, and where the model's own is simulated in its place.

    Args:
        trainer: that trains now; None where none is found.
        args: its arguments.
        model: as it is trained.
        sharding: the engine around the model.
        dataset: of the training data. Nothing is drawn from it.
        collator: of its data loader.

    Raises:
        UnsupportedError: the step of this trainer is not simulated.
    """
    of_trl = next((kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), None)
    if of_trl is None:
        return None
    names = {_MODULE.format(name): name for name in (*_BATCHES, *_GENERATING)}
    if of_trl.__module__ not in names:
        raise refuse(
            "of trl's trainers the steps of SFT, DPO, KTO, Reward, GRPO and RLOO are, and that of "
            f"{of_trl.__name__} is not"
        )
    name = names[of_trl.__module__]
    if getattr(args, "activation_offloading", False):
        raise refuse("activation_offloading=True copies activations to the host as trl does, which is not simulated")
    why = _why_not(trainer, of_trl, sharding)
    if why and name in (*_WITH_REFERENCE, *_GENERATING):
        raise refuse(why)
    if name in _GENERATING:
        return generation_loss(trainer, sharding, dataset, _others(trainer, model), is_rloo=name == "rloo")
    return None if why else TrainerLoss(trainer, _BATCHES[name](trainer, dataset, collator), _others(trainer, model))


def _why_not(trainer: Any, of_trl: type, sharding: Sharding) -> str:
    """Return why the loss of a trainer is not run; empty where it is."""
    mro = type(trainer).__mro__
    derived = mro[: mro.index(of_trl)]
    own = [f"{kind.__name__}.{name}" for kind in derived for name in _LOSSES if name in vars(kind)]
    if getattr(trainer, "compute_loss_func", None) is not None:
        own.append("compute_loss_func")
    if own:
        return f"{own[0]} replaces the loss of {of_trl.__name__}, which alone is"
    if sharding.engine not in ("none", "ddp"):
        return f"the reference of {of_trl.__name__} runs under {sharding.engine} too, which gathers its weights"
    return ""


def _others(trainer: Any, model: nn.Module) -> dict[str, nn.Module]:
    reference = getattr(trainer, _REFERENCE, None)
    if reference is None:
        return {}
    own = {id(tensor) for tensor in weights_and_buffers(model)}
    if any(id(tensor) in own for tensor in weights_and_buffers(reference)):
        raise refuse(f"{type(trainer).__name__}.{_REFERENCE} shares weights with the model that is trained")
    return {_REFERENCE: meta_copy(reference)}


# --- Batches. ---


class _Texts(ModelInputs):
    """What SFT trains on: rows as any language model reads them, always with a mask unless they are packed."""

    def make(self, step: Step, model: nn.Module) -> dict[str, Tensor]:
        inputs = super().make(step, model)
        if not step.is_packed:
            inputs.setdefault(_MASK, torch.ones_like(inputs["input_ids"]))
        return inputs


_Columns = tuple[str, ...]


@dataclass(frozen=True)
class _Preferences(ModelInputs):
    """Rows that are liked or not, and numbers for each example."""

    columns: tuple[_Columns, ...]
    """Of each row of an example: the columns that are joined to it."""
    numbers: tuple[tuple[str, torch.dtype], ...]
    """Of each example, such as log-probabilities that were computed before training."""
    has_completions: bool = True
    """Whether the batch says which tokens are completions."""
    kl_lengths: tuple[int, int] | None = None
    """Of KTO with an estimate of the KL divergence: the tokens of the longest row, and those of the longest row with
    another example's completion."""

    takes_more_than_text = False

    @property
    def rows_per_example(self) -> int:
        return len(self.columns)

    @classmethod
    def of_dpo(cls, trainer: Any, dataset: Any, collator: Any) -> _Preferences:
        numbers = _reference_columns(trainer, "ref_chosen_logps", "ref_rejected_logps")
        return cls(((_PROMPT, "chosen_ids"), (_PROMPT, "rejected_ids")), numbers)

    @classmethod
    def of_reward(cls, trainer: Any, dataset: Any, collator: Any) -> _Preferences:
        has_margin = "margin" in (getattr(dataset, "column_names", None) or ())
        numbers = (("margin", torch.float32),) if has_margin else ()
        return cls((("chosen_ids",), ("rejected_ids",)), numbers, has_completions=False)

    @classmethod
    def of_kto(cls, trainer: Any, dataset: Any, collator: Any) -> _Preferences:
        columns, kl_columns = (_PROMPT, "completion_ids"), (_PROMPT, "KL_completion_ids")
        if not trainer.calculate_KL:
            return cls((columns,), (("label", torch.bool), *_reference_columns(trainer, "ref_logps")))
        lengths = [_lengths(dataset, collator, (each,)) for each in (columns, kl_columns)]
        if not all(lengths):
            raise refuse(
                f"{type(trainer).__name__} reads each prompt with another example's completion too, whose lengths are "
                "known of a data set with its own collator only"
            )
        numbers = _reference_columns(trainer, "ref_logps", "ref_KL_logps")
        kl_lengths = max(lengths[0]), max(lengths[1])
        return cls((columns,), (("label", torch.bool), *numbers), kl_lengths=kl_lengths)

    def largest(self, dataset: Any, collator: Any, num_examples: int, max_length: int | None) -> Batch | None:
        lengths = _lengths(dataset, collator, self.columns)
        if max_length is None and not lengths:
            return None
        rows = num_examples * self.rows_per_example
        longest = max(lengths) if max_length is None else max_length
        length = rounded(longest, getattr(collator, "pad_to_multiple_of", None) or 1)
        return Batch(rows, length, is_padded=length > min(lengths, default=0))

    def make(self, step: Step, model: nn.Module) -> dict[str, Tensor]:
        inputs = self._rows(step, step.seq_length)
        if self.kl_lengths is not None:
            longest, kl = self.kl_lengths
            # Shorter rows than those of the data are cut, and so are these.
            inputs |= self._rows(step, kl if step.seq_length >= longest else min(kl, step.seq_length), _KL)
        # Every second one is liked.
        numbers = torch.arange(step.batch_size) % 2 == 0
        return inputs | {name: numbers.to(dtype) for name, dtype in self.numbers}

    def _rows(self, step: Step, length: int, prefix: str = "") -> dict[str, Tensor]:
        shape = (step.rows, length)
        mask = torch.ones(shape, dtype=torch.long)
        if step.is_padded:
            # One token of the first row is padding, for code that checks whether there is any.
            mask[0, -1] = 0
        inputs = {_IDS: torch.full(shape, _TOKEN, dtype=torch.long), _MASK: mask}
        if self.has_completions:
            inputs[_COMPLETION] = (torch.arange(length) >= length // 2).long().expand(shape).contiguous()
        return {f"{prefix}{name}": value for name, value in inputs.items()}


def _reference_columns(trainer: Any, *names: str) -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((name, torch.float32) for name in names) if trainer.precompute_ref_logps else ()


def _lengths(dataset: Any, collator: Any, columns: tuple[_Columns, ...]) -> list[int]:
    """Return the tokens of each row; nothing where they are not known without computing examples."""
    needed = sorted({name for row in columns for name in row})
    is_trls = type(collator).__module__.startswith("trl.trainer.")
    if not is_trls or not set(needed) <= set(stored_columns(dataset)):
        return []
    most = getattr(collator, "max_length", None)
    found: list[int] = []
    for table in tables(dataset, needed):
        tokens = {name: list(lengths_in(table[name])) for name in needed}
        for row in columns:
            lengths = map(sum, zip(*(tokens[name] for name in row), strict=True))
            found.extend(length if most is None else min(length, most) for length in lengths)
    return found


_BATCHES: dict[str, Callable[[Any, Any, Any], ModelInputs]] = {
    "sft": lambda trainer, dataset, collator: _Texts(),
    "dpo": _Preferences.of_dpo,
    "kto": _Preferences.of_kto,
    "reward": _Preferences.of_reward,
}
_WITH_REFERENCE = ("dpo", "kto")
_GENERATING = ("grpo", "rloo")
