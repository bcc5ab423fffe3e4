"""A deferred call of the head: what the logits are computed from.

That is the call itself, and what the model has done to its logits since. Rows are positions of the batch; columns are
the vocabulary. All that is stored here works on each row alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.execution_state import AutocastState
from hf_ckpt.regions.head.chunking import Chunking
from hf_ckpt.upstream.torch import num_modules_in_unit, tree_map_only

COMPUTE_NOW = "_hf_ckpt_at_once"
"""Keyword of the head's forward: compute these rows now. It goes through the hooks around the head, so that they gather
its weight, and belongs to one call, whatever thread runs that."""


class HeadCall:
    """A deferred call of a head; `hidden` are the hidden states that it was called with, [..., H], `num_columns` is V.

    `hooks` are those of engines, to be run before the backward of whatever is computed from the logits.
    """

    def __init__(self, chunking: Chunking, module: nn.Module, hidden: Tensor, num_columns: int) -> None:
        self.chunking = chunking
        self.num_rows = hidden.shape[:-1].numel()
        self.hooks: dict[int, Callable[[Tensor], Any]] = OrderedDict()
        self._num_columns = num_columns
        self._row_bytes = hidden.shape[-1] * hidden.element_size()
        self._module = chunking.outer if chunking.outer is not None else module
        self._autocast = AutocastState.now()
        self.head = module
        # What is asked for later: a forward that is taken off becomes another one.
        self._deferring = getattr(vars(module).get("forward"), "func", None)
        held = [*filter(_is_whole, module.parameters()), *(x for x in module.buffers() if not x.is_inference())]
        self._versions = [(tensor, tensor._version) for tensor in held]
        self._forms = _forms(module)

    def lengths(self, num_rows: int) -> list[int]:
        """Return the number of rows of each chunk."""
        return self.chunking.lengths(num_rows, self._num_columns, num_rows * self._row_bytes)

    def trainable_weights(self) -> dict[str, Tensor]:
        """Return the weights of the head that get a gradient, by name: those that are there before it is called."""
        if self.is_gathered_by_itself():
            return {}
        return {name: weight for name, weight in self.head.named_parameters() if weight.requires_grad}

    def run(self, hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the rows `hidden`, [n, H], with `weights` in place of the head's own, by name."""
        keyword = {COMPUTE_NOW: True} if self._has_deferring_forward() else {}
        with self._autocast.restored():
            if _shares_its_unit(self.head):
                return self._run_in_unit(hidden, keyword)
            if not self.is_gathered_by_itself():
                return cast("Tensor", self._with(weights)(hidden))
            # Once for all: an engine that shards runs a model in one thread.
            with _hooks_of_engines_alone(self._module), _hooks_of_engines_alone(self.head):
                logits: Tensor = self._module(hidden, **keyword)
            return logits

    def _with(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Return a head with other weights in the place of its own."""
        # FSDP1 leaves views of its flat parameter as plain attributes while a module runs.
        # Not by `functional_call`, which puts them into the head itself meanwhile: another thread that reads the
        # model's parameters would take them for those.
        head = _replica(self.head, {id(attrgetter(name)(self.head)): weight for name, weight in weights.items()})
        if self._has_deferring_forward():
            # The forward that was found, of the replica.
            found = vars(head).pop("forward").args[-1]
            if found is not None:
                vars(head)["forward"] = found
        # Those on the head have run: on the hidden states, and on the logits that were put off.
        for name in _HOOKS:
            hooks = vars(head)[name]
            vars(head)[name] = OrderedDict((number, hook) for number, hook in hooks.items() if _is_of_engine(hook))
        return head

    def _run_in_unit(self, hidden: Tensor, keyword: dict[str, bool]) -> Tensor:
        """Run without FSDP2's hooks, which wait for the other modules of the unit to run as well."""
        # The weights are there already: gathered in forward for the whole unit, and in backward by the hook on the
        # head's output, until the backward of the unit's first module.
        cast("FSDPModule", self.head).unshard()
        logits: Tensor = self.head.forward(hidden, **keyword)
        return logits

    def _has_deferring_forward(self) -> bool:
        """Whether the head's forward still takes the keyword: the plan may be removed before backward comes."""
        now = getattr(vars(self.head).get("forward"), "func", None)
        return now is not None and now is self._deferring

    def check_unchanged(self) -> None:
        """Raise `UnsupportedError` if an engine has freed the weights of the call, or if they have been updated."""
        if _forms(self.head) != self._forms and not self.is_gathered_by_itself():
            raise UnsupportedError(
                "The logits that head: chunked put off are asked for outside of the model's forward, where FSDP has "
                "taken the head's weight away again. Compute the loss in the model (pass labels to it, without "
                "label_smoothing_factor or compute_loss_func), make the head a unit of its own, or leave head: chunked "
                "out."
            )
        if any(tensor._version != version for tensor, version in self._versions):
            raise UnsupportedError(
                "The logits that head: chunked put off are asked for after the head's weights have changed (an "
                "optimizer step), or its buffers, so that they would come out different. Use them before, or leave "
                "head: chunked out."
            )

    def is_gathered_by_itself(self) -> bool:
        """Whether calling the head gathers its weight."""
        modules = self._module.modules()
        return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in modules) or any(
            map(_is_of_zero, self.head.parameters())
        )


