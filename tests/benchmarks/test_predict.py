"""The benchmark of predictions, run small on the CPU, so that it is known to work where there is a GPU."""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import predict
from benchmarks.cases import (
    CONFIGURATIONS,
    SEGMENTS,
    SHAPES,
    Configuration,
    build_configuration,
    small_configuration,
)
from benchmarks.journal import FileJournal, ReadJournal
from hf_ckpt import HFCkptCallback
from hf_ckpt.simulation.devices import DEVICES
from hf_ckpt.simulation.step_memory import Category

pytestmark = pytest.mark.sweep

OPTIONS = predict.Options(device="cpu", is_small=True, num_warmup=1, num_steps=1, calibration_s=0.05)


def test_configurations_span_what_is_asked_for() -> None:
    assert len(CONFIGURATIONS) >= 12
    parameters = {
        name: sum(
            p.numel() for p in build_configuration(Configuration(name, "full", None, 8), shape, "meta").parameters()
        )
        for name, shape in SHAPES.items()
    }
    billions = dict(zip(SHAPES, (0.60, 1.00, 1.24, 3.21, 6.74, 8.03, 13.02, 6.92), strict=True))
    assert {name: round(count / 1e9, 2) for name, count in parameters.items()} == billions
    policies = {json.dumps(configuration.policy) for configuration in CONFIGURATIONS.values()}
    assert policies >= {"null", '"full"', '"selective"', '"attention"', '"ffn"', json.dumps(SEGMENTS)}
    assert {configuration.method for configuration in CONFIGURATIONS.values()} == {"full", "lora", "qlora"}
    assert {configuration.tokens for configuration in CONFIGURATIONS.values()} == {1024, 2048, 4096, 8192}


@pytest.mark.parametrize("name", ["llama_8b_lora_attention", "llama_8b_qlora_full", "qwen3_0.6b_full_none"])
def test_one_result_has_predicted_beside_measured(name: str) -> None:
    journal = FileJournal()
    predict.collect(journal, [name], OPTIONS)
    assert list(journal.entries) == ["device", f"measured/{name}"]
    # What is there is not measured again.
    predict.collect(ReadJournal(journal.entries), [name], OPTIONS)
    result = predict.with_predictions(predict.assemble(ReadJournal(journal.entries), name, OPTIONS))
    measured, predicted = result["measured"], result["predicted"]
    assert measured["peak_bytes"] > 0
    assert measured["step_time_ms_min"] <= measured["step_time_ms_median"] <= measured["step_time_ms_max"]
    # Random weights: the loss is that of a guess among 512 tokens.
    assert measured["mean_loss"] == pytest.approx(math.log(512), abs=0.2)
    assert sum(predicted["by_category"].values()) == predicted["peak_bytes"]
    assert set(predicted["by_category"]) <= set(Category)
    assert sum(predicted["time_ms"].values()) == pytest.approx(predicted["step_time_ms"])
    assert (predicted["time_ms"]["recomputation"] > 0) == (result["configuration"]["policy"] is not None)
    assert result["predicted_with_calibration"]["peak_bytes"] == predicted["peak_bytes"]
    assert result["predicted_with_calibration"]["source"].startswith("measured with torch")
    assert result["peak_ratio"] == predicted["peak_bytes"] / measured["peak_bytes"]
    prepared = predict.assemble(journal, name, OPTIONS, {"predicted": predicted})
    assert prepared["peak_ratio"] == result["peak_ratio"]
    assert "predicted_with_calibration" not in prepared
    assert "step_time_ratio_with_calibration" not in prepared


def test_one_model_is_gone_when_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[weakref.ref[nn.Module]] = []

    def watched(*given: Any) -> nn.Module:
        assert [model() for model in built] == [None] * len(built)
        model = build_configuration(*given)
        built.append(weakref.ref(model))
        return model

    monkeypatch.setattr(predict, "build_configuration", watched)
    predict.collect(FileJournal(), ["llama_7b_lora_none", "llama_7b_lora_full"], OPTIONS)
    assert len(built) == 2


def test_what_is_measured_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    # The prediction beside it has no proof either.
    given: list[dict[str, Any]] = []

    def watched(policy: object, **options: Any) -> HFCkptCallback:
        given.append(options)
        return HFCkptCallback(policy, **options)

    monkeypatch.setattr(predict, "HFCkptCallback", watched)
    predict.collect(FileJournal(), ["llama_7b_lora_full"], OPTIONS)
    assert [options["prove"] for options in given] == ["off"]


def test_results_are_predicted_anew_without_the_device(tmp_path: Path) -> None:
    path = tmp_path / "predict_one.json"
    device = predict.fields_of(DEVICES["h200"])
    configuration, shape = small_configuration(CONFIGURATIONS["llama_7b_lora_full"])
    result = {"name": "one", "configuration": asdict(configuration), "shape": asdict(shape)}
    result |= {"table_device": device, "calibrated_device": device}
    result["measured"] = {"peak_bytes": 10**6, "step_time_ms_median": 10.0}
    path.write_text(json.dumps(result))
    predict.again(tmp_path)
    anew = json.loads(path.read_text())
    assert anew["measured"] == result["measured"]
    assert anew["predicted"]["device"] == "h200"
    assert anew["peak_ratio"] == anew["predicted"]["peak_bytes"] / 10**6
    assert anew["step_time_ratio"] == anew["predicted"]["step_time_ms"] / 10
    assert anew["predicted_in"]["command"].startswith("python ")


def test_devices_come_back_from_json() -> None:
    for device in DEVICES.values():
        assert predict.device_of(json.loads(json.dumps(predict.fields_of(device)))) == device


def test_step_that_does_not_fit_is_a_result_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(predict, "measure", fail)
    monkeypatch.setattr(predict, "predict", lambda *args: {"peak_bytes": 2**30, "step_time_ms": 5.0})
    journal = FileJournal()
    predict.collect(journal, ["llama_1b_full_none"], OPTIONS)
    result = predict.with_predictions(predict.assemble(journal, "llama_1b_full_none", OPTIONS))
    assert result["measured"] == {"out_of_memory": "CUDA out of memory. Tried to allocate 2.00 GiB."}
    assert "peak_ratio" not in result
    assert predict.line(result).endswith("; CUDA out of memory. Tried to allocate 2.00 GiB.")
