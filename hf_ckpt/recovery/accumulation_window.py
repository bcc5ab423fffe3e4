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

from hf_ckpt.recovery.attribute_snapshots import Attributes, SavedTensor
from hf_ckpt.recovery.ladder import Size
from hf_ckpt.recovery.replay_proof import ReplayProof
from hf_ckpt.regions.execution_state import RandomState

# A buffer of more bytes, such as packed weights, is not copied to find out whether forwards change it.
_LARGE_BYTES = 2**26
# A gradient that nobody has set to None before the window is copied up to so many bytes.
_COPIED_BYTES = 2**20

_version = attrgetter("_version")


def one_of_each_device(model: nn.Module) -> list[Tensor]:
    """Return a parameter on each device of a model: they tell which generators there are."""
    return list({tensor.device: tensor for tensor in model.parameters()}.values())


# --- Buffers. ---


class Buffers:
    """The buffers of modules, and which of them forwards change.

    Args:
        are_sent: DistributedDataParallel writes to them, with the values that they have: only values tell, then.
    """

    def __init__(self, *, are_sent: bool = False) -> None:
        self._are_sent = are_sent
        self._first: SavedBuffers | None = None
        self._modules: Sequence[nn.Module] = ()
        self._holders: list[dict[str, Tensor | None]] = []
        # The ids of dictionaries of which a buffer is known to change.
        self._changing: set[int] | None = None

    def of(self, modules: Sequence[nn.Module]) -> SavedBuffers:
        """Return the buffers of some modules as they are."""
        if self._first is not None:
            return self._first
        if modules is not self._modules:
            # Walking all modules in each micro-batch would take longer than all else.
            self._modules, self._holders = modules, [module._buffers for module in modules if module._buffers]
        saved = [
            (holder, name, buffer if buffer is None else self._saved(holder, buffer))
            for holder in self._holders
            for name, buffer in holder.items()
        ]
        return SavedBuffers(saved, modules)

    def _saved(self, holder: dict[str, Tensor | None], buffer: Tensor) -> SavedTensor:
        copied: Tensor | None = None
        if self._changing is None:
            # Before the first micro-batch all but very large ones are copied to the host.
            copied = buffer.detach().to("cpu", copy=True) if buffer.nbytes <= _LARGE_BYTES else None
        elif id(holder) in self._changing:
            copied = buffer.detach().clone()
        return SavedTensor(buffer, buffer._version, copied)

    def learn(self, saved: SavedBuffers) -> None:
        """Find out, after the first micro-batch, which modules it has changed buffers of."""
        if self._are_sent:
            self._first = saved
        elif self._changing is None:
            # Kernels of normalization write running statistics past the versions of tensors.
            self._changing = {id(holder) for holder, _, _ in saved.changed(or_written=True)}


class SavedBuffers:
    """The buffers of modules at one moment: the dictionaries that they are in, their names, and what they were."""

    def __init__(
        self, saved: list[tuple[dict[str, Tensor | None], str, SavedTensor | None]], modules: Sequence[nn.Module]
    ) -> None:
        self._saved = saved
        self._modules = modules

    def changed(self, *, or_written: bool = False) -> list[tuple[dict[str, Tensor | None], str, SavedTensor]]:
        """Return those that are others, have other values, or of which there is no copy to tell."""
        return [
            (holder, name, each)
            for holder, name, each in self._saved
            if each is not None
            and (holder.get(name) is not each.tensor or (or_written and each.is_written) or each.has_other_values)
        ]

    def with_other_values(self) -> list[str]:
        """Return the names of those that have other values than they had, or of which there is no copy to tell."""
        return [name for _, name, _ in self.changed()]

    def describe_lost(self) -> str | None:
        """Name those that were written to and of which there is no copy; None where there are none."""
        lost = [name for _, name, each in self._saved if each is not None and each.is_lost]
        if not lost:
            return None
        return f"a forward has written to buffers that earlier ones left alone: {', '.join(lost[:4])}"

    def restore(self) -> None:
        """Bring them back, and take those away that were not there."""
        known = {(id(holder), name) for holder, name, _ in self._saved}
        for module in self._modules:
            for name in [name for name in module._buffers if (id(module._buffers), name) not in known]:
                # Not from the dictionary alone: the module also lists those that are not to be saved.
                delattr(module, name)
        for holder, name, each in self._saved:
            holder[name] = None if each is None else each.tensor
            if each is not None:
                each.restore()


