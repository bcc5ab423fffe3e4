"""SIGTERM ends a run as Ctrl-C does. Only a command may say so: signals belong to the program, not to a library."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hf_ckpt.errors import DiskFullError, OtherProcessError, cause_chain
from hf_ckpt.units import format_bytes

_DEADLINE_S = 20.0
"""How long the run may take to end, in seconds. Launchers kill what has not ended 30 s after SIGTERM."""
EXIT_CODE = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """Raised in the main thread on SIGTERM."""


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, after the handler that was there; in the end put that one back.

    A handler that is set within governs, such as the Trainer's with `enable_jit_checkpoint`.
    """
    found = signal.getsignal(signal.SIGTERM)
    # Only the main thread may set a handler. None: one that is not Python's.
    if threading.current_thread() is not threading.main_thread() or found in (signal.SIG_IGN, None):
        yield
        return
    process, deadline = os.getpid(), threading.Timer(_DEADLINE_S, os._exit, [EXIT_CODE])
    deadline.daemon = True

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            # A forked child, such as one that reads data, has its parent's handlers.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if callable(found):
            found(number, frame)
        # Once: the run is ending, and must not be interrupted in that.
        if deadline.ident is None:
            deadline.start()
            raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, found)
        deadline.cancel()


_FULL = (errno.ENOSPC, errno.EDQUOT)
# safetensors, pyarrow and tokenizers hand on the system's words in errors of their own.
_WORDS = ("No space left on device", "Disk quota exceeded")
_TORCHS_WRITER = "inline_container.cc"
_NEXT_TO_NOTHING = 16 * 2**20


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Raise errors of a full disk as what they are.

    `folder`: of the run; named where the error does not say which file could not be written.
    """
    try:
        yield
    # Said already; what another process says is not of this one's disk.
    except (DiskFullError, OtherProcessError):
        raise
    except Exception as error:
        found = next((link for link in cause_chain(error) if _is_full(link, folder)), None)
        if found is None:
            raise
        raise DiskFullError(_message(found, folder)) from error


def _is_full(error: BaseException, folder: Path) -> bool:
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    text = str(error)
    # torch.save does not hand on why it cannot write.
    return any(word in text for word in _WORDS) or (_TORCHS_WRITER in text and _free_bytes(folder) < _NEXT_TO_NOTHING)


def _message(error: BaseException, folder: Path) -> str:
    named_file = getattr(error, "filename", None)
    where = Path(str(named_file)) if named_file else folder
    return (
        f"The disk is full: {where} cannot be written ({error}), and {format_bytes(_free_bytes(where))} are free "
        "there. What was being written is not whole. Free space, or name another folder (training.output_dir; "
        "HF_HOME for caches); checkpoints take less with training.save_total_limit or training.save_only_model=true."
    )


def _free_bytes(path: Path) -> int:
    nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(nearest).free
