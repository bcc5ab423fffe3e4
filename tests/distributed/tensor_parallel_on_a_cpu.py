"""For tests only: lets a Trainer train under transformers' tensor parallelism on CPUs.

accelerate refuses a `ParallelismConfig` where the processes have no GPU. What shares the matrices is transformers,
which runs on gloo. On GPUs this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tests.distributed.ranks import has_gpus


@contextmanager
def tensor_parallel_on_a_cpu() -> Iterator[None]:
    """Let every `Accelerator` that is made in this context take the sizes that it is given."""
    from accelerate import ParallelismConfig

    if has_gpus():
        yield
        return
    with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        yield
