"""How FSDP1 makes the shares of its units, and the memory that torch's allocator holds from then on.

Note [What wrapping leaves free]. All of this is in use for a moment before the first step:
- Unit by unit, the root last: the weights are moved to the device, copied into one tensor and freed, and a share of
  that is copied (`flatten_tensors_into_flat_param` and `shard` in `torch/distributed/fsdp/_flat_param.py`).
- Where rank 0 sends its weights (`sync_module_states`), it sends buckets of 250 MiB or more, which are copies where
  they hold more than one weight (`broadcast_coalesced`). Up to torch 2.7 NCCL still reads them when they are freed, so
  that they are of use again when the unit is done. Later versions let go of them a little sooner: not told apart here.
- In mixed precision accelerate casts the shares of trained weights to float32 when all are made. The model's parameters
  are views of the shares as they were until the first forward.
- Before the first forward `init_flat_param_attributes` makes what each unit gathers into, the root's first, and empties
  it: in mixed precision in both dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

Block = TypeVar("Block")

_BUCKET_BYTES = 250 * 2**20
"""torch's `PARAM_BROADCAST_BUCKET_SIZE`."""


class Allocator(Protocol[Block]):
    """What serves memory: `CachingAllocator`."""

    def allocate(self, num_bytes: int) -> Block:
        """Return a block of at least so many bytes."""

    def free(self, block: Block) -> None:
        """Take a block back."""


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """A unit of FSDP1, whose weights are one tensor, of which each rank keeps a share.

    Args:
        weights: bytes of each weight, whole, as it was loaded.
        is_broadcast: whether rank 0 sends them to the others.
        loaded_bytes: of the share as its weights were loaded.
        share_bytes: of the share that is kept.
        emptied: bytes of each tensor that is made, and emptied, before the first forward.
    """

    weights: tuple[int, ...]
    is_broadcast: bool
    loaded_bytes: int
    share_bytes: int
    emptied: tuple[int, ...]

    def loaded_share(self, allocator: Allocator[Block]) -> Block:
        """Return the block of the share as its weights were loaded."""
        weights = [allocator.allocate(num_bytes) for num_bytes in self.weights]
        sent = [allocator.allocate(sum(bucket)) for bucket in self._buckets() if len(bucket) > 1]
        flat = allocator.allocate(sum(self.weights))
        for each in weights:
            allocator.free(each)
        share = allocator.allocate(self.loaded_bytes)
        for each in (flat, *sent):
            allocator.free(each)
        return share

    def _buckets(self) -> list[list[int]]:
        buckets: list[list[int]] = []
        for num_bytes in self.weights if self.is_broadcast else ():
            if not buckets or sum(buckets[-1]) >= _BUCKET_BYTES:
                buckets.append([])
            buckets[-1].append(num_bytes)
        return buckets


def blocks_of_shares(allocator: Allocator[Block], units: Sequence[FlatParameter]) -> list[Block]:
    """Return the blocks of the shares of all units, the root's last. See Note [What wrapping leaves free]."""
    loaded = [unit.loaded_share(allocator) for unit in units]
    root_first = [len(units) - 1, *range(len(units) - 1)] if units else []
    kept: Mapping[int, Block] = {
        number: allocator.allocate(units[number].share_bytes)
        for number in root_first
        if units[number].share_bytes != units[number].loaded_bytes
    }
    for number in root_first:
        for num_bytes in units[number].emptied:
            allocator.free(allocator.allocate(num_bytes))
    for number in kept:
        allocator.free(loaded[number])
    return [kept.get(number, share) for number, share in enumerate(loaded)]
