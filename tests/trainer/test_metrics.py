"""The figures of a run reach the user's reporters, once, and in the run's own place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from hf_ckpt import HFCkptCallback
from tests.training import During, llama, trainer

FIGURES = {"ckpt/num_layers_full", "ckpt/num_layers_none", "ckpt/recomputed_share", "ckpt/tokens_per_sec"}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def scalars() -> Callable[[Path], dict[str, list[tuple[int, float]]]]:
    """Read (step, value) by name from the event files of a folder."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
        events = reader.EventAccumulator(str(folder)).Reload()
        return {
            name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]
        }

    return read


def event_folders(folder: Path) -> set[Path]:
    return {path.parent for path in folder.rglob("events.out.tfevents.*")}


def run(folder: Path, *callbacks: TrainerCallback, **arguments: Any) -> dict[str, float]:
    used = HFCkptCallback("full", every_n_layers=2)
    trainer(llama(), folder, used, *callbacks, **arguments).train()
    assert used.report().keys() > FIGURES
    return used.report()


def test_figures_are_in_the_event_files_of_the_run_and_nowhere_else(
    tmp_path: Path, elsewhere: Path, scalars: Callable[..., Any]
) -> None:
    report = run(tmp_path / "run", report_to="tensorboard")
    (folder,) = event_folders(tmp_path)
    assert folder.is_relative_to(tmp_path / "run")
    written = scalars(folder)
    for name, value in report.items():
        assert written[f"train/{name}"] == [(2, pytest.approx(value))]
    assert [step for step, _ in written["train/loss"]] == [1, 2]
    assert list(elsewhere.iterdir()) == []


def test_figures_of_a_second_run_are_in_its_own_folder(
    tmp_path: Path, elsewhere: Path, scalars: Callable[..., Any]
) -> None:
    run(tmp_path, report_to="tensorboard")
    (first,) = event_folders(tmp_path)
    # TensorBoard's folder is named after the second in which the run begins.
    first = first.rename(first.with_name("first"))
    run(tmp_path, report_to="tensorboard")
    (second,) = event_folders(tmp_path) - {first}
    assert all(len(scalars(folder)["train/ckpt/recomputed_share"]) == 1 for folder in (first, second))


def test_figures_go_where_tensorboard_is_told_to_write(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, scalars: Callable[..., Any]
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    run(tmp_path / "run", report_to="tensorboard")
    assert event_folders(tmp_path) == {tmp_path / "board"}
    assert "train/ckpt/tokens_per_sec" in scalars(tmp_path / "board")


def test_nothing_is_written_where_the_run_has_no_event_files(tmp_path: Path, elsewhere: Path) -> None:
    pytest.importorskip("tensorboard")
    started = trainer(llama(), tmp_path / "run", HFCkptCallback("full"), report_to="tensorboard")
    started.remove_callback(integration_utils.TensorBoardCallback)
    started.train()
    assert event_folders(tmp_path) == set()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.core
def test_nothing_is_written_without_reporters(tmp_path: Path, elsewhere: Path) -> None:
    run(tmp_path / "run", report_to="none")
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["hf_ckpt_plan.json"]
    assert list(elsewhere.iterdir()) == []


class Reporter(TrainerCallback):
    """A reporter that keeps what it is told; all instances share one list, as all share one run."""

    told: list[tuple[str, int]]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.told.extend((name, state.global_step) for name in logs if name.startswith("ckpt/"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append(("end", state.global_step))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the reporter "mine" is told."""
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "mine", Reporter)
    monkeypatch.setattr(Reporter, "told", [], raising=False)
    return Reporter.told


@pytest.mark.core
def test_any_reporter_gets_each_figure_once_before_its_run_ends(tmp_path: Path, told: list[tuple[str, int]]) -> None:
    report = run(tmp_path, report_to=["mine"])
    assert told == [*((name, 2) for name in report), ("end", 2)]


@pytest.mark.core
def test_figures_of_a_run_that_another_callback_stops_arrive_once(tmp_path: Path, told: list[tuple[str, int]]) -> None:
    class Stop(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    report = run(tmp_path, Stop(), report_to=["mine"], max_steps=16)
    assert sorted(told) == sorted([*((name, 8) for name in report), ("end", 8)])


@pytest.mark.core
def test_other_processes_than_the_first_send_nothing(
    tmp_path: Path, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = HFCkptCallback("full")
    started = trainer(llama(), tmp_path, used, report_to=["mine"])
    started.state.is_world_process_zero = False
    monkeypatch.setattr(type(started), "is_world_process_zero", lambda self: False)
    started.train()
    assert [name for name, _ in told if name != "end"] == []
    assert used.report()["ckpt/num_layers_full"] == 4


@pytest.mark.core
def test_reporter_that_takes_no_figures_is_not_made_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    class Meter(TrainerCallback):
        def __init__(self) -> None:
            made.append(self)

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "meter", Meter)
    trainer(llama(), tmp_path, HFCkptCallback("full"), During("on_log", id), report_to=["meter"]).train()
    assert len(made) == 1
