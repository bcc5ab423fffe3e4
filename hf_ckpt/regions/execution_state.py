"""What a run of a region depends on apart from its tensors and modules: generators, autocast, threads, transforms.

Which run it is, the first, a recomputation or one for a check only, the thread knows.

The state of the generators and of autocast is read and restored. Threads that run regions at the same time, and
transforms of torch.func, are refused where a recomputation could not give what the forward gave.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_device_states

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.upstream.torch import (
    BATCHED_BACKWARD,
    COMPILED_CALL,
    IS_USED,
    NO_BACKWARD,
    RUNS_BACKWARD_CODE,
    UNPACK_HOOK,
    DispatchKeySet,
    ExcludeDispatchKeys,
    current_graph_task_id,
    has_forward_derivatives,
    is_transformed,
    temporarily_clear_interpreter_stack,
)

Function = Callable[..., Any]
"""The forward of a region: a function, or a `partial` that carries keyword arguments."""


def keeps_activations(module: nn.Module) -> bool:
    """Whether a forward of this module keeps activations for a backward of training."""
    return module.training and torch.is_grad_enabled()


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread. A user's hook may call the model in it, and train it."""
    return bool(current_graph_task_id() != NO_BACKWARD)


class AllRecomputed(Exception):  # noqa: N818  # a signal, not an error
    """Stops a recomputation once the last tensor that backward needs is there."""


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in an argument or an output of a layer: itself, or those in its tuple or list, not deeper."""
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, tuple | list) else []


def module_of(function: Any) -> nn.Module | None:
    """Return the module whose forward a region calls."""
    while isinstance(function, partial):
        if function.args and isinstance(function.args[0], nn.Module):
            return function.args[0]
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else None


def modules_inside(module: nn.Module | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules inside, except for compiled ones."""
    for name, child in () if module is None else module.named_children():
        if not is_compiled(child):
            yield name, child
            yield from ((f"{name}.{inner}", found) for inner, found in modules_inside(child))


def computes_nothing(module: nn.Module) -> bool:
    """Whether a module only holds others, and is never called itself, or returns what it is given."""
    if "forward" in vars(module) or module._forward_hooks:
        return False
    forward: Any = type(module).forward
    return forward is nn.Module.forward or forward is nn.Identity.forward


def is_compiled(module: nn.Module) -> bool:
    """Whether a compiler runs a module."""
    # By name, as importing the class takes seconds.
    return getattr(module, COMPILED_CALL, None) is not None or type(module).__name__ == "OptimizedModule"


# --- Which run it is. ---


