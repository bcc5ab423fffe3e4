"""What of a model its plan was made for: which parameters train, and how the model computes. Looked at in each step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from hf_ckpt.auto.batch_of_forward import without_adapter
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.upstream.peft import ACTIVE_ADAPTER, DISABLE_ADAPTERS
from hf_ckpt.upstream.transformers import ATTENTION

_trains = attrgetter("requires_grad")


class ModelState:
    """What a model is like now, held against what it was like when its plan was made.

    Args:
        model: that is trained.
        shape: the copy of it that is simulated.
        optimizer: the Trainer's, which may get other parameters; None where it has made none.
        autocast: the dtype that the step is simulated with; None where that is no mixed precision.
    """

    def __init__(self, model: nn.Module, shape: nn.Module, optimizer: Any, autocast: str | None) -> None:
        # The callback keeps this after the run, and is not to keep the weights.
        self._model, self._optimizer = ref(model), None if optimizer is None else ref(optimizer)
        self._parameters = WeakKeyDictionary({model: list(model.parameters())})
        self._shape = shape
        self._autocast = autocast
        self._place = next(model.parameters()).device.type
        self._known = self._now()

    def _now(self) -> tuple[object, ...]:
        model: Any = self._model()
        parameters = self._parameters[model]
        groups = getattr(self.optimizer, "param_groups", ())
        # Walking all modules for new ones would take longer than all else.
        num_others = [len(group["params"]) for group in groups], len(getattr(model, "peft_config", ()))
        computed = parameters[0].dtype, parameters[-1].dtype, _attention(model), self.autocast
        return list(map(_trains, parameters)), num_others, computed

    @property
    def optimizer(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    @property
    def autocast(self) -> str | None:
        """The dtype of mixed precision: the Trainer's, else that of the code around it."""
        if self._autocast is None and torch.is_autocast_enabled(self._place):
            return str(torch.get_autocast_dtype(self._place)).removeprefix("torch.")
        return self._autocast

    def is_changed(self) -> bool:
        """Whether it is another one than at the last look."""
        before, self._known = self._known, self._now()
        return self._known != before

    def follow(self, refuse: Callable[[str], UnsupportedError]) -> nn.Module:
        """Let the same parameters train in the copy that is simulated, and return the model.

        Raises:
            UnsupportedError: more than that has changed.
        """
        model = self._model()
        assert model is not None, "it runs"
        named, copied = dict(model.named_parameters()), dict(self._shape.named_parameters())
        self._parameters[model] = list(named.values())
        is_same = named.keys() == copied.keys() and all(
            each.shape == copied[name].shape and each.dtype == copied[name].dtype for name, each in named.items()
        )
        if not is_same or _attention(model) != _attention(self._shape):
            raise refuse("since the plan was made the model has got other parameters, dtypes or another attention")
        for name, each in copied.items():
            each.requires_grad_(named[name].requires_grad)
        modules = dict(model.named_modules())
        for name, module in self._shape.named_modules():
            own = vars(modules[name])
            vars(module).update({each: copy.copy(own[each]) for each in _OF_ADAPTERS if each in own})
        return model


_OF_ADAPTERS = (ACTIVE_ADAPTER, DISABLE_ADAPTERS, "merged_adapters")  # What a layer of PEFT says of its adapters.


def _attention(model: nn.Module) -> str | None:
    return getattr(getattr(without_adapter(model), "config", None), ATTENTION, None)
