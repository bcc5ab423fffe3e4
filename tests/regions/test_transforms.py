"""Derivatives beyond one backward, through all that a plan can do: the numbers of no plan, or one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from hf_ckpt import UnsupportedError
from tests import exactness, plain_models, zoo

CPU = {"to": "cpu", "min_bytes": 0}
POLICIES: dict[str, tuple[object, dict[str, Any]]] = {
    **{name: exactness.POLICIES[name] for name in ("full", "attention", "ffn", "segments_2", "nested")},
    "selective": ("selective", {}),
    "selective_attention": ("selective_attention", {}),
    "offload": ("full", {"offload": CPU}),
    "selective_offload": ("selective", {"offload": CPU}),
}
TILES: dict[str, tuple[object, dict[str, Any]]] = {
    "tiles": ("none", {"tiles": 2}),
    "full_tiles": ("full", {"tiles": 2}),
}
every_policy = pytest.mark.parametrize("policy", POLICIES)
every_policy_with_tiles = pytest.mark.parametrize("policy", [*POLICIES, *TILES])
tiles = pytest.mark.parametrize("policy", TILES)


def apply(model: nn.Module, policy: str) -> hf_ckpt.patch.apply.Applied:
    mode, options = {**POLICIES, **TILES}[policy]
    return hf_ckpt.apply(model, mode, **options)


def decoder(dropout: float = 0.0) -> zoo.Case:
    torch.manual_seed(0)
    case = plain_models.case(plain_models.Decoder().double())
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return zoo.Case(case.model_type, case.model, {"hidden": case.inputs["hidden"].double()})


def directions(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]


def second_order(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """Return the product of the loss's second derivatives with a direction."""
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    slope = torch.stack([(x * y).sum() for x, y in zip(first, directions(model), strict=True)]).sum()
    found = torch.autograd.grad(slope, parameters, allow_unused=True)
    return [torch.zeros_like(p) if x is None else x for p, x in zip(parameters, found, strict=True)]


def loss_of(case: zoo.Case) -> Tensor:
    return case.model(**case.inputs).square().sum()


# --- A backward of the backward. ---


@every_policy
def test_second_derivatives_are_those_without_a_plan(policy: str) -> None:
    case = decoder(dropout=0.3)

    def run() -> list[Tensor]:
        torch.manual_seed(2)
        return second_order(case.model, loss_of(case))

    expected = run()
    with apply(case.model, policy):
        # The engine adds up the parts of a gradient in another order when they come from other nodes.
        torch.testing.assert_close(run(), expected, rtol=1e-12, atol=1e-12)


@tiles
def test_tiles_refuse_to_be_differentiated_twice(policy: str) -> None:
    case = decoder()
    with apply(case.model, policy), pytest.raises(UnsupportedError, match="create_graph=True asks"):
        second_order(case.model, loss_of(case))


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=19, attn_implementation="eager", **changes)
    return LlamaForCausalLM(config).double().train()


def ids() -> Tensor:
    return torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(1))


