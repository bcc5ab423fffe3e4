"""Transformers' own activation checkpointing, as `TrainingArguments(activation_checkpointing=True)` turns it on.

Non-reentrant, with the input gradients that it asks for. What it leaves behind when it is turned off (a hook on the
embedding, attributes of modules) is taken away, so that the next contender finds the model as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.side_by_side.contender import OFFLOAD_WARMUP, Contender, NotHereError

_ATTRIBUTES = (
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "gradient_checkpointing_enable",
    "_require_grads_hook",
    "_require_grads_hooks",
)
"""What libraries set on instances of modules when they turn checkpointing on."""
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Undo what was done in this context to the switches of checkpointing and to the forward hooks of all modules."""
    found = [
        (module, _found(module), {name: list(vars(module)[name]) for name in _HOOKS}) for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, hooks in found:
            _set_back(module, attributes)
            for name, keys in hooks.items():
                for key in vars(module)[name].keys() - keys:
                    del vars(module)[name][key]


def _found(module: nn.Module) -> dict[str, Any]:
    return {name: vars(module)[name] for name in _ATTRIBUTES if name in vars(module)}


def _set_back(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name in _ATTRIBUTES:
        vars(module).pop(name, None)
    vars(module).update(attributes)


def enable(model: nn.Module, kwargs: dict[str, Any] | None = None, **options: Any) -> None:
    """Turn checkpointing on as the Trainer does.

    Args:
        model: of transformers, or one of peft around it.
        kwargs: `activation_checkpointing_kwargs`; non-reentrant if left out.
        options: of `activation_checkpointing_enable`, as `every_n_layers`.

    Raises:
        NotHereError: this version has no such option.
    """
    # transformers before 5.23 knows the older name only.
    is_new = hasattr(model, "activation_checkpointing_enable")
    technique = "activation" if is_new else "gradient"
    turn_on: Callable[..., None] = getattr(model, f"{technique}_checkpointing_enable")
    unknown = sorted(options.keys() - inspect.signature(turn_on).parameters.keys())
    if unknown:
        raise NotHereError(
            f"{technique}_checkpointing_enable has no {', '.join(unknown)} in this version of transformers"
        )
    turn_on(**{f"{technique}_checkpointing_kwargs": kwargs or {"use_reentrant": False}}, **options)


def try_out(model: nn.Module, name: str) -> None:
    """Run what transformers would run each layer in, which may fail in the first forward only.

    Args:
        model: with checkpointing turned on.
        name: of what is tried.

    Raises:
        NotHereError: it failed.
    """
    functions = (vars(module).get("_gradient_checkpointing_func") for module in model.modules())
    checkpointing = next(function for function in functions if function is not None)
    device = next(model.parameters()).device
    try:
        checkpointing(Tensor.sin, torch.ones(1, device=device, requires_grad=True))
    except (RuntimeError, ValueError) as error:
        raise NotHereError(f"{name} fails here: {error}") from error


@contextmanager
def _checkpointed(model: nn.Module, **options: Any) -> Iterator[nn.Module]:
    with put_back(model):
        enable(model, **options)
        yield model


@contextmanager
def _offloaded(model: nn.Module) -> Iterator[nn.Module]:
    with _checkpointed(model, offload=True):
        try_out(model, "transformers' offload")
        yield model


CONTENDERS = (
    Contender(name="transformers_full", title="transformers, full", group="today", enter=_checkpointed),
    *(
        Contender(
            name=f"transformers_every_{number}",
            title=f"transformers, every_n_layers={number}",
            group="today",
            enter=partial(_checkpointed, every_n_layers=number),
        )
        for number in (2, 4)
    ),
    Contender(
        name="transformers_offload",
        title="transformers, full with offload",
        group="today",
        enter=_offloaded,
        num_warmup=OFFLOAD_WARMUP,
    ),
)
