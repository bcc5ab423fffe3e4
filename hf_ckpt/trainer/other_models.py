"""The models that a Trainer holds besides the one that it trains, such as a reference, a teacher or a reward model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OtherModel:
    """A module on the device with tensors that the trained model does not have."""

    name: str
    """Where it was found, such as `DPOTrainer.ref_model`."""
    module: nn.Module
    num_bytes: int
    """Of the tensors that are its own."""

    @property
    def attribute(self) -> str:
        """Under which its holder has it."""
        return self.name.rpartition(".")[2]


def other_models(trainer: Any, model: nn.Module, device: torch.device) -> Iterator[OtherModel]:
    """Yield the modules of a Trainer and its callbacks that have tensors besides the trained model's, each once.

    Args:
        trainer: that trains; None where none is found.
        model: as it is trained.
        device: whose memory counts.
    """
    trained = [getattr(trainer, name, None) for name in ("model", "model_wrapped")]
    own = {id(tensor) for each in (model, *trained) if isinstance(each, nn.Module) for tensor in tensors_of(each)}
    for name, module in _modules_of(trainer):
        tensors = {id(each): each for each in tensors_of(module) if id(each) not in own}
        own |= tensors.keys()
        if tensors:
            on_device = (each for each in tensors.values() if each.device.type == device.type)
            yield OtherModel(name, module, sum(each.nbytes for each in on_device))


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module."""
    yield from module.parameters()
    yield from module.buffers()


def _modules_of(trainer: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a Trainer and its callbacks hold, in lists and dictionaries too, by their names."""
    handler = getattr(trainer, "callback_handler", None)
    for holder in (trainer, *getattr(handler, "callbacks", ())):
        for name, value in getattr(holder, "__dict__", {}).items():
            for each in (value, *_held_by(value)):
                if isinstance(each, nn.Module):
                    yield f"{type(holder).__name__}.{name}", each


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list | tuple) else ()
