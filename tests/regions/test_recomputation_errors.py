"""What is raised while a region is recomputed: with layer, module, cause and the modes that work; or passed on."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import hf_ckpt
from hf_ckpt.errors import RecomputationError
from tests import exactness, modes, plain_models

LAYER = 1
WHOLE = ["full", "segments", "nested", "selective", "offload"]
every_whole_region = pytest.mark.parametrize("mode", WHOLE)

# --- What the model's own code raises. ---


def context(mlp: nn.Module) -> Callable[[], None]:
    scales = {"mlp": 1.5}
    mlp.register_forward_hook(lambda module, args, output: output * scales["mlp"])
    return scales.clear


def iterator(mlp: nn.Module) -> None:
    scales = iter([1.5])
    mlp.register_forward_hook(lambda module, args, output: output * next(scales))


def popped(mlp: nn.Module) -> None:
    scales = {"mlp": 1.5}
    mlp.register_forward_hook(lambda module, args, output: output * scales.pop("mlp"))


def closed_file(mlp: nn.Module) -> Callable[[], None]:
    file = io.StringIO("1.5")
    mlp.register_forward_hook(lambda module, args, output: output * float(file.getvalue()))
    return file.close


def lock(mlp: nn.Module) -> None:
    once = threading.Lock()

    def take(module: nn.Module, args: Any, output: Tensor) -> None:
        if not once.acquire(blocking=False):
            raise RuntimeError(f"{take} runs once")

    mlp.register_forward_hook(take)


RAISED = {
    context: "KeyError: 'mlp'. Something that the forward has taken out of it (pop), or that stands there during",
    iterator: "StopIteration. An iterator or generator that the forward has used up would explain it",
    popped: "KeyError: 'mlp'. Something that the forward has taken out of it (pop)",
    closed_file: "ValueError: I/O operation on closed file. A context manager or variable that stands around the for",
    lock: "RuntimeError: <function lock.<locals>.take> runs once. A context manager or variable that stands around",
}


def broken(mode: str, plant: Callable[[nn.Module], Any]) -> tuple[hf_ckpt.patch.apply.Applied, Tensor]:
    """Return the loss of a model under a mode whose second layer has something planted into it."""
    case = plain_models.case()
    after = plant(case.model.blocks[LAYER].mlp)
    policy, options = modes.REGIONS[mode]
    applied = hf_ckpt.apply(case.model, policy, **options)
    loss = case.model(**case.inputs).sum()
    if after is not None:
        after()
    return applied, loss


@pytest.mark.parametrize("plant", RAISED, ids=lambda plant: plant.__name__)
@every_whole_region
def test_what_the_models_code_raises_again_is_explained(mode: str, plant: Callable[[nn.Module], Any]) -> None:
    _, loss = broken(mode, plant)
    with pytest.raises(RecomputationError) as caught:
        loss.backward()
    text = str(caught.value)
    assert text.startswith(
        "blocks.1 is recomputed in backward, and mlp raised there what it did not in the forward: " + RAISED[plant]
    )
    assert text.endswith('Use mode "attention" for the layer, which does not run that again, or "none".')
    assert caught.value.path == "blocks.1"
    assert type(caught.value.__cause__).__name__ in text


@pytest.mark.parametrize("plant", RAISED, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("mode", ["attention", "ffn"])
def test_modes_that_do_not_run_it_again_train(mode: str, plant: Callable[[nn.Module], Any]) -> None:
    # The hook of a part lies outside of it.
    broken(mode, plant)[1].backward()


def test_a_layers_own_code_names_the_modes_of_both_parts() -> None:
    case = plain_models.case()
    layer = case.model.blocks[LAYER]
    runs, found = iter(range(1)), layer.forward
    # A plain function, which says nothing of its module.
    layer.forward = lambda *args: found(*args) * (1 + next(runs))
    with hf_ckpt.apply(case.model, "full"), pytest.raises(RecomputationError) as caught:
        case.model(**case.inputs).sum().backward()
    assert "blocks.1 is recomputed in backward, and its code raised there" in str(caught.value)
    assert str(caught.value).endswith(
        'Use mode "none" for the layer, or "attention" or "ffn", which recompute a part of it each.'
    )


def test_in_tiles_they_are_what_to_leave_out() -> None:
    case = plain_models.case()
    iterator(case.model.blocks[LAYER].mlp.up)
    with hf_ckpt.apply(case.model, "none", tiles=2), pytest.raises(RecomputationError) as caught:
        case.model(**case.inputs).sum().backward()
    assert "blocks.1.mlp runs in tiles, and up raised in a later slice what it did not in the first: Stop" in str(
        caught.value
    )
    assert str(caught.value).endswith("Leave tiles out for its layer.")


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        torch.OutOfMemoryError("of a card"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
@every_whole_region
def test_what_is_for_others_passes_as_it_is(mode: str, error: BaseException) -> None:
    def raising(mlp: nn.Module) -> None:
        runs = iter(range(1))

        def refuse(module: nn.Module, args: Any, output: Tensor) -> None:
            if next(runs, None) is None:
                raise error

        mlp.register_forward_hook(refuse)

    _, loss = broken(mode, raising)
    with pytest.raises(type(error)) as caught:
        loss.backward()
    assert caught.value is error


# --- What torch's checkpoint raises. ---


def branch(mlp: nn.Module) -> None:
    runs: list[None] = []

    def other(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        runs.append(None)
        return output.sin().cos() if len(runs) > 1 else output

    mlp.register_forward_hook(other)


def kept_of_the_first_run(mlp: nn.Module) -> None:
    scale = functools.cache(lambda: torch.sigmoid(mlp.down.weight.sum() * 2))
    mlp.register_forward_hook(lambda module, args, output: output * scale())


@pytest.mark.parametrize("plant", [branch, kept_of_the_first_run], ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("mode", ["full", "nested", "selective", "offload"])
def test_a_layer_that_does_not_repeat_itself_is_named(mode: str, plant: Callable[[nn.Module], Any]) -> None:
    _, loss = broken(mode, plant)
    with pytest.raises(RecomputationError) as caught:
        loss.backward()
    text = str(caught.value)
    assert text.startswith("blocks.1 is recomputed in backward, and does not repeat its forward there: ")
    assert "functools.cache" in text
    assert '"none"' in text
    assert "Tip" not in text
    assert "What differs is in mlp." in text or plant is kept_of_the_first_run


class AskingTwice(torch.autograd.Function):
    """Doubles its input; backward asks for what was saved two times, as some of torch's own do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (first,), (second,), (third,) = ctx.saved_tensors, ctx.saved_tensors, ctx.saved_tensors
        assert torch.equal(first, second)
        assert torch.equal(first, third)
        return gradient * 2


