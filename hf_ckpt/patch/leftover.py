"""A plan whose run has ended in an exception, which no event tells of: found where its model is used next.

That is a forward, a change between training and evaluation (all that is seen of a compiled model), a save, another
plan, or another Trainer with the callback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from hf_ckpt.patch.apply import Applied, remove_leftover
from hf_ckpt.patch.train_call import TrainCall, train_call

_SAVE, _TRAIN = "save_pretrained", "train"


@dataclass(frozen=True)
class _Run:
    """A call of a Trainer, and what is done before its plan is taken off while another Trainer runs."""

    call: TrainCall
    leave_use_cache: Callable[[], None]

    def look_at(self, model: nn.Module) -> None:
        """Take the plan off if the call is over."""
        if torch.compiler.is_compiling() or self.call.is_running():
            return
        if train_call() is not None:
            self.leave_use_cache()
        remove_leftover(model)


def look_out(applied: Applied, model: nn.Module, call: TrainCall, leave_use_cache: Callable[[], None]) -> None:
    """Have a plan taken off when its model is used after the end of the call that it was put on in.

    Args:
        applied: the plan.
        model: as it is trained.
        call: of the Trainer.
        leave_use_cache: is called before, where another Trainer has set the `use_cache` that it wants by then.
    """
    applied.belongs_to(call)
    run = _Run(call, leave_use_cache)
    applied.on_remove(model.register_forward_pre_hook(partial(_before_forward, run), prepend=True).remove)
    applied.on_remove(_place(_TRAIN, model, run))
    for module in model.modules():
        if hasattr(type(module), _SAVE):
            # In the middle of a step use_cache is off in the config, which is saved before anything else is asked for.
            applied.on_remove(_place(_SAVE, module, run))


def _before_forward(run: _Run, model: nn.Module, args: Any) -> None:
    run.look_at(model)


def _place(name: str, module: nn.Module, run: _Run) -> Callable[[], None]:
    """Set an instance method that looks first, and return what puts back what was there."""
    found = module.__dict__.get(name)
    setattr(module, name, update_wrapper(partial(_look_first, run, module, name, found), getattr(module, name)))
    return partial(_put_back, module, name, found)


def _look_first(
    run: _Run, module: nn.Module, name: str, found: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    run.look_at(module)
    return getattr(type(module), name)(module, *args, **kwargs) if found is None else found(*args, **kwargs)


def _put_back(module: nn.Module, name: str, found: Callable[..., Any] | None) -> None:
    current = module.__dict__.get(name)
    if not isinstance(current, partial) or current.func is not _look_first:
        # Whoever put another one over ours knows what to put back.
        return
    if found is None:
        del module.__dict__[name]
    else:
        setattr(module, name, found)
