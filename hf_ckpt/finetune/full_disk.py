"""A full disk, by whatever name the library that was writing calls it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_ckpt.errors import DiskFullError, OtherProcessError
from hf_ckpt.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
# safetensors, pyarrow and tokenizers hand on the system's words in errors of their own.
_WORDS = ("No space left on device", "Disk quota exceeded")
_TORCHS_WRITER = "inline_container.cc"
_NEXT_TO_NOTHING = 16 * 2**20


@contextmanager
def named(folder: Path) -> Iterator[None]:
    """Raise errors of a full disk as what they are.

    Args:
        folder: of the run; named where the error does not say which file could not be written.

    Raises:
        DiskFullError: a disk is full, or its quota used up.
    """
    try:
        yield
    # Said already; what another process says is not of this one's disk.
    except (DiskFullError, OtherProcessError):
        raise
    except Exception as error:
        found = next((link for link in _chain(error) if _is_full(link, folder)), None)
        if found is None:
            raise
        raise DiskFullError(_message(found, folder)) from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


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
