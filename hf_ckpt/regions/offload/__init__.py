"""Offload: what regions save of their inputs waits in host memory, or on disk, for backward.

`offloader` sends tensors and brings them back; `pacing` says which layers send, and in which order tensors come back. A
`Link` (`host_buffers`, `disk`) keeps the bytes; a `Wire` (`transfer`, `cuda`) copies them between device and host.
"""

from hf_ckpt.regions.offload.disk import check_path
from hf_ckpt.regions.offload.offloader import Offloader, OffloadStats, run_offloaded, run_with_prefetch_hook
from hf_ckpt.regions.offload.transfer import Link

__all__ = ["Link", "OffloadStats", "Offloader", "check_path", "run_offloaded", "run_with_prefetch_hook"]
