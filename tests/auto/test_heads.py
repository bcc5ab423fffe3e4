"""Policy `auto` with the heads of encoders: classes, answers, choices, embeddings; as followed steps show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DebertaV2Config,
    LlamaConfig,
    LlamaForQuestionAnswering,
    Trainer,
    TrainingArguments,
)

from hf_ckpt import HFCkptCallback
from hf_ckpt.measure.track_real_step import follow_trainer
from tests.training import VOCAB, arguments, losses

pytestmark = pytest.mark.slow

Example = dict[str, Any]
SIZES: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
SIZES |= {"vocab_size": VOCAB, "pad_token_id": 0}


class Embedder(nn.Module):
    """A bare encoder whose mean over a text is its embedding: each anchor is closest to its own positive."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return nn.functional.normalize(mean, dim=-1)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, positive_ids: Tensor, positive_mask: Tensor
    ) -> dict[str, Tensor]:
        anchors, positives = self.embed(input_ids, attention_mask), self.embed(positive_ids, positive_mask)
        scores = 20.0 * anchors @ positives.T
        return {"loss": nn.functional.cross_entropy(scores, torch.arange(len(scores))), "scores": scores}


@dataclass(frozen=True)
class Kind:
    """A model, and an example of so many tokens."""

    model: Callable[[], nn.Module]
    example: Callable[[int], Example]


def text(*shape: int) -> Tensor:
    return torch.randint(1, VOCAB, shape)


def pair(length: int) -> Example:
    texts = {"input_ids": text(length), "positive_ids": text(length // 2)}
    masks = {"attention_mask": torch.ones(length).long(), "positive_mask": torch.ones(length // 2).long()}
    return {**texts, **masks}


def bert(**changes: Any) -> BertConfig:
    return BertConfig(**SIZES, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, **changes)


KINDS = {
    "class": Kind(
        lambda: BertForSequenceClassification(bert(num_labels=3)),
        lambda length: {"input_ids": text(length), "labels": 2},
    ),
    "class of each token": Kind(
        lambda: BertForTokenClassification(bert(num_labels=3)),
        lambda length: {"input_ids": text(length), "labels": text(length) % 3},
    ),
    "answer": Kind(
        lambda: BertForQuestionAnswering(bert()),
        lambda length: {"input_ids": text(length), "start_positions": 1, "end_positions": 2},
    ),
    "answer of a decoder": Kind(
        lambda: LlamaForQuestionAnswering(LlamaConfig(**SIZES)),
        lambda length: {"input_ids": text(length), "start_positions": 1, "end_positions": 2},
    ),
    "choice": Kind(
        lambda: BertForMultipleChoice(bert()),
        lambda length: {"input_ids": text(4, length // 2), "labels": 3},
    ),
    "embedding": Kind(lambda: Embedder(BertModel(bert(), add_pooling_layer=False)), pair),
}


def run_of(kind: Kind, folder: Path, budget: str | None, length: int) -> tuple[Trainer, HFCkptCallback]:
    """A run under `auto`; without a plan where there is no budget."""
    torch.manual_seed(0)
    data: Any = [kind.example(length) for _ in range(8)]
    # A later step is followed, which proves nothing.
    callback = HFCkptCallback("auto", memory_budget=budget or "1GiB", prove="off")
    args = TrainingArguments(**arguments(folder, remove_unused_columns=False))
    return Trainer(kind.model(), args, train_dataset=data, callbacks=[] if budget is None else [callback]), callback


def predicted(callback: HFCkptCallback, mode: str | None = None) -> int:
    planning = callback._planning
    assert planning is not None
    return planning.predicted_bytes if mode is None else planning.simulator(planning.batch).simulate(mode).peak_bytes


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [16, 256])
def test_followed_step_is_the_predicted_one_and_keeps_a_budget(tmp_path: Path, name: str, length: int) -> None:
    run, callback = run_of(KINDS[name], tmp_path, "1GiB", length)
    plain = follow_trainer(run).peak_bytes
    assert abs(predicted(callback) / plain - 1) < 0.01
    if length == 16:
        return
    budget = (predicted(callback, "full") + plain) // 2
    run, callback = run_of(KINDS[name], tmp_path, f"{budget}B", length)
    followed = follow_trainer(run).peak_bytes
    assert followed <= budget < 0.97 * plain
    assert abs(predicted(callback) / followed - 1) < 0.01
    without, _ = run_of(KINDS[name], tmp_path, None, length)
    without.train()
    assert losses(run) == losses(without)


def deberta(length: int) -> nn.Module:
    settings = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": length}
    # Older transformers cannot import its class without a warning: not before it is needed.
    return AutoModelForMaskedLM.from_config(DebertaV2Config(**SIZES, **settings, type_vocab_size=0))


def masked(length: int) -> Example:
    return {"input_ids": text(length), "labels": text(length), "attention_mask": torch.ones(length).long()}


def in_order(length: int) -> Example:
    return {"input_ids": text(length), "labels": text(length), "next_sentence_label": 1}


ONCE = {
    # It computes with the mask, in the mask's own type.
    "mask that hides nothing": Kind(lambda: deberta(64), masked),
    "second label of each example": Kind(lambda: BertForPreTraining(bert()), in_order),
}


@pytest.mark.parametrize("name", ONCE)
def test_further_inputs_are_predicted(tmp_path: Path, name: str) -> None:
    run, callback = run_of(ONCE[name], tmp_path, "1GiB", 64)
    assert follow_trainer(run).peak_bytes == pytest.approx(predicted(callback), rel=0.001)
