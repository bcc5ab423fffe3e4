"""Segments end where a row of layers would not repeat what the model does between them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_ckpt
from hf_ckpt.regions.execution_state import is_extra_run, is_in_backward
from tests import exactness, plain_models, zoo
from tests.exactness import every_policy

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def _weights_and_inputs_are_the_same_each_time() -> None:
    torch.manual_seed(0)


def order_of_recomputation(case: zoo.Case) -> list[int]:
    """Return the indices of the blocks as they are recomputed: a segment runs in ascending order."""
    order: list[int] = []

    def note(idx: int) -> Callable[..., None]:
        return lambda *_: order.append(idx) if is_in_backward() and not is_extra_run() else None

    hooks = [block.norm.register_forward_pre_hook(note(idx)) for idx, block in enumerate(case.model.blocks)]
    exactness.step(case)
    for hook in hooks:
        hook.remove()
    return order


def nothing(idx: int, hidden: Tensor) -> Tensor:
    return hidden


def scaled(idx: int, hidden: Tensor) -> Tensor:
    return hidden * 1.5 if idx == 2 else hidden


def scaled_in_place(idx: int, hidden: Tensor) -> Tensor:
    return hidden.mul_(1.5) if idx == 2 else hidden


def viewed(idx: int, hidden: Tensor) -> Tensor:
    return hidden.view_as(hidden) if idx == 2 else hidden


def dropped_out(idx: int, hidden: Tensor) -> Tensor:
    return nn.functional.dropout(hidden, 0.5) if idx == 2 else hidden


def detached(idx: int, hidden: Tensor) -> Tensor:
    return hidden.detach() if idx == 2 else hidden


def only_drawing(idx: int, hidden: Tensor) -> Tensor:
    """Draws random numbers and does nothing with them."""
    torch.rand(3)
    return hidden


ENDED, WHOLE = [2, 3, 0, 1], [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("between", "order"),
    [
        (nothing, WHOLE),
        (only_drawing, WHOLE),
        (scaled, ENDED),
        (scaled_in_place, ENDED),
        (viewed, ENDED),
        (dropped_out, ENDED),
        # Nothing before the second layer needs a gradient.
        (detached, [2, 3]),
    ],
)
def test_segment_ends_where_the_model_does_something(
    between: Callable[[int, Tensor], Tensor], order: list[int]
) -> None:
    case = plain_models.case(plain_models.Decoder(between=between))
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", segment_size=4):
        assert order_of_recomputation(case) == order
        assert exactness.differences(expected, exactness.step(case)) == []
    with hf_ckpt.apply(case.model, "full", segment_size=4, nested=True):
        assert exactness.differences(expected, exactness.step(case)) == []


def test_segment_ends_where_a_hook_changes_the_output() -> None:
    case = plain_models.case()
    case.model.blocks[1].register_forward_hook(lambda module, args, output: output * 1.5)
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", segment_size=4):
        assert order_of_recomputation(case) == ENDED
        assert exactness.differences(expected, exactness.step(case)) == []


class Reordered(plain_models.Decoder):
    """Runs its blocks in an order of its own."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order

    def forward(self, hidden: Tensor, **kwargs: object) -> Tensor:
        hidden = self.embedding(hidden)
        for idx in self.order:
            hidden = self.blocks[idx](hidden, **kwargs)
        return hidden


@every_policy
@pytest.mark.parametrize("order", [[0, 1, 1, 2, 3], [0, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3, 0, 1, 2, 3], [2, 2, 2]])
def test_layers_in_another_order_are_exact(order: list[int], policy: str) -> None:
    assert exactness.check(plain_models.case(Reordered(order)), policy) == []


def test_skipped_layer_does_not_end_a_segment() -> None:
    case = plain_models.case(Reordered([0, 2, 3]))
    with hf_ckpt.apply(case.model, "full", segment_size=4):
        assert order_of_recomputation(case) == [0, 2, 3]


def test_layer_that_runs_twice_begins_a_segment() -> None:
    case = plain_models.case(Reordered([0, 1, 1, 2]))
    with hf_ckpt.apply(case.model, "full", segment_size=4):
        assert order_of_recomputation(case) == [1, 2, 0, 1]


class Seamed(GradientCheckpointingLayer, plain_models.Block):
    """A block with the seam of transformers."""

    def forward(self, hidden: Tensor) -> Tensor:
        return plain_models.Block.forward(self, hidden)


class PartlyFrozen(plain_models.Decoder):
    """Runs its first block without gradients."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.blocks[0](self.embedding(hidden))
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize("block", [plain_models.Block, Seamed])
def test_layer_without_gradients_is_in_no_segment(block: type[plain_models.Block]) -> None:
    case = plain_models.case(PartlyFrozen([block() for _ in range(4)]))
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", segment_size=4):
        assert order_of_recomputation(case) == [1, 2, 3]
        assert exactness.differences(expected, exactness.step(case)) == []


@every_policy
def test_layers_with_the_seam_are_exact(policy: str) -> None:
    assert exactness.check(plain_models.case(plain_models.Decoder([Seamed() for _ in range(4)])), policy) == []


class Skipping(plain_models.Decoder):
    """Adds the output of the first block before the third: it leaves its segment twice."""

    def forward(self, hidden: Tensor, **kwargs: object) -> Tensor:
        first = self.blocks[0](self.embedding(hidden))
        third = self.blocks[2](self.blocks[1](first))
        return self.blocks[3](third) + first.sin()


@every_policy
def test_layer_output_that_is_used_twice_is_exact(policy: str) -> None:
    assert exactness.check(plain_models.case(Skipping()), policy) == []


class Masking(plain_models.Decoder):
    """Makes the last block's mask of the first block's output, and hands on what the blocks return as it is."""

    def forward(self, hidden: Tensor) -> Tensor:
        first = self.blocks[0](self.embedding(hidden))
        third = self.blocks[2](self.blocks[1](first))
        return self.blocks[3](third, mask=first @ first.mT)


@every_policy
def test_tensor_made_beside_the_layers_is_exact(policy: str) -> None:
    assert exactness.check(plain_models.case(Masking()), policy) == []


def test_tensor_made_beside_the_layers_does_not_end_a_segment() -> None:
    case = plain_models.case(Masking())
    with hf_ckpt.apply(case.model, "full", segment_size=4):
        assert order_of_recomputation(case) == WHOLE


class Twofold(plain_models.Decoder):
    """Runs two batches layer by layer, side by side."""

    def forward(self, hidden: Tensor) -> Tensor:
        one, two = self.embedding(hidden), self.embedding(hidden.flip(0))
        for block in self.blocks:
            one, two = block(one), block(two)
        return one + two.sin()


@every_policy
def test_two_batches_side_by_side_are_exact(policy: str) -> None:
    assert exactness.check(plain_models.case(Twofold()), policy) == []


class Threaded(plain_models.Decoder):
    """Runs its last two blocks in another thread, as a pipeline does."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.blocks[1](self.blocks[0](self.embedding(hidden)))
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: self.blocks[3](self.blocks[2](hidden))).result()


def test_segment_ends_where_another_thread_goes_on() -> None:
    case = plain_models.case(Threaded())
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", segment_size=4):
        assert order_of_recomputation(case) == ENDED
        assert exactness.differences(expected, exactness.step(case)) == []
