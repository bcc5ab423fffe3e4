"""The outputs that one call of a region keeps, and whether the layers of a stack keep all that was asked for.

Note [Writes into kept outputs]: an operator that writes in place gets here before it writes, with whatever view it
writes through, and the output that lies in the same storage is copied first. The recomputation starts from the copy and
writes again. torch's own selective checkpointing looks at version counters instead, and `_unsafe_view`, behind every
linear layer on 3-D input, starts a new one: the write goes unseen and the gradients are wrong.

Note [Writes that no operator declares]: a kernel launched past the dispatcher can write too (Triton: Liger's rotary
embedding rotates the queries in the output of their projection). Until the stack has been recomputed once, each kept
output is summed over its bits when it is made and when the region ends. Where the sums differ the output is let go, so
that its operator runs again, and from then on it is copied as soon as it is made.

Note [Writes and kernels of our own]: our kernels (`dispatch`) are not given the operators that write, of which there
are more than of any other kind, most of them inside of other operators. There, the tensors that were returned are held
until the region ends, with what `_unsafe_view` made of them; where one of these has counted a write, the output is let
go and copied from then on, as above.

Note [Linear layers]: what a linear layer returns is its product, in another shape. So the product is taken from the
module, and nothing that runs inside is looked at in forward (`linears`). In recomputation the product is replaced by
what was kept, in the shape that it had.

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
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_ckpt.errors import PlanMismatchError, UnsupportedError, did_you_mean
from hf_ckpt.regions.execution_state import RandomState
from hf_ckpt.regions.selective import dispatch
from hf_ckpt.regions.selective.save_rules import (
    ATTENTION_OUTPUT,
    SELECTIVE,
    SELECTIVE_ATTENTION,
    CallId,
    OperatorKind,
    OperatorRole,
    SaveRules,
    nested_tensors_in,
    storages_of,
)

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import CallProof


LINEAR_LAYER = OperatorKind("a linear layer", "", OperatorRole.PRODUCT)
"""Stands for linear and adapted layers, as if they were operators."""


class Keeper(Protocol):
    """Holds kept outputs from the region's forward to its recomputation, on the host for instance."""

    def put(self, tensor: Tensor) -> Any:
        """Take a tensor; only what is returned here is kept of it."""

    def get(self, handle: Any) -> Tensor:
        """Bring a tensor back. Called at most once for each."""


@dataclass(frozen=True, slots=True)
class _KeeperHandle:
    """What a keeper returned for a tensor."""

    value: Any


@dataclass(slots=True)
class _KeptOutput:
    """What one operator returned."""

    kind: OperatorKind
    output: Any
    """Its tensors without graph, or their handles, in the tuples that they came in."""
    shapes: tuple[torch.Size, ...]
    """Of the tensors that it was given, to notice a recomputation that takes another way."""
    random_state: RandomState | None
    """After it, where it drew random numbers."""
    order: int
    """How many outputs had been kept before it."""
    sums: list[Tensor] = field(default_factory=list)
    """Over the bits of its tensors, where they are checked."""
    returned: list[tuple[Tensor, int]] = field(default_factory=list)
    """Its tensors as the layer got them, with the writes that they had counted, until the region ends."""