class _Nested(threading.local):
    """Counts the blocks of a kind that a thread is in. A backward recomputes in a thread of its own."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *raised: object) -> None:
        self.depth -= 1


_RECOMPUTING = _Nested()
_EXTRA_RUN = _Nested()
_STARTED_AGAIN = _Nested()


def recomputing() -> AbstractContextManager[None]:
    """A region of a plan is recomputed in the block."""
    return _RECOMPUTING


def is_recomputed() -> bool:
    """Whether a region of a plan is being recomputed in this thread."""
    return _RECOMPUTING.depth > 0


def extra_run() -> AbstractContextManager[None]:
    """What runs in the block runs for a check only, and is counted nowhere."""
    return _EXTRA_RUN


def is_extra_run() -> bool:
    """Whether what runs in this thread does so for a check only."""
    return _EXTRA_RUN.depth > 0


def started_again() -> AbstractContextManager[None]:
    """A forward runs from the start in the block that was left half-way; see `recompute.holding_if_needed`."""
    return _STARTED_AGAIN


def is_started_again() -> bool:
    """Whether what runs in this thread may have run half-way before, in the same forward."""
    return _STARTED_AGAIN.depth > 0


def runs_again() -> bool:
    """Whether what runs in this thread has run before: in a region of a plan, or under another checkpointing."""
    return is_recomputed() or is_repeated_by_others()


def is_repeated_by_others() -> bool:
    """Whether another checkpointing than ours runs a forward again in this thread: torch's, or one that is named so.

    A forward that a user's own hook or function runs in a backward is no such thing.
    """
    if not is_in_backward() or is_recomputed():
        return False
    frame: FrameType | None = sys._getframe(1)
    # What called the backward has nothing to do with what runs in it.
    while frame is not None and frame.f_code is not RUNS_BACKWARD_CODE:
        code = frame.f_code
        # Non-reentrant.
        if code.co_name == UNPACK_HOOK and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        # Reentrant: an autograd function, `CheckpointFunction` with torch, DeepSpeed, Megatron and fairscale.
        if code.co_name == "backward" and "Checkpoint" in code.co_qualname:
            return True
        frame = frame.f_back
    return False


# --- Random numbers and autocast. ---


@dataclass(frozen=True)
class RandomState:
    """State of the CPU's generator, and of those of the devices that tensors of a call lie on, or the current one."""

    cpu: Tensor
    devices: tuple[int, ...]
    device_states: tuple[Tensor, ...]
    device_type: str

    @classmethod
    def of(cls, *values: Any) -> RandomState:
        """Read the states; of the devices, those on which tensors in `values` lie, or else the current one."""
        devices = _devices_in_use(*values)
        module = torch.get_device_module(_accelerator_type())
        states = tuple(module.get_rng_state(device) for device in devices)
        return cls(torch.get_rng_state(), tuple(device.index for device in devices), states, _accelerator_type())

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(list(self.devices), list(self.device_states), device_type=self.device_type)

    def is_same(self, other: RandomState) -> bool:
        """Whether no random number was drawn between this state and another one of the same devices."""
        ours, theirs = (dict(zip(one.devices, one.device_states, strict=True)) for one in (self, other))
        # Of a device that only one of them knows nothing can be said.
        both = ours.keys() & theirs.keys()
        return torch.equal(self.cpu, other.cpu) and all(torch.equal(ours[device], theirs[device]) for device in both)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators, on leaving the block, to what they were on entering it."""
        with torch.random.fork_rng(devices=list(self.devices), device_type=self.device_type, enabled=True):
            yield


@dataclass(frozen=True)
class Randomness:
    """The state of all generators that a forward may draw from: torch's, Python's and numpy's."""

    of_torch: RandomState
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls, tensors: Iterable[Any]) -> Randomness:
        """Read them; torch's of the CPU and of the devices of `tensors`, as `RandomState.of` has them."""
        return cls(RandomState.of(*tensors), random.getstate(), np.random.get_state())  # the global one

    def restore(self) -> None:
        """Bring them back."""
        self.of_torch.restore()
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)

    @contextmanager
    def brought_back(self) -> Iterator[None]:
        """Let the block draw what was drawn from this state on, and nothing after it notice."""
        found = random.getstate(), np.random.get_state()
        try:
            with self.of_torch.kept():
                self.restore()
                yield
        finally:
            random.setstate(found[0])
            np.random.set_state(found[1])

    def others_than(self, other: Randomness) -> list[str]:
        """Name the generators that are in another state than they were."""
        (kind, keys, *rest), (other_kind, other_keys, *other_rest) = self.of_numpy, other.of_numpy
        is_same_numpy = (kind, *rest) == (other_kind, *other_rest) and np.array_equal(keys, other_keys)
        same = {
            "torch's": self.of_torch.is_same(other.of_torch),
            "Python's": self.of_python == other.of_python,
            "numpy's": is_same_numpy,
        }
        return [name for name, is_same in same.items() if not is_same]


