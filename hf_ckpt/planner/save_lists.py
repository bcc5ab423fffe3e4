"""Between full and selective: which outputs to keep for how many bytes, against which recomputation.

Note [What if it were kept]. A step in mode full shows each operator of a layer twice: in forward, where its output is
let go, and in recomputation, where it is made again. Keeping an output adds its bytes from where forward lets it go to
where recomputation would make it, and takes the operator's time off; from there on everything is as it was. So the
cost of any list of outputs follows from that one step. Bytes and seconds of different outputs just add up: taking them
in the order of seconds saved for each byte kept gives the convex frontier, from full to all of them. What decides where
tokens go is kept in any case (`regions.selective`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch

from hf_ckpt.planner.chain import Cost
from hf_ckpt.planner.costs_from_tape import LayerKey, StepReading
from hf_ckpt.policy.plan import LayerPlan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.regions.selective.save_rules import ATTENTION_OUTPUT, OperatorRole, is_narrow
from hf_ckpt.simulation.op_costs import role_of_operator
from hf_ckpt.simulation.step_memory import Phase
from hf_ckpt.simulation.tape import Event, MemoryChange, Storage

_MOST_POINTS = 6
"""Lists of outputs that are offered for one kind of layer, between `full` and all of them."""

_ADAPTER = re.compile(r"(^|.*\.)(lora_[AB])\.[^.]+$")
"""Adapters are so small that they are kept together."""
_ROUTING = ""
_DENSE = ("aten.mm", "aten.addmm")


@dataclass
class Product:
    """What one name in `save` keeps in one layer."""

    name: str
    """A module below the layer, a glob of such, or an operator; empty for routing."""
    seconds: float = 0.0
    """Of its recomputation, in all micro-batches."""
    num_bytes: int = 0
    """That it keeps from forward on."""
    forward: list[tuple[int, int]] = field(default_factory=list)
    """For each output, bytes and the event of the forward that would let it go, counted from the start."""
    backward: list[tuple[int, int]] = field(default_factory=list)
    """For each output, bytes and the event of the backward that would make it, counted from the start."""

    @property
    def worth(self) -> float:
        """Seconds saved for each byte kept."""
        return self.seconds / max(1, self.num_bytes)


def save_list_options(full: StepReading, key: LayerKey) -> dict[LayerPlan, Cost]:
    """Return what a layer of the step in mode full costs with some products kept: convex, few bytes to many."""
    base = full.cost(key)
    products, routing = products_of(full, key)
    products.sort(key=lambda product: (-product.worth, product.name))
    points = {}
    # All of them together are mode selective, which is simulated.
    for count in _spread(products)[:-1]:
        taken = products[:count]
        option = LayerPlan(Mode.SELECTIVE, save=tuple(sorted(product.name for product in taken)))
        points[option] = kept_instead(full, key, base, [*taken, routing])
    return _convex(base, points)


def _convex(base: Cost, points: dict[LayerPlan, Cost]) -> dict[LayerPlan, Cost]:
    """Leave out points that lie above a line between others, or that keep more and are no faster."""
    hull: list[tuple[LayerPlan | None, Cost]] = [(None, base)]
    for option, cost in points.items():
        while len(hull) > 1 and _slope(hull[-2][1], hull[-1][1]) >= _slope(hull[-1][1], cost):
            hull.pop()
        if cost.seconds < hull[-1][1].seconds and cost.kept_bytes > hull[-1][1].kept_bytes:
            hull.append((option, cost))
    return {option: cost for option, cost in hull if option is not None}


def _slope(one: Cost, other: Cost) -> float:
    return (other.seconds - one.seconds) / max(1, other.kept_bytes - one.kept_bytes)


def kept_instead(full: StepReading, key: LayerKey, base: Cost, products: list[Product]) -> Cost:
    """Return what a layer, which costs `base` in mode full, would cost if it kept some of `products_of`.

    See Note [What if it were kept].
    """
    forward, backward = (full.levels[full.span(region, key)] for region in (Phase.FORWARD, Phase.BACKWARD))
    added_forward, added_backward = np.zeros_like(forward), np.zeros_like(backward)
    for product in products:
        for num_bytes, freed in product.forward:
            added_forward[freed:] += num_bytes
        for num_bytes, made in product.backward:
            added_backward[:made] += num_bytes
    return replace(
        base,
        kept_bytes=base.kept_bytes + int(added_forward[-1]),
        forward_bytes=base.forward_bytes + int((forward + added_forward).max() - forward.max()),
        backward_bytes=base.backward_bytes + int((backward + added_backward).max() - backward.max()),
        seconds=base.seconds - sum(product.seconds for product in products),
    )


def products_of(full: StepReading, key: LayerKey) -> tuple[list[Product], Product]:
    """Return what a layer in mode full could keep of what it runs again, and what it keeps in any case.

    The first are outputs of matrix products and attention, by the names that keep them; the second those that decide
    where tokens go.
    """
    again = list(_outputs(full, Phase.BACKWARD, key))
    leaves = _leaves({output.module for output in again if output.role is not OperatorRole.ROUTING})
    found: dict[str, Product] = {}
    for output in again:
        name = _name_of(output, leaves)
        product = found.setdefault(name, Product(name))
        product.seconds += output.seconds
        product.backward.extend(output.made)
    for output in _outputs(full, Phase.FORWARD, key):
        name = _name_of(output, leaves)
        if name in found:
            found[name].forward.extend(output.freed)
            found[name].num_bytes += sum(num_bytes for num_bytes, _ in output.freed)
    routing = found.pop(_ROUTING, Product(_ROUTING))
    return [product for product in found.values() if product.num_bytes], routing


def _spread(products: list[Product]) -> list[int]:
    """Return after how many products, in their order, to offer a point: at most so many, evenly over the bytes."""
    sums = list(accumulate(product.num_bytes for product in products))
    if len(sums) <= _MOST_POINTS:
        return list(range(1, len(sums) + 1))
    places = {int(np.searchsorted(sums, sums[-1] * part / _MOST_POINTS)) + 1 for part in range(1, _MOST_POINTS + 1)}
    return sorted({1, *places})


# --- What runs in a layer. ---


@dataclass(frozen=True, slots=True)
class _Output:
    """What one operator of a layer returned."""

    module: str
    """Path below the layer."""
    operator: str
    """Such as `aten.mm`."""
    role: OperatorRole
    seconds: float
    """In all micro-batches."""
    made: tuple[tuple[int, int], ...]
    """Bytes of each output, and the event that makes it."""
    freed: tuple[tuple[int, int], ...]
    """Bytes of each output, and the event that lets it go, where that is before the layer is done."""


def _outputs(reading: StepReading, region: Phase, key: LayerKey) -> Iterator[_Output]:
    """Yield what runs in the forward of a layer, or what its backward runs again, as far as it can be kept."""
    phase = Phase.FORWARD if region is Phase.FORWARD else Phase.RECOMPUTATION
    events = reading.events[reading.span(region, key)]
    freed = {id(event.storage): at for at, event in enumerate(events) if event.change is MemoryChange.FREE}
    for at, event in enumerate(events):
        place = event.place
        if not event.seconds or place.phase is not phase or place.layer_idx is None:
            continue
        role = role_of_operator(place.operator)
        made = [] if role is OperatorRole.CHEAP else list(_made_by(events, at))
        if not made or _is_narrow(event, events[made[0]].storage):
            continue
        sizes = [(number, events[number].storage) for number in made]
        yield _Output(
            place.module.removeprefix(f"{place.stack}.{place.layer_idx}").lstrip("."),
            place.operator.rpartition(".")[0],
            role,
            event.seconds * reading.num_micro_batches,
            tuple((storage.num_bytes, number) for number, storage in sizes if storage is not None),
            tuple((storage.num_bytes, freed[id(storage)]) for _, storage in sizes if storage and id(storage) in freed),
        )


def _made_by(events: list[Event], at: int) -> Iterator[int]:
    """Yield the events with which the operator of an event makes its outputs."""
    for number in range(at + 1, len(events)):
        event = events[number]
        if event.place.operator != events[at].place.operator or event.change is not MemoryChange.ALLOCATE:
            return
        yield number


def _is_narrow(event: Event, storage: Storage | None) -> bool:
    """Whether a product is over too few terms to be kept for the module that it runs in."""
    packet = event.place.operator.rpartition(".")[0]
    if storage is None or len(storage.shape) != 2 or packet not in _DENSE:
        return False
    inner = event.num_flops // (2 * math.prod(storage.shape))
    return _is_narrow_product(packet, inner, storage.shape[1])


@lru_cache(maxsize=1024)
def _is_narrow_product(packet: str, inner: int, outer: int) -> bool:
    weight = torch.empty(inner, outer, device="meta")
    return is_narrow(packet, (None, weight) if packet == "aten.mm" else (None, None, weight))


def _leaves(modules: set[str]) -> set[str]:
    return {module for module in modules if module and not any(other.startswith(f"{module}.") for other in modules)}


def _name_of(output: _Output, leaves: set[str]) -> str:
    """Return the name that keeps an output: of its module, if no module below that has products of its own."""
    if output.role is OperatorRole.ROUTING:
        return _ROUTING
    if output.module not in leaves:
        # Another batch of the same run may dispatch another kernel than the one that was simulated.
        return ATTENTION_OUTPUT if output.role is OperatorRole.ATTENTION else output.operator
    adapter = _ADAPTER.match(output.module)
    return output.module if adapter is None else f"*.{adapter[2]}.*"
