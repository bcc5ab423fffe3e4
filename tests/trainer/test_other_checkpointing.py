"""Other libraries switch checkpointing, generate, or put a forward of their own: the plan is back, or the run stops."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_ckpt
from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.upstream.transformers import FLAG, OTHER_FLAGS
from tests import exactness, plain_models, traces, zoo
from tests.exactness import every_kind_of_policy, every_policy

pytestmark = pytest.mark.core


def llama(**options: object) -> zoo.Case:
    return exactness.build("llama", **options)


def switch(model: nn.Module, onoff: str, **arguments: object) -> None:
    """Switch transformers' own activation checkpointing; its name until transformers 5.2x was another."""
    name = f"activation_checkpointing_{onoff}"
    getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{onoff}")(**arguments)


# --- Other checkpointing, before and during the plan. ---


def own_function(*args: object, **kwargs: object) -> object:
    raise AssertionError("transformers' own checkpointing ran beside the plan")


@every_policy
def test_transformers_own_checkpointing_is_off_during_the_plan_and_on_again_afterwards(policy: str) -> None:
    case = llama()
    expected = exactness.step(case)
    switch(case.model, "enable")
    for layer in case.model.model.layers:
        layer._gradient_checkpointing_func = own_function
    exactness.hold(case, policy, expected)
    with pytest.raises(AssertionError, match="ran beside the plan"):
        exactness.step(case)


def test_layers_that_the_plan_leaves_alone_are_not_recomputed_by_transformers() -> None:
    case = llama()
    switch(case.model, "enable")
    assert exactness.recomputed(case) == [True] * 4
    with hf_ckpt.apply(case.model, "full", every_n_layers=2):
        assert exactness.recomputed(case) == [True, False, True, False]
    assert exactness.recomputed(case) == [True] * 4


class WithOwnCheckpointing(plain_models.Decoder):
    """Checkpoints its blocks as libraries of vision do, by a flag on the module around them or on the blocks."""

    def __init__(self, flag: str, *, on_blocks: bool) -> None:
        super().__init__()
        self.flag, self.holders = flag, [*self.blocks] if on_blocks else [self]
        self.switch(on=False)

    def switch(self, *, on: bool) -> None:
        for holder in self.holders:
            setattr(holder, self.flag, on)

    def forward(self, hidden: Tensor, **kwargs: object) -> Tensor:
        hidden = self.embedding(hidden)
        for block in self.blocks:
            is_on = getattr(self if self in self.holders else block, self.flag)
            hidden = checkpoint(block, hidden, use_reentrant=False) if is_on else block(hidden)
        return hidden


@pytest.mark.parametrize("flag", [FLAG, *OTHER_FLAGS])
@pytest.mark.parametrize("on_blocks", [True, False])
@pytest.mark.sweep(keep=4)
def test_checkpointing_of_other_libraries_is_held_off(flag: str, on_blocks: bool) -> None:
    torch.manual_seed(0)
    case = plain_models.case(WithOwnCheckpointing(flag, on_blocks=on_blocks))
    expected = exactness.step(case)
    for policy, again in (("none", 0), ("ffn", 0), ("attention", 4), ("full", 4)):
        for is_early in (True, False):
            case.model.switch(on=is_early)
            found = traces.snapshot(case.model)
            with hf_ckpt.apply(case.model, policy, prove="off"):
                case.model.switch(on=True)
                with exactness.counted_entries(case.model) as (_, backward):
                    assert exactness.differences(expected, exactness.step(case)) == []
                assert sum(backward[f"blocks.{idx}.attention.query"] for idx in range(4)) == again
            case.model.zero_grad()
            assert traces.differences(found, traces.snapshot(case.model)) == []


def test_timms_own_checkpointing_is_held_off() -> None:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=2).train()
    model.set_grad_checkpointing(True)
    images = torch.randn(1, 3, 32, 32)
    for policy, again in (("none", 0), ("ffn", 0), ("full", 1)):
        with hf_ckpt.apply(model, policy, prove="off"), exactness.counted_entries(model) as (forward, backward):
            model(images).sum().backward()
        assert (forward["blocks.0.attn.qkv"], backward["blocks.0.attn.qkv"]) == (1, again)
    assert model.grad_checkpointing is True


