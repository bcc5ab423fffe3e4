"""Decoders written by hand, without transformers: for what no real model does, or not alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests import zoo

BATCH, LENGTH, WIDTH = 2, 6, 8


class Attention(nn.Module):
    """One head with dropout on its output."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.query(hidden) @ self.key(hidden).mT
        return self.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1) @ self.value(hidden))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(hidden)))


class Block(nn.Module):
    """One layer; no class of transformers, so it has no seam."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden), mask)
        return hidden + self.mlp(hidden)


class Decoder(nn.Module):
    """A list of blocks that run one after another.

    Args:
        blocks: the layers; four of `Block` if left out.
        between: what happens to the hidden states before the block of this index; nothing if left out.
    """

    def __init__(
        self, blocks: Sequence[nn.Module] | None = None, between: Callable[[int, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks if blocks is not None else [Block() for _ in range(4)])
        self.between = between

    def forward(self, hidden: Tensor, **kwargs: object) -> Tensor:
        hidden = self.embedding(hidden)
        for idx, block in enumerate(self.blocks):
            hidden = self.between(idx, hidden) if self.between is not None else hidden
            hidden = block(hidden, **kwargs)
        return hidden


def case(model: nn.Module | None = None, **inputs: Tensor) -> zoo.Case:
    """Return a model in train mode, a `Decoder` if left out, with one batch of hidden states and the inputs given."""
    model = model if model is not None else Decoder()
    return zoo.Case("plain", model.train(), {"hidden": torch.randn(BATCH, LENGTH, WIDTH), **inputs})
