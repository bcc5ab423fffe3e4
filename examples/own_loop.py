"""Train in a loop of your own, without a Trainer.

python examples/own_loop.py
python examples/own_loop.py --small      # a tiny model on the CPU, without a network
"""

from __future__ import annotations

import argparse

import small
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import hf_ckpt

NAME = "Qwen/Qwen2.5-0.5B"

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true")
options = parser.parse_args()

if options.small:
    tokenizer, model, data = small.tokenizer(), small.llama(), small.texts()
else:
    tokenizer, model = AutoTokenizer.from_pretrained(NAME), AutoModelForCausalLM.from_pretrained(NAME)
    data = load_dataset("tatsu-lab/alpaca", split="train[:2000]").select_columns("text")

device = "cuda" if torch.cuda.is_available() and not options.small else "cpu"
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=1024), remove_columns="text")
loader = DataLoader(data, batch_size=2, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
model.to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

# Undone when the block ends, also by an exception.
with hf_ckpt.apply(model, "full", every_n_layers=2) as applied:
    print(applied.summary())
    for step, batch in zip(range(2 if options.small else 100), loader, strict=False):
        loss = model(**batch.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
