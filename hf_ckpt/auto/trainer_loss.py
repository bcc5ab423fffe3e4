"""The loss of a Trainer run on fake tensors: its own `compute_loss`, on a stand-in of the Trainer that holds copies.

The stand-in has the Trainer's class and settings. What the loss adds to it, such as metrics, is lost with it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_ckpt.auto.simulation_coverage import losses_of_its_own, refuse
from hf_ckpt.simulation.constant_folding import has_values, raised_at
from hf_ckpt.simulation.fake_model import meta_copy
from hf_ckpt.simulation.step import Sharding, Step, make_inputs
from hf_ckpt.trainer.batch import Batch, largest_text_batch
from hf_ckpt.trainer.other_models import other_models
from hf_ckpt.upstream.trl import ADD_PRODUCT, BACKWARD_TILE, FORWARD_TILE, FUSED_HEAD


class ModelInputs:
    """What the collator of a Trainer makes: here, what the model's own forward takes."""

    @property
    def rows_per_example(self) -> int:
        return 1

    takes_more_than_text = True
    """Whether what is no text may come as well."""

    def largest(self, dataset: Any, collator: Any, num_examples: int, max_length: int | None) -> Batch | None:
        """Return the largest micro-batch that can come; None where no bound is known. See `largest_text_batch`."""
        return largest_text_batch(dataset, collator, num_examples, max_length)

    def make(self, step: Step, model: nn.Module) -> dict[str, Tensor]:
        """Return a micro-batch of the step's size, with values. See `hf_ckpt.simulation.step.make_inputs`."""
        return make_inputs(replace(step, loss=None), model)


@dataclass(frozen=True, eq=False)
class TrainerLoss:
    """See `hf_ckpt.simulation.step.OwnLoss`."""

    trainer: Any
    batch: ModelInputs
    others: Mapping[str, nn.Module]

    @property
    def name(self) -> str:
        return f"{type(self.trainer).__name__}.compute_loss"

    @property
    def code(self) -> tuple[object, ...]:
        return type(self.trainer), vars(self.trainer).get("compute_loss_func")

    @property
    def rows_per_example(self) -> int:
        return self.batch.rows_per_example

    @property
    def keeps_predictions(self) -> bool:
        return getattr(self.trainer, "compute_metrics", None) is not None

    def of(self, batch: Batch) -> TrainerLoss:
        """Return the loss to simulate a batch with.

        Raises:
            UnsupportedError: it is not known for such a batch.
        """
        if batch.tensors and not self.batch.takes_more_than_text:
            kind = type(self.trainer).__name__
            raise refuse(f"a batch came with {batch.describe()}, for which {kind}.compute_loss is not")
        return self

    def make_inputs(self, step: Step, model: nn.Module) -> dict[str, Tensor]:
        return self.batch.make(step, model)

    def bound_to(self, model: nn.Module, others: Mapping[str, nn.Module], *, is_cuda: bool) -> partial[Any]:
        """Return `compute_loss` on copies of the models."""
        for each in (model, *others.values()) if is_cuda else ():
            _use_cuda_kernels(each)
        return partial(_compute, _stand_in(self.trainer, model, others), model)

    @property
    def prepares(self) -> str:
        return ""

    def make_prepared(self, step: Step) -> dict[str, Tensor]:
        return {}

    def prepare(self, step: Step, model: nn.Module, loss_of: Callable[..., Any]) -> None:
        """Do nothing: the data loader has the micro-batches."""


class UsersLoss(TrainerLoss):
    """A loss that a user has put in the place of the model's, or label smoothing."""


def users_loss(trainer: Any, model: nn.Module, sharding: Sharding) -> UsersLoss | None:
    """Return what a Trainer computes in the place of the model's own loss; None of any other, and of those of trl."""
    # A model that the Trainer has as an attribute, such as a teacher, is one that its loss may ask.
    if trainer is None or sharding.engine not in ("none", "ddp"):
        return None
    is_trls = any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)
    is_replaced = getattr(trainer, "label_smoother", None) is not None or any(losses_of_its_own(trainer))
    if not is_replaced or is_trls:
        return None
    found = other_models(trainer, model, trainer.args.device)
    asked = {other.attribute: other.module for other in found if other.module is not None}
    has = {name: module for name, module in asked.items() if vars(trainer).get(name) is module}
    return UsersLoss(trainer, ModelInputs(), {name: meta_copy(module) for name, module in has.items()})


