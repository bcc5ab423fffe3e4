"""What autograd saves in a region is not kept: when backward asks for the first of it, the region runs again.

This is what torch's checkpoint does (non-reentrant), and in the same way: by hooks on what is saved. By that one (2.13)
a layer whose tensors are small takes the host a sixth longer. It brings back the random state of its arguments' devices
alone, and gives a tensor once: here it is computed again for a kernel that reads `ctx.saved_tensors` twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from hf_ckpt.regions.compiled import run_uncompiled
from hf_ckpt.regions.execution_state import (
    AllRecomputed,
    AutocastState,
    Function,
    RandomState,
    recomputing,
)
from hf_ckpt.upstream.torch import (
    BACKWARDS,
    NO_BACKWARD,
    SAVED,
    STOPS_EARLY,
    current_graph_task_id,
    graph_exec_group,
    has_compiled,
    make_saved_tensor,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)

if TYPE_CHECKING:
    from hf_ckpt.regions.module_state import CallState
    from hf_ckpt.regions.value_proof import CallProof

# What surrounds a forward, and what surrounds its recomputations.
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
NO_CONTEXTS: Contexts = (nullcontext(), nullcontext())


class _Placeholder(dict[Hashable, Tensor | None]):
    """Stands in the graph for a tensor: its value, by the backward that asks for it; None once that has got it."""

    # No attributes: an empty dictionary takes no more memory than an object of slots, and is made by C.
    __slots__ = ("__weakref__",)


# What torch's checkpoint compares too: the shape, dtype and device of a tensor.
_Meta = tuple[torch.Size, torch.dtype, torch.device]


class Checkpoint:
    """One call of a region whose saved tensors are made again. The graph owns it, by the hooks on what it saved.

    Args:
        run: what runs again, on tensors that autograd is handed.
        state: that of the region's modules, for messages and for gradients that a forward takes inside of itself.
        proof: may want a recomputation to run to its end.
        contexts: entered around the forward, and around each recomputation.
    """

    __slots__ = (
        "__weakref__",
        "_autocast",
        "_contexts",
        "_inputs",
        "_is_forward",
        "_meta",
        "_proof",
        "_random_state",
        "_run",
        "_saved",
        "_state",
        "_stops_early",
    )

    def __init__(
        self, run: Function, state: CallState, proof: CallProof | None, contexts: Contexts = NO_CONTEXTS
    ) -> None:
        self._run = run
        self._state = state
        self._proof = proof
        self._contexts = contexts
        # A switch of torch's own checkpoint, for all of them.
        stops_early: bool | None = getattr(torch.utils.checkpoint, STOPS_EARLY, None)
        self._stops_early = (proof is None or not proof.runs_to_end) if stops_early is None else stops_early
        self._is_forward = True
        self._meta: list[_Meta] = []

    def forward(
        self, tensors: Sequence[Any], others: Sequence[Any], saved: list[weakref.ref[_Placeholder]] | None = None
    ) -> Any:
        """Run it for the first time.

        `others` may lie on devices that it draws random numbers on. `saved` gets an item for each tensor that autograd
        saves. Raises `GradientInside`.
        """
        self._random_state = RandomState.of(*tensors, *others)
        self._autocast = AutocastState.now()
        self._saved: list[weakref.ref[_Placeholder]] = [] if saved is None else saved
        self._inputs = SavedInputs(tensors)
        held = held_saved_tensors() if self._state.takes_gradients else nullcontext()
        try:
            with saved_tensors_hooks(self._pack, self._unpack), self._contexts[0], held:
                returned = self._run(*tensors)
        finally:
            self._is_forward = False
        return returned

    def _pack(self, tensor: Tensor) -> _Placeholder:
        placeholder = _Placeholder()
        self._saved.append(weakref.ref(placeholder))
        self._meta.append((tensor.shape, tensor.dtype, tensor.device))
        return placeholder

    def _unpack(self, placeholder: _Placeholder) -> Tensor:
        # One run serves all that one backward asks for, or all backwards in a block of torch's `GraphExecGroup`.
        key: Hashable = graph_exec_group() or current_graph_task_id()
        if key == NO_BACKWARD and not BACKWARDS.gone:
            # Nobody but who asks now.
            key = object()
        while (value := placeholder.get(key)) is None:
            if key in placeholder:
                # Asked for again, as by a kernel that reads `ctx.saved_tensors` twice.
                key = (key,)
                continue
            try:
                self._recompute(key)
            except CheckpointError as error:
                self._state.explain(error, differs_in=None if self._proof is None else self._proof.differs_in)
        # Each is freed as soon as it has been used.
        placeholder[key] = None
        return value

    def _recompute(self, key: Hashable) -> None:
        if self._is_forward:
            raise GradientInside(self._random_state)
        collector = _Collector(key, self._saved, self._stops_early, self._proof)
        # A compiler may stand around the backward, or inside of the region: all of this is none of its business.
        compiles = has_compiled()
        run = partial(run_uncompiled, self._run) if compiles else self._run
        tensors = self._inputs.tensors()
        with (
            saved_tensors_hooks(collector.take_uncompiled if compiles else collector.take, _as_it_is),
            torch.enable_grad(),
            self._random_state.brought_back(),
            self._autocast.restored(),
            self._contexts[1],
            recomputing(),
            until_stopped(collector),
        ):
            run(*tensors)
        if collector.num_taken != len(self._saved):
            raise CheckpointError(f"{collector.num_taken} tensors are saved where the forward saved {len(self._saved)}")
        if collector.meta != self._meta:
            self._compare(collector.meta)

    def _compare(self, meta: Sequence[_Meta]) -> None:
        for number, (was, now) in enumerate(zip(self._meta, meta, strict=True)):
            # Of what the graph has let go nobody asks.
            if was != now and self._saved[number]() is not None:
                raise CheckpointError(f"a tensor of {now} is saved where the forward saved one of {was}")


class _Collector:
    """Takes what one recomputation saves, in the order of the forward.

    Note [noise]: `rrelu` saves the memory for its noise, then its input, and draws after that; no version tells (torch
    2.13). Who stops there would leave the noise undefined. So where the last two are like these, it runs to the end.
    """

    __slots__ = ("_key", "_may_be_noise", "_proof", "_saved", "_stops_early", "meta", "num_taken")

    def __init__(
        self, key: Hashable, saved: list[weakref.ref[_Placeholder]], stops_early: bool, proof: CallProof | None
    ) -> None:
        self._key = key
        self._saved = saved
        self._stops_early = stops_early
        self._proof = proof
        self.num_taken = 0
        self.meta: list[_Meta] = []
        self._may_be_noise = False

    @property
    def stops(self) -> bool:
        """See `Collector`."""
        return self._stops_early and self.num_taken == len(self._saved)

    def take(self, tensor: Tensor) -> Tensor:
        """Take what autograd saves; raises `AllRecomputed` where nothing more is needed."""
        number, saved = self.num_taken, self._saved
        if number == len(saved):
            if self.stops:
                # Whatever ran has caught it, and goes on.
                raise AllRecomputed
            raise CheckpointError(f"more tensors are saved than the {number} that the forward saved")
        self.num_taken = number + 1
        meta = tensor.shape, tensor.dtype, tensor.device
        if number + 2 == len(saved):
            self._may_be_noise = not tensor.requires_grad
        elif number + 1 == len(saved) and self._may_be_noise and tensor.requires_grad and meta == self.meta[-1]:
            # See the note on noise.
            self._stops_early = False
        self.meta.append(meta)
        # Detached: a node that holds its own output would keep itself alive for ever.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        placeholder = saved[number]()
        if placeholder is not None:
            placeholder[self._key] = tensor
        if number + 1 == len(saved):
            if self.stops:
                raise AllRecomputed
            if self._proof is not None:
                self._proof.after_last_needed()
        return tensor

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
    def take_uncompiled(self, tensor: Tensor) -> Tensor:
        """Do so where a compiler may be at work."""
        return self.take(tensor)


class Collector(Protocol):
    """Takes what a recomputation saves, and stops it."""

    @property
    def stops(self) -> bool:
        """Whether it has what is needed, and nothing more is to run."""


@contextmanager
def until_stopped(collector: Collector) -> Iterator[None]:
    """Leave the block where the recomputation in it is stopped."""
    try:
        yield
    except AllRecomputed:
        pass
    except Exception:
        # Else it is of a layer that has caught what stopped it, and raises something else in its place.
        if not collector.stops:
            raise


def _as_it_is(value: Any) -> Any:
    return value


class SavedInputs:
    """Tensors that a region starts from, handed to autograd before it runs: it notices who writes to them in place.

    Saved-tensor hooks that stand around the region see them now.
    """

    __slots__ = ("_saved",)

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._saved: Any = (
            save_inputs(tensors) if SAVED.gone else [make_saved_tensor(each, is_output=False) for each in tensors]
        )

    def tensors(self) -> list[Tensor]:
        """Return them."""
        return saved_behind(self._saved) if SAVED.gone else [each.unpack() for each in self._saved]


def save_inputs(tensors: Sequence[Tensor]) -> Tensor:
    """Hand tensors that a region starts from to autograd, before the region runs. Saved-tensor hooks see them now.

    Returns a token of no elements whose node holds the others: whoever keeps it keeps them; see `saved_behind`.
    """
    # The first argument makes autograd create a node that holds the others, even if none of them needs a gradient.
    token: Tensor = _SaveForBackward.apply(torch.empty((), requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
    return token


def saved_behind(token: Tensor) -> list[Tensor]:
    """Return the tensors that a token of `save_inputs` keeps."""
    node: Any = token.grad_fn
    return list(node.saved_tensors)


class _SaveForBackward(torch.autograd.Function):
    """Its node never runs; it only holds the tensors."""

    @staticmethod
    def forward(ctx: Any, node_maker: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return (tensors[0] if tensors else node_maker).new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise AssertionError("the output of _SaveForBackward is in no graph")


# --- Hooks in the place of others. ---


# The public `saved_tensors_hooks` can only be stacked: hooks on top would hide the tensors from hooks that the user
# placed around the region (offloading, measuring), and switch off autograd's check for in-place changes.


@contextmanager
def own_hooks_away() -> Iterator[None]:
    """Let autograd save in the block as if the innermost region were none: with the hooks inside and around of it."""
    # A layer may have placed some of its own since.
    inside: list[Any] = []
    while not _are_own(found := top_saved_tensors_hooks(False)):
        inside.append(found)
        pop_saved_tensors_hooks()
    pop_saved_tensors_hooks()
    for each in reversed(inside):
        push_saved_tensors_hooks(*each)
    try:
        yield
    finally:
        for _ in inside:
            pop_saved_tensors_hooks()
        for each in (found, *reversed(inside)):
            push_saved_tensors_hooks(*each)


def _are_own(hooks: Any) -> bool:
    return getattr(hooks[0], "__module__", None) == __name__


# --- Gradients that a forward takes inside of itself. ---


class GradientInside(BaseException):
    """A forward takes a gradient inside of itself, of what its region has let go. No error: code inside is to miss it.

    Test-time training and energy blocks do so. `random_state` is that of when the forward began.
    """

    def __init__(self, random_state: RandomState) -> None:
        super().__init__("a forward takes a gradient inside of itself")
        self.random_state = random_state


@contextmanager
def held_saved_tensors() -> Iterator[None]:
    """Hold what autograd saves in the block until its end, besides what the region's hooks make of it."""
    pack, unpack = top_saved_tensors_hooks(False)
    held: list[weakref.ref[_Held]] = []

    def pack_and_hold(tensor: Tensor) -> _Held:
        # Detached: a node that holds its own output would keep itself alive for ever.
        found = _Held(pack(tensor), tensor.detach())
        held.append(weakref.ref(found))
        return found

    def unpack_held(found: _Held) -> Tensor:
        tensor: Tensor = unpack(found.packed) if found.tensor is None else found.tensor
        return tensor

    pop_saved_tensors_hooks()
    push_saved_tensors_hooks(pack_and_hold, unpack_held)
    try:
        yield
    finally:
        pop_saved_tensors_hooks()
        push_saved_tensors_hooks(pack, unpack)
        for each in held:
            if (found := each()) is not None:
                found.tensor = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Held:
    """What hooks have made of a tensor, and the tensor as long as it is held."""

    packed: Any
    tensor: Tensor | None
