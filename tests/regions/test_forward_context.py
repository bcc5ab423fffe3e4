"""What a forward finds past its modules, from the second step on: generators, hooks, context, what it is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import OPTConfig, OPTForCausalLM

import hf_ckpt
from hf_ckpt.errors import HFCkptError, PlanMismatchError, UnsupportedError
from hf_ckpt.regions import arguments, fingerprints
from hf_ckpt.regions.execution_state import HostRandomState
from tests.attack.models import VOCAB, WIDTH, Between, Decoder, layers_of
from tests.modes import REGIONS

pytestmark = pytest.mark.core

IDS = torch.arange(12).view(2, 6) % VOCAB
NAMES = {"layers": ["layers"], "attention": "self_attn", "ffn": "mlp"}
EACH_REGION = pytest.mark.parametrize("region", REGIONS)

Late = Callable[[nn.Module], AbstractContextManager[Any] | None]
"""What happens to a model before its second step, and what is around that step's forward."""


def trained(late: Late, region: str, **more: Any) -> list[Any]:
    """Return the gradients of the second step, and the states of the generators after it."""
    policy, options = REGIONS.get(region, ("none", {}))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Decoder("tensor").train()
    with hf_ckpt.apply(model, policy, **options, **more, **NAMES):
        model(IDS, IDS)["loss"].backward()
        model.zero_grad()
        with late(model) or nullcontext():
            loss = model(IDS, IDS)["loss"]
        loss.backward()
    states = [random.getstate(), str(np.random.get_state(legacy=False)), *torch.get_rng_state().tolist()]
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return [gradients, states]


def assert_exact(late: Late, region: str, **more: Any) -> None:
    (expected, states), (found, others) = trained(late, "none"), trained(late, region, **more)
    assert all(map(torch.equal, expected, found))
    assert states == others


# --- The generators of Python and numpy. ---


def drops_layers(model: nn.Module) -> None:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return args[0] if random.random() < 0.5 else out * random.gauss(1.0, 0.1)

    for layer in layers_of(model):
        layer.mlp.register_forward_hook(hook)
        layer.self_attn.register_forward_hook(hook)


def masks_by_numpy(model: nn.Module) -> None:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * torch.from_numpy(np.random.rand(*out.shape) > 0.3) * float(np.random.randn())

    for layer in layers_of(model):
        layer.self_attn.v_proj.register_forward_hook(hook)
        layer.post_attention_layernorm.register_forward_hook(hook)


def looks_ahead(model: nn.Module) -> None:
    """Draw, and put the generators back: their states tell nothing of that."""

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        states = random.getstate(), np.random.get_state()
        out = out * random.random() * float(np.random.rand())
        random.setstate(states[0])
        np.random.set_state(states[1])
        return out

    for layer in layers_of(model):
        layer.self_attn.v_proj.register_forward_hook(hook)
        layer.mlp.up_proj.register_forward_hook(hook)
        layer.register_forward_hook(lambda module, args, out: out * random.random())


@EACH_REGION
@pytest.mark.parametrize("late", [drops_layers, masks_by_numpy, looks_ahead])
@pytest.mark.parametrize("prove", ["off", 1])
@pytest.mark.sweep(keep=12)
def test_numbers_of_python_and_numpy_are_drawn_again(late: Late, region: str, prove: Any) -> None:
    assert_exact(late, region, prove=prove)


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        # After so many it is at the same place among its words again.
        lambda: [random.random() for _ in range(312)][-1],
        np.random.rand,
        np.random.randn,
        lambda: np.random.rand(312)[-1],
    ],
    ids=["r", "gauss", "round", "np", "randn", "np_round"],
)
def test_a_state_is_read_again_only_after_a_draw(draw: Callable[[], float]) -> None:
    before = HostRandomState.now()
    assert HostRandomState.now() is before
    drawn = draw(), draw()
    after = HostRandomState.now()
    assert len(after.others_than(before)) == 1
    before.restore()
    assert (draw(), draw()) == drawn
    assert HostRandomState.now().others_than(after) == []


def test_draws_between_forward_and_backward_stay() -> None:
    # Its ffn is recomputed around its attention, after which a recomputation goes on with the state of the forward.
    model = OPTForCausalLM(
        OPTConfig(vocab_size=VOCAB, hidden_size=8, ffn_dim=8, num_hidden_layers=2, num_attention_heads=2)
    ).train()
    with hf_ckpt.apply(model, "ffn"):
        loss = model(input_ids=IDS, labels=IDS).loss
        random.random(), np.random.rand()
        before = HostRandomState.now()
        loss.backward()
    assert HostRandomState.now().others_than(before) == []


