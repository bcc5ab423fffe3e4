"""Of which kind a model is, by its config: what class is built, what its rows are, and what a recipe can do with it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
)

from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe.trainer_kinds import TrainerKind
from hf_ckpt.upstream.transformers import classes_by_config

SPEECH = "input_features"
"""The main input of a model that hears."""


def auto_class(kind: TrainerKind, config: PreTrainedConfig) -> Any:
    """Return what builds and loads the model that a trainer of this kind takes."""
    if kind.reads_images:
        return AutoModelForImageTextToText
    if kind.scores_rows:
        return AutoModelForSequenceClassification
    return sequence_to_sequence_class(config) or AutoModelForCausalLM


def sequence_to_sequence_class(config: PreTrainedConfig) -> Any:
    """Return what builds a model with an encoder and a decoder; None for any other config."""
    if not getattr(config, "is_encoder_decoder", False):
        return None
    classes = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
    return next((each for each in classes if type(config) in classes_by_config(each)), None)


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether a model fills in masked words and writes no text."""
    may_write = sequence_to_sequence_class(config) is not None or getattr(config, "is_decoder", False)
    return type(config) in classes_by_config(AutoModelForMaskedLM) and not may_write


def needs_images(config: PreTrainedConfig) -> bool:
    """Whether a model can be built only with its tower of images."""
    return type(config) in classes_by_config(AutoModelForImageTextToText) and type(config) not in classes_by_config(
        AutoModelForCausalLM
    )


def fitting_config(auto: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config that a class takes: that of the text alone, where the class is a model of text alone."""
    found = classes_by_config(auto).get(type(config), None)
    wanted = getattr(found, "config_class", None)
    text: PreTrainedConfig = config.get_text_config()
    is_text_alone = wanted is not None and not isinstance(config, wanted) and isinstance(text, wanted)
    return text if is_text_alone else config


def fitting_attention(auto: Any, config: PreTrainedConfig, wanted: str | None) -> str | None:
    """Return the attention to build a model with; None for its own choice, where it cannot run torch's."""
    found = classes_by_config(auto).get(type(config), None)
    return None if wanted == "sdpa" and not getattr(found, "_supports_sdpa", True) else wanted


def task_type(kind: TrainerKind, config: PreTrainedConfig) -> str | None:
    """Return PEFT's name for what a model does; None where its wrapper passes on whatever the forward takes."""
    found = sequence_to_sequence_class(config)
    if kind.scores_rows or found is None:
        return kind.task_type
    return "SEQ_2_SEQ_LM" if found is AutoModelForSeq2SeqLM else None


def check_trainable(config: PreTrainedConfig, kind: TrainerKind) -> None:
    """Refuse to train by a recipe what its data and its trainer do not fit.

    Raises:
        RecipeError: the model has an encoder and a decoder, or is an encoder that should write.
    """
    if kind.is_text and is_encoder(config):
        raise RecipeError(
            f"trainer: a model of type {config.model_type} is an encoder, and writes no text. Write trainer: "
            "classification and model.num_labels, how many classes there are."
        )
    if kind.is_text and sequence_to_sequence_class(config) is not None:
        raise RecipeError(
            f"model.name_or_path: a model of type {config.model_type} has an encoder and a decoder, and a recipe "
            "trains models that write on. Train it in a script, with Seq2SeqTrainer and HFCkptCallback; hf-ckpt "
            "estimate and plan answer for it."
        )


def num_positions(model: nn.Module) -> int | None:
    """Return the tokens for which a model has learnt positions, the fewest of its halves; None where it has none."""
    found = [
        module.num_embeddings - getattr(module, "offset", 0)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS
    ]
    return min(found, default=None)


_POSITIONS = ("position_embeddings", "embed_positions", "wpe")
