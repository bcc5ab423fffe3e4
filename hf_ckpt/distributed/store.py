"""What the processes of a run tell each other, through the store that their process group was made with.

Not by collectives: a process that does something else, because it was given no policy or has failed, would take part in
the wrong one, and all would wait, or abort, without a word.
"""

from __future__ import annotations

import datetime
import json
import logging
import time
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hf_ckpt.distributed import watchdog
from hf_ckpt.errors import OtherProcessError

logger = logging.getLogger(__name__)

Told = TypeVar("Told")

PATIENCE_S = 300
"""How long the first processes at a step of the plugin wait for the last, in seconds: reporters start before it.

One that is watched is waited for as long as it lives, be it in a debugger.
"""


def num_processes() -> int:
    """Return how many processes train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def exchange(told: Told, doing: str, timeout_s: float | None = None) -> list[Told]:
    """Return what each process tells, by rank. Called by all of them, in the same order.

    Args:
        told: what this one tells; of JSON's types, and tuples come as lists.
        doing: what all are about to do, for messages: "applying the policy".
        timeout_s: how long to wait for each of the others, in seconds; `PATIENCE_S` where nothing is said.

    Raises:
        OtherProcessError: another process does not come.
    """
    patience_s = PATIENCE_S if timeout_s is None else timeout_s
    store, rank = _get_default_store(), dist.get_rank()
    # Counted in the store, so that each new process group starts anew.
    number = store.add(f"hf_ckpt/{rank}", 1)
    store.set(f"hf_ckpt/{rank}/{number}", json.dumps(told))
    return [_heard(store, other, number, doing, patience_s) for other in range(dist.get_world_size())]


def _heard(store: Any, rank: int, number: int, doing: str, timeout_s: float) -> Any:
    key = f"hf_ckpt/{rank}/{number}"
    while True:
        start = time.monotonic()
        try:
            store.wait([key], datetime.timedelta(seconds=timeout_s))
            return json.loads(store.get(key))
        except dist.DistError as error:
            # The store itself may be gone too, and then there is nothing to wait for.
            if time.monotonic() - start >= timeout_s and watchdog.sees(rank):
                logger.info("Process %d has not come to %s yet. It is alive, and waited for.", rank, doing)
                continue
            raise OtherProcessError(
                f"Process {rank} has not come to {doing} within {timeout_s:.0f} s of process {dist.get_rank()}. Pass "
                "HFCkptCallback to the Trainer in all processes of a run, or in none; if all have it, see what that "
                "process is waiting for."
            ) from error
