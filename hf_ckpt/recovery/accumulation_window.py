"""An accumulation window: its micro-batches as each began, and what brings that back.

Until something fails nothing of size is copied. Inputs are held by reference, random states and counters are small,
gradients are not kept at all, and buffers are cloned only where forwards are known to change them.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ckpt.recovery.attribute_snapshots import Attributes
from hf_ckpt.regions.execution_state import RandomState

_LARGE_BYTES = 2**26
"""Of a buffer that is not copied to find out whether forwards change it, such as packed weights."""


# --- Random numbers. ---


@dataclass(frozen=True)
class Randomness:
    """The state of all generators that a forward may draw from: torch's, Python's and numpy's."""

    of_torch: RandomState
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls, tensors: Iterable[Tensor]) -> Randomness:
        """Read them; torch's of the CPU and of the devices that tensors lie on."""
        return cls(RandomState.of(*tensors), random.getstate(), np.random.get_state())  # the global one

    def restore(self) -> None:
        """Bring them back."""
        self.of_torch.restore()
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)


def one_of_each_device(model: nn.Module) -> list[Tensor]:
    """Return a parameter on each device of a model: they tell which generators there are."""
    return list({tensor.device: tensor for tensor in model.parameters()}.values())


# --- Buffers. ---

_Key = tuple[int, str]
"""The id of a module's dictionary of buffers, and a name in it."""


class Buffers:
    """The buffers of a model, and which of them its forwards change.

    Before the first micro-batch all of them but very large ones are copied to the host. What has changed after it is
    known to change: that is cloned before each micro-batch from then on, and the rest is held by reference.

    Args:
        model: whose buffers.
        are_sent: DistributedDataParallel writes to them, with the values that they have: only values tell, then, and
            the first copies stay.
    """

    def __init__(self, model: nn.Module, *, are_sent: bool = False) -> None:
        self._are_sent = are_sent
        self._first: SavedBuffers | None = None
        # Walking all modules in each micro-batch would take longer than all else.
        holders = [module for module in model.modules() if module._buffers]
        self._holders = [module._buffers for module in holders]
        # A rotary embedding knows the length that its frequencies are for. Modules of torch know nothing of the kind.
        self._attributes = [vars(module) for module in holders if not type(module).__module__.startswith("torch.nn.")]
        self._changing: set[_Key] | None = None

    def now(self) -> SavedBuffers:
        """Return the buffers as they are."""
        if self._first is not None:
            # But not the numbers that belong to them.
            return SavedBuffers(self._first.saved, self._attributes)
        saved = {
            (id(holder), name): _SavedBuffer(holder, name, buffer, buffer._version, self._copied(holder, name, buffer))
            for holder in self._holders
            for name, buffer in holder.items()
            if buffer is not None
        }
        return SavedBuffers(saved, self._attributes)

    def _copied(self, holder: dict[str, Tensor | None], name: str, buffer: Tensor) -> Tensor | None:
        """Return what brings a buffer back after it was written to."""
        if self._changing is None:
            return buffer.detach().to("cpu", copy=True) if buffer.nbytes <= _LARGE_BYTES else None
        return buffer.detach().clone() if (id(holder), name) in self._changing else None

    def learn(self, saved: SavedBuffers) -> None:
        """Find out, after the first micro-batch, which buffers it has changed."""
        if self._are_sent:
            self._first = saved
        elif self._changing is None:
            self._changing = saved.of_changed_modules()


@dataclass(slots=True)
class _SavedBuffer:
    holder: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None

    @property
    def is_written(self) -> bool:
        return self.tensor._version != self.version

    @property
    def has_other_values(self) -> bool:
        if self.holder.get(self.name) is not self.tensor:
            return True
        if self.copy is None:
            return self.is_written
        return not torch.equal(self.copy.to(self.tensor.device), self.tensor)


class SavedBuffers:
    """The buffers of a model at one moment.

    Args:
        saved: the buffers.
        of_holders: attributes of modules that have buffers; the numbers in them belong to these.
    """

    def __init__(self, saved: dict[_Key, _SavedBuffer], of_holders: Iterable[dict[str, Any]]) -> None:
        self.saved = saved
        self._numbers = [(attributes, _numbers(attributes)) for attributes in of_holders]

    def of_changed_modules(self) -> set[_Key]:
        """Return the keys of all buffers of the modules of which any buffer has changed since."""
        # Kernels of normalization write running statistics past the versions of tensors.
        changed = {key[0] for key, each in self.saved.items() if each.is_written or each.has_other_values}
        return {key for key in self.saved if key[0] in changed}

    def with_other_values(self) -> list[str]:
        """Return the names of those that have other values than they had, or of which there is no copy to tell."""
        return [each.name for each in self.saved.values() if each.has_other_values]

    def describe_lost(self) -> str | None:
        """Name those that were written to and of which there is no copy; None where there are none."""
        lost = [each.name for each in self.saved.values() if each.copy is None and each.is_written]
        if not lost:
            return None
        return f"a forward has written to buffers that earlier ones left alone: {', '.join(lost[:4])}"

    def restore(self) -> None:
        """Bring them back."""
        for attributes, numbers in self._numbers:
            for name in _numbers(attributes).keys() - numbers.keys():
                del attributes[name]
            attributes.update(numbers)
        for each in self.saved.values():
            each.holder[each.name] = each.tensor
            # To later micro-batches, which have no copy of it, a write would be one of a forward's.
            if each.copy is not None and each.has_other_values:
                with torch.no_grad():
                    each.tensor.copy_(each.copy)
                each.version = each.tensor._version


