"""One call of a region's function, so kept that it can be run again.

Tensors of the graph are handed to autograd, which frees them with the graph, lets saved-tensor hooks see them, and
refuses them when they were changed in place. All other arguments are kept by reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.module_state import CallState
from hf_ckpt.regions.threads import OneOfSeveral
from hf_ckpt.regions.transforms import untransformed

Function = Callable[..., Any]


class AllRecomputed(Exception):  # noqa: N818  # a signal, not an error
    """Stops a recomputation once the last tensor that backward needs is there."""


class Call:
    """A function and its arguments, without the tensors that belong to the graph: `run` is given those.

    Made by `take_apart`.

    Attributes:
        state: of the modules that the function runs.
    """

    __slots__ = ("_args", "_function", "_kwargs", "_lengths", "_places", "_versions", "state")

    def __init__(self, function: Function, args: list[Any], kwargs: dict[str, Any], places: list[int | str]) -> None:
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._places = places
        self._versions = [
            (tensor, tensor._version)
            for value in (*args, *kwargs.values())
            for tensor in tensors_of(value)
            if not tensor.is_inference()
        ]
        self._lengths = [(value, len(value)) for value in (*args, *kwargs.values()) if isinstance(value, list)]
        self.state = CallState(function, args)

    def run(self, *tensors: Any) -> Any:
        """Call the function with `tensors` in their places.

        Raises:
            UnsupportedError: an argument has been changed since the call was made, by the function or by another; or
                the state of the modules has, in a way that cannot be brought back.
        """
        self._check_unchanged()
        args, kwargs = list(self._args), dict(self._kwargs)
        for place, tensor in zip(self._places, tensors, strict=True):
            if isinstance(place, str):
                kwargs[place] = tensor
            else:
                args[place] = tensor
        with self.state.as_in_forward(), untransformed(), OneOfSeveral():
            returned = self._function(*args, **kwargs)
        self._check_unchanged()
        return returned

    def _check_unchanged(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            change = "writes into a tensor that it is given, or another module does"
        elif any(len(values) != length for values, length in self._lengths):
            change = "appends to a list that it is given"
        else:
            return
        raise UnsupportedError(
            f"A layer that is to be recomputed {change}, so that recomputing it would give other values "
            f"({self._function!r:.120}). Leave it out of the policy."
        )


def take_apart(function: Function, args: Sequence[Any]) -> tuple[Call, list[Tensor]]:
    """Split a call into what can be kept by reference and the tensors that autograd should keep.

    Every key/value cache is taken out: recomputation would append to it a second time. The seam of transformers does
    that with keyword arguments only, and GPT-2 passes its cache by position.

    Args:
        function: a callable, or a `partial`, whose arguments are looked through as well.
        args: positional arguments.
    """
    arguments: dict[int | str, Any] = {}
    if isinstance(function, partial):
        args = (*function.args, *args)
        arguments.update(function.keywords)
        function = function.func
    arguments = {**dict(enumerate(args)), **arguments}
    arguments = {place: None if is_cache(value) else value for place, value in arguments.items()}
    graph = {place: value for place, value in arguments.items() if _belongs_to_graph(place, value)}
    rest = {place: None if place in graph else value for place, value in arguments.items()}
    positional = [rest[place] for place in range(len(args))]
    keywords = {place: value for place, value in rest.items() if isinstance(place, str)}
    return Call(function, positional, keywords, list(graph)), list(graph.values())


def _belongs_to_graph(place: int | str, value: Any) -> bool:
    # Masks and rotary tables come by keyword and are shared by all layers; hidden states come either way.
    if not isinstance(value, Tensor):
        return False
    return value.requires_grad or (isinstance(place, int) and value.is_floating_point())


def is_cache(value: object) -> bool:
    """Whether a value is a key/value cache, or the state of a mamba or linear-attention layer."""
    # In transformers 5.0 the caches of some hybrids (jamba, zamba, qwen3_next) are no subclass of Cache, as all are in
    # 5.23: by then `isinstance` does.
    return any(base.__name__.endswith("Cache") for base in type(value).__mro__)


def keeps_activations(module: nn.Module) -> bool:
    """Whether a forward of this module keeps activations for a backward of training."""
    return module.training and torch.is_grad_enabled()


def is_in_backward() -> bool:
    """Whether autograd is running a backward: whatever forward runs now is recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in an argument or an output of a layer: itself, or those in its tuple or list."""
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, tuple | list) else []
