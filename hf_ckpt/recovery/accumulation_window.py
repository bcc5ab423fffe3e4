"""An accumulation window: its micro-batches as each began, and what brings that back.

Until something fails nothing of size is copied. Inputs are held by reference, random states and counters are small,
gradients are not kept at all, and buffers are cloned only where forwards are known to change them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.recovery.attribute_snapshots import Attributes
from hf_ckpt.recovery.ladder import Size
from hf_ckpt.recovery.replay_proof import ReplayProof
from hf_ckpt.regions.execution_state import RandomState

_LARGE_BYTES = 2**26
"""Of a buffer that is not copied to find out whether forwards change it, such as packed weights."""
_COPIED_BYTES = 2**20
"""Of a gradient that nobody has set to None before the window, up to which it is copied."""


_version = attrgetter("_version")


# --- Random numbers. ---


def one_of_each_device(model: nn.Module) -> list[Tensor]:
    """Return a parameter on each device of a model: they tell which generators there are."""
    return list({tensor.device: tensor for tensor in model.parameters()}.values())


# --- Buffers. ---

_Key = tuple[int, str]
"""The id of a module's dictionary of buffers, and a name in it."""


class Buffers:
    """The buffers of modules, and which of them forwards change.

    Before the first micro-batch all of them but very large ones are copied to the host. What has changed after it is
    known to change: that is cloned before each micro-batch from then on, and the rest is held by reference.

    Args:
        are_sent: DistributedDataParallel writes to them, with the values that they have: only values tell, then, and
            the first copies stay.
    """

    def __init__(self, *, are_sent: bool = False) -> None:
        self._are_sent = are_sent
        self._first: SavedBuffers | None = None
        self._modules: Sequence[nn.Module] = ()
        self._holders: list[dict[str, Tensor | None]] = []
        self._changing: set[_Key] | None = None

    def of(self, modules: Sequence[nn.Module]) -> SavedBuffers:
        """Return the buffers of some modules as they are."""
        if self._first is not None:
            return self._first
        if modules is not self._modules:
            # Walking all modules in each micro-batch would take longer than all else.
            self._modules, self._holders = modules, [module._buffers for module in modules if module._buffers]
        saved = {
            (id(holder), name): _SavedBuffer(holder, name, buffer, buffer._version, self._copied(holder, name, buffer))
            for holder in self._holders
            for name, buffer in holder.items()
            if buffer is not None
        }
        empty = {(id(holder), name) for holder in self._holders for name, buffer in holder.items() if buffer is None}
        return SavedBuffers(saved, empty, modules)

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
    """The buffers of modules at one moment."""

    def __init__(self, saved: dict[_Key, _SavedBuffer], empty: set[_Key], modules: Sequence[nn.Module]) -> None:
        self.saved = saved
        self._empty = empty
        self._modules = modules

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
        """Bring them back, and take those away that were not there."""
        for module in self._modules:
            for name, buffer in list(module._buffers.items()):
                key = id(module._buffers), name
                if key in self._empty:
                    module._buffers[name] = None
                elif buffer is not None and key not in self.saved:
                    delattr(module, name)
        for each in self.saved.values():
            each.holder[each.name] = each.tensor
            # To later micro-batches, which have no copy of it, a write would be one of a forward's.
            if each.copy is not None and each.has_other_values:
                with torch.no_grad():
                    each.tensor.copy_(each.copy)
                each.version = each.tensor._version


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

    def new(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient which was not there, or has been written to."""
        return [
            parameter
            for seen, parameter in zip(self._seen, self._parameters, strict=True)
            if parameter.grad is not None
            and (seen is None or seen[0]() is not parameter.grad or seen[1] != parameter.grad._version)
        ]

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


class GradientsOfOthers:
    """Those of parameters that are not the model's, as of a loss: nobody need have set them to None before the window.

    Where they are there small ones are copied.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        found = ((parameter, parameter.grad) for parameter in parameters)
        small = [(each, grad) for each, grad in found if grad is not None and grad.nbytes <= _COPIED_BYTES]
        self._copies = [(parameter, gradient, gradient.detach().clone()) for parameter, gradient in small]
        copied = {id(parameter) for parameter, _ in small}
        self._rest = Gradients([parameter for parameter in parameters if id(parameter) not in copied])

    def fault(self) -> str | None:
        """Return why they cannot be brought back; None if they can."""
        if self._rest.are_written():
            return "it has added to large gradients that were there before, of weights that are not the model's"
        return None

    def restore(self) -> None:
        """Bring them back."""
        self._rest.drop_new()
        for parameter, gradient, copied in self._copies:
            parameter.grad = gradient.copy_(copied)

    def new(self) -> list[nn.Parameter]:
        """Return the parameters that have another gradient than they had."""
        others = [
            p for p, gradient, copied in self._copies if p.grad is not gradient or not torch.equal(gradient, copied)
        ]
        return [*self._rest.new(), *others]


class StepParameters:
    """The parameters that a step may use: frozen ones too, which may be trained later, or written to by a forward.

    Args:
        model: that is trained.
        optimizer: the Trainer's, where it is known.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._found: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        self._modules: Sequence[nn.Module] = ()
        self._stepped: list[int] = []

    def of(
        self, modules: Sequence[nn.Module], loose: Sequence[nn.Parameter]
    ) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return those of the model, and the others: of its optimizer, of these modules or of none."""
        # Asked each time: to load its state gives an optimizer other groups.
        groups = getattr(self._optimizer, "param_groups", ())
        stepped = list(chain.from_iterable(group["params"] for group in groups))
        numbers = list(map(id, stepped))
        if modules is not self._modules or numbers != self._stepped:
            self._modules, self._stepped = modules, numbers
            own = dict.fromkeys(self._model.parameters())
            held = chain.from_iterable(module._parameters.values() for module in modules)
            found = chain(stepped, held, loose)
            others = dict.fromkeys(each for each in found if each is not None and each not in own)
            self._found = list(own), list(others)
        return self._found


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
    randomness: RandomState
    attributes: Attributes
    buffers: SavedBuffers
    syncs_gradients: bool
    """As accelerate counts micro-batches."""
    sends_gradients: bool
    """To other processes."""

    def __post_init__(self) -> None:
        named = list(nested_named_tensors(self.call.inputs))
        self._versions = [(name, tensor, tensor._version) for name, tensor in named if not tensor.is_inference()]
        self.size = Size.of(named)
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


_LARGE_TENSORS = "the step has written to large tensors that the Trainer holds"


class Window:
    """The micro-batches of one optimizer step that have begun, and what parameters were like before the first.

    Raises nothing: `fault` says why the window cannot be undone, if so.

    Attributes:
        proof: whether its replay computes the same.
    """

    def __init__(self, proof: ReplayProof) -> None:
        self.micro_batches: list[MicroBatch] = []
        self.proof = proof

    def begin(self, parameters: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> None:
        """Its first micro-batch begins.

        Args:
            parameters: of the model, whose gradients the Trainer has set to None, or to zeros.
            others: that the step may use; their gradients may be there.
        """
        self._parameters, self._others = parameters, others
        self._versions = list(map(_version, chain(parameters, others)))
        self._zeros = [parameter for parameter in parameters if parameter.grad is not None]
        # Waits for the device, which the Trainer's own zero_grad(), to None, makes needless.
        self._has_gradients = any(bool(p.grad.any()) for p in self._zeros if p.grad is not None)
        self._gradients_of_others = GradientsOfOthers(others)

    @property
    def has_written_weights(self) -> bool:
        """Whether weights have changed since its first micro-batch."""
        return list(map(_version, chain(self._parameters, self._others))) != self._versions

    def fault(self) -> str | None:
        """Return why the window cannot be undone; None if it can."""
        if self._has_gradients:
            return "there were gradients before its first micro-batch, which nothing keeps"
        if fault := self._gradients_of_others.fault():
            return fault
        if self.has_written_weights:
            return (
                "weights have changed since its first micro-batch (an optimizer that steps in backward, or an average "
                "that forwards update?)"
            )
        for micro_batch in self.micro_batches:
            if written := micro_batch.changed_inputs:
                return f"the step has written to its inputs: {', '.join(written)}"
            if lost := micro_batch.attributes.describe_lost(_LARGE_TENSORS) or micro_batch.buffers.describe_lost():
                return lost
        return None

    def undo(self) -> None:
        """Bring gradients and buffers back to what they were before the first micro-batch."""
        for parameter in self._parameters:
            parameter.grad = None
        for parameter in self._zeros:
            parameter.grad = torch.zeros_like(parameter)
        self._gradients_of_others.restore()
        if self.micro_batches:
            self.micro_batches[0].buffers.restore()

    def kept_gradients(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient that the first micro-batch did not begin with."""
        zeros = set(map(id, self._zeros))
        kept = [p for p in self._parameters if p.grad is not None and (id(p) not in zeros or bool(p.grad.any()))]
        return [*kept, *self._gradients_of_others.new()]
