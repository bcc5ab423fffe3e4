"""What a run of a region depends on apart from tensors and modules: generators, autocast, modes, threads, transforms.

Which run it is, the first, a recomputation or one for a check only, the thread knows.

The state of the generators, of autocast, of modes and of context variables is read and restored. Threads that run
regions at the same time, and transforms of torch.func, are refused where a recomputation could not give what the
forward gave.
"""

from __future__ import annotations

import contextvars
import ctypes
import pickle
import random
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
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
    HOOKS,
    IS_USED,
    KERNEL_SWITCHES,
    NO_BACKWARD,
    RUNS_BACKWARD_CODE,
    SURROUNDINGS,
    UNPACK_HOOK,
    DispatchKeySet,
    ExcludeDispatchKeys,
    current_graph_task_id,
    dispatch_modes,
    function_mode_at,
    has_forward_derivatives,
    is_transformed,
    num_dispatch_modes,
    num_function_modes,
    parametrized_weights,
    parametrized_weights_kept,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    temporarily_clear_interpreter_stack,
    top_saved_tensors_hooks,
)

# The forward of a region: a function, or a `partial` that carries keyword arguments.
Function = Callable[..., Any]


def keeps_activations(module: nn.Module) -> bool:
    """Whether a forward of this module keeps activations for a backward of training."""
    return module.training and torch.is_grad_enabled()


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread. A user's hook may call the model in it, and train it."""
    return bool(current_graph_task_id() != NO_BACKWARD)


# An exception, so that torch calls the hooks that are always to be called.
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


def qualified_name(value: object) -> str:
    """Return the dotted name of a function, or of the class of a value, for a message: no address of it."""
    while isinstance(value, partial):
        value = value.func
    named: Any = value if value is None or hasattr(value, "__qualname__") else type(value)
    return "None" if value is None else f"{named.__module__}.{named.__qualname__}"


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
    """Whether another checkpointing than ours runs a forward again in this thread: torch's, or one that is named so."""
    if not is_in_backward() or is_recomputed():
        return False
    # A forward that a user's own hook or function runs in a backward is no such thing.
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


class HostRandomState:
    """State of the generators of Python's `random` and of `numpy.random`, the global ones.

    To read it takes 100 us. So their memory is read, which takes less than one, and a state only if that is another one
    than the last time.
    """

    __slots__ = ("_memory", "_states")

    def __init__(self, memory: tuple[object, object], last: HostRandomState | None) -> None:
        self._memory = memory
        known = (None, None) if last is None else last._memory
        self._states: tuple[Any, ...] = tuple(
            last._states[at] if last is not None and memory[at] == known[at] else read()
            for at, (_, read, _) in enumerate(_HOST_GENERATORS)
        )

    @staticmethod
    def now() -> HostRandomState:
        """Read it."""
        memory, last = (_python_memory(), _numpy_memory()), _LAST_READ[0]
        if last is None or last._memory != memory:
            last = _LAST_READ[0] = HostRandomState(memory, last)
        return last

    def restore(self) -> None:
        """Set the generators to this state."""
        memory = _python_memory(), _numpy_memory()
        if memory != self._memory:
            for was, now, state, (_, _, write) in zip(
                self._memory, memory, self._states, _HOST_GENERATORS, strict=True
            ):
                if was != now:
                    write(state)

    def others_than(self, other: HostRandomState) -> list[str]:
        """Name the generators that are in another state than they were."""
        names = [name for name, *_ in _HOST_GENERATORS]
        pairs = [] if self is other else zip(names, self._states, other._states, strict=True)
        return [name for name, one, another in pairs if pickle.dumps(one) != pickle.dumps(another)]


_HOST_GENERATORS: tuple[tuple[str, Callable[[], Any], Callable[[Any], None]], ...] = (
    ("Python's", random.getstate, random.setstate),
    ("numpy's", partial(np.random.get_state, legacy=False), np.random.set_state),  # the global one
)
# That of the process, as its generators are.
_LAST_READ: list[HostRandomState | None] = [None]


def _memory_of(value: Any, kind: Any, most: int | None = None) -> Any:
    size = kind.__basicsize__ - object.__basicsize__
    return (ctypes.c_char * (most or size)).from_address(id(value) + object.__basicsize__)


