"""What of a run the simulated step covers, and what it does not: that is refused, or named in the log.

`check_run` looks at the Trainer before a plan is made; `InputCheck` at the inputs of each forward before it runs. What
may change the peak by more than a percent is refused. What is known to be less, and a loss that cannot be followed, is
named in `Coverage.not_counted`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from hf_ckpt.auto.batch_of_forward import without_adapter
from hf_ckpt.auto.live_step import NOT_SIMULATED, SPLIT_SIZES
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.patch.checks import check_model
from hf_ckpt.regions.execution_state import is_compiled
from hf_ckpt.regions.offload.host_memory import num_local_processes
from hf_ckpt.simulation.shared_tensors import has_shared
from hf_ckpt.simulation.step import OwnLoss, labels_shape
from hf_ckpt.structure.layers import is_sharded
from hf_ckpt.trainer.batch import Batch, is_like_tokens
from hf_ckpt.trainer.other_models import OtherModel, other_models, weights_and_buffers
from hf_ckpt.units import format_bytes
from hf_ckpt.upstream.accelerate import fsdp_plugin

logger = logging.getLogger(__name__)

_SMALL = 0.01  # Of the trained model: what another module on the device may have without being refused.
_TINY = 0.001  # Of the trained model: what tensors on their own may have without being named.
_STEPS_LOOKED_AT = 2
_FIXED = 'Use a fixed policy, such as HFCkptCallback("full")'
_EXACT = ": none, full, attention, ffn, selective and selective_attention are exact to the bit under tensor parallelism"
# The styles of transformers' plans whose steps were followed, and those made of the same operators.
_TENSOR_PARALLEL = frozenset(
    "colwise colwise_gather_output colwise_rep rowwise rowwise_rep rowwise_split_input embedding_rowwise "
    "embedding_colwise replicated_with_grad_allreduce replicate".split()
)
_KEEPS_MORE = ("output_hidden_states", "output_attentions", "use_cache")


@dataclass(frozen=True)
class Coverage:
    """What a prediction counts, and what it is known to leave out."""

    counted: tuple[str, ...]
    not_counted: tuple[str, ...]
    others: tuple[OtherModel, ...] = ()
    """What the Trainer reaches that has tensors of its own, not those of the trained model."""
    loss: OwnLoss | None = None
    """The Trainer's own, which knows what its batches are made of."""

    @property
    def beside_bytes(self) -> int:
        """Bytes of tensors that are in no module."""
        return sum(each.num_bytes for each in self.others if each.module is None)

    @property
    def counted_bytes(self) -> int:
        return sum(each.num_bytes for each in self.others)

    def without(self, what: str) -> Coverage:
        return replace(self, not_counted=(*self.not_counted, what))

    def without_unknown(self, num_bytes: int, budget_bytes: int) -> Coverage:
        """Return the same, which leaves out what nothing that is known has allocated on a GPU, unless that is small."""
        if num_bytes <= _SMALL * budget_bytes:
            return self
        return self.without(f"{format_bytes(num_bytes)} that something else in this process has allocated")

    def log(self, names: Iterable[str]) -> None:
        """Say both in one line, with the names of inputs; at the level of a warning where something is left out."""
        level = logging.WARNING if self.not_counted else logging.INFO
        left_out = "; ".join(self.not_counted) or "nothing that is known"
        counted = "; ".join((", ".join(names), *self.counted))
        logger.log(level, "Counted: %s. Not counted: %s.", counted, left_out)


def refuse(what: str, remedy: str = "") -> UnsupportedError:
    """Return the error about a run that `auto` cannot plan for."""
    return UnsupportedError(f'Policy "auto" simulates the step, and {what}. {_FIXED}{remedy}.')


# --- Before a plan is made. ---


def check_run(
    trainer: Any, args: TrainingArguments, model: nn.Module, optimizer: str, loss: OwnLoss | None = None
) -> Coverage:
    """Refuse a run whose memory is not that of the simulated step, and return what is counted of any other.

    `optimizer` is what will be simulated, in words; `loss` is the Trainer's own, where that is simulated.
    """
    # What no plan can govern is not to be tried with another policy.
    check_model(model)
    _check_arguments(args, simulated=() if loss is None else ("label_smoothing_factor",))
    _check_engine(trainer, args, model)
    check_not_compiled(model)
    # Engines of several processes have such hooks too.
    hooked = [name for name, each in model.named_parameters() if getattr(each, "_post_accumulate_grad_hooks", None)]
    if args.world_size == 1 and hooked:
        raise refuse(f"hooks run when {hooked[0]} has its gradient, as those of an optimizer that steps in backward do")
    others = tuple(other_models(trainer, model, args.device))
    counted, left_out = _sorted_models(others, trainer, model, loss)
    left_out += _generation(trainer, args, loss)
    left_out += _steps_of_its_own(trainer, loss)
    engine = "one process" if args.world_size == 1 else f"{args.world_size} processes"
    engine += " of tensor parallelism" if has_shared(model) and not is_sharded(model) else ""
    own = [] if loss is None else [f"{type(trainer).__name__}.compute_loss"]
    own += [loss.prepares] if loss is not None and loss.prepares else []
    known = (type(without_adapter(model)).__name__, *counted, *own, optimizer, engine)
    return Coverage(known, tuple(left_out), others, loss)