_OF_A_PLAN = ("training", "gradient_checkpointing")
"""Attributes that are not the forward's to change."""


def _numbers(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, int | float | Tensor) and not name.startswith("_") and name not in _OF_A_PLAN
    }


# --- Gradients. ---


class Gradients:
    """Which gradients are there. They are not kept alive: whoever lets go of them frees them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._seen = [
            None if parameter.grad is None else (weakref.ref(parameter.grad), parameter.grad._version)
            for parameter in parameters
        ]

    def are_written(self) -> bool:
        """Whether one that was there has been written to, and is there still."""
        return any(is_same and version != gradient._version for gradient, is_same, version in self._now())

    def is_changed(self) -> bool:
        """Whether any is another one, or has been written to."""
        num_before = sum(seen is not None for seen in self._seen)
        now = list(self._now())
        return len(now) != num_before or any(not same or version != each._version for each, same, version in now)

    def drop_new(self) -> None:
        """Let go of those that were not there."""
        for seen, parameter in zip(self._seen, self._parameters, strict=True):
            if seen is None or seen[0]() is not parameter.grad:
                parameter.grad = None

    def _now(self) -> Iterator[tuple[Tensor, bool, int]]:
        """Yield the gradients that are there, whether each was there before, and its version then."""
        for seen, parameter in zip(self._seen, self._parameters, strict=True):
            if parameter.grad is not None:
                yield parameter.grad, seen is not None and seen[0]() is parameter.grad, seen[1] if seen else -1


# --- The window. ---


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """A call of a method of a Trainer, of its accelerator or of its optimizer."""

    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        """Run the method."""
        return self.method(*self.args, **self.kwargs)

    @property
    def inputs(self) -> Any:
        """What a training step or a prediction step is given."""
        return self.kwargs["inputs"] if "inputs" in self.kwargs else self.args[1]

    def with_inputs(self, inputs: Any) -> TrainerCall:
        """Return the call of such a step with other inputs."""
        if "inputs" in self.kwargs:
            return replace(self, kwargs={**self.kwargs, "inputs": inputs})
        return replace(self, args=(self.args[0], inputs, *self.args[2:]))


@dataclass
class MicroBatch:
    """One call of a Trainer's `training_step`, and what things were like when it began."""

    call: TrainerCall
    randomness: Randomness
    attributes: Attributes
    buffers: SavedBuffers
    syncs_gradients: bool
    """As accelerate counts micro-batches."""
    sends_gradients: bool
    """To other processes."""

    def __post_init__(self) -> None:
        named = list(nested_named_tensors(self.call.inputs))
        self._versions = [(name, tensor, tensor._version) for name, tensor in named if not tensor.is_inference()]
        self.size = sum(tensor.nbytes for _, tensor in named)
        # A step may take entries out of what it is given.
        self._inputs = copy.copy(self.call.inputs)

    def again(self) -> TrainerCall:
        """Return the call with its inputs as they came."""
        return self.call.with_inputs(copy.copy(self._inputs))

    @property
    def changed_inputs(self) -> list[str]:
        """The names of inputs that have been written to since."""
        return [name for name, tensor, version in self._versions if tensor._version != version]


def named_tensors(inputs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among the inputs of a step, by name."""
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
    """Return the shapes of the inputs of a step."""
    return describe_tensors(nested_named_tensors(inputs)) or "no tensors"


def describe_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return shapes in words."""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named)


class Window:
    """The micro-batches of one optimizer step that have begun, and what parameters were like before the first.

    Raises nothing: `fault` says why the window cannot be undone, if so.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.micro_batches: list[MicroBatch] = []
        self._parameters = parameters
        self._versions = [parameter._version for parameter in parameters]
        self._zeros = [parameter for parameter in parameters if parameter.grad is not None]
        # Waits for the device, which the Trainer's own zero_grad(), to None, makes needless.
        self._has_gradients = any(bool(p.grad.any()) for p in self._zeros if p.grad is not None)

    @property
    def has_written_weights(self) -> bool:
        """Whether weights have changed since its first micro-batch."""
        return [parameter._version for parameter in self._parameters] != self._versions

    def fault(self) -> str | None:
        """Return why the window cannot be undone; None if it can."""
        if self._has_gradients:
            return "there were gradients before its first micro-batch, which nothing keeps"
        if self.has_written_weights:
            return (
                "weights have changed since its first micro-batch (an optimizer that steps in backward, or an average "
                "that forwards update?)"
            )
        for micro_batch in self.micro_batches:
            if written := micro_batch.changed_inputs:
                return f"the step has written to its inputs: {', '.join(written)}"
            if changed := micro_batch.attributes.lost():
                return f"the step has written to large tensors that the Trainer holds: {', '.join(changed)}"
            if lost := micro_batch.buffers.describe_lost():
                return lost
        return None

    def undo(self) -> None:
        """Bring gradients and buffers back to what they were before the first micro-batch."""
        for parameter in self._parameters:
            parameter.grad = None
        for parameter in self._zeros:
            parameter.grad = torch.zeros_like(parameter)
        if self.micro_batches:
            self.micro_batches[0].buffers.restore()