class Doubling(plain_models.Attention):
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(AskingTwice.apply(hidden), mask)


def asking_twice() -> Any:
    blocks = [plain_models.Block() for _ in range(4)]
    for block in blocks:
        block.attention = Doubling()
    return plain_models.case(plain_models.Decoder(blocks))


@pytest.mark.parametrize("mode", modes.REGIONS)
def test_a_backward_that_asks_for_a_saved_tensor_again_is_exact(mode: str) -> None:
    case = asking_twice()
    expected = exactness.step(case)
    policy, options = modes.REGIONS[mode]
    with hf_ckpt.apply(case.model, policy, **options):
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.parametrize("mode", ["full", "segments"])
def test_it_is_exact_over_a_graph_that_is_retained(mode: str) -> None:
    case = asking_twice()
    policy, options = modes.REGIONS[mode]
    with hf_ckpt.apply(case.model, policy, **options):
        case.model.zero_grad()
        loss = case.model(**case.inputs).sum()
        loss.backward(retain_graph=True)
        once = [weight.grad.clone() for weight in case.model.parameters()]
        loss.backward()
    assert all(
        torch.equal(weight.grad, 2 * gradient) for weight, gradient in zip(case.model.parameters(), once, strict=True)
    )


# --- Parametrized weights that are kept for a block. ---


class Bent(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.exp(weight / 10)


@pytest.mark.parametrize("is_around_backward", [True, False])
@pytest.mark.parametrize("mode", modes.REGIONS)
def test_cached_parametrizations_are_exact(mode: str, is_around_backward: bool) -> None:
    case = plain_models.case()
    for block in case.model.blocks:
        parametrize.register_parametrization(block.mlp.up, "weight", Bent())
    # Kept of the layer before.
    case.model.blocks[3].mlp.up = case.model.blocks[2].mlp.up

    def step() -> list[Tensor]:
        case.model.zero_grad()
        torch.manual_seed(0)
        with parametrize.cached():
            loss = case.model(**case.inputs).sum()
            if is_around_backward:
                loss.backward()
        if not is_around_backward:
            loss.backward()
        return [weight.grad.clone() for weight in case.model.parameters()]

    expected = step()
    policy, options = modes.REGIONS[mode]
    with hf_ckpt.apply(case.model, policy, **options):
        for _ in range(2):
            assert all(map(torch.equal, expected, step()))
