"""What single architectures need to be built tiny; `tests/zoo.py` holds the rules for all of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch
import transformers

BATCH, LENGTH, PADDING = 2, 16, 2
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 128, 64, 96, 4, 2, 16
PATCH, GRID = 4, 4  # pixels along a patch, patches along an image
PATCHES, PIXELS = BATCH * GRID**2, 3 * PATCH**2  # patches in the batch, numbers in a patch
IMAGE = (3, GRID * PATCH, GRID * PATCH)
FIRST_TOKEN, LAST_TOKEN = 40, 60  # text tokens are drawn between them; special ones lie outside
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
SPEECH = {"hidden_dim": HIDDEN, "num_layers": 2, "dim_head": HEAD_DIM, "max_pos_emb": 64, "context_size": 16}
VOCABULARY_MAPS = {
    "chameleon": {"<image>": 120} | {f"IMGIMG{letter}Z": 100 + i for i, letter in enumerate("ABCDEFGH")},
    "emu3": {"<image>": 120, "<|extra_200|>": 119} | {f"<|visual token {i:06d}|>": 100 + i for i in range(8)},
}

CANNOT: dict[str, str] = {
    "gemma4_assistant": "drafts from the keys and values of another model",
    "gemma4_unified_assistant": "drafts from the keys and values of another model",
    "voxtral_realtime": "needs audio for every token",
}
if transformers.__version__ == "5.24.0":
    CANNOT["llama4"] = "no forward ends: it reads `image_outputs` of an output that has none; its text model does"


def cycled(*kinds: str) -> Callable[[int], list[str]]:
    """Kinds of layers that take turns, for any number of layers."""
    return lambda count: list(islice(cycle(kinds), count))


def odd_layers(count: int) -> list[int]:
    """Indices of every second layer, the second one first."""
    return list(range(1, count, 2))


# Config fields by model type, sub-configs included. A callable is given the number of layers.
OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 100, "audio_token_offset": 108},
    "apertus1p5_vision_tokenizer": {"codebook_size": 8, "base_channels": 32, "channel_multiplier": [1, 1]},
    "aria": {"projector_patch_to_query_dict": {GRID**2: 4}},
    "bamba": {"attn_layer_indices": odd_layers},
    "big_bird": {"attention_type": "original_full"},  # else the first short batch switches it
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "chameleon": {"image_token_id": 120, "vocabulary_map": VOCABULARY_MAPS["chameleon"]},
    "chameleon_vqgan": {"num_embeddings": 8, "base_channels": 32, "channel_multiplier": [1, 1]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {**ROPE, "mrope_section": [2, 3, 3]} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [INNER, HIDDEN]},
    "deepseek_ocr2_text": {"mlp_layer_types": cycled("dense", "sparse"), "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffllama": {"attention_dropout": 0.0},  # it has none
    "diffusion_gemma": {"canvas_length": LENGTH},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": INNER},
    "distilbert": {"hidden_dim": INNER},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {"swa_head_dim": 2 * HEAD_DIM}
    | {f"swa_{name}": HEADS for name in ("num_attention_heads", "num_key_value_heads")}
    | {f"swa_{name}": HEAD_DIM for name in ("qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")},
    "emu3": {"image_token_id": 120, "vocabulary_map": VOCABULARY_MAPS["emu3"]},
    "emu3_vqgan": {"codebook_size": 8, "base_channels": 32, "channel_multiplier": [1, 2]},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}},
    "esm": {"vocab_size": VOCAB, "pad_token_id": 1, "mask_token_id": 32},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_n_heads": 16},
    "florence_vision": {"embed_dim": [HIDDEN] * 4},
    "gemma4_unified_vision": {"pooling_kernel_size": 2, "output_proj_dims": HIDDEN, "mm_embed_dim": HIDDEN},
    "gemma4_vision": {"pooling_kernel_size": 2},
    "glm5_next_text": {"index_kpool": 4},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "1/2",
    },
    "granite_speech_encoder": SPEECH,
    "granite_speech_plus_encoder": SPEECH,
    "granitemoehybrid": {"layer_types": cycled("linear_attention", "full_attention")},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 8},
    "kosmos_2_5_vision_model": {"patch_embed_hidden_size": PIXELS},
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "lfm2_moe": {"layer_types": cycled("conv", "full_attention")},
    "llama4_vision_model": {"intermediate_size": 4 * HIDDEN},
    "longformer": {"attention_window": 8},  # the width to which rows are padded
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl": {"merged_hidden_size": 4 * HIDDEN},  # before 5.23 it is not derived anew
    "mistral4": {"head_dim": 2 * HEAD_DIM},
    "mllama_text_model": {"cross_attention_layers": odd_layers},
    "mllama_vision_model": {"intermediate_layers_indices": [1], "vision_output_dim": 2 * HIDDEN},
    "molmo2_adapter": {"vision_feature_layer": lambda count: [count - 1, 0]},
    "molmo2_vision": {"num_position_embeddings": GRID**2},
    "muse_glimmer": {"out_hidden_size": 4 * HIDDEN},
    "muse_spark": {"out_hidden_size": 4 * HIDDEN},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "paddleocr_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "pegasus_x": {"block_size": 8},  # the same
    "perceiver": {"num_latents": 8, "d_latents": HIDDEN, "num_self_attends_per_block": 4}
    | {"max_position_embeddings": LENGTH},
    "phi4_multimodal_audio": {"num_blocks": 2, "nemo_conv_channels": 32, "ext_pw_out_channel": HIDDEN}
    | {"depthwise_separable_out_channel": HIDDEN},
    "pix2struct_vision_model": {"patch_embed_hidden_size": PIXELS},
    "qwen2_5_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 119},
    "qwen2_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 119},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM}
    | {"indexer_budget": 8, "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (32, 32), "attn_layers": cycled("local", "lsh")},
    "step3p5": {"sliding_window": 8},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [INNER, HIDDEN]},
    "unlimited_ocr_text": {"num_key_value_heads": HEADS},  # eager attention repeats no heads
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 8, "depths": (1, 1), "downsampling_ratios": (2,)},
    "wavtokenizer_encoder": {"codebook_dim": HIDDEN, "codebook_size": 8},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "xmod": {"default_language": "en_XX"},
}

_DECODER = {"model_type": "bert", "is_decoder": True, "add_cross_attention": True}
_MUSICGEN = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
# Parts that a composite default config leaves out, or left out before transformers 5.23.
PARTS: dict[str, dict[str, Any]] = {
    "diffusion_gemma": {"vision_config": {}},
    "encoder-decoder": {"encoder": {"model_type": "bert"}, "decoder": _DECODER},
    "gemma4": {"vision_config": {}},
    "gemma4_unified": {"vision_config": {}},
    "granite4_vision": {"text_config": {}, "vision_config": {}},
    "musicgen": {**_MUSICGEN, "decoder": {"model_type": "musicgen_decoder"}},
    "musicgen_melody": {**_MUSICGEN, "decoder": {"model_type": "musicgen_melody_decoder"}},
    "vision-encoder-decoder": {"encoder": {"model_type": "vit"}, "decoder": _DECODER},
}


def _positions() -> torch.Tensor:
    return torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).repeat(BATCH, 1, 1)


def _pools() -> torch.Tensor:
    return torch.arange(PATCHES).view(-1, GRID)


def _grids() -> torch.Tensor:
    return torch.tensor([[2, 2, 0, 0]] * BATCH)


def _first_four() -> torch.Tensor:
    return (torch.arange(LENGTH) < 4).repeat(BATCH, 1)


# Inputs by model type, beside the usual ones or in their place: a shape, how to make it, or None for not at all.
INPUTS: dict[str, dict[str, tuple[int, ...] | Callable[[], torch.Tensor] | None]] = {
    "deepseek_vl_hybrid": {"high_res_pixel_values": (BATCH, *IMAGE)},
    "diffusion_gemma": {"decoder_input_ids": (BATCH, LENGTH), "pixel_values": None, "labels": None},
    "evolla": {"protein_input_ids": (BATCH, 8), "protein_attention_mask": (BATCH, 8), "pixel_values": None},
    "fuyu": {"pixel_values": (BATCH, GRID**2, PIXELS)},
    "gemma4": {"pixel_values": (BATCH, GRID**2, PIXELS), "image_position_ids": _positions},
    "gemma4_unified": {"pixel_values": (BATCH, GRID**2, 4 * PIXELS), "image_position_ids": _positions},
    "granite4_vision": {"pixel_values": (BATCH, 2, *IMAGE)},
    "granite_docling": {"pixel_attention_mask": (BATCH, 1)},
    "idefics": {"pixel_values": (BATCH, 1, *IMAGE), "image_attention_mask": (BATCH, LENGTH, 1)},
    "inkling2": {"pixel_values": (PATCHES, 2 * PATCH, 2 * PATCH, 3)},
    "inkling2_loop": {"pixel_values": (PATCHES, 2 * PATCH, 2 * PATCH, 3)},
    "inkling_mm_model": {"pixel_values": (4 * BATCH, 2, PATCH, PATCH, 3)},
    "instructblip": {"qformer_input_ids": (BATCH, 4)},
    "instructblipvideo": {"qformer_input_ids": (BATCH, 4), "pixel_values": (BATCH, 2, *IMAGE)},
    "kimi_k25": {"pixel_values": (PATCHES, 3, PATCH, PATCH)},
    "kosmos-2": {"image_embeds_position_mask": _first_four},
    "kosmos-2.5": {"image_embeds_position_mask": _first_four},
    "llava": {"image_sizes": None},  # only for a Pixtral tower
    "llava_next": {"pixel_values": (BATCH, 2, *IMAGE)},  # the whole image and its only tile
    "llava_next_video": {"pixel_values": (BATCH, 2, *IMAGE)},
    "llava_onevision": {"pixel_values": (BATCH, 2, *IMAGE)},
    "mllama": {"pixel_values": (BATCH, 1, 4, *IMAGE), "cross_attention_mask": (BATCH, LENGTH, 1, 4)}
    | {"aspect_ratio_ids": (BATCH, 1), "aspect_ratio_mask": (BATCH, 1, 4)},
    "molmo2": {"pixel_values": (BATCH, GRID**2, PIXELS), "image_token_pooling": _pools, "image_grids": _grids},
    "nemotron_h_omni": {"pixel_values": (PATCHES, PIXELS), "image_grid_hw": (BATCH, 2)},
    "paddleocr_vl": {"pixel_values": (PATCHES, 3, PATCH, PATCH)},
    "pi0": {"state": (BATCH, 32), "actions": (BATCH, 8, 32), "pixel_attention_mask": (BATCH, 1), "labels": None},
    "pix2struct": {"input_ids": None, "attention_mask": None},
    "udop": {"bbox": (BATCH, LENGTH, 4)},
    "video_llama_3": {"image_merge_sizes": (BATCH,)},
    "vision-encoder-decoder": {"input_ids": None, "attention_mask": None},
}
