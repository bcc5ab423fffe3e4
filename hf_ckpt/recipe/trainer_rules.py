"""Contradictions between a recipe's trainer and its sections. See `rules`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hf_ckpt.recipe.schema import DEFAULT_MAX_LENGTH, Draft, Refusal
from hf_ckpt.recipe.trainer_kinds import DEFAULT_COMPLETION, IMAGES, REWARDS, TrainerKind

_SAID_ELSEWHERE = {
    "max_length": "data.max_length",
    "dataset_num_proc": "data.num_proc",
    "dataset_text_field": "data.columns",
    "completion_only_loss": "data.loss_on",
    "assistant_only_loss": "data.loss_on",
    "packing": "data.packing",
    "eval_packing": "data.packing",
    "packing_strategy": "data.packing",
    "padding_free": "data.packing",
    "truncation_mode": "data.max_length",
    "chat_template_path": "data.chat_template",
    "trust_remote_code": "model.trust_remote_code",
    "model_init_kwargs": "model",
    "eos_token": "model.tokenizer",
    "pad_token": "model.tokenizer",
    "dataset_kwargs": "data",
}
"""Arguments of trl's trainers that a recipe says in a section of its own."""
_OF_TEXT = ("format", "loss_on", "packing")


def check_trainer(draft: Draft) -> Iterator[Refusal]:
    """Check what a trainer makes of the sections; of one that cannot be had nothing is known."""
    if draft.trainer is not None:
        for rule in _RULES:
            yield from rule(draft, draft.trainer)


def _trainer_reads_its_sections(draft: Draft, kind: TrainerKind) -> Iterator[Refusal]:
    for name, home in _SAID_ELSEWHERE.items() if kind.of_trl else ():
        if draft.has(f"training.{name}"):
            yield f"training.{name}", f"a recipe says this in {home}. Write it there."
    for name in () if kind.is_text else ("packing",) if kind.reads_images else _OF_TEXT:
        if draft.has(f"data.{name}"):
            what = f"trainer {kind.name} reads the columns {', '.join(kind.columns)}"
            yield f"data.{name}", f"belongs to plain text, and {what}. Remove it."
    if not kind.is_text and draft.get("checkpointing.micro_batch"):
        yield "checkpointing.micro_batch", f"is chosen for plain text, not for trainer {kind.name}. Remove it."


def _images_are_read(draft: Draft, kind: TrainerKind) -> Iterator[Refusal]:
    if draft.get("data.format") != IMAGES:
        for name in ("max_pixels", "max_images"):
            if draft.has(f"data.{name}"):
                yield f"data.{name}", "belongs to data.format: images. Remove it, or write that."
        return
    if kind.is_text:
        yield "data.format", "images are read by trl's SFTTrainer. Write trainer: sft."
    if kind.reads_images and draft.has("model.config"):
        yield "model.config", "images are read by the processor of trained weights. Write model.name_or_path."
    if kind.reads_images and draft.get("data.loss_on") == "completion":
        yield "data.loss_on", "messages have turns. Use assistant, or all."


def _labels_are_counted(draft: Draft, kind: TrainerKind) -> Iterator[Refusal]:
    if kind.name == "classification" and not draft.has("model.num_labels"):
        yield "model.num_labels", "missing. Write how many classes there are; 1 for a number to predict."
    elif kind.name != "classification" and draft.has("model.num_labels"):
        yield "model.num_labels", "belongs to trainer: classification. Remove it, or use that."


def _reference_is_one(draft: Draft, kind: TrainerKind) -> Iterator[Refusal]:
    if draft.get("training.sync_ref_model") and (draft.has("lora") or draft.has("adapter")):
        yield "training.sync_ref_model", "with an adapter the reference is the model without it. Remove one of the two."


def written_rewards(draft: Draft) -> list[str]:
    """Return the names of what rewards completions; none where they are not a list of names."""
    found = draft.written(REWARDS)
    return found if isinstance(found, list) and all(isinstance(name, str) and name for name in found) else []


def _completions_are_rewarded(draft: Draft, kind: TrainerKind) -> Iterator[Refusal]:
    if not kind.generates:
        if draft.has(REWARDS):
            yield REWARDS, "belongs to trainer: grpo. Remove it, or use that."
        return
    if not written_rewards(draft):
        yield (
            REWARDS,
            "expected a list of names. Write reward_funcs: [think_format_reward], another function of trl's, or where "
            "one of your own lies, as module:function.",
        )
    completion = draft.get("training.max_completion_length", DEFAULT_COMPLETION)
    length = draft.get("data.max_length", DEFAULT_MAX_LENGTH)
    if completion is None:
        yield "training.max_completion_length", "expected tokens, which bound what is generated."
    elif length <= completion:
        yield (
            "data.max_length",
            f"is of a prompt with its completion, and training.max_completion_length = {completion} leaves none for "
            "the prompt. Raise it.",
        )
    if draft.get("training.beta") and not (draft.has("lora") or draft.has("adapter")):
        yield (
            "training.beta",
            "without an adapter trl loads the reference by its name, without what the recipe says of it. Write "
            "beta: 0, or train an adapter.",
        )


_RULES: tuple[Callable[[Draft, TrainerKind], Iterator[Refusal]], ...] = (
    _trainer_reads_its_sections,
    _images_are_read,
    _labels_are_counted,
    _reference_is_one,
    _completions_are_rewarded,
)