def penalty(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a loss that has the size of its own gradient in it."""
    model.zero_grad()
    loss = model(input_ids=ids(), labels=ids()).loss
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + 0.1 * torch.stack([x.square().sum() for x in first]).sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_second_derivatives_through_a_chunked_head_are_those_of_the_model(mode: str, tie: bool) -> None:
    model = llama(tie_word_embeddings=tie)
    expected, product = penalty(model), second_order(model, model(input_ids=ids(), labels=ids()).loss)
    with hf_ckpt.apply(model, mode, head="chunked"):
        # In float64, sums over chunks are taken in another order.
        torch.testing.assert_close(penalty(model), expected, rtol=1e-11, atol=1e-13)
        got = second_order(model, model(input_ids=ids(), labels=ids()).loss)
        torch.testing.assert_close(got, product, rtol=1e-11, atol=1e-13)
        # A plain step afterwards finds nothing left over.
        model.zero_grad()
        model(input_ids=ids(), labels=ids()).loss.backward()
        assert float(model.lm_head.weight.grad.norm()) > 0


# --- A backward of several gradients at once. ---


@every_policy
def test_a_vectorized_backward_is_that_without_a_plan(policy: str) -> None:
    case = decoder(dropout=0.3)
    parameters, several = list(case.model.parameters()), torch.tensor([1.0, 2.0]).double()

    def batched() -> tuple[Tensor, ...]:
        torch.manual_seed(2)
        return torch.autograd.grad(loss_of(case), parameters, several, is_grads_batched=True)

    def mapped() -> tuple[Tensor, ...]:
        torch.manual_seed(2)
        loss = loss_of(case)
        return vmap(lambda x: torch.autograd.grad(loss, parameters, x, retain_graph=True))(several)

    expected = [batched(), mapped()]
    with apply(case.model, policy):
        for run, before in zip((batched, mapped), expected, strict=True):
            torch.testing.assert_close(run(), before, rtol=1e-12, atol=1e-12)


@tiles
def test_tiles_refuse_a_vectorized_backward(policy: str) -> None:
    case = decoder()
    with apply(case.model, policy), pytest.raises(UnsupportedError, match="several gradients at once, and tiles"):
        torch.autograd.grad(loss_of(case), list(case.model.parameters()), torch.ones(2).double(), is_grads_batched=True)


# --- Transforms. ---


def functional(case: zoo.Case) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    def loss(values: dict[str, Tensor]) -> Tensor:
        return functional_call(case.model, values, (), case.inputs).square().sum()

    return loss, {name: p.detach() for name, p in case.model.named_parameters()}


def with_duals(case: zoo.Case) -> None:
    with forward_ad.dual_level():
        hidden = forward_ad.make_dual(case.inputs["hidden"], torch.ones_like(case.inputs["hidden"]))
        case.model(hidden)


TRANSFORMS: dict[str, Callable[[zoo.Case], Any]] = {
    "grad": lambda case: (lambda loss, values: grad(loss)(values))(*functional(case)),
    "vjp": lambda case: (lambda loss, values: vjp(loss, values))(*functional(case)),
    "jacrev": lambda case: (lambda loss, values: jacrev(loss)(values))(*functional(case)),
    "jvp": lambda case: (lambda loss, values: jvp(loss, (values,), (values,)))(*functional(case)),
    "vmap": lambda case: vmap(case.model)(case.inputs["hidden"][None].expand(2, -1, -1, -1)),
    "forward_ad": with_duals,
}


# torch scripts its own decompositions for forward-mode derivatives.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("transform", TRANSFORMS)
@every_policy_with_tiles
def test_transforms_are_refused_in_one_message(policy: str, transform: str) -> None:
    case = decoder()
    TRANSFORMS[transform](case)
    text = "forward-mode derivatives" if transform == "forward_ad" else "a transform of torch.func"
    with apply(case.model, policy), pytest.raises(UnsupportedError, match=f"inside of {text}.* take the plan off"):
        TRANSFORMS[transform](case)
    TRANSFORMS[transform](case)


@pytest.mark.parametrize("transform", [grad, vjp, jacrev])
def test_transforms_of_a_chunked_head_are_refused_in_one_message(transform: Callable[..., Any]) -> None:
    model = llama()
    inputs = {"input_ids": ids(), "labels": ids()}
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return functional_call(model, values, (), inputs).loss

    with (
        hf_ckpt.apply(model, "none", head="chunked"),
        pytest.raises(UnsupportedError, match="inside of a transform of torch"),
    ):
        vjp(loss, values) if transform is vjp else transform(loss)(values)


@every_policy_with_tiles
def test_transforms_in_evaluation_are_those_without_a_plan(policy: str) -> None:
    case = decoder()
    case.model.eval()
    loss, values = functional(case)
    expected = grad(loss)(values)
    with apply(case.model, policy):
        got = grad(loss)(values)
    assert all(torch.equal(got[name], x) for name, x in expected.items())


class Energy(nn.Module):
    """A layer that follows a slope that `slope_of` gives it."""

    def __init__(self, slope_of: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._slope_of = slope_of

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self._slope_of(self.linear, hidden)


@pytest.mark.parametrize(
    ("mode", "options"),
    [("full", {}), ("selective", {}), ("full", {"segment_size": 2})],
    ids=["full", "sel", "segment"],
)
def test_torch_func_inside_of_a_region_is_refused_by_name(mode: str, options: dict[str, Any]) -> None:
    def slope(linear: nn.Module, hidden: Tensor) -> Tensor:
        return grad(lambda each: linear(each).square().sum())(hidden)

    model = nn.Sequential(Energy(slope), Energy(slope))
    with hf_ckpt.apply(model, mode, layers="", **options), pytest.raises(UnsupportedError, match="0 calls torch"):
        model(torch.ones(2, 4)).sum().backward()
