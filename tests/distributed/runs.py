"""One run of the real Trainer under each engine: what it logged, what it left in the weights, and what ran it."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ckpt import HFCkptCallback
from tests import training, zoo
from tests.distributed.fsdp_on_a_cpu import fsdp_on_a_cpu
from tests.distributed.ranks import has_gpus
from tests.exactness import POLICIES

ENGINES = ["ddp", "fsdp1", "fsdp2"]
STEPS = 3


def full_fine_tune(model_type: str) -> nn.Module:
    """A tiny model of the zoo with attention dropout, the same one on every rank."""
    torch.manual_seed(0)
    return zoo.build(model_type).model


def lora(model_type: str) -> nn.Module:
    """The same model, frozen, with adapters in the attention and, where it is dense, in the ffn of each layer."""
    # Adapters that start at zero would give their first matrices no gradient. peft has no dropout for fused experts.
    targets = ["self_attn.q_proj"] + ["mlp.down_proj"] * (model_type != "qwen3_moe")
    config = LoraConfig(r=2, target_modules=targets, lora_dropout=0.1, init_lora_weights=False)
    return get_peft_model(full_fine_tune(model_type), config)


KINDS: dict[str, Callable[[str], nn.Module]] = {"full": full_fine_tune, "lora": lora}


@dataclass(frozen=True)
class Outcome:
    """What a run left behind.

    Args:
        engine: the engine that the model really ran under, by the types of what stands around its layers.
        losses: as logged, one for each optimizer step.
        weights: every parameter at the end, by name, as `train` was asked to read them.
        names: of all modules while the run went on, in order.
    """

    engine: str
    losses: list[float]
    weights: dict[str, Tensor]
    names: list[str]


def callback(policy: str, **options: Any) -> HFCkptCallback:
    """The plugin with one of `POLICIES`."""
    mode, given = POLICIES[policy]
    return HFCkptCallback(mode, **given, **options)


def shards(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of this rank's part of every parameter by name."""
    return {name: local(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every parameter, gathered, by the name that it has in the bare model."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in bare.named_parameters()
    }


def train(
    model: nn.Module,
    engine: str,
    *callbacks: TrainerCallback,
    read: Callable[[nn.Module], dict[str, Tensor]] = shards,
    evaluated: list[dict[str, Tensor]] | None = None,
    **changes: Any,
) -> Outcome:
    """Train for `STEPS` optimizer steps, one row at a time on each rank.

    Args:
        model: what to train, not yet wrapped.
        engine: one of `ENGINES`.
        callbacks: given to the Trainer.
        read: what to make of the wrapped model when training has ended.
        evaluated: rows to evaluate.
        changes: further training arguments.
    """
    names: list[str] = []
    note_names = training.During("on_step_end", lambda wrapped: names.extend(n for n, _ in wrapped.named_modules()), 1)
    with fresh_accelerate(), tempfile.TemporaryDirectory() as folder:
        asked = {**engine_arguments(engine), **changes}
        trainer = make_trainer(model, Path(folder), *callbacks, note_names, evaluated=evaluated, **asked)
        trainer.train()
    wrapped = trainer.model_wrapped
    return Outcome(engine_of(wrapped), training.losses(trainer), read(wrapped), names)


def make_trainer(
    model: nn.Module,
    folder: Path,
    *callbacks: TrainerCallback,
    evaluated: list[dict[str, Tensor]] | None = None,
    **changes: Any,
) -> Trainer:
    """A Trainer over 64 rows of tokens."""
    run = {"max_steps": STEPS, "per_device_train_batch_size": 1, "use_cpu": not has_gpus(), **changes}
    # FSDP1 is deprecated, which transformers says through its logger.
    with mock.patch.object(logging.getLogger("transformers.training_args"), "disabled", True):
        args = TrainingArguments(**training.arguments(folder, **run))
    return Trainer(model=model, args=args, train_dataset=rows(), eval_dataset=evaluated, callbacks=list(callbacks))


def rows(count: int = 64) -> list[dict[str, Tensor]]:
    """Random texts of one length; every third has less to learn from, so that rows weigh differently."""
    tokens = torch.randint(
        zoo.FIRST_TOKEN, zoo.LAST_TOKEN, (count, zoo.LENGTH), generator=torch.Generator().manual_seed(0)
    )
    labels = tokens.clone()
    labels[::3, : zoo.LENGTH // 2] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def engine_arguments(engine: str) -> dict[str, Any]:
    """The training arguments that ask for an engine."""
    if engine == "none":
        return {}
    if engine == "ddp":
        return {"ddp_find_unused_parameters": False}
    version = int(engine.removeprefix("fsdp"))
    # FSDP1 cannot send the weights to the other ranks on a CPU; all have built the same.
    return {"fsdp": True, "fsdp_config": {"version": version} | ({"sync_module_states": False} if version == 1 else {})}


@contextmanager
def one_process() -> Iterator[None]:
    """Let each rank train by itself, as if it was alone."""
    with mock.patch.dict(os.environ):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        yield


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Let accelerate, which keeps the first run's engine for its process and in its environment, look again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.dict(os.environ), fsdp_on_a_cpu():
        for name in [name for name in os.environ if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP"]:
            del os.environ[name]
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def engine_of(model: nn.Module) -> str:
    """Name the engine that stands around a model and, if it shards, around each of its decoder layers."""
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if not isinstance(model, (FullyShardedDataParallel, FSDPModule)):
        return "none"
    layers = next(module for name, module in model.named_modules() if name.endswith(".layers"))
    for engine, sharded in (("fsdp1", FullyShardedDataParallel), ("fsdp2", FSDPModule)):
        if isinstance(model, sharded) and all(isinstance(layer, sharded) for layer in layers):
            return engine
    return f"{type(model).__name__} around {type(layers[0]).__name__}"
