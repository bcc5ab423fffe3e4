"""Policy `auto` on two ranks: rank 0 plans, both train under its plan, to the numbers of a run without one."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.auto.replan import RunPlanner
from hf_ckpt.errors import BudgetError, HFCkptError, OtherProcessError, UnsupportedError
from hf_ckpt.policy.policy import Mode
from hf_ckpt.simulation.devices import CPU, GIB
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Sharding, Step
from tests.auto.test_more_than_text import KINDS, Stream, collate, examples, vision_language
from tests.distributed.runs import Outcome, fresh_accelerate, full_fine_tune, train
from tests.training import During, arguments, losses
from tests.zoo_tables import LENGTH

ENGINES = ["ddp", "fsdp2"]
# So many that activations are more than weights.
ROWS: dict[str, Any] = {"per_device_train_batch_size": 32}


@functools.cache
def without_plan(engine: str) -> Outcome:
    return train(full_fine_tune("llama"), engine, **ROWS)


@functools.cache
def peak(engine: str) -> int:
    step = Step(batch_size=32, seq_length=LENGTH, sharding=Sharding(engine=engine, world_size=2))
    return simulate_step(full_fine_tune("llama"), None, step, CPU).peak_bytes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.two("budgets are those of two")
def test_both_ranks_train_under_one_plan_to_the_same_bits(engine: str) -> None:
    callback = HFCkptCallback("auto", memory_budget=f"{int(0.8 * peak(engine))}B")
    got = train(full_fine_tune("llama"), engine, callback, **ROWS)
    expected = without_plan(engine)
    assert (got.engine, got.losses, got.names) == (engine, expected.losses, expected.names)
    assert callback.plan is not None
    assert callback.plan.count(Mode.NONE) < len(callback.plan.stacks[0].layers)
    digests: list[str | None] = [None, None]
    dist.all_gather_object(digests, callback.plan.digest())
    assert digests[0] == digests[1]
    assert callback.report()["ckpt/predicted_peak_gib"] > 0


def run_with_images(data: Any, callback: HFCkptCallback | None, *others: Any) -> list[float]:
    with fresh_accelerate(), tempfile.TemporaryDirectory() as folder:
        # The last layer of the images' tower gives the text nothing.
        own = {"remove_unused_columns": False, "ddp_find_unused_parameters": True}
        args = TrainingArguments(**arguments(Path(folder), accelerator_config={"dispatch_batches": False}, **own))
        callbacks: Any = [*others, *([] if callback is None else [callback])]
        trainer = Trainer(vision_language("llava"), args, collate, train_dataset=data, callbacks=callbacks)
        trainer.train()
    return losses(trainer)


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.two("budgets are those of two")
def test_both_ranks_train_on_images_under_one_plan(kind: type) -> None:
    # The most images come to the other rank than the longest text.
    sizes = [(8, 1), (8, 1), (8, 2), (8, 2), (40, 1), (8, 1), (8, 1), (8, 1)]
    data = kind(examples(KINDS["llava"], sizes))
    callback = HFCkptCallback("auto", memory_budget="1GiB")
    assert run_with_images(data, callback) == run_with_images(data, None)
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, (callback.plan and callback.plan.digest(), callback.planned_for))
    assert plans[0] == plans[1]
    planned_for = callback.planned_for
    assert planned_for is not None
    assert "pixel_values" in planned_for.names


@pytest.mark.two("one of two runs a forward alone")
def test_forward_of_a_callback_on_one_rank_waits_for_nobody() -> None:
    data = Stream(examples(KINDS["llava"], [(8, 1)] * 8))

    def look(model: nn.Module) -> None:
        if dist.get_rank() == 0:
            model(input_ids=torch.ones(1, 4, dtype=torch.long))

    beside = During("on_step_end", look)
    callback = HFCkptCallback("auto", memory_budget="1GiB")
    assert run_with_images(data, callback, beside) == run_with_images(data, None, beside)


def test_budget_that_nothing_fits_ends_both_ranks() -> None:
    with pytest.raises(HFCkptError) as raised:
        train(full_fine_tune("llama"), "ddp", HFCkptCallback("auto", memory_budget="10kB"))
    assert type(raised.value) is (BudgetError if dist.get_rank() == 0 else OtherProcessError)
    assert "No plan fits memory_budget=9.8 KiB." in str(raised.value)


def refuse_on_rank_0(*given: Any) -> None:
    if dist.get_rank() == 0:
        raise UnsupportedError("not here")


@pytest.mark.parametrize("is_everywhere", [False, True], ids=["rank 0", "all ranks"])
def test_both_ranks_fall_back_where_one_cannot_plan(is_everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_everywhere:
        monkeypatch.setattr(RunPlanner, "_decide", refuse_on_rank_0)
    callback = HFCkptCallback("auto", memory_budget="1GiB", fallback="full")
    got = train(full_fine_tune("llama"), "ddp", callback, neftune_noise_alpha=5.0 if is_everywhere else None)
    assert callback.plan is not None
    assert callback.plan.count(Mode.FULL) == len(callback.plan.stacks[0].layers)
    if not is_everywhere:
        assert got.losses == train(full_fine_tune("llama"), "ddp").losses


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.two("what two hold is predicted")
def test_optimizer_that_runs_is_the_one_that_is_simulated(engine: str) -> None:
    # accelerate's default for FSDP1 is to prefetch nothing.
    sharding = Sharding(engine=engine, world_size=2, prefetches_in_backward=engine != "fsdp1")
    step = Step(batch_size=1, seq_length=LENGTH, is_proven=True, optim="sgd", sharding=sharding)
    expected = simulate_step(full_fine_tune("llama"), None, step, CPU).peak_bytes
    callback = HFCkptCallback("auto", memory_budget="1GiB")
    train(full_fine_tune("llama"), engine, callback, optim="sgd")
    assert callback.report()["ckpt/predicted_peak_gib"] * GIB == pytest.approx(expected, rel=0.001)
