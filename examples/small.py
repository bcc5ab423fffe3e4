"""What `--small` takes in place of the hub's models and data: made here, so that no network and no GPU is needed."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCES = ["Activations are kept for backward.", "What is not kept is computed again.", "A budget says how much."]
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are bytes."""
    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE)


def llama() -> LlamaForCausalLM:
    """Return a Llama of four layers with random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=258, num_attention_heads=2, pad_token_id=0, eos_token_id=1, **sizes))


def texts() -> Dataset:
    """Return a few sentences."""
    return Dataset.from_dict({"text": SENTENCES * 4})


def pairs() -> Dataset:
    """Return prompts, each with a better and a worse answer."""
    rows = [{"prompt": text[:10], "chosen": text[10:], "rejected": text[10:][::-1]} for text in SENTENCES * 4]
    return Dataset.from_list(rows)


def arguments(is_small: bool) -> dict[str, Any]:
    """Return what training arguments say in place of the usual: two steps on the CPU."""
    return {"max_steps": 2, "use_cpu": True, "save_strategy": "no"} if is_small else {"bf16": True}
