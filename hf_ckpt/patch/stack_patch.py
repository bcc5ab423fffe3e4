"""What a plan sets on one stack of layers: set in place, asserted again, and put back.

It lives on the list of layers, so that copies and pickles of the model carry it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.distributed import deepspeed
from hf_ckpt.errors import PlanMismatchError, UnsupportedError
from hf_ckpt.patch.instance_methods import run_all, set_method, take_off
from hf_ckpt.patch.interrupted_run import NoCall, TrainCall
from hf_ckpt.patch.use_cache import SharedIndexCheck, Topic
from hf_ckpt.policy.plan import Plan
from hf_ckpt.regions.arguments import is_cache
from hf_ckpt.regions.execution_state import qualified_name
from hf_ckpt.regions.module_state import STATE, ModuleState
from hf_ckpt.regions.offload.offloader import Offloader
from hf_ckpt.regions.pending_errors import PendingErrors
from hf_ckpt.regions.recomputation_errors import OtherModes
from hf_ckpt.regions.recompute import run_region
from hf_ckpt.regions.segments import SegmentRunner, enter, leave
from hf_ckpt.regions.tiling import Tiling
from hf_ckpt.regions.waiting_weights import WaitingWeights
from hf_ckpt.structure.layers import is_unit, members
from hf_ckpt.structure.stored import Missing, own, restore_own
from hf_ckpt.upstream.accelerate import FORWARD_BEFORE_HOOK
from hf_ckpt.upstream.transformers import (
    FLAG,
    FORWARD,
    FUNCTION,
    INPUT_GRADIENTS,
    READS_CACHE_ONLY,
    SEAM_CODE,
    SEAM_METHOD,
    GradientCheckpointingLayer,
    asks_for_input_gradients,
)

logger = logging.getLogger(__name__)

LEFTOVER = (
    "A plan was still on the model, as an interrupted run leaves one; it was removed, "
    "and use_cache is the user's again."
)
HANDLE = "_hf_ckpt_applied"

_ENGINES = frozenset({"torch", "accelerate", "deepspeed"})

# Runs a function so that its activations are handled: `region(function, *args)`.
Region = Callable[..., Any]


@dataclass
class Change:
    """One attribute set on one module."""

    path: str
    module: nn.Module
    name: str
    found: object
    ours: object

    def is_in_force(self) -> bool:
        return own(self.module, self.name) is self.ours

    def assert_again(self) -> None:
        setattr(self.module, self.name, self.ours)

    def undo(self) -> None:
        if self.name == FORWARD:
            take_off(self.module, FORWARD, self.ours)
            return
        if self.name == FUNCTION:
            # Whoever has kept it and sets it again, with the flag, finds one that recomputes nothing.
            original = _call_function if self.found is Missing else self.found
            cast("Any", self.ours).__setstate__((original, (), {}, {}))
        restore_own(self.module, self.name, self.found)


def _call_function(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _modules_above(model: nn.Module, path: str) -> dict[nn.Module, str]:
    """Return the modules on the way to a path, with theirs; without those of engines and torch's containers."""
    found, module, names = {model: ""}, model, path.split(".")
    for depth, name in enumerate(names[:-1], 1):
        child = module._modules.get(name)
        if child is None:
            break
        module = child
        found[module] = ".".join(names[:depth])
    return {module: path for module, path in found.items() if type(module).__module__.partition(".")[0] not in _ENGINES}


