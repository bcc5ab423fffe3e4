"""What one trial left behind, to be compared with another trial's, and the hooks that write it down.

The hooks are verify's own and sit on every module. They do not ask the plan, the callback or the regions what they
did: they see modules entered and left, in forward and in backward, and the gradients. No verdicts here.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.regions.execution_state import is_extra_run, is_in_backward, qualified_name
from hf_ckpt.regions.head import DeferredLogits
from hf_ckpt.structure.layers import Stack
from hf_ckpt.upstream.transformers import FLAG, FORWARD, FUNCTION

Gradients = dict[str, Tensor | None]
State = dict[str, object]
_DIGEST_BYTES = 8
_PLAN_ATTRIBUTES = (FLAG, FUNCTION, FORWARD)
_WRITTEN_BY_LOSS = "problem_type"  # By that of transformers, into the config, when it sees the first labels.
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class StateChange:
    """A value around a module that was another one when the module was recomputed."""

    path: str
    what: str  # the flag, or "autocast"
    in_forward: object
    in_recomputation: object


@dataclass(frozen=True)
class TrialError:
    """An exception that ended a trial."""

    error: Exception
    path: str  # the layer whose forward or recomputation ran; empty outside of the layers
    is_recomputing: bool


@dataclass
class RecordedMicroBatch:
    """One forward and backward."""

    loss: float = float("nan")
    outputs: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """(module path, digests of the tensors that it returned), in the order in which forwards ended."""
    layer_gradients: list[tuple[tuple[str, str], str]] = field(default_factory=list)
    """((layer path, "input" or "output"), digest), in the order of backward."""
    random_state: dict[str, str] = field(default_factory=dict)
    """Digests of the generators' states after backward; empty if the micro-batch was not completed."""


@dataclass(frozen=True)
class WatchedLayer:
    """The paths in one layer where forwards are counted, and what the policy resolves to there."""

    path: str
    entry: LayerPlan
    attention: tuple[str, ...]
    ffn: tuple[str, ...]  # empty where the layer's own forward computes it
    recomputes_itself: bool  # a reversible layer, which recomputes under any plan
    tiled: tuple[str, ...] = ()  # what runs in slices of the sequence, each of them recomputed


@dataclass(frozen=True)
class UserHook:
    """A hook or a replaced forward that is neither ours nor a library's."""

    path: str
    kind: str  # "forward hook", "forward pre-hook", "backward hook", "backward pre-hook" or "forward"
    name: str
    change: Any  # what was added to its visible state over the trial, in comparable form; None without such state
    runs_again: int  # runs in recomputation


@dataclass(frozen=True)
class Tolerance:
    """Relative errors that are no fault."""

    first: float  # of losses and gradients in the first optimizer step, which begins with the same weights
    what: str  # the part of the plan that adds up in another order

    @property
    def later(self) -> float:
        """Errors of what follows: half of the digits, as the optimizer magnifies the last of them."""
        return float(self.first**0.5)


