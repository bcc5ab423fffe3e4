"""The state of the modules that a region runs: weights, large buffers, hooks, and what else modules hold.

It is noted when a region's forward begins and ends, and compared before each recomputation, which would otherwise use
another state without a word. What modules hold besides weights (`held_state`), hooks and `requires_grad` are restored
to what the forward found, for the recomputation alone; any other change raises an error.

Cheap enough for every step: modules are walked when one comes or goes; otherwise only attributes are read, and a few
values of some trainable weights. Those values reveal optimizers that write past the versions of tensors (fused ones,
8-bit ones, those of engines that shard).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.errors import ChangedSinceForwardError, UnsupportedError
from hf_ckpt.regions import fingerprints
from hf_ckpt.regions.execution_state import qualified_name
from hf_ckpt.regions.fingerprints import BitSum, Fingerprint, Samples
from hf_ckpt.regions.held_state import SMALL_BYTES, Held, HeldState, is_managed
from hf_ckpt.regions.pending_errors import PendingErrors
from hf_ckpt.regions.put_back import put_container_back
from hf_ckpt.regions.recomputation_errors import OtherModes, recomputation_error, what_to_do
from hf_ckpt.structure.routers import has_router
from hf_ckpt.upstream.accelerate import HOOK
from hf_ckpt.upstream.peft import ACTIVE_ADAPTER, DISABLE_ADAPTERS

# Attribute of a module whose forward is a region.
STATE = "_hf_ckpt_module_state"

# Returns the shard that an engine keeps of weights that it gathers for each use.
Values = Callable[[], Tensor]

# Where an engine shards weights, changes of these are refused. The latter are of peft's layers; `scaling` is an
# attribute of many attention modules too.
_FLAGS = frozenset({"training", ACTIVE_ADAPTER, DISABLE_ADAPTERS, "scaling"})
_MERGED = "merged_adapters"
_MAIN_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS = (*_MAIN_HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
# Those of all modules, under the names that a module's have (torch 2.13).
_GLOBAL_HOOKS = SimpleNamespace(
    _forward_hooks=nn.modules.module._global_forward_hooks,
    _forward_pre_hooks=nn.modules.module._global_forward_pre_hooks,
    _forward_hooks_with_kwargs=nn.modules.module._global_forward_hooks_with_kwargs,
    _forward_hooks_always_called=nn.modules.module._global_forward_hooks_always_called,
    _forward_pre_hooks_with_kwargs={},
)
_MAX_NAMES = 4
# As many weights as a layer of Llama has, so that a full fine-tune samples all of them.
_NUM_SAMPLED = 9
_NUM_SHARDS = 4

_OWNED = attrgetter("_modules", "_parameters", "_buffers")
_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")


class ModuleState:
    """Reads the state below one module whose forward is a region; lives on that module, and is copied with it.

    `path` is that of the module, for messages; `errors` are those of the plan; `num_steps` counts the steps of the
    optimizer, if somebody sets it; `takes_gradients` says whether a forward has taken a gradient inside of itself.
    `above` are the modules that contain it, with their paths, if somebody sets them. `met` is for `meets_new`, and
    `other_modes` for messages.
    """

    def __init__(self, path: str, errors: PendingErrors, other_modes: OtherModes | None = None) -> None:
        self.path = path
        self.errors = errors
        self.other_modes = other_modes
        self.num_steps = 0
        self.takes_gradients = False
        self.above: Mapping[nn.Module, str] = {}
        self._shards: Sequence[Values] = ()
        self._layout: _Layout | None = None
        self._fingerprints: dict[int, tuple[tuple[int, int], Fingerprint | None]] = {}
        self.met: set[Hashable] = set()
        self._lock = threading.Lock()
        self._inside: dict[int, int] = {}
        self._changed_by: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # All else belongs to this model's modules, and to what runs in them; a copy does not share shards either.
        return {"path": self.path, "errors": self.errors, "other_modes": self.other_modes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy starts anew

    def use_shards(self, shards: Sequence[Values]) -> None:
        """Compare what an engine keeps of the weights below the module, in place of the weights."""
        self._shards = shards
        self._layout = None

    def layout(self, root: nn.Module) -> _Layout:
        """Return where the state below `root`, the module, is read."""
        if self._layout is None or not self._layout.is_current(root):
            self._layout = _Layout(root, self._shards, self.above)
            self._fingerprints.clear()
        return self._layout

    def has_router(self, root: nn.Module) -> bool:
        """Whether `root`, the module, held a router when its modules were last walked."""
        return (self._layout or self.layout(root)).has_router

    def enter(self) -> int:
        """Let the region run in this thread, which is returned; refused while another has changed its attributes."""
        me = threading.get_ident()
        with self._lock:
            if self._changed_by not in (None, me):
                self._refuse_thread()
            self._inside[me] = self._inside.get(me, 0) + 1
        return me

    def leave(self, me: int) -> None:
        """End a run of the region in this thread."""
        with self._lock:
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]

    @contextmanager
    def set_for_this_thread(self, changes: Sequence[_Change]) -> Iterator[None]:
        """Make changes, and undo them at the end of the block; no other thread may run the region meanwhile."""
        found = self._changed_by
        with self._lock:
            if set(self._inside) != {threading.get_ident()}:
                self._refuse_thread()
            self._changed_by = threading.get_ident()
        try:
            with ExitStack() as undo:
                for change in changes:
                    undo.callback(change())
                yield
        finally:
            self._changed_by = found

    def fingerprint_of(self, position: int, buffer: Tensor, identity: tuple[int, int]) -> Fingerprint | None:
        """Return the fingerprint of a buffer, taken once for each version of it; None if it has no values."""
        known = self._fingerprints.get(position)
        if known is None or known[0] != identity:
            known = self._fingerprints[position] = identity, fingerprints.fingerprint_of(buffer)
        return known[1]

    def runs_elsewhere(self) -> bool:
        """Whether the region runs in another thread as well."""
        return len(self._inside) > 1

    def refuse(self, what: str, names: Sequence[str], todo: str) -> NoReturn:
        """Raise: a recomputation would give other values."""
        listed = ", ".join(names[:_MAX_NAMES]) + " ..." * (len(names) > _MAX_NAMES)
        raise ChangedSinceForwardError(
            f"{self.path} is recomputed in backward, but since its forward {what}{': ' * bool(names)}{listed}. "
            f"Recomputing it would give other values than those that the loss was made of. {todo}"
        )

    def _refuse_thread(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.path} runs in two threads, and its training flags or adapters were changed between a forward and "
            "the backward of one of them. They cannot be brought back while the other one runs. Let one thread after "
            "the other train, or change nothing before backward."
        )


# Forward hooks by the position of their module, if it has any: a dictionary for each of `_HOOKS`; see `_copied_hooks`.
_Hooks = dict[int, list[dict[int, Any]]]
# Makes a change, and returns a function that undoes it.
_Change = Callable[[], Callable[[], None]]


class CallState:
    """The state of the modules of one call of a region, as it was when the call's first run ended.

    `function` is a method of a module, or a function that takes the module as an argument.
    """

    __slots__ = ("_found", "_hooks", "_module", "_name", "_note", "_state", "_takes_gradients")

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        bound: Any = function.func if isinstance(function, partial) else function
        given = function.args if isinstance(function, partial) else ()
        owner = getattr(bound, "__self__", None)
        module = next((value for value in (owner, *given, *args) if isinstance(value, nn.Module)), None)
        self._module: Any = module
        # No function, whose owner may hold this object.
        self._name = qualified_name(bound) if module is None else ""
        # None if the module is no region of a plan.
        self._state: ModuleState | None = None if module is None else module.__dict__.get(STATE)
        self._note: _Note | None = None
        # From `setting` until the forward begins.
        self._found: _Layout | None = None
        self._hooks: tuple[list[int], _Hooks] = [], {}
        self._takes_gradients = False

    @property
    def takes_gradients(self) -> bool:
        """Whether a forward of the module is known to take a gradient inside of itself."""
        return self._takes_gradients if self._state is None else self._state.takes_gradients

    @takes_gradients.setter
    def takes_gradients(self, value: bool) -> None:
        self._takes_gradients = value
        if self._state is not None:
            self._state.takes_gradients = value

    @property
    def path(self) -> str:
        """The path of the module, for messages; if it is no region of a plan, what the function is called."""
        if self._state is None:
            return self._name or qualified_name(self._module)
        return self._state.path

    def what_to_do(self) -> str:
        """Return which modes work in the place of the region's, as a sentence."""
        return what_to_do(None, None if self._state is None else self._state.other_modes)

    def explain(self, error: Exception, *, is_tiled: bool = False, differs_in: str | None = None) -> NoReturn:
        """Raise what a later run has raised, which is not for others, with what it means; see `recomputation_error`."""
        modes = None if self._state is None else self._state.other_modes
        raise recomputation_error(
            error, self.path, self._module, modes, is_tiled=is_tiled, differs_in=differs_in
        ) from error

    def add_error(self, is_wrong: Tensor, refuse: Callable[[], None]) -> None:
        """Have `refuse` called if a boolean of a device is true; see `PendingErrors`."""
        if self._state is not None:
            self._state.errors.add(is_wrong, refuse)
        elif bool(is_wrong):
            refuse()

    def sums_of(self, tensors: Sequence[Tensor]) -> list[BitSum]:
        """Return the sums of the bits of what several regions are given; none if it is no region of a plan."""
        return [] if self._state is None else self._state.errors.shared_sums.of(tensors, self._state)

    @property
    def module(self) -> nn.Module | None:
        """The module that runs."""
        module: nn.Module | None = self._module
        return module

    def modules_of(self, module: nn.Module) -> Iterable[nn.Module]:
        """Return a module and those inside; without a walk, if it is the one that runs."""
        if self._state is None or module is not self._module:
            return module.modules()
        return self._state.layout(module).modules

    @property
    def has_router(self) -> bool:
        """Whether the module holds a router; False if it is no region of a plan."""
        return self._state is not None and self._state.has_router(self._module)

    @property
    def errors(self) -> PendingErrors | None:
        """Those of the plan."""
        return None if self._state is None else self._state.errors

    def setting(self) -> Hashable:
        """Return what tells hooks and settings from others; None where others have changed one since the last run."""
        if self._state is None:
            return ()
        layout = self._found = self._state.layout(self._module)
        if layout.held.has_changed():
            return None
        return self._state.path, layout.held.num_changes, *layout.hooks_now()

    def meets_new(self, others: Iterable[Hashable]) -> bool:
        """Whether what may hide a state of its own has come: a hook, a forward, an attribute, or one of `others`."""
        if self._state is None:
            return False
        if self._found is None:
            self._found = self._state.layout(self._module)
            self._found.held.look()
        found, met = {*others, *self._found.kinds()}, self._state.met
        if found <= met:
            return False
        met |= found
        return True

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Run the call in the block: the first time as things are, later as they were when that run ended.

        Raises `UnsupportedError` if something changed that cannot be restored.
        """
        state = self._state
        if state is None:
            yield
            return
        me = state.enter()
        try:
            if self._note is None:
                found, self._found = self._found, None
                layout = found or state.layout(self._module)
                held = layout.held.note(is_looked_at=found is not None)
                before, above = layout.identities(), layout.above.note()
                # A hook may take itself off while it runs.
                self._hooks = layout.hooks_copied()
                yield
                layout.held.end_forward(held)
                layout.above.end_forward(above)
                self._note = _Note(state, layout, before, self._hooks, held, above)
            else:
                with self._note.restored(state), gradient_hooks_put_back(self._note.weights()):
                    yield
        finally:
            state.leave(me)

    @contextmanager
    def unwritten(self) -> Iterator[None]:
        """Refuse what the block, or a slice before it, writes for later: each slice would."""
        if self._state is None:
            yield
            return
        layout, refuse = self._state.layout(self._module), partial(_refuse_slices, self._state)
        if layout.hooks_now() != self._hooks[0]:
            refuse(["which hooks there are"])
        with layout.above.unchanged(refuse), layout.held.unchanged(refuse):
            yield


class _Layout:
    """The modules below a region, and where in them tensors and attributes are."""

    def __init__(self, root: nn.Module, shards: Sequence[Values], above: Mapping[nn.Module, str]) -> None:
        self.modules = list(root.modules())
        self.held = HeldState({module: path for path, module in root.named_modules()})
        self.above = HeldState(above, is_above=True)
        # Those without children too: a parametrization gives a linear layer its first one.
        self._all_children = [module._modules for module in self.modules]
        # Weights and buffers come later as well.
        self._all: list[Sized] = list(chain.from_iterable(map(_OWNED, self.modules)))
        self._sizes = list(map(len, self._all))
        self._lists = list(filter(None, self._all_children))
        self._children = self._children_now()
        self.is_sharded = is_managed(root)
        self.shards = list(shards)
        self._places: list[tuple[dict[str, Any], str]] = []
        self.names: list[str] = []
        self._num_parameters = 0
        self._trainable: tuple[list[bool], list[int]] = [], []
        self._find_tensors(root)
        # Hooks may change what a forward computes; engines and users place and remove them.
        self.hooked = [*self.modules, _GLOBAL_HOOKS]
        self._hooks = list(chain.from_iterable(map(attrgetter(*_MAIN_HOOKS), self.hooked)))
        self._numbers: tuple[list[int], list[int]] = [], []
        self._copied_hooks: tuple[list[int], _Hooks] = [], {}
        self._kinds: tuple[Sequence[int], Sequence[str], set[Hashable]] = (), (), set()

    def _find_tensors(self, root: nn.Module) -> None:
        paths = dict(zip(self.modules, (path for path, _ in root.named_modules()), strict=True))
        for module in self.modules:
            # Engines that shard, and accelerate's offload, put other tensors into the module for each use.
            is_replaced = self.is_sharded or is_managed(module) or _is_offloaded(module)
            for name, parameter in module._parameters.items():
                if parameter is not None and hasattr(parameter, "ds_id"):
                    self.is_sharded = True
                    self.shards += [partial(getattr, parameter, "ds_tensor")] * parameter.requires_grad
                elif parameter is not None and not is_replaced and not parameter.is_meta:
                    self._add(module._parameters, paths[module], name)
        self._num_parameters = len(self._places)
        for module in self.modules:
            for name, buffer in module._buffers.items():
                # Small ones are brought back, and need not be compared; sparse ones are not.
                if buffer is None or buffer.is_meta:
                    continue
                if buffer.layout is not torch.strided or buffer.nbytes > SMALL_BYTES:
                    self._add(module._buffers, paths[module], name)

    def _add(self, place: dict[str, Any], path: str, name: str) -> None:
        self._places.append((place, name))
        self.names.append(f"{path}.{name}".lstrip("."))

    @cached_property
    def has_router(self) -> bool:
        """Whether one of the modules is, or belongs to, a router."""
        return has_router(self.modules)

    def is_current(self, root: nn.Module) -> bool:
        """Whether the same modules are there, and no engine has taken over."""
        return self.modules[0] is root and self.has_same_children() and (self.is_sharded or not is_managed(root))

    def has_same_children(self) -> bool:
        """Whether the same modules are there, and as many weights and buffers."""
        return list(map(len, self._all)) == self._sizes and self._children_now() == self._children

    def lost_children(self) -> list[str]:
        """Name the modules that are gone."""
        now = set(map(id, self._children_now()))
        return [type(module).__name__ for module in self._children if module is not None and id(module) not in now]

    def _children_now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._lists)))

    def tensors(self) -> list[Any]:
        """Return parameters, then buffers; None in the place of one that is gone."""
        return [place.get(name) for place, name in self._places]

    def identities(self) -> tuple[list[int], list[int]]:
        """Return the ids and versions of the tensors."""
        tensors = self.tensors()
        return list(map(id, tensors)), versions_of(tensors)

    def is_buffer(self, position: int) -> bool:
        return position >= self._num_parameters

    def trainable(self, requires_grad: list[bool]) -> list[int]:
        """Return the positions of trainable parameters, or of some that are spread over them."""
        if requires_grad != self._trainable[0]:
            found = [position for position in range(self._num_parameters) if requires_grad[position]]
            if len(found) > _NUM_SAMPLED:
                found = [found[(len(found) - 1) * number // (_NUM_SAMPLED - 1)] for number in range(_NUM_SAMPLED)]
            self._trainable = requires_grad, found
        return self._trainable[1]

    def hooks_now(self) -> list[int]:
        """Return the numbers of the hooks, which are unique in a process. This package's own come and go."""
        numbers = list(chain.from_iterable(filter(None, self._hooks)))
        if numbers != self._numbers[0]:
            found = chain.from_iterable(map(dict.items, self._hooks))
            self._numbers = numbers, [number for number, hook in found if not is_ours(hook)]
        return self._numbers[1]

    def kinds(self) -> set[Hashable]:
        """Return the names of attributes, and the code of forwards and hooks, the same for one placed in each step."""
        numbers, names = self.hooks_now(), self.held.names()
        if numbers != self._kinds[0] or names is not self._kinds[1]:
            functions = chain(map(attrgetter("forward"), self.modules), *map(dict.values, self._hooks))
            # Tools of torch (FLOP counters) only watch, and so do this package's when they follow a step.
            others = (each for each in functions if not _only_watches(each))
            self._kinds = numbers, names, {*names, *map(_code_of, others)}
        return self._kinds[2]

    def hooks_copied(self) -> tuple[list[int], _Hooks]:
        """Return the numbers of the hooks, and a copy of them; copied again only if one has come or gone."""
        now = self.hooks_now()
        if now != self._copied_hooks[0]:
            found = enumerate(map(attrgetter(*_HOOKS), self.hooked))
            self._copied_hooks = now, {at: _copied_hooks(hooks) for at, hooks in found if any(hooks)}
        return self._copied_hooks


