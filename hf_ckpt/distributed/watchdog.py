"""Ends this process, with a clear message, when another process of the run has failed or left training early.

A process that is killed, or ends with an error, is the launcher's affair: torchrun's agent ends the others within a
second. It does not see one that leaves training and lives on, or exits with 0, and cannot say why one failed. So each
process says through the run's store why it stops, and looks there each second.

Silence ends nobody. A process that is slow, stopped in a debugger, or busy with what it does alone is left in peace;
its beats, which its watchdog counts in the store, only tell `store` for how long it is worth waiting for it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.utils.hooks import RemovableHandle

from hf_ckpt.errors import HFCkptError, OtherProcessError
from hf_ckpt.upstream.torch import default_store

logger = logging.getLogger(__name__)

# How often a process looks whether another has failed, and whether its own training still runs, in seconds.
_LOOK_S = 1.0
# How often in a row training must be found to run no longer: the stack is read while its thread changes it.
_NUM_LOOKS = 5
# How long a process that fails waits at its end for the others to say so, in seconds: then the launcher ends them.
_LINGER_S = 2.0
# How long this process may take to end by itself, in seconds: gloo raises at once, NCCL does not.
_GRACE_S = 15.0
# After how long without a beat a process is not waited for any longer, in seconds: as long as collectives wait.
_SILENCE_S = 1800.0

IsHandled = Callable[[BaseException], bool] | None

_running: weakref.WeakSet[Watchdog] = weakref.WeakSet()


class Training(Protocol):
    """A call of `Trainer.train()`, which any thread may ask. Another one is equal if it is the same call."""

    def is_over(self) -> bool: ...
    def uncaught_error(self) -> BaseException | None: ...


class Watchdog:
    """Tells the other processes of a run why this one stops, and ends it when another one has stopped.

    `store` is shared by all processes of the run. Such a watch is made by all of them, in the same order. With
    `outlasts_training` the process is needed until `close`, and not just until its training has ended.
    """

    def __init__(self, store: Store, rank: int, group: object = None, *, outlasts_training: bool = False) -> None:
        # A connection of its own: what another thread waits for in the store would hold up the beats.
        self._store: Store = store.clone()  # type: ignore[attr-defined] # Torch's stubs do not know it.
        self._rank = rank
        self._group = None if group is None else weakref.ref(group)
        self._outlasts_training = outlasts_training
        # Counted in the store, so that watches that follow each other are not mixed up.
        name = f"hf_ckpt/watch/{self._store.add(f'hf_ckpt/watches/{rank}', 1)}"
        self._failure, self._beats = f"{name}/failure", f"{name}/beats"
        self._store.add(f"{self._beats}/{rank}", 1)
        self._trainings: list[Training] = []
        self._heard: dict[int, tuple[int, float]] = {}
        self._over, self._has_failed = threading.Event(), False
        # Runs at the end of processes that multiprocessing starts too, where atexit does not, and in no forked child.
        self._at_exit = Finalize(None, self._end_of_process, exitpriority=0)
        _running.add(self)
        # A daemon: it must not keep a process alive that has ended its work.
        self._thread = threading.Thread(target=self._run, name="hf_ckpt-watch", daemon=True)
        self._thread.start()

    # --- What this process does. ---

    def begin(self, training: Training) -> None:
        """Note that training begins. Raises `OtherProcessError` if another process has left."""
        # A Trainer that looks for a batch size that fits begins several times in one call.
        if training not in self._trainings:
            self._trainings.append(training)
        # Asked afterwards: what comes between the two, the thread finds.
        if (stopped := self._stopped()) is not None:
            self._trainings.pop()
            raise OtherProcessError(f"{stopped} Process {self._rank} cannot train without it.")

    def end(self) -> None:
        if self._trainings:
            self._trainings.pop()
        if not self._is_needed():
            self.close()

    def fail(self, reason: str) -> None:
        """Tell the other processes why this one stops. The first reason of a run stands: others may come of it."""
        # A forked child, which has no thread, has the connection of its parent, who would read the answer.
        if not self._over.is_set() and self._thread.is_alive():
            self._has_failed = True
            with suppress(dist.DistError):
                self._store.compare_set(self._failure, "", json.dumps([self._rank, reason[:1000]]))
        self.close()

    def leave(self) -> None:
        """Do the same where nobody says why, which may be known all the same."""
        what = "it left training before its end" if self._is_needed() else "its process ended before training began"
        errors = (training.uncaught_error() for training in self._trainings)
        known = (f"{type(error).__name__}: {error}" for error in errors if error is not None)
        self.fail(next(known, f"{what}; its own output may tell more"))

    def report_failures(self, model: nn.Module, is_handled: IsHandled = None) -> Iterable[RemovableHandle]:
        """Place a hook that reports an exception in the model's forward to the others, before anybody handles it.

        `is_handled` tells of an exception whether this process will go on, or tell of it itself.
        """
        return [model.register_forward_hook(functools.partial(_report, self, is_handled), always_call=True)]

    def close(self) -> None:
        """Watch no longer: this process and the others do not need each other."""
        self._over.set()
        self._trainings.clear()
        self._outlasts_training = False

    def is_of(self, group: object) -> bool:
        return not self._over.is_set() and (self._group is None or self._group() is group)

    def has_left_training(self) -> bool:
        """Whether training has begun here, and is neither ended nor running."""
        return any(training.is_over() for training in self._trainings)

    def is_alive(self, rank: int) -> bool:
        """Whether another process has made this watch too, and has been heard lately, as far as was asked before."""
        with suppress(dist.DistError):
            # Adding nothing reads a count, also where there is none yet.
            beats = 0 if self._over.is_set() else self._store.add(f"{self._beats}/{rank}", 0)
            if beats != self._heard.get(rank, (0, 0.0))[0]:
                self._heard[rank] = beats, time.monotonic()
            return beats > 0 and time.monotonic() - self._heard[rank][1] < _SILENCE_S
        return False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of the model leads here by its hook (`report_failures`), and is in no run.
        return type(None), ()

    def _end_of_process(self) -> None:
        self.leave()
        # It lingers; and a thread that is at work in torch while the interpreter ends would abort the process.
        self._thread.join(_LINGER_S + _LOOK_S)

    def _is_needed(self) -> bool:
        return bool(self._trainings) or self._outlasts_training

    def _stopped(self) -> str | None:
        if not self._store.check([self._failure]):
            return None
        rank, reason = json.loads(self._store.get(self._failure))
        return f"Process {rank} has stopped: {reason.rstrip('.')}."

    # --- What its thread does. ---

    def _run(self) -> None:
        # The store ends with the run, or with the process that has it: then the launcher or a collective tells.
        with suppress(dist.DistError):
            num_missed = 0
            while not self._over.wait(_LOOK_S):
                self._store.add(f"{self._beats}/{self._rank}", 1)
                # In a command whoever leaves training comes to the end of the command.
                has_left = self.has_left_training() and not self._outlasts_training
                num_missed = num_missed + 1 if has_left else 0
                if num_missed == _NUM_LOOKS:
                    self.leave()
                elif not has_left and (stopped := self._stopped()) is not None:
                    # What runs here may need no other process: only training does, which `begin` refuses.
                    if self._is_needed():
                        self._end(stopped)
                    break
        if self._has_failed:
            time.sleep(_LINGER_S)
        # There is nothing more to tell; and it would keep this watch, and with it a connection.
        self._at_exit.cancel()

    def _end(self, stopped: str) -> None:
        # All may stop for one reason, and then each of them says it.
        if self._over.wait(_LOOK_S / 2):
            return
        self._over.set()
        logger.error("%s Process %d cannot train on without it, and ends too.", stopped, self._rank)
        time.sleep(_GRACE_S)
        # Training may have come to its end since, or been left for this very reason: then it waits for nobody.
        if self._outlasts_training or (self._trainings and not self.has_left_training()):
            # The main thread waits in a collective that nobody will join.
            os._exit(1)


# --- The watchdogs of this process. ---


def start() -> Watchdog | None:
    """Watch the other processes of the default process group from here on, without waiting for them.

    Returns the watchdog of this process, which may be there already; None where there is one process only.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    group = dist.group.WORLD
    for watch in list(_running):
        if watch.is_of(group):
            if not watch.has_left_training():
                return watch
            watch.leave()
    return Watchdog(default_store(), dist.get_rank(), group)


@contextmanager
def watched_training(training: Training) -> Iterator[Watchdog | None]:
    """Begin a training, which ends by an error of this package's within: that is raised in all processes."""
    watch = start()
    if watch is None:
        # There is nobody to tell.
        yield None
        return
    watch.begin(training)
    try:
        yield watch
    except HFCkptError:
        watch.end()
        raise


def is_alive(rank: int) -> bool:
    """Whether another process is watched, and worth waiting for."""
    return any(watch.is_alive(rank) for watch in list(_running))


def _report(watch: Watchdog | None, is_handled: IsHandled, module: nn.Module, args: Any, output: Any) -> None:
    error = sys.exception()
    # With an output, the exception is one that the caller is handling.
    if watch is None or error is None or output is not None:
        return
    if is_handled is None or not is_handled(error):
        watch.fail(f"{type(error).__name__}: {error}")