# Both are Mersenne twisters: 624 words, all of which are others after each round, and the place among them. The place
# and a few of the words tell any two states apart that a generator comes to.
_NUM_WORDS = 16
_Words = ctypes.c_char * (4 * _NUM_WORDS)
# Of Python's, where the place comes first.
_NUM_READ = 4 * (1 + _NUM_WORDS)
_PYTHON: Any = random._inst  # CPython 3.11 to 3.14
_PYTHON_WORDS = _memory_of(_PYTHON, random.Random.__base__, _NUM_READ)
_NUMPY_KEPT = _memory_of(np.random.mtrand._rand, np.random.RandomState)  # numpy 2.0 to 2.5


@lru_cache(maxsize=1)
def _numpy_words(address: int) -> tuple[Any, Any]:
    """Return words of numpy's own generator, and the place among them, as it publishes them to who writes in C."""
    return _Words.from_address(address), (ctypes.c_char * 4).from_address(address + 4 * 624)


def _python_memory() -> object:
    """Return what is another value if the generator is in another state."""
    # `gauss` makes two numbers, and keeps one of them.
    return (_PYTHON_WORDS.raw, _PYTHON.gauss_next) if _CAN_READ_MEMORY else random.getstate()


def _numpy_memory() -> object:
    """See `_python_memory`."""
    generator: Any = np.random.mtrand.get_bit_generator()
    if not _CAN_READ_MEMORY or type(generator) is not np.random.MT19937:
        return pickle.dumps(np.random.get_state(legacy=False))
    # What is kept of two numbers is in the object around the generator.
    words, place = _numpy_words(generator.ctypes.state_address)
    return words.raw, place.raw, _NUMPY_KEPT.raw


def _shows_draws() -> bool:
    """Whether numbers that are drawn show in memory: other builds of Python or numpy may have it elsewhere."""
    one, other = random.Random(0), np.random.RandomState(0)
    places = _memory_of(one, random.Random.__base__, _NUM_READ), _memory_of(other, np.random.RandomState)
    before = [place.raw for place in places]
    one.random()
    other.standard_normal()
    return all(place.raw != was for place, was in zip(places, before, strict=True))


_CAN_READ_MEMORY = _shows_draws()


