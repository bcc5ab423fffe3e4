"""The optimizer step that `TrainingArguments` describe, as `Step`: of a Trainer about to train, or of a recipe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, FullyShardedDataParallel
from transformers import Adafactor, Trainer, TrainingArguments

from hf_ckpt.auto.batch_of_forward import without_adapter
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.simulation.optimizers import SUPPORTED, innermost_optimizer
from hf_ckpt.simulation.shared_tensors import has_shared
from hf_ckpt.simulation.step import GivenOptimizer, OwnLoss, Sharding, Step, Zero
from hf_ckpt.trainer.batch import Batch
from hf_ckpt.upstream.accelerate import fsdp_plugin
from hf_ckpt.upstream.peft import ACTIVE_ADAPTER, DISABLE_ADAPTERS
from hf_ckpt.upstream.transformers import ATTENTION

OPTIMIZER_FIELDS = (
    *("optim_args", "optim_target_modules", "learning_rate", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon"),
)
"""Fields of `TrainingArguments` that the optimizer reads."""

NOT_SIMULATED = {
    "torch_compile": ("false", "a compiled model fuses operators, and keeps other tensors than those of the code"),
    "use_liger_kernel": ("false", "Liger's kernels replace modules when training begins"),
    "label_smoothing_factor": ("0", "label smoothing takes the loss out of the model"),
    "neftune_noise_alpha": ("null", "noise is added to the embeddings"),
}
"""Fields of `TrainingArguments` that change what is held: the value without it, and why it is not followed."""

SPLIT_SIZES = {
    "cp_size": "each sequence",
    "sp_size": "each sequence",
    "ep_size": "the experts",
}
"""Sizes in accelerate's `ParallelismConfig` and transformers' `DistributedConfig` that are not simulated above 1, and
what ranks share under them."""

_STAGE_3_SIZES = ("max_live_parameters", "max_reuse_distance", "param_persistence_threshold")
_WHOLE_LAYERS_IN_BACKWARD = ("FULL_SHARD", "HYBRID_SHARD")


def live_step(
    args: TrainingArguments,
    batch: Batch,
    sharding: Sharding,
    *,
    given_optimizer: GivenOptimizer | None = None,
    is_proven: bool = False,
    loss: OwnLoss | None = None,
) -> Step:
    """Return the step that a Trainer runs; `batch` is its largest micro-batch, and `loss` the Trainer's own."""
    optim_arguments = {name: getattr(args, name) for name in OPTIMIZER_FIELDS if hasattr(args, name)}
    step = step_from(partial(getattr, args), batch, sharding, optim_arguments, is_proven=is_proven)
    rows_per_example = 1 if loss is None else loss.rows_per_example
    num_examples = -(-batch.rows // rows_per_example)
    return replace(step, given_optimizer=given_optimizer, loss=loss, batch_size=num_examples)


def step_from(
    value_of: Callable[[str], Any],
    batch: Batch,
    sharding: Sharding,
    optim_arguments: dict[str, Any],
    *,
    is_proven: bool,
) -> Step:
    """Return the step of so large a micro-batch; `value_of` gives fields of `TrainingArguments` by name."""
    optim = value_of("optim")
    return Step(
        batch_size=batch.rows,
        seq_length=batch.length,
        is_padded=batch.is_padded,
        is_packed=batch.is_packed,
        more_inputs=batch.more,
        tensors=batch.tensors,
        settings=batch.settings,
        autocast=_mixed_precision(value_of),
        gradient_accumulation_steps=value_of("gradient_accumulation_steps"),
        max_grad_norm=float(value_of("max_grad_norm") or 0.0),
        optim=str(getattr(optim, "value", optim)),
        optim_arguments=optim_arguments,
        sharding=sharding,
        is_proven=is_proven,
    )


def mixed_precision(args: TrainingArguments) -> str | None:
    return _mixed_precision(partial(getattr, args))


def _mixed_precision(value_of: Callable[[str], Any]) -> str | None:
    return "bfloat16" if value_of("bf16") else "float16" if value_of("fp16") else None


def given_optimizer(
    optimizer: Any, args: TrainingArguments | None, model: nn.Module, sharding: Sharding
) -> GivenOptimizer | None:
    """Return the optimizer that a Trainer has, to be made again; None where its arguments make the same one.

    Whoever made it: the Trainer, the user for `optimizers=` or `optimizer_cls_and_kwargs=`, or a Trainer of their own.
    `args` are the Trainer's; None in a loop without one.

    Raises:
        UnsupportedError: it cannot be simulated.
    """
    made = innermost_optimizer(optimizer)
    if made is None:
        return None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in made.param_groups for parameter in group["params"]]
    is_whole = all(id(parameter) in names for parameter in parameters)
    kind, is_shared = type(made), sharding.engine not in ("none", "ddp")
    # Whether it makes its state in `step()` alone, from parameters and gradients.
    is_known = kind is Adafactor or (f"{kind.__module__}.".startswith("torch.optim.") and kind not in _NEED_MORE)
    if sharding.engine == "tp":
        is_known = is_known and kind not in (Adafactor, getattr(torch.optim, "Muon", None))
    if is_known and is_whole:
        return GivenOptimizer(kind, _groups(made, names))
    if args is not None and args.optim in SUPPORTED and sharding.engine != "tp" and _is_of_arguments(made, args, model):
        return None
    if not is_whole:
        what = "holds parameters that are not the model's"
    elif is_shared:
        what = "cannot be simulated where ranks share its state: what it keeps of a shard is not known"
    elif getattr(made, "is_paged", False):
        what = "keeps state on the host, which is simulated where the arguments ask for it alone"
    elif type(made) in _NEED_MORE:
        what = f"cannot be simulated: {_NEED_MORE[type(made)]}"
    else:
        return GivenOptimizer(type(made), _groups(made, names), copied=made)
    name = f"{type(made).__module__}.{type(made).__qualname__}"
    if args is None:
        raise UnsupportedError(
            f'Policy "auto" simulates the step, and the optimizer, {name}, {what}. Give it one of torch.optim over the '
            'model\'s parameters, or use a fixed policy, such as "full".'
        )
    raise UnsupportedError(
        f'Policy "auto" simulates the step, and the optimizer of this Trainer, {name}, {what}. Give it one of '
        f"torch.optim over the model's parameters, set TrainingArguments.optim to one of {', '.join(SUPPORTED)}, or "
        'use a fixed policy, such as HFCkptCallback("full").'
    )