@dataclass(frozen=True)
class AutocastState:
    """Whether and how autocast is on, for the CPU and for the accelerator."""

    settings: tuple[tuple[str, bool, torch.dtype, bool], ...]

    @classmethod
    def now(cls) -> AutocastState:
        """Read the state."""
        types = dict.fromkeys(("cpu", _accelerator_type()))
        return cls(
            tuple(
                (
                    kind,
                    torch.is_autocast_enabled(kind),
                    torch.get_autocast_dtype(kind),
                    torch.is_autocast_cache_enabled(),
                )
                for kind in types
            )
        )

    def without_cache(self) -> AutocastState:
        """Return the same state in which casts of weights are not kept for the next use."""
        return AutocastState(tuple((kind, enabled, dtype, False) for kind, enabled, dtype, _ in self.settings))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set autocast to this state while the block runs."""
        with ExitStack() as stack:
            for device_type, enabled, dtype, cache in self.settings:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield


def device_witnesses(tensors: Sequence[Tensor], others: Sequence[Any]) -> list[Tensor]:
    """Return a tensor of no elements on each device that a call may draw on and that none of `tensors` lies on.

    torch's checkpoint brings back the random state of the devices of its tensor arguments, and of no others. The inputs
    of a layer below the first adapter are no such arguments where they come by keyword, so that its dropout would draw
    other masks on a GPU: wrong gradients at the same loss.

    Args:
        tensors: that the checkpoint is given.
        others: what else the call is given, and a weight of what it runs: under a `device_map` it may lie elsewhere.
    """
    known = {tensor.device for tensor in tensors}
    return [torch.empty(0, device=device) for device in _devices_in_use(*tensors, *others) if device not in known]


def _devices_in_use(*values: Any) -> list[torch.device]:
    """Return the devices whose generators a call may use: those of the tensors in `values`, else the current one.

    The current device is another one in the backward, whose threads have one each: it counts where nothing else says.
    """
    kind = _accelerator_type()
    module = torch.get_device_module(kind)
    # A device that has not been used yet has no state to read; MPS has none that could be read by device.
    if kind == "cpu" or not getattr(module, IS_USED, False):
        return []
    devices = {tensor.device for value in values for tensor in tensors_in(value) if tensor.device.type == kind}
    return sorted(devices or {torch.device(kind, module.current_device())}, key=lambda device: device.index)


def _accelerator_type() -> str:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if device is None else device.type


# --- Threads. ---


class ConcurrentRun:
    """A run of a region, forward or recomputation, while other threads may run regions too. A context manager.

    All state of a region belongs to its call or to its thread, except for torch's generators, which belong to the
    process. If another thread draws while a region runs, the region draws other numbers in backward, and nothing else
    would show it. So runs in several threads are exact while no random number is drawn, and leaving the block raises
    `UnsupportedError` if the state of a generator has moved while another thread was in a region. Costs one check of
    the list of runs while there is no other thread.
    """

    __slots__ = ("_random_state", "_task", "_thread")

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._task = current_graph_task_id()
        self._random_state: list[Tensor] | None = None
        with _LOCK:
            others = [run for run in _RUNS if not self._belongs_to(run)]
            _RUNS.append(self)
            if others:
                now = _random_state()
                for run in (self, *others):
                    run._random_state = run._random_state or now

    def __exit__(self, *raised: object) -> None:
        with _LOCK:
            _RUNS.remove(self)
        before, self._random_state = self._random_state, None
        if before is not None and not all(map(torch.equal, before, _random_state())):
            raise UnsupportedError(
                "Two threads ran layers under a plan at the same time, and random numbers were drawn or brought back "
                "meanwhile. Their generator is the whole process's, so that recomputation could not draw the same ones "
                "again. Let the threads take turns (a lock around forward and backward), or use processes."
            )

    def _belongs_to(self, other: ConcurrentRun) -> bool:
        """Whether this is a part of the same forward or backward: one backward may run in a thread for each device."""
        return self._thread == other._thread or (self._task == other._task and self._task != NO_BACKWARD)


_LOCK = threading.Lock()
_RUNS: list[ConcurrentRun] = []
"""The runs that go on now, of all models, as all of them share the generators."""


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    devices: Any = torch.get_device_module()
    if getattr(devices, IS_USED, False) and hasattr(devices, "get_rng_state_all"):
        states.extend(devices.get_rng_state_all())
    return states


# --- Transforms: ways to differentiate that a region cannot go through. ---
#
# A region's backward runs its forward again. What torch.func and forward-mode derivatives attach to the tensors of the
# first run is gone by then: torch raises from somewhere inside, and outputs that are kept would lose their tangents
# without a word. A backward of the backward (`create_graph=True`) goes through all regions but tiles.


def refuse_transforms() -> None:
    """Refuse to begin a region while torch.func or forward-mode derivatives are at work."""
    if is_transformed():
        inside = "a transform of torch.func (grad, vjp, jvp, jacrev, hessian, vmap)"
    elif has_forward_derivatives():
        inside = "forward-mode derivatives (torch.autograd.forward_ad)"
    else:
        return
    raise UnsupportedError(
        f"A model under a plan is called inside of {inside}, and what is recomputed in backward cannot go through "
        "that. Use backward() or torch.autograd.grad, with create_graph=True for second derivatives, or take the plan "
        "off the model meanwhile: remove()."
    )


def refuse_in_tiles() -> None:
    """Refuse a backward of tiles that is to be differentiated again, or that runs for several gradients at once."""
    if torch.is_grad_enabled():
        wish = "create_graph=True asks for a backward that can be differentiated again"
    elif is_transformed():
        wish = "is_grads_batched=True, vectorize=True or torch.vmap asks for a backward of several gradients at once"
    else:
        return
    raise UnsupportedError(
        f"{wish}, and tiles compute one backward, slice by slice, without a graph. Leave tiles out: everything else "
        "in a plan can be differentiated so."
    )


def untransformed() -> AbstractContextManager[Any]:
    """Let a recomputation run outside of the transform that its backward runs in.

    Where torch vectorizes a backward over several gradients, the recomputation is the same for all of them, and inside
    of the transform it could not draw random numbers.
    """
    return _outside() if is_transformed() else nullcontext()


@contextmanager
def _outside() -> Iterator[None]:
    with temporarily_clear_interpreter_stack(), ExcludeDispatchKeys(DispatchKeySet(BATCHED_BACKWARD)):
        yield
