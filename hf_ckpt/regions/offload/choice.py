"""Which link suits a device and what the user asked for."""

from __future__ import annotations

import torch

from hf_ckpt.policy.modifiers import TO_DISK, Offload
from hf_ckpt.regions.offload.cuda import CudaWire
from hf_ckpt.regions.offload.disk import DiskLink
from hf_ckpt.regions.offload.host import HostLink
from hf_ckpt.regions.offload.limits import HostLimits
from hf_ckpt.regions.offload.link import Link, Wire
from hf_ckpt.regions.offload.plain import PlainWire


def link_for(settings: Offload, device: torch.device) -> tuple[Link, str]:
    """Return a link for tensors on a device, and the type of device that it serves.

    Raises:
        PolicyError: disk was asked for, and nothing can be written there.
    """
    kind = device.type
    wire, limits = _wire(kind), HostLimits(settings.host_memory, trusts=settings.trust_host_memory)
    if settings.to == TO_DISK:
        assert settings.path is not None, "parse_offload has seen to that"
        return DiskLink(wire, limits, settings.path), kind
    return HostLink(wire, limits), kind


def _wire(kind: str) -> Wire:
    return CudaWire() if kind == "cuda" else PlainWire()
