"""What share of a card's dense matrix rate attention reaches, by architecture and kernel, causal work left out.

Of one kernel forward and backward have one share: that of both together, in a step that recomputes or not.
"""

from __future__ import annotations

import re
from enum import StrEnum


class AttentionKernel(StrEnum):
    """Kernels of fused attention that have rates of their own."""

    FLASH_2 = "FlashAttention-2"
    FLASH_3 = "FlashAttention-3"
    CUDNN = "cuDNN"


_USUAL = 0.60
"""FlashAttention-2 reaches 50 to 73 % on an A100 (Dao 2023). Of other cards no figure was found."""

_SHARES: dict[tuple[int, AttentionKernel], float] = {
    # It does not use Hopper's own instructions for products (Shah et al. 2024).
    (9, AttentionKernel.FLASH_2): 0.35,
    # At rows of 2,048 to 16,384 and heads of 128: 49 to 55 % in a causal forward and 47 to 52 % in backward (Shah et
    # al. 2024, figures 5 and 6).
    (9, AttentionKernel.CUDNN): 0.50,
    # Fitted to half of prime-rl's steps (benchmarks/results/attention_rates.json). Alone, the kernel runs at 1.5 to 2
    # times FlashAttention-2's forward and 1.5 to 1.75 times its backward (Shah et al. 2024).
    (9, AttentionKernel.FLASH_3): 0.49,
    # Fitted as the one before. Its instructions are those of Ampere.
    (10, AttentionKernel.FLASH_2): 0.135,
    # As on Hopper; no figure was found.
    (10, AttentionKernel.CUDNN): 0.50,
}


def share_of_rate(capability: tuple[int, int] | None, kernel: AttentionKernel) -> float:
    """Return the share that a kernel reaches on cards of a compute capability."""
    major = 0 if capability is None else capability[0]
    # What does not run on a card is not asked about: FlashAttention-3 is Hopper's alone.
    return _SHARES.get((major, kernel), _SHARES.get((major, AttentionKernel.FLASH_2), _USUAL))


def kernel_named(attention: str | None) -> AttentionKernel | None:
    """Return the kernel that `attn_implementation` names; None where torch, or the model's own code, chooses."""
    found = re.search(r"flash[-_]att(?:entio)?n[-_]?([23])", attention or "")
    if found is None:
        return None
    return AttentionKernel.FLASH_3 if found[1] == "3" else AttentionKernel.FLASH_2
