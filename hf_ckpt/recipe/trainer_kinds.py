"""The trainers that a recipe may name, and what each needs of model and data. Imports none of them."""

from __future__ import annotations

from dataclasses import dataclass

Columns = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrainerKind:
    """One value of `trainer`."""

    name: str = ""  # As a recipe writes it; empty for the Trainer of transformers on plain text.
    of_trl: str = ""  # What trl's names of trainer and arguments begin with, such as `DPO`; empty for none of trl's.
    columns: Columns = ()  # Of the data set, without which it cannot train; none where rows are plain text.
    more_columns: Columns = ()  # That it reads where they are there.
    token_columns: tuple[Columns, ...] = ()  # What trl makes of an example: for each row, the columns that are joined.
    scores_rows: bool = False  # Whether the model gives each row a number or a class, and writes no text.
    reads_images: bool = False  # Whether the model sees images, which its processor reads when a batch is made.
    generates: bool = False  # Whether it trains on what the model writes, and functions reward.

    @property
    def is_text(self) -> bool:
        """Whether it trains on text as the `data` section reads it."""
        return not self.columns

    @property
    def task_type(self) -> str:
        """PEFT's name for what the model does."""
        return "SEQ_CLS" if self.scores_rows else "CAUSAL_LM"

    @property
    def arguments(self) -> str:
        """The name of the class whose fields the `training` section takes."""
        return f"{self.of_trl}Config" if self.of_trl else "TrainingArguments"


TEXT = TrainerKind()
_PAIR = ("chosen", "rejected")
_KINDS = (
    TrainerKind(name="sft", of_trl="SFT"),
    TrainerKind(
        name="dpo",
        of_trl="DPO",
        columns=_PAIR,
        more_columns=("prompt",),
        token_columns=(("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids")),
    ),
    TrainerKind(
        name="kto",
        of_trl="KTO",
        columns=("prompt", "completion", "label"),
        token_columns=(("prompt_ids", "completion_ids"),),
    ),
    TrainerKind(
        name="reward",
        of_trl="Reward",
        columns=_PAIR,
        more_columns=("prompt", "margin"),
        token_columns=(("chosen_ids",), ("rejected_ids",)),
        scores_rows=True,
    ),
    TrainerKind(name="grpo", of_trl="GRPO", columns=("prompt",), generates=True),
    TrainerKind(name="classification", columns=("text", "label"), token_columns=(("input_ids",),), scores_rows=True),
)
TRAINERS = {kind.name: kind for kind in _KINDS}  # By the word in a recipe.

IMAGES = "images"  # The value of `data.format` for messages with images.
_WITH_IMAGES = TrainerKind(name="sft", of_trl="SFT", columns=("messages", "images"), reads_images=True)


def kind_of(trainer: str | None, data_format: object) -> TrainerKind:
    """Return what a trainer needs that reads such data."""
    if trainer == _WITH_IMAGES.name and data_format == IMAGES:
        return _WITH_IMAGES
    return TEXT if trainer is None else TRAINERS[trainer]


REWARDS = "reward_funcs"  # The key of the functions that reward what a model writes, as in trl's own command.
DEFAULT_COMPLETION = 512  # Of trl's `max_completion_length`, in tokens.

NOT_POSSIBLE = {
    "rloo": "generates in each step and trains on what comes out, which a recipe does not describe. Write a script "
    'with trl\'s RLOOTrainer and HFCkptCallback("auto")',
}
"""Trainers that a recipe cannot have, and why."""

OLDEST_TRL = (1, 16)
