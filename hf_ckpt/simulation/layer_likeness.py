"""Which layers of a model are alike: equal in everything that a copy of them can see.

Two layers are compared attribute by attribute, through hooks, functions, containers and objects. Their `layer_idx` may
differ, and names of theirs: what a layer makes of these is noted while it runs on a copy, and asked again for the
layers like it.
"""

from __future__ import annotations

import functools
import operator
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.structure.layers import Layer, Stack

_INDEX = "layer_idx"
_RECENT = 8  # Kinds of layers, the last ones, that a layer is compared with: each comparison takes time.


def number_kinds(stacks: Sequence[Stack], apart: set[nn.Module]) -> dict[nn.Module, Hashable]:
    """Return, by layer as it stands in its list, a number that is equal for layers that are alike.

    `apart`: layers that are like no other.
    """
    numbers: dict[nn.Module, Hashable] = {}
    for stack in stacks:
        kinds: dict[int, Layer] = {}
        for layer in stack.layers:
            recent = () if layer.outer in apart else list(kinds.items())[: -_RECENT - 1 : -1]
            number = next((number for number, other in recent if _are_alike_layers(layer, other)), len(numbers))
            numbers[layer.outer] = number
            if layer.outer not in apart:
                kinds[number] = kinds.pop(number, layer)
    return numbers


def _are_alike_layers(layer: Layer, other: Layer) -> bool:
    is_same_kind = (layer.layer_type, layer.needs_gradient) == (other.layer_type, other.needs_gradient)
    return is_same_kind and _Comparison(_number(layer), _number(other)).run(layer.module, other.module)


def _number(layer: Layer) -> str:
    """Return what tells the names of modules of a layer, as PEFT keeps them, from those of another."""
    return f".{layer.layer_idx}."


Place = tuple[str, ...]
"""The name of an attribute of a module, and a key where that is a dictionary."""


def places_of_numbers(layer: Layer, module: nn.Module) -> Iterator[tuple[dict[Any, Any], str, Place]]:
    """Yield where a module in a layer holds the layer's index or its name: the dictionary, the key, and the place."""
    own, number = vars(module), _number(layer)
    for name, value in own.items():
        if (name == _INDEX and type(value) is int) or (type(value) is str and number in value):
            yield own, name, (name,)
        elif type(value) is dict:
            yield from (
                (value, key, (name, key)) for key, each in value.items() if type(each) is str and number in each
            )


def number_at(module: nn.Module, place: Place) -> Any:
    """Return what is at such a place of another module."""
    found: Any = vars(module)
    for key in place:
        found = found[key]
    return found


# --- Two layers, side by side. ---

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Which of the hooks are called in another way, by the number of each.
_OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
# No step runs these.
_UNSEEN = frozenset(
    "_state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks _load_state_dict_post_hooks".split()
)
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__"})


class _Comparison:
    """Compares what two things hold, pair by pair: a pair that comes again, as in a circle, is alike if the rest is."""

    def __init__(self, number: str, others_number: str) -> None:
        self._numbers = number, others_number
        self._pending: list[tuple[Any, Any]] = []
        self._seen: set[tuple[int, int]] = set()
        # Of modules and tensors: what stands twice in one layer has to stand twice in the other.
        self._partners: dict[int, int] = {}
        # Made on the way: their addresses must not be given to others.
        self._kept: list[Any] = []

    def run(self, one: Any, other: Any) -> bool:
        """Return whether they are alike."""
        self._pending.append((one, other))
        while self._pending:
            one, other = self._pending.pop()
            if one is not other and (id(one), id(other)) not in self._seen:
                self._seen.add((id(one), id(other)))
                self._kept.append((one, other))
                if not self._are_alike(one, other):
                    return False
        return True

    def _hold(self, one: Sequence[Any], other: Sequence[Any]) -> bool:
        self._pending.extend(zip(one, other, strict=False))
        return len(one) == len(other)

    def _are_alike(self, one: Any, other: Any) -> bool:
        """Whether two things are alike but for what they hold, which is left to be compared."""
        if isinstance(one, nn.Module) and isinstance(other, nn.Module):
            return self._are_partners(one, other) and self._modules(one, other)
        if type(one) is not type(other):
            return False
        if isinstance(one, Tensor) and not (self._are_partners(one, other) and _look(one) == _look(other)):
            return False
        if isinstance(one, _VALUES):
            return bool(one == other)
        parts = next((parts for kinds, parts in _PARTS if isinstance(one, kinds)), _held)
        return self._hold(parts(one), parts(other))

    def _are_partners(self, one: Any, other: Any) -> bool:
        for mine, theirs in ((one, other), (other, one)):
            if self._partners.setdefault(id(mine), id(theirs)) != id(theirs):
                return False
        return True

    def _modules(self, one: nn.Module, other: nn.Module) -> bool:
        mine, theirs = vars(one), vars(other)
        if mine.keys() != theirs.keys():
            return False
        self._pending.append((type(one), type(other)))
        for name, value in mine.items():
            its = theirs[name]
            if value is its or name in _UNSEEN or name in _OF_HOOKS or (not value and value == its):
                continue
            if (name == _INDEX and type(value) is type(its) is int) or self._are_names(value, its):
                continue
            if type(value) is type(its) is dict and value.keys() == its.keys():
                self._pending.extend(
                    (value[key], its[key]) for key in value if not self._are_names(value[key], its[key])
                )
                continue
            if name in _HOOKS:
                if _hooks(mine, name) != _hooks(theirs, name):
                    return False
                value, its = list(value.values()), list(its.values())
            self._pending.append((value, its))
        return True

    def _are_names(self, one: Any, other: Any) -> bool:
        return type(one) is type(other) is str and one.replace(*self._numbers) == other


