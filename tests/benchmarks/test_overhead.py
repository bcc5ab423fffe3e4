"""The benchmark of the library's own overhead, run small on the CPU."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from benchmarks import overhead, step_costs
from benchmarks.journal import FileJournal, ReadJournal

# peft and transformers before 5.23 go by the older name.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"),
    pytest.mark.sweep,
]

OPTIONS = overhead.Options(device="cpu", case="llama_tiny", num_rounds=2)


def test_entries_give_the_result_and_are_not_made_again() -> None:
    journal = FileJournal()
    overhead.collect(journal, OPTIONS)
    names = ["none", "transformers_full", "hf_ckpt_full"]
    looks = [f"peak/{name}" for name in names]
    assert list(journal.entries) == [
        *looks,
        *(f"round_1/{name}" for name in names),
        *(f"round_2/{name}" for name in reversed(names)),
    ]
    read = ReadJournal(json.loads(json.dumps(journal.entries)))
    overhead.collect(read, OPTIONS)
    result = overhead.assemble(read, OPTIONS)
    assert result == overhead.assemble(journal, OPTIONS)
    assert result["num_steps"] == 2
    none, theirs, ours = (result["contenders"][name] for name in names)
    assert none["flops"] < theirs["flops"] == ours["flops"]
    assert none["loss"] == theirs["loss"] == ours["loss"]
    assert result["step_time_ratio_median"] > 0


def test_timed_step_comes_after_others_and_empties_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    # Peaks have a pass of their own.
    monkeypatch.setattr(overhead, "Peak", None)
    num_steps = 0
    step = overhead.step

    def counted(*given: object) -> float:
        nonlocal num_steps
        num_steps += 1
        return step(*given)

    for module in (overhead, step_costs):
        monkeypatch.setattr(module, "step", counted)
    bench = overhead.Bench(partial(overhead.build_llama, overhead.LLAMAS[OPTIONS.case], OPTIONS.device))
    assert set(overhead.turn(bench, "none", OPTIONS)) == {"seconds"}
    assert num_steps == 2


def test_contender_that_runs_out_of_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(overhead.CONTENDERS, "none", fail)
    journal = FileJournal()
    overhead.collect(journal, OPTIONS)
    result = overhead.assemble(journal, OPTIONS)
    assert result["contenders"]["none"] == {"out_of_memory": "CUDA out of memory"}
    assert result["num_steps"] == 2
