"""The check of the first step: faults planted in a model are named, and what is no fault is not."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_ckpt
from hf_ckpt import HFCkptCallback, PlanMismatchError, find_layers
from hf_ckpt.patch import apply as patch
from hf_ckpt.policy.policy import Mode
from hf_ckpt.trainer.first_step import FirstStep
from tests import plain_models, zoo
from tests.exactness import POLICIES, every_core_model
from tests.training import During, llama, lora, losses, rows, trainer

pytestmark = pytest.mark.core


def backward(model: nn.Module, **inputs: Tensor) -> None:
    """One forward and backward of a training step."""
    zoo.loss(model, inputs or batch()).backward()


def batch() -> dict[str, Tensor]:
    texts = rows(2)
    return {name: torch.stack([text[name] for text in texts]) for name in texts[0]}


def faults(
    model: nn.Module, policy: object, step: Callable[[nn.Module], object] = backward, **options: Any
) -> list[str]:
    """Apply a policy, run a step of a model in train mode under watch, and return what is found."""
    model.train()
    model.zero_grad(set_to_none=True)
    # Not `hf_ckpt.apply`, which watches by itself.
    with patch.apply(model, policy, **options) as applied:
        watch = FirstStep(model, applied.plan, find_layers(model))
        watch.start()
        step(model)
        found = watch.finish()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return found


# --- Planted faults. ---

SWITCHED_OFF = "Its checkpoint function was replaced after the policy was applied. Apply the policy after that call."
SWITCHED_ON = "Another library's activation checkpointing is on too. Turn it off."
NOT_USED = "Its output does not depend on them: is an adapter disabled, or something detached?"


def not_checkpointed(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Stands in torch's place: a checkpoint function that keeps everything."""
    return function(*args)


