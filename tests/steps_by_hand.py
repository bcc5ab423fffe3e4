"""Steps made by hand, with the shape of real ones: activations rise in forward, and fall in backward."""

from __future__ import annotations

from hf_ckpt.simulation.step_memory import Category, HeldTensor, Phase, Place, StepMemory, StepTime, Timeline

GIB = 2**30
MIB = 2**20
NUM_LAYERS = 4


def step(
    saved_gib: float = 1.0, recomputed_gib: float = 0.0, *, states_gib: float = 4.0, seconds: float = 2.0
) -> StepMemory:
    """A step of four layers.

    Args:
        saved_gib: held by each layer.
        recomputed_gib: brought back in the backward of each layer.
        states_gib: of the parameters.
        seconds: of the whole step.
    """
    places, columns = [], {category: [] for category in _USED}  # type: ignore[var-annotated]
    held = 0.0

    def tell(place: Place, **more: float) -> None:
        places.append(place)
        values = {"parameters": states_gib, "saved": held, **more}
        for category in _USED:
            columns[category].append(int(values.get(category.name.lower(), 0.0) * GIB))

    for layer_idx in range(NUM_LAYERS):
        held += saved_gib
        tell(Place(Phase.FORWARD, stack="model.layers", layer_idx=layer_idx, part="ffn"))
    tell(Place(Phase.FORWARD, operator="aten._log_softmax.default"), loss=0.5)
    for layer_idx in reversed(range(NUM_LAYERS)):
        if recomputed_gib:
            tell(Place(Phase.RECOMPUTATION, stack="model.layers", layer_idx=layer_idx), recomputed=recomputed_gib)
        tell(Place(Phase.BACKWARD, stack="model.layers", layer_idx=layer_idx, part="ffn"), recomputed=recomputed_gib)
        held -= saved_gib
    tell(Place(Phase.OPTIMIZER))
    return _told(places, {category: tuple(column) for category, column in columns.items()}, seconds)


_USED = (Category.PARAMETERS, Category.SAVED, Category.RECOMPUTED, Category.LOSS)


def _told(places: list[Place], columns: dict[Category, tuple[int, ...]], seconds: float) -> StepMemory:
    times = tuple(seconds * (index + 1) / len(places) for index in range(len(places)))
    timeline = Timeline(tuple(places), columns, times)
    totals = timeline.total_bytes()
    peak = max(range(len(totals)), key=totals.__getitem__)
    return StepMemory(
        device="rtx4090",
        plan=None,
        tokens=4096,
        peak_bytes=totals[peak],
        peak_at=places[peak],
        by_category={category: column[peak] for category, column in columns.items() if column[peak]},
        timeline=timeline,
        time=StepTime(forward=seconds / 3, backward=2 * seconds / 3),
        num_flops={Phase.FORWARD: 10, Phase.BACKWARD: 20},
    )


def held(
    layer_idx: int | None, module: str, operator: str, mib: float, *, part: str = "ffn", why: str = ""
) -> HeldTensor:
    """A tensor that a layer of `model.layers` holds for its backward."""
    path = module if layer_idx is None else f"model.layers.{layer_idx}.{module}".rstrip(".")
    stack = "" if layer_idx is None else "model.layers"
    place = Place(Phase.FORWARD, 0, stack, layer_idx, "" if layer_idx is None else part, path, operator)
    return HeldTensor(place, int(mib * MIB), (1, 8, 4), "bfloat16", why)
