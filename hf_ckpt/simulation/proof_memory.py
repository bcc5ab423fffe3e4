"""The memory of the first step's proof of recomputed values (`regions.value_proof`), in a simulated step.

Recomputations run to the end, as in the real proof. Fingerprints are not taken; their memory is recorded. What runs
only for the proof takes no time, so that a step's time is that of all later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_ckpt.regions.execution_state import Function, module_of
from hf_ckpt.regions.fingerprints import Fingerprint, checksum_scratch_bytes, scratch_bytes
from hf_ckpt.regions.value_proof import CallProof, RegionProof
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.upstream.torch import DisableTorchFunction, tree_leaves

_HASH_BYTES = 8
_SKETCH_BYTES = 4 * 65


class _Fingerprints:
    """The fingerprints of one run. Their memory is freed with this object."""


class SimulatedCallProof(CallProof):
    """The proof of one call, with the memory of the real one. See `regions.value_proof.CallProofFactory`."""

    is_simulated = True

    def __init__(self, tracker: Tracker, region: RegionProof, function: Function, tensors: Sequence[Any]) -> None:
        super().__init__(region, module_of(function))
        self._tracker = tracker
        self._of_forward = _Fingerprints()
        self._of_original = _Fingerprints()
        self._has_run = False

    def run(self, function: Function, *tensors: Any) -> Any:
        """See `CallProof`."""
        is_forward = not self._has_run
        if not is_forward and self.original is not None:
            self.original.before_recomputation(tensors)
        found = self._of_forward if is_forward else _Fingerprints()
        if self.is_given_noise:
            self._record_fingerprints(found, tensors, has_sketch=True)
        try:
            with self._hooks(found):
                returned = function(*tensors)
            self._record_fingerprints(found, returned, has_sketch=is_forward)
        finally:
            self._tracker.counts_time = True
        # Only now: a forward that takes gradients inside of itself starts again.
        self._has_run = True
        if not is_forward:
            self._region.finish_call(None)
        return returned

    def fingerprints(self, tensors: Sequence[Tensor], *, has_sketch: bool = False) -> list[Fingerprint]:
        """See `CallProof`. Nothing is compared here."""
        with self._extra():
            self._record_fingerprints(self._of_original, tensors, has_sketch=has_sketch)
        return []

    def after_last_needed(self) -> None:
        """See `CallProof`."""
        self._tracker.counts_time = False

    @contextmanager
    def extra_run(self) -> Iterator[None]:
        """See `CallProof`."""
        found, self._tracker.counts_time = self._tracker.counts_time, False
        try:
            with self._extra():
                yield
        finally:
            self._tracker.counts_time = found

    @contextmanager
    def _extra(self) -> Iterator[None]:
        """Mark what is made inside: only layers that are held to the original make it."""
        found, self._tracker.is_extra = self._tracker.is_extra, True
        try:
            yield
        finally:
            self._tracker.is_extra = found

    def _returned(self, found: Any, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """See `CallProof`; `found` are `_Fingerprints`."""
        if self.runs_to_end:
            self._record(found, output, checksum_scratch_bytes)
        else:
            self._record_fingerprints(found, output, has_sketch=True)

    def _record_fingerprints(self, found: _Fingerprints, values: Any, *, has_sketch: bool = False) -> None:
        self._record(found, values, partial(scratch_bytes, has_sketch=has_sketch), has_sketch=has_sketch)

    def _record(
        self, found: _Fingerprints, values: Any, scratch: Callable[[Tensor], int], *, has_sketch: bool = False
    ) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                with DisableTorchFunction():
                    num_bytes = scratch(tensor)
                self._tracker.record_temporary(num_bytes)
                self._tracker.record_owned(_HASH_BYTES, found)
                if has_sketch and tensor.is_floating_point():
                    self._tracker.record_owned(_SKETCH_BYTES, found)