class StackPatch:
    """The plan of one stack on the model."""

    def __init__(self, plan: Plan, path: str) -> None:
        self.plan = plan
        self.path = path
        self._changes: list[Change] = []
        self._on_remove: list[Callable[[], None]] = []
        self._hook: RemovableHandle | None = None
        self._home: nn.Module | None = None
        self.segment_hooks: SegmentHooks | None = None
        self.hooks: list[RemovableHandle] = []
        self.offloaders: tuple[Offloader, ...] = ()
        self.waiting: WaitingWeights | None = None
        self.pending_errors = PendingErrors()
        self.tilings: list[Tiling] = []
        self.siblings: list[StackPatch] = [self]
        self.train_call: TrainCall = NoCall()
        # Not where others act on the flag of a layer as if transformers' own checkpointing were on.
        self.uses_seam = True
        self.drops_cache = False
        self.reads_cache = False
        self.cache_check: SharedIndexCheck | None = None
        self.told: set[Topic] = set()
        self.switched: SwitchedByOthers | None = None
        self._is_paused = False
        self._is_logged = False

    def set(self, path: str, module: nn.Module, name: str, ours: object) -> None:
        # Layers that share a module want the same of it (`check_exact` has seen to that): the first one sets it.
        if any(change.module is module and change.name == name for change in self._changes):
            return
        self._changes.append(Change(path, module, name, own(module, name), ours))
        setattr(module, name, ours)

    def make_region(self, path: str, module: nn.Module, region: Region, modes: OtherModes) -> None:
        """Make a whole layer a region, through the seam if that is what runs. `modes` are for messages."""
        reads_only = bool(getattr(type(module), READS_CACHE_ONLY, False))
        self.drops_cache |= not reads_only
        self.reads_cache |= reads_only
        if self.uses_seam and runs_seam(module):
            self.set(path, module, STATE, ModuleState(path, self.pending_errors, modes))
            if hasattr(module, READS_CACHE_ONLY):
                # The region takes caches out, and nothing else that has such a name.
                self.set(path, module, READS_CACHE_ONLY, True)
            self.set(path, module, FUNCTION, region)
            self.set(path, module, FLAG, True)
        else:
            self.set_forward(path, module, partial(run_region, region), modes)

    def set_forward(self, path: str, module: nn.Module, run: partial[Any], modes: OtherModes | None = None) -> None:
        """Set `run` as instance forward. It gets the module, the instance's former forward or None, and the inputs."""
        found = module.__dict__.get(FORWARD)
        if isinstance(found, partial) and found.func is run.func:
            # A module that two layers share: the first of them has reached it already.
            return
        self.set(path, module, STATE, ModuleState(path, self.pending_errors, modes))
        ours = set_method(module, FORWARD, partial(run, module))
        self._changes.append(Change(path, module, FORWARD, ours.args[-1], ours))

    def watch_above(self, model: nn.Module) -> None:
        """Let regions bring back what the modules that contain them hold: a layer may count there as well."""
        for change in self._changes:
            if isinstance(change.ours, ModuleState):
                change.ours.above = _modules_above(model, change.path)

    @property
    def is_removed(self) -> bool:
        return self._home is None

    def on_remove(self, undo: Callable[[], None]) -> None:
        self._on_remove.append(undo)

    def take_undos(self) -> list[Callable[[], None]]:
        undos, self._on_remove = self._on_remove, []
        return undos

    def seams(self) -> Set[nn.Module]:
        return {change.module for change in self._changes if change.name == FLAG}

    def attach(self, home: nn.Module, owner: nn.Module) -> None:
        """Put the patch on `home`, the list of layers, so that copies have it; hook the owner's forward."""
        self._home = home
        setattr(home, HANDLE, self)
        self._hook = owner.register_forward_pre_hook(partial(_before_forward, self), with_kwargs=True)

    def remove(self) -> None:
        """Put back what was found, all of it: errors of single undos are raised in the end."""
        undos: list[Callable[[], object]] = [change.undo for change in reversed(self._changes)]
        # Not by `on_remove`, which another plan would take over.
        ends = [self._hook, self.segment_hooks, *self.hooks, self.switched]
        undos += [*self._on_remove, *(end.remove for end in ends if end is not None)]
        if self.cache_check is not None:
            undos.append(self.cache_check.end)
        undos += [offloader.close for offloader in self.offloaders]
        if self.waiting is not None:
            undos.append(self.waiting.bring_back)
        if self._home is not None:
            undos.append(partial(delattr, self._home, HANDLE))
        self._changes, self._on_remove, self.hooks = [], [], []
        self._home = self._hook = None
        self.train_call = NoCall()
        run_all(undos)

    def remove_if_over(self) -> bool:
        """Put back what was found, in all stacks of the model, if an exception has ended the run that it was set for.

        Returns whether it had: a run that ends otherwise does so itself.
        """
        if not self.train_call.is_over():
            return False
        logger.info(LEFTOVER)
        run_all(patch.remove for patch in reversed(self.siblings))
        return True

    def refuse_cache(self, arguments: Iterable[object]) -> None:
        """Raise `UnsupportedError` if an argument is a key/value cache: recomputed layers can neither read nor fill it.

        A cache that the model makes for itself in training serves nobody, and is left out of recomputed layers.
        """
        # What layers of one stack would read, those of another may have been kept from filling.
        is_lost = self.drops_cache or (self.reads_cache and any(patch.drops_cache for patch in self.siblings))
        if is_lost and any(map(is_cache, arguments)):
            raise UnsupportedError(
                f"The model that runs {self.path} was handed a key/value cache in a training step (prefix tuning, a "
                "prompt that was encoded before, or use_cache=True). Recomputed layers can neither read nor fill it, "
                'and the loss would change without a word. Set use_cache=False, or use mode "none" or "ffn" there.'
            )

    def assert_in_force(self) -> None:
        """Bring the plan back where another library switched it off, or raise `PlanMismatchError` (new forward)."""
        if self._is_paused:
            # The last forward had no gradients.
            for change in self._seams():
                if change.ours:
                    change.assert_again()
            self._is_paused = False
        if self.segment_hooks is not None and self._home is not None:
            self.segment_hooks.place(self._home)
        self._replace_lost_seams()
        lost = [change for change in self._changes if not change.is_in_force()]
        if lost:
            self._log_or_raise(lost)
            if self.switched is not None:
                self.switched.take_off_hooks()
        for change in lost:
            change.assert_again()

    def _replace_lost_seams(self) -> None:
        """Go on by an instance forward where somebody has put another one in the place of transformers' wrapper."""
        for flag in [change for change in self._seams() if change.ours and not runs_seam(change.module)]:
            changes = (each for each in self._changes if each.module is flag.module and each.name == FUNCTION)
            region: Any = next(changes).ours
            flag.ours = False
            flag.assert_again()
            self.set_forward(flag.path, flag.module, partial(run_region, region))

    def _log_or_raise(self, lost: list[Change]) -> None:
        for change in lost:
            if change.name == FORWARD:
                by = qualified_name(change.module.__dict__.get(FORWARD))
                raise PlanMismatchError(
                    f"The forward of {change.path} was replaced by {by} after the policy was applied, so that the plan "
                    "is no longer in force there. Apply the policy after that call."
                )
        in_layers = [change for change in lost if change.path.startswith(f"{self.path}.")]
        if in_layers and not self._is_logged:
            by = qualified_name(in_layers[0].module.__dict__.get(FUNCTION))
            logger.info(
                "%d layers of %s were switched to another activation checkpointing (%s) after the policy was applied; "
                "the policy is in force again.",
                len({change.path for change in in_layers}),
                self.path,
                by,
            )
            self._is_logged = True

    def pause(self) -> None:
        """Switch the seam off for a forward without gradients in training mode."""
        # transformers' seam drops the cache whenever the layer is in training mode, so that `generate()` between two
        # steps would give wrong tokens.
        # Of layers that keep everything too: another library may have switched it on, as trl does after it has asked a
        # reference.
        for change in self._seams():
            setattr(change.module, FLAG, False)
        self._is_paused = True

    def tell_of_eval(self) -> None:
        """Say once that nothing is recomputed in eval mode: a forward with gradients has come."""
        if self.plan.does_nothing or any(change.module.training for change in self._changes):
            return
        if Topic.EVAL_MODE not in self.told:
            self.told.add(Topic.EVAL_MODE)
            logger.warning(
                "%s runs in eval mode with gradients on, where the plan rests: nothing is recomputed, and activations "
                "are kept as without it. If a backward follows, call train() on the model, with the p of its dropouts "
                "at 0 if they are to be off; if none follows, use torch.no_grad().",
                self.path,
            )

    def _seams(self) -> Iterator[Change]:
        return (change for change in self._changes if change.name == FLAG)


