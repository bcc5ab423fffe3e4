"""Activation checkpointing that others ask for, which a plan overrules: the Trainer's arguments, the model, accelerate.

That of accelerate under FSDP would wrap the layers that the plan governs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers import TrainingArguments
from transformers.utils import logging as transformers_logging

from hf_ckpt.patch.instance_methods import method_before, set_method
from hf_ckpt.structure.stored import replaced
from hf_ckpt.upstream import accelerate
from hf_ckpt.upstream.transformers import CHECKPOINTING_ARGUMENTS, OTHER_FLAGS

logger = logging.getLogger(__name__)


def hold_off_accelerates_checkpointing(trainer: Any, callback: object, *, is_quiet: bool) -> None:
    """Leave out the activation checkpointing that accelerate wraps layers with, as long as a Trainer has a callback.

    `is_quiet`: say what is overruled in the log only.
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
    # The setting is that of the process, and so of all its Trainers: it is another one during this call alone.
    with replaced(plugin, "activation_checkpointing", False):
        return prepare(*args, **kwargs)


def say_who_governs(args: TrainingArguments, model: nn.Module, *, is_quiet: bool) -> None:
    """Say that activation checkpointing which the training arguments or the model ask for is not what happens."""
    if any(getattr(args, name, None) for name in CHECKPOINTING_ARGUMENTS):
        say_overruled(args, "Gradient (activation) checkpointing of the training arguments", is_quiet=is_quiet)
    # A flag of the instance, by the names of timm and others: transformers' own flag is the seam of the plan.
    owns = [
        f"{name}.{flag}".lstrip(".")
        for name, module in model.named_modules()
        for flag in OTHER_FLAGS
        if vars(module).get(flag) is True
    ]
    if owns:
        more = f" and {len(owns) - 1} more" if len(owns) > 1 else ""
        say_overruled(args, f"The model's own checkpointing ({owns[0]}=True{more})", is_quiet=is_quiet)


def say_overruled(args: TrainingArguments, what: str, *, is_quiet: bool) -> None:
    """Say that the policy governs in place of something that the user asked for."""
    # A warning, which Python shows where no logging is set up: it is said under `disable_tqdm` too.
    if args.process_index == 0:
        is_shown = not is_quiet and transformers_logging.get_verbosity() <= logging.WARNING
        level = logging.WARNING if is_shown else logging.INFO
        logger.log(level, "%s is overruled: the policy of HFCkptCallback governs.", what)
