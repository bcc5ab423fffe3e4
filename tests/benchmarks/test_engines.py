"""The benchmark of engines, run small on the CPU in a group of one process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from benchmarks import engines
from benchmarks.journal import FileJournal, ReadJournal

pytestmark = pytest.mark.sweep

NAMES = ["none", "full", "attention", "ffn", "none_again"]


def options(engine: str, *, has_lora: bool = True) -> engines.Options:
    return engines.Options(device="cpu", engine=engine, has_lora=has_lora, num_steps=3, num_warmup=1)


@pytest.fixture(autouse=True)
def _group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    with engines.process_group("cpu"):
        yield
    assert not dist.is_initialized()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_every_policy_has_the_losses_without_a_plan_in_a_group_without_a_launcher(engine: str) -> None:
    asked, journal = options(engine), FileJournal()
    engines.collect(journal, asked)
    assert list(journal.entries) == [f"llama_tiny_lora_{engine}/{name}" for name in NAMES]
    read = ReadJournal(json.loads(json.dumps(journal.entries)))
    engines.collect(read, asked)
    result = engines.assemble(read, asked)
    assert result == engines.assemble(journal, asked)
    assert result["is_repeatable"]
    assert all(figures["has_the_losses_without_a_plan"] for figures in result["policies"].values())
    assert all(len(figures["losses"]) == 3 for figures in result["policies"].values())
    assert not torch.are_deterministic_algorithms_enabled()


def test_policy_that_fails_is_the_only_one_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, journal = options("ddp"), FileJournal()
    train = engines.train
    calls: list[int] = []

    def fail_once(*given: object) -> object:
        calls.append(len(calls))
        if len(calls) == 2:
            given[0].register_forward_pre_hook(lambda *args: pytest.fail("this model has broken off"))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(*given)

    monkeypatch.setattr(engines, "train", fail_once)
    engines.collect(journal, asked)
    policies = engines.assemble(journal, asked)["policies"]
    assert policies["full"] == {"out_of_memory": "CUDA out of memory"}
    assert [name for name in NAMES if policies[name].get("has_the_losses_without_a_plan")] == [
        "none",
        "attention",
        "ffn",
        "none_again",
    ]


def test_group_of_one_process_needs_no_network() -> None:
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_group_asks_for_kernels_that_repeat_themselves() -> None:
    engines.collect(FileJournal(), options("ddp", has_lora=False))
    # Read when CUDA starts, so that it stays.
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
