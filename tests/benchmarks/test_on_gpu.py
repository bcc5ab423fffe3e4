"""The programme that measures on a GPU: what it keeps when something is killed, and what it goes on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import runner
from benchmarks.journal import Entry, Journal
from benchmarks.on_gpu import command, documents, exactness, merge, prepare, prepared, programme, seconds
from benchmarks.on_gpu.identity import ROOT, differences, identity_of
from benchmarks.on_gpu.results import MOST_CUTS, Results, read
from benchmarks.on_gpu.setting import Prepared, Setting, Stage
from benchmarks.on_gpu.stages import STAGES
from benchmarks.runner import WrongInputError

pytestmark = pytest.mark.sweep

HERE = {"code": "c", "commit": "1234567890", "versions": {"torch": "2"}, "device": "a card", "is_small": True}


@pytest.fixture(autouse=True)
def _stages_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of these tests are in no list; and a test that was collected earlier may have imported bitsandbytes."""
    monkeypatch.setattr(programme, "needs_a_fresh_interpreter", lambda: False)


def stage(name: str, run: Callable[[Journal, Setting], None], limit_s: float = 20.0) -> Stage:
    return Stage(name=name, question="?", collect=run, assemble=lambda *given: (), files=(), limit_s=limit_s)


def numbered(journal: Journal, setting: Setting, *, pause: float = 0.0) -> None:
    """Entries 0 to 3; each says in which process it was made."""
    for number in range(4):
        journal.entry(str(number), partial(_made, number, pause))


def _made(number: int, pause: float) -> Entry:
    time.sleep(pause)
    return {"number": number, "process": os.getpid()}


def run(
    tmp_path: Path,
    *stages: Stage,
    results: Results | None = None,
    seconds: float = 20.0,
    prepared: Prepared | None = None,
) -> tuple[Results, list[str]]:
    results = results or Results(tmp_path / "results.json", HERE)
    results.begin_slice({})
    setting = Setting(device="cpu", is_small=True, prepared=prepared or Prepared(), scratch=tmp_path)
    with (tmp_path / "log.txt").open("ab", buffering=0) as log:
        left = programme.run(stages, setting, results, time.monotonic() + seconds, log, lambda text: None)
    return results, left


def forked(run: Callable[[], Any]) -> int:
    """Run in a process of its own, which leaves nothing of pytest's behind; return its number."""
    number = os.fork()
    if number:
        return number
    try:
        run()
    finally:
        os._exit(0)


def wait_for(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.01)


def entries(path: Path, name: str) -> dict[str, Any]:
    return read(path)["stages"].get(name, {}).get("entries", {}) if path.is_file() else {}


def in_flight(path: Path, name: str) -> list[str]:
    return read(path)["stages"].get(name, {}).get("in_flight", []) if path.is_file() else []


