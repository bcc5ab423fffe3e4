"""What logits that were put off are computed from: a call of the head, and what the model did to its logits since.

Rows are positions of the batch; columns are the vocabulary. All that is known here works on each row alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.head.chunking import Chunking
from hf_ckpt.regions.rng_state import AutocastState

AT_ONCE = "_hf_ckpt_at_once"
"""Keyword of the head's forward: compute these rows now. It goes through the hooks that stand around the head, so that
they gather its weight, and belongs to one call whatever thread that runs in."""


@dataclass(frozen=True, eq=False)
class Step:
    """An operation on the logits that treats each row alone, as it was called.

    Args:
        function: of torch.
        args: as it was called; None in place of the logits.
        kwargs: likewise.
        position: of the logits among `args`.
        num_dims: of the logits that it was called with, so that dimensions keep their numbers.
        autocast: it may decide on the dtype.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int
    num_dims: int
    autocast: AutocastState

    def run(self, logits: Tensor) -> Tensor:
        """Apply the operation to some rows.

        Args:
            logits: [n, V].
        """
        args = list(self.args)
        args[self.position] = logits.view(*[1] * (self.num_dims - 2), *logits.shape)
        with self.autocast.restored():
            output: Tensor = self.function(*args, **self.kwargs)
        return output.reshape(logits.shape[0], output.shape[-1])