def evaluates(args: TrainingArguments) -> bool:
    return str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no" or bool(args.eval_on_start)


def check_call(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse a model that cannot be called with inputs of these names."""
    bare, names = without_adapter(model), list(names)
    try:
        inspect.signature(type(bare).forward).bind(bare, **dict.fromkeys(names))
    except TypeError as error:
        what = f"it calls the model with {', '.join(names)}, and {type(bare).__name__}.forward"
        raise refuse(f"{what} cannot be called so: {error}") from None


def _check_arguments(args: TrainingArguments, simulated: tuple[str, ...]) -> None:
    for name, (without, reason) in NOT_SIMULATED.items():
        if name not in simulated and getattr(args, name, None):
            raise UnsupportedError(
                f'Policy "auto" simulates the step, and {name}={getattr(args, name)} cannot be simulated: {reason}. '
                f"Use {name}={without}, or another policy."
            )


def check_not_compiled(model: nn.Module) -> None:
    # A copy of a compiled module is not compiled.
    for module in model.modules():
        if is_compiled(module):
            raise refuse(f"{type(module).__name__} is compiled: {NOT_SIMULATED['torch_compile'][1]}")


def _check_engine(trainer: Any, args: TrainingArguments, model: nn.Module) -> None:
    accelerator = getattr(trainer, "accelerator", None)
    configs = [getattr(holder, "parallelism_config", None) for holder in (args, accelerator)]
    configs.append(getattr(getattr(without_adapter(model), "config", None), "distributed_config", None))
    for name, what in SPLIT_SIZES.items():
        size = max(getattr(config, name, None) or 1 for config in configs)
        if size > 1:
            raise refuse(f"{name}={size} shares {what} among ranks, which is not simulated")
    _check_tensor_parallelism(args, model, max(getattr(config, "tp_size", None) or 1 for config in configs))
    launched = getattr(accelerator, "mixed_precision", None) or "no"
    asked = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    # On a CPU accelerate leaves fp16 out.
    if launched not in ("no", asked):
        raise refuse(
            f"accelerate was launched with mixed precision {launched}, and the arguments ask for {asked}, which was "
            "simulated",
            f", or set {launched}=True in TrainingArguments" if launched in ("bf16", "fp16") else "",
        )
    if getattr(trainer, "is_model_parallel", False):
        raise refuse("the model's layers lie on several devices, and one is simulated")
    _check_replicas(args, model, configs)
    _check_host(args, fsdp_plugin())


def _check_tensor_parallelism(args: TrainingArguments, model: nn.Module, size: int) -> None:
    """Refuse matrices that are shared in another way than transformers shares them, by all ranks."""
    is_shared = has_shared(model) and not is_sharded(model)
    if size > 1 and not is_shared:
        what = "FSDP shares its weights as well" if is_sharded(model) else "the model was not loaded so"
        raise refuse(f"tp_size={size} shares each matrix among ranks, and {what}", _EXACT)
    if not is_shared:
        return
    meshes = {each.device_mesh for each in model.parameters() if isinstance(each, DTensor)}
    if {mesh.size() for mesh in meshes} != {args.world_size} or any(mesh.ndim > 1 for mesh in meshes):
        raise refuse("tensor parallelism shares the weights among some of the ranks only; all are simulated", _EXACT)
    bare = without_adapter(model)
    unknown = sorted(set((getattr(bare, "tp_plan", None) or {}).values()) - _TENSOR_PARALLEL)
    if unknown:
        raise refuse(f'under tensor parallelism "{unknown[0]}" of its plan is not simulated', _EXACT)
    if bare is not model:
        raise refuse("under tensor parallelism adapters are not simulated", _EXACT)
    if getattr(bare, "hf_quantizer", None) is not None:
        raise refuse("under tensor parallelism quantised weights are not simulated", _EXACT)


def _check_replicas(args: TrainingArguments, model: nn.Module, configs: list[Any]) -> None:
    """Refuse weights that are shared among fewer ranks than train."""
    replicas = max(getattr(config, "dp_replicate_size", None) or 1 for config in configs)
    strategy: Any = getattr(fsdp_plugin(), "sharding_strategy", None)
    is_hybrid = "HYBRID" in str(getattr(strategy, "name", strategy)) and args.world_size > num_local_processes()
    if is_sharded(model) and (replicas > 1 or is_hybrid):
        raise refuse("FSDP shares the weights among some of the ranks only (hybrid sharding); all are simulated")


def _check_host(args: TrainingArguments, plugin: Any) -> None:
    """Refuse an engine that keeps weights or the optimizer's state on the host."""
    deepspeed: Any = getattr(args, "deepspeed_plugin", None)
    devices = [getattr(deepspeed, f"offload_{what}_device", None) for what in ("optimizer", "param")]
    if any(device not in (None, "none") for device in devices):
        raise refuse("DeepSpeed's offloading to the host is not simulated")
    policy = getattr(plugin, "cpu_offload", None)
    if isinstance(policy, CPUOffloadPolicy) or getattr(policy, "offload_params", False):
        raise refuse("FSDP's offloading of parameters to the host is not simulated")


def _sorted_models(
    others: Iterable[OtherModel], trainer: Any, model: nn.Module, loss: OwnLoss | None
) -> tuple[list[str], list[str]]:
    """Return what else is on the device: what is counted, and the models that are not, but too small to matter.

    Raises:
        UnsupportedError: one of those is not small.
    """
    own_bytes = sum(tensor.nbytes for tensor in weights_and_buffers(model))
    counted, left_out = [], []
    for other in others:
        figures = f"({other.kind}, {format_bytes(other.num_bytes)})"
        what = f"{other.name} {figures}"
        if other.module is None:
            # Few tensors are counted all the same.
            counted += [what] if other.num_bytes >= _TINY * own_bytes else []
        elif loss and other.attribute in loss.others and getattr(trainer, other.attribute, None) is other.module:
            counted.append(f"{other.attribute} {figures}")
        elif other.num_bytes > _SMALL * own_bytes:
            raise refuse(
                f"{what} is on the device with the model that is trained. Neither it nor what it computes is counted"
            )
        else:
            left_out.append(what)
    return counted, left_out


class NewModels:
    """Looks again, when the first two steps begin, for what a Trainer and its callbacks have made since a plan was."""

    def __init__(
        self, trainer: Any, model: nn.Module, device: torch.device, known: Coverage, loss: OwnLoss | None
    ) -> None:
        # The hook that calls this is copied with the model, and the Trainer must not be.
        self._trainer, self._model, self._device = ref(trainer), ref(model), device
        # What its loss makes, as it is first called, is in the simulated step.
        self._counted = "" if loss is None else f"{type(trainer).__name__}."
        self._small = _SMALL * sum(tensor.nbytes for tensor in weights_and_buffers(model))
        self._known = {id(tensor) for other in known.others for tensor in other.tensors}
        self._steps_seen: set[int] = set()

    def check(self) -> None:
        """Refuse, before the first step, what is new and not small; name it afterwards."""
        trainer, model = self._trainer(), self._model()
        if trainer is None or model is None:
            return
        step = trainer.state.global_step
        if step in self._steps_seen or len(self._steps_seen) == _STEPS_LOOKED_AT:
            return
        self._steps_seen.add(step)
        for other in other_models(trainer, model, self._device):
            new = [tensor for tensor in other.tensors if id(tensor) not in self._known]
            self._known |= {id(tensor) for tensor in new}
            num_bytes = sum(tensor.nbytes for tensor in new)
            if num_bytes <= self._small or (self._counted and other.name.startswith(self._counted)):
                continue
            what = f"{other.name} ({other.kind}, {format_bytes(num_bytes)})"
            if len(self._steps_seen) == 1:
                raise refuse(f"{what} was put on the device after the plan was made, which does not count it")
            logger.warning("Not counted: %s, which was put on the device after the plan was made.", what)


def _steps_of_its_own(trainer: Any, loss: OwnLoss | None) -> Iterator[str]:
    """Yield what replaces the model's loss and is not simulated, or the step around it."""
    if trainer is None:
        return
    if loss is None:
        yield from losses_of_its_own(trainer)
    owner = _users(trainer, "training_step")
    is_trls = owner is not None and owner.__module__.startswith("trl.")
    if owner is not None and not is_trls and (loss is not None or _users(trainer, "compute_loss") is None):
        yield _BESIDES.format(f"{owner.__name__}.training_step")


def losses_of_its_own(trainer: Any) -> Iterator[str]:
    """Yield what a Trainer has in the place of the model's loss, as it is named where it is not counted."""
    if getattr(trainer, "compute_loss_func", None) is not None:
        yield "compute_loss_func, in whose place the model's own loss was simulated"
    owner = _users(trainer, "compute_loss")
    if owner is not None:
        yield _BESIDES.format(f"{owner.__name__}.compute_loss")


_BESIDES = "what {} does besides the model's own forward and loss, which were simulated"


def _users(trainer: Any, name: str) -> type | None:
    """Return the class that has overridden a method of transformers' trainers; None where none has."""
    owner = next((each for each in type(trainer).__mro__ if name in vars(each)), None)
    return None if owner is None or owner.__module__.startswith("transformers.") else owner


def _generation(trainer: Any, args: TrainingArguments, loss: OwnLoss | None) -> Iterator[str]:
    if loss is not None and loss.prepares:
        yield "what functions that reward completions take"
        if evaluates(args):
            yield "evaluation, which generates"
    elif hasattr(trainer, "num_generations"):
        # trl's GRPO and RLOO.
        raise refuse(f"{type(trainer).__name__} generates in each step, and trains on what comes out")
    if getattr(args, "predict_with_generate", False):
        yield "generation in evaluation (predict_with_generate)"


# --- Before a forward runs. ---


@dataclass
class InputCheck:
    """Holds what a forward gets, and how often it runs, against the simulated step."""

    _num_forwards: int = 0
    _named: set[str] = field(default_factory=set)

    def check(self, model: nn.Module, batch: Batch | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a training forward that is not the simulated one, before it runs."""
        if batch is None:
            raise refuse("the model's forward came without a tensor, so that its batch is not known")
        self._num_forwards += 1
        if self._num_forwards > 1:
            raise refuse(
                "the model's forward came twice in one micro-batch: the step has one, and keeps activations of one"
            )
        named = {f"positional argument {place}": value for place, value in enumerate(args)} | kwargs
        ids = kwargs.get("input_ids", args[0] if args else None)
        for name, value in named.items():
            if not isinstance(value, Tensor):
                _check_setting(model, name, value)
            elif batch.tensors:
                if value.requires_grad:
                    raise refuse(
                        f"a batch came with {name} that was computed with gradients, outside of the model's forward"
                    )
            elif value is not ids:
                self._check_tensor(model, name, value, ids)
        if batch.tensors:
            check_call(model, batch.names)

    @property
    def is_under_way(self) -> bool:
        """Whether an earlier forward of the micro-batch keeps what the plan in force says."""
        return self._num_forwards > 1

    def forget_micro_batch(self) -> None:
        self._num_forwards = 0

    def end_micro_batch(self) -> None:
        """Refuse a micro-batch in which the model's own forward did not run."""
        if not self._num_forwards:
            raise refuse(
                "a micro-batch ran without a training forward of the model that the Trainer has: its parts were called "
                "alone, or it was in eval mode"
            )
        self._num_forwards = 0

    def _check_tensor(self, model: nn.Module, name: str, value: Tensor, ids: Any) -> None:
        shape = tuple(value.shape)
        if name == "labels":
            expected = labels_shape(model, *ids.shape)
            if shape != expected:
                raise refuse(
                    f"labels are {[*shape]}, where the loss of {type(model).__name__} was simulated with {[*expected]}"
                )
            return
        is_mask = name == "attention_mask" and shape == tuple(ids.shape)
        if is_mask or value.numel() <= 1 or is_like_tokens(value, ids):
            return
        if name not in self._named:
            # Whole numbers, fewer than tokens: no activation has their shape.
            self._named.add(name)
            logger.warning("Not counted: %s, %s of the batch.", name, format_bytes(value.nbytes))


def _check_setting(model: nn.Module, name: str, value: Any) -> None:
    if name in _KEEPS_MORE and value is True and not getattr(getattr(model, "config", None), name, False):
        raise refuse(
            f"{name}=True keeps tensors that the simulated step does not have",
            f", or set {name} in the model's config",
        )
    check_no_tensors_inside(name, value)


def check_no_tensors_inside(name: str, value: Any) -> None:
    """Refuse an input that is a list or a dictionary of tensors."""
    if _holds_tensor(value):
        raise refuse(f"a batch came with tensors inside {name}, which the simulated step does not have")


def _holds_tensor(value: Any) -> bool:
    """Whether a list or a dictionary holds a tensor, at any depth. A tensor itself holds none."""
    held = list(value.values()) if isinstance(value, Mapping) else value
    return isinstance(held, list | tuple) and any(isinstance(each, Tensor) or _holds_tensor(each) for each in held)
