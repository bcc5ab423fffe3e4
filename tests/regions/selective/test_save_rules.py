"""Lists of what to keep: which operator has which role, and names that never occur."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hf_ckpt
from hf_ckpt.errors import PlanMismatchError, PolicyError
from hf_ckpt.policy.plan import LayerPlan, StackPlan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.regions.selective.save_rules import OperatorRole, SaveRules, check_save_rules, operator_kind
from tests import exactness, plain_models, traces, zoo
from tests.regions.selective.selective_layers import PRESETS, llama, plain, recomputed, step_of_plain

pytestmark = [pytest.mark.slow, pytest.mark.core]


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
    assert not operator_kind(torch.ops.c10d.allreduce_.default).returns_new


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
        ("aten.unsafe_split", 'save: "aten.unsafe_split" makes no tensor of its own'),
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
