"""The tiny models that other tests stand on are sound: they step, every layer learns, and a step can be repeated."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
import torch
from torch import nn

from tests import zoo

pytestmark = pytest.mark.core


def seeded_case(model_type: str, **options: object) -> zoo.Case:
    torch.manual_seed(0)
    return zoo.build(model_type, **options)


def step(case: zoo.Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients by parameter name, under a fixed seed."""
    torch.manual_seed(1)
    case.model.zero_grad()
    loss = zoo.loss(case.model, case.inputs)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}


def layers_with_gradients(model: nn.Module, gradients: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Whether any gradient is nonzero, by the name of the layer: a numbered child of a module list."""
    found: dict[str, bool] = defaultdict(bool)
    for name, _ in model.named_parameters():
        if match := re.match(r".*?\.(layers?|h|blocks?)\.\d+(?=\.)", name):
            found[match.group()] |= name in gradients and bool(gradients[name].any())
    return dict(found)


@pytest.mark.parametrize("model_type", zoo.CORE)
def test_every_layer_of_a_core_model_gets_a_gradient_and_its_step_repeats(model_type: str) -> None:
    case = seeded_case(model_type)
    loss, gradients = step(case)
    again, gradients_again = step(case)
    layers = layers_with_gradients(case.model, gradients)
    assert loss.isfinite()
    assert [name for name, has_gradient in layers.items() if not has_gradient] == []
    assert len(layers) == 4 * len({name.rsplit(".", 1)[0] for name in layers})
    assert torch.equal(loss, again)
    assert gradients.keys() == gradients_again.keys()
    assert [name for name in gradients if not torch.equal(gradients[name], gradients_again[name])] == []


def test_the_same_seed_builds_the_same_case() -> None:
    first, second = seeded_case("llama"), seeded_case("llama")
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert all(torch.equal(first.inputs[name], second.inputs[name]) for name in first.inputs)


def test_dropout_makes_the_step_depend_on_the_seed() -> None:
    case = seeded_case("gpt2")
    torch.manual_seed(1)
    first = zoo.loss(case.model, case.inputs)
    assert not torch.equal(first, zoo.loss(case.model, case.inputs))
    quiet = seeded_case("gpt2", dropout=0.0)
    assert torch.equal(zoo.loss(quiet.model, quiet.inputs), zoo.loss(quiet.model, quiet.inputs))


@pytest.mark.parametrize("num_layers", [1, 2, 7])
def test_the_number_of_layers_is_as_asked(num_layers: int) -> None:
    case = seeded_case("gemma3_text", num_layers=num_layers, attn_implementation="eager")
    assert len(case.model.model.layers) == num_layers
    assert case.model.config._attn_implementation == "eager"


def test_kinds_of_layers_take_turns() -> None:
    kinds = seeded_case("gemma3_text").model.config.layer_types
    assert kinds == ["sliding_attention", "full_attention"] * 2


def test_a_task_picks_one_of_several_models() -> None:
    assert type(seeded_case("bert").model).__name__ == "BertForMaskedLM"
    assert type(seeded_case("bert", task="causal").model).__name__ == "BertLMHeadModel"


def test_images_reach_the_vision_tower() -> None:
    case = seeded_case("qwen2_vl")
    _, gradients = step(case)
    assert (case.inputs["input_ids"] == case.model.config.image_token_id).sum() == 2 * 4
    assert gradients["model.visual.blocks.0.attn.qkv.weight"].any()


def test_an_unknown_architecture_says_so() -> None:
    with pytest.raises(zoo.CannotBuild, match="no_such_model is not in transformers"):
        zoo.build("no_such_model")


def test_core_models_are_listed_for_a_task() -> None:
    listed = {*zoo.CAUSAL(), *zoo.SEQ2SEQ(), *zoo.ENCODERS(), *zoo.VISION_LANGUAGE()}
    assert set(zoo.CORE) <= listed
