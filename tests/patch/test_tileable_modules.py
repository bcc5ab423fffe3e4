"""What of a layer runs in tiles, and what cannot: told by structure, before the model is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import hf_ckpt
from hf_ckpt import UnsupportedError, find_layers
from hf_ckpt.patch.tileable_modules import random_modules, tiled_modules
from hf_ckpt.structure.layers import Layer
from tests import exactness, plain_models, traces

pytestmark = pytest.mark.core

WIDTH = plain_models.WIDTH
QKVO = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LLAMA = [*QKVO, "mlp", "input_layernorm", "post_attention_layernorm"]


def first_layer(model: nn.Module, stack: int = 0) -> Layer:
    return find_layers(model)[stack].layers[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", LLAMA),
        ("mixtral", LLAMA),
        # Norms of each head inside attention.
        ("qwen3", [*QKVO, "self_attn.q_norm", "self_attn.k_norm", *LLAMA[4:]]),
        ("gemma2", [*LLAMA, "pre_feedforward_layernorm", "post_feedforward_layernorm"]),
        # One product for all of attention; transformers' Conv1D is a linear layer.
        ("gpt2", ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp"]),
        ("gpt_neox", ["input_layernorm", "post_attention_layernorm", "attention.query_key_value", "attention.dense"]),
        # Lists in a layer; the first layer of T5 has a table of positions, which is no linear layer.
        ("t5", [f"layer.0.SelfAttention.{name}" for name in "qkvo"] + ["layer.0.layer_norm", "layer.1"]),
        # A mixer in the place of attention: its convolution stays whole.
        ("bamba", ["feed_forward", "mamba.norm", "mamba.in_proj", "mamba.out_proj", "input_layernorm"]),
    ],
)
def test_norms_ffn_and_projections_run_in_tiles(name: str, expected: list[str]) -> None:
    names = tiled_modules(first_layer(exactness.build(name).model))
    assert [given for given in expected if given not in names] == []
    assert len(set(names)) == len(names)
    if name not in ("gpt_neox", "t5", "bamba"):
        assert sorted(names) == sorted(expected)


def test_compressed_keys_have_their_own_projections_and_norms() -> None:
    names = tiled_modules(first_layer(exactness.build("deepseek_v3").model))
    attention = sorted(name.removeprefix("self_attn.") for name in names if name.startswith("self_attn."))
    assert attention == [
        *("kv_a_layernorm", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_layernorm", "q_a_proj", "q_b_proj")
    ]


def test_an_adapter_runs_with_what_it_is_around() -> None:
    model = exactness.lora(exactness.build("llama")).model
    assert sorted(tiled_modules(first_layer(model))) == sorted(LLAMA)


def activated(*targets: str) -> nn.Module:
    config = LoraConfig(r=2, alora_invocation_tokens=[5], target_modules=list(targets), task_type="CAUSAL_LM")
    return get_peft_model(exactness.build("llama").model, config)


def test_an_adapter_that_counts_from_the_end_of_a_call_runs_whole() -> None:
    names = tiled_modules(first_layer(activated("q_proj", "v_proj")))
    assert {*LLAMA} - {*names} == {"self_attn.q_proj", "self_attn.v_proj"}
    with pytest.raises(UnsupportedError, match=r"mlp.up_proj \(Linear\) adapts the last tokens of a call alone"):
        hf_ckpt.apply(activated("up_proj"), "none", tiles=2)


class AttentionAlone(nn.Module):
    """A layer of a hybrid model: its ffn is another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), plain_models.Attention()


def test_a_layer_without_ffn_has_its_norm_and_its_projections() -> None:
    layers = find_layers(plain_models.Decoder([plain_models.Block(), AttentionAlone()]))[0].layers
    assert layers[1].ffn == ()
    assert tiled_modules(layers[1]) == ["norm", "attention.query", "attention.key", "attention.value"]


class Ffn(plain_models.Mlp):
    """An ffn that holds one thing more."""

    def __init__(self, inner: nn.Module | None = None, **settings: Any) -> None:
        super().__init__()
        self.inner = inner if inner is not None else nn.Identity()
        vars(self).update(settings)


def decoder(ffn: nn.Module) -> nn.Module:
    blocks = [plain_models.Block() for _ in range(2)]
    blocks[1].mlp = ffn
    return plain_models.Decoder(blocks)


WHERE = "Layer 1 (Block) is to run in tiles, but its ffn is not position-wise: mlp"


