"""Policy `auto` with images, sound and two texts: every tensor of a batch is simulated, as followed steps show."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset as Table
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForQuestionAnswering,
    CLIPConfig,
    CLIPModel,
    IntervalStrategy,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
    default_data_collator,
)

from hf_ckpt import HFCkptCallback
from hf_ckpt.auto import largest_multimodal_batch_in_data
from hf_ckpt.auto.batch_of_forward import batch_of_forward
from hf_ckpt.auto.largest_multimodal_batch_in_data import collated_batches
from hf_ckpt.errors import BudgetError, UnsupportedError
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.policy.policy import Mode
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Step
from hf_ckpt.trainer.batch import outline, with_values
from tests import zoo
from tests.training import arguments, changed, llama, losses, weights

pytestmark = pytest.mark.slow

Example = dict[str, Any]
SIZES: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
BART: Any = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 64}
TOKENS: Any = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
IMAGE = {"image_size": 16, "patch_size": 4}


@dataclass(frozen=True)
class Kind:
    """A model, and examples for it.

    Args:
        model: builds it, always the same one.
        example: makes one from a text's length and the number of images, or how long another text or a sound is.
    """

    model: Callable[[], nn.Module]
    example: Callable[[int, int], Example]


def text(length: int) -> Tensor:
    return torch.randint(40, 60, (length,))


# --- Images in a text. ---


@cache
def case(model_type: str) -> zoo.Case:
    return zoo.build(model_type, num_layers=3)


def vision_language(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    return zoo.build(model_type, num_layers=3).model


def with_images(model_type: str, length: int, num_images: int) -> Example:
    """A text with an image after each of its first tokens, as the model's own processor would make it."""
    known = case(model_type)
    config: Any = known.model.config
    token = next(found for name in zoo.IMAGE_TOKENS if (found := getattr(config, name, None)))
    per_image = int((known.inputs["input_ids"][0] == token).sum())
    words = text(length)
    images = [part for word in words[:num_images] for part in (word[None], torch.full((per_image,), token))]
    ids = torch.cat([*images, words[num_images:]])
    types = (ids == token).long()
    made: Example = {"input_ids": ids, "labels": ids.masked_fill(ids == token, -100)}
    made |= {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in known.inputs}
    per_row = known.inputs["pixel_values"].shape[0] // 2
    made["pixel_values"] = torch.randn(per_row * num_images, *known.inputs["pixel_values"].shape[1:])
    if "image_grid_thw" in known.inputs:
        made["image_grid_thw"] = known.inputs["image_grid_thw"][:1].expand(num_images, 3)
    return made


JOINED = ("pixel_values", "image_grid_thw")


def collate(examples: list[Example]) -> Example:
    """Pad texts, and join images."""
    made: Example = {}
    for name in examples[0]:
        values = [example[name] for example in examples]
        if name in JOINED:
            made[name] = torch.cat(values)
        elif isinstance(values[0], Tensor) and values[0].dim() == 1:
            made[name] = pad_sequence(values, batch_first=True, padding_value=-100 if name == "labels" else 0)
        elif isinstance(values[0], bool):
            made[name] = values[0]
        else:
            made[name] = torch.stack([torch.as_tensor(value) for value in values])
    if "input_ids" in made:
        made["attention_mask"] = (made["input_ids"] != 0).long()
    return made


# --- Other models. ---


def whisper() -> nn.Module:
    torch.manual_seed(0)
    own = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64, **TOKENS}
    return WhisperForConditionalGeneration(WhisperConfig(**{**BART, **own, "suppress_tokens": None}))


def sound(length: int, _: int) -> Example:
    return {"input_features": torch.randn(8, 32), "labels": text(length)}


def wav2vec2() -> nn.Module:
    torch.manual_seed(0)
    own: Any = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
    own |= {"vocab_size": 64, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return Wav2Vec2ForCTC(Wav2Vec2Config(**SIZES, **own, layerdrop=0.0, mask_time_prob=0.3, mask_time_length=2))


def speech(length: int, other: int) -> Example:
    return {"input_values": torch.randn(60 * length), "labels": text(4 * other)}


def vit() -> nn.Module:
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**SIZES, **IMAGE, num_labels=3))


