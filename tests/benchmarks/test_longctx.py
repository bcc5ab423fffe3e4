"""The benchmark of the longest context: its searches, and a small run of it on the CPU, capped by a budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import longctx, runner
from benchmarks.journal import Entry, FileJournal, OutOfTimeError, ReadJournal
from benchmarks.longctx_predict import Search
from hf_ckpt.planner.advice import LENGTH_MULTIPLE
from hf_ckpt.planner.largest_that_fits import Limit
from hf_ckpt.simulation.devices import CPU

pytestmark = pytest.mark.sweep

MIB = 2**20


@pytest.mark.parametrize("longest", [30_016, 31_936, 32_000, 32_064, 32_640, 40_000, 2_048])
def test_search_ends_at_the_longest_row_that_trains(longest: int) -> None:
    tried: dict[int, bool] = {}
    while (length := longctx.next_length(tried, 32_000)) is not None:
        assert length not in tried
        assert length % LENGTH_MULTIPLE == 0
        tried[length] = length <= longest
    found = max(length for length, fits in tried.items() if fits)
    assert longest - 320 <= found <= longest
    assert len(tried) <= 30


def test_search_ends_where_nothing_trains() -> None:
    tried: dict[int, bool] = {}
    while (length := longctx.next_length(tried, 32_000)) is not None:
        tried[length] = False
    assert min(tried) == LENGTH_MULTIPLE


def test_longest_row_is_found_with_few_simulations() -> None:
    asked: list[int] = []

    def peak(length: int) -> int:
        asked.append(length)
        return 6 * 2**30 + length * 115_000

    search = Search(peak)
    assert search.longest(8 * 2**30) == Limit(18_624, peak(18_624))
    asked.clear()
    assert search.longest(24 * 2**30).number == 168_000
    assert len(asked) == 1
    assert Search(lambda length: 9 * 2**30 + length).longest(8 * 2**30).number == 0


@pytest.fixture(scope="module")
def told() -> longctx.Prediction:
    """What is predicted for the tiny model in 4 MiB."""
    return longctx.predicted(4 * MIB, CPU, num_layers=None, is_small=True)


def test_a_step_of_the_predicted_length_stays_within_the_cap(told: longctx.Prediction) -> None:
    assert told.length
    entries = told.plan.stacks[0].layers
    # All that the library can do is in the plan.
    assert [entry.offload is not None for entry in entries] == [True, True, False]
    assert {entry.tiles for entry in entries} == {"auto"}
    # In the first step there is no optimizer's state yet, which here is as large as a layer's input: without it a step
    # that keeps one input too many on the device looks right.
    trial = longctx.Trial(told.length, told.cap_bytes, told.plan.to_json(), num_steps=2, is_small=True)
    found = longctx.train(trial, "cpu")
    assert found["peak_bytes"] <= told.cap_bytes
    assert found["peak_bytes"] == pytest.approx(told.peak_bytes, rel=1e-4)
    # The embeddings' output, which is the first layer's input, has left the device too.
    assert found["host_bytes"] == told.host_bytes


def test_optimizer_has_no_memory_that_the_driver_moves() -> None:
    # Managed memory beside a cap of the allocator can stop a card for good.
    for is_small in (False, True):
        assert longctx._recipe(is_small=is_small).training["optim"] == "adamw_8bit"


def test_prediction_comes_back_from_json(told: longctx.Prediction) -> None:
    assert longctx.Prediction.from_json(json.loads(json.dumps(told.as_json()))) == told


def test_result_is_gone_on_with(told: longctx.Prediction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = told.length + 2 * LENGTH_MULTIPLE
    tried: list[int] = []

    def train(trial: longctx.Trial, device: str) -> Entry:
        tried.append(trial.length)
        return {"peak_bytes": 4 * MIB + trial.length - limit}

    monkeypatch.setattr(longctx, "predicted", lambda *given, **options: told)
    monkeypatch.setattr(longctx, "train", train)
    path = tmp_path / "longctx_small_limit_0.00390625gib_cpu.json"
    words = ["--device", "cpu", "--small", "--cap", str(4 / 1024), "--out", str(tmp_path)]
    runner.main("benchmarks.longctx", [*words, "--seconds", "0"])
    assert json.loads(path.read_text())["trials"] == []
    assert list(tmp_path.iterdir()) == [path]
    runner.main("benchmarks.longctx", words)
    result = json.loads(path.read_text())
    assert result["longest"] == limit
    assert len(set(tried)) == len(tried) == len(result["trials"])
    assert list(tmp_path.iterdir()) == [path]


SMALL = longctx.Options(device="cpu", is_small=True, cap_gib=4 / 1024)


def predicted(told: longctx.Prediction) -> FileJournal:
    """Return a journal that has the prediction."""
    journal = FileJournal()
    journal.entry(SMALL.key("predicted"), told.as_json)
    return journal


def test_search_stops_on_what_is_no_lack_of_memory(told: longctx.Prediction, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(trial: longctx.Trial, device: str) -> Entry:
        raise RuntimeError("a kernel of this length is missing")

    monkeypatch.setattr(longctx, "train", train)
    journal = predicted(told)
    longctx.collect(journal, SMALL)
    assert list(journal.entries) == [SMALL.key("predicted"), SMALL.key(told.length)]
    result = longctx.assemble(journal, SMALL)
    assert result["stopped_by"] == f"{told.length} tokens: failed: RuntimeError: a kernel of this length is missing"
    assert "longest" not in result


def test_lack_of_memory_is_a_length_that_does_not_fit(
    told: longctx.Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(trial: longctx.Trial, device: str) -> Entry:
        if trial.length > told.length - 3 * LENGTH_MULTIPLE:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return {"peak_bytes": told.cap_bytes}

    monkeypatch.setattr(longctx, "train", train)
    journal = predicted(told)
    longctx.collect(journal, SMALL)
    read = ReadJournal(json.loads(json.dumps(journal.entries)))
    longctx.collect(read, SMALL)
    result = longctx.assemble(read, SMALL)
    assert result["longest"] == told.length - 3 * LENGTH_MULTIPLE
    assert "CUDA out of memory. Tried to allocate 2.00 GiB" in [one.get("out_of_memory") for one in result["trials"]]


def test_trial_that_takes_too_long_is_not_kept(told: longctx.Prediction, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(trial: longctx.Trial, device: str) -> Entry:
        raise OutOfTimeError("it takes longer than the 3 s that are left")

    monkeypatch.setattr(longctx, "train", train)
    journal = predicted(told)
    with pytest.raises(OutOfTimeError):
        longctx.collect(journal, SMALL)
    assert list(journal.entries) == [SMALL.key("predicted")]


def test_trial_of_a_process_of_its_own_is_ended_in_time(told: longctx.Prediction) -> None:
    trial = longctx.Trial(told.length, told.cap_bytes, told.plan.to_json(), is_small=True)
    with pytest.raises(OutOfTimeError, match="take longer than the 0 s that are left"):
        longctx.in_a_process(trial, "cpu", 0.01)


def test_trial_in_a_process_of_its_own_is_the_same(told: longctx.Prediction) -> None:
    trial = longctx.Trial(told.length, told.cap_bytes, told.plan.to_json(), is_small=True)
    found = longctx.in_a_process(trial, "cpu", 240.0)
    assert found["peak_bytes"] == longctx.train(trial, "cpu")["peak_bytes"]


def test_speed_has_plans_beside_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longctx, "train", lambda trial, device: {"seconds": [2.0, 4.0, 3.0]})
    options = replace(SMALL, part="speed", lengths=(256,))
    journal = FileJournal()
    longctx.collect(journal, options)
    assert [key.rpartition("gib/")[2] for key in journal.entries] == ["planned_256", "256/hf_ckpt", "256/transformers"]
    ours, theirs = longctx.assemble(ReadJournal(journal.entries), options)["trials"]
    assert (ours["name"], theirs["name"]) == ("hf_ckpt", "transformers")
    assert ours["tokens_per_sec"] == 256 / 3
    assert ours["predicted_peak_bytes"] <= SMALL.cap_bytes
    assert "plan" not in theirs
