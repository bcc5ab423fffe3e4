"""The key/value cache of a model's configs, off while training steps run and the user's own value otherwise.

A plan that does nothing leaves it as it is, unless other plans may take its place.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.execution_state import is_in_backward, is_started_again
from hf_ckpt.structure.layers import Stack, modules_of
from hf_ckpt.structure.stored import own, restore_own, stored
from hf_ckpt.upstream.transformers import CACHE_ARGUMENTS

logger = logging.getLogger(__name__)

_NAME = "use_cache"
_RECORD = "_hf_ckpt_use_cache"
_PACKED = ("position_ids", "attention_mask")


class UseCache:
    """The `use_cache` values that a model's configs, and those of the models inside it, had when this was made."""

    def __init__(self, model: nn.Module) -> None:
        found = (stored(module, "config") for module in modules_of(model))
        # Models that are not transformers' may have anything by that name.
        configs = {id(config): config for config in found if hasattr(config, "__dict__")}
        # The outermost one: wrappers such as PEFT's, which have none, answer with it.
        self._own = next(iter(configs.values()), None)
        # The Trainer writes the value into the model's own config even where that has none (vision-language models).
        self._found = [
            (config, own(config, _NAME)) for config in configs.values() if config is self._own or hasattr(config, _NAME)
        ]
        self._set: dict[int, object] = {}

    def without_plan(self, of_trainer: bool) -> dict[int, object]:
        """Return the values that a Trainer's steps would see, by the id of the config; it sets the model's own one."""
        return {id(config): of_trainer if config is self._own else value for config, value in self._found}

    def set(self, values: Mapping[int, object]) -> None:
        """Set the values by the id of the config, and False where there is none."""
        self._set = {id(config): values.get(id(config), False) for config, _ in self._found}
        for config, _ in self._found:
            setattr(config, _NAME, self._set[id(config)])

    @property
    def is_set(self) -> bool:
        return bool(self._set)

    def restore(self) -> None:
        """Set every value that is as it was set, or False, to what it was; another value is somebody's later choice."""
        for config, value in self._found:
            if vars(config).get(_NAME) is self._set.get(id(config), False):
                restore_own(config, _NAME, value)
        self._set = {}


def record(model: nn.Module) -> None:
    """Keep the user's values on the model until `restore_recorded`: a Trainer that is being built overwrites them next.

    A Trainer that was built earlier and has not trained may have done so already; its record is then the one to trust.
    """
    restore_recorded(model)
    setattr(model, _RECORD, UseCache(model))


def restore_recorded(model: nn.Module) -> None:
    """Undo what Trainers did since `record`; from then on the configs themselves hold the user's values."""
    for module in modules_of(model):
        recorded = module.__dict__.pop(_RECORD, None)
        if recorded is not None:
            recorded.restore()


def skip_in_training_forwards(model: nn.Module, check: SharedIndexCheck) -> Iterator[RemovableHandle]:
    """Place hooks that make no cache in training forwards unless the caller asks for one; configs stay as they are."""
    # The arguments are set, not the configs: those are what others read and save at any time. All models inside are
    # reached, for one that reads its config hands what it finds there to the next as if a caller had asked for it.
    # `check` stops the first forward if the cache would matter.
    for module in modules_of(model):
        if isinstance(module, PreTrainedModel) and getattr(stored(module, "config"), _NAME, None) is not None:
            parameters = inspect.signature(module.forward).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            if _NAME in parameters or takes_any:
                # What has no place of its own comes by keyword only.
                places = {name: place for place, name in enumerate(parameters) if name in (_NAME, *_PACKED)}
                hook = partial(_without_cache, check, places)
                yield module.register_forward_pre_hook(hook, with_kwargs=True)


def _without_cache(
    check: SharedIndexCheck,
    places: Mapping[str, int],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    # torch calls a hook without keywords that another hook of the same call has just removed.
    if kwargs is None or check.leaves_cache or not module.training or not torch.is_grad_enabled():
        return None

    def given(name: str) -> Any:
        place = places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name)

    asked = given(_NAME)
    check.enter(module, asked)
    if asked is not None:
        if asked:
            check.tell_of_empty_cache()
        return None
    position_ids, attention_mask = map(given, _PACKED)
    # Positions that begin anew: transformers keeps the rows apart only where there is no cache (`masking_utils`).
    # Without the plan there would be one.
    is_on = position_ids is not None and attention_mask is None and check.is_on_without_plan(module)
    if is_on:
        check.tell_of_packed_rows(position_ids)
    place = places.get(_NAME, len(args))
    if len(args) <= place:
        return args, {**kwargs, _NAME: is_on}
    return (*args[:place], is_on, *args[place + 1 :]), kwargs


class Topic(Enum):
    """What is said once of a plan, and of those that take its place; nothing of it of simulated steps."""

    EMPTY_CACHE = "a cache that is asked for comes back empty"
    PACKED_ROWS = "documents of a sequence attend to those before them"
    EVAL_MODE = "a forward keeps activations in eval mode"