@pytest.mark.parametrize(
    ("ffn", "why"),
    [
        (Ffn(nn.Conv1d(WIDTH, WIDTH, 3)), ".inner (Conv1d) is a convolution over 3 positions"),
        (Ffn(nn.LSTM(WIDTH, WIDTH)), ".inner (LSTM) carries a state along the sequence"),
        (Ffn(nn.ZeroPad2d((0, 0, 1, -1))), ".inner (ZeroPad2d) pools or shifts positions"),
        (Ffn(nn.AvgPool1d(2)), ".inner (AvgPool1d) pools or shifts positions"),
        (Ffn(nn.BatchNorm1d(WIDTH)), ".inner (BatchNorm1d) takes its statistics over positions"),
        (Ffn(nn.LayerNorm((4, WIDTH))), ".inner (LayerNorm) normalises over the last 2 dimensions"),
        (Ffn(expert_capacity=64), " (Ffn) drops tokens beyond a capacity that is counted over a call"),
        (Ffn(router_jitter_noise=0.1), " (Ffn) multiplies its input by noise in place (router_jitter_noise=0.1; 0"),
    ],
)
def test_an_ffn_that_is_not_position_wise_is_refused_before_the_model_is_touched(ffn: nn.Module, why: str) -> None:
    model = decoder(ffn)
    found = traces.snapshot(model)
    with pytest.raises(UnsupportedError) as error:
        hf_ckpt.apply(model, "none", tiles=2)
    assert str(error.value).startswith(WHERE + why)
    assert traces.differences(found, traces.snapshot(model)) == []


def test_an_ffn_with_what_is_position_wise_is_not_refused() -> None:
    kinds = [nn.Conv1d(WIDTH, WIDTH, 1), nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Identity()]
    for ffn in [*map(Ffn, kinds), Ffn(router_jitter_noise=0.0), Ffn(expert_capacity=None)]:
        assert "mlp" in tiled_modules(find_layers(decoder(ffn))[0].layers[1])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("opt", r"its ffn is written out in the layer's own forward"),
        ("bert", r"its ffn is written out in the layer's own forward"),
        ("rwkv", r"feed_forward.time_shift \(ZeroPad2d\) pools or shifts positions"),
        ("switch_transformers", r"drops tokens beyond a capacity that is counted over a call \(expert_capacity=64\)"),
        ("reformer", r"it computes its own backward"),
    ],
)
def test_models_that_cannot_run_in_tiles_are_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        hf_ckpt.apply(exactness.build(name).model, "none", tiles=2)


class Linear8bitLt(nn.Linear):
    """bitsandbytes' layer as far as it is asked; it looks for outliers over all rows that it is given."""

    def __init__(self, threshold: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.state = type("State", (), {"threshold": threshold})()


def test_outliers_of_8_bit_weights_are_looked_for_over_all_tokens() -> None:
    with pytest.raises(UnsupportedError, match=r"mlp.inner \(Linear8bitLt\) looks for outliers over all tokens"):
        hf_ckpt.apply(decoder(Ffn(Linear8bitLt(6.0))), "none", tiles=2)
    model = decoder(Ffn(Linear8bitLt(0.0)))
    model.blocks[0].attention.query, model.blocks[0].attention.key = Linear8bitLt(6.0), Linear8bitLt(0.0)
    names = tiled_modules(first_layer(model))
    assert [name for name in names if name.startswith("attention.")] == ["attention.key", "attention.value"]


class Scaled(nn.BatchNorm1d):
    """No norm of positions, whatever it is called."""


class PerHeadNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden, hidden.shape[-1:]) * self.weight[0]


def test_norms_over_more_than_features_run_whole() -> None:
    model = plain_models.Decoder()
    for number, norm in enumerate([nn.BatchNorm1d(6), nn.GroupNorm(2, 6), PerHeadNorm(), nn.LayerNorm(WIDTH)]):
        model.blocks[number].norm = norm
    layers = find_layers(model)[0].layers
    assert ["norm" in tiled_modules(layer) for layer in layers] == [False, False, False, True]


# --- Random operators. ---


def test_random_operators_in_tiles_are_named() -> None:
    model = exactness.build("llama").model
    layer = first_layer(model)
    assert random_modules(layer, tiled_modules(layer)) == []
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    layer = first_layer(get_peft_model(model, config))
    assert random_modules(layer, tiled_modules(layer)) == [
        "self_attn.q_proj.lora_dropout.default",
        "mlp.down_proj.lora_dropout.default",
    ]
    assert random_modules(layer, ["self_attn.k_proj"]) == []


@pytest.mark.parametrize(
    ("ffn", "names"),
    [
        (Ffn(nn.Dropout(0.1)), ["mlp.inner"]),
        (Ffn(nn.Dropout(0.0)), []),
        (Ffn(nn.RReLU()), ["mlp.inner"]),
        (Ffn(activation_dropout=0.1), ["mlp"]),
        (Ffn(activation_dropout=0.0), []),
    ],
)
def test_dropout_is_told_by_its_rate(ffn: nn.Module, names: list[str]) -> None:
    layer = find_layers(decoder(ffn))[0].layers[1]
    assert random_modules(layer, tiled_modules(layer)) == names


def test_dropout_of_the_attention_scores_lies_outside_of_tiles() -> None:
    case = exactness.build("llama")
    layer = first_layer(case.model)
    assert layer.module.self_attn.attention_dropout > 0
    assert random_modules(layer, tiled_modules(layer)) == []
