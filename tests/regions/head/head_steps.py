"""A small Llama, and its steps with the head whole and chunked.

Chunks add up their losses, and the gradients of the head's weight, in another order than one product over the whole
batch does: a few roundings of float32, so that 1e-6 relative is the bound. What goes back into the decoder is bitwise
the same where the loss is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from hf_ckpt.regions.head import DeferredLogits

VOCAB, BATCH, LENGTH = 97, 2, 24
BOUND = 1e-6

Loss = Callable[[nn.Module], Tensor]


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "vocab_size": VOCAB, **changes})).to(dtype).train()


def ids() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def labels() -> Tensor:
    """Token ids of which some are ignored."""
    marked = ids()
    marked[0, :5] = -100
    return marked


def own_loss(model: nn.Module, **options: Any) -> Tensor:
    return model(input_ids=ids(), labels=labels(), **options).loss


def logits(model: nn.Module) -> Tensor:
    return model(input_ids=ids()).logits


def shifted(model: nn.Module) -> Tensor:
    """Logits that predict `targets()`, [B, S - 1, V]."""
    return logits(model)[:, :-1]


def targets() -> Tensor:
    return ids()[:, 1:]


def step(model: nn.Module, loss_of: Loss = own_loss) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def chunked(model: nn.Module) -> hf_ckpt.patch.apply.Applied:
    return hf_ckpt.apply(model, "none", head="chunked")


def off_by(got: Tensor, expected: Tensor) -> float:
    """Relative difference, of a number or in the norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(off_by(got[name], gradient) for name, gradient in expected.items())


def check_same(model: nn.Module, loss_of: Loss = own_loss) -> DeferredLogits | None:
    """Assert that the chunked head changes neither loss nor gradients by more than the bound."""
    expected = step(model, loss_of)
    with chunked(model):
        got = step(model, loss_of)
    assert got[0].dtype == torch.float32
    assert off_by(got[0], expected[0]) <= BOUND
    assert worst(got[1], expected[1]) <= BOUND
