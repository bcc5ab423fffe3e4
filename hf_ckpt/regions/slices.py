"""How the tensors of one call are cut along the sequence, and how what the slices return is put together again.

Knows shapes only: which dimension holds the positions, which arguments share them, where a slice's output belongs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.policy.modifiers import Tiles

_MOST_TILES = 16
"""What a slice needs is then a small part of what the rest of a layer needs; more slices save next to nothing."""
_LEAST_TOKENS = 2048
"""Matrix products over fewer tokens than this no longer fill a device."""


@dataclass(frozen=True)
class Cut:
    """How tensors that share their leading dimensions are cut.

    Args:
        leading: sizes of the dimensions up to the one that is cut: [B, S], or [T] where the batch is flattened.
        bounds: start and length of each slice.
    """

    leading: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, hidden: Tensor, tiles: Tiles) -> Cut:
        """Choose for a call.

        `auto` takes slices of 2,048 tokens and more, at most 16: fewer tokens would not fill a device, and more slices
        would free next to nothing beside what attention needs.

        Args:
            hidden: [B, S, H], [T, H], or more dimensions, of which the longest is then cut.
            tiles: how many slices; no more than there are positions.
        """
        sizes = tuple(hidden.shape[:-1])
        dim = len(sizes) - 1 if len(sizes) <= 2 else max(range(len(sizes)), key=sizes.__getitem__)
        leading = sizes[: dim + 1]
        wished = min(_MOST_TILES, math.prod(leading) // _LEAST_TOKENS) if tiles == "auto" else tiles
        return cls(leading, _bounds(leading[dim], int(wished)))

    @property
    def dim(self) -> int:
        """The dimension that is cut."""
        return len(self.leading) - 1

    def shares(self, tensor: Tensor) -> bool:
        """Whether a tensor has a value for each position."""
        return tuple(tensor.shape[: len(self.leading)]) == self.leading

    def piece(self, tensor: Tensor, start: int, length: int) -> Tensor:
        """Return some positions of a tensor that `shares` them: in one piece, as modules that flatten them need it."""
        # A view wherever the slice is in one piece already, as it is for one row.
        return tensor.narrow(self.dim, start, length).contiguous()

    def leading_of(self, length: int) -> tuple[int, ...]:
        """Return the leading dimensions of a slice."""
        return (*self.leading[:-1], length)

    def as_leading(self, output: Tensor, length: int) -> Tensor:
        """Return what a slice returned with the leading dimensions apart; as it is where they cannot be told."""
        leading = self.leading_of(length)
        if tuple(output.shape[: len(leading)]) != leading and output.dim() and output.shape[0] == math.prod(leading):
            return output.reshape(*leading, *output.shape[1:])
        return output


def _bounds(num_positions: int, tiles: int) -> tuple[tuple[int, int], ...]:
    """Return start and length of slices that differ by at most one position."""
    tiles = max(1, min(tiles, num_positions))
    length, longer = divmod(num_positions, tiles)
    lengths = [length + (number < longer) for number in range(tiles)]
    starts = [sum(lengths[:number]) for number in range(tiles)]
    return tuple(zip(starts, lengths, strict=True))


def arguments_to_cut(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], tiles: Tiles
) -> tuple[Cut, list[int | str]] | None:
    """Return how to cut a call and the places of the arguments that are cut; None if it can only run whole.

    The first tensor is taken for the hidden states. Any other one must have a value for each position, or be a single
    number.

    Args:
        module: that is called.
        args: positional arguments.
        kwargs: keyword arguments.
        tiles: how many slices.
    """
    arguments: dict[int | str, Any] = {}
    arguments.update(enumerate(args))
    arguments.update(kwargs)
    tensors = {place: value for place, value in arguments.items() if isinstance(value, Tensor)}
    hidden = next(iter(tensors.values()), None)
    if hidden is None or not hidden.is_floating_point() or hidden.dim() < 2 or not hidden.numel():
        return None
    if any(_holds_tensors(value) for value in arguments.values()) or not _works_on_last_dim(module, hidden):
        return None
    cut = Cut.of(hidden, tiles)
    places = [place for place, tensor in tensors.items() if tensor.dim()]
    return (cut, places) if all(cut.shares(tensors[place]) for place in places) else None


def _holds_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(item, Tensor) or _holds_tensors(item) for item in values)


def _works_on_last_dim(module: nn.Module, hidden: Tensor) -> bool:
    """Whether a vector of weights is one for each feature, and not one for each head and feature."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or weight.numel() == 1:
        return True
    return hidden.dim() <= 3 or weight.numel() == hidden.shape[-1]


