"""Offload: what regions save of their inputs waits in host memory, or on disk, for backward.

`engine` sends and brings back; `schedule` says what and in which order; a link (`host`, `disk`) keeps the bytes in
buffers (`pool`, `limits`) that a wire (`plain`, `cuda`) copies to and from.
"""

from hf_ckpt.regions.offload.engine import Offloader, announced, offloaded
from hf_ckpt.regions.offload.files import check_path
from hf_ckpt.regions.offload.handles import Keeper
from hf_ckpt.regions.offload.link import Link
from hf_ckpt.regions.offload.stats import Stats

__all__ = ["Keeper", "Link", "Offloader", "Stats", "announced", "check_path", "offloaded"]
