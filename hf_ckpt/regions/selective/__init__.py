"""Recompute a layer but for what is costly: outputs of matrix products and attention are kept, the rest is made again.

Costs the memory of what is kept, and next to no work. What is kept is chosen operator by operator while the layer
runs (`saves`), held with the graph (`kept`), and handed out in the order of the forward when backward recomputes the
layer (`modes`); that all of it occurs is checked in the first step (`proof`). Knows no policy and no model.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
which recomputes attention alone; torch's `create_selective_checkpoint_contexts`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle

from hf_ckpt.regions.call import Function, take_apart, tensors_of
from hf_ckpt.regions.recompute import run_proven
from hf_ckpt.regions.selective.kept import Keeper, KeptOutputs
from hf_ckpt.regions.selective.linears import watch_linears
from hf_ckpt.regions.selective.modes import DispatchMode, Forward, HandingOut, Interception, Keeping
from hf_ckpt.regions.selective.operators import Role, kind_of
from hf_ckpt.regions.selective.proof import Proof
from hf_ckpt.regions.selective.running import RUNNING
from hf_ckpt.regions.selective.saves import SELECTIVE_ATTENTION, Saves, check_saves
from hf_ckpt.regions.transforms import refuse_transforms

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import RegionProof

__all__ = ["Keeper", "Saves", "Selection", "check_saves", "recompute_selectively"]


class Selection:
    """What the selective layers of one stack share; lives on them, and is copied with them.

    Args:
        path: of the stack, for messages.
    """

    def __init__(self, path: str = "") -> None:
        self.proof = Proof(path)

    def hooks(self, layer: nn.Module, saves: Saves) -> list[RemovableHandle]:
        """Place what tells which modules run, where modules are named or adapted; return the handles, to be removed.

        Args:
            layer: whose modules are meant.
            saves: names them.
        """
        handles: list[RemovableHandle] = []
        for module, globs in saves.matching(layer):
            handles.append(module.register_forward_pre_hook(partial(_enter, globs), prepend=True))
            handles.append(module.register_forward_hook(partial(_leave, globs), always_call=True))
        # Inside of these, which tell what is named.
        handles.extend(watch_linears(layer))
        return handles


# A compiler would note that they run when all of the graph has.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def _enter(globs: tuple[str, ...], module: nn.Module, args: Any) -> None:
    """Forward pre-hook of a module that was named."""
    run = RUNNING.run
    if run is not None:
        run.modules.extend(globs)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def _leave(globs: tuple[str, ...], module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a module that was named."""
    run = RUNNING.run
    if run is not None:
        for glob in globs:
            run.modules.remove(glob)


def recompute_selectively(
    selection: Selection,
    saves: Saves,
    keeper: Keeper | None,
    function: Function,
    *args: Any,
    proof: RegionProof | None = None,
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
        proof: see `recompute`.

    Raises:
        UnsupportedError: what the layer returned and keeps was written to, or the layer does not repeat itself.
        PlanMismatchError: something that `saves` names occurs in no layer of the stack; in the first backward.
    """
    if torch.compiler.is_compiling():
        if selection.proof.allows_compiling and keeper is None and not saves.globs:
            return _recompute_compiled(saves, function, *args)
        return _recompute_uncompiled(selection, saves, keeper, None, function, *args)
    return _recompute_eagerly(selection, saves, keeper, proof, function, *args)


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
    selection: Selection,
    saves: Saves,
    keeper: Keeper | None,
    values: RegionProof | None,
    function: Function,
    *args: Any,
) -> Any:
    """See `recompute_selectively`."""
    refuse_transforms()
    call, tensors = take_apart(function, args)
    proof = selection.proof
    proof.begin(saves)
    intercepts = proof.intercepts()
    if values is not None and intercepts and not proof.has_intercepted:
        # So far a dispatch mode was given the operators.
        values.again()
    looked = None if values is None else values.watch(function, tensors)
    is_checked = proof.has_intercepted if intercepts else proof.is_complete
    kept = KeptOutputs(keeper, proof, looked, checks_writes=not is_checked, is_told_of_writes=not intercepts)
    contexts = partial(_contexts, proof, saves, kept, intercepts)
    returned = run_proven(looked, call.run, tensors, context_fn=contexts)
    kept.watch(tensors_of(returned))
    if looked is not None:
        looked.look_at_graph(function, args, returned)
    return returned


def _contexts(
    proof: Proof, saves: Saves, kept: KeptOutputs, intercepts: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    drive = Interception if intercepts else partial(DispatchMode, ignores=_ignores(proof, saves))
    forward = Forward(kept, drive(partial(Keeping, kept, saves, proof)))
    return forward, drive(partial(_recomputation, proof, saves, kept, intercepts))


def _recomputation(proof: Proof, saves: Saves, kept: KeptOutputs, intercepts: bool) -> HandingOut:
    proof.recomputed(intercepts=intercepts)
    return HandingOut(kept, saves)


def _ignores(proof: Proof, saves: Saves) -> Callable[[Any], bool]:
    """Return what tells which operators a mode need not look at."""
    # All of them until all is proved, and where probabilities are followed.
    return saves.ignores if proof.is_complete and saves.preset != SELECTIVE_ATTENTION else _sees_all


def _sees_all(function: Any) -> bool:
    return False


def _compiled_policy(saves: Saves, context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Choose what is kept of a layer that is compiled."""
    kind = kind_of(function)
    is_kept = kind.returns_new and (kind.role is Role.ROUTING or bool(saves.for_operator(kind, args)))
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
