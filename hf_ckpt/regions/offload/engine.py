"""The engine: sends away what regions save of their inputs, and has it back when their backward asks for it.

`offloaded` goes around a region; what autograd saves on the way in goes to a link, and autograd keeps a handle. Knows
no streams, buffers or files: those are the link's.

Note on lifetimes. A tensor that is being copied is kept here until its copy has been ordered before whatever the
device does next (`Link.settle`). What a region was given is kept to the end of the region, when the next one sends
something too: its caller holds it for as long anyway, so that this costs no memory on the device. What a region has
made is sent when it ends, and kept to the end of the next one, which hides the copy. What waits on the host lives as
long as the handles in the graph: a second backward finds it, and a forward without a backward leaves nothing behind.

Note on forks. A forked process has none of the threads that write and read files, no stream of the device, and perhaps
a lock that another thread held. There the engine begins anew: what was sent before stays with the process that sent it,
is not touched here, and asking for it is an error. Copies in ordinary memory are this process's too, and go on.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_ckpt.errors import OffloadError, UnsupportedError
from hf_ckpt.policy.modifiers import Offload
from hf_ckpt.regions.call import Function, tensors_of
from hf_ckpt.regions.offload.choice import link_for
from hf_ckpt.regions.offload.handles import Flight, Gone, Handle, Keeper, Passage, Sent, unpack
from hf_ckpt.regions.offload.link import Link
from hf_ckpt.regions.offload.pace import Pace
from hf_ckpt.regions.offload.schedule import Group, Order, is_offloaded
from hf_ckpt.regions.offload.stats import Counts, Stats
from hf_ckpt.regions.offload.tensors import Key, bytes_of, identity, why_left_alone
from hf_ckpt.regions.transforms import refuse_transforms


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def offloaded(offloader: Offloader, position: int, region: Function, function: Function, *args: Any) -> Any:
    """Run `region(function, *args)`; what the region saves of its inputs waits on the host for backward.

    Exact: the same bits come back, in the same layout. Costs a copy each way, beside the computation on a GPU.

    Args:
        offloader: the model's.
        position: the layer's place among those that offload, in the order in which they run.
        region: recomputes: `recompute`, or another function with its signature. What it saves inside is its own.
        function: the layer's forward, with its keyword arguments.
        args: positional arguments.

    Raises:
        HostMemoryError: the host has no room for what all layers would send there.
    """
    if not torch.is_grad_enabled():
        return region(function, *args)
    # Before our hooks for saved tensors, which torch.func has a word of its own against.
    refuse_transforms()
    with offloader.passage(position) as passage, saved_tensors_hooks(passage.pack, unpack):
        output = region(function, *args)
    if not passage.is_offloaded:
        offloader.announce(output)
    return output


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]  # as above
def announced(offloader: Offloader, region: Function, function: Function, *args: Any) -> Any:
    """Run `region(function, *args)`, the layer behind the last one that offloads, which keeps what it saves.

    When its backward begins, what the layer before it has sent away starts coming back. Without this the device waits
    for that one copy; nothing else differs.

    Args:
        offloader: of the layer before it.
        region: how the activations of this one are handled.
        function: the layer's forward, with its keyword arguments.
        args: positional arguments.
    """
    output = region(function, *args)
    if torch.is_grad_enabled():
        offloader.announce(output)
    return output


class Offloader:
    """Sends tensors of one model away and brings them back. Lives on the model's layers, and is copied with them.

    Args:
        settings: what the user asked for.
        num_layers: how many layers share it.
    """

    def __init__(self, settings: Offload, num_layers: int) -> None:
        self.settings = settings
        self.num_layers = num_layers
        self._lock = threading.Lock()
        self._here = threading.local()
        self._foreseen = 1, 1
        self._process = os.getpid()
        self._of_other_processes: list[object] = []
        self._begin()

    def _begin(self) -> None:
        self._begun_in = self._process
        self._link: Link | None = None
        self._device_type: str | None = None
        self._gone: deque[Gone] = deque()
        self._flights: list[Flight] = []
        self._sent: dict[Key, weakref.ref[Sent]] = {}
        self._orders: dict[torch.device, Order[Sent]] = {}
        self._last_position = self.num_layers
        self._is_checked = False
        self._counts = Counts()
        self._pace = Pace(self.settings.fraction, self.num_layers)

    def _look_for_fork(self) -> None:
        """Begin anew if this process was forked since. See the note on forks."""
        if self._process == os.getpid():
            return
        # A lock that is held now is held by a thread that this process has not, in the middle of something.
        is_whole, self._lock = not self._lock.locked(), threading.Lock()
        self._process = os.getpid()
        if self._link is not None and not (is_whole and self._link.survives_fork):
            # Freeing what is the other process's would wait for its threads, or ask its device.
            self._of_other_processes += [self._link, self._flights, self._pace]
            self._begin()

    def __getstate__(self) -> dict[str, Any]:
        # Everything else belongs to running steps, which a copy of the model has not.
        return {"settings": self.settings, "num_layers": self.num_layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy begins as a new one

    def use_link(self, link: Link) -> None:
        """Send over this link instead of the device's own: in a simulation, or in tests. Nothing may be out."""
        self.close()
        self._link, self._device_type = link, None

    def foresee(self, num_tokens: int, most_tokens: int) -> None:
        """Say how long the batch is that comes, and how long the longest one will be. See `Link.foresee`."""
        with self._locked():
            self._foreseen = num_tokens, most_tokens
            if self._link is not None:
                self._link.foresee(*self._foreseen)

    def keeper(self, position: int) -> Keeper:
        """Return what keeps the outputs that the layer at a position wants back."""
        return Keeper(self, position)

    @contextmanager
    def passage(self, position: int) -> Iterator[Passage]:
        """Enter one call of the region at a position.

        Raises:
            HostMemoryError: it sent more than the host has room for, times the layers that are to follow.
            UnsupportedError: a tensor was written to while it was copied.
        """
        found = getattr(self._here, "passage", None)
        with self._locked():
            passage = self._enter(position)
        self._here.passage = passage
        try:
            yield passage
        except BaseException:
            self._leave(passage, is_whole=False)
            raise
        finally:
            self._here.passage = found
        self._leave(passage, is_whole=True)

    def passage_now(self, position: int) -> Passage:
        """Return the call of the region at a position that runs in this thread."""
        passage: Passage | None = getattr(self._here, "passage", None)
        if passage is None or passage.position != position:
            return self._new_passage(position)
        return passage

    def _new_passage(self, position: int) -> Passage:
        return Passage(self, position, self._is_offloaded(position), self._begun_in)

    def _enter(self, position: int) -> Passage:
        if position <= self._last_position:
            self._counts.num_passes += 1
            self._is_checked = False
            self._pace.begin(self._link)
        self._last_position = position
        return self._new_passage(position)

    def _leave(self, passage: Passage, *, is_whole: bool) -> None:
        with self._locked():
            if is_whole:
                self._check_process(passage.begun_in)
            if is_whole and passage.num_bytes:
                # Before the device waits for the copies: that is not the layer's own time.
                self._pace.leave(self._link, next(iter(passage.groups)))
            self._settle(
                [flight for flight in self._flights if not is_whole or self._is_due(flight, passage)], is_whole
            )
            # A layer without a gradient has let go of what it saved already, and says nothing of the others.
            if is_whole and passage.is_needed() and not self._is_checked:
                self._is_checked = True
                self._expect(passage)

    def _is_due(self, flight: Flight, passage: Passage) -> bool:
        """Whether a tensor is kept no longer than to the end of this call. See the note on lifetimes."""
        if flight.made_in is not None:
            return flight.made_in is not passage
        following = passage.position + 1
        return following >= self.num_layers or self._is_offloaded(following)

    def _is_offloaded(self, position: int) -> bool:
        return is_offloaded(position, self.num_layers, self._pace.fraction)

    def _expect(self, passage: Passage) -> None:
        """Compare what all layers are going to send with what there is, before much has been copied."""
        count = sum(self._is_offloaded(position) for position in range(passage.position + 1, self.num_layers))
        if self._link is not None:
            self._link.expect(passage.num_bytes * count)

    def send_away(self, tensor: Tensor, passage: Passage, *, is_made_here: bool) -> Handle | Tensor:
        """Send a tensor away unless it is better left where it is.

        Args:
            tensor: what the region saves.
            passage: the call of the region.
            is_made_here: whether the region has made it, and not been given it.
        """
        reason = why_left_alone(tensor, self.settings.min_bytes)
        with self._locked(), torch.no_grad():
            self._check_process(passage.begun_in)
            if reason is None and not self._reaches(tensor.device):
                reason = f"on {tensor.device.type}"
            if reason is not None:
                self._counts.leave_alone(reason)
                return tensor
            group, order = self._group(tensor.device, passage)
            sent = self._known(tensor)
            if sent is not None and sent not in group.items():
                self._counts.leave_alone("saved by several layers, which would all have to fetch it")
                return tensor
            if sent is None:
                sent = self._send(tensor, passage, passage if is_made_here else None)
                group.add(sent)
            return Handle(self, sent, group, order)

    def _reaches(self, device: torch.device) -> bool:
        if self._link is None:
            self._link, self._device_type = link_for(self.settings, device)
            self._link.foresee(*self._foreseen)
        return self._device_type is None or device.type == self._device_type

    def _known(self, tensor: Tensor) -> Sent | None:
        """Return the same tensor if it was sent away before, and is still needed."""
        reference = self._sent.get(identity(tensor)[1])
        return None if reference is None else reference()

    def _send(self, tensor: Tensor, passage: Passage, made_in: Passage | None) -> Sent:
        assert self._link is not None, "_reaches has been asked"
        # Two at a time, so that the device's memory does not depend on how fast the copies are.
        self._settle([flight for flight in self._flights if flight.made_in is None][:-1], is_whole=True)
        # Without its graph, which must not live longer because of the copy.
        tensor = tensor.detach()
        parcel = self._link.send(tensor)
        self._flights.append(Flight(parcel, tensor, tensor._version, made_in))
        storage, key = identity(tensor)
        sent = Sent(parcel, bytes_of(tensor), self._begun_in)
        self._sent[key] = weakref.ref(sent)
        # Not `__del__`: while that runs, another thread can still reach the object through a weak reference.
        weakref.finalize(sent, self._forget, Gone(parcel, sent.num_bytes, self._begun_in, key, storage)).atexit = False
        self._counts.send(sent.num_bytes)
        is_first, passage.num_bytes = not passage.num_bytes, passage.num_bytes + sent.num_bytes
        self._pace.sent(self._link, parcel, tensor.device, passage.num_bytes, is_first=is_first)
        return sent

    def _group(self, device: torch.device, passage: Passage) -> tuple[Group[Sent], Order[Sent]]:
        if device not in passage.groups:
            order = self._orders.setdefault(device, Order())
            passage.groups[device] = (order.new_group(), order)
        return passage.groups[device]

    def _settle(self, flights: list[Flight], is_whole: bool) -> None:
        """Let go of tensors that were being copied.

        Args:
            flights: which.
            is_whole: the region ran to its end; otherwise there is an error already.
        """
        assert self._link is not None or not flights, "what flies was sent"
        flights = list(flights)
        self._flights = [flight for flight in self._flights if flight not in flights]
        for flight in flights:
            self._link.settle(flight.parcel)  # type: ignore[union-attr]  # asserted above
        if is_whole and any(flight.tensor._version != flight.version for flight in flights):
            # Autograd would notice that the tensor which it saved has changed, but not that a copy was being made.
            raise UnsupportedError(
                "A layer that is offloaded writes into a tensor that it is given or keeps, or another module does, "
                "while the tensor is being copied. Leave it out of the policy."
            )

    def bring_back(self, handle: Handle) -> Tensor:
        """Return the tensor of a handle, and start bringing back what is asked for next."""
        sent = handle.sent
        with self._locked(), torch.no_grad():
            self._check_process(sent.begun_in)
            assert self._link is not None, "the handle's tensor was sent over it"
            tensor = self._link.receive(sent.parcel)
            self._counts.bytes_in += sent.num_bytes
            wanted = handle.order.next_items(sent, handle.group, self._link.ahead)
            self._look_ahead(handle.order, sent, wanted)
            return tensor

    def announce(self, output: Any) -> None:
        """Let the backward that comes to this output bring back what was last sent before it.

        What earlier layers have made and sent has had this one's time for its copy.

        Args:
            output: of a layer that sends nothing itself.
        """
        with self._locked():
            self._settle([flight for flight in self._flights if flight.made_in is not None], is_whole=True)
        for tensor in tensors_of(output):
            order = self._orders.get(tensor.device)
            if tensor.requires_grad and order is not None:
                hook = partial(self._come_to, order, order.num_groups)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _come_to(self, order: Order[Sent], number: int, gradient: Tensor) -> None:
        """Hook of an output's gradient: the layer that made it has its backward next."""
        with self._locked(), torch.no_grad():
            # An order of another process has no more to give here.
            if self._link is not None and self._orders.get(gradient.device) is order:
                self._look_ahead(order, None, order.last_items(number, self._link.ahead))

    def _look_ahead(self, order: Order[Sent], received: Sent | None, wanted: list[Sent]) -> None:
        assert self._link is not None, "something was received over it"
        unwanted, missing = order.look_ahead(received, wanted)
        for sent in unwanted:
            # Backward took another way than was thought: what lies ready must not pile up on the device.
            self._link.cancel(sent.parcel)
        for sent in missing:
            self._link.prefetch(sent.parcel)

    def _check_process(self, begun_in: int) -> None:
        if begun_in != self._begun_in:
            raise OffloadError(
                f"This process was forked from another one between a layer's forward and its backward, or inside of "
                f"one. What was offloaded to {self.settings.to} by then stays with the process that sent it. Run a "
                "whole step in one process: fork before its forward, or after its backward."
            )

    def _forget(self, gone: Gone) -> None:
        """Release what nobody needs any more. Called where its last handle dies, at any moment and in any thread."""
        self._look_for_fork()
        if gone.begun_in == self._begun_in:
            self._gone.append(gone)
        self._sweep()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._look_for_fork()
        try:
            with self._lock:
                yield
        finally:
            self._sweep()

    def _sweep(self) -> None:
        # A handle can die at any moment, also while this thread is in the middle of something else here; then the one
        # that holds the lock does this when it leaves.
        while self._gone and self._lock.acquire(blocking=False):
            try:
                while self._gone:
                    self._release(self._gone.popleft())
            finally:
                self._lock.release()

    def _release(self, gone: Gone) -> None:
        assert self._link is not None, "the parcel was sent over it"
        self._settle([flight for flight in self._flights if flight.parcel is gone.parcel], is_whole=False)
        reference = self._sent.get(gone.key)
        if reference is not None and reference() is None:
            del self._sent[gone.key]
        self._counts.release(gone.num_bytes)
        self._link.release(gone.parcel)

    @property
    def stats(self) -> Stats:
        """What has been done so far."""
        self._look_for_fork()
        counts, link = self._counts, self._link
        return Stats(
            num_tensors=counts.num_tensors,
            bytes_out=counts.bytes_out,
            bytes_in=counts.bytes_in,
            num_live=counts.num_live,
            live_bytes=counts.live_bytes,
            host_bytes=0 if link is None else link.host_bytes,
            peak_host_bytes=0 if link is None else link.peak_host_bytes,
            seconds_waited=0.0 if link is None else link.seconds_waited,
            fraction=self._pace.fraction,
            forgotten_peak_bytes=self._pace.forgotten_peak,
            num_left_alone=dict(counts.num_left_alone),
        )

    def faults(self) -> list[str]:
        """Return what is wrong after a step, in sentences: nothing at all was sent away, though it was asked for."""
        if not self._counts.num_passes or self._counts.num_tensors:
            return []
        reasons = "; ".join(f"{count} {reason}" for reason, count in sorted(self._counts.num_left_alone.items()))
        return [
            f"offload was asked for {self.num_layers} layers, but nothing was sent away: "
            f"{reasons or 'they saved nothing'}. Lower min_bytes, or leave offload out."
        ]

    def close(self) -> None:
        """Give back buffers, streams and files. Handles that are still in a graph stay good."""
        with self._locked():
            if self._link is not None:
                self._link.close()
