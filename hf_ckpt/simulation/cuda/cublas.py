"""The workspaces that torch gives cuBLAS: one for each thread that has run a matrix product on its stream, for good.

They come from the caching allocator, so that `torch.cuda.max_memory_allocated` counts them, and no operator returns
them. A step has two threads: the one that calls forward and the optimizer, and autograd's own, which runs backward and
recomputes. cuBLASLt shares the workspace of its thread (`TORCH_CUBLASLT_UNIFIED_WORKSPACE`, on by default).

Source: `setWorkspaceForHandle` and `getCUDABlasLtWorkspace` in `aten/src/ATen/cuda/CublasHandlePool.cpp`.
"""

from __future__ import annotations

from functools import cache

from hf_ckpt.simulation.devices import Device, workspace_bytes
from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tape import Storage, Tape
from hf_ckpt.simulation.tracker import BLOCK_BYTES

_PRODUCTS = frozenset("mm addmm bmm baddbmm mv addmv dot vdot addbmm _addmm_activation _scaled_mm _int_mm".split())
_OF_AUTOGRAD = (Phase.BACKWARD, Phase.RECOMPUTATION)


def add_workspaces(tape: Tape, device: Device, *, has_trained: bool = False) -> None:
    """Count the workspaces as there before the step: it is not the first one.

    Args:
        tape: of a step.
        device: where it runs; on a CPU there are none.
        has_trained: whether a backward of the same model came before, which the tape does not show.
    """
    num_bytes = -(-workspace_bytes(device) // BLOCK_BYTES) * BLOCK_BYTES
    if not num_bytes:
        return
    threads = {event.place.phase in _OF_AUTOGRAD for event in tape.events if _is_product(event.place.operator)}
    num_threads = 2 if has_trained and threads else len(threads)
    tape.before += [Storage(num_bytes, category=Category.WORKSPACES) for _ in range(num_threads)]


@cache
def _is_product(operator: str) -> bool:
    namespace, _, name = operator.partition(".")
    return namespace == "aten" and name.partition(".")[0].rstrip("_") in _PRODUCTS
