"""For tests only: DeepSpeed on CPUs, inside the tests' own process group, leaving the process as it was found.

Its collectives go through gloo, as on any machine without a C++ compiler, and not through the shared-memory extension
that it would compile first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.distributed.ranks import has_gpus

# DeepSpeed 0.19.8 knows functions of torch by names that 2.13 gave up, and imports torch.compile, which does so too.
ignores_its_warnings = [
    pytest.mark.filterwarnings(
        "ignore:.torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor). is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]
# A tiny model's weights would never be sharded otherwise, and those that were gathered would stay.
LETTING_GO_AT_ONCE = dict.fromkeys(
    (
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size",
    ),
    0,
)


def config(stage: int, **sections: Any) -> dict[str, Any]:
    """Return a configuration of DeepSpeed, for `TrainingArguments(deepspeed=...)`.

    Args:
        stage: of ZeRO.
        sections: further ones.
    """
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3, **LETTING_GO_AT_ONCE}
    return {"zero_optimization": zero, **dict.fromkeys(auto, "auto"), **sections}


@contextmanager
def deepspeed_on_a_cpu() -> Iterator[None]:
    """Let the Trainer run DeepSpeed in this context."""
    import deepspeed
    from deepspeed.accelerator import cpu_accelerator, real_accelerator
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.utils import groups

    with ExitStack() as stack:
        if not has_gpus():
            # It would take a GPU that the processes have to share.
            cpu = cpu_accelerator.CPU_Accelerator()
            stack.enter_context(mock.patch.object(real_accelerator, "ds_accelerator", cpu))
        stack.enter_context(mock.patch.dict(deepspeed.ops.__compatible_ops__, {"deepspeed_shm_comm": False}))
        # ZeRO-3 puts a function of its own there, for all that runs afterwards in this process.
        stack.enter_context(mock.patch.object(nn.functional, "linear", nn.functional.linear))
        # What it keeps of models, and of a process group that the tests may have left since.
        stack.enter_context(mock.patch.object(parameter_offload, "FWD_MODULE_STACK", []))
        stack.enter_context(mock.patch.object(comm, "cdb", None))
        stack.enter_context(mock.patch.object(groups, "_WORLD_GROUP", None))
        # transformers shards the models that it makes as long as somebody holds a configuration of ZeRO-3.
        unset_hf_deepspeed_config()
        stack.callback(unset_hf_deepspeed_config)
        yield


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every parameter, gathered, by the name that it has in the bare model."""
    import deepspeed

    bare = model.module if isinstance(model, deepspeed.DeepSpeedEngine) else model
    named = dict(bare.named_parameters())
    with deepspeed.zero.GatheredParameters([parameter for parameter in named.values() if hasattr(parameter, "ds_id")]):
        return {name: parameter.detach().clone() for name, parameter in named.items()}
