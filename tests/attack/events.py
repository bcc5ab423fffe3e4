"""Late events: what may change in a training from some step on. `layer_events` has those inside layers.

An event is given the `Training` before its step begins, and draws what it leaves open (which module, before or behind
it, in one layer or in all). Everything that it does is exact without a plan, and repeatable. Knows nothing of plans.
"""

from __future__ import annotations

import contextvars
import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.pytorch_utils import Conv1D

from tests.attack.layer_events import EVENTS, Event, EventError, Kind, Needs, halved, takes_product
from tests.attack.models import Act, Ground, layers_of

if TYPE_CHECKING:
    from tests.attack.training import Training


def event(kind: Kind, needs: Needs = "any") -> Callable[[Callable[[Training, random.Random], None]], Any]:
    """Make a function an event; it is named by its own name."""

    def add(happen: Callable[[Training, random.Random], None]) -> Any:
        EVENTS[happen.__name__] = Event(happen.__name__, kind, happen, needs)
        return happen

    return add


# --- A surrounding context. ---

_LEVEL: contextvars.ContextVar[float] = contextvars.ContextVar("level", default=1.0)


@event("mode")
def sets_context_around_forward(training: Training, rng: random.Random) -> None:
    """A context that is left before the backward."""
    reads_at(training, rng, lambda ground, hidden: hidden * _LEVEL.get())

    def around() -> AbstractContextManager[Any]:
        return _Level()

    training.around_forward = around


class _Level:
    def __enter__(self) -> None:
        self._token = _LEVEL.set(1.5)

    def __exit__(self, *raised: object) -> None:
        _LEVEL.reset(self._token)


def reads_at(training: Training, rng: random.Random, does: Act) -> None:
    """Switch something on in all layers."""
    where = rng.choice(("before", "behind"))
    for ground in training.grounds:
        ground.switch(does, where, is_hidden=True)


# --- Hooks on modules. ---

LINEAR = (nn.Linear, Conv1D)


def chosen_module(training: Training, rng: random.Random, kind: type | tuple[type, ...] = nn.Module) -> nn.Module:
    """Draw a module of a layer."""
    layer = rng.choice(list(layers_of(training.model)))
    found = [m for m in layer.modules() if isinstance(m, kind) and not isinstance(m, nn.ModuleList | nn.ModuleDict)]
    return rng.choice([m for m in found if type(m).forward is not nn.Module.forward] or [layer])


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


def _like(value: Any, first: Tensor) -> Any:
    return (first, *value[1:]) if isinstance(value, tuple) else first


@event("forward hook")
def places_forward_hook(training: Training, rng: random.Random) -> None:
    options = rng.choice(({}, {"prepend": True}, {"always_call": True}))
    module = chosen_module(training, rng)
    handle = module.register_forward_hook(lambda m, args, out: _like(out, _first(out) * 1.5), **options)
    training.kept["handle"] = handle


@event("forward hook")
def places_writing_forward_hook(training: Training, rng: random.Random) -> None:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        _first(out).data.mul_(1.5)

    chosen_module(training, rng, LINEAR).register_forward_hook(hook, prepend=rng.random() < 0.5)


@event("forward hook")
def places_forward_pre_hook(training: Training, rng: random.Random) -> None:
    module = chosen_module(training, rng, (*LINEAR, nn.LayerNorm))
    module.register_forward_pre_hook(lambda m, args: (args[0] * 1.5, *args[1:]), prepend=rng.random() < 0.5)


@event("noise")
def places_noisy_pre_hook(training: Training, rng: random.Random) -> None:
    def hook(module: nn.Module, args: Any) -> Any:
        noise = torch.from_numpy((np.random.rand(*args[0].shape) > 0.3) * 1.25)
        return (args[0] * noise.to(args[0].dtype), *args[1:])

    chosen_module(training, rng, LINEAR).register_forward_pre_hook(hook)


@event("forward hook")
def removes_forward_hook(training: Training, rng: random.Random) -> None:
    training.early_hook.remove()


@event("forward hook")
def exchanges_forward_hook(training: Training, rng: random.Random) -> None:
    training.early_hook.remove()
    layer = rng.choice(list(layers_of(training.model)))
    layer.register_forward_hook(lambda m, args, out: _like(out, _first(out) * 0.75))