class Source:
    """The call of a head that was put off.

    Args:
        chunking: how it runs.
        module: the head.
        hidden: what it was given, [..., H].
        num_columns: of what it returns, V.

    Attributes:
        head: the head.
        hooks: of engines, to be run before the backward of whatever is computed from the logits.
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
        self._forward = vars(module).get("forward")
        self._versions = [(parameter, parameter._version) for parameter in module.parameters() if _is_whole(parameter)]
        self._forms = _forms(module)

    def lengths(self, num_rows: int) -> list[int]:
        """Return the chunks that so many rows are computed in."""
        return self.chunking.lengths(num_rows, self._num_columns, num_rows * self._row_bytes)

    def trainable_weights(self) -> dict[str, Tensor]:
        """Return the weights of the head that get a gradient, by name: those that stand there before it is called."""
        if self.is_gathered_by_itself():
            return {}
        return {name: weight for name, weight in self.head.named_parameters() if weight.requires_grad}

    def run(self, hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of these rows.

        Args:
            hidden: [n, H].
            weights: in place of the head's own, by name.
        """
        keyword = {AT_ONCE: True} if self._is_in_force() else {}
        with self._autocast.restored():
            if _shares_its_unit(self.head):
                return self._run_in_unit(hidden, keyword)
            if not weights:
                logits: Tensor = self._module(hidden, **keyword)
                return logits
            return cast("Tensor", self._with(weights)(hidden))

    def _with(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Return a head with other weights in the place of its own.

        Not by `functional_call`, which has them in the head itself meanwhile: whoever looks at the model's parameters
        in another thread would take them for those.
        """
        # FSDP1 leaves views of its flat parameter as plain attributes while a module runs.
        head = _replica(self.head, {id(attrgetter(name)(self.head)): weight for name, weight in weights.items()})
        if self._is_in_force():
            # The forward that was found, of the replica.
            found = vars(head).pop("forward").args[-1]
            if found is not None:
                vars(head)["forward"] = found
        return head

    def _run_in_unit(self, hidden: Tensor, keyword: dict[str, bool]) -> Tensor:
        """Run without FSDP2's hooks, which wait for the other modules of the unit to run as well.

        The weights are there already: gathered in forward for the whole unit, in backward by the hook of what the head
        returned, until the backward of the unit's first module.
        """
        cast("FSDPModule", self.head).unshard()
        logits: Tensor = self.head.forward(hidden, **keyword)
        return logits

    def _is_in_force(self) -> bool:
        """Whether the head still has a forward that knows the keyword: the plan may be gone before backward comes."""
        now = vars(self.head).get("forward")
        return now is not None and getattr(now, "func", now) is getattr(self._forward, "func", self._forward)

    def check_unchanged(self) -> None:
        """Refuse to compute from other weights than those of the call.

        Raises:
            UnsupportedError: an engine has taken them away, or they have been updated.
        """
        if _forms(self.head) != self._forms and not self.is_gathered_by_itself():
            raise UnsupportedError(
                "The logits that head: chunked put off are asked for outside of the model's forward, where FSDP has "
                "taken the head's weight away again. Compute the loss in the model (pass labels to it, without "
                "label_smoothing_factor or compute_loss_func), make the head a unit of its own, or leave head: chunked "
                "out."
            )
        if any(parameter._version != version for parameter, version in self._versions):
            raise UnsupportedError(
                "The logits that head: chunked put off are asked for after the head's weights have changed (an "
                "optimizer step), so that they would come out different. Use them before, or leave head: chunked out."
            )

    def is_gathered_by_itself(self) -> bool:
        """Whether calling the head gathers its weight."""
        modules = self._module.modules()
        return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in modules) or any(
            map(_is_of_zero, self.head.parameters())
        )


def _replica(module: nn.Module, weights: Mapping[int, Tensor]) -> nn.Module:
    """Return a module that shares everything with another one but some weights.

    Args:
        module: the other one.
        weights: in place of its own, by their `id`.
    """
    replica = module.__new__(type(module))
    vars(replica).update({name: weights.get(id(value), value) for name, value in vars(module).items()})
    parameters = {
        name: None if value is None else weights.get(id(value), value) for name, value in module._parameters.items()
    }
    modules = {name: None if child is None else _replica(child, weights) for name, child in module._modules.items()}
    vars(replica).update(_parameters=parameters, _modules=modules)
    return replica


def _forms(module: nn.Module) -> list[tuple[type, torch.Size]]:
    """Return what tells a gathered weight from a share of it."""
    return [(type(parameter.data), parameter.shape) for parameter in module.parameters()]


def _shares_its_unit(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module together with others, as accelerate does with the last norm and the head."""
    return isinstance(module, FSDPModule) and len(module._get_fsdp_state()._modules) > 1


def _is_of_zero(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether the weight stands there itself: FSDP and ZeRO-3 put gathered weights in its place and take them away."""
    return type(parameter) is nn.Parameter and parameter.is_leaf and not _is_of_zero(parameter)


@dataclass(frozen=True, eq=False)
class State:
    """What logits are computed from.

    Args:
        source: the call of the head.
        hidden: what it was given, [..., H].
        steps: what was done to the logits since.
        sample: no row of these logits, [0, V]: their dtype, their device and V.
        version: of the hidden states.
        is_cut: the hidden states or the steps were made under `no_grad`, so that no gradient would reach the model.
        has_classes_first: the vocabulary stands behind the batch, [B, V, S], as `cross_entropy` takes it too.
    """

    source: Source
    hidden: Tensor
    steps: tuple[Step, ...]
    sample: Tensor
    version: int
    is_cut: bool = False
    has_classes_first: bool = False

    @classmethod
    def of(cls, source: Source, hidden: Tensor, sample: Tensor) -> State:
        """Return the state of what a head returns.

        Args:
            source: its call.
            hidden: what it was given, [..., H].
            sample: what it returns for no row, [0, V].
        """
        return cls(source, hidden, (), sample, hidden._version)

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits, [..., V]."""
        shape = [*self.hidden.shape[:-1], self.sample.shape[-1]]
        return torch.Size([shape[0], shape[-1], *shape[1:-1]] if self.has_classes_first else shape)

    def rows(self, *, has_gradient: bool) -> Tensor:
        """Return the hidden states row by row, [T, H], with their graph where gradients are to flow.

        Raises:
            UnsupportedError: what would be computed is not what the model would have computed.
        """
        self.source.check_unchanged()
        if self.hidden._version != self.version:
            raise UnsupportedError(
                "The hidden states were changed in place after head: chunked put off the logits, which would come out "
                "different now. Leave head: chunked out for this model."
            )
        if has_gradient and self.is_cut:
            raise unsupported("A gradient through what was made of the logits under no_grad")
        hidden = self.hidden if has_gradient else self.hidden.detach()
        return hidden.reshape(-1, hidden.shape[-1])


def unsupported(what: str) -> UnsupportedError:
    """Return the error of a wish that logits which are not there cannot fulfil."""
    return UnsupportedError(
        f"{what} was asked for of logits that head: chunked has put off: they are not there. Compute the loss with "
        "torch.nn.functional.cross_entropy, or leave head: chunked out."
    )