def children_of(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_alive(process: int) -> bool:
    """Whether a process runs: one that nobody has waited for yet does not."""
    path = Path(f"/proc/{process}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


# --- Stages and entries. ---


def test_each_stage_is_a_process_and_hands_over_its_entries(tmp_path: Path) -> None:
    results, left = run(tmp_path, stage("one", numbered), stage("two", numbered))
    assert left == []
    processes = {name: {found["process"] for found in results.entries(name).values()} for name in ("one", "two")}
    assert all(len(numbers) == 1 and os.getpid() not in numbers for numbers in processes.values())
    assert processes["one"] != processes["two"]
    assert read(results.path)["slices"][0]["environment"]["versions"]["torch"] == version("torch")


def fails_once(journal: Journal, setting: Setting) -> None:
    journal.entry("good", dict)
    journal.entry("full", lambda: _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")))
    journal.entry("bad", lambda: _raise(ValueError("of no use")))
    journal.entry("behind", dict)


def _raise(error: Exception) -> Entry:
    raise error


def test_an_error_is_the_entry_and_the_others_follow(tmp_path: Path) -> None:
    results, left = run(tmp_path, stage("one", fails_once))
    found = results.entries("one")
    assert left == []
    assert list(found) == ["good", "full", "bad", "behind"]
    assert found["full"]["out_of_memory"] == "CUDA out of memory. Tried to allocate 2 GiB"
    assert found["bad"]["failed"] == "ValueError: of no use"


def dies_at_two(journal: Journal, setting: Setting) -> None:
    for number in range(4):
        journal.entry(str(number), lambda number=number: os.kill(os.getpid(), signal.SIGKILL) if number == 2 else {})


def test_what_takes_its_process_with_it_twice_is_left_out(tmp_path: Path) -> None:
    results, left = run(tmp_path, stage("one", dies_at_two))
    assert left == []
    assert results.entries("one")["2"] == {"died": "its process ended with SIGKILL"}
    assert sorted(results.entries("one")) == ["0", "1", "2", "3"]


def loses_the_device(journal: Journal, setting: Setting) -> None:
    journal.entry("first", dict)
    journal.entry("fault", lambda: _raise(RuntimeError("CUDA error: an illegal memory access was encountered")))
    journal.entry("behind", lambda: {"process": os.getpid()})


def test_a_fault_of_the_device_ends_the_process_and_not_the_stage(tmp_path: Path) -> None:
    results, left = run(tmp_path, stage("one", loses_the_device))
    assert left == []
    assert "illegal memory access" in results.entries("one")["fault"]["died"]
    assert "process" in results.entries("one")["behind"]


CASES_OF_A_DEVICE = """
import pytest

@pytest.mark.parametrize("number", range(6))
def test_case(number):
    if number == 2:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


@pytest.mark.sweep
def test_a_fault_of_the_device_costs_one_case_of_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_device.py").write_text(CASES_OF_A_DEVICE)
    plugins = ("benchmarks.on_gpu.cases_left", "no:cacheprovider", "xdist.plugin")
    words = ["-q", "-n", "1", str(tmp_path), *(word for name in plugins for word in ("-p", name))]
    monkeypatch.setattr(exactness, "_words", lambda setting: words)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    results, left = run(tmp_path, stage("exactness", exactness.collect, limit_s=100.0), seconds=100.0)
    assert left == []
    outcomes = {name.partition("::")[2]: found["outcome"] for name, found in results.entries("exactness").items()}
    assert outcomes == {f"test_case[{number}]": "failed" if number == 2 else "passed" for number in range(6)}


CASES_TO_SORT = """
import warnings

def test_flex_attention(): ...
def test_liger(): ...
def test_first(): ...

def test_warning():
    warnings.warn("of a library that nobody here knows")
"""


@pytest.mark.sweep
def test_what_compiles_comes_last_and_a_warning_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_device.py").write_text(CASES_TO_SORT)
    # As under the project's own settings.
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    words = exactness._words(Setting(device="cuda", is_small=False))
    assert words[words.index("-n") + 1] == "8"
    # One worker, so that the order is known, and no CUDA.
    for asked, instead in (("8", "1"), ("tests/gpu", str(tmp_path)), ("gpu", "not gpu")):
        words[words.index(asked)] = instead
    monkeypatch.setattr(exactness, "_words", lambda setting: words)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    results, left = run(tmp_path, stage("exactness", exactness.collect, limit_s=100.0), seconds=100.0)
    assert left == []
    outcomes = [(name.partition("::")[2], found["outcome"]) for name, found in results.entries("exactness").items()]
    names = ("test_first", "test_warning", "test_liger", "test_flex_attention")
    assert outcomes == [(name, "passed") for name in names]


def hangs(journal: Journal, setting: Setting) -> None:
    journal.entry("still", partial(_made, 0, 60.0), limit_s=0.2)
    journal.entry("behind", dict)


def test_what_hangs_is_killed_and_then_left_out(tmp_path: Path) -> None:
    results, left = run(tmp_path, stage("one", hangs))
    assert left == []
    assert results.entries("one")["still"] == {"died": "still took too long"}
    assert "behind" in results.entries("one")


def never_begins(journal: Journal, setting: Setting) -> None:
    raise ImportError("no module named x")


def test_a_stage_that_cannot_begin_is_given_up_and_named(tmp_path: Path) -> None:
    _, left = run(tmp_path, stage("bad", never_begins), stage("good", numbered))
    assert left == ["bad"]
    assert "ImportError: no module named x" in read(tmp_path / "results.json")["stages"]["bad"]["deaths"]["(start)"][0]


def leaves_a_child(journal: Journal, setting: Setting) -> None:
    number = forked(partial(time.sleep, 60))
    journal.entry("child", lambda: {"process": number})


def test_children_of_a_stage_end_with_it(tmp_path: Path) -> None:
    results, _ = run(tmp_path, stage("one", leaves_a_child))
    number = results.entries("one")["child"]["process"]
    wait_for(lambda: not is_alive(number))


# --- Time. ---


def test_time_is_kept(tmp_path: Path) -> None:
    began = time.monotonic()
    slow = partial(numbered, pause=3.0)
    results, left = run(tmp_path, stage("slow", slow), stage("later", numbered), seconds=8.0)
    # Ten seconds more than asked at most; both stages undisturbed take 24.
    assert time.monotonic() - began < 18
    assert left == ["slow", "later"]
    # Nothing is held against what was measured when time was over.
    document = read(results.path)["stages"]["slow"]
    assert document["deaths"] == document["cuts"] == {}
    assert "in_flight" not in document


def needs_much(journal: Journal, setting: Setting) -> None:
    journal.entry("short", dict)
    journal.entry("long", dict, needs_s=1000.0)


def test_what_needs_more_time_than_is_left_does_not_begin(tmp_path: Path) -> None:
    results, left = run(tmp_path, stage("one", needs_much), stage("two", numbered))
    assert left == ["one"]
    assert list(results.entries("one")) == ["short"]


# --- Kills. ---


def test_the_parent_is_killed_and_the_next_run_goes_on(tmp_path: Path) -> None:
    path, slow = tmp_path / "results.json", partial(numbered, pause=0.3)
    stages = (stage("one", slow), stage("two", slow))
    number = forked(lambda: run(tmp_path, *stages))
    wait_for(lambda: in_flight(path, "two") == ["1"])
    (child,) = children_of(number)
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    wait_for(lambda: not is_alive(child), 5.0)
    before = {name: json.dumps(entries(path, name)) for name in ("one", "two")}
    resumed = Results.resumed(path, path, HERE)
    _, left = run(tmp_path, *stages, results=resumed)
    assert left == []
    assert json.dumps(entries(path, "one")) == before["one"]
    assert json.dumps(entries(path, "two")).startswith(before["two"].removesuffix("}"))
    assert sorted(entries(path, "two")) == ["0", "1", "2", "3"]


def test_the_child_is_killed_and_the_stage_goes_on_behind(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    number = forked(lambda: run(tmp_path, stage("one", partial(numbered, pause=0.3))))
    wait_for(lambda: in_flight(path, "one") == ["2"])
    (child,) = children_of(number)
    os.kill(child, signal.SIGKILL)
    os.waitpid(number, 0)
    found = entries(path, "one")
    assert list(found) == ["0", "1", "2", "3"]
    assert found["0"]["process"] == found["1"]["process"] == child != found["2"]["process"]


def test_what_is_cut_off_again_and_again_is_left_out(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", HERE)
    for _ in range(MOST_CUTS):
        results.begin("one", "endless")
        assert results.entries("one") == {}
        results = Results.resumed(results.path, results.path, HERE)
    assert results.entries("one")["endless"] == {"died": "the programme was killed 3 times while this was measured"}


# --- Files. ---


def test_a_file_of_other_code_versions_or_device_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    Results(path, HERE).begin_slice({})
    other = HERE | {"code": "d", "versions": {"torch": "3"}, "device": "another", "is_small": False}
    with pytest.raises(WrongInputError) as refusal:
        Results.resumed(tmp_path / "new.json", path, other)
    message = str(refusal.value)
    for part in ("old.json", "code c", "torch 2, here 3", "device a card, here another", "small twins, here full size"):
        assert part in message
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist"),
        ("{", "cannot be read as JSON"),
        ("[]", "is no result of this programme"),
        ('{"format": 9, "identity": {}, "slices": [], "stages": {}}', "has format 9"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(WrongInputError, match=words):
        Results.resumed(path, path, HERE)


def test_the_identity_is_that_of_the_sources() -> None:
    first, second = (identity_of("cpu", is_small=True) for _ in range(2))
    assert differences(first, second) == []
    assert len(first["code"]) == 16
    assert first["versions"]["torch"] == torch.__version__.partition("+")[0]


# --- The command. ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "No CUDA device was found"),
        (["--device", "cpu"], "add --small"),
        (["--device", "cpu", "--small"], "--out is missing"),
        (["--device", "cpu", "--small", "--out", "x", "--resume", "nowhere.json"], "nowhere.json does not exist"),
        (["--prepare", "--predicts-for", "h2000", "--prepared", "x.json"], 'Unknown device "h2000"'),
    ],
)
def test_wrong_input_is_one_message(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "gpu_name", lambda: None)
    with pytest.raises(SystemExit) as end:
        runner.main("benchmarks.on_gpu.command", words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def exit_code(words: list[str]) -> int:
    return runner.main("benchmarks.on_gpu.command", words)


def measures_nothing(journal: Journal, setting: Setting) -> None:
    journal.give("prepared", {"plan": "full"})
    journal.entry("bad", lambda: _raise(ValueError("of no use")))


def test_exit_code_says_whether_anything_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--device", "cpu", "--small", "--out", str(tmp_path), "--seconds", "30", "--stage"]
    monkeypatch.setattr(command, "STAGES", (stage("bad", measures_nothing), stage("good", numbered)))
    assert exit_code([*words, "bad"]) == 1
    resume = ["--resume", str(tmp_path / "results.json")]
    assert exit_code([*words, "bad", "good", *resume]) == 0
    # Nothing was left to measure.
    assert exit_code([*words, "good", *resume]) == 0


def test_a_long_log_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programme, "_LOG_BYTES", 1000)
    (tmp_path / "log.txt").write_text("old\n" * 1000)
    run(tmp_path, stage("one", numbered))
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith("old\n" * (500 // 4))
    assert len(log) < 1000


# --- What is prepared. ---


def test_what_was_prepared_for_another_card_is_better_than_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "FOLDER", tmp_path)
    here = identity_of("NVIDIA H100 80GB HBM3", is_small=False)
    parser = ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args([])
    assert command._prepared(options, here) == Prepared()
    for card in ("h200",):
        facts = prepared.facts_of(here | {"device": card})
        # What was made by another commit, or by versions that differ in the last number, is what this one would make.
        facts |= {"versions": {name: f"{number}.9" for name, number in facts["versions"].items()}}
        document = {"facts": facts, "entries": {"predicted/x": {"peak_bytes": 1}}}
        (tmp_path / f"{card}.json").write_text(json.dumps(document))
    found = command._prepared(options, here)
    assert found.get("predicted/x") == {"peak_bytes": 1}
    assert found.differences == ("device h200, here h100",)


def _no_module() -> Entry:
    raise ImportError("no module named bitsandbytes")


@pytest.mark.sweep
def test_what_cannot_be_prepared_is_named_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = {"predicted/good": dict, "predicted/bad": _no_module}
    monkeypatch.setattr(prepare, "_pieces", lambda *given: iter(pieces.items()))
    path = tmp_path / "h100.json"
    assert exit_code(["--prepare", "--prepared", str(path)]) == 1
    said = capsys.readouterr().err
    assert "could not be prepared: predicted/bad: ImportError: no module named bitsandbytes" in said
    # Tried again, and there.
    pieces["predicted/bad"] = dict
    assert exit_code(["--prepare", "--prepared", str(path)]) == 0
    assert list(json.loads(path.read_text())["entries"]) == ["predicted/good", "predicted/bad"]


def test_the_first_call_has_room_for_what_matters_most() -> None:
    beforehand = prepared.read(prepared.path_of("h100", is_small=False), identity_of("h100", is_small=False), "h100")
    found = seconds.planned(STAGES, beforehand)
    assert {name for name, (_, source) in found.items() if source == "predictions"} == {
        *("predicted", "side_by_side_llama2_7b_lora_2048", "side_by_side_llama32_1b_full_2048"),
        *("bracket_24gib", "bracket_80gib"),
    }
    stages = list(found)
    assert sum(found[name][0] for name in stages[: stages.index("side_by_side_llama32_1b_full_2048")]) <= 585


# --- Documents. ---


@pytest.mark.parametrize("place", documents.PLACES)
def test_blocks_of_documents_are_written_from_results(place: str) -> None:
    path = ROOT / place
    text = path.read_text()
    assert "<!-- gpu:" in text
    assert documents.filled(text, STAGES, documents.Results(merge.RESULTS, path)) == text


def test_what_was_measured_takes_the_place_of_what_was_not(tmp_path: Path) -> None:
    results = documents.Results(tmp_path, tmp_path / "README.md")
    text = "a\n\n<!-- gpu:measured -->\n\n<!-- /gpu -->\n\nb\n\n<!-- gpu:longest -->\nold\n<!-- /gpu -->\n"
    not_yet = "Not yet measured on a GPU: `make bench-gpu`."
    before = documents.filled(text, STAGES, results)
    assert before.count(not_yet) == 2
    assert before.count("<!-- /gpu -->") == 2
    environment = {"hardware": {"gpu": "NVIDIA H200"}, "prepared_for_another": ["device h100, here h200"]}
    verdict = {"best_ratio_to_today": 0.796, "worst_ratio_to_fixed": 1.1}
    rows = [{"budget_bytes": size * 2**30, "ratio_to_today": ratio} for size, ratio in ((18, 0.796), (41, 1.104))]
    found = {"environment": environment, "verdict": verdict, "budgets": rows, "title": "A model"}
    (tmp_path / "side_by_side_llama2_7b_lora_2048_cuda.json").write_text(json.dumps(found))
    found = {"environment": environment, "longest": 180_000, "predicted": {"length": 180_800}}
    (tmp_path / "longctx_limit_24gib_cuda.json").write_text(json.dumps(found))
    after = documents.filled(before, STAGES, results)
    assert not_yet not in after
    auto = "within 18.0 GiB and 41.0 GiB a step that `auto` planned takes 80 % and 110 % of the time of the best"
    assert f"Measured on one NVIDIA H200: - **`auto`**, A model: {auto}" in " ".join(after.split())
    assert "a row of 180,000 tokens trains, where 180,800 tokens are predicted" in " ".join(after.split())
    assert " ".join(after.split()).count("Plans were prepared for another run: device h100, here h200.") == 2
    assert after.startswith("a\n\n<!-- gpu:measured -->\n\n")


def test_stages_and_their_results_have_names_of_their_own() -> None:
    names, files = [stage.name for stage in STAGES], [name for stage in STAGES for name in stage.files]
    assert len(set(names)) == len(names)
    assert len(set(files)) == len(files)
    lean = [stage.name for stage in STAGES if stage.share_s is not None]
    assert names[: len(lean)] == lean
    first = ["recovery", "exactness", "predicted", "side_by_side_llama2_7b_lora_2048", "bracket_24gib", "offload"]
    assert lean[: len(first) + 1] == ["smoke", *first]


@pytest.mark.sweep
def test_the_process_that_forks_imports_nothing_that_touches_a_device() -> None:
    code = "import sys; import benchmarks.on_gpu.command; print({'bitsandbytes', 'peft'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.sweep
def test_a_stage_can_begin_in_an_interpreter_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = (stage for stage in STAGES if stage.name == "exactness")
    monkeypatch.setattr(programme, "needs_a_fresh_interpreter", lambda: True)
    results, left = run(tmp_path, one, seconds=100.0)
    assert left == []
    assert {found["outcome"] for found in results.entries("exactness").values()} == {"passed"}
