"""Where the forward and the recomputation of each layer begin and end, seen from hooks on its modules.

A recomputed layer does not run through its own hooks again, only through those of the modules inside of it. Its
recomputation begins where the first of them is entered in backward, and ends where the last one of its forward is
left, or where an exception leaves one of them: recomputation stops as soon as it has what backward needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from hf_ckpt.regions.call import is_in_backward
from hf_ckpt.structure.layers import Layer, Stack


@dataclass(slots=True)
class Range:
    """One forward or recomputation of a layer.

    Args:
        stack: path of its stack.
        layer_idx: the layer.
        start: what was stamped when it began.
        end: what was stamped when it ended.
        bytes_after: memory in use when it ended.
    """

    stack: str
    layer_idx: int
    start: Any
    end: Any = None
    bytes_after: int = 0


class LayerRanges:
    """Watches the layers of a model while it is entered.

    Args:
        model: the model.
        stacks: its layers.
        stamp: called at the beginning and the end of each range.
        measure: called at the end of each range: bytes in use.
        is_named: whether to name the ranges for torch's profiler: `hf_ckpt layer 3`, `recompute layer 3`.

    Attributes:
        forward: the ranges of forwards, in order.
        recomputation: those of recomputations.
    """

    def __init__(
        self,
        model: nn.Module,
        stacks: Sequence[Stack],
        *,
        stamp: Callable[[], Any] = lambda: None,
        measure: Callable[[], int] = lambda: 0,
        is_named: bool = False,
    ) -> None:
        self.forward: list[Range] = []
        self.recomputation: list[Range] = []
        self._model = model
        self._stacks = stacks
        self._stamp = stamp
        self._measure = measure
        self._is_named = is_named
        self._handles: list[Any] = []
        self._inside: list[nn.Module] = []
        self._last_child: dict[nn.Module, nn.Module] = {}
        self._parent: dict[nn.Module, nn.Module] = {}
        self._open: dict[bool, tuple[Range, Any]] = {}

    def __enter__(self) -> LayerRanges:
        for stack in self._stacks:
            for layer in stack.layers:
                for module in dict.fromkeys((layer.outer, *layer.module.modules())):
                    entered, left = partial(self._enter, stack, layer), partial(self._leave, layer)
                    self._handles.append(module.register_forward_pre_hook(entered, prepend=True))
                    self._handles.append(module.register_forward_hook(left, always_call=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for is_again in list(self._open):
            self._end(is_again)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, stack: Stack, layer: Layer, module: nn.Module, args: Any) -> None:
        is_again = is_in_backward()
        if not self._inside and (is_again or module is layer.outer):
            self._begin(stack, layer, is_again)
        self._inside.append(module)

    def _leave(self, layer: Layer, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()
        if not is_in_backward():
            self._leave_forward(layer, module)
        elif not self._inside:
            parent = self._parent.get(module)
            is_last = parent is None or self._last_child.get(parent) is module
            if module is layer.outer or is_last or sys.exc_info()[0] is not None:
                self._end(is_again=True)

    def _leave_forward(self, layer: Layer, module: nn.Module) -> None:
        if self._inside:
            self._parent[module] = self._inside[-1]
            self._last_child[self._inside[-1]] = module
        elif module is layer.outer:
            self._end(is_again=False)

    def _begin(self, stack: Stack, layer: Layer, is_again: bool) -> None:
        found = self._open.get(is_again)
        if found is not None and (found[0].stack, found[0].layer_idx) == (stack.path, layer.layer_idx):
            return
        if found is not None:
            self._end(is_again)
        name = None
        if self._is_named:
            where = "" if len(self._stacks) == 1 else f"{stack.path} "
            name = record_function(f"{'recompute' if is_again else 'hf_ckpt'} {where}layer {layer.layer_idx}")
            name.__enter__()  # type: ignore[no-untyped-call]
        self._open[is_again] = (Range(stack.path, layer.layer_idx, self._stamp()), name)

    def _end(self, is_again: bool) -> None:
        found, name = self._open.pop(is_again, (None, None))
        if found is None:
            return
        found.end, found.bytes_after = self._stamp(), self._measure()
        if name is not None:
            name.__exit__(None, None, None)
        (self.recomputation if is_again else self.forward).append(found)
