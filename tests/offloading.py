"""What the tests of offload share: where tensors go, the one offloader of a plan, and whether anything is still out."""

from __future__ import annotations

import gc
from typing import Any

from hf_ckpt.policy.options import Offload
from hf_ckpt.regions.offload.offloader import Offloader

TO_HOST = Offload(min_bytes=0)
LAYERS = 5


def engine(applied: Any) -> Offloader:
    (only,) = applied.offloaders
    return only


def is_empty(offloader: Offloader) -> bool:
    """Whether nothing is out any more."""
    gc.collect()
    stats = offloader.stats
    return (stats.num_live, stats.live_bytes) == (0, 0) and not (offloader._pending or offloader._sent)
