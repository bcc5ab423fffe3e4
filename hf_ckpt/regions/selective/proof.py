"""Whether all that a plan wants kept was there to be kept: known when the first recomputation begins."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from hf_ckpt.errors import PlanMismatchError, did_you_mean
from hf_ckpt.regions.selective import kernels
from hf_ckpt.regions.selective.operators import Kind, Number, Role
from hf_ckpt.regions.selective.saves import SELECTIVE, SELECTIVE_ATTENTION, Saves


class Proof:
    """What occurred in the layers of a stack, until its first recomputation. One for each stack.

    Args:
        path: of the stack, for messages.

    Attributes:
        is_complete: whether all occurred.
        has_writes: whether something wrote into a kept output.
        rewritten: operators, with the number of the call in their layer, whose output is written to unseen.
        needs_modes: whether something occurred that only a dispatch mode is given.
        has_intercepted: whether the stack was recomputed once with what kernels of our own kept. They are given what
            operators do inside of themselves, which a mode is not: writes are looked for anew.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._start()

    def _start(self) -> None:
        self.has_writes = False
        self.rewritten: set[Number] = set()
        self.needs_modes = False
        self.has_intercepted = False
        self._to_serve: set[Any] = set()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model proves itself.
        return {"_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path = state["_path"]
        self._start()

    @property
    def allows_compiling(self) -> bool:
        """Whether a graph of the layers can be compiled and be exact: known once they were recomputed."""
        return self.is_complete and not self.has_writes

    def wrote(self) -> None:
        """A layer wrote into an output that it keeps."""
        self.has_writes = True

    def rewrote(self, number: Number) -> None:
        """Something that no operator told of wrote into the output of this call."""
        self.has_writes = True
        self.rewritten.add(number)

    def _forget(self) -> None:
        self.is_complete = False
        self._occurred: defaultdict[Saves, set[str]] = defaultdict(set)
        self._seen: dict[str, Role] = {}

    def begin(self, saves: Saves) -> None:
        """A layer runs that is to keep this."""
        if not self.is_complete:
            self._occurred[saves] |= set()

    def occurred(self, saves: Saves, asked: tuple[str, ...], is_attention: bool) -> None:
        """Something that was asked for has been kept.

        Args:
            saves: that asked for it.
            asked: what of them.
            is_attention: whether it was found by following probabilities, operator by operator.
        """
        if asked and not self.is_complete:
            self._occurred[saves].update(asked)
            self.needs_modes |= is_attention

    def seen(self, kind: Kind, may_keep: bool) -> None:
        """An operator ran."""
        if self.is_complete:
            return
        if kind.returns_new:
            self._seen[kind.packet] = kind.role
        if kind.is_higher_order:
            self.needs_modes = True
        elif may_keep:
            self._to_serve.add(kind.function)

    def intercepts(self) -> bool:
        """Whether the stack's regions are to run with kernels of our own; makes those that are missing."""
        # A mode of somebody else's is to see what it always saw.
        if (
            not self.is_complete
            or self.needs_modes
            or torch._C._len_torch_dispatch_stack()
            or not kernels.are_possible()
        ):
            return False
        if self._to_serve or not self.has_intercepted:
            kernels.serve(self._to_serve)
            self._to_serve = set()
        return True

    def recomputed(self, *, intercepts: bool) -> None:
        """A recomputation begins.

        Raises:
            PlanMismatchError: see `check`.
        """
        self.check()
        self.has_intercepted |= intercepts

    def check(self) -> None:
        """Raise if something that was asked for never occurred. Every layer has run by now.

        Raises:
            PlanMismatchError: names it, and what did occur.
        """
        if self.is_complete:
            return
        for saves, occurred in self._occurred.items():
            for asked in saves.asked:
                if asked not in occurred:
                    raise PlanMismatchError(self._message(saves, asked))
        self._forget()
        self.is_complete = True

    def _message(self, saves: Saves, asked: str) -> str:
        where = f"the layers of {self._path}" if self._path else "the layers"
        if asked == SELECTIVE:
            return (
                f'Mode "selective" keeps matrix products and attention, but none ran in {where}: all would be '
                f'recomputed. Use mode "full" for them, or name operators under save. What ran: {self._ran()}.'
            )
        if asked == SELECTIVE_ATTENTION:
            return (
                f'Mode "selective_attention" keeps what the attention kernel returns, but no attention ran in {where} '
                'that could be told: all would be recomputed. Use mode "selective" or "full" for them, or name '
                f"operators under save. Products that ran: {self._ran(Role.PRODUCT)}."
            )
        if asked in saves.globs:
            return (
                f'save: "{asked}" is to be kept, but no operator of that name ran in {where} in the first step, and no '
                "matrix product or attention kernel in a module that matches it: it would be recomputed. Products and "
                f"kernels that ran: {self._ran(Role.PRODUCT, Role.ATTENTION)}.{self._nearest(asked)}"
            )
        return (
            f'save: "{asked}" is to be kept, but that operator did not run in {where} in the first step: it would be '
            "recomputed. Another device or attention implementation dispatches another one. Products and kernels that "
            f"ran: {self._ran(Role.PRODUCT, Role.ATTENTION)}.{self._nearest(asked)}"
        )

    def _nearest(self, asked: str) -> str:
        products = [name for name, role in self._seen.items() if role is not Role.CHEAP]
        return did_you_mean(asked, products) or did_you_mean(asked, self._seen)

    def _ran(self, *roles: Role) -> str:
        names = sorted(name for name, role in self._seen.items() if not roles or role in roles)
        return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "none"
