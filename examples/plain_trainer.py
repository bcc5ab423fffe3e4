"""Fine-tune with transformers' own Trainer, in as much memory as you say.

python examples/plain_trainer.py --memory-budget 10GiB
python examples/plain_trainer.py --small                # a tiny model on the CPU, without a network
"""

from __future__ import annotations

import argparse

import small
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from hf_ckpt import HFCkptCallback

NAME = "Qwen/Qwen2.5-0.5B"

parser = argparse.ArgumentParser()
parser.add_argument("--memory-budget", default=None, help="what a whole step may use; what is free, if left out")
parser.add_argument("--small", action="store_true")
options = parser.parse_args()

if options.small:
    tokenizer, model, data = small.tokenizer(), small.llama(), small.texts()
else:
    tokenizer, model = AutoTokenizer.from_pretrained(NAME), AutoModelForCausalLM.from_pretrained(NAME)
    data = load_dataset("tatsu-lab/alpaca", split="train[:2000]").select_columns("text")

data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=1024), remove_columns="text")
trainer = Trainer(
    model=model,
    args=TrainingArguments("runs/plain_trainer", per_device_train_batch_size=4, **small.arguments(options.small)),
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    # Plans for the largest batch of the data, before the first step.
    callbacks=[HFCkptCallback("auto", memory_budget=options.memory_budget or ("1GiB" if options.small else None))],
)
trainer.train()
