"""Leaner plans, one after the other, and for which sizes of batches each is in force."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_ckpt import HFCkptCallback, Plan, apply
from hf_ckpt.errors import PolicyError
from hf_ckpt.patch.apply import make_plan
from hf_ckpt.patch.interrupted_run import running_trainer
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.policy.revolve import fewest_snapshots
from hf_ckpt.recovery.escalation import MOST_RERUNS, rung_after, share_of_batch, share_of_layers
from hf_ckpt.recovery.ladder import Ladder, Room, Rung, Size, leanest_rung, next_rung
from hf_ckpt.recovery.out_of_memory import Failure, Figures, Part
from hf_ckpt.recovery.recovery import RUNGS_FILE
from hf_ckpt.regions.offload.transfer import DeviceMemory
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.structure.layers import find_layers
from hf_ckpt.trainer.batch import Batch
from hf_ckpt.trainer.device_peak import DevicePeak
from hf_ckpt.trainer.saved_files import PLAN_FILE
from tests.recovery.limits import FULL, LimitedTrainer
from tests.training import VOCAB, During, arguments, changed, llama, losses, weights

UNKNOWN = Room(None, DevicePeak(torch.device("cpu")))
"""Nothing is predicted."""


def row(length: int) -> Size:
    return Size.of([("input_ids", torch.zeros(1, length))])


def rungs(model: nn.Module, policy: Any, *, is_exact: bool = True, drops_offload: bool = False) -> list[Rung]:
    """All rungs below a policy."""
    stacks = find_layers(model)
    plan = make_plan(model, Policy.parse(policy), stacks)
    found: list[Rung] = []
    while (rung := next_rung(plan, stacks, model, is_exact=is_exact, drops_offload=drops_offload)) is not None:
        found.append(rung)
        plan = rung.plan
    return found


def test_a_quarter_more_of_the_layers_is_set_to_full_and_then_segments_are_nested_and_run_again_and_again() -> None:
    found = rungs(llama(num_hidden_layers=9), "selective")
    assert [rung.plan.count(Mode.FULL) for rung in found] == [3, 6, 9, 9, 9]
    nested, binomial = (rung.plan.stacks[0].layers for rung in found[-2:])
    assert [(entry.nested, entry.snapshots) for entry in nested] == [(True, None)] * 9
    # One input beside the first: two segments, and the second must do without.
    assert [(entry.segment, entry.snapshots) for entry in binomial] == [(0, 1)] * 6 + [(6, 0)] * 3
    assert all(rung.is_exact for rung in found)


def test_a_schedule_that_saves_many_inputs_is_left_for_one_that_saves_few() -> None:
    model = llama(num_hidden_layers=20)
    many, few = ({"mode": "full", "nested": "revolve", "snapshots": saved} for saved in (12, fewest_snapshots(20, 4)))
    (found,) = rungs(model, many)
    assert found.plan == make_plan(model, Policy.parse(few))


CUDA = (
    "CUDA out of memory. Tried to allocate {wanted} MiB. GPU 0 has a total capacity of 1.00 GiB of which {free} MiB is "
    "free. Of the allocated memory {allocated} MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
    "unallocated."
)


@pytest.mark.parametrize(("share", "numbers"), [(None, [3, 3, 3]), (0.01, [1, 1]), (0.3, [3, 2, 2]), (1.0, [9])])
def test_as_many_layers_are_set_to_full_as_are_asked_for(share: float | None, numbers: list[int]) -> None:
    model = llama(num_hidden_layers=9)
    stacks = find_layers(model)
    plan = make_plan(model, Policy.parse("selective"), stacks)
    for number in numbers:
        before = plan.count(Mode.FULL)
        rung = next_rung(plan, stacks, model, is_exact=True, share=share)
        assert rung is not None
        plan = rung.plan
        assert plan.count(Mode.FULL) - before == number


@pytest.mark.parametrize(
    ("part", "wanted", "held", "share"),
    [
        # Of 800 MiB that a step had made 180 are missing.
        (Part.BACKWARD, 200, 200, 1.1 * 180 / 800),
        (Part.RECOMPUTATION, 200, 200, 1.1 * 180 / 800),
        (Part.BACKWARD, 2000, 200, 1.0),
        # What a whole forward would have kept is not known, nor what is held without a device that counts it.
        (Part.FORWARD, 200, 200, None),
        (Part.BACKWARD, 200, None, None),
        (Part.BACKWARD, 200, 1000, None),
    ],
)
def test_the_share_of_layers_is_that_of_what_was_missing(
    part: Part, wanted: int, held: int | None, share: float | None
) -> None:
    figures = Figures.of(CUDA.format(wanted=wanted, free=20, allocated=1000))
    failure = Failure(torch.OutOfMemoryError(), part, figures)
    found = share_of_layers(failure, None if held is None else held * 2**20)
    assert found == (None if share is None else pytest.approx(share))
    assert share_of_layers(Failure(torch.OutOfMemoryError(), part, Figures()), 0) is None


CAPPED = (
    "CUDA out of memory. Tried to allocate {wanted} MiB. GPU 0 has a total capacity of 79.18 GiB of which 60.00 GiB is "
    "free. Process 7 has 2.00 GiB memory in use. 1.25 GiB allowed; Of the allocated memory 1000.00 MiB is allocated by "
    "PyTorch, with 24.00 MiB allocated in private pools (e.g., CUDA Graphs), and {unused} MiB is reserved by PyTorch "
    "but unallocated."
)


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        # Of 1,280 MiB that are allowed 1,000 are in use and 200 in pieces, none of which was large enough.
        (CAPPED.format(wanted=100, unused=200), 20),
        (CAPPED.format(wanted=2000, unused=0), 1720),
        # Rounding in the message: less than nothing is never missing.
        (CAPPED.format(wanted=10, unused=200), 0),
        # On a card whose free memory is in pieces.
        (CUDA.format(wanted=200, free=20, allocated=500).replace("0 bytes is", "300 MiB is"), 180),
    ],
)
def test_memory_that_a_cap_or_its_pieces_keep_from_use_is_missing(message: str, missing: int) -> None:
    assert Figures.of(message).missing_bytes == missing * 2**20


def test_what_a_cap_allows_is_said() -> None:
    words = Figures.of(CAPPED.format(wanted=100, unused=200)).describe()
    assert words == (
        "1,000.0 MiB were allocated and 200.0 MiB reserved without being used, of 79.2 GiB; 1.2 GiB of it are "
        "allowed; 100.0 MiB more were asked for."
    )


@pytest.mark.parametrize(
    ("share", "numbers"),
    # Of 16 layers: a quarter of all, then a half; 3 %, of those that are left 6 %, and 12 %.
    [(None, [4, 8, 4]), (0.03, [1, 2, 4]), (0.2, [4, 6, 6])],
)
def test_each_further_rerun_gives_up_twice_the_share_and_the_fourth_everything(
    share: float | None, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_ckpt.recovery.escalation.share_of_layers", lambda failure, held: share)
    model = llama(num_hidden_layers=16)
    failure = Failure(torch.OutOfMemoryError(), Part.BACKWARD, Figures())
    leanest = rungs(model, "none")[-1]
    with apply(model, "none") as applied:
        plan, found = applied.plan, []
        for rerun in range(1, MOST_RERUNS):
            before = plan.count(Mode.FULL)
            rung = rung_after(plan, failure, applied, model, None, is_exact=True, rerun=rerun)
            assert rung is not None
            plan = rung.plan
            found.append(plan.count(Mode.FULL) - before)
        assert found == numbers
        last = rung_after(plan, failure, applied, model, None, is_exact=True, rerun=MOST_RERUNS)
        assert last is not None
        assert last.plan == leanest.plan
        assert last.change == ("the leanest plan there is, with layers run up to 4 times, from fewer saved inputs")
        assert leanest_rung(last.plan, applied.stacks, model, is_exact=True) is None


def test_the_last_rerun_leaves_out_rungs_that_are_known() -> None:
    plans = {mode: make_plan(llama(), Policy.parse(mode)) for mode in ("none", "attention", "full")}
    ladder = Ladder(plans["none"], quiet_steps=2, room=UNKNOWN)
    for mode in ("attention", "full"):
        assert ladder.fail(row(100), lambda plan, mode=mode: Rung(plans[mode]))
    ladder.level = 0
    assert ladder.fail(row(100), lambda plan: None, to_leanest=True)
    assert ladder.level == 2
    assert not ladder.fail(row(100), lambda plan: None, to_leanest=True)


def test_chunked_head_and_tiles_come_last_and_only_where_they_are_allowed() -> None:
    model = llama(attention_dropout=0.0)
    assert [rung.change for rung in rungs(model, "full")] == []
    found = rungs(model, "full", is_exact=False)
    assert [rung.change for rung in found] == ["head and loss in chunks", "layers in tiles"]
    assert not any(rung.is_exact for rung in found)
    apply(model, found[-1].plan).remove()


def test_without_memory_of_the_host_nothing_is_offloaded() -> None:
    policy = {"mode": "full", "offload": "cpu"}
    assert rungs(llama(), policy)[:1] == []
    (found,) = rungs(llama(), policy, drops_offload=True)
    assert all(entry.offload is None for entry in found.plan.stacks[0].layers)


@pytest.mark.parametrize(
    ("message", "share"),
    [
        # 100 of 1,000 are missing, and a tenth of that more.
        (CUDA.format(allocated=800, wanted=200, free=100), 0.11),
        (CUDA.format(allocated=990, wanted=10, free=9), 0.02),
        (CUDA.format(allocated=100, wanted=900, free=100), 0.5),
        ("CUDA error: out of memory", 0.1),
    ],
)
def test_the_planner_is_asked_for_what_was_missing(message: str, share: float) -> None:
    model = llama()
    asked: list[float] = []
    planning: Any = SimpleNamespace(leaner_plan=lambda share, **options: asked.append(share))
    with apply(model, "none") as applied:
        failure = Failure.caught(torch.OutOfMemoryError(message))
        rung = rung_after(applied.plan, failure, applied, model, planning, is_exact=True)
    assert asked == [pytest.approx(share)]
    # The planner has found none.
    assert rung is not None
    assert rung.change == "1 more layer recomputed in full"


def test_what_failed_for_a_size_is_not_tried_again_for_batches_as_large() -> None:
    plans = {mode: make_plan(llama(), Policy.parse(mode)) for mode in ("none", "attention", "full")}
    ladder = Ladder(plans["none"], quiet_steps=2, room=UNKNOWN)
    order = iter([Rung(plans["attention"]), Rung(plans["full"]), None])
    assert ladder.fail(row(100), lambda plan: next(order))
    assert ladder.fail(row(300), lambda plan: next(order))
    # Nothing is faster until it has been quiet; afterwards each size has its plan.
    assert [ladder.level_for(row(size)) for size in (50, 100, 299, 300)] == [2, 2, 2, 2]
    ladder.end_step()
    ladder.end_step()
    assert [ladder.level_for(row(size)) for size in (50, 100, 299, 300)] == [0, 1, 1, 2]
    assert not ladder.fail(row(400), lambda plan: next(order))

    other = Ladder(plans["none"], quiet_steps=2, room=UNKNOWN)
    assert other.resume(json.loads(json.dumps(ladder.to_json())))
    assert (other.level, other.rungs) == (ladder.level, ladder.rungs)
    for found in (ladder, other):
        found.end_step()
        found.end_step()
    assert [other.level_for(row(size)) for size in (50, 100, 299, 300)] == [0, 1, 1, 2]
    assert not Ladder(plans["full"], quiet_steps=2, room=UNKNOWN).resume(ladder.to_json())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_batches_are_told_apart_by_shape_and_not_by_bytes(dtype: torch.dtype) -> None:
    def size(*shape: int, mask: bool = True, images: int = 0) -> Size:
        tensors = [("input_ids", torch.zeros(shape, dtype=dtype))]
        tensors += [("attention_mask", torch.ones(shape, dtype=torch.bool))] * mask + [("scale", torch.ones(()))]
        return Size.of([*tensors, *[("pixel_values", torch.zeros(images, 3, 2, 2))] * bool(images)])

    none, full = (make_plan(llama(), Policy.parse(mode)) for mode in ("none", "full"))
    ladder = Ladder(none, quiet_steps=1, room=UNKNOWN)
    assert ladder.fail(size(1, 64), lambda plan: Rung(full))
    ladder.end_step()
    # Of as many bytes or more, and less where it counts; of fewer, and more.
    fast = [size(4, 15), size(1, 63), size(1, 63, mask=False)]
    lean = [size(1, 64), size(1, 65, mask=False), size(1, 4, images=1), size(5, 16)]
    assert [ladder.level_for(each) for each in (*fast, *lean)] == [0, 0, 0, 1, 1, 1, 1]


def test_a_prediction_for_one_shape_is_not_that_of_another_one_of_as_many_bytes() -> None:
    none, full = (make_plan(llama(), Policy.parse(mode)) for mode in ("none", "full"))
    room = PerByte({none: 10, full: 1}, most=500)
    ladder = Ladder(none, 1, room)
    assert ladder.fail(Size.of([("input_ids", torch.zeros(1, 128))]), lambda plan: Rung(full), batch=128)  # type: ignore[arg-type]
    long, short = (Size.of([("input_ids", torch.zeros(shape))]) for shape in ((1, 64), (8, 8)))
    # A long row needs more of its bytes.
    ladder.passed(long, 64)  # type: ignore[arg-type]
    ladder.passed(short, 40)  # type: ignore[arg-type]
    ladder.end_step()
    assert [ladder.level_for(each) for each in (long, short)] == [1, 0]


class PerByte(Room):
    """A batch needs so many bytes for each of its own, by plan; `most` is what there is."""

    def __init__(self, needs: dict[Plan, int], most: int) -> None:
        self.asked: list[int] = []
        self.ran: list[Any] = []
        self.most = most
        self._needs = needs

    def needed(self, plan: Plan, batch: Any) -> int | None:
        self.asked.append(batch)
        return self._needs[plan] * batch

    def begin_window(self, plans: Any) -> None:
        pass

    def bytes(self, failed_bytes: int | None, ran: Any) -> int | None:
        self.ran = list(ran)
        return min(self.most, failed_bytes or self.most)


def test_a_faster_plan_returns_for_batches_that_it_has_room_for() -> None:
    none, attention, full = (make_plan(llama(), Policy.parse(mode)) for mode in ("none", "attention", "full"))
    room = PerByte({none: 10, attention: 5, full: 1}, most=10_000)
    ladder = Ladder(none, 2, room)
    order = iter([Rung(attention), Rung(full), None])

    def steps(*sizes: int) -> list[int]:
        room.asked.clear()
        levels = []
        for size in sizes:
            ladder.level = ladder.level_for(row(size))
            levels.append(ladder.level)
            ladder.passed(row(size), size)  # type: ignore[arg-type]
            ladder.end_step()
        return levels

    # Nothing is noted or asked until something fails.
    assert (steps(5, 5), room.asked) == ([0, 0], [])
    # A tenth of 1,000 bytes was missing: there is room for 900.
    assert ladder.fail(row(100), lambda plan: next(order), batch=100, of_step=0.1)  # type: ignore[arg-type]
    assert steps(95, 40) == [1, 1]
    # The largest of these did not fit.
    assert (room.asked, room.ran) == ([95, 40], [(attention, 95)])
    assert steps(95, 50, 40, 51, 41) == [1, 1, 0, 1, 0]
    # What lies between sizes that fit is not simulated.
    assert room.asked == [50, 51]
    assert steps(50, 90, 91, 90, 91) == [0, 1, 1, 0, 1]
    # By what was measured there is less.
    room.most = 420
    assert steps(42, 41, 42, 43) == [0, 0, 0, 1]
    # And on the next rung likewise.
    ladder.level = 1
    assert ladder.fail(row(200), lambda plan: next(order), batch=200, of_step=0.1)  # type: ignore[arg-type]
    assert steps(42, 80, 84, 85, 84, 85) == [2, 2, 2, 2, 1, 2]
    document = json.loads(json.dumps(ladder.to_json()))
    other = Ladder(none, 2, room)
    assert other.resume(document)
    assert [other.level_for(row(size)) for size in (42, 43, 84, 85)] == [0, 1, 1, 2]


def test_without_a_prediction_as_much_smaller_batches_run_fast_as_was_missing() -> None:
    failure = Failure(
        torch.OutOfMemoryError(), Part.FORWARD, Figures.of(CUDA.format(wanted=100, free=20, allocated=900))
    )
    # Of 800 MiB that were needed for the batch.
    assert share_of_batch(failure, 200 * 2**20) == 0.1
    assert share_of_batch(failure, None) == share_of_batch(failure, 2**30) == 0
    none, full = (make_plan(llama(), Policy.parse(mode)) for mode in ("none", "full"))
    ladder = Ladder(none, 1, UNKNOWN)
    assert ladder.fail(row(100), lambda plan: Rung(full), of_batch=0.1)
    ladder.end_step()
    assert [ladder.level_for(row(size)) for size in (1, 89, 90)] == [0, 0, 1]


@pytest.mark.parametrize(("measured", "room"), [(600, 900), (900, 700), (None, 900)])
def test_room_is_what_is_left_beside_what_steps_needed_more_than_was_predicted(measured: int | None, room: int) -> None:
    plan = make_plan(llama(), Policy.parse("full"))
    sizes = {Batch(1, 8): 500, Batch(1, 16): 600}
    held_by = lambda plan, batch: (sizes[batch], sizes[batch] + 50)  # noqa: E731
    planning: Any = SimpleNamespace(capacity=Capacity(1000), held_by=held_by)
    memory = None if measured is None else DeviceMemory(capacity=1000, allocated=0, peak=measured)
    windows: list[str] = []
    peak: Any = SimpleNamespace(in_window=lambda: memory, begin_window=lambda: windows.append("begun"))
    found = Room(planning, peak)
    ran = [(plan, Batch(1, 8)), (plan, Batch(1, 16)), (plan, None)]
    assert found.bytes(900, ran) == room
    found.begin_window([plan])
    assert windows == ["begun"]
    # An offload measures by the same count.
    offloading = make_plan(llama(), Policy.parse({"mode": "full", "offload": "cpu"}))
    found.begin_window([plan, offloading])
    assert windows == ["begun"]
    assert found.bytes(900, [*ran, (offloading, None)]) == 900
    assert Room(None, peak).bytes(900, ran) is None
    assert found.needed(plan, None) is None


# --- A stream of short rows with rare long ones, under a limit. ---

SHORT, LONG = 4, 64
LENGTHS = [LONG if number in (3, 9, 14) else SHORT for number in range(16)]


def stream(lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in tokens]


def streamed(
    folder: Path,
    callback: HFCkptCallback,
    *others: Any,
    limit: int | None = None,
    lengths: Sequence[int] = LENGTHS,
    kind: type[LimitedTrainer] = LimitedTrainer,
    **changes: Any,
) -> Any:
    model = llama(hidden_size=32, intermediate_size=64)
    settings = {"per_device_train_batch_size": 1, "max_steps": len(lengths), **changes.pop("settings", {})}
    args = TrainingArguments(**arguments(folder, **settings))
    run = kind(model=model, args=args, train_dataset=stream(lengths), callbacks=[callback, *others])
    run.limit = limit
    run.train(**changes)
    return run


@pytest.fixture(scope="module")
def limit(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes between what a long row needs without recomputation and with all of it."""
    folder = tmp_path_factory.mktemp("limit")
    peaks = [max(streamed(folder, HFCkptCallback(mode, prove="off")).peaks) for mode in ("none", "full")]
    short = min(streamed(folder, HFCkptCallback("none", prove="off")).peaks)
    found = (peaks[0] + peaks[1]) // 2
    assert short < found
    return found