class SegmentHooks:
    """Hooks on what stands outermost in the place of a segment's layers, where FSDP or ZeRO-3 gathers their weights."""

    def __init__(self, runner: SegmentRunner, indices: list[int]) -> None:
        self._runner = runner
        self._indices = indices
        self._hooks: dict[int, tuple[nn.Module, RemovableHandle, RemovableHandle]] = {}

    def place(self, home: nn.Module) -> None:
        """Place the hooks, first and last of the module's own, wherever an engine has come since they were placed."""
        modules = members(home)
        # Layers may have been dropped from the end.
        for layer_idx in [layer_idx for layer_idx in self._indices if layer_idx < len(modules)]:
            outer = modules[layer_idx]
            is_hooked = is_unit(outer) or deepspeed.is_hooked(outer)
            # Before transformers 5.23 the region of a layer takes in its own hooks, an engine's among them.
            holds_its_hooks = SEAM_METHOD == "__call__" and runs_seam(outer)
            if not is_hooked or holds_its_hooks or self._is_placed(layer_idx, outer):
                continue
            self._take_off(layer_idx)
            runner = self._runner
            first = outer.register_forward_pre_hook(partial(enter, runner, layer_idx), prepend=True, with_kwargs=True)
            last = outer.register_forward_hook(partial(leave, runner, layer_idx))
            self._hooks[layer_idx] = (outer, first, last)

    def _is_placed(self, layer_idx: int, outer: nn.Module) -> bool:
        if layer_idx not in self._hooks:
            return False
        module, first, last = self._hooks[layer_idx]
        return module is outer and first.id == next(iter(outer._forward_pre_hooks)) and last.id in outer._forward_hooks

    def _take_off(self, layer_idx: int) -> None:
        for hook in self._hooks.pop(layer_idx, ())[1:]:
            hook.remove()

    def remove(self) -> None:
        for layer_idx in self._indices:
            self._take_off(layer_idx)


