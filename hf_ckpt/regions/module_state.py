"""The state of the modules that a region runs: weights, buffers, training flags, active adapters.

It is noted when a region's forward ends, and compared before each recomputation, which would otherwise use another
state without a word. Flags are restored to what the forward found, for the recomputation alone; any other change
raises an error.

Cheap enough for every step: modules are walked when one comes or goes; otherwise only attributes are read, and a few
values of some trainable weights. Those values reveal optimizers that write past the versions of tensors (fused ones,
8-bit ones, those of engines that shard).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NoReturn

from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions import fingerprints
from hf_ckpt.regions.fingerprints import Fingerprint, Samples
from hf_ckpt.regions.pending_errors import PendingErrors

STATE = "_hf_ckpt_module_state"
"""Attribute of a module whose forward is a region."""

Values = Callable[[], Tensor]
"""Returns the shard that an engine keeps of weights that it gathers for each use."""

# Of peft's layers; `scaling` is an attribute of many attention modules too.
_FLAGS = ("_active_adapter", "_disable_adapters", "scaling")
_MERGED = "merged_adapters"
_MAIN_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS = (*_MAIN_HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_MAX_NAMES = 4
_NUM_SAMPLED = 9
"""As many weights as a layer of Llama has, so that a full fine-tune samples all of them."""
_NUM_SHARDS = 4

_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")
_training = itemgetter("training")


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
        return self._layout

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the region run in this thread; refused while another thread has changed its flags."""
        me = threading.get_ident()
        with self._lock:
            if self._changed_by not in (None, me):
                self._refuse_thread()
            self._inside[me] = self._inside.get(me, 0) + 1
        try:
            yield
        finally:
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

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Run the call in the block: the first time as things are, later as they were when that run ended.

        Raises `UnsupportedError` if something changed that cannot be restored.
        """
        state = self._state
        if state is None:
            yield
            return
        with state.running():
            if self._note is None:
                layout = state.layout(self._module)
                before = layout.identities()
                yield
                # At the end, as the region's own writes (running statistics, counters) are no change by others.
                self._note = _Note(state, layout, before)
            elif changes := self._note.compare(state):
                with state.set_for_this_thread(changes):
                    yield
            else:
                yield


class _Layout:
    """The modules below a region, and where in them tensors and flags are."""

    def __init__(self, root: nn.Module, shards: Sequence[Values]) -> None:
        self.modules = list(root.modules())
        self.attributes = list(map(vars, self.modules))
        self._lists = [module._modules for module in self.modules if module._modules]
        self._children = self._children_now()
        self.is_sharded = _is_managed(root)
        self.shards = list(shards)
        self._places: list[tuple[dict[str, Any], str]] = []
        self.names: list[str] = []
        self._num_parameters = 0
        self._find_tensors(root)
        # Hooks may change what a forward computes; engines and users place and remove them.
        self._hooks = list(chain.from_iterable(map(attrgetter(*_MAIN_HOOKS), self.modules)))
        self._copied_hooks: tuple[list[int], _Hooks] = [], {}
        self._copied_flags: list[tuple[nn.Module, str, Any]] = []
        self._flags = [
            (module, name)
            for module in self.modules
            for name in (*_FLAGS, _MERGED)
            if getattr(type(module), name, None) is not None or name in vars(module)
        ]

    def _find_tensors(self, root: nn.Module) -> None:
        paths = dict(zip(self.modules, (path for path, _ in root.named_modules()), strict=True))
        for module in self.modules:
            # Engines that shard, and accelerate's offload, put other tensors into the module for each use.
            is_replaced = self.is_sharded or _is_managed(module) or _is_offloaded(module)
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
        return self.modules[0] is root and self.has_same_children() and (self.is_sharded or not _is_managed(root))

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

    def trainable(self, requires_grad: Sequence[bool]) -> list[int]:
        """Return the positions of trainable parameters, or of some that are spread over them."""
        found = [position for position in range(self._num_parameters) if requires_grad[position]]
        if len(found) <= _NUM_SAMPLED:
            return found
        return [found[(len(found) - 1) * number // (_NUM_SAMPLED - 1)] for number in range(_NUM_SAMPLED)]

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

    def flags_now(self) -> list[Any]:
        """Return the values of the flags."""
        return [getattr(module, name) for module, name in self._flags]

    def flags_copied(self) -> list[tuple[nn.Module, str, Any]]:
        """Return the flags with their places; copied again only if one has changed."""
        now = self.flags_now()
        if now != [value for _, _, value in self._copied_flags]:
            copies = map(_copied, now)
            self._copied_flags = [(*place, value) for place, value in zip(self._flags, copies, strict=True)]
        return self._copied_flags


class _Note:
    """The state when the forward of a call ended; `before` are the `identities` when it began."""

    __slots__ = (
        "_fingerprints",
        "_flags",
        "_hook_numbers",
        "_hooks",
        "_ids",
        "_layout",
        "_num_steps",
        "_requires_grad",
        "_sampled",
        "_samples",
        "_training",
        "_versions",
    )

    def __init__(self, state: ModuleState, layout: _Layout, before: tuple[list[int], list[int]]) -> None:
        tensors = layout.tensors()
        self._layout = layout
        self._ids: list[int | None] = list(map(id, tensors))
        self._versions = versions_of(tensors)
        self._requires_grad = _all_require_grad(tensors)
        self._training = list(map(_training, layout.attributes))
        self._flags = layout.flags_copied()
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
        if list(map(_training, layout.attributes)) != self._training:
            pairs = zip(layout.modules, self._training, strict=True)
            changes += [partial(_set, module, "training", was) for module, was in pairs if module.training is not was]
        if layout.flags_now() != [value for _, _, value in self._flags]:
            changes += self._changes_of_flags(state)
        if changes and layout.is_sharded:
            state.refuse(
                "training flags, adapters or requires_grad were changed",
                (),
                "Under FSDP and ZeRO they are not brought back for a recomputation: call backward before they change.",
            )
        if layout.hooks_now() != self._hook_numbers:
            changes += self._changes_of_hooks()
        return changes

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
            partial(_set, tensor, "requires_grad", was)
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

    def _changes_of_flags(self, state: ModuleState) -> list[_Change]:
        changes: list[_Change] = []
        for module, name, was in self._flags:
            if getattr(module, name) == was:
                continue
            if name == _MERGED:
                state.refuse("adapters were merged or unmerged", (), "Call backward before that.")
            changes.append(partial(_set, module, name, was))
        return changes


_WRITTEN = "weights were written to"
_STEPPED = "Call backward before the optimizer steps, or run the forward again after its step."
_OTHER_BUFFERS = "buffers have got other values"
_BEFORE_THAT = "Call backward before that, or leave it out of the policy."


def _set(owner: nn.Module | Tensor, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute, and return a function that undoes it."""
    found = vars(owner).get(name, _MISSING) if isinstance(owner, nn.Module) else getattr(owner, name)
    setattr(owner, name, value)
    return partial(delattr, owner, name) if found is _MISSING else partial(setattr, owner, name, found)


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


_MISSING = object()


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


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list) else value


def _is_managed(module: nn.Module) -> bool:
    """Whether FSDP gathers the weights of a module; FSDP1 and FSDP2 both mark it so."""
    return "_is_fsdp_managed_module" in module.__dict__


def _is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate loads the weights of a module for each use."""
    hook = module.__dict__.get("_hf_hook")
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,)))
