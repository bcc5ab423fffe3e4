"""What is kept, and what its operator is fed, is looked at in every step: writes and noise that begin late."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import hf_ckpt
from hf_ckpt.errors import PlanMismatchError, UnsupportedError
from hf_ckpt.regions import fingerprints, value_proof
from hf_ckpt.regions.selective import kept_outputs
from tests import exactness
from tests.plain_models import WIDTH, Block, Decoder

pytestmark = pytest.mark.core

STEPS = 4
LATE = 2
"""The first step in which anything happens."""


SWITCH = {"is_on": False}
"""No setting of a layer, of which a change would be seen."""


class Doing(Block):
    """Does something to the product of its first linear layer, or to what that is fed, from step `LATE` on."""

    def __init__(self, write: Callable[[Tensor], Any] | None, change: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.write, self.change = write, change

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        fed = self.norm(hidden)
        if self.change is not None and SWITCH["is_on"]:
            fed = self.change(fed)
        product = self.mlp.up(fed)
        if self.write is not None and SWITCH["is_on"]:
            self.write(product)
        # Autograd saves nothing of the product itself.
        return hidden + self.mlp.down(torch.tanh(product + 0))


def gradients(
    policy: str | None,
    length: Callable[[int], int] = lambda step: 3,
    begins: int = LATE,
    num_steps: int = STEPS,
    **doing: Any,
) -> list[list[Tensor]]:
    torch.manual_seed(0)
    model = Decoder([Doing(**{"write": None, "change": None} | doing) for _ in range(2)]).train()
    if policy is not None:
        hf_ckpt.apply(model, policy)
    found = []
    for step in range(num_steps):
        SWITCH["is_on"] = step >= begins
        model.zero_grad()
        model(torch.ones(2, length(step), WIDTH).cumsum(1)).pow(2).sum().backward()
        found.append([weight.grad for weight in model.parameters() if weight.grad is not None])
    return found


def are_equal(ones: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(*pair) for one, other in zip(ones, others, strict=True) for pair in zip(one, other, strict=True)
    )


# --- Writes that begin late. ---


def by_data(product: Tensor) -> None:
    product.data.mul_(2)


def by_numpy(product: Tensor) -> None:
    product.detach().numpy()[...] *= 2


def by_part(product: Tensor) -> None:
    with torch.no_grad():
        torch.ops.aten.unsafe_chunk(product.view(-1, 16), 2, 1)[0].data.zero_()


def by_order(product: Tensor) -> None:
    """The same bits at other places."""
    product.data.copy_(product.detach().flip(-1))


def by_one_element(product: Tensor) -> None:
    product.data.view(-1)[5] = 7


def by_view(product: Tensor) -> None:
    with torch.no_grad():
        product[:, 1:].mul_(3)


def by_torch_dlpack(product: Tensor) -> None:
    torch.from_dlpack(product.detach()).add_(1)


WRITES = [by_data, by_numpy, by_torch_dlpack, by_part, by_order, by_one_element, by_view]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_begins_late_is_exact(write: Callable[[Tensor], Any]) -> None:
    assert are_equal(gradients(None, write=write), gradients("selective", write=write))


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_a_device_tells_of_late_stops_the_step(
    write: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "is_read_late", lambda tensor: True)
    with pytest.raises(
        UnsupportedError, match=r"blocks\.1 is .* the output of aten.addmm.default number 1 \(mlp\.up\)"
    ):
        gradients("selective", write=write)


def to_centroids(product: Tensor) -> None:
    """From 26 rows on, by a product that is written to inside of the operator."""
    torch.cdist(product, torch.ones(2, 4, product.shape[-1]))


@pytest.mark.parametrize("is_read_late", [False, True])
@pytest.mark.parametrize("operator", ["cdist", "data"])
def test_a_longer_batch_that_is_written_to_is_exact(
    operator: str, is_read_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def distance(fed: Tensor) -> Tensor:
        if operator == "data" and fed.shape[1] > 3:
            return Doubled.apply(fed @ torch.eye(WIDTH))
        return fed * torch.cdist(fed, fed.detach()[:, :4]).softmax(-1)[..., :1]

    lengths = lambda step: 3 if step < LATE else 30  # noqa: E731
    expected = gradients(None, lengths, change=distance)
    if is_read_late:
        monkeypatch.setattr(fingerprints, "is_read_late", lambda tensor: True)
    assert are_equal(expected, gradients("selective", lengths, change=distance))


class Doubled(torch.autograd.Function):
    """Writes past the versions of tensors."""

    @staticmethod
    def forward(ctx: Any, product: Tensor) -> Tensor:
        product.data.mul_(2)
        return product.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


# --- What an operator is fed. ---


# No module holds them.
OF_NUMPY, OF_PYTHON = np.random.default_rng(0), random.Random(0)


def by_numpy_noise(fed: Tensor) -> Tensor:
    return fed * torch.from_numpy(OF_NUMPY.random(fed.shape) > 0.3)


def by_python_noise(fed: Tensor) -> Tensor:
    return fed * OF_PYTHON.uniform(0.5, 1.5)


def by_own_generator(fed: Tensor, generator: torch.Generator = torch.Generator()) -> Tensor:  # noqa: B008
    return fed + torch.randn(fed.shape, generator=generator)


def by_numpy_order(fed: Tensor) -> Tensor:
    return fed[..., torch.from_numpy(1 + OF_NUMPY.permutation(WIDTH - 1).repeat(2)[:WIDTH])]


def by_counter(fed: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006
    calls.append(1)
    return fed + len(calls)


@pytest.mark.parametrize(
    "draw", [lambda fed: fed * float(np.random.uniform(0.5, 1.5)), lambda fed: fed * random.uniform(0.5, 1.5)]
)
def test_noise_of_the_generators_of_python_and_numpy_is_the_same_again(draw: Callable[[Tensor], Tensor]) -> None:
    def seeded(policy: str | None) -> list[list[Tensor]]:
        np.random.seed(0), random.seed(0)
        return gradients(policy, change=draw)

    assert are_equal(seeded(None), seeded("selective"))


FED = r"blocks\.1 is .*number 1 \(mlp\.up\), whose output is kept, is fed"
NOISE = [by_numpy_noise, by_python_noise, by_own_generator, by_numpy_order, by_counter]


@pytest.mark.parametrize("is_read_late", [False, True])
@pytest.mark.parametrize("change", NOISE)
def test_noise_in_front_of_a_kept_product_that_begins_late_is_found(
    change: Callable[[Tensor], Tensor],
    is_read_late: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fingerprints, "is_read_late", lambda tensor: is_read_late)
    monkeypatch.setattr(kept_outputs, "TURNS", 1)
    if not is_read_late:
        with pytest.raises(UnsupportedError, match=FED):
            gradients("selective", change=change)
        return
    with pytest.raises(PlanMismatchError, match=r"feeds aten\.addmm\.default number 1 \(mlp\.up\) something else"):
        gradients("selective", change=change)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "number 1 (mlp.up), whose output is kept, something else" in caplog.text
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UnsupportedError, match=FED):
            gradients("selective", change=change)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("change", NOISE)
def test_noise_in_front_of_a_kept_product_is_found_in_the_first_step(
    change: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(PlanMismatchError, match=r"feeds aten\.addmm\.default number 1 \(mlp\.up\) something else"):
        gradients("selective", change=change, begins=0)


def test_operators_take_turns_in_being_asked_by_a_device_what_they_are_fed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fingerprints, "is_read_late", lambda tensor: True)
    with pytest.raises(PlanMismatchError, match=r"\(mlp\.up\) something else"):
        gradients("selective", change=by_numpy_noise, num_steps=8 * kept_outputs.TURNS)
    assert "WARNING" in [record.levelname for record in caplog.records]


# --- Kernels that do not repeat themselves. ---

GENERATOR = torch.Generator()


def by_rounding(fed: Tensor) -> Tensor:
    """As of kernels that add in any order."""
    return fed + fed.detach() * 2**-23 * torch.randint(-1, 2, fed.shape, generator=GENERATOR)


def by_rounding_of_a_row(fed: Tensor) -> Tensor:
    return torch.cat([by_rounding(fed[:, :1]), fed[:, 1:]], 1)


def by_rounding_of_a_scale(fed: Tensor) -> Tensor:
    return fed + fed.detach() * 2**-23 * torch.randint(1, 8, (), generator=GENERATOR)


ROUNDING = [by_rounding, by_rounding_of_a_row, by_rounding_of_a_scale]


@pytest.mark.parametrize(("begins", "is_read_late", "is_gathered"), [(0, 0, 0), (0, 1, 0), (0, 1, 1), (LATE, 1, 0)])
@pytest.mark.parametrize("change", ROUNDING)
def test_kernels_that_do_not_repeat_themselves_train(
    change: Callable[[Tensor], Tensor],
    begins: int,
    is_read_late: bool,
    is_gathered: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fingerprints, "is_read_late", lambda tensor: bool(is_read_late))
    monkeypatch.setattr(kept_outputs, "TURNS", 1)
    if is_gathered:
        # Under ZeRO-3 a recomputation cannot run to its end, nor another one follow.
        monkeypatch.setattr(
            value_proof.CallProof, "runs_to_end", property(lambda _: False, lambda *_: None), raising=False
        )
    GENERATOR.manual_seed(2)
    caplog.set_level("INFO", "hf_ckpt")
    gradients("selective", lambda step: 5, begins, change=change)
    # Whoever has been proven to have noise is not warned of.
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO"] if begins else levels[-1:] == ["INFO"]


@pytest.mark.parametrize("change", ROUNDING)
def test_a_recomputation_that_alone_rounds_otherwise_is_a_fault(change: Callable[[Tensor], Tensor]) -> None:
    def only_once(fed: Tensor) -> Tensor:
        # After two forwards and the original.
        calls.append(1)
        return change(fed) if len(calls) == 4 else fed

    calls: list[int] = []
    GENERATOR.manual_seed(2)
    with pytest.raises(PlanMismatchError, match="something else than its forward did"):
        gradients("selective", lambda step: 5, begins=0, change=only_once)


# --- Adapters that come and go. ---


@pytest.mark.parametrize("names", [["q_proj", "up_proj"], ["q_proj", "up_proj", "down_proj"], ["k_proj"]])
@pytest.mark.parametrize("rank", [2, 4])
def test_an_adapter_that_is_added_between_steps_is_exact(names: list[str], rank: int) -> None:
    def run(policy: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        case = exactness.build("llama", num_layers=2, dropout=0.0)
        config = LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False)
        model: Any = get_peft_model(case.model, config)
        if policy is not None:
            hf_ckpt.apply(model, policy)
        for step in range(4):
            if step == 1:
                torch.manual_seed(1)
                model.add_adapter("later", LoraConfig(r=rank, target_modules=names, init_lora_weights=False))
                model.set_adapter("later")
            model.zero_grad()
            model(**case.inputs).logits.pow(2).sum().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    assert all(map(torch.equal, run(None), run("selective")))


# --- Sums of bits. ---


@pytest.mark.sweep(keep=8)
@pytest.mark.parametrize("is_read_late", [False, True])
@pytest.mark.parametrize("size", [(3, 5), (40, 512), (300, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_sums_tell_what_is_written_to(
    size: tuple[int, int], dtype: torch.dtype, is_read_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "is_read_late", lambda tensor: is_read_late)
    torch.manual_seed(0)
    tensor = (10 * torch.randn(size)).to(dtype)

    def sums(of: Tensor) -> list[Any]:
        return fingerprints.bit_sums([of], is_whole=False)

    assert not fingerprints.sums_differ(sums(tensor), sums(tensor.clone()))
    assert not fingerprints.sums_differ(sums(tensor.mT), sums(tensor.clone().mT))
    for rows, columns in ((slice(1, 2), slice(None)), (slice(None), slice(2, 3)), (slice(-1, None), slice(None))):
        other = tensor.clone()
        part = other[rows, columns]
        part.copy_(~part if dtype is torch.bool else part + 1)
        assert fingerprints.sums_differ(sums(tensor), sums(other))
    assert dtype is torch.bool or fingerprints.sums_differ(sums(tensor), sums(tensor.flip(0)))
