"""Of the binomial schedule, the number that Griewank and Walther prove for it."""

from __future__ import annotations

import math

from hf_ckpt.policy.revolve import most_runs


def num_forwards(num_layers: int, snapshots: int) -> int:
    """Return how many layers run in a whole step: the least possible."""
    checkpoints, length = snapshots + 1, num_layers + 1
    # Before their own turn.
    times = most_runs(num_layers, snapshots) - 1
    return times * length - math.comb(checkpoints + times, checkpoints + 1) + num_layers