@event("forward hook")
def hooks_centre_over_positions(training: Training, rng: random.Random) -> None:
    module = chosen_module(training, rng, LINEAR)
    module.register_forward_hook(lambda m, args, out: out - 0.5 * out.mean(1, keepdim=True) if out.ndim == 3 else out)


@event("forward hook")
def hook_removes_itself(training: Training, rng: random.Random) -> None:
    """For one forward only."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        training.kept["handle"].remove()
        return _like(out, _first(out) * 1.5)

    training.kept["handle"] = chosen_module(training, rng).register_forward_hook(hook)


@event("forward hook")
def hook_stands_for_forward_only(training: Training, rng: random.Random) -> None:
    """As a logger's or a steering context: placed around each forward, gone in the backward."""
    module = chosen_module(training, rng)

    class Around:
        def __enter__(self) -> None:
            self.handle = module.register_forward_hook(lambda m, args, out: _like(out, _first(out) * 1.5))

        def __exit__(self, *raised: object) -> None:
            self.handle.remove()

    training.around_forward = Around


def _grad_hook(training: Training) -> Callable[..., Any]:
    def hook(module: nn.Module, given: Any, out: Any) -> Any:
        training.counts["module hook"] += 1
        return tuple(None if each is None else each * 0.5 for each in given)

    return hook


@event("gradient hook")
def places_full_backward_hook(training: Training, rng: random.Random) -> None:
    chosen_module(training, rng).register_full_backward_hook(_grad_hook(training), prepend=rng.random() < 0.5)


@event("gradient hook")
def places_full_backward_pre_hook(training: Training, rng: random.Random) -> None:
    def hook(module: nn.Module, given: Any) -> Any:
        training.counts["module pre-hook"] += 1
        return tuple(None if each is None else each * 0.5 for each in given)

    chosen_module(training, rng).register_full_backward_pre_hook(hook)


@event("gradient hook")
def normalises_gradient_inside(training: Training, rng: random.Random) -> None:
    def hook(module: nn.Module, given: Any, out: Any) -> Any:
        return tuple(None if each is None else each / (each.norm() + 1) for each in given)

    chosen_module(training, rng, LINEAR).register_full_backward_hook(hook)


def _chosen_parameter(training: Training, rng: random.Random) -> nn.Parameter:
    return rng.choice([each for each in training.model.parameters() if each.requires_grad])


@event("gradient hook")
def places_parameter_hook(training: Training, rng: random.Random) -> None:
    training.kept["handle"] = _chosen_parameter(training, rng).register_hook(partial(halved, training.counts, "hook"))


@event("gradient hook")
def places_clipping_parameter_hooks(training: Training, rng: random.Random) -> None:
    def hook(grad: Tensor) -> Tensor:
        training.counts["clipped"] += 1
        return grad.clamp(-1e-3, 1e-3)

    for parameter in training.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(hook)


@event("gradient hook")
def places_post_accumulate_hook(training: Training, rng: random.Random) -> None:
    def hook(parameter: Tensor) -> None:
        training.counts["accumulated"] += 1
        parameter.grad.mul_(0.5)

    _chosen_parameter(training, rng).register_post_accumulate_grad_hook(hook)


@event("gradient hook")
def hooks_hidden_states(training: Training, rng: random.Random) -> None:
    """A forward hook of a layer that places a tensor hook on what it returns, or was given."""
    layer, is_given = rng.choice(list(layers_of(training.model))), rng.random() < 0.5

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        tensor = args[0] if is_given and args else _first(out)
        if tensor.requires_grad:
            tensor.register_hook(partial(halved, training.counts, "hook"))

    layer.register_forward_hook(hook)


@event("gradient hook")
def hooks_head_input(training: Training, rng: random.Random) -> None:
    head = next(module for name, module in training.model.named_modules() if name.endswith("lm_head"))

    def hook(module: nn.Module, args: Any) -> None:
        args[0].register_hook(partial(halved, training.counts, "hook"))

    head.register_forward_pre_hook(hook)


# --- Parameters. ---


@event("parameter")
def freezes_parameter(training: Training, rng: random.Random) -> None:
    _chosen_parameter(training, rng).requires_grad_(False)


@event("parameter")
def freezes_layers(training: Training, rng: random.Random) -> None:
    layers = list(layers_of(training.model))
    for layer in layers[: rng.randrange(1, len(layers))]:
        layer.requires_grad_(False)


