"""What is asked of logits that are computed only where they are needed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.regions.head.head_steps import (
    BATCH,
    BOUND,
    LENGTH,
    VOCAB,
    Loss,
    check_same,
    chunked,
    ids,
    labels,
    llama,
    logits,
    shifted,
    targets,
)

core = pytest.mark.core


def label_smoother(model: nn.Module) -> Tensor:
    """As the Trainer's: sums and picks of log-probabilities, masked in place."""
    negative = -functional.log_softmax(shifted(model), dim=-1)
    picked = negative.gather(dim=-1, index=targets()[..., None])
    summed = negative.sum(dim=-1, keepdim=True, dtype=torch.float32)
    mask = targets()[..., None] < 3
    picked.masked_fill_(mask, 0.0)
    summed.masked_fill_(mask, 0.0)
    return 0.9 * picked.sum() + 0.1 * summed.sum() / VOCAB


def by_hand(model: nn.Module, **options: Any) -> Tensor:
    return functional.cross_entropy(shifted(model).reshape(-1, VOCAB), targets().reshape(-1), **options)


def without_reduction(model: nn.Module) -> Tensor:
    return by_hand(model, reduction="none") @ torch.linspace(0, 1, BATCH * (LENGTH - 1))


def labelled_only(model: nn.Module) -> Tensor:
    mask = labels()[:, 1:] != -100
    return functional.cross_entropy(shifted(model)[mask], targets()[mask])


def capped(model: nn.Module) -> Tensor:
    scores = torch.tanh(logits(model).float() / 30.0) * 30.0
    return functional.cross_entropy(scores.flatten(0, 1), ids().flatten())


def without_some_tokens(model: nn.Module) -> Tensor:
    scores = logits(model)
    scores[:, :, [3, 4]] = torch.finfo(scores.dtype).min
    scores /= 2
    return functional.cross_entropy(scores.view(-1, VOCAB), ids().flatten().clamp_min(5))


def with_z_loss(model: nn.Module) -> Tensor:
    output = model(input_ids=ids(), labels=labels())
    return output.loss + 1e-2 * output.logits.logsumexp(-1).square().mean()


# (What is asked of the logits, whether all of them are needed.)
LOSSES: dict[str, tuple[Loss, bool]] = {
    "label smoother": (label_smoother, False),
    "smoothing": (lambda model: by_hand(model, label_smoothing=0.1), False),
    "weights": (lambda model: by_hand(model, weight=torch.linspace(0.1, 2, VOCAB), ignore_index=5), False),
    "weights, smoothing": (
        lambda model: by_hand(model, weight=torch.linspace(0.1, 2, VOCAB), label_smoothing=0.2),
        False,
    ),
    "sum": (lambda model: by_hand(model, reduction="sum"), False),
    "none": (without_reduction, False),
    "module": (lambda model: nn.CrossEntropyLoss()(shifted(model).flatten(0, 1), targets().flatten()), False),
    "nll": (
        lambda model: functional.nll_loss(shifted(model).log_softmax(-1).flatten(0, 1), targets().flatten()),
        False,
    ),
    "mask": (labelled_only, False),
    "capping": (capped, False),
    "writes": (without_some_tokens, False),
    "z loss": (with_z_loss, False),
    "columns": (
        lambda model: functional.cross_entropy(shifted(model)[..., :90].flatten(0, 1), targets().flatten() % 90),
        False,
    ),
    "one column": (lambda model: shifted(model)[..., 7].square().mean(), False),
    "largest": (lambda model: shifted(model).max(dim=-1).values.sum() + shifted(model).topk(3).values.sum(), False),
    "classes first": (lambda model: functional.cross_entropy(shifted(model).transpose(1, 2), targets()), False),
    "classes first, none": (
        lambda model: functional.cross_entropy(shifted(model).permute(0, 2, 1).float(), targets(), reduction="none")[
            1, 3
        ],
        False,
    ),
    "classes first, else": (lambda model: shifted(model).mT.softmax(1)[:, 3].sum(), True),
    "transposed": (lambda model: shifted(model).transpose(1, 2).square().mean(), True),
    "probabilities": (
        lambda model: functional.cross_entropy(shifted(model).flatten(0, 1), torch.full((46, VOCAB), 1 / VOCAB)),
        True,
    ),
    "picks": (lambda model: -shifted(model).log_softmax(-1)[0][torch.arange(23), targets()[0]].mean(), True),
    "divergence": (
        lambda model: functional.kl_div(shifted(model).log_softmax(-1), torch.full((2, 23, VOCAB), 1 / VOCAB)),
        True,
    ),
}


@core
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_logits_are_exact(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss_of, needs_all = LOSSES[name]
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        check_same(llama(), loss_of)
    assert len(caplog.records) == needs_all


@core
def test_whole_logits_are_those_of_the_model_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    expected = logits(model)
    with chunked(model), caplog.at_level(logging.WARNING, "hf_ckpt"):
        put_off = logits(model)
        assert torch.equal(put_off.sin(), expected.sin())
        assert torch.equal(logits(model).cos(), expected.cos())
    assert [record.getMessage() for record in caplog.records] == [
        "head: chunked keeps logits from being held, but sin asks for all of them ((2, 24, 97) in float32, 0.00 GiB), "
        "and gets them. Compute it with torch.nn.functional.cross_entropy or from a few rows at a time, or leave head: "
        "chunked out."
    ]


@core
def test_few_rows_of_the_logits_are_no_matter(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    expected = logits(model)
    with chunked(model), caplog.at_level(logging.WARNING, "hf_ckpt"):
        put_off = logits(model)
        # A product with fewer sequences.adds up in another order.
        torch.testing.assert_close(put_off[0, 3], expected[0, 3], rtol=BOUND, atol=BOUND)
        torch.testing.assert_close(put_off[:, -1, :].sin(), expected[:, -1].sin(), rtol=BOUND, atol=BOUND)
        assert torch.equal(put_off.detach().argmax(-1), expected.argmax(-1))
    assert caplog.records == []


@core
def test_logits_look_like_logits() -> None:
    model = llama(torch.bfloat16)
    with chunked(model):
        found = logits(model)
        assert (found.shape, found.size(-1), len(found), found.dim(), found.numel()) == (
            (2, 24, VOCAB),
            VOCAB,
            2,
            3,
            4656,
        )
        assert (found.dtype, found.device.type, found.is_floating_point()) == (torch.bfloat16, "cpu", True)
        assert found.is_contiguous()
        assert found.requires_grad
        assert found.grad_fn is not None
        assert found.float().dtype == torch.float32
        assert not found.detach().requires_grad
        assert repr(found) == "DeferredLogits(shape=(2, 24, 97), dtype=torch.bfloat16, device=cpu)"


@core
def test_detached_logits_pass_no_gradient() -> None:
    model = llama()
    with chunked(model):
        found = logits(model)
        assert not functional.cross_entropy(found.detach()[0], ids()[0]).requires_grad
        with torch.no_grad():
            inside = found.clone()
        assert not functional.cross_entropy(inside[0], ids()[0]).requires_grad