# --- Gradients. ---


class Gradients:
    """Which gradients are there. They are not kept alive: whoever lets go of them frees them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._seen = [
            (each, None, 0) if each.grad is None else (each, weakref.ref(each.grad), each.grad._version)
            for each in parameters
        ]

    def are_written(self) -> bool:
        """Whether one that was there has been written to, and is there still."""
        return any(
            each.grad is not None and was is not None and was() is each.grad and version != each.grad._version
            for each, was, version in self._seen
        )

    def is_changed(self) -> bool:
        """Whether any is another one, has been written to, or is gone."""
        return bool(self.new()) or any(each.grad is None and was is not None for each, was, _ in self._seen)

    def new(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient which was not there, or has been written to."""
        return [
            each
            for each, was, version in self._seen
            if each.grad is not None and (was is None or was() is not each.grad or version != each.grad._version)
        ]

    def drop_new(self) -> None:
        """Let go of those that were not there."""
        for each, was, _ in self._seen:
            if was is None or was() is not each.grad:
                each.grad = None


class GradientsOfOthers:
    """Those of parameters that are not the model's, as of a loss: nobody need have set them to None before the window.

    Where they are there small ones are copied.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._copied = [
            (each, SavedTensor(each.grad, each.grad._version, each.grad.detach().clone()))
            for each in parameters
            if each.grad is not None and each.grad.nbytes <= _COPIED_BYTES
        ]
        copied = {id(each) for each, _ in self._copied}
        self._rest = Gradients([each for each in parameters if id(each) not in copied])

    def fault(self) -> str | None:
        """Return why they cannot be brought back; None if they can."""
        if self._rest.are_written():
            return "it has added to large gradients that were there before, of weights that are not the model's"
        return None

    def restore(self) -> None:
        """Bring them back."""
        self._rest.drop_new()
        for each, saved in self._copied:
            each.grad = saved.tensor
            saved.restore()

    def new(self) -> list[nn.Parameter]:
        """Return the parameters that have another gradient than they had."""
        others = (each for each, saved in self._copied if each.grad is not saved.tensor or saved.has_other_values)
        return [*self._rest.new(), *others]


class StepParameters:
    """The parameters that a step may use: frozen ones too, which may be trained later, or written to by a forward."""

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
            others = dict.fromkeys(chain(stepped, held, loose))
            self._found = list(own), [each for each in others if each is not None and each not in own]
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
        self.size = Size.of(named)
        self._versions = [(name, tensor, tensor._version) for name, tensor in named if not tensor.is_inference()]
        # A step may take entries out of what it is given.
        self._inputs = copy.copy(self.call.inputs)

    def again(self) -> TrainerCall:
        """Return the call with its inputs as they came."""
        return self.call.with_inputs(copy.copy(self._inputs))

    def restore(self) -> None:
        """Bring attributes and random states back."""
        self.attributes.restore()
        self.randomness.restore()

    def fault(self) -> str | None:
        """Return what of it cannot be brought back; None if all can."""
        if written := [name for name, tensor, version in self._versions if tensor._version != version]:
            return f"the step has written to its inputs: {', '.join(written)}"
        large = "the step has written to large tensors that the Trainer holds"
        return self.attributes.describe_lost(large) or self.buffers.describe_lost()


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

    Raises nothing: `fault` says why the window cannot be undone, if so. `proof` holds its replay against it.
    """

    def __init__(self, proof: ReplayProof) -> None:
        self.micro_batches: list[MicroBatch] = []
        self.proof = proof

    def begin(self, parameters: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> None:
        """Its first micro-batch begins; `others` are parameters that are not the model's, as of a loss."""
        self._parameters, self._others = parameters, others
        self._versions = list(map(_version, chain(parameters, others)))
        # The Trainer has set the model's gradients to None, which costs nothing here, or to zeros. To see that they are
        # zeros waits for the device.
        self._zeros = [parameter for parameter in parameters if parameter.grad is not None]
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
        return next(filter(None, (each.fault() for each in self.micro_batches)), None)

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