_NEED_MORE = {
    torch.optim.LBFGS: "it runs the forward again",
    torch.optim.SparseAdam: "it takes sparse gradients",
    torch.optim.Adafactor: "it computes with values on the host",
}


def _groups(made: Any, names: dict[int, str]) -> tuple[tuple[tuple[str, ...], dict[str, Any]], ...]:
    found = []
    for group in made.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        numbers = {name: float(value) if isinstance(value, Tensor) else value for name, value in options.items()}
        found.append((tuple(names[id(each)] for each in group["params"]), numbers))
    return tuple(found)


def _is_of_arguments(made: Any, args: TrainingArguments, model: nn.Module) -> bool:
    """Whether an optimizer is of the class, and has the options, that the Trainer's arguments ask for."""
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, cast(Any, model))
    except (ImportError, ValueError):
        return False
    if type(made) is not kind:
        return False
    # The learning rate is the scheduler's by then; bitsandbytes keeps the rest apart.
    found = {**vars(getattr(made, "args", None) or SimpleNamespace()), **made.param_groups[0]}
    return all(found[name] == value for name, value in options.items() if name != "lr" and name in found)


def live_sharding(args: TrainingArguments, model: nn.Module) -> Sharding:
    """Return the engine around a model that is about to be trained."""
    # The model comes as the callback gets it: bare under DDP and DeepSpeed, wrapped under FSDP.
    world_size, plugin = args.world_size, fsdp_plugin()
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        reshards = bool(getattr(plugin, "reshard_after_forward", True))
        return Sharding(
            engine="fsdp2",
            world_size=world_size,
            reshards_after_forward=reshards,
            syncs_each_batch=syncs_each_batch(vars(args.accelerator_config)),
        )
    fsdp1: Any = next((module for module in model.modules() if isinstance(module, FullyShardedDataParallel)), None)
    if fsdp1 is not None:
        strategy: Any = getattr(plugin, "sharding_strategy", None)
        reshards = strategy is None or getattr(strategy, "name", str(strategy)) in _WHOLE_LAYERS_IN_BACKWARD
        return Sharding(
            engine="fsdp1",
            world_size=world_size,
            reshards_after_forward=reshards,
            prefetches_in_backward=fsdp1.backward_prefetch is BackwardPrefetch.BACKWARD_PRE,
            broadcasts_weights=bool(getattr(plugin, "sync_module_states", False)),
            syncs_each_batch=syncs_each_batch(vars(args.accelerator_config)),
        )
    if has_shared(model):
        return Sharding(engine="tp", world_size=world_size)
    deepspeed: Any = getattr(args, "deepspeed_plugin", None)
    if deepspeed is not None and deepspeed.zero_stage:
        options = zero_of(deepspeed.deepspeed_config)
        return Sharding(engine=f"zero{deepspeed.zero_stage}", world_size=world_size, zero=options)
    return Sharding(engine="ddp" if world_size > 1 else "none", world_size=world_size)


