"""What stands for a tensor that was sent away: in the graph, in one call of a region, and in the engine's own books.

No logic: whatever happens is asked of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_ckpt.regions.offload.schedule import Group, Order
from hf_ckpt.regions.offload.tensors import Key

if TYPE_CHECKING:
    from hf_ckpt.regions.offload.engine import Offloader


def unpack(packed: Handle | Tensor) -> Tensor:
    """Return the tensor that `Passage.pack` or `Keeper.put` was given."""
    return packed.get() if isinstance(packed, Handle) else packed


class Sent:
    """A tensor that was sent away; all who saved it share this.

    Args:
        parcel: the link's.
        num_bytes: of the tensor.
        begun_in: the process that the engine had begun in.
    """

    __slots__ = ("__weakref__", "begun_in", "num_bytes", "parcel")

    def __init__(self, parcel: Any, num_bytes: int, begun_in: int) -> None:
        self.parcel = parcel
        self.num_bytes = num_bytes
        self.begun_in = begun_in


class Handle:
    """What autograd keeps in place of a tensor.

    Args:
        offloader: who has the tensor.
        sent: the tensor.
        group: of the region that saved it.
        order: of the group.
    """

    __slots__ = ("group", "offloader", "order", "sent")

    def __init__(self, offloader: Offloader, sent: Sent, group: Group[Sent], order: Order[Sent]) -> None:
        self.offloader = offloader
        self.sent = sent
        self.group = group
        self.order = order

    def get(self) -> Tensor:
        """Return the tensor, and start bringing back what backward asks for next."""
        return self.offloader.bring_back(self)


class Passage:
    """One call of a region.

    Args:
        offloader: the model's.
        position: the layer's.
        is_offloaded: whether this layer sends away what it saves.
        begun_in: the process that the engine had begun in.
    """

    def __init__(self, offloader: Offloader, position: int, is_offloaded: bool, begun_in: int) -> None:
        self._offloader = offloader
        self.position = position
        self.is_offloaded = is_offloaded
        self.begun_in = begun_in
        self.num_bytes = 0
        self.groups: dict[torch.device, tuple[Group[Sent], Order[Sent]]] = {}

    def is_needed(self) -> bool:
        """Whether something that was sent in this call is still to be asked for."""
        return any(group.items() for group, _ in self.groups.values())

    def pack(self, tensor: Tensor, *, is_made_here: bool = False) -> Handle | Tensor:
        """Send a tensor away if that is worth it, and return what autograd keeps.

        Args:
            tensor: what the region saves.
            is_made_here: whether the region has made it, and not been given it.
        """
        # Before 2.13 torch's checkpoint saves an empty tensor of its own.
        is_something = self.is_offloaded and tensor.numel() > 0
        return self._offloader.send_away(tensor, self, is_made_here=is_made_here) if is_something else tensor


class Keeper:
    """Keeps tensors that a region wants to have back in its recomputation.

    Args:
        offloader: the model's.
        position: the layer's.
    """

    def __init__(self, offloader: Offloader, position: int) -> None:
        self._offloader = offloader
        self._position = position

    def put(self, tensor: Tensor) -> Handle | Tensor:
        """Send a tensor away if that is worth it, and return what `get` takes."""
        return self._offloader.passage_now(self._position).pack(tensor, is_made_here=True)

    def get(self, packed: Handle | Tensor) -> Tensor:
        """Return the tensor."""
        return unpack(packed)


@dataclass(slots=True, eq=False)
class Flight:
    """A tensor that is being copied.

    Attributes:
        parcel: the link's.
        tensor: it; nobody may write to it before the copy is done.
        version: autograd's count of writes to it when it was sent.
        made_in: the call of the region that made it; None if the region was given it.
    """

    parcel: Any
    tensor: Tensor
    version: int
    made_in: Passage | None


@dataclass(slots=True, frozen=True)
class Gone:
    """What is left of a tensor that nobody needs any more.

    Attributes:
        parcel: the link's.
        num_bytes: of the tensor.
        begun_in: the process that the engine had begun in.
        key: it was known by that.
        storage: keeps the key from being given to another tensor.
    """

    parcel: Any
    num_bytes: int
    begun_in: int
    key: Key
    storage: StorageWeakRef
