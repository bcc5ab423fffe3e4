"""docs/long_context.md says what benchmarks/results/longctx_predicted.json holds, and that is what is predicted now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import longctx_predict
from benchmarks.longctx_cases import GIB, recipe_of, subject
from benchmarks.longctx_predict import Predictor, with_synchronous_offload
from benchmarks.longctx_table import TABLES, names_in, with_tables
from benchmarks.runner import RESULTS
from hf_ckpt.estimate.max_length_and_batch import with_length
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.step_memory import Category, Phase, Place, StepMemory, Timeline

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "long_context.md"
RESULT = RESULTS / longctx_predict.NAME


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return read


def budget(result: dict[str, Any], size: int) -> dict[str, Any]:
    (found,) = (row for row in result["budgets"] if row["budget_gib"] == size)
    return found


def test_document_is_what_the_result_says(result: dict[str, Any]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert sorted(names_in(text)) == sorted(TABLES)
    assert with_tables(text, result) == text


def test_twice_the_published_lengths_are_reached(result: dict[str, Any]) -> None:
    assert budget(result, 24)["hf_ckpt"]["length"] >= 157_000
    assert budget(result, 80)["hf_ckpt"]["length"] >= 685_000
    for row in result["budgets"]:
        published = result["published"]["unsloth"][str(row["budget_gib"])]
        assert row["hf_ckpt"]["length"] >= 2 * published - 1000


def test_every_byte_of_a_peak_is_told(result: dict[str, Any]) -> None:
    for row in result["budgets"]:
        ours = row["hf_ckpt"]
        assert sum(ours["by_category"].values()) == ours["peak_bytes"] <= row["budget_gib"] * GIB
        # The inputs of all layers but the last one wait on the host, in bfloat16.
        assert ours["host_bytes"] >= 31 * ours["length"] * 4096 * 2
    ledger = result["ledger"]
    at_24 = budget(result, 24)["hf_ckpt"]
    assert ledger["length"] == at_24["length"]
    # Tensors, in blocks that are at most 1 MiB larger each.
    assert ledger["peak_bytes"] <= at_24["peak_bytes"] < ledger["peak_bytes"] + len(ledger["storages"]) * 2**20
    assert sum(item["num_bytes"] for item in ledger["storages"]) == ledger["peak_bytes"]


def test_each_stage_reaches_further(result: dict[str, Any]) -> None:
    lengths = [stage["longest"]["length"] for stage in result["stages"]]
    assert lengths == sorted(set(lengths))


def test_result_is_what_is_predicted_now(result: dict[str, Any]) -> None:
    # The cheapest of the steps: full checkpointing as transformers does it, in the smallest budget.
    written = budget(result, 8)["transformers"]
    case = subject(recipe_of())
    predictor = Predictor(case, find_device(result["device"]))
    memory = predictor.memory(case.resolve("full"), with_length(case.step, written["length"] or 64))
    assert memory.peak_bytes == written["peak_bytes"]


def test_synchronous_offload_takes_inputs_of_layers_that_wait() -> None:
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    steps = [(forward, None, 10), (forward, 0, 20), (forward, 1, 30), (forward, None, 60), (backward, None, 50)]
    steps += [(backward, 1, 45), (backward, 0, 30), (Phase.OPTIMIZER, None, 5)]
    places = tuple(Place(phase, layer_idx=layer) for phase, layer, _ in steps)
    sizes = tuple(size for *_, size in steps)
    memory = StepMemory("", None, 1, 60, places[3], {}, Timeline(places, {Category.SAVED: sizes}))
    # Of 8 bytes each: at the head both inputs are away, in the backward of layer 1 that of layer 0.
    assert with_synchronous_offload(memory, 2, 8) == (44, 16)
    assert with_synchronous_offload(memory, 2, 5) == (50, 16)
