"""The names of result files, for those who must not import what makes them.

The process that forks the stages imports none of the benchmarks: with the Trainer comes bitsandbytes, and that touches
the device when it is imported, after which CUDA cannot start in a forked process.
"""

from __future__ import annotations


def offload(policy: str, device: str) -> str:
    """Return the name of a result of `offload.py`."""
    return f"offload_{policy}_{device}.json"


def predict(name: str, device: str, *, is_small: bool = False) -> str:
    """Return the name of a result of `predict.py`."""
    return f"predict_{'small_' if is_small else ''}{name}_{device}.json"


def side_by_side(case: str, device: str, *, is_compiled: bool) -> str:
    """Return the name of a result of `side_by_side/run.py`."""
    return f"side_by_side_{case}_{device}{'_compiled' if is_compiled else ''}.json"


def overhead(case: str, device: str) -> str:
    """Return the name of a result of `overhead.py`."""
    return f"overhead_{case}_{device}.json"


def engine(case: str, method: str, name: str, device: str) -> str:
    """Return the name of a result of `engines.py` in a group of one process."""
    return f"engines_{case}_{method}_{name}_{device}_1.json"


def longest(part: str, cap_gib: float, device: str, *, is_small: bool = False) -> str:
    """Return the name of a result of `longctx.py`."""
    return f"longctx_{'small_' if is_small else ''}{part}_{cap_gib:g}gib_{device}.json"
