"""Host memory: what is there, how fast it comes when it is touched, and how far.

It is touched in a process of its own, which the kernel kills first where memory runs out after all. Virtual machines
may start with little memory and grow when it is touched: each step notes what is there by then.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.children import die_with_parent
from hf_ckpt.regions.offload import host_memory

_ROOT = Path(__file__).parents[2]
_NUM_FIRST = 3
_SLOW = 5.0
_SLOW_S = 0.05
"""A step is slow that takes so many times as long as the first ones; shorter ones are noise."""
_GRACE_S = 15.0

Step = dict[str, Any]


def measure(step_bytes: int, seconds: float, most_steps: int | None = None) -> dict[str, Any]:
    """Touch at most half of what is there, in another process, and say how that went.

    Args:
        step_bytes: that are touched at a time.
        seconds: after which no step begins.
        most_steps: so many at most.

    Returns:
        Figures before, a row for each step, why it stopped, and figures afterwards.
    """
    before = figures()
    arguments = [str(step_bytes), str(seconds), str(most_steps or 0), str(os.getpid())]
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.on_gpu.host_probe", *arguments], cwd=_ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = child.communicate(timeout=seconds + _GRACE_S)
        stopped = f"its process ended with {child.returncode}"
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        stopped = "a step hung"
    # The last line of a process that was killed may be cut.
    rows = [json.loads(line) for line in output.splitlines() if line.endswith("}")]
    steps = [row for row in rows if "seconds" in row]
    stopped = next((row["stopped"] for row in rows if "stopped" in row), stopped)
    return {
        "before": before,
        "step_bytes": step_bytes,
        "steps": steps,
        "touched_bytes": step_bytes * len(steps),
        "stopped": stopped,
        "after": figures(),
    }


def figures() -> dict[str, Any]:
    """Return what the machine has by its own account, and what its control groups leave; None where nobody says."""
    found = host_memory.read_host_memory()
    names = ("MemTotal", "MemFree", "MemAvailable", "SwapTotal", "SwapFree")
    return {name: _meminfo().get(name) for name in names} | {
        "group_left_bytes": found.group_bytes,
        "total_bytes": found.total_bytes,
    }


def _meminfo() -> dict[str, int]:
    with suppress(OSError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines}
    return {}


# --- The process that touches. ---


def touched(
    step_bytes: int,
    seconds: float,
    most_steps: int | None = None,
    *,
    left: Callable[[], int | None] = host_memory.available_bytes,
    take: Callable[[int], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Step]:
    """Touch memory step by step and keep it; yield a row for each step, and at last why it stopped.

    Args:
        step_bytes: of a step.
        seconds: after which no step begins.
        most_steps: so many at most.
        left: returns the bytes that can still be taken; replaced in tests, as the next two.
        take: makes memory and touches it.
        clock: tells the time in seconds.
    """
    kept: list[Any] = []
    took: list[float] = []
    began = clock()
    while True:
        now_left = left()
        if now_left is None:
            yield {"stopped": "what is free is not known"}
        elif (len(kept) + 1) * step_bytes > now_left - step_bytes:
            # Half of what was there: as much is left as was taken.
            yield {"stopped": "half"}
        elif len(kept) == most_steps:
            yield {"stopped": "steps"}
        elif clock() - began > seconds:
            yield {"stopped": "time"}
        else:
            start = clock()
            try:
                kept.append((take or _take)(step_bytes))
            except (OSError, MemoryError) as error:
                yield {"stopped": f"failed: {type(error).__name__}: {error}"}
                return
            took.append(clock() - start)
            yield {"seconds": round(took[-1], 6), "total": _meminfo().get("MemTotal"), "left": left()}
            if took[-1] > max(_SLOW_S, _SLOW * statistics.median(took[:_NUM_FIRST])):
                yield {"stopped": "slow"}
                return
            continue
        return


def _take(num_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # As buffers of offload are made.
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):
            pages.madvise(advice)
    pages[:: mmap.PAGESIZE] = b"\1" * -(-num_bytes // mmap.PAGESIZE)
    return pages


def main() -> None:
    """Touch, and print a line of JSON for each step. Arguments: bytes of a step, seconds, most steps or 0, parent."""
    step_bytes, seconds, most_steps, parent = sys.argv[1:]
    die_with_parent(int(parent))
    with suppress(OSError):
        # Whoever has to be killed, it shall be this process (man 5 proc).
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    for row in touched(int(step_bytes), float(seconds), int(most_steps) or None):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
