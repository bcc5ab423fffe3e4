"""For tests only: makes accelerate use the FSDP that it is asked for on a CPU, where it otherwise runs DDP, silently.

`AcceleratorState` drops the FSDP plugin where the processes have no GPU. torch's FSDP itself runs on gloo. On GPUs this
does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_found_init = AcceleratorState.__init__


@contextmanager
def fsdp_on_a_cpu() -> Iterator[None]:
    """Keep the FSDP plugin of every `Accelerator` that is made in this context."""
    with mock.patch.object(AcceleratorState, "__init__", _init_that_keeps_fsdp):
        yield


def _init_that_keeps_fsdp(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _found_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
        return
    if self._mixed_precision != "no":
        fsdp_plugin.set_mixed_precision(self._mixed_precision)
    self.fsdp_plugin = fsdp_plugin
    # FSDP1 compares it with the device of the parameters, which has no index.
    self.device = torch.device("cpu")
    self.distributed_type = DistributedType.FSDP
    PartialState._shared_state.update(device=self.device, distributed_type=DistributedType.FSDP)