class _Note:
    """The state when the forward of a call ended; `before` and `hooks` are the `identities` and hooks when it began."""

    __slots__ = (
        "_above",
        "_fingerprints",
        "_held",
        "_hook_numbers",
        "_hooks",
        "_ids",
        "_layout",
        "_num_steps",
        "_requires_grad",
        "_sampled",
        "_samples",
        "_versions",
    )

    def __init__(
        self,
        state: ModuleState,
        layout: _Layout,
        before: tuple[list[int], list[int]],
        hooks: tuple[list[int], _Hooks],
        held: Held,
        above: Held,
    ) -> None:
        tensors = layout.tensors()
        self._layout = layout
        self._ids: list[int | None] = list(map(id, tensors))
        self._versions = versions_of(tensors)
        self._requires_grad = _all_require_grad(tensors)
        self._held, self._above = held, above
        self._hook_numbers, self._hooks = hooks
        if before != (self._ids, self._versions):
            # What the region writes itself changes in each of its runs, and cannot be compared.
            for position, identity in enumerate(zip(*before, strict=True)):
                if identity != (self._ids[position], self._versions[position]):
                    self._ids[position] = None
        self._fingerprints = {
            position: state.fingerprint_of(
                position, tensors[position], (id(tensors[position]), self._versions[position])
            )
            for position in range(layout._num_parameters, len(tensors))
            if self._ids[position] is not None
        }
        self._num_steps = state.num_steps
        self._sampled = layout.trainable(self._requires_grad)
        self._samples = Samples(self._values_of(tensors))

    def _values_of(self, tensors: Sequence[Any]) -> list[Tensor]:
        values = [tensors[position] for position in self._sampled]
        return values + [shard() for shard in self._layout.shards[:_NUM_SHARDS]]

    @contextmanager
    def restored(self, state: ModuleState) -> Iterator[None]:
        """Let the block find what the forward found.

        Raises `UnsupportedError` if something else has changed.
        """
        layout = self._layout
        if not layout.has_same_children() and (lost := layout.lost_children()):
            state.refuse("modules were replaced or taken away", lost, "Call backward before that.")
        tensors = layout.tensors()
        if list(map(id, tensors)) != self._ids or versions_of(tensors) != self._versions:
            self._compare_tensors(state, tensors)
        if state.num_steps != self._num_steps and (self._sampled or layout.shards):
            state.refuse(_WRITTEN, (), _STEPPED)
        differ = self._samples.differ(self._values_of(tensors))
        if isinstance(differ, Tensor):
            state.errors.add(differ, partial(state.refuse, _WRITTEN, (), _STEPPED))
        elif differ:
            state.refuse(_WRITTEN, (), _STEPPED)
        changes = self._changes(state, tensors)
        held, found = self._layout.held, self._held
        now = held.look()
        is_same = now is found.shape
        if not is_same:
            # Attributes of adapters and engines cannot be brought back.
            names = now.differences(found.shape)
            if _MERGED in names:
                state.refuse("adapters were merged or unmerged", (), "Call backward before that.")
            if layout.is_sharded and not names.isdisjoint(_FLAGS):
                self._refuse_sharded(state)
        # Copies of tensors alone another thread need not find.
        is_shared = state.runs_elsewhere() and is_same and not changes
        is_set = not is_shared and (changes or found.has_copies or not is_same)
        refuse, above = partial(state.refuse, todo=_BEFORE_THAT), layout.above
        with (
            state.set_for_this_thread(changes) if is_set else nullcontext(),
            held.as_in_forward(found, now, refuse, is_shared=is_shared),
            nullcontext()
            if state.runs_elsewhere()
            else above.as_in_forward(self._above, above.look(), refuse, is_shared=False),
        ):
            yield

    def weights(self) -> list[Any]:
        """Return the tensors of the modules, trainable ones among them."""
        return self._layout.tensors()

    def _changes(self, state: ModuleState, tensors: Sequence[Any]) -> list[_Change]:
        """Return what restores the flags and hooks that have changed since."""
        layout = self._layout
        changes: list[_Change] = []
        if _all_require_grad(tensors) != self._requires_grad:
            changes += [
                partial(_set_requires_grad, tensor, was)
                for tensor, was in zip(tensors, self._requires_grad, strict=True)
                if tensor is not None and tensor.requires_grad is not was and tensor.is_leaf
            ]
            if changes and layout.is_sharded:
                self._refuse_sharded(state)
        if layout.hooks_now() != self._hook_numbers:
            (_, found), none = layout.hooks_copied(), [dict[int, Any]() for _ in _HOOKS]
            for position in sorted({*found, *self._hooks}):
                was, now = self._hooks.get(position, none), found.get(position, none)
                if _others(was) != _others(now):
                    changes.append(partial(_set_hooks, layout.hooked[position], was))
        return changes

    def _refuse_sharded(self, state: ModuleState) -> NoReturn:
        state.refuse(
            "training flags, adapters or requires_grad were changed",
            (),
            "Under FSDP and ZeRO they are not brought back for a recomputation: call backward before they change.",
        )

    def _compare_tensors(self, state: ModuleState, tensors: Sequence[Any]) -> None:
        replaced, written, other_buffers = [], [], []
        for position, tensor in enumerate(tensors):
            was = self._ids[position], self._versions[position]
            now = id(tensor), versions_of([tensor])[0]
            if was[0] is None or was == now:
                continue
            name = self._layout.names[position]
            if self._layout.is_buffer(position):
                # DDP broadcasts the first process's buffers before each forward, mostly with the same values.
                differ = (
                    tensor is None
                    or tensor.layout is not torch.strided
                    or fingerprints.have_other_values(
                        self._fingerprints[position], state.fingerprint_of(position, tensor, now)
                    )
                )
                if isinstance(differ, Tensor):
                    state.errors.add(differ, partial(state.refuse, _OTHER_BUFFERS, [name], _BEFORE_THAT))
                elif differ:
                    other_buffers.append(name)
            elif was[0] != now[0]:
                replaced.append(name)
            else:
                written.append(name)
        if replaced:
            state.refuse(
                "other tensors have taken the place of weights",
                replaced,
                "Call backward while the forward's weights are in place; torch.func.functional_call puts others back "
                "as soon as it returns, so use it on a model without a policy (hf_ckpt.remove).",
            )
        if written:
            state.refuse(_WRITTEN, written, _STEPPED)
        if other_buffers:
            state.refuse(_OTHER_BUFFERS, other_buffers, _BEFORE_THAT)


