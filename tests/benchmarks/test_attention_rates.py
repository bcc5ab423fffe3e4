"""Shares of attention: those of the package are those that were fitted, and published steps are in two halves."""

from __future__ import annotations

import json

import pytest

from benchmarks import attention_rates
from benchmarks.runner import RESULTS
from hf_ckpt.simulation.attention_rates import kernel_named, share_of_rate
from hf_ckpt.simulation.devices import find_device

RESULT = json.loads((RESULTS / "attention_rates.json").read_text(encoding="utf-8"))


def test_shares_are_the_fitted_ones() -> None:
    shares = RESULT["fitted"]["shares"]
    assert set(shares) == {" ".join(key) for key in attention_rates._OF_KERNELS}
    for name, share in shares.items():
        card, attention = name.split()
        kernel = kernel_named(attention)
        assert kernel is not None
        assert share_of_rate(find_device(card).capability, kernel) == share


def test_half_of_the_steps_was_not_fitted_and_long_ones_agree_within_a_tenth() -> None:
    rows = attention_rates.rows()
    assert [row["file"] for row in rows] == [step["file"] for step in RESULT["steps"]]
    assert RESULT["halves"]["fitted"]["points"] + RESULT["halves"]["test"]["points"] == len(rows) == 21
    long = RESULT["halves"]["test, 65,536 tokens"]
    assert long["points"] >= 5
    assert long["mean_error"] < 0.10
    signs = {step["ratio"] > 1 for step in RESULT["steps"] if step["tokens"] == 65536 and not step["is_fitted"]}
    assert signs == {True, False}
    assert attention_rates.groups(RESULT["steps"]) == RESULT["groups"]
    assert sum(group["num_points"] for group in RESULT["groups"]) == len(rows)


def test_constants_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_rates, "parts", lambda *names: (2.0, 4.0, 1.0))
    rows = [
        {
            "gpu": gpu,
            "attention": attention,
            "kind": kind,
            "model": "m",
            "lora_rank": "",
            "tokens": 1,
            "is_fitted": True,
        }
        | {"seconds": 2.0 + 0.25 * 4.0 + 1.0 / share + (1.0 if kind == "rl" else 0.0)}
        for gpu, attention, share in (("h100", "flash_attention_3", 0.5), ("b200", "flash_attention_2", 0.15))
        for kind in ("rl", "sft")
    ]
    found = attention_rates.fitted(rows)
    assert found["idle_seconds"] == pytest.approx(1.0)
    for row in rows:
        share = found["shares"][f"{row['gpu']} {row['attention']}"]
        assert attention_rates.predicted(
            row, found["part_of_other_operators"], found["idle_seconds"], share
        ) == pytest.approx(row["seconds"], rel=0.01)
