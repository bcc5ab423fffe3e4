"""The state of the modules that a region runs: weights, buffers, and attributes that are plain values.

It is noted when a region's forward ends, and compared before each recomputation, which would otherwise use another
state without a word. Attributes (training flags, active adapters, a dropout rate, a scale) are restored to what the
forward found, for the recomputation alone; any other change raises an error. What a region writes itself is no change:
it does so in each of its runs.

Cheap enough for every step: modules are walked when one comes or goes; otherwise only attributes are read, and a few
values of some trainable weights. Those values reveal optimizers that write past the versions of tensors (fused ones,
8-bit ones, those of engines that shard).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import chain
from numbers import Number
from operator import attrgetter, getitem
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions import fingerprints
from hf_ckpt.regions.fingerprints import Fingerprint, Samples
from hf_ckpt.regions.pending_errors import PendingErrors

STATE = "_hf_ckpt_module_state"
"""Attribute of a module whose forward is a region."""

Values = Callable[[], Tensor]
"""Returns the shard that an engine keeps of weights that it gathers for each use."""

# Where an engine shards weights, changes of these are refused. The latter are of peft's layers; `scaling` is an
# attribute of many attention modules too.
_FLAGS = frozenset({"training", "_active_adapter", "_disable_adapters", "scaling"})
_MERGED = "merged_adapters"
_MAIN_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS = (*_MAIN_HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_MAX_NAMES = 4
_NUM_SAMPLED = 9
"""As many weights as a layer of Llama has, so that a full fine-tune samples all of them."""
_NUM_SHARDS = 4

_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")


class ModuleState:
    """Reads the state below one module whose forward is a region; lives on that module, and is copied with it.

    `path` is that of the module, for messages; `errors` are those of the plan; `num_steps` counts the steps of the
    optimizer, if somebody sets it.
    """

    def __init__(self, path: str, errors: PendingErrors) -> None:
        self.path = path
        self.errors = errors
        self.num_steps = 0
        self._shards: Sequence[Values] = ()
        self._layout: _Layout | None = None
        self._fingerprints: dict[int, tuple[tuple[int, int], Fingerprint | None]] = {}
        self._lock = threading.Lock()
        self._inside: dict[int, int] = {}
        self._changed_by: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # All else belongs to this model's modules, and to what runs in them; a copy does not share shards either.
        return {"path": self.path, "errors": self.errors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy starts anew

    def use_shards(self, shards: Sequence[Values]) -> None:
        """Compare what an engine keeps of the weights below the module, in place of the weights."""
        self._shards = shards
        self._layout = None

    def layout(self, root: nn.Module) -> _Layout:
        """Return where the state below `root`, the module, is read."""
        if self._layout is None or not self._layout.is_current(root):
            self._layout = _Layout(root, self._shards)
            self._fingerprints.clear()
        self._layout.attributes = self._layout.attributes.renewed()
        return self._layout

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

    def after_run(self, attributes: _Attributes) -> None:
        """Note what a run wrote; `attributes` are those that its forward found, and there may be others by now."""
        attributes.after_run()
        if self._layout is not None and self._layout.attributes is not attributes:
            self._layout.attributes.after_run()

    def runs_elsewhere(self) -> bool:
        """Whether the region runs in another thread as well."""
        return len(self._inside) > 1

    def refuse(self, what: str, names: Sequence[str], todo: str) -> NoReturn:
        """Raise: a recomputation would give other values."""
        listed = ", ".join(names[:_MAX_NAMES]) + " ..." * (len(names) > _MAX_NAMES)
        raise UnsupportedError(
            f"{self.path} is recomputed in backward, but since its forward {what}{': ' * bool(names)}{listed}. "
            f"Recomputing it would give other values than those that the loss was made of. {todo}"
        )

    def _refuse_thread(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.path} runs in two threads, and its training flags or adapters were changed between a forward and "
            "the backward of one of them. They cannot be brought back while the other one runs. Let one thread after "
            "the other train, or change nothing before backward."
        )


_Hooks = dict[int, list[dict[int, Any]]]
"""Forward hooks by the position of their module, if it has any: a dictionary for each of `_HOOKS`; see
`_copied_hooks`."""
_Change = Callable[[], Callable[[], None]]
"""Makes a change, and returns a function that undoes it."""


class CallState:
    """The state of the modules of one call of a region, as it was when the call's first run ended.

    `function` is a method of a module, or a function that takes the module as an argument.
    """

    __slots__ = ("_module", "_note", "_state")

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        bound: Any = function.func if isinstance(function, partial) else function
        given = function.args if isinstance(function, partial) else ()
        owner = getattr(bound, "__self__", None)
        module = next((value for value in (owner, *given, *args) if isinstance(value, nn.Module)), None)
        self._module: Any = module
        # None if the module is no region of a plan.
        self._state: ModuleState | None = None if module is None else module.__dict__.get(STATE)
        self._note: _Note | None = None

    @property
    def path(self) -> str | None:
        """The path of the module, for messages; None if it is no region of a plan."""
        return None if self._state is None else self._state.path

    @property
    def module(self) -> nn.Module | None:
        """The module that runs."""
        module: nn.Module | None = self._module
        return module

    @property
    def errors(self) -> PendingErrors | None:
        """Those of the plan."""
        return None if self._state is None else self._state.errors

    def setting(self) -> Hashable:
        """Return what tells hooks and settings from others; None where a setting has changed since the last run."""
        if self._state is None:
            return ()
        layout = self._state.layout(self._module)
        attributes = layout.attributes
        if not attributes.are_as(attributes._values):
            return None
        return self._state.path, attributes.num_changes, *layout.hooks_now()

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
                layout = state.layout(self._module)
                before = layout.identities(), layout.attributes, layout.attributes.now()
                yield
                # At the end, as the region's own writes (running statistics, counters) are no change by others.
                self._note = _Note(state, layout, *before)
            elif changes := self._note.compare(state):
                with state.set_for_this_thread(changes):
                    yield
            else:
                yield
        finally:
            # Also where torch stops a recomputation once it has what backward needs, by an exception.
            if self._note is not None:
                state.after_run(self._note.attributes)
            state.leave(me)


class _Layout:
    """The modules below a region, and where in them tensors and attributes are."""

    def __init__(self, root: nn.Module, shards: Sequence[Values]) -> None:
        self.modules = list(root.modules())
        self.attributes = _Attributes(self.modules, set())
        self._lists = [module._modules for module in self.modules if module._modules]
        self._children = self._children_now()
        self.is_sharded = is_managed(root)
        self.shards = list(shards)
        self._places: list[tuple[dict[str, Any], str]] = []
        self.names: list[str] = []
        self._num_parameters = 0
        self._trainable: tuple[list[bool], list[int]] = [], []
        self._find_tensors(root)
        # Hooks may change what a forward computes; engines and users place and remove them.
        self._hooks = list(chain.from_iterable(map(attrgetter(*_MAIN_HOOKS), self.modules)))
        self._copied_hooks: tuple[list[int], _Hooks] = [], {}

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
                if buffer is not None and not buffer.is_meta:
                    self._add(module._buffers, paths[module], name)

    def _add(self, place: dict[str, Any], path: str, name: str) -> None:
        self._places.append((place, name))
        self.names.append(f"{path}.{name}".lstrip("."))

    def is_current(self, root: nn.Module) -> bool:
        """Whether the same modules are there, and no engine has taken over."""
        return self.modules[0] is root and self.has_same_children() and (self.is_sharded or not is_managed(root))

    def has_same_children(self) -> bool:
        """Whether the same modules are there."""
        return self._children_now() == self._children

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
        return [number for hooks in filter(None, self._hooks) for number, hook in hooks.items() if not is_ours(hook)]

    def hooks_copied(self) -> tuple[list[int], _Hooks]:
        """Return the numbers of the hooks, and a copy of them; copied again only if one has come or gone."""
        now = self.hooks_now()
        if now != self._copied_hooks[0]:
            found = enumerate(map(attrgetter(*_HOOKS), self.modules))
            self._copied_hooks = now, {at: _copied_hooks(hooks) for at, hooks in found if any(hooks)}
        return self._copied_hooks


class _Attributes:
    """Where attributes of modules are plain values: numbers, strings, flags, and containers of such.

    Of each change it is known whether the region made it, in one of its runs, or somebody else between them. What only
    the region changes is left as it is: a layer keeps the length beside the mask that it has made for it, and one
    without the other would be wrong.

    `left_out` are places, as `_place` has them, that have held something else since: tensors for instance, which are
    too many to compare, and which a note must not keep alive.
    """

    def __init__(self, modules: Sequence[nn.Module], left_out: set[_Place], *, are_written: bool = False) -> None:
        self.num_changes = 0
        self.are_written = are_written
        self._modules = modules
        self._left_out = left_out
        self._all = [vars(module) for module in modules if type(module) not in _HOLDERS]
        # Layers read switches of the model's config when they run, as the implementation of attention.
        configs = (config for owner in self._all if _is_config(config := owner.get("config")))
        self._all += {id(config): vars(config) for config in configs}.values()
        self._sizes = list(map(len, self._all))
        found = [(owner, name) for owner in self._all for name in owner if self._is_compared(owner, name)]
        self._owners = [owner for owner, _ in found]
        self.names = [name for _, name in found]
        self._values = [deepcopy(owner[name]) for owner, name in found]
        self._changed_by_others: dict[int, int] = {}
        self._created: set[_Place] = set()
        self._is_outdated = False

    def _is_compared(self, owner: dict[str, Any], name: str) -> bool:
        return (
            name not in _OTHERS_NAMES
            and not name.startswith(_OTHERS_PREFIXES)
            and _is_plain(owner[name])
            and _place(owner, name) not in self._left_out
        )

    def renewed(self) -> _Attributes:
        """Return these, or others if an attribute has come, gone, or become something else."""
        if not self._is_outdated and self._have_same_sizes():
            return self
        return _Attributes(self._modules, self._left_out, are_written=self.are_written)

    def _have_same_sizes(self) -> bool:
        return list(map(len, self._all)) == self._sizes

    def now(self) -> list[Any]:
        """Return the values; `_MISSING` for what is gone."""
        try:
            return list(map(getitem, self._owners, self.names))
        except KeyError:
            return [owner.get(name, _MISSING) for owner, name in zip(self._owners, self.names, strict=True)]

    def after_forward(self, before: list[Any]) -> list[Any]:
        """Return copies of the values; `before` are those before it."""
        now = self.now()
        if not _are_same(now, self._values):
            # Containers are those that they were, whoever changed their items.
            self._note(now, set(_changed(before, now)))
        if not self._have_same_sizes():
            self._created |= self._added()
        return self._values

    def before_recomputation(self, runs_elsewhere: bool) -> None:
        """Note what has changed since the region ran, by others unless it runs elsewhere."""
        now = self.now()
        if not _are_same(now, self._values):
            self._note(now, set(range(len(now))) if runs_elsewhere else set())

    def after_run(self) -> None:
        """Note what a run wrote, if the region ever writes."""
        if self.are_written and not _are_same(now := self.now(), self._values):
            self._note(now, set(range(len(now))))

    def _note(self, now: list[Any], written: set[int]) -> None:
        """Note values that have changed, of which the region wrote some. The list of copies is a new one."""
        changed = _changed(self._values, now)
        self._values = list(self._values)
        for number in changed:
            self._values[number] = self._copy(number, now[number])
        self.are_written |= not written.isdisjoint(changed)
        if by_others := set(changed) - written:
            self.num_changes += 1
            self._changed_by_others |= dict.fromkeys(by_others, self.num_changes)

    def _copy(self, number: int, value: Any) -> Any:
        if _is_plain(value):
            return deepcopy(value)
        self._left_out.add(_place(self._owners[number], self.names[number]))
        self._is_outdated = True
        return _NOT_PLAIN

    def _added(self) -> set[_Place]:
        known = set(map(_place, self._owners, self.names))
        found = ((owner, name) for owner in self._all for name in owner if self._is_compared(owner, name))
        return {_place(*each) for each in found} - known

    def are_as(self, values: list[Any]) -> bool:
        """Whether the values are these."""
        return _are_same(self.now(), values) and self._have_same_sizes()

    def changed_since(self, values: list[Any], num_changes: int) -> list[int]:
        """Return the numbers of values that differ from these, and that somebody else has changed since then."""
        changed = _changed(values, self.now())
        return [number for number in changed if self._changed_by_others.get(number, 0) > num_changes]

    def setting(self, number: int, value: Any) -> _Change:
        """Return what sets a value."""
        return partial(_put, self._owners[number], self.names[number], deepcopy(value))

    def removing(self) -> list[_Change]:
        """Return what takes away the attributes that somebody else has added."""
        places = self._added() - self._created
        found = ((owner, name) for owner in self._all for name in owner if _place(owner, name) in places)
        return [partial(_put, owner, name, _MISSING) for owner, name in found]


class _Note:
    """The state when the forward of a call ended.

    `before` are the `identities` when it began, and `values` the values of `attributes`.
    """

    __slots__ = (
        "_fingerprints",
        "_hook_numbers",
        "_hooks",
        "_ids",
        "_layout",
        "_num_changes",
        "_num_steps",
        "_requires_grad",
        "_sampled",
        "_samples",
        "_values",
        "_versions",
        "attributes",
    )

    def __init__(
        self,
        state: ModuleState,
        layout: _Layout,
        before: tuple[list[int], list[int]],
        attributes: _Attributes,
        values: list[Any],
    ) -> None:
        tensors = layout.tensors()
        self._layout = layout
        self._ids: list[int | None] = list(map(id, tensors))
        self._versions = versions_of(tensors)
        self._requires_grad = _all_require_grad(tensors)
        self.attributes = attributes
        self._values = attributes.after_forward(values)
        self._num_changes = attributes.num_changes
        self._hook_numbers, self._hooks = layout.hooks_copied()
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

    def compare(self, state: ModuleState) -> list[_Change]:
        """Return what restores the flags that have changed since.

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
        return self._changes(state, tensors)

    def _changes(self, state: ModuleState, tensors: Sequence[Any]) -> list[_Change]:
        """Return what restores the flags and hooks that have changed since."""
        layout = self._layout
        changes: list[_Change] = []
        if _all_require_grad(tensors) != self._requires_grad:
            changes += self._changes_of_requires_grad(tensors)
            if changes and layout.is_sharded:
                self._refuse_sharded(state)
        if self.attributes.are_written or not self.attributes.are_as(self._values):
            changes += self._changes_of_attributes(state)
        if layout.hooks_now() != self._hook_numbers:
            changes += self._changes_of_hooks()
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
                differ = tensor is None or fingerprints.have_other_values(
                    self._fingerprints[position], state.fingerprint_of(position, tensor, now)
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

    def _changes_of_requires_grad(self, tensors: Sequence[Any]) -> list[_Change]:
        return [
            partial(_set_requires_grad, tensor, was)
            for tensor, was in zip(tensors, self._requires_grad, strict=True)
            if tensor is not None and tensor.requires_grad is not was and tensor.is_leaf
        ]

    def _changes_of_hooks(self) -> list[_Change]:
        """Return what restores the hooks of the forward."""
        changes: list[_Change] = []
        (_, found), none = self._layout.hooks_copied(), [dict[int, Any]() for _ in _HOOKS]
        for position in sorted({*found, *self._hooks}):
            was, now = self._hooks.get(position, none), found.get(position, none)
            if _others(was) != _others(now):
                changes.append(partial(_set_hooks, self._layout.modules[position], was))
        return changes

    def _changes_of_attributes(self, state: ModuleState) -> list[_Change]:
        attributes = self.attributes
        # What another thread changes meanwhile, in a run of its own, is no change by others.
        attributes.before_recomputation(state.runs_elsewhere())
        found = attributes.changed_since(self._values, self._num_changes)
        changed = [n for n in found if self._values[n] is not _NOT_PLAIN]
        names = {attributes.names[number] for number in changed}
        if _MERGED in names:
            state.refuse("adapters were merged or unmerged", (), "Call backward before that.")
        if self._layout.is_sharded and not names.isdisjoint(_FLAGS):
            self._refuse_sharded(state)
        return [attributes.setting(number, self._values[number]) for number in changed] + attributes.removing()


_WRITTEN = "weights were written to"
_STEPPED = "Call backward before the optimizer steps, or run the forward again after its step."
_OTHER_BUFFERS = "buffers have got other values"
_BEFORE_THAT = "Call backward before that, or leave it out of the policy."


def _set_requires_grad(tensor: Tensor, value: bool) -> Callable[[], None]:
    """Set whether a tensor requires a gradient, and return a function that undoes it."""
    found = tensor.requires_grad
    tensor.requires_grad = value
    return partial(setattr, tensor, "requires_grad", found)


def _put(owner: dict[str, Any], name: str, value: Any) -> Callable[[], None]:
    """Set an attribute, or delete it for `_MISSING`, and return a function that undoes it."""
    found = owner.get(name, _MISSING)
    _assign(owner, name, value)
    return partial(_assign, owner, name, found)


def _assign(owner: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        owner.pop(name, None)
    else:
        owner[name] = value


def _set_hooks(module: nn.Module, was: Sequence[dict[int, Any]]) -> Callable[[], None]:
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
    return partial(_put_hooks_back, hooks, found)


def _put_hooks_back(hooks: Sequence[dict[int, Any]], found: Sequence[dict[int, Any]]) -> None:
    for place, before in zip(hooks, found, strict=True):
        place.clear()
        place.update(before)


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


def _changed(before: Sequence[Any], after: Sequence[Any]) -> list[int]:
    """Return the numbers of the values that differ."""
    pairs = enumerate(zip(before, after, strict=True))
    return [number for number, (was, now) in pairs if was is not now and not _are_same([was], [now])]


class _Sign(Enum):
    """Stands for a value; a copy is the same one."""

    MISSING = 0
    NOT_PLAIN = 1


_MISSING, _NOT_PLAIN = _Sign

_Place = tuple[int, str]

_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device})
_PLAIN: tuple[Any, ...] = (*_IMMUTABLE, torch.layout, torch.memory_format, Number, Enum, range)
_PLAIN += (FunctionType, BuiltinFunctionType, type)
_MAX_ITEMS = 1000
"""A longer container is no setting but a record, and would take long to compare."""
_HOLDERS = frozenset({nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Identity})
"""Exactly these modules read no attribute when they run."""
_OTHERS_NAMES = frozenset(vars(nn.Module())) - {"training"} | {
    # Of whoever checkpoints; the plan looks after that.
    "gradient_checkpointing",
    # Of FSDP1's state (2.13), and of transformers' loading (5.23).
    "training_state",
    "_is_hf_initialized",
    # Sizes of weights.
    "in_features",
    "out_features",
}
# This package's own, and what DeepSpeed counts on modules (0.19).
_OTHERS_PREFIXES = ("_hf_ckpt", "ds_", "applied_pre_backward")


def _place(owner: dict[str, Any], name: str) -> _Place:
    return id(owner), name


def _is_plain(value: Any, depth: int = 4) -> bool:
    if type(value) in _IMMUTABLE:
        return True
    if isinstance(value, dict) and depth and len(value) <= _MAX_ITEMS:
        return all(_is_plain(item, depth - 1) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | frozenset) and depth and len(value) <= _MAX_ITEMS:
        return all(_is_plain(item, depth - 1) for item in value)
    return isinstance(value, _PLAIN)


def _is_config(value: Any) -> bool:
    return isinstance(value, (PretrainedConfig, SimpleNamespace)) or (
        is_dataclass(value) and hasattr(value, "__dict__")
    )


def _are_same(one: list[Any], other: list[Any]) -> bool:
    """Whether values are equal; those that cannot be compared, as tensors where numbers were, are not."""
    try:
        return one == other
    except (RuntimeError, TypeError, ValueError):
        return False


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


def is_managed(module: nn.Module) -> bool:
    """Whether FSDP gathers the weights of a module; FSDP1 and FSDP2 both mark it so."""
    return "_is_fsdp_managed_module" in module.__dict__


def _is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate loads the weights of a module for each use."""
    hook = module.__dict__.get("_hf_hook")
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,)))
