"""Which layers send away what they save, and in which order it is brought back.

Counts and weak references only: knows neither tensors nor links.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


def is_offloaded(position: int, num_layers: int, fraction: float | None) -> bool:
    """Whether the layer at this position sends away what it saves.

    The layers that do are spread evenly, beginning with the first, so that each copy has as much time as the others
    and the last layers stay where their backward needs them first.

    Args:
        position: 0 to `num_layers - 1`, in the order in which the layers run.
        num_layers: how many layers could.
        fraction: share of them that do; None for all.
    """
    count = num_offloaded(num_layers, fraction)
    return _before(position + 1, count, num_layers) > _before(position, count, num_layers)


def num_offloaded(num_layers: int, fraction: float | None) -> int:
    """Return how many layers send away what they save: at least one, unless the fraction is 0.

    Args:
        num_layers: how many layers could.
        fraction: share of them that do; None for all.
    """
    if fraction is None or fraction >= 1 or not num_layers:
        return num_layers
    return 0 if fraction <= 0 else max(1, int(num_layers * fraction + 0.5))


def _before(position: int, count: int, num_layers: int) -> int:
    """Return how many of `count` evenly spread layers come before a position, rounded up."""
    return -(-position * count // num_layers) if num_layers else 0


class Group(Generic[T]):
    """What one call of a region sent away, in that order. Lives as long as one of its items is needed.

    Args:
        number: counts the calls that sent something away.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._items: list[weakref.ref[T]] = []

    def add(self, item: T) -> None:
        """Take in what was just sent away."""
        self._items.append(weakref.ref(item))

    def items(self) -> list[T]:
        """Return the items that are still needed."""
        return [item for item in (reference() for reference in self._items) if item is not None]

    def after(self, item: T) -> list[T]:
        """Return the items that are still needed and come behind this one."""
        items = self.items()
        return items[next((number + 1 for number, other in enumerate(items) if other is item), 0) :]


class Order(Generic[T]):
    """The groups of one device that are still needed, in the order of the forward. Backward runs the other way.

    Attributes:
        num_groups: groups begun so far; the number of the next one.
    """

    def __init__(self) -> None:
        self.num_groups = 0
        self._groups: list[weakref.ref[Group[T]]] = []
        self._ahead: list[weakref.ref[T]] = []

    def new_group(self) -> Group[T]:
        """Begin a group, behind all others."""
        self._groups = [reference for reference in self._groups if reference() is not None]
        group = Group[T](self.num_groups)
        self.num_groups += 1
        self._groups.append(weakref.ref(group))
        return group

    def next_items(self, item: T, group: Group[T], num_ahead: int) -> list[T]:
        """Return what backward asks for next, in that order.

        A region asks for what it saved in the order of its forward; the regions follow each other the other way.

        Args:
            item: what it asks for now.
            group: the group of that.
            num_ahead: how many groups further to go.
        """
        return group.after(item) + self.last_items(group.number, num_ahead)

    def last_items(self, number: int, num_groups: int) -> list[T]:
        """Return the items of the last groups before a number, in the order in which backward asks for them."""
        return [item for group in itertools.islice(self._before(number), num_groups) for item in group.items()]

    def look_ahead(self, received: T | None, wanted: list[T]) -> tuple[list[T], list[T]]:
        """Take note of what is to be on its way from now on, and return what has to be let go and what to be started.

        Args:
            received: what was on its way and has been asked for.
            wanted: what backward asks for next.
        """
        alive = (reference() for reference in self._ahead)
        started = [item for item in alive if item is not None and item is not received]
        self._ahead = [weakref.ref(item) for item in wanted]
        return [item for item in started if item not in wanted], [item for item in wanted if item not in started]

    def _before(self, number: int) -> Iterator[Group[T]]:
        for reference in reversed(self._groups):
            group = reference()
            if group is not None and group.number < number and group.items():
                yield group
