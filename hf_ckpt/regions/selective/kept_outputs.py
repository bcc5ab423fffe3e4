"""The outputs that one call of a region keeps, and whether the layers of a stack keep all that was asked for.

Note [Looked at whenever used]: what is kept gets a fingerprint when it is made, and another one when it is handed out,
in every step; so does what its operator is fed (on a device by turns). Nothing seen before is relied upon: kernels
launched past the dispatcher write too (Triton: Liger's rotary embedding rotates the queries in the output of their
projection), as do operators inside of themselves (`torch.cdist`), numpy, and views that count their own writes.

A kept output that the region itself writes to is let go when the region ends, so that its operator runs again. The host
sees it there at once on a CPU; a device it asks where the call has a shape, hooks, settings or operators that the
region has not been recomputed with. From then on such an output is copied as soon as it is made. What shows only
later stops the backward.

Note [Sums of adapted layers]: an adapted layer adds what its adapter returns to what its base returns, and nothing but
the sum is used behind it. So the sum is kept in the place of the base's product, with the narrow product inside the
adapter, which backward needs. In recomputation the layer runs as it is, so that autograd saves what it saved, random
numbers are drawn, and hooks see it; but its two wide products return tensors without memory (on `meta`), and so do the
scaling, casts and sums of them. In the end the kept sum takes the place of what came out. If anything that backward
needs depended on these, torch's comparison of devices would say so. The sum of a layer behind which backward needs
nothing is not kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from hf_ckpt.errors import PlanMismatchError, UnsupportedError, did_you_mean
from hf_ckpt.regions.execution_state import RandomState
from hf_ckpt.regions.fingerprints import BitSum, Fingerprint, bit_sums, largest_distance, rounding_of, sums_differ
from hf_ckpt.regions.selective import dispatch
from hf_ckpt.regions.selective.save_rules import (
    ATTENTION_OUTPUT,
    SELECTIVE,
    SELECTIVE_ATTENTION,
    CallId,
    OperatorKind,
    OperatorRole,
    SaveRules,
    fed_tensors,
    linear_weight,
    nested_tensors_in,
)
from hf_ckpt.upstream.torch import num_dispatch_modes, tree_map_only

if TYPE_CHECKING:
    from hf_ckpt.regions.module_state import CallState
    from hf_ckpt.regions.value_proof import CallProof, RegionProof


TURNS = 8
"""On a device one of so many operators is asked what it is fed, by chance, where its region was proven as it is."""

ADAPTED_LAYER = OperatorKind("an adapted layer", "", OperatorRole.PRODUCT)
"""Stands for adapted layers, as if they were operators."""


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
    shapes: list[torch.Size]
    """Of the tensors that it was fed, to notice a recomputation that takes another way."""
    random_state: RandomState | None
    """After it, where it drew random numbers."""
    sums: list[BitSum]
    """Of its tensors, as soon as they were made."""
    fed: Sequence[BitSum]
    """Of the tensors that it was fed."""
    fingerprints: Sequence[Fingerprint]
    """Of the same tensors, in a call that is proven."""
    num_saved: int
    """How many tensors autograd had saved before it was kept."""


class KeptOutputs:
    """What is kept of one call of a region. Without a `keeper` the outputs are held here.

    `state` is that of the region's modules, and `setting` what tells this call from others, as far as that is known
    before it runs; None if it is like no other.
    """

    def __init__(
        self,
        keeper: Keeper | None,
        coverage: SaveCoverage,
        state: CallState,
        setting: Hashable = None,
        values: CallProof | None = None,
        region: RegionProof | None = None,
    ) -> None:
        self._keeper = keeper
        self._coverage = coverage
        self._state = state
        self._setting = setting
        self._values = values
        self._region = region
        self._is_whole = values is not None or not coverage.knows(setting)
        self._turn = coverage.turns.randrange(TURNS)
        self._operators: frozenset[CallId] = frozenset()
        self.entries: dict[CallId, _KeptOutput] = {}
        self.saved: list[Any] = []
        """Has an item for each tensor that autograd has saved so far: recomputation comes to the last of them."""
        # Adapted layers that were taken as a whole, whether or not anything of them is kept: their rank, and columns,
        # dtype and device of what they returned.
        self.adapted: dict[CallId, tuple[int, int, torch.dtype, torch.device]] = {}
        self._unneeded: set[CallId] = set()
        self._looked_at: list[_Look] = []
        if values is not None:
            values.watch_kept(self)

    # --- Forward. ---

    def keep(self, number: CallId, kind: OperatorKind, args: Any, kwargs: Any, output: Any) -> None:
        """Keep what an operator returned; it has to be new memory."""
        if torch.is_inference_mode_enabled():
            # No graph needs what is made there: it is computed again.
            return
        # Without its graph: the graph owns this. An alias, which keeps the storage and nothing else.
        detach = Tensor.clone if number in self._coverage.copied_calls else Tensor.detach
        detached = _with_others(detach, output)
        tensors = _tensors_of(detached)
        random_state = RandomState.of(*tensors) if kind.is_random and kind.draws(args, kwargs) else None
        fed = fed_tensors(kind, args)
        sums = bit_sums(tensors, is_whole=self._is_whole)
        reads_late = self._is_whole or len(self.entries) % TURNS == self._turn
        of_fed, fingerprints = self._sums_of_fed(kind, fed, reads_late)
        shapes = [tensor.shape for tensor in fed]
        num_saved = len(self.saved)
        self.entries[number] = _KeptOutput(kind, detached, shapes, random_state, sums, of_fed, fingerprints, num_saved)

    def _sums_of_fed(
        self, kind: OperatorKind, fed: list[Tensor], reads_late: bool = True
    ) -> tuple[Sequence[BitSum], Sequence[Fingerprint]]:
        """Return sums of what an operator is fed; in a proven call fingerprints too, which tell how far apart it is."""
        if kind is ADAPTED_LAYER:
            # It feeds its adapter what it is fed.
            return (), ()
        # A simulated step counts the memory of both, and has no values.
        if self._values is not None and (found := self._values.fingerprints(fed, has_sketch=True)):
            return [each.hash for each in found], found
        return bit_sums(fed, is_whole=self._is_whole, is_sparse=True, reads_late=reads_late), ()

    def finish(self) -> None:
        """End the forward: let go what the region wrote to or no recomputation comes to; the keeper gets the rest."""
        num_saved = len(self.saved)
        self._unneeded = {number for number, each in self.entries.items() if each.num_saved == num_saved}
        for number in self._unneeded:
            del self.entries[number]
        self._operators = frozenset(self.entries)
        if self._values is not None or not self._coverage.knows((self._setting, self._operators)):
            looks = [_Look(number, 0, False, each.sums, self._sums_of(each)) for number, each in self.entries.items()]
            # The host waits for a device once.
            for look in filter(_Look.differs, looks if _differ(looks) else ()):
                self._coverage.copied_calls.add(look.number)
                del self.entries[look.number]
        if (keeper := self._keeper) is not None:
            for entry in self.entries.values():
                entry.output = tree_map_only(Tensor, partial(_handed_over, keeper), entry.output)

    def _sums_of(self, entry: _KeptOutput) -> list[BitSum]:
        return bit_sums(_tensors_of(entry.output), is_whole=self._is_whole)

    # --- Recomputation. ---

    def take(self, number: CallId, args: Any) -> Any:
        """Return what an operator returned in forward, or `NOT_KEPT`: it has to run again. Each once.

        An output that was handed out before (a second backward over a graph that was retained) is computed again.

        Raises:
            CheckpointError: it is fed tensors of other shapes than in forward.
        """
        entry = self.entries.get(number)
        if entry is None:
            return NOT_KEPT
        fed = fed_tensors(entry.kind, args)
        if entry.shapes != (shapes := [tensor.shape for tensor in fed]):
            raise CheckpointError(
                f"{entry.kind.name} number {number[1] + 1} has inputs of {list(map(list, shapes))} where the forward "
                f"had {list(map(list, entry.shapes))}"
            )
        if entry.fed:
            now, fingerprints = self._sums_of_fed(entry.kind, fed)
            # What is known to be equal needs no second look.
            if _are_late(now) or now != entry.fed:
                weight = linear_weight(entry.kind, args)
                self._looked_at.append(_Look(number, weight, True, entry.fed, now, entry.fingerprints, fingerprints))
        return self._pop(number, args)

    def _pop(self, number: CallId, args: Any) -> Any:
        entry = self.entries.pop(number)
        if (keeper := self._keeper) is not None:
            entry.output = tree_map_only(_KeeperHandle, lambda each: keeper.get(each.value).detach(), entry.output)
        may_run_again = self._may_run_again(entry)
        # That of an adapted layer was looked at by `is_kept`, when it began.
        if not may_run_again or entry.kind is not ADAPTED_LAYER:
            sums = self._sums_of(entry)
            if may_run_again:
                if sums != entry.sums:
                    return NOT_KEPT
            elif _are_late(sums) or sums != entry.sums:
                self._looked_at.append(_Look(number, linear_weight(entry.kind, args), False, entry.sums, sums))
        if entry.random_state is not None:
            # What follows must draw the numbers that it drew behind this operator.
            entry.random_state.restore()
        return entry.output

    def _may_run_again(self, entry: _KeptOutput) -> bool:
        """Whether it is known at once that an output was written to, by nothing that the first step looks for."""
        return self._values is None and self._keeper is None and not _are_late(entry.sums)

    def is_kept(self, number: CallId) -> bool:
        """Whether what an adapted layer returned is there, or is not needed by what backward needs."""
        entry = self.entries.get(number)
        if entry is None:
            # A recomputation that is looked at goes on to where it is needed.
            return number in self._unneeded and self._values is None
        return not self._may_run_again(entry) or entry.sums == self._sums_of(entry)

    def run_unneeded(self, number: CallId, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator of an adapted layer for real; only to be compared, if backward needs nothing behind it."""
        if number not in self._unneeded or self._values is None:
            return call(*args, **kwargs)
        with self._values.extra_run():
            return call(*args, **kwargs)

    # --- What was handed out, and fed. ---

    def check(self) -> None:
        """End a recomputation. What was wrong stops the backward; where a device has the answers, at its end.

        Raises:
            UnsupportedError: a kept output was written to, or its operator was fed something else than in forward.
        """
        looked_at, self._looked_at = self._looked_at, []
        if self._values is None and looked_at:
            is_wrong = _differ(looked_at)
            if isinstance(is_wrong, Tensor) and (errors := self._state.errors) is not None:
                errors.add(is_wrong, partial(self._refuse, looked_at))
            elif is_wrong:
                self._refuse(looked_at)
        if self._setting is not None:
            self._coverage.note_known(self._setting, (self._setting, self._operators))

    def fault(self, *, is_fed: bool) -> str | None:
        """Return what is wrong with what was handed out so far, or with what was fed. Waits for the device."""
        found = [look for look in self._looked_at if look.is_fed is is_fed]
        if not found or not _differ(found):
            return None
        name = self._first(found)
        if is_fed:
            return (
                f"its recomputation feeds {name} something else than its forward did, which keeping its output hides."
            )
        return (
            f"recomputation is handed another output of {name} than the forward kept: something has written into it "
            "since."
        )

    def fed_distance(self) -> tuple[float | None, float]:
        """See `KeptValues`."""
        pairs = [(look.fingerprints_before, look.fingerprints_now) for look in self._looked_at if look.is_fed]
        before, now = ([each for pair in pairs for each in pair[at]] for at in (0, 1))
        return largest_distance(before, now), rounding_of(before)

    def _refuse(self, looked_at: list[_Look]) -> None:
        found = [look for look in looked_at if look.differs()]
        name = self._first(looked_at)
        where = f"{self._state.path} is recomputed in backward, but"
        if all(look.is_fed for look in found):
            # Kernels of a device need not repeat themselves; those of a CPU do, but for a few.
            region = None if torch.are_deterministic_algorithms_enabled() else self._region
            if region is not None and (region.has_noise or all(_are_late(look.now) for look in found)):
                region.note_other_inputs(name)
                return
            raise UnsupportedError(
                f"{where} {name}, whose output is kept, is fed something else there than in the forward, so that its "
                "gradients would be wrong. A generator or a counter that no module holds, or a changed input would "
                'explain it. Draw from torch, or use mode "none" for it.'
            )
        raise UnsupportedError(
            f"{where} the output of {name}, which is kept for that, is no longer what the forward returned: somebody "
            "has written into it since, so that recomputation would start from other values. Leave the layer out of "
            'the policy, or use mode "full" for it.'
        )

    def _first(self, looked_at: list[_Look]) -> str:
        """Name the operator, and the module that owns its weight, of the first difference."""
        look = next(each for each in looked_at if each.differs())
        (operator, place), module = look.number, self._state.module
        inside = () if module is None else module.named_parameters()
        owner = next((name for name, each in inside if look.weight and each.data_ptr() == look.weight), "")
        return f"{operator} number {place + 1}" + f" ({owner.rpartition('.')[0]})" * bool(owner)


