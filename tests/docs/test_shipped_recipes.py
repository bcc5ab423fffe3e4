"""Recipes that name hub weights, carried out key by key on tiny twins of those weights and data (tests/twins.py)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_ckpt import Plan
from hf_ckpt.finetune import train
from hf_ckpt.finetune.run_report import RunSummary
from hf_ckpt.recipe.recipe import Recipe, load_recipe
from tests import twins
from tests.small_recipes import can_be_loaded

pytestmark = [
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
    # trl 1.16 uses the names that transformers 5.23 gives up.
    pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"),
]

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = sorted(
    path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith("tiny_") and can_be_loaded(path)
)
ON_MANY = [stem for stem in SHIPPED if "launch --config_file" in (RECIPES / f"{stem}.yaml").read_text("utf-8")]
"""Recipes for many GPUs, which tests/distributed carries out on two processes."""

# What a test has to change: where things are, no GPU, and how long it takes. Every other key is the recipe's own.
CHANGED = {
    *("model.name_or_path", "data.path", "training.output_dir", "training.use_cpu", "training.max_steps"),
    *("training.gradient_accumulation_steps", "training.logging_steps", "training.eval_steps", "training.save_steps"),
    # Without a GPU, policy auto has to be told what it may use.
    "checkpointing.memory_budget",
    # A CPU writes a few tokens for each of a few completions.
    *("training.num_generations", "training.max_completion_length"),
    # float16 needs a GPU, which scales its gradients.
    *("training.fp16", "training.bf16", "model.dtype", "quantization.bnb_4bit_compute_dtype"),
}
NUM_STEPS = 2
# Where rules name layers of the hub's model, its twin has as many.
NUM_LAYERS = {"llama7b_lora_ddp": 32}
# Of a twin that policy auto plans for; all of it fits, so that planning takes one simulation.
BUDGETS = dict.fromkeys((stem for stem in SHIPPED if load_recipe(RECIPES / f"{stem}.yaml").is_auto), "64MiB")

PLANS = {
    "gemma3_4b_lora": [
        "base_model.model.model.vision_tower.encoder.layers: 2 layers",
        "  0 to 1       none",
        "base_model.model.model.language_model.layers: 7 layers",
        "  0 to 4       ffn",
        "  5            full",
        "  6            ffn",
    ],
    "gpt_oss_20b_lora_24gb": ["base_model.model.model.layers: 4 layers", "  0 to 3       none"],
    "llama32_3b_qlora_t4": ["base_model.model.model.layers: 4 layers", "  0 to 3       none"],
    "llama3_8b_dpo_lora": ["base_model.model.model.layers: 4 layers", "  0 to 3       none"],
    "llama3_8b_qlora": ["base_model.model.model.layers: 4 layers", "  0 to 3       none"],
    "llama3_8b_qlora_6gb": ["base_model.model.model.layers: 4 layers", "  0 to 3       none"],
    "llama3_8b_qlora_longctx": ["base_model.model.model.layers: 4 layers", "  0 to 3       none"],
    "llama3_8b_reward": ["model.layers: 4 layers", "  0 to 3       none"],
    "llama70b_qlora_24gb": [
        "base_model.model.model.layers: 4 layers",
        "  0 to 3       full, weights on cpu",
        "embedding: cpu",
    ],
    "llama70b_qlora_fsdp": ["base_model.model.model.layers: 4 layers", "  0 to 3       full"],
    "llama7b_full_fsdp": ["model.layers: 4 layers", "  0 to 3       full"],
    "llama7b_full_zero3": ["model.layers: 4 layers", "  0 to 3       full"],
    "llama7b_lora": ["base_model.model.model.layers: 4 layers", "  0 to 3       none"],
    "llama7b_lora_ddp": ["base_model.model.model.layers: 32 layers", "  0 to 15      full", "  16 to 31     ffn"],
    "llama7b_qlora_24gb": ["base_model.model.model.layers: 4 layers", "  0 to 3       none"],
    "mistral7b_full_bf16": ["model.layers: 4 layers", "  0 to 3       none"],
    "mixtral_8x7b_qlora_48gb": ["base_model.model.model.layers: 4 layers", "  0 to 3       none"],
    "qwen3_30b_a3b_qlora_24gb": ["base_model.model.model.layers: 4 layers", "  0 to 3       none"],
    "qwen3_32b_lora_fsdp": ["base_model.model.model.layers: 4 layers", "  0 to 3       full"],
    "qwen3_4b_grpo_lora": ["base_model.model.model.layers: 4 layers", "  0 to 3       full"],
    "qwen3_8b_lora": ["base_model.model.model.layers: 4 layers", "  0 to 3       none"],
    "qwen3_vl_8b_lora": [
        "base_model.model.model.visual.blocks: 3 layers",
        "  0 to 2       none",
        "base_model.model.model.language_model.layers: 4 layers",
        "  0 to 3       none",
    ],
}

LINEAR_SIZES = {
    "q_proj": (64, 64),
    "k_proj": (64, 32),
    "v_proj": (64, 32),
    "o_proj": (64, 64),
    "gate_proj": (64, 256),
    "up_proj": (64, 256),
    "down_proj": (256, 64),
}
"""Inputs and outputs of the linear layers of a twin's decoder layer."""


