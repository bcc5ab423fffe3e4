"""A plan whose run has ended in an exception: found, and taken off, where its model is used next.

No event tells that an exception has ended a call of `Trainer.train()`. The traceback, which notebooks keep, holds its
frames and all that is in them, so nothing is freed either. But what runs is on the stack of its thread, and what is
only kept is not.

The next use is a forward, a change between training and evaluation (all that is seen of a compiled model), a save,
another plan, or another Trainer with the callback.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from hf_ckpt.patch.instance_methods import method_before, set_method, take_off

_SAVE, _TRAIN, _TRAINING_STEP = "save_pretrained", "train", "training_step"


class TrainCall:
    """One call of a Trainer's `train()`. Copies of a model share it; in what comes from a pickle it is over."""

    def __init__(self, frame: FrameType) -> None:
        # The frame itself would keep all its callers' variables.
        self._frame = id(frame)
        self._thread = threading.get_ident()
        # Once a frame is freed, another one can have its id.
        self._trainer: Callable[[], Any] = weakref.ref(frame.f_locals["self"])

    def is_running(self) -> bool:
        """Whether the call is under way, here or in the thread that made it."""
        is_here = self._thread == threading.get_ident()
        frame = sys._getframe() if is_here else sys._current_frames().get(self._thread)
        trainer = self._trainer()
        while frame is not None and trainer is not None:
            if id(frame) == self._frame:
                return _trainer_of(frame) is trainer
            frame = frame.f_back
        return False

    def is_over(self) -> bool:
        return not self.is_running()

    def is_around_another(self) -> bool:
        """Whether the call is under way, further out than the innermost one in this thread."""
        frame = _innermost()
        return self.is_running() and (frame is None or id(frame) != self._frame)

    def is_of(self, trainer: object) -> bool:
        return self._trainer() is trainer

    def uncaught_error(self) -> BaseException | None:
        """Return the exception that ended it, where nobody caught that; the program may have seen others since."""
        error: BaseException | None = getattr(sys, "last_value", None)
        frames = () if error is None else traceback.walk_tb(error.__traceback__)
        return error if any(id(frame) == self._frame for frame, _ in frames) else None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainCall:
        return self

    def __reduce__(self) -> tuple[type[TrainCall], tuple[()]]:
        return _Over, ()


class NoCall(TrainCall):
    """What stands for a call outside of a Trainer, as for a plan that was applied by hand: it neither runs nor ends."""

    def __init__(self) -> None:
        self._frame = self._thread = 0
        # There is none.
        self._trainer = type(None)

    def is_over(self) -> bool:
        return False

    def __reduce__(self) -> tuple[type[TrainCall], tuple[()]]:
        return type(self), ()


class _Over(NoCall):
    def is_over(self) -> bool:
        return True


def train_call() -> TrainCall:
    """Return the innermost call of a `train()` in this thread; `NoCall` outside of one."""
    frame = _innermost()
    return NoCall() if frame is None else TrainCall(frame)


def running_trainer() -> Any:
    """Return the Trainer whose `train()` is the innermost one in this thread; None outside of one."""
    frame = _innermost()
    return None if frame is None else _trainer_of(frame)


def trainer_being_built() -> Any:
    """Return the Trainer whose `__init__` is the innermost one in this thread; None outside of one."""
    frame = _innermost("__init__")
    return None if frame is None else _trainer_of(frame, "__init__")


def is_beside_training_steps() -> bool:
    """Whether a Trainer trains in this thread, and what runs is in none of its training steps, as in a callback."""
    return hasattr(running_trainer(), _TRAINING_STEP) and _innermost(_TRAINING_STEP) is None


def train_arguments() -> dict[str, Any]:
    """Return what that `train()` was given, by name, and what else it has found by now; empty outside of one."""
    frame = _innermost()
    return {} if frame is None else dict(frame.f_locals)


def _innermost(method: str = _TRAIN) -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and _trainer_of(frame, method) is None:
        frame = frame.f_back
    return frame


def _trainer_of(frame: FrameType, method: str = _TRAIN) -> object | None:
    """Return the Trainer whose method a frame is; None if it is something else."""
    if frame.f_code.co_name != method:
        return None
    trainer = frame.f_locals.get("self")
    # No test for transformers' class: importing it takes seconds, and other trainers have callbacks too.
    return trainer if hasattr(trainer, "callback_handler") else None


@dataclass(frozen=True)
class Removal:
    """What takes a plan off when its model is used after the end of the call that it was put on in."""

    call: TrainCall
    remove: Callable[[nn.Module], object]
    leave_use_cache: Callable[[], None]
    """Called before, where another Trainer runs: it has set the `use_cache` that it wants, when it was built."""

    def run_if_over(self, model: nn.Module) -> None:
        if torch.compiler.is_compiling() or not self.call.is_over():
            return
        trainer = running_trainer()
        if trainer is not None and not self.call.is_of(trainer):
            self.leave_use_cache()
        self.remove(model)


def place(removal: Removal, model: nn.Module) -> Iterator[Callable[[], None]]:
    """Have a removal tried at each use of a model. Yields what takes that off again."""
    yield model.register_forward_pre_hook(partial(_before_forward, removal), prepend=True).remove
    yield _place(_TRAIN, model, removal)
    for module in model.modules():
        if hasattr(type(module), _SAVE):
            # In the middle of a step use_cache is off in the config, which is saved before anything else is asked for.
            yield _place(_SAVE, module, removal)


def _before_forward(removal: Removal, model: nn.Module, args: Any) -> None:
    removal.run_if_over(model)


def _place(name: str, module: nn.Module, removal: Removal) -> Callable[[], None]:
    """Set an instance method that tries the removal first, and return what takes it off."""
    return partial(take_off, module, name, set_method(module, name, partial(_try_first, removal, module, name)))


def _try_first(
    removal: Removal, module: nn.Module, name: str, found: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    removal.run_if_over(module)
    return method_before(module, name, found)(*args, **kwargs)
