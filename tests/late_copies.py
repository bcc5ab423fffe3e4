"""A device whose copies happen as late as its streams allow, to be put in place of CUDA.

What computes runs at once, as it does on the CPU; a copy on another stream runs only when somebody has to wait for it.
Memory is looked at through weak references: a copy that finds it freed says so. Whoever forgets to wait, frees early,
or uses a buffer again too soon gets wrong values, or an entry in `faults`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_ckpt.regions.offload.transfer import DeviceMemory, HostAllocation, PageableMemory


class Stream:
    """Does what it is given in order; at once if it computes, else when it has to."""

    def __init__(self, name: str, log: list[str], *, computes: bool) -> None:
        self.name = name
        self._log = log
        self._computes = computes
        self._waiting: list[Callable[[], None]] = []
        self.num_given = 0
        self._num_done = 0

    def give(self, work: Callable[[], None]) -> None:
        self.num_given += 1
        self._waiting.append(work)
        if self._computes:
            self.run_to(self.num_given)

    def run_to(self, number: int) -> None:
        while self._num_done < number:
            self._num_done += 1
            self._waiting.pop(0)()

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self.name} waits for {event.stream.name} {event.number}")
        self.give(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(Event(other))


class Event:
    """Reached when its stream has done what it had been given."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.number = stream.num_given

    def synchronize(self) -> None:
        self.stream.run_to(self.number)


class Late:
    """Stands in for `hf_ckpt.regions.offload.cuda.CudaDevice`, on tensors of the CPU.

    Attributes:
        faults: memory that was gone when a copy got to it.
        log: who waited for whom, which stream copied, and which was lent memory of another.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.log: list[str] = []
        self.compute = Stream("compute", self.log, computes=True)
        self._in_force = self.compute
        self._names = iter(("out", "into"))
        self.streams: list[Stream] = []

    def is_capturing(self, device: torch.device) -> bool:
        return False

    def current_stream(self, device: torch.device) -> Stream:
        return self._in_force

    def new_stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(next(self._names), self.log, computes=False))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        found, self._in_force = self._in_force, stream
        yield
        self._in_force = found

    def record_event(self, stream: Stream) -> Event:
        return Event(stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.log.append(f"{self._in_force.name} copies")
        to, of = _Weak(target), _Weak(source)

        def run() -> None:
            there, values = to.tensor(), of.tensor()
            if there is None or values is None:
                self.faults.append("the target was freed" if there is None else "the source was freed")
            elif to.is_emptied():
                self.faults.append("the target was emptied")
            else:
                there.copy_(values)

        self._in_force.give(run)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self.log.append(f"{stream.name} has memory lent")

    def allocate(self, num_bytes: int, *, in_forks: bool = False) -> PageableMemory:
        return PageableMemory(num_bytes)

    def map(self, memory: HostAllocation, device: torch.device) -> Tensor:
        return memory.bytes

    def memory(self, device: torch.device) -> DeviceMemory | None:
        return None

    def reset_peak(self, device: torch.device) -> None:
        raise AssertionError("there is none")


class _Weak:
    """Bytes that are not kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._where: tuple[Any, ...] = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._end = tensor.storage_offset() + tensor.numel()

    def is_emptied(self) -> bool:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return storage is not None and storage.nbytes() < self._end

    def tensor(self) -> Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        # `set_` would make an emptied storage grow.
        where = (0, (0,)) if storage is not None and self.is_emptied() else self._where
        return None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage, *where)