@event("parameter")
def freezes_embeddings(training: Training, rng: random.Random) -> None:
    training.model.requires_grad_(False)
    for layer in layers_of(training.model):
        layer.requires_grad_(True)


@event("parameter")
def unfreezes_layers(training: Training, rng: random.Random) -> None:
    """Needs parameters that were frozen when training began: all of the model's, where it is adapted."""
    for parameter in training.model.parameters():
        parameter.requires_grad_(True)
    training.add_to_optimizer(training.model.parameters())


@event("parameter")
def replaces_parameter(training: Training, rng: random.Random) -> None:
    module = chosen_module(training, rng, LINEAR)
    module.weight = nn.Parameter(module.weight.detach() * 0.5, requires_grad=module.weight.requires_grad)
    training.add_to_optimizer([module.weight])


@event("parameter")
def swaps_data(training: Training, rng: random.Random) -> None:
    parameter = _chosen_parameter(training, rng)
    parameter.data = parameter.data.clone() * 0.5


@event("parameter")
def writes_weights(training: Training, rng: random.Random) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.9)


@event("parameter")
def ties_weights(training: Training, rng: random.Random) -> None:
    grounds = training.grounds
    for ground in grounds[1:]:
        ground.weight = grounds[0].weight
    reads_at(training, rng, takes_product)


@event("parameter")
def trains_new_parameter(training: Training, rng: random.Random) -> None:
    ground = rng.choice(training.grounds)
    ground.extra = nn.Parameter(torch.ones(()))
    training.add_to_optimizer([ground.extra])
    ground.switch(lambda ground, hidden: hidden * ground.extra, "before", is_hidden=False)


@event("parameter")
def parametrizes_weight(training: Training, rng: random.Random) -> None:
    module = chosen_module(training, rng, LINEAR)
    if rng.random() < 0.5:
        parametrizations.weight_norm(module)
    else:
        parametrize.register_parametrization(module, "weight", nn.Tanh())
    training.add_to_optimizer(module.parameters())


@event("parameter")
def prunes_weight(training: Training, rng: random.Random) -> None:
    module = chosen_module(training, rng, LINEAR)
    prune.l1_unstructured(module, "weight", amount=0.3)
    training.add_to_optimizer(module.parameters())


@event("parameter", "by hand")
def changes_dtype(training: Training, rng: random.Random) -> None:
    training.model.to(torch.bfloat16)


@event("parameter", "own loop")
def adds_param_group(training: Training, rng: random.Random) -> None:
    frozen = [each for each in training.grounds[0].parameters() if each.requires_grad]
    training.optimizer.param_groups[0]["params"] = [
        each for each in training.optimizer.param_groups[0]["params"] if all(each is not one for one in frozen)
    ]
    training.optimizer.add_param_group({"params": frozen, "lr": 0.05})


# --- Modules and their attributes. ---


@event("module")
def exchanges_module(training: Training, rng: random.Random) -> None:
    ground = rng.choice(training.grounds)
    ground.inner = copy.deepcopy(ground.inner)
    training.add_to_optimizer(ground.inner.parameters())


@event("module")
def patches_forward_of_instance(training: Training, rng: random.Random) -> None:
    module = chosen_module(training, rng, LINEAR)
    found = module.forward
    module.forward = lambda hidden: found(hidden) * 1.5


@event("module")
def changes_rates_of_dropout(training: Training, rng: random.Random) -> None:
    for module in training.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.3


@event("module")
def changes_scale(training: Training, rng: random.Random) -> None:
    reads_at(training, rng, lambda ground, hidden: hidden * ground.scale)
    for ground in training.grounds:
        ground.scale = 1.25


@event("module")
def changes_scale_every_step(training: Training, rng: random.Random) -> None:
    reads_at(training, rng, lambda ground, hidden: hidden * ground.scale)

    def begin(step: int) -> None:
        for ground in training.grounds:
            ground.scale = 1 + 0.1 * step

    training.begins_step.append(begin)


@event("module")
def changes_scale_before_backward(training: Training, rng: random.Random) -> None:
    reads_at(training, rng, lambda ground, hidden: hidden * ground.scale)

    def later(loss: Tensor) -> None:
        for ground in training.grounds:
            ground.scale += 0.25

    training.behind_forward.append(later)