class _Look(NamedTuple):
    """A comparison of what an operator was fed, or returned, in forward and in recomputation."""

    number: CallId
    weight: int
    """Address of its weight, for its name; 0 if it has none."""
    is_fed: bool
    before: Sequence[BitSum]
    now: Sequence[BitSum]
    fingerprints_before: Sequence[Fingerprint] = ()
    fingerprints_now: Sequence[Fingerprint] = ()

    def differs(self) -> bool:
        return bool(sums_differ(self.before, self.now))


def _differ(looked_at: Sequence[_Look]) -> bool | Tensor:
    before, now = (list(chain.from_iterable(map(attrgetter(name), looked_at))) for name in ("before", "now"))
    return sums_differ(before, now)


def _are_late(sums: Iterable[BitSum]) -> bool:
    """Whether a device has one of them."""
    return not _ON_HOST.issuperset(map(type, sums))


_ON_HOST = frozenset({int, bytes})


def _tensors_of(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(nested_tensors_in(output))


def _with_others(change: Callable[[Tensor], Any], output: Any) -> Any:
    """Return what an operator returned, with other tensors."""
    if isinstance(output, Tensor):
        return change(output)
    if type(output) is tuple:
        # torch's own way through nested values takes as long as some operators, and leaves cycles behind.
        return tuple([_with_others(change, each) for each in output])
    return tree_map_only(Tensor, change, output) if isinstance(output, tuple | list | dict) else output


def _handed_over(keeper: Keeper, tensor: Tensor) -> _KeeperHandle:
    return _KeeperHandle(keeper.put(tensor))


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


class SaveCoverage:
    """Whether all that a plan wants kept occurred in the layers of a stack: known when the first recomputation begins.

    One for each stack. Also knows which outputs are copied, and whether kernels of our own can be used.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._start()

    def _start(self) -> None:
        # Calls whose output the layer has written to.
        self.copied_calls: set[CallId] = set()
        # Hashes of settings, and of settings with operators, that were recomputed.
        self._known: set[int] = set()
        # Its own, so that those of the user stay as they are.
        self.turns = Random(0)
        # Whether something occurred that only a dispatch mode is given.
        self.needs_dispatch_mode = False
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
        return self.is_complete and not self.copied_calls

    def knows(self, way: Hashable) -> bool:
        """Whether a call that went this way has been recomputed."""
        return hash(way) in self._known

    def note_known(self, *ways: Hashable) -> None:
        """Note that a call has been recomputed that went these ways."""
        self._known.update(map(hash, ways))

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
        if kind.is_higher_order or (may_keep and kind.role is OperatorRole.CHEAP):
            self.needs_dispatch_mode = True
        elif may_keep:
            self._without_kernels.add(kind.function)

    def uses_kernels(self) -> bool:
        """Whether the stack's regions are to run with kernels of our own; registers those that are missing."""
        # A mode of somebody else's is to see what it always saw.
        if (
            not self.is_complete
            or self.needs_dispatch_mode
            or num_dispatch_modes()
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
