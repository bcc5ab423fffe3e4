"""Policy `auto` in a Trainer: a plan for the largest batch, within the budget, and the same numbers as without one."""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset as Table
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt import HFCkptCallback, Plan, PolicyError
from hf_ckpt.auto import budgets
from hf_ckpt.auto.budgets import AllocatorState, _usable
from hf_ckpt.auto.replan import _rounded_up
from hf_ckpt.auto.simulation_coverage import Coverage
from hf_ckpt.errors import BudgetError, UnsupportedError
from hf_ckpt.planner.search import StepPlanner
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.options import Offload
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.simulation.devices import CPU, GIB, find_device, workspace_bytes
from hf_ckpt.simulation.fake_model import meta_copy
from hf_ckpt.simulation.fit import Capacity, capacity_of, judge
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.trainer.batch import Batch, largest_text_batch
from hf_ckpt.trainer.training_run import StepProof
from hf_ckpt.units import parse_budget
from tests.training import VOCAB, arguments, changed, llama, lora, losses, rows, weights

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

ROWS, LONGEST = 2, 64
MODELS: dict[str, Callable[[], nn.Module]] = {"full fine-tune": llama, "lora": lora}
LENGTHS = (9, 17, 30, LONGEST, 12, 40, 8, 21)


def examples(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, torch.Tensor]]:
    """Random texts of these lengths, their own labels."""
    tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in torch.split(tokens, list(lengths))]


def pad(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad examples on the right to the longest one of the batch."""
    rows = [example["input_ids"] for example in batch]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Stream(IterableDataset):  # type: ignore[type-arg]  # upstream
    """Examples whose number and lengths nobody knows before."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from examples(self._lengths)


class Computed(Dataset):  # type: ignore[type-arg]  # upstream
    """Examples that are made when they are asked for."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return examples()[index]


def run(model: nn.Module, folder: Path, *callbacks: HFCkptCallback, data: Any = None, **changes: Any) -> Trainer:
    """Train two steps over padded examples."""
    args = TrainingArguments(**arguments(folder, **{"per_device_train_batch_size": ROWS, **changes}))
    train = examples() if data is None else data
    trainer = Trainer(model, args, pad, train_dataset=train, eval_dataset=examples()[:4], callbacks=[*callbacks])
    trainer.train()
    return trainer


def step(length: int = LONGEST, rows: int = ROWS, **changes: Any) -> Step:
    """The largest step of `run`, as the Trainer's arguments say."""
    given: dict[str, Any] = {"optim": "adamw_torch_fused", "is_proven": True, **changes}
    return Step(batch_size=rows, seq_length=length, is_padded=True, **given)


@functools.cache
def peak(kind: str, mode: str, length: int = LONGEST) -> int:
    return simulate_step(MODELS[kind](), mode, step(length), CPU).peak_bytes


def between(kind: str, share: float, length: int = LONGEST) -> str:
    """A budget between the peaks of mode full and mode none."""
    low, high = peak(kind, "full", length), peak(kind, "none", length)
    return f"{int(low + share * (high - low))}B"


@functools.cache
def without_plan(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = MODELS[kind]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = run(model, Path(folder), eval_strategy="steps", eval_steps=1)
    return losses(trainer), weights(model)


# --- The plan. ---


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.sweep(keep=1)
def test_auto_mixes_modes_within_the_budget_and_trains_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    model, callback = MODELS[kind](), HFCkptCallback("auto", memory_budget=between(kind, 0.4))
    trainer = run(model, tmp_path, callback, eval_strategy="steps", eval_steps=1)
    expected_losses, expected_weights = without_plan(kind)
    assert losses(trainer) == expected_losses
    assert len(expected_losses) == 4
    assert changed(expected_weights, weights(model)) == []
    plan = callback.plan
    assert plan is not None
    modes = {layer.mode for layer in plan.stacks[0].layers}
    assert len(modes) > 1
    assert Plan.from_json((tmp_path / "hf_ckpt_plan.json").read_text()) == plan
    # For the longest example and another one beside it, whatever the first batch was.
    budget = int(between(kind, 0.4)[:-1])
    planned_for = simulate_step(MODELS[kind](), plan, step(), CPU).peak_bytes
    assert callback.report()["ckpt/predicted_peak_gib"] == pytest.approx(planned_for / GIB, rel=0.01)
    assert planned_for <= budget < peak(kind, "none")


def test_a_large_budget_recomputes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = HFCkptCallback("auto", memory_budget="1GiB")
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        run(llama(num_hidden_layers=1), tmp_path, callback)
    assert callback.plan is not None
    assert callback.plan.count(Mode.NONE) == 1
    assert "Planning for 2 sequences of 64 tokens within" in caplog.text
    assert "Planned for 2 sequences of 64 tokens: predicted peak" in caplog.text
    assert "a CPU does not count what is allocated." in caplog.text


@pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning")
@pytest.mark.parametrize("share", [2, 0.4], ids=["none fits", "none does not fit"])
@pytest.mark.sweep(keep=1)
def test_checkpointing_of_the_trainers_own_arguments_is_not_what_is_planned_for(tmp_path: Path, share: float) -> None:
    """The plan governs, also the one that keeps everything."""
    plans = []
    for is_on in (False, True):
        callback = HFCkptCallback("auto", memory_budget=between("full fine-tune", share))
        run(llama(), tmp_path, callback, gradient_checkpointing=is_on)
        plans.append((callback.plan, callback.report()["ckpt/predicted_peak_gib"]))
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiles": 8}, r"tiles is 8 with policy \"auto\""),
        ({"offload": {"to": "cpu", "fraction": 0.5}}, "Leave fraction out"),
        ({"save": ["aten.mm"]}, "save was given with policy"),
        ({"head": "chunk"}, 'Did you mean "chunked"'),
    ],
)
def test_what_only_the_planner_can_say_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        HFCkptCallback("auto", memory_budget="1GiB", **options)