# --- Hooks of the forward. ---


def hooks_once(model: nn.Module) -> None:
    handles: dict[nn.Module, Any] = {}

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if module in handles:
            handles.pop(module).remove()
        return out * 1.5

    for layer in layers_of(model):
        for module in (layer.mlp.up_proj, layer.self_attn, layer.mlp):
            handles[module] = module.register_forward_hook(hook)


def hooks_from_inside(model: nn.Module) -> None:
    """Places a hook on a module that runs later in the layer."""
    for layer in layers_of(model):

        def hook(module: nn.Module, args: Any, last: nn.Module = layer.mlp.down_proj) -> None:
            if not hasattr(last, "is_hooked"):
                last.is_hooked = True  # type: ignore[assignment]  # a flag
                last.register_forward_hook(lambda m, args, out: out * 1.5)

        layer.mlp.up_proj.register_forward_pre_hook(hook)


@EACH_REGION
@pytest.mark.parametrize("late", [hooks_once, hooks_from_inside])
@pytest.mark.sweep(keep=6)
def test_hooks_are_those_that_the_forward_began_with(late: Late, region: str) -> None:
    assert_exact(late, region)


def counting() -> Callable[..., Tensor]:
    calls: list[int] = []

    def count(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        calls.append(1)
        return out * (1 + 0.1 * len(calls))

    return count


def counts_in_a_hook(model: nn.Module) -> None:
    layers_of(model)[1].mlp.up_proj.register_forward_hook(counting())


def counts_in_a_forward(model: nn.Module) -> None:
    projection, count = layers_of(model)[1].mlp.up_proj, counting()
    forward = projection.forward
    projection.forward = lambda given: count(projection, (), forward(given))


def counts_in_a_module(model: nn.Module) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.hook = layers_of(model)[1].mlp.up_proj, counting()

        def forward(self, given: Tensor) -> Tensor:
            return self.hook(self, (), self.linear(given))

    layers_of(model)[1].mlp.up_proj = Counted()


@EACH_REGION
@pytest.mark.parametrize("late", [counts_in_a_hook, counts_in_a_forward, counts_in_a_module])
@pytest.mark.sweep(keep=6)
def test_what_comes_late_and_hides_a_state_is_proven(late: Late, region: str) -> None:
    # What is not recomputed, the attention alone is, counts once.
    with nullcontext() if region == "attention" else pytest.raises(PlanMismatchError, match="its recomputation"):
        assert_exact(late, region)


def test_a_buffer_that_comes_late_is_brought_back() -> None:
    def hook(module: Any, args: Any, out: Tensor) -> Tensor:
        module.mean.add_(out.detach().mean())
        return out * (1 + module.mean)

    def late(model: nn.Module) -> None:
        projection = layers_of(model)[1].mlp.up_proj
        projection.register_buffer("mean", torch.zeros(()))
        projection.register_forward_hook(hook)

    assert_exact(late, "full", prove="off")


def test_in_tiles_a_hook_that_takes_itself_off_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"but it writes which hooks there are for later.* Leave tiles out"):
        trained(hooks_once, "full", tiles=2)


# --- What is around the forward alone. ---

LEVEL = ContextVar("LEVEL", default=1.0)


def sets_a_variable(model: nn.Module) -> AbstractContextManager[Any]:
    @contextmanager
    def around() -> Iterator[None]:
        token = LEVEL.set(1.5)
        yield
        LEVEL.reset(token)

    for layer in layers_of(model):
        layer.mlp.up_proj.register_forward_hook(lambda m, args, out: out * LEVEL.get())
        layer.self_attn.register_forward_hook(lambda m, args, out: out * LEVEL.get())
    return around()


class Halving(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return out * 0.5 if function is torch.tanh else out


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is torch.ops.aten.mm.default else out


def halves(model: nn.Module) -> AbstractContextManager[Any]:
    return Halving()


def doubles(model: nn.Module) -> AbstractContextManager[Any]:
    return Doubling()


@EACH_REGION
@pytest.mark.parametrize("late", [sets_a_variable, halves, doubles])
@pytest.mark.parametrize("prove", ["off", 1])
@pytest.mark.sweep(keep=14)
def test_what_is_around_the_forward_is_around_the_recomputation(late: Late, region: str, prove: Any) -> None:
    assert_exact(late, region, prove=prove)


def switches_kernels(model: nn.Module) -> AbstractContextManager[Any]:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * (2.0 if torch.backends.cuda.flash_sdp_enabled() else 0.5)

    for layer in layers_of(model):
        layer.mlp.up_proj.register_forward_hook(hook)
        layer.self_attn.register_forward_hook(hook)
    around: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH)
    return around


