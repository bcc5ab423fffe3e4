"""Five optimizer steps under each engine, with and without a plan: the same losses and weights, bit by bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest

from tests.distributed.runs import ENGINES, KINDS, Outcome, callback, train
from tests.training import changed

MODES = ["full", "attention", "ffn", "every_2", "segments_2", "nested", "mixed"]
MODELS = ["llama", "qwen3", "gemma3_text", "qwen3_moe"]
SETTINGS = [("full", 1), ("lora", 4), ("full", 4), ("lora", 1)]


@functools.cache
def without_plan(engine: str, model_type: str, kind: str, accumulation: int) -> Outcome:
    return train(KINDS[kind](model_type), engine, gradient_accumulation_steps=accumulation)


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_repeats_itself(engine: str, model_type: str) -> None:
    expected = without_plan(engine, model_type, "full", 1)
    again = train(KINDS["full"](model_type), engine)
    assert expected.engine == again.engine == engine
    assert again.losses == expected.losses
    assert changed(expected.weights, again.weights) == []
    assert any(weight.any() for weight in again.weights.values())


def cases() -> Iterator[tuple[str, str, str, int, str]]:
    """Each mode on each model, in another setting on each; on Llama under FSDP2 each mode both full and with LoRA.

    On models other than Llama some modes stand for all under DDP, which leaves modules as they are, and under FSDP1.
    """
    for engine, model_type, mode in itertools.product(ENGINES, MODELS, MODES):
        turn = (MODES.index(mode) + MODELS.index(model_type)) % len(SETTINGS)
        if engine != "fsdp2" and model_type != "llama" and mode not in ("full", "ffn", "nested"):
            continue
        is_whole = model_type == "llama" and engine == "fsdp2"
        for kind, accumulation in (SETTINGS * 2)[turn : turn + 1 + is_whole]:
            yield engine, model_type, kind, accumulation, mode


@pytest.mark.parametrize(("engine", "model_type", "kind", "accumulation", "mode"), [*cases()])
def test_training_is_as_without_a_plan(engine: str, model_type: str, kind: str, accumulation: int, mode: str) -> None:
    expected = without_plan(engine, model_type, kind, accumulation)
    got = train(KINDS[kind](model_type), engine, callback(mode), gradient_accumulation_steps=accumulation)
    assert expected.engine == got.engine == engine
    assert len(got.losses) == 5
    assert got.losses == expected.losses
    assert changed(expected.weights, got.weights) == []
    assert got.names == expected.names
