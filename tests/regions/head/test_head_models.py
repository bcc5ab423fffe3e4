"""The chunked head on the ways in which models compute their loss: within 1e-6 of their own, or refused."""

from __future__ import annotations

import pytest
import torch

import hf_ckpt
from hf_ckpt.errors import PlanMismatchError, UnsupportedError
from hf_ckpt.regions.head import DeferredLogits
from tests import exactness, zoo

pytestmark = pytest.mark.core

BOUND = 1e-6
"""Relative, of the loss and of each gradient in its norm; see tests/regions/head/head_steps.py."""

EXACT = {
    "llama": "labels shifted, logits in float32",
    "gpt2": "tied embeddings",
    "opt": "position ids",
    "bloom": "logits shifted",
    "falcon": "tied embeddings",
    "gemma2": "soft-capped logits",
    "gemma3_text": "soft-capping left out",
    "cohere": "scaled logits",
    "granite": "divided logits",
    "falcon_h1": "multiplied logits, a mamba",
    "mixtral": "a loss of the router added",
    "biogpt": "a head with another name",
    "cpmant": "a loss of its own",
    "bart": "a bias behind the head",
    "t5": "no shift, hidden states scaled",
    "bert": "a head inside a prediction head",
    "xlnet": "a bias in the head",
    "blt": "bytes",
    "qwen2_vl": "images",
    "chameleon": "logits of some tokens overwritten",
}
REFUSED = {
    "idefics": "is IdeficsDecoupledLinear, which is not known",
    "fsmt": "is Embedding, which is not known",
    "perceiver": "has no language-model head",
}


def build(model_type: str) -> zoo.Case:
    try:
        return exactness.build(model_type, num_layers=2)
    except zoo.CannotBuild as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("model_type", EXACT)
def test_loss_and_gradients_are_those_of_the_model(model_type: str) -> None:
    case = build(model_type)
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "none", head="chunked"):
        got = exactness.step(case)
        assert isinstance(case.model(**case.inputs).logits, DeferredLogits)
    torch.testing.assert_close(got[0], expected[0], rtol=BOUND, atol=0)
    for name, gradient in expected[1].items():
        found = got[1][name]
        assert (gradient is None) == (found is None)
        if gradient is not None and found is not None:
            # A gradient that is nothing but rounding, as of a key's bias, has no digits to agree in.
            assert (found - gradient).norm() <= BOUND * max(float(gradient.norm()), 1e-6), name


@pytest.mark.parametrize("model_type", REFUSED)
def test_head_that_cannot_be_exact_is_refused(model_type: str) -> None:
    case = build(model_type)
    with pytest.raises(UnsupportedError, match=REFUSED[model_type]):
        hf_ckpt.apply(case.model, "none", head="chunked")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_head_that_is_passed_over_is_said() -> None:
    # It multiplies with two weights side by side.
    case = build("mobilebert")
    with hf_ckpt.apply(case.model, "none", head="chunked"), pytest.raises(PlanMismatchError, match="without calling"):
        exactness.step(case)