@dataclass(frozen=True)
class Run:
    """A recipe that was carried out, and what it left behind."""

    recipe: Recipe
    summary: RunSummary
    folder: Path

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.summary.log_history if "loss" in entry]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        (file,) = self.folder.glob("*.safetensors")
        return load_file(file)


@functools.cache
def shipped(stem: str) -> Recipe:
    return load_recipe(RECIPES / f"{stem}.yaml")


def overrides(stem: str, folder: Path) -> Iterator[str]:
    recipe = shipped(stem)
    fields = {"num_hidden_layers": NUM_LAYERS[stem]} if stem in NUM_LAYERS else {}
    yield f"model.name_or_path={twins.model(recipe.model['name_or_path'], **fields)}"
    yield f"data.path={twins.data(recipe.data['path'])}"
    yield f"training.output_dir={folder}"
    if stem in BUDGETS:
        yield f"checkpointing.memory_budget={BUDGETS[stem]}"
    if recipe.training.get("fp16"):
        yield from ("training.fp16=false", "training.bf16=true", "model.dtype=bfloat16")
        yield "quantization.bnb_4bit_compute_dtype=bfloat16"
    if recipe.kind.generates:
        yield "reward_funcs=[tests.twins:has_letters_of_solution]"
        yield from ("training.num_generations=2", "training.max_completion_length=12")
    yield f"training.max_steps={NUM_STEPS}"
    yield from ("training.use_cpu=true", "training.gradient_accumulation_steps=2", "training.logging_steps=1")
    for key in ("eval_steps", "save_steps"):
        if key in recipe.training:
            yield f"training.{key}={NUM_STEPS}"


def carry_out(stem: str, folder: Path, *more: str, is_merged: bool = False) -> Run:
    recipe = load_recipe(RECIPES / f"{stem}.yaml", [*overrides(stem, folder), *more])
    return Run(recipe, train.finetune(recipe, is_merged=is_merged), folder)