def _look(tensor: Tensor) -> tuple[object, ...]:
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad


def _hooks(attributes: dict[str, Any], name: str) -> list[list[bool]]:
    flags = [attributes[each] for each in _OF_HOOKS if each.startswith(name)]
    return [[key in each for each in flags] for key in attributes[name]]


def _of_function(function: types.FunctionType) -> list[Any]:
    parts = [function.__code__, function.__defaults__, function.__kwdefaults__, id(function.__globals__)]
    return [*parts, vars(function), *map(_contents, function.__closure__ or ())]


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _of_class(kind: type) -> list[Any]:
    held = {name: each for name, each in vars(kind).items() if name not in _OF_CLASSES}
    return [kind.__qualname__, kind.__bases__, held]


def _held(thing: Any) -> list[Any]:
    """Return what an object holds in attributes; itself where it shows nothing."""
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind)]
    attributes = getattr(thing, "__dict__", None)
    if attributes is None and not slots:
        return [id(thing)]
    return [attributes, *(getattr(thing, name, None) for name in slots)]


def _slots(kind: type) -> Sequence[str]:
    found: Any = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return [name for name in names if not name.startswith("__")]


_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, types.CodeType)
_VALUES = (*_ATOMS, set, frozenset)
# Of kinds of things: what they hold.
_PARTS: tuple[tuple[Any, Callable[[Any], Sequence[Any]]], ...] = (
    ((list, tuple, deque), list),
    (dict, lambda held: [*held, *held.values()]),
    (types.FunctionType, _of_function),
    (types.MethodType, lambda method: [method.__func__, method.__self__]),
    (functools.partial, lambda made: [made.func, made.args, made.keywords]),
    (weakref.ref, lambda reference: [reference()]),
    (property, lambda each: [each.fget, each.fset]),
    ((staticmethod, classmethod), lambda each: [each.__func__]),
    (type, _of_class),
    (np.ndarray, lambda array: [str(array.dtype), array.shape, array.tobytes()]),
    (random.Random, lambda generator: [generator.getstate()]),
    # A number of its own each; and no step of a copy has random values.
    ((RemovableHandle, torch.Generator), lambda _: []),
)


# --- What is made of an index. ---

Answer = tuple[Callable[[Any], object], object]
"""What was asked of an index, and what it said."""


def says_otherwise(index: Any, answers: Sequence[Answer]) -> bool:
    """Whether an index, or a name, says something else than another one has."""
    try:
        return any(question(index) != said for question, said in answers)
    # What it cannot be asked, such as to divide by 0.
    except ArithmeticError:
        return True


_BINARY = {name: getattr(operator, f"__{name}__") for name in "add sub mul floordiv mod truediv pow and or xor".split()}
_UNARY = {name: getattr(operator, f"__{name}__") for name in "neg pos abs invert".split()}
_COMPARED = "eq ne lt le gt ge".split()
_QUESTIONS: tuple[Callable[..., object], ...] = (bool, hash, int, float, complex, str, repr, format, round, divmod, len)
_READ = {question.__name__: question for question in (*_QUESTIONS, operator.index, operator.contains, operator.getitem)}


class NotedIndex:
    """What stands in the place of a module's `layer_idx`, or of its name, and notes what is asked of it.

    No `int`: a list or a `range` would read that unseen. What takes nothing else raises, and all layers are traced.
    """

    def __init__(self, value: Any, answers: list[Answer], made: Callable[[Any], Any] = lambda value: value) -> None:
        self._value = value
        self._answers = answers
        self._made = made

    @property  # type: ignore[misc]  # of `object` it can be written
    def __class__(self) -> type:
        """For `isinstance`."""
        return type(self._value)

    def __deepcopy__(self, memo: dict[int, Any]) -> NotedIndex:
        return self

    def _computed(self, operation: Callable[..., Any], *others: Any) -> Any:
        if any(isinstance(each, Tensor) for each in others):
            # A factor: its size does not matter to the memory.
            return operation(self._value, *others)
        made = self._made
        found = operation(self._value, *others)
        if type(found) in (int, float):
            return NotedIndex(found, self._answers, lambda index: operation(made(index), *others))
        return self._asked(operation, *others)

    def _asked(self, question: Callable[..., Any], *others: Any) -> Any:
        made, found = self._made, question(self._value, *others)
        self._answers.append((lambda index: question(made(index), *others), found))
        return found

    def __getattr__(self, name: str) -> Any:
        return self._asked(lambda value: getattr(value, name))


def _swapped(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, other: operation(other, value)


def _add_methods() -> None:
    for name, operation in {**_BINARY, **_UNARY}.items():
        setattr(NotedIndex, f"__{name}__", functools.partialmethod(NotedIndex._computed, operation))
    for name, operation in _BINARY.items():
        setattr(NotedIndex, f"__r{name}__", functools.partialmethod(NotedIndex._computed, _swapped(operation)))
    for name in _COMPARED:
        setattr(NotedIndex, f"__{name}__", functools.partialmethod(NotedIndex._asked, getattr(operator, name)))
    for name, question in _READ.items():
        setattr(NotedIndex, f"__{name}__", functools.partialmethod(NotedIndex._asked, question))


_add_methods()
