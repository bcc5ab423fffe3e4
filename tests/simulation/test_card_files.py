"""Cards that are named by their memory, or described by a file, and those whose memory is the host's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_ckpt.errors import PolicyError
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.card_files import CARDS
from hf_ckpt.simulation.devices import DEVICES, GIB, find_device, workspace_bytes
from hf_ckpt.simulation.fit import capacity_of
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from tests.training import llama

CARD = {"memory_gib": 23.6, "bfloat16_tflops": 165.2, "float32_tflops": 82.6, "bandwidth_gb_per_s": 1008}


def test_each_further_card_has_a_source_and_is_found() -> None:
    for name, card in json.loads(CARDS.read_text()).items():
        assert len(card["source"]) > 20
        assert find_device(name) is find_device(card["title"]) is DEVICES[name]


@pytest.mark.parametrize(
    ("written", "gib", "capability"),
    [("96GiB", 96, (8, 0)), ("24 gib", 24, (8, 6)), ("24GB", 24e9 / GIB, (8, 6)), ("12.5GiB", 12.5, (8, 6))],
)
def test_amount_is_a_gpu_without_times(written: str, gib: float, capability: tuple[int, int]) -> None:
    device = find_device(written)
    assert device.memory_bytes == pytest.approx(gib * GIB, abs=1)
    assert (device.is_cuda, device.is_timed, device.capability) == (True, False, capability)
    assert device.remarks() == ["its rates are not known: no times, and plans are put in order as on an A100"]


@pytest.mark.parametrize("written", ["apple-64gb", "Apple M4 Max 64GB", "m4-max-64gb", "apple 64 GB"])
def test_apple_chip_has_the_memory_that_is_named_and_no_cuda(written: str) -> None:
    device = find_device(written)
    assert device.memory_bytes == 64 * GIB
    assert (device.is_cuda, device.is_timed, device.shares_host_memory) == (False, False, True)
    assert "it runs no CUDA kernels" in " ".join(device.remarks())


@pytest.mark.parametrize("written", ["0.2GiB", "99999999999GiB"])
def test_amount_that_no_gpu_has_is_refused(written: str) -> None:
    with pytest.raises(PolicyError, match="is no amount that a GPU has"):
        find_device(written)


def test_card_of_a_file_is_that_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "my_card.json"
    path.write_text(json.dumps(CARD | {"capability": "8.9", "multiprocessors": 128}))
    found, known = find_device(str(path)), find_device("rtx4090")
    assert (found.name, found.title, found.source) == ("my_card", "my_card", str(path))
    for field in ("matmul_flops", "memory_bandwidth", "memory_bytes", "host_link", "capability", "num_multiprocessors"):
        assert getattr(found, field) == getattr(known, field)
    path.write_text('{"memory_gib": 23.6}')
    assert not find_device(str(path)).is_timed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds no object"),
        ("{", "is not valid JSON"),
        ('{"title": "x"}', "does not say memory_gib"),
        ('{"memory_gib": -1}', "memory_gib is -1. Write a number above 0."),
        ('{"memory_gib": true}', "memory_gib is true"),
        ('{"memory_gb": 24}', r'has no memory_gb. .* Did you mean "memory_gib"'),
        ('{"memory_gib": 24, "bfloat16_tflops": 100}', "and not float32_tflops, bandwidth_gb_per_s"),
        ('{"memory_gib": 24, "capability": 8.9}', "capability is 8.9"),
    ],
)
def test_mistake_in_a_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(text)
    with pytest.raises(PolicyError, match=message):
        find_device(str(path))


def test_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"nowhere\.json cannot be read: No such file"):
        find_device("nowhere.json")


def test_amd_s_cards_have_the_workspace_and_the_context_of_large_ones() -> None:
    device = find_device("mi300x")
    assert workspace_bytes(device) == 128 * 2**20
    assert capacity_of(device).outside[1] == int(1.8 * GIB)


# --- Memory that is the host's. ---


@pytest.mark.parametrize("name", ["gb10", "apple-16gb"])
def test_offload_gains_nothing_where_the_memory_is_the_host_s(name: str) -> None:
    model, step = llama(hidden_size=512, num_hidden_layers=16), Step(seq_length=2048, optim=None)
    # Gradients of all weights would be the peak.
    model.model.requires_grad_(False).embed_tokens.requires_grad_(True)
    plans = [Policy.parse("full"), Policy.parse("full", offload="cpu")]
    kept, offloaded = (simulate_step(model, plan, step, find_device(name)) for plan in plans)
    assert offloaded.host_bytes > 0
    assert offloaded.peak_bytes >= kept.peak_bytes
    kept, offloaded = (simulate_step(model, plan, step, find_device("rtx5070")) for plan in plans)
    assert kept.peak_bytes - offloaded.peak_bytes > 0.5 * offloaded.host_bytes


def test_paged_state_counts_where_the_memory_is_the_host_s() -> None:
    model = llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=2)
    step = Step(seq_length=16, optim="paged_adamw_32bit")
    shared, own = (simulate_step(model, "full", step, find_device(name)) for name in ("gb10", "rtx5070"))
    assert shared.host_bytes == 0 < own.host_bytes
    assert shared.peak_bytes - own.peak_bytes > 0.9 * own.host_bytes


def test_apple_chip_keeps_the_probabilities_of_attention() -> None:
    model, step = llama(num_hidden_layers=2, attention_dropout=0.0), Step(seq_length=1024)
    model.set_attn_implementation("sdpa")
    fused, plain = (simulate_step(model, None, step, find_device(name)) for name in ("cpu", "apple-16gb"))
    heads = model.config.num_attention_heads
    assert plain.peak_bytes - fused.peak_bytes > 2 * heads * 1024 * 1024 * 4