def syncs_each_batch(accelerator_config: Mapping[str, Any]) -> bool:
    """Return whether gradients are shared out in each micro-batch (`TrainingArguments.accelerator_config`)."""
    return bool((accelerator_config.get("gradient_accumulation_kwargs") or {}).get("sync_each_batch"))


def zero_of(config: Mapping[str, Any]) -> Zero:
    """Return the sizes of a DeepSpeed configuration."""
    # Before the Trainer replaces it, `auto` counts as 0: it makes a bucket of fewer elements than most weights have,
    # and keeps but the smallest weights whole.
    zero = config.get("zero_optimization", {})
    asked: dict[str, Any] = {}
    for name in ("reduce_bucket_size", "sub_group_size", *_STAGE_3_SIZES):
        found = zero.get(f"stage3_{name}" if name in _STAGE_3_SIZES else name)
        if found is not None:
            asked[name] = 0 if found == "auto" else int(found)
    if zero.get("stage3_prefetch_bucket_size") == 0:
        asked["max_live_parameters"] = 0
    # DeepSpeed takes it only together with `bf16_master_weights_and_grads`.
    if (config.get("bf16") or config.get("bfloat16") or {}).get("bf16_optimizer_states"):
        asked["master_bytes"] = 2
    has_two = bool(zero.get("overlap_comm")) and zero.get("stage") != 3
    return Zero(num_buckets=2 if has_two else 1, **asked)


# --- Whether it is the model still that the step was made for. ---


_trains = attrgetter("requires_grad")


class ModelState:
    """What a model is like now, held against what it was like when its plan was made. Looked at in each step."""

    # That is: which parameters train, and how the model computes. `shape` is the copy of it that is simulated; the
    # optimizer may get other parameters.

    def __init__(self, model: nn.Module, shape: nn.Module, optimizer: Any, autocast: str | None) -> None:
        # The callback keeps this after the run, and is not to keep the weights.
        self._model, self._optimizer = ref(model), None if optimizer is None else ref(optimizer)
        self._parameters = WeakKeyDictionary({model: list(model.parameters())})
        self._shape = shape
        self._autocast = autocast
        self._place = next(model.parameters()).device.type
        self._known = self._now()

    def _now(self) -> tuple[object, ...]:
        model: Any = self._model()
        parameters = self._parameters[model]
        groups = getattr(self.optimizer, "param_groups", ())
        # Walking all modules for new ones would take longer than all else.
        num_others = [len(group["params"]) for group in groups], len(getattr(model, "peft_config", ()))
        computed = parameters[0].dtype, parameters[-1].dtype, _attention(model), self.autocast
        return list(map(_trains, parameters)), num_others, computed

    @property
    def optimizer(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    @property
    def autocast(self) -> str | None:
        """The dtype of mixed precision: the Trainer's, else that of the code around it."""
        if self._autocast is None and torch.is_autocast_enabled(self._place):
            return str(torch.get_autocast_dtype(self._place)).removeprefix("torch.")
        return self._autocast

    def is_changed(self) -> bool:
        """Whether it is another one than at the last look."""
        before, self._known = self._known, self._now()
        return self._known != before

    def follow(self, refuse: Callable[[str], UnsupportedError]) -> nn.Module:
        """Let the same parameters train in the copy that is simulated, and return the model.

        Raises:
            UnsupportedError: more than that has changed.
        """
        model = self._model()
        assert model is not None, "it runs"
        named, copied = dict(model.named_parameters()), dict(self._shape.named_parameters())
        self._parameters[model] = list(named.values())
        is_same = named.keys() == copied.keys() and all(
            each.shape == copied[name].shape and each.dtype == copied[name].dtype for name, each in named.items()
        )
        if not is_same or _attention(model) != _attention(self._shape):
            raise refuse("since the plan was made the model has got other parameters, dtypes or another attention")
        for name, each in copied.items():
            each.requires_grad_(named[name].requires_grad)
        modules = dict(model.named_modules())
        for name, module in self._shape.named_modules():
            own = vars(modules[name])
            vars(module).update({each: copy.copy(own[each]) for each in _OF_ADAPTERS if each in own})
        return model


_OF_ADAPTERS = (ACTIVE_ADAPTER, DISABLE_ADAPTERS, "merged_adapters")  # What a layer of PEFT says of its adapters.


def _attention(model: nn.Module) -> str | None:
    return getattr(getattr(without_adapter(model), "config", None), ATTENTION, None)
