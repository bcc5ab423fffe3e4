"""Offload to files on disk, written and read ahead in the background.

For lengths at which host memory does not suffice. Simple and safe rather than clever: bytes pass through a few buffers
in host memory; each tensor is a file of its own, with a checksum; where a file cannot be written, its buffer keeps the
bytes. The tensor goes to the device only when it is asked for, so that only the reading is hidden.

The files lie in a private directory that is gone with the process. Linux and other Unix systems.

Note on what is left after a crash. Each directory holds a file that its process has locked (flock). The system lets go
of the lock when the process ends, however it ends; so a directory whose lock can be had belongs to nobody, and the next
start removes it. Whoever locks a file checks afterwards that it is still the one under that name, because another
process may have taken the directory for an abandoned one in the moment before.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
import time
import warnings
import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_ckpt.errors import HostMemoryError, OffloadError, PolicyError
from hf_ckpt.regions.offload.host_buffers import BufferedLink, OutgoingTensor
from hf_ckpt.regions.offload.host_memory import HostLimits
from hf_ckpt.regions.offload.transfer import AsyncCopy, Buffer, Wire
from hf_ckpt.units import format_bytes

# Tensors that may wait to be written: one is written while the next is copied from the device.
_NUM_WRITING = 2


@dataclass(slots=True, eq=False)
class DiskHandle:
    """A tensor whose bytes are in a file, or in host memory on their way to or from it."""

    outgoing: OutgoingTensor
    buffer: Buffer | None
    """Where the bytes are while they are written or read, or for good if they could not be written."""
    name: str
    writing: Future[int] | None = None
    """Ends with the checksum."""
    checksum: int | None = None
    """None until the file is written, and for good if it could not be."""
    reading: Future[None] | None = None


class DiskLink(BufferedLink):
    """Keeps what is sent in files, in a private directory that it makes below `path`.

    Raises:
        PolicyError: nothing can be written there.
    """

    ahead = 2
    # Its threads stay behind.
    survives_fork = False

    def __init__(self, wire: Wire, limits: HostLimits, path: str) -> None:
        super().__init__(wire, limits)
        self.directory = PrivateDirectory(path)
        self._names = itertools.count()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="hf_ckpt-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="hf_ckpt-read")
        self._writing: list[DiskHandle] = []
        self._num_out = 0
        self._is_closed = False
        self._has_warned = False
        # Also when the process ends, and when nobody has closed the link.
        self._end = weakref.finalize(self, _end, os.getpid(), self.directory, self._writer, self._reader)

    def send(self, tensor: Tensor) -> DiskHandle:
        """Start copying into a buffer, and writing that; wait while too many are being written."""
        self._collect(at_most=_NUM_WRITING - 1)
        outgoing, buffer = self._fill(tensor)
        handle = DiskHandle(outgoing, buffer, f"{next(self._names):08}")
        content = _content(buffer, outgoing.layout.num_bytes)
        handle.writing = self._writer.submit(_write, self.directory, handle.name, content, outgoing.copy)
        self._writing.append(handle)
        self._num_out += 1
        return handle

    def prefetch(self, handle: DiskHandle) -> None:
        """Start reading the file, unless the bytes are still in memory."""
        self._collect()
        if handle.buffer is None:
            # Without room for a buffer it is read when it is asked for: by then others have come back.
            with suppress(HostMemoryError):
                self._start_reading(handle)

    def _start_reading(self, handle: DiskHandle) -> None:
        assert handle.checksum is not None, "without a buffer its bytes are in a file"
        num_bytes = handle.outgoing.layout.num_bytes
        buffer = self.pool.take(num_bytes)
        content = _content(buffer, num_bytes)
        handle.buffer = buffer
        handle.reading = self._reader.submit(
            _read, self.directory, handle.name, content, handle.checksum, buffer.last_copy
        )

    def cancel(self, handle: DiskHandle) -> None:
        """Give back the buffer that was being filled."""
        if handle.reading is not None:
            self._wait(handle.reading)
            self._empty(handle)

    def receive(self, handle: DiskHandle) -> Tensor:
        """Wait until the file is read, and return the tensor.

        Raises:
            OffloadError: the file is not what was written.
        """
        self._collect()
        if handle.buffer is None:
            self._start_reading(handle)
        assert handle.buffer is not None, "its bytes are in memory, or are being read"
        try:
            if handle.reading is not None:
                self._wait(handle.reading)
                handle.reading.result()
            return self._wire.fetch(handle.buffer, handle.outgoing.layout).take()
        finally:
            if handle.reading is not None:
                self._empty(handle)

    def release(self, handle: DiskHandle) -> None:
        """Remove the file and give the buffer back."""
        self.wait_for_send(handle)
        self.cancel(handle)
        if handle.writing is not None:
            self._wait(handle.writing)
            self._collect()
        if handle.buffer is not None:
            self._empty(handle)
        self.directory.remove_file(handle.name)
        self._num_out -= 1
        self._end_if_closed()

    def _empty(self, handle: DiskHandle) -> None:
        buffer, handle.buffer, handle.reading = handle.buffer, None, None
        if buffer is not None:
            self.pool.give_back(buffer)

    def _collect(self, at_most: int = _NUM_WRITING) -> None:
        """Take back the buffers whose bytes are on disk; wait until at most so many are left to be written."""
        for handle in list(self._writing):
            assert handle.writing is not None, "it is being written"
            if len(self._writing) > at_most:
                self._wait(handle.writing)
            if handle.writing.done():
                self._writing.remove(handle)
                self._written(handle, handle.writing)

    def _written(self, handle: DiskHandle, writing: Future[int]) -> None:
        handle.writing = None
        error = writing.exception()
        if error is None:
            handle.checksum = writing.result()
            self._empty(handle)
        elif not isinstance(error, OSError):
            raise error
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Offloading to {self.directory.path} fails ({error}); what cannot be written stays in host memory. "
                "Free space there, or name another path.",
                stacklevel=2,
            )

    def _wait(self, future: Future[Any]) -> None:
        if not future.done():
            start = time.perf_counter()
            wait_for([future])
            self.seconds_waited += time.perf_counter() - start

    def check_room(self, num_bytes: int) -> None:
        """Compare what is to come with what the disk has free, and the rest with host memory."""
        missing = num_bytes - self.directory.free_bytes()
        try:
            self._limits.check(missing, self.pool.held_bytes)
        except HostMemoryError as error:
            raise HostMemoryError(
                f"Offloading to {self.directory.path} needs {format_bytes(num_bytes)} more, "
                f"{format_bytes(missing)} more than the disk has free; and host memory cannot take the rest: {error}"
            ) from None

    def close(self) -> None:
        """Remove the directory as soon as no handle is out."""
        super().close()
        self._is_closed = True
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        if self._is_closed and not self._num_out:
            self._end()


def _write(directory: PrivateDirectory, name: str, content: memoryview, before: AsyncCopy) -> int:
    # The copy from the device has to be in the buffer first.
    before.synchronize()
    return directory.write(name, content)


def _read(directory: PrivateDirectory, name: str, content: memoryview, checksum: int, before: AsyncCopy | None) -> None:
    # What was in the buffer before may still be on its way to the device.
    if before is not None:
        before.synchronize()
    directory.read(name, content, checksum)


def _content(buffer: Buffer, num_bytes: int) -> memoryview:
    content: memoryview = buffer.first(num_bytes).numpy().data
    return content


def _end(process: int, directory: PrivateDirectory, *threads: ThreadPoolExecutor) -> None:
    if os.getpid() != process:
        # A forked process has neither the threads nor the files.
        return
    for executor in threads:
        executor.shutdown(wait=True, cancel_futures=True)
    directory.remove()


_PREFIX = "hf_ckpt-offload-"
_LOCK = "lock"
# Bytes of one read or write.
_CHUNK = 2**24
_TRIES = 10
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class PrivateDirectory:
    """A directory (mode 0700) that only this process uses. Removes what crashed processes left next to it.

    Raises:
        PolicyError: nothing can be written in `path`.
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
        """Write a new file and return the checksum of its content.

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
        """Read a whole file, of as many bytes as `into` has.

        Raises:
            OffloadError: the file is not what was written (its checksum differs).
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
            fault = f"has {size} bytes instead of {len(into)}" if found is None else "has changed since it was written"
            raise OffloadError(f"What was offloaded to {where} {fault}. {_STEP_IS_LOST}")

    def remove_file(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self._directory)

    def free_bytes(self) -> int:
        """Return the bytes that can still be written."""
        return shutil.disk_usage(self._directory).free

    def remove(self) -> None:
        """Remove the directory and all that is in it. Does nothing a second time, or in a forked process."""
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
    try:
        import fcntl  # noqa: F401  # asked for only
    except ImportError:
        message = "offload to disk was asked for, but this system has no file locks (fcntl). Offload to cpu."
        raise PolicyError(message) from None
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


