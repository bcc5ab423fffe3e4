"""What the weights of a model are, by dtype, and which adapter trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_ckpt import load_recipe
from hf_ckpt.cli.inspect_report import inspect_report
from hf_ckpt.estimate.estimate import facts_as_json
from hf_ckpt.estimate.step_of_recipe import subject_of
from hf_ckpt.estimate.weights import weights_of
from hf_ckpt.finetune import train
from hf_ckpt.loading.model import build_model
from hf_ckpt.loading.tokenizer import load_tokenizer
from hf_ckpt.recipe.recipe import Training
from hf_ckpt.upstream.transformers import experts_of
from tests import small_recipes
from tests.estimate.small_estimates import small_subject
from tests.small_recipes import LORA


class Experts(nn.Module):
    """The experts of a layer, which are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 45
        self.down_proj = nn.Parameter(torch.empty(45, 1000, 1000, dtype=torch.bfloat16))


class Mixture(nn.Module):
    """A model of which a linear layer is quantised, and the head is that of the embeddings."""

    def __init__(self, *, has_experts: bool) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(1000, 1000, dtype=torch.bfloat16)
        self.proj, self.head = nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1000, bias=False)
        self.head.weight = self.embeddings.weight
        self.norm = nn.LayerNorm(1000, dtype=torch.bfloat16)
        packed = nn.Parameter(torch.empty(500_000, 1, dtype=torch.uint8), requires_grad=False)
        packed.quant_state = SimpleNamespace(shape=(1000, 1000))  # type: ignore[attr-defined]  # as bitsandbytes does
        self.proj.weight = packed
        if has_experts:
            self.experts = Experts()


@pytest.mark.parametrize(
    ("has_experts", "said"),
    [
        (False, "2.0 M parameters: 1.0 M in 4 bits, 1.0 M in bfloat16 (embeddings)"),
        (
            True,
            "47.0 M parameters: 1.0 M in 4 bits, 46.0 M in bfloat16, 45.0 M of them experts, as bitsandbytes quantises "
            "linear layers only",
        ),
    ],
)
def test_quantised_weights_say_what_is_not_and_why(has_experts: bool, said: str) -> None:
    with torch.device("meta"):
        found = weights_of(Mixture(has_experts=has_experts))
    assert found.describe() == said
    assert found.by_dtype == {"4 bits": 10**6, "bfloat16": 10**6 + 2000 + 45 * 10**6 * has_experts}


def test_adapter_says_its_kind_rank_targets_and_numbers(tmp_path: Path) -> None:
    lora = {**LORA, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}, "lora_dropout": 0.0}
    subject = small_subject(tmp_path, lora={**lora, "use_dora": True, "modules_to_save": ["lm_head"]})
    facts = dict(subject.facts)
    assert subject.weights is not None
    # Of four layers: two matrices and a length each; and the head, 300 x 32.
    trained = 4 * (4 * (32 + 32) + 2 * (32 + 32) + 2 * 32) + 300 * 32
    assert facts["trained"] == (
        f"{trained:,} numbers in float32: DoRA of rank 4 on q_proj (4) and of rank 2 on v_proj (4); lm_head whole"
    )
    assert facts["weights"].endswith(" parameters in float32")
    assert facts["training"] == "no autocast, adamw_torch_fused"
    assert facts["versions"].startswith("transformers ")
    assert ", attention by sdpa" in facts["versions"]
    read = facts_as_json(subject)["weights"]
    assert (read["num_trained"], read["adapter"]["targets"][1]) == (trained, {"name": "v_proj", "count": 4, "rank": 2})


def test_adamw_in_half_precision_is_said(tmp_path: Path) -> None:
    facts = dict(small_subject(tmp_path, model={"dtype": "bfloat16"}).facts)
    assert facts["trained"] == "all in bfloat16"
    assert facts["training"].endswith(" in bfloat16: neither weights nor state in float32")


ON_EXPERTS = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (ON_EXPERTS, "12,288 in float32: 4 in each of 2 layers, an adapter on down_proj, gate_up_proj"),
        ({"r": 4, "target_modules": ["q_proj"]}, "12,288 in float32: 4 in each of 2 layers, frozen"),
        (None, "12,288 in float32: 4 in each of 2 layers, trained"),
    ],
    ids=["adapter on experts", "frozen", "all"],
)
def test_estimate_inspect_and_the_run_say_the_same(
    lora: dict[str, Any] | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "_NUM_SAMPLE_TOKENS", 4)
    sections = {"model": {"config": small_recipes.MIXTURE}, "lora": lora, "checkpointing": None}
    recipe = load_recipe(small_recipes.write(tmp_path, **sections), ["training.max_steps=1"])
    subject = subject_of(recipe)
    facts = {name: text for name, text in subject.facts if name in ("weights", "experts", "trained")}
    # Two layers: 4 experts with matrices of 32 x 32 and 32 x 16.
    assert facts["experts"] == said
    read = facts_as_json(subject)["weights"]["experts"]
    assert (read["by_dtype"], read["num_layers"], read["in_layer"]) == ({"float32": 12288}, 2, (4,))
    shown = " ".join(inspect_report(recipe, {}).split())
    assert all(f"{name} {text}" in shown for name, text in facts.items())
    capsys.readouterr()
    train.finetune(recipe)
    printed = capsys.readouterr().out.splitlines()
    assert all(f"{name.capitalize()}: {text}" in printed for name, text in facts.items())


@pytest.mark.parametrize(("wanted", "runs"), [(None, "grouped_mm"), ("eager", "eager"), ("batched_mm", "batched_mm")])
def test_experts_are_computed_as_the_run_computes_them_and_that_is_said(
    wanted: str | None, runs: str, tmp_path: Path
) -> None:
    model = {"config": small_recipes.MIXTURE, **({} if wanted is None else {"experts_implementation": wanted})}
    recipe = load_recipe(small_recipes.write(tmp_path, model=model, lora=ON_EXPERTS, checkpointing=None))
    subject = subject_of(recipe)
    assert dict(subject.facts)["versions"].endswith(f"attention by sdpa, experts by {runs}")
    real = build_model(recipe, load_tokenizer(recipe.model, recipe.data, cache_dir=tmp_path))
    assert experts_of(real.config) == experts_of(subject.model.config) == runs


def test_gpt_oss_answers_with_the_attention_that_it_has() -> None:
    subject = subject_of(Training().recipe_for("openai/gpt-oss-20b"))
    assert dict(subject.facts)["versions"].endswith("attention by eager, experts by grouped_mm")
    assert dict(subject.facts)["experts"] == "19.1 B in bfloat16: 32 in each of 24 layers, frozen"
