"""How many tokens the head computes at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import RegionProof

_CHUNK_BYTES = 256 * 2**20
"""Logits of a chunk in float32, where the hidden states of the batch are no larger than twice that. A chunk needs about
three times as much in backward: its probabilities, and gradients twice."""

_FEWEST_CHUNKS = 8
"""Also where a batch is short: its logits are to become small as well."""


@dataclass(eq=False)
class Chunking:
    """How the head of one model runs. Lives on the head, and is copied with it.

    Args:
        tokens: length of a chunk; None chooses by the size of the logits.
        outer: what stands in the head's place, with the hooks that gather its weight: FSDP1's wrapper, say. None for
            the head itself.
        is_called: whether the model has called its head. Not after a training forward: the model goes around its head,
            and nothing is chunked.
        has_warned: whether the user has been told of logits that were computed whole.
        proof: looks at a loss and its gradients.
    """

    tokens: int | None = None
    outer: nn.Module | None = None
    is_called: bool = False
    has_warned: bool = False
    proof: RegionProof | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What has happened so far happened to the original.
        return {**self.__dict__, "is_called": False, "has_warned": False}

    def lengths(self, num_rows: int, num_columns: int, hidden_bytes: int) -> list[int]:
        """Return the number of rows of each chunk: equal but for the last one, which may be shorter.

        At long context what is small beside the hidden states is small beside all that a layer needs; more chunks than
        about four times the vocabulary over the hidden size would only cost time, here and in a simulation.

        Args:
            num_rows: tokens of the batch, T.
            num_columns: size of the vocabulary, V.
            hidden_bytes: of the hidden states, [T, H].
        """
        tokens = self.tokens
        if tokens is None:
            most_bytes = max(_CHUNK_BYTES, hidden_bytes // 2)
            num_chunks = max(-(-num_rows * num_columns * 4 // most_bytes), _FEWEST_CHUNKS)
            tokens = max(1, -(-num_rows // num_chunks))
        # No row at all is one chunk: its loss is that of nothing.
        return [min(tokens, num_rows - start) for start in range(0, max(num_rows, 1), tokens)]
