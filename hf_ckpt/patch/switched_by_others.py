"""What others leave on a model when they switch transformers' own checkpointing off and on during a plan.

They take it to be on, by the flag of the plan's layers: trl does around its reference and generation.
"""

from __future__ import annotations

from torch import nn

from hf_ckpt.structure.stored import Missing, own, put_back
from hf_ckpt.upstream.transformers import FUNCTION, INPUT_GRADIENTS, asks_for_input_gradients

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
                put_back(module, name, value)


def _marked(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not vars(module).keys().isdisjoint(_NAMES)]


def _hooks_of(module: nn.Module) -> set[int]:
    return {key for key, hook in module._forward_hooks.items() if asks_for_input_gradients(hook)}
