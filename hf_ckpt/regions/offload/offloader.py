"""Sends away what regions save of their inputs, and brings it back when their backward asks for it.

`run_offloaded` goes around a region: what autograd saves on the way in goes to a link, and autograd keeps a
`PackedTensor`. Knows no streams, buffers or files: those are the link's.

Note on lifetimes. A tensor that is being copied is kept here until the device's later work waits for the copy
(`Link.wait_for_send`). What a region was given is kept to the end of the region, when the next one sends something too:
its caller holds it for as long anyway, so that this costs no memory on the device. What a region has made is sent when
the region ends, and kept to the end of the next one, which hides the copy. What waits on the host lives as long as the
packed tensors in the graph: a second backward finds it, and a forward without a backward leaves nothing behind.

Note on forks. A forked process has none of the threads that write and read files, no stream of the device, and perhaps
a lock that another thread held. There the offloader starts afresh: what was sent before stays with the process that
sent it, is not touched here, and asking for it is an error. Copies in ordinary memory are this process's too, and go
on.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_ckpt.errors import ChangedSinceForwardError, OffloadError, UnsupportedError
from hf_ckpt.policy.options import TO_DISK, Offload
from hf_ckpt.regions.execution_state import Function, refuse_transforms, tensors_in
from hf_ckpt.regions.offload.cuda import CudaWire
from hf_ckpt.regions.offload.disk import DiskLink
from hf_ckpt.regions.offload.eligible_tensors import reason_not_offloaded
from hf_ckpt.regions.offload.host_buffers import HostLink
from hf_ckpt.regions.offload.host_memory import HostLimits
from hf_ckpt.regions.offload.pacing import (
    FractionTuner,
    PendingCopy,
    PrefetchOrder,
    ReleasedTensor,
    SentGroup,
    SentTensor,
    is_offloaded,
)
from hf_ckpt.regions.offload.transfer import Link, StorageKey, Wire, storage_key


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def run_offloaded(
    offloader: Offloader, position: int, region: Function, function: Function, *args: Any, **options: Any
) -> Any:
    """Run `region(function, *args, **options)`; what the region saves of its inputs waits on the host for backward.

    Exact: the same bits come back, in the same layout. Costs a copy each way, while a GPU computes.

    `position` is the layer's place among those that offload, in the order of the forward. `region` recomputes:
    `recompute`, or another function with its signature; what it saves inside is its own.

    Raises:
        HostMemoryError: the host has no room for what all layers would send there.
    """
    if not torch.is_grad_enabled():
        return region(function, *args, **options)
    # Before our hooks for saved tensors, which torch.func has a word of its own against.
    refuse_transforms()
    with offloader.scope(position) as scope, saved_tensors_hooks(scope.pack, unpack):
        output = region(function, *args, **options)
    if not scope.is_offloaded:
        offloader.add_prefetch_hook(output)
    return output


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]  # as above
def run_with_prefetch_hook(
    offloader: Offloader, region: Function, function: Function, *args: Any, **options: Any
) -> Any:
    """Run `region(function, *args, **options)` for the layer behind the last one that offloads; it sends nothing away.

    When its backward begins, what the layer before it has sent away starts coming back. Without this the device waits
    for that one copy; nothing else differs.
    """
    output = region(function, *args, **options)
    if torch.is_grad_enabled():
        offloader.add_prefetch_hook(output)
    return output


class Offloader:
    """Sends tensors of one model away and brings them back. Lives on the model's layers, and is copied with them."""

    def __init__(self, settings: Offload, num_layers: int) -> None:
        self.settings = settings
        self.num_layers = num_layers
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._expected_batch = 1, 1
        self._pid = os.getpid()
        self._kept_after_fork: list[object] = []
        self._reset()

    def _reset(self) -> None:
        self._start_pid = self._pid
        self._link: Link | None = None
        self._device_type: str | None = None
        self._released: deque[ReleasedTensor] = deque()
        self._pending: list[PendingCopy] = []
        self._sent: dict[StorageKey, weakref.ref[SentTensor]] = {}
        self._orders: dict[torch.device, PrefetchOrder] = {}
        self._last_position = self.num_layers
        self._is_checked = False
        self._stats = OffloadStats()
        self._num_forwards = 0
        self._tuner = FractionTuner(self.settings.fraction, self.num_layers)

    def _reset_after_fork(self) -> None:
        """Start afresh if this process was forked since. See the note on forks."""
        if self._pid == os.getpid():
            return
        # A lock that is held now is held by a thread that this process has not, in the middle of something.
        is_whole, self._lock = not self._lock.locked(), threading.Lock()
        self._pid = os.getpid()
        if self._link is not None and not (is_whole and self._link.survives_fork):
            # Freeing what is the other process's would wait for its threads, or ask its device.
            self._kept_after_fork += [self._link, self._pending, self._tuner]
            self._reset()

    def __getstate__(self) -> dict[str, Any]:
        # Everything else belongs to running steps, which a copy of the model has not.
        return {"settings": self.settings, "num_layers": self.num_layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy begins as a new one

    def use_link(self, link: Link) -> None:
        """Send over this link instead of the device's own: in a simulation, or in tests. Nothing may be out."""
        self.close()
        self._link, self._device_type = link, None

    def expect_batch(self, num_tokens: int, max_tokens: int) -> None:
        """Announce how long the next batch is and how long the longest one will be. See `Link.expect_batch`."""
        with self._locked():
            self._expected_batch = num_tokens, max_tokens
            if self._link is not None:
                self._link.expect_batch(*self._expected_batch)

    def begin_step(self) -> None:
        """Announce that an optimizer step begins. Once this is called, `end_step` is to be called in each step."""
        with self._locked():
            self._tuner.begin_step()

    def end_step(self) -> None:
        """Announce that the last backward of an optimizer step has ended."""
        with self._locked():
            self._tuner.end_step(self._link)

    @contextmanager
    def scope(self, position: int) -> Iterator[OffloadScope]:
        """Enter one call of the region at a position.

        Raises:
            HostMemoryError: it sent more than the host has room for, times the layers that are to follow.
            UnsupportedError: a tensor was written to while it was copied.
        """
        found = getattr(self._thread, "scope", None)
        with self._locked():
            scope = self._enter(position)
        self._thread.scope = scope
        try:
            yield scope
        except BaseException:
            self._exit(scope, is_whole=False)
            raise
        finally:
            self._thread.scope = found
        self._exit(scope, is_whole=True)

    def current_scope(self, position: int) -> OffloadScope:
        """Return the call of the region at a position that runs in this thread."""
        scope: OffloadScope | None = getattr(self._thread, "scope", None)
        if scope is None or scope.position != position:
            return self._new_scope(position)
        return scope

    def _new_scope(self, position: int) -> OffloadScope:
        return OffloadScope(self, position, self._is_offloaded(position), self._start_pid)

    def _enter(self, position: int) -> OffloadScope:
        if position <= self._last_position:
            self._num_forwards += 1
            self._is_checked = False
            self._tuner.begin_forward(self._link)
        self._last_position = position
        return self._new_scope(position)

    def _exit(self, scope: OffloadScope, *, is_whole: bool) -> None:
        with self._locked():
            if is_whole:
                self._check_pid(scope.start_pid)
            if is_whole and scope.num_bytes:
                # Before the device waits for the copies: that is not the layer's own time.
                self._tuner.end_region(self._link, next(iter(scope.groups)))
            self._finish_copies([copy for copy in self._pending if not is_whole or self._is_due(copy, scope)], is_whole)
            # A layer without a gradient has let go of what it saved already, and says nothing of the others.
            if is_whole and scope.is_needed() and not self._is_checked:
                self._is_checked = True
                self._check_room(scope)

    def _is_due(self, copy: PendingCopy, scope: OffloadScope) -> bool:
        """Whether a tensor is kept no longer than to the end of this call. See the note on lifetimes."""
        if copy.made_in is not None:
            return copy.made_in is not scope
        following = scope.position + 1
        return following >= self.num_layers or self._is_offloaded(following)

    def _is_offloaded(self, position: int) -> bool:
        return is_offloaded(position, self.num_layers, self._tuner.fraction)

    def _check_room(self, scope: OffloadScope) -> None:
        """Compare what all layers are going to send with what there is, before much has been copied."""
        count = sum(self._is_offloaded(position) for position in range(scope.position + 1, self.num_layers))
        if self._link is not None:
            self._link.check_room(scope.num_bytes * count)

    def offload_tensor(self, tensor: Tensor, scope: OffloadScope, *, is_made_here: bool) -> PackedTensor | None:
        """Send a tensor away, and return what autograd keeps; None if it is better left where it is.

        `is_made_here`: the region has made the tensor, and was not given it.
        """
        reason = reason_not_offloaded(tensor, self.settings.min_bytes)
        with self._locked(), torch.no_grad():
            self._check_pid(scope.start_pid)
            if reason is None and not self._has_link_for(tensor.device):
                reason = f"on {tensor.device.type}"
            if reason is not None:
                self._stats.num_not_offloaded[reason] += 1
                return None
            group = self._group(tensor.device, scope)
            sent = self._sent_before(tensor)
            if sent is not None and sent not in group.items():
                self._stats.num_not_offloaded["saved by several layers, which would all have to fetch it"] += 1
                return None
            if sent is None:
                sent = self._send(tensor, scope, scope if is_made_here else None)
                group.add(sent)
            return PackedTensor(self, sent, group)

    def _has_link_for(self, device: torch.device) -> bool:
        if self._link is None:
            self._link, self._device_type = link_for(self.settings, device.type), device.type
            self._link.expect_batch(*self._expected_batch)
        return self._device_type is None or device.type == self._device_type

    def _sent_before(self, tensor: Tensor) -> SentTensor | None:
        """Return the same tensor if it was sent away before and is still needed."""
        reference = self._sent.get(storage_key(tensor)[1])
        return None if reference is None else reference()

    def _send(self, tensor: Tensor, scope: OffloadScope, made_in: OffloadScope | None) -> SentTensor:
        assert self._link is not None, "_has_link_for has made it"
        # Two at a time, so that the device's memory does not depend on how fast the copies are.
        self._finish_copies([copy for copy in self._pending if copy.made_in is None][:-1], is_whole=True)
        # Without its graph, which must not live longer because of the copy.
        tensor = tensor.detach()
        handle = self._link.send(tensor)
        self._pending.append(PendingCopy(handle, tensor, tensor._version, made_in))
        storage, key = storage_key(tensor)
        sent = SentTensor(handle, tensor.nbytes, self._start_pid)
        self._sent[key] = weakref.ref(sent)
        # Not `__del__`: while that runs, another thread can still reach the object through a weak reference.
        weakref.finalize(
            sent, self._release_later, ReleasedTensor(handle, sent.num_bytes, self._start_pid, key, storage)
        ).atexit = False
        stats = self._stats
        stats.num_tensors += 1
        stats.bytes_out += sent.num_bytes
        stats.num_live += 1
        stats.live_bytes += sent.num_bytes
        is_first, scope.num_bytes = not scope.num_bytes, scope.num_bytes + sent.num_bytes
        self._tuner.note_sent(self._link, handle, tensor.device, scope.num_bytes, is_first=is_first)
        return sent

    def _group(self, device: torch.device, scope: OffloadScope) -> SentGroup:
        if device not in scope.groups:
            scope.groups[device] = self._orders.setdefault(device, PrefetchOrder()).new_group()
        return scope.groups[device]

    def _finish_copies(self, copies: list[PendingCopy], is_whole: bool) -> None:
        """Let go of tensors that were being copied. `is_whole`: the region has ended without an error."""
        assert self._link is not None or not copies, "what is being copied was sent"
        copies = list(copies)
        self._pending = [copy for copy in self._pending if copy not in copies]
        for copy in copies:
            self._link.wait_for_send(copy.handle)  # type: ignore[union-attr]  # asserted above
        if is_whole and any(copy.tensor._version != copy.version for copy in copies):
            # Autograd would notice that the tensor which it saved has changed, but not that a copy was being made.
            raise UnsupportedError(
                "A layer that is offloaded writes into a tensor that it is given or keeps, or another module does, "
                "while the tensor is being copied. Leave it out of the policy."
            )

    def receive_packed(self, packed: PackedTensor) -> Tensor:
        """Return a packed tensor, and start bringing back what is asked for next."""
        sent = packed.sent
        with self._locked(), torch.no_grad():
            self._check_pid(sent.start_pid)
            assert self._link is not None, "the handle's tensor was sent over it"
            tensor = self._link.receive(sent.handle)
            self._stats.bytes_in += sent.num_bytes
            order = packed.group.order
            self._prefetch(order, sent, order.next_items(sent, packed.group, self._link.ahead))
            return tensor

    def add_prefetch_hook(self, output: Any) -> None:
        """Let the backward that comes to this output bring back what was last sent before it."""
        # The output is of a layer that sends nothing itself. What earlier layers have made and sent has had this
        # layer's time for its copy.
        with self._locked():
            self._finish_copies([copy for copy in self._pending if copy.made_in is not None], is_whole=True)
        for tensor in tensors_in(output):
            order = self._orders.get(tensor.device)
            if tensor.requires_grad and order is not None:
                hook = partial(self._prefetch_last, order, order.num_groups)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _prefetch_last(self, order: PrefetchOrder, number: int, gradient: Tensor | None) -> None:
        """Hook of an output's gradient: the layer that made the output has its backward next."""
        with self._locked(), torch.no_grad():
            # An order of another process has no more to give here. The gradient may be None: the operator that made the
            # output made others too (`chunk`), and only they got one.
            if self._link is not None and any(each is order for each in self._orders.values()):
                self._prefetch(order, None, order.last_items(number, self._link.ahead))

    def _prefetch(self, order: PrefetchOrder, received: SentTensor | None, wanted: list[SentTensor]) -> None:
        assert self._link is not None, "something was received over it"
        unwanted, missing = order.update_prefetched(received, wanted)
        for sent in unwanted:
            # Backward took another way than was thought: what lies ready must not pile up on the device.
            self._link.cancel(sent.handle)
        for sent in missing:
            self._link.prefetch(sent.handle)

    def _check_pid(self, start_pid: int) -> None:
        if start_pid != self._start_pid:
            raise OffloadError(
                f"This process was forked from another one between a layer's forward and its backward, or inside of "
                f"one. What was offloaded to {self.settings.to} by then stays with the process that sent it. Run a "
                "whole step in one process: fork before its forward, or after its backward."
            )

    def _release_later(self, released: ReleasedTensor) -> None:
        """Release what nobody needs any more. Called when its last packed tensor dies, at any moment, in any thread."""
        self._reset_after_fork()
        if released.start_pid == self._start_pid:
            self._released.append(released)
        self._release_all()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._reset_after_fork()
        try:
            with self._lock:
                yield
        finally:
            self._release_all()

    def _release_all(self) -> None:
        # A handle can die at any moment, also while this thread is in the middle of something else here; then the one
        # that holds the lock does this when it leaves.
        while self._released and self._lock.acquire(blocking=False):
            try:
                while self._released:
                    self._release(self._released.popleft())
            finally:
                self._lock.release()

    def _release(self, released: ReleasedTensor) -> None:
        assert self._link is not None, "the handle was sent over it"
        self._finish_copies([copy for copy in self._pending if copy.handle is released.handle], is_whole=False)
        reference = self._sent.get(released.key)
        if reference is not None and reference() is None:
            del self._sent[released.key]
        self._stats.num_live -= 1
        self._stats.live_bytes -= released.num_bytes
        self._link.release(released.handle)

    @property
    def stats(self) -> OffloadStats:
        """What has been done so far."""
        self._reset_after_fork()
        link = self._link
        return replace(
            self._stats,
            host_bytes=0 if link is None else link.host_bytes,
            peak_host_bytes=0 if link is None else link.peak_host_bytes,
            seconds_waited=0.0 if link is None else link.seconds_waited,
            fraction=self._tuner.fraction,
            num_not_offloaded=dict(self._stats.num_not_offloaded),
        )

    def faults(self) -> list[str]:
        """Return what is wrong after a step, in sentences: nothing at all was sent away, though it was asked for."""
        if not self._num_forwards or self._stats.num_tensors:
            return []
        reasons = "; ".join(f"{count} {reason}" for reason, count in sorted(self._stats.num_not_offloaded.items()))
        return [
            f"offload was asked for {self.num_layers} layers, but nothing was sent away: "
            f"{reasons or 'they saved nothing'}. Lower min_bytes, or leave offload out."
        ]

    def close(self) -> None:
        """Give back buffers, streams and files. Packed tensors that are still in a graph stay good."""
        with self._locked():
            if self._link is not None:
                self._link.close()


def unpack(packed: PackedTensor | StayingTensor) -> Tensor:
    """Return the tensor that `OffloadScope.pack` or `OffloadKeeper.put` was given."""
    if isinstance(packed, PackedTensor):
        return packed.offloader.receive_packed(packed)
    if packed.version is not None and packed.tensor._version != packed.version:
        raise ChangedSinceForwardError(
            "A layer that is offloaded was given or keeps a tensor that stays on its device, and that has been written "
            "to since its forward. Recomputing the layer would give other values. Write no longer in place (x = x + y "
            "in place of x += y), or leave the layer out of the policy."
        )
    return packed.tensor


class StayingTensor:
    """What autograd keeps in place of a tensor that stays where it is. Under hooks autograd looks at no version."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version


@dataclass(slots=True, eq=False)
class PackedTensor:
    """What autograd keeps in place of a tensor."""

    offloader: Offloader
    sent: SentTensor
    group: SentGroup


class OffloadScope:
    """One call of a region."""

    def __init__(self, offloader: Offloader, position: int, is_offloaded: bool, start_pid: int) -> None:
        self._offloader = offloader
        self.position = position
        self.is_offloaded = is_offloaded
        self.start_pid = start_pid
        self.num_bytes = 0
        self.groups: dict[torch.device, SentGroup] = {}

    def is_needed(self) -> bool:
        """Whether something that was sent in this call is still to be asked for."""
        return any(group.items() for group in self.groups.values())

    def pack(self, tensor: Tensor, *, is_made_here: bool = False) -> PackedTensor | StayingTensor:
        """Send a tensor away if that is worth it, and return what autograd keeps. See `Offloader.offload_tensor`."""
        is_something = self.is_offloaded and tensor.numel() > 0
        sent = self._offloader.offload_tensor(tensor, self, is_made_here=is_made_here) if is_something else None
        return StayingTensor(tensor) if sent is None else sent


class OffloadKeeper:
    """Keeps tensors that the region at a position wants to have back in its recomputation."""

    def __init__(self, offloader: Offloader, position: int) -> None:
        self._offloader = offloader
        self._position = position

    def put(self, tensor: Tensor) -> PackedTensor | StayingTensor:
        """Send a tensor away if that is worth it, and return what `get` takes."""
        return self._offloader.current_scope(self._position).pack(tensor, is_made_here=True)

    def get(self, packed: PackedTensor | StayingTensor) -> Tensor:
        """Return the tensor."""
        return unpack(packed)


@dataclass
class OffloadStats:
    """Counts since the offloader was made."""

    num_tensors: int = 0
    """Tensors copied to the host, or to disk."""
    bytes_out: int = 0
    bytes_in: int = 0
    num_live: int = 0
    """Tensors that wait on the host now."""
    live_bytes: int = 0
    host_bytes: int = 0
    """Host memory held now, in use or kept for later."""
    peak_host_bytes: int = 0
    seconds_waited: float = 0.0
    """Time for which a thread waited for a copy. On a GPU streams wait for each other instead, which this misses."""
    fraction: float = 1.0
    """Share of the layers that send away what they save, as it stands now."""
    num_not_offloaded: dict[str, int] = field(default_factory=Counter)
    """Tensors that stayed where they were, by the reason."""


def link_for(settings: Offload, device_type: str) -> Link:
    """Return a link for tensors on a type of device.

    Raises:
        PolicyError: disk was asked for, and nothing can be written there.
    """
    wire = CudaWire() if device_type == "cuda" else Wire()
    limits = HostLimits(settings.host_memory, trusts=settings.trust_host_memory)
    if settings.to == TO_DISK:
        assert settings.path is not None, "parse_offload has seen to that"
        return DiskLink(wire, limits, settings.path)
    return HostLink(wire, limits)
