"""Files of one process in a private directory on disk, gone with the process.

Knows bytes and names only. Linux and other Unix systems.

Note on what is left after a crash. Each directory holds a file that its process has locked (flock). The system lets go
of the lock when the process ends, however it ends; so a directory whose lock can be had belongs to nobody, and the next
start removes it. Whoever locks a file looks afterwards whether it is still the one under that name, because another
process may have taken the directory for an abandoned one in the moment before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from hf_ckpt.errors import OffloadError, PolicyError

_PREFIX = "hf_ckpt-offload-"
_LOCK = "lock"
_CHUNK = 2**24
"""Bytes of one read or write."""
_TRIES = 10
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class PrivateDirectory:
    """A directory (mode 0700) that only this process uses. Removes what crashed processes left beside it.

    Args:
        path: where to make it; an existing directory.

    Raises:
        PolicyError: nothing can be written there.

    Attributes:
        path: of the private directory.
    """

    def __init__(self, path: str) -> None:
        check_path(path)
        home = os.path.expanduser(path)
        _remove_abandoned(home)
        self.path, self._lock = _make_directory(home)
        self._process = os.getpid()
        # What is opened goes through this, not through the path, which others may rename.
        self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def write(self, name: str, content: memoryview) -> int:
        """Write a new file.

        Returns:
            The checksum of the content.

        Raises:
            OSError: not all of it could be written; the file is gone then.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        file = os.open(name, flags, 0o600, dir_fd=self._directory)
        try:
            try:
                _reserve(file, len(content))
                return write_all(file, content)
            finally:
                # The last errors of a write can come here.
                os.close(file)
        except BaseException:
            self.remove_file(name)
            raise

    def read(self, name: str, into: memoryview, checksum: int) -> None:
        """Read a whole file.

        Args:
            name: of the file.
            into: as many bytes as were written.
            checksum: what `write` returned.

        Raises:
            OffloadError: the file is not what was written.
        """
        where = os.path.join(self.path, name)
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._directory)
            try:
                size = os.fstat(file).st_size
                found = read_all(file, into) if size == len(into) else None
            finally:
                os.close(file)
        except OSError as error:
            raise OffloadError(f"What was offloaded to {where} cannot be read: {error}. {_STEP_IS_LOST}") from error
        if found != checksum:
            told = f"has {size} bytes instead of {len(into)}" if found is None else "has changed since it was written"
            raise OffloadError(f"What was offloaded to {where} {told}. {_STEP_IS_LOST}")

    def remove_file(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._directory)

    def free_bytes(self) -> int:
        """Return the bytes that can still be written."""
        return shutil.disk_usage(self._directory).free

    def remove(self) -> None:
        """Remove the directory and all that is in it. A second call does nothing, as does one in a forked process."""
        if self._process != os.getpid() or self._lock < 0:
            return
        lock, self._lock = self._lock, -1
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._directory)
        os.close(lock)


_STEP_IS_LOST = "The step cannot go on; no gradient has been computed from it. Check the disk, or offload to cpu."


def check_path(path: str) -> None:
    """Check that files can be written in a directory, and locked.

    Raises:
        PolicyError: they cannot.
    """
    if os.name != "posix":
        raise PolicyError("offload to disk was asked for, but this system has no file locks (flock). Offload to cpu.")
    home = os.path.expanduser(path)
    if not os.path.isdir(home):
        raise PolicyError(
            f'offload to disk was asked for with path="{path}", which is no directory. Make it, or name another.'
        )
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"1")
            _lock_now(file.fileno())
    except OSError as error:
        raise PolicyError(
            f'offload to disk was asked for with path="{path}", where no file can be written and locked: {error}. '
            "Name a directory of yours on a local disk."
        ) from error


def write_all(file: int, content: memoryview, write: Callable[[int, memoryview, int], int] | None = None) -> int:
    """Write all of `content` at the start of a file, in as many writes as it takes, and return its checksum.

    Args:
        file: descriptor.
        content: bytes.
        write: replaces `os.pwrite` in tests.

    Raises:
        OSError: it could not be written.
    """
    write, checksum, done = write or os.pwrite, 0, 0
    while done < len(content):
        written = write(file, content[done : done + _CHUNK], done)
        if written <= 0:
            raise OSError(errno.EIO, "the disk takes no more bytes, and does not say why")
        checksum = zlib.crc32(content[done : done + written], checksum)
        done += written
    return checksum


def read_all(
    file: int, into: memoryview, read: Callable[[int, list[memoryview], int], int] | None = None
) -> int | None:
    """Fill `into` from the start of a file, in as many reads as it takes.

    Args:
        file: descriptor.
        into: bytes.
        read: replaces `os.preadv` in tests.

    Returns:
        The checksum of what was read; None if the file ends early.
    """
    read, checksum, done = read or os.preadv, 0, 0
    while done < len(into):
        count = read(file, [into[done : done + _CHUNK]], done)
        if count <= 0:
            return None
        checksum = zlib.crc32(into[done : done + count], checksum)
        done += count
    return checksum


def _reserve(file: int, num_bytes: int) -> None:
    """Take the space on disk now, so that a full disk says so before anything is written. Not all systems can."""
    if not hasattr(os, "posix_fallocate") or not num_bytes:
        return
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise


def _remove_abandoned(path: str) -> None:
    """Remove the directories of this user's processes that are no more."""
    try:
        entries = list(os.scandir(path))
    except OSError:
        # Written to, but not read by this user: what else is there is not ours to know.
        return
    for entry in entries:
        # A link, or what another user has made, is none of ours, whatever its name.
        if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False) and _is_ours(Path(entry.path)):
            _remove_if_abandoned(entry.path)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _remove_if_abandoned(path: str) -> None:
    try:
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Being made right now, or its maker died in that moment. If it is being made, its maker makes another.
        with contextlib.suppress(OSError):
            os.rmdir(path)
        return
    except OSError:
        return
    try:
        _lock_now(lock)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        # Its process is alive.
        return
    finally:
        os.close(lock)


def _make_directory(path: str) -> tuple[str, int]:
    """Make a private directory and return its path and the descriptor of its lock.

    Raises:
        PolicyError: others take it away each time, or it cannot be locked.
    """
    for _ in range(_TRIES):
        made = tempfile.mkdtemp(prefix=_PREFIX, dir=path)
        lock = _make_lock(made)
        if lock >= 0:
            return made, lock
        shutil.rmtree(made, ignore_errors=True)
    raise PolicyError(
        f'offload to disk was asked for with path="{path}", where a directory was made {_TRIES} times and could not be '
        "locked. Name a directory on a local disk."
    )


def _make_lock(path: str) -> int:
    """Make and lock the lock file of a directory; return its descriptor, or -1 if it was taken away."""
    where = os.path.join(path, _LOCK)
    try:
        lock = os.open(where, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return -1
    try:
        _lock_now(lock)
        if os.path.samestat(os.fstat(lock), os.stat(where, follow_symlinks=False)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return -1


def _lock_now(file: int) -> None:
    """Lock a file for this process, or raise an OSError if it is locked."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
