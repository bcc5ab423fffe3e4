"""What selective recomputation keeps, and what is written into that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hf_ckpt.errors import PlanMismatchError, RecomputationError, UnsupportedError
from hf_ckpt.regions import fingerprints
from hf_ckpt.regions.selective.save_rules import SaveRules
from hf_ckpt.regions.selective.selective_recompute import SelectiveStack, recompute_selectively
from tests import exactness, plain_models
from tests.regions.selective.selective_layers import LAYERS, POLICIES, Recomputed, llama, recomputed

pytestmark = [pytest.mark.slow, pytest.mark.core]


# --- What is kept. ---

PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
KERNEL = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def products(counts: Counter[str]) -> int:
    return sum(counts[name] for name in PRODUCTS)


# Of the seven projections `down_proj` comes last, and recomputation stops before it.
BEFORE_LAST = 6


@pytest.mark.parametrize(
    ("mode", "options", "num_products", "num_kernels"),
    [
        ("full", {}, BEFORE_LAST, 1),
        ("selective", {}, 0, 0),
        ("selective_attention", {}, BEFORE_LAST, 0),
        ("selective", {"save": ["aten.mm"]}, 0, 1),
        ("selective", {"save": ["mm"]}, 0, 1),
        ("selective", {"save": ["aten.mm.default"]}, 0, 1),
        ("selective", {"save": ["torch.ops.aten.mm.default"]}, 0, 1),
        ("selective", {"save": ["aten._scaled_dot_product_flash_attention_for_cpu"]}, BEFORE_LAST, 0),
        ("selective", {"save": ["mlp.up_proj"]}, BEFORE_LAST - 1, 1),
        ("selective", {"save": ["mlp.*"]}, BEFORE_LAST - 2, 1),
        ("selective", {"save": ["self_attn"]}, BEFORE_LAST - 4, 0),
        ("selective", {"save": ["*.[qk]_proj", "aten._scaled_dot_product_flash_attention_for_cpu"]}, 4, 0),
    ],
)
def test_what_runs_again(mode: str, options: dict[str, Any], num_products: int, num_kernels: int) -> None:
    again = recomputed(llama(), mode, **options)
    assert products(again) == LAYERS * num_products
    assert again[KERNEL] == LAYERS * num_kernels


def test_eager_attention_keeps_the_product_of_its_probabilities_and_values() -> None:
    # The scores are computed again, so that their softmax can be, and the second product is not.
    assert recomputed(llama("eager"), "selective_attention")["aten.bmm.default"] == LAYERS
    assert recomputed(llama("eager"), "full")["aten.bmm.default"] == 2 * LAYERS
    assert products(recomputed(llama("eager"), "selective")) == 0


def test_a_module_with_adapters_keeps_their_products_too() -> None:
    case = exactness.lora(exactness.build("llama", dropout=0.0))
    # Of q_proj with its two products of an adapter, and the five projections before the last.
    assert products(recomputed(case, "full")) == LAYERS * (6 + 2 + 2)
    assert products(recomputed(case, "selective", save=["self_attn.q_proj"])) == LAYERS * (5 + 2)


def test_routing_is_always_kept() -> None:
    case = exactness.build("qwen3_moe", attn_implementation="eager")
    assert recomputed(case, "full")["aten.topk.default"] == LAYERS
    for mode, options in POLICIES.values():
        assert recomputed(case, mode, **options)["aten.topk.default"] == 0


class Narrow(nn.Module):
    """A product over few terms that returns much, as the second one of an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 2, bias=False), nn.Linear(2, 1024, bias=False)
        self.third = nn.Linear(1024, 8, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.third(torch.tanh(self.second(self.first(hidden)))))


@pytest.mark.parametrize(("options", "num_products"), [({}, 1), ({"save": ["second"]}, 3), ({"save": ["aten.mm"]}, 0)])
def test_narrow_products_run_again_unless_the_operator_is_named(options: dict[str, Any], num_products: int) -> None:
    layer, selection = Narrow(), SelectiveStack()
    saves = SaveRules.of("selective", tuple(options.get("save", ())))
    selection.hooks(layer, saves)
    hidden = torch.randn(4, 8, requires_grad=True)
    if "second" in saves.names:
        # It runs no other product.
        with pytest.raises(PlanMismatchError, match='"second" is to be kept'):
            recompute_selectively(selection, saves, None, layer, hidden).sum().backward()
        return
    with Recomputed() as seen:
        recompute_selectively(selection, saves, None, layer, hidden).sum().backward()
    assert products(seen.counts) == num_products


# --- Writes into what is kept. ---


