"""The training step to simulate: sizes, precision, optimizer and engine, as the Trainer would run them. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What each rank holds.

    Args:
        engine: `none`, `ddp`, `fsdp1`, `fsdp2`, `zero1`, `zero2` or `zero3`.
        world_size: ranks that share.
        reshards_after_forward: whether layers gathered in forward are let go until backward (FSDP's full shard).
    """

    engine: str = "none"
    world_size: int = 1
    reshards_after_forward: bool = True


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of the Trainer on one rank.

    Args:
        batch_size: rows of a micro-batch.
        seq_length: tokens of a row, padding included.
        is_padded: whether rows may differ in length, so that the model gets a mask.
        is_packed: whether rows hold several documents, told apart by position ids.
        autocast: `bfloat16` or `float16` where the Trainer runs with bf16 or fp16; None without mixed precision.
        gradient_accumulation_steps: micro-batches.
        max_grad_norm: gradients are clipped where it is above 0.
        optim: name of the optimizer, in the words of `TrainingArguments.optim`; None for no optimizer step.
        optim_arguments: further fields of `TrainingArguments` that the optimizer reads, such as `optim_args`.
        sharding: the engine, and how many ranks share.
        is_proven: whether the first micro-batch is proven (`prove` of `apply`): memory is counted for that, no time.
    """

    batch_size: int = 1
    seq_length: int = 2048
    is_padded: bool = False
    is_packed: bool = False
    autocast: str | None = None
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 1.0
    optim: str | None = "adamw_torch_fused"
    optim_arguments: dict[str, Any] = field(default_factory=dict)
    sharding: Sharding = Sharding()
    is_proven: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the step on one rank, padding included."""
        return self.batch_size * self.seq_length * self.gradient_accumulation_steps