@pytest.mark.sweep
def test_offload_that_is_allowed_is_planned_and_trains_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Allowed] = []

    def plan_for(planner: StepPlanner, capacity: Capacity, *, compare: bool) -> Any:
        simulator, allowed = planner._simulator, planner._allowed
        asked.append(allowed)
        plan = simulator.plan_of(Policy.parse("full", offload=allowed.offload_option))
        memory = simulator.memory(plan)
        verdict = judge(memory.peak_bytes, 0, capacity)
        return SimpleNamespace(plan=plan, memory=memory, verdict=verdict, exactness=None)

    monkeypatch.setattr(StepPlanner, "plan_for", plan_for)
    offload = {"to": "cpu", "min_bytes": 0}
    model, callback = lora(), HFCkptCallback("auto", memory_budget=between("lora", 0.4), offload=offload, tiles=1)
    trainer = run(model, tmp_path, callback, eval_strategy="steps", eval_steps=1)
    expected_losses, expected_weights = without_plan("lora")
    assert losses(trainer) == expected_losses
    assert changed(expected_weights, weights(model)) == []
    (allowed,) = asked
    # No more than is free here; how much that is is no part of the plan.
    assert allowed.offload is not None
    assert allowed.offload.host_memory is not None
    assert (allowed.tiles, allowed.head, allowed.exact) == (False, None, "prefer")
    assert callback.plan is not None
    entries = callback.plan.stacks[0].layers
    assert [entry.offload for entry in entries] == [Offload(fraction=1.0, min_bytes=0)] * 3 + [None]
    report = callback.report()
    assert report["ckpt/offloaded_gib"] > 0
    assert report["ckpt/host_peak_gib"] > 0
    assert report["ckpt/offloaded_share"] == 1


