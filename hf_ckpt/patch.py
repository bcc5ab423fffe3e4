"""A plan put onto a model, in place, and taken off again without a trace.

A layer is reached through the seam that transformers provides (`gradient_checkpointing` and
`_gradient_checkpointing_func` of a `GradientCheckpointingLayer`), a part or a layer without the seam through an
instance `forward`. No module is wrapped and no name changes; every value set here is a module-level function or a
`partial` of one, so that copies and pickles of the model carry the plan too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ckpt import deepspeed, fsdp
from hf_ckpt.errors import AlreadyAppliedError, PlanMismatchError, PolicyError, UnsupportedError
from hf_ckpt.layers import Layer, Stack, class_name, clean_path, find_layers, members
from hf_ckpt.plans import LayerPlan, Plan, StackPlan, parse, resolve
from hf_ckpt.policy import Mode, Policy, SegmentSize
from hf_ckpt.refusals import check_exact, check_model
from hf_ckpt.regions.around import KeptModules, recompute_around, run_kept
from hf_ckpt.regions.call import is_cache
from hf_ckpt.regions.recompute import recompute, run_region
from hf_ckpt.regions.segments import SegmentRunner, enter, leave, run_in_segment
from hf_ckpt.shapes import unwrapped

logger = logging.getLogger(__name__)

_HANDLE = "_hf_ckpt_applied"
_FLAG = "gradient_checkpointing"
_FUNCTION = "_gradient_checkpointing_func"
_FORWARD = "forward"


class _Missing:
    """Stands for an attribute that the instance did not have. A class: copies and pickles keep its identity."""


@dataclass
class _Change:
    """One attribute set on one module."""

    path: str
    module: nn.Module
    name: str
    found: object
    ours: object

    def is_in_force(self) -> bool:
        return self.module.__dict__.get(self.name, _Missing) is self.ours

    def assert_again(self) -> None:
        setattr(self.module, self.name, self.ours)

    def undo(self) -> None:
        if self.name == _FORWARD and not self.is_in_force():
            # Whoever put a forward over ours knows what to put back; taking theirs away would break it.
            return
        if self.found is _Missing:
            self.module.__dict__.pop(self.name, None)
        else:
            setattr(self.module, self.name, self.found)


class StackPatch:
    """The plan of one stack on the model. Lives on the list of layers, and is copied with it."""

    def __init__(self, plan: Plan, path: str) -> None:
        self.plan = plan
        self.path = path
        self._changes: list[_Change] = []
        self._on_remove: list[Callable[[], None]] = []
        self._hook: RemovableHandle | None = None
        self._home: nn.Module | None = None
        self.doors: _Doors | None = None
        self.drops_cache = False
        self._is_paused = False
        self._has_said = False

    def set(self, path: str, module: nn.Module, name: str, ours: object) -> None:
        """Set an attribute on a module and remember what was there.

        Layers that share a module want the same of it (`check_exact` has seen to that): the first one sets it.
        """
        if any(change.module is module and change.name == name for change in self._changes):
            return
        self._changes.append(_Change(path, module, name, module.__dict__.get(name, _Missing), ours))
        setattr(module, name, ours)

    def on_remove(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the patch is removed, by whomever."""
        self._on_remove.append(undo)

    def take_undos(self) -> list[Callable[[], None]]:
        """Return what `on_remove` was given, and forget it."""
        undos, self._on_remove = self._on_remove, []
        return undos

    def settle(self, home: nn.Module, owner: nn.Module) -> None:
        """Leave the patch on `home`, the list of layers, where copies take it along; watch the owner's forward."""
        self._home = home
        setattr(home, _HANDLE, self)
        self._hook = owner.register_forward_pre_hook(partial(_before_forward, self), with_kwargs=True)

    def remove(self) -> None:
        """Put back what was found."""
        for change in reversed(self._changes):
            change.undo()
        self._changes.clear()
        for undo in self._on_remove:
            undo()
        self._on_remove.clear()
        if self._hook is not None:
            self._hook.remove()
        if self.doors is not None:
            self.doors.remove()
        if self._home is not None:
            delattr(self._home, _HANDLE)
        self._home = self._hook = None

    def refuse_cache(self, arguments: Iterable[object]) -> None:
        """Refuse a forward that is handed a key/value cache: recomputed layers can neither read nor fill it.

        A cache that the model makes for itself in training serves nobody, and is left out of recomputed layers.

        Raises:
            UnsupportedError: one of the arguments is a cache, and a recomputed region would have to use it.
        """
        if self.drops_cache and any(map(is_cache, arguments)):
            raise UnsupportedError(
                f"The model that runs {self.path} was handed a key/value cache in a training step (prefix tuning, a "
                "prompt that was encoded before, or use_cache=True). Recomputed layers can neither read nor fill it, "
                'and the loss would change without a word. Set use_cache=False, or use mode "none" or "ffn" there.'
            )

    def assert_in_force(self) -> None:
        """Bring the plan back where another library switched it off.

        Raises:
            PlanMismatchError: a part's forward was replaced, so that the plan cannot be brought back.
        """
        self._resume()
        if self.doors is not None and self._home is not None:
            self.doors.watch(self._home)
        lost = [change for change in self._changes if not change.is_in_force()]
        if lost:
            self._say_or_raise(lost)
        for change in lost:
            change.assert_again()

    def _say_or_raise(self, lost: list[_Change]) -> None:
        for change in lost:
            if change.name == _FORWARD:
                raise PlanMismatchError(
                    f"The forward of {change.path} was replaced by {_name_of(change.module.__dict__.get(_FORWARD))} "
                    "after the policy was applied, so that the plan is no longer in force there. Apply the policy "
                    "after that call."
                )
        in_layers = [change for change in lost if change.path.startswith(f"{self.path}.")]
        if in_layers and not self._has_said:
            by = _name_of(in_layers[0].module.__dict__.get(_FUNCTION))
            logger.info(
                "%d layers of %s were switched to another activation checkpointing (%s) after the policy was applied; "
                "the policy is in force again.",
                len({change.path for change in in_layers}),
                self.path,
                by,
            )
            self._has_said = True

    def pause(self) -> None:
        """Switch the seam off for a forward without gradients in training mode.

        transformers' seam drops the cache whenever the layer is in training mode, so that `generate()` between two
        steps would give wrong tokens.
        """
        for change in self._seams():
            setattr(change.module, _FLAG, False)
        self._is_paused = True

    def _resume(self) -> None:
        if self._is_paused:
            for change in self._seams():
                change.assert_again()
        self._is_paused = False

    def _seams(self) -> Iterator[_Change]:
        return (change for change in self._changes if change.name == _FLAG and change.ours)


