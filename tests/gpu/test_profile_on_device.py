"""Profiles and calibrations on a device; the same code runs small on the CPU."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest
import torch

from hf_ckpt.measure.calibrate import calibrate
from hf_ckpt.measure.profile import profile_step
from hf_ckpt.simulation.devices import DEVICES, GIB, this_device
from hf_ckpt.simulation.fit import capacity_of
from tests.gpu.test_exact_on_device import DEVICES as PLACES
from tests.gpu.test_exact_on_device import on_device


@pytest.mark.parametrize("device", PLACES)
def test_recomputation_is_timed_and_traced(device: str, tmp_path: Path) -> None:
    case = on_device("llama", device)
    path = tmp_path / "trace.json"
    profile = profile_step(case.model, case.inputs, plan="full", num_warmup=1, num_steps=2, trace_path=path)
    assert all(profile.phases[name].seconds > 0 for name in ("forward", "recomputation", "backward"))
    assert all(layer.forward > 0 and layer.recomputation > 0 for layer in profile.layers)
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation" and " layer " in event["name"]]
    assert sorted(names) == sorted(
        f"{kind} layer {layer.layer_idx}" for kind in ("hf_ckpt", "recompute") for layer in profile.layers
    )


@pytest.mark.gpu
def test_memory_after_forward_is_what_the_policy_keeps() -> None:
    case = on_device("llama", "cuda")
    after = {
        policy: profile_step(case.model, case.inputs, plan=policy, num_warmup=1, num_steps=2).phases["forward"]
        for policy in ("none", "full")
    }
    assert after["full"].bytes_after < after["none"].bytes_after
    assert all(phase.peak_bytes >= phase.bytes_after > 0 for phase in after.values())


@pytest.mark.gpu
@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="others use the device meanwhile; the probe measures it alone"
)
def test_calibration_agrees_with_the_table() -> None:
    known, measured = this_device(), calibrate()
    if known.name not in DEVICES:
        pytest.skip(f"{known.title} is not in the table")
    for dtype in ("bfloat16", "float32"):
        # Power limits, clocks and the size of the products leave a wide range; beyond the peak nothing can be.
        assert 0.4 <= measured.matmul_flops[dtype] / known.matmul_flops[dtype] <= 1.1
    assert 0.7 <= measured.memory_bandwidth / known.memory_bandwidth <= 1.05
    assert 0.3 <= measured.host_link / known.host_link <= 1.05
    assert 1e-6 < measured.launch_seconds < 1e-4
    assert measured.attention_efficiency is not None
    assert 0.1 < measured.attention_efficiency < 1.0


@pytest.mark.parametrize(("worker", "is_skipped"), [("gw0", True), (None, False)])
def test_calibration_skips_itself_beside_others(
    worker: str | None, is_skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker is not None:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    marks = runpy.run_path(__file__)["test_calibration_agrees_with_the_table"].pytestmark
    assert [mark.args for mark in marks if mark.name == "skipif"] == [(is_skipped,)]


@pytest.mark.gpu
def test_what_a_process_takes_beside_its_tensors_is_what_is_kept_for_the_context() -> None:
    torch.ones(1024, 1024, device="cuda") @ torch.ones(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    least, _ = capacity_of(this_device()).outside
    # Other processes may use the device too, so that only the lower bound is certain.
    assert outside >= least - GIB // 16
