"""How many tokens the head runs at a time, and what is known of that of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import RegionProof

# Logits of a chunk in float32, where the hidden states of the batch are no larger than twice that. A chunk needs about
# three times as much in backward: its probabilities, and gradients twice.
_CHUNK_BYTES = 256 * 2**20

# Also for a short batch, so that its logits become small as well.
_MIN_CHUNKS = 8


@dataclass(eq=False)
class Chunking:
    """How the head of one model runs. Lives on the head, and is copied with it."""

    tokens: int | None = None
    """Length of a chunk; None chooses by the size of the logits."""
    outer: nn.Module | None = None
    """The module that stands in the head's place with the hooks that gather its weight, such as FSDP1's wrapper."""
    is_called: bool = False
    """Whether the model has called its head. If it has not after a training forward, nothing is chunked."""
    has_warned: bool = False
    """Whether the user has been warned of logits that were computed as a whole."""
    proof: RegionProof | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What has happened so far happened to the original.
        return {**self.__dict__, "is_called": False, "has_warned": False}

    def lengths(self, num_rows: int, num_columns: int, hidden_bytes: int) -> list[int]:
        """Return the number of rows of each chunk: equal except for the last one, which may be shorter.

        `hidden_bytes` is the size of the hidden states [T, H]. At long context what is small compared to them is small
        compared to all that a layer needs; more chunks than about four times the vocabulary over the hidden size would
        only cost time, here and in a simulation.
        """
        tokens = self.tokens
        if tokens is None:
            max_bytes = max(_CHUNK_BYTES, hidden_bytes // 2)
            num_chunks = max(-(-num_rows * num_columns * 4 // max_bytes), _MIN_CHUNKS)
            tokens = max(1, -(-num_rows // num_chunks))
        # No row at all is one chunk, whose loss is that of no tokens.
        return [min(tokens, num_rows - start) for start in range(0, max(num_rows, 1), tokens)]
