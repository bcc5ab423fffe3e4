"""Policy `auto` under transformers' tensor parallelism: a rank's share is simulated, as followed steps show."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, IntervalStrategy, TrainingArguments
from transformers.distributed import DistributedConfig

from hf_ckpt import HFCkptCallback
from hf_ckpt.auto.simulation_coverage import check_run
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.policy.policy import Mode
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.simulator import StepSimulator
from tests import training
from tests.distributed.following_a_rank import RankRun, followed_here
from tests.distributed.runs import fresh_accelerate, local
from tests.distributed.tensor_parallel_on_a_cpu import tensor_parallel_on_a_cpu
from tests.distributed.test_followed_steps import MOST_RUNS, assert_followed

TOLERANCE = 2e-3


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that all ranks see."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        yield Path(folders[0])
        dist.barrier()


@dataclass(frozen=True, kw_only=True)
class SharedRun(RankRun):
    """A run whose matrices are shared by two processes, which read the same rows."""

    def model(self) -> nn.Module:
        with shared_folder() as folder:
            if dist.get_rank() == 0:
                super().model().save_pretrained(folder)
            dist.barrier()
            sharing = DistributedConfig(tp_size=2)
            return AutoModelForCausalLM.from_pretrained(
                folder, distributed_config=sharing, attn_implementation=self.attention
            )


RUNS = {
    "llama": SharedRun(),
    "llama, full": SharedRun(policy="full"),
    "llama, attention": SharedRun(policy="attention"),
    "llama, selective": SharedRun(policy="selective"),
    "llama, full, accumulated in bf16": SharedRun(policy="full", accumulation=2, bf16=True),
    "llama, adamw": SharedRun(policy="full", more={"optim": "adamw_torch"}),
    # Norms of heads, whose gradients are summed.
    "qwen3, full": SharedRun(model_type="qwen3", policy="full"),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.two("heads are split in two")
def test_predicted_peak_is_that_of_the_step_that_ran(name: str) -> None:
    with tensor_parallel_on_a_cpu():
        assert_followed(RUNS[name], "tp", TOLERANCE)


@pytest.mark.two("heads are split in two")
def test_layers_that_stand_for_others_give_what_all_of_them_give() -> None:
    run = RUNS["llama, full"]
    with tensor_parallel_on_a_cpu():
        simulator = StepSimulator(run.model(), run.step, CPU)
    found = [simulator.simulate("full", traces_all=traces_all) for traces_all in (False, True)]
    assert found[0].peak_bytes == found[1].peak_bytes
    assert found[0].timeline == found[1].timeline


# --- auto. ---


@dataclass(frozen=True)
class Outcome:
    """What a run left behind, and what was predicted and followed of its second step."""

    callback: HFCkptCallback
    followed_bytes: int
    losses: list[float]
    weights: dict[str, torch.Tensor]

    @property
    def planning(self) -> Any:
        assert self.callback._planning is not None
        return self.callback._planning


def trained(budget: str | None, **more: Any) -> Outcome:
    """A run of two steps under `auto`; without a plan where there is no budget."""
    run = SharedRun(more={"per_device_eval_batch_size": 2, **more})
    with tensor_parallel_on_a_cpu(), fresh_accelerate(), tempfile.TemporaryDirectory() as folder:
        trainer = run.trainer(Path(folder), run.model())
        trainer.eval_dataset, trainer.args.eval_strategy = run.data()[:2], IntervalStrategy.STEPS
        trainer.args.eval_steps = 1
        callback = HFCkptCallback("auto", memory_budget=budget or "1GiB")
        if budget is not None:
            trainer.add_callback(callback)
        followed = torch.tensor(followed_here(trainer).peak_bytes)
    dist.all_reduce(followed, dist.ReduceOp.MAX)
    held = {name: local(each.detach()).clone() for name, each in trainer.model.named_parameters()}
    return Outcome(callback, int(followed), training.losses(trainer), held)


@pytest.mark.two("heads are split in two")
def test_auto_keeps_a_budget_and_trains_as_without_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        plain, wide = trained(None), trained("1GiB")
    assert wide.callback.plan is not None
    assert wide.callback.plan.count(Mode.NONE) == 3
    least = wide.planning.simulator(wide.planning.batch).simulate("full").peak_bytes
    budget = (least + wide.planning.predicted_bytes) // 2
    most, followed = budget * (1 + TOLERANCE), []
    for _ in range(MOST_RUNS):  # The least of them, as `assert_followed` says.
        found = trained(f"{budget}B")
        assert found.callback.plan is not None
        assert found.callback.plan.count(Mode.NONE) < 3
        for each in (wide, found):
            assert each.losses == plain.losses
            assert training.changed(plain.weights, each.weights) == []
        followed.append(found.followed_bytes)
        if followed[-1] <= most:
            break
    assert min(followed) <= most < plain.followed_bytes
    assert (
        "Counted: input_ids, labels; LlamaForCausalLM; AdamW; 2 processes of tensor parallelism. Not counted: nothing "
        "that is known." in caplog.messages
    )


def refusal(run: SharedRun, **more: Any) -> str:
    """Return what `auto` says to a run."""
    with tensor_parallel_on_a_cpu(), fresh_accelerate(), tempfile.TemporaryDirectory() as folder:
        trainer = run.trainer(Path(folder), run.model())
        trainer.add_callback(HFCkptCallback("auto", memory_budget="1GiB"))
        with pytest.raises(UnsupportedError) as raised:
            trainer.train()
    return str(raised.value)


@pytest.mark.two("heads are split in two")
def test_what_was_not_followed_is_refused() -> None:
    assert 'under tensor parallelism "moe_tp_experts" of its plan is not simulated. Use a fixed policy' in refusal(
        SharedRun(model_type="mixtral")
    )
    assert "Adafactor, cannot be simulated where ranks share its state" in refusal(
        SharedRun(more={"optim": "adafactor"})
    )


@pytest.mark.two("heads are split in two")
def test_weights_that_some_ranks_share_are_refused() -> None:
    with tensor_parallel_on_a_cpu(), fresh_accelerate(), tempfile.TemporaryDirectory() as folder:
        run = SharedRun()
        trainer = run.trainer(Path(folder), run.model())
        some = pytest.raises(UnsupportedError, match="shares the weights among some of the ranks only")
        with mock.patch.object(TrainingArguments, "world_size", 4), some:
            check_run(trainer, trainer.args, trainer.model, "AdamW")
        adapted = get_peft_model(trainer.model, LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(UnsupportedError, match="under tensor parallelism adapters are not simulated"):
            check_run(trainer, trainer.args, adapted, "AdamW")
