"""A run that goes out of memory says where, why, and what would fit. On the CPU the error is raised by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from hf_ckpt import load_recipe
from hf_ckpt.cli.finetune import main
from hf_ckpt.finetune import train
from hf_ckpt.finetune.oom_report import Figures, OutOfMemoryRun, Part, RunWatch, explanation
from hf_ckpt.loading.trainer import build_trained_model, training_arguments
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.fit import capacity_of
from hf_ckpt.simulation.step_memory import Category, Phase, Place, StepMemory, Timeline
from hf_ckpt.trainer.batch import Batch
from tests import small_recipes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

MIB, GIB = 2**20, 2**30
# As torch's allocator says it.
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.50 GiB of which 1.25 GiB is "
    "free. Process 1 has 22.25 GiB memory in use. Of the allocated memory 20.00 GiB is allocated by PyTorch, and "
    "512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
RTX4090 = find_device("rtx4090")


def give_up(*_: Any) -> NoReturn:
    raise torch.OutOfMemoryError(MESSAGE)


# --- Where. ---


class Layer(nn.Module):
    """Gives up in one part of a run."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        self.forwards = 0

    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            if self.part is Part.EVALUATION:
                give_up()
            return hidden
        self.forwards += 1
        is_again = torch._C._current_graph_task_id() != -1
        if self.part is (Part.RECOMPUTATION if is_again else Part.FORWARD):
            give_up()
        if self.part is Part.BACKWARD and hidden.requires_grad:
            hidden = hidden * 1
            hidden.register_hook(give_up)  # type: ignore[no-untyped-call]
        return hidden


