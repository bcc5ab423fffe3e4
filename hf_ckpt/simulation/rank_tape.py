"""One rank's tape under an engine, made of that of the whole model: the weights as engines share them out, and DDP.

The arithmetic of engines; nothing is sent. A unit is what an engine gathers at a time: a decoder layer, or the rest of
the model, which stays gathered from its forward to its backward. FSDP is in `fsdp_tape`, DeepSpeed in `zero_tape`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.caching_allocator import BLOCK_BYTES
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import Event, Mark, MemoryChange, Storage, Tape, Transfer, TransferKind
from hf_ckpt.structure.four_bit_tensor import FourBitTensor
from hf_ckpt.structure.layers import Stack
from hf_ckpt.structure.stored import inside_adapters, stored
from hf_ckpt.upstream.peft import CASTS_INPUT

UnitKey = tuple[int, int] | str | None
"""Number of the stack and `layer_idx`; path of an adapter; `EMBEDDINGS`, `HEAD`; None for the rest of the model."""

Running = tuple[Phase, UnitKey, int]  # What runs: forward or backward, unit, micro-batch.

EMBEDDINGS, HEAD = "embeddings", "head"

MASTER_DTYPE = torch.float32  # In which weights are kept and stepped.

# Before accelerate 1.14 they are part of the root, which has the last layer gathered when the loss runs backward.
HAS_UNITS_AT_THE_ENDS = TorchVersion(accelerate.__version__) >= "1.14"


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One parameter."""

    unit: UnitKey  # The unit that it belongs to: its layer's, as a rule.
    numel: int  # Of its storage: a 4-bit weight is packed.
    loaded_bytes: int  # Whole, in the dtype that it was loaded in.
    num_bytes: int  # Whole, in the dtype that it is stored in.
    compute_bytes: int  # Whole, in the dtype that it is gathered in.
    shard_bytes: int  # Of one rank.
    is_trained: bool  # Whether it gets a gradient.


def compute_dtype(step: Step, tensor: Tensor) -> torch.dtype:
    """Return the dtype in which an engine passes a parameter to the computation."""
    engine, dtype = step.sharding.engine, step.autocast
    gathers_in_half = engine.startswith(("fsdp", "zero")) and dtype is not None and tensor.is_floating_point()
    return getattr(torch, dtype) if gathers_in_half and dtype is not None else tensor.dtype


def let_adapters_cast(model: nn.Module, step: Step) -> None:
    """Let the adapters of a copy cast their input to the dtype that PEFT finds their weights in under FSDP1."""
    # Each adapter is a unit of its own, and PEFT looks before it is gathered: then it has the dtype of the shares.
    if step.sharding.engine == "fsdp1" and step.autocast is not None:
        for module in model.modules():
            adapted: Any = module
            if hasattr(adapted, "base_layer") and hasattr(adapted, CASTS_INPUT):
                setattr(adapted, CASTS_INPUT, partial(_cast_as_shares, getattr(adapted, CASTS_INPUT)))


def _cast_as_shares(cast: Callable[[Any, torch.dtype], Any], inputs: Any, dtype: torch.dtype) -> Any:
    return cast(inputs, MASTER_DTYPE)


