"""One model under a plan, trained by two threads at once: the numbers of one thread, or one message."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import hf_ckpt
from hf_ckpt import UnsupportedError
from hf_ckpt.regions.execution_state import is_extra_run
from hf_ckpt.regions.head.head_call import HeadCall
from tests import plain_models
from tests.regions.test_transforms import TILES, apply, every_policy, every_policy_with_tiles, llama

Gradients = tuple[Tensor, ...]
Loss = Callable[[int], Tensor]
"""Of one of two batches."""


class Meeting:
    """A hook at which two threads wait for each other, so that both are inside of what it stands on."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=30)
        self.is_on = False

    def __call__(self, *_: object) -> None:
        # One of them also runs a layer as it was without the plan, in the first step.
        if self.is_on and not is_extra_run():
            self._barrier.wait()

    def gradients(self, model: nn.Module, loss: Loss) -> list[Gradients | str]:
        """Train on both batches in two threads; of one that fails return what it says."""
        self.is_on = True

        def train(number: int) -> Gradients | str:
            try:
                return torch.autograd.grad(loss(number), list(model.parameters()))
            except (UnsupportedError, RuntimeError, IndexError) as error:
                # The other one goes on to its end.
                self._barrier.abort()
                return f"{type(error).__name__}: {error}"

        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(train, range(2)))
        self.is_on = False
        return found


def decoder(dropout: float, blocks: Sequence[nn.Module] | None = None) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    model = plain_models.Decoder(blocks).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    batches = torch.randn(2, plain_models.BATCH, plain_models.LENGTH, plain_models.WIDTH)
    return model, lambda number: model(batches[number]).square().sum()


def meet_inside(model: nn.Module) -> Meeting:
    """Let threads wait for each other in the norms, projections and attentions of every block."""
    meeting = Meeting()
    for block in model.blocks:
        for module in (block.norm, block.attention, block.attention.query, block.mlp.up, block.mlp.down):
            module.register_forward_pre_hook(meeting)
    return meeting


def alone(model: nn.Module, loss: Loss) -> list[Gradients]:
    return [torch.autograd.grad(loss(number), list(model.parameters())) for number in range(2)]


def check_equal(found: list[Gradients | str], expected: list[Gradients]) -> None:
    assert [got for got in found if isinstance(got, str)] == []
    for got, gradients in zip(found, expected, strict=True):
        assert all(map(torch.equal, got, gradients))


@every_policy_with_tiles
def test_two_threads_in_the_same_layers_get_the_gradients_of_one(policy: str) -> None:
    model, loss = decoder(dropout=0.0)
    meeting = meet_inside(model)
    expected = alone(model, loss)
    with apply(model, policy):
        if policy in TILES:
            # Slices are added up in an order of their own.
            expected = alone(model, loss)
        for _ in range(2):
            check_equal(meeting.gradients(model, loss), expected)


class Inline(plain_models.Block):
    """Has its ffn written out in its forward, as OPT's layers do: what is kept is its attention."""

    def __init__(self) -> None:
        super().__init__()
        del self.mlp
        self.fc1, self.fc2 = (nn.Linear(plain_models.WIDTH, plain_models.WIDTH) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.fc2(torch.tanh(self.fc1(hidden)))


def test_kept_attentions_of_two_threads_stay_apart() -> None:
    model, loss = decoder(dropout=0.0, blocks=[Inline() for _ in range(4)])
    meeting = Meeting()
    for block in model.blocks:
        block.norm.register_forward_pre_hook(meeting)
        block.fc1.register_forward_pre_hook(meeting)
    expected = alone(model, loss)
    with hf_ckpt.apply(model, "ffn"):
        assert "run_kept" in repr(vars(model.blocks[0].attention)["forward"])
        check_equal(meeting.gradients(model, loss), expected)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_a_chunked_head_of_two_threads_keeps_the_gradient_of_its_weight(mode: str) -> None:
    model = llama()
    meeting = Meeting()
    # Between what comes before and behind the product, other threads look at the model's parameters.
    model.lm_head.register_forward_pre_hook(meeting)
    model.lm_head.register_forward_hook(meeting)
    batches = torch.randint(0, 19, (2, 2, 9), generator=torch.Generator().manual_seed(1))

    def loss(number: int) -> Tensor:
        return model(input_ids=batches[number], labels=batches[number]).loss

    with hf_ckpt.apply(model, mode, head="chunked"):
        expected = alone(model, loss)
        for _ in range(2):
            check_equal(meeting.gradients(model, loss), expected)


def test_the_weight_of_a_chunked_head_is_the_models_own_while_chunks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    weight, seen = model.lm_head.weight, []
    run = HeadCall.run

    def noted(head_call: HeadCall, *given: object) -> Tensor:
        seen.append(model.lm_head.weight is weight)
        found = run(head_call, *given)  # type: ignore[arg-type]
        seen.append(model.lm_head.weight is weight)
        return found

    monkeypatch.setattr(HeadCall, "run", noted)
    with hf_ckpt.apply(model, "none", head="chunked"):
        ids = torch.randint(0, 19, (2, 9))
        model(input_ids=ids, labels=ids).loss.backward()
    assert len(seen) > 8
    assert all(seen)


@every_policy_with_tiles
def test_two_threads_that_draw_random_numbers_are_refused(policy: str) -> None:
    model, loss = decoder(dropout=0.3)
    # Both parts draw.
    for block in model.blocks:
        block.mlp.up = nn.Sequential(block.mlp.up, nn.Dropout(0.3))
    meeting = Meeting()
    for block in model.blocks:
        for module in (block.attention.dropout, block.mlp.up):
            module.register_forward_pre_hook(meeting)
            module.register_forward_hook(meeting)
    with apply(model, policy):
        said = [got for got in meeting.gradients(model, loss) if isinstance(got, str)]
        assert any(
            text.startswith("UnsupportedError: Two threads ran layers under a plan at the same time") for text in said
        )
        # One after the other they may.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(alone, model, loss).result()
        alone(model, loss)


@every_policy
def test_threads_that_take_turns_are_exact_with_random_numbers(policy: str) -> None:
    model, loss = decoder(dropout=0.3)

    def forward(number: int) -> Tensor:
        torch.manual_seed(number)
        return loss(number)

    def backward(value: Tensor) -> Gradients:
        return torch.autograd.grad(value, list(model.parameters()))

    expected = [backward(forward(number)) for number in range(2)]
    with apply(model, policy), ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        values = [thread.submit(forward, number).result() for number, thread in enumerate((one, other))]
        # Backward runs in another thread than forward, as on a GPU.
        for thread, value, gradients in zip((other, one), values, expected, strict=True):
            assert all(map(torch.equal, thread.submit(backward, value).result(), gradients))
