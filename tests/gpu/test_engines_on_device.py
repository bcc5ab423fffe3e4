"""A step under DDP and FSDP2 on a device, with and without a policy, bit by bit; the same code runs on the CPU.

The group has one process: NCCL on CUDA, gloo on the CPU. Two processes, where there are two GPUs, run all of
tests/distributed without its stand-ins.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.engines import process_group
from hf_ckpt.structure.layers import find_layers
from tests import exactness, zoo
from tests.gpu.test_exact_on_device import DEVICES, on_device

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device, with a process group of one on it."""
    monkeypatch.delenv("RANK", raising=False)
    with process_group(request.param):
        yield request.param


def in_engine(case: zoo.Case, engine: str, device: str) -> zoo.Case:
    """Put an engine around the model of a case."""
    if engine == "ddp":
        return zoo.Case(case.model_type, DistributedDataParallel(case.model), case.inputs)
    mesh = init_device_mesh(device, (1,))
    layers = [layer.module for stack in find_layers(case.model) for layer in stack.layers]
    for module in (*layers, case.model):
        fully_shard(module, mesh=mesh)
    assert all(isinstance(layer, FSDPModule) for layer in layers)
    return case


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kind", ["full fine-tune", "lora"])
def test_every_policy_is_exact_under_an_engine(kind: str, model_type: str, engine: str, device: str) -> None:
    case = on_device(model_type, device, attn_implementation="eager")
    if kind == "lora":
        case = exactness.lora(case, lora_dropout=0.1)
        case.model.to(device)
    case = in_engine(case, engine, device)
    expected = exactness.step(case)
    assert exactness.differences(expected, exactness.step(case)) == [], "the step itself is not repeatable"
    changed = {policy: exactness.check(case, policy) for policy in exactness.POLICIES}
    assert {policy: names for policy, names in changed.items() if names} == {}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.timeout(1200)
def test_two_gpus_run_the_tests_of_two_processes() -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pytest", "tests/distributed"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
