"""accelerate's own activation checkpointing under FSDP, which would wrap the layers that a plan governs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hf_ckpt.patch.instance_methods import method_before, set_method
from hf_ckpt.structure.stored import replaced
from hf_ckpt.trainer.messages import say_overruled
from hf_ckpt.upstream import accelerate


def hold_off_accelerates_checkpointing(trainer: Any, callback: object, *, is_quiet: bool) -> None:
    """Leave out the activation checkpointing that accelerate wraps layers with, wherever a Trainer prepares its model.

    The setting is that of the process, and so of all its Trainers: it is another one during that call alone.

    Args:
        trainer: that is being built.
        callback: for as long as the Trainer has it.
        is_quiet: say what is overruled in the log only.
    """
    plugin = accelerate.fsdp_plugin()
    if plugin is not None and plugin.activation_checkpointing:
        say_overruled(trainer.args, "fsdp_activation_checkpointing of accelerate", is_quiet=is_quiet)
        accelerator = trainer.accelerator
        set_method(accelerator, "prepare", partial(_prepare, accelerator, callback, trainer.callback_handler))


def _prepare(
    accelerator: Any, callback: object, handler: Any, found: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    prepare = method_before(accelerator, "prepare", found)
    plugin = accelerate.fsdp_plugin()
    if plugin is None or callback not in handler.callbacks:
        return prepare(*args, **kwargs)
    with replaced(plugin, "activation_checkpointing", False):
        return prepare(*args, **kwargs)
