"""Processes that run the same tests in step: a process group for the tests, a store for the harness.

What the harness has to say goes through the store, so that it arrives also when a test has left a collective half done.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import warnings
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

GROUP_TIMEOUT = datetime.timedelta(seconds=60)
# Longer than what it waits for: another process that a collective holds up.
STORE_TIMEOUT = datetime.timedelta(seconds=90)


def has_gpus() -> bool:
    """Whether each process of this machine has a GPU of its own."""
    return torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 0


class Ranks:
    """This process among those that `torchrun` started."""

    def __init__(self) -> None:
        self._store, self.rank, self.size = next(rendezvous("env://", timeout=STORE_TIMEOUT))
        self._store.set_timeout(STORE_TIMEOUT)
        self._num_groups = self._num_exchanges = 0

    def connect(self) -> None:
        """Make a new process group, on GPUs where each process has one."""
        if has_gpus():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self._num_groups += 1
        store = dist.PrefixStore(f"group {self._num_groups}", self._store)
        backend = "cuda:nccl,cpu:gloo" if has_gpus() else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=GROUP_TIMEOUT)

    def reconnect(self) -> None:
        """Leave a process group that a failed test may have left out of step."""
        dist.destroy_process_group()
        self.connect()

    def exchange(self, text: str) -> list[str]:
        """Return what all ranks say, by rank.

        Raises:
            dist.DistStoreError: another rank says nothing, as one that has crashed.
        """
        self._num_exchanges += 1
        self._store.set(f"{self._num_exchanges} {self.rank}", text)
        return [self._store.get(f"{self._num_exchanges} {rank}").decode() for rank in range(self.size)]

    def leave(self, status: int) -> NoReturn:
        """End this process when all are done. Left to end by itself, about one in twenty aborts at exit."""
        self.exchange("done")
        dist.destroy_process_group()
        with warnings.catch_warnings():
            # Under pytest's filters the clean-up of a temporary folder would be an error.
            warnings.simplefilter("ignore")
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
