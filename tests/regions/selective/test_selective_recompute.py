"""Selective recomputation is exact, also where layers draw random numbers, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_ckpt
from tests import exactness, live_storages, traces, zoo
from tests.exactness import Result
from tests.regions.selective.selective_layers import (
    LAYERS,
    POLICIES,
    PRESETS,
    Recomputed,
    Routed,
    plain,
    recomputed,
    step_of_plain,
)

pytestmark = [pytest.mark.slow, pytest.mark.core]


def check(case: zoo.Case, policy: str, run: Callable[[zoo.Case], Result] = exactness.step) -> list[str]:
    """Return what a policy changes in a step of this case."""
    expected = run(case)
    mode, options = POLICIES[policy]
    case.model.zero_grad()
    with hf_ckpt.apply(case.model, mode, **options):
        return exactness.differences(expected, run(case))


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


@pytest.mark.parametrize("options", [{}, {"save": ["aten.addmm", "aten.native_dropout", "aten.rand_like"]}])
def test_numbers_behind_a_kept_operator_that_draws_are_drawn_again(options: dict[str, Any]) -> None:
    class Drawing(Routed):
        def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
            hidden = hidden + torch.rand_like(hidden) * torch.native_dropout(hidden, 0.5, True)[0]
            return super().forward(hidden, mask)

    case = plain(Drawing)
    expected = step_of_plain(case)
    # Unproven: the original draws them all.
    with hf_ckpt.apply(case.model, "selective", prove="off", **options), Recomputed() as seen:
        assert exactness.differences(expected, step_of_plain(case)) == []
    # Else there would be nothing to bring back.
    assert seen.counts["aten.bernoulli.default"] == 0
    assert seen.counts["aten.bernoulli_.float"] > 0
    assert seen.counts["aten.rand_like.default"] == (0 if options else 3)


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
@pytest.mark.sweep(keep=1)
def test_compiled_layers_are_exact(model_type: str, policy: str, num_graphs: int) -> None:
    from functorch.compile import min_cut_rematerialization_partition, nop
    from torch._dynamo.backends.common import AotAutograd

    class CountingGraphs(AotAutograd):
        """As "aot_eager"."""

        num_graphs = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.num_graphs += 1
            return super().__call__(*args, **kwargs)

    # Before 5.23 transformers compiles what is inside of the region, which hooks of modules cut into other graphs.
    is_inside = "__call__" in vars(GradientCheckpointingLayer)
    if is_inside and policy == "modules":
        pytest.skip("gradients are added up in another order")
    case = exactness.build(model_type, num_layers=2)
    expected = exactness.step(case)
    mode, options = POLICIES[policy]
    torch._dynamo.reset()
    counter = CountingGraphs(fw_compiler=nop, partition_fn=min_cut_rematerialization_partition)
    with hf_ckpt.apply(case.model, mode, **options):
        for layer in case.model.model.layers:
            layer.compile(backend=counter)
        # What a stack keeps is known when it was recomputed once: from then on it is compiled.
        for _ in range(3):
            assert exactness.differences(expected, exactness.step(case)) == []
    assert counter.num_graphs == num_graphs or is_inside


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


# --- Hooks on linear layers that come later than the plan. ---


def exchange(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, given, output: output * 2).remove()
    module.register_forward_hook(lambda module, given, output: output * 3, prepend=True)


def halved(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient * 0.5


LATE_HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda x: x.register_forward_hook(lambda module, given, output: output * 2 + 0.1),
    "forward, prepended": lambda x: x.register_forward_hook(lambda module, given, out: out * 2 + 0.1, prepend=True),
    "forward, exchanged": exchange,
    "before": lambda x: x.register_forward_pre_hook(lambda module, given: (given[0] * 2 + 0.1,)),
    "before, prepended": lambda x: x.register_forward_pre_hook(lambda module, given: (given[0] * 2,), prepend=True),
    "backward": lambda x: x.register_full_backward_hook(lambda module, given, _: (halved(given[0]),), prepend=True),
    "before backward": lambda x: x.register_full_backward_pre_hook(lambda module, given: (given[0] * 0.5,)),
}


# The first adapter is given what needs no gradient.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.sweep(keep=6)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("first_step", [0, 1, 3])
@pytest.mark.parametrize("hook", LATE_HOOKS)
def test_hooks_that_are_placed_on_linear_layers_later_act_once(hook: str, first_step: int, adapted: bool) -> None:
    found = []
    for policy in ("none", "selective"):
        case = exactness.build("llama")
        case = exactness.lora(case) if adapted else case
        with hf_ckpt.apply(case.model, policy):
            for _ in range(first_step):
                exactness.step(case)
            for name, module in case.model.named_modules():
                if name.endswith(("q_proj", "up_proj", "down_proj")):
                    LATE_HOOKS[hook](module)
            found.append([exactness.step(case) for _ in range(2)])
    assert [exactness.differences(*pair) for pair in zip(*found, strict=True)] == [[], []]
