"""What would give other values when it is run again is noticed, and raises in place of a wrong gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hf_ckpt
from hf_ckpt.errors import UnsupportedError
from tests import exactness, plain_models, zoo
from tests.exactness import Result

pytestmark = pytest.mark.core

CHANGED = "it writes into a tensor that it is given, or another module does: the argument"
IN_PLACE = "has been modified by an inplace operation"


@pytest.fixture(autouse=True)
def _weights_and_inputs_are_the_same_each_time() -> None:
    torch.manual_seed(0)


def masked_case() -> zoo.Case:
    return plain_models.case(mask=torch.zeros(plain_models.LENGTH, plain_models.LENGTH).triu(1))


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ("full", UnsupportedError, CHANGED),
        ("every_2", UnsupportedError, CHANGED),
        ("segments_2", UnsupportedError, CHANGED),
        ("nested", UnsupportedError, CHANGED),
        # Blocks hand the mask to their attention by position, where autograd itself looks after it.
        ("attention", RuntimeError, IN_PLACE),
    ],
)
def test_shared_mask_changed_between_forward_and_backward_raises(
    policy: str, error: type[Exception], message: str
) -> None:
    case = masked_case()
    with exactness.apply(case.model, policy):
        loss = zoo.loss(case.model, case.inputs)
        case.inputs["mask"].fill_(-1.0)
        with pytest.raises(error, match=message):
            loss.backward()


def test_shared_mask_outside_of_the_region_may_change() -> None:
    case = masked_case()

    def step(case: zoo.Case) -> Result:
        case.model.zero_grad()
        torch.manual_seed(0)
        case.inputs["mask"].zero_()
        loss = zoo.loss(case.model, case.inputs)
        case.inputs["mask"].fill_(-1.0)
        loss.backward()
        return loss.detach(), exactness.gradients(case.model)

    assert exactness.check(case, "ffn", step) == []


def test_tensor_in_a_tuple_changed_between_forward_and_backward_raises() -> None:
    case = plain_models.case(plain_models.Decoder([Rotated() for _ in range(4)]))
    table = (torch.ones(plain_models.WIDTH), torch.zeros(plain_models.WIDTH))
    with hf_ckpt.apply(case.model, "full"):
        loss = zoo.loss(case.model, {**case.inputs, "table": table})
        table[1].fill_(1.0)
        with pytest.raises(UnsupportedError, match=CHANGED):
            loss.backward()


class Rotated(plain_models.Block):
    """Takes a table in two tensors, as rotary embeddings come."""

    def forward(self, hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(hidden * table[0] + table[1])


class Recording(plain_models.Block):
    """Appends to a list that all layers share."""

    def forward(self, hidden: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(hidden)
        return super().forward(hidden)


class Popping(plain_models.Block):
    """Takes something out of a list that all layers share, so that its caller lets go of it."""

    def forward(self, hidden: Tensor, box: list[Tensor]) -> Tensor:
        return super().forward(hidden + box.pop())


class Writing(plain_models.Block):
    """Writes into a tensor that all layers share."""

    def forward(self, hidden: Tensor, sums: Tensor) -> Tensor:
        sums.add_(hidden.detach().sum())
        return super().forward(hidden)


@pytest.mark.parametrize("policy", ["full", "segments_2", "nested"])
@pytest.mark.parametrize(
    ("block", "inputs", "change"),
    [
        (Recording, {"seen": []}, "adds something to a list that it is given"),
        (Popping, {"box": [torch.ones(()), torch.ones(())]}, "takes something out of a list that it is given"),
        (Writing, {"sums": torch.zeros(())}, "writes into a tensor that it is given"),
    ],
)
def test_layer_that_changes_what_it_is_given_raises(
    block: type[nn.Module], inputs: dict[str, object], change: str, policy: str
) -> None:
    case = plain_models.case(plain_models.Decoder([block() for _ in range(4)]))
    with exactness.apply(case.model, policy), pytest.raises(UnsupportedError) as raised:
        zoo.loss(case.model, {**case.inputs, **copy.deepcopy(inputs)})
    assert str(raised.value) == (
        f"blocks.0 is to be recomputed, but it {change}, or another module does: the argument {next(iter(inputs))}. "
        'Recomputing it would give other values. Use mode "none" for the layer, or "attention" or "ffn", which '
        "recompute a part of it each."
    )


@pytest.mark.parametrize("policy", ["attention", "ffn", "none"])
def test_layer_that_changes_what_it_is_given_is_exact_around_its_parts(policy: str) -> None:
    case = plain_models.case(plain_models.Decoder([Writing() for _ in range(4)]), sums=torch.zeros(()))
    assert exactness.check(case, policy) == []


@pytest.mark.parametrize("trainable", ["everything", "all but the embedding"])
@pytest.mark.parametrize("policy", ["full", "segments_2", "nested"])
def test_saved_input_changed_in_place_raises(policy: str, trainable: str) -> None:
    case = plain_models.case()
    # With a frozen embedding the first saved input needs no gradient, and must be looked after all the same.
    case.model.embedding.requires_grad_(trainable == "everything")
    inputs: list[Tensor] = []
    case.model.blocks[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with exactness.apply(case.model, policy):
        loss = zoo.loss(case.model, case.inputs)
        with torch.no_grad():
            inputs[0].add_(1.0)
        with pytest.raises(RuntimeError, match=IN_PLACE):
            loss.backward()


@pytest.mark.parametrize("policy", ["full", "attention", "every_2", "segments_2", "nested", "mixed"])
def test_dropout_switched_off_between_forward_and_backward_is_on_in_recomputation(policy: str) -> None:
    case = exactness.build("gpt2", attn_implementation="eager")

    def step(case: zoo.Case) -> Result:
        case.model.zero_grad()
        case.model.train()
        torch.manual_seed(0)
        loss = zoo.loss(case.model, case.inputs)
        case.model.eval()
        loss.backward()
        return loss.detach(), exactness.gradients(case.model)

    assert exactness.check(case, policy, step) == []