class Joined:
    """Takes what the slices of a call return, into tensors that are made once.

    Args:
        cut: how the call is cut.
        module: that is called, for messages.
    """

    def __init__(self, cut: Cut, module: nn.Module) -> None:
        self._cut = cut
        self._module = module
        self._kind: type = Tensor
        self._wholes: list[Tensor | None] = []
        self._is_flat: list[bool] = []

    def put(self, returned: Any, start: int, length: int) -> None:
        """Copy what a slice returned into its place."""
        values = outputs_of(returned)
        if not self._wholes:
            self._kind = type(returned)
            self._is_flat = [value is not None and self._is_flattened(value, length) for value in values]
            self._wholes = [
                None if value is None else self._whole(value, is_flat)
                for value, is_flat in zip(values, self._is_flat, strict=True)
            ]
        for value, whole, is_flat in zip(values, self._wholes, self._is_flat, strict=True):
            if value is not None and whole is not None:
                place = self._apart(whole, is_flat).narrow(self._cut.dim, start, length)
                place.copy_(value.detach().reshape(place.shape))

    def take(self) -> tuple[Tensor | None, ...]:
        """Return the outputs of the call; they are not kept."""
        wholes, self._wholes = self._wholes, []
        return tuple(wholes)

    def as_returned(self, outputs: Sequence[Tensor | None]) -> Any:
        """Return the outputs as the module returns them: alone, in a tuple or in a list."""
        return self._kind(outputs) if self._kind in (tuple, list) else outputs[0]

    def parts(self, wholes: Sequence[Tensor | None], start: int, length: int) -> list[Tensor | None]:
        """Return what belongs to one slice of tensors that are shaped as the outputs of the call: their gradients.

        Args:
            wholes: they.
            start: of the slice.
            length: of the slice.
        """
        return [
            None if whole is None else self._part(whole, is_flat, start, length)
            for whole, is_flat in zip(wholes, self._is_flat, strict=True)
        ]

    def _part(self, whole: Tensor, is_flat: bool, start: int, length: int) -> Tensor:
        part = self._apart(whole, is_flat).narrow(self._cut.dim, start, length)
        return (part.flatten(0, self._cut.dim) if is_flat else part).contiguous()

    def _apart(self, whole: Tensor, is_flat: bool) -> Tensor:
        """Return a tensor with its leading dimensions apart."""
        return whole.reshape(*self._cut.leading, *whole.shape[1:]) if is_flat else whole

    def _is_flattened(self, value: Tensor, length: int) -> bool:
        leading = self._cut.leading_of(length)
        if tuple(value.shape[: len(leading)]) == leading:
            return False
        if value.dim() and value.shape[0] == math.prod(leading):
            return True
        raise UnsupportedError(
            f"{type(self._module).__name__} is to run in tiles, but for {math.prod(leading)} positions it returns a "
            f"tensor of shape {list(value.shape)}: something over all positions (an auxiliary loss, a statistic), "
            "which slices would change. Leave tiles out for this layer."
        )

    def _whole(self, value: Tensor, is_flat: bool) -> Tensor:
        leading = self._cut.leading
        return value.new_empty(
            (math.prod(leading), *value.shape[1:]) if is_flat else (*leading, *value.shape[len(leading) :])
        )


def outputs_of(returned: Any) -> list[Tensor | None]:
    """Return the tensors, or None in their place, in what a module returned.

    Raises:
        UnsupportedError: it is something else.
    """
    values = list(returned) if type(returned) in (tuple, list) else [returned]
    if all(value is None or isinstance(value, Tensor) for value in values):
        return values
    kinds = ", ".join(sorted({type(value).__name__ for value in values}))
    raise UnsupportedError(
        f"A module that is to run in tiles returns {kinds}, not tensors: what slices return cannot be put together. "
        "Leave tiles out for its layer."
    )
