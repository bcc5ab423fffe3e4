"""Gradient accumulation on two ranks, against one process that sees the same rows in the same optimizer steps."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests import zoo
from tests.distributed.runs import ENGINES, Outcome, callback, one_process, train, whole

ACCUMULATION = 4


def model() -> nn.Module:
    # Without dropout: two processes draw other masks than one.
    torch.manual_seed(0)
    return zoo.build("llama", dropout=0.0).model


@functools.cache
def alone() -> Outcome:
    with one_process():
        return train(
            model(),
            "none",
            read=whole,
            optim="sgd",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=ACCUMULATION,
        )


@pytest.mark.parametrize("mode", ["none", "full", "nested"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.two("the one process takes the rows of two")
def test_accumulation_equals_one_process_with_the_same_rows(engine: str, mode: str) -> None:
    expected = alone()
    got = train(model(), engine, callback(mode), read=whole, optim="sgd", gradient_accumulation_steps=ACCUMULATION)
    assert got.engine == engine
    # The sums over rows and over ranks are taken in another order; float32 has seven digits.
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(got.weights, expected.weights, rtol=1e-5, atol=1e-6)
