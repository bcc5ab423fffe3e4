"""Selective recomputation: what is kept, that it is exact, what is refused, and that nothing is left behind."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_ckpt
from hf_ckpt.errors import PlanMismatchError, PolicyError, UnsupportedError
from hf_ckpt.policy.plan import LayerPlan, StackPlan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.regions.selective.save_rules import OperatorRole, SaveRules, check_save_rules, operator_kind
from hf_ckpt.regions.selective.selective_recompute import SelectiveStack, recompute_selectively
from tests import exactness, live_storages, plain_models, traces, zoo
from tests.exactness import Result

pytestmark = [pytest.mark.slow, pytest.mark.core]

PRESETS = ["selective", "selective_attention"]
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "selective": ("selective", {}),
    "selective_attention": ("selective_attention", {}),
    "operators": ("selective", {"save": ["aten.mm", "aten.bmm"]}),
    "modules": ("selective", {"save": ["self_attn", "mlp.*"]}),
}


def check(case: zoo.Case, policy: str, run: Callable[[zoo.Case], Result] = exactness.step) -> list[str]:
    """Return what a policy changes in a step of this case."""
    expected = run(case)
    mode, options = POLICIES[policy]
    case.model.zero_grad()
    with hf_ckpt.apply(case.model, mode, **options):
        return exactness.differences(expected, run(case))


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


# --- Exact. ---


@cache
def cases(model_type: str, attn_implementation: str) -> tuple[zoo.Case, Result]:
    case = exactness.build(model_type, attn_implementation=attn_implementation)
    return case, exactness.step(case)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_decoders_with_dropout_are_exact(model_type: str, attn_implementation: str, policy: str) -> None:
    case, expected = cases(model_type, attn_implementation)
    mode, options = POLICIES[policy]
    with hf_ckpt.apply(case.model, mode, **options), Recomputed() as seen:
        got = exactness.step(case)
    assert exactness.differences(expected, got) == []
    # Or nothing was put to the test.
    assert seen.counts["aten._softmax.default"] + seen.counts["aten.pow.Tensor_Scalar"] > 0


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("model_type", ["opt", "gpt2", "t5", "bert", "qwen2_vl", "gemma3n_text", "gpt_oss", "mixtral"])
def test_other_shapes_of_layers_are_exact(model_type: str, policy: str) -> None:
    assert check(exactness.build(model_type), policy) == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{"lora_dropout": 0.2}, {"use_dora": True, "lora_dropout": 0.2}])
def test_adapters_are_exact(options: dict[str, Any], policy: str) -> None:
    assert check(exactness.lora(exactness.build("llama"), **options), policy) == []


@pytest.mark.parametrize("policy", PRESETS)
def test_block_diagonal_adapters_which_write_in_place_are_exact(policy: str) -> None:
    peft = pytest.importorskip("peft", minversion="0.18.1")
    blocks = peft.BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"], nblocks=2)
    assert check(exactness.lora(exactness.build("llama"), use_bdlora=blocks), policy) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_bf16_autocast_and_accumulation_are_exact(policy: str) -> None:
    def two_micro_batches(case: zoo.Case) -> Result:
        case.model.zero_grad()
        torch.manual_seed(0)
        losses = []
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses.append(zoo.loss(case.model, case.inputs))
            losses[-1].backward()
        return torch.stack(losses).detach(), exactness.gradients(case.model)

    assert check(exactness.lora(exactness.build("llama"), lora_dropout=0.1), policy, two_micro_batches) == []


def test_tied_embeddings_are_exact() -> None:
    case = exactness.build("llama")
    case.model.lm_head.weight = case.model.model.embed_tokens.weight
    assert check(case, "selective") == []


@pytest.mark.parametrize("policy", PRESETS)
def test_four_bit_weights_are_exact_and_their_products_kept(policy: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    case = exactness.build("llama", dropout=0.0)
    for layer in case.model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight = getattr(layer.mlp, name).weight.detach().to(torch.bfloat16).contiguous()
            quantized = bnb.nn.Linear4bit(weight.shape[1], weight.shape[0], bias=False, quant_type="nf4")
            quantized.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
            setattr(layer.mlp, name, quantized.to("cpu"))
    case = exactness.lora(case, lora_dropout=0.1)
    assert check(case, policy) == []
    again = recomputed(case, policy)
    num_quantized = sum(count for name, count in again.items() if name.startswith("bitsandbytes"))
    # `down_proj` with its adapter: recomputation comes as far as the adapter's second product.
    assert num_quantized == (3 * LAYERS if policy == "selective_attention" else 0)


# --- Random numbers. ---


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
    torch.manual_seed(1)
    loss = case.model(**case.inputs).pow(2).mean()
    loss.backward()
    return loss.detach(), exactness.gradients(case.model)


@pytest.mark.parametrize("options", [{}, {"save": ["aten.addmm", "aten.native_dropout", "aten.rand_like"]}])
def test_numbers_behind_a_kept_operator_that_draws_are_drawn_again(options: dict[str, Any]) -> None:
    class Drawing(Routed):
        def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
            hidden = hidden + torch.rand_like(hidden) * torch.native_dropout(hidden, 0.5, True)[0]
            return super().forward(hidden, mask)

    case = plain(Drawing)
    expected = step_of_plain(case)
    with hf_ckpt.apply(case.model, "selective", **options), Recomputed() as seen:
        assert exactness.differences(expected, step_of_plain(case)) == []
    # Else there would be nothing to bring back.
    assert seen.counts["aten.bernoulli.default"] == 0
    assert seen.counts["aten.bernoulli_.float"] > 0
    assert seen.counts["aten.rand_like.default"] == (0 if options else 3)


# --- What is kept. ---

PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
KERNEL = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def products(counts: Counter[str]) -> int:
    return sum(counts[name] for name in PRODUCTS)


@cache
def llama(attn_implementation: str = "sdpa") -> zoo.Case:
    return exactness.build("llama", attn_implementation=attn_implementation, dropout=0.0)


LAYERS = 4
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


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("aten.mm.default", OperatorRole.PRODUCT),
        ("aten._grouped_mm.default", OperatorRole.PRODUCT),
        ("aten.convolution.default", OperatorRole.PRODUCT),
        ("aten._scaled_dot_product_flash_attention.default", OperatorRole.ATTENTION),
        ("aten._scaled_dot_product_efficient_attention.default", OperatorRole.ATTENTION),
        ("aten._scaled_dot_product_cudnn_attention.default", OperatorRole.ATTENTION),
        ("aten._scaled_dot_product_fused_attention_overrideable.default", OperatorRole.ATTENTION),
        ("aten._flash_attention_forward.default", OperatorRole.ATTENTION),
        ("aten._efficient_attention_forward.default", OperatorRole.ATTENTION),
        ("aten._scaled_dot_product_flash_attention_backward.default", OperatorRole.CHEAP),
        ("aten._flash_attention_backward.default", OperatorRole.CHEAP),
        ("aten.topk.default", OperatorRole.ROUTING),
        ("aten.sort.stable", OperatorRole.ROUTING),
        ("aten.max.dim", OperatorRole.ROUTING),
        ("aten.max.default", OperatorRole.CHEAP),
        ("aten.bernoulli_.float", OperatorRole.CHEAP),
        ("aten.silu.default", OperatorRole.CHEAP),
    ],
)
def test_operators_have_their_role(name: str, role: OperatorRole) -> None:
    namespace, packet, overload = name.split(".")
    kind = operator_kind(getattr(getattr(getattr(torch.ops, namespace), packet), overload))
    assert (kind.name, kind.role) == (name, role)


def test_kernels_of_other_packages_are_known_by_their_names() -> None:
    @torch.library.custom_op("hf_ckpt_flash_attn::varlen_fwd", mutates_args=())
    def forward(query: Tensor) -> Tensor:
        return query.clone()

    @torch.library.custom_op("hf_ckpt_flash_attn::varlen_bwd", mutates_args=())
    def backward(query: Tensor) -> Tensor:
        return query.clone()

    assert operator_kind(torch.ops.hf_ckpt_flash_attn.varlen_fwd.default).role is OperatorRole.ATTENTION
    assert operator_kind(torch.ops.hf_ckpt_flash_attn.varlen_bwd.default).role is OperatorRole.CHEAP


def test_flex_attention_is_a_kernel() -> None:
    # It has no backward on a CPU.
    from torch.nn.attention.flex_attention import flex_attention  # noqa: F401  # registers it

    assert operator_kind(torch.ops.higher_order.flex_attention).role is OperatorRole.ATTENTION


def test_collectives_write_into_what_they_are_given() -> None:
    # Their schemas do not say so; tensor parallel layers add up the product of their last projection that way.
    kind = operator_kind(torch.ops.c10d.allreduce_.default)
    tensor = torch.ones(2)
    assert list(kind.written_tensors(([tensor],), {})) == [tensor]
    assert not kind.returns_new


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


def test_a_write_into_what_the_layer_returned_is_refused() -> None:
    def run(layer: nn.Module, hidden: Tensor) -> Tensor:
        output, product = selectively(layer, hidden)
        with torch.no_grad():
            product.zero_()
        return output

    with pytest.raises(UnsupportedError, match="somebody has written into it since"):
        gradient(run, ReturningProduct())


def test_a_layer_that_does_not_repeat_itself_is_refused() -> None:
    widths = iter([slice(0, 2), slice(0, 1)])

    def changing(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(hidden[next(widths)] @ weight) @ weight)

    hidden, weight = torch.randn(2, 8, requires_grad=True), torch.randn(8, 8)
    with pytest.raises(UnsupportedError, match=r"aten\.mm\.default number 1 with inputs of \[\[1, 8\], \[8, 8\]\]"):
        recompute_selectively(
            SelectiveStack(), SaveRules.of("selective"), None, changing, hidden, weight
        ).sum().backward()


# --- What does not occur. ---


def message(mode: str, case: zoo.Case | None = None, **options: Any) -> str:
    case = case or llama()
    with hf_ckpt.apply(case.model, mode, **options), pytest.raises(PlanMismatchError) as raised:
        exactness.step(case)
    case.model.zero_grad()
    return str(raised.value)


def test_an_operator_that_never_runs_is_an_error_in_the_first_step() -> None:
    told = message("selective", save=["aten.mm", "aten.addmm"])
    assert told.startswith(
        'save: "aten.addmm" is to be kept, but that operator did not run in the layers of model.layers in the first '
        "step: it would be recomputed."
    )
    assert told.endswith(
        "Products and kernels that ran: aten._scaled_dot_product_flash_attention_for_cpu, aten.mm. "
        'Did you mean "aten.mm"?'
    )


def test_attention_output_is_that_of_whichever_kernel_runs() -> None:
    aten = torch.ops.aten
    operators = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention, aten.mm
    kinds = [operator_kind(operator.default) for operator in operators]
    rules = SaveRules.of("selective", ("attention_output", "mlp.down_proj"))
    assert [rules.for_operator(kind, ()) for kind in kinds] == [("attention_output",), ("attention_output",), ()]
    assert (rules.globs, rules.attention) == (("mlp.down_proj",), "attention_output")
    told = message("selective", zoo.build("mamba"), save=["attention_output"])
    assert told.startswith('save: "attention_output" is to be kept, but no attention ran in the layers of')


@pytest.mark.parametrize(
    ("attn_implementation", "operator"),
    [("sdpa", "aten._scaled_dot_product_flash_attention_for_cpu.default"), ("eager", "aten.bmm.default")],
)
def test_attention_output_in_a_list_is_what_the_mode_keeps(attn_implementation: str, operator: str) -> None:
    counts = recomputed(llama(attn_implementation), "selective", save=["attention_output"])
    assert counts == recomputed(llama(attn_implementation), "selective_attention")
    assert recomputed(llama(attn_implementation), "full") - counts == {operator: 4}


def test_a_module_without_products_is_an_error_in_the_first_step() -> None:
    assert 'save: "input_layernorm" is to be kept, but no' in message("selective", save=["input_layernorm"])


def test_a_name_need_not_occur_in_every_layer_of_a_stack() -> None:
    case = exactness.build("qwen3_next", num_layers=4)
    assert {hasattr(layer, "self_attn") for layer in case.model.model.layers} == {True, False}
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "selective", save=["self_attn.q_proj"]):
        assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.parametrize("mode", PRESETS)
def test_a_preset_that_finds_nothing_is_an_error_in_the_first_step(mode: str) -> None:
    class Elementwise(plain_models.Block):
        def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
            return torch.tanh(hidden * self.mlp.up.bias[:8])

    case = plain(Elementwise)
    with hf_ckpt.apply(case.model, mode), pytest.raises(PlanMismatchError, match=f'Mode "{mode}" keeps'):
        step_of_plain(case)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("aten.mmm", 'save: "aten.mmm" is no operator that torch knows, and no module of the layer matches it'),
        ("aten.mmm", 'Did you mean "aten.mm"?'),
        ("mlp.up_porj", 'Did you mean "mlp.up_proj"?'),
        ("self_attn.*_prj", "by its path below the layer, * for any characters (self_attn.q_proj, self_attn.k_proj"),
        ("torch.ops.atn.mm", "no operator that torch knows"),
        ("aten.mm.defualt", "no operator that torch knows"),
        ("aten.view", 'save: "aten.view" makes no tensor of its own'),
        ("aten.add_", 'save: "aten.add_" makes no tensor of its own'),
    ],
)
def test_names_that_nothing_can_have_are_refused_at_once(name: str, told: str) -> None:
    layer = llama().model.model.layers[0]
    with pytest.raises(PolicyError) as raised:
        check_save_rules(SaveRules.of("selective", (name,)), layer)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    "name", ["mm", "aten.mm", "aten::mm", "torch.ops.aten.mm.default", "mlp", "*_proj", "flex_attention"]
)
def test_names_that_there_are_pass(name: str) -> None:
    check_save_rules(SaveRules.of("selective", (name,)), llama().model.model.layers[0])


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


# --- Nothing left behind. ---


def test_a_second_backward_over_a_retained_graph_is_exact() -> None:
    case = exactness.build("llama")
    torch.manual_seed(0)
    expected = [g.clone() for g in torch.autograd.grad(zoo.loss(case.model, case.inputs), [*case.model.parameters()])]
    with hf_ckpt.apply(case.model, "selective"):
        torch.manual_seed(0)
        loss = zoo.loss(case.model, case.inputs)
        for retains in (True, False):
            got = torch.autograd.grad(loss, [*case.model.parameters()], retain_graph=retains)
            assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("policy", ["selective", "modules"])
@pytest.mark.parametrize("runs_backward", [True, False])
def test_activations_are_freed_without_the_garbage_collector(policy: str, runs_backward: bool) -> None:
    case = exactness.build("llama")
    mode, options = POLICIES[policy]
    gc.collect()
    gc.disable()
    try:
        with (
            hf_ckpt.apply(case.model, mode, **options),
            live_storages.of(case.model, case.inputs.values()) as alive,
        ):
            loss = zoo.loss(case.model, case.inputs)
            held = alive.num_bytes()
            if runs_backward:
                loss.backward()
                case.model.zero_grad(set_to_none=True)
            del loss
            assert alive.num_bytes() < held / 20
    finally:
        gc.enable()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_exception_leaves_the_layers_as_they_were(phase: str) -> None:
    case = exactness.build("llama")
    expected = exactness.step(case)
    fails = iter([phase == "forward", True])

    def fail(*_: Any) -> None:
        if next(fails, False):
            raise RuntimeError("on purpose")

    with hf_ckpt.apply(case.model, "selective", save=["mlp.*", "self_attn"]):
        hook = case.model.model.layers[2].mlp.up_proj.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            exactness.step(case)
        hook.remove()
        assert exactness.differences(expected, exactness.step(case)) == []


def test_copies_and_pickles_of_the_model_are_exact_by_themselves() -> None:
    case = exactness.build("llama")
    expected = exactness.step(case)
    case.model.zero_grad()
    with hf_ckpt.apply(case.model, "selective", save=["mlp.up_proj"]):
        exactness.step(case)
        for copied in (copy.deepcopy(case.model), pickle.loads(pickle.dumps(case.model))):
            got = exactness.step(zoo.Case(case.model_type, copied, case.inputs))
            assert exactness.differences(expected, got) == []


def test_removal_leaves_no_trace() -> None:
    case = exactness.build("llama")
    found = traces.snapshot(case.model)
    with hf_ckpt.apply(case.model, "selective", save=["mlp.*"]):
        exactness.step(case)
        assert case.model.model.layers[0].mlp.up_proj._forward_hooks
    case.model.zero_grad()
    assert traces.differences(found, traces.snapshot(case.model)) == []


# --- Compiled layers. ---


@pytest.mark.parametrize(
    ("model_type", "policy", "num_graphs"),
    [
        ("llama", "selective", 1),
        ("llama", "modules", 0),
        # Its layers write into what they keep.
        ("gemma3n_text", "selective", 0),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_are_exact(model_type: str, policy: str, num_graphs: int) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    # Before 5.23 transformers compiles what is inside of the region, which hooks of modules cut into other graphs.
    is_inside = "__call__" in vars(GradientCheckpointingLayer)
    if is_inside and policy == "modules":
        pytest.skip("gradients are added up in another order")
    case = exactness.build(model_type, num_layers=2)
    expected = exactness.step(case)
    mode, options = POLICIES[policy]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with hf_ckpt.apply(case.model, mode, **options):
        for layer in case.model.model.layers:
            layer.compile(backend=counter)
        # What a stack keeps is known when it was recomputed once: from then on it is compiled.
        for _ in range(3):
            assert exactness.differences(expected, exactness.step(case)) == []
    assert counter.frame_count == num_graphs or is_inside


# --- Layers without attention. ---


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("led", ["selective_attention"] * 8),
        ("longformer", ["selective_attention"] * 4),
        ("bamba", ["full", "selective_attention"] * 2),
        ("jamba", ["full", "selective_attention"] * 2),
    ],
)
def test_selective_attention_is_exact_on_local_attention_and_hybrids(model_type: str, expected: list[str]) -> None:
    case = exactness.build(model_type)
    without = exactness.step(case)
    with hf_ckpt.apply(case.model, "selective_attention") as applied:
        assert exactness.differences(without, exactness.step(case)) == []
    assert [str(entry.mode) for stack in applied.plan.stacks for entry in stack.layers] == expected


@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_selective_attention_on_a_model_without_attention_is_refused_when_it_is_applied(model_type: str) -> None:
    model = exactness.build(model_type).model
    found = traces.snapshot(model)
    with pytest.raises(PolicyError, match="computes attention: nothing could be kept"):
        hf_ckpt.apply(model, "selective_attention")
    assert traces.differences(found, traces.snapshot(model)) == []


def test_plan_that_keeps_attention_where_there_is_none_is_refused() -> None:
    model = exactness.build("bamba").model
    stacks = (StackPlan("model.layers", (LayerPlan(Mode.SELECTIVE_ATTENTION),) * 4),)
    with pytest.raises(PolicyError, match=r'sets layer 0 of model\.layers to "selective_attention", but that layer of'):
        hf_ckpt.apply(model, hf_ckpt.Plan("BambaForCausalLM", stacks))
