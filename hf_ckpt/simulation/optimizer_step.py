"""The optimizer's state and its step, simulated by themselves: they depend on no plan.

Parameters, gradients and state are fake; nothing of the model runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.simulation.operator_memo import fake_empty, fake_mode, fake_parameter
from hf_ckpt.simulation.optimizers import (
    copy_state,
    host_tensors,
    make_optimizer,
    makes_state_by_looks,
    state_tensors,
    trained_embeddings,
)
from hf_ckpt.simulation.random_states import random_states_kept
from hf_ckpt.simulation.sharded_weights import compute_dtype
from hf_ckpt.simulation.shared_tensors import local_part
from hf_ckpt.simulation.step import MICRO_BATCHES, Step
from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tape import Event, Storage, copied_events
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.upstream.torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    is_traceable_wrapper_subclass,
)


@dataclass(frozen=True)
class OptimizerStep:
    """What the optimizer keeps from step to step, and what its step does."""

    state: tuple[Storage, ...]
    """On the device."""
    host_bytes: int
    """State that lies on the host."""
    events: tuple[Event, ...]
    """Of clipping and of the step, until gradients are freed."""

    def copied_state(self) -> Iterator[Storage]:
        """Yield the state as storages of their own, for a tape."""
        return map(replace, self.state)

    def copied_events(self) -> Iterator[Event]:
        """Yield the events with storages of their own, for a tape."""
        return copied_events(self.events)


def simulate_optimizer(
    model: nn.Module, step: Step, names: frozenset[str], tracker: Tracker, *, is_cuda: bool
) -> OptimizerStep:
    """Simulate the optimizer of a model's trainable parameters, of which those in `names` get a gradient.

    The tracker is a new one, which folds constants. With `is_cuda` clipping works on all gradients at once, as on CUDA.
    Raises what `make_optimizer` raises.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    mode = fake_mode()
    fakes = {parameter: fake_parameter(_fake(parameter, step, mode)) for _, parameter in trainable}
    with random_states_kept(), mode, tracker:
        with tracker.before_step():
            optimizer = make_optimizer(model, step, is_cuda=is_cuda, fake_of=fakes.__getitem__)
            with_gradient = [fakes[parameter] for name, parameter in trainable if name in names]
            embeddings = {*trained_embeddings(model, fakes.__getitem__)}
            _let_make_state(optimizer, with_gradient, embeddings, mode)
            _check_state(optimizer)
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


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    if any(is_traceable_wrapper_subclass(tensor) for _, tensor in state_tensors(optimizer)):
        raise _refused(optimizer, "its state is of a class of its own, whose memory is not known")


def _refused(optimizer: torch.optim.Optimizer, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"The step of optimizer {type(optimizer).__name__} cannot be simulated: {reason}. Use other options of it, or "
        "another optimizer."
    )


def _fake(parameter: nn.Parameter, step: Step, mode: FakeTensorMode) -> FakeTensor:
    # Of shared ones what this rank holds: optimizers work on that.
    dtype, held = compute_dtype(step, parameter), local_part(parameter)
    return fake_empty(held.shape, held.stride(), dtype, mode)


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
        copy_state(optimizer, {each: first for first, *others in alike for each in (first, *others)}, mode)


def _alike(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], embeddings: Collection[nn.Parameter]
) -> Collection[list[nn.Parameter]]:
    """Return the parameters in groups of those that get the same state; bitsandbytes gives embeddings another."""
    if optimizer.state or not makes_state_by_looks(optimizer):
        return [[parameter] for parameter in parameters]
    groups = {each: number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
    alike = dict[Hashable, list[nn.Parameter]]()
    for each in parameters:
        looks = groups.get(each), each.shape, each.stride(), each.dtype, each in embeddings
        alike.setdefault(looks, []).append(each)
    return alike.values()


def _state_of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    counted_elsewhere = {id(tensor) for tensor in (*host_tensors(optimizer), *names)}
    for parameter, tensor in state_tensors(optimizer):
        if id(tensor) not in counted_elsewhere:
            yield names.get(parameter, ""), tensor
