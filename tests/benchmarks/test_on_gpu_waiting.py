"""The stage of the GPU programme about frozen weights on the host, small, on the CPU."""

from __future__ import annotations

import pytest

from benchmarks.journal import FileJournal
from benchmarks.on_gpu import waiting
from benchmarks.on_gpu.setting import Setting
from benchmarks.on_gpu.stages import STAGES

SMALL = Setting(device="cpu", is_small=True)


@pytest.mark.sweep
def test_late_copies_change_nothing_and_the_control_is_seen() -> None:
    journal = FileJournal()
    waiting.collect(journal, SMALL)
    ((name, result),) = waiting.assemble(journal, SMALL)
    assert name == "waiting_weights_cpu.json"
    exact = {part: found["num_changed"] for part, found in result["exact"].items()}
    assert exact.pop(waiting.CONTROL) > 0
    assert exact == dict.fromkeys(("not_repeatable", *waiting.MODES, "with_embedding"), 0)
    assert all(found["num_fetched"] > 0 for part, found in result["exact"].items() if part != "not_repeatable")
    (length,) = result["lengths"]
    found, predicted = length["contenders"], length["predicted"]
    assert len({loss for way in waiting.WAYS for loss in found[way]["losses"]}) == 1
    assert {way: found[way]["host_bytes"] for way in waiting.WAYS} == {
        way: predicted[way]["host_bytes"] for way in waiting.WAYS
    }
    peaks = [predicted[way]["peak_bytes"] for way in ("plain", "waiting", "with_embedding")]
    assert sorted(peaks, reverse=True) == peaks
    assert length["step_time_ratio"] > 0


def test_the_stage_fits_into_forty_seconds() -> None:
    (stage,) = (stage for stage in STAGES if stage.name == "waiting_weights")
    assert stage.share_s is not None
    assert stage.share_s <= 40


def test_at_full_size_it_is_eight_layers_of_8b() -> None:
    case = waiting.case_of(2048, Setting(device="cuda", is_small=False))
    config = case.config
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (4096, 14336, 8)
    assert (case.dtype, case.method, case.tokens) == ("bfloat16", "lora", 2048)