@dataclass(frozen=True, eq=False)
class RowOperation:
    """An operation on the logits that treats each row alone, as it was called."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    """With None in place of the logits."""
    kwargs: dict[str, Any]
    position: int
    """Of the logits in `args`."""
    num_dims: int
    """Of the logits that it was called with, so that dimensions keep their numbers."""
    autocast: AutocastState
    """It may decide the dtype."""

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], position: int, num_dims: int
    ) -> RowOperation:
        """Store an operation that is called now, with `args` and `kwargs` as they are now."""
        # Copies: an addition saves nothing, so that its caller may write to what was added. One row at most, each.
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
        return cls(function, args, kwargs, position, num_dims, AutocastState.now())

    def run(self, logits: Tensor) -> Tensor:
        """Apply the operation to some rows, [n, V]."""
        args = list(self.args)
        args[self.position] = logits.view(*[1] * (self.num_dims - 2), *logits.shape)
        with self.autocast.restored():
            output: Tensor = self.function(*args, **self.kwargs)
        return output.reshape(logits.shape[0], output.shape[-1])


@dataclass(frozen=True, eq=False)
class LogitsState:
    """What logits are computed from."""

    head_call: HeadCall
    hidden: Tensor
    """What the head was called with, [..., H], moved as the logits have been since."""
    operations: tuple[RowOperation, ...]
    """Done to the logits since."""
    sample: Tensor
    """No row of these logits, [0, V]: their dtype, their device and V."""
    version: int
    """Of the hidden states."""
    is_detached: bool = False
    """The hidden states or the operations were made under `no_grad`: no gradient would reach the model."""
    has_classes_first: bool = False
    """The vocabulary stands right after the batch, [B, V, S], as `cross_entropy` takes it too."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits, [..., V]."""
        shape = [*self.hidden.shape[:-1], self.sample.shape[-1]]
        return torch.Size([shape[0], shape[-1], *shape[1:-1]] if self.has_classes_first else shape)

    def rows(self, *, has_gradient: bool) -> Tensor:
        """Return the hidden states row by row, [T, H], with their graph where gradients are to flow.

        Raises `UnsupportedError` if the logits computed from them would not be those of the model.
        """
        self.head_call.check_unchanged()
        if self.hidden._version != self.version:
            raise UnsupportedError(
                "The hidden states were changed in place after head: chunked put off the logits, which would come out "
                "different now. Leave head: chunked out for this model."
            )
        if has_gradient and self.is_detached:
            raise unsupported("A gradient through what was made of the logits under no_grad")
        hidden = self.hidden if has_gradient else self.hidden.detach()
        return hidden.reshape(-1, hidden.shape[-1])


def compute_logits(
    head_call: HeadCall, operations: Sequence[RowOperation], hidden: Tensor, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return the logits of some rows [n, H], as [n, V], with `weights` in place of the head's own."""
    logits = head_call.run(hidden, weights or {})
    for operation in operations:
        # Nothing but the operation's own input and output is alive meanwhile.
        logits = operation.run(logits)
    return logits


def unsupported(what: str) -> UnsupportedError:
    """Return the error of an operation that deferred logits do not support."""
    return UnsupportedError(
        f"{what} was asked for of logits that head: chunked has put off: they are not there. Compute the loss with "
        "torch.nn.functional.cross_entropy, or leave head: chunked out."
    )


def _replica(module: nn.Module, weights: Mapping[int, Tensor]) -> nn.Module:
    """Return a module that shares everything with `module` except the weights whose `id` is in `weights`."""
    replica = module.__new__(type(module))
    vars(replica).update({name: weights.get(id(value), value) for name, value in vars(module).items()})
    parameters = {
        name: None if value is None else weights.get(id(value), value) for name, value in module._parameters.items()
    }
    modules = {name: None if child is None else _replica(child, weights) for name, child in module._modules.items()}
    vars(replica).update(_parameters=parameters, _modules=modules)
    return replica


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ENGINES = ("torch.", "deepspeed.", "accelerate.", "hf_ckpt.")


def _is_of_engine(hook: Any) -> bool:
    """Whether a hook gathers weights or watches, by where it comes from: it is to see each chunk."""
    while isinstance(hook, partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', None)}.".startswith(_ENGINES)


@contextmanager
def _hooks_of_engines_alone(module: nn.Module) -> Iterator[None]:
    """Take the other hooks of a module away for the block."""
    found = [(hooks, dict(hooks)) for hooks in map(vars(module).__getitem__, _HOOKS)]
    for hooks, before in found:
        for number in [number for number, hook in before.items() if not _is_of_engine(hook)]:
            del hooks[number]
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.clear()
            hooks.update(before)


def _forms(module: nn.Module) -> list[tuple[type, torch.Size]]:
    """Return what distinguishes a gathered weight from a shard of it."""
    return [(type(parameter.data), parameter.shape) for parameter in module.parameters()]


def _shares_its_unit(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module together with others, as accelerate does with the last norm and the head."""
    return isinstance(module, FSDPModule) and num_modules_in_unit(module) > 1


def _is_of_zero(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether the weight stands there itself: FSDP and ZeRO-3 put gathered weights in its place and take them away."""
    return type(parameter) is nn.Parameter and parameter.is_leaf and not _is_of_zero(parameter)