class Writing(nn.Module):
    """Writes into the output of its first product, through a view that counts its own writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        hidden.mul_(torch.sigmoid(hidden.detach()))
        return torch.tanh(self.second(torch.tanh(hidden)))


def gradient(run: Callable[[nn.Module, Tensor], Tensor], layer: nn.Module) -> Tensor:
    hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    run(layer, hidden).pow(2).sum().backward()
    assert hidden.grad is not None
    return hidden.grad


def selectively(layer: nn.Module, hidden: Tensor) -> Tensor:
    return recompute_selectively(SelectiveStack(), SaveRules.of("selective"), None, layer, hidden)


def as_torch_does(layer: nn.Module, hidden: Tensor) -> Tensor:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    return checkpoint(layer, hidden, use_reentrant=False, context_fn=contexts)


def test_writes_into_kept_outputs_are_exact() -> None:
    layer = Writing()
    expected = gradient(lambda module, hidden: module(hidden), layer)
    assert torch.equal(gradient(selectively, layer), expected)
    # What this guards against; once torch sees the write, `selective` can do without its own modes for that.
    assert not torch.equal(gradient(as_torch_does, layer), expected)


class Unseen(torch.autograd.Function):
    """Writes as a kernel does that is launched past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        hidden.numpy()[...] *= 2
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class WritingUnseen(Writing):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(Unseen.apply(self.first(hidden)))))


def test_writes_that_no_operator_tells_of_are_exact() -> None:
    layer, selection = WritingUnseen(), SelectiveStack()
    expected = gradient(lambda module, hidden: module(hidden), layer)
    num_again = []
    for _ in range(3):
        with Recomputed() as seen:
            got = gradient(partial(recompute_selectively, selection, SaveRules.of("selective"), None), layer)
        assert torch.equal(got, expected)
        num_again.append(products(seen.counts))
    # Found out at the end of the first forward; from then on a copy is kept.
    assert num_again == [1, 0, 0]


class ReturningProduct(Writing):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        product = self.first(hidden)
        return torch.tanh(self.second(torch.tanh(product))), product


def write_into_product(run: Callable[[nn.Module, Tensor], Any], layer: nn.Module, hidden: Tensor) -> Tensor:
    output, product = run(layer, hidden)
    with torch.no_grad():
        product.zero_()
    returned: Tensor = output
    return returned


def test_a_write_into_what_the_layer_returned_is_exact_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ReturningProduct()
    expected = gradient(partial(write_into_product, lambda layer, hidden: layer(hidden)), layer)
    # The host sees it before it is handed out, and the operator runs again.
    assert torch.equal(gradient(partial(write_into_product, selectively), layer), expected)
    monkeypatch.setattr(fingerprints, "is_read_late", lambda tensor: True)
    with pytest.raises(UnsupportedError, match="somebody has written into it since"):
        gradient(partial(write_into_product, selectively), layer)


def test_a_layer_that_does_not_repeat_itself_is_refused() -> None:
    widths = iter([slice(0, 2), slice(0, 1)])

    def changing(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(hidden[next(widths)] @ weight) @ weight)

    hidden, weight = torch.randn(2, 8, requires_grad=True), torch.randn(8, 8)
    with pytest.raises(RecomputationError, match=r"there: aten\.mm\.default number 1 has inputs of \[\[1, 8\]\] where"):
        recompute_selectively(
            SelectiveStack(), SaveRules.of("selective"), None, changing, hidden, weight
        ).sum().backward()


# --- Elsewhere meanwhile. ---


class OnHost:
    """Keeps copies, and the shapes of what it was given."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}
        self.shapes: list[tuple[int, ...]] = []

    def put(self, tensor: Tensor) -> int:
        self.shapes.append(tuple(tensor.shape))
        self.held[len(self.shapes)] = tensor.clone()
        return len(self.shapes)

    def get(self, handle: int) -> Tensor:
        return self.held.pop(handle)


def test_a_keeper_is_given_what_recomputation_needs_and_no_more() -> None:
    block, keeper = plain_models.Block(), OnHost()
    hidden = torch.randn(2, 6, 8, requires_grad=True)
    torch.manual_seed(0)
    expected = torch.autograd.grad(block(hidden).pow(2).sum(), hidden)[0]
    torch.manual_seed(0)
    output = recompute_selectively(SelectiveStack(), SaveRules.of("selective"), keeper, block, hidden)
    # Query, key, scores, value, weighted values, the wider product of the ffn; its last one backward does not need.
    assert keeper.shapes == [(12, 8), (12, 8), (2, 6, 6), (12, 8), (2, 6, 8), (12, 16)]
    assert torch.equal(torch.autograd.grad(output.pow(2).sum(), hidden)[0], expected)
    assert keeper.held == {}