def runs_seam(module: nn.Module) -> bool:
    """Whether transformers' wrapper, which hands a layer's forward to its checkpoint function, is what runs."""
    if not isinstance(module, GradientCheckpointingLayer):
        return False
    # It is not where somebody has assigned another `forward` to the class or to the layer.
    forward = module.__dict__.get(FORWARD) if SEAM_METHOD == FORWARD else None
    if isinstance(forward, partial) and forward.func.__module__ == "accelerate.hooks":
        # It calls the class's. What it moves for each use must be there in the recomputation as well.
        forward = module.__dict__.get(FORWARD_BEFORE_HOOK)
        forward = None if getattr(forward, "__code__", None) is SEAM_CODE else forward
    return forward is None and getattr(getattr(type(module), SEAM_METHOD), "__code__", None) is SEAM_CODE


def _before_forward(patch: StackPatch, owner: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
    # torch calls a hook without keywords that another hook of the same call has just removed.
    if kwargs is None or torch.compiler.is_compiling() or patch.remove_if_over():
        return
    if patch.is_removed:
        # Somebody has kept the hooks, and put them back.
        return
    if not owner.training:
        if torch.is_grad_enabled():
            patch.tell_of_eval()
    elif torch.is_grad_enabled():
        patch.refuse_cache((*args, *kwargs.values()))
        patch.assert_in_force()
    else:
        patch.pause()


# --- What others switch. ---

# Others switch transformers' own checkpointing off and on during a plan, and take it to be on by the flag of the plan's
# layers: trl does around its reference and generation.

_NAMES = (FUNCTION, *INPUT_GRADIENTS)


class SwitchedByOthers:
    """The attributes and hooks of a model that such a switch changes, as they were found."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found = {module: {name: own(module, name) for name in _NAMES} for module in _marked(model)}
        self._hooks = {key for module in model.modules() for key in _hooks_of(module)}

    def take_off_hooks(self) -> None:
        """Take off the hooks on embeddings that have come: each switch places one more."""
        for module in self._model.modules():
            for key in _hooks_of(module) - self._hooks:
                del module._forward_hooks[key]

    def remove(self) -> None:
        """Put back what was found, where the function that recomputes is another one; asked once the plan's is off."""
        # What has come since had none of them.
        marked = {**dict.fromkeys(_marked(self._model), dict.fromkeys(_NAMES, Missing)), **self._found}
        if all(own(module, FUNCTION) is found[FUNCTION] for module, found in marked.items()):
            return
        self.take_off_hooks()
        for module, found in marked.items():
            for name, value in found.items():
                restore_own(module, name, value)


def _marked(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not vars(module).keys().isdisjoint(_NAMES)]


def _hooks_of(module: nn.Module) -> set[int]:
    return {key for key, hook in module._forward_hooks.items() if asks_for_input_gradients(hook)}
