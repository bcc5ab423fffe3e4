"""Recipes whose data has images: read by the model's own processor, which needs no torchvision for LLaVA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from hf_ckpt import DataError, RecipeError, load_recipe
from hf_ckpt.auto.batch_of_forward import batch_of_forward
from hf_ckpt.auto.replan import RunPlanner
from hf_ckpt.estimate.max_length_and_batch import with_length, with_rows
from hf_ckpt.estimate.own_loss import ImageRows, largest_grid
from hf_ckpt.estimate.step_of_recipe import subject_of
from hf_ckpt.finetune import train
from hf_ckpt.loading.trainer import training_arguments
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.step import Step, make_inputs
from tests import small_recipes, twins, zoo
from tests.byte_tokenizer import byte_tokenizer

pytest.importorskip("trl", minversion="1.16")
Image = pytest.importorskip("PIL.Image")
pil = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "</{{ message['role'] }}>\n{% endfor %}"
)
SIZES: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny LLaVA and its processor."""
    folder = tmp_path_factory.mktemp("llava")
    tokenizer: Any = byte_tokenizer(pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = pil.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    more = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(images, tokenizer, chat_template=TEMPLATE, **more).save_pretrained(folder)
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**SIZES, image_size=16, patch_size=4),
        text_config=LlamaConfig(**SIZES, vocab_size=len(tokenizer), **tokens),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture
def qwen3_vl(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny Qwen3-VL and its processor, which reads images only: one of videos needs torchvision."""
    twins.reads_no_videos(monkeypatch)
    return twins.model("Qwen/Qwen3-VL-8B-Instruct")


def write(folder: Path, weights: Path, **sections: Any) -> Path:
    """Write a recipe, with images of several sizes under a name that has to be mapped."""
    rows = []
    for number in range(12):
        pixels = np.random.default_rng(number).random((16 + number, 24, 3))
        Image.fromarray((255 * pixels).astype("uint8")).save(folder / f"{number}.png")
        said = (("user", "What is this?"), ("assistant", f"Noise{' and more' * (number % 4)}."))
        messages = [{"role": role, "content": content} for role, content in said]
        rows.append(json.dumps({"pictures": [str(folder / f"{number}.png")], "messages": messages}))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    data = {"path": str(folder / "rows.jsonl"), "format": "images", "columns": {"images": "pictures"}}
    given = {"lora": small_recipes.LORA, "checkpointing": {"policy": "full"}, **sections}
    given["data"] = {**data, "max_length": 128, "eval_fraction": None, **(sections.get("data") or {})}
    path = small_recipes.write(folder, model=small_recipes.on_weights(weights), **given)
    path.write_text(f"trainer: sft\n{path.read_text()}")
    return path


def planned_and_followed(recipe: Recipe) -> tuple[RunPlanner, int]:
    """Train; return what was planned, and the peak of what really ran."""
    processor, data = train._tokenizer_and_data(recipe)
    run, callback, _ = train._trainer(recipe, training_arguments(recipe), processor, data)
    followed = follow_trainer(run)
    assert callback is not None
    assert callback._planning is not None
    return callback._planning, followed.peak_bytes


def test_images_are_trained_on_as_without_the_plan(
    llava: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, llava)
    plain = train.finetune(load_recipe(path, ["checkpointing=null"]))
    without = load_file(tmp_path / "run" / "adapter_model.safetensors")
    planned = train.finetune(load_recipe(path))
    weights = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert [entry.get("loss") for entry in planned.log_history] == [entry.get("loss") for entry in plain.log_history]
    assert planned.plan is not None
    assert [stack.path.split(".")[-2] for stack in planned.plan.stacks] == ["encoder", "language_model"]
    assert [name for name in without if not torch.equal(weights[name], without[name])] == []
    # The images reached the model: what stands behind its tower has learned.
    assert any(".vision_tower." in name and ".lora_B." in name and weight.any() for name, weight in weights.items())
    assert (tmp_path / "run" / "processor_config.json").is_file()
    assert "  images  | 24 x 16 pixels" in capsys.readouterr().out


@pytest.mark.sweep
def test_largest_images_are_planned_for(llava: Path, tmp_path: Path) -> None:
    auto = {"policy": "auto", "memory_budget": "1GiB", "prove": "off"}
    recipe = load_recipe(write(tmp_path, llava, checkpointing=auto))
    planning, peak_bytes = planned_and_followed(recipe)
    assert planning.predicted_bytes == pytest.approx(peak_bytes, rel=0.01)


@pytest.mark.sweep
def test_images_of_qwen3_vl_are_planned_for(qwen3_vl: Path, tmp_path: Path) -> None:
    auto = {"policy": "auto", "memory_budget": "1GiB", "prove": "off"}
    path = write(tmp_path, qwen3_vl, checkpointing=auto)
    plain = train.finetune(load_recipe(path, ["checkpointing=null"]))
    recipe = load_recipe(path)
    planning, peak_bytes = planned_and_followed(recipe)
    assert planning.predicted_bytes == pytest.approx(peak_bytes, rel=0.01)
    assert planning.batch is not None
    # It was planned for before it came: what trl's loss adds to the call makes no other batch of it.
    assert planning.batch.settings == ()
    simulated = planning.simulator(planning.batch)
    budget = (simulated.simulate("full").peak_bytes + peak_bytes) // 2
    planned = train.finetune(load_recipe(path, [f"checkpointing.memory_budget={budget}B"]))
    assert [entry.get("loss") for entry in planned.log_history] == [entry.get("loss") for entry in plain.log_history]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer=null"], r"data\.format = \"images\": images are read by trl's SFTTrainer. Write trainer: sft\."),
        (["trainer=dpo"], r"data\.format = \"images\": "),
        (["data.packing=true"], r"data\.packing = true: belongs to plain text"),
        (["data.loss_on=completion"], r"data\.loss_on = \"completion\": messages have turns"),
        (["data.format=messages", "data.max_pixels=9"], r"data\.max_pixels = 9: belongs to data\.format: images"),
    ],
)
def test_images_are_refused_where_nothing_reads_them(
    overrides: list[str], says: str, llava: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe(write(tmp_path, llava), overrides)


BOUNDS = {"max_pixels": 4 * 32**2, "max_images": 1}
"""Images of up to four tokens of the tiny Qwen3-VL."""


def write_bounded(folder: Path, weights: Path, **sections: Any) -> Path:
    """Write a recipe with bounds, and an image of more pixels than that, before a short text and one that is cut."""
    pixels = np.random.default_rng(0).random((100, 100, 3))
    Image.fromarray((255 * pixels).astype("uint8")).save(folder / "large.png")
    rows = []
    for said in ("Noise.", "Noise." * 30):
        messages = [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": said}]
        rows.append(json.dumps({"pictures": [str(folder / "large.png")], "messages": messages}))
    path = write(folder, weights, data=BOUNDS, training={"train_sampling_strategy": "sequential"}, **sections)
    (folder / "rows.jsonl").write_text("\n".join(rows * 4))
    return path


@pytest.mark.parametrize("overrides", [[], ["training.per_device_train_batch_size=1", "training.bf16=true"]])
@pytest.mark.sweep
def test_bounds_say_before_what_the_largest_images_take(qwen3_vl: Path, tmp_path: Path, overrides: list[str]) -> None:
    auto = {"policy": "auto", "memory_budget": "1GiB", "prove": "off"}
    recipe = load_recipe(write_bounded(tmp_path, qwen3_vl, checkpointing=auto), overrides)
    found = subject_of(recipe)
    assert dict(found.facts)["loss"] == "SFTTrainer.compute_loss; each sequence with 1 image of 4 tokens"
    planning, peak_bytes = planned_and_followed(recipe)
    planned = planning.batch
    assert planned is not None
    made = batch_of_forward(found.model, (), make_inputs(found.step, found.model), may_pad=False)
    assert made is not None
    outlines, live = ({each.name: (each.shape, each.sizes) for each in batch.tensors} for batch in (made, planned))
    assert outlines == live
    predicted = found.simulator(CPU).memory(None).peak_bytes
    assert predicted == pytest.approx(peak_bytes, rel=0.01)
    assert predicted == pytest.approx(planning.predicted_bytes, rel=1e-3)


def test_longer_rows_and_more_of_them_have_their_images(qwen3_vl: Path, tmp_path: Path) -> None:
    found = subject_of(load_recipe(write_bounded(tmp_path, qwen3_vl), ["data.max_images=2"]))
    shapes = [
        make_inputs(step, found.model)["pixel_values"].shape[0]
        for step in (found.step, with_length(found.step, 256), with_rows(found.step, 3), with_length(found.step, 8))
    ]
    # Two rows of two images of four tokens of four patches; in rows of eight tokens an image has two.
    assert shapes == [64, 64, 96, 32]


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "glm4v"])
def test_what_bounds_make_is_what_a_model_reads(model_type: str) -> None:
    model = zoo.build(model_type, num_layers=2).model
    made = ImageRows(max_images=2, tokens_per_image=4).make(Step(batch_size=2, seq_length=16, is_padded=True), model)
    made["pixel_values"].normal_()
    loss = model(**made).loss
    assert loss.isfinite()


@pytest.mark.parametrize(("most", "grid"), [(1, (1, 1)), (7, (1, 7)), (8, (2, 4)), (1009, (28, 36)), (1024, (32, 32))])
def test_largest_image_has_the_most_tokens_that_a_processor_may_make(most: int, grid: tuple[int, int]) -> None:
    assert largest_grid(most) == grid


def test_what_images_take_is_known_when_they_are_read(llava: Path, qwen3_vl: Path, tmp_path: Path) -> None:
    for weights, overrides, says in (
        (qwen3_vl, [], r"data\.format = images: how large a batch is, is not known before"),
        # Its tower makes 16 patches of an image, whatever `image_seq_length` the config has.
        (llava, ["data.max_pixels=4096", "data.max_images=1", "data.max_length=16"], r"up to 18 tokens"),
        (
            qwen3_vl,
            ["data.max_pixels=524288", "data.max_images=1"],
            r"an image of .* up to 514 tokens",
        ),
    ):
        with pytest.raises(RecipeError, match=says):
            subject_of(load_recipe(write(tmp_path, weights), overrides))


def test_images_beyond_the_bounds_are_refused(llava: Path, qwen3_vl: Path, tmp_path: Path) -> None:
    path = write_bounded(tmp_path, qwen3_vl)
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    row = json.loads(rows[0])
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, json.dumps({**row, "pictures": row["pictures"] * 3})]))
    with pytest.raises(DataError, match=r"data\.max_images is 1, but an example has 3 images"):
        train._tokenizer_and_data(load_recipe(path))
    with pytest.raises(DataError, match=r"data\.max_pixels = 4096: CLIPImageProcessor\w* gives images a size"):
        train._tokenizer_and_data(load_recipe(write_bounded(tmp_path, llava)))


def test_model_without_a_processor_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, twins.model("meta-llama/Llama-3.1-8B-Instruct")))
    with pytest.raises((DataError, RecipeError)) as refused:
        train._tokenizer_and_data(recipe)
    assert "has no processor of images" in str(refused.value)
