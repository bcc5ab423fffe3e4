"""Follows the storages of a step that runs, on real or on fake tensors, and writes a tape.

A storage counts from the operator that makes it until nobody holds it: autograd, a module, or Python. Knows no plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_ckpt.regions.call import is_in_backward, tensors_of
from hf_ckpt.simulation import quantized
from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import Change, Event, Mark, Storage, Tape, Transfer

Costs = Callable[[Any, Any, Any, Any], tuple[float, int]]
"""Returns seconds and floating-point operations of an operator, from it, its arguments and its output."""
BLOCK_BYTES = 512
"""CUDA's caching allocator rounds up every block to a multiple of it."""
_DETACH = torch.ops.aten.detach.default
_DETACH_NAME = str(_DETACH)
_MOST_REASONS = 2
_SAVE_OUTPUTS = frozenset(
    "softmax log_softmax exp sqrt rsqrt reciprocal tanh sigmoid relu native_dropout native_layer_norm "
    "native_group_norm fused_rms_norm max min".split()
)
"""Operators whose backward uses what they returned; so do all kernels of attention."""
_DEVICE = torch.ops.prim.device.default
"""Fake tensors are asked for their device several times by each operator, by way of the modes."""


def no_costs(function: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, int]:
    """Predict nothing."""
    return 0.0, 0


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows storages while it is entered.

    Args:
        rounding: bytes to which the device's allocator rounds up each block.
        costs: predicts the time of an operator.

    Attributes:
        tape: what happened so far.
        counts_time: whether operators that run take time.
    """

    def __init__(self, *, rounding: int = 1, costs: Costs = no_costs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.counts_time = True
        self._rounding = rounding
        self._costs = costs
        self._alive: dict[int, tuple[weakref.ref[Any], Storage]] = {}
        self._is_silent = False
        self._phase: Phase | None = None
        self._micro_batch = 0
        self._inner: list[Place] = []
        self._outer = Place(Phase.FORWARD)
        self._place = self._outer
        # Saved for the backward of an operator that comes next; and what the last one made.
        self._waiting: list[Storage] = []
        self._made_last: tuple[str, set[int]] = ("", set())
        self._with_gradient: set[str] = set()

    @property
    def module(self) -> str:
        """Path of the innermost module that runs, or ran last; empty outside all."""
        return (self._inner[-1] if self._inner else self._outer).module

    # --- What the step tells. ---

    def know(self, tensors: Iterable[tuple[str, Tensor]], category: Category) -> None:
        """Count tensors that are there before the step begins.

        Args:
            tensors: they, each with the path of the parameter that it belongs to, or another name.
            category: what they are.
        """
        for name, tensor in tensors:
            storage = self._storage_of(tensor)
            if storage is None:
                storage = self._follow(tensor, None)
                self.tape.before.append(storage)
            storage.category, storage.parameter = category, name

    def name_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Say that a tensor is the gradient of the parameter `name`."""
        storage = None if gradient is None else self._storage_of(gradient)
        self._with_gradient.add(name)
        if storage is not None and storage.category is None:
            storage.category, storage.parameter = Category.GRADIENTS, name

    def forget_unused_state(self) -> None:
        """Leave out the optimizer's state of parameters that got no gradient: in a real run there is none."""

        def is_used(storage: Storage) -> bool:
            return storage.category is not Category.OPTIMIZER or storage.parameter in self._with_gradient

        self.tape.before = list(filter(is_used, self.tape.before))

    def know_gradient(self, name: str, parameter: Tensor) -> None:
        """Make the gradient of a parameter whose layer is passed through; other events stand for its making."""
        with self._quietly():
            parameter.grad = torch.empty_like(parameter)
            self.name_gradient(name, parameter.grad)
            storage = self._storage_of(parameter.grad)
            assert storage is not None, "it was followed when it was made"
            self.tape.copied_gradients[name] = storage

    def start_micro_batch(self, number: int) -> None:
        """Say which micro-batch comes."""
        self._micro_batch = number
        self.leave_layers()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Say that what follows belongs to `phase`, whatever it looks like."""
        found, self._phase = self._phase, phase
        self.leave_layers()
        try:
            yield
        finally:
            self._phase = found

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Follow storages without events: what is alive afterwards was there before the step."""
        with self._quietly():
            yield
        self.tape.before = [storage for _, storage in self._alive.values()]

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        found, self._is_silent = self._is_silent, True
        try:
            yield
        finally:
            self._is_silent = found

    def mark(self, mark: Mark) -> None:
        """Write a mark, with the micro-batch that runs."""
        self._write(Event(self._here(), mark=replace(mark, micro_batch=self._micro_batch)))

    def note_transfer(self, transfer: Transfer) -> None:
        """Write down what goes to the host or comes back."""
        self._write(Event(self._here(), transfer=transfer))

    def note_passing(self, num_bytes: int) -> None:
        """Count memory that is there for a moment."""
        storage = self._note_block(num_bytes)
        self._write(Event(self._here(), Change.FREE, storage))

    def note_held(self, num_bytes: int, holder: object) -> None:
        """Count memory that goes with an object."""
        # No address of a storage.
        key = -1 - len(self.tape.events)
        self._alive[key] = (weakref.ref(holder, lambda _: self._lose(key)), self._note_block(num_bytes))

    def _note_block(self, num_bytes: int) -> Storage:
        place = self._here()
        storage = Storage(self._rounded(num_bytes), place, category=Category.TEMPORARY)
        self._write(Event(place, Change.ALLOCATE, storage))
        return storage

    @contextmanager
    def out_of_sight(self) -> Iterator[None]:
        """Let what is made in here be none of the device's memory: it lies on the host."""
        with _disable_current_modes():
            yield

    def enter_module(self, place: Place) -> None:
        """A module's forward begins, for the first time or again."""
        self._inner.append(place)

    def leave_module(self) -> None:
        """The forward of the module that was entered last ends."""
        self._outer = self._inner.pop()
        if not self._inner and not is_in_backward():
            self.leave_layers()

    def enter_backward(self, place: Place) -> None:
        """The backward of a layer or a part begins."""
        self._outer = place

    def leave_layers(self) -> None:
        """What follows lies outside of all layers."""
        self._outer = Place(Phase.FORWARD)

    # --- What runs. ---

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # upstream
        # What is let go from now on is no longer of the step.
        self._is_silent = True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        if function is _DEVICE:
            return output
        if self._waiting and function is not _DETACH:
            self._say_why(self._waiting, str(function))
            self._waiting = []
        if self._is_silent:
            self._take_in(output, self._place)
            return output
        place = self._here(str(function))
        seconds, num_flops = self._costs(function, args, kwargs, output) if self.counts_time else (0.0, 0)
        if seconds or num_flops:
            self._write(Event(place, seconds=seconds, num_flops=num_flops))
        self._take_in(output, place)
        return output

    def _take_in(self, output: Any, place: Place) -> None:
        made = set[int]()
        for tensor in tensors_of(output):
            if self._storage_of(tensor) is None and not is_without_memory(tensor):
                storage = self._follow(tensor, place)
                made.add(id(storage))
                if storage.num_bytes:
                    self._write(Event(place, Change.ALLOCATE, storage))
        if place.operator != _DETACH_NAME:
            self._made_last = (place.operator, made)

    def _here(self, operator: str = "") -> Place:
        phase, where = self._phase, self._inner[-1] if self._inner else self._outer
        if phase is None:
            phase = Phase.FORWARD
            if is_in_backward():
                # Operators of backward record no graph, those of a forward that runs again do. A function of the
                # user's (`autograd.Function`) records none either; it runs inside a module.
                runs_again = bool(self._inner) or torch.is_grad_enabled()
                phase = Phase.RECOMPUTATION if runs_again else Phase.BACKWARD
        return Place(phase, self._micro_batch, where.stack, where.layer_idx, where.part, where.module, operator)

    def note_saved(self, tensor: Tensor) -> Tensor:
        """Take note that autograd saves a tensor. A hook of `saved_tensors_hooks`.

        An operator's inputs are saved just before it runs, its outputs just after.
        """
        storage = self._storage_of(tensor)
        if storage is not None and not is_in_backward():
            operator, made = self._made_last
            if id(storage) in made and _saves_outputs(operator):
                self._say_why([storage], operator)
            else:
                self._waiting.append(storage)
        # The tensor itself, handed back by a hook, would hold the node that made it, and with it itself.
        return tensor.detach()

    def _say_why(self, storages: list[Storage], operator: str) -> None:
        place = self._here()
        module = place.module.removeprefix(f"{place.stack}.{place.layer_idx}").lstrip(".") or "the layer"
        name = _plain_name(operator)
        reason = f"{name} of {module}" if place.layer_idx is not None else name
        for storage in storages:
            reasons = storage.why.split(", ") if storage.why else []
            if reason not in reasons and len(reasons) < _MOST_REASONS:
                storage.why = ", ".join([*reasons, reason])

    # --- Storages. ---

    def _storage_of(self, tensor: Tensor) -> Storage | None:
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def _follow(self, tensor: Tensor, place: Place | None) -> Storage:
        storage = tensor.untyped_storage()
        num_bytes = self._rounded(storage.nbytes())
        followed = Storage(num_bytes, place, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        key = storage._cdata
        # Called when C++ lets the storage go: Python's object of a storage lives as long as the storage.
        self._alive[key] = (weakref.ref(storage, lambda _: self._lose(key)), followed)
        return followed

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._rounding) * self._rounding

    def _lose(self, key: int) -> None:
        _, storage = self._alive.pop(key)
        if storage.num_bytes and not self._is_silent:
            self._write(Event(self._here(), Change.FREE, storage))

    def _write(self, event: Event) -> None:
        if not self._is_silent:
            self.tape.events.append(event)


def is_without_memory(tensor: Tensor) -> bool:
    """Whether a tensor lies on `meta`: it stands for one that recomputation does without (`regions.selective`)."""
    # Of a fake tensor each look at `device` costs; all of them are `is_meta`.
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "meta"


def _plain_name(operator: str) -> str:
    """Return `mul` of `aten.mul.Tensor`."""
    return operator.removeprefix("aten.").partition(".")[0].lstrip("_")


def _saves_outputs(operator: str) -> bool:
    name = _plain_name(operator)
    return name in _SAVE_OUTPUTS or "scaled_dot_product" in name


def parameters_and_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a model holds on the device, with the tensors that modules keep without registering them."""
    for path, module in model.named_modules():
        yield from ((f"{path}.{name}", value) for name, value in vars(module).items() if isinstance(value, Tensor))
    yield from model.named_parameters()
    yield from model.named_buffers()
    yield from (("", constant) for constant in quantized.constants(model))
