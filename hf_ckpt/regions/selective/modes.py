"""What a selective region does at each of its operators: keep the output in forward, hand it out in recomputation.

What `create_selective_checkpoint_contexts` of torch 2.13 makes, with what that lacks: a copy from before a write into
a kept output, the random state behind a kept operator that draws, nothing held that recomputation never comes to,
outputs that another place holds meanwhile, and sums of adapted layers in the place of their products.

How operators get here is another matter: through a dispatch mode (`DispatchMode`), which is given all of them, or
through kernels of our own in torch's dispatcher (`kernels`), which are given those that matter and cost a tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ckpt.regions.selective import kernels, linears
from hf_ckpt.regions.selective.kept import MODULE, NOT_KEPT, Calls, KeptOutputs
from hf_ckpt.regions.selective.operators import Kind, Number, Role, kind_of
from hf_ckpt.regions.selective.probabilities import Probabilities
from hf_ckpt.regions.selective.proof import Proof
from hf_ckpt.regions.selective.running import RUNNING, Run
from hf_ckpt.regions.selective.saves import SELECTIVE, SELECTIVE_ATTENTION, Saves, is_kept_in_modules


class Keeping:
    """The forward of a region: runs operators, and keeps the outputs of some.

    Args:
        kept: what is kept.
        saves: says of which.
        proof: is told what occurs.
    """

    def __init__(self, kept: KeptOutputs, saves: Saves, proof: Proof) -> None:
        self.modules: list[str] = []
        self._kept = kept
        self._saves = saves
        self._is_by_modules = saves.is_by_modules
        self._may_keep = saves.may_keep()
        self._proof = proof
        self._proves = not proof.is_complete
        self._calls = Calls()
        self._probabilities = Probabilities() if saves.preset == SELECTIVE_ATTENTION else None
        # The linear and adapted layers that run; None for those that are not taken as a whole.
        self._entered: list[_Whole | None] = []
        self._num_whole = 0

    def run(self, kind: Kind, args: Any, kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """See `Region`."""
        if kind.written:
            self._kept.before_write(kind, args, kwargs)
        output = call(*args, **kwargs)
        is_attention = self._probabilities is not None and self._probabilities.take(kind, args, output)
        if self._may_keep[kind]:
            why = self._reasons(kind, args, is_attention)
            if self._num_whole == 0 or kind.role is not Role.PRODUCT:
                number = self._calls.number(kind)
                if why or kind.role is Role.ROUTING:
                    self._kept.keep(number, kind, args, kwargs, output)
            if self._proves:
                self._proof.occurred(self._saves, why, is_attention)
        if self._proves:
            self._proof.seen(kind, self._may_keep[kind])
        return output

    def note_view(self, tensor: Tensor, view: Tensor) -> None:
        """See `Region`."""
        self._kept.note_view(tensor, view)

    def _reasons(self, kind: Kind, args: Any, is_attention: bool) -> tuple[str, ...]:
        why = self._saves.for_operator(kind, args)
        if self.modules and is_kept_in_modules(kind, args):
            why += tuple(self.modules)
        return (*why, SELECTIVE_ATTENTION) if is_attention else why

    def enter(self, module: nn.Module, args: Any) -> None:
        """See `Run`."""
        number = self._calls.number(MODULE)
        whole = None
        if self._is_by_modules:
            is_kept = self._saves.preset == SELECTIVE or bool(self.modules)
            # Of an adapted layer of which nothing is kept, parts may be named.
            is_certain = is_kept or not self._saves.names
            hidden = args[0] if len(args) == 1 else None
            if linears.is_linear(module, hidden) or (
                is_certain and linears.is_adapted(module) and linears.is_sum(module, args)
            ):
                whole = _Whole(number, is_kept, kernels.pause())
                self._num_whole += 1
        self._entered.append(whole)

    def leave(self, module: nn.Module, output: Any) -> None:
        """See `Run`."""
        whole = self._entered.pop()
        if whole is None:
            return
        self._num_whole -= 1
        kernels.leave(whole.setting)
        self._kept.modules[whole.number] = output.shape[-1], output.dtype, output.device
        if whole.is_kept and linears.is_worth_keeping(module, output):
            self._kept.keep_module(whole.number, output)


@dataclass(frozen=True, slots=True)
class _Whole:
    """A layer that is taken as a whole, while its forward runs.

    Args:
        number: of the call.
        is_kept: whether its output is sought.
        setting: of the kernels before.
    """

    number: Number
    is_kept: bool
    setting: kernels.Setting


class HandingOut:
    """A recomputation of a region: runs operators again, but for those whose outputs were kept.

    Args:
        kept: what was kept.
        saves: of the forward.
    """

    def __init__(self, kept: KeptOutputs, saves: Saves) -> None:
        self.modules: list[str] = []
        self._kept = kept
        self._may_keep = saves.may_keep()
        self._calls = Calls()
        # The linear and adapted layers that run, and those among them that the forward took as a whole.
        self._entered: list[_WholeAgain | None] = []
        self._whole: list[_WholeAgain] = []

    def run(self, kind: Kind, args: Any, kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """See `Region`."""
        if not self._may_keep[kind]:
            return call(*args, **kwargs)
        if self._whole and kind.role is Role.PRODUCT:
            whole = self._whole[-1]
            if whole.is_sum:
                return linears.placeholder(kind, args, whole.outer)
            if whole.is_proven:
                return self._kept.run_proven(call, args, kwargs)
            shape = linears.shape_of_product(kind, args, whole.outer)
            is_there = not whole.is_adapted and linears.is_output(whole.module, kind)
            output = self._kept.take_module(whole.number, shape) if is_there else NOT_KEPT
        else:
            output = self._kept.take(self._calls.number(kind), args)
        return call(*args, **kwargs) if output is NOT_KEPT else output

    def note_view(self, tensor: Tensor, view: Tensor) -> None:
        """See `Region`."""

    def enter(self, module: nn.Module, args: Any) -> None:
        """See `Run`."""
        number = self._calls.number(MODULE)
        returned = self._kept.modules.get(number)
        whole = None
        if returned is not None:
            is_adapted = linears.is_adapted(module)
            # Where it is a sum no longer (somebody looks inside since), or was handed out before, it runs for real.
            is_sum = is_adapted and self._kept.is_kept(number) and linears.is_sum(module, args)
            is_proven = is_adapted and self._kept.is_proven(number)
            whole = _WholeAgain(module, number, returned[0], is_adapted, is_sum, is_proven)
            self._whole.append(whole)
        self._entered.append(whole)

    def leave(self, module: nn.Module, output: Any) -> Tensor | None:
        """See `Run`."""
        whole = self._entered.pop()
        if whole is None:
            return None
        self._whole.pop()
        if not whole.is_sum or not output.is_meta:
            # Not meta: its operators ran past us, as where somebody traces; then they ran for real.
            return None
        kept = self._kept.take_module(whole.number, output.shape)
        if kept is NOT_KEPT:
            # Backward needs nothing from here on: what is computed with it has no use.
            _, dtype, device = self._kept.modules[whole.number]
            kept = torch.zeros(output.shape, dtype=dtype, device=device)
        found: Tensor = kept
        if not output.requires_grad:
            return found
        # With a node behind it, as in forward: a leaf could not be written into. Nobody goes back through that node.
        again: Tensor = torch._C._functions.DelayedError(b"this graph is of a recomputation", 1)(found.requires_grad_())
        return again


@dataclass(frozen=True, slots=True)
class _WholeAgain:
    """A layer that the forward took as a whole, while its forward runs again.

    Args:
        module: the layer.
        number: of the call.
        outer: columns of what it returns.
        is_adapted: whether it is an adapted layer.
        is_sum: whether its kept sum stands for what it computes.
        is_proven: whether it computes that only to be looked at.
    """

    module: nn.Module
    number: Number
    outer: int
    is_adapted: bool
    is_sum: bool
    is_proven: bool


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # upstream
    """Gives every operator that runs inside to a run of a region.

    Args:
        begin: makes the run; called each time that this is entered, as for each backward over the same graph.
        ignores: tells of operators that matter to no run.
    """

    supports_higher_order_operators = True

    def __init__(self, begin: Callable[[], Run], ignores: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # upstream
        self._begin = begin
        self._ignores = ignores
        self._run: Run | None = None
        self._found: tuple[Run | None, kernels.Setting] = None, (False, None, 0)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled inside of a region stay compiled (flex attention is)."""
        return True

    def __enter__(self) -> DispatchMode:
        self._run = self._begin()
        self._found = RUNNING.run, kernels.pause()
        RUNNING.run = self._run
        super().__enter__()  # type: ignore[no-untyped-call]  # upstream
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # upstream
        self._run = None
        RUNNING.run, setting = self._found
        kernels.leave(setting)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._ignores(function):
            return function(*args, **(kwargs or {}))
        assert self._run is not None, "it is entered"
        return self._run.run(kind_of(function), args, kwargs or {}, function)


