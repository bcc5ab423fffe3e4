"""How often weights are gathered, gradients reduced and layers run in one step: the numbers of docs/distributed.md."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.debug import CommDebugMode
from transformers import LlamaForCausalLM, TrainerCallback
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_ckpt
from benchmarks.cases import LLAMAS, build_llama
from benchmarks.collectives import OTHERS, POLICIES, Collectives, Counts, contenders, count, measure, shard, table
from hf_ckpt.policy.revolve import replays, segment_starts
from tests.distributed.ranks import has_gpus
from tests.distributed.runs import callback, full_fine_tune, train
from tests.policy.binomial import num_forwards

ONCE, TWICE = [1, 1, 1, 1], [2, 2, 2, 2]
# Forwards of attention and of ffn by layer, and the all-gathers of FSDP1's backward beside one for each layer.
EXPECTED: dict[str, tuple[list[int], list[int], int]] = {
    "none": (ONCE, ONCE, 0),
    "full": (TWICE, TWICE, 0),
    "attention": (TWICE, ONCE, 0),
    "ffn": (ONCE, TWICE, 0),
    "full, every_n_layers=2": ([2, 1, 2, 1], [2, 1, 2, 1], 0),
    # A replay gathers all layers of its segment but the last, which is there already, and FSDP1 frees them again.
    "full, segment_size=2": (TWICE, TWICE, 2),
    "full, segment_size=4": (TWICE, TWICE, 3),
    # The last layer of a segment is not run for its output, which nobody needs.
    "full, segment_size=2, nested": ([3, 2, 3, 2], [3, 2, 3, 2], 2),
    "full on 0:2, ffn on 2:4": ([2, 2, 1, 1], TWICE, 0),
    "transformers' own": (TWICE, TWICE, 0),
    "transformers' own, reentrant": (TWICE, TWICE, 0),
    "CheckpointWrapper around the shard": (TWICE, TWICE, 0),
    "CheckpointWrapper around the shard, reentrant": (TWICE, TWICE, 4),
}


ROOT = Path(__file__).parents[2]


def test_everything_that_is_counted_has_its_numbers_here() -> None:
    assert list(EXPECTED) == [*POLICIES, *OTHERS]


def test_document_shows_the_committed_result() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "collectives_llama_tiny.json").read_text())
    counts = {engine: {name: Counts(**row) for name, row in result[engine].items()} for engine in ("fsdp1", "fsdp2")}
    assert table(counts) in (ROOT / "docs" / "distributed.md").read_text()


@pytest.mark.parametrize("name", EXPECTED)
def test_fsdp1_gathers_again_only_within_segments_and_around_reentrant_wrappers(name: str) -> None:
    attention, ffn, extra = EXPECTED[name]
    # Four layers and the root, which keeps its weights from forward to backward.
    assert measure("llama_tiny", "fsdp1", contenders()[name]) == Counts(attention, ffn, 5, 4 + extra, 5)


@pytest.mark.parametrize("name", EXPECTED)
def test_fsdp2_gathers_as_often_as_without_a_plan(name: str) -> None:
    attention, ffn, _ = EXPECTED[name]
    # Four layers, the embeddings, and the norm with the head, which keep their weights from forward to backward.
    assert measure("llama_tiny", "fsdp2", contenders()[name]) == Counts(attention, ffn, 6, 5, 6)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(("num_layers", "snapshots"), [(7, 1), (12, 2)])
def test_a_binomial_schedule_gathers_a_layer_again_for_each_time_that_it_runs(
    engine: str, num_layers: int, snapshots: int
) -> None:
    tiny = replace(LLAMAS["llama_tiny"], layers=num_layers)
    model, inputs = build_llama(tiny, "cuda" if has_gpus() else "cpu")
    model = shard(model, engine)
    expected = gradients(model, inputs)
    with hf_ckpt.apply(model, "full", nested="revolve", snapshots=snapshots):
        got = gradients(model, inputs)
        counts = count(model, inputs)
    assert all(map(torch.equal, expected, got))
    in_backward = num_forwards(num_layers, snapshots) - num_layers
    assert sum(counts.attention_forwards) == num_layers + in_backward
    if engine == "fsdp1":
        assert counts.all_gathers_backward == in_backward
    else:
        # The layer before the one that is in its backward is gathered for both its run and its own backward.
        ends = pairwise([*segment_starts(num_layers, snapshots), (num_layers, 0)])
        rows = [row for (start, free), (end, _) in ends for row in replays(end - start, free)]
        assert counts.all_gathers_backward == in_backward - sum(start < layer for start, _, layer in rows) + 1


def gradients(model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    model(**inputs).loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # Copies: the next backward adds to them.
    return [(gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone() for gradient in found]


# Its backward hooks do not suit the outputs of transformers' models, of which torch warns in several ways.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_torchs_own_counter_agrees(engine: str) -> None:
    model, inputs = build_llama(LLAMAS["llama_tiny"], "cuda" if has_gpus() else "cpu")
    model = shard(model, engine)
    with CommDebugMode() as torchs, Collectives() as ours:
        model(**inputs).loss.backward()
    assert torchs.get_total_counts() == sum(ours.seen.values())


# As above.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_last_layer_is_gathered_before_the_loss_runs_backward(engine: str, mode: str) -> None:
    model, inputs = build_llama(LLAMAS["llama_tiny"], "cuda" if has_gpus() else "cpu")
    sharded = shard_as_accelerate(model, engine)
    hf_ckpt.apply(sharded, mode)
    loss = sharded(**inputs).loss
    seen = []
    with Collectives() as counted:
        loss.register_hook(lambda gradient: seen.append(counted.num("gather", in_backward=True)))
        loss.backward()
    assert seen == [1]


def shard_as_accelerate(model: LlamaForCausalLM, engine: str) -> nn.Module:
    """Make each layer a unit, and the rest of the model one, with what the next unit needs gathered ahead."""
    if engine == "fsdp1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            use_orig_params=True,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            device_id=torch.device("cuda", torch.cuda.current_device()) if has_gpus() else torch.device("cpu"),
        )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


class CountedSteps(TrainerCallback):
    """Counts the collectives of each optimizer step in a Trainer: all-gathers in forward and backward, reductions."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._collectives = Collectives()
        self._collectives.__enter__()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        seen = self._collectives
        seen.__exit__(None, None, None)
        gathers = (seen.num("gather", in_backward) for in_backward in (False, True))
        self.steps.append((*gathers, seen.num("reduce_scatter", in_backward=True)))


@pytest.mark.parametrize("mode", ["none", "full", "ffn"])
@pytest.mark.parametrize(("engine", "step"), [("fsdp1", (20, 16, 5)), ("fsdp2", (24, 20, 6))])
def test_trainer_gathers_for_each_accumulated_batch_and_reduces_once(
    engine: str, step: tuple[int, int, int], mode: str
) -> None:
    counted = CountedSteps()
    got = train(full_fine_tune("llama"), engine, callback(mode), counted, gradient_accumulation_steps=4, max_steps=2)
    assert got.engine == engine
    assert counted.steps == [step] * 2
