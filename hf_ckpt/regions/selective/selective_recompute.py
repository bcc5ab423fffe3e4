"""Recompute a layer but for what is costly: outputs of matrix products and attention are kept, the rest is made again.

Costs the memory of what is kept, and next to no work. Operator by operator, while the layer runs, `save_rules` says
what is kept. `kept_outputs` holds it with the graph, and checks in the first step that all of it occurs. When backward
recomputes the layer, it is handed out in the order of the forward. Knows no policy and no model.

How operators get here is another matter (`dispatch`): through a dispatch mode, which is given all of them, or through
kernels of our own in torch's dispatcher, which are given those that matter and cost a tenth.

`create_selective_checkpoint_contexts` of torch 2.13 does the like. It lacks a look at what was kept and at what its
operator is fed, the random state behind a kept operator that draws, outputs that another place holds meanwhile, and
sums of adapted layers in the place of their products; and it holds what recomputation never comes to.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
which recomputes attention alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle

from hf_ckpt.regions.compiled import recompute_compiled, run_uncompiled
from hf_ckpt.regions.execution_state import AllRecomputed, Function, refuse_transforms
from hf_ckpt.regions.recompute import run_checkpointed, run_watched, split_call
from hf_ckpt.regions.saved_tensors import Contexts
from hf_ckpt.regions.selective import adapted_layers, dispatch
from hf_ckpt.regions.selective.adapted_layers import watch_adapted
from hf_ckpt.regions.selective.dispatch import ACTIVE, DispatchMode, KernelInterception
from hf_ckpt.regions.selective.kept_outputs import (
    ADAPTED_LAYER,
    NOT_KEPT,
    CallCounter,
    Keeper,
    KeptOutputs,
    SaveCoverage,
)
from hf_ckpt.regions.selective.save_rules import (
    SELECTIVE,
    CallId,
    OperatorKind,
    OperatorRole,
    ProbabilityTracker,
    SaveRules,
    is_by_modules,
    is_kept_in_modules,
    may_keep,
    operator_kind,
)
from hf_ckpt.upstream.torch import DelayedError

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import CallProof, RegionProof


class SelectiveStack:
    """What the selective layers of one stack share; lives on them, and is copied with them. `path` is for messages."""

    def __init__(self, path: str = "") -> None:
        self.coverage = SaveCoverage(path)

    def hooks(self, layer: nn.Module, saves: SaveRules) -> list[RemovableHandle]:
        """Place hooks that say which named and adapted modules run; return their handles."""
        handles: list[RemovableHandle] = []
        for module, globs in saves.matching(layer):
            handles.append(module.register_forward_pre_hook(partial(_enter, globs), prepend=True))
            handles.append(module.register_forward_hook(partial(_leave, globs), always_call=True))
        # Inside of the hooks of named modules.
        handles.extend(watch_adapted(layer))
        return handles


# A compiler would note that they run when all of the graph has.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def _enter(globs: tuple[str, ...], module: nn.Module, args: Any) -> None:
    """Forward pre-hook of a module that was named."""
    run = ACTIVE.run
    if run is not None:
        run.modules.extend(globs)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def _leave(globs: tuple[str, ...], module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a module that was named."""
    run = ACTIVE.run
    if run is not None:
        for glob in globs:
            run.modules.remove(glob)


def recompute_selectively(
    selection: SelectiveStack,
    saves: SaveRules,
    keeper: Keeper | None,
    function: Function,
    *args: Any,
    proof: RegionProof | None = None,
) -> Any:
    """Run `function(*args)`, and recompute it in backward but for what `saves` keeps.

    Gradients do not change by a bit: random numbers are drawn again from the same state, and what is kept is what the
    forward computed. What the region computes after the last tensor that its backward needs is not kept.

    `keeper` holds the outputs meanwhile; None leaves them where they are. `function` is a callable, or a `partial` that
    carries the keyword arguments, as the seam of transformers hands it. `proof`: see `recompute`.

    Raises:
        UnsupportedError: what is kept was written to, or the layer does not repeat itself.
        PlanMismatchError: something that `saves` names occurs in no layer of the stack; in the first backward.
    """
    if torch.compiler.is_compiling():
        eagerly = partial(_recompute_eagerly, selection, saves, keeper, None)
        if selection.coverage.allows_compiling and keeper is None and not saves.globs:
            # The compiler chooses again what it keeps of the graph, by the operators that `saves` names.
            contexts = partial(create_selective_checkpoint_contexts, partial(_compiled_policy, saves))
            return recompute_compiled(eagerly, function, *args, context_fn=contexts)
        # A stack that was not recomputed yet: it is not known what there is to be kept, nor whether it is written to.
        # And for good a stack that writes into what it keeps (torch's modes give wrong gradients there, compiled too),
        # that keeps it elsewhere, or whose modules are named (a graph has operators only).
        return run_uncompiled(eagerly, function, *args)
    return _recompute_eagerly(selection, saves, keeper, proof, function, *args)


