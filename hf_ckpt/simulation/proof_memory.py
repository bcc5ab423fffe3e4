"""The first step in a simulation: what the proof of recomputed values (`regions.value_proof`) needs, and nothing else.

Recomputations run to the end, as they do there. Fingerprints are not taken: their memory is told to the tracker. What
runs only to be looked at takes no time, so that a step's time is that of all later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_ckpt.regions.call import Function
from hf_ckpt.regions.tensor_hashes import scratch_bytes
from hf_ckpt.regions.value_proof import CallProof, RegionProof, module_of, modules_inside, tensors_held
from hf_ckpt.simulation.tracker import Tracker

_HASH_BYTES = 8
_SKETCH_BYTES = 4 * 65


def simulated(tracker: Tracker, region: RegionProof, function: Function, tensors: Sequence[Any]) -> CallProof:
    """Return what stands for the proof of a call. See `regions.value_proof.Look`.

    Args:
        tracker: is told.
        region: see there.
        function: see there.
        tensors: see there.
    """
    return _SimulatedCall(tracker, region, module_of(function))


class _Fingerprints:
    """Those of one run. Their memory goes with this object."""


class _SimulatedCall(CallProof):
    """See `CallProof`."""

    is_simulated = True

    def __init__(self, tracker: Tracker, region: RegionProof, module: nn.Module | None) -> None:
        super().__init__(region, module)
        self._tracker = tracker
        self._of_forward = _Fingerprints()
        self._num_saved: int | None = None

    def run(self, function: Function, *tensors: Any) -> Any:
        """See `CallProof`."""
        is_forward = self._num_saved is None
        found = self._of_forward if is_forward else _Fingerprints()
        try:
            self._take(found, self._held())
            with self._looking(found), _counted(self._saved) as num_saved:
                returned = function(*tensors)
            self._take(found, returned, sketch_bytes=_SKETCH_BYTES)
        finally:
            self._tracker.counts_time = True
        if is_forward:
            self._num_saved = len(num_saved)
        else:
            self._region.compared(None)
        return returned

    def look_at_graph(self, function: Function, args: Sequence[Any], returned: Any) -> None:
        """See `CallProof`. Nothing is on trial here."""

    def goes_on(self) -> None:
        """See `CallProof`."""
        self._tracker.counts_time = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See `CallProof`."""
        found, self._tracker.counts_time = self._tracker.counts_time, False
        try:
            yield
        finally:
            self._tracker.counts_time = found

    def _saved(self, number: int) -> None:
        if number == self._num_saved:
            self.goes_on()

    def kept(self, number: Any, tensors: Sequence[Tensor]) -> None:
        """See `CallProof`."""
        self._take(self._of_forward, tensors)

    def handed_out(self, number: Any, name: str, tensors: Sequence[Tensor]) -> None:
        """See `CallProof`."""
        self._take(_Fingerprints(), tensors)

    def _held(self) -> list[Tensor]:
        modules = () if self._module is None else self._module.modules()
        return [tensor for module in modules for _, tensor in tensors_held(module)]

    @contextmanager
    def _looking(self, found: _Fingerprints) -> Iterator[None]:
        with ExitStack() as hooks:
            for _, module in modules_inside(self._module):
                hooks.callback(module.register_forward_hook(partial(self._module_returned, found)).remove)
            yield

    def _module_returned(self, found: _Fingerprints, module: nn.Module, args: Any, output: Any) -> None:
        self._take(found, output)

    def _take(self, found: _Fingerprints, values: Any, *, sketch_bytes: int = 0) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                self._tracker.note_passing(scratch_bytes(tensor))
                self._tracker.note_held(_HASH_BYTES, found)
                if sketch_bytes and tensor.is_floating_point():
                    self._tracker.note_held(sketch_bytes, found)


@contextmanager
def _counted(told: Callable[[int], None]) -> Iterator[list[None]]:
    """Count what autograd saves in the block; yields as many items. Where torch's checkpoint recomputes, tell of each.

    The hooks that are on top take what is saved, and stay there: see `regions.around`.
    """
    saved: list[None] = []
    pack, unpack = hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    # It may have come by what it needs in the middle of an operator. A segment tells by itself.
    is_told = "_recomputation_hook" in getattr(pack, "__qualname__", "")

    def counting(tensor: Tensor) -> Any:
        saved.append(None)
        if is_told:
            told(len(saved))
        return pack(tensor)

    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(counting, unpack)
    try:
        yield saved
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
