"""What stands beside a plan in a run of several processes: governed, switched off, or refused on all of them alike."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from hf_ckpt import HFCkptCallback, Plan, UnsupportedError
from hf_ckpt.errors import HFCkptError
from hf_ckpt.patch.apply import make_plan
from hf_ckpt.structure.layers import find_layers
from tests import training
from tests.distributed import runs
from tests.distributed.runs import KINDS, callback, engine_arguments, fresh_accelerate, make_trainer, train


def raised_by(model: nn.Module, engine: str, folder: Path, policy: HFCkptCallback, **fsdp_config: object) -> str:
    """Train, and return the error that ends it."""
    given = engine_arguments(engine)
    if fsdp_config:
        given["fsdp_config"] = {**given["fsdp_config"], **fsdp_config}
    with fresh_accelerate(), pytest.raises(HFCkptError) as raised:
        make_trainer(model, folder, policy, **given).train()
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_accelerates_own_checkpointing_gives_way(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(KINDS["lora"]("llama"), engine, callback("ffn"))
    given = engine_arguments(engine)
    given["fsdp_config"]["activation_checkpointing"] = True
    monkeypatch.setattr(runs, "engine_arguments", lambda engine: given)
    got = train(KINDS["lora"]("llama"), engine, callback("ffn"))
    assert got.engine == engine
    assert got.losses == expected.losses
    assert training.changed(expected.weights, got.weights) == []
    # Its wrapper would stand in the names.
    assert got.names == expected.names


@pytest.mark.parametrize("engine", runs.ENGINES)
def test_checkpoint_wrappers_of_others_are_refused(engine: str, tmp_path: Path) -> None:
    model = KINDS["full"]("llama")
    layers = [layer.module for stack in find_layers(model) for layer in stack.layers]
    apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
    text = raised_by(model, engine, tmp_path, callback("full"))
    assert "is wrapped in CheckpointWrapper" in text
    assert "Leave it out: the policy does its work." in text


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_wrapping_that_reaches_no_decoder_layer_is_refused(engine: str, tmp_path: Path) -> None:
    model = KINDS["full"]("llama")
    text = raised_by(model, engine, tmp_path, callback("full"), transformer_layer_cls_to_wrap=["LlamaRMSNorm"])
    assert "of LlamaForCausalLM, but none of its 4 decoder layers" in text
    assert "fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer." in text


@pytest.mark.parametrize("engine", runs.ENGINES)
def test_another_policy_on_one_rank_is_refused_on_all(engine: str, tmp_path: Path) -> None:
    policy = callback("ffn" if dist.get_rank() else "full")
    text = raised_by(KINDS["full"]("llama"), engine, tmp_path, policy)
    assert text == (
        'PlanMismatchError: Another policy was asked for in process 1 than in process 0: [{mode: "ffn"}], and not '
        '[{mode: "full"}]. All processes of a run train under one plan. Give all of them the same policy and the same '
        "model."
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_error_on_one_rank_ends_all(engine: str, rank: int, tmp_path: Path) -> None:
    def fail(*args: object) -> None:
        raise UnsupportedError("this rank cannot")

    is_failing = dist.get_rank() == rank
    with mock.patch("hf_ckpt.patch.apply.set_on_stack", fail) if is_failing else nullcontext():
        text = raised_by(KINDS["full"]("llama"), engine, tmp_path, callback("full"))
    if is_failing:
        assert text == "UnsupportedError: this rank cannot"
    else:
        assert text == f"OtherProcessError: Process {rank} failed while applying the policy: this rank cannot"


def test_reentrant_request_is_refused(tmp_path: Path) -> None:
    reentrant = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    with fresh_accelerate(), pytest.raises(UnsupportedError, match="use_reentrant: True"):
        make_trainer(KINDS["full"]("llama"), tmp_path, callback("full"), **engine_arguments("ddp"), **reentrant)


def test_plan_of_rank_0_is_applied_by_all(tmp_path: Path) -> None:
    made: list[str] = []
    found = HFCkptCallback("full")

    def noting(*args: Any, **kwargs: Any) -> Plan:
        made.append("made")
        return make_plan(*args, **kwargs)

    with fresh_accelerate(), mock.patch("hf_ckpt.trainer.training_run.make_plan", noting):
        make_trainer(KINDS["full"]("llama"), tmp_path, found, **engine_arguments("fsdp2")).train()
    assert made == (["made"] if dist.get_rank() == 0 else [])
    assert found.plan is not None
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, found.plan.digest())
    assert len(set(digests)) == 1
