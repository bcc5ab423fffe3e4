"""Several processes go through a run stage by stage: an error in one of them ends the stage in all, in its words.

What they tell each other goes through the launcher's store, which is there before the process group is and still works
when a collective is left half done. From the first stage on they are watched too, so that one that is killed is noticed
at once.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hf_ckpt.errors import HFCkptError, OtherProcessError, RecipeError, in_words

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from hf_ckpt.distributed.watchdog import Watch

DEFAULT_TIMEOUT_S = 1800
"""How long one process waits for another in a stage: as long as collectives do, if nothing else is said."""

# How long a process that failed waits to hear whether the others failed too.
_GRACE = datetime.timedelta(seconds=20)
# How long a process waits to be watched, before it goes on without.
_CONNECT_S = 10.0
_SILENT = "\0"
"""Stands for what a process did not say in time."""


class Together:
    """The processes that a launcher started for one run. A process by itself has nothing to wait for.

    While it is entered, a process that is killed, or that leaves by an error of which the others do not know yet, ends
    the others.

    Args:
        timeout_s: how long to wait in each stage for the others, in seconds.

    Example:
        with Together() as together:
            with together.stage("reading the recipe"):
                recipe = load_recipe(path)
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._grace = min(self._timeout, _GRACE)
        self._num_said = 0
        self._failed: dict[int, str | None] = {}
        self._store = _join(self.size, self._timeout) if self.size > 1 else None
        self._watch: Watch | None = None

    def __enter__(self) -> Self:
        if self._store is not None:
            from hf_ckpt.distributed.watchdog import Watch, own

            self._watch = Watch(own(self._store), self.rank, self.size, outlasts_training=True)
            self._watch.is_connected.wait(_CONNECT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watch is None:
            return
        if error is None:
            self._watch.close()
        elif isinstance(error, KeyboardInterrupt):
            self._watch.fail("it was stopped")
        elif isinstance(error, HFCkptError):
            self._watch.fail(str(error))
        else:
            self._watch.leave(f"{type(error).__name__}: {error}")

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Run the body in every process, and wait until all are through.

        Args:
            what: the stage, for messages: "reading the recipe".

        Raises:
            OtherProcessError: the body raised in another process. The process in which it did raises what it raised.
        """
        try:
            yield
        # Whatever it is, the others would wait for this process in vain.
        except Exception as error:
            self._exchange(in_words(error), self._grace)
            raise
        said = self._exchange(None, self._timeout, is_patient=True)
        silent = [rank for rank, told in enumerate(said) if told is _SILENT]
        if silent:
            raise OtherProcessError(
                f"Process {silent[0]} has not come to the end of {what} within {self._timeout.total_seconds():g} s of "
                "this one, and is taken for lost. Its own output may tell more; if it is only slow, raise "
                "training.ddp_timeout."
            )
        if self._failed:
            rank, text = min(self._failed.items())
            raise OtherProcessError(f"Process {rank} failed while {what}: {text}")

    def check_same(self, value: str, what: str) -> None:
        """Refuse to go on with different values in different processes.

        Args:
            value: this process's.
            what: what it tells, for the message: "the base model".

        Raises:
            RecipeError: another process has another value.
        """
        said = self._said_by_all(value, self._timeout, is_patient=True)
        for rank, other in enumerate(said):
            if other != said[0]:
                found = "not known" if other == _SILENT else other
                text = (
                    f"{what} is {said[0]} in process 0, but {found} in process {rank}. All machines of a run need the "
                    "same recipe, data and folders; a folder that they share is simplest."
                )
                # All meet it.
                self._failed = dict.fromkeys(range(self.size), text)
                self._let_go(said)
                raise RecipeError(text)

    def wait_for(self, timeout_s: float) -> None:
        """Change how long to wait in each stage for the others, in seconds."""
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def is_said_by_another(self, error: Exception) -> bool:
        """Tell whether an error that ended a stage is another process's to print.

        All have often met the same one, such as a mistake in the recipe; the first of them prints it.
        """
        first = min((rank for rank, text in self._failed.items() if text == in_words(error)), default=self.rank)
        return isinstance(error, OtherProcessError) or first != self.rank

    def _exchange(self, text: str | None, timeout: datetime.timedelta, *, is_patient: bool = False) -> list[str | None]:
        """Tell the others what went wrong here, if anything did, and return what each tells."""
        said = self._said_by_all(text, timeout, is_patient=is_patient)
        self._failed = {rank: told for rank, told in enumerate(said) if told not in (None, _SILENT)}
        if self._failed:
            self._let_go(said)
        return said

    def _sees_the_silent(self, keys: list[str]) -> bool:
        """Tell whether all that have said nothing yet are watched, and so alive."""
        if (watch := self._watch) is None or (store := self._store) is None:
            return False
        return all(store.check([key]) or watch.sees(rank) for rank, key in enumerate(keys))

    def _let_go(self, said: list[str | None]) -> None:
        """Have this process no longer needed by others that all know of the error, and end as it does."""
        if self._watch is not None and not any(told is _SILENT for told in said):
            self._watch.close()

    def _said_by_all(
        self, text: str | None, timeout: datetime.timedelta, *, is_patient: bool = False
    ) -> list[str | None]:
        """Tell the others something, and return what each tells.

        Args:
            text: what this process tells.
            timeout: how long to wait for the others.
            is_patient: wait for those that are watched, and known to be alive, for as long as they take.
        """
        if (store := self._store) is None:
            return [text]
        self._num_said += 1
        keys = [f"{self._num_said}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(text))
        is_over = False
        while not is_over:
            is_over = _waited(store, keys, timeout) or not (is_patient and self._sees_the_silent(keys))
        return [json.loads(store.get(key)) if store.check([key]) else _SILENT for key in keys]


def _waited(store: Store, keys: list[str], timeout: datetime.timedelta) -> bool:
    """Wait for keys; tell whether there is nothing to wait for any more: they came, or the store is gone."""
    from torch.distributed import DistError

    start = time.monotonic()
    try:
        store.wait(keys, timeout)
    except DistError:
        # A process that is gone says nothing, nor does one that is held up in a collective.
        return time.monotonic() - start < timeout.total_seconds()
    return True


def _join(size: int, timeout: datetime.timedelta) -> Store:
    """Return the launcher's store, with room for one run in it."""
    # A wrong recipe is refused before torch is loaded where there is one process.
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # Each process joins once for each run, so that all get the same number.
    run = (store.add("hf_ckpt/num_joined", 1) - 1) // size
    return PrefixStore(f"hf_ckpt/run {run}", store)
