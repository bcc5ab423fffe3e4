"""Fine-tune with trl's SFTTrainer and LoRA: half of each layer is computed again in backward.

python examples/sft.py
python examples/sft.py --small      # a tiny model on the CPU, without a network
"""

from __future__ import annotations

import argparse

import small
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from hf_ckpt import HFCkptCallback

NAME = "Qwen/Qwen2.5-0.5B-Instruct"

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true")
options = parser.parse_args()

if options.small:
    tokenizer, model, data = small.tokenizer(), small.llama(), small.texts()
else:
    tokenizer, model = AutoTokenizer.from_pretrained(NAME), AutoModelForCausalLM.from_pretrained(NAME)
    data = load_dataset("trl-lib/Capybara", split="train[:2000]")

# trl's own checkpointing is on by default. One plan governs; this leaves no doubt which.
arguments = {"gradient_checkpointing": False, "per_device_train_batch_size": 2, **small.arguments(options.small)}
trainer = SFTTrainer(
    model=model,
    args=SFTConfig("runs/sft", **arguments),
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
    callbacks=[HFCkptCallback("ffn")],
)
trainer.train()
