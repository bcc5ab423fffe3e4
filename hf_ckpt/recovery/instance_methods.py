"""Methods of one object that run through a recovery while a call of `train()` goes on, and then no longer.

Only instance attributes are set, each a `partial` of a module-level function: what a subclass has written runs inside,
and copies and pickles of the object run it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, Protocol

Method = Callable[..., Any]


class Runner(Protocol):
    """Runs a method, and is over at some time."""

    def is_over(self) -> bool:
        """Whether methods are to run by themselves again."""

    def stop(self) -> None:
        """Take all methods back."""

    def run(self, name: str, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `method(*args, **kwargs)` returns, whatever it takes."""


class Handle:
    """What a method holds of its runner. A copy of it, or one from a pickle, holds none."""

    def __init__(self, runner: Runner | None = None) -> None:
        self.runner = runner

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return Handle()

    def __reduce__(self) -> tuple[type[Handle], tuple[()]]:
        return Handle, ()


def set_method(runner: Runner, owner: object, name: str) -> Callable[[], None]:
    """Let a method of an object run through a runner, and return what puts back what was there."""
    found = vars(owner).get(name)
    ours = partial(_call, Handle(runner), owner, name, found)
    # A scheduler of torch looks for a mark on the step of its optimizer.
    setattr(owner, name, update_wrapper(ours, getattr(owner, name)))
    return partial(_put_back, owner, name, found, ours)


def _call(handle: Handle, owner: object, name: str, found: Method | None, *args: Any, **kwargs: Any) -> Any:
    method = partial(getattr(type(owner), name), owner) if found is None else found
    runner = handle.runner
    if runner is None:
        return method(*args, **kwargs)
    if runner.is_over():
        runner.stop()
        return method(*args, **kwargs)
    return runner.run(name, method, args, kwargs)


def _put_back(owner: object, name: str, found: Method | None, ours: Method) -> None:
    if vars(owner).get(name) is not ours:
        # Whoever put another one over ours knows what to put back.
        return
    if found is None:
        delattr(owner, name)
    else:
        setattr(owner, name, found)