def test_recomputation_that_does_not_happen_is_named_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def lost_in_the_middle(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls.append(function)
        return function(*args) if len(calls) in (2, 3) else checkpoint(function, *args, **options)

    monkeypatch.setattr("hf_ckpt.regions.recompute.checkpoint", lost_in_the_middle)
    assert faults(llama(), "full") == [
        'Layers 1, 2 of model.layers are set to "full", but a forward ran once in step 1 (twice expected). '
        + SWITCHED_OFF
    ]


@pytest.mark.parametrize("part", ["attention", "ffn"])
def test_part_that_is_not_recomputed_is_named(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr("hf_ckpt.regions.recompute.checkpoint", not_checkpointed)
    assert faults(llama(), {"mode": part, "layers": -1}) == [
        f'Layer 3 of model.layers is set to "{part}", but the forward of {part} ran once in step 1 (twice expected). '
        + SWITCHED_OFF
    ]


def test_segment_that_is_not_recomputed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_ckpt.regions.segments.saved_tensors_hooks", lambda *hooks: contextlib.nullcontext())
    (fault,) = faults(llama(), "full", segment_size=2)
    assert fault.startswith('Layers 0, 1, 2, 3 of model.layers are set to "full", but a forward ran once')


def checkpointed(found: Callable[..., Any], use_reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    """Instance forward of another library."""
    return checkpoint(partial(found, **kwargs), *args, use_reentrant=use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_another_library_on_a_layer_of_none_is_named(use_reentrant: bool) -> None:
    # Such a checkpointing would fill a cache twice.
    model = llama(use_cache=False)
    layer = model.model.layers[3]
    layer.forward = partial(checkpointed, layer.forward, use_reentrant)
    assert faults(model, "full", every_n_layers=2) == [
        f'Layer 3 of model.layers is set to "none", but a forward ran again in the backward of step 1. {SWITCHED_ON}'
    ]


def test_checkpointing_of_another_library_on_the_other_part_is_named() -> None:
    model = llama(use_cache=False)
    for layer in model.model.layers[:2]:
        layer.mlp.forward = partial(checkpointed, layer.mlp.forward, False)
    assert faults(model, "attention") == [
        'Layers 0, 1 of model.layers are set to "attention", but the forward of ffn ran again in the backward of '
        f"step 1. {SWITCHED_ON}"
    ]


def test_disabled_adapter_is_named() -> None:
    model = lora(target_modules=["q_proj", "v_proj"])
    model.base_model.model.model.layers[2].self_attn.q_proj._disable_adapters = True
    (fault,) = faults(model, "full")
    assert fault == (
        "2 trainable parameters got no gradient in step 1 although the module ran: "
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.default.weight, "
        f"base_model.model.model.layers.2.self_attn.q_proj.lora_B.default.weight. {NOT_USED}"
    )


def without_weight(module: nn.Linear, hidden: Tensor) -> Tensor:
    return nn.functional.linear(hidden, module.weight.detach())


def test_detached_parameters_are_named() -> None:
    model = llama()
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "o_proj")):
            module.forward = partial(without_weight, module)
    (fault,) = faults(model, "full")
    assert fault.startswith(
        "8 trainable parameters got no gradient in step 1 although the module ran: "
        "model.layers.0.self_attn.o_proj.weight, model.layers.0.self_attn.q_proj.weight, "
        "model.layers.1.self_attn.o_proj.weight, model.layers.1.self_attn.q_proj.weight .... Its output"
    )


def test_detached_parameter_of_the_first_module_is_named() -> None:
    model = llama()
    embedding = model.model.embed_tokens
    embedding.forward = lambda tokens: nn.functional.embedding(tokens, embedding.weight.detach())
    assert faults(model, "full") == [
        "1 trainable parameter got no gradient in step 1 although the module ran: model.embed_tokens.weight. Its "
        "output does not depend on it: is an adapter disabled, or something detached?"
    ]


def plant(model: nn.Module) -> None:
    layer = model.model.layers[1]
    layer.forward = partial(checkpointed, layer.forward, False)


def test_fault_stops_the_run_and_leaves_the_model_clean(tmp_path: Path) -> None:
    model = llama()
    run = trainer(model, tmp_path, During("on_step_begin", plant, step=0), HFCkptCallback("none"))
    with pytest.raises(PlanMismatchError, match=r'^Layer 1 of .* Turn it off\.\nWith on_mismatch="warn" the run goes'):
        run.train()
    assert run.state.global_step == 0
    assert not hf_ckpt.remove(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config.use_cache is True


def test_fault_warns_once_and_the_run_goes_on_when_asked_to(tmp_path: Path) -> None:
    model = llama()
    warned = HFCkptCallback("none", on_mismatch="warn")
    run = trainer(model, tmp_path, During("on_step_begin", plant, step=0), warned)
    with pytest.warns(UserWarning, match='Layer 1 of model.layers is set to "none", but') as caught:
        run.train()
    assert len(caught) == 1
    assert len(losses(run)) == 2


class CountingBlock(plain_models.Block):
    """Counts its forwards in a buffer, as balanced routers count their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_forwards", torch.zeros(()))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        self.num_forwards += 1
        return super().forward(hidden, mask)


@pytest.mark.parametrize(("policy", "is_fault"), [("full", True), ("attention", False), ("none", False)])
def test_buffer_that_recomputation_writes_to_is_named(policy: str, is_fault: bool) -> None:
    case = plain_models.case(plain_models.Decoder([plain_models.Block(), CountingBlock()]))
    stacks = find_layers(case.model)
    with patch.apply(case.model, policy) as applied:
        watch = FirstStep(case.model, applied.plan, stacks)
        watch.start()
        zoo.loss(case.model, case.inputs).backward()
        faults = watch.finish()
    expected = (
        'Layer 1 of blocks is set to "full", but its recomputation wrote to num_forwards a second time. Leave the '
        "layer out of the policy."
    )
    assert faults == ([expected] if is_fault else [])


# --- No false alarm. ---


@every_core_model
def test_no_policy_gives_a_fault(model_type: str) -> None:
    torch.manual_seed(0)
    case = _build(model_type)
    for name, (policy, options) in POLICIES.items():
        assert faults(case.model, policy, lambda model: backward(model, **case.inputs), **options) == [], name


@pytest.mark.parametrize("policy", ["full", "attention"])
@every_core_model
def test_every_layer_is_named_when_none_is_recomputed(
    model_type: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = _build(model_type)
    monkeypatch.setattr("hf_ckpt.regions.recompute.checkpoint", not_checkpointed)
    found = faults(case.model, policy, lambda model: backward(model, **case.inputs))
    named = [len(re.match(r"Layers? ([\d, ]+) of", fault).group(1).split(", ")) for fault in found]
    with hf_ckpt.apply(case.model, policy) as applied:
        assert sum(named) == applied.plan.count(Mode(policy))


def _build(model_type: str) -> zoo.Case:
    try:
        return zoo.build(model_type)
    except zoo.CannotBuild as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("targets", [["q_proj"], ["down_proj"], ["o_proj", "gate_proj"]])
@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn", "nested"])
def test_part_without_a_gradient_is_no_fault(policy: str, targets: list[str]) -> None:
    mode, options = POLICIES[policy]
    assert faults(lora(target_modules=targets), mode, **options) == []


@pytest.mark.parametrize("policy", ["full", "attention", "ffn"])
def test_frozen_lower_layers_are_no_fault(policy: str) -> None:
    model = llama()
    for part in (model.model.embed_tokens, *model.model.layers[:2]):
        part.requires_grad_(False)
    assert faults(model, policy) == []


def test_two_forwards_of_one_step_and_one_without_gradients_are_no_fault() -> None:
    def preferences(model: nn.Module) -> None:
        with torch.no_grad():
            reference = zoo.loss(model, batch())
        (zoo.loss(model, batch()) - zoo.loss(model, batch()) + reference).backward()

    assert faults(llama(), "full", preferences) == []
    assert faults(lora(), "attention", preferences) == []


def test_gradient_accumulation_is_no_fault() -> None:
    def accumulate(model: nn.Module) -> None:
        for _ in range(3):
            backward(model)

    assert faults(llama(), "full", accumulate, segment_size=2) == []


def test_parameters_that_the_loss_does_not_need_are_no_fault() -> None:
    def step(model: nn.Module) -> None:
        model.side(model.model(batch()["input_ids"]).last_hidden_state)
        backward(model)

    model = llama()
    model.side = nn.Linear(16, 2)
    model.model.layers[0].mlp.never_called = nn.Linear(2, 2)
    assert faults(model, "full", step) == []
    assert model.side.weight.grad is None


class Mixture(nn.Module):
    """A mixture of experts whose router never chooses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(plain_models.WIDTH, 3)
        self.experts = nn.ModuleList(plain_models.Mlp() for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        shares = torch.softmax(self.router(hidden), dim=-1)
        return sum(expert(hidden) * shares[..., idx : idx + 1] for idx, expert in enumerate(self.experts[:3]))


@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn"])
def test_idle_expert_is_no_fault(policy: str) -> None:
    model = plain_models.Decoder()
    for block in model.blocks:
        block.mlp = Mixture()
    case = plain_models.case(model)
    assert faults(model, policy, lambda model: backward(model, **case.inputs)) == []
    assert model.blocks[0].mlp.experts[3].up.weight.grad is None


@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn"])
def test_text_alone_for_a_vision_language_model_is_no_fault(policy: str) -> None:
    torch.manual_seed(0)
    model = zoo.build("qwen2_vl").model
    tokens = torch.randint(zoo.FIRST_TOKEN, zoo.LAST_TOKEN, (2, 8))
    assert faults(model, policy, lambda model: backward(model, input_ids=tokens, labels=tokens)) == []
    assert all(parameter.grad is None for parameter in model.model.visual.parameters())


def test_layers_dropped_by_layerdrop_are_no_fault() -> None:
    torch.manual_seed(0)
    case = zoo.build("opt", num_layers=8)
    case.model.model.decoder.layerdrop = 0.5
    for policy in ("none", "full", "attention", "ffn"):
        assert faults(case.model, policy, lambda model: backward(model, **case.inputs)) == []
        ran = [any(p.grad is not None for p in layer.parameters()) for layer in case.model.model.decoder.layers]
        assert set(ran) == {True, False}


def test_layer_that_recomputes_by_itself_is_no_fault() -> None:
    torch.manual_seed(0)
    case = _build("reformer")
    assert faults(case.model, "none", lambda model: backward(model, **case.inputs)) == []


def test_step_that_an_fp16_scaler_skips_is_no_fault(tmp_path: Path) -> None:
    model = llama()
    before = model.lm_head.weight.detach().clone()
    run = trainer(model, tmp_path, HFCkptCallback("full"), max_steps=1, max_grad_norm=0.0)
    # accelerate makes a scaler on a GPU only. The gradients of the first step overflow float32.
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    run.train()
    assert run.accelerator.scaler.get_scale() < 3e38
    assert torch.equal(model.lm_head.weight, before)


def test_engine_that_takes_the_gradients_away_is_no_fault() -> None:
    def step(model: nn.Module) -> None:
        backward(model)
        model.zero_grad(set_to_none=True)

    assert faults(llama(), "full", step) == []


def test_only_the_first_step_is_watched(tmp_path: Path) -> None:
    hooks: list[int] = []

    def count(model: nn.Module) -> None:
        hooks.append(sum(len(module._forward_pre_hooks) for module in model.model.layers.modules()))

    trainer(llama(), tmp_path, HFCkptCallback("full"), During("on_optimizer_step", count)).train()
    assert hooks == [0, 0]
