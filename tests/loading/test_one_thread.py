"""Tiny models are trained in one thread, others in as many as torch takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hf_ckpt.loading.trainer import use_one_thread_if_tiny


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("width", "expected"), [(64, 1), (2048, 2)])
def test_one_thread_is_for_tiny_models(width: int, expected: int) -> None:
    use_one_thread_if_tiny(nn.Linear(width, width, device="meta"))
    assert torch.get_num_threads() == expected


def test_what_the_user_says_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    use_one_thread_if_tiny(nn.Linear(2, 2))
    assert torch.get_num_threads() == 2