@pytest.mark.sweep
def test_long_rows_run_lean_and_short_ones_fast(tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = HFCkptCallback("none", on_oom="escalate", quiet_steps=2, prove="off")
    seen: list[int] = []
    look = During("on_step_end", lambda model: seen.append(callback.plan.count(Mode.FULL)))  # type: ignore[union-attr]
    # A switch looks for nothing in the model: that takes milliseconds a layer where there are adapters.
    cannot = During("on_step_begin", lambda model: monkeypatch.setattr("hf_ckpt.patch.apply.find_layers", None))
    run = streamed(tmp_path, callback, look, cannot, limit=limit)
    monkeypatch.undo()
    expected = streamed(tmp_path, HFCkptCallback("none"))
    assert changed(weights(expected.model), weights(run.model)) == []
    assert run.state.log_history[:-1] == expected.state.log_history[:-1]
    # Up to the first long row everything is kept; two quiet steps later short rows run without recomputation again.
    lean = seen[3]
    assert lean > 0
    assert seen == [0, 0, 0, lean, lean, 0, 0, 0, 0, lean, 0, 0, 0, 0, lean, 0]
    assert callback.report()["ckpt/oom_recovered"] == 1


CARD = (
    "CUDA out of memory. Tried to allocate {wanted} MiB. GPU 0 has a total capacity of 79.18 GiB of which {free} MiB is"
    " free. Process 7 has 2.00 GiB memory in use. {allowed}Of the allocated memory {allocated} MiB is allocated by "
    "PyTorch, and {unused} MiB is reserved by PyTorch but unallocated."
)
NUM_LAYERS, ROOM = 32, 330


class RunsOutInBackward(torch.autograd.Function):
    """A backward that asks for memory piece by piece while each layer that is not recomputed holds 10 MiB.

    Args:
        num_kept: layers that are not recomputed.
        pieces: in MiB.
        is_capped: whether the 330 MiB that there are have been set by `set_per_process_memory_fraction`; else 15 MiB of
            them are in pieces that are too small.
    """

    @staticmethod
    def forward(context: Any, loss: Tensor, num_kept: int, pieces: list[int], is_capped: bool) -> Tensor:
        context.given = num_kept, pieces, is_capped
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        num_kept, pieces, is_capped = context.given
        allocated, unused = 10 * num_kept, 0 if is_capped else 15
        for wanted in pieces:
            if allocated + unused + wanted > ROOM:
                free = 60_000 if is_capped else max(0, ROOM - allocated - unused)
                said = f"{ROOM} MiB allowed; " if is_capped else ""
                figures = {"wanted": wanted, "free": free, "allocated": allocated, "unused": unused, "allowed": said}
                raise torch.OutOfMemoryError(CARD.format(**figures))
            allocated += wanted
        return gradient, None, None, None


@pytest.mark.parametrize("is_capped", [True, False])
@pytest.mark.parametrize(
    ("pieces", "num_reruns"),
    [
        # 190 MiB of the 320 are missing, and said to be.
        ([200], 1),
        # It is said of 10 or 15 MiB only, each time.
        ([20] * 10, MOST_RERUNS),
    ],
)
@pytest.mark.sweep(keep=1)
def test_what_runs_out_in_backward_runs_again_four_times_at_most(
    is_capped: bool, pieces: list[int], num_reruns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_ckpt.recovery.escalation.allocated_bytes", lambda: 0)

    def run(**options: Any) -> tuple[Any, HFCkptCallback]:
        callback = HFCkptCallback("none", prove="off", **options)

        class Failing(LimitedTrainer):
            def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                loss = super().compute_loss(model, inputs, *args, **kwargs)
                num_kept = callback.plan.count(Mode.NONE)  # type: ignore[union-attr]
                return RunsOutInBackward.apply(loss, num_kept, pieces, is_capped) if options else loss

        model = llama(num_hidden_layers=NUM_LAYERS)
        args = TrainingArguments(**arguments(tmp_path, per_device_train_batch_size=1, max_steps=1))
        trainer = Failing(model=model, args=args, train_dataset=stream([LONG]), callbacks=[callback])
        trainer.train()
        return trainer, callback

    (plain, _), (found, callback) = run(), run(on_oom="escalate")
    assert changed(weights(plain.model), weights(found.model)) == []
    assert losses(found) == losses(plain)
    assert callback.report()["ckpt/oom_recovered"] == 1
    assert callback.report()["ckpt/plan_switches"] == num_reruns


@pytest.mark.sweep
def test_a_resumed_run_begins_on_the_rung(tmp_path: Path, limit: int, caplog: pytest.LogCaptureFixture) -> None:
    def escalating() -> HFCkptCallback:
        return HFCkptCallback("none", on_oom="escalate", prove="off", strict_resume=True)

    saving = {"save_strategy": "steps", "save_steps": 5}
    whole = streamed(tmp_path, escalating(), limit=limit, settings=saving)
    checkpoint = tmp_path / "checkpoint-5"
    rung = Plan.from_file(checkpoint / PLAN_FILE)
    assert rung.count(Mode.FULL) > 0
    assert json.loads((checkpoint / RUNGS_FILE).read_text())["level"] > 0
    begun: list[Plan | None] = []
    callback = escalating()
    look = During("on_step_begin", lambda model: begun.append(callback.plan))
    resumed = streamed(tmp_path, callback, look, limit=limit, settings=saving, resume_from_checkpoint=str(checkpoint))
    assert begun[0] == rung
    assert callback.report()["ckpt/oom_recovered"] == 0
    assert changed(weights(whole.model), weights(resumed.model)) == []
    # Rungs below another policy say nothing.
    caplog.set_level(logging.INFO)
    (checkpoint / PLAN_FILE).write_text(make_plan(whole.model, Policy.parse("attention")).to_json())
    other = HFCkptCallback("attention", on_oom="escalate", prove="off", strict_resume=True)
    streamed(tmp_path, other, settings=saving, resume_from_checkpoint=str(checkpoint))
    assert any(f"{RUNGS_FILE} is of a run under another plan" in record.getMessage() for record in caplog.records)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.sweep
def test_a_run_that_was_killed_while_it_climbed_resumes(tmp_path: Path, limit: int) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}

    class Killed(HFCkptCallback):
        """Is killed when the leaner plan has been put in force, and written, and the step has not yet run again."""

        def _change_plan(self, *given: Any) -> None:
            super()._change_plan(*given)
            if running_trainer().state.global_step:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            streamed(tmp_path, Killed("none", on_oom="escalate", prove="off"), limit=limit, settings=saving)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    # The fourth row is the first long one.
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{at}" for at in (1, 2, 3)]
    assert Plan.from_file(tmp_path / PLAN_FILE).count(Mode.FULL) > 0
    callback = HFCkptCallback("none", on_oom="escalate", prove="off")
    resumed = streamed(tmp_path, callback, limit=limit, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    expected = streamed(tmp_path / "whole", HFCkptCallback("none"))
    assert callback.report()["ckpt/oom_recovered"] == 1
    assert changed(weights(expected.model), weights(resumed.model)) == []


# --- Where it is in force. ---


def test_beside_auto_find_batch_size_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        PolicyError, match=r'on_oom="escalate" was asked for, but auto_find_batch_size answers the same'
    ):
        streamed(tmp_path, HFCkptCallback("none", on_oom="escalate"), settings={"auto_find_batch_size": True})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"on_oom": "retry"}, r'on_oom is "retry"\. Use "escalate" or "error"'), ({"quiet_steps": 0}, "quiet_steps is 0")],
)
def test_other_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        HFCkptCallback("none", **options)