def _recompute_eagerly(
    selection: SelectiveStack,
    saves: SaveRules,
    keeper: Keeper | None,
    values: RegionProof | None,
    function: Function,
    *args: Any,
) -> Any:
    refuse_transforms()
    call, tensors = split_call(function, args)
    coverage = selection.coverage
    coverage.begin_layer(saves)
    uses_kernels = coverage.uses_kernels()
    if values is not None and uses_kernels and not coverage.has_recomputed_with_kernels:
        # So far a dispatch mode was given the operators.
        values.check_again()
    found = call.state.setting()
    setting = None if found is None else (uses_kernels, found, *((each.shape, each.dtype) for each in tensors))

    def run(call_proof: CallProof | None) -> Any:
        kept = KeptOutputs(keeper, coverage, call.state, setting, call_proof, values)
        contexts = _contexts(coverage, saves, kept, uses_kernels)
        return run_checkpointed(call_proof, call, call.run, tensors, kept.saved, contexts)

    return run_watched(values, function, call, tensors, run)


def _contexts(coverage: SaveCoverage, saves: SaveRules, kept: KeptOutputs, uses_kernels: bool) -> Contexts:
    drive: Callable[..., AbstractContextManager[Any]] = KernelInterception
    if not uses_kernels:
        # A mode can skip no operator until all is proved, and where probabilities are followed.
        ignores = saves.ignores if coverage.is_complete and not saves.attention else lambda function: False
        drive = partial(DispatchMode, ignores=ignores)
    forward = drive(partial(ForwardRun, kept, saves, coverage))
    return forward, drive(partial(_recomputation, coverage, saves, kept, uses_kernels))


def _recomputation(coverage: SaveCoverage, saves: SaveRules, kept: KeptOutputs, uses_kernels: bool) -> RecomputationRun:
    coverage.begin_recomputation(uses_kernels=uses_kernels)
    return RecomputationRun(kept, saves)