def test_removal_after_a_forward_without_gradients_gives_back_what_was_on() -> None:
    case = llama()
    switch(case.model, "enable")
    found = traces.snapshot(case.model)
    with hf_ckpt.apply(case.model, "full"), torch.no_grad():
        zoo.loss(case.model, case.inputs)
    assert traces.differences(found, traces.snapshot(case.model)) == []
    assert exactness.recomputed(case) == [True] * 4


@every_kind_of_policy
def test_plan_is_back_after_a_round_trip_of_transformers_own_checkpointing(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = llama()
    expected = exactness.step(case)
    found = traces.snapshot(case.model)
    with exactness.apply(case.model, policy):
        planned = exactness.recomputed(case)
        with caplog.at_level(logging.INFO, logger="hf_ckpt"):
            for _ in range(2):
                # As trl does around generation and its reference model.
                switch(case.model, "disable")
                with torch.no_grad():
                    zoo.loss(case.model, case.inputs)
                switch(case.model, "enable")
                assert exactness.recomputed(case) == planned
                assert exactness.differences(expected, exactness.step(case)) == []
                assert not case.model.get_input_embeddings()._forward_hooks
    said = [record.getMessage() for record in caplog.records if record.name == "hf_ckpt.patch.stack_patch"]
    # Once, although it happened twice.
    assert len(said) == 1
    assert said[0].startswith("4 layers of model.layers were switched to another activation checkpointing (")
    assert traces.differences(found, traces.snapshot(case.model)) == []
    assert exactness.differences(expected, exactness.step(case)) == []


def test_round_trip_names_the_function_that_took_over(caplog: pytest.LogCaptureFixture) -> None:
    case = llama()
    with hf_ckpt.apply(case.model, "full"), caplog.at_level(logging.INFO, logger="hf_ckpt"):
        for layer in case.model.model.layers:
            layer._gradient_checkpointing_func = own_function
        exactness.step(case)
    assert caplog.messages == [
        f"4 layers of model.layers were switched to another activation checkpointing ({__name__}.own_function) "
        "after the policy was applied; the policy is in force again."
    ]


def test_plan_is_back_after_others_switched_it_off_for_good() -> None:
    case = llama()
    with hf_ckpt.apply(case.model, "full"):
        switch(case.model, "disable")
        assert exactness.recomputed(case) == [True] * 4
    assert exactness.recomputed(case) == [False] * 4


def other_forward(hidden: Tensor) -> Tensor:
    return hidden


@pytest.mark.parametrize("paused", [False, True])
def test_replaced_forward_of_a_part_raises_and_names_it(paused: bool) -> None:
    case = llama()
    with hf_ckpt.apply(case.model, "ffn"):
        if paused:
            with torch.no_grad():
                zoo.loss(case.model, case.inputs)
        case.model.model.layers[2].mlp.forward = other_forward
        with pytest.raises(PlanMismatchError) as raised:
            zoo.loss(case.model, case.inputs)
    assert str(raised.value) == (
        f"The forward of model.layers.2.mlp was replaced by {__name__}.other_forward after the policy was applied, "
        "so that the plan is no longer in force there. Apply the policy after that call."
    )
    # Removal took nothing away that was not ours.
    assert case.model.model.layers[2].mlp.forward is other_forward
    assert "forward" not in case.model.model.layers[1].mlp.__dict__


def test_replaced_forward_is_no_matter_in_evaluation() -> None:
    case = llama()
    with hf_ckpt.apply(case.model.eval(), "ffn"):
        case.model.model.layers[2].mlp.forward = other_forward
        zoo.loss(case.model, case.inputs)


# --- Generation. ---


@every_kind_of_policy
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "bamba", "t5"])
def test_generation_in_train_mode_gives_the_same_tokens(
    model_type: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = exactness.build(model_type, dropout=0.0)
    prompt = {name: tensor[:1, :4] for name, tensor in case.inputs.items() if name != "labels"}

    def tokens() -> list[int]:
        generated = case.model.generate(
            **prompt, max_new_tokens=8, do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None
        )
        return generated[0].tolist()

    assert case.model.training
    expected = tokens()
    with exactness.apply(case.model, policy), caplog.at_level(logging.INFO, logger="hf_ckpt"):
        assert tokens() == expected
        with exactness.counted_entries(case.model) as (_, backward):
            exactness.step(case)
        assert backward
        assert tokens() == expected
    # The plan steps aside for this by itself; nobody switched it off.
    assert [record.getMessage() for record in caplog.records if record.name.startswith("hf_ckpt")] == []