class _Doors:
    """Hooks on what stands outermost in the place of a segment's layers, where FSDP or ZeRO-3 gathers their weights.

    Args:
        runner: of the stack.
        indices: the layers that run in segments.
    """

    def __init__(self, runner: SegmentRunner, indices: list[int]) -> None:
        self._runner = runner
        self._indices = indices
        self._hooks: dict[int, tuple[nn.Module, RemovableHandle, RemovableHandle]] = {}

    def watch(self, home: nn.Module) -> None:
        """Place the hooks, first and last of the module's own, wherever an engine has come since they were placed."""
        modules = members(home)
        for layer_idx in self._indices:
            outer = modules[layer_idx]
            is_hooked = fsdp.is_unit(outer) or deepspeed.is_hooked(outer)
            if is_hooked and not self._is_watched(layer_idx, outer) and not _holds_its_hooks(outer):
                self._place(layer_idx, outer)

    def _is_watched(self, layer_idx: int, outer: nn.Module) -> bool:
        if layer_idx not in self._hooks:
            return False
        module, first, last = self._hooks[layer_idx]
        return module is outer and first.id == next(iter(outer._forward_pre_hooks)) and last.id in outer._forward_hooks

    def _place(self, layer_idx: int, outer: nn.Module) -> None:
        self._take_off(layer_idx)
        first = outer.register_forward_pre_hook(partial(enter, self._runner, layer_idx), prepend=True, with_kwargs=True)
        last = outer.register_forward_hook(partial(leave, self._runner, layer_idx))
        self._hooks[layer_idx] = (outer, first, last)

    def _take_off(self, layer_idx: int) -> None:
        for hook in self._hooks.pop(layer_idx, ())[1:]:
            hook.remove()

    def remove(self) -> None:
        """Take the hooks off."""
        for layer_idx in self._indices:
            self._take_off(layer_idx)


