"""Fine-tune a model of images and text: its tower of images is recomputed whole, its language model by halves.

python examples/vision_language.py
python examples/vision_language.py --small      # a tiny model on the CPU, without a network
"""

from __future__ import annotations

import argparse
from typing import Any

import small
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from hf_ckpt import HFCkptCallback

NAME = "HuggingFaceTB/SmolVLM-256M-Instruct"


def small_model() -> LlavaForConditionalGeneration:
    """Return a LLaVA with random weights, which sees an image as four tokens, the last one of its vocabulary."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=16, patch_size=8, num_hidden_layers=3, **sizes)
    text = LlamaConfig(vocab_size=259, num_hidden_layers=4, **sizes)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=258))


def small_batch(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return images of noise, each before its text."""
    texts = small.tokenizer()([row["text"][:20] for row in rows], return_tensors="pt")["input_ids"]
    ids = torch.cat([torch.full((len(rows), 4), 258), texts], dim=1)
    labels = ids.masked_fill(ids == 258, -100)
    return {"input_ids": ids, "labels": labels, "pixel_values": torch.randn(len(rows), 3, 16, 16)}


def batch(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return images with a question and its answer, as the model's processor makes them."""
    texts = []
    for row in rows:
        asked = [{"type": "image"}, {"type": "text", "text": row["question"]}]
        answer = [{"type": "text", "text": row["multiple_choice_answer"]}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        texts.append(processor.apply_chat_template(turns))
    images = [[row["image"].convert("RGB")] for row in rows]
    made: dict[str, torch.Tensor] = processor(text=texts, images=images, return_tensors="pt", padding=True)
    hidden = (processor.tokenizer.pad_token_id, model.config.image_token_id)
    made["labels"] = made["input_ids"].masked_fill(torch.isin(made["input_ids"], torch.tensor(hidden)), -100)
    return made


parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true")
options = parser.parse_args()

if options.small:
    model, data = small_model(), small.texts()
else:
    processor, model = AutoProcessor.from_pretrained(NAME), AutoModelForImageTextToText.from_pretrained(NAME)
    data = load_dataset("merve/vqav2-small", split="validation[:2000]")

arguments = {"remove_unused_columns": False, "per_device_train_batch_size": 2, **small.arguments(options.small)}
trainer = Trainer(
    model=model,
    args=TrainingArguments("runs/vision_language", **arguments),
    train_dataset=data,
    data_collator=small_batch if options.small else batch,
    callbacks=[HFCkptCallback([{"stack": "vision", "mode": "full"}, {"stack": "language", "mode": "ffn"}])],
)
trainer.train()
