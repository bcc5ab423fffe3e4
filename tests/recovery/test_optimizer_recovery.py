"""The optimizer's step under a memory limit: what it needs is tried before it writes, and then it runs in parts."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import OutOfMemoryError
from hf_ckpt.recovery.optimizer_recovery import _KNOWN, Temporaries
from tests.recovery.limits import FailingOperators, Limit, Steps
from tests.training import arguments, changed, llama, rows, weights

NUM_STEPS = 4


class Limited(TrainerCallback):
    """Puts a limit on what the optimizer's step may allocate; `peaks` are what each step has."""

    def __init__(self, num_bytes: int | None, first: int = 0) -> None:
        self.peaks: list[int] = []
        self.raised = 0
        self._num_bytes, self._first = num_bytes, first
        self._mode = Limit()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mode = Limit(self._num_bytes if state.global_step >= self._first else None)
        self._mode.__enter__()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mode.__exit__(None, None, None)
        self.peaks.append(self._mode.peak_bytes)
        self.raised += self._mode.raised


def made(kind: type[torch.optim.Optimizer], model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of two groups, which works on all tensors of a group at once."""
    every = list(model.parameters())
    groups = [{"params": every[:10], "weight_decay": 0.1}, {"params": every[10:]}]
    return kind(groups, **{"lr": 1e-2, "foreach": True, **options})


def trained(
    folder: Path,
    kind: type[torch.optim.Optimizer],
    *callbacks: TrainerCallback,
    on_oom: str = "escalate",
    **options: Any,
) -> tuple[Trainer, dict[str, Tensor], HFCkptCallback]:
    model = llama()
    args = TrainingArguments(**arguments(folder, max_steps=NUM_STEPS, **options.pop("args", {})))
    ours = HFCkptCallback("none", on_oom=on_oom)
    optimizers = (made(kind, model, **options), None)
    run = Trainer(model=model, args=args, train_dataset=rows(), optimizers=optimizers, callbacks=[ours, *callbacks])
    run.train()
    return run, weights(model), ours


@pytest.mark.parametrize("kind", _KNOWN, ids=lambda kind: kind.__name__)
def test_a_step_in_parts_is_to_the_bit_that_of_the_whole(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    free = Limited(None)
    _, expected, _ = trained(tmp_path, kind, free, on_oom="error")
    # The first step makes state, which all of it must have.
    limit = max(free.peaks[1:]) // 3
    limited = Limited(limit, first=1)
    _, got, ours = trained(tmp_path, kind, limited)
    assert changed(expected, got) == []
    assert limited.raised >= 1
    assert ours.report()["ckpt/oom_recovered"] >= 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_a_first_step_that_has_room_for_its_state_and_little_more_runs_in_parts(
    kind: type[torch.optim.Optimizer], share: float, tmp_path: Path
) -> None:
    free = Limited(None)
    _, expected, _ = trained(tmp_path, kind, free, on_oom="error")
    # Beside all of its state.
    limited = Limited(int(free.peaks[0] - (1 - share) * free.peaks[1]))
    _, got, ours = trained(tmp_path, kind, limited)
    assert changed(expected, got) == []
    assert limited.raised >= 1
    assert ours.report()["ckpt/oom_recovered"] >= 1


def failing(folder: Path, number: int, *, after: bool, **options: Any) -> tuple[dict[str, Tensor], FailingOperators]:
    """Train with AdamW while operator `number` of the third optimizer step fails."""
    mode = FailingOperators({2: [number]}, after=after)
    with mode:
        _, got, _ = trained(folder, torch.optim.AdamW, Steps(mode, counts_optimizer=True), **options)
    return got, mode


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.sweep(keep=1)
def test_a_step_is_recovered_before_its_first_write_and_ended_after_it(after: bool, tmp_path: Path) -> None:
    _, expected, _ = trained(tmp_path, torch.optim.AdamW, on_oom="error")
    _, mode = failing(tmp_path, 10**6, after=after)
    recovered, ended = [], []
    for number in range(0, mode.number, 1 + mode.number // 16):
        with suppress(OutOfMemoryError):
            got, _ = failing(tmp_path, number, after=after)
            assert changed(expected, got) == []
            recovered.append(number)
            continue
        ended.append(number)
    # What is tried comes first, and everything after it writes.
    assert recovered
    assert ended
    assert max(recovered) < min(ended)


def test_state_that_was_half_made_is_made_again(tmp_path: Path) -> None:
    _, expected, _ = trained(tmp_path, torch.optim.AdamW, on_oom="error")
    mode = FailingOperators({0: [len(weights(llama())) + 20]})
    with mode:
        _, got, _ = trained(tmp_path, torch.optim.AdamW, Steps(mode, counts_optimizer=True))
    assert mode.raised == 1
    assert changed(expected, got) == []


def test_a_step_that_has_written_names_the_last_checkpoint_and_saves_nothing(tmp_path: Path) -> None:
    saving = {"args": {"save_strategy": "steps", "save_steps": 1}}
    _, mode = failing(tmp_path / "whole", 10**6, after=False, **saving)
    folder = tmp_path / "failed"
    with pytest.raises(
        OutOfMemoryError,
        match=r"optimizer step of step 3.* Do not save them\. The newest complete checkpoint is .*/checkpoint-2: 0",
    ):
        failing(folder, mode.number - 1, after=False, **saving)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_an_optimizer_that_is_not_known_is_not_stepped_twice(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        pass

    mode = FailingOperators({1: [0]})
    with (
        mode,
        pytest.raises(OutOfMemoryError, match=r"Weights may be half-way .* There is no checkpoint to go on from"),
    ):
        trained(tmp_path, Own, Steps(mode, counts_optimizer=True))


def test_hooks_on_all_optimizers_are_called_once(tmp_path: Path) -> None:
    called: list[int] = []
    hook = register_optimizer_step_post_hook(lambda *_: called.append(1))
    limited = Limited(20_000, first=1)
    try:
        with pytest.raises(OutOfMemoryError, match="Weights may be half-way"):
            trained(tmp_path, torch.optim.AdamW, limited)
    finally:
        hook.remove()
        # The step has not come to its end.
        limited._mode.__exit__(None, None, None)
    assert len(called) == 1


def test_parts_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, torch.optim.AdamW, Limited(20_000, first=1))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    num = len(weights(llama()))
    assert [line for line in lines if line.startswith("Out of memory")] == [
        f"Out of memory in the optimizer step of step 2, before anything of {num} weights was written. It goes on in "
        f"parts of {num // 2} and fewer, to the same result."
    ]


def test_temporaries_are_those_of_the_kernels() -> None:
    weight = nn.Parameter(torch.ones(8))
    shares = {}
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        optimizer = torch.optim.AdamW([weight], **options)
        shares[str(options)] = Temporaries.of(optimizer, optimizer.param_groups[0])
    assert shares == {
        "{'foreach': True}": Temporaries(1.0, is_at_once=True, state_share=2.0),
        "{'foreach': False}": Temporaries(3.0, is_at_once=False, state_share=2.0),
        "{'fused': True}": Temporaries(0.0, is_at_once=False, state_share=2.0),
    }
