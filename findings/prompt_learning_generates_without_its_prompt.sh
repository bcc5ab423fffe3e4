#!/usr/bin/env bash
# A prefix-tuned model of PEFT generates as if it had no prefix, and a prompt-tuned one gets its prompt before each token.
#
# Good guess: greedy generation takes, token by token, what the model's own forward on the row so far ranks first, as it
# does with transformers 5.23.0; where a cache cannot be handed on under its old name, something raises.
# Behaviour: transformers 5.24.0 names the cache `cache`. PEFT looks for it, and hands its own, under the name
# `past_key_values`. With prefix tuning both arrive, and the one with the prefix is dropped: the tokens are those of the
# model with its adapter disabled. With prompt tuning PEFT finds no cache, takes each step for the first, and inserts the
# prompt again: the tokens are right until the first of these matters. Loss and gradients are right in both.
# Versions: torch 2.13.0, transformers 5.24.0, peft 0.21.2 (the newest; 5.24.0 asks for 0.22 in `add_adapter` only).
# Seen: "prefix: generate = forward False, generate = no adapter True", "prompt: generate = forward False, generate = no
# adapter False".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - <<'PYTHON'
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

NEW = 8


def compared(config_class: type) -> tuple[bool, bool]:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    adapter = config_class(task_type="CAUSAL_LM", num_virtual_tokens=8)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), adapter).eval()
    with torch.no_grad():
        # As training would move it: far from nothing.
        model.prompt_encoder["default"].embedding.weight.normal_(std=3.0)
    ids = torch.randint(3, 128, (1, 8))

    def generated() -> list[int]:
        options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
        return model.generate(input_ids=ids, **options)[0, ids.shape[1] :].tolist()

    row = ids
    with torch.no_grad():
        for _ in range(NEW):
            row = torch.cat([row, model(input_ids=row).logits[:, -1:].argmax(-1)], dim=1)
    found, by_forward = generated(), row[0, ids.shape[1] :].tolist()
    with model.disable_adapter():
        without = generated()
    assert by_forward != without, "the adapter does nothing"
    return found == by_forward, found == without


for name, config_class, expected in (
    ("prefix", PrefixTuningConfig, (False, True)),
    ("prompt", PromptTuningConfig, (False, False)),
):
    result = compared(config_class)
    print(f"{name}: generate = forward {result[0]}, generate = no adapter {result[1]}")
    assert result == expected, "this has changed"
PYTHON
