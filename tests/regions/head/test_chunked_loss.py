"""A loss in chunks: that of the model within rounding, and logits that are never held."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ckpt.policy.plan import parse
from hf_ckpt.regions.head import Chunking
from hf_ckpt.regions.head.chunked_loss import InParts, _RowGradients, _SummedGradient
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase
from tests.regions.head.head_steps import (
    BATCH,
    BOUND,
    LENGTH,
    VOCAB,
    check_same,
    chunked,
    ids,
    llama,
    logits,
    off_by,
    own_loss,
    step,
)

core = pytest.mark.core


# --- The model's own loss. ---


@core
@pytest.mark.parametrize("tie", [False, True])
def test_loss_and_gradients_are_those_of_the_model(tie: bool) -> None:
    check_same(llama(tie_word_embeddings=tie))


@core
def test_loss_is_scaled_by_the_number_of_items() -> None:
    check_same(llama(), lambda model: own_loss(model, num_items_in_batch=torch.tensor(33)))


@core
def test_gradients_add_up_over_micro_batches() -> None:
    check_same(llama(), lambda model: own_loss(model) + functional.cross_entropy(logits(model)[0], ids()[1]))


@core
def test_batch_without_any_label_gives_nan_as_the_model_does() -> None:
    model = llama()
    with chunked(model):
        assert model(input_ids=ids(), labels=torch.full_like(ids(), -100)).loss.isnan()


@core
def test_gradients_behind_a_frozen_head_are_bitwise_the_same() -> None:
    model = llama()
    model.lm_head.requires_grad_(False)
    expected = step(model)
    with chunked(model):
        got = step(model)
    assert all(torch.equal(got[1][name], gradient) for name, gradient in expected[1].items())


@core
def test_head_alone_can_be_trained() -> None:
    model = llama()
    model.model.requires_grad_(False)
    check_same(model)


@core
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning")
@pytest.mark.parametrize("settings", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_adapter_on_the_head_is_exact(settings: dict[str, Any]) -> None:
    wanted = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **settings}
    check_same(get_peft_model(llama(tie_word_embeddings=False), LoraConfig(**wanted)).train())


@core
def test_second_backward_through_the_same_graph_gives_the_same() -> None:
    model = llama()
    with chunked(model):
        loss = own_loss(model)
        loss.backward(retain_graph=True)
        first = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        loss.backward()
    assert all(torch.equal(p.grad, first[name]) for name, p in model.named_parameters())


# --- Lower precision. ---


@core
def test_bf16_loss_is_float32_and_that_of_the_model() -> None:
    model = llama(torch.bfloat16)
    expected = own_loss(model).detach()
    with chunked(model):
        got = own_loss(model).detach()
    assert got.dtype == expected.dtype == torch.float32
    assert off_by(got, expected) <= BOUND


@core
def test_bf16_weight_gradient_is_as_near_to_the_truth_as_the_models() -> None:
    # Added up in bf16 it would be three times as far off with this many chunks.
    model = llama(torch.bfloat16, num_hidden_layers=1)
    tokens = torch.randint(0, VOCAB, (2, 512))

    def gradient(of: nn.Module) -> Tensor:
        of.zero_grad()
        of(input_ids=tokens, labels=tokens).loss.backward()
        return of.lm_head.weight.grad

    truth = gradient(copy.deepcopy(model).double())
    plain = off_by(gradient(model), truth)
    with chunked(model):
        model.lm_head.forward.args[0].tokens = 16
        assert off_by(gradient(model), truth) <= 1.5 * plain


@core
def test_autocast_is_as_near_to_the_truth_as_the_models() -> None:
    def loss_of(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return own_loss(model)

    model = llama()
    truth, plain = step(model), step(model, loss_of)
    with chunked(model):
        got = step(model, loss_of)
    assert off_by(got[0], plain[0]) <= BOUND
    for name, gradient in truth[1].items():
        assert off_by(got[1][name], gradient) <= 1.5 * off_by(plain[1][name], gradient)


# --- The logits are never held. ---


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.elements = max(self.elements, output.numel())
        return output


@core
def test_no_tensor_of_the_size_of_the_logits_is_made() -> None:
    model = llama(vocab_size=997)
    with _Largest() as plain:
        step(model)
    with chunked(model), _Largest() as largest:
        step(model)
    assert plain.elements == BATCH * LENGTH * 997
    # The head's own weight and its gradient.
    assert largest.elements == 997 * 32


def test_simulated_step_holds_no_logits() -> None:
    config = LlamaConfig(hidden_size=256, intermediate_size=256, num_hidden_layers=2, vocab_size=32000)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    size = 4 * 8192 * 32000
    shape, device = Step(seq_length=8192, optim=None), find_device("cpu")
    plain = simulate_step(model, "full", shape, device)
    less = simulate_step(model, parse("full", head="chunked"), shape, device)
    assert max(plain.timeline.bytes_by_category[Category.LOSS]) >= 3 * size
    assert max(less.timeline.bytes_by_category[Category.LOSS]) <= size
    # One more product with the weight of the head, and nothing else.
    assert sum(less.num_flops.values()) - sum(plain.num_flops.values()) == 2 * 8192 * 32000 * 256
    assert less.num_flops[Phase.BACKWARD] == plain.num_flops[Phase.BACKWARD]


@core
@pytest.mark.parametrize(
    ("rows", "columns", "hidden_bytes", "chunks", "longest"),
    [
        (24, 97, 3072, 8, 3),
        (5, 97, 640, 5, 1),
        (0, 97, 0, 1, 0),
        (4096, 32000, 2**25, 8, 512),
        (8192, 128256, 2**26, 16, 512),
        # A quarter of the bytes of 685,000 hidden states, which are 5.2 GiB.
        (685_000, 128_256, 685_000 * 8192, 126, 5437),
    ],
)
def test_chunks_are_small_and_few(rows: int, columns: int, hidden_bytes: int, chunks: int, longest: int) -> None:
    lengths = Chunking().lengths(rows, columns, hidden_bytes)
    assert (len(lengths), max(lengths), sum(lengths)) == (chunks, longest, rows)


@core
def test_gradient_of_a_tensor_used_in_parts_is_made_in_one_buffer() -> None:
    tensor = torch.randn(6, 3, requires_grad=True)
    rows = InParts(tensor * 1, _RowGradients([4, 2]))
    (rows(0).sum() * 2 + rows(1).sum() * 3).backward()
    assert torch.equal(tensor.grad, torch.tensor([[2.0] * 3] * 4 + [[3.0] * 3] * 2))
    tensor.grad = None
    again = InParts(tensor, _SummedGradient(tensor.dtype))
    (again(0).sum() + again(1).square().sum()).backward()
    assert torch.equal(tensor.grad, 1 + 2 * tensor)


@core
def test_step_costs_one_more_product_with_the_heads_weight() -> None:
    model = llama()
    with FlopCounterMode(display=False) as plain:
        step(model)
    product = 2 * BATCH * LENGTH * VOCAB * 32
    with chunked(model):
        with FlopCounterMode(display=False) as first:
            step(model)
        with FlopCounterMode(display=False) as later:
            step(model)
    assert later.get_total_flops() - plain.get_total_flops() == product
    # Its proof: the loss of the plain head, and the gradients of one chunk of eight.
    assert first.get_total_flops() - later.get_total_flops() == product + 3 * product // 8