class KeptOutputs:
    """What is kept of one call of a region.

    Without a `keeper` the outputs are held here. `checks_writes`: look for writes that no operator declares, at the
    cost of reading each output twice. `sees_writes`: `before_write` is called; see Note [Writes and kernels of our
    own].
    """

    def __init__(
        self,
        keeper: Keeper | None,
        coverage: SaveCoverage,
        values: CallProof | None = None,
        *,
        checks_writes: bool = False,
        sees_writes: bool = True,
    ) -> None:
        self._keeper = keeper
        self._coverage = coverage
        self._values = values
        self._checks_writes = checks_writes
        self._sees_writes = sees_writes
        self._last: _KeptOutput | None = None
        self._entries: dict[CallId, _KeptOutput] = {}
        self._in_storage: dict[int, list[_KeptOutput]] = {}
        self._num_kept = 0
        self._num_needed = 0
        # Linear and adapted layers that were taken as a whole, whether or not anything of them is kept: columns, dtype
        # and device of what they returned.
        self.modules: dict[CallId, tuple[int, torch.dtype, torch.device]] = {}
        self._unneeded: set[CallId] = set()
        self._storages: set[int] = set()
        self._returned: list[tuple[Tensor, int]] = []

    # --- Forward. ---

    def keep(self, number: CallId, kind: OperatorKind, args: Any, kwargs: Any, output: Any) -> None:
        """Keep what an operator returned; it has to be new memory."""
        # Without its graph: the graph owns this. An alias, which keeps the storage and nothing else.
        is_copied = number in self._coverage.rewritten_calls
        detach = Tensor.clone if is_copied else Tensor.detach
        detached = detach(output) if isinstance(output, Tensor) else tree_map_only(Tensor, detach, output)
        tensors = [detached] if isinstance(detached, Tensor) else list(nested_tensors_in(detached))
        random_state = RandomState.of(*tensors) if kind.is_random and kind.draws(args, kwargs) else None
        entry = _KeptOutput(kind, detached, _shapes(args), random_state, self._num_kept)
        self._enter(number, entry, tensors, () if is_copied else nested_tensors_in([output]))

    def keep_module(self, number: CallId, output: Tensor) -> None:
        """Keep what a linear or adapted layer returned: as `keep` does, in less time, of one tensor."""
        is_copied = number in self._coverage.rewritten_calls
        detached = output.clone() if is_copied else output.detach()
        entry = _KeptOutput(LINEAR_LAYER, detached, (), None, self._num_kept)
        self._enter(number, entry, [detached], () if is_copied else (output,))

    def _enter(self, number: CallId, entry: _KeptOutput, tensors: list[Tensor], returned: Iterable[Tensor]) -> None:
        if torch.is_inference_mode_enabled():
            # Tensors that are made there count no writes. No graph needs them: they are computed again.
            return
        self._num_kept += 1
        self._entries[number] = self._last = entry
        if self._checks_writes:
            entry.sums = _sums(tensors)
        if self._values is not None:
            self._values.record_kept(number, tensors)
        if not self._sees_writes:
            entry.returned = [(tensor, tensor._version) for tensor in returned]
            return
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._in_storage.setdefault(storage._cdata, []).append(entry)

    def note_view(self, tensor: Tensor, view: Tensor) -> None:
        """Note that a tensor got a view that counts its own writes."""
        if self._last is not None and any(tensor is returned for returned, _ in self._last.returned):
            self._last.returned.append((view, view._version))

    def before_write(self, kind: OperatorKind, args: Any, kwargs: dict[str, Any]) -> None:
        """Copy what is kept in the storages of tensors that an operator is about to write to."""
        if not self._in_storage:
            return
        for tensor in kind.written_tensors(args, kwargs):
            for storage in storages_of(tensor):
                if storage._cdata not in self._in_storage:
                    continue
                for entry in self._in_storage.pop(storage._cdata, ()):
                    self._coverage.has_writes = True
                    entry.output = tree_map_only(Tensor, partial(_copy_out_of, storage._cdata), entry.output)

    def note_saved(self) -> None:
        """Note that autograd saves a tensor: recomputation comes at least as far as here."""
        self._num_needed = self._num_kept

    def finish(self) -> None:
        """End the forward: let go what no recomputation comes to, and hand the rest to the keeper."""
        self._unneeded = {number for number, entry in self._entries.items() if entry.order >= self._num_needed}
        for number in self._unneeded:
            del self._entries[number]
        self._in_storage.clear()
        for number, entry in list(self._entries.items()):
            is_written = any(tensor._version != version for tensor, version in entry.returned)
            if entry.sums and not is_written:
                sums = zip(entry.sums, _sums(list(nested_tensors_in(entry.output))), strict=True)
                is_written = not all(torch.equal(before, after) for before, after in sums)
            if is_written:
                self._coverage.note_unseen_write(number)
                del self._entries[number]
        self.forget_returned()
        self._storages = {
            storage._cdata
            for entry in self._entries.values()
            for tensor in nested_tensors_in(entry.output)
            for storage in storages_of(tensor)
        }
        if (keeper := self._keeper) is not None:
            for entry in self._entries.values():
                entry.output = tree_map_only(Tensor, lambda tensor: _KeeperHandle(keeper.put(tensor)), entry.output)

    def forget_returned(self) -> None:
        """Let go of tensors with a graph, which holds all this in turn."""
        for entry in self._entries.values():
            entry.sums, entry.returned = [], []
        self._last = None

    def note_returned(self, returned: Sequence[Tensor]) -> None:
        """Note what the region returned: its owner may write into it, where no mode of ours sees it."""
        self._returned = [
            (tensor.detach(), tensor._version)
            for tensor in returned
            if not tensor.is_inference() and any(storage._cdata in self._storages for storage in storages_of(tensor))
        ]

    # --- Recomputation. ---

    def take(self, number: CallId, args: Any) -> Any:
        """Return what an operator returned in forward, or `NOT_KEPT`: it has to run again. Each once.

        An output that was handed out before (a second backward over a graph that was retained) is computed again.

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
        return self._pop(number)

    def _pop(self, number: CallId) -> Any:
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
        output = entry.output
        if (keeper := self._keeper) is not None:
            output = tree_map_only(_KeeperHandle, lambda handle: keeper.get(handle.value).detach(), output)
        if self._values is not None:
            self._values.check_kept(number, entry.kind.name, list(nested_tensors_in([output])))
        return output

    def is_kept(self, number: CallId) -> bool:
        """Whether what a module returned is there, or is not needed by what backward needs."""
        # A recomputation that is looked at goes on to where it is needed.
        return number in self._entries or (number in self._unneeded and self._values is None)

    def is_proven(self, number: CallId) -> bool:
        """Whether what a module returns is not needed by what backward needs, and is computed only to be compared."""
        return number in self._unneeded and self._values is not None

    def run_proven(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator of such a module."""
        assert self._values is not None, "it looks at the module"
        with self._values.extra_run():
            return call(*args, **kwargs)

    def take_module(self, number: CallId, shape: Sequence[int]) -> Any:
        """Return what a linear or adapted layer returned in forward, in a shape, or `NOT_KEPT`. Each once.

        Raises:
            UnsupportedError: it had another number of elements in forward, or was written to.
        """
        if number not in self._entries:
            return NOT_KEPT
        found = self._pop(number)
        if found.numel() != math.prod(shape):
            raise UnsupportedError(
                f"Recomputing a layer came to a linear layer that returns {list(shape)} where the forward had "
                f"{list(found.shape)}: the layer does not repeat itself (a branch taken differently, a changed flag). "
                "Leave it out of the policy."
            )
        return found.reshape(shape)


