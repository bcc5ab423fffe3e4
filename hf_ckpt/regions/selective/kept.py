"""The outputs that one call of a region keeps, from its forward to its recomputation.

Note [Writes into kept outputs]: an operator that writes in place gets here before it writes, with whatever view it
writes through, and the output that lies in the same storage is copied first. The recomputation starts from the copy
and writes again. torch's own selective checkpointing looks at version counters instead, and `_unsafe_view`, behind
every linear layer on 3-D input, starts a new one: the write goes unseen and the gradients are wrong.

Note [Writes that no operator tells of]: a kernel launched past the dispatcher can write too (Triton: Liger's rotary
embedding rotates the queries in the output of their projection). Until the stack has been recomputed once, sums over
the bits of what is kept are taken when it is made and when the region ends. Where they differ the output is let go, so
that its operator runs again, and from then on it is copied as soon as it is made.

Note [Writes and kernels of our own]: they are not given the operators that write (`kernels`), of which there are more
than of any other kind, most of them inside of other operators. There, the tensors that were returned are held until the
region ends, with what `_unsafe_view` made of them; where one of these has counted a write, the output is let go and
copied from then on, as above.

Note [Linear layers]: what a linear layer returns is its product, in another shape. So it is taken from the module, and
nothing that runs inside is looked at in forward (`linears`); in recomputation its product is handed that, in the shape
that it had.

Note [Sums of adapted layers]: an adapted layer adds what its adapter returns to what its base returns, and nothing but
the sum is used behind it. So the sum is kept in the place of the base's product, with the narrow product inside the
adapter, which backward needs. In recomputation the layer runs as it is, so that autograd saves what it saved, random
numbers are drawn, and hooks see it; but its two wide products return tensors without memory (on `meta`), and so do the
scaling, casts and sums of them. In the end the kept sum takes the place of what came out. If anything that backward
needs depended on these, torch's comparison of devices would say so. The sum of a layer behind which backward needs
nothing is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.rng_state import RandomState
from hf_ckpt.regions.selective.operators import Kind, Number, Role, storages_of, tensors_in
from hf_ckpt.regions.selective.proof import Proof

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import CallProof

Shapes = tuple[torch.Size, ...]
MODULE = Kind("a linear layer", "", Role.PRODUCT)
"""Stands for linear and adapted layers, as if they were operators."""


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
        order: how many outputs had been kept before it.
        sums: over the bits of its tensors, where they are checked.
        returned: its tensors as the layer got them, with the writes that they had counted, until the region ends.
    """

    kind: Kind
    output: Any
    shapes: Shapes
    random_state: RandomState | None
    order: int
    sums: list[Tensor] = field(default_factory=list)
    returned: list[tuple[Tensor, int]] = field(default_factory=list)


