"""Models with several unlike stacks: all are found, and lists that may be layers are named."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, WhisperConfig, WhisperForConditionalGeneration

import hf_ckpt
from hf_ckpt.structure.layers import find_layers, uncovered_lists
from tests import exactness, zoo
from tests.plain_models import WIDTH, Attention, Mlp

pytestmark = pytest.mark.core

BOTH = ["transformer_blocks", "single_transformer_blocks"]
POLICIES = ["full", "attention", "ffn", "every_2", "segments_2"]


class JointBlock(nn.Module):
    """Image and text, each with an ffn of its own, attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm1_context = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ff, self.ff_context = Mlp(), Mlp()

    def forward(self, hidden: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        joint = self.attn(torch.cat([self.norm1_context(context), self.norm1(hidden)], dim=1))
        of_context, of_image = joint.split([context.shape[1], hidden.shape[1]], dim=1)
        context, hidden = context + of_context, hidden + of_image
        return context + self.ff_context(context), hidden + self.ff(hidden)


class SingleBlock(nn.Module):
    """Attention and ffn side by side, of which no module is the ffn."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj_mlp, self.act_mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()
        self.proj_out = nn.Linear(3 * WIDTH, WIDTH)
        self.attn = Attention()

    def forward(self, hidden: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        joint = torch.cat([context, hidden], dim=1)
        normed = self.norm(joint)
        joint = joint + self.proj_out(torch.cat([self.attn(normed), self.act_mlp(self.proj_mlp(normed))], dim=2))
        changed, hidden = joint.split([context.shape[1], hidden.shape[1]], dim=1)
        return changed, hidden


class FusedBlock(nn.Module):
    """One product for queries, keys, values and the ffn."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), FusedAttention()

    def forward(self, hidden: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return context, hidden + self.attn(self.norm(hidden))


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv_mlp, self.to_out = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        queries, keys, values, mlp = self.to_qkv_mlp(hidden).split([WIDTH, WIDTH, WIDTH, 2 * WIDTH], dim=-1)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values)
        return self.to_out(torch.cat([attended, torch.tanh(mlp)], dim=-1))


class Flux(nn.Module):
    """The lists and the names of diffusers' FluxTransformer2DModel."""

    def __init__(self, single: type[nn.Module] = SingleBlock) -> None:
        super().__init__()
        self.x_embedder, self.context_embedder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.transformer_blocks = nn.ModuleList(JointBlock() for _ in range(2))
        self.single_transformer_blocks = nn.ModuleList(single() for _ in range(3))
        self.proj_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, context: Tensor) -> Tensor:
        hidden, context = self.x_embedder(hidden), self.context_embedder(context)
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            context, hidden = block(hidden, context)
        return self.proj_out(hidden)


def flux(single: type[nn.Module] = SingleBlock) -> zoo.Case:
    torch.manual_seed(0)
    return zoo.Case(
        "flux", Flux(single).train(), {"hidden": torch.randn(2, 5, WIDTH), "context": torch.randn(2, 3, WIDTH)}
    )


def paths(model: nn.Module) -> list[str]:
    return [stack.path for stack in find_layers(model)]


def test_second_list_of_blocks_is_found() -> None:
    model = flux().model
    assert paths(model) == BOTH
    # Of the second one no module is the ffn; the two of the first look like the halves of one.
    found = {(layer.attention, layer.ffn_is_inline) for stack in find_layers(model) for layer in stack.layers}
    assert found == {(("attn",), True)}


@pytest.mark.parametrize("policy", POLICIES)
def test_both_lists_are_exact(policy: str) -> None:
    case = flux()
    with exactness.counted_entries(case.model) as (_, backward):
        assert exactness.check(case, policy) == []
    assert {path.partition(".")[0] for path in backward} == set(BOTH)


def test_list_that_may_hold_layers_is_named(caplog: pytest.LogCaptureFixture) -> None:
    case = flux(FusedBlock)
    with caplog.at_level(logging.WARNING, "hf_ckpt"), hf_ckpt.apply(case.model, "full"):
        pass
    assert [entry.getMessage() for entry in caplog.records] == [
        "No policy reaches single_transformer_blocks of Flux: its modules compute attention, and are no layers that "
        'were recognised. Name the lists that are: layers=["transformer_blocks", "single_transformer_blocks"].'
    ]


def test_list_that_is_named_is_covered_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    case = flux(FusedBlock)
    expected = exactness.step(case)
    with (
        caplog.at_level(logging.WARNING, "hf_ckpt"),
        hf_ckpt.apply(case.model, "full", layers=BOTH),
        exactness.counted_entries(case.model) as (_, backward),
    ):
        assert exactness.differences(expected, exactness.step(case)) == []
    assert {path.partition(".")[0] for path in backward} == set(BOTH)
    assert caplog.records == []


def whisper() -> nn.Module:
    sizes = {"d_model": 8, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 16, "pad_token_id": 0}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **tokens))


def clip() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CLIPModel(CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4}))


def test_stacks_of_sound_and_of_images_are_found_beside_those_of_texts() -> None:
    assert paths(whisper()) == ["model.encoder.layers", "model.decoder.layers"]
    assert paths(clip()) == ["text_model.encoder.layers", "vision_model.encoder.layers"]


# Those with lists of attentions in an image tokenizer, of convolutions over time, of ffns and of adapters.
@pytest.mark.parametrize("model_type", [*zoo.CORE, "chameleon", "janus", "emu3", "llava", "qwen3_vl", "florence2"])
def test_nothing_is_missed_in_models_of_transformers(model_type: str) -> None:
    model = exactness.build(model_type).model
    assert uncovered_lists(model, find_layers(model)) == ()