def image(_: int, __: int) -> Example:
    return {"pixel_values": torch.randn(1, 3, 16, 16), "labels": 1}


def clip() -> nn.Module:
    torch.manual_seed(0)
    words = {**SIZES, "vocab_size": 64, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    return CLIPModel(CLIPConfig(text_config=words, vision_config={**SIZES, **IMAGE}, projection_dim=8))


def pair(length: int, _: int) -> Example:
    return {"input_ids": text(length), "pixel_values": torch.randn(1, 3, 16, 16), "return_loss": True}


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 3, "num_heads": 2, "vocab_size": 64}
    return T5ForConditionalGeneration(T5Config(**sizes, **TOKENS))


def bart() -> nn.Module:
    torch.manual_seed(0)
    return BartForConditionalGeneration(BartConfig(**BART, max_position_embeddings=64, **TOKENS))


def two_texts(length: int, other: int) -> Example:
    return {"input_ids": text(length), "labels": text(8 * other)}


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForQuestionAnswering(BertConfig(**SIZES, vocab_size=64))


def question(length: int, _: int) -> Example:
    return {"input_ids": text(length), "start_positions": 1, "end_positions": 2}


VISION_LANGUAGE = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3")
KINDS = {name: Kind(partial(vision_language, name), partial(with_images, name)) for name in VISION_LANGUAGE}
KINDS |= {
    "whisper": Kind(whisper, sound),
    "wav2vec2 with CTC": Kind(wav2vec2, speech),
    "vit": Kind(vit, image),
    "clip": Kind(clip, pair),
    "t5": Kind(t5, two_texts),
    "bart": Kind(bart, two_texts),
    "question answering": Kind(bert, question),
}


# --- Runs. ---


def examples(kind: Kind, sizes: list[tuple[int, int]]) -> list[Example]:
    torch.manual_seed(0)
    return [kind.example(*each) for each in sizes]


EQUAL = [(16, 1)] * 8
LARGER = [(48, 2)] * 16
MIXED = [(16, 1), (8, 1), (32, 1), (12, 3), (20, 2), (40, 1), (9, 1), (30, 1)]


def trainer(
    kind: Kind, folder: Path, data: Any, budget: str | None, collator: Any = collate, **changes: Any
) -> tuple[Trainer, HFCkptCallback]:
    """A run under `auto`; without a plan where there is no budget."""
    # A later step is followed, which proves nothing.
    callback = HFCkptCallback("auto", memory_budget=budget or "1GiB", prove="off")
    args = TrainingArguments(**arguments(folder, remove_unused_columns=False, **changes))
    callbacks = [] if budget is None else [callback]
    return Trainer(kind.model(), args, collator, train_dataset=data, callbacks=callbacks), callback  # type: ignore[arg-type]  # upstream


def planned(callback: HFCkptCallback) -> Any:
    assert callback._planning is not None
    return callback._planning


