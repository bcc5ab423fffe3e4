"""Which engine runs a trial, told by the type of what really runs, and FSDP where there is no GPU.

accelerate drops FSDP on a CPU without a word and runs DDP (`AcceleratorState` keeps the plugin for accelerators only).
Everything behind that decision works on gloo and a CPU: wrapping, gradient accumulation, clipping, saving. So the
Trainer of a trial takes the decision back, on the instances that it made itself; no class is patched, and nothing
outside `hf-ckpt verify` uses it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from hf_ckpt.recipe.recipe import Recipe

Engine = Literal["one process", "ddp", "fsdp1", "fsdp2", "deepspeed"]


# An Accelerator with an FSDP plugin sets it for whatever runs next in its process.
_LEFT_BEHIND = "ACCELERATE_USE_FSDP"


class VerifyTrainer(Trainer):
    """The Trainer, which also shards on a CPU where its arguments ask for FSDP."""

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and give it back the FSDP plugin that it dropped."""
        launched = os.environ.get(_LEFT_BEHIND)
        super().create_accelerator_and_postprocess()
        if launched is None:
            os.environ.pop(_LEFT_BEHIND, None)
        state = self.accelerator.state
        if self.args.fsdp_plugin_args is None or state.distributed_type != DistributedType.MULTI_CPU:
            return
        _shard(state, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
        self.is_fsdp_enabled = True


def _shard(state: AcceleratorState, plugin: FullyShardedDataParallelPlugin) -> None:
    """Do to the state of a CPU what `AcceleratorState` does to that of GPUs."""
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def engine_of(model: nn.Module) -> Engine:
    """Tell what runs a model, by its type.

    Args:
        model: what the Trainer runs (`trainer.model_wrapped`), once training has begun.
    """
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if isinstance(model, FullyShardedDataParallel):
        return "fsdp1"
    if isinstance(model, FSDPModule):
        return "fsdp2"
    # Named and not imported: DeepSpeed is optional.
    is_deepspeed = any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__)
    return "deepspeed" if is_deepspeed else "one process"


# --- One of several processes. ---


def join_processes() -> bool:
    """Meet the other processes that torchrun started, before anything else is done.

    Returns:
        Whether this is the first one.
    """
    is_cpu = not torch.accelerator.is_available()
    if is_cpu:
        # accelerate would number the CPU, and FSDP1 takes "cpu:0" for another device than "cpu".
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    return bool(PartialState(cpu=is_cpu).is_main_process)


def end_process(code: int) -> NoReturn:
    """End this process, with the process group gone and nothing left for the interpreter to take down.

    Left to itself about one process in twenty aborts while it exits, after everything has been done.
    """
    if code == 0 and distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
    sys.stderr.flush()
    os._exit(code)


# --- What a recipe asks for, and what it is given. ---


def with_engine(recipe: Recipe, engine: str | None) -> Recipe:
    """Return a recipe that asks for an engine of several processes.

    Args:
        recipe: the recipe.
        engine: "ddp", "fsdp1" or "fsdp2"; None takes what `training` asks for, which is DDP where it says nothing.
    """
    training = {key: value for key, value in recipe.training.items() if key not in ("fsdp", "fsdp_config")}
    config = _fsdp_config(recipe.training.get("fsdp_config"))
    own = f"fsdp{config.get('version', 2)}" if recipe.training.get("fsdp") else "ddp"
    wanted = engine or own
    if wanted != "ddp":
        training |= {"fsdp": True, "fsdp_config": {**config, "version": int(wanted[-1])}}
    return replace(recipe, training=training)


def _fsdp_config(written: Any) -> dict[str, Any]:
    """Return the settings of FSDP under their names without `fsdp_`, without those that only a GPU can do here."""
    read = json.loads(Path(written).read_text(encoding="utf-8")) if isinstance(written, str) else dict(written or {})
    config = {name.removeprefix("fsdp_"): value for name, value in read.items()}
    if not torch.accelerator.is_available():
        config |= {"cpu_offload": False, "sync_module_states": False, "cpu_ram_efficient_loading": False}
    return config
