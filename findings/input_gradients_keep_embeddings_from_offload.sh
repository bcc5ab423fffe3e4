#!/usr/bin/env bash
# With `enable_input_require_grads`, no saved-tensor hook can move the embeddings' output off the device.
#
# Good guess: hooks that pack every saved tensor into a copy (as `torch.autograd.graph.save_on_cpu` and transformers'
# `offload` do) leave nothing of the layers' inputs on the device after the forward.
# Behaviour: that holds for a LoRA model as it is. Where the embeddings' output was made to require a gradient, it is a
# leaf of the graph, and the node that collects its gradient holds it until the backward has passed: one whole
# [B, S, hidden] tensor, at any length of the row. Loss and gradients of adapters are the same in both.
# Versions: torch 2.13.0, transformers 5.23.0, peft 0.21.2.
# Seen: "input gradients off: kept False", "input gradients on: kept True".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - <<'PYTHON'
import gc
import weakref

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def stepped(with_input_gradients: bool) -> tuple[bool, float, list[torch.Tensor]]:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=128)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), LoraConfig(target_modules="all-linear"))
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
    if with_input_gradients:
        model.enable_input_require_grads()
    outputs = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, given, output: outputs.append(weakref.ref(output))
    )
    ids = torch.randint(128, (2, 16))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda copy: copy):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    gc.collect()
    is_kept = outputs[0]() is not None
    loss.backward()
    return is_kept, float(loss.detach()), [p.grad for p in model.parameters() if p.grad is not None]


off, on = stepped(False), stepped(True)
print(f"input gradients off: kept {off[0]}", f"input gradients on: kept {on[0]}", sep="\n")
assert off[1] == on[1] and all(map(torch.equal, off[2], on[2])), "loss or gradients differ"
assert (off[0], on[0]) == (False, True), "this has changed"
PYTHON