@dataclass
class Record:
    """What one trial left behind. Digests stand for tensors, by name; paths are those before any engine wrapped."""

    folder: Path  # of gradients, weights and what the Trainer saved
    layers: tuple[WatchedLayer, ...] = ()
    expected_plan: Plan | None = None
    plan: Plan | None = None
    head: str = ""  # path of the head, where the plan runs it in chunks
    tolerance: Tolerance | None = None  # from a trial without the plan; None: equal bit by bit
    callback_faults: list[str] = field(default_factory=list)
    micro_batches: list[RecordedMicroBatch] = field(default_factory=list)
    num_steps: int = 0
    num_recovered: int = 0  # steps that ran again under a leaner plan, as memory had run out
    trainable: tuple[str, ...] = ()
    on_other_ranks: frozenset[str] = frozenset()  # trainable, but FSDP1 left no part of them to this process
    tensors_before: dict[str, str] = field(default_factory=dict)
    tensors_after: dict[str, str] = field(default_factory=dict)
    trained: dict[str, str] = field(default_factory=dict)  # digests of whole values, whatever their dtype
    buffers: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    forwards: Counter[str] = field(default_factory=Counter)  # by module path
    recomputations: Counter[str] = field(default_factory=Counter)  # forwards in backward, by module path
    with_output_gradient: set[str] = field(default_factory=set)  # layers and parts that a gradient came back to
    no_output_gradient: set[str] = field(default_factory=set)  # layers whose output required none
    reentrant: set[str] = field(default_factory=set)
    state_changes: list[StateChange] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)  # by path, what stands where the plan had put its own
    hooks: list[UserHook] = field(default_factory=list)
    failure: TrialError | None = None
    use_cache: Mapping[str, tuple[object, object]] = field(default_factory=dict)
    generated: dict[str, Any] = field(default_factory=dict)
    logits: Tensor | None = None
    engine: str = ""

    @property
    def can_save_model(self) -> bool:
        """Whether the model can be saved and run: FSDP1 keeps the weights in its wrappers, and cannot on a CPU."""
        return self.engine != "fsdp1"

    def gradients(self, step: int) -> Gradients:
        """Read the gradients of an optimizer step, before clipping; of shards, this process's."""
        gradients: Gradients = _read(self._file("gradients", step))
        return gradients

    def keep_gradients(self, step: int, gradients: Gradients) -> None:
        """Write the gradients of a step to disk: a real model leaves no memory for those of all trials."""
        _write(self._file("gradients", step), gradients)

    def weights(self) -> dict[str, Tensor]:
        """Read the trainable parameters after the last step; of shards, this process's."""
        weights: dict[str, Tensor] = _read(self._file("weights", self.num_steps))
        return weights

    def keep_weights(self, weights: dict[str, Tensor]) -> None:
        """Write the trainable parameters to disk, after the last step."""
        _write(self._file("weights", self.num_steps), weights)

    def _file(self, what: str, step: int) -> Path:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return self.folder / f"{what}_{step}_{rank}.pt"

    @property
    def saved(self) -> Path:
        """Folder of what `Trainer.save_model` wrote at the end."""
        return self.folder / "run"


def _read(file: Path) -> Any:
    return torch.load(file, mmap=True, weights_only=True)


