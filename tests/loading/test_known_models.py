"""Each known shape is that of the model: as many parameters as others count, and where both were read is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hf_ckpt import RecipeError
from hf_ckpt.estimate.step_of_recipe import subject_of
from hf_ckpt.loading.config_files import KNOWN_MODELS, documents, known_configs, not_to_be_had
from hf_ckpt.loading.model import find_config, known_config
from hf_ckpt.loading.similar_models import suggested
from hf_ckpt.recipe.recipe import Training

DOCUMENTS = documents()
AT_A_COMMIT = re.compile(r"[\w-]+/[\w-]+, [\w./-]+ at [0-9a-f]{40}")
PUBLISHED = re.compile(r"transformers \d+\.\d+\.\d+, the defaults of \w+|arXiv \d{4}\.\d{5}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["ids"][0])
def test_shape_has_as_many_parameters_as_others_count(document: dict[str, Any]) -> None:
    config = known_config(document["ids"][0])
    of_text = type(config) in AutoModelForCausalLM._model_mapping
    usual = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
    with torch.device("meta"):
        model = getattr(transformers, document.get("counted_as", usual.__name__)).from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == document["parameters"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["ids"][0])
def test_sources_are_said(document: dict[str, Any]) -> None:
    assert AT_A_COMMIT.match(document["shape_from"]) or PUBLISHED.match(document["shape_from"])
    assert AT_A_COMMIT.match(document["counted_by"]) or document["counted_by"] == "the hub, in the weights' files"


def test_every_id_is_known_once() -> None:
    ids = [hub_id for document in DOCUMENTS for hub_id in document["ids"]]
    assert len(ids) == len(set(ids)) == len(known_configs())
    assert len(DOCUMENTS) >= 69
    assert sorted(path.stem for path in KNOWN_MODELS.glob("*.json")) == sorted(
        document["ids"][0].replace("/", "--") for document in DOCUMENTS
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        # Without its owner, in any case.
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        # The same family and size.
        ("Qwen/Qwen3-8B-Instruct", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("Qwen/Qwn3-8B", "Qwen/Qwen3-8B"),
        # Another size, another version, another family: none.
        ("meta-llama/Llama-3.1-405B", None),
        ("Qwen/Qwen3-235B-A22B", None),
        ("openai/whisper-large-v2", None),
        ("google/gemma-3n-E2B-it", None),
        ("Qwen/Qwen2.5-Coder-7B", None),
        ("tiiuae/falcon-7b", None),
    ],
)
def test_suggestion_is_of_the_same_family_and_size_or_none(written: str, meant: str | None) -> None:
    said = suggested(written, known_configs())
    assert said == (f' Did you mean "{meant}"?' if meant else "")
    assert said in not_to_be_had(written, "it is not cached")


def test_text_for_a_model_of_images_is_refused_in_one_line() -> None:
    with pytest.raises(RecipeError) as refused:
        subject_of(Training().recipe_for("Qwen/Qwen3-VL-8B-Instruct", ()))
    said = str(refused.value)
    assert said == (
        "model: a model of type qwen3_vl reads images. Give --images 1, or write trainer: sft with data.format: "
        "images, as the recipe qwen3_vl_8b_lora does."
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        (
            {"num_hidden_layers": 12},
            ", which is taken; the shape of meta-llama/Llama-3.2-1B that hf_ckpt knows has other values: "
            "num_hidden_layers 12, not 16",
        ),
    ],
)
def test_a_folder_of_its_name_wins_over_the_shape_and_a_difference_is_said(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    config = known_config("meta-llama/Llama-3.2-1B")
    assert config is not None
    config.update(changes)
    folder = tmp_path / "Llama-3.2-1B"
    config.save_pretrained(folder)
    found = find_config(Training().recipe_for(str(folder), ()))
    assert found.source == f"the folder {folder}{said}"
    assert found.config.num_hidden_layers == changes.get("num_hidden_layers", 16)
