"""The two dispatch modes of a selective region: one keeps outputs while it runs, the other hands them out again.

What `create_selective_checkpoint_contexts` of torch 2.13 makes, with what that lacks: a copy from before a write into
a kept output, the random state behind a kept operator that draws, nothing held that recomputation never comes to, and
outputs that another place holds meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ckpt.regions.selective.kept import NOT_KEPT, Calls, KeptOutputs
from hf_ckpt.regions.selective.operators import Kind, Role, kind_of
from hf_ckpt.regions.selective.probabilities import Probabilities
from hf_ckpt.regions.selective.proof import Proof
from hf_ckpt.regions.selective.saves import SELECTIVE_ATTENTION, Saves, is_kept_in_modules


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # upstream
    """What both modes have in common."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled inside of a region stay compiled (flex attention is)."""
        return True


class Keeping(_Mode):
    """Runs operators, and keeps the outputs of some.

    Args:
        kept: what is kept.
        saves: says of which.
        proof: is told what occurs.

    Attributes:
        modules: globs that the modules which run now match, one entry for each module.
    """

    def __init__(self, kept: KeptOutputs, saves: Saves, proof: Proof) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # upstream
        self.modules: list[str] = []
        self._kept = kept
        self._saves = saves
        self._proof = proof
        self._calls = Calls()
        self._probabilities = Probabilities() if saves.preset == SELECTIVE_ATTENTION else None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(function)
        if kind.written:
            self._kept.before_write(kind.written_tensors(args, kwargs))
        output = function(*args, **kwargs)
        is_attention = self._probabilities is not None and self._probabilities.take(kind, args, output)
        if self._saves.may_keep(function):
            number = self._calls.number(function)
            why = self._reasons(kind, args, is_attention)
            if why or kind.role is Role.ROUTING:
                self._kept.keep(number, kind, args, kwargs, output)
            self._proof.occurred(self._saves, why)
        self._proof.seen(kind)
        return output

    def _reasons(self, kind: Kind, args: Any, is_attention: bool) -> tuple[str, ...]:
        why = self._saves.for_operator(kind, args)
        if self.modules and is_kept_in_modules(kind, args):
            why += tuple(self.modules)
        return (*why, SELECTIVE_ATTENTION) if is_attention else why


class HandingOut(_Mode):
    """Runs operators again, but for those whose outputs were kept.

    Args:
        kept: what was kept.
        saves: of the forward.
        proof: says whether all that was asked for has occurred.
    """

    def __init__(self, kept: KeptOutputs, saves: Saves, proof: Proof) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # upstream
        self._kept = kept
        self._saves = saves
        self._proof = proof
        self._calls = Calls()

    def __enter__(self) -> HandingOut:
        self._proof.check()
        # Entered once for each backward over the same graph.
        self._calls = Calls()
        super().__enter__()  # type: ignore[no-untyped-call]  # upstream
        return self

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._saves.may_keep(function):
            output = self._kept.take(self._calls.number(function), args)
            if output is not NOT_KEPT:
                return output
        return function(*args, **(kwargs or {}))


@contextmanager
def keeping(mode: Keeping, kept: KeptOutputs, opened: AbstractContextManager[None]) -> Iterator[None]:
    """Run a region's forward; at its end let go what recomputation does not need.

    Args:
        mode: keeps.
        kept: what.
        opened: says that the region runs.
    """
    with opened, _told_of_saved(kept.note_saved), mode:
        yield
    kept.finish()


@contextmanager
def _told_of_saved(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` whenever autograd saves a tensor in the block, and let it be saved as before.

    Only the innermost hooks are asked, and those are `checkpoint`'s: put between, not on top.
    """
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
    torch._C._autograd._push_saved_tensors_default_hooks(partial(_pack, note, pack), unpack)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _pack(note: Callable[[], None], pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    note()
    return pack(tensor)
