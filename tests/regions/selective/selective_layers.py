"""Layers that are recomputed selectively: what they keep, and what runs again."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import set_seed

import hf_ckpt
from tests import exactness, plain_models, zoo
from tests.exactness import Result

PRESETS = ["selective", "selective_attention"]
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "selective": ("selective", {}),
    "selective_attention": ("selective_attention", {}),
    "operators": ("selective", {"save": ["aten.mm", "aten.bmm"]}),
    "modules": ("selective", {"save": ["self_attn", "mlp.*"]}),
}


class Recomputed(TorchDispatchMode):
    """Counts the operators that run again in backward: those that record a graph there."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A function of the library's own records none; the backward of this one multiplies dense matrices.
        records = torch.is_grad_enabled() or str(function).startswith("bitsandbytes.gemm")
        if torch._C._current_graph_task_id() != -1 and records:
            self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def recomputed(case: zoo.Case, mode: str, **options: Any) -> Counter[str]:
    with hf_ckpt.apply(case.model, mode, prove="off", **options), Recomputed() as seen:
        exactness.step(case)
    return seen.counts


class Routed(plain_models.Block):
    """Routes by drawn numbers, and has dropout behind that."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        goes = torch.bernoulli(torch.sigmoid(hidden[..., :1]))
        hidden = functional.dropout(hidden, 0.3, self.training) + goes * self.mlp(hidden)
        return super().forward(hidden, mask)


def plain(block: type[nn.Module]) -> zoo.Case:
    torch.manual_seed(0)
    return plain_models.case(plain_models.Decoder([block() for _ in range(3)]))


def step_of_plain(case: zoo.Case) -> Result:
    case.model.zero_grad()
    set_seed(1)
    loss = case.model(**case.inputs).pow(2).mean()
    loss.backward()
    return loss.detach(), exactness.gradients(case.model)


@cache
def llama(attn_implementation: str = "sdpa") -> zoo.Case:
    return exactness.build("llama", attn_implementation=attn_implementation, dropout=0.0)


LAYERS = 4
