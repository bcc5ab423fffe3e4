"""What the processes of a run say to each other: values through a store, and errors with them.

The store is the launcher's, which is there before a process group is, or the one that the process group was made with.
Collectives would not do: a process that does something else, because it was given no policy or has failed, would take
part in the wrong one, and all would wait, or abort, without a word.

Loads torch only where there are several processes: a wrong recipe is refused before that where there is one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hf_ckpt.errors import HFCkptError, OtherProcessError, RecipeError, error_text

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from hf_ckpt.distributed.watchdog import Watchdog

logger = logging.getLogger(__name__)

# What JSON can hold; tuples come as lists.
Value = TypeVar("Value")

# How long one process waits for another at the end of a stage: as long as collectives do, if nothing else is said.
DEFAULT_TIMEOUT_S = 1800
PATIENCE_S = 300
"""How long the first processes at a step of the callback wait for the last: reporters start before it.

One that is watched is waited for as long as it is heard of: see `watchdog`.
"""
# How long a process that failed waits to hear whether the others failed too.
_GRACE_S = 20.0
# Stands for the value that a process did not set in time.
_MISSING = "\0"


# --- The stages of a run that a launcher started. ---


class LaunchedProcesses:
    """The processes that a launcher started for one run. A process by itself has nothing to wait for.

    An error in a stage ends the stage in all of them. While this is entered, they are watched too: a process that
    leaves by an error of which the others do not know yet, or without one, ends the others.

    Example:
        with LaunchedProcesses() as processes:
            with processes.stage("reading the recipe"):
                recipe = load_recipe(path)
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self._timeout_s = timeout_s
        self._grace_s = min(timeout_s, _GRACE_S)
        self._num_gathered = 0
        self._errors: dict[int, str | None] = {}
        self._store = _join(self.size, timeout_s) if self.size > 1 else None
        self._watchdog: Watchdog | None = None

    def __enter__(self) -> Self:
        if self._store is not None:
            from hf_ckpt.distributed.watchdog import Watchdog

            self._watchdog = Watchdog(self._store, self.rank, outlasts_training=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watchdog is None:
            return
        if error is None:
            self._watchdog.close()
        elif isinstance(error, KeyboardInterrupt):
            self._watchdog.fail("it was stopped")
        elif isinstance(error, HFCkptError):
            self._watchdog.fail(str(error))
        else:
            self._watchdog.fail(f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Run the body in every process, and wait until all are through.

        Raises `OtherProcessError` where the body raised in another process; the process in which it did raises what it
        raised. `what` names the stage in messages: "reading the recipe".
        """
        try:
            yield
        # Whatever it is, the others would wait for this process in vain.
        except Exception as error:
            self._gather_errors(error_text(error))
            raise
        errors = self._gather_errors(None)
        missing = [rank for rank, text in enumerate(errors) if text is _MISSING]
        if missing:
            raise OtherProcessError(
                f"Process {missing[0]} has not come to the end of {what} within {self._timeout_s:g} s of "
                "this one, and is taken for lost. Its own output may tell more; if it is only slow, raise "
                "training.ddp_timeout."
            )
        if self._errors:
            rank, text = min(self._errors.items())
            raise OtherProcessError(f"Process {rank} failed while {what}: {text}")

    def check_same(self, value: str, what: str) -> None:
        """Raise `RecipeError` in all processes where one has another value. `what` names it: "the base model"."""
        values = self._gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                found = "not known" if other == _MISSING else other
                text = (
                    f"{what} is {values[0]} in process 0, but {found} in process {rank}. All machines of a run need "
                    "the same recipe, data and folders; a folder that they share is simplest."
                )
                # All meet it.
                self._errors = dict.fromkeys(range(self.size), text)
                self._close_if_all_know(values)
                raise RecipeError(text)

    def set_timeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def is_printed_by_another(self, error: Exception) -> bool:
        """Whether an error that ended a stage is another process's to print."""
        # All have often met the same one, such as a mistake in the recipe; the first of them prints it.
        first = min((rank for rank, text in self._errors.items() if text == error_text(error)), default=self.rank)
        return isinstance(error, OtherProcessError) or first != self.rank

    def _gather_errors(self, error: str | None) -> list[str | None]:
        errors = self._gather(error, has_failed=error is not None)
        self._errors = {rank: text for rank, text in enumerate(errors) if text not in (None, _MISSING)}
        if self._errors:
            self._close_if_all_know(errors)
        return errors

    def _gather(self, value: str | None, *, has_failed: bool = False) -> list[str | None]:
        """Return each process's value by rank. Unless failed, wait for those known to be alive as long as they take."""
        if (store := self._store) is None:
            return [value]
        from torch.distributed import DistError

        self._num_gathered += 1
        keys = [f"{self._num_gathered}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(value))
        # A process that is gone says nothing, nor does one that is held up in a collective.
        timeout_s = self._grace_s if has_failed else self._timeout_s
        with contextlib.suppress(DistError):
            _wait(store, keys, timeout_s, lambda: not has_failed and self._are_missing_alive(keys))
        return [json.loads(store.get(key)) if store.check([key]) else _MISSING for key in keys]

    def _are_missing_alive(self, keys: Sequence[str]) -> bool:
        """Whether all that have set no value yet are watched, and heard of."""
        if (watchdog := self._watchdog) is None or (store := self._store) is None:
            return False
        return all(store.check([key]) or watchdog.is_alive(rank) for rank, key in enumerate(keys))

    def _close_if_all_know(self, values: Sequence[str | None]) -> None:
        """Stop the watch where all have got the error: each ends by itself, and this process is needed no longer."""
        if self._watchdog is not None and not any(value is _MISSING for value in values):
            self._watchdog.close()


def _join(size: int, timeout_s: float) -> Store:
    """Return the launcher's store, with room for one run in it."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    timeout = datetime.timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # Each process joins once for each run, so that all get the same number.
    run = (store.add("hf_ckpt/num_joined", 1) - 1) // size
    return PrefixStore(f"hf_ckpt/run {run}", store)


# --- The processes of the default process group. ---


def num_processes() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_results(work: Callable[[], Value], doing: str, timeout_s: float | None = None) -> list[Value]:
    """Let every process work, and return in all of them what each of them got, by rank.

    Raises in all of them where `work` raised in one: there what it raised, elsewhere `OtherProcessError`. `doing` names
    the work in messages: "planning". Without `timeout_s`, `PATIENCE_S` counts.
    """
    if num_processes() == 1:
        return [work()]
    value: Value | None = None
    error: Exception | None = None
    try:
        value = work()
    # Whatever it is, the others would wait for the result.
    except Exception as raised:  # noqa: BLE001
        error = raised
    gathered: list[Any] = all_gather((None if error is None else error_text(error), value), doing, timeout_s)
    if error is not None:
        raise error
    for rank, (text, _) in enumerate(gathered):
        if text is not None:
            raise OtherProcessError(f"Process {rank} failed while {doing}: {text}")
    return [result for _, result in gathered]


def broadcast_result(work: Callable[[], Value], timeout_s: float, doing: str) -> Value:
    """Let rank 0 work, and return its result in all processes: what it finds in files that only it writes, or plans.

    Raises as `gather_results` does. `timeout_s` is long where rank 0 may still be writing.
    """
    if num_processes() == 1:
        return work()
    import torch.distributed as dist

    results: list[Any] = gather_results(work if dist.get_rank() == 0 else lambda: None, doing, timeout_s)
    result: Value = results[0]
    return result


def all_gather(value: Value, doing: str, timeout_s: float | None = None) -> list[Value]:
    """Return each process's value, by rank. Called by all of them, in the same order.

    Raises `OtherProcessError` where another process does not come. `doing` is what all are about to do, for messages:
    "applying the policy"; `timeout_s` counts for each of the others.
    """
    import torch.distributed as dist

    from hf_ckpt.upstream.torch import default_store

    store, rank = default_store(), dist.get_rank()
    # Counted in the store, so that each new process group starts anew.
    number = store.add(f"hf_ckpt/{rank}", 1)
    store.set(f"hf_ckpt/{rank}/{number}", json.dumps(value))
    patience_s = PATIENCE_S if timeout_s is None else timeout_s
    return [_value_of(store, other, number, doing, patience_s) for other in range(dist.get_world_size())]


def _value_of(store: Store, rank: int, number: int, doing: str, timeout_s: float) -> Any:
    import torch.distributed as dist

    key = f"hf_ckpt/{rank}/{number}"
    try:
        _wait(store, [key], timeout_s, lambda: _is_alive(rank, doing))
        return json.loads(store.get(key))
    # The store may also be gone between the two.
    except dist.DistError as error:
        raise OtherProcessError(
            f"Process {rank} has not come to {doing} within {timeout_s:.0f} s of process {dist.get_rank()}. Pass "
            "HFCkptCallback to the Trainer in all processes of a run, or in none; if all have it, see what that "
            "process is waiting for."
        ) from error


def _is_alive(rank: int, doing: str) -> bool:
    from hf_ckpt.distributed import watchdog

    if not watchdog.is_alive(rank):
        return False
    logger.info("Process %d has not come to %s yet. It is alive, and waited for.", rank, doing)
    return True


def _wait(store: Store, keys: list[str], timeout_s: float, is_worth_it: Callable[[], bool]) -> None:
    """Wait for keys, and again after each timeout for which it is worth it. Raises `DistError` if they do not come."""
    from torch.distributed import DistError

    while True:
        start = time.monotonic()
        try:
            return store.wait(keys, datetime.timedelta(seconds=timeout_s))
        except DistError:
            # Sooner, the store itself is gone, and there is nothing to wait for.
            is_store_gone = time.monotonic() - start < timeout_s
            if is_store_gone or not is_worth_it():
                raise