@EACH_REGION
@pytest.mark.sweep(keep=3)
def test_switches_of_kernels_are_those_of_the_forward(region: str) -> None:
    assert_exact(switches_kernels, region)
    assert torch.backends.cuda.flash_sdp_enabled()


@EACH_REGION
@pytest.mark.sweep(keep=3)
def test_a_flop_counter_around_the_forward_counts_that_alone(region: str) -> None:
    counters = [FlopCounterMode(display=False) for _ in range(2)]
    left = list(counters)
    assert_exact(lambda model: left.pop(), region)
    assert counters[0].get_total_flops() == counters[1].get_total_flops()


@pytest.mark.parametrize("region", ["full", "nested", "selective"])
def test_a_device_around_the_forward_is_around_the_recomputation(region: str) -> None:
    model = Decoder("tensor").train()
    made: list[torch.device] = []
    model.layers[1].mlp.register_forward_hook(lambda m, args, out: made.append(torch.empty(1).device))
    policy, options = REGIONS[region]
    with hf_ckpt.apply(model, policy, **options, **NAMES):
        hidden = model.embed_tokens(IDS).detach().requires_grad_()
        with torch.device("meta"), Halving():
            for layer in model.layers:
                hidden = layer(hidden, torch.zeros(WIDTH, device="cpu"))
        with torch.device("cpu"):
            hidden.sum().backward()
            assert torch.get_default_device() == torch.device("cpu")
    assert torch.get_default_device() == torch.device("cpu")
    assert len(made) > 1
    assert {device.type for device in made} == {"meta"}


# --- Writes past versions into what a region is given. ---


def writes_hidden(idx: int, hidden: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    hidden.data.mul_(0.5)
    return hidden


def swaps_hidden(idx: int, hidden: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    hidden.data = hidden.data * 0.5
    return hidden


def writes_shift(idx: int, hidden: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    shift.numpy()[...] += 0.5
    return hidden


def writes_between_layers(write: Between, model: nn.Module) -> None:
    model.between = write  # type: ignore[assignment]  # no module


@EACH_REGION
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("write", [writes_hidden, swaps_hidden, writes_shift])
@pytest.mark.sweep(keep=9)
def test_what_others_write_into_inputs_is_exact_or_refused(
    write: Between, is_late: bool, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "is_read_late", lambda tensor: is_late)
    if write is writes_shift:
        # Parts are given what their layer makes of it.
        is_refused = region not in ("attention", "ffn")
    else:
        # Else segments end there.
        is_refused = is_late and region in ("segments", "nested", "revolve")
    with pytest.raises(HFCkptError, match="was written to past the versions") if is_refused else nullcontext():
        assert_exact(partial(writes_between_layers, write), region)


def test_a_large_tensor_that_all_layers_share_is_summed_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    sums = arguments.bit_sums
    monkeypatch.setattr(
        arguments, "bit_sums", lambda each, **how: summed.append(each[0].shape[-1]) or sums(each, **how)
    )
    model = Decoder("dict").train()
    table = torch.zeros(20_000)
    with hf_ckpt.apply(model, "full", prove="off", **NAMES):
        for step in range(3):
            # Between steps it may be written to.
            table.data += step
            hidden = torch.randn(1, 2, WIDTH, requires_grad=True)
            for layer in model.layers:
                hidden = layer(hidden, {"shift": torch.zeros(WIDTH), "table": table})
            hidden.sum().backward()
    assert summed.count(len(table)) == 2 * 3


def test_tiles_that_write_into_their_input_past_versions_are_refused() -> None:
    def hook(module: nn.Module, args: tuple[Tensor]) -> None:
        args[0].data[:, 0] *= 0.5

    def writes(model: nn.Module) -> None:
        layers_of(model)[1].mlp.up_proj.register_forward_pre_hook(hook)

    with pytest.raises(UnsupportedError, match="is to run in tiles, but it, or another module, writes into its input"):
        trained(writes, "in tiles", tiles=2)
