"""The benchmark of the longest context: its searches, and a small run of it on the CPU, capped by a budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import longctx
from benchmarks.longctx_predict import Search
from hf_ckpt.finetune.estimate.limits import LENGTH_UNIT
from hf_ckpt.memory.devices import CPU
from hf_ckpt.memory.largest import Limit

MIB = 2**20


@pytest.mark.parametrize("longest", [30_016, 31_936, 32_000, 32_064, 32_640, 40_000, 2_048])
def test_search_ends_at_the_longest_row_that_trains(longest: int) -> None:
    tried: dict[int, bool] = {}
    while (length := longctx.next_length(tried, 32_000)) is not None:
        assert length not in tried
        assert length % LENGTH_UNIT == 0
        tried[length] = length <= longest
    found = max(length for length, fits in tried.items() if fits)
    assert longest - 320 <= found <= longest
    assert len(tried) <= 30


def test_search_ends_where_nothing_trains() -> None:
    tried: dict[int, bool] = {}
    while (length := longctx.next_length(tried, 32_000)) is not None:
        tried[length] = False
    assert min(tried) == LENGTH_UNIT


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


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
def test_a_step_of_the_predicted_length_stays_within_the_cap(told: longctx.Prediction) -> None:
    assert told.length
    entries = told.plan.stacks[0].layers
    # All that the library can do is in the plan.
    assert [entry.offload is not None for entry in entries] == [True, True, False]
    assert {entry.tiles for entry in entries} == {"auto"}
    found = longctx.train(longctx.Trial(told.length, told.cap_bytes, told.plan.to_json(), is_small=True), "cpu")
    assert found["peak_bytes"] <= told.cap_bytes
    assert found["peak_bytes"] == pytest.approx(told.peak_bytes, rel=0.01)


def test_result_is_gone_on_with(told: longctx.Prediction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longctx, "predicted", lambda *given, **options: told)
    limit = told.length + 2 * LENGTH_UNIT
    monkeypatch.setattr(longctx, "train", lambda trial, device: {"peak_bytes": 4 * MIB + trial.length - limit})
    path = tmp_path / "longctx_small_limit_0.00390625gib_cpu.json"
    words = ["--device", "cpu", "--small", "--cap", str(4 / 1024), "--results", str(tmp_path)]
    longctx.main([*words, "--seconds", "0"])
    assert json.loads(path.read_text())["trials"] == []
    longctx.main(words)
    result = json.loads(path.read_text())
    assert result["longest"] == limit
    tried = len(result["trials"])
    longctx.main(words)
    assert len(json.loads(path.read_text())["trials"]) == tried