def fail_in(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model of every recipe give up there."""

    def built(*args: Any) -> Any:
        model: Any = build_trained_model(*args)
        model.model.layers[1].mlp.act_fn = nn.Sequential(model.model.layers[1].mlp.act_fn, Layer(part))
        return model

    monkeypatch.setattr(train, "build_trained_model", built)
    if part is Part.OPTIMIZER:
        norm = torch.nn.utils.clip_grad._get_total_norm

        def give_up_on_real_ones(gradients: list[Tensor], *rest: Any) -> Any:
            # The step is simulated as well, on fake ones.
            if type(gradients[0]) is Tensor:
                give_up()
            return norm(gradients, *rest)

        monkeypatch.setattr(torch.nn.utils.clip_grad, "_get_total_norm", give_up_on_real_ones)


@pytest.mark.parametrize("part", [part for part in Part if part is not Part.ELSEWHERE])
def test_run_ends_with_exit_code_1_and_says_the_part(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_in(part, monkeypatch)
    recipe = small_recipes.write(
        tmp_path,
        checkpointing={"policy": "full"},
        training={"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    )
    assert main([str(recipe)]) == 1
    message = capsys.readouterr().err
    rows = 4 if part is Part.EVALUATION else 2
    step = "" if part is Part.EVALUATION else " of step 1"
    assert f"Out of memory in the {part}{step}, with a batch of {rows} sequences of 3" in message
    assert "20.0 GiB were allocated and 512.0 MiB reserved without being used, of 23.5 GiB; 2.0 GiB more" in message
    if part is Part.EVALUATION:
        assert "A batch of evaluation is predicted to need" in message
    else:
        assert "Predicted for this batch: " in message
        assert "Probable cause: something else than the step, which is predicted to need" in message


@pytest.mark.sweep
def test_step_of_another_trainer_is_predicted_with_its_own_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl", minversion="1.16")
    fail_in(Part.BACKWARD, monkeypatch)
    recipe = small_recipes.of_trainer(tmp_path, "dpo", training={"max_steps": 1})
    assert main([str(recipe)]) == 1
    message = capsys.readouterr().err
    assert "Out of memory in the backward of step 1, with a batch of 4 sequences of " in message
    # A tile of logits on a CPU alone has 19 MiB.
    (peak,) = re.findall(r"Predicted for this batch: ([\d.]+) MiB", message)
    assert float(peak) > 19


def test_a_recovery_that_gave_up_says_what_it_has_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_in(Part.BACKWARD, monkeypatch)
    checkpointing = {"policy": "attention", "on_oom": "escalate", "quiet_steps": 10}
    assert main([str(small_recipes.write(tmp_path, checkpointing=checkpointing, training={"max_steps": 1}))]) == 1
    message = capsys.readouterr().err
    assert "There is no leaner plan. Tried: 1 more layer recomputed in full" in message
    assert "Out of memory in the backward of step 1, with a batch of 2 sequences of 3" in message
    assert "Predicted for this batch: " in message


# --- Why. ---


def predicted(peak: int) -> StepMemory:
    return StepMemory("rtx4090", None, 0, peak, Place(Phase.BACKWARD), {Category.SAVED: peak}, Timeline((), {}))


def figures(**changes: int | None) -> Figures:
    return Figures(**{"wanted": GIB, "capacity": 24 * GIB, "allocated": 20 * GIB, "unused": 0, **changes})


def watch(batch: Batch | None = None, after_steps: tuple[int, ...] = ()) -> RunWatch:
    return RunWatch(batch=batch, num_steps=9, after_steps=list(after_steps))


@pytest.mark.parametrize(
    ("failure", "peak", "expected"),
    [
        (OutOfMemoryRun(Part.BACKWARD, figures(), watch()), 20 * GIB, []),
        (OutOfMemoryRun(Part.BACKWARD, figures(unused=3 * GIB), watch()), 20 * GIB, ["fragmentation"]),
        # 0.5 GiB would not have been enough for the one that was asked for.
        (OutOfMemoryRun(Part.BACKWARD, figures(unused=GIB // 2), watch()), 20 * GIB, []),
        (
            OutOfMemoryRun(Part.BACKWARD, figures(), watch(after_steps=(8 * GIB, 12 * GIB))),
            12 * GIB,
            ["something grows: 4.0 GiB"],
        ),
        (
            OutOfMemoryRun(Part.BACKWARD, figures(), watch(after_steps=(8 * GIB, 8 * GIB))),
            12 * GIB,
            ["something else than"],
        ),
        (OutOfMemoryRun(Part.BACKWARD, Figures(), watch()), 12 * GIB, []),
        (
            OutOfMemoryRun(Part.FORWARD, figures(), watch(Batch(2, 90)), Batch(2, 80)),
            20 * GIB,
            ["a larger batch than the plan"],
        ),
        (OutOfMemoryRun(Part.FORWARD, figures(), watch(Batch(2, 80)), Batch(2, 80)), 20 * GIB, []),
    ],
)
def test_causes(failure: OutOfMemoryRun, peak: int, expected: list[str]) -> None:
    causes = list(failure.causes(predicted(peak)))
    assert [cause[: len(start)] for cause, start in zip(causes, expected, strict=True)] == expected


def test_message_of_another_allocator_gives_no_figures() -> None:
    assert Figures.of("out of memory") == Figures()
    assert Figures.of(MESSAGE) == Figures(2 * GIB, int(23.5 * GIB), 20 * GIB, GIB // 2, int(1.25 * GIB))
    assert OutOfMemoryRun(Part.ELSEWHERE, Figures(), RunWatch()).head() == (
        "Out of memory in the run, outside of its steps. The allocator gave no figures."
    )


def test_what_stays_allocated_is_noted_after_the_second_step() -> None:
    amounts = iter([100, 130, 160])
    noted = RunWatch(allocated=lambda: next(amounts))
    for step in range(1, 5):
        noted.on_step_end(None, SimpleNamespace(global_step=step), None)  # type: ignore[arg-type]
    assert noted.grown_bytes == 60


# --- What would fit. ---


def explained(tmp_path: Path, batch: Batch, usable: int, part: Part = Part.BACKWARD, **sections: Any) -> str:
    recipe = load_recipe(small_recipes.write(tmp_path, checkpointing={"policy": "full"}, **sections))
    device = replace(RTX4090, memory_bytes=capacity_of(RTX4090).needed_bytes(usable))
    failure = OutOfMemoryRun(part, Figures(), watch(batch))
    return explanation(failure, recipe, training_arguments(recipe), None, device)


WIDE = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
FULL_SIZE = {"config": {**WIDE, "num_attention_heads": 2}}


@pytest.mark.sweep
def test_budget_that_fits_is_the_override(tmp_path: Path) -> None:
    text = explained(tmp_path, Batch(8, 512), 47 * MIB, model=FULL_SIZE)
    assert "Predicted for this batch: " in text
    assert re.search(
        r"What fits: checkpointing\.policy=auto checkpointing\.memory_budget=\d+MiB, predicted to need", text
    )


@pytest.mark.sweep
def test_weights_that_do_not_fit_need_something_else_than_checkpointing(tmp_path: Path) -> None:
    # Not even next to the least that CUDA's context takes, 0.4 GiB less than the most.
    text = explained(tmp_path, Batch(1, 64), MIB - int(0.4 * 2**30), model=FULL_SIZE)
    assert "No plan fits memory_budget=" in text
    assert "activation checkpointing does not make them smaller. Adapters (lora: {r: 16" in text


def test_smaller_batch_of_evaluation_is_the_override(tmp_path: Path) -> None:
    text = explained(tmp_path, Batch(64, 512), 20 * MIB, Part.EVALUATION, model=FULL_SIZE)
    found = re.search(r"What fits: training\.per_device_eval_batch_size=(\d+) \(", text)
    assert found is not None
    assert 1 <= int(found[1]) < 64
