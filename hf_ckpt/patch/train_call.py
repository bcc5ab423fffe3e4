"""One call of a Trainer's `train()`, and whether it is still under way.

No event tells that an exception has ended it. The traceback, which notebooks keep, holds its frames and all that is in
them, so nothing is freed either. But what runs is on the stack of its thread, and what is only kept is not.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import Any


class TrainCall:
    """One call. Copies of a model share it; in what comes from a pickle it is over.

    Args:
        frame: of `train()`, which runs in this thread.
    """

    def __init__(self, frame: FrameType) -> None:
        # The frame itself would keep all its callers' variables.
        self._frame = id(frame)
        self._thread = threading.get_ident()
        # Once a frame is freed, another one can have its id.
        self._trainer = weakref.ref(frame.f_locals["self"])

    def is_running(self) -> bool:
        """Whether the call is under way, here or in the thread that made it."""
        is_here = self._thread == threading.get_ident()
        frame = sys._getframe() if is_here else sys._current_frames().get(self._thread)
        while frame is not None:
            if id(frame) == self._frame:
                return _trainer_of(frame) is self._trainer()
            frame = frame.f_back
        return False

    def is_innermost(self) -> bool:
        """Whether this call is under way in this thread, and no other within it."""
        frame = _innermost()
        return frame is not None and id(frame) == self._frame and self.is_running()

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainCall:
        return self

    def __reduce__(self) -> tuple[type[_Over], tuple[()]]:
        return _Over, ()


class _Over(TrainCall):
    def __init__(self) -> None:
        pass

    def is_running(self) -> bool:
        return False


def train_call() -> TrainCall | None:
    """Return the innermost call of a `train()` in this thread; None outside of one."""
    frame = _innermost()
    return None if frame is None else TrainCall(frame)


def _innermost() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and _trainer_of(frame) is None:
        frame = frame.f_back
    return frame


def _trainer_of(frame: FrameType) -> object | None:
    """Return the Trainer whose `train()` a frame is; None if it is something else."""
    if frame.f_code.co_name != "train":
        return None
    trainer = frame.f_locals.get("self")
    # transformers' class is not asked for: importing it takes seconds, and other trainers have callbacks too.
    return trainer if hasattr(trainer, "callback_handler") else None
