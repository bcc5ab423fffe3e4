"""Recompute a layer but for what is costly: outputs of matrix products and attention are kept, the rest is made again.

Costs the memory of what is kept, and next to no work. What is kept is chosen operator by operator while the layer
runs (`saves`), held with the graph (`kept`), and handed out in the order of the forward when backward recomputes the
layer (`modes`); that all of it occurs is checked in the first step (`proof`). Knows no policy and no model.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
which recomputes attention alone; torch's `create_selective_checkpoint_contexts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle

from hf_ckpt.regions.call import Function, take_apart, tensors_of
from hf_ckpt.regions.selective.kept import Keeper, KeptOutputs
from hf_ckpt.regions.selective.modes import HandingOut, Keeping, keeping
from hf_ckpt.regions.selective.operators import Role, kind_of
from hf_ckpt.regions.selective.proof import Proof
from hf_ckpt.regions.selective.saves import Saves, check_saves

__all__ = ["Keeper", "Saves", "Selection", "check_saves", "recompute_selectively"]


class Selection:
    """What the selective layers of one stack share; lives on them, and is copied with them.

    Args:
        path: of the stack, for messages.
    """

    def __init__(self, path: str = "") -> None:
        self.proof = Proof(path)
        self._running: Keeping | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model made while a layer runs must not share the running call.
        return {"proof": self.proof, "_running": None}

    def hooks(self, layer: nn.Module, saves: Saves) -> list[RemovableHandle]:
        """Place what tells which modules run, where modules are named; return the handles, to be removed.

        Args:
            layer: whose modules are meant.
            saves: names them.
        """
        handles: list[RemovableHandle] = []
        for module, globs in saves.matching(layer):
            handles.append(module.register_forward_pre_hook(partial(_enter, self, globs), prepend=True))
            handles.append(module.register_forward_hook(partial(_leave, self, globs), always_call=True))
        return handles

    @contextmanager
    def running(self, mode: Keeping) -> Iterator[None]:
        """Let modules tell `mode` that they run."""
        found, self._running = self._running, mode
        try:
            yield
        finally:
            self._running = found

    def enter(self, globs: tuple[str, ...]) -> None:
        """A module that matches begins."""
        if self._running is not None:
            self._running.modules.extend(globs)

    def leave(self, globs: tuple[str, ...]) -> None:
        """It ends."""
        if self._running is not None:
            for glob in globs:
                self._running.modules.remove(glob)


# A compiler would note that they run when all of the graph has.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def _enter(selection: Selection, globs: tuple[str, ...], module: nn.Module, args: Any) -> None:
    """Forward pre-hook of a module that was named."""
    selection.enter(globs)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def _leave(selection: Selection, globs: tuple[str, ...], module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a module that was named."""
    selection.leave(globs)


def recompute_selectively(
    selection: Selection, saves: Saves, keeper: Keeper | None, function: Function, *args: Any
) -> Any:
    """Run `function(*args)`, and recompute it in backward but for what `saves` keeps.

    Gradients do not change by a bit: random numbers are drawn again from the same state, and what is kept is what the
    forward computed. What the region computes after the last tensor that its backward needs is not kept.

    Args:
        selection: what the layers of the stack share.
        saves: what is kept.
        keeper: holds it meanwhile; None to leave it where it is.
        function: a callable, or a `partial` that carries the keyword arguments, as the seam of transformers hands it.
        args: positional arguments.

    Raises:
        UnsupportedError: what the layer returned and keeps was written to, or the layer does not repeat itself.
        PlanMismatchError: something that `saves` names occurs in no layer of the stack; in the first backward.
    """
    if torch.compiler.is_compiling():
        if selection.proof.allows_compiling and keeper is None and not saves.globs:
            return _recompute_compiled(saves, function, *args)
        return _recompute_uncompiled(selection, saves, keeper, function, *args)
    return _recompute_eagerly(selection, saves, keeper, function, *args)


def _recompute_compiled(saves: Saves, function: Function, *args: Any) -> Any:
    """See `recompute_selectively`. The compiler chooses anew what it keeps of the graph, by what operators ask for."""
    contexts = partial(create_selective_checkpoint_contexts, partial(_compiled_policy, saves))
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def _recompute_uncompiled(*args: Any) -> Any:
    """See `recompute_selectively`.

    So runs a stack that was not recomputed yet (what there is to be kept is not known, nor whether it is written to).
    So runs for good one that writes into what it keeps (torch's modes give wrong gradients there, compiled too), that
    keeps it elsewhere, or whose modules are named (a graph has operators only).
    """
    return _recompute_eagerly(*args)


def _recompute_eagerly(
    selection: Selection, saves: Saves, keeper: Keeper | None, function: Function, *args: Any
) -> Any:
    """See `recompute_selectively`."""
    call, tensors = take_apart(function, args)
    kept = KeptOutputs(keeper, selection.proof)
    contexts = partial(_contexts, selection, saves, kept)
    returned = checkpoint(call.run, *tensors, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)
    kept.watch(tensors_of(returned))
    return returned


def _contexts(
    selection: Selection, saves: Saves, kept: KeptOutputs
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    selection.proof.begin(saves)
    mode = Keeping(kept, saves, selection.proof)
    return keeping(mode, kept, selection.running(mode)), HandingOut(kept, saves, selection.proof)


def _compiled_policy(saves: Saves, context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Choose what is kept of a layer that is compiled."""
    kind = kind_of(function)
    is_kept = kind.returns_new and (kind.role is Role.ROUTING or bool(saves.for_operator(kind, args)))
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