class SharedIndexCheck:
    """Looks, in the first training forward that would make a cache, whether one layer would read what another wrote."""

    # Layers write their keys and values to the cache at their `layer_idx`, and attend to all that is there. Where
    # layers share an index, or one runs several times (looped models), the cache changes the loss: a forward without
    # it, or with layers that it is taken out of, is another one. `drops_cache` says whether the plan takes it out of
    # some, `does_nothing` whether it leaves the model as it is.

    def __init__(self, stacks: Sequence[Stack], told: set[Topic], *, drops_cache: bool, does_nothing: bool) -> None:
        self._does_nothing = does_nothing
        self.is_on_ladder = False
        """Whether other plans may take this one's place: all have to give the same bits, which a cache may change."""
        self._stacks = stacks
        self._drops_cache = drops_cache
        self._is_done = self._is_over = False
        self._handles: list[RemovableHandle] = []
        # The models that run now, as each makes a cache of its own, and which module of which layer has run, by what
        # tells its place in that cache.
        self._running: list[tuple[nn.Module, dict[object, list[tuple[nn.Module, nn.Module]]]]] = []
        self.values: Mapping[int, object] = {}
        """Of `use_cache` without the plan, by the id of the config, where it is not what the config has."""
        self._told = told

    @property
    def leaves_cache(self) -> bool:
        """Whether forwards are to make a cache as they do without the plan."""
        return self._is_over or (self._does_nothing and not self.is_on_ladder)

    def is_on_without_plan(self, module: nn.Module) -> bool:
        """Whether the model would make a cache if there were no plan, and nobody asks."""
        config: Any = module.config
        return bool(self.values.get(id(config), getattr(config, _NAME)))

    def tell_of_empty_cache(self) -> None:
        """Say once that a cache which is asked for comes back empty: recomputed layers can neither read nor fill it."""
        if self._drops_cache and Topic.EMPTY_CACHE not in self._told and not torch.compiler.is_compiling():
            self._told.add(Topic.EMPTY_CACHE)
            logger.warning(
                "use_cache=True is asked for in a training forward, but layers that recompute their attention put no "
                'keys and values into the cache: it comes back empty there. Use mode "none" or "ffn" where a loss '
                "reads it, or leave use_cache out."
            )

    def tell_of_packed_rows(self, position_ids: Any) -> None:
        """Say once what becomes of rows in one: a forward with a cache has come, without a mask."""
        if Topic.PACKED_ROWS in self._told or torch.compiler.is_compiling():
            return
        begins_anew = bool((position_ids.diff(dim=-1) != 1).any())
        if begins_anew or not position_ids.is_cpu:
            # A device is waited for, and so is asked once.
            self._told.add(Topic.PACKED_ROWS)
        if begins_anew:
            logger.warning(
                "Position ids begin again within a sequence, no attention_mask came, and use_cache is on. So "
                "transformers lets each document of the sequence attend to those before it, with this plan and "
                "without. With use_cache=False documents are kept apart, which is another loss. Say in the call or the "
                "config which is meant: use_cache=False for packed documents."
            )

    def enter(self, module: nn.Module, asked: object) -> None:
        """A model begins to run in training; the caller asks for a cache, for none, or for nothing (None)."""
        if self._is_done or torch.compiler.is_compiling():
            return
        is_changed = self._drops_cache if asked else asked is None and self.is_on_without_plan(module)
        if self._running and self._running[0][0] is module:
            # An exception has ended its last forward.
            self._running.clear()
            self.remove()
        if not self._running and not is_changed:
            return
        if not self._handles:
            self._place_hooks()
        self._running.append((module, {}))
        self._handles.append(module.register_forward_hook(self._leave))

    def _place_hooks(self) -> None:
        layers = [(stack, layer) for stack in self._stacks for layer in stack.layers]
        for layer, path in {layer.module: f"{stack.path}.{layer.layer_idx}" for stack, layer in layers}.items():
            for inner in filter(_writes_cache, layer.modules()):
                hook = partial(self._note, layer, path)
                self._handles.append(inner.register_forward_pre_hook(hook, with_kwargs=True))

    def _leave(self, *_: Any) -> None:
        self._running.pop()
        if not self._running:
            self._is_done = True
            self.remove()

    def end(self) -> None:
        self._is_over = True
        self.remove()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _note(self, layer: nn.Module, path: str, module: Any, args: Any, kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is None or not self._running or is_in_backward() or is_started_again():
            return
        # Looped models hand a module the number of the round, or its index.
        numbers = [item for item in (*enumerate(args), *kwargs.items()) if type(item[1]) is int]
        known = self._running[-1][1].setdefault((module.layer_idx, *numbers), [])
        # Attention and cross-attention of one layer have a cache each.
        is_shared = any(other is module or other_layer is not layer for other, other_layer in known)
        known.append((module, layer))
        if is_shared:
            raise UnsupportedError(
                f"The plan runs layers without a key/value cache in training, but {path} has layer_idx "
                f"{module.layer_idx} in a forward that has used it before (a layer that runs again, or several with "
                "one index): with a cache, as without the plan, it would attend to those keys too, and the loss be "
                "another. Set use_cache=False in the call or the config, which changes the model with and without a "
                "plan alike, or give each layer a layer_idx of its own."
            )


def _writes_cache(module: nn.Module) -> bool:
    """Whether a module writes to a cache at an index of its own, rather than one inside of it."""
    indexed = [each for each in module.modules() if type(vars(each).get("layer_idx")) is int]
    writers = [each for each in indexed if not CACHE_ARGUMENTS.isdisjoint(inspect.signature(each.forward).parameters)]
    return writers == [module]