def write_all(file: int, content: memoryview) -> int:
    """Write all of `content` at the start of a file, in as many writes as it takes, and return its checksum.

    Raises:
        OSError: it could not be written.
    """
    checksum = done = 0
    while done < len(content):
        written = os.pwrite(file, content[done : done + _CHUNK], done)
        if written <= 0:
            raise OSError(errno.EIO, "the disk takes no more bytes, and does not say why")
        checksum = zlib.crc32(content[done : done + written], checksum)
        done += written
    return checksum


def read_all(file: int, into: memoryview) -> int | None:
    """Fill `into` from the start of a file; return the checksum of what was read, None if the file ends early."""
    checksum = done = 0
    while done < len(into):
        count = os.preadv(file, [into[done : done + _CHUNK]], done)
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
    """Remove the directories of this user's processes that have ended."""
    try:
        entries = list(os.scandir(path))
    except OSError:
        # Written to, but not read by this user: what else is there is not ours to know.
        return
    for entry in entries:
        if entry.name.startswith(_PREFIX):
            with suppress(OSError):
                # A link, or what another user has made, is none of ours, whatever its name.
                if entry.is_dir(follow_symlinks=False) and os.lstat(entry.path).st_uid == os.geteuid():
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(path: str) -> None:
    try:
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Being made right now, or its maker died in that moment. If it is being made, its maker makes another.
        with suppress(OSError):
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
    """Make a private directory and return its path and the descriptor of its lock."""
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
    with suppress(OSError):
        _lock_now(lock)
        if os.path.samestat(os.fstat(lock), os.stat(where, follow_symlinks=False)):
            return lock
    os.close(lock)
    return -1


def _lock_now(file: int) -> None:
    """Lock a file for this process, or raise an OSError if it is locked."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
