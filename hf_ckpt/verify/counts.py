"""Forwards that were counted, held against the policy: what ran again in backward, and what did not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hf_ckpt.policy.policy import Mode
from hf_ckpt.verify.check import Check
from hf_ckpt.verify.record import Record, WatchedLayer
from hf_ckpt.verify.words import listed, numbered

FORWARDS = "forward counts"
IN_FORCE = "plan in force"


def check_counts(reference: Record, planned: Record) -> Check:
    """Hold the forwards of a planned trial, and those of one without a plan, against the policy."""
    others = [path for (path, in_backward), count in reference.entries.items() if in_backward and count]
    if others:
        return Check(
            name=FORWARDS,
            verdict="fail",
            detail=f"Without the plan, {_modules(others)} ran again in backward all the same: something else than the "
            "plan checkpoints the model. Turn it off.",
        )
    if planned.expected_plan != planned.plan:
        return Check(name=FORWARDS, verdict="fail", detail="The plan in force was not the one that the policy means.")
    if planned.failure is not None:
        return Check(name=FORWARDS, verdict="skip", detail="The run ended in the middle of a step.")
    faults = list(_faults(planned))
    if faults:
        return Check(name=FORWARDS, verdict="fail", detail=" ".join(faults))
    return Check(name=FORWARDS, verdict="pass", detail=_as_planned(planned), figures=_figures(planned))


def check_in_force(planned: Record) -> Check:
    """See that what the plan put onto layers and parts stood there in every forward."""
    if planned.replaced:
        path, what = next(iter(planned.replaced.items()))
        return Check(
            name=IN_FORCE,
            verdict="fail",
            detail=f"The plan was overwritten by another library or script on {_modules(list(planned.replaced))}: on "
            f"{path} {what}. Call whatever does this before training, or not at all.",
        )
    faults = " ".join(planned.callback_faults)
    if faults:
        return Check(name=IN_FORCE, verdict="fail", detail=f"The run itself would stop in its first step: {faults}")
    return Check(name=IN_FORCE, verdict="pass", detail="In every forward the plan was on its layers as it was applied.")


def _faults(planned: Record) -> Iterator[str]:
    idle: list[WatchedLayer] = []
    again: list[str] = []
    wrong: list[str] = []
    for layer in planned.layers:
        for root, excluded in _regions(layer):
            if (count := _count(planned, layer, root, excluded)) is None:
                continue
            forward, backward, expected = count
            if not backward:
                idle.append(layer)
            elif backward not in expected:
                wrong.append(f"{root} ran {forward} times, and {backward} times again in backward")
        again += _ran_again(planned, layer)
    # The chunked head runs again, and what is below it.
    layers = (*(layer.path for layer in planned.layers), *([planned.head] if planned.head else []))
    again += [path for (path, b), count in planned.entries.items() if b and count and not _is_below(path, layers)]
    if planned.head and not any(b and _is_below(path, (planned.head,)) for path, b in planned.entries):
        yield f"The plan did nothing on the head: nothing of {planned.head} ran again in backward."
    if idle:
        modes = listed(sorted({f'"{layer.entry.mode}"' for layer in idle}))
        which = _layers(planned, idle)
        yield (
            f"The plan did nothing on {which}: planned {modes}, but nothing ran again in backward. Its checkpoint "
            "function was replaced or switched off after the plan was applied."
        )
    if again:
        yield (
            f"{_modules(again)} ran again in backward although the plan keeps the activations there: activation "
            "checkpointing of another library or script is on beside the plan. Turn it off."
        )
    if wrong:
        yield f"Counts are not those of the plan: {wrong[0]}{f', and {len(wrong) - 1} more' * (len(wrong) > 1)}."


def _regions(layer: WatchedLayer) -> list[tuple[str, tuple[str, ...]]]:
    """Return the paths of what should run again, each with the paths inside it that should not."""
    if layer.recomputes_itself:
        return []
    return [*_regions_of_mode(layer), *((path, ()) for path in layer.tiled)]


def _regions_of_mode(layer: WatchedLayer) -> list[tuple[str, tuple[str, ...]]]:
    match layer.entry.mode:
        case Mode.FULL | Mode.SELECTIVE | Mode.SELECTIVE_ATTENTION:
            return [(layer.path, ())]
        case Mode.ATTENTION:
            return [(path, ()) for path in layer.attention]
        case Mode.FFN if layer.ffn:
            # What runs in tiles is recomputed in them.
            return [(path, ()) for path in layer.ffn if path not in layer.tiled]
        case Mode.FFN:
            return [(layer.path, layer.attention)]
        case _:
            return []


def _count(
    planned: Record, layer: WatchedLayer, root: str, excluded: tuple[str, ...]
) -> tuple[int, int, set[int]] | None:
    """Return forward entries, recomputations and the allowed numbers of them; None where nothing can be expected.

    The first module that a region enters is asked: a region that is stopped early still begins at its beginning.
    Without a gradient at its output a region has no backward, and so no reason to run again.
    """
    entered = (path for path, in_backward in planned.entries if not in_backward and path.startswith(f"{root}."))
    first = next((path for path in entered if not _is_below(path, excluded)), None)
    if first is None or root not in planned.reached:
        return None
    forward, backward = planned.entries[first, False], planned.entries[first, True]
    if root in layer.tiled:
        # Each slice, and before them a few positions to see whether slices can stand for the whole.
        return forward, backward, set(range(1, 2 * forward + 1))
    # The last layer of a nested segment is needed once only.
    return forward, backward, {forward, 2 * forward} if layer.entry.nested else {forward}


def _ran_again(planned: Record, layer: WatchedLayer) -> Iterator[str]:
    if layer.recomputes_itself:
        return
    regions = _regions(layer)
    for (path, in_backward), count in planned.entries.items():
        if not in_backward or not count or not path.startswith(f"{layer.path}."):
            continue
        if not any(_is_below(path, (root,)) and not _is_below(path, excluded) for root, excluded in regions):
            yield path


def _is_below(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def _as_planned(planned: Record) -> str:
    figures = _figures(planned)
    recomputed, layers = int(figures["num_layers_recomputed"]), int(figures["num_layers"])
    if not recomputed:
        return f"Nothing of {layers} layers ran again in backward, as planned."
    return f"{recomputed} of {layers} layers ran again in backward, whole or in part, each as often as planned."


def _figures(planned: Record) -> dict[str, float]:
    recomputed = [
        layer
        for layer in planned.layers
        if any(count and b and path.startswith(f"{layer.path}.") for (path, b), count in planned.entries.items())
    ]
    forward = sum(count for (_, in_backward), count in planned.entries.items() if not in_backward)
    backward = sum(count for (_, in_backward), count in planned.entries.items() if in_backward)
    return {
        "num_layers": len(planned.layers),
        "num_layers_recomputed": len(recomputed),
        "num_module_forwards": forward,
        "num_module_forwards_in_backward": backward,
    }


def _layers(planned: Record, layers: Sequence[WatchedLayer]) -> str:
    paths = dict.fromkeys(layer.path.rpartition(".")[0] for layer in layers)
    return listed(
        f"{numbered([int(layer.path.rpartition('.')[2]) for layer in layers if layer.path.startswith(f'{path}.')])} "
        f"of {path}"
        for path in paths
    )


def _modules(paths: Sequence[str]) -> str:
    return f"{paths[0]}{f' and {len(paths) - 1} more modules' * (len(paths) > 1)}"
