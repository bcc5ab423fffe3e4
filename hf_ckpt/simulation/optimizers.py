"""The optimizer that the Trainer would make, on fake parameters: its state, and its step, which depend on no plan.

Parameters, gradients and state are fake; nothing of the model runs. Paged state lies on the host: it is made outside of
the modes, so that the tracker does not count it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Adafactor, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from hf_ckpt.errors import UnsupportedError, did_you_mean
from hf_ckpt.simulation.fake_model import EmptyCopies
from hf_ckpt.simulation.isolation import random_states_kept
from hf_ckpt.simulation.operator_memo import fake_empty, fake_mode, fake_parameter
from hf_ckpt.simulation.rank_tape import compute_dtype
from hf_ckpt.simulation.shared_tensors import local_part
from hf_ckpt.simulation.step import MICRO_BATCHES, GivenOptimizer, Step
from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tape import Event, Storage, copied_events
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.structure.stored import stored
from hf_ckpt.upstream.bitsandbytes import HAS_WARNED_OF_CPU, STATE_BUFFERS
from hf_ckpt.upstream.torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    is_traceable_wrapper_subclass,
    no_dispatch,
)

_OF_TORCH = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
_OF_BITSANDBYTES = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
    *("ademamix", "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit"),
    *("lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
SUPPORTED = _OF_TORCH + _OF_BITSANDBYTES
"""The optimizers that can be simulated, in the words of `TrainingArguments.optim`."""

_MAKE_STATE_BY_LOOKS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
_NUMEL_PAGED = 1e5  # bitsandbytes pages the state of parameters with at least so many elements.


# --- A step of it. ---


@dataclass(frozen=True)
class OptimizerStep:
    """What the optimizer keeps from step to step, and what its step does."""

    state: tuple[Storage, ...]  # On the device.
    host_bytes: int  # State that lies on the host.
    events: tuple[Event, ...]  # Of clipping and of the step, until gradients are freed.

    def copied_state(self) -> Iterator[Storage]:
        """Yield the state as storages of their own, for a tape."""
        return map(replace, self.state)

    def copied_events(self) -> Iterator[Event]:
        """Yield the events with storages of their own, for a tape."""
        return copied_events(self.events)


def simulate_optimizer(
    model: nn.Module, step: Step, names: frozenset[str], tracker: Tracker, *, is_cuda: bool, pages: bool = True
) -> OptimizerStep:
    """Simulate the optimizer of a model's trainable parameters, of which those in `names` get a gradient.

    The tracker is a new one, which folds constants. With `is_cuda` clipping works on all gradients at once, as on CUDA.
    Without `pages` paged state lies on the device, whose memory is the host's.
    Raises what `make_optimizer` raises.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    mode, fakes = fake_mode(), dict[nn.Parameter, nn.Parameter]()
    for _, parameter in trainable:
        # Of shared ones what this rank holds: optimizers work on that.
        held = local_part(parameter)
        fakes[parameter] = fake_parameter(fake_empty(held.shape, held.stride(), compute_dtype(step, parameter), mode))
    with random_states_kept(), mode, tracker:
        with tracker.before_step():
            optimizer = make_optimizer(model, step, is_cuda=is_cuda, pages=pages, fake_of=fakes.__getitem__)
            with_gradient = [fakes[parameter] for name, parameter in trainable if name in names]
            embeddings = {*trained_embeddings(model, fakes.__getitem__)}
            _let_make_state(optimizer, with_gradient, embeddings, mode)
            if any(is_traceable_wrapper_subclass(tensor) for _, tensor in state_tensors(optimizer)):
                raise _refused(optimizer, "its state is of a class of its own, whose memory is not known")
        tracker.record_existing((("", parameter) for parameter in fakes.values()), Category.PARAMETERS)
        tracker.record_existing((("", _gradient(parameter)) for parameter in with_gradient), Category.GRADIENTS)
        tracker.record_existing(
            _state_of(optimizer, {fakes[parameter]: name for name, parameter in trainable}), Category.OPTIMIZER
        )
        state = [storage for storage in tracker.tape.before if storage.category is Category.OPTIMIZER]
        tracker.start_micro_batch(min(step.gradient_accumulation_steps, MICRO_BATCHES) - 1)
        with tracker.phase(Phase.OPTIMIZER):
            if step.max_grad_norm > 0:
                torch.nn.utils.clip_grad_norm_(with_gradient, step.max_grad_norm, foreach=is_cuda or None)
            _run_step(optimizer)
        host_bytes = sum(tensor.nbytes for tensor in host_tensors(optimizer))
        return OptimizerStep(tuple(state), host_bytes, tuple(tracker.tape.events))


