"""How much host memory a benchmark lets offload take.

A rented machine is often a virtual one that is given memory when it is touched: what it says is free may be too little,
and offload would be refused. So its figures are not asked; limits of control groups are, and nothing goes beyond a cap.
"""

from __future__ import annotations

from dataclasses import replace

from hf_ckpt.policy.options import Offload
from hf_ckpt.policy.plan import LayerPlan, Plan, with_entries

MOST_HOST_BYTES = 48 * 2**30
"""That one plan may take. The largest row measured, 65,536 tokens in 32 layers of 8B width, needs 16 GiB."""


def capped(offload: Offload) -> Offload:
    """Return an offload that does not ask what the machine has free, and takes no more than the cap.

    Args:
        offload: as the benchmark asks for it; a lower cap of its own stays.
    """
    own = MOST_HOST_BYTES if offload.host_memory is None else offload.host_memory
    return replace(offload, trust_host_memory=True, host_memory=min(own, MOST_HOST_BYTES))


def with_capped_offload(plan: Plan) -> Plan:
    """Return a plan whose layers offload under the cap.

    The planner is not told of it: a limit of host memory makes other plans, and this one is only a guard.

    Args:
        plan: that is about to run.
    """
    return with_entries(plan, _with_cap)


def _with_cap(entry: LayerPlan) -> LayerPlan:
    return entry if entry.offload is None else replace(entry, offload=capped(entry.offload))
