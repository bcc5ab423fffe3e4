"""What others leave on a model when they switch transformers' own checkpointing off and on during a plan.

They take it to be on, by the flag of the plan's layers: trl does around its reference and generation.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_ckpt.upstream.transformers import FUNCTION, INPUT_GRADIENTS, asks_for_input_gradients

_NAMES = (FUNCTION, *INPUT_GRADIENTS)


class SwitchedByOthers:
    """The attributes and hooks of a model that such a switch changes, as they were found."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found = {
            module: {name: vars(module)[name] for name in _NAMES if name in vars(module)} for module in _marked(model)
        }
        self._hooks = {key for module in model.modules() for key in _hooks_of(module)}

    def take_off_hooks(self) -> None:
        """Take off the hooks on embeddings that have come: each switch places one more."""
        for module in self._model.modules():
            for key in _hooks_of(module) - self._hooks:
                del module._forward_hooks[key]

    def remove(self) -> None:
        """Put back what was found, where the function that recomputes is another one; asked once the plan's is off."""
        marked = {**self._found, **dict.fromkeys(_marked(self._model))}
        if not any(vars(module).get(FUNCTION) is not self._of(module).get(FUNCTION) for module in marked):
            return
        self.take_off_hooks()
        for module in marked:
            found = self._of(module)
            for name in _NAMES:
                if name not in found:
                    vars(module).pop(name, None)
                elif found[name] is not vars(module).get(name):
                    setattr(module, name, found[name])

    def _of(self, module: nn.Module) -> dict[str, Any]:
        return self._found.get(module, {})


def _marked(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not vars(module).keys().isdisjoint(_NAMES)]


def _hooks_of(module: nn.Module) -> set[int]:
    return {key for key, hook in module._forward_hooks.items() if asks_for_input_gradients(hook)}
