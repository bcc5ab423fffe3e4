"""Single modules, forward and backward again and again on fake tensors, as benchmarks of kernels run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from benchmarks.published.points import ModulePoint
from hf_ckpt.simulation.caching_allocator import BLOCK_BYTES
from hf_ckpt.simulation.constant_folding import fold
from hf_ckpt.simulation.cuda import add_workspaces, emulate_cuda
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category
from hf_ckpt.simulation.tape import read_tape
from hf_ckpt.simulation.tracker import Tracker

_TIMES = 3
"""From the second time on gradients are there."""

Prepared = tuple[Callable[[], None], Any]
"""What runs forward and backward, and what else lies on the device meanwhile."""


def peak_bytes(point: ModulePoint) -> int:
    """Return the predicted peak of a module's forward and backward."""
    device = find_device(point.gpu)
    tracker = Tracker(rounding=BLOCK_BYTES, run=fold)
    with ExitStack() as entered:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        for context in (torch.random.fork_rng(devices=[]), mode, tracker, emulate_cuda(Step(), device, tracker)):
            entered.enter_context(context)
        with tracker.before_step():
            run, _held = MODULES[point.kernel](point.size)
        for storage in tracker.tape.before:
            storage.category = Category.TEMPORARY
        for _ in range(_TIMES):
            run()
    add_workspaces(tracker.tape, device)
    return read_tape(tracker.tape, device=device.name, plan=None, tokens=1).peak_bytes


def _cross_entropy(vocab_size: int) -> Prepared:
    logits = torch.randn(8 * 2048, vocab_size, requires_grad=True)
    targets = torch.randint(vocab_size, (8 * 2048, 1)).squeeze(1)
    loss = nn.CrossEntropyLoss()
    return lambda: loss(logits, targets).backward(), targets


def _head_and_loss(tokens: int) -> Prepared:
    width, vocab_size = 4096, 128256
    head, other = (nn.Linear(width, vocab_size, bias=False, dtype=torch.bfloat16) for _ in range(2))
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocab_size, (tokens, 1)).squeeze(1)
    loss = nn.CrossEntropyLoss()
    return lambda: loss(head(hidden), targets).backward(), (other, targets)


def _mlp(rows: int, width: int, inner: int, activation: str, tokens: int) -> Prepared:
    config = LlamaConfig(hidden_size=width, intermediate_size=inner, hidden_act=activation)
    hidden = torch.randn(rows, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    with _made_in(torch.bfloat16):
        layer = LlamaMLP(config)

    def run() -> None:
        output = layer(hidden)
        output.backward(torch.randn_like(output), retain_graph=True)

    return run, hidden


@contextmanager
def _made_in(dtype: torch.dtype) -> Iterator[None]:
    # Fake parameters that are tracked cannot be cast afterwards.
    found = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(found)


def _norm(layer: nn.Module, other: nn.Module, hidden: Tensor) -> Prepared:
    gradient = torch.randn_like(hidden)
    hidden.requires_grad_(True)
    return lambda: layer(hidden).backward(gradient, retain_graph=True), (other, hidden)


def _layer_norm(width: int) -> Prepared:
    layer, other = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
    return _norm(layer, other, torch.randn(4096, width))


def _rms_norm(width: int) -> Prepared:
    layer, other = (LlamaRMSNorm(width, eps=1e-6) for _ in range(2))
    return _norm(layer, other, torch.randn(2048, width, dtype=torch.bfloat16))


MODULES: Mapping[str, Callable[[int], Prepared]] = {
    "cross_entropy": _cross_entropy,
    "fused_linear_cross_entropy": _head_and_loss,
    "geglu": partial(_mlp, 8, 4096, 11008, "gelu_pytorch_tanh"),
    "swiglu": partial(_mlp, 4, 4096, 11008, "silu"),
    "tiled_geglu": partial(_mlp, 2, 2048, 4096, "gelu_pytorch_tanh"),
    "tiled_swiglu": partial(_mlp, 2, 2048, 4096, "silu"),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
}
"""By the kernel that the module was compared with; each takes the size that was varied."""
