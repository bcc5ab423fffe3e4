"""Selective, offload, tiles and the chunked head on a model: what they leave, copies, and what runs between steps."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_ckpt
from hf_ckpt import HFCkptCallback
from tests import exactness, live_storages, traces, training, zoo
from tests.modes import CLOSE, MODES, apart, in_force, is_bitwise, llama, worst

pytestmark = pytest.mark.core

DISTINCT = [mode for mode in MODES if mode not in ("offload_half", "full_tile", "attention_tiles", "full_head")]


def fresh() -> zoo.Case:
    return llama(dropout=0.1)


@pytest.mark.parametrize("mode", DISTINCT)
def test_removal_leaves_no_trace(mode: str, tmp_path: Path) -> None:
    case = fresh()
    found, threads = traces.snapshot(case.model), set(threading.enumerate())
    with in_force(case, mode, tmp_path):
        exactness.step(case)
    case.model.zero_grad()
    assert traces.differences(found, traces.snapshot(case.model)) == []
    assert set(threading.enumerate()) <= threads
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", DISTINCT)
def test_forward_without_backward_leaves_nothing_alive(mode: str, tmp_path: Path) -> None:
    case = fresh()
    with in_force(case, mode, tmp_path) as applied:
        # What runs once only is done.
        exactness.step(case)
        case.model.zero_grad()
        with live_storages.of(case.model, case.inputs.values()) as alive:
            loss = zoo.loss(case.model, case.inputs)
            assert alive.num_bytes() > 10_000
            del loss
            gc.collect()
            assert alive.num_bytes() == sum(offloader.stats.host_bytes for offloader in applied.offloaders)
        assert [offloader.stats.num_live for offloader in applied.offloaders] == [0] * len(applied.offloaders)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("mode", ["selective_offload", "disk", "head", "all"])
def test_copy_carries_the_plan_and_runs_itself(mode: str, copied: Callable[[Any], Any], tmp_path: Path) -> None:
    case = fresh()
    with in_force(case, mode, tmp_path):
        expected = exactness.step(case)
        case.model.zero_grad()
        twin = zoo.Case(case.model_type, copied(case.model), case.inputs)
        with exactness.counted_entries(case.model) as (forward, _):
            assert exactness.differences(expected, exactness.step(twin)) == []
        assert not forward
        assert all(parameter.grad is None for parameter in case.model.parameters())
        hf_ckpt.remove(twin.model)
        assert hf_ckpt.patch.apply.plan_of(case.model) is not None
        assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.parametrize("mode", DISTINCT)
def test_evaluation_and_generation_between_two_steps_are_those_of_no_plan(mode: str, tmp_path: Path) -> None:
    case = fresh()

    def between() -> list[Tensor]:
        with torch.no_grad():
            torch.manual_seed(0)
            in_training = case.model(**case.inputs).logits
            tokens = [case.model.generate(case.inputs["input_ids"][:1], max_new_tokens=4, do_sample=False)]
            case.model.eval()
            tokens.append(case.model.generate(case.inputs["input_ids"][:1], max_new_tokens=4, do_sample=False))
            in_evaluation = case.model(**case.inputs)
            case.model.train()
        return [in_training, *tokens, in_evaluation.logits, in_evaluation.loss]

    # Generation in training mode draws dropout masks.
    for module in case.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    expected_step, expected = exactness.step(case), between()
    with in_force(case, mode, tmp_path):
        first, got, second = exactness.step(case), between(), exactness.step(case)
    assert [torch.equal(*pair) for pair in zip(expected, got, strict=True)] == [True] * len(expected)
    assert exactness.differences(first, second) == []
    assert worst(apart(expected_step, first))[0] <= CLOSE


@pytest.mark.parametrize("mode", ["selective", "all"])
def test_plan_that_another_library_switched_off_is_brought_back(mode: str, tmp_path: Path) -> None:
    case = fresh()
    with in_force(case, mode, tmp_path) as applied:
        expected = exactness.step(case)
        for module in case.model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False
        applied.assert_in_force()
        with exactness.counted_entries(case.model) as (_, backward):
            assert exactness.differences(expected, exactness.step(case)) == []
        assert any(name.endswith(("input_layernorm", "q_proj")) for name in backward)


@pytest.mark.parametrize("mode", ["selective_offload", "disk", "none_tiles", "all"])
def test_trainer_with_evaluation_logs_what_it_logs_without_a_plan(mode: str, tmp_path: Path) -> None:
    policy, options = MODES[mode]
    if mode == "disk":
        options = {"offload": {**options["offload"], "path": str(tmp_path)}}
    # Adam takes a step of full size for the rounding error of a gradient that should be zero.
    changes = {"optim": "sgd", "learning_rate": 0.1, "eval_strategy": "steps", "eval_steps": 1}
    expected = training.trainer(training.llama(), tmp_path, **changes)
    expected.train()
    got = training.trainer(training.llama(), tmp_path, HFCkptCallback(policy, **options), **changes)
    got.train()
    assert len(training.losses(got)) == 4
    assert training.losses(got) == pytest.approx(training.losses(expected), rel=0 if is_bitwise(mode) else CLOSE)
    assert hf_ckpt.patch.apply.plan_of(got.model) is None
    assert got.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=CLOSE)
