"""Several processes go through a run stage by stage: an error in one of them ends the stage in all, in its words.

What they tell each other goes through the launcher's store, which is there before the process group is and still works
when a collective is left half done.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hf_ckpt.errors import OtherProcessError, RecipeError, in_words

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

DEFAULT_TIMEOUT_S = 1800
"""How long one process waits for another in a stage: as long as collectives do, if nothing else is said."""

# How long a process that failed waits to hear whether the others failed too.
_GRACE = datetime.timedelta(seconds=20)
_SILENT = "\0"
"""Stands for what a process did not say in time."""


class Together:
    """The processes that a launcher started for one run. A process by itself has nothing to wait for.

    Args:
        timeout_s: how long to wait in each stage for the others, in seconds.

    Example:
        together = Together()
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
        said = self._exchange(None, self._timeout)
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
        said = self._said_by_all(value, self._timeout)
        for rank, other in enumerate(said):
            if other != said[0]:
                found = "not known" if other == _SILENT else other
                text = (
                    f"{what} is {said[0]} in process 0, but {found} in process {rank}. All machines of a run need the "
                    "same recipe, data and folders; a folder that they share is simplest."
                )
                # All meet it.
                self._failed = dict.fromkeys(range(self.size), text)
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

    def _exchange(self, text: str | None, timeout: datetime.timedelta) -> list[str | None]:
        """Tell the others what went wrong here, if anything did, and return what each tells."""
        said = self._said_by_all(text, timeout)
        self._failed = {rank: told for rank, told in enumerate(said) if told not in (None, _SILENT)}
        return said

    def _said_by_all(self, text: str | None, timeout: datetime.timedelta) -> list[str | None]:
        if (store := self._store) is None:
            return [text]
        from torch.distributed import DistError

        self._num_said += 1
        keys = [f"{self._num_said}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(text))
        # A process that is gone says nothing, nor does one that is held up in a collective.
        with contextlib.suppress(DistError):
            store.wait(keys, timeout)
        return [json.loads(store.get(key)) if store.check([key]) else _SILENT for key in keys]


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