class Interception:
    """Gives those operators that matter to a run of a region, through kernels of our own.

    Args:
        begin: see `DispatchMode`.
    """

    def __init__(self, begin: Callable[[], Run]) -> None:
        self._begin = begin
        self._found: tuple[Run | None, kernels.Setting] = None, (False, None, 0)

    def __enter__(self) -> Interception:
        run = self._begin()
        self._found = RUNNING.run, kernels.enter(run)
        RUNNING.run = run
        return self

    def __exit__(self, *raised: Any) -> None:
        RUNNING.run, setting = self._found
        kernels.leave(setting)


class Forward:
    """Runs a region's forward; at its end lets go what recomputation does not need.

    Args:
        kept: what is kept.
        driver: gives the region's operators to a `Keeping`.
    """

    def __init__(self, kept: KeptOutputs, driver: AbstractContextManager[Any]) -> None:
        self._kept = kept
        self._driver = driver

    def __enter__(self) -> None:
        # Only the innermost hooks are asked, and those are `checkpoint`'s: put between, not on top.
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
        torch._C._autograd._push_saved_tensors_default_hooks(partial(_pack, self._kept, pack), unpack)
        self._driver.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._driver.__exit__(*raised)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if raised[0] is None:
            self._kept.finish()
        else:
            self._kept.forget_returned()


def _pack(kept: KeptOutputs, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """Note that autograd saves a tensor, and let it be saved as before."""
    kept.note_saved()
    return pack(tensor)
