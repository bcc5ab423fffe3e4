"""axolotl's plugin: adds `HFCkptCallback` with the options of a section `hf_ckpt` of axolotl's YAML file.

    plugins: [hf_ckpt.integrations.axolotl.HFCkptPlugin]
    hf_ckpt: {policy: auto, memory_budget: 22GiB}
    gradient_checkpointing: false

Written against the plugin interface of axolotl's source (src/axolotl/integrations/base.py, commit 002a637c) and tested
against its signatures; axolotl itself was not run with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_ckpt.callback import HFCkptCallback
from hf_ckpt.errors import PolicyError

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
except ImportError:
    BasePlugin = object
    BaseModel = object  # type: ignore[assignment,misc]

SECTION = "hf_ckpt"


class HFCkptArgs(BaseModel):
    """The section, for axolotl's check of its file."""

    hf_ckpt: dict[str, Any] | None = None


class HFCkptPlugin(BasePlugin):  # type: ignore[misc]  # axolotl is not always there
    """Adds the callback to axolotl's trainer, before it is made."""

    def get_input_args(self) -> str:
        """Return where the model of the section is."""
        return f"{__name__}.{HFCkptArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[HFCkptCallback]:
        """Return the callback.

        Raises:
            PolicyError: the file has no section `hf_ckpt` with a policy, or the policy cannot be read.
        """
        options = _plain(cfg.get(SECTION) or {})
        if "policy" not in options:
            raise PolicyError(
                f"The plugin {type(self).__name__} is on, but axolotl's file names no policy for it. Write, for "
                f"instance, {SECTION}: {{policy: auto, memory_budget: 22GiB}}, or take the plugin out of plugins."
            )
        return [HFCkptCallback(**options)]


def _plain(value: Any) -> Any:
    """Return axolotl's mappings, which answer None for any name, as dictionaries."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
