"""Recipes whose data has images: read by the model's own processor, which needs no torchvision for LLaVA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from hf_ckpt import DataError, RecipeError, load_recipe
from hf_ckpt.estimate.subject import subject_of
from hf_ckpt.finetune import train
from hf_ckpt.loading.training_args import training_arguments
from hf_ckpt.measure.follow import follow_trainer
from tests import small_recipes, twins
from tests.byte_tokenizer import byte_tokenizer

pytest.importorskip("trl", minversion="1.16")
Image = pytest.importorskip("PIL.Image")
pil = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"),
]
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


def test_largest_images_are_planned_for(llava: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    auto = {"policy": "auto", "memory_budget": "1GiB", "prove": "off"}
    recipe = load_recipe(write(tmp_path, llava, checkpointing=auto))
    processor, data = train._tokenizer_and_data(recipe)
    run, callback, _ = train._trainer(recipe, training_arguments(recipe), processor, data)
    followed = follow_trainer(run)
    assert callback is not None
    assert callback._planning is not None
    # trl's own loss on images is not simulated, and named as such: the model's is.
    assert callback._planning.predicted_bytes == pytest.approx(followed.peak_bytes, rel=0.01)
    assert "Not counted: what SFTTrainer.compute_loss does to images and sound" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer=null"], r"data\.format = \"images\": images are read by trl's SFTTrainer. Write trainer: sft\."),
        (["trainer=dpo"], r"data\.format = \"images\": "),
        (["data.packing=true"], r"data\.packing = true: belongs to plain text"),
        (["data.loss_on=completion"], r"data\.loss_on = \"completion\": messages have turns"),
    ],
)
def test_images_are_refused_where_nothing_reads_them(
    overrides: list[str], says: str, llava: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe(write(tmp_path, llava), overrides)


def test_what_images_take_is_known_when_they_are_read(llava: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.format = images: how large a batch is, is not known before"):
        subject_of(load_recipe(write(tmp_path, llava)))


def test_model_without_a_processor_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, twins.model("meta-llama/Llama-3.1-8B-Instruct")))
    with pytest.raises((DataError, RecipeError)) as refused:
        train._tokenizer_and_data(recipe)
    assert "has no processor of images" in str(refused.value)
