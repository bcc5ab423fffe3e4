"""A link to files on disk, written and read ahead in the background.

For lengths at which host memory does not suffice. Simple and safe rather than clever: bytes pass through a few buffers
in host memory; each tensor is a file of its own, with a checksum; where a file cannot be written, its buffer keeps the
bytes. The tensor goes to the device when it is asked for, so that only the reading is hidden.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_ckpt.errors import HostMemoryError
from hf_ckpt.regions.offload.buffered import BufferedLink, Filling
from hf_ckpt.regions.offload.files import PrivateDirectory
from hf_ckpt.regions.offload.limits import HostLimits
from hf_ckpt.regions.offload.link import Buffer, Trip, Wire
from hf_ckpt.units import format_bytes

_NUM_WRITING = 2
"""Tensors that may wait to be written: one is written while the next is copied from the device."""


@dataclass(slots=True, eq=False)
class DiskParcel:
    """A tensor whose bytes are in a file, or in host memory on their way to or from it.

    Attributes:
        filling: its way to the host.
        buffer: where its bytes are while it is written or read, or for good if it could not be written.
        name: of its file.
        writing: ends with the checksum.
        checksum: of the file, once it is written; None before, and for good if it could not be.
        reading: ends when the buffer is filled.
    """

    filling: Filling
    buffer: Buffer | None
    name: str
    writing: Future[int] | None = None
    checksum: int | None = None
    reading: Future[None] | None = None


class DiskLink(BufferedLink):
    """Keeps what is sent in files. See `BufferedLink`.

    Args:
        wire: copies between device and host.
        limits: how much host memory there may be.
        path: where a private directory is made.

    Raises:
        PolicyError: nothing can be written there.

    Attributes:
        directory: the files.
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
        self._writing: list[DiskParcel] = []
        self._num_out = 0
        self._is_closed = False
        self._has_warned = False
        # Also when the process ends, and when nobody has closed the link.
        self._end = weakref.finalize(self, _end, os.getpid(), self.directory, self._writer, self._reader)

    def send(self, tensor: Tensor) -> DiskParcel:
        """Start copying into a buffer, and writing that; wait while too many are being written."""
        self._collect(at_most=_NUM_WRITING - 1)
        filling, buffer = self._fill(tensor)
        parcel = DiskParcel(filling, buffer, f"{next(self._names):08}")
        content = _content(buffer, filling.layout.num_bytes)
        parcel.writing = self._writer.submit(_write, self.directory, parcel.name, content, filling.trip)
        self._writing.append(parcel)
        self._num_out += 1
        return parcel

    def settle(self, parcel: DiskParcel) -> None:
        """Order the copy to the host before what the device does from now on."""
        parcel.filling.settle()

    def prefetch(self, parcel: DiskParcel) -> None:
        """Start reading the file, unless the bytes are in memory still."""
        self._collect()
        if parcel.buffer is None:
            # Without room for a buffer it is read when it is asked for: by then others have come back.
            with suppress(HostMemoryError):
                self._start_reading(parcel)

    def _start_reading(self, parcel: DiskParcel) -> None:
        assert parcel.checksum is not None, "without a buffer its bytes are in a file"
        num_bytes = parcel.filling.layout.num_bytes
        buffer = self.pool.take(num_bytes)
        content = _content(buffer, num_bytes)
        parcel.buffer = buffer
        parcel.reading = self._reader.submit(_read, self.directory, parcel.name, content, parcel.checksum, buffer.trip)

    def cancel(self, parcel: DiskParcel) -> None:
        """Give back the buffer that was being filled."""
        if parcel.reading is not None:
            self._wait(parcel.reading)
            self._empty(parcel)

    def receive(self, parcel: DiskParcel) -> Tensor:
        """Wait until the file is read, and return the tensor.

        Raises:
            OffloadError: the file is not what was written.
        """
        self._collect()
        if parcel.buffer is None:
            self._start_reading(parcel)
        assert parcel.buffer is not None, "its bytes are in memory, or are being read"
        try:
            if parcel.reading is not None:
                self._wait(parcel.reading)
                parcel.reading.result()
            return self._wire.fetch(parcel.buffer, parcel.filling.layout).take()
        finally:
            if parcel.reading is not None:
                self._empty(parcel)

    def release(self, parcel: DiskParcel) -> None:
        """Remove the file and give the buffer back."""
        self.settle(parcel)
        self.cancel(parcel)
        if parcel.writing is not None:
            self._wait(parcel.writing)
            self._collect()
        if parcel.buffer is not None:
            self._empty(parcel)
        self.directory.remove_file(parcel.name)
        self._num_out -= 1
        self._end_if_closed()

    def _empty(self, parcel: DiskParcel) -> None:
        buffer, parcel.buffer, parcel.reading = parcel.buffer, None, None
        if buffer is not None:
            self.pool.give_back(buffer)

    def _collect(self, at_most: int = _NUM_WRITING) -> None:
        """Take back the buffers whose bytes are on disk; wait until at most so many are left to be written."""
        for parcel in list(self._writing):
            assert parcel.writing is not None, "it is being written"
            if len(self._writing) > at_most:
                self._wait(parcel.writing)
            if parcel.writing.done():
                self._writing.remove(parcel)
                self._written(parcel, parcel.writing)

    def _written(self, parcel: DiskParcel, writing: Future[int]) -> None:
        parcel.writing = None
        error = writing.exception()
        if error is None:
            parcel.checksum = writing.result()
            self._empty(parcel)
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

    def expect(self, num_bytes: int) -> None:
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
        """Remove the directory, as soon as no parcel is out."""
        self.pool.close()
        self._is_closed = True
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        if self._is_closed and not self._num_out:
            self._end()


def _write(directory: PrivateDirectory, name: str, content: memoryview, before: Trip) -> int:
    # The copy from the device has to be in the buffer first.
    before.wait()
    return directory.write(name, content)


def _read(directory: PrivateDirectory, name: str, content: memoryview, checksum: int, before: Trip | None) -> None:
    # What was in the buffer before may still be on its way to the device.
    if before is not None:
        before.wait()
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