def _run_step(optimizer: torch.optim.Optimizer) -> None:
    if inspect.unwrap(type(optimizer).step) is torch.optim.Optimizer.step:
        raise UnsupportedError(
            f"The step of optimizer {type(optimizer).__name__} cannot be simulated: it has none, as it changes weights "
            "and frees gradients in backward (LOMO does), and a simulated step keeps gradients to its end. Use a fixed "
            'policy, such as HFCkptCallback("full"), or an optimizer with a step.'
        )
    try:
        optimizer.step()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        reason = f"it reads values of tensors ({error.func}), and a simulated step has shapes only"
        raise _refused(optimizer, reason) from error
    except Exception as error:
        # The code of any library: it may need what no fake tensor has.
        said = str(error).strip().partition("\n")[0]
        raise _refused(optimizer, ": ".join(filter(None, (type(error).__name__, said)))) from error


def _refused(optimizer: torch.optim.Optimizer, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"The step of optimizer {type(optimizer).__name__} cannot be simulated: {reason}. Use other options of it, or "
        "another optimizer."
    )


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "it was set before the first step"
    return parameter.grad


# --- The first step, in which the state is made. ---


def _let_make_state(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    embeddings: Collection[nn.Parameter],
    mode: FakeTensorMode,
) -> None:
    """Give parameters a gradient each, and let the optimizer step with one of those that get the same state."""
    alike = _alike(optimizer, parameters, embeddings)
    for first, *_ in alike:
        first.grad = torch.zeros_like(first)
    _run_step(optimizer)
    if len(alike) < len(parameters):
        for first, *others in alike:
            for parameter in others:
                parameter.grad = fake_empty(parameter.shape, _gradient(first).stride(), parameter.dtype, mode)
        _copy_state(optimizer, {each: first for first, *others in alike for each in (first, *others)}, mode)