def _write(file: Path, tensors: Mapping[str, Tensor | None]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Not over the file itself: an earlier reader may have it mapped.
    new = file.with_suffix(".part")
    torch.save({name: None if tensor is None else tensor.detach().cpu() for name, tensor in tensors.items()}, new)
    new.replace(file)


# --- Hooks that write a record. ---


class Recorder:
    """Watches a model from `start` to `stop`; `step` is entered for each forward and backward.

    Takes the model as it was built, before any engine wraps it, so that module paths are clean.
    """

    def __init__(self, model: nn.Module, stacks: Sequence[Stack], record: Record) -> None:
        self._record = record
        self._paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        layers = [layer for stack in stacks for layer in stack.layers]
        self._layers = {self._paths[layer.module] for layer in layers}
        self._watched = self._layers | {
            self._paths[layer.module.get_submodule(name)] for layer in layers for name in (*layer.attention, *layer.ffn)
        }
        self._layer_of: dict[str, str] = {
            self._paths[inner]: self._paths[layer.module] for layer in layers for inner in layer.module.modules()
        }
        self._handles: list[RemovableHandle] = []
        self._micro_batch: RecordedMicroBatch | None = None
        self._forward_states: dict[str, list[State]] = {}
        self._plan_attributes: dict[str, tuple[object, ...]] = {}
        self._running: list[str] = []
        self._last_entered = ""
        self._is_reference = False
        self.is_recomputing = False
        self.is_digesting = False

    def start(self) -> None:
        """Place the hooks, behind those that are there, and note what the plan has put onto the layers."""
        for module, path in self._paths.items():
            self._handles += [
                module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True),
                module.register_forward_hook(partial(self._leave, path)),
            ]
            if path in self._watched:
                self._plan_attributes[path] = _plan_attributes_of(module)

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def step(self, number: int) -> Iterator[RecordedMicroBatch]:
        """Record what happens inside the block as the micro-batch with this number; it and later ones are forgotten."""
        self._micro_batch = RecordedMicroBatch()
        del self._record.micro_batches[number:]
        self._record.micro_batches.append(self._micro_batch)
        self._forward_states.clear()
        self._running.clear()
        try:
            yield self._micro_batch
        finally:
            self._micro_batch = None

    @property
    def current_layer(self) -> str:
        """Path of the layer that the module entered last belongs to; empty outside of the layers."""
        return self._layer_of.get(self._last_entered, "")

    @property
    def current_module(self) -> str:
        """Path of the module that runs now; empty where that is not known."""
        return self._running[-1] if self._running else ""

    def is_inside(self, path: str) -> bool:
        """Whether the forward of a module runs now."""
        return path in self._running

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if self._micro_batch is None or is_extra_run():
            return
        in_backward = is_in_backward()
        if not self._running and not in_backward:
            # Such as trl's, with adapters disabled: the plan rests.
            self._is_reference = not torch.is_grad_enabled()
        if self._is_reference and not in_backward:
            self._running.append(path)
            return
        (self._record.recomputations if in_backward else self._record.forwards)[path] += 1
        self._last_entered, self.is_recomputing = path, in_backward
        # A recomputation that stopped early never left the modules that it was in.
        while in_backward and self._running and not path.startswith(f"{self._running[-1]}."):
            self._running.pop()
        self._running.append(path)
        if path in self._layer_of:
            self._note_state(path, module, in_backward)
        if in_backward:
            return
        if path in self._watched:
            self._note_replaced(path, module)
        if path in self._layers:
            values = (*args, kwargs.get("hidden_states"))
            tensors = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
            hidden = next(tensors, None)
            if not torch.is_grad_enabled():
                # transformers before 5.23 runs a layer's hooks inside of its checkpoint, whose return is not seen here.
                has_gradient = hidden is not None and hidden.requires_grad
                (self._record.reentrant if has_gradient else self._record.no_output_gradient).add(path)
            self._watch_gradient(hidden, path, "input")

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if is_extra_run():
            return
        if self._running and self._running[-1] == path:
            self._running.pop()
        if self._micro_batch is None or is_in_backward():
            return
        with self._digesting():
            # To read deferred logits would compute them.
            computed = (x for x in tensors_in(output, depth=1) if not isinstance(x, DeferredLogits))
            digests = tuple(map(tensor_digest, computed))
            self._micro_batch.outputs.append((path, digests))
        if self._is_reference:
            return
        if path in self._layer_of:
            self._forward_states[path].append(_state_of(module))
        if path in self._watched:
            tensor = next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)
            self._watch_gradient(tensor, path, "output")

    def _note_state(self, path: str, module: nn.Module, in_backward: bool) -> None:
        """Note flags and autocast in the forward; in recomputation compare with any of the module's forwards.

        The forward's state is noted at its start and end, so that what a module changes itself does not count.
        """
        state = _state_of(module)
        if not in_backward:
            self._forward_states.setdefault(path, []).append(state)
            return
        known = self._forward_states.get(path, [])
        if not known or state in known:
            return
        for name in sorted(state.keys() | known[-1].keys()):
            change = StateChange(path, name, known[-1].get(name), state.get(name))
            if change.in_forward != change.in_recomputation and change not in self._record.state_changes:
                self._record.state_changes.append(change)

    def _note_replaced(self, path: str, module: nn.Module) -> None:
        now = _plan_attributes_of(module)
        is_off = not now[0] and not self._plan_attributes[path][0]
        for name, value, found in zip(_PLAN_ATTRIBUTES, now, self._plan_attributes[path], strict=True):
            # A function that is switched off, as trl leaves one on layers that keep everything, is never called.
            if value is not found and path not in self._record.replaced and not (is_off and name == FUNCTION):
                self._record.replaced[path] = f"{name} is now {qualified_name(value)}"

    def _watch_gradient(self, tensor: Tensor | None, path: str, side: str) -> None:
        if tensor is None or self._micro_batch is None:
            return
        if not tensor.requires_grad:
            if side == "output" and path in self._layers and torch.is_grad_enabled():
                self._record.no_output_gradient.add(path)
            return
        if type(tensor.grad_fn).__name__ == "CheckpointFunctionBackward" and side == "output":
            self._record.reentrant.add(path)
        tensor.register_hook(partial(self._note_gradient, self._micro_batch, path, side))  # type: ignore[no-untyped-call]

    def _note_gradient(self, micro: RecordedMicroBatch, path: str, side: str, gradient: Tensor) -> None:
        if side == "output":
            self._record.with_output_gradient.add(path)
        with self._digesting():
            micro.layer_gradients.append(((path, side), tensor_digest(gradient)))

    @contextmanager
    def _digesting(self) -> Iterator[None]:
        """Mark operators that the recorder itself runs: they are not the model's."""
        self.is_digesting = True
        try:
            yield
        finally:
            self.is_digesting = False