def _refuse_slices(state: ModuleState, names: Sequence[str]) -> NoReturn:
    raise UnsupportedError(
        f"{state.path} is to run in tiles, but it writes {', '.join(names[:_MAX_NAMES])} for later, and would do so in "
        "each of them. Leave tiles out for its layer."
    )


_WRITTEN = "weights were written to"
_STEPPED = "Call backward before the optimizer steps, or run the forward again after its step."
_OTHER_BUFFERS = "buffers have got other values"
_BEFORE_THAT = "Call backward before that, or leave it out of the policy."


def _set_requires_grad(tensor: Tensor, value: bool) -> Callable[[], None]:
    """Set whether a tensor requires a gradient, and return a function that undoes it."""
    found = tensor.requires_grad
    tensor.requires_grad = value
    return partial(setattr, tensor, "requires_grad", found)


def _set_hooks(module: Any, was: Sequence[dict[int, Any]]) -> Callable[[], None]:
    """Set the forward hooks of a module, except for this package's own, and return a function that undoes it."""
    hooks: list[dict[int, Any]] = list(attrgetter(*_HOOKS)(module))
    found = list(map(dict, hooks))
    ours = _numbers_of_ours(found)
    for place, before, now in zip(hooks, was, found, strict=True):
        place.clear()
        # Each in its place, and this package's own as they are now.
        kept = {number: hook for number, hook in before.items() if hook is not None or number in now}
        place.update({number: now[number] if hook is None else hook for number, hook in kept.items()})
        place.update({number: hook for number, hook in now.items() if number in ours})

    def put_hooks_back() -> None:
        for place, before in zip(hooks, found, strict=True):
            put_container_back(place, before)

    return put_hooks_back