def _makes_state_by_looks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it makes the state of a parameter from its shape, strides, dtype and group alone, in the first step."""
    kind = type(optimizer)
    return kind in _MAKE_STATE_BY_LOOKS or kind.__module__.startswith("bitsandbytes.optim.")


def _alike(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], embeddings: Collection[nn.Parameter]
) -> Collection[list[nn.Parameter]]:
    """Return the parameters in groups of those that get the same state; bitsandbytes gives embeddings another."""
    if optimizer.state or not _makes_state_by_looks(optimizer):
        return [[parameter] for parameter in parameters]
    groups = {each: number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
    alike = dict[Hashable, list[nn.Parameter]]()
    for each in parameters:
        looks = groups.get(each), each.shape, each.stride(), each.dtype, each in embeddings
        alike.setdefault(looks, []).append(each)
    return alike.values()


def _copy_state(
    optimizer: torch.optim.Optimizer, like: Mapping[nn.Parameter, nn.Parameter], mode: FakeTensorMode
) -> None:
    """Give each parameter a state like that of another one, in the order in which a first step would."""
    made, was_on_host = dict(optimizer.state), {id(each) for each in host_tensors(optimizer)}
    shared = {id(each) for each in _own_tensors(optimizer, set(was_on_host))}
    on_host: list[Tensor] = []

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in shared:
            return value
        if value.dim() == 0 and not isinstance(value, FakeTensor):
            # The number of steps, which is read.
            return value.clone()
        found = fake_empty(value.shape, value.stride(), value.dtype, mode)
        if id(value) in was_on_host:
            on_host.append(found)
        return found

    optimizer.state.clear()
    with disable_current_modes():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in like:
                    of_other = made[like[parameter]]
                    optimizer.state[parameter] = {name: copied(value) for name, value in of_other.items()}
    if on_host:
        cast(Any, optimizer)._hf_ckpt_on_host[:] = on_host


def _state_of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    counted_elsewhere = {id(tensor) for tensor in (*host_tensors(optimizer), *names)}
    for parameter, tensor in state_tensors(optimizer):
        if id(tensor) not in counted_elsewhere:
            yield names.get(parameter, ""), tensor


# --- The optimizer itself. ---


FakeOf = Callable[[nn.Parameter], nn.Parameter]


def make_optimizer(
    model: nn.Module, step: Step, *, is_cuda: bool, pages: bool = True, fake_of: FakeOf = lambda parameter: parameter
) -> torch.optim.Optimizer:
    """Make the optimizer that the Trainer would make, on fake parameters.

    They are the model's own, or what `fake_of` returns for the trainable ones.

    With `is_cuda` torch's own optimizers work on all tensors of a group at once, and paged state lies on the host.
    The optimizer makes its state in its first `step()`, except Adagrad, which makes it at once.
    Raises `UnsupportedError` when it cannot be simulated, or its package is not installed.
    """
    if step.given_optimizer is not None:
        _check_shards(step.given_optimizer.kind, step)
        optimizer = _make_given(model, step.given_optimizer, fake_of)
    else:
        optimizer_class, kwargs = _class_and_kwargs(model, step)
        _check_shards(optimizer_class, step)
        groups = _groups(model, step.optim_arguments.get("weight_decay", 0.0), fake_of)
        if step.optim in _OF_BITSANDBYTES:
            return _make_bitsandbytes(
                trained_embeddings(model, fake_of), optimizer_class, groups, kwargs, pages=is_cuda and pages
            )
        optimizer = optimizer_class(groups, **kwargs)
    for group in optimizer.param_groups if is_cuda else ():
        # Where it is None, torch reads the device of the parameters, and these are fake CPU tensors.
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer


def _check_shards(kind: type, step: Step) -> None:
    """Refuse an optimizer whose state of a shard is no share of its state of the whole."""
    engine = step.sharding.engine
    if kind is Adafactor and step.sharding.world_size > 1 and engine.startswith(("fsdp", "zero")):
        raise UnsupportedError(
            f"The step of optimizer Adafactor cannot be simulated under {engine}: of a shard, which is flat, it keeps "
            "a number for each weight, and not one for each row and column. Use another optimizer, or DDP."
        )


def _make_given(model: nn.Module, given: GivenOptimizer, fake_of: FakeOf) -> torch.optim.Optimizer:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if given.copied is not None:
        return _copy_given(trained, given, given.copied, fake_of)
    groups = [
        {**options, "params": [fake_of(trained[name]) for name in names if name in trained]}
        for names, options in given.groups
    ]
    make: Any = given.kind
    return cast(torch.optim.Optimizer, make(groups))


def _copy_given(
    trained: Mapping[str, nn.Parameter], given: GivenOptimizer, made: torch.optim.Optimizer, fake_of: FakeOf
) -> torch.optim.Optimizer:
    """Return a copy of an optimizer of any class, whose parameters and state are fake; numbers keep their values."""
    names = [name for group, _ in given.groups for name in group]
    parameters = [parameter for group in made.param_groups for parameter in group["params"]]
    fakes = {id(each): fake_of(trained[name]) for name, each in zip(names, parameters, strict=True) if name in trained}
    copied = object.__new__(type(made))
    # A scheduler has put a function that steps the optimizer itself on the instance; hooks are of the user's.
    found = {name: {} if name in _STEP_HOOKS else value for name, value in vars(made).items() if name != "step"}
    with EmptyCopies(_fake_state):
        vars(copied).update(copy.deepcopy(found, {**fakes, id(made): copied}))
    for group in copied.param_groups:
        group["params"] = [each for each in group["params"] if isinstance(each, FakeTensor)]
    # As the Trainer does with those that have two modes (schedule-free ones).
    getattr(copied, "train", lambda: None)()
    return copied


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _fake_state(tensor: Tensor) -> Tensor:
    """Return what stands for a tensor that an optimizer holds already; a single number may be read."""
    if tensor.dim() == 0:
        return tensor.detach().clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def host_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the optimizer's state that lies on the host: that of paged optimizers on CUDA."""
    yield from getattr(optimizer, "_hf_ckpt_on_host", ())


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, Tensor]]:
    """Yield the tensors that an optimizer keeps from step to step, each with its parameter; None where it has none.

    They may lie in lists, dictionaries and objects, such as the projection of GaLore.
    """
    seen: set[int] = set()
    for parameter, state in optimizer.state.items():
        yield from ((parameter, tensor) for tensor in _tensors_in(state, seen))
    yield from ((None, tensor) for tensor in _own_tensors(optimizer, seen))


