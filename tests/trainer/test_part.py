"""Parts of a run: found by name, and told of each event in the order of the callback's list."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import HFCkptCallback, UnsupportedError
from hf_ckpt.trainer.part import Part, load
from tests.training import llama, trainer

EVENTS = ("begin_step", "end_micro_batch", "faults_of_step", "end_optimizer_step", "end_step")


def missing(name: str) -> Any:
    def raise_missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    return raise_missing


def test_house_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", missing("hf_ckpt.auto"))
    with pytest.raises(UnsupportedError, match=r'^policy "auto" needs hf_ckpt\.auto, which is not there'):
        load("auto.auto", 'policy "auto"')


def test_another_library_that_is_missing_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", missing("bitsandbytes"))
    with pytest.raises(ModuleNotFoundError, match="bitsandbytes"):
        load("auto.auto", 'policy "auto"')


@pytest.mark.core
def test_parts_get_the_events_of_each_step_in_their_order(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching(Part):
        def __getattribute__(self, name: str) -> Any:
            if name in EVENTS:
                seen.append(name)
            return super().__getattribute__(name)

    class Watched(HFCkptCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_begin(*args, **kwargs)
            self._parts.append(Watching())

    trainer(llama(), tmp_path, Watched("full"), max_steps=2, gradient_accumulation_steps=2).train()
    assert seen == 2 * [*EVENTS]


@pytest.mark.core
def test_error_of_a_part_ends_the_run_and_takes_the_plan_off(tmp_path: Path) -> None:
    class Refusing(Part):
        def end_optimizer_step(self) -> None:
            raise UnsupportedError("This part goes on no longer.")

    class Watched(HFCkptCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_begin(*args, **kwargs)
            self._parts.append(Refusing())

    model, callback = llama(), Watched("full")
    with pytest.raises(UnsupportedError, match="goes on no longer"):
        trainer(model, tmp_path, callback).train()
    assert callback._parts == []
    assert "_hf_ckpt_applied" not in vars(model.model.layers)
