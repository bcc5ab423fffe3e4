"""After an interrupted train() there is no on_train_end: the plan that is left behind is found and removed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_ckpt
from hf_ckpt import HFCkptCallback, PolicyError
from tests.exactness import POLICIES
from tests.traces import differences, snapshot
from tests.training import During, changed, counted, llama, lora, losses, trainer, weights

pytestmark = pytest.mark.core

LEFTOVER = (
    "A plan was still on the model, as an interrupted run leaves one; it was removed, "
    "and use_cache is the user's again."
)
MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB"


class Fault:
    """Raises in the training step with this number, counted from 0, in its forward or in its backward."""

    def __init__(self, model: nn.Module, error: BaseException, step: int, in_backward: bool = False) -> None:
        self._error, self._left, self._in_backward = error, step, in_backward
        self._hook = model.get_output_embeddings().register_forward_hook(self._count)

    def _count(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if not module.training:
            return
        self._left -= 1
        if self._left >= 0:
            return
        self._hook.remove()
        if not self._in_backward:
            raise self._error
        args[0].register_hook(self._raise)

    def _raise(self, gradient: torch.Tensor) -> None:
        raise self._error


def interrupted(
    model: nn.Module, folder: Path, policy: str, step: int = 0, in_backward: bool = False
) -> hf_ckpt.HFCkptCallback:
    mode, options = POLICIES[policy]
    used = HFCkptCallback(mode, **options)
    run = trainer(model, folder, used)
    Fault(model, KeyboardInterrupt(), step, in_backward)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    return used


@pytest.mark.parametrize(("step", "in_backward"), [(0, False), (1, True)])
@pytest.mark.parametrize("policy", ["full", "mixed", "nested"])
@pytest.mark.parametrize("build", [llama, lora])
def test_remove_needs_no_handle_and_leaves_no_trace(
    tmp_path: Path, build: Any, policy: str, step: int, in_backward: bool
) -> None:
    plain, model = build(), build()
    Fault(plain, KeyboardInterrupt(), step, in_backward)
    run = trainer(plain, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    interrupted(model, tmp_path, policy, step, in_backward)
    assert model.config.use_cache is False
    assert hf_ckpt.remove(model)
    assert model.config.use_cache is True
    left = {name: set(module.__dict__) for name, module in model.named_modules()}
    assert left == {name: set(module.__dict__) for name, module in plain.named_modules()}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not hf_ckpt.remove(model)


def test_new_callback_in_a_new_trainer_finds_the_leftover(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    interrupted(model, tmp_path, "full")
    with caplog.at_level(logging.INFO, logger="hf_ckpt"):
        run = trainer(model, tmp_path, HFCkptCallback("full", every_n_layers=2))
        assert caplog.messages == [LEFTOVER]
        with counted(model, "q_proj") as counts:
            run.train()
    assert caplog.messages.count(LEFTOVER) == 1
    assert [counts[idx] for idx in range(4)] == [4, 2, 4, 2]
    assert model.config.use_cache is True
    assert not hf_ckpt.remove(model)


def test_train_again_finds_the_leftover(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    used = HFCkptCallback("attention")
    run = trainer(model, tmp_path, used)
    Fault(model, torch.OutOfMemoryError(MEMORY), step=1)
    # What holds the error holds the call that it ended, as a notebook does: the next one cannot be taken for it.
    with pytest.raises(torch.OutOfMemoryError) as _held:
        run.train()
    with caplog.at_level(logging.INFO, logger="hf_ckpt"), counted(model, "q_proj") as counts:
        run.train()
    assert caplog.messages.count(LEFTOVER) == 1
    assert [counts[idx] for idx in range(4)] == [4, 4, 4, 4]
    assert model.config.use_cache is True
    assert not hf_ckpt.remove(model)
    assert used.report()["ckpt/num_layers_attention"] == 4


@pytest.mark.parametrize(
    ("policy", "in_backward"), [("full", False), ("ffn", True), ("segments_2", False), ("nested", True)]
)
def test_run_after_an_interruption_has_the_losses_of_runs_without_the_callback(
    tmp_path: Path, policy: str, in_backward: bool
) -> None:
    mode, options = POLICIES[policy]
    found = []
    for callbacks in ([], [HFCkptCallback(mode, **options)]):
        model = llama()
        run = trainer(model, tmp_path, *callbacks)
        Fault(model, RuntimeError(MEMORY), 1, in_backward)
        with pytest.raises(RuntimeError, match="out of memory"):
            run.train()
        run.train()
        found.append((losses(run), weights(model)))
    assert found[0][0] == found[1][0]
    assert changed(found[0][1], found[1][1]) == []


def test_smaller_batch_after_running_out_of_memory_has_the_plan_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "max_steps": 3}
    plain, model = llama(), llama()
    Fault(plain, RuntimeError(MEMORY), step=1)
    expected = trainer(plain, tmp_path, **arguments)
    expected.train()
    used = HFCkptCallback("full")
    run = trainer(model, tmp_path, used, **arguments)
    Fault(model, RuntimeError(MEMORY), step=1)
    with caplog.at_level(logging.INFO, logger="hf_ckpt"), counted(model, "q_proj") as counts:
        run.train()
    assert run._train_batch_size == expected._train_batch_size < 4
    assert losses(run) == losses(expected)
    assert changed(weights(plain), weights(model)) == []
    assert caplog.messages.count(LEFTOVER) == 1
    # One step and a forward before, three steps after.
    assert [counts[idx] for idx in range(4)] == [2 + 1 + 6] * 4
    assert model.config.use_cache is True
    assert not hf_ckpt.remove(model)
    assert used.report()["ckpt/tokens_per_sec"] > 0


def test_exception_of_another_callback_before_the_first_step_leaves_a_plan_that_is_found(tmp_path: Path) -> None:
    def fail(model: nn.Module) -> None:
        raise ValueError("a mistake of the user's")

    model = llama()
    run = trainer(model, tmp_path, HFCkptCallback("full"), During("on_train_begin", fail))
    with pytest.raises(ValueError, match="a mistake"):
        run.train()
    assert hf_ckpt.remove(model)
    assert model.config.use_cache is True


def test_policy_mended_after_an_error_starts_from_the_users_values(tmp_path: Path) -> None:
    model = llama()
    before = snapshot(model)
    run = trainer(model, tmp_path, HFCkptCallback({"mode": "full", "layers": "2:9"}))
    with pytest.raises(PolicyError):
        run.train()
    trainer(model, tmp_path, HFCkptCallback({"mode": "full", "layers": "2:"})).train()
    assert model.config.use_cache is True
    differing = {trace for trace in differences(before, snapshot(model)) if "_parameters" not in trace}
    assert differing == {": _is_accelerate_prepared"}
