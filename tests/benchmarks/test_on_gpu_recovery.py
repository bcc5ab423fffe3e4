"""The stage that lets a card run out of memory: small on the CPU, and what it does on a card, step by step."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.journal import Entry, FileJournal
from benchmarks.on_gpu import recovery
from benchmarks.on_gpu.setting import Setting

pytestmark = pytest.mark.sweep

SMALL = Setting(device="cpu", is_small=True)
MIB = 2**20


@pytest.mark.slow
def test_a_run_goes_on_wherever_memory_runs_out_and_ends_as_if_it_had_not() -> None:
    journal = FileJournal()
    recovery.collect(journal, SMALL)
    ((name, result),) = recovery.assemble(journal, SMALL)
    assert name == "recovery_cpu.json"
    assert result["phases_met"] == {"forward": True, "backward": True, "optimizer": True}
    assert result["is_repeatable"] is True
    cases = result["cases"]
    assert list(cases) == ["forward", "backward/1", "optimizer", "expandable_segments", "auto"]
    assert "skipped" in cases.pop("expandable_segments")
    for case, found in cases.items():
        assert found["has_the_losses"], case
        assert found["has_the_weights"], case
        assert found["ran_out_as_intended"], case
        assert found["num_recovered"] == 1, case
        assert found["num_reruns"] == (0 if case == "optimizer" else 1), case
        assert found["plan_before"] == "layers: 4 none", case
        assert (found["plan_after"] == found["plan_before"]) is (case == "optimizer"), case
    losses = result["without_a_limit"]["reference"]["losses"]
    assert len(losses) == len(set(losses)) == recovery.NUM_STEPS


def test_what_is_left_for_backward_is_halved_until_memory_runs_out_there() -> None:
    asked: list[int] = []

    def runs_out(key: str, leave_bytes: int) -> Entry:
        asked.append(leave_bytes)
        # A backward takes 260 and a forward 220.
        where = "forward" if leave_bytes < 220 else "backward"
        return {"ran_out_in": [f"{where} of step 2"] if leave_bytes < 260 else []}

    def phases(reserved: int) -> Entry:
        return {"phases": {"begin_bytes": 100, "forward_bytes": 300, "backward_bytes": 350, "reserved_bytes": reserved}}

    recovery._try_backward(runs_out, phases(500))
    assert asked == [300, 250]
    asked.clear()
    recovery._try_backward(lambda key, leave_bytes: {"ran_out_in": [], "n": asked.append(leave_bytes)}, phases(500))
    assert asked == [300, 250, 225, 212]
    asked.clear()
    recovery._try_backward(lambda key, leave_bytes: {"failed": "", "n": asked.append(leave_bytes)}, phases(500))
    assert asked == [300]


@pytest.mark.parametrize(
    ("lines", "num_recovered", "places"),
    [
        ([], 0, []),
        # One of the optimizer's that passed when the cache was empty is not warned of.
        ([], 1, ["optimizer step"]),
        (
            [
                "Out of memory in the recomputation in backward of step 2 (input_ids (2, 8)). 1 GiB were allocated.",
                "Something else.",
                "Out of memory in the optimizer step of step 1, before anything of 3 weights was written.",
            ],
            2,
            ["recomputation in backward of step 2", "optimizer step of step 1"],
        ),
    ],
)
def test_where_memory_ran_out_is_read_off_the_warnings(lines: list[str], num_recovered: int, places: list[str]) -> None:
    said = recovery._Said()
    with said.heard():
        for line in lines:
            logging.getLogger("hf_ckpt.recovery.escalation").warning(line)
    assert said.lines == lines
    assert said.places(num_recovered) == places
    assert recovery._met({"ran_out_in": places[:1]}) == (
        None if not places else "backward" if "backward" in places[0] else "optimizer"
    )


NO_CUDA = """
import ctypes
class Cuda:
    # A card of 100 MiB, 10 of them taken by a context; no piece is larger than 50.
    total, used, largest = 100 * 2**20, 10 * 2**20, 50 * 2**20
    def __getattr__(self, name):
        return lambda *given: 0
    def cuMemGetInfo_v2(self, free, total):
        free._obj.value, total._obj.value = self.total - self.used, self.total
        return 0
    def cuMemAlloc_v2(self, pointer, size):
        if size.value > min(self.largest, self.total - self.used):
            return 2
        self.used += size.value
        return 0
ctypes.CDLL = lambda name: Cuda()
"""


def test_the_child_holds_all_but_what_it_is_to_leave() -> None:
    words = [sys.executable, "-c", NO_CUDA + recovery._HOLDER, str(15 * MIB + 1)]
    done = subprocess.run(words, input="", capture_output=True, text=True, check=True, timeout=30)
    found: dict[str, Any] = json.loads(done.stdout)
    # In steps of 2 MiB, and never less than was asked for.
    assert found == {"held_bytes": 74 * MIB, "free_bytes": 16 * MIB, "total_bytes": 100 * MIB}


def test_a_card_that_has_none_is_said() -> None:
    failing = NO_CUDA.replace("return lambda *given: 0", "return lambda *given: 100")
    words = [sys.executable, "-c", failing + recovery._HOLDER, "0"]
    done = subprocess.run(words, input="", capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (1, '{"failed": "CUDA\'s error 100"}\n')