def plain_attributes(module: nn.Module) -> State:
    """Return the plain values on a module, by attribute: flags, counters, names, and dicts of them.

    Leaves out what a plan sets, and switches for a forward without gradients.
    """
    found: State = {}
    for name, value in vars(module).items():
        if name in _PLAN_ATTRIBUTES:
            continue
        if isinstance(value, _PLAIN):
            found[name] = value
        elif (
            isinstance(value, dict) and not name.startswith("_") and all(isinstance(v, _PLAIN) for v in value.values())
        ):
            found.update((f"{name}[{key}]", item) for key, item in value.items())
    return found


def _state_of(module: nn.Module) -> State:
    state = plain_attributes(module)
    config = getattr(module, "config", None)
    if config is not None:
        plain = ((name, value) for name, value in vars(config).items() if isinstance(value, _PLAIN))
        state.update((f"config.{name}", value) for name, value in plain if name != _WRITTEN_BY_LOSS)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    types = dict.fromkeys(("cpu", "cpu" if accelerator is None else accelerator.type))
    on = [f"{kind} {torch.get_autocast_dtype(kind)}" for kind in types if torch.is_autocast_enabled(kind)]
    state["autocast"] = ", ".join(on) or "off"
    return state


def _plan_attributes_of(module: nn.Module) -> tuple[object, ...]:
    return tuple(vars(module).get(name) for name in _PLAN_ATTRIBUTES)


# --- Digests: bitwise equality of things too many to keep. ---


def tensor_digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's shape, dtype and bits. Of a sharded tensor, that of this process's shard."""
    kept = local_shard(tensor).detach()
    if kept.is_meta:
        return f"meta {kept.dtype} {tuple(kept.shape)}"
    head = f"{kept.dtype} {tuple(kept.shape)} ".encode()
    flat = kept.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if kept.numel() else b""
    return hashlib.blake2b(head + flat, digest_size=_DIGEST_BYTES).hexdigest()


def values_digest(tensor: Tensor) -> str:
    """Return a digest of a whole tensor's values, whatever its dtype; shards are gathered, on all processes at once."""
    full_tensor = getattr(tensor, "full_tensor", None)
    whole = tensor if full_tensor is None else full_tensor()
    return tensor_digest(whole.detach().float() if whole.is_floating_point() else whole)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor, any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def random_state_digests() -> dict[str, str]:
    """Return digests of the states of all random number generators that training may draw from."""
    states = {"torch": tensor_digest(torch.get_rng_state()), "python": _object_digest(random.getstate())}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = _object_digest(numpy.random.get_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Only this process's device: the others' belong to other processes.
        states["cuda"] = tensor_digest(torch.cuda.get_rng_state())
    return states


def _object_digest(value: object) -> str:
    return hashlib.blake2b(pickle.dumps(value), digest_size=_DIGEST_BYTES).hexdigest()


def tensors_in(value: Any, depth: int = 3) -> Iterable[Tensor]:
    """Yield the tensors of an argument or an output, looking into tuples, lists and dicts (a ModelOutput is one)."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item, depth - 1)
