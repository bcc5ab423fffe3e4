"""The outputs that one call of a region keeps, from its forward to its recomputation.

Note [Writes into kept outputs]: an operator that writes in place gets here before it writes, with whatever view it
writes through, and the output that lies in the same storage is copied first. The recomputation starts from the copy
and writes again. torch's own selective checkpointing looks at version counters instead, and `_unsafe_view`, behind
every linear layer on 3-D input, starts a new one: the write goes unseen and the gradients are wrong.

Note [Writes that no operator tells of]: a kernel launched past the dispatcher can write too (Triton: Liger's rotary
embedding rotates the queries in the output of their projection). Until the stack has been recomputed once, sums over
the bits of what is kept are taken when it is made and when the region ends. Where they differ the output is let go, so
that its operator runs again, and from then on it is copied as soon as it is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.random_state import RandomState
from hf_ckpt.regions.selective.operators import Kind, Number, storages_of, tensors_in
from hf_ckpt.regions.selective.proof import Proof

Shapes = tuple[torch.Size, ...]


class Keeper(Protocol):
    """Holds kept outputs from the region's forward to its recomputation, on the host for instance."""

    def put(self, tensor: Tensor) -> Any:
        """Take a tensor; what is returned is all that is kept of it."""

    def get(self, handle: Any) -> Tensor:
        """Bring a tensor back. Called at most once for each."""


@dataclass(frozen=True, slots=True)
class _Handle:
    """What a keeper returned for a tensor."""

    value: Any


@dataclass(slots=True)
class _Entry:
    """What one operator returned.

    Args:
        kind: of the operator.
        output: its tensors without graph, or their handles, in the tuples that they came in.
        shapes: of the tensors that it was given, to notice a recomputation that takes another way.
        random_state: after it, where it drew random numbers.
        sums: over the bits of its tensors, where they are checked.
    """

    kind: Kind
    output: Any
    shapes: Shapes
    random_state: RandomState | None
    sums: list[Tensor] = field(default_factory=list)