def _compute(stand_in: Any, model: nn.Module, inputs: dict[str, Any], **options: Any) -> Any:
    labels = inputs.get("labels")
    # Labelled tokens of a step are counted for these alone; trl's losses need no such number.
    counts_items = any(getattr(stand_in, name, None) is not None for name in ("compute_loss_func", "label_smoother"))
    if isinstance(labels, Tensor) and has_values(labels) and counts_items:
        options["num_items_in_batch"] = (labels != _IGNORED).sum()
    try:
        with _NumbersUnknown(), warnings.catch_warnings():
            # Said again by the Trainer itself.
            warnings.simplefilter("ignore")
            return stand_in.compute_loss(model, inputs, **options)
    except (_ValueNeededError, AttributeError, KeyError, TypeError, IndexError) as error:
        kind = type(stand_in).__name__
        if isinstance(error, KeyError) and error.args[0] not in inputs:
            raise refuse(
                f"{kind}.compute_loss reads {error} of a batch; only what the model's forward takes is simulated"
            ) from error
        raise refuse(
            f"{kind}.compute_loss cannot be simulated: of tensors without values it raises {type(error).__name__} "
            f'"{error}"{raised_at(error)[0]}'
        ) from error


_IGNORED = -100  # The label of a token that is no item.


def _stand_in(trainer: Any, model: nn.Module, others: Mapping[str, nn.Module]) -> Any:
    made = object.__new__(type(trainer))
    vars(made).update({name: _copied(value) for name, value in vars(trainer).items()})
    vars(made).update({"model": model, "model_wrapped": model, "accelerator": _Alone(trainer.accelerator), **others})
    # A loss may log by itself, which reporters would hear of.
    vars(made).update({"log": lambda *args, **kwargs: None, "args": copy.copy(trainer.args)})
    made.args.report_to = []
    return made


def _copied(value: Any) -> Any:
    """Return a container of its own, as deep as containers go: losses append their metrics to lists."""
    if type(value) in (list, set):
        return type(value)(map(_copied, value))
    if isinstance(value, dict) and hasattr(value, "copy"):
        copied = value.copy()
        copied.update({key: _copied(each) for key, each in value.items()})
        return copied
    return value


class _Alone:
    """The accelerator as a loss sees it that runs on fake tensors: on the CPU, and in one process only."""

    device = torch.device("cpu")

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what this rank gives: of all ranks, numbers for metrics are gathered."""
        return tensor

    gather_for_metrics = reduce = gather

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model: nothing is around a copy."""
        return model


# --- Numbers of tensors without values. ---


class _ValueNeededError(Exception):
    """A loss decides by a number that is not known."""


def _refused(*args: Any) -> Any:
    raise _ValueNeededError("it decides by a number that depends on the weights")


class _UnknownNumber:
    """What `item()` returns of a tensor without values: to be computed with and noted, not to decide by."""

    def _itself(self, *others: object) -> _UnknownNumber:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _itself
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __round__ = _itself
    __bool__ = __int__ = __float__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refused

    def __format__(self, format_spec: str) -> str:
        # Printed, it decides nothing.
        return "?"

    __hash__ = None  # type: ignore[assignment]


class _NumbersUnknown(TorchFunctionMode):
    """Lets a loss note numbers of fake tensors, as for its metrics."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.item and not has_values(args[0]):
            return _UnknownNumber()
        return function(*args, **(kwargs or {}))


# --- trl's head and loss as they run on CUDA. ---


def _use_cuda_kernels(copied: nn.Module) -> None:
    """Let a copy of a model run trl's fused head as on CUDA, where a kernel of Triton works in place."""
    # Elsewhere trl computes the same with operators of torch, and so it does on the tensors of a simulation: with
    # several float32 copies of each tile of logits, of up to 512 MiB, which CUDA never has. Functions are made anew:
    # those of trl stay as they are. Source: `trl/kernels/chunked_logprob.py`.
    for module in copied.modules():
        forward = vars(module).get("forward")
        function = getattr(forward, "__func__", None)
        if isinstance(function, FunctionType) and FUSED_HEAD in function.__globals__:
            loss = _in_place(function.__globals__[FUSED_HEAD])
            module.forward = MethodType(with_globals(function, {FUSED_HEAD: loss}), module)


def _in_place(loss: Any) -> Any:
    """Return an autograd function like trl's whose steps on a tile take no memory."""
    steps = {FORWARD_TILE: _fold, BACKWARD_TILE: _turn_to_gradient, ADD_PRODUCT: _add_product}
    methods = {name: staticmethod(with_globals(getattr(loss, name), steps)) for name in ("forward", "backward")}
    return type(loss.__name__, (torch.autograd.Function,), methods)


def with_globals(function: FunctionType, changes: dict[str, Any]) -> FunctionType:
    """Return a function made anew that finds other things by these names of its module."""
    names = {**function.__globals__, **changes}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _fold(tile: Tensor, *args: Any, **kwargs: Any) -> None:
    """Write into the statistics of each row what depends on its tile."""
    for each in args:
        if isinstance(each, Tensor) and each.is_floating_point():
            each.copy_(tile[:, 0])


def _turn_to_gradient(tile: Tensor, *args: Any, **kwargs: Any) -> None:
    """Put the gradient of the logits in their place."""


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
