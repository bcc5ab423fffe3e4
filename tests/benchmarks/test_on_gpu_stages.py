"""All that is measured on a GPU, run small on the CPU: undisturbed, and with kills in the middle of every stage."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner
from benchmarks.on_gpu import exactness, measurements, prepare, probe, recovery
from benchmarks.on_gpu import prepared as prepared_file
from benchmarks.on_gpu.identity import identity_of
from benchmarks.on_gpu.merge import merge
from benchmarks.on_gpu.results import read
from benchmarks.on_gpu.setting import Setting
from benchmarks.on_gpu.stages import STAGES
from hf_ckpt.policy.plan import Plan
from tests.benchmarks.test_on_gpu import children_of, entries, forked, in_flight, is_alive, run, wait_for

# Imported here, so that no stage has to: each is forked from this process.
assert {exactness, measurements, probe, recovery}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.sweep]

SMALL = Setting(device="cpu", is_small=True)
# Of stages that run the same code one is enough.
KILLED = [
    stage.name
    for stage in STAGES
    if not stage.name.startswith(("side_by_side_", "engine_llama_1b", "speed", "longest_row_80", "bracket_80"))
    or stage.name == "side_by_side_llama2_7b_lora_2048"
]


def full_plan(num_layers: int, path: str) -> dict[str, Any]:
    layers = [{"mode": "full"} for _ in range(num_layers)]
    plan = {"format": 2, "model_class": "PeftModelForCausalLM", "stacks": [{"path": path, "layers": layers}]}
    return json.loads(Plan.from_json(json.dumps(plan)).to_json())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `--prepare` writes, with plans that nobody has to search for."""
    path = tmp_path_factory.mktemp("prepared") / "prepared.json"
    options = measurements.longest_options(24, "limit", device="cpu", is_small=True)
    bracket = measurements.longest_options(24, "bracket", device="cpu", is_small=True)
    compared = {
        "contenders": {
            "auto_1": {
                "group": "auto",
                "not_run": None,
                "budget_bytes": 2**24,
                "set_by": "full",
                "plan": full_plan(2, "base_model.model.model.layers"),
                "predicted": {"peak_bytes": 2**23, "host_bytes": 0, "step_time_ms": 1.0},
            }
        }
    }
    document = {
        "facts": prepared_file.facts_of(identity_of("cpu", is_small=True)),
        "entries": {
            "side_by_side/llama2_7b_lora_2048": compared,
            f"longest/{measurements.longest_keys(options)[0]}": longctx_entry(options),
            **{f"longest/{key}": longctx_entry(bracket) for key in measurements.longest_keys(bracket)},
        },
    }
    path.write_text(json.dumps(document))
    return path


def longctx_entry(options: Any) -> dict[str, Any]:
    plan = full_plan(3, "base_model.model.model.layers")
    return {
        "plan": plan,
        "length": 576,
        "peak_bytes": 2**21,
        "host_bytes": 0,
        "cap_bytes": options.cap_bytes,
        "run_peak_bytes": 2**21,
        "num_layers": None,
    }


def words(out: Path, prepared: Path, *more: str) -> list[str]:
    given = ["--all", "--device", "cpu", "--small", "--out", str(out), "--prepared", str(prepared), "--seconds", "500"]
    return [*given, *more]


def start(out: Path, prepared: Path, *more: str) -> int:
    """Start the programme in a process of its own, which has all imports; return its number."""

    def run() -> None:
        # Those of pytest make errors of warnings.
        warnings.resetwarnings()
        log = os.open(out.parent / f"{out.name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        runner.main("benchmarks.on_gpu.command", words(out, prepared, *more))

    return forked(run)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    os.waitpid(start(out, prepared), 0)
    return out


def test_every_stage_runs_to_its_end(undisturbed: Path) -> None:
    document = read(undisturbed / "results.json")
    finished = [name for name, stage in document["stages"].items() if stage["is_finished"]]
    # Rows of many lengths were not planned for beforehand, which takes minutes.
    assert finished == [stage.name for stage in STAGES if not stage.name.startswith("speed")]
    for name, stage in document["stages"].items():
        assert stage["deaths"] == stage["cuts"] == {}, name
        bad = {key: found for key, found in stage["entries"].items() if {"failed", "died"} & set(found)}
        assert bad == {}, name
    assert sorted(path.name for path in undisturbed.iterdir()) == ["cases.xml", "log.txt", "results.json"]


def test_what_came_home_is_filed_as_results(undisturbed: Path, tmp_path: Path) -> None:
    merge([undisturbed / "results.json"], STAGES, tmp_path, lambda text: None)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"probe_cpu.json", "exactness_cpu.json", "offload_full_cpu.json", "overhead_llama_1b_cpu.json"} <= names
    exactness = json.loads((tmp_path / "exactness_cpu.json").read_text())
    assert exactness["outcomes"] == {"passed": exactness["num_cases"]}
    assert exactness["environment"]["command"] == "python -m benchmarks.on_gpu"
    recovered = json.loads((tmp_path / "recovery_cpu.json").read_text())
    assert all(recovered["phases_met"].values())
    races = json.loads((tmp_path / "offload_full_cpu.json").read_text())["races"]
    assert races["with_late_copies"] == races["not_repeatable"] == 0
    side = json.loads((tmp_path / "side_by_side_llama2_7b_lora_2048_cpu.json").read_text())
    assert side["contenders"]["auto_1"]["predicted"]["peak_bytes"] == 2**23
    assert side["contenders"]["full"]["ratios"]["peak"] < 1
    assert side["losses"]["are_equal"]
    longest = json.loads((tmp_path / "longctx_small_limit_0.004gib_cpu.json").read_text())
    assert longest["longest"] > 0
    bracket = json.loads((tmp_path / "longctx_small_bracket_0.004gib_cpu.json").read_text())
    assert [one["fits"] for one in bracket["hf_ckpt"]["trials"]] == [True, False]
    assert bracket["hf_ckpt"]["is_as_predicted"] is True


