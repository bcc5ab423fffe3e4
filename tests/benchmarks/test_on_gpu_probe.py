"""What a GPU run probes, on the CPU with tiny sizes; and how the table of devices takes what a probe measured."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.journal import NO_FIGURES, FileJournal
from benchmarks.on_gpu import constants, host_probe, probe, sdpa_probe
from benchmarks.on_gpu.setting import Setting
from benchmarks.predict import device_of, fields_of
from hf_ckpt.measure.calibrate import rows_of_run
from hf_ckpt.simulation import devices
from hf_ckpt.simulation.devices import (
    CPU,
    DEVICES,
    MEASURED,
    RATES,
    Device,
    find_device,
    measured_devices,
    with_measured,
)
from hf_ckpt.simulation.simulator import StepSimulator

pytestmark = pytest.mark.sweep

GIB = 2**30
H200 = devices.find_device("h200")
IS_CPU_ALONE = not torch.cuda.is_available()

# --- The stage, small, on the CPU. ---


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    journal = FileJournal(None)
    scratch = tmp_path_factory.mktemp("scratch")
    probe.collect(journal, Setting(device="cpu", is_small=True, scratch=scratch))
    return journal.entries


@pytest.mark.sweep
def test_every_fact_is_an_entry_with_figures_or_a_reason(entries: dict[str, dict[str, Any]]) -> None:
    names = {key.partition("/")[0] for key in entries}
    assert names == set("device calibrate sdpa products link host_time pinning host_memory".split())
    assert [key for key in entries if key.startswith("calibrate/")] == [f"calibrate/{n}" for n in (1, 2, 3, 4, 5)]
    assert {key.removeprefix("sdpa/") for key in entries if key.startswith("sdpa/")} == set(sdpa_probe.CASES)
    failed = {key for key, entry in entries.items() if any(reason in entry for reason in NO_FIGURES)}
    is_there = importlib.util.find_spec("benchmarks.host_time") is not None
    assert failed == (set() if is_there else {"host_time/lora"})


@pytest.mark.sweep
def test_what_only_a_gpu_has_is_left_out_with_the_reason(entries: dict[str, dict[str, Any]]) -> None:
    left_out = ("properties", "driver", "context", "workspaces", "bytes_outside_the_allocator")
    assert all(entries["device"][name]["skipped"] for name in left_out)
    assert entries["pinning"]["skipped"]
    assert entries["sdpa/causal_128"]["kernels"]["skipped"]


def test_calibrations_come_back_as_devices(entries: dict[str, dict[str, Any]]) -> None:
    found = [device_of(entries[f"calibrate/{number}"]["device"]) for number in range(1, 6)]
    assert {device.name for device in found} == {"cpu"}
    assert all(device.matmul_efficiency == 1.0 for device in found)
    assert device_of(entries["device"]["table_device"]) == CPU


def test_attention_is_told_by_the_operator_that_ran(entries: dict[str, dict[str, Any]]) -> None:
    found = entries["sdpa/causal_128"]
    assert found["forward"] == ["aten._scaled_dot_product_flash_attention_for_cpu.default"]
    assert "aten._scaled_dot_product_flash_attention_for_cpu_backward.default" in found["backward"]
    assert found["forward_repeats"]
    assert found["backward_repeats"]
    assert len(found["forward_s"]) == len(found["step_s"]) == 5
    # Queries, keys, values and the output in two bytes; a float32 number for each row of each head.
    assert found["saved_bytes"] == 4 * (4 * 64 * 128) * 2 + 4 * 64 * 4
    assert sum(tensor["is_input"] for tensor in found["saved"]) == 3


def test_attention_with_dropout_falls_apart_on_the_cpu(entries: dict[str, dict[str, Any]]) -> None:
    found = entries["sdpa/dropout"]
    assert "aten.bernoulli_.float" in found["forward"]
    assert not any("scaled_dot_product" in name for name in found["forward"])
    # Each run draws the same numbers.
    assert found["forward_repeats"]


def test_grouped_heads_are_repeated_only_where_that_is_asked_for(entries: dict[str, dict[str, Any]]) -> None:
    repeated, enabled = entries["sdpa/grouped_repeat_kv"], entries["sdpa/grouped_enable_gqa"]
    assert "aten.expand.default" in repeated["forward"]
    assert repeated["case"]["num_heads"] == 4
    assert repeated["case"]["num_kv_heads"] == enabled["case"]["num_kv_heads"] == 2


def test_a_case_that_does_not_repeat_itself_is_found_out() -> None:
    draws = iter(range(100))
    assert not sdpa_probe._repeats(lambda: (torch.tensor(next(draws)),))
    assert sdpa_probe._repeats(lambda: (torch.tensor(1),))


def test_deterministic_algorithms_are_asked_for_in_their_cases_only() -> None:
    seen: list[bool] = []
    with sdpa_probe._deterministic(True):
        seen.append(torch.are_deterministic_algorithms_enabled())
    assert [*seen, torch.are_deterministic_algorithms_enabled()] == [True, False]


def test_products_and_links_keep_every_repetition(entries: dict[str, dict[str, Any]]) -> None:
    found = entries["products/2048"]
    assert {name: set(rows) for name, rows in found.items() if name != "took_s"} == {
        name: {"forward", "input_gradient", "weight_gradient"} for name in ("attention", "gate_up", "down")
    }
    assert len(found["down"]["weight_gradient"]) == 5
    assert len(entries["link/both"]["rates"][str(2**20)]) == 5
    assert min(entries["link/both"]["rates"][str(2**20)]) > 0


def test_rows_add_up_to_what_was_asked_for() -> None:
    times: list[None] = []
    rows = rows_of_run(lambda: times.append(None), 0.0, torch.device("cpu"))
    assert len(rows) == 5
    # One to begin with, one that warms up, one in each row.
    assert len(times) == 7


def test_variables_are_told_and_paths_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("TORCH_HOME", "/home/somebody")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    found = probe._variables()
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert found["TORCH_HOME"] == "(a path)"
    assert "SECRET_TOKEN" not in found


# --- What is asked of the driver. ---


def answering(text: str, code: int = 0) -> Callable[..., Any]:
    return lambda *given, **options: SimpleNamespace(stdout=text, stderr="", returncode=code)


def test_driver_is_asked_for_the_first_card(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ", ".join(f"answer {number}" for number in range(len(probe._ASKED)))
    monkeypatch.setattr(subprocess, "run", answering(f"{line}\nanother card\n"))
    found = probe._driver()
    assert list(found) == list(probe._ASKED)
    assert found["driver_version"] == "answer 1"


def test_driver_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", answering('Field "x" is not a valid field\n', code=2))
    assert probe._driver() == {"failed": 'Field "x" is not a valid field'}


@pytest.mark.skipif(not IS_CPU_ALONE, reason="makes a context here")
def test_context_that_cannot_be_made_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    assert probe._context()["failed"].startswith("no second context: CUDA's error ")


class Pinned:
    made: list[int] = []  # noqa: RUF012

    def __init__(self, num_bytes: int) -> None:
        self.made.append(num_bytes)

    def free(self) -> None:
        self.made.append(-1)


def refused(num_bytes: int) -> Any:
    raise RuntimeError("CUDA error: out of memory")


def test_pinning_tells_each_repetition_and_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Pinned.made.clear()
    monkeypatch.setattr(probe, "PinnedPages", Pinned)
    monkeypatch.setattr(probe, "PinnedByTorch", refused)
    monkeypatch.setattr(probe, "_empty_host_cache", lambda: None)
    monkeypatch.setattr(probe.host_memory, "available_bytes", lambda: 2 * GIB)
    rows = probe.pinning(torch.device("cuda"), is_small=False)["rows"]
    assert [(row["way"], row["bytes"] // 2**20) for row in rows if "pin_s" in row] == 3 * [("pages", 64)] + 3 * [
        ("pages", 256)
    ]
    assert {row["failed"] for row in rows if row.get("way") == "torch"} == {"CUDA error: out of memory"}
    # A quarter of 2 GiB is less than 1 GiB.
    assert [row["bytes"] for row in rows if "skipped" in row] == [GIB]
    assert Pinned.made == 3 * [64 * 2**20, -1] + 3 * [256 * 2**20, -1]


# --- Host memory. ---


def steps_of(lefts: Iterator[int | None], **options: Any) -> tuple[int, str]:
    """Return how many steps were made, and why they stopped."""
    given: dict[str, Any] = {"take": lambda num_bytes: None, "clock": lambda: 0.0} | options
    rows = list(host_probe.touched(1, 60.0, left=lambda: next(lefts), **given))
    assert [row for row in rows if "stopped" in row] == rows[-1:]
    return len(rows) - 1, rows[-1]["stopped"]


def falling(left: int, *, per_look: float = 0.5) -> Iterator[int]:
    """Yield what is left where each step takes 1 of it; there are two looks to a step."""
    looks = 0
    while True:
        yield int(left - looks * per_look + 0.5)
        looks += 1


def test_at_most_half_of_what_is_there_is_touched() -> None:
    assert steps_of(falling(20)) == (10, "half")
    assert steps_of(falling(1)) == (0, "half")


def test_memory_that_grows_when_touched_is_followed() -> None:
    # What is left stays the same however much is taken, up to a point.
    assert steps_of(falling(20, per_look=0.0)) == (19, "half")


def test_nothing_is_touched_where_nobody_says_what_is_free() -> None:
    assert steps_of(iter([None])) == (0, "what is free is not known")


def test_touching_stops_where_it_becomes_slow() -> None:
    # Two looks at the clock for each step behind one at the start and one for the time that is over.
    took = iter([0.1, 0.1, 0.1, 0.2, 0.6, 0.1])
    now = [0.0]

    def take(num_bytes: int) -> None:
        now[0] += next(took)

    assert steps_of(falling(100), take=take, clock=lambda: now[0]) == (5, "slow")


def test_touching_stops_when_time_is_over_and_when_memory_is_refused() -> None:
    now = iter(range(0, 10_000, 10))
    # A step looks at the clock three times: 30 seconds by this one.
    assert steps_of(falling(100), clock=lambda: float(next(now))) == (2, "time")

    def take(num_bytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    assert steps_of(falling(100), take=take) == (0, "failed: OSError: [Errno 12] Cannot allocate memory")


def test_a_process_of_its_own_touches_and_tells() -> None:
    found = host_probe.measure(2**20, 5.0, most_steps=3)
    assert found["stopped"] == "steps"
    assert found["touched_bytes"] == 3 * 2**20
    assert all(row["seconds"] > 0 and row["total"] for row in found["steps"])
    assert found["before"]["MemTotal"] == found["after"]["MemTotal"] > 0


def test_a_process_that_is_killed_leaves_what_it_told(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, signal; print('{\"seconds\": 1.0}'); print('{\"seconds\": ', end='', flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda words, **options: start([sys.executable, "-c", script], **options))
    found = host_probe.measure(GIB, 5.0)
    assert found["steps"] == [{"seconds": 1.0}]
    assert found["touched_bytes"] == GIB
    assert found["stopped"] == f"its process ended with {-signal.SIGKILL}"


def test_a_step_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import time; print('{\"seconds\": 1.0}', flush=True); time.sleep(60)"
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda words, **options: start([sys.executable, "-c", script], **options))
    monkeypatch.setattr(host_probe, "_GRACE_S", 0.5)
    found = host_probe.measure(GIB, 0.0)
    assert (found["steps"], found["stopped"]) == ([{"seconds": 1.0}], "a step hung")


# --- What was measured of a card. ---

SOURCE = "on_gpu_h200.json"


def measured(number: int, *, device: Device = H200, spreads: dict[str, float] | None = None) -> Device:
    """Return what the nth calibration found: rates of 0.7 of the data sheet, some of which vary by a share."""
    vary = {name: 1 + share * number / 5 for name, share in (spreads or {}).items()}
    return replace(
        device,
        matmul_flops={
            dtype: 0.7 * rate * vary.get(dtype, 1.0) for dtype, rate in find_device("h200").matmul_flops.items()
        },
        memory_bandwidth=0.9 * H200.memory_bandwidth * vary.get("memory", 1.0),
        host_link=40e9,
        matmul_efficiency=1.0,
        bandwidth_efficiency=1.0,
        link_efficiency=1.0,
        attention_efficiency=0.5 * vary.get("attention", 1.0),
        launch_seconds=5e-6,
        backward_launch_seconds=3e-6,
        kernel_seconds=2e-6 * vary.get("kernel", 1.0),
    )


def probed(spreads: dict[str, float] | None = None, count: int = 5, device: Device = H200) -> dict[str, Any]:
    """Return made-up entries of a probe."""
    found: dict[str, Any] = {"device": {"table_device": fields_of(device)}}
    for number in range(count):
        fields = fields_of(measured(number, device=device, spreads=spreads))
        found[f"calibrate/{number + 1}"] = {"seconds": 3.0, "device": fields, "took_s": 4.0}
    found["link/out"] = {"way": "out", "rates": {str(2**28): [50e9, 51e9, 50e9, 50e9, 50e9], "1048576": [1e9] * 5}}
    found["sdpa/causal_128"] = {"forward": ["aten._scaled_dot_product_cudnn_attention.default"]}
    found["link/in"] = {"failed": "RuntimeError: something"}
    found["pinning"] = {
        "rows": [
            {"way": "pages", "bytes": GIB, "pin_s": 0.1, "free_s": 0.1},
            {"way": "torch", "bytes": GIB, "failed": "no"},
        ]
    }
    loaded: dict[str, Any] = json.loads(json.dumps(found))
    return loaded


def attention_in_force(device: Device) -> float:
    return constants._reached(device)["attention_flops"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "measured_devices.json"
    path.write_text("{}\n")
    return path


def test_rates_are_compared_as_they_are_reached() -> None:
    found = {proposal.field: proposal for proposal in constants.propose(probed())}
    assert set(found) >= set(RATES)
    product = found["matmul_flops.bfloat16"]
    assert (product.old, product.new) == (pytest.approx(0.8 * 989e12), pytest.approx(0.7 * 989e12))
    attention = found["attention_flops"]
    assert attention.old == attention_in_force(H200)
    assert attention.new == pytest.approx(0.5 * 0.7 * 989e12)
    assert found["memory_bandwidth"].old == pytest.approx(0.85 * 4800e9)


def test_lines_say_old_new_spread_and_what_becomes_of_it() -> None:
    found = constants.lines(constants.propose(probed({"memory": 0.1})))
    assert "h200: float32 products: 53.6 TFLOP/s -> 46.9 TFLOP/s, spread 0.0% of 5; can be taken" in found
    assert any(
        line.startswith("h200: memory: 4080.0 GB/s -> ") and line.endswith("not taken: more than 3% apart")
        for line in found
    )
    assert any(
        line.startswith("h200: attention (aten._scaled_dot_product_cudnn_attention.default): ") for line in found
    )
    assert "h200: launch, forward: 10.0 us -> 5.0 us, spread 0.0% of 5; of this machine, never taken" in found
    assert (
        "h200: link, out, 256 MiB a copy: nothing -> 50.0 GB/s, spread 2.0% of 5; of this machine, never taken" in found
    )
    assert any(line.startswith("h200: pinning 1 GiB, pages: nothing -> 10.7 GB/s") for line in found)


def test_accepted_figures_reach_the_table_and_others_stay(file: Path) -> None:
    entries = probed({"memory": 0.1, "float32": 0.1})
    taken = constants.accept(constants.propose(entries), SOURCE, file)
    assert {proposal.field for proposal in taken} == set(RATES) - {"memory_bandwidth", "matmul_flops.float32"}
    table = measured_devices(devices._TABLE, file)
    found, nominal = table["h200"], next(card for card in devices._TABLE if card.name == "h200")
    assert found.matmul_flops["bfloat16"] == nominal.matmul_flops["bfloat16"]
    assert found.matmul_efficiency == pytest.approx(0.7)
    assert found.matmul_flops["float16"] * found.matmul_efficiency == pytest.approx(0.7 * 989e12)
    # Not taken: what the data sheet says, less what is taken off it by rule.
    assert found.matmul_flops["float32"] * found.matmul_efficiency == pytest.approx(0.8 * 67e12)
    assert found.bandwidth_efficiency == nominal.bandwidth_efficiency
    assert attention_in_force(found) == pytest.approx(0.5 * 0.7 * 989e12)
    assert found.kernel_seconds == pytest.approx(2e-6)
    # Facts of the machine.
    assert (found.launch_seconds, found.host_link) == (nominal.launch_seconds, nominal.host_link)
    assert found.source == (
        "NVIDIA H200 data sheet; measured (on_gpu_h200.json): bfloat16 products, float16 products, attention, "
        "a kernel in addition to its work"
    )
    assert {name: card for name, card in table.items() if name != "h200"} == {
        card.name: card for card in devices._TABLE if card.name != "h200"
    }


def test_attention_that_was_not_measured_takes_as_long_as_before(file: Path) -> None:
    constants.accept(constants.propose(probed({"attention": 0.2})), SOURCE, file)
    nominal = next(card for card in devices._TABLE if card.name == "h200")
    found = measured_devices(devices._TABLE, file)["h200"]
    assert found.matmul_efficiency == pytest.approx(0.7)
    assert attention_in_force(found) == attention_in_force(nominal)


def test_accepting_again_replaces_figures_of_this_card_only(file: Path) -> None:
    file.write_text(json.dumps({"a100-80gb": {"measured": {"memory_bandwidth": {"value": 1.8e12, "source": "old"}}}}))
    constants.accept(constants.propose(probed()), "first.json", file)
    constants.accept(constants.propose(probed({"memory": 0.5})), "second.json", file)
    known = json.loads(file.read_text())
    assert known["a100-80gb"] == {"measured": {"memory_bandwidth": {"value": 1.8e12, "source": "old"}}}
    sources = {field: figure["source"] for field, figure in known["h200"]["measured"].items()}
    assert sources == dict.fromkeys(RATES, "second.json") | {"memory_bandwidth": "first.json"}
    assert measured_devices(devices._TABLE, file)["a100-80gb"].bandwidth_efficiency == pytest.approx(1.8 / 2.039)


def test_figures_within_three_percent_are_taken_and_beyond_are_not(file: Path) -> None:
    # The largest of five repetitions is 4/5 of the share above the smallest.
    for share, is_taken in ((0.035, True), (0.045, False)):
        proposals = constants.propose(probed({"kernel": share}))
        (found,) = [proposal for proposal in proposals if proposal.field == "kernel_seconds"]
        assert (not found.why_not) is is_taken
        assert found.spread == pytest.approx(0.8 * share / (1 + 0.4 * share))


def test_four_repetitions_are_not_enough(file: Path) -> None:
    entries = probed() | {"calibrate/3": {"out_of_memory": "no memory", "took_s": 1.0}}
    proposals = constants.propose(entries)
    assert "not taken: 4 of 5 repetitions" in constants.lines(proposals)[0]
    assert constants.accept(proposals, SOURCE, file) == []
    assert file.read_text() == "{}\n"


def test_a_figure_of_zero_has_a_spread() -> None:
    proposals = constants.propose(probed())
    zero = replace(proposals[0], repetitions=(0.0,) * 5)
    assert (zero.spread, zero.why_not) == (0.0, "")
    assert replace(zero, repetitions=(0.0, 0.0, 0.0, 0.0, 1e-6)).spread == float("inf")


def test_a_cpu_and_a_try_with_tiny_sizes_propose_nothing(entries: dict[str, dict[str, Any]]) -> None:
    assert constants.propose(entries) == []
    short = probed()
    for entry in short.values():
        if "seconds" in entry:
            entry["seconds"] = 0.1
    assert constants.propose(short) == []
    assert constants.propose({}) == []


def test_two_cards_are_not_mixed() -> None:
    mixed = probed() | {"calibrate/5": probed(device=DEVICES["h100"])["calibrate/5"]}
    with pytest.raises(ValueError, match=r"of 2 cards: H100 80GB HBM3, H200\. Propose from the results of one"):
        constants.propose(mixed)


def test_a_card_that_is_not_in_the_table_gets_an_entry(file: Path) -> None:
    card = replace(H200, name="prototype1", title="NVIDIA Prototype 1", memory_bytes=5 * GIB, source="its clocks")
    proposals = constants.propose(probed(device=card))
    constants.accept(proposals, SOURCE, file)
    table = measured_devices(devices._TABLE, file)
    found = table["prototype1"]
    assert (found.title, found.memory_bytes, found.capability) == ("NVIDIA Prototype 1", 5 * GIB, (9, 0))
    assert found.matmul_efficiency == pytest.approx(0.7)
    assert found.source.startswith("its clocks; measured (on_gpu_h200.json): ")
    assert len(table) == len(devices._TABLE) + 1
    without = {key: entry for key, entry in probed(device=card).items() if key != "device"}
    with pytest.raises(ValueError, match="NVIDIA Prototype 1 is not in the table of devices"):
        constants.propose(without)


def test_the_file_of_the_package_names_a_source_for_each_figure() -> None:
    known = json.loads(MEASURED.read_text())
    for name, card in known.items():
        assert DEVICES[name].source != ""
        assert set(card["measured"]) <= set(RATES)
        assert all(figure["value"] > 0 and figure["source"] for figure in card["measured"].values())
    assert measured_devices((CPU, *devices._TABLE)) == DEVICES


def test_nothing_measured_changes_nothing() -> None:
    assert with_measured(H200, {}) is H200


# --- What changes with it. ---


@pytest.mark.sweep
def test_predictions_that_change_are_told_with_both_times() -> None:
    slow = with_measured(H200, {"memory_bandwidth": {"value": 1e8, "source": SOURCE}})
    found = constants.changed_predictions(H200, slow, ["tiny_llama_lora.yaml"])
    assert [(one.recipe, one.policy) for one in found] == [
        ("tiny_llama_lora.yaml", None),
        ("tiny_llama_lora.yaml", "full"),
    ]
    assert all(one.new_s > one.old_s > 0 for one in found)


def test_predictions_that_change_by_less_than_is_shown_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = constants.before_and_after(constants.propose(probed()), SOURCE)
    assert (before, after.matmul_efficiency) == (H200, pytest.approx(0.7))
    seconds = {0.8: 1.0, after.matmul_efficiency: 1.0009}

    def simulated(simulator: StepSimulator, policy: object) -> SimpleNamespace:
        return SimpleNamespace(time=SimpleNamespace(total=seconds[simulator.device.matmul_efficiency]))

    monkeypatch.setattr(StepSimulator, "simulate", simulated)
    assert constants.changed_predictions(before, after, ["tiny_llama_lora.yaml"]) == []


def test_results_that_name_a_card_are_told(tmp_path: Path) -> None:
    texts = {"one": [{"device": "h100-80gb"}], "two": {"NVIDIA H200": 1}, "three": {"words": "an H200 is a card"}}
    for name, document in texts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert constants.results_that_predict("h100", tmp_path) == ["one.json"]
    assert constants.results_that_predict("h200", tmp_path) == ["two.json"]


def test_fields_of_a_device_survive_json() -> None:
    assert device_of(json.loads(json.dumps(asdict(H200)))) == H200