def test_trainers_that_generate_their_inputs_keep_the_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class GRPOTrainer(LimitedTrainer):
        """By its name alone."""

    caplog.set_level(logging.INFO)
    callback = HFCkptCallback("none", on_oom="escalate")
    args = TrainingArguments(**arguments(tmp_path, per_device_train_batch_size=1))
    run = GRPOTrainer(model=llama(), args=args, train_dataset=stream(LENGTHS), callbacks=[callback])
    run.limit = 1000
    with pytest.raises(torch.OutOfMemoryError):
        run.train()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("GRPOTrainer generates its inputs, which are not made again" in line for line in lines) == 1


@pytest.mark.sweep
def test_by_default_an_error_ends_the_run(tmp_path: Path, limit: int) -> None:
    callback = HFCkptCallback("none", prove="off")
    with pytest.raises(torch.OutOfMemoryError):
        streamed(tmp_path, callback, limit=limit)
    assert "ckpt/oom_recovered" not in callback.report()


@pytest.mark.sweep
def test_with_auto_the_planner_gives_the_leaner_plan(tmp_path: Path, limit: int) -> None:
    callback = HFCkptCallback("auto", memory_budget="1GiB", prove="off")
    run = streamed(tmp_path, callback, limit=limit)
    expected = streamed(tmp_path, HFCkptCallback("none"))
    assert changed(weights(expected.model), weights(run.model)) == []
    assert callback.report()["ckpt/oom_recovered"] >= 1
    assert callback.plan is not None
    assert callback.plan.count(Mode.NONE) < 4