class KeptOutputs:
    """What is kept of one call of a region.

    Args:
        keeper: who holds the outputs between forward and recomputation; None to hold them here.
        proof: of the stack.
        values: looks at whether what is handed out is what was kept.
        checks_writes: whether to look for writes that no operator tells of, at the cost of reading each output twice.
        is_told_of_writes: whether `before_write` is called; see Note [Writes and kernels of our own].

    Attributes:
        modules: numbers of the linear and adapted layers that were taken as a whole, whether or not anything of them
            is kept, with the columns, dtype and device of what they returned.
    """

    def __init__(
        self,
        keeper: Keeper | None,
        proof: Proof,
        values: CallProof | None = None,
        *,
        checks_writes: bool = False,
        is_told_of_writes: bool = True,
    ) -> None:
        self._keeper = keeper
        self._proof = proof
        self._values = values
        self._checks_writes = checks_writes
        self._is_told_of_writes = is_told_of_writes
        self._last: _Entry | None = None
        self._entries: dict[Number, _Entry] = {}
        self._in_storage: dict[int, list[_Entry]] = {}
        self._num_kept = 0
        self._num_needed = 0
        self.modules: dict[Number, tuple[int, torch.dtype, torch.device]] = {}
        self._unneeded: set[Number] = set()
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
        is_copied = number in self._proof.rewritten
        detach = Tensor.clone if is_copied else Tensor.detach
        detached = detach(output) if isinstance(output, Tensor) else tree_map_only(Tensor, detach, output)
        tensors = [detached] if isinstance(detached, Tensor) else list(tensors_in(detached))
        random_state = RandomState.of(*tensors) if kind.is_random and kind.draws(args, kwargs) else None
        entry = _Entry(kind, detached, _shapes(args), random_state, self._num_kept)
        if self._checks_writes:
            entry.sums = _sums(tensors)
        self._enter(number, entry, tensors)
        if not self._is_told_of_writes and not is_copied:
            entry.returned = [(tensor, tensor._version) for tensor in tensors_in([output])]

    def keep_module(self, number: Number, output: Tensor) -> None:
        """Keep what a linear or adapted layer returned. See `keep`."""
        is_copied = number in self._proof.rewritten
        detached = output.clone() if is_copied else output.detach()
        entry = _Entry(MODULE, detached, (), None, self._num_kept)
        if self._checks_writes:
            entry.sums = _sums([detached])
        self._enter(number, entry, [detached])
        if not self._is_told_of_writes and not is_copied:
            entry.returned = [(output, output._version)]

    def _enter(self, number: Number, entry: _Entry, tensors: list[Tensor]) -> None:
        self._num_kept += 1
        self._entries[number] = self._last = entry
        if self._values is not None:
            self._values.kept(number, tensors)
        if self._is_told_of_writes:
            for tensor in tensors:
                for storage in storages_of(tensor):
                    self._in_storage.setdefault(storage._cdata, []).append(entry)

    def note_view(self, tensor: Tensor, view: Tensor) -> None:
        """A tensor got another that lies in its storage and counts its own writes."""
        if self._last is not None and any(tensor is returned for returned, _ in self._last.returned):
            self._last.returned.append((view, view._version))

    def before_write(self, kind: Kind, args: Any, kwargs: dict[str, Any]) -> None:
        """Copy what is kept in the storages of tensors that an operator is about to write to."""
        if not self._in_storage:
            return
        for tensor in kind.written_tensors(args, kwargs):
            for storage in storages_of(tensor):
                if storage._cdata not in self._in_storage:
                    continue
                for entry in self._in_storage.pop(storage._cdata, ()):
                    self._proof.wrote()
                    entry.output = tree_map_only(Tensor, partial(_copy_out_of, storage._cdata), entry.output)

    def note_saved(self) -> None:
        """Autograd saves a tensor: recomputation comes at least as far as here."""
        self._num_needed = self._num_kept

    def finish(self) -> None:
        """The forward has ended: let go what no recomputation comes to, and hand the rest to the keeper."""
        self._unneeded = {number for number, entry in self._entries.items() if entry.order >= self._num_needed}
        for number in self._unneeded:
            del self._entries[number]
        self._in_storage.clear()
        for number, entry in list(self._entries.items()):
            is_written = any(tensor._version != version for tensor, version in entry.returned)
            if is_written or (entry.sums and not _are_equal(entry.sums, _sums(list(tensors_in(entry.output))))):
                self._proof.rewrote(number)
                del self._entries[number]
        self.forget_returned()
        self._storages = {
            storage._cdata
            for entry in self._entries.values()
            for tensor in tensors_in(entry.output)
            for storage in storages_of(tensor)
        }
        if self._keeper is not None:
            for entry in self._entries.values():
                entry.output = tree_map_only(Tensor, self._put, entry.output)

    def forget_returned(self) -> None:
        """Let go of tensors with a graph, which holds all this in turn."""
        for entry in self._entries.values():
            entry.sums, entry.returned = [], []
        self._last = None

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
        entry = self._entries.get(number)
        if entry is None:
            return NOT_KEPT
        if entry.shapes != _shapes(args):
            raise UnsupportedError(
                f"Recomputing a layer came to {entry.kind.name} number {number[1] + 1} with inputs of "
                f"{list(map(list, _shapes(args)))} where the forward had {list(map(list, entry.shapes))}: the layer "
                "does not repeat itself (a branch taken differently, a changed flag). Leave it out of the policy."
            )
        return self._hand_out(number)

    def _hand_out(self, number: Number) -> Any:
        entry = self._entries.pop(number)
        if any(tensor._version != version for tensor, version in self._returned):
            raise UnsupportedError(
                f"The output of {entry.kind.name} is kept for recomputing the layer, and the layer returns it, but "
                "somebody has written into it since, so that recomputation would start from other values. Leave the "
                'layer out of the policy, or use mode "full" for it.'
            )
        if entry.random_state is not None:
            # What follows must draw the numbers that it drew behind this operator.
            entry.random_state.restore()
        output = entry.output if self._keeper is None else tree_map_only(_Handle, self._get, entry.output)
        if self._values is not None:
            self._values.handed_out(number, entry.kind.name, list(tensors_in([output])))
        return output

    def is_kept(self, number: Number) -> bool:
        """Whether what a module returned is there, or is not needed by what backward needs."""
        # A recomputation that is looked at goes on to where it is needed.
        return number in self._entries or (number in self._unneeded and self._values is None)

    def is_proven(self, number: Number) -> bool:
        """Whether what a module returns is not needed by what backward needs, and is computed to be looked at."""
        return number in self._unneeded and self._values is not None

    def run_proven(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator of such a module."""
        assert self._values is not None, "it looks at the module"
        with self._values.aside():
            return call(*args, **kwargs)

    def take_module(self, number: Number, shape: Sequence[int]) -> Any:
        """Return what a linear or adapted layer returned in forward, or `NOT_KEPT`. Each once.

        Args:
            number: of the call.
            shape: that it has to have.

        Raises:
            UnsupportedError: it had another number of elements in forward, or was written to.
        """
        if number not in self._entries:
            return NOT_KEPT
        found = self._hand_out(number)
        if found.numel() != math.prod(shape):
            raise UnsupportedError(
                f"Recomputing a layer came to a linear layer that returns {list(shape)} where the forward had "
                f"{list(found.shape)}: the layer does not repeat itself (a branch taken differently, a changed flag). "
                "Leave it out of the policy."
            )
        return found.reshape(shape)

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
        self._num_calls: dict[str, int] = {}

    def number(self, kind: Kind) -> Number:
        """Return the number of the call that comes now."""
        place = self._num_calls.get(kind.name, 0)
        self._num_calls[kind.name] = place + 1
        return kind.name, place


def _shapes(args: Any) -> Shapes:
    return tuple([tensor.shape for tensor in tensors_in(args)])


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
