"""What others leave on a model when they switch transformers' own checkpointing off and on during a plan.

They take it to be on, by the flag of the plan's layers: trl does around its reference and generation.
"""

from __future__ import annotations

from torch import nn

from hf_ckpt.upstream.transformers import FUNCTION, INPUT_GRADIENTS, asks_for_input_gradients

_NAMES = (FUNCTION, *INPUT_GRADIENTS)


class SwitchedByOthers:
    """The attributes and hooks of a model that such a switch changes, as they were found."""

    def __init__(self, model: nn.Module) -> None:
        self._found = [
            (module, {name: vars(module)[name] for name in _NAMES if name in vars(module)}, _hooks_of(module))
            for module in model.modules()
        ]

    def take_off_hooks(self) -> None:
        """Take off the hooks on embeddings that have come: each switch places one more."""
        for module, _, hooks in self._found:
            for key in _hooks_of(module) - hooks:
                del module._forward_hooks[key]

    def remove(self) -> None:
        """Put back what was found, where the function that recomputes is another one; asked once the plan's is off."""
        if not any(vars(module).get(FUNCTION) is not found.get(FUNCTION) for module, found, _ in self._found):
            return
        self.take_off_hooks()
        for module, found, _ in self._found:
            for name in _NAMES:
                if name in found and found[name] is not vars(module).get(name):
                    setattr(module, name, found[name])
                elif name not in found:
                    vars(module).pop(name, None)


def _hooks_of(module: nn.Module) -> set[int]:
    return {key for key, hook in module._forward_hooks.items() if asks_for_input_gradients(hook)}
