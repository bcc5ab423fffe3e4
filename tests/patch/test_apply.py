"""A plan on a model: names stay as they are, removal leaves no trace, and a refusal leaves the model whole."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

import hf_ckpt
from hf_ckpt.errors import AlreadyAppliedError, PolicyError, UnsupportedError
from hf_ckpt.patch import apply
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.structure.layers import find_layers
from tests import exactness, plain_models, traces, zoo
from tests.exactness import POLICIES, every_policy

pytestmark = pytest.mark.core


def llama(**options: object) -> zoo.Case:
    return exactness.build("llama", **options)


# --- Names and signatures. ---


def outside(model: nn.Module) -> dict[str, object]:
    """What others see of a model."""
    return {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "state": list(model.state_dict()),
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers()],
        "signatures": {name: inspect.signature(module.forward) for name, module in model.named_modules()},
        "repr": repr(model),
    }


@every_policy
@pytest.mark.parametrize("model_type", ["llama", "opt", "t5", "gpt2"])
def test_names_and_signatures_stay(model_type: str, policy: str) -> None:
    case = exactness.build(model_type)
    before = outside(case.model)
    with exactness.apply(case.model, policy):
        assert outside(case.model) == before
        exactness.step(case)
        assert outside(case.model) == before
    assert outside(case.model) == before


def test_forwards_of_parts_keep_their_names_and_docstrings() -> None:
    model = llama().model
    mlp = model.model.layers[0].mlp
    found = mlp.forward
    with hf_ckpt.apply(model, "ffn"):
        assert mlp.forward != found
        assert mlp.forward.__name__ == found.__name__ == "forward"
        assert mlp.forward.__doc__ == found.__doc__
    assert mlp.forward == found


# --- Without a trace. ---


@pytest.mark.parametrize("model_type", zoo.CORE)
def test_removal_leaves_no_trace(model_type: str) -> None:
    case = exactness.build(model_type)
    exactness.step(case)
    found = traces.snapshot(case.model)
    for policy in POLICIES:
        with exactness.apply(case.model, policy):
            assert bool(traces.differences(found, traces.snapshot(case.model))), policy
        assert traces.differences(found, traces.snapshot(case.model)) == [], policy


@every_policy
@pytest.mark.parametrize("model_type", ["llama", "opt", "t5"])
def test_removal_after_steps_leaves_no_trace(model_type: str, policy: str) -> None:
    case = exactness.build(model_type)
    found = traces.snapshot(case.model)
    with exactness.apply(case.model, policy):
        exactness.step(case)
        case.model.eval()
        exactness.step(case)
        case.model.train()
        with torch.no_grad():
            zoo.loss(case.model, case.inputs)
    assert traces.differences(found, traces.snapshot(case.model)) == []


def test_snapshot_sees_what_it_should() -> None:
    model = plain_models.Decoder()
    found = traces.snapshot(model)
    model.blocks[1].mlp.forward = None
    model.blocks[2].register_forward_hook(print)
    model.blocks[3].training = False
    assert traces.differences(found, traces.snapshot(model)) == [
        "blocks.1.mlp: forward",
        "blocks.2: _forward_hooks",
        "blocks.3: training",
    ]


def test_step_after_removal_recomputes_nothing() -> None:
    case = llama()
    hf_ckpt.apply(case.model, "full").remove()
    assert exactness.recomputed(case) == [False] * 4


# --- Applying twice, and removing. ---


def test_second_apply_raises() -> None:
    case = llama()
    with hf_ckpt.apply(case.model, "full"):
        with pytest.raises(AlreadyAppliedError) as raised:
            hf_ckpt.apply(case.model, "ffn")
        assert exactness.recomputed(case) == [True] * 4
    assert str(raised.value) == (
        "LlamaForCausalLM carries a plan already. Call remove() on the handle that apply() returned, or "
        "hf_ckpt.remove(model), and apply the policy then."
    )
    hf_ckpt.apply(case.model, "ffn").remove()


@pytest.mark.parametrize("part", ["", "model", "model.layers"])
def test_second_apply_raises_whatever_part_of_the_model_it_is_given(part: str) -> None:
    model = exactness.lora(llama()).model
    base = model.get_base_model()
    with hf_ckpt.apply(base, "full"), pytest.raises(AlreadyAppliedError):
        hf_ckpt.apply(model, "full")
    with hf_ckpt.apply(model, "full"), pytest.raises(AlreadyAppliedError):
        hf_ckpt.apply(base.get_submodule(part), "full")


def test_remove_needs_no_handle() -> None:
    case = llama()
    found = traces.snapshot(case.model)
    hf_ckpt.apply(case.model, "full")
    assert hf_ckpt.remove(case.model) is True
    assert traces.differences(found, traces.snapshot(case.model)) == []
    assert hf_ckpt.remove(case.model) is False


def test_remove_finds_the_plan_from_around_the_model_and_from_inside() -> None:
    model = exactness.lora(llama()).model
    hf_ckpt.apply(model.get_base_model(), "full")
    assert hf_ckpt.remove(model) is True
    hf_ckpt.apply(model, "full")
    assert hf_ckpt.remove(model.get_base_model()) is True


def test_handle_may_be_removed_twice() -> None:
    applied = hf_ckpt.apply(llama().model, "full")
    applied.remove()
    applied.remove()


def test_old_handle_does_not_remove_a_new_plan() -> None:
    case = llama()
    old = hf_ckpt.apply(case.model, "full")
    hf_ckpt.remove(case.model)
    with hf_ckpt.apply(case.model, "full", every_n_layers=2):
        old.remove()
        assert exactness.recomputed(case) == [True, False, True, False]


def test_context_manager_removes_the_plan_when_the_block_raises() -> None:
    case = llama()
    found = traces.snapshot(case.model)
    with pytest.raises(KeyError), hf_ckpt.apply(case.model, "full"):
        raise KeyError
    assert traces.differences(found, traces.snapshot(case.model)) == []


def test_summary_and_plan_are_of_what_is_in_force() -> None:
    model = llama().model
    assert apply.plan_of(model) is None
    with hf_ckpt.apply(model, "full", every_n_layers=2) as applied:
        assert apply.plan_of(model) is applied.plan
        assert applied.summary() == applied.plan.summary()
        assert applied.plan.model_class == "LlamaForCausalLM"
    assert apply.plan_of(model) is None


# --- A failure leaves the model whole. ---


class Stumbled(Exception):  # noqa: N818  # nothing is wrong; it is raised on purpose
    pass


@pytest.mark.parametrize("policy", ["full", "attention", "ffn", "segments_2"])
@pytest.mark.parametrize(("method", "call"), [("set", 1), ("set", 4), ("attach", 1), ("attach", 2)])
def test_failure_in_the_middle_leaves_the_model_whole(
    method: str, call: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = exactness.build("t5")
    found = traces.snapshot(case.model)
    original = getattr(apply.StackPatch, method)
    calls = iter(range(1, 100))

    def failing(self: apply.StackPatch, *args: Any) -> None:
        if next(calls) == call:
            raise Stumbled
        original(self, *args)

    monkeypatch.setattr(apply.StackPatch, method, failing)
    with pytest.raises(Stumbled):
        exactness.apply(case.model, policy)
    monkeypatch.undo()
    assert traces.differences(found, traces.snapshot(case.model)) == []
    exactness.apply(case.model, policy).remove()


@pytest.mark.parametrize(
    "policy", ["ful", {"mode": "full", "layers": "0:99"}, [{"mode": "full"}, {"mode": "ffn"}], {"mode": "full", "a": 1}]
)
def test_refused_policy_leaves_the_model_alone(policy: object) -> None:
    model = llama().model
    found = traces.snapshot(model)
    with pytest.raises(PolicyError):
        hf_ckpt.apply(model, policy)
    assert traces.differences(found, traces.snapshot(model)) == []


# --- Plans as policies, and what is refused. ---


def with_adapter(kind: str) -> nn.Module:
    model = llama().model
    if kind == "LORA":
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    if kind == "PROMPT_TUNING":
        return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    return model


@pytest.mark.parametrize(
    ("planned", "there", "message"),
    [
        (
            "LORA",
            "",
            "The plan was made with LoRA or another adapter (PeftModel), and this model (LlamaForCausalLM) has none: "
            "what it needs is not what was planned for. Run `hf-ckpt plan` again, or train what the plan was made for.",
        ),
        (
            "",
            "LORA",
            "The plan was made without an adapter (LlamaForCausalLM), and this model (PeftModel) has an adapter (LORA)",
        ),
        ("", "PROMPT_TUNING", "The plan was made without an adapter (LlamaForCausalLM), and this model (PeftModelForC"),
        ("PROMPT_TUNING", "LORA", "The plan was made with LoRA or another adapter (PeftModelForCausalLM), and this "),
    ],
)
def test_plan_for_another_adapter_says_so(planned: str, there: str, message: str) -> None:
    with hf_ckpt.apply(with_adapter(planned), "full") as applied:
        plan = Plan.from_json(applied.plan.to_json())
    with pytest.raises(PolicyError) as raised:
        hf_ckpt.apply(with_adapter(there), plan)
    assert str(raised.value).startswith(message)


def test_plan_is_a_policy() -> None:
    case = llama()
    rules = [{"layers": "0:2", "mode": "full", "segment_size": 2}, {"layers": 3, "mode": "ffn"}]
    with hf_ckpt.apply(case.model, rules) as applied:
        written = applied.plan.to_json()
    with hf_ckpt.apply(case.model, Plan.from_json(written)) as applied:
        assert applied.plan.to_json() == written
        assert exactness.recomputed(case) == [True, True, False, False]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            ("llama", 6),
            "The plan was made for LlamaForCausalLM with 6 layers in model.layers, but LlamaForCausalLM has 4 layers "
            "in model.layers. Resolve the policy for this model.",
        ),
        (
            ("gpt2", 4),
            "The plan was made for GPT2LMHeadModel with 4 layers in transformer.h, but LlamaForCausalLM has 4 layers "
            "in model.layers. Resolve the policy for this model.",
        ),
        (
            ("t5", 2),
            "The plan was made for T5ForConditionalGeneration with 2 layers in encoder.block, 2 layers in "
            "decoder.block, but LlamaForCausalLM has 4 layers in model.layers. Resolve the policy for this model.",
        ),
    ],
)
def test_plan_for_another_model_raises(other: tuple[str, int], message: str) -> None:
    model_type, num_layers = other
    with hf_ckpt.apply(exactness.build(model_type, num_layers=num_layers).model, "full") as applied:
        plan = applied.plan
    model = llama().model
    found = traces.snapshot(model)
    with pytest.raises(PolicyError) as raised:
        hf_ckpt.apply(model, plan)
    assert str(raised.value) == message
    assert traces.differences(found, traces.snapshot(model)) == []


@pytest.mark.parametrize(
    "options", [{"every_n_layers": 2}, {"segment_size": 2}, {"nested": True}, {"skip_frozen": True}], ids=str
)
def test_options_beside_a_plan_raise(options: dict[str, object]) -> None:
    model = llama().model
    with hf_ckpt.apply(model, "full") as applied:
        plan = applied.plan
    with pytest.raises(PolicyError, match=f"^{next(iter(options))} was given with a plan"):
        hf_ckpt.apply(model, plan, **options)


def test_data_parallel_raises() -> None:
    with pytest.raises(UnsupportedError) as raised:
        hf_ckpt.apply(nn.DataParallel(llama().model), "full")
    assert str(raised.value) == (
        "The model is wrapped in nn.DataParallel, whose replicas would run the original's layers. Start one process "
        "for each GPU instead: accelerate launch --multi_gpu <script>, or set CUDA_VISIBLE_DEVICES to one GPU."
    )


def test_plan_that_asks_for_a_part_which_the_layer_has_not_is_refused() -> None:
    model = zoo.build("mamba").model
    stack = find_layers(model)[0]
    plan = Plan("LlamaForCausalLM", (StackPlan(stack.path, (LayerPlan(Mode.FFN),) * len(stack.layers)),))
    with pytest.raises(PolicyError, match=r"asks for the ffn of layer 0 of backbone\.layers, but that layer of Mamba"):
        hf_ckpt.apply(model, plan)
