"""Steps that really run: which ranges they show, what their figures add up to, and that nothing stays behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hf_ckpt
from hf_ckpt.measure.calibrate import calibrate
from hf_ckpt.measure.profile import LayerFigures, LayerRanges, PhaseFigures, Profile, profile_step
from hf_ckpt.simulation.devices import CPU
from tests import exactness, zoo

MIB = 2**20


def ranges_of(case: zoo.Case, policy: object) -> tuple[list[int], list[int]]:
    """Return the layers in the order of their forwards and of their recomputations."""
    count = iter(range(10_000))
    with (
        hf_ckpt.apply(case.model, policy) as applied,
        LayerRanges(case.model, applied.stacks, stamp=lambda: next(count)) as ranges,
    ):
        exactness.step(case)
    for found in (*ranges.forward, *ranges.recomputation):
        assert found.start < found.end
    return [found.layer_idx for found in ranges.forward], [found.layer_idx for found in ranges.recomputation]


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("none", []),
        ("full", [3, 2, 1, 0]),
        ("attention", [3, 2, 1, 0]),
        ("ffn", [3, 2, 1, 0]),
        ({"mode": "full", "every_n_layers": 2}, [2, 0]),
        ([{"mode": "ffn", "layers": "3:"}, {"mode": "attention", "layers": "0"}], [3, 0]),
        # A segment runs its layers in a row.
        ({"mode": "full", "segment_size": 2}, [2, 3, 0, 1]),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text"])
def test_each_recomputation_is_one_range(model_type: str, policy: object, again: list[int]) -> None:
    case = zoo.build(model_type, num_layers=4)
    assert ranges_of(case, policy) == ([0, 1, 2, 3], again)


def test_watching_leaves_no_trace() -> None:
    case = zoo.build("llama")
    expected = exactness.step(case)
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in case.model.modules()]
    profile = profile_step(case.model, case.inputs, plan="full", num_warmup=0, num_steps=1)
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in case.model.modules()] == hooks
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert exactness.differences(expected, exactness.step(case)) == []
    assert profile.num_steps == 1


def test_phases_add_up_to_the_step() -> None:
    case = zoo.build("llama")
    optimizer = torch.optim.AdamW(case.model.parameters())
    profile = profile_step(case.model, case.inputs, plan="full", optimizer=optimizer, num_warmup=1, num_steps=2)
    assert list(profile.phases) == ["forward", "recomputation", "backward", "optimizer"]
    assert all(phase.seconds > 0 for phase in profile.phases.values())
    assert profile.seconds == sum(phase.seconds for phase in profile.phases.values())
    again = sum(layer.recomputation for layer in profile.layers)
    # Medians over two steps, of the sum and of each layer.
    assert again == pytest.approx(profile.phases["recomputation"].seconds)
    assert sum(layer.forward for layer in profile.layers) < profile.phases["forward"].seconds
    assert profile.is_resident
    assert profile.peak_bytes >= profile.phases["backward"].bytes_after > 100 * MIB


def test_step_without_a_plan_recomputes_nothing_and_one_with_a_plan_is_left_alone() -> None:
    case = zoo.build("llama")
    profile = profile_step(case.model, case.inputs, num_warmup=0, num_steps=1)
    assert profile.phases["recomputation"] == PhaseFigures(0.0, 0, 0)
    assert profile.recomputation_over_forward == 0
    with hf_ckpt.apply(case.model, "full"):
        profile = profile_step(case.model, case.inputs, num_warmup=0, num_steps=1)
    assert profile.phases["recomputation"].seconds > 0


def test_trace_has_one_named_range_per_layer_and_per_recomputation(tmp_path: Path) -> None:
    case = zoo.build("llama")
    path = tmp_path / "deep" / "trace.json"
    profile = profile_step(case.model, case.inputs, plan="full", num_warmup=0, num_steps=1, trace_path=path)
    assert profile.trace_path == str(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation" and " layer " in event["name"]]
    num_layers = len(profile.layers)
    assert names == [
        *(f"hf_ckpt layer {layer_idx}" for layer_idx in range(num_layers)),
        *(f"recompute layer {layer_idx}" for layer_idx in reversed(range(num_layers))),
    ]


def test_ranges_of_several_stacks_carry_their_paths(tmp_path: Path) -> None:
    case = zoo.build("t5")
    path = tmp_path / "trace.json"
    profile_step(case.model, case.inputs, plan="full", num_warmup=0, num_steps=1, trace_path=path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"hf_ckpt encoder.block layer 0", "recompute decoder.block layer 1"} <= names


def test_mixed_precision_is_entered_for_the_forward() -> None:
    case = zoo.build("llama")
    seen: list[torch.dtype] = []

    def note(module: nn.Module, args: object, output: Tensor) -> None:
        seen.append(output.dtype)

    with case.model.model.layers[0].mlp.down_proj.register_forward_hook(note):
        profile_step(case.model, case.inputs, autocast=torch.bfloat16, num_warmup=0, num_steps=1)
    assert seen == [torch.bfloat16]


FIGURES = Profile(
    device="cpu",
    is_resident=False,
    num_steps=5,
    phases={
        "forward": PhaseFigures(0.1, 2048 * MIB, 2050 * MIB),
        "recomputation": PhaseFigures(0.09, 3000 * MIB, 0),
        "backward": PhaseFigures(0.21, 1024 * MIB, 4096 * MIB),
    },
    layers=(LayerFigures("model.layers", 0, 0.05, 0.045),),
    peak_bytes=4096 * MIB,
    trace_path="trace.json",
)


def test_table_shows_time_share_and_memory_after_each_phase() -> None:
    assert FIGURES.table().splitlines() == [
        "                      time   share     allocated after",
        "forward           100.0 ms     25%             2.0 GiB",
        "recomputation      90.0 ms     22%             2.9 GiB",
        "backward          210.0 ms     52%             1.0 GiB",
        "step              400.0 ms    100%        peak 4.0 GiB",
        "backward takes 2.10 x forward, recomputation 0.90 x",
        "trace: trace.json (open it in https://ui.perfetto.dev or chrome://tracing)",
    ]


def test_profile_is_written_as_json_types() -> None:
    figures = json.loads(json.dumps(FIGURES.to_dict()))
    assert figures["seconds"] == pytest.approx(0.4)
    assert figures["recomputation_over_forward"] == pytest.approx(0.9)
    assert figures["phases"]["forward"] == {"seconds": 0.1, "bytes_after": 2048 * MIB, "peak_bytes": 2050 * MIB}
    assert figures["layers"] == [{"stack": "model.layers", "layer_idx": 0, "forward": 0.05, "recomputation": 0.045}]


# --- Calibration. ---


def test_calibration_measures_the_rates_of_this_machine() -> None:
    device = calibrate(seconds=0.2)
    assert device.name == CPU.name
    assert device.memory_bytes == CPU.memory_bytes
    assert device.source.startswith("measured with torch ")
    assert set(device.matmul_flops) == {"bfloat16", "float16", "float32"}
    # Wide bounds, so that no machine that runs tests is outside.
    assert 1e8 < device.matmul_flops["float32"] < 1e14
    assert 1e8 < device.memory_bandwidth < 1e13
    assert 1e-7 < device.launch_seconds < 1e-2
    assert device.matmul_efficiency == device.bandwidth_efficiency == device.link_efficiency == 1.0
    # What the host does besides launches is as much slower or faster as they are.
    factor = device.launch_seconds / CPU.launch_seconds
    assert device.selective_seconds == pytest.approx(factor * CPU.selective_seconds)
    assert device.unit_seconds == pytest.approx(factor * CPU.unit_seconds)
