"""Models whose forwards change more than gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.training import LENGTH, llama


class WithBatchNorm(nn.Module):
    """A Llama behind a vision-like stem with running statistics, and a counter that forwards write to."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = llama()
        self.norm = nn.BatchNorm1d(LENGTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.config = self.llama.config

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        self.seen += 1
        return self.llama(inputs_embeds=self.norm(self.llama.get_input_embeddings()(input_ids)), labels=labels)
