"""The devices that a recipe is estimated for."""

from __future__ import annotations

from collections.abc import Sequence

from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.devices import CPU, Device, find_device, this_device

_USUAL = ("rtx4090", "a6000", "a100-80gb")
"""One card each with 24, 48 and 80 GB, for where no device was named and there is none."""

_LARGER = ("h200", "b200")


def devices_for(recipe: Recipe | None, names: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices to estimate for.

    Args:
        recipe: the recipe; one that trains on the CPU is estimated for it.
        names: of devices, as the user wrote them; where there are none, this machine's GPU, else one card of each
            usual size.

    Raises:
        PolicyError: a name is not known.
    """
    if names:
        return tuple(find_device(name) for name in names)
    if recipe is not None and recipe.training.get("use_cpu"):
        return (CPU,)
    own = this_device()
    return (own,) if own.is_cuda else tuple(find_device(name) for name in _USUAL)


def usual_device_with(num_bytes: int) -> Device:
    """Return the smallest card of a few usual ones that has so much memory, or the largest of them."""
    cards = [find_device(name) for name in (*_USUAL, *_LARGER)]
    return next((card for card in cards if card.memory_bytes >= num_bytes), cards[-1])
