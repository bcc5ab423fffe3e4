"""Systems without `fcntl`, `resource` and `/proc`, such as Windows: what works there, and what is refused."""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_ckpt
from hf_ckpt import HFCkptCallback, PolicyError, UnsupportedError
from hf_ckpt.measure import profile
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from tests.training import changed, llama, losses, trainer, weights

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def _another_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("fcntl", "resource"):
        # So that importing it fails.
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(profile, "_SELF", tmp_path / "no" / "proc")


def test_training_is_exact_and_leaves_out_the_figure_that_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model, callback = llama(), llama(), HFCkptCallback("full")
    expected = trainer(plain, tmp_path / "plain")
    expected.train()
    run = trainer(model, tmp_path / "full", callback)
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        run.train()
    assert losses(run) == losses(expected)
    assert changed(weights(plain), weights(model)) == []
    if not torch.accelerator.is_available():
        assert "ckpt/peak_resident_gib" not in callback.report()
        assert "this system does not tell it (no module resource)" in caplog.text


def test_a_step_is_predicted() -> None:
    memory = simulate_step(llama(), "full", Step(batch_size=2, seq_length=8), CPU)
    assert memory.peak_bytes > 0


def test_offload_to_disk_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as refusal:
        hf_ckpt.apply(llama(), "full", offload={"to": "disk", "path": str(tmp_path)})
    assert str(refusal.value) == (
        "offload to disk was asked for, but this system has no file locks (fcntl). Offload to cpu."
    )


def test_measuring_a_step_on_the_cpu_is_refused_in_one_line() -> None:
    ids = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(UnsupportedError, match=r"^A step on the CPU is measured by the memory of its process, which"):
        profile.profile_step(llama(), {"input_ids": ids, "labels": ids})


def test_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No telemetry: neither importing, nor training, nor predicting opens a connection."""
    asked: list[Any] = []

    def refuse(*address: Any) -> None:
        asked.append(address)
        raise OSError("no network here")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    trainer(llama(), tmp_path, HFCkptCallback("auto", memory_budget="1GiB")).train()
    hf_ckpt.simulate(llama(), plan="full", batch_size=2, seq_length=8)
    assert asked == []