NOT_KEPT = object()
"""Stands for an output that is not there; operators may return None."""


class CallCounter:
    """Numbers the calls of each operator, in forward and in recomputation alike."""

    def __init__(self) -> None:
        self._num_calls: dict[str, int] = {}

    def number(self, kind: OperatorKind) -> CallId:
        """Return the id of the call that comes now."""
        place = self._num_calls.get(kind.name, 0)
        self._num_calls[kind.name] = place + 1
        return kind.name, place


def _shapes(args: Any) -> tuple[torch.Size, ...]:
    return tuple([tensor.shape for tensor in nested_tensors_in(args)])


def _copy_out_of(storage: int, tensor: Tensor) -> Tensor:
    return tensor.clone() if any(each._cdata == storage for each in storages_of(tensor)) else tensor


def _sums(tensors: list[Tensor]) -> list[Tensor]:
    """Return a sum over the bits of each tensor that has any: fake ones and other subclasses have none."""
    plain = [tensor for tensor in tensors if type(tensor) is Tensor and tensor.layout is torch.strided]
    return [_bits(tensor).sum(dtype=torch.int64) for tensor in plain]


def _bits(tensor: Tensor) -> Tensor:
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])


class SaveCoverage:
    """Whether all that a plan wants kept occurred in the layers of a stack: known when the first recomputation begins.

    One for each stack. Also remembers which outputs are written to, and whether kernels of our own can be used.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._start()

    def _start(self) -> None:
        # Whether something wrote into a kept output, and the calls whose output is written to unseen.
        self.has_writes = False
        self.rewritten_calls: set[CallId] = set()
        # Whether something occurred that only a dispatch mode is given.
        self.needs_dispatch_mode = False
        # Kernels are given what operators do inside of themselves, which a mode is not: writes are looked for again.
        self.has_recomputed_with_kernels = False
        self._without_kernels: set[Any] = set()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model starts without proof.
        return {"_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path = state["_path"]
        self._start()

    @property
    def allows_compiling(self) -> bool:
        """Whether a graph of the layers can be compiled and be exact: known once they were recomputed."""
        return self.is_complete and not self.has_writes

    def note_unseen_write(self, number: CallId) -> None:
        """Note that something which no operator reported wrote into the output of this call."""
        self.has_writes = True
        self.rewritten_calls.add(number)

    def _forget(self) -> None:
        self.is_complete = False
        self._occurred: defaultdict[SaveRules, set[str]] = defaultdict(set)
        self._seen: dict[str, OperatorRole] = {}

    def begin_layer(self, saves: SaveRules) -> None:
        """Note that a layer runs which is to keep this."""
        if not self.is_complete:
            self._occurred[saves] |= set()

    def note_kept(self, saves: SaveRules, names: tuple[str, ...], is_attention: bool) -> None:
        """Note which required names a call was kept for.

        `is_attention`: the call was found by following probabilities, operator by operator, which only a dispatch mode
        can.
        """
        if names and not self.is_complete:
            self._occurred[saves].update(names)
            self.needs_dispatch_mode |= is_attention

    def note_operator(self, kind: OperatorKind, may_keep: bool) -> None:
        """Note that an operator ran."""
        if self.is_complete:
            return
        if kind.returns_new:
            self._seen[kind.packet] = kind.role
        if kind.is_higher_order:
            self.needs_dispatch_mode = True
        elif may_keep:
            self._without_kernels.add(kind.function)

    def uses_kernels(self) -> bool:
        """Whether the stack's regions are to run with kernels of our own; registers those that are missing."""
        # A mode of somebody else's is to see what it always saw.
        if (
            not self.is_complete
            or self.needs_dispatch_mode
            or torch._C._len_torch_dispatch_stack()
            or not dispatch.kernels_are_possible()
        ):
            return False
        if self._without_kernels or not self.has_recomputed_with_kernels:
            dispatch.register_kernels(self._without_kernels)
            self._without_kernels = set()
        return True

    def begin_recomputation(self, *, uses_kernels: bool) -> None:
        """Note that a recomputation begins: every layer has run by now.

        Raises:
            PlanMismatchError: something that was required never occurred; names it, and what did occur.
        """
        if not self.is_complete:
            for saves, occurred in self._occurred.items():
                for name in saves.required:
                    if name not in occurred:
                        raise PlanMismatchError(self._message(saves, name))
            self._forget()
            self.is_complete = True
        self.has_recomputed_with_kernels |= uses_kernels

    def _message(self, saves: SaveRules, name: str) -> str:
        where = f"the layers of {self._path}" if self._path else "the layers"
        if name == SELECTIVE:
            return (
                f'Mode "selective" keeps matrix products and attention, but none ran in {where}: all would be '
                f'recomputed. Use mode "full" for them, or name operators under save. What ran: {self._ran()}.'
            )
        if name == SELECTIVE_ATTENTION:
            return (
                f'Mode "selective_attention" keeps what the attention kernel returns, but no attention ran in {where} '
                'that is known: all would be recomputed. Use mode "selective" or "full" for them, or name '
                f"operators under save. Products that ran: {self._ran(OperatorRole.PRODUCT)}."
            )
        if name == ATTENTION_OUTPUT:
            return (
                f'save: "{name}" is to be kept, but no attention ran in {where} that is known: it would be '
                f"recomputed. Leave it out, or name operators. Products that ran: {self._ran(OperatorRole.PRODUCT)}."
            )
        if name in saves.globs:
            return (
                f'save: "{name}" is to be kept, but no operator of that name ran in {where} in the first step, and no '
                "matrix product or attention kernel in a module that matches it: it would be recomputed. Products and "
                f"kernels that ran: {self._ran(OperatorRole.PRODUCT, OperatorRole.ATTENTION)}.{self._nearest(name)}"
            )
        return (
            f'save: "{name}" is to be kept, but that operator did not run in {where} in the first step: it would be '
            "recomputed. Another device, mask or attention implementation dispatches another one; "
            f'"{ATTENTION_OUTPUT}" is that of whichever runs. Products and kernels that ran: '
            f"{self._ran(OperatorRole.PRODUCT, OperatorRole.ATTENTION)}.{self._nearest(name)}"
        )

    def _nearest(self, name: str) -> str:
        products = [known for known, role in self._seen.items() if role is not OperatorRole.CHEAP]
        return did_you_mean(name, products) or did_you_mean(name, self._seen)

    def _ran(self, *roles: OperatorRole) -> str:
        names = sorted(name for name, role in self._seen.items() if not roles or role in roles)
        return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "none"
