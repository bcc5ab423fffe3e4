"""accelerate's FSDP activation checkpointing (`fsdp_activation_checkpointing: true`, FSDP2), on one process.

accelerate's own functions wrap and shard the model, in the order in which `Accelerator.prepare` calls them. On a CPU
`Accelerator` would drop FSDP without a word; it is given back its plugin there, and gloo moves the bytes.

Names of parameters change and parameters become `DTensor`s: an optimizer is built after the contender is entered, and
the model is of no use afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

from benchmarks.side_by_side.contender import Contender, NotHereError
from hf_ckpt.errors import StructureError
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.structure.layers import class_name, find_layers

_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@contextmanager
def _sharded(model: nn.Module) -> Iterator[nn.Module]:
    # Releases of accelerate without FSDP2 have no such functions.
    try:
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
    except ImportError as error:
        raise NotHereError(str(error)) from error
    plugin = _plugin(model)
    with _one_process(next(model.parameters()).device.type) as device_type, _fresh_accelerate():
        accelerator = Accelerator(cpu=device_type == "cpu", fsdp_plugin=plugin, mixed_precision="no")
        accelerator.state.fsdp_plugin = plugin
        plugin.set_auto_wrap_policy(model)
        yield fsdp2_prepare_model(accelerator, fsdp2_apply_ac(accelerator, model))


def _plugin(model: nn.Module) -> FullyShardedDataParallelPlugin:
    try:
        layers = {class_name(layer.module) for stack in find_layers(model) for layer in stack.layers}
    except StructureError as error:
        raise NotHereError(str(error)) from error
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        activation_checkpointing=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted(layers),
        # The weights are there already.
        cpu_ram_efficient_loading=False,
    )


@contextmanager
def _one_process(device_type: str) -> Iterator[str]:
    if dist.is_initialized():
        raise NotHereError("a process group is in use; FSDP on one process needs a group of its own")
    backend = "gloo" if device_type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mock.patch.dict(os.environ, _ALONE):
            yield device_type
    finally:
        dist.destroy_process_group()


@contextmanager
def _fresh_accelerate() -> Iterator[None]:
    """Let accelerate, which keeps one state for a process, look again; and give it back the state that it had."""
    with ExitStack() as stack:
        for state in (PartialState, AcceleratorState, GradientState):
            stack.enter_context(mock.patch.dict(state._shared_state, clear=True))
        yield


@contextmanager
def resizing_followed(tracker: Tracker) -> Iterator[None]:
    """Let a tracker know when FSDP2 empties a gathered weight, and when it fills it again.

    It does so by resizing the storage, to which it holds on. A tracker takes a storage to be as large as it was made.

    Args:
        tracker: entered.
    """

    def resize_and_record(resize: Callable[[Tensor], None], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        resize(tensor)
        if storage.nbytes() == num_bytes:
            return
        if storage._cdata in tracker._alive:
            tracker._record_free(storage._cdata)
        tracker._record_outputs(tensor, tracker._current_place(resize.__name__))

    with ExitStack() as stack:
        for module, name in (
            (_fsdp_param, "alloc_storage"),
            (_fsdp_param, "free_storage"),
            (_fsdp_param_group, "alloc_storage"),
        ):
            stack.enter_context(mock.patch.object(module, name, partial(resize_and_record, getattr(module, name))))
        yield


CONTENDERS = (
    Contender(
        name="accelerate_fsdp",
        title="accelerate, FSDP activation checkpointing",
        group="today",
        enter=_sharded,
        is_reversible=False,
    ),
)
