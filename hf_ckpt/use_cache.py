"""The key/value cache of a model's configs, off while training steps run and the user's own value otherwise."""

from __future__ import annotations

from torch import nn


class UseCache:
    """The `use_cache` values that a model's configs had when this was made.

    Args:
        model: a model; every config of it and of the models inside it counts.
    """

    def __init__(self, model: nn.Module) -> None:
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        self._found = [(config, config.use_cache) for config in configs.values() if hasattr(config, "use_cache")]

    def covers(self, model: nn.Module) -> bool:
        """Whether this was made from the config that the model has."""
        return any(config is getattr(model, "config", None) for config, _ in self._found)

    def off(self) -> None:
        """Set every value to False: a cache would only hold memory in a training step."""
        for config, _ in self._found:
            config.use_cache = False

    def restore(self) -> None:
        """Set every value to what it was."""
        for config, value in self._found:
            config.use_cache = value