def _holds_its_hooks(outer: nn.Module) -> bool:
    """Whether the region of a layer takes in its own hooks, an engine's among them (transformers before 5.23)."""
    return isinstance(outer, GradientCheckpointingLayer) and "__call__" in vars(GradientCheckpointingLayer)


class Applied:
    """A plan in force on a model; also a context manager that removes it on exit.

    Attributes:
        plan: what is in force.
        stacks: the stacks of the model that the plan is in force on.
    """

    def __init__(self, plan: Plan, stacks: tuple[Stack, ...], patches: list[StackPatch]) -> None:
        self.plan = plan
        self.stacks = stacks
        self._patches = patches

    def summary(self) -> str:
        """Return the plan as text, equal neighbouring layers on one line."""
        return self.plan.summary()

    def assert_in_force(self) -> None:
        """Bring the plan back where another library switched it off.

        Raises:
            PlanMismatchError: it cannot be brought back.
        """
        for patch in self._patches:
            patch.assert_in_force()

    def on_remove(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the plan is removed, through this handle or through `hf_ckpt.remove`."""
        self._patches[0].on_remove(undo)

    def make_way(self) -> list[Callable[[], None]]:
        """Put the model back as it was found, for another plan to be applied in place of this one.

        Returns:
            What `on_remove` was given, not called: it is the other plan's from now on.
        """
        undos = self._patches[0].take_undos()
        self.remove()
        return undos

    def remove(self) -> None:
        """Put the model back as it was found. A second call does nothing."""
        for patch in reversed(self._patches):
            patch.remove()
        self._patches.clear()

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def apply(
    model: nn.Module,
    policy: object,
    *,
    every_n_layers: int | None = None,
    segment_size: SegmentSize | None = None,
    nested: bool | None = None,
    skip_frozen: bool = False,
    layers: str | Sequence[str] | None = None,
    attention: str | None = None,
    ffn: str | None = None,
) -> Applied:
    """Put a policy in force on a model, in place.

    Loss and gradients do not change by a bit; module and parameter names stay. Activation (gradient) checkpointing
    costs up to one more forward of the layers it reaches.

    Args:
        model: any transformers model, or another with layers that can be found; PEFT, DDP, FSDP or DeepSpeed may stand
            around it or its layers.
        policy: a mode name, a rule, a list of rules, a `Policy`, or a `Plan` made for this model.
        every_n_layers: see `Rule`.
        segment_size: see `Rule`.
        nested: see `Rule`.
        skip_frozen: leave alone the layers that need no gradient.
        layers: dotted path of the layer list, or several, where they cannot be found by structure.
        attention: attribute name, in each layer, of the attention.
        ffn: attribute name, in each layer, of the ffn.

    Returns:
        A handle with `summary()` and `remove()`; as a context manager it removes the plan on exit.

    Raises:
        PolicyError: the policy cannot be read or does not suit the model.
        StructureError: the layers cannot be found.
        UnsupportedError: a mode could not be exact on a layer.
        AlreadyAppliedError: the model carries a plan already.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import hf_ckpt
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=4, num_attention_heads=2)
        >>> with hf_ckpt.apply(LlamaForCausalLM(config), "full", every_n_layers=2) as applied:
        ...     print(applied.summary())
        model.layers: 4 layers
          0            full
          1            none
          2            full
          3            none
    """
    options = {"every_n_layers": every_n_layers, "segment_size": segment_size, "nested": nested}
    parsed = parse(policy, skip_frozen=skip_frozen, **options)
    return _put_on(model, *_planned(model, parsed, {"layers": layers, "attention": attention, "ffn": ffn}))


def make_plan(model: nn.Module, policy: Policy | Plan, **structure: Any) -> Plan:
    """Return the plan that `apply` would put in force, and leave the model alone.

    Args:
        model: see `apply`.
        policy: see `apply`.
        structure: `layers`, `attention` and `ffn` of `apply`.

    Raises:
        HFCkptError: what `apply` raises.
    """
    return _planned(model, policy, structure)[0]


def _planned(model: nn.Module, policy: Policy | Plan, structure: Mapping[str, Any]) -> tuple[Plan, tuple[Stack, ...]]:
    check_model(model)
    if _patches(model):
        raise AlreadyAppliedError(
            f"{class_name(model)} carries a plan already. Call remove() on the handle that apply() returned, or "
            "hf_ckpt.remove(model), and apply the policy then."
        )
    stacks = find_layers(model, **structure)
    fsdp.check_units(model, stacks)
    plan = _checked(policy, stacks, model) if isinstance(policy, Plan) else resolve(policy, stacks, class_name(model))
    check_exact(plan, stacks)
    deepspeed.check_version(plan, stacks)
    return plan, stacks


def remove(model: nn.Module) -> bool:
    """Take a plan off a model without the handle that `apply` returned.

    Args:
        model: the model that the policy was applied to, or one around it.

    Returns:
        Whether there was a plan.
    """
    patches = _patches(model)
    for patch in patches:
        patch.remove()
    return bool(patches)


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan that is in force on a model, or None."""
    patches = _patches(model)
    return patches[0].plan if patches else None


