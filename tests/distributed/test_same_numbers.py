"""Some optimizer steps under each engine, with and without a plan: the same losses and weights, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

import hf_ckpt
from tests.distributed.runs import ENGINES, KINDS, STEPS, Outcome, callback, train
from tests.training import changed

MODES = ["full", "attention", "ffn", "every_2", "segments_2", "nested", "mixed"]
SETTINGS = [("full", 1), ("lora", 2)]
OTHERS = {"qwen3": ("full", 2), "gemma3_text": ("lora", 1), "qwen3_moe": ("full", 1)}
# What stands for all: a whole layer, a part of it, segments. DDP leaves modules as they are.
SOME = ["full", "ffn", "nested"]
MODES_OF_OTHERS = {"ddp": ["full"], "fsdp1": ["ffn", "nested"], "fsdp2": SOME}


@functools.cache
def without_plan(engine: str, model_type: str, kind: str, accumulation: int) -> Outcome:
    return train(KINDS[kind](model_type), engine, gradient_accumulation_steps=accumulation)


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_repeats_itself(engine: str) -> None:
    expected = without_plan(engine, "llama", "full", 1)
    again = train(KINDS["full"]("llama"), engine)
    assert expected.engine == again.engine == engine
    assert again.losses == expected.losses
    assert changed(expected.weights, again.weights) == []
    assert any(weight.any() for weight in again.weights.values())


def cases() -> Iterator[tuple[str, str, str, int, str]]:
    """Each mode on Llama, full and with LoRA in turn, under FSDP2 some with both; some modes on every other model.

    Settings are few: in each one every engine has to run without a plan, too.
    """
    for engine in ENGINES:
        for number, mode in enumerate(MODES):
            for kind, accumulation in SETTINGS if engine == "fsdp2" and mode in SOME else [SETTINGS[number % 2]]:
                yield engine, "llama", kind, accumulation, mode
        for model_type, (kind, accumulation) in OTHERS.items():
            for mode in MODES_OF_OTHERS[engine]:
                yield engine, model_type, kind, accumulation, mode


@pytest.mark.parametrize("engine", ENGINES)
def test_a_binomial_schedule_trains_as_without_a_plan(engine: str) -> None:
    expected = without_plan(engine, "llama", "lora", 2)
    schedule = hf_ckpt.HFCkptCallback("full", nested="revolve", snapshots=1)
    got = train(KINDS["lora"]("llama"), engine, schedule, gradient_accumulation_steps=2)
    assert got.losses == expected.losses
    assert changed(expected.weights, got.weights) == []


@pytest.mark.parametrize(("engine", "model_type", "kind", "accumulation", "mode"), [*cases()])
def test_training_is_as_without_a_plan(engine: str, model_type: str, kind: str, accumulation: int, mode: str) -> None:
    expected = without_plan(engine, model_type, kind, accumulation)
    got = train(KINDS[kind](model_type), engine, callback(mode), gradient_accumulation_steps=accumulation)
    assert expected.engine == got.engine == engine
    assert len(got.losses) == STEPS
    assert got.losses == expected.losses
    assert changed(expected.weights, got.weights) == []
    assert got.names == expected.names