def _own_tensors(optimizer: torch.optim.Optimizer, seen: set[int]) -> Iterator[Tensor]:
    """Yield what an optimizer keeps for all parameters together."""
    own = {
        name: value
        for name, value in vars(innermost_optimizer(optimizer)).items()
        if name not in ("state", "param_groups")
    }
    yield from (tensor for tensor in _tensors_in(own, seen) if not isinstance(tensor, nn.Parameter))


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(each, seen)
    elif not isinstance(value, type | nn.Module | torch.optim.Optimizer):
        yield from _tensors_in(getattr(value, "__dict__", None), seen)


def innermost_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that accelerate and DeepSpeed have put wrappers around."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _class_and_kwargs(model: nn.Module, step: Step) -> tuple[Any, dict[str, Any]]:
    if step.optim not in SUPPORTED:
        raise UnsupportedError(
            f'The step of optimizer "{step.optim}" cannot be simulated. Those that can are {", ".join(SUPPORTED)}.'
            f"{did_you_mean(step.optim, SUPPORTED)}"
        )
    # A real `TrainingArguments` would set the device of this process.
    arguments = {field.name: _default(field) for field in fields(TrainingArguments)} | step.optim_arguments
    arguments["optim"] = OptimizerNames(step.optim)
    try:
        found = Trainer.get_optimizer_cls_and_kwargs(
            cast(TrainingArguments, SimpleNamespace(**arguments)), cast(Any, model)
        )
    except ImportError as error:
        raise UnsupportedError(f'The step of optimizer "{step.optim}" cannot be simulated: {error}') from error
    return found[0], dict(found[1])


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def _groups(model: nn.Module, weight_decay: float, fake_of: FakeOf) -> list[dict[str, Any]]:
    """Return the groups of `Trainer.create_optimizer`: temporaries of foreach optimizers are made group by group."""
    # The method does not read the Trainer.
    decaying = set(Trainer.get_decay_parameter_names(cast(Trainer, None), model))
    trainable = [(name, fake_of(parameter)) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in trainable if name in decaying], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in trainable if name not in decaying], "weight_decay": 0.0},
    ]


# --- bitsandbytes. ---


def trained_embeddings(model: nn.Module, fake_of: FakeOf) -> list[nn.Parameter]:
    """Return the fake weights of embeddings, which bitsandbytes gives a state of its own."""
    embeddings = (stored(module, "weight") for module in model.modules() if isinstance(module, nn.Embedding))
    return [fake_of(cast(nn.Parameter, weight)) for weight in embeddings if weight is not None and weight.requires_grad]


def _make_bitsandbytes(
    embeddings: Sequence[nn.Parameter],
    optimizer_class: Any,
    groups: list[dict[str, Any]],
    kwargs: dict[str, Any],
    *,
    pages: bool,
) -> torch.optim.Optimizer:
    from bitsandbytes.optim.optimizer import GlobalOptimManager

    # It computes its quantisation maps when it is made, with values.
    with disable_current_modes():
        optimizer = optimizer_class(groups, **kwargs)
    fake = next((each for group in groups for each in group["params"] if isinstance(each, FakeTensor)), None)
    if fake is not None:
        converter = fake.fake_mode.from_tensor
        optimizer.name2qmap = {name: converter(qmap) for name, qmap in optimizer.name2qmap.items()}
    # The manager that it found belongs to the whole process.
    optimizer.mng = GlobalOptimManager.__new__(GlobalOptimManager)
    optimizer.mng.initialize()
    if kwargs.get("optim_bits") == 8:
        for weight in embeddings:
            # As the Trainer does.
            optimizer.mng.register_module_override(SimpleNamespace(weight=weight), "weight", {"optim_bits": 32})
    # It warns of CPU parameters at each step.
    setattr(optimizer, HAS_WARNED_OF_CPU, True)
    if pages and optimizer.is_paged:
        optimizer._hf_ckpt_on_host = []
        for name, leading in STATE_BUFFERS:
            if hasattr(optimizer, name):
                made = partial(_state_buffer, optimizer._hf_ckpt_on_host, getattr(optimizer, name), leading)
                setattr(optimizer, name, made)
    return cast(torch.optim.Optimizer, optimizer)


def _state_buffer(
    on_host: list[Tensor],
    on_device: Callable[..., Tensor],
    leading: tuple[int, ...],
    parameter: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    if parameter.numel() < _NUMEL_PAGED or not isinstance(parameter, FakeTensor):
        return on_device(parameter, dtype=dtype)
    with no_dispatch():
        shape = torch.empty((*leading, *parameter.shape), dtype=dtype, device="meta")
        on_host.append(FakeTensor(parameter.fake_mode, shape, torch.device("cpu")))
    return on_host[-1]