def _patches(model: nn.Module) -> list[StackPatch]:
    return [module.__dict__[_HANDLE] for module in model.modules() if _HANDLE in module.__dict__]


def _checked(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> Plan:
    planned = [(stack.path, len(stack.layers)) for stack in plan.stacks]
    there = [(stack.path, len(stack.layers)) for stack in stacks]
    if planned != there:
        raise PolicyError(
            f"The plan was made for {plan.model_class} with {_shapes(planned)}, but {class_name(model)} has "
            f"{_shapes(there)}. Resolve the policy for this model."
        )
    for stack_plan, stack in zip(plan.stacks, stacks, strict=True):
        for entry, layer in zip(stack_plan.layers, stack.layers, strict=True):
            if entry.mode in (Mode.ATTENTION, Mode.FFN) and entry.mode not in layer.parts:
                raise PolicyError(
                    f"The plan was made for {plan.model_class} and asks for the {entry.mode} of layer "
                    f"{layer.layer_idx} of {stack.path}, but that layer of {class_name(model)} has none. Resolve "
                    "the policy for this model."
                )
    return plan


def _shapes(shapes: list[tuple[str, int]]) -> str:
    return ", ".join(f"{num_layers} layers in {path}" for path, num_layers in shapes)


def _put_on(model: nn.Module, plan: Plan, stacks: tuple[Stack, ...]) -> Applied:
    patches: list[StackPatch] = []
    try:
        for stack_plan, stack in zip(plan.stacks, stacks, strict=True):
            patch = StackPatch(plan, stack.path)
            patches.append(patch)
            _patch_stack(model, patch, stack_plan, stack)
        _switch_off_others(model, patches, stacks)
        for patch, stack in zip(patches, stacks, strict=True):
            patch.settle(stack.home, stack.owner)
    except BaseException:
        for patch in reversed(patches):
            patch.remove()
        raise
    return Applied(plan, stacks, patches)


_Setting = tuple[nn.Module, Callable[[], None]]
"""A module, and what makes it carry its part of the plan."""


def _patch_stack(model: nn.Module, patch: StackPatch, plan: StackPlan, stack: Stack) -> None:
    runner = SegmentRunner()
    settings: dict[nn.Module, list[Callable[[], None]]] = {}
    for entry, layer in zip(plan.layers, stack.layers, strict=True):
        for module, make in _settings(patch, entry, layer, stack, runner):
            settings.setdefault(module, []).append(make)
    if fsdp.is_sharded(model):
        fsdp.set_in_place(model, settings)
    else:
        for make in chain.from_iterable(settings.values()):
            make()
    in_segments = [idx for idx, entry in enumerate(plan.layers) if entry.segment is not None]
    if in_segments:
        patch.doors = _Doors(runner, in_segments)


def _settings(
    patch: StackPatch, entry: LayerPlan, layer: Layer, stack: Stack, runner: SegmentRunner
) -> Iterator[_Setting]:
    path = f"{stack.path}.{layer.layer_idx}"
    match entry.mode:
        case Mode.FULL if entry.segment is not None:
            region = partial(run_in_segment, runner, entry.segment, layer.layer_idx, entry.nested)
            yield _region(patch, path, layer.module, region)
        case Mode.FULL:
            yield _region(patch, path, layer.module, recompute)
        case Mode.ATTENTION:
            patch.drops_cache = True
            yield from _part_regions(patch, path, layer, layer.attention)
        case Mode.FFN if layer.ffn_is_inline:
            kept = KeptModules()
            yield _region(patch, path, layer.module, partial(recompute_around, kept))
            for name in layer.attention:
                yield _forward(patch, f"{path}.{name}", layer.submodule(name), partial(run_kept, kept))
        case Mode.FFN:
            yield from _part_regions(patch, path, layer, layer.ffn)


def _part_regions(patch: StackPatch, path: str, layer: Layer, names: tuple[str, ...]) -> Iterator[_Setting]:
    for name in names:
        yield _forward(patch, f"{path}.{name}", layer.submodule(name), partial(run_region, recompute))


def _region(patch: StackPatch, path: str, module: nn.Module, region: Callable[..., Any]) -> _Setting:
    return module, partial(_make_region, patch, path, module, region)


def _forward(patch: StackPatch, path: str, module: nn.Module, run: partial[Any]) -> _Setting:
    return module, partial(_set_forward, patch, path, module, run)


def _make_region(patch: StackPatch, path: str, module: nn.Module, region: Callable[..., Any]) -> None:
    """Make a whole layer a region, through the seam if it has one."""
    patch.drops_cache = True
    if isinstance(module, GradientCheckpointingLayer):
        patch.set(path, module, _FUNCTION, region)
        patch.set(path, module, _FLAG, True)
    else:
        _set_forward(patch, path, module, partial(run_region, region))


def _set_forward(patch: StackPatch, path: str, module: nn.Module, run: partial[Any]) -> None:
    """Set an instance forward that calls the one that it found there."""
    found = module.__dict__.get(_FORWARD)
    if isinstance(found, partial) and found.func is run.func:
        # A module that two layers share: the first of them has reached it already.
        return
    forward = partial(run.func, *run.args, module, found)
    # Tools that look at the signature see the original's.
    patch.set(path, module, _FORWARD, update_wrapper(forward, found or module.forward))


def _switch_off_others(model: nn.Module, patches: list[StackPatch], stacks: Sequence[Stack]) -> None:
    """Hold every other seam off: one plan governs, also when a library switches all seams on later."""
    ours = {change.module for patch in patches for change in patch._changes if change.name == _FLAG}
    for raw_path, module in model.named_modules():
        # A wrapper shows the attributes of what it wraps.
        if hasattr(module, _FLAG) and module not in ours and unwrapped(module) is module:
            path = clean_path(model, raw_path)
            _patch_around(path, patches, stacks).set(path, module, _FLAG, False)


def _patch_around(path: str, patches: list[StackPatch], stacks: Sequence[Stack]) -> StackPatch:
    """Return the patch of the stack whose owner holds the module at `path`; the first one's if none does."""
    for patch, stack in zip(patches, stacks, strict=True):
        if path.startswith(stack.path.rpartition(".")[0]):
            return patch
    return patches[0]


def _before_forward(patch: StackPatch, owner: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or not owner.training:
        return
    if torch.is_grad_enabled():
        patch.refuse_cache((*args, *kwargs.values()))
        patch.assert_in_force()
    else:
        patch.pause()


def _name_of(function: object) -> str:
    """Return the dotted name of a function, looking through `partial`s, for messages."""
    while isinstance(function, partial):
        function = function.func
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}.{name}" if name else repr(function)