@event("module")
def writes_buffer_before_backward(training: Training, rng: random.Random) -> None:
    reads_at(training, rng, lambda ground, hidden: hidden + ground.seen)

    def later(loss: Tensor) -> None:
        for ground in training.grounds:
            ground.seen.add_(0.25)

    training.behind_forward.append(later)


@event("module")
def writes_weights_before_backward(training: Training, rng: random.Random) -> None:
    """Of all that train, as an optimizer does that steps too early, past their versions."""

    def later(loss: Tensor) -> None:
        for parameter in training.model.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(0.9)

    training.behind_forward.append(later)


@event("module")
def sets_buffer(training: Training, rng: random.Random) -> None:
    reads_at(training, rng, lambda ground, hidden: hidden + ground.seen)
    for ground in training.grounds:
        ground.seen = torch.ones(()) if rng.random() < 0.5 else ground.seen.fill_(0.5)


@event("module")
def removes_module(training: Training, rng: random.Random) -> None:
    """The last layer is dropped."""
    layers = layers_of(training.model)
    del layers[len(layers) - 1]


@event("module")
def copies_model(training: Training, rng: random.Random) -> None:
    """An average of the weights, kept as a copy of the model."""
    training.kept["copy"] = copy.deepcopy(training.model.state_dict())

    def end(step: int) -> None:
        with torch.no_grad():
            for name, value in training.model.state_dict().items():
                if value.is_floating_point() and name in training.kept["copy"]:
                    training.kept["copy"][name].lerp_(value, 0.5)

    training.begins_step.append(end)


@event("module")
def loads_state(training: Training, rng: random.Random) -> None:
    found = training.model.state_dict()
    training.model.load_state_dict({name: value * 0.9 for name, value in found.items()})


@event("module")
def balances_by_statistic(training: Training, rng: random.Random) -> None:
    """As experts without an auxiliary loss: the forward counts, the loop moves a bias."""

    def does(ground: Ground, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            ground.statistic += (hidden > 0).float().mean()
        return hidden + 0.1 * ground.scale

    def begin(step: int) -> None:
        for ground in training.grounds:
            ground.scale, ground.statistic = float(ground.statistic) - 0.5, torch.zeros(())

    reads_at(training, rng, does)
    training.begins_step.append(begin)


# --- Adapters. ---


@event("adapter", "adapted")
def switches_adapter(training: Training, rng: random.Random) -> None:
    training.model.set_adapter("second")
    training.add_to_optimizer(training.model.parameters())


@event("adapter", "adapted")
def adds_adapter(training: Training, rng: random.Random) -> None:
    from peft import LoraConfig

    targets = rng.choice((["v_proj", "gate_proj"], ["down_proj"], ["k_proj"]))
    training.model.add_adapter("late", LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    training.model.set_adapter("late")
    training.add_to_optimizer(training.model.parameters())


@event("adapter", "adapted")
def disables_adapters_in_one_forward(training: Training, rng: random.Random) -> None:
    """As the reference pass of preference training; here with its gradient: no adapter trains in it."""
    training.forwards = 2

    def between() -> None:
        training.model.base_model.disable_adapter_layers()

    training.between_forwards = between
    training.behind_forward.append(lambda loss: training.model.base_model.enable_adapter_layers())


@event("adapter", "adapted")
def switches_adapter_between_forwards(training: Training, rng: random.Random) -> None:
    training.forwards = 2
    training.between_forwards = lambda: training.model.set_adapter("second")
    training.begins_step.append(lambda step: training.model.set_adapter("default"))
    training.add_to_optimizer(training.model.parameters())


@event("adapter", "adapted")
def changes_scaling(training: Training, rng: random.Random) -> None:
    for module in training.model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: 0.5 * scale for name, scale in module.scaling.items()}


@event("adapter", "adapted")
def merges_and_unmerges(training: Training, rng: random.Random) -> None:
    training.model.merge_adapter()
    training.model.unmerge_adapter()


@event("adapter", "adapted")
def deletes_adapter(training: Training, rng: random.Random) -> None:
    training.model.delete_adapter("second")


# --- Modes. ---


@event("mode")
def evaluates_between_steps(training: Training, rng: random.Random) -> None:
    guard = rng.choice((torch.no_grad, torch.inference_mode))

    def begin(step: int) -> None:
        training.model.eval()
        with guard():
            training.model(**training.inputs(step))
        training.model.train()

    training.begins_step.append(begin)


@event("mode")
def trains_in_eval_mode(training: Training, rng: random.Random) -> None:
    module = training.model if rng.random() < 0.5 else chosen_module(training, rng)
    module.eval()
    training.begins_step.append(lambda step: module.eval())


@event("mode")
def switches_mode_before_backward(training: Training, rng: random.Random) -> None:
    training.begins_step.append(lambda step: training.model.train())
    training.behind_forward.append(lambda loss: training.model.eval() and None)


@event("mode")
def switches_autocast_on(training: Training, rng: random.Random) -> None:
    training.autocast = torch.bfloat16


@event("mode")
def switches_autocast_every_other_step(training: Training, rng: random.Random) -> None:
    def begin(step: int) -> None:
        training.autocast = torch.bfloat16 if step % 2 else None

    training.begins_step.append(begin)


@event("mode")
def detects_anomalies(training: Training, rng: random.Random) -> None:
    training.around_forward = lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)