def moments(path: Path, stages: list[str], killed: set[str]) -> Iterator[str]:
    """Yield a stage that is in the middle of its second entry and was not killed yet."""
    for name in stages:
        if name not in killed and len(entries(path, name)) >= 1 and in_flight(path, name):
            yield name


def test_the_programme_and_then_a_child_killed_in_every_stage_lose_one_entry(
    undisturbed: Path, prepared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    path, resumed, killed = out / "results.json", set[str](), set[str]()
    known: dict[str, dict[str, Any]] = {}
    number = start(out, prepared, "--stage", *KILLED)
    while not ended(number):
        for name in moments(path, KILLED, killed):
            if name in resumed:
                # Until the new one has noted the cut, the file says what was in flight in the old one.
                for child in children_of(number) if read(path)["stages"][name]["cuts"] else ():
                    os.kill(child, signal.SIGKILL)
                continue
            resumed.add(name)
            children = children_of(number)
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            wait_for(lambda children=children: not any(map(is_alive, children)), 10.0)
            for each, found in known.items():
                assert {key: entries(path, each)[key] for key in found} == found
            known = {each: entries(path, each) for each in KILLED}
            number = start(out, prepared, "--stage", *KILLED, "--resume", str(path))
        killed = {name for name in resumed if read(path)["stages"][name]["deaths"]}
        time.sleep(0.01)
    assert resumed == killed == set(KILLED)
    for name in KILLED:
        assert {key: entries(path, name)[key] for key in known[name]} == known[name]
        assert set(entries(path, name)) == set(entries(undisturbed / "results.json", name)), name
        assert [reasons[-1] for reasons in read(path)["stages"][name]["deaths"].values()] == [
            "its process ended with SIGKILL"
        ], name


def ended(number: int) -> bool:
    return os.waitpid(number, os.WNOHANG)[0] != 0


def test_what_was_prepared_for_another_run_is_said(prepared: Path, tmp_path: Path) -> None:
    document = json.loads(prepared.read_text())
    document["facts"]["versions"]["torch"] = "1.0"
    path = tmp_path / "prepared.json"
    path.write_text(json.dumps(document))
    found = prepared_file.read(path, identity_of("cpu", is_small=True), "cpu")
    (line,) = found.differences
    assert line.startswith("torch 1.0, here ")


def test_rows_that_were_prepared_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "COMPARED", ())
    monkeypatch.setattr(prepare, "LONGEST", ((24, "speed"),))
    monkeypatch.setattr(prepare, "LEAN_LONGEST", ())
    path, said = tmp_path / "small.json", list[str]()
    assert prepare.write(path, "cpu", is_small=True, is_lean=False, say=said.append) == []
    written = path.read_bytes()
    prepare.write(path, "cpu", is_small=True, is_lean=False, say=said.append)
    assert path.read_bytes() == written
    entries = json.loads(written)["entries"]
    assert [key.partition("/")[0] for key in entries] == ["predicted", "longest"]
    assert not any("failed" in found for found in entries.values())
    (rows,) = (each for each in STAGES if each.name == "speed_of_rows_24gib")
    beforehand = prepared_file.read(path, identity_of("cpu", is_small=True), "cpu")
    assert beforehand.differences == ()
    with warnings.catch_warnings():
        # Those of pytest make errors of warnings.
        warnings.simplefilter("default")
        results, left = run(tmp_path, rows, seconds=200.0, prepared=beforehand)
    assert left == []
    assert not any({"failed", "died"} & set(found) for found in results.entries(rows.name).values())
