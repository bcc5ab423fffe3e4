"""Late events inside layers: what a layer does with a tensor from some step on.

Everything is exact without a plan, and repeatable. Knows nothing of plans.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.attack.models import WIDTH, Act, Ground

if TYPE_CHECKING:
    from tests.attack.training import Training

Kind = Literal[
    "write", "operator", "noise", "state", "gradient hook", "forward hook", "inner gradient", "parameter", "module",
    "adapter", "mode", "between layers", "loop", "exception", "batch",
]  # fmt: skip
Needs = Literal["any", "by hand", "adapted", "real", "own loop", "streams"]


class EventError(RuntimeError):
    """Raised by an event; the loop catches it."""


@dataclass(frozen=True)
class Event:
    """What happens at a step.

    Args:
        happen: makes it happen.
        needs: the models, or the loop, that it suits.
    """

    name: str
    kind: Kind
    happen: Callable[[Training, random.Random], None]
    needs: Needs = "any"


EVENTS: dict[str, Event] = {}


def act(kind: Kind, where: tuple[str, ...] = ("before", "behind")) -> Callable[[Act], Act]:
    """Make what a layer does with a tensor an event: in one layer or in all, before or behind the module there."""

    def add(does: Act) -> Act:
        def happen(training: Training, rng: random.Random) -> None:
            grounds = training.grounds if rng.random() < 0.5 else [rng.choice(training.grounds)]
            side, is_hidden = rng.choice(where), rng.random() < 0.5
            for ground in grounds:
                ground.switch(partial(does), side, is_hidden=is_hidden)

        EVENTS[does.__name__] = Event(does.__name__, kind, happen)
        return does

    return add


def mixed(ground: Ground, hidden: Tensor) -> Tensor:
    """A factor for each position, of a product with the ground's weight."""
    return 1 + 0.1 * torch.tanh(hidden[..., :WIDTH] @ ground.weight).mean(-1, keepdim=True)


# --- Writes into what a module was given, or returned. ---


