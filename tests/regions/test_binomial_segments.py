"""Layers that really run under the binomial schedule: how often, what is held meanwhile, and that nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import hf_ckpt
from hf_ckpt.policy.revolve import most_runs, reruns, segment_starts
from tests import exactness, plain_models, zoo
from tests.policy.binomial import num_forwards

pytestmark = pytest.mark.core

LAYERS = 9
ARCHITECTURES = ["llama", "gpt2", "qwen3", "gemma3_text", "mixtral", "opt", "bloom", "falcon", "t5", "bamba"]


def decoder(num_layers: int) -> zoo.Case:
    torch.manual_seed(0)
    return plain_models.case(plain_models.Decoder([plain_models.Block() for _ in range(num_layers)]))


class AliveInputs:
    """Which inputs of layers are alive where a layer begins, by their storages, as one input comes as many tensors."""

    def __init__(self) -> None:
        self._inputs: dict[int, StorageWeakRef] = {}
        self.most = 0

    def note(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        now = args[0].untyped_storage()
        # Those that are gone stay in the list: a weak reference keeps an address from being used again.
        first = next(iter(self._inputs), None)
        alive = {key for key, storage in self._inputs.items() if not storage.expired()} - {first, now._cdata}
        self.most = max(self.most, len(alive))
        self._inputs.setdefault(now._cdata, StorageWeakRef(now))


@contextmanager
def counted(blocks: nn.ModuleList) -> Iterator[list[int]]:
    """Count how often the norm, the first module inside each block, runs."""
    runs = [0] * len(blocks)

    def count(idx: int, *_: object) -> None:
        runs[idx] += 1

    hooks = [block.norm.register_forward_pre_hook(lambda *_, idx=idx: count(idx)) for idx, block in enumerate(blocks)]
    yield runs
    for hook in hooks:
        hook.remove()


def planned_runs(num_layers: int, snapshots: int) -> list[int]:
    ends = pairwise([*segment_starts(num_layers, snapshots), (num_layers, 0)])
    return [1 + times for (start, free), (end, _) in ends for times in reruns(end - start, free)]


SIZES = [(layers, snapshots) for layers in (1, 2, 3, 5, 8, 21, 64) for snapshots in (1, 2, 3, 8) if snapshots <= layers]


@pytest.mark.parametrize(("num_layers", "snapshots"), SIZES)
def test_each_layer_runs_as_often_as_the_schedule_says(num_layers: int, snapshots: int) -> None:
    case = decoder(num_layers)
    expected = exactness.step(case)
    with (
        hf_ckpt.apply(case.model, "full", nested="revolve", snapshots=snapshots, prove="off"),
        counted(case.model.blocks) as runs,
    ):
        assert exactness.differences(expected, exactness.step(case)) == []
    assert runs == planned_runs(num_layers, snapshots)
    assert sum(runs) == num_forwards(num_layers, snapshots)
    assert max(runs) <= most_runs(num_layers, snapshots)


@pytest.mark.parametrize(("num_layers", "snapshots"), SIZES)
def test_no_more_inputs_are_alive_than_snapshots(num_layers: int, snapshots: int) -> None:
    """Beside the stack's own input and that of the layer that runs."""
    case = decoder(num_layers)
    inputs = AliveInputs()
    hooks = [block.norm.register_forward_pre_hook(inputs.note) for block in case.model.blocks]
    with hf_ckpt.apply(case.model, "full", nested="revolve", snapshots=snapshots, prove="off"):
        exactness.step(case)
    for hook in hooks:
        hook.remove()
    assert inputs.most <= snapshots
    # Of few layers some snapshot is always that of the layer that runs.
    assert inputs.most == snapshots or num_layers < 4 * snapshots


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_architectures_train_as_without_a_plan(model_type: str) -> None:
    case = exactness.build(model_type, num_layers=LAYERS)
    expected = exactness.step(case)
    # There is dropout in it.
    assert exactness.differences(expected, exactness.step(case, seed=1)) != []
    for snapshots in (1, 3):
        with hf_ckpt.apply(case.model, "full", nested="revolve", snapshots=snapshots, prove=1):
            assert exactness.differences(expected, exactness.step(case)) == []
    assert exactness.differences(expected, exactness.step(case)) == []