@dataclass(frozen=True)
class RandomState:
    """State of all generators that a forward may draw from: torch's, Python's and numpy's.

    torch's are the CPU's, and those of the devices that tensors of a call lie on, or the current one.
    """

    cpu: Tensor
    devices: tuple[int, ...]
    device_states: tuple[Tensor, ...]
    device_type: str
    host: HostRandomState = field(default_factory=HostRandomState.now)

    @classmethod
    def of(cls, *values: Any) -> RandomState:
        """Read the states; of the devices, those on which tensors in `values` lie, or else the current one."""
        kind = _accelerator_type()
        devices = _devices_in_use(kind, values)
        states = tuple(torch.get_device_module(kind).get_rng_state(device) for device in devices)
        return cls(torch.get_rng_state(), tuple(device.index for device in devices), states, kind)

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(list(self.devices), list(self.device_states), device_type=self.device_type)
        self.host.restore()

    def is_same(self, other: RandomState) -> bool:
        """Whether no random number was drawn between this state and another one of the same devices."""
        return not self.others_than(other)

    def others_than(self, other: RandomState) -> list[str]:
        """Name the generators that are in another state than they were."""
        ours, theirs = (dict(zip(one.devices, one.device_states, strict=True)) for one in (self, other))
        # Of a device that only one of them knows nothing can be said.
        both = ours.keys() & theirs.keys()
        is_same = torch.equal(self.cpu, other.cpu) and all(torch.equal(ours[device], theirs[device]) for device in both)
        return ["torch's"] * (not is_same) + self.host.others_than(other.host)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators, on leaving the block, to what they were on entering it."""
        found = HostRandomState.now()
        with torch.random.fork_rng(devices=list(self.devices), device_type=self.device_type, enabled=True):
            try:
                yield
            finally:
                found.restore()

    @contextmanager
    def brought_back(self) -> Iterator[None]:
        """Let the block draw what was drawn from this state on, and nothing after it notice."""
        devices = list(self.devices)
        forked = torch.random.fork_rng(devices, device_type=self.device_type) if devices else nullcontext()
        with forked:
            cpu, host = torch.get_rng_state(), HostRandomState.now()
            try:
                self.restore()
                yield
            finally:
                torch.set_rng_state(cpu)
                host.restore()


@dataclass(frozen=True)
class AutocastState:
    """Whether and how autocast is on, for the CPU and for the accelerator."""

    settings: tuple[tuple[str, bool, torch.dtype, bool], ...]

    @classmethod
    def now(cls) -> AutocastState:
        """Read the state."""
        accelerator = _accelerator_type()
        has_own = accelerator != "cpu" and torch.amp.is_autocast_available(accelerator)
        types = ("cpu", accelerator) if has_own else ("cpu",)
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

    def restored(self) -> AbstractContextManager[Any]:
        """Set autocast to this state while the block runs."""
        return nullcontext() if AutocastState.now().settings == self.settings else self._set()

    @contextmanager
    def _set(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device_type, enabled, dtype, cache in self.settings:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield


# --- Context variables and modes. ---


class ForwardContext:
    """What surrounds a forward in its thread: context variables, and modes over functions (a device) and operators.

    Of the latter not those of torch, which watch (FLOP counters) what runs in their block, nor this package's. Also the
    switches of torch that choose kernels, and the weights that `parametrize.cached()` keeps, which are the process's.
    """

    __slots__ = ("_functions", "_operators", "_switches", "_variables", "_weights")

    def __init__(self) -> None:
        self._switches = _read_switches()
        self._weights = None if (weights := parametrized_weights()) is None else dict(weights)
        self._variables = contextvars.copy_context()
        self._functions = _of_others(_function_modes())
        self._operators = [mode for mode in _of_others(_operator_modes()) if not _is_of("torch", mode)]

    def kinds(self) -> list[Hashable]:
        """Return the types of the modes, and what gives saved tensors back: it may give others than it was given."""
        return [*map(type, chain(self._functions, self._operators)), *_unpack_of_others()]

    def run(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Run a function in it again."""
        if self._weights is not None or parametrized_weights() is not None:
            # What the forward has made of weights since, it makes again.
            with parametrized_weights_kept(self._weights):
                return self._run_switched(function, *args, **kwargs)
        return self._run_switched(function, *args, **kwargs)

    def _run_switched(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        found = _read_switches()
        if found == self._switches:
            return self._run(function, *args, **kwargs)
        _set_switches(found, self._switches)
        try:
            return self._run(function, *args, **kwargs)
        finally:
            _set_switches(self._switches, found)

    def _run(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        functions, operators = _function_modes(), _operator_modes()
        new = [mode for mode in self._operators if mode not in operators]
        # A copy, as a context can be entered once.
        variables = self._variables.copy()
        if not new and _of_others(functions) == self._functions:
            return variables.run(function, *args, **kwargs)
        modes = [*self._functions, *(mode for mode in functions if _is_of("hf_ckpt", mode))]
        with (
            _replaced(functions, modes, pop_function_mode, push_function_mode),
            # Below those that are there, as a selective region is given operators before them.
            _replaced(operators, [*new, *operators], pop_dispatch_mode, push_dispatch_mode),
        ):
            return variables.run(function, *args, **kwargs)


def _read_switches() -> list[Any]:
    return [read() for read, _ in KERNEL_SWITCHES]


def _set_switches(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for (_, write), now, new in zip(KERNEL_SWITCHES, found, wanted, strict=True):
        if now != new:
            write(new)


def _function_modes() -> list[Any]:
    return [function_mode_at(at) for at in range(num_function_modes())]


def _operator_modes() -> list[Any]:
    return dispatch_modes() if num_dispatch_modes() and not SURROUNDINGS.gone else []


def _unpack_of_others() -> list[Any]:
    hooks = None if HOOKS.gone else top_saved_tensors_hooks(False)
    if hooks is None:
        return []
    unpack: Any = hooks[1].func if isinstance(hooks[1], partial) else hooks[1]
    is_known = str(getattr(unpack, "__module__", "")).startswith(("torch.", "hf_ckpt."))
    return [] if is_known else [getattr(unpack, "__code__", type(unpack))]


def _of_others(modes: list[Any]) -> list[Any]:
    return [mode for mode in modes if not _is_of("hf_ckpt", mode)] if modes else modes


def _is_of(package: str, mode: Any) -> bool:
    return type(mode).__module__.partition(".")[0] == package


@contextmanager
def _replaced(
    found: Sequence[Any], modes: Sequence[Any], pop: Callable[[], Any], push: Callable[[Any], None]
) -> Iterator[None]:
    """Let these modes be the ones in force. They are not entered, which may do more: they have been."""
    _exchange(found, modes, pop, push)
    try:
        yield
    finally:
        _exchange(modes, found, pop, push)


def _exchange(now: Sequence[Any], new: Sequence[Any], pop: Callable[[], Any], push: Callable[[Any], None]) -> None:
    for _ in now:
        pop()
    for mode in new:
        push(mode)


def _devices_in_use(kind: str, values: Sequence[Any]) -> list[torch.device]:
    """Return the devices whose generators a call may use: those of the tensors in `values`, else the current one."""
    # A device that has not been used yet has no state to read; MPS has none that could be read by device.
    if kind == "cpu" or not getattr(module := torch.get_device_module(kind), IS_USED, False):
        return []
    # The current device is another one in the backward, whose threads have one each: it counts where nothing else says.
    devices = {tensor.device for value in values for tensor in tensors_in(value) if tensor.device.type == kind}
    return sorted(devices or {torch.device(kind, module.current_device())}, key=lambda device: device.index)


def _accelerator_type() -> str:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if device is None else device.type


# --- Threads. ---


class ConcurrentRun:
    """A run of a region, forward or recomputation, while other threads may run regions too. A context manager.

    All state of a region belongs to its call or to its thread, except for the generators, which belong to the
    process. If another thread draws while a region runs, the region draws other numbers in backward, and nothing else
    would show it. So runs in several threads are exact while no random number is drawn, and leaving the block raises
    `UnsupportedError` if the state of a generator has moved while another thread was in a region. Costs one check of
    the list of runs while there is no other thread.
    """

    __slots__ = ("_random_state", "_task", "_thread")

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._task = current_graph_task_id()
        self._random_state: _States | None = None
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
        if before is not None and not _are_same(before, _random_state()):
            raise UnsupportedError(
                "Two threads ran layers under a plan at the same time, and random numbers were drawn or brought back "
                "meanwhile. Their generator is the whole process's, so that recomputation could not draw the same ones "
                "again. Let the threads take turns (a lock around forward and backward), or use processes."
            )

    def _belongs_to(self, other: ConcurrentRun) -> bool:
        """Whether this is a part of the same forward or backward: one backward may run in a thread for each device."""
        return self._thread == other._thread or (self._task == other._task and self._task != NO_BACKWARD)


_LOCK = threading.Lock()
# The runs that go on now, of all models, as all of them share the generators.
_RUNS: list[ConcurrentRun] = []


_States = tuple[list[Tensor], HostRandomState]


def _random_state() -> _States:
    states = [torch.get_rng_state()]
    devices: Any = torch.get_device_module()
    if getattr(devices, IS_USED, False) and hasattr(devices, "get_rng_state_all"):
        states.extend(devices.get_rng_state_all())
    return states, HostRandomState.now()


def _are_same(before: _States, now: _States) -> bool:
    return all(map(torch.equal, before[0], now[0])) and not now[1].others_than(before[1])


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
    """Let a recomputation run outside of the transform that its backward runs in."""
    # Where torch vectorizes a backward over several gradients, the recomputation is the same for all of them, and
    # inside of the transform it could not draw random numbers.
    return _outside() if is_transformed() else nullcontext()


@contextmanager
def _outside() -> Iterator[None]:
    with temporarily_clear_interpreter_stack(), ExcludeDispatchKeys(DispatchKeySet(BATCHED_BACKWARD)):
        yield
