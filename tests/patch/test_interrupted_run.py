"""After an exception out of train() whoever uses the model next finds no plan on it, though the traceback is kept."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

import hf_ckpt
from hf_ckpt import AlreadyAppliedError, HFCkptCallback
from hf_ckpt.patch.apply import plan_of
from hf_ckpt.patch.interrupted_run import TrainCall
from tests.exactness import POLICIES
from tests.traces import differences, snapshot
from tests.training import During, counted, llama, lora, rows, trainer

pytestmark = pytest.mark.core

BUSY = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


class Stop(BaseException):
    """No Exception, as KeyboardInterrupt is none."""


def fail(*args: Any, **kwargs: Any) -> None:
    raise Stop


class BadRows:
    """Rows of which the third that is asked for cannot be had."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.num_asked += 1
        if self.num_asked == 3:
            raise Stop
        return rows(16)[index]


def in_data(run: Trainer) -> None:
    run.train_dataset = BadRows()


def in_forward(run: Trainer) -> None:
    hook = run.model.get_output_embeddings().register_forward_hook(lambda *_: (hook.remove(), fail()))


def in_backward(run: Trainer) -> None:
    def place(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if type(args[0]) is torch.Tensor:
            # And no fake one, of a step that is simulated.
            hook.remove()
            args[0].register_hook(fail)

    hook = run.model.get_output_embeddings().register_forward_hook(place)


def in_recomputation(run: Trainer) -> None:
    layer = next(module for name, module in run.model.named_modules() if name.endswith("layers.1.mlp"))
    count = [0]

    def second(*args: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            hook.remove()
            fail()

    hook = layer.register_forward_pre_hook(second)


def in_optimizer(run: Trainer) -> None:
    run.create_optimizer()
    hook = run.optimizer.register_step_pre_hook(lambda *_: (hook.remove(), fail()))


def in_evaluation(run: Trainer) -> None:
    def look(module: nn.Module, args: Any) -> None:
        if not module.training:
            hook.remove()
            fail()

    hook = run.model.register_forward_pre_hook(look)


def in_saving(run: Trainer) -> None:
    run._save_optimizer_and_scheduler = fail


def in_callback(event: str, *, before: bool) -> Callable[[Trainer], None]:
    def place(run: Trainer) -> None:
        failing = During(event, fail)
        run.callback_handler.callbacks.insert(0 if before else len(run.callback_handler.callbacks), failing)

    return place


PLACES: dict[str, Callable[[Trainer], None]] = {
    "data": in_data,
    "forward": in_forward,
    "backward": in_backward,
    "recomputation": in_recomputation,
    "optimizer": in_optimizer,
    "evaluation": in_evaluation,
    "saving": in_saving,
    **{
        f"{event}, {'before' if before else 'after'} ours": in_callback(event, before=before)
        for event in ("on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_save")
        for before in (True, False)
    },
    "on_train_begin, after ours": in_callback("on_train_begin", before=False),
    "on_train_end, before ours": in_callback("on_train_end", before=True),
}


@contextmanager
def interrupted(
    model: nn.Module, folder: Path, place: Callable[[Trainer], None], policy: str = "mixed", **changes: Any
) -> Iterator[Trainer]:
    """A run that has ended in an exception; its traceback is kept, as notebooks do."""
    mode, options = POLICIES[policy]
    run = trainer(model, folder, HFCkptCallback(mode, **options), **{**BUSY, "max_steps": 1, **changes})
    place(run)
    with pytest.raises(Stop) as kept:
        run.train()
    assert kept.value.__traceback__ is not None
    yield run
    assert kept.value.__traceback__ is not None


def remains_of(model: nn.Module) -> list[str]:
    """What a plan or a run has left on a model."""
    found = ["use_cache"] if model.config.use_cache is not True else []
    for name, module in model.named_modules():
        seams = {"forward", "_gradient_checkpointing_func", "_hf_ckpt_applied", "save_pretrained", "train"}
        # accelerate leaves a forward of its own on what it prepares.
        left = (seams & set(module.__dict__)) - ({"forward"} if not name else set())
        left |= {"gradient_checkpointing"} if getattr(module, "gradient_checkpointing", False) else set()
        left |= {"hooks"} if module._forward_hooks or module._forward_pre_hooks else set()
        found += [f"{name}: {what}" for what in sorted(left)]
    return found


@pytest.mark.parametrize("place", PLACES)
def test_plain_trainer_after_an_exception_trains_without_the_plan(tmp_path: Path, place: str) -> None:
    model = llama()
    with interrupted(model, tmp_path / "first", PLACES[place]):
        with counted(model, "q_proj") as counts:
            trainer(model, tmp_path / "second", max_steps=1).train()
        assert [counts[idx] for idx in range(4)] == [1] * 4
        # The Trainer's own setting, which it leaves behind.
        assert remains_of(model) == ["use_cache"]


def forward(model: nn.Module, folder: Path) -> None:
    model(**{name: row[None] for name, row in rows(1)[0].items()})


def evaluate(model: nn.Module, folder: Path) -> None:
    forward(model.eval(), folder)


def forward_without_gradients(model: nn.Module, folder: Path) -> None:
    with torch.no_grad():
        forward(model, folder)


def generate(model: nn.Module, folder: Path) -> None:
    model.eval().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False, pad_token_id=0)


def save(model: nn.Module, folder: Path) -> None:
    model.save_pretrained(folder / "saved")
    assert json.loads((folder / "saved" / "config.json").read_text())["use_cache"] is True


def apply_by_hand(model: nn.Module, folder: Path) -> None:
    hf_ckpt.apply(model, "full").remove()


@pytest.mark.parametrize("use", [forward, forward_without_gradients, evaluate, generate, save, apply_by_hand])
@pytest.mark.parametrize("place", ["forward", "saving"])
def test_whoever_uses_the_model_after_an_exception_finds_no_trace(
    tmp_path: Path, place: str, use: Callable[[nn.Module, Path], None]
) -> None:
    model = llama()
    names = list(model.state_dict())
    with interrupted(model, tmp_path, PLACES[place]):
        assert list(model.state_dict()) == names
        use(model, tmp_path)
        assert remains_of(model) == []


def test_inner_model_and_base_of_an_adapter_find_no_trace(tmp_path: Path) -> None:
    model = lora()
    with interrupted(model, tmp_path, in_backward):
        base = model.merge_and_unload()
        assert isinstance(base, type(llama()))
        base.save_pretrained(tmp_path / "saved")
        assert json.loads((tmp_path / "saved" / "config.json").read_text())["use_cache"] is True
        assert remains_of(base) == []
    model = llama()
    with interrupted(model, tmp_path, in_backward):
        model.model(torch.tensor([[5, 6, 7]]))
        assert remains_of(model) == []


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_an_interrupted_run_lose_the_plan_too(tmp_path: Path, way: Callable[[nn.Module], nn.Module]) -> None:
    model = llama()
    with interrupted(model, tmp_path, in_callback("on_step_begin", before=False)):
        copied = way(model)
        with counted(copied, "q_proj") as counts:
            forward(copied, tmp_path)
        assert [counts[idx] for idx in range(4)] == [1] * 4
        assert remains_of(copied) == []
        assert plan_of(model) is not None


def test_offloading_plan_is_taken_off_before_anything_is_sent(tmp_path: Path) -> None:
    model = llama()
    used = HFCkptCallback("full", offload={"to": "cpu", "min_bytes": 0})
    run = trainer(model, tmp_path, used, max_steps=1)
    in_backward(run)
    with pytest.raises(Stop) as kept:
        run.train()
    forward(model, tmp_path)
    assert remains_of(model) == []
    assert kept.value.__traceback__ is not None


def test_plan_of_auto_is_not_made_anew_after_an_exception(tmp_path: Path) -> None:
    model = llama()
    run = trainer(model, tmp_path, HFCkptCallback("auto", memory_budget="4GiB"), max_steps=1)
    in_backward(run)
    with pytest.raises(Stop) as kept:
        run.train()
    # Longer than what was planned for.
    ids = torch.zeros(4, 64, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    assert remains_of(model) == []
    assert kept.value.__traceback__ is not None


# torch looks at the attribute while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.sweep
def test_compiled_model_loses_the_plan_too(tmp_path: Path) -> None:
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager", "eval_strategy": "no"}
    model = llama()
    with interrupted(model, tmp_path, in_callback("on_pre_optimizer_step", before=False), **compiled):
        trainer(model, tmp_path, max_steps=1, **compiled).train()
        assert remains_of(model) == ["use_cache"]


def test_plan_applied_by_hand_stays_until_it_is_removed(tmp_path: Path) -> None:
    model = llama()
    applied = hf_ckpt.apply(model, "full")
    run = trainer(model, tmp_path, max_steps=1)
    in_backward(run)
    with pytest.raises(Stop):
        run.train()
    with counted(model, "q_proj") as counts:
        trainer(model, tmp_path, max_steps=1).train()
    assert [counts[idx] for idx in range(4)] == [2] * 4
    applied.remove()
    assert plan_of(model) is None


class Within(TrainerCallback):
    """Trains and evaluates the model of a run at one of its events."""

    def __init__(self, event: str, act: Callable[[nn.Module], None]) -> None:
        setattr(self, event, lambda args, state, control, model, **kwargs: act(model))


@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_substep_end", "on_evaluate", "on_save"])
def test_trainer_and_evaluation_within_a_run_leave_its_plan_alone(tmp_path: Path, event: str) -> None:
    model = llama()
    inner_counts: list[int] = []

    def act(model: nn.Module) -> None:
        with counted(model, "q_proj") as counts:
            inner = trainer(model, tmp_path / "inner", max_steps=1, eval_strategy="steps", eval_steps=1)
            inner.train()
            inner.evaluate()
        model.zero_grad()
        inner_counts.append(counts[0])
        assert plan_of(model) is not None

    run = trainer(
        model,
        tmp_path,
        HFCkptCallback("full", on_mismatch="warn"),
        Within(event, act),
        gradient_accumulation_steps=2,
        **BUSY,
    )
    run.train()
    assert set(inner_counts) == {2}
    assert remains_of(model) == []


def test_second_run_with_the_callback_within_a_run_is_refused(tmp_path: Path) -> None:
    model = llama()
    before = snapshot(model)
    messages: list[str] = []

    def act(model: nn.Module) -> None:
        with pytest.raises(AlreadyAppliedError) as raised:
            trainer(model, tmp_path / "inner", HFCkptCallback("full"), max_steps=1).train()
        messages.append(str(raised.value))
        assert plan_of(model) is not None

    trainer(model, tmp_path, HFCkptCallback("attention"), Within("on_step_end", act), max_steps=1).train()
    assert "while another one with HFCkptCallback trains the same model" in messages[0]
    differing = {trace for trace in differences(before, snapshot(model)) if "_parameters" not in trace}
    assert differing == {": _is_accelerate_prepared"}


def test_call_is_over_once_its_frame_is_only_kept() -> None:
    class Run:
        callback_handler = None

        def train(self, look: Callable[[], None]) -> None:
            look()

    calls: list[TrainCall] = []

    def look() -> None:
        from hf_ckpt.patch.interrupted_run import train_call

        call = train_call()
        assert call.is_running()
        assert not call.is_around_another()
        if calls:
            # Called within the first one.
            assert calls[0].is_running()
            assert calls[0].is_around_another()
        calls.append(call)
        if len(calls) == 1:
            Run().train(look)
        raise Stop

    with pytest.raises(Stop) as kept:
        Run().train(look)
    assert len(calls) == 2
    assert not any(call.is_running() for call in calls)
    assert kept.value.__traceback__ is not None
