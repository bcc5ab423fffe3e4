"""The binomial schedule: which inputs of a chain of layers to save so that the fewest forwards run. Pure arithmetic.

Source: Griewank and Walther 2000, "Algorithm 799: revolve" (ACM TOMS 26), whose steps are layers here. Their
checkpoints hold the chain's first input too, so that `snapshots` inputs saved besides it are `snapshots + 1` of theirs.
With c of them and each layer run at most r times before its own turn, chains of up to `(c + r)! / (c! r!)` layers can
be reversed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator


def segment_starts(num_layers: int, snapshots: int) -> list[tuple[int, int]]:
    """Return where a forward saves inputs: the first layer of each segment, and the segment's free snapshots.

    A segment may save so many inputs while it runs again: those of all later segments are gone by then.

    Args:
        num_layers: in the chain. What follows them, head and loss, runs forward and backward at once.
        snapshots: inputs that may be saved besides the chain's first one.

    Example:
        >>> segment_starts(6, 2)
        [(0, 2), (4, 1), (5, 0)]
    """
    starts = [0, *(start for start in _saved(num_layers + 1, snapshots) if start < num_layers)]
    return [(start, snapshots - number) for number, start in enumerate(starts)]


def saved_on_the_way(num_layers: int, snapshots: int | None) -> list[int]:
    """Return the layers whose inputs are saved while a chain runs again for the backward of its last layer.

    Args:
        num_layers: in the chain, from the saved input to the layer whose backward comes next.
        snapshots: inputs that may still be saved; None for any number.

    Example:
        >>> saved_on_the_way(6, 1)
        [3]
    """
    if snapshots is None:
        return list(range(1, num_layers - 1))
    return [start for start in _saved(num_layers, snapshots) if start < num_layers - 1]


def reruns(num_layers: int, snapshots: int | None) -> list[int]:
    """Return how often each layer of a segment runs while the segment runs backward, its own turn included.

    Example:
        >>> reruns(4, None), reruns(4, 0)
        ([2, 2, 2, 1], [4, 3, 2, 1])
    """
    counts = [1] * num_layers
    for start, _, layer in replays(num_layers, snapshots):
        for each in range(start, layer):
            counts[each] += 1
    return counts


def replays(num_layers: int, snapshots: int | None) -> Iterator[tuple[int, list[int], int]]:
    """Yield, for each layer from the last, the layer that its segment runs again from, and the saved ones up to it.

    The saved ones are those whose inputs lie ready when the layer's own turn comes, without the segment's first.
    """
    saved = [0]
    for layer in reversed(range(num_layers)):
        start = saved[-1]
        free = None if snapshots is None else snapshots - len(saved) + 1
        saved += [start + each for each in saved_on_the_way(layer - start + 1, free)]
        yield start, saved[1:], layer
        if saved[-1] == layer:
            saved.pop()


def most_runs(num_layers: int, snapshots: int) -> int:
    """Return the most often that any layer of a chain runs, in its forward, on the way and in its own turn."""
    return _repetitions(num_layers + 1, snapshots + 1) + 1


def fewest_snapshots(num_layers: int, most: int) -> int:
    """Return the fewest snapshots, at least one, with which no layer of a chain runs more often than `most` times."""
    return next(count for count in range(1, num_layers + 1) if most_runs(num_layers, count) <= max(2, most))


def _saved(length: int, snapshots: int) -> Iterator[int]:
    """Yield the inputs that a sweep to the last of `length` layers saves, besides the first one."""
    start = 0
    while snapshots and length - start > 1:
        start += _advance(length - start, snapshots + 1)
        snapshots -= 1
        yield start


def _advance(length: int, checkpoints: int) -> int:
    """Return how many layers to run before the next input is saved: the most that lets no layer run once more."""
    times = _repetitions(length, checkpoints)
    return min(
        math.comb(checkpoints + times - 1, checkpoints), length - math.comb(checkpoints + times - 2, checkpoints - 1)
    )


def _repetitions(length: int, checkpoints: int) -> int:
    """Return how often layers run at most before their own turn."""
    times = 0
    while math.comb(checkpoints + times, checkpoints) < length:
        times += 1
    return times
