"""Follows the storages of a step that runs, on real or on fake tensors, and writes a tape.

A storage counts from the operator that makes it until nobody holds it: autograd, a module, or Python. `module_hooks`
reports which layer, part and module runs. Knows no plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_ckpt.regions.execution_state import is_in_backward, tensors_in
from hf_ckpt.regions.held_state import COUNTS_COPIES
from hf_ckpt.simulation import quantized
from hf_ckpt.simulation.isolation import RealTensors
from hf_ckpt.simulation.operator_memo import Outputs, Run, call
from hf_ckpt.simulation.shared_tensors import is_shared, local_bytes, local_part
from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import Event, Mark, MemoryChange, Storage, Tape, Transfer
from hf_ckpt.structure.four_bit_tensor import FourBitTensor, holder_of
from hf_ckpt.upstream.torch import (
    AsyncCollectiveTensor,
    DisableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
    disable_current_modes,
    storage_id,
)

CostFunction = Callable[[Any, Any, Any, Any], tuple[float, int]]
"""Returns seconds and floating-point operations of an operator, from it, its arguments and its output."""
# Each operator asks fake tensors for it several times; `fake_device` is a shorter way to the answer.
_DEVICE_OF = torch.ops.prim.device.default
_DETACH = torch.ops.aten.detach.default
_DETACH_NAME = str(_DETACH)
_name_of: Callable[[Any], str] = cache(str)
_MAX_REASONS = 2
# Operators whose backward uses what they returned; so do all kernels of attention.
_SAVE_OUTPUTS = frozenset(
    "softmax log_softmax exp sqrt rsqrt reciprocal tanh sigmoid relu native_dropout native_layer_norm "
    "native_group_norm fused_rms_norm max min".split()
)


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows storages while it is entered.

    `rounding` is the multiple of bytes to which the device's allocator rounds up each block. `run` runs an operator:
    `constant_folding.fold` where tensors are fake.
    """

    def __init__(self, *, rounding: int = 1, costs: CostFunction | None = None, run: Run = call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        setattr(self, COUNTS_COPIES, True)
        self.tape = Tape()
        self.real = RealTensors()  # What no operator may meet.
        self.counts_time = True  # Whether operators that run take time.
        self.is_extra = False  # Whether what is made from now on is extra. See `Storage`.
        # Whether there are marks where a layer runs again in backward, for `layer_reuse`.
        self.marks_recomputation = False
        # Stack and number of layers whose backward has no mark: they only pass on what they get, for `layer_reuse`.
        self.without_backward: set[tuple[int, int]] = set()
        # Forwards that run now, and are not the one that is trained: what they make has a category of its own.
        self.num_reference_forwards = 0
        self.stack_numbers: dict[str, int] = {}  # By path.
        # Makes what an operator allocates for itself, from it and its arguments, before or after its outputs.
        self.holds: Callable[[Any, Any, Any, bool], object] = lambda function, args, kwargs, is_after: None
        self._marked = (-1, -1)
        self._rounding = rounding
        self._costs = costs
        self._known_costs: dict[Outputs, tuple[float, int]] = {}
        self._run = run
        # By address, and those of `free_with` by themselves.
        self._alive: dict[int | Storage, tuple[weakref.ref[Any], Storage]] = {}
        self._is_silent = False
        self._phase: Phase | None = None
        self._micro_batch = 0
        self._inner: list[Place] = []
        self._outer = Place(Phase.FORWARD)
        self._setup_place = self._outer
        # Saved for the backward of the operator that comes next; and the name and storages of the last one.
        self._awaiting_reason: list[Storage] = []
        self._last_output: tuple[str, set[int]] = ("", set())
        self.names_with_gradient: set[str] = set()  # The parameters that got a gradient.
        self._apart: list[Storage] = []
        # Equal places are one object: few of the tens of thousands differ.
        self._places: dict[tuple[Phase, int, int, str], Place] = {}
        self._kept: list[Place] = []

    @property
    def module(self) -> str:
        """Path of the innermost module that runs, or ran last; empty outside all."""
        return (self._inner[-1] if self._inner else self._outer).module

    # --- What whoever runs the step records. ---

    def record_existing(self, tensors: Iterable[tuple[str, Tensor]], category: Category) -> None:
        """Count tensors that exist before the step, each with the path of its parameter or another name."""
        for name, tensor in tensors:
            tensor = local_part(tensor)
            storage = self._storage_of(tensor)
            if storage is None:
                storage = self._start_tracking(tensor)
                self.tape.before.append(storage)
            storage.category, storage.parameter = category, name

    def name_gradient(self, name: str, parameter: Tensor) -> None:
        """Record that a parameter has its gradient. A hook of `register_post_accumulate_grad_hook`."""
        storage = None if parameter.grad is None else self._storage_of(local_part(parameter.grad))
        self.names_with_gradient.add(name)
        if storage is not None and storage.category is None:
            storage.category, storage.parameter = Category.GRADIENTS, name

    def record_apart(self, storages: Iterable[Storage]) -> None:
        """Count what exists before the step and stays, and what no tensor of the step that runs holds."""
        self._apart.extend(storages)

    def record_weight_apart(self, name: str, weight: Tensor, dtype: torch.dtype) -> None:
        """Count a weight of a layer that is not there."""
        storage = self._storage_like(local_part(weight), dtype)
        if isinstance(weight, DTensor):
            storage.num_bytes = self._rounded(local_bytes(weight))
        storage.category, storage.parameter = Category.PARAMETERS, name
        self.record_apart([storage])

    def record_copied_gradients(self, names: Sequence[str], like: Tensor) -> None:
        """Count the gradients of parameters whose layers are skipped: they look like that of `like`."""
        # `tape_expansion` writes their allocation into the tape.
        self.names_with_gradient.update(names)
        copied = self.tape.copied_gradients
        if any(name not in copied for name in names):
            found = self._storage_like(like, like.dtype)
            looks = found.num_bytes, found.shape, found.dtype, Category.GRADIENTS
            copied.update({name: Storage(*looks, parameter=name) for name in names if name not in copied})

    def free_copied_gradients(self) -> None:
        """Record that the gradients of skipped layers are freed."""
        for storage in self.tape.copied_gradients.values():
            self._append(Event(self._current_place(), MemoryChange.FREE, storage))

    def _storage_like(self, tensor: Tensor, dtype: torch.dtype) -> Storage:
        num_bytes = self._rounded(_bytes_of(tuple(tensor.shape), tensor.stride(), dtype))
        return Storage(num_bytes, tuple(tensor.shape), str(dtype).removeprefix("torch."))

    def start_micro_batch(self, number: int) -> None:
        """Set the micro-batch that the following events belong to."""
        self._micro_batch = number
        self.leave_layers()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Assign what follows to `phase`, whatever it looks like."""
        found, self._phase = self._phase, phase
        self.leave_layers()
        try:
            yield
        finally:
            self._phase = found

    @contextmanager
    def before_step(self) -> Iterator[None]:
        """Follow storages without events: those that are alive at the end exist before the step."""
        found, self._is_silent = self._is_silent, True
        try:
            yield
        finally:
            self._is_silent = found
        self.tape.before = [*(storage for _, storage in self._alive.values()), *self._apart]

    @property
    def is_reference(self) -> bool:
        """Whether a forward runs that is not the one that is trained."""
        return self.num_reference_forwards > 0

    def mark(self, mark: Mark) -> None:
        """Write a mark, with the current micro-batch. Layers of a reference have none: they run no backward."""
        if not self.is_reference:
            self._marked = mark.stack, mark.layer_idx
            self._append(Event(self._current_place(), mark=replace(mark, micro_batch=self._micro_batch)))

    def record_cost(self, event: Event) -> None:
        """Count the time and the operations of an event once more, and none of its memory."""
        self._append(Event(event.place, seconds=event.seconds, num_flops=event.num_flops))

    def record_transfer(self, transfer: Transfer) -> None:
        """Record a copy to the host or back."""
        self._append(Event(self._current_place(), transfer=transfer))

    def record_temporary(self, num_bytes: int) -> None:
        """Count memory that is allocated and freed at once."""
        storage = self._record_block(num_bytes)
        self._append(Event(self._current_place(), MemoryChange.FREE, storage))

    def record_owned(self, num_bytes: int, owner: object, category: Category = Category.TEMPORARY) -> None:
        """Count memory that is freed with the object that owns it."""
        self.free_with(owner, self._record_block(num_bytes, category))

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count nothing of tensors: they are on the host, or counted otherwise."""
        for tensor in tensors:
            self._start_tracking(tensor).num_bytes = 0

    def free_with(self, owner: object, storage: Storage) -> None:
        """Record that a storage is freed when its owner is."""
        self._alive[storage] = (weakref.ref(owner, lambda _: self._record_free(storage)), storage)

    def owner_of(self, storage: Storage) -> object | None:
        """Return the object with which a storage of `record_owned` is freed; None of other storages."""
        found = self._alive.get(storage)
        return None if found is None else found[0]()

    def _record_block(self, num_bytes: int, category: Category = Category.TEMPORARY) -> Storage:
        place = self._current_place()
        storage = Storage(self._rounded(num_bytes), category=category, is_extra=self.is_extra)
        self._append(Event(place, MemoryChange.ALLOCATE, storage))
        return storage

    on_host = staticmethod(disable_current_modes)  # Leaves out of the count what is made inside: it lies on the host.

    def enter_module(self, place: Place, *_: object) -> None:
        """Note that a module's forward begins, for the first time or again. A hook, given the place."""
        if self.marks_recomputation and place.layer_idx is not None and is_in_backward():
            layer = self.stack_numbers[place.stack], place.layer_idx
            if layer != self._marked:
                # In a segment the layer itself is not called: since transformers 5.23 its hooks run around the segment.
                self.mark(Mark(Phase.RECOMPUTATION, *layer, 0))
        self._inner.append(place)

    def leave_module(self, *_: object) -> None:
        """Note that the forward of the module entered last ends. A hook."""
        self._outer = self._inner.pop()
        if not self._inner and not is_in_backward():
            self.leave_layers()

    def enter_backward(self, place: Place) -> None:
        """Note that the backward of a layer or a part begins."""
        self._outer = place

    def leave_layers(self) -> None:
        """Note that what follows lies outside of all layers."""
        self._outer = Place(Phase.FORWARD)

    # --- Operators. ---

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # upstream
        # What is freed from now on is no longer part of the step.
        self._is_silent = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nobody compiles a simulation: torch would wrap each call in two more, to keep its compiler out.
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is _DEVICE_OF:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else function(*args)
        if is_shared(types) or FourBitTensor in types:
            # Left to the class: its operators on what it holds come here again.
            return NotImplemented
        kwargs = kwargs or {}
        if self.real.is_guarded:
            self.real.check(args, self)
            if kwargs:
                self.real.check(kwargs.values(), self)
        held = [self.holds(function, args, kwargs, False)]  # until this returns
        output, known = self._run(function, args, kwargs)
        with DisableTorchFunction():
            self._record(function, args, kwargs, output, known)
        if not self._is_silent:
            held.append(self.holds(function, args, kwargs, True))
        return output

    def _record(self, function: Any, args: Any, kwargs: dict[str, Any], output: Any, known: Outputs | None) -> None:
        """Record an operator that has run. No function mode is to see what is read of tensors here: see `run_once`."""
        if self._awaiting_reason and function is not _DETACH:
            self._add_reason(self._awaiting_reason, _name_of(function))
            self._awaiting_reason = []
        if self._is_silent:
            self._record_outputs(output, self._setup_place)
            return
        place = self._current_place(_name_of(function))
        if self.counts_time and self._costs is not None:
            cost = None if known is None else self._known_costs.get(known)
            if cost is None:
                cost = self._costs(function, args, kwargs, output)
                if known is not None and known.has_one_cost:
                    self._known_costs[known] = cost
            seconds, num_flops = cost
            if seconds or num_flops:
                self._append(Event(place, seconds=seconds, num_flops=num_flops))
        self._record_outputs(output, place)

    def _record_outputs(self, output: Any, place: Place) -> None:
        made = set[int]()
        for tensor in tensors_in(output):
            if isinstance(tensor, AsyncCollectiveTensor):
                # It has no memory of its own.
                continue
            if self._storage_of(tensor) is None and not is_without_memory(tensor):
                storage = self._start_tracking(tensor)
                storage.category = Category.REFERENCE if self.is_reference else None
                made.add(id(storage))
                if storage.num_bytes:
                    self._append(Event(place, MemoryChange.ALLOCATE, storage))
        if place.operator != _DETACH_NAME:
            self._last_output = (place.operator, made)

    def _current_place(self, operator: str = "") -> Place:
        phase, where = self._phase, self._inner[-1] if self._inner else self._outer
        if phase is None:
            phase = Phase.FORWARD
            if is_in_backward():
                # Operators of backward record no graph, those of a forward that runs again do. A function of the
                # user's (`autograd.Function`) records none either; it runs inside a module.
                runs_again = bool(self._inner) or torch.is_grad_enabled()
                phase = Phase.RECOMPUTATION if runs_again else Phase.BACKWARD
        key = phase, self._micro_batch, id(where), operator
        place = self._places.get(key)
        if place is None:
            place = Place(phase, self._micro_batch, where.stack, where.layer_idx, where.part, where.module, operator)
            self._places[key] = place
            # Its key names this by identity.
            self._kept.append(where)
        return place

    def record_saved(self, tensor: Tensor) -> Tensor:
        """Record that autograd saves a tensor. A hook of `saved_tensors_hooks`."""
        # An operator's inputs are saved just before it runs, its outputs just after.
        storage = self._storage_of(tensor)
        if storage is not None and not is_in_backward():
            operator, made = self._last_output
            name = _plain_name(operator)
            if id(storage) in made and (name in _SAVE_OUTPUTS or "scaled_dot_product" in name):
                self._add_reason([storage], operator)
            else:
                self._awaiting_reason.append(storage)
        # A hook that returned the tensor itself would keep the node that made it alive, and so the tensor too.
        return tensor.detach()

    def _add_reason(self, storages: list[Storage], operator: str) -> None:
        place = self._current_place()
        module = place.module.removeprefix(f"{place.stack}.{place.layer_idx}").lstrip(".") or "the layer"
        name = _plain_name(operator)
        reason = f"{name} of {module}" if place.layer_idx is not None else name
        for storage in storages:
            reasons = storage.why.split(", ") if storage.why else []
            if reason not in reasons and len(reasons) < _MAX_REASONS:
                storage.why = ", ".join([*reasons, reason])

    # --- Storages. ---

    def _storage_of(self, tensor: Tensor) -> Storage | None:
        found = self._alive.get(storage_id(tensor.untyped_storage()))
        return None if found is None else found[1]

    def _start_tracking(self, tensor: Tensor) -> Storage:
        storage = tensor.untyped_storage()
        num_bytes = self._rounded(storage.nbytes())
        followed = Storage(num_bytes, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        followed.is_extra = self.is_extra
        key = storage_id(storage)
        # Called when C++ frees the storage: Python's object of a storage lives as long as the storage.
        self._alive[key] = (weakref.ref(storage, lambda _: self._record_free(key)), followed)
        return followed

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._rounding) * self._rounding

    def _record_free(self, key: int | Storage) -> None:
        _, storage = self._alive.pop(key)
        if storage.num_bytes and not self._is_silent:
            self._append(Event(self._current_place(), MemoryChange.FREE, storage))

    def _append(self, event: Event) -> None:
        if not self._is_silent:
            self.tape.events.append(event)


@cache
def _bytes_of(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> int:
    with disable_current_modes():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta").untyped_storage().nbytes()


def is_without_memory(tensor: Tensor) -> bool:
    """Whether a tensor lies on `meta`: it replaces one that recomputation does without (`regions.selective`)."""
    # Reading `device` of a fake tensor is slow; and every fake tensor is `is_meta`.
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "meta"


def _plain_name(operator: str) -> str:
    """Return `mul` of `aten.mul.Tensor`."""
    return operator.removeprefix("aten.").partition(".")[0].lstrip("_")


def parameters_and_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a model holds on the device, with the tensors that modules keep without registering them."""
    for path, module in model.named_modules():
        yield from ((f"{path}.{name}", value) for name, value in vars(module).items() if isinstance(value, Tensor))
    yield from ((name, holder_of(parameter)) for name, parameter in model.named_parameters())
    yield from model.named_buffers()
    yield from (("", constant) for constant in quantized.constants(model))
