"""The table of devices, how they are found, and what is kept free on them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_ckpt.errors import PolicyError
from hf_ckpt.simulation import devices
from hf_ckpt.simulation.devices import (
    CPU,
    DEVICES,
    GIB,
    MIB,
    Device,
    _own_workspace,
    find_device,
    this_device,
    workspace_bytes,
)

CARDS = [device for device in DEVICES.values() if device.is_cuda]
# Without what was measured of some.
DATA_SHEETS = devices._TABLE


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_every_device_is_whole(device: Device) -> None:
    assert set(device.matmul_flops) == {"bfloat16", "float16", "float32"}
    assert device.memory_bytes > 0
    assert device.memory_bandwidth > 0
    assert device.host_link > 0
    assert device.source
    assert find_device(device.name) is device
    assert find_device(device.title) is device


@pytest.mark.parametrize("device", DATA_SHEETS, ids=[device.name for device in DATA_SHEETS])
def test_rates_of_a_card_are_of_dense_products_with_float32_accumulation(device: Device) -> None:
    tensor, plain = device.matmul_flops["float16"], device.matmul_flops["float32"]
    # GeForce: 2 x float32; others 4 to 8 x, Hopper 15 x, A100 16 x, B200 30 x. With sparsity GeForce would have 4 x.
    is_geforce = device.title.startswith("GeForce")
    assert 1.98 <= tensor / plain <= 2.02 if is_geforce else 2.2 <= tensor / plain <= 30
    if device.capability < (8, 0):
        assert device.matmul_flops["bfloat16"] == plain
    else:
        assert device.matmul_flops["bfloat16"] == tensor
    assert device.rank_link >= device.host_link


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti16gb"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("A100_80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("h100-80gb", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("CPU", "cpu"),
        ("NVIDIA GeForce RTX 5060 Ti", "rtx5060ti"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "rtx5090laptop"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("NVIDIA GB10", "gb10"),
        ("DGX Spark", "gb10"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_device_is_found_by_the_names_it_goes_by(written: str, name: str) -> None:
    assert find_device(written).name == name


@pytest.mark.parametrize(
    ("written", "nearest"),
    [("rtx4900", "rtx4090"), ("H300", "h200"), ("a100-8gb", "a100-80gb"), ("toaster", "")],
)
def test_unknown_device_is_refused_with_the_list(written: str, nearest: str) -> None:
    with pytest.raises(PolicyError) as raised:
        find_device(written)
    message = str(raised.value)
    assert message.startswith(f'Unknown device "{written}". Devices are cpu, rtx3060, rtx3090, ')
    assert "hf-ckpt devices lists them" in message
    assert message.endswith(f'Did you mean "{nearest}"?' if nearest else "can be named too.")


def test_name_of_several_cards_asks_which() -> None:
    with pytest.raises(PolicyError, match=r'^"A100" is 2 cards\. Write a100-40gb or a100-80gb\.$'):
        find_device("A100")


@pytest.mark.parametrize("name", ["t4", "v100-16gb", "v100-32gb"])
def test_card_without_matrix_units_for_bfloat16_says_so(name: str) -> None:
    card = find_device(name)
    assert card.is_slow_in_bfloat16
    assert card.remarks("float16") == []
    (remark,) = card.remarks("bfloat16")
    assert remark.startswith("it has no matrix units for bfloat16: float16 products are up to ")
    assert f"hf-ckpt init --device {name}" in remark
    assert not find_device("a100-40gb").is_slow_in_bfloat16


def test_memory_is_what_cuda_reports_and_not_the_size_on_the_box() -> None:
    shares = {device.name: device.memory_bytes / GIB for device in CARDS}
    assert {name: shares[name] for name in ("rtx4090", "t4", "a100-80gb", "h200")} == pytest.approx(
        {"rtx4090": 23.6, "t4": 14.5, "a100-80gb": 79.1, "h200": 139.7}, abs=1e-6
    )


def test_cpu_has_the_memory_of_the_host() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    assert CPU.memory_bytes == next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    assert not CPU.is_cuda


# --- The machine's own device. ---


def properties(name: str, **fields: object) -> SimpleNamespace:
    given = {"total_memory": 25_294_995_456, "major": 8, "minor": 9, "multi_processor_count": 128}
    return SimpleNamespace(name=name, **given | fields)


def on_cuda(monkeypatch: pytest.MonkeyPatch, found: SimpleNamespace) -> Device:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: found)
    monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 3 * MIB, raising=False)
    return this_device()


@pytest.mark.parametrize(("choice", "prefers"), [(1, False), (3, True)])
def test_own_card_is_asked_which_attention_it_runs(choice: int, prefers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **options: (device, shape))
    monkeypatch.setattr(
        "hf_ckpt.upstream.torch.fused_sdp_choice", lambda *given, **options: (asked.append(given), choice)[1]
    )
    ada = on_cuda(monkeypatch, properties("NVIDIA GeForce RTX 4090"))
    assert (ada.prefers_cudnn, ada.tries_cudnn_first, ada.describe_attention(), asked) == (None, False, None, [])
    hopper = on_cuda(monkeypatch, properties("NVIDIA H200", major=9, minor=0))
    assert (hopper.prefers_cudnn, hopper.tries_cudnn_first) == (prefers, prefers)
    assert asked == [(("cuda", (1, 1, 128, 128)),) * 3]
    first = "cuDNN" if prefers else "FlashAttention-2"
    assert hopper.describe_attention() == f"sdpa tries {first} first (as torch chooses here)"


def test_own_card_is_asked_for_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_cuda(monkeypatch, properties("NVIDIA GeForce RTX 4090"))
    assert workspace_bytes(found) == found.cublas_workspace == 3 * MIB


@pytest.mark.parametrize(
    ("capability", "config", "expected"),
    [
        ((9, 0), None, 32 * MIB),
        ((10, 0), None, 8 * MIB + 128 * 1024),
        ((8, 0), None, 8 * MIB + 128 * 1024),
        ((9, 0), ":4096:8", 32 * MIB),
        ((8, 0), ":4096:2:16:8", 8 * MIB + 128 * 1024),
        ((8, 0), ":16:8", 128 * 1024),
        ((8, 0), "nonsense", 8 * MIB + 128 * 1024),
    ],
)
def test_workspaces_of_a_torch_that_does_not_tell_are_read_as_it_reads_them(
    capability: tuple[int, int], config: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.backends.cuda, "cublas_workspace_size", raising=False)
    if config is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert _own_workspace(capability) == expected


def test_what_is_assumed_of_a_card_that_is_not_here_is_said() -> None:
    assert find_device("h100").tries_cudnn_first
    assert find_device("h100").describe_attention() == (
        "sdpa tries cuDNN first (assumed: torch 2.11 or later with a cuDNN above 9.15, and no "
        "TORCH_CUDNN_SDPA_DEPRIORITIZED)"
    )
    assert not find_device("rtx5090").tries_cudnn_first
    assert find_device("a100-80gb").describe_attention() is None


def test_own_device_without_cuda_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert this_device() is CPU


def test_own_card_has_the_rates_of_the_table_and_the_memory_that_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_cuda(monkeypatch, properties("NVIDIA GeForce RTX 4090"))
    assert (found.name, found.memory_bytes) == ("rtx4090", 25_294_995_456)
    assert found.matmul_flops == find_device("rtx4090").matmul_flops


@pytest.mark.parametrize(
    ("name", "fields", "tflops"),
    [
        # The table's own cards, so that what is derived can be compared: boost clocks in kHz.
        ("rtx4090", {"clock_rate": 2_520_000, "memory_clock_rate": 10_501_000, "memory_bus_width": 384}, 165.2),
        (
            "h200",
            {"major": 9, "minor": 0, "multi_processor_count": 132, "clock_rate": 1_830_000}
            | {"memory_clock_rate": 3_201_000, "memory_bus_width": 6144},
            989,
        ),
        (
            "a100-80gb",
            {"major": 8, "minor": 0, "multi_processor_count": 108, "clock_rate": 1_410_000}
            | {"memory_clock_rate": 1_593_000, "memory_bus_width": 5120},
            312,
        ),
    ],
)
def test_card_that_is_not_in_the_table_is_derived_from_its_clocks(
    name: str, fields: dict[str, object], tflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_ckpt.simulation.devices._prefers_cudnn", lambda: True)
    found = on_cuda(monkeypatch, properties("NVIDIA Prototype 1", **fields))
    known = find_device(name)
    assert found.name == "prototype1"
    assert found.matmul_flops["bfloat16"] == pytest.approx(1e12 * tflops, rel=0.01)
    assert found.matmul_flops["float32"] == pytest.approx(known.matmul_flops["float32"], rel=0.09)
    assert found.memory_bandwidth == pytest.approx(known.memory_bandwidth, rel=0.03)
    assert found.source.startswith("not in the table")


def test_a_slower_host_is_slower_in_all_that_it_does() -> None:
    device = find_device("h200")
    slower = device.beside_host(3 * device.launch_seconds, 5 * device.backward_launch_seconds)
    assert slower.launch_seconds == 3 * device.launch_seconds
    assert slower.backward_launch_seconds == 5 * device.backward_launch_seconds
    assert slower.selective_seconds == pytest.approx(3 * device.selective_seconds)
    assert slower.unit_seconds == pytest.approx(3 * device.unit_seconds)
    assert slower.matmul_flops == device.matmul_flops
