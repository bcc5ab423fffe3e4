"""Learn from preferences with trl's DPOTrainer and LoRA: the first layers are recomputed whole, the last keep all.

python examples/dpo.py
python examples/dpo.py --small      # a tiny model on the CPU, without a network
"""

from __future__ import annotations

import argparse

import small
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from hf_ckpt import HFCkptCallback

NAME = "Qwen/Qwen2.5-0.5B-Instruct"

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true")
options = parser.parse_args()

if options.small:
    tokenizer, model, data = small.tokenizer(), small.llama(), small.pairs()
else:
    tokenizer, model = AutoTokenizer.from_pretrained(NAME), AutoModelForCausalLM.from_pretrained(NAME)
    data = load_dataset("trl-lib/ultrafeedback_binarized", split="train[:2000]")

arguments = {"gradient_checkpointing": False, "per_device_train_batch_size": 2, **small.arguments(options.small)}
trainer = DPOTrainer(
    model=model,
    args=DPOConfig("runs/dpo", **arguments),
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
    callbacks=[HFCkptCallback([{"layers": ":-2", "mode": "full"}])],
)
trainer.train()