def weights_of(model: nn.Module, stacks: Sequence[Stack], step: Step) -> dict[str, Weight]:
    """Return the parameters of a model by name. The model is whole, in the dtypes that it was loaded in."""
    has_ends = step.sharding.engine == "zero3" or (step.sharding.engine == "fsdp2" and HAS_UNITS_AT_THE_ENDS)
    units = _units_at_the_ends(model) if has_ends else {}
    for number, stack in enumerate(stacks):
        for layer in stack.layers:
            units |= dict.fromkeys(layer.outer.parameters(), (number, layer.layer_idx))
    # Around adapters PEFT's policy for FSDP1 makes units within those of the layers.
    frozen = {units.get(parameter) for parameter in model.parameters() if not parameter.requires_grad} - {None}
    weights = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, FourBitTensor):
            raise UnsupportedError(
                f"{name} is in 4 bits, as quantize_experts asks, and {step.sharding.engine} cannot "
                "shard it. Leave quantize_experts out, or take one GPU, or DDP."
            )
        stored = parameter.element_size()
        computed = compute_dtype(step, parameter).itemsize
        if step.sharding.engine.startswith("fsdp") and step.autocast is not None and parameter.requires_grad:
            stored = MASTER_DTYPE.itemsize
        elif step.sharding.engine.startswith("zero"):
            stored = computed
        shape, world_size = tuple(parameter.shape) or (1,), step.sharding.world_size
        rows = -(-shape[0] // world_size) if step.sharding.engine == "fsdp2" else shape[0] / world_size
        numel, unit = parameter.numel(), units.get(parameter)
        if step.sharding.engine == "fsdp1" and parameter.requires_grad and unit in frozen:
            unit = name.rpartition(".")[0]
        weights[name] = Weight(
            unit,
            numel,
            numel * parameter.element_size(),
            numel * stored,
            numel * computed,
            math.ceil(rows * (numel // max(1, shape[0])) * stored),
            parameter.requires_grad,
        )
    return weights


def _units_at_the_ends(model: nn.Module) -> dict[nn.Parameter, UnitKey]:
    """Return the units of the embeddings and of the head, where they are not tied."""
    embeddings, head = (getattr(model, f"get_{name}_embeddings", lambda: None)() for name in ("input", "output"))
    weight = None if head is None else stored(inside_adapters(head), "weight")
    if weight is not None and weight is stored(embeddings, "weight"):
        return {}
    ends = ((embeddings, EMBEDDINGS), (head, HEAD))
    return {parameter: key for module, key in ends if module is not None for parameter in module.parameters()}


# --- Tapes. ---


@dataclass(eq=False)
class RankTape:
    """Makes one rank's tape of that of the whole model. Each engine has a class of its own."""

    whole: Tape
    weights: Mapping[str, Weight]
    step: Step
    device: Device
    plan: Plan | None = None

    def __post_init__(self) -> None:
        self._trained = [weight for weight in self.weights.values() if weight.is_trained]

    def tape(self) -> Tape:
        """Return it."""
        # In this order: what is there before the step is what its events change.
        before = list(self._before())
        tape = Tape(before, self._events())
        rounding = BLOCK_BYTES if self.device.is_cuda else 1
        for storage in (*tape.before, *(event.storage for event in tape.events)):
            if storage is not None:
                storage.num_bytes = -(-storage.num_bytes // rounding) * rounding
        return tape

    def _before(self) -> Iterator[Storage]:
        """Yield what exists before the step."""
        raise NotImplementedError

    def _events(self) -> Iterable[Event]:
        """Return the step."""
        raise NotImplementedError


class DdpTape(RankTape):
    """A rank of DDP holds everything, and buckets as large as all gradients, which are copied into them (`Reducer`)."""

    def _before(self) -> Iterator[Storage]:
        yield from self.whole.before
        yield Storage(sum(weight.num_bytes for weight in self._trained), category=Category.GATHERED)

    def _events(self) -> Iterable[Event]:
        return self.whole.events


class UnitTape(RankTape):
    """Goes through the units of an engine that shards weights, gradients or optimizer state, as they run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sharding, self._world_size = self.step.sharding, self.step.sharding.world_size
        self._by_unit: dict[UnitKey, list[Weight]] = {}
        for weight in self.weights.values():
            self._by_unit.setdefault(weight.unit, []).append(weight)
        # Whether the optimizer steps weights in float32.
        self._keeps_masters = any(weight.num_bytes != weight.compute_bytes for weight in self._trained)
        self._master_bytes = MASTER_DTYPE.itemsize
        begun = (mark for event in self.whole.events if (mark := event.mark) and mark.phase is Phase.FORWARD)
        # The layers as they first run forward.
        self._order: list[UnitKey] = list(
            dict.fromkeys((mark.stack, mark.layer_idx) for mark in begun if not mark.is_end)
        )
        self._small_units: frozenset[str] = frozenset()  # The modules within layers that the host gathers one by one.
        self._module = ""  # Of them, or of others, what ran last.
        self._adapter: Running | None = None  # Of them, under FSDP1, what is gathered now.
        self._running: Running | None = None
        self._backward_place = Place(Phase.BACKWARD)  # Of the last event of a backward.
        self._shards: dict[Storage, Storage] = {}  # Of what the whole step allocates: what a rank has instead.

    # --- What exists before the step. ---

    def _before(self) -> Iterator[Storage]:
        for storage in self.whole.before:
            weight = self.weights.get(storage.parameter)
            if weight is None:
                yield storage
            elif storage.category is Category.PARAMETERS:
                yield from self._kept(storage, weight)
            else:
                yield self._state(storage, weight)
        yield from self._held_by_engine()

    def _kept(self, storage: Storage, weight: Weight) -> Iterator[Storage]:
        """Yield what a rank keeps of a weight."""
        yield replace(storage, num_bytes=weight.shard_bytes)

    def _held_by_engine(self) -> Iterator[Storage]:
        """Yield what is of no module and of no optimizer."""
        yield from ()

    def _state(self, storage: Storage, weight: Weight) -> Storage:
        """Return a rank's part of the optimizer's tensor: a share of what is as large as the parameter."""
        if math.prod(storage.shape) <= 1:
            return storage
        return replace(storage, num_bytes=self._share(self._stepped_bytes(storage)))

    def _stepped_bytes(self, storage: Storage) -> int:
        """Return what a tensor of the optimizer takes in the dtype of the stored weights: float32 where kept so."""
        is_wider = self._keeps_masters and "float" in storage.dtype
        return max(storage.num_bytes, math.prod(storage.shape) * self._master_bytes if is_wider else 0)

    def _share(self, num_bytes: int) -> int:
        return -(-num_bytes // self._world_size)

    # --- The step. ---

    def _events(self) -> Iterator[Event]:
        place = Place(Phase.FORWARD)
        yield from self._use(None, place)
        yield from self._use(EMBEDDINGS, place)
        for event in self.whole.events:
            mark, place = event.mark, event.place
            yield from self._before_event(place)
            if mark is not None and not mark.is_end:
                yield from self._change_layer(event, mark)
                continue
            yield from self._change_outside_layers(event)
            if self._small_units:
                yield from self._visit(event)
            if self._takes_over(event):
                continue
            yield from self._one_rank_events(event)
            if place.phase is Phase.BACKWARD:
                self._backward_place = place
        yield from self._leave_backward(place)

    def _leave_backward(self, place: Place) -> Iterator[Event]:
        """Leave what ran last. Before the optimizer runs, which makes its state out of what the backward has left."""
        yield from self._leave(self._running, place)
        self._running = None
        yield from self._end_backward(place)

    def _change_layer(self, event: Event, mark: Mark) -> Iterator[Event]:
        """Go from what ran to a layer whose forward or backward begins."""
        yield from self._leave(self._running, event.place)
        phase, key, micro_batch = self._running = mark.phase, (mark.stack, mark.layer_idx), mark.micro_batch
        # The embeddings end where layers begin, and the head where their backward does.
        if phase is Phase.BACKWARD:
            yield from self._leave((phase, HEAD, micro_batch), event.place)
        elif key == self._order[0]:
            yield from self._leave((phase, EMBEDDINGS, micro_batch), event.place)
        yield event
        yield from self._enter_layer(self._running, event.place)

    def _change_outside_layers(self, event: Event) -> Iterator[Event]:
        """Leave the last layer that runs, for the head, for the embeddings, or for the optimizer."""
        place, mark = event.place, event.mark
        if self._running is None:
            if place.phase is Phase.BACKWARD:
                yield from self._start_backward(place)
        elif place.phase is Phase.OPTIMIZER:
            yield from self._leave_backward(self._backward_place)
        elif mark and mark.is_end and (mark.stack, mark.layer_idx) == self._order[-1]:
            yield from self._leave(self._running, place)
            self._running = None
            yield from self._use(HEAD, place)
        elif (weight := self.weights.get(_parameter_of_gradient(event))) and weight.unit == EMBEDDINGS:
            # Their backward comes when the layers' is done.
            yield from self._leave(self._running, place)
            yield from self._use(EMBEDDINGS, place)

    def _visit(self, event: Event) -> Iterator[Event]:
        """Notice which module within a layer runs, and in backward whose gradient is made."""
        module = event.place.module
        if event.place.phase not in (Phase.FORWARD, Phase.RECOMPUTATION):
            module = _parameter_of_gradient(event).rpartition(".")[0]
            if not module and self._adapter is None:
                return
        if module != self._module and event.change is not MemoryChange.FREE:
            self._module = module
            yield from self._change_module(module, event.place)

    def _event(self, event: Event) -> Event:
        """Return one rank's event for an event of the whole step."""
        storage, in_optimizer = event.storage, event.place.phase is Phase.OPTIMIZER
        if in_optimizer and event.seconds:
            return replace(event, seconds=event.seconds * self._times_wider / self._world_size)
        if storage is None:
            return event
        if event.change is MemoryChange.FREE:
            return replace(event, storage=self._shards.get(storage, storage))
        if in_optimizer and storage.category is not Category.GRADIENTS:
            shard = self._shards[storage] = replace(storage, num_bytes=self._optimizer_bytes(storage))
            return replace(event, storage=shard)
        return event

    @cached_property
    def _times_wider(self) -> float:
        """How many bytes the optimizer steps for each that its step was simulated with."""
        computed = sum(weight.compute_bytes for weight in self._trained)
        stepped = sum(weight.numel for weight in self._trained) * self._master_bytes
        return stepped / computed if computed and self._keeps_masters else 1.0

    # --- What engines do otherwise. ---

    def _before_event(self, place: Place) -> Iterator[Event]:
        """What the engine does before an event at `place`."""
        yield from ()

    def _start_backward(self, place: Place) -> Iterator[Event]:
        """What it does while the head and the loss run backward."""
        yield from ()

    def _end_backward(self, place: Place) -> Iterator[Event]:
        """What it does when all has run backward."""
        raise NotImplementedError

    def _enter_layer(self, running: Running, place: Place) -> Iterator[Event]:
        """Gather a layer that runs now."""
        yield from self._use(running[1], place)

    def _use(self, key: UnitKey, place: Place) -> Iterator[Event]:
        """Gather a unit that runs now."""
        raise NotImplementedError

    def _leave(self, running: Running | None, place: Place) -> Iterator[Event]:
        """Free the unit that ran, if any."""
        raise NotImplementedError

    def _change_module(self, module: str, place: Place) -> Iterator[Event]:
        """Go to a module within a layer, which may be one of `_small_units`."""
        raise NotImplementedError

    def _takes_over(self, event: Event) -> bool:
        """Whether what an event does is done at another time."""
        return False

    def _one_rank_events(self, event: Event) -> Iterator[Event]:
        """Return what one rank does where the whole step has an event."""
        yield self._event(event)

    def _optimizer_bytes(self, storage: Storage) -> int:
        """Return what a temporary tensor of the whole optimizer step takes on one rank."""
        return self._share(self._stepped_bytes(storage))

    # --- Events. ---

    def _free(self, place: Place, *storages: Storage | None) -> Iterator[Event]:
        return (Event(place, MemoryChange.FREE, storage) for storage in storages if storage is not None)

    def _collective(self, kind: TransferKind, num_bytes: int, place: Place, num_calls: int = 0) -> Event:
        return Event(place, transfer=Transfer(kind, num_bytes * (self._world_size - 1) // self._world_size, num_calls))

    def _pass(self, num_bytes: int, place: Place) -> Iterator[Event]:
        """Gather bytes, and let go of them."""
        yield self._collective(TransferKind.GATHER, num_bytes, place)
        yield Event(place, transfer=Transfer(TransferKind.LET_GO, 0))


def _parameter_of_gradient(event: Event) -> str:
    """Return the path of the parameter whose gradient is made, empty where none is."""
    storage = event.storage
    if event.change is not MemoryChange.ALLOCATE or storage is None or storage.category is not Category.GRADIENTS:
        return ""
    return storage.parameter