@act("write")
def writes_in_place(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden.mul_(1.5)


@act("write")
def adds_product_in_place(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden.add_(0.1 * mixed(ground, hidden.detach().clone()))


@act("write")
def writes_through_data(ground: Ground, hidden: Tensor) -> Tensor:
    hidden.data.mul_(1.5)
    return hidden


@act("write")
def writes_through_numpy(ground: Ground, hidden: Tensor) -> Tensor:
    if hidden.dtype is not torch.bfloat16:
        hidden.detach().numpy()[...] *= 1.5
    return hidden


@act("write")
def writes_through_dlpack(ground: Ground, hidden: Tensor) -> Tensor:
    torch.from_dlpack(hidden.detach()).mul_(1.5)
    return hidden


@act("write")
def writes_into_unsafe_part(ground: Ground, hidden: Tensor) -> Tensor:
    hidden.unsafe_chunk(2, dim=-1)[0].mul_(1.5)
    return hidden


@act("write")
def writes_into_detached_view(ground: Ground, hidden: Tensor) -> Tensor:
    hidden.detach()[..., ::2].mul_(1.5)
    return hidden


@act("write")
def writes_without_gradient(ground: Ground, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        hidden.clamp_(-0.5, 0.5)
    return hidden


@act("write")
def writes_with_foreach(ground: Ground, hidden: Tensor) -> Tensor:
    torch._foreach_mul_([hidden.detach()], 1.5)
    return hidden


@act("write")
def writes_as_out(ground: Ground, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(hidden, 1.5, out=hidden)
    return hidden


@act("write")
def writes_row_by_index(ground: Ground, hidden: Tensor) -> Tensor:
    hidden.data[:, 0] *= 0.5
    return hidden


@act("write")
def swaps_storage(ground: Ground, hidden: Tensor) -> Tensor:
    hidden.data = hidden.data * 1.5
    return hidden


@act("write", ("behind",))
def writes_into_copy_of_product(ground: Ground, hidden: Tensor) -> Tensor:
    product = torch.matmul(hidden[..., :WIDTH], ground.weight)
    product.detach().numpy()[..., 0] = 0.25
    return hidden * (1 + 0.1 * product.tanh().mean(-1, keepdim=True))


# --- Another operator is taken. ---


@act("operator")
def takes_distance(ground: Ground, hidden: Tensor) -> Tensor:
    """From 26 tokens on torch writes in place inside of it."""
    given = hidden[..., :WIDTH]
    distance = torch.cdist(given, ground.weight.expand(len(given), WIDTH, WIDTH))
    return hidden * (1 + distance.softmax(-1)[..., :1])


@act("operator")
def takes_product(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden * mixed(ground, hidden)


@act("operator")
def takes_einsum(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden * (1 + 0.1 * torch.einsum("bsi,ij->bsj", hidden[..., :WIDTH], ground.weight).sum(-1, keepdim=True))


@act("operator")
def takes_bmm(ground: Ground, hidden: Tensor) -> Tensor:
    scores = torch.bmm(hidden, hidden.mT) * 0.1
    return hidden + torch.baddbmm(hidden, torch.softmax(scores, -1), hidden, beta=0.0, alpha=0.1)


@act("operator")
def takes_attention(ground: Ground, hidden: Tensor) -> Tensor:
    heads = hidden[:, None]
    return hidden + 0.1 * functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]


@act("operator")
def takes_convolution(ground: Ground, hidden: Tensor) -> Tensor:
    along = functional.conv1d(hidden[..., :WIDTH].mT, ground.weight[:, :, None].expand(-1, -1, 3), padding=1).mT
    return hidden * (1 + 0.1 * along.mean(-1, keepdim=True))


@act("operator")
def centres_over_positions(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden - 0.5 * hidden.mean(1, keepdim=True)


@act("operator")
def sums_over_positions(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden + 0.01 * hidden.cumsum(1)


@act("operator")
def looks_at_last_position(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden + 0.1 * hidden[:, -1:]


@act("operator")
def sorts(ground: Ground, hidden: Tensor) -> Tensor:
    values, places = hidden.sort(dim=-1)
    return hidden + 0.1 * values.gather(-1, places)


@act("operator")
def branches_on_values(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden * 0.5 if float(hidden.detach().flatten()[0]) > 0 else hidden * mixed(ground, hidden)


@act("operator")
def multiplies_by_addmm(ground: Ground, hidden: Tensor) -> Tensor:
    rows = hidden[..., :WIDTH].flatten(0, 1)
    out = torch.addmm(rows, rows, ground.weight).addmm_(rows, ground.weight, alpha=0.1)
    return hidden * (1 + 0.1 * out.tanh().mean(-1).view(*hidden.shape[:2], 1))


@act("operator")
def normalises_weight(ground: Ground, hidden: Tensor) -> Tensor:
    weight = ground.weight / ground.weight.norm(dim=0, keepdim=True)
    return hidden * (1 + 0.1 * functional.linear(hidden[..., :WIDTH], weight).mean(-1, keepdim=True))


@act("operator")
def stops_gradient(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden.detach() * mixed(ground, hidden.detach())


@act("operator")
def returns_view(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden.transpose(0, 1).transpose(0, 1)


@act("operator")
def checkpoints_inside(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden * torch.utils.checkpoint.checkpoint(mixed, ground, hidden, use_reentrant=False)


@act("operator")
def differentiates_by_func(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden * (1 + 0.1 * torch.vmap(torch.sin)(hidden))


class _Gate(torch.autograd.Function):
    """Reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden * torch.sigmoid(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if len(ctx.saved_tensors) != 2:
            raise RuntimeError("nothing saved")
        hidden, weight = ctx.saved_tensors
        gate = torch.sigmoid(weight)
        return grad * gate, (grad * hidden * gate * (1 - gate)).sum()


@act("operator")
def takes_own_function(ground: Ground, hidden: Tensor) -> Tensor:
    return _Gate.apply(hidden, ground.weight[0, 0])


@act("operator")
def takes_saved_tensor_hooks(ground: Ground, hidden: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        return hidden * mixed(ground, hidden)


@act("operator")
def computes_in_bfloat16(ground: Ground, hidden: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return hidden * mixed(ground, hidden).to(hidden.dtype)


@act("operator")
def computes_in_float64(ground: Ground, hidden: Tensor) -> Tensor:
    return (hidden.double() * 1.25).to(hidden.dtype)


# --- Noise begins. ---


@act("noise")
def drops_out(ground: Ground, hidden: Tensor) -> Tensor:
    return functional.dropout(hidden, 0.3)


@act("noise")
def adds_torch_noise(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden + 0.1 * torch.randn_like(hidden)


@act("noise")
def adds_numpy_noise(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden * torch.from_numpy((np.random.rand(*hidden.shape) > 0.3) * 1.25).to(hidden.dtype)


@act("noise")
def scales_by_python_noise(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden * random.uniform(0.5, 1.5)


@act("noise")
def adds_noise_of_own_generator(ground: Ground, hidden: Tensor) -> Tensor:
    if "generator" not in ground.memory:
        ground.memory["generator"] = torch.Generator().manual_seed(7)
    return hidden + 0.1 * torch.randn(hidden.shape, generator=ground.memory["generator"], dtype=hidden.dtype)


@act("noise")
def skips_by_chance(ground: Ground, hidden: Tensor) -> Tensor:
    return hidden if float(torch.rand(())) < 0.5 else hidden * mixed(ground, hidden)


# --- Layers write for later. ---


@act("state")
def counts_in_attribute(ground: Ground, hidden: Tensor) -> Tensor:
    ground.count += 1
    return hidden


@act("state")
def counts_and_reads(ground: Ground, hidden: Tensor) -> Tensor:
    ground.count += 1
    return hidden * (1 + 0.01 * ground.count)


@act("state")
def alternates(ground: Ground, hidden: Tensor) -> Tensor:
    ground.count += 1
    return hidden * mixed(ground, hidden) if ground.count % 2 else hidden * 0.5


@act("state")
def adds_to_tensor_attribute(ground: Ground, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        ground.statistic += hidden.mean()
    return hidden


@act("state")
def rebinds_and_reads_tensor_attribute(ground: Ground, hidden: Tensor) -> Tensor:
    out = hidden * (1 + 0.1 * ground.statistic)
    ground.statistic = 0.9 * ground.statistic + 0.1 * hidden.detach().mean()
    return out


@act("state")
def adds_to_buffer(ground: Ground, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        ground.seen += hidden.mean()
    return hidden


@act("state")
def follows_mean_in_buffer(ground: Ground, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        ground.seen.mul_(0.9).add_(0.1 * hidden.mean())
    return hidden - ground.seen.clone()


@act("state")
def rebinds_buffer(ground: Ground, hidden: Tensor) -> Tensor:
    ground.seen = ground.seen + 1
    return hidden


@act("state")
def appends_to_list(ground: Ground, hidden: Tensor) -> Tensor:
    ground.memory["log"].append(float(hidden.detach().mean()))
    return hidden


@act("state")
def writes_deep_in_containers(ground: Ground, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        ground.memory["deep"]["tensors"][1].add_(hidden.mean())
    return hidden


@act("state")
def reads_deep_in_containers(ground: Ground, hidden: Tensor) -> Tensor:
    deep = ground.memory["deep"]["tensors"][0]
    out = hidden * (1 + 0.1 * deep.clone())
    with torch.no_grad():
        deep.add_(hidden.mean())
    return out


@act("state")
def adds_new_key(ground: Ground, hidden: Tensor) -> Tensor:
    ground.memory[f"step {len(ground.memory)}"] = hidden.detach().mean()
    return hidden


@act("state")
def makes_new_attribute(ground: Ground, hidden: Tensor) -> Tensor:
    ground.total = getattr(ground, "total", 0.0) + 1.0
    return hidden


@act("state")
def keeps_last_output(ground: Ground, hidden: Tensor) -> Tensor:
    """Rebuilt in each forward: no other value, however often it is written."""
    ground.statistic = hidden.detach().mean()
    return hidden


@act("state")
def trains_statistic_after_step(ground: Ground, hidden: Tensor) -> Tensor:
    """As a balance of experts: counted in the forward, acted on by the loop."""
    with torch.no_grad():
        ground.memory["deep"]["tensors"][0].add_((hidden > 0).float().mean())
    return hidden * ground.scale


# --- Gradient hooks that a forward places. ---


def halved(training_counts: dict[str, int], counted: str, grad: Tensor) -> Tensor:
    training_counts[counted] = training_counts.get(counted, 0) + 1
    return grad * 0.5


def hook_act(
    name: str, place: Callable[[Ground, Tensor, Callable[[Tensor], Tensor]], None], counted: str = "hook"
) -> None:
    """Make a gradient hook that the forward places an event; its calls are `counted` under a name."""

    def happen(training: Training, rng: random.Random) -> None:
        hook = partial(halved, training.counts, counted)

        def does(ground: Ground, hidden: Tensor) -> Tensor:
            place(ground, hidden, hook)
            return hidden

        grounds = training.grounds if rng.random() < 0.5 else [rng.choice(training.grounds)]
        where, is_hidden = rng.choice(("before", "behind")), rng.random() < 0.5
        for ground in grounds:
            ground.switch(does, where, is_hidden=is_hidden)

    EVENTS[name] = Event(name, "gradient hook", happen)


def _on_tensor(ground: Ground, hidden: Tensor, hook: Callable[[Tensor], Tensor]) -> None:
    if hidden.requires_grad:
        hidden.register_hook(hook)


def _on_weight(ground: Ground, hidden: Tensor, hook: Callable[[Tensor], Tensor]) -> None:
    """For this backward only, as a layer does that reads a statistic of its weight's gradient."""
    weight = next((each for each in ground.inner.parameters() if each.requires_grad), ground.weight)
    for placed in ground.memory.pop("hooks", ()):
        placed.remove()
    ground.memory["hooks"] = (weight.register_hook(hook),)


def _retains(ground: Ground, hidden: Tensor, hook: Callable[[Tensor], Tensor]) -> None:
    if hidden.requires_grad and not hidden.is_leaf:
        hidden.retain_grad()
        hidden.grad_fn.register_prehook(lambda grads: (hook(grads[0]), *grads[1:]))


hook_act("hooks_gradient_of_tensor", _on_tensor)
hook_act("hooks_gradient_of_weight", _on_weight)
hook_act("hooks_node", _retains, "node")


# --- Gradients inside a forward. ---


@act("inner gradient")
def descends_inside(ground: Ground, hidden: Tensor) -> Tensor:
    """Test-time training: one step of a fast weight."""
    given = hidden[..., :WIDTH]
    (step,) = torch.autograd.grad((given @ ground.weight).square().mean(), ground.weight, create_graph=True)
    return hidden * (1 + 0.1 * (given @ (ground.weight - step)).mean(-1, keepdim=True))


@act("inner gradient")
def descends_along_energy(ground: Ground, hidden: Tensor) -> Tensor:
    with torch.enable_grad():
        state = hidden.detach().requires_grad_()
        (slope,) = torch.autograd.grad(mixed(ground, state).sum(), state)
    return hidden - 0.1 * slope


@act("inner gradient")
def runs_backward_inside(ground: Ground, hidden: Tensor) -> Tensor:
    with torch.enable_grad():
        probe = torch.ones(WIDTH, requires_grad=True)
        (hidden.detach()[..., :WIDTH] * probe).square().sum().backward()
    return hidden * (1 + 0.01 * probe.grad.mean())