class KeptOutputs:
    """What is kept of one call of a region.

    Args:
        keeper: who holds the outputs between forward and recomputation; None to hold them here.
        proof: of the stack; until it is complete, writes that no operator tells of are looked for, at the cost of
            reading each output twice.
    """

    def __init__(self, keeper: Keeper | None, proof: Proof) -> None:
        self._keeper = keeper
        self._proof = proof
        self._entries: dict[Number, _Entry] = {}
        self._in_storage: dict[int, list[_Entry]] = {}
        self._num_needed = 0
        self._storages: set[int] = set()
        self._returned: list[tuple[Tensor, int]] = []

    # --- Forward. ---

    def keep(self, number: Number, kind: Kind, args: Any, kwargs: Any, output: Any) -> None:
        """Keep what an operator returned.

        Args:
            number: of the call.
            kind: of the operator.
            args: what it was given.
            kwargs: likewise.
            output: what it returned: new memory.
        """
        # Without its graph: the graph owns this. An alias, which keeps the storage and nothing else.
        detached = tree_map_only(Tensor, Tensor.clone if number in self._proof.rewritten else Tensor.detach, output)
        tensors = list(tensors_in(detached))
        random_state = RandomState.of(*tensors) if kind.draws(args, kwargs) else None
        entry = _Entry(kind, detached, _shapes(args), random_state)
        if not self._proof.is_complete:
            entry.sums = _sums(tensors)
        self._entries[number] = entry
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._in_storage.setdefault(storage._cdata, []).append(entry)

    def before_write(self, tensors: Iterator[Tensor]) -> None:
        """Copy what is kept in the storages of tensors that are about to be written to."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                for entry in self._in_storage.pop(storage._cdata, ()):
                    self._proof.wrote()
                    entry.output = tree_map_only(Tensor, partial(_copy_out_of, storage._cdata), entry.output)

    def note_saved(self) -> None:
        """Autograd saves a tensor: recomputation comes at least as far as here."""
        self._num_needed = len(self._entries)

    def finish(self) -> None:
        """The forward has ended: let go what no recomputation comes to, and hand the rest to the keeper."""
        for number in list(self._entries)[self._num_needed :]:
            del self._entries[number]
        self._in_storage.clear()
        for number, entry in list(self._entries.items()):
            if entry.sums and not _are_equal(entry.sums, _sums(list(tensors_in(entry.output)))):
                self._proof.rewrote(number)
                del self._entries[number]
            entry.sums = []
        self._storages = {
            storage._cdata
            for entry in self._entries.values()
            for tensor in tensors_in(entry.output)
            for storage in storages_of(tensor)
        }
        if self._keeper is not None:
            for entry in self._entries.values():
                entry.output = tree_map_only(Tensor, self._put, entry.output)

    def _put(self, tensor: Tensor) -> _Handle:
        assert self._keeper is not None, "asked by the caller"
        return _Handle(self._keeper.put(tensor))

    def watch(self, returned: Sequence[Tensor]) -> None:
        """Note what the region returned: whoever has it may write into it, where no mode of ours sees it."""
        self._returned = [
            (tensor.detach(), tensor._version)
            for tensor in returned
            if not tensor.is_inference() and any(storage._cdata in self._storages for storage in storages_of(tensor))
        ]

    # --- Recomputation. ---

    def take(self, number: Number, args: Any) -> Any:
        """Return what an operator returned in forward, or `NOT_KEPT`: it has to run again. Each once.

        An output that was handed out before (a second backward over a graph that was retained) is computed again.

        Args:
            number: of the call.
            args: what the operator is given now.

        Raises:
            UnsupportedError: it is given tensors of other shapes than in forward, or the output was written to.
        """
        entry = self._entries.pop(number, None)
        if entry is None:
            return NOT_KEPT
        if entry.shapes != _shapes(args):
            raise UnsupportedError(
                f"Recomputing a layer came to {entry.kind.name} number {number[1] + 1} with inputs of "
                f"{list(map(list, _shapes(args)))} where the forward had {list(map(list, entry.shapes))}: the layer "
                "does not repeat itself (a branch taken differently, a changed flag). Leave it out of the policy."
            )
        if any(tensor._version != version for tensor, version in self._returned):
            raise UnsupportedError(
                f"The output of {entry.kind.name} is kept for recomputing the layer, and the layer returns it, but "
                "somebody has written into it since, so that recomputation would start from other values. Leave the "
                'layer out of the policy, or use mode "full" for it.'
            )
        if entry.random_state is not None:
            # What follows must draw the numbers that it drew behind this operator.
            entry.random_state.restore()
        return tree_map_only(_Handle, self._get, entry.output)

    def _get(self, handle: _Handle) -> Tensor:
        assert self._keeper is not None, "it made the handle"
        return self._keeper.get(handle.value).detach()


class _NotKept:
    """The class of `NOT_KEPT`."""


NOT_KEPT = _NotKept()
"""Stands for an output that is not there; operators may return None."""


class Calls:
    """Numbers the calls of each operator, in forward and in recomputation alike."""

    def __init__(self) -> None:
        self._num_calls: Counter[Any] = Counter()

    def number(self, function: Any) -> Number:
        """Return the number of the call that comes now."""
        self._num_calls[function] += 1
        return function, self._num_calls[function] - 1


def _shapes(args: Any) -> Shapes:
    return tuple(tensor.shape for tensor in tensors_in(args))


def _copy_out_of(storage: int, tensor: Tensor) -> Tensor:
    return tensor.clone() if any(each._cdata == storage for each in storages_of(tensor)) else tensor


def _sums(tensors: list[Tensor]) -> list[Tensor]:
    """Return a sum over the bits of each tensor that has any to be looked at."""
    return [_bits(tensor).sum(dtype=torch.int64) for tensor in tensors if _is_plain(tensor)]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not isinstance(tensor, FakeTensor) and tensor.layout is torch.strided


def _bits(tensor: Tensor) -> Tensor:
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])


def _are_equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(before, after, strict=True))
