"""What is not run again where memory runs out in it: the run ends, and the error says what is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import OutOfMemoryError
from tests.recovery.limits import FRAGMENTED, FULL
from tests.training import arguments, llama, rows, trainer


def test_clipping_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", fail)
    run = trainer(llama(num_hidden_layers=1), tmp_path, HFCkptCallback("none", on_oom="escalate"))
    with pytest.raises(OutOfMemoryError, match=r"in the clipping of gradients, after 0 steps\."):
        run.train()
    assert "clip_grad_norm_" not in vars(run.accelerator)


@pytest.mark.parametrize(("name", "step"), [("_save_checkpoint", 2), ("log", 1)])
def test_what_runs_between_steps_says_what_to_go_on_from(name: str, step: int, tmp_path: Path) -> None:
    class Failing(Trainer):
        pass

    def fail(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            raise torch.OutOfMemoryError(FRAGMENTED)
        return getattr(Trainer, name)(self, *args, **kwargs)

    setattr(Failing, name, fail)
    args = TrainingArguments(**arguments(tmp_path, save_strategy="steps", save_steps=1))
    callback = HFCkptCallback("none", on_oom="escalate")
    run = Failing(model=llama(num_hidden_layers=1), args=args, train_dataset=rows(), callbacks=[callback])
    with pytest.raises(OutOfMemoryError) as caught:
        run.train()
    after, where = {
        "_save_checkpoint": ("2 steps", f"The newest complete checkpoint is {tmp_path}/checkpoint-1: 1 step is lost."),
        "log": ("1 step", "There is no checkpoint to go on from: 1 step is lost."),
    }[name]
    assert str(caught.value) == (
        f"Out of memory in the logging, evaluation or saving, after {after}. 20.0 GiB were allocated and 40.0 GiB "
        f"reserved without being used, of 79.0 GiB; 2.0 GiB more were asked for. It is not run again. {where}"
    )
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert "_maybe_log_save_evaluate" not in vars(run)