def _compiled_policy(saves: SaveRules, context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Choose what is kept of a layer that is compiled."""
    kind = operator_kind(function)
    is_kept = kind.returns_new and (kind.role is OperatorRole.ROUTING or bool(saves.for_operator(kind, args)))
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Run:
    """A run of a region. See `dispatch.RegionRun`."""

    def __init__(self, kept: KeptOutputs, saves: SaveRules) -> None:
        self.modules: list[str] = []
        self.outer = ACTIVE.run
        self._kept = kept
        self._may_keep = may_keep(saves)
        self._calls = CallCounter()
        # The adapted layers that run; None for those whose operators are kept, not their sum.
        self._entered: list[_Sum | None] = []

    def _sum_around(self, kind: OperatorKind, args: Any) -> _Sum | None:
        """Return the adapted layer whose sum takes the place of what a product returns."""
        whole = self._entered[-1] if self._entered else None
        if whole is None or kind.role is not OperatorRole.PRODUCT or adapted_layers.is_first(kind, args, whole.rank):
            return None
        return whole


@dataclass(frozen=True, slots=True)
class _Sum:
    """An adapted layer that is taken as a whole, while its forward runs."""

    number: CallId
    rank: int
    outer: int = 0
    """Columns of what it returns."""
    is_handed_out: bool = False
    """In recomputation: its kept sum stands for what it computes."""
    paused: list[dispatch.InterceptionState] = field(default_factory=list)
    """In forward: from before the rest of the layer, to be restored after it."""


class ForwardRun(_Run):
    """The forward of a region: runs operators, and keeps the outputs of some."""

    def __init__(self, kept: KeptOutputs, saves: SaveRules, coverage: SaveCoverage) -> None:
        super().__init__(kept, saves)
        self._saves = saves
        self._coverage = coverage
        self._proves = not coverage.is_complete
        self._probabilities = ProbabilityTracker() if saves.attention else None

    def run(self, kind: OperatorKind, args: Any, kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """See `RegionRun`."""
        output = call(*args, **kwargs)
        is_attention = self._probabilities is not None and self._probabilities.take(kind, args, output)
        if self._may_keep[kind]:
            whole = self._sum_around(kind, args)
            reasons = () if whole and not self._proves else self._reasons(kind, args, is_attention)
            if whole is None:
                number = self._calls.number(kind)
                if kind.role is OperatorRole.ROUTING or reasons:
                    self._kept.keep(number, kind, args, kwargs, output)
                if self._entered and self._entered[-1] is not None:
                    # The first product of an adapter: nothing that is kept follows in its layer.
                    self._entered[-1].paused.append(dispatch.pause_interception())
            if self._proves:
                self._coverage.note_kept(self._saves, reasons, is_attention)
        if self._proves:
            self._coverage.note_operator(kind, self._may_keep[kind])
        return output

    def _reasons(self, kind: OperatorKind, args: Any, is_attention: bool) -> tuple[str, ...]:
        reasons = self._saves.for_operator(kind, args)
        if self.modules and is_kept_in_modules(kind, args):
            reasons += tuple(self.modules)
        return (*reasons, self._saves.attention) if is_attention else reasons

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """See `RegionRun`."""
        number = self._calls.number(ADAPTED_LAYER)
        is_kept = self._saves.preset == SELECTIVE or (bool(self.modules) and is_by_modules(self._saves))
        rank = adapted_layers.rank_of_sum(module, args) if is_kept and adapted_layers.is_seen_as_it_is(module) else 0
        self._entered.append(_Sum(number, rank) if rank else None)

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """See `RegionRun`."""
        whole = self._entered.pop()
        if whole is not None:
            for state in whole.paused[:1]:
                dispatch.restore_interception(state)
            self._kept.adapted[whole.number] = whole.rank, output.shape[-1], output.dtype, output.device
            self._kept.keep(whole.number, ADAPTED_LAYER, args, {}, output)

    def end(self, raised: type[BaseException] | None) -> None:
        """See `RegionRun`."""
        if raised is None:
            self._kept.finish()


class RecomputationRun(_Run):
    """A recomputation of a region: runs operators again, but for those whose outputs were kept."""

    def run(self, kind: OperatorKind, args: Any, kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """See `RegionRun`."""
        if not self._may_keep[kind]:
            return call(*args, **kwargs)
        if (whole := self._sum_around(kind, args)) is not None:
            if whole.is_handed_out:
                return adapted_layers.placeholder(kind, args, whole.outer)
            return self._kept.run_unneeded(whole.number, call, args, kwargs)
        output = self._kept.take(self._calls.number(kind), args)
        return call(*args, **kwargs) if output is NOT_KEPT else output

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """See `RegionRun`."""
        number = self._calls.number(ADAPTED_LAYER)
        whole = None
        if number in self._kept.adapted:
            rank, outer, *_ = self._kept.adapted[number]
            # It is a sum as in the forward, whose hooks and attributes the modules have now. Where it was handed out
            # before, it runs for real.
            whole = _Sum(number, rank, outer, self._kept.is_kept(number))
        self._entered.append(whole)

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> Tensor | None:
        """See `RegionRun`."""
        whole = self._entered.pop()
        if whole is None or not whole.is_handed_out or not output.is_meta:
            # Not meta: its operators ran past us, as where somebody traces; then they ran for real.
            return None
        kept = self._kept.take(whole.number, args)
        if kept is NOT_KEPT:
            # Backward needs nothing from here on: what is computed with it has no use.
            *_, dtype, device = self._kept.adapted[whole.number]
            kept = torch.zeros(output.shape, dtype=dtype, device=device)
        found: Tensor = kept
        if not output.requires_grad:
            return found
        # With a node behind it, as in forward: a leaf could not be written into. Nobody goes back through that node.
        again: Tensor = DelayedError(b"this graph is of a recomputation", 1)(found.requires_grad_())
        return again

    def end(self, raised: type[BaseException] | None) -> None:
        """See `RegionRun`."""
        # Torch stops it by an exception once it has what backward needs.
        if raised is None or issubclass(raised, AllRecomputed):
            self._kept.check()
