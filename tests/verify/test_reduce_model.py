"""What `hf-ckpt verify` tries in place of a recipe: a small model of the same structure, with the plan carried over."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, Trainer

from hf_ckpt import HFCkptCallback, PolicyError, RecipeError, find_layers
from hf_ckpt.loading import config_files
from hf_ckpt.loading import model as model_config
from hf_ckpt.loading.config_files import known_configs
from hf_ckpt.loading.model import build_model
from hf_ckpt.loading.trainer import training_arguments
from hf_ckpt.recipe.checkpointing import Checkpointing
from hf_ckpt.recipe.recipe import Recipe, load_recipe
from hf_ckpt.verify import run
from hf_ckpt.verify.reduce_model import ReducedRecipe, reduce_recipe
from hf_ckpt.verify.run import sample_rows
from tests import zoo, zoo_tables

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
]

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = sorted(path.stem for path in RECIPES.glob("*.yaml"))
HALF_AND_HALF = [{"layers": "0:16", "mode": "full"}, {"layers": "16:32", "mode": "ffn"}]


def recipe_of(folder: Path, fields: dict[str, Any], policy: object = "full", **options: Any) -> Recipe:
    """A recipe on a model at its full size, of which there is the config only."""
    source = folder / "full-size"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(fields))
    return Recipe(
        model={"name_or_path": str(source), "dtype": "float32"},
        data={"path": "nowhere"},
        training={"output_dir": str(folder / "run")},
        lora=options.pop("lora", None),
        quantization=options.pop("quantization", None),
        checkpointing=Checkpointing({"policy": policy, **options}),
        path=Path("recipe.yaml"),
    )


def llama(**fields: Any) -> dict[str, Any]:
    """Llama 2 7B but for what is given."""
    return {**known_configs()["meta-llama/Llama-2-7b-hf"], **fields}


def small(folder: Path, recipe: Recipe) -> ReducedRecipe:
    return reduce_recipe(recipe, folder, is_full=False)


def built(made: ReducedRecipe) -> Any:
    return build_model(made.recipe, made.tokenizer)


def plan_of(made: ReducedRecipe) -> list[tuple[str, int | None, bool]]:
    """Mode, segment and nested of each layer of the last stack, as the callback would apply it."""
    model, callback = built(made), HFCkptCallback(**made.recipe.checkpointing)
    args = training_arguments(replace(made.recipe, training={**made.recipe.training, "max_steps": 1}))
    batches = sample_rows(made.recipe, made.tokenizer, args, num_steps=1)
    Trainer(model, args, train_dataset=batches.rows, data_collator=batches.collator, callbacks=[callback]).train()
    return [(str(layer.mode), layer.segment, layer.nested) for layer in callback.plan.stacks[-1].layers]


def fact(made: ReducedRecipe, name: str) -> str:
    (text,) = [text for known, text in made.facts if known == name]
    return text


# --- Every architecture. ---

# One of each make: dense, windows, shared keys and values, experts, latent attention, hybrids, towers, old ones.
ARCHITECTURES = [
    *("llama", "qwen3", "gemma2", "gemma3_text", "gemma3", "gemma3n_text", "gemma4_text", "phi3", "olmo2", "cohere2"),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "glm4_moe", "jamba", "bamba", "falcon_h1"),
    *("qwen3_next", "granitemoehybrid", "mamba2", "falcon_mamba", "gpt2", "gpt_neox", "gpt_neo", "falcon", "bloom"),
    *("opt", "bert", "bart"),
]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_architecture_trains_at_its_reduced_size(model_type: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[model_type](**zoo_tables.PARTS.get(model_type, {}))
    if "is_decoder" in vars(config):
        config.is_decoder = True
    # A recipe refuses a model with an encoder: of Bart the decoder is left.
    config.is_encoder_decoder = False
    recipe = recipe_of(tmp_path, json.loads(config.to_json_string()), every_n_layers=2)
    made = small(tmp_path, recipe)
    model = built(made).train()
    assert sum(parameter.numel() for parameter in model.parameters()) < 20_000_000
    ids = torch.randint(3, 259, (2, 24))
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
    loss.backward()
    assert math.isfinite(loss.item())
    layers = find_layers(model)[-1].layers
    assert len(layers) < max(17, config.get_text_config().num_hidden_layers / 2)
    idle = [layer.layer_idx for layer in layers if not any(has_gradient(p) for p in layer.module.parameters())]
    assert idle == []


def has_gradient(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def test_the_architectures_are_those_of_the_zoo() -> None:
    assert set(ARCHITECTURES) <= set(zoo.CAUSAL())


# --- What is kept of the structure. ---


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kept"), [(32, 32, (2, 2)), (32, 8, (8, 2)), (64, 8, (8, 1)), (16, 8, (4, 2)), (8, 1, (8, 1))]
)
def test_query_heads_share_keys_and_values_as_at_full_size(
    heads: int, kv_heads: int, kept: tuple[int, int], tmp_path: Path
) -> None:
    made = small(tmp_path, recipe_of(tmp_path, llama(num_attention_heads=heads, num_key_value_heads=kv_heads)))
    config = built(made).config
    assert (config.num_attention_heads, config.num_key_value_heads) == kept
    assert config.head_dim * config.num_attention_heads == config.hidden_size


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_embeddings_stay_tied(is_tied: bool, tmp_path: Path) -> None:
    model = built(small(tmp_path, recipe_of(tmp_path, llama(tie_word_embeddings=is_tied))))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is is_tied


def test_fewer_experts_are_chosen_than_there_are(tmp_path: Path) -> None:
    config = built(small(tmp_path, recipe_of(tmp_path, {"model_type": "qwen3_moe"}))).config
    assert (config.num_experts, config.num_experts_per_tok) == (4, 2)


def test_windows_are_shorter_than_the_rows(tmp_path: Path) -> None:
    made = small(tmp_path, recipe_of(tmp_path, {"model_type": "gemma3_text"}))
    config = built(made).config
    assert config.sliding_window == 16
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    assert fact(made, "model.layers") == (
        "4 of 26 layers: 0, 1 for 22 sliding_attention layers (full); 5, 11 for 4 full_attention layers (full)"
    )


def test_layers_that_share_keys_and_values_are_kept_beside_those_that_do_not(tmp_path: Path) -> None:
    config = built(small(tmp_path, recipe_of(tmp_path, {"model_type": "gemma3n_text"}))).config
    assert 2 <= config.num_kv_shared_layers < config.num_hidden_layers - 2
    shared = config.layer_types[-config.num_kv_shared_layers :]
    assert {shared.count(kind) for kind in ("sliding_attention", "full_attention")} == {2}


def test_kinds_that_a_period_makes_are_all_there(tmp_path: Path) -> None:
    made = small(tmp_path, recipe_of(tmp_path, {"model_type": "jamba"}))
    layers = find_layers(built(made))[-1].layers
    kinds = [type(layer.module).__name__ for layer in layers]
    assert (len(layers), kinds.count("JambaAttentionDecoderLayer")) == (13, 2)


def test_special_tokens_are_no_text(tmp_path: Path) -> None:
    made = small(tmp_path, recipe_of(tmp_path, dict(known_configs()["google/gemma-3-4b-it"])))
    config = built(made).config
    special = [config.image_token_index, config.boi_token_index, config.eoi_token_index]
    assert len(set(special)) == 3
    assert all(len(made.tokenizer) <= token < config.text_config.vocab_size for token in special)
    assert config.text_config.pad_token_id == made.tokenizer.pad_token_id


def test_weights_are_the_same_each_time(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, llama())
    first, second = (built(small(tmp_path / name, recipe)).state_dict() for name in ("first", "second"))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_no_weight_starts_at_zero(tmp_path: Path) -> None:
    model = built(small(tmp_path, recipe_of(tmp_path, {"model_type": "gpt2"})))
    assert [name for name, parameter in model.named_parameters() if not parameter.any()] == []


# --- The plan. ---


@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [
        ("full", {}, ["full"] * 2),
        ("full", {"every_n_layers": 2}, ["full", "none"] * 2),
        (HALF_AND_HALF, {}, ["full", "full", "ffn", "ffn"]),
        ([{"layers": "-4:", "mode": "attention"}], {}, ["none", "none", "attention", "attention"]),
        ([{"layers": 3, "mode": "ffn"}], {}, ["none", "none", "ffn"]),
        ("none", {}, ["none"] * 2),
    ],
)
def test_every_mode_of_the_full_plan_is_there(
    policy: object, options: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    made = small(tmp_path, recipe_of(tmp_path, llama(), policy, **options))
    assert [mode for mode, _, _ in plan_of(made)] == expected


@pytest.mark.parametrize("is_nested", [True, False])
def test_segments_keep_two_layers_of_two_of_them(is_nested: bool, tmp_path: Path) -> None:
    made = small(tmp_path, recipe_of(tmp_path, llama(), segment_size=8, nested=is_nested))
    assert plan_of(made) == [("full", segment, is_nested) for segment in (0, 0, 2, 2)]


def test_a_binomial_schedule_keeps_a_segment_with_a_snapshot_and_one_without(tmp_path: Path) -> None:
    made = small(tmp_path, recipe_of(tmp_path, llama(), nested="revolve", snapshots=3))
    # Two segments of five layers are kept, and run under one schedule of ten.
    assert made.recipe.checkpointing["policy"] == [
        {"layers": list(range(10)), "mode": "full", "nested": "revolve", "snapshots": 1}
    ]
    assert plan_of(made) == [("full", segment, True) for segment in [0] * 7 + [7] * 3]


def test_a_segment_keeps_every_kind_of_layer_in_it(tmp_path: Path) -> None:
    made = small(tmp_path, recipe_of(tmp_path, {"model_type": "gemma3_text"}, segment_size=6))
    config = built(made).config
    # Of two segments of five sliding layers and a full one, and of the last, which is shorter.
    assert config.layer_types[:6] == ["sliding_attention", "sliding_attention", "full_attention"] * 2
    assert [segment for _, segment, _ in plan_of(made)][:6] == [0, 0, 0, 3, 3, 3]


def test_other_options_of_the_plan_stay(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, llama(), HALF_AND_HALF, ffn="mlp", input_require_grads=False)
    made = small(tmp_path, recipe)
    assert made.recipe.checkpointing["ffn"] == "mlp"
    assert made.recipe.checkpointing["input_require_grads"] is False
    assert fact(made, "model.layers") == "4 of 32 layers: 0, 1 for 0 to 15 (full); 16, 17 for 16 to 31 (ffn)"


def test_policy_for_more_layers_than_the_full_size_has_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, llama(num_hidden_layers=24), HALF_AND_HALF)
    with pytest.raises(PolicyError, match=r"model\.layers of LlamaForCausalLM has 24 decoder layers \(0 to 23\)"):
        small(tmp_path, recipe)


# --- Adapters. ---

LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": "all-linear"}


def adapted(model: Any) -> dict[str, int]:
    """Rank of each module with an adapter."""
    return {
        name.removeprefix("base_model.model.model."): module.r["default"]
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def test_adapters_keep_rank_scale_and_dropout(tmp_path: Path) -> None:
    model = built(small(tmp_path, recipe_of(tmp_path, llama(), HALF_AND_HALF, lora=LORA)))
    assert len(adapted(model)) == 4 * 7
    assert set(adapted(model).values()) == {8}
    layer = model.get_submodule("base_model.model.model.layers.3.mlp.up_proj")
    assert (layer.scaling["default"], layer.lora_dropout["default"].p) == (2, 0.1)


@pytest.mark.parametrize(
    "section",
    [
        {"target_modules": ["q_proj"], "layers_to_transform": [30, 31], "layers_pattern": "layers"},
        {"target_modules": r".*layers\.(30|31)\.self_attn\.q_proj"},
    ],
)
def test_layers_named_by_number_keep_their_adapters(section: dict[str, Any], tmp_path: Path) -> None:
    made = small(tmp_path, recipe_of(tmp_path, llama(), lora={"r": 8, **section}))
    assert sorted(adapted(built(made))) == ["layers.2.self_attn.q_proj", "layers.3.self_attn.q_proj"]
    assert fact(made, "model.layers") == "4 of 32 layers: 0, 1 for 0 to 29 (full); 30, 31 for 30 to 31 (full)"


def test_ranks_named_by_number_are_carried_over(tmp_path: Path) -> None:
    section = {"r": 8, "target_modules": ["q_proj"], "layers_to_transform": [30, 31], "layers_pattern": "layers"}
    recipe = recipe_of(tmp_path, llama(), lora={**section, "rank_pattern": {"layers.31.self_attn.q_proj": 2}})
    ranks = adapted(built(small(tmp_path, recipe)))
    assert ranks == {"layers.2.self_attn.q_proj": 8, "layers.3.self_attn.q_proj": 2}


def test_modules_to_save_are_trained_whole(tmp_path: Path) -> None:
    model = built(small(tmp_path, recipe_of(tmp_path, llama(), lora={**LORA, "modules_to_save": ["lm_head"]})))
    assert any("lm_head.modules_to_save" in name for name, p in model.named_parameters() if p.requires_grad)


def test_weights_in_four_bits_are_real(tmp_path: Path) -> None:
    quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    model = built(small(tmp_path, recipe_of(tmp_path, llama(), lora=LORA, quantization=quantization)))
    kinds = {type(module).__name__ for module in model.modules()}
    assert "Linear4bit" in kinds
    assert {p.dtype for name, p in model.named_parameters() if name.endswith("base_layer.weight")} == {torch.uint8}


def test_quantisation_that_the_model_brings_moves_into_the_recipe(tmp_path: Path) -> None:
    own = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    made = small(tmp_path, recipe_of(tmp_path, llama(quantization_config=own), lora=LORA))
    assert made.recipe.quantization == {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert "Linear4bit" in {type(module).__name__ for module in built(made).modules()}


# --- Where configs come from. ---


def test_unknown_model_without_network_is_refused_with_what_to_do(tmp_path: Path) -> None:
    recipe = replace(recipe_of(tmp_path, llama()), model={"name_or_path": "some-maker/some-model"})
    with pytest.raises(RecipeError, match=r"the config of some-maker/some-model was not found .*hf auth login"):
        small(tmp_path, recipe)


def test_known_model_without_network_is_told_by_its_facts(tmp_path: Path) -> None:
    recipe = replace(recipe_of(tmp_path, llama()), model={"name_or_path": "meta-llama/Llama-2-7b-hf"})
    made = small(tmp_path, recipe)
    assert fact(made, "model") == (
        "LlamaForCausalLM, config from the shapes that hf_ckpt knows (meta-llama/Llama-2-7b-hf is not cached, and "
        "cannot be loaded from the hub)"
    )


def test_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def nobody(request: Any, timeout: float) -> None:
        asked.append(request.full_url)
        raise OSError("no route")

    monkeypatch.setattr(config_files.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(config_files.urllib.request, "urlopen", nobody)
    recipe = replace(recipe_of(tmp_path, llama()), model={"name_or_path": "meta-llama/Llama-2-7b-hf"})
    assert model_config.find_config(recipe).config.num_hidden_layers == 32
    assert asked == [config_files.constants.ENDPOINT]


def test_every_hub_model_of_the_recipes_is_known() -> None:
    named = {load_recipe(RECIPES / f"{stem}.yaml").model.get("name_or_path") for stem in SHIPPED}
    assert {name for name in named if name and not name.startswith("runs/")} <= known_configs().keys()


def test_full_size_with_weights_keeps_them(tmp_path: Path) -> None:
    first = small(tmp_path, recipe_of(tmp_path, llama()))
    recipe = replace(first.recipe, checkpointing=Checkpointing({"policy": "full"}))
    made = reduce_recipe(recipe, tmp_path / "again", is_full=True)
    assert made.recipe.model["name_or_path"] == first.recipe.model["name_or_path"]
    assert made.recipe.checkpointing == {"policy": "full"}
    assert fact(made, "size") == "full, 172,352 parameters, its own weights"


def test_full_size_with_weights_has_the_tokenizer_of_the_recipe(tmp_path: Path) -> None:
    first = small(tmp_path, recipe_of(tmp_path, llama()))
    weights, own = Path(first.recipe.model["name_or_path"]), tmp_path / "own"
    first.tokenizer.pad_token = first.tokenizer.bos_token
    first.tokenizer.save_pretrained(own)
    for path in weights.glob("*token*"):
        path.unlink()
    recipe = replace(first.recipe, model={"name_or_path": str(weights), "tokenizer": str(own)})
    inputs = run._trial_inputs(reduce_recipe(recipe, tmp_path / "again", is_full=True), tmp_path, 1, None)
    assert inputs.tokenizer.pad_token == first.tokenizer.bos_token