@pytest.fixture(autouse=True)
def _said(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        yield


def peak(callback: HFCkptCallback, mode: str) -> int:
    """Return the predicted peak of the largest batch."""
    planning = planned(callback)
    return int(planning.simulator(planning.batch).simulate(mode).peak_bytes)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sweep(keep=1)
def test_followed_step_is_the_predicted_one(tmp_path: Path, name: str) -> None:
    run, callback = trainer(KINDS[name], tmp_path, examples(KINDS[name], EQUAL), "1GiB")
    followed = follow_trainer(run)
    assert abs(planned(callback).predicted_bytes / followed.peak_bytes - 1) < 0.01
    assert callback.plan is not None
    assert callback.plan.count(Mode.NONE) == sum(len(stack.layers) for stack in callback.plan.stacks)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sweep
def test_followed_step_of_a_larger_batch_keeps_a_budget(tmp_path: Path, name: str) -> None:
    data = examples(KINDS[name], LARGER)
    run, callback = trainer(KINDS[name], tmp_path, data, "1GiB", per_device_train_batch_size=8)
    plain = follow_trainer(run).peak_bytes
    assert abs(planned(callback).predicted_bytes / plain - 1) < 0.01
    budget = (peak(callback, "full") + plain) // 2
    run, callback = trainer(KINDS[name], tmp_path, data, f"{budget}B", per_device_train_batch_size=8)
    followed = follow_trainer(run)
    assert followed.peak_bytes <= budget
    assert abs(planned(callback).predicted_bytes / followed.peak_bytes - 1) < 0.01
    assert budget < 0.97 * plain


def adapted() -> nn.Module:
    return get_peft_model(vision_language("qwen2_5_vl"), LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"]))


def test_adapters_in_lower_precision_over_several_batches_are_predicted(tmp_path: Path) -> None:
    kind = Kind(adapted, partial(with_images, "qwen2_5_vl"))
    run, callback = trainer(kind, tmp_path, examples(kind, EQUAL), "1GiB", bf16=True, gradient_accumulation_steps=2)
    followed = follow_trainer(run)
    assert abs(planned(callback).predicted_bytes / followed.peak_bytes - 1) < 0.01


def masked(length: int, _: int) -> Example:
    ids = text(length)
    mask = torch.full((length, length), -1e9).triu(1)[None]
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def test_mask_of_four_dimensions_is_predicted(tmp_path: Path) -> None:
    kind = Kind(partial(llama, vocab_size=64), masked)
    run, callback = trainer(kind, tmp_path, examples(kind, EQUAL), "1GiB", default_data_collator)
    followed = follow_trainer(run)
    assert abs(planned(callback).predicted_bytes / followed.peak_bytes - 1) < 0.01


def assert_traced_once(known: zoo.Case) -> None:
    """See that a step with layers that stand for others is that of all layers."""
    batch = batch_of_forward(known.model, (), known.inputs)
    assert batch is not None
    step = Step(batch_size=batch.rows, seq_length=batch.length, tensors=batch.tensors, optim=None)
    found = [
        StepSimulator(known.model, step, CPU).simulate(None, traces_all=all_layers) for all_layers in (False, True)
    ]
    assert found[0].peak_bytes == found[1].peak_bytes
    assert found[0].timeline == found[1].timeline


@pytest.mark.sweep
def test_stacks_of_unequal_depth_are_traced_once() -> None:
    # Nine layers amid stacks of one.
    assert_traced_once(zoo.build("florence2", num_layers=2))


def test_hidden_state_of_a_layer_that_is_not_traced_is_there() -> None:
    known = zoo.build("llava", num_layers=6)
    # The tower's states are asked for: transformers puts on the hooks that collect them.
    known.model(**known.inputs)
    assert_traced_once(known)


# --- The largest batch. ---


def noisy(batch: list[Example]) -> Example:
    """A collator that draws from every generator, as augmentation does."""
    made = collate(batch)
    made["pixel_values"] = made["pixel_values"] * (1 + random.random()) + torch.rand(1) * float(np.random.rand())
    return made


def run_of(folder: Path, budget: str | None, data: Any, collator: Any = collate) -> Trainer:
    random.seed(0)
    np.random.seed(0)
    # accelerate would cut the images of a stream to as many as there are rows.
    own = {"accelerator_config": {"dispatch_batches": False}}
    run, _ = trainer(KINDS["llava"], folder, data, budget, collator, max_steps=4, **own)
    run.train()
    return run


@pytest.mark.sweep
def test_losses_and_batches_are_those_without_a_plan(tmp_path: Path) -> None:
    data = examples(KINDS["llava"], MIXED)
    plain = run_of(tmp_path / "plain", None, data, noisy)
    run, callback = trainer(KINDS["llava"], tmp_path / "size", data, "1GiB", noisy)
    run.train()
    budget = (peak(callback, "full") + peak(callback, "none")) // 2
    found = run_of(tmp_path / "auto", f"{budget}B", data, noisy)
    assert losses(found) == losses(plain)
    assert changed(weights(plain.model), weights(found.model)) == []


def batches(data: Any, model_type: str = "qwen2_5_vl", rows: int = 2, collator: Any = collate) -> list[tuple[Any, ...]]:
    """Return rows, tokens and patches of the largest batches."""
    found = collated_batches(case(model_type).model, data, collator, rows)
    tensors = [{tensor.name: tensor for tensor in each.tensors} for each in found]
    return [
        (each.rows, each.length, named["pixel_values"].shape[0]) for each, named in zip(found, tensors, strict=True)
    ]


def test_largest_batches_have_the_longest_text_and_the_most_images() -> None:
    data = examples(KINDS["qwen2_5_vl"], MIXED)
    # An image has 16 patches and becomes 4 tokens: 40 + 4 beside 12 + 3 * 4; and 20 + 2 * 4 beside 12 + 3 * 4.
    assert batches(data) == [(2, 28, 80), (2, 44, 64), (2, 44, 32)]
    assert batches(Subset(data, [0, 1, 2])) == [(2, 36, 32)]
    assert batches(ConcatDataset([Subset(data, [0]), Subset(data, [1])])) == [(2, 20, 32)]  # type: ignore[arg-type]  # upstream
    columns = {name: [each[name].tolist() for each in data] for name in data[0]}
    table = Table.from_dict(columns).with_format("torch")
    assert batches(table)[0] == (2, 28, 80)
    assert batches(Subset(table, torch.arange(3))) == [(2, 36, 32)]  # type: ignore[arg-type]  # upstream
    assert batches(data, rows=20)[0][0] == len(data)


def computed(rows: Any) -> Any:
    return rows


class Stream(IterableDataset):  # type: ignore[type-arg]  # upstream
    def __init__(self, data: list[Example]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Example]:
        yield from self._data


def fails(_: list[Example]) -> Example:
    raise KeyError("images")


def test_bound_that_is_not_known_is_none() -> None:
    data = examples(KINDS["qwen2_5_vl"], MIXED)
    table = Table.from_dict({"input_ids": [each["input_ids"].tolist() for each in data]})
    assert batches(table.with_transform(computed)) == []
    assert batches(Stream(data)) == []
    assert batches(data, collator=fails) == []
    # Text alone is described by its lengths.
    assert batches(table) == []


def test_length_that_is_told_is_no_bound_of_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, _ = trainer(KINDS["vit"], tmp_path, examples(KINDS["vit"], EQUAL), None)
    run.add_callback(HFCkptCallback("auto", memory_budget="1GiB", max_length=9))
    run.train()
    assert (
        "max_length=9 says nothing of 2 sequences with pixel_values [2, 3, 16, 16], labels [2]: the largest"
        in caplog.text
    )


def test_looking_at_examples_is_cut_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = examples(KINDS["qwen2_5_vl"], MIXED)
    monkeypatch.setattr(largest_multimodal_batch_in_data, "MAX_EXAMPLES", 4)
    assert batches(data)[0] == (2, 36, 48)
    assert "Looked at 4 of 8 examples for the largest batch; a larger one is planned for before it runs." in caplog.text
    monkeypatch.setattr(largest_multimodal_batch_in_data, "MAX_SECONDS", 0.0)
    assert batches(data, rows=1) == [(1, 20, 16)]


def test_images_in_files_are_ranked_by_their_headers(tmp_path: Path) -> None:
    image_class = pytest.importorskip("PIL.Image")
    sizes = [(8, 8), (4, 4), (32, 8)]
    files = [str(tmp_path / f"{width}.png") for width, _ in sizes]
    for file, size in zip(files, sizes, strict=True):
        image_class.new("RGB", size).save(file)
    contents = [{"bytes": None, "path": file} for file in files]
    assert [largest_multimodal_batch_in_data._size(each) for each in contents] == [64, 16, 256]
    assert largest_multimodal_batch_in_data._size(image_class.new("RGB", (5, 3))) == 15
    assert largest_multimodal_batch_in_data._size({"bytes": b"RIFF1234", "path": None}) == 8
    assert largest_multimodal_batch_in_data._size([{"role": "user", "content": "four"}]) == 8
    assert largest_multimodal_batch_in_data._size({"array": np.zeros(7), "sampling_rate": 16000}) == 8


def test_stream_is_planned_as_batches_come_and_anew_for_more_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = examples(KINDS["llava"], [(16, 1), (16, 1), (8, 2), (8, 1), (12, 1), (16, 1), (16, 2), (16, 1)])
    plain = run_of(tmp_path / "plain", None, Stream(data))
    found = run_of(tmp_path / "auto", "1GiB", Stream(data))
    assert losses(found) == losses(plain)
    planned_for = [line for line in caplog.messages if line.startswith("Planned for")]
    assert [line.partition(":")[0] for line in planned_for] == [
        "Planned for 2 sequences of 32 tokens with pixel_values [2, 3, 16, 16]",
        "Planned for 2 sequences of 40 tokens with pixel_values [3, 3, 16, 16]",
        "Planned for 2 sequences of 48 tokens with pixel_values [3, 3, 16, 16]",
    ]
    assert all("; bound not known, larger batches are planned for before they run." in line for line in planned_for)


def test_batch_is_held_by_no_smaller_tensor() -> None:
    grid = torch.tensor([[1, 4, 4], [1, 8, 4]])
    known = outline("image_grid_thw", grid)
    assert known.sizes == (32, 16)
    assert known.holds(outline("image_grid_thw", torch.tensor([[1, 4, 8]])))
    assert not known.holds(outline("image_grid_thw", torch.tensor([[1, 6, 6]])))
    assert not known.holds(outline("image_grid_thw", torch.tensor([[1, 4, 4]] * 3)))
    assert not known.holds(outline("image_grid_thw", grid.int()))
    assert outline("pixel_values", torch.zeros(2, 3)).sizes == ()
    for made in (torch.tensor([[True, False]]), torch.arange(6).view(2, 3).T, torch.tensor([], dtype=torch.long)):
        again = with_values("x", made).make(torch.zeros(1))
        assert again.shape == made.shape
        assert again.dtype == made.dtype
        assert made.numel() == 0 or torch.equal(again, made)


# --- What is refused, and said. ---


def test_everything_that_a_batch_has_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(KINDS["clip"], tmp_path, examples(KINDS["clip"], EQUAL), "1GiB")[0].train()
    (told,) = {line for line in caplog.messages if line.startswith("Counted")}
    assert told == (
        "Counted: input_ids, pixel_values, attention_mask, return_loss; CLIPModel; AdamW; one process. Not counted: "
        "nothing that is known."
    )


class ReadsPixels(ViTForImageClassification):
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(pixel_values if pixel_values.sum() > 0 else -pixel_values, labels=labels)


def test_forward_that_reads_pixels_is_refused(tmp_path: Path) -> None:
    kind = Kind(lambda: ReadsPixels(ViTConfig(**SIZES, **IMAGE)), image)
    run, _ = trainer(kind, tmp_path, examples(kind, EQUAL), "1GiB")
    with pytest.raises(UnsupportedError, match="a simulated step has shapes only, of pixel_values too"):
        run.train()


@pytest.mark.sweep
def test_budget_that_no_plan_fits_says_what_would(tmp_path: Path) -> None:
    run, _ = trainer(KINDS["llava"], tmp_path, examples(KINDS["llava"], EQUAL), "10kB")
    with pytest.raises(BudgetError) as raised:
        run.train()
    # How many images shorter rows would have is not known.
    assert "memory_budget: " in str(raised.value) or "memory_budget=" in str(raised.value)
    assert "max_length" not in str(raised.value)


def test_evaluation_with_images_is_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = examples(KINDS["llava"], EQUAL)
    run, _ = trainer(KINDS["llava"], tmp_path, data, "1GiB")
    run.eval_dataset = data
    run.args.eval_strategy = IntervalStrategy.STEPS
    run.args.eval_steps = 1
    run.train()
    (told,) = [line for line in caplog.messages if line.startswith("Evaluation of")]
    assert told.startswith("Evaluation of 8 sequences of 32 tokens with pixel_values [8, 3, 16, 16]: predicted peak ")
