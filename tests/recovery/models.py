"""Models whose forwards change more than gradients."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from tests.quantized_experts import quantize
from tests.training import LENGTH, VOCAB, llama


def mixtral(**changes: Any) -> MixtralForCausalLM:
    """A tiny mixture of experts with dropout, always the same one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, **changes}
    return MixtralForCausalLM(
        MixtralConfig(
            **sizes,
            vocab_size=VOCAB,
            num_key_value_heads=2,
            num_local_experts=2,
            attention_dropout=0.1,
            output_router_logits=True,
        )
    )


def adapted_mixtral(*, is_4bit: bool) -> PeftModel:
    """A mixture with adapters on its attention and on its experts, which may be in 4 bits."""
    model = mixtral(hidden_size=32, intermediate_size=64).to(torch.bfloat16)
    if is_4bit:
        quantize(model)
    config = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    return get_peft_model(model, config)


class WithBatchNorm(nn.Module):
    """A Llama behind a vision-like stem with running statistics, and a counter that forwards write to."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llama = llama(**changes)
        self.norm = nn.BatchNorm1d(LENGTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.config = self.llama.config

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        self.seen += 1
        return self.llama(inputs_embeds=self.norm(self.llama.get_input_embeddings()(input_ids)), labels=labels)
