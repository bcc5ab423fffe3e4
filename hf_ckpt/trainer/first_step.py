"""What really ran in the first step, held against the plan.

Hooks on the modules inside each layer count forward entries by kind of run; hooks on the graph behind outputs note what
a backward came to. Of the regions it is only believed that they say when they run again.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.patch.tileable_modules import tiled_modules
from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.regions.execution_state import (
    is_compiled,
    is_extra_run,
    is_recomputed,
    is_repeated_by_others,
    tensors_in,
)
from hf_ckpt.structure.layers import Layer, Stack
from hf_ckpt.structure.stored import stored
from hf_ckpt.upstream.torch import BACKWARDS, current_graph_task_id, is_transformed, queue_callback

logger = logging.getLogger(__name__)

# The region of what runs in tiles besides the ffn: norms and linear projections, with adapters in them.
_TILES = "tiles"
_REGIONS = ("layer", "attention", "ffn", _TILES)
# Parameters that a message names; more would bury the sentence.
_SHOWN = 4

# A layer, by its place among all of them, and a region of it.
_Key = tuple[int, str]


class _Run(Enum):
    """Why a forward runs."""

    FORWARD = "the model is called, in a backward too where a hook of the user's calls it"
    RECOMPUTATION = "a region of the plan is recomputed"
    BY_OTHERS = "another library's checkpointing runs it again"


class _Backward:
    """The regions that one backward has entered, by an output, and left, by an input or by a weight."""

    # Each with whether its module was in training mode; None in a model that was not.

    def __init__(self) -> None:
        self.entered: set[tuple[_Key, bool | None]] = set()
        self.left: set[tuple[_Key, bool | None]] = set()


class FirstStep:
    """Watches the first step of a model under a plan, and holds it against the plan."""

    # A Trainer's step is all from `start` to `finish`. In a loop of one's own nobody says where a step ends: there
    # `start_with_forward` watches from the next forward until a backward that has come to a region has ended.

    def __init__(self, model: nn.Module, plan: Plan, stacks: Sequence[Stack]) -> None:
        self._model = model
        self._layers = [
            (stack, layer, entry)
            for stack, planned in zip(stacks, plan.stacks, strict=True)
            for layer, entry in zip(stack.layers, planned.layers, strict=True)
        ]
        self._owners = list(dict.fromkeys(stack.owner for stack in stacks))
        self._hooks: list[RemovableHandle] = []
        self._ends_with_backward = False
        self._start_counts()

    def _start_counts(self) -> None:
        self._entries: Counter[tuple[_Key, _Run]] = Counter()
        self._reached: set[tuple[_Key, bool | None]] = set()
        self._accumulated: set[nn.Parameter] = set()
        # By number, as long as they run: of one that ends in an exception, autograd drops what holds it.
        self._backwards: WeakValueDictionary[int, _Backward] = WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has run nothing yet.
        counts = ("_entries", "_reached", "_accumulated", "_backwards")
        return {name: value for name, value in vars(self).items() if name not in counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_counts()

    def start(self) -> None:
        for parameter in {p for _, p in self._trainable() if not self._ends_with_backward}:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulated.add))  # type: ignore[no-untyped-call]
        for number, (_, layer, entry) in enumerate(self._layers):
            # A compiled graph runs no hooks: nothing is counted there, and so nothing is held against the plan.
            if is_compiled(layer.module):
                continue
            for region in _REGIONS:
                for module in _modules_of(layer, region, entry):
                    if is_compiled(module):
                        continue
                    # The children, not the part: a part that is recomputed is entered once, its children twice.
                    for child in _called_children(module):
                        self._hooks.append(child.register_forward_pre_hook(partial(self._count, (number, region))))
                    watch = partial(self._watch_output, (number, region))
                    self._hooks.append(module.register_forward_hook(watch, with_kwargs=True))

    def start_with_forward(self) -> None:
        """Place the hooks when the model is next called with gradients."""
        # The backward that ends the watch raises `PlanMismatchError` where something is not as planned.
        self._ends_with_backward = True
        self._hooks += [owner.register_forward_pre_hook(self._start_now) for owner in self._owners]

    def _start_now(self, owner: nn.Module, args: Any) -> None:
        if _is_seen():
            self.stop()
            self.start()

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def finish(self) -> list[str]:
        """Take the hooks off, warn of what only costs, and return a message for each thing that is not as planned."""
        self.stop()
        self._log_resting()
        self._log_without_gradient()
        faults = self._lost_recomputations()
        others = self._repeated_by_others(is_planned=False)
        if not self._ends_with_backward:
            faults += others
            others = []
        # Gradients are right, and the plan is in force. In a loop of one's own nothing would let the run go on.
        for fault in others or self._repeated_by_others(is_planned=True) * (not faults):
            warnings.warn(fault, stacklevel=2)
        return faults

    @property
    def is_over(self) -> bool:
        """Whether nothing is watched, or not any more."""
        return not self._hooks

    # --- Hooks. ---

    def _count(self, key: _Key, module: nn.Module, args: Any) -> None:
        if not _is_seen():
            return
        kind = _Run.RECOMPUTATION if is_recomputed() else _Run.FORWARD
        if kind is _Run.FORWARD and is_repeated_by_others():
            kind = _Run.BY_OTHERS
        self._entries[key, kind] += 1

    def _watch_output(self, key: _Key, module: nn.Module, args: Any, *rest: Any) -> None:
        if not _is_seen() or is_recomputed():
            return
        # torch leaves the keywords out for a hook that another hook of the same call has just removed.
        kwargs, output = rest if len(rest) == 2 else ({}, rest[-1])
        inputs = [tensor for value in (*args, *kwargs.values()) for tensor in tensors_in(value) if tensor.requires_grad]
        # Of a whole model in eval mode its patch tells, in whichever step.
        is_training = module.training if module.training or self._layers[key[0]][0].owner.training else None
        enters = partial(self._reach, key, is_training, is_entered=True)
        leaves = partial(self._reach, key, is_training, is_entered=False)
        # On the graph, not on tensors: who asks for the gradient of one gets it without a backward of the region. A
        # region that is entered need not be left: the gradient of a bias at its end needs nothing that was saved.
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(enters)
                if not inputs and _trains_weights(module):
                    tensor.grad_fn.register_prehook(leaves)
        for tensor in inputs:
            get_gradient_edge(tensor).node.register_prehook(leaves)

    def _reach(self, key: _Key, is_training: bool | None, gradients: Any, *, is_entered: bool) -> None:
        if self.is_over or BACKWARDS.gone:
            return
        number = current_graph_task_id()
        backward = self._backwards.get(number)
        if backward is None:
            backward = self._backwards[number] = _Backward()
            queue_callback(partial(self._end_backward, number, backward))
        (backward.entered if is_entered else backward.left).add((key, is_training))

    def _end_backward(self, number: int, backward: _Backward) -> None:
        """Count what a backward came to: it has ended, and by now has recomputed all that it needs."""
        self._reached |= backward.entered & backward.left
        self._backwards.pop(number, None)
        # One inside of another, or in another thread, may have come to a region that it has not recomputed yet.
        if self._ends_with_backward and not self._backwards and not self.is_over:
            faults = self.finish()
            if faults:
                raise PlanMismatchError("\n".join(faults))

    # --- What is not as planned. ---

    def _lost_recomputations(self) -> list[str]:
        def lost(key: _Key, what: str, is_planned: bool) -> str | None:
            # Without a gradient at its output a region has no backward, and so no reason to be recomputed.
            if not is_planned or not self._has_kept(key) or (key, True) not in self._reached:
                return None
            return (
                f"but {what} ran once in step 1 (twice expected). Its checkpoint function was replaced after the "
                "policy was applied: apply the policy after that call. Or it computes in a thread, or under "
                "saved_tensors_hooks, of its own, where nothing is recomputed: leave it out of the policy."
            )

        return self._by_layer(lost)

    def _repeated_by_others(self, *, is_planned: bool) -> list[str]:
        def repeated(key: _Key, what: str, is_region_planned: bool) -> str | None:
            number, region = key
            # A whole layer that is recomputed has parts that somebody else may recompute again.
            regions = _REGIONS if region == "layer" and is_planned else (region,)
            # Nobody, this plan included, should run again what is to be kept.
            kinds = (_Run.BY_OTHERS,) if is_planned else (_Run.BY_OTHERS, _Run.RECOMPUTATION)
            if is_region_planned is not is_planned or not any(
                self._entries[(number, each), kind] for each in regions for kind in kinds
            ):
                return None
            return (
                f"but {what} ran again in the backward of step 1{' for somebody else too' * is_planned}. Another "
                "library's activation checkpointing is on too. Turn it off."
            )

        return self._by_layer(repeated)

    def _log_resting(self) -> None:
        def resting(key: _Key, what: str, is_planned: bool) -> str | None:
            if not is_planned or not self._has_kept(key) or (key, False) not in self._reached:
                return None
            return f"but {what} ran in eval mode in step 1, in which a plan rests: it was not recomputed. Call train()."

        for sentence in self._by_layer(resting):
            logger.warning(sentence)

    def _log_without_gradient(self) -> None:
        # The model's own affair: what gets a gradient without the plan, and none with it, is for `prove` to find.
        names = sorted(name for name, each in self._trainable() if not got_gradient(each, self._accumulated))
        if names and self._accumulated:
            logger.info(
                "%d trainable parameter%s got no gradient in step 1: %s%s. If they are to train, is an adapter "
                "disabled, or something detached?",
                *(len(names), "s" * (len(names) > 1), _listed(names[:_SHOWN]), " ..." * (len(names) > _SHOWN)),
            )

    def _trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self._model.named_parameters() if p.requires_grad and p.is_leaf)

    def _has_kept(self, key: _Key) -> bool:
        return bool(self._entries[key, _Run.FORWARD]) and not self._entries[key, _Run.RECOMPUTATION]

    def _by_layer(self, fault_of: Any) -> list[str]:
        """Return sentences on the layers for which a function of region and plan returns one."""
        seen: dict[tuple[str, str, str], list[int]] = {}
        for number, (stack, layer, entry) in enumerate(self._layers):
            for region, is_planned in _planned(layer, entry):
                what = "a forward" if region == "layer" else f"the forward of {region}"
                fault = fault_of((number, region), what, is_planned)
                if fault is not None:
                    indices = seen.setdefault((stack.path, _shown(entry), fault), [])
                    indices.append(layer.layer_idx)
                    break
        return [
            f"{'Layers' if len(indices) > 1 else 'Layer'} {_listed(indices)} of {path} "
            f'{"are" if len(indices) > 1 else "is"} set to "{mode}", {fault}'
            for (path, mode, fault), indices in seen.items()
        ]


def got_gradient(parameter: nn.Parameter, accumulated: Container[nn.Parameter]) -> bool:
    """Whether a step gave a parameter a gradient; `accumulated`: those whose hook after accumulation has run."""
    # Some engines have taken the gradient away by now; of what FSDP1 leaves to other ranks, none comes here. What
    # ZeRO-3 has emptied is whole in backward, on every rank.
    is_elsewhere = not parameter.numel() and not hasattr(parameter, "ds_id")
    return parameter.grad is not None or parameter in accumulated or is_elsewhere


def _called_children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        # Lists have no forward of their own (T5 keeps the parts of a layer in one).
        yield from _called_children(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else (child,)


def _modules_of(layer: Layer, region: str, entry: LayerPlan) -> list[nn.Module]:
    if region == "layer":
        return [layer.module]
    if region == _TILES:
        names = [] if entry.tiles is None else [name for name in tiled_modules(layer) if name not in layer.ffn]
    else:
        names = getattr(layer, region)
    return [layer.submodule(name) for name in names]


def _shown(entry: LayerPlan) -> str:
    return f"{entry.mode}" if entry.tiles is None else f"{entry.mode}, tiles {entry.tiles}"


def _trains_weights(module: nn.Module) -> bool:
    """Whether a module has weights that train, and whose gradient needs what the forward saved: no mere biases."""
    # ZeRO-3 keeps the shape of what it has emptied.
    return any(p.requires_grad and len(getattr(p, "ds_shape", p.shape)) > 1 for p in module.parameters())


def _planned(layer: Layer, entry: LayerPlan) -> list[tuple[str, bool]]:
    """Return which regions of a layer should run again in backward, and which should not."""
    if stored(layer.module, "backward_pass") is not None:
        # A reversible layer (Reformer's) recomputes by itself, under any plan.
        return []
    is_tiled = entry.tiles is not None
    in_tiles = [(_TILES, True)] if is_tiled else []
    match entry.mode:
        case Mode.FULL | Mode.SELECTIVE | Mode.SELECTIVE_ATTENTION:
            # The forward of all children is repeated also where the outputs of their operators are kept.
            return [("layer", True), *in_tiles]
        case Mode.NONE:
            return [("layer", False), ("attention", False), ("ffn", is_tiled), *in_tiles]
        case Mode.FFN if layer.ffn_is_inline:
            return [("layer", True), ("attention", False)]
        case _:
            is_ffn = is_tiled or entry.mode is Mode.FFN
            return [("attention", entry.mode is Mode.ATTENTION), ("ffn", is_ffn), *in_tiles]


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _is_seen() -> bool:
    if torch.compiler.is_compiling():
        return False
    # Inside of a transform of torch.func there is no backward to be held against a plan.
    return torch.is_grad_enabled() and not is_extra_run() and not is_transformed()
