"""A step of each kind of model that can be asked about: run by the Trainer, followed, and as it was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.estimate.own_loss import FixedImageRows, ImageRows
from hf_ckpt.loading.model_kinds import auto_class, fitting_attention
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.recipe.trainer_kinds import TEXT, TRAINERS, TrainerKind, kind_of
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step, make_inputs
from hf_ckpt.trainer.batch import with_values
from tests.following import differences

pytestmark = pytest.mark.slow

TOLERANCE = 0.01
ROWS, LENGTH, VOCAB = 2, 64, 512
_TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
_MORE = {"num_key_value_heads": 2, "head_dim": 16}
_HALVES = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 160,
    "decoder_ffn_dim": 128,
    "decoder_start_token_id": 1,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_SEEN = {**_VISION, "image_size": 28, "patch_size": 7}
_SCORES, _SEES = TRAINERS["classification"], kind_of("sft", "images")
_TEXT_OF_LLAVA = {"model_type": "llama", **_TOKENS, **_DECODER}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}

# By name of the case: type of the config, its kind of recipe, fields.
KINDS: dict[str, tuple[str, TrainerKind, dict[str, Any]]] = {
    "t5": (
        "t5",
        TEXT,
        {**_TOKENS, "d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"},
    ),
    "bart": ("bart", TEXT, {**_TOKENS, **_HALVES, "max_position_embeddings": LENGTH}),
    "whisper": (
        "whisper",
        TEXT,
        {**_TOKENS, **_HALVES, "num_mel_bins": 16, "max_source_positions": 50} | {"max_target_positions": LENGTH},
    ),
    "bert": ("bert", _SCORES, {**_TOKENS, **_DECODER, "num_labels": 3}),
    "modernbert": (
        "modernbert",
        _SCORES,
        {**_TOKENS, **_DECODER, "num_labels": 3, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "deberta": (
        "deberta-v2",
        _SCORES,
        {**_TOKENS, **_DECODER, "num_labels": 3, "relative_attention": True}
        | {"position_buckets": 16, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
        | {"norm_rel_ebd": "layer_norm", "type_vocab_size": 0, "position_biased_input": False},
    ),
    "classes of a decoder": ("qwen3", _SCORES, {**_TOKENS, **_DECODER, **_MORE, "num_labels": 5}),
    "gpt-oss": ("gpt_oss", TEXT, {**_TOKENS, **_DECODER, **_MORE, **_EXPERTS, "sliding_window": 16}),
    "llama 4": (
        "llama4_text",
        TEXT,
        {**_TOKENS, **_DECODER, **_MORE, "num_local_experts": 4} | {"intermediate_size_mlp": 128},
    ),
    "qwen3-next": (
        "qwen3_next",
        TEXT,
        {**_TOKENS, **_DECODER, **_MORE, "num_hidden_layers": 4, "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    "llava": (
        "llava",
        _SEES,
        {"text_config": _TEXT_OF_LLAVA, "image_token_index": 7, "image_seq_length": 16}
        | {"vision_config": {"model_type": "clip_vision_model", **_SEEN}},
    ),
    "gemma 3": (
        "gemma3",
        _SEES,
        {"image_token_index": 7, "mm_tokens_per_image": 16}
        | {"text_config": {"model_type": "gemma3_text", **_TOKENS, **_DECODER, **_MORE, "sliding_window": 16}}
        | {"vision_config": {"model_type": "siglip_vision_model", **_SEEN}},
    ),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        _SEES,
        {"image_token_id": 7, "video_token_id": 8, "vision_config": _QWEN_VISION}
        | {"vision_start_token_id": 3, "vision_end_token_id": 4}
        | {
            "text_config": {"model_type": "qwen2_5_vl_text", **_TOKENS, **_DECODER, **_MORE}
            | {"rope_parameters": _QWEN_ROPE}
        },
    ),
}
IMAGES = {
    "llava": FixedImageRows(max_images=1, tokens_per_image=16, sides=28),
    "gemma 3": FixedImageRows(max_images=1, tokens_per_image=16, sides=28),
    "qwen2.5-vl": ImageRows(max_images=1, tokens_per_image=16),
}


def built(kind: str) -> PreTrainedModel:
    """Build the model, always the same one."""
    torch.manual_seed(0)
    model_type, trainer_kind, fields = KINDS[kind]
    config = CONFIG_MAPPING[model_type](**fields)
    auto = auto_class(trainer_kind, config)
    attention = fitting_attention(auto, config, "sdpa")
    model: PreTrainedModel = auto.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model


def inputs_of(kind: str, model: PreTrainedModel, step: Step) -> dict[str, Tensor]:
    """Return the inputs that a prediction assumes, with values."""
    made = IMAGES[kind].make(step, model) if kind in IMAGES else make_inputs(step, model)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(each.shape, generator=generator) if each.is_floating_point() and name != "labels" else each
        for name, each in made.items()
    }


@pytest.mark.parametrize("policy", [None, "full"], ids=["none", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_step_of_each_kind_needs_what_was_predicted(kind: str, policy: str | None, tmp_path: Path) -> None:
    model, step = built(kind), Step(batch_size=ROWS, seq_length=LENGTH, optim="adamw_torch")
    inputs = inputs_of(kind, model, step)
    args = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        max_steps=2,
        per_device_train_batch_size=1,
        optim="adamw_torch",
        remove_unused_columns=False,
    )
    callbacks: list[TrainerCallback] = [] if policy is None else [HFCkptCallback(policy)]
    # A batch of the Trainer is a row of the data set: all of a micro-batch.
    trainer = Trainer(model, args, lambda rows: dict(rows[0]), [inputs] * 2, callbacks=callbacks)  # type: ignore[arg-type]
    followed = follow_trainer(trainer)
    if kind in IMAGES:
        tensors = tuple(with_values(name, each) for name, each in inputs.items())
        step = Step(batch_size=ROWS, seq_length=LENGTH, optim="adamw_torch", tensors=tensors)
    predicted = simulate_step(built(kind), policy, step, CPU)
    assert {name: off for name, off in differences(predicted, followed).items() if abs(off) > TOLERANCE} == {}
