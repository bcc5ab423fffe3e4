"""Finds the output of attention that is computed step by step: the product of its probabilities and the values.

So it is with eager attention, and with `scaled_dot_product_attention` where no kernel fits (dropout on a CPU). There
are no statistics then, and recomputation makes the scores and the probabilities again, up to that last product.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from hf_ckpt.regions.selective.operators import Kind, Role, storages_of, tensors_in

_SOFTMAX = frozenset({"aten._softmax", "aten._safe_softmax"})
_PAD = "aten.constant_pad_nd"


class Probabilities:
    """Follows what a softmax returned, through casts and dropout, to the product that takes it."""

    def __init__(self) -> None:
        # By the address of a storage, which another may get once it is gone.
        self._followed: dict[int, tuple[weakref.ref[Any], int]] = {}

    def take(self, kind: Kind, args: Any, output: Any) -> bool:
        """Look at an operator that has run; tell whether it multiplied probabilities with something.

        Args:
            kind: of the operator.
            args: what it was given.
            output: what it returned.
        """
        if kind.packet in _SOFTMAX:
            self._follow(output)
        elif not self._followed:
            return False
        elif kind.role is Role.PRODUCT:
            if any(self._is_followed(tensor) for tensor in tensors_in(args)):
                self._followed.clear()
                return True
        elif kind.returns_new:
            # A cast, dropout, a mask. Views need nothing: they lie in the same storage.
            self._hand_on(args, output, is_padded=kind.packet == _PAD)
        return False

    def _hand_on(self, args: Any, output: Any, *, is_padded: bool) -> None:
        first = next(tensors_in(output), None)
        # What is broadcast is something else: the weight of an expert times what it returned. Local attention pads its
        # windows to a band.
        if (
            first is not None
            and first.is_floating_point()
            and any(
                (is_padded or tensor.numel() == first.numel()) and self._is_followed(tensor)
                for tensor in tensors_in(args)
            )
        ):
            self._follow(first)

    def _follow(self, output: Any) -> None:
        for tensor in tensors_in(output):
            for storage in storages_of(tensor):
                self._followed[storage._cdata] = (weakref.ref(storage), tensor.numel())

    def _is_followed(self, tensor: Tensor) -> bool:
        return any(
            storage._cdata in self._followed and self._followed[storage._cdata][0]() is not None
            for storage in storages_of(tensor)
        )