# --- Hooks on the gradients of weights. ---


@contextmanager
def gradient_hooks_put_back(tensors: Iterable[Any]) -> Iterator[None]:
    """Let the hooks on the gradients of trainable tensors be, when the block ends, those that were there before it."""
    # For a run that is not the forward: what a forward places on a weight is there already, and would run twice.
    weights = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    before, number = _gradient_hooks(weights), RemovableHandle.next_id
    try:
        yield
    finally:
        # Mostly there are none, and nobody has placed a hook anywhere.
        if (before or RemovableHandle.next_id != number) and (after := _gradient_hooks(weights)) != before:
            none = [((), ())] * len(weights)
            for weight, *pair in zip(weights, before or none, after or none, strict=True):
                for hooks, found, now in zip(_GRADIENT_HOOKS(weight), *pair, strict=True):
                    if found != now:
                        _put_gradient_hooks_back(hooks, dict(found))


@contextmanager
def gradient_hooks_away(weights: Iterable[Tensor]) -> Iterator[None]:
    """Take the hooks on the gradients of weights away for the block: autograd calls them for parts of one as well."""
    found: list[tuple[Any, dict[int, Any]]] = [
        (hooks, dict(hooks)) for weight in weights if (hooks := weight._backward_hooks)
    ]
    for hooks, _ in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.update(before)


