"""An accumulation window: its micro-batches as each began, and what brings that back.

Until something fails nothing of size is copied. Inputs are held by reference, random states and counters are small,
gradients are not kept at all, and buffers are cloned only where forwards are known to change them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.recovery.attribute_snapshots import Attributes, AttributeSnapshots
from hf_ckpt.recovery.replay_proof import ReplayProof
from hf_ckpt.recovery.saved_values import BUFFERS, SENT_BUFFERS, SavedTensor
from hf_ckpt.regions.execution_state import RandomState
from hf_ckpt.structure.stored import set_in_forwards

# A gradient that nobody has set to None before the window is copied up to so many bytes.
_COPIED_BYTES = 2**20

_version = attrgetter("_version")


def one_of_each_device(model: nn.Module) -> list[Tensor]:
    """Return a parameter on each device of a model: they tell which generators there are."""
    return list({tensor.device: tensor for tensor in model.parameters()}.values())


# --- Gradients. ---


class Gradients:
    """The gradients that are there. They are not kept alive, but for those that are copied."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        # Those of up to so many bytes are copied.
        copied_bytes: int = 0,
        # Somebody has set them to zeros, which can be brought back whatever their size. To see that they are waits for
        # the device. None of them may be lost.
        are_zeros: bool = False,
    ) -> None:
        self._parameters = parameters
        self._are_zeros = are_zeros
        self._seen: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}
        self._copied: dict[nn.Parameter, SavedTensor] = {}
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if are_zeros and gradient.layout is torch.strided and not gradient.any():
                copied = gradient.new_zeros(()).expand_as(gradient)
            elif gradient.nbytes <= copied_bytes:
                copied = gradient.detach().clone()
            else:
                self._seen[parameter] = weakref.ref(gradient), gradient._version
                continue
            self._copied[parameter] = SavedTensor(gradient, gradient._version, copied)

    def _is_same(self, parameter: nn.Parameter) -> bool:
        was, version = self._seen.get(parameter, (None, 0))
        gradient = parameter.grad
        return was is not None and gradient is not None and was() is gradient and version == gradient._version

    def are_lost(self) -> bool:
        """Whether one of which there is no copy has been written to; or set to None, where zeros are expected."""
        return any(
            not self._is_same(each) and (self._are_zeros or (each.grad is not None and was() is each.grad))
            for each, (was, _) in self._seen.items()
        )

    def new(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient which was not there, or has been written to."""

        def is_new(parameter: nn.Parameter) -> bool:
            if (saved := self._copied.get(parameter)) is not None:
                return parameter.grad is not saved.tensor or saved.has_other_values
            return not self._is_same(parameter)

        return [each for each in self._parameters if each.grad is not None and is_new(each)]

    def is_changed(self) -> bool:
        """Whether any is another one, has been written to, or is gone."""
        return bool(self.new()) or any(each.grad is None for each in (*self._seen, *self._copied))

    def restore(self) -> None:
        """Drop those that are new, and bring back what was copied."""
        for each in self._parameters:
            if each in self._copied:
                each.grad = self._copied[each].tensor
                self._copied[each].restore()
            elif each.grad is not None and not (each in self._seen and self._seen[each][0]() is each.grad):
                each.grad = None


# --- Calls. ---


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """A call of a method of a Trainer, of its accelerator or of its optimizer."""

    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.method(*self.args, **self.kwargs)

    @property
    def inputs(self) -> Any:
        return self.kwargs["inputs"] if "inputs" in self.kwargs else self.args[1]

    def with_inputs(self, inputs: Any) -> TrainerCall:
        if "inputs" in self.kwargs:
            return replace(self, kwargs={**self.kwargs, "inputs": inputs})
        return replace(self, args=(self.args[0], inputs, *self.args[2:]))


def named_tensors(inputs: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(inputs, Mapping):
        yield from ((str(name), value) for name, value in inputs.items() if isinstance(value, Tensor))


def nested_named_tensors(batch: Any, name: str = "input") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a batch of whatever form: one, or a mapping or a sequence of them, within each other."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from nested_named_tensors(value, str(key))
    elif isinstance(batch, list | tuple):
        for number, value in enumerate(batch):
            yield from nested_named_tensors(value, f"{name} {number}")


def describe_inputs(inputs: Any) -> str:
    named = nested_named_tensors(inputs)
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named) or "no tensors"


# --- The window. ---


@dataclass
class Beginning:
    """What things were like when a micro-batch, or a closure, began."""

    attributes: Attributes
    randomness: RandomState
    inputs: Sequence[tuple[str, Tensor]]

    def __post_init__(self) -> None:
        self._versions = [(name, each, each._version) for name, each in self.inputs if not each.is_inference()]

    def restore(self) -> None:
        self.attributes.restore()
        self.randomness.restore()

    def fault(self) -> str | None:
        if written := [name for name, tensor, version in self._versions if tensor._version != version]:
            return f"it has written to its inputs: {', '.join(written)}"
        return self.attributes.describe_lost()


class Window:
    """The micro-batches of one optimizer step that have begun, or one closure, and what brings back their beginnings.

    Raises nothing: `fault` says why the window cannot be undone, if so.
    """

    def __init__(
        self,
        model: nn.Module,
        # See `AttributeSnapshots`.
        owners: Sequence[tuple[str, object]],
        # It may step weights that are not the model's.
        optimizer: Any = None,
        *,
        # See `Gradients`. The Trainer has set the model's to None, which costs nothing here, or to zeros.
        are_zeros: bool = False,
        # DistributedDataParallel sends buffers and gradients: only the last micro-batch may run again. Else they all
        # do, so that those before one give what it begins with.
        are_sent: bool = False,
    ) -> None:
        self.begun: list[Beginning] = []
        # Holds a replay against what ran before; None between steps.
        self.proof: ReplayProof | None = None
        self._model = model
        self._optimizer = optimizer
        self._owners = owners
        self._snapshots = AttributeSnapshots(*owners, buffers=SENT_BUFFERS if are_sent else BUFFERS)
        self._on_devices = one_of_each_device(model)
        self._are_zeros = are_zeros
        self._are_sent = are_sent
        self._modules: Mapping[nn.Module, str] = {}
        self._stepped: list[int] = []

    def clear(self, proof: ReplayProof | None = None) -> None:
        self.begun.clear()
        self.proof = proof

    def look_beside(self, others: Sequence[tuple[str, object]]) -> bool:
        """Note these objects too from here on, by name. Returns whether they are others than before."""
        return self._snapshots.look_into(*self._owners, *others)

    def begin(self, inputs: Sequence[tuple[str, Tensor]]) -> Beginning:
        """A micro-batch begins that was not there before, or a closure."""
        attributes = self._snapshots.now(is_later=bool(self.begun))
        if not self.begun:
            self._find_parameters()
            self._versions = list(map(_version, self._looked_at))
            # Nobody need have set the gradients of others to None before the window.
            others = Gradients(self._others, copied_bytes=_COPIED_BYTES)
            self._gradients = Gradients(self._own, are_zeros=self._are_zeros), others
        elif not self._are_sent:
            attributes = attributes.without_large_tensors()
        self.begun.append(Beginning(attributes, RandomState.of(*self._on_devices), inputs))
        return self.begun[-1]

    def _find_parameters(self) -> None:
        """Find those of the model, and others, as of a loss. Frozen ones may be trained later, or written to."""
        # Asked each time: to load its state gives an optimizer other groups.
        groups = getattr(self._optimizer, "param_groups", ())
        stepped = list(chain.from_iterable(group["params"] for group in groups))
        modules, numbers = self._snapshots.modules, list(map(id, stepped))
        if modules is not self._modules or numbers != self._stepped:
            self._modules, self._stepped = modules, numbers
            own = dict.fromkeys(self._model.parameters())
            held = chain.from_iterable(module._parameters.values() for module in modules)
            others = dict.fromkeys(chain(stepped, held, self._snapshots.parameters))
            self._own, self._others = list(own), [each for each in others if each is not None and each not in own]
            # Of these the version does not tell of writes. What is trained is not among them.
            unknown = {each for each in set_in_forwards(modules) if not each.requires_grad}
            self._looked_at = [each for each in chain(self._own, self._others) if each not in unknown]

    @property
    def has_written_weights(self) -> bool:
        return list(map(_version, self._looked_at)) != self._versions

    def fault(self) -> str | None:
        """Return why the window cannot be undone; None if it can."""
        if any(each.are_lost() for each in self._gradients):
            return (
                "it has added to gradients that were there before, or set them to zero in place, and nothing keeps "
                "those: optimizer.zero_grad() sets them to None"
            )
        if self.has_written_weights:
            return (
                "weights have changed since it began (an optimizer that steps in backward, or before the end of "
                "applied.step(), or an average that forwards update?)"
            )
        return next(filter(None, (each.fault() for each in self.begun)), None)

    def undo(self, number: int = 0) -> None:
        """Bring back what the micro-batch with this number began with; with the first one gradients too."""
        if number == 0:
            for gradients in self._gradients:
                gradients.restore()
            # Casts of weights that the failed forward has left hold its graph.
            torch.clear_autocast_cache()
        self.begun[number].restore()

    def undo_and_check(self, number: int = 0) -> None:
        """Do that, and raise `PlanMismatchError` where what runs again begins otherwise all the same."""
        self.undo(number)
        new = [parameter for each in self._gradients for parameter in each.new()] if number == 0 else []
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        kept = [names.get(id(parameter), "of no module of the model") for parameter in new]
        assert self.proof is not None, "a step runs"
        self.proof.check_start(RandomState.of(*self._on_devices).others_than(self.begun[number].randomness), kept)
