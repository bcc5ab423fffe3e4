"""The key/value cache of a model's configs, off while training steps run and the user's own value otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_ckpt.structure.layers import modules_of
from hf_ckpt.structure.stored import stored

_NAME = "use_cache"
_RECORD = "_hf_ckpt_use_cache"


class _Missing:
    """Stands for a value that the config did not have."""


class UseCache:
    """The `use_cache` values that a model's configs, and those of the models inside it, had when this was made."""

    def __init__(self, model: nn.Module) -> None:
        own = stored(model, "config")
        found = (stored(module, "config") for module in modules_of(model))
        # Models that are not transformers' may have anything by that name.
        configs = {id(config): config for config in found if hasattr(config, "__dict__")}
        # The Trainer writes the value into the model's own config even where that has none (vision-language models).
        self._found = [
            (config, vars(config).get(_NAME, _Missing))
            for config in configs.values()
            if config is own or hasattr(config, _NAME)
        ]

    def off(self) -> None:
        """Set every value to False: a cache would only hold memory in a training step."""
        for config, _ in self._found:
            setattr(config, _NAME, False)

    def restore(self) -> None:
        """Set every value that is False to what it was; another value is somebody's later choice."""
        for config, value in self._found:
            if vars(config).get(_NAME) is not False:
                continue
            if value is _Missing:
                delattr(config, _NAME)
            else:
                setattr(config, _NAME, value)


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


def skip_in_training_forwards(model: nn.Module) -> Iterator[RemovableHandle]:
    """Place hooks that make no cache in training forwards unless the caller asks for one; configs stay as they are.

    The arguments are set, not the configs: those are what others read and save at any time. All models inside are
    reached, for one that reads its config hands what it finds there to the next as if a caller had asked for it.
    """
    for module in modules_of(model):
        if isinstance(module, PreTrainedModel) and getattr(stored(module, "config"), _NAME, None) is not None:
            parameters = inspect.signature(module.forward).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            if _NAME in parameters or takes_any:
                # Without a place of its own it comes by keyword only.
                place = list(parameters).index(_NAME) if _NAME in parameters else len(parameters)
                yield module.register_forward_pre_hook(partial(_without_cache, place), with_kwargs=True)


def _without_cache(
    place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    # torch calls a hook without keywords that another hook of the same call has just removed.
    if kwargs is None or not module.training or not torch.is_grad_enabled() or kwargs.get(_NAME) is not None:
        return None
    if len(args) <= place:
        return args, {**kwargs, _NAME: False}
    return (args if args[place] is not None else (*args[:place], False, *args[place + 1 :])), kwargs