_GRADIENT_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def _gradient_hooks(weights: Sequence[Tensor]) -> list[tuple[tuple[tuple[int, Any], ...], ...]]:
    """Return the hooks of each weight; nothing if none of them has any."""
    found = list(map(_GRADIENT_HOOKS, weights))
    if not any(map(any, found)):
        return []
    return [(tuple((one or {}).items()), tuple((other or {}).items())) for one, other in found]


def _put_gradient_hooks_back(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    """Take off what was placed, and put back what was taken off."""
    now = dict(hooks)
    kept = {number for number in before if _is_in_force(number, now)}
    gone = [number for number in before if number not in kept and _is_in_force(number, before)]
    # A run inside of the block may have exchanged hooks, which were put back.
    linked = {other for number in kept for other in getattr(now[number], "numbers", ())}
    placed = [number for number in now if number not in before and number not in linked and _is_in_force(number, now)]
    hooks.clear()
    wanted = {*kept, *gone}
    hooks.update(
        (number, now[number] if number in kept else hook) for number, hook in before.items() if number in wanted
    )
    hooks.update((number, now[number]) for number in linked)
    # A forward may exchange the hook that it placed the last time. Then it goes on with the handle of the new one, or
    # with the old one's if that is put back: either takes off both.
    for new, old in zip(placed, gone, strict=False):
        hook = hooks[old]
        numbers = (*(hook.numbers if isinstance(hook, _Exchanged) else (old,)), new)
        for number in numbers:
            hook = hooks.get(number)
            hooks[number] = _Exchanged(hook.hook if isinstance(hook, _Exchanged) else hook, hooks, numbers)


def _is_in_force(number: int, hooks: dict[int, Any]) -> bool:
    hook = hooks.get(number)
    return number in hooks and (not isinstance(hook, _Exchanged) or all(each in hooks for each in hook.numbers))


class _Exchanged:
    """A hook that has several handles: among the `hooks`, an entry for each of the `numbers`, of which one has `hook`.

    It acts as long as all of them are there.
    """

    def __init__(self, hook: Any, hooks: dict[int, Any], numbers: tuple[int, ...]) -> None:
        self.hook = hook
        self._hooks = hooks
        self.numbers = numbers

    def __call__(self, given: Tensor) -> Any:
        is_whole = self.hook is not None and all(number in self._hooks for number in self.numbers)
        return self.hook(given) if is_whole else None


def _copied_hooks(hooks: Sequence[dict[int, Any]]) -> list[dict[int, Any]]:
    """Return a copy of the hooks of a module; None in the place of this package's own, which it does not keep alive."""
    ours = _numbers_of_ours(hooks)
    return [{number: None if number in ours else hook for number, hook in each.items()} for each in hooks]


def _others(copied: Sequence[dict[int, Any]]) -> list[list[int]]:
    return [[number for number, hook in each.items() if hook is not None] for each in copied]


def _numbers_of_ours(hooks: Sequence[dict[int, Any]]) -> set[int]:
    # The dictionaries after the main ones say how a hook is called.
    return {number for each in hooks[: len(_MAIN_HOOKS)] for number, hook in each.items() if is_ours(hook)}


def is_ours(value: Any) -> bool:
    """Whether a function, such as a hook, or a class is of this package."""
    while isinstance(value, partial):
        value = value.func
    return str(getattr(value, "__module__", "")).partition(".")[0] == "hf_ckpt"


def _only_watches(function: Any) -> bool:
    return is_ours(function) or str(getattr(function, "__module__", "")).startswith("torch.utils.")


def _code_of(function: Any) -> Hashable:
    """Return the code of a function, or the name of the type of what is called."""
    while isinstance(function, partial):
        function = function.func
    code: Hashable = getattr(function, "__code__", type(function).__qualname__)
    return code


def versions_of(tensors: Sequence[Any]) -> list[int]:
    """Return the versions of tensors; -1 for a tensor that counts none."""
    try:
        return list(map(_version, tensors))
    except (AttributeError, RuntimeError):
        # One is gone, or is a tensor of inference mode.
        return [-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def _all_require_grad(tensors: Sequence[Any]) -> list[bool]:
    try:
        return list(map(_requires_grad, tensors))
    except AttributeError:
        return [tensor is not None and tensor.requires_grad for tensor in tensors]


def _is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate loads the weights of a module for each use."""
    hook = module.__dict__.get(HOOK)
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,)))