def key_paths(sections: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Values by dotted key path; what is inside a list belongs to its key."""
    paths: dict[str, Any] = {}
    for key, value in sections.items():
        paths |= key_paths(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return paths


def keys_of(recipe: Recipe) -> dict[str, Any]:
    names = ("model", "lora", "quantization", "data", "checkpointing", "training")
    return key_paths({name: getattr(recipe, name) for name in names if getattr(recipe, name) is not None})


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_NUM_SAMPLE_TOKENS", 4)


@pytest.fixture(autouse=True)
def _without_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    twins.reads_no_videos(monkeypatch)


def test_every_shipped_recipe_has_a_plan_to_compare_with() -> None:
    assert sorted(stem for stem in PLANS if can_be_loaded(RECIPES / f"{stem}.yaml")) == SHIPPED


@pytest.mark.parametrize("stem", SHIPPED)
def test_no_key_of_the_recipe_is_left_out_here(stem: str, tmp_path: Path) -> None:
    run = keys_of(load_recipe(RECIPES / f"{stem}.yaml", overrides(stem, tmp_path)))
    written = keys_of(shipped(stem))
    assert written.keys() - run.keys() == set()
    assert {key for key in run if run[key] != written.get(key)} <= CHANGED


@pytest.mark.parametrize("stem", [stem for stem in SHIPPED if stem not in ON_MANY])
def test_recipe_trains_as_without_its_plan(stem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    has_adapter = shipped(stem).lora is not None
    run = carry_out(stem, tmp_path / "planned", is_merged=has_adapter)
    printed = capsys.readouterr().out
    plain = carry_out(stem, tmp_path / "plain", "checkpointing=null")

    check_losses(run, plain)
    check_plan(run)
    check_weights_are_those_without_the_plan(run, plain)
    check_optimizer(run)
    if has_adapter:
        check_adapter_is_whole(run)
        check_merged_model(run)
    check_words(run, printed)


def check_losses(run: Run, plain: Run) -> None:
    assert len(run.losses) == NUM_STEPS
    assert all(math.isfinite(loss) for loss in run.losses)
    assert run.losses == plain.losses


def check_plan(run: Run, expected: Sequence[str] = ()) -> None:
    assert run.summary.plan is not None
    assert run.summary.plan.summary().splitlines() == list(expected or PLANS[run.recipe.path.stem])
    written = [run.folder, *run.folder.glob("checkpoint-*")]
    # The folder itself, and the one checkpoint that every recipe writes at the end of so short a run.
    assert len(written) == 2
    for folder in written:
        assert Plan.from_json((folder / "hf_ckpt_plan.json").read_text()) == run.summary.plan


def check_weights_are_those_without_the_plan(run: Run, plain: Run) -> None:
    weights, others = run.weights, plain.weights
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


def check_optimizer(run: Run) -> None:
    (checkpoint,) = run.folder.glob("checkpoint-*")
    if run.recipe.training.get("save_only_model"):
        assert not (checkpoint / "optimizer.pt").exists()
        return
    state = torch.load(checkpoint / "optimizer.pt", weights_only=False)["state"]
    dtypes = {tensor.dtype for tensor in tensors_in(state)}
    # bitsandbytes keeps anything smaller in float32.
    is_large = any(weight.numel() >= 4096 for weight in run.weights.values())
    assert (torch.uint8 in dtypes) is (is_large and "8bit" in run.recipe.training["optim"])


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)


def check_adapter_is_whole(run: Run) -> None:
    rank, targets = run.recipe.lora["r"], run.recipe.lora["target_modules"]
    expected = {}
    for number in range(num_layers(run)):
        for name, (inputs, outputs) in LINEAR_SIZES.items():
            if isinstance(targets, list) and name not in targets:
                continue
            part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            path = f"{layers_path(run)}.{number}.{part}.{name}"
            expected[f"{path}.lora_A.weight"] = (rank, inputs)
            expected[f"{path}.lora_B.weight"] = (outputs, rank)
        if run.recipe.lora.get("target_parameters"):
            expected |= _of_experts(f"{layers_path(run)}.{number}.mlp.experts", rank)
    weights = run.weights
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected
    # Every B begins as zeros: what is not zero has been trained.
    assert [name for name, weight in weights.items() if ".lora_B." in name and not weight.any()] == []


def _of_experts(path: str, rank: int) -> dict[str, tuple[int, int]]:
    """Shapes of the adapters of gpt-oss' experts: four, of which each has a rank; the second is around the first."""
    sizes = {"base_layer.": (64, 2 * 256), "": (256, 64)}
    both: dict[str, tuple[int, int]] = {}
    for wrapper, (inputs, outputs) in sizes.items():
        both[f"{path}.{wrapper}lora_A.weight"] = (4 * rank, inputs)
        both[f"{path}.{wrapper}lora_B.weight"] = (outputs, 4 * rank)
    return both


def layers_path(run: Run) -> str:
    return run.summary.plan.stacks[-1].path


def num_layers(run: Run) -> int:
    return len(run.summary.plan.stacks[-1].layers)


def check_merged_model(run: Run) -> None:
    kind = AutoModelForImageTextToText if run.recipe.kind.reads_images else AutoModelForCausalLM
    # Where choices of experts are close, rounding changes one: here all experts are chosen.
    config = AutoConfig.from_pretrained(run.recipe.model["name_or_path"])
    if hasattr(config, "num_experts_per_tok"):
        config.num_experts_per_tok = twins.NUM_EXPERTS
    base = kind.from_pretrained(run.recipe.model["name_or_path"], config=config, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run.folder).eval()
    folder = run.folder / "merged"
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    merged = kind.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    ids = torch.tensor([[0, 70, 71, 72, 73]])
    with torch.no_grad():
        expected, got = adapted(input_ids=ids).logits, merged(input_ids=ids).logits
        with adapted.disable_adapter():
            unadapted = adapted(input_ids=ids).logits
    # Computed in float32, so that all that differs is that merged weights are rounded to bfloat16, to 2**-9 of their
    # size. Those errors add up over layers; without the adapter the logits are further away by far.
    assert (got - expected).abs().max() < 2**-6 * expected.abs().max()
    if run.recipe.training["learning_rate"] >= 1e-4:
        # Two steps at a smaller rate are within that rounding.
        assert (got - expected).abs().max() < (unadapted - expected).abs().max() / 4


def check_words(run: Run, printed: str) -> None:
    lines = printed.splitlines()
    assert any(line.startswith("Training data: ") for line in lines)
    assert any(line.startswith("First of ") for line in lines)
    has_sample = not run.recipe.kind.scores_rows and not run.recipe.kind.reads_images
    assert any(line.startswith("Sample, ") for line in lines) == has_sample
    assert run.summary.table() in printed