@pytest.fixture
def plans_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the planner answer mode full, so that only what is made of its plans takes time."""

    def plan_for(planner: StepPlanner, capacity: Capacity, *, compare: bool) -> Any:
        simulator = planner._simulator
        plan = simulator.plan_of(Policy.parse("full"))
        memory = simulator.memory(plan)
        verdict = judge(memory.peak_bytes, 0, capacity)
        return SimpleNamespace(plan=plan, memory=memory, verdict=verdict, exactness=None)

    monkeypatch.setattr(StepPlanner, "plan_for", plan_for)


def test_stream_is_planned_as_batches_come_and_anew_for_a_longer_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, plans_full: None
) -> None:
    lengths = (8, 8, 40, 62, 30, 10, 63, 63)
    plain, model = llama(), llama()
    expected = run(plain, tmp_path / "plain", data=Stream(lengths), max_steps=4)
    callback = HFCkptCallback("auto", memory_budget=between("full fine-tune", 0.6))
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        trainer = run(model, tmp_path / "auto", callback, data=Stream(lengths), max_steps=4)
    assert losses(trainer) == losses(expected)
    assert changed(weights(plain), weights(model)) == []
    planned = [line.partition(":")[0] for line in caplog.messages if line.startswith("Planned for")]
    # The first batch fits as it is. 30 tokens need no look; 63 do, and the plan for 62 holds them.
    assert planned == [f"Planned for 2 sequences of {length} tokens" for length in (8, 62, 63)]
    assert sum(line.startswith("Another plan is in force") for line in caplog.messages) == 1
    assert callback.plan is not None
    assert callback.plan.count(Mode.FULL) == 4
    assert callback.planned_for == Batch(2, 63, is_padded=True)
    assert "_hf_ckpt_applied" not in vars(model.model.layers)


def test_replaced_plan_is_checked_in_the_next_step(tmp_path: Path, plans_full: None) -> None:
    seen: list[list[str]] = []

    class Watched(HFCkptCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            watched = next(part for part in self._parts if isinstance(part, StepProof))._first_step
            seen.append([] if watched is None else [str(entry.mode) for _, _, entry in watched._layers])
            super().on_pre_optimizer_step(*args, **kwargs)

    model = llama(num_hidden_layers=1)
    budget = simulate_step(model, None, step(62), CPU).peak_bytes - 1
    callback = Watched("auto", memory_budget=f"{budget}B")
    run(model, tmp_path, callback, data=Stream((62,) * 6), max_steps=3)
    assert seen == [[], ["full"], []]


def test_smallest_budget_that_cannot_hold_says_what_would(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)
    with pytest.raises(BudgetError, match=r"No plan fits memory_budget=9\.8 KiB\. Lowest predicted peak is .* KiB"):
        run(model, tmp_path, HFCkptCallback("auto", memory_budget="10kB"))
    assert "_hf_ckpt_applied" not in vars(model.model.layers)


def test_batches_that_a_larger_one_holds_are_asked_for_no_more(tmp_path: Path) -> None:
    callback = HFCkptCallback("auto", memory_budget="1GiB")
    given = {"data": Stream((8, 12, 20, 40)), "per_device_train_batch_size": 1, "max_steps": 4}
    run(llama(num_hidden_layers=1), tmp_path, callback, **given)
    assert callback._planning is not None
    asked = [[(each.rows, each.length) for each in batches] for batches in callback._planning._fitting.values()]
    assert asked == [[(1, 40)]]


@pytest.mark.parametrize("data", [Stream((LONGEST,) * 8), None], ids=["a stream", "known lengths"])
@pytest.mark.sweep(keep=1)
def test_a_budget_that_does_not_hold_the_batch_lets_the_trainer_find_a_smaller_one(
    data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Between what two rows need in full and three.
    two, three = (simulate_step(llama(num_hidden_layers=2), "full", step(rows=rows), CPU).peak_bytes for rows in (2, 3))
    given = {"data": data, "auto_find_batch_size": True, "per_device_train_batch_size": 3, "max_steps": 1}
    callback = HFCkptCallback("auto", memory_budget=f"{(2 * two + three) // 3}B", tiles=1, head="plain")
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        trainer = run(llama(num_hidden_layers=2), tmp_path, callback, **given)
    assert trainer._train_batch_size == 2
    (told,) = [text for text in caplog.messages if "auto_find_batch_size tries fewer sequences" in text]
    assert "No plan fits memory_budget=" in told
    assert not any("ends the run" in text for text in caplog.messages)
    assert "the Trainer begins again at its first step, with fewer sequences" in caplog.text
    # With one row there is nothing left to try.
    with pytest.raises(BudgetError, match="No plan fits"):
        run(llama(num_hidden_layers=2), tmp_path, HFCkptCallback("auto", memory_budget="10kB"), **given)


@pytest.mark.parametrize("options", [{}, {"on_oom": "error"}])
def test_running_out_of_memory_is_not_said_to_end_a_run_that_finds_its_batch_size(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Small(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self._train_batch_size > 2:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return super().training_step(*args, **kwargs)

    given = {"auto_find_batch_size": True, "per_device_train_batch_size": 3, "max_steps": 1}
    planned = HFCkptCallback("auto", memory_budget="1GiB", **options)
    args = TrainingArguments(**arguments(tmp_path, **given))
    trainer = Small(llama(num_hidden_layers=1), args, train_dataset=rows(), callbacks=[planned])
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        trainer.train()
    assert trainer._train_batch_size == 2
    assert not any("ends the run" in text for text in caplog.messages)
    again = "the Trainer begins again at its first step, with fewer sequences"
    told = [text for text in caplog.messages if again in text]
    # For each batch size, where recovery was asked for.
    assert len(told) == (0 if options else 2)


def test_evaluation_beyond_the_budget_is_told_with_a_batch_size_that_fits(tmp_path: Path) -> None:
    callback = HFCkptCallback("auto", memory_budget="2MB", max_length=16)
    with pytest.warns(
        UserWarning, match=r"Evaluation of 256 sequences of 16 tokens needs .* Set per_device_eval_batch_size="
    ):
        run(
            llama(num_hidden_layers=1),
            tmp_path,
            callback,
            max_steps=1,
            eval_strategy="epoch",
            per_device_eval_batch_size=256,
            data=examples((16, 16)),
        )


def test_resumed_run_with_another_plan_goes_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    run(llama(num_hidden_layers=1), tmp_path, HFCkptCallback("full"), **saving)
    args = TrainingArguments(**arguments(tmp_path, per_device_train_batch_size=ROWS))
    callback = HFCkptCallback("auto", memory_budget="1GiB")
    trainer = Trainer(llama(num_hidden_layers=1), args, pad, train_dataset=examples(), callbacks=[callback])
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "was written under another plan. Results do not change, memory does." in caplog.text
    assert trainer.state.global_step == 2


# --- What is refused. ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "auto", "memory_budget": "22"}, 'memory_budget is "22", without a unit. Write "22GiB" or "22GB"'),
        ({"policy": "auto", "memory_budget": "22GX"}, 'with the unknown unit "GX"'),
        ({"policy": "auto", "memory_budget": -1}, "memory_budget is -1. It must be above 0"),
        ({"policy": "auto", "max_length": 0}, "max_length is 0. Write the tokens of the longest example"),
        ({"policy": "auto", "every_n_layers": 2}, 'every_n_layers was given with policy "auto"'),
        ({"policy": "full", "memory_budget": "22GiB"}, 'memory_budget is 22GiB, but only policy "auto" plans for a'),
        ({"policy": "full", "max_length": 9}, "max_length is 9, but only policy"),
        ({"policy": [{"mode": "auto"}]}, 'Mode "auto" in a rule: "auto" plans for all layers together'),
    ],
)
def test_wrong_words_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        HFCkptCallback(**options)
    assert message in str(raised.value)


def test_apply_refuses_auto_because_no_step_is_known() -> None:
    with pytest.raises(PolicyError, match="no step is known here"):
        hf_ckpt.apply(llama(), "auto")


@pytest.mark.parametrize(
    ("budget", "changes", "error", "message"),
    [
        (None, {}, PolicyError, "has no memory_budget, and this machine's CPU shares its memory"),
        ("900TB", {}, PolicyError, 'memory_budget is "900TB", but this machine\'s CPU has'),
        ("1GB", {"neftune_noise_alpha": 5}, UnsupportedError, "Use neftune_noise_alpha=null, or another policy."),
    ],
)
def test_run_that_cannot_be_planned_is_refused(
    tmp_path: Path, budget: str | None, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        run(llama(num_hidden_layers=1), tmp_path, HFCkptCallback("auto", memory_budget=budget), **changes)
    assert message in str(raised.value)


# --- The largest batch. ---

FLATTENING = DataCollatorWithFlattening()  # type: ignore[no-untyped-call]  # upstream


class Multiple:
    """As collators of transformers say it."""

    pad_to_multiple_of = 16


class Around:
    """As the Trainer puts one around a collator."""

    def __init__(self, collator: object) -> None:
        self.data_collator = collator


class ToMaxLength:
    padding, max_length, pad_to_multiple_of = "max_length", 50, None


# torch's annotations know no list as a data set.
LIST: Any = examples()
TABLE = Table.from_dict({"input_ids": [[1] * length for length in (5, 9, 30)], "other": [1, 2, 3]})
MASKED = Table.from_dict({"input_ids": [[1] * 9] * 3, "attention_mask": [[1] * 9, [1] * 9, [1] * 8 + [0]]})


@pytest.mark.parametrize(
    ("data", "collator", "rows", "max_length", "expected"),
    [
        (examples(), pad, 2, None, Batch(2, 64, is_padded=True)),
        (examples(), pad, 1, None, Batch(1, 64)),
        (examples((7, 7)), pad, 2, None, Batch(2, 7)),
        (examples((7, 7)), Around(Multiple()), 2, None, Batch(2, 16, is_padded=True)),
        (examples((7, 9)), ToMaxLength(), 2, None, Batch(2, 50, is_padded=True)),
        # The two longest examples in one row.
        (examples(), Around(FLATTENING), 2, None, Batch(1, 104, is_packed=True)),
        (examples(), FLATTENING, 2, 70, Batch(1, 140, is_packed=True)),
        (examples(), pad, 2, 70, Batch(2, 70, is_padded=True)),
        (Subset(LIST, [0]), pad, 2, None, Batch(2, 64, is_padded=True)),
        (Subset(TABLE, torch.tensor([0])), pad, 2, None, Batch(2, 30, is_padded=True)),
        (ConcatDataset([Subset(LIST, [0]), TABLE]), pad, 2, None, Batch(2, 64, is_padded=True)),
        (TABLE, pad, 2, None, Batch(2, 30, is_padded=True)),
        (TABLE.select([1, 0]), pad, 2, None, Batch(2, 9, is_padded=True)),
        (TABLE.with_format("torch"), FLATTENING, 2, None, Batch(1, 39, is_packed=True)),
        (MASKED, pad, 1, None, Batch(1, 9, is_padded=True)),
        (MASKED.select([0, 1]), pad, 2, None, Batch(2, 9)),
        (Table.from_dict({"text": ["a", "b"], "length": [4, 6]}), pad, 2, None, Batch(2, 6, is_padded=True)),
        (Table.from_dict({"text": ["a", "b"]}), pad, 2, None, None),
        (Table.from_dict({"text": ["a", "b"]}), pad, 2, 33, Batch(2, 33, is_padded=True)),
        (TABLE.with_transform(lambda rows: rows), pad, 2, None, None),
        (TABLE.to_iterable_dataset(), pad, 2, None, None),
        (Stream((3, 4)), pad, 2, None, None),
        (Computed(), pad, 2, None, None),
        (None, None, 2, None, None),
    ],
)
def test_largest_batch(data: Any, collator: Any, rows: int, max_length: int | None, expected: Batch | None) -> None:
    assert largest_text_batch(data, collator, rows, max_length) == expected


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 1), (8, 8), (15, 15), (17, 18), (100, 104), (1000, 1024), (1025, 1152), (4097, 4608)]
)
def test_unbounded_lengths_are_planned_for_in_steps_of_an_eighth(length: int, expected: int) -> None:
    assert _rounded_up(Batch(2, length)).length == expected


def test_default_budget_is_what_is_free_the_step_s_own_and_the_context_that_is_there() -> None:
    # 10 GiB are free, 6 held by the allocator, of which 5 are used, 3 of those by the model.
    card = find_device("rtx4090")
    whole, context = capacity_of(card), int(0.3 * GIB)
    found = _usable(AllocatorState(10 * GIB, 6 * GIB, 5 * GIB), card, whole, 3 * GIB)
    # The step's own workspaces, of 2 * 4 MiB + 8 * 16 KiB each, may be among what is used.
    assert found == context + 14 * GIB + 2 * (8 * 2**20 + 8 * 2**14)
    assert _usable(AllocatorState(10 * GIB, 6 * GIB, 3 * GIB + 5), card, whole, 3 * GIB) == context + 16 * GIB


def test_fraction_that_a_process_was_given_is_the_size_of_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card, model = find_device("rtx4090"), nn.Linear(1, 1)
    total, context = card.memory_bytes, int(0.3 * GIB)
    known = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda number: SimpleNamespace(total_memory=total),
        "mem_get_info": lambda: (total - 2 * GIB, total),
        "memory_reserved": lambda: GIB,
        "memory_allocated": lambda: 0,
    }
    for name, asked in known.items():
        monkeypatch.setattr(torch.cuda, name, asked)
    for fraction, expected in ((1.0, context + total - GIB), (0.5, context + int(total * 0.5))):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda fraction=fraction: fraction)
        assert budgets.capacity_of_run(None, card, model, None).num_bytes == expected
    share = budgets.capacity_of_run(parse_budget(0.9), card, model, None).num_bytes
    assert share == int(0.9 * (int(total * 0.5) + context))
    with pytest.raises(PolicyError, match="the share of GeForce RTX 4090 that set_per_process_memory_fraction leaves"):
        budgets.check_budget(parse_budget("20GiB"), card)


def test_what_is_counted_beside_the_model_is_none_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # A reference of 2 GiB is part of the step: it was taken off the budget, and counted in the step as well.
    card, model = find_device("rtx4090"), nn.Linear(1, 1)
    monkeypatch.setattr(budgets, "_free_on_cuda", lambda: AllocatorState(10 * GIB, 6 * GIB, 5 * GIB))
    without, counted = (budgets.capacity_of_run(None, card, model, None, each) for each in (0, 2 * GIB))
    assert counted.num_bytes - without.num_bytes == 2 * GIB
    workspaces = 2 * workspace_bytes(card)
    assert budgets.unknown_bytes(card, model, None, 2 * GIB) == 3 * GIB - workspaces
    assert budgets.unknown_bytes(card, model, None, 5 * GIB) == 0
    assert budgets.unknown_bytes(CPU, model, None, 0) == 0
    nothing = Coverage((), ())
    assert nothing.without_unknown(GIB, 200 * GIB) == nothing
    assert nothing.without_unknown(3 * GIB, 22 * GIB).not_counted == (
        "3.0 GiB that something else in this process has allocated",
    )


# --- The model's shape. ---


def quantized(folder: Path, **bits: bool) -> nn.Module:
    """A small Llama whose weights were loaded with fewer bits, with adapters."""
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    llama(hidden_size=64, intermediate_size=64, num_hidden_layers=1).save_pretrained(folder)
    config = BitsAndBytesConfig(**bits)  # type: ignore[no-untyped-call]  # upstream
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))


def prepared(folder: Path) -> nn.Module:
    """A small Llama as accelerate prepares it for mixed precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    made: nn.Module = Accelerator(mixed_precision="bf16", cpu=True).prepare(llama(num_hidden_layers=1))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "forward" in vars(made)
    return made


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (partial(quantized, load_in_4bit=True, bnb_4bit_use_double_quant=True), {}),
        (partial(quantized, load_in_8bit=True), {}),
        (prepared, {"autocast": "bfloat16"}),
    ],
    ids=["4-bit", "8-bit", "prepared"],
)
def test_shape_of_a_model_is_simulated_as_the_model_was(
    make: Callable[[Path], nn.Module], changes: dict[str, Any], tmp_path: Path
) -> None:
    model, card = make(tmp_path), find_device("rtx4090")
    copied = meta_copy(model)
    assert {tensor.device.type for tensor in (*copied.parameters(), *copied.buffers())} == {"meta"}
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    if "autocast" in changes:
        model = llama(num_hidden_layers=1)
    taken = step(32, **changes)
    expected = simulate_step(model, "full", taken, card)
    assert simulate_step(copied, "full", taken, card).by_category == expected.by_category