class FullDevice:
    """Counts, in place of CUDA, that steps have left nothing free, and that others have taken a MiB since."""

    num_windows = 0

    def memory(self, place: torch.device) -> DeviceMemory:
        return DeviceMemory(capacity=2**25 - 2**20, allocated=0, peak=2**25)

    def reset_peak(self, place: torch.device) -> None:
        self.num_windows += 1


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.sweep
def test_with_auto_a_faster_plan_returns_where_it_is_predicted_to_fit(is_full: bool, tmp_path: Path) -> None:
    callback = HFCkptCallback("auto", memory_budget="1GiB", prove="off", quiet_steps=2)

    class Failing(LimitedTrainer):
        """Has no memory for rows of more than 40 tokens without recomputation."""

        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if inputs["input_ids"].numel() > 40 and callback.plan.count(Mode.NONE) == 4:  # type: ignore[union-attr]
                raise torch.OutOfMemoryError(FULL)
            return loss

    # Rows of 60 tokens are shorter than what failed.
    lengths = [4, LONG, *[60, 24] * 3]
    kept: list[int] = []
    device = FullDevice()
    look = During("on_step_end", lambda model: kept.append(callback.plan.count(Mode.NONE)))  # type: ignore[union-attr]
    measure = During("on_step_begin", lambda model: setattr(callback._run.peak, "_cuda", device), step=0)  # type: ignore[union-attr]
    streamed(tmp_path, callback, look, *[measure] * is_full, lengths=lengths, kind=Failing)
    assert callback.report()["ckpt/oom_recovered"] == 1
    assert kept[0] == 4
    # After two quiet steps of which one is short such rows run without recomputation again, and those of 60 do not.
    assert [number == 4 for number in kept[1:]] == [not is_full and at > 3 and lengths[at] == 24 for at in range(1, 8)]
    assert (device.num_windows > 0) is is_full