@event("mode")
def saves_tensors_elsewhere(training: Training, rng: random.Random) -> None:
    training.around_forward = lambda: torch.autograd.graph.saved_tensors_hooks(_elsewhere, lambda tensor: tensor)


def _elsewhere(tensor: Tensor) -> Tensor:
    # A copy of a slice begins at another place of a cache line, where kernels add in another order; and what is saved
    # inside of a checkpoint, torch's too, is not handed to the hooks around it.
    return tensor.detach() if tensor.storage_offset() or not tensor.is_contiguous() else tensor.detach().clone()


@event("mode")
def asks_for_input_gradients(training: Training, rng: random.Random) -> None:
    embeddings = next(m for m in training.model.modules() if isinstance(m, nn.Embedding))
    embeddings.requires_grad_(False)
    embeddings.register_forward_hook(lambda m, args, out: out.detach().requires_grad_())


# --- What the model does between layers. ---


def _between(does: Callable[[int, Tensor, Tensor, Tensor | None], Tensor], needs: Needs = "by hand") -> None:
    def happen(training: Training, rng: random.Random) -> None:
        training.model.between = does

    EVENTS[does.__name__] = Event(does.__name__, "between layers", happen, needs)


def writes_context_between_layers(idx: int, hidden: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    shift.add_(0.5)
    return hidden


def writes_context_through_data(idx: int, hidden: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    shift.numpy()[...] += 0.5
    return hidden


def writes_hidden_states(idx: int, hidden: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    return hidden.mul_(0.5)


def writes_hidden_states_through_data(idx: int, hidden: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    hidden.data.mul_(0.5)
    return hidden


def writes_second_stream(idx: int, hidden: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    residual.mul_(0.5)
    return hidden


def detaches_between_layers(idx: int, hidden: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    return hidden.detach() if idx == 0 else hidden


def drops_between_layers(idx: int, hidden: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    return functional.dropout(hidden, 0.2)


def shortens_between_layers(idx: int, hidden: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    """Early tokens are merged into one, and taken apart again by the loss's side of the model."""
    return torch.cat([hidden[:, :2].mean(1, keepdim=True).expand(-1, 2, -1), hidden[:, 2:]], dim=1)


for _does in (
    writes_context_between_layers,
    writes_context_through_data,
    writes_hidden_states,
    writes_hidden_states_through_data,
    detaches_between_layers,
    drops_between_layers,
    shortens_between_layers,
):
    _between(_does)
_between(writes_second_stream, "streams")


# --- Loops. ---


@event("loop")
def sums_two_forwards(training: Training, rng: random.Random) -> None:
    training.forwards = rng.choice((2, 3))


@event("noise")
def changes_dropout_between_forwards(training: Training, rng: random.Random) -> None:
    """R-Drop with two rates."""
    training.forwards = 2
    reads_at(training, rng, lambda ground, hidden: functional.dropout(hidden, 0.2 * ground.scale))

    def between() -> None:
        for ground in training.grounds:
            ground.scale = 2.0

    def begin(step: int) -> None:
        for ground in training.grounds:
            ground.scale = 1.0

    training.between_forwards = between
    training.begins_step.append(begin)


@event("loop")
def freezes_between_forwards(training: Training, rng: random.Random) -> None:
    training.forwards = 2
    weight = training.grounds[0].inner

    def freeze(*, trains: bool) -> None:
        for parameter in weight.parameters():
            parameter.requires_grad_(trains)

    were = any(parameter.requires_grad for parameter in weight.parameters())
    training.between_forwards = lambda: freeze(trains=False)
    training.begins_step.append(lambda step: freeze(trains=were))


@event("loop", "own loop")
def accumulates(training: Training, rng: random.Random) -> None:
    training.micro_batches = 2


@event("loop", "own loop")
def runs_backward_twice(training: Training, rng: random.Random) -> None:
    training.backwards = 2


@event("loop", "own loop")
def takes_gradients_by_grad(training: Training, rng: random.Random) -> None:
    training.by_grad = True


@event("loop")
def drops_a_forward(training: Training, rng: random.Random) -> None:
    training.begins_step.append(lambda step: training.model(**training.inputs(step)) and None)


@event("loop", "own loop")
def keeps_gradients(training: Training, rng: random.Random) -> None:
    """They are set to zero in place."""
    training.sets_to_none = False


@event("loop")
def seeds_anew(training: Training, rng: random.Random) -> None:
    training.begins_step.append(lambda step: torch.manual_seed(3) and None)


@event("loop")
def draws_before_backward(training: Training, rng: random.Random) -> None:
    def later(loss: Tensor) -> None:
        torch.rand(3), np.random.rand(3), random.random()

    training.behind_forward.append(later)


@event("loop")
def penalises_gradients(training: Training, rng: random.Random) -> None:
    """A backward through the backward."""

    def penalty(loss: Tensor) -> Tensor:
        weight = next(each for each in training.grounds[0].parameters() if each.requires_grad)
        (grad,) = torch.autograd.grad(loss, weight, create_graph=True, allow_unused=True)
        return loss if grad is None else loss + grad.square().sum()

    training.losses.append(penalty)


@event("loop")
def penalises_weights(training: Training, rng: random.Random) -> None:
    def penalty(loss: Tensor) -> Tensor:
        return loss + 0.01 * sum(each.square().sum() for each in training.model.parameters() if each.requires_grad)

    training.losses.append(penalty)


# --- Exceptions that the loop catches. ---


def _fails_once(training: Training) -> Callable[[], None]:
    def check() -> None:
        if "failed" not in training.kept:
            training.kept["failed"] = True
            raise EventError("as planned")

    return check


@event("exception")
def fails_in_forward(training: Training, rng: random.Random) -> None:
    check = _fails_once(training)
    module = chosen_module(training, rng)
    module.register_forward_hook(lambda m, args, out: check())


@event("exception")
def fails_behind_forward(training: Training, rng: random.Random) -> None:
    check = _fails_once(training)
    training.behind_forward.append(lambda loss: check())


@event("exception")
def fails_in_backward(training: Training, rng: random.Random) -> None:
    check = _fails_once(training)
    training.kept["handle"] = _chosen_parameter(training, rng).register_hook(lambda grad: check())


@event("exception")
def fails_in_backward_of_tensor(training: Training, rng: random.Random) -> None:
    check = _fails_once(training)
    layer = rng.choice(list(layers_of(training.model)))

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        if _first(out).requires_grad:
            _first(out).register_hook(lambda grad: check())

    layer.register_forward_hook(hook)


@event("exception")
def fails_while_counting(training: Training, rng: random.Random) -> None:
    """In a forward that has written a statistic before."""
    check = _fails_once(training)

    def does(ground: Ground, hidden: Tensor) -> Tensor:
        ground.count += 1
        if ground is training.grounds[-1]:
            check()
        return hidden * (1 + 0.01 * ground.count)

    reads_at(training, rng, does)


# --- Batches. ---


@event("batch")
def nothing_but_length(training: Training, rng: random.Random) -> None:
    """Only the batches change, as they may with any event."""


@event("batch", "own loop")
def another_number_of_rows(training: Training, rng: random.Random) -> None:
    training.rows = rng.choice((1, 3))


@event("batch", "real")
def masks_come(training: Training, rng: random.Random) -> None:
    training.is_padded = True


@event("batch", "real")
def packs_rows(training: Training, rng: random.Random) -> None:
    training.is_packed = True


@event("batch", "real")
def embeds_outside(training: Training, rng: random.Random) -> None:
    """The model is given embeddings, of which the loop asks for gradients."""
    training.gives_embeddings = True


COARSE = ("changes_dtype", "computes_in_bfloat16", "switches_autocast_on", "switches_autocast_every_other_step")
"""Events after which sums in another order show: bfloat16 has three digits."""
