"""Packed rows: the same loss for each example as in a row of its own, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, masking_utils

from hf_ckpt.errors import DataError
from hf_ckpt.loading.dataset import PackingCollator, check_packing

pytestmark = pytest.mark.core

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
# Of unequal lengths, one of them a single token; all but one masked at their beginning.
DOCUMENTS = [
    {"input_ids": [3, 9, 27, 17, 51, 25, 11], "labels": [-100, -100, -100, 17, 51, 25, 11]},
    {"input_ids": [5], "labels": [-100]},
    {"input_ids": [33, 35, 41, 59, 49], "labels": [-100, 35, 41, 59, 49]},
    {"input_ids": [60, 2, 4, 8, 16, 32, 1, 7, 13], "labels": [-100, -100, 4, 8, 16, 32, 1, 7, 13]},
]


def tiny(model_type: str = "llama", *, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def token_losses(model: PreTrainedModel, batch: dict[str, Any]) -> list[float]:
    """The loss of each learned token of a row, in order."""
    inputs = dict(batch)
    labels = inputs.pop("labels")[0, 1:]
    with torch.no_grad():
        logits = model(**inputs).logits[0, :-1]
    return cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none").tolist()


def losses_of_separate_rows(model: PreTrainedModel) -> list[float]:
    rows = [{key: torch.tensor([value]) for key, value in document.items()} for document in DOCUMENTS]
    return [loss for row in rows for loss in token_losses(model, {**row, "use_cache": False})]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("changes", [{}, {"model_type": "mistral", "sliding_window": 3}], ids=["causal", "sliding"])
def test_packed_row_has_the_losses_of_separate_rows(attention: str, changes: dict[str, Any]) -> None:
    model = tiny(**changes, attention=attention).double().eval()
    packed = token_losses(model, PackingCollator()(DOCUMENTS))
    assert len(packed) == 15
    # Rows of another length are summed in another order: float64 rounding. Eager attention has its softmax in float32.
    tolerance = 1e-13 if attention == "sdpa" else 1e-7
    assert packed == pytest.approx(losses_of_separate_rows(model), rel=0, abs=tolerance)


def test_packed_row_has_the_gradients_of_separate_rows() -> None:
    model = tiny().double()

    def gradients(batches: list[dict[str, Any]]) -> torch.Tensor:
        model.zero_grad()
        for batch in batches:
            model(**batch, num_items_in_batch=15).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    # The document of one token has no loss of its own (0 / 15), and is left out of the separate rows.
    separate = [
        {key: torch.tensor([value]) for key, value in row.items()} for row in DOCUMENTS if len(row["labels"]) > 1
    ]
    torch.testing.assert_close(gradients([PackingCollator()(DOCUMENTS)]), gradients(separate), rtol=0, atol=1e-13)


def test_cache_makes_documents_see_each_other_and_the_collator_asks_for_none() -> None:
    model = tiny().double().eval()
    batch = PackingCollator()(DOCUMENTS)
    assert batch["use_cache"] is False
    assert model.config.use_cache is True
    separate = losses_of_separate_rows(model)
    with_cache = token_losses(model, {**batch, "use_cache": True})
    # The first document has nothing before it.
    assert with_cache[:4] == pytest.approx(separate[:4], rel=0, abs=1e-13)
    assert max(abs(a - b) for a, b in zip(with_cache[4:], separate[4:], strict=True)) > 1e-3


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention": "eager"}),
        ("gemma3_text", {"sliding_window": 4}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3", {}),
    ],
)
def test_model_that_keeps_documents_apart_is_accepted(model_type: str, changes: dict[str, Any]) -> None:
    check_packing(tiny(model_type, **changes))


@pytest.mark.parametrize(
    ("model_type", "changes", "name"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM"),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 2}, "OPTForCausalLM"),
        ("mamba", {"state_size": 4}, "MambaForCausalLM"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "Lfm2ForCausalLM"),
    ],
)
def test_model_whose_documents_see_each_other_is_refused(model_type: str, changes: dict[str, Any], name: str) -> None:
    pattern = rf"^data\.packing: {name} cannot keep packed documents apart: .* Set data\.packing to false\.$"
    with pytest.raises(DataError, match=pattern):
        check_packing(tiny(model_type, **changes))


def test_chunked_attention_that_counts_from_the_rows_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama4_text", intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=4)
    assert "chunked_attention" in model.config.layer_types
    # As in transformers 5.0.
    monkeypatch.delattr(masking_utils, "remap_positions_for_packed_sequence", raising=False)
    with pytest.raises(DataError, match="chunks of its attention are counted from the start of the sequence"):
        check_packing(model)


def test_check_leaves_the_model_as_found() -> None:
    model = tiny(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    random_state = torch.get_rng_state()
    with torch.no_grad():
        check_packing(model)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_model_whose_attention_needs_a_gpu_is_asked_with_another_and_gets_its_own_back() -> None:
    model = tiny(attention="flex_attention")
    check_packing(model)
    assert model.config._attn_implementation == "flex_attention"
    refused = tiny("lfm2", attention="flex_attention", layer_types=["conv", "full_attention"])
    with pytest.raises(DataError, match="with flex_attention attention, tokens depend on the document before theirs"):
        check_packing(refused)
    assert refused.config._attn_implementation == "flex_attention"


def test_model_without_weights_is_not_asked() -> None:
    with torch.device("meta"):
        check_packing(tiny("bloom", n_layer=2, n_head=4))
