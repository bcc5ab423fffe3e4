"""What the tests of offload start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests import exactness, offloading, zoo


@pytest.fixture(autouse=True)
def _fresh_memory_holds_nonsense() -> Iterator[None]:
    # torch fills what `empty` makes with NaN then, so that a copy which never came cannot look right by chance.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def case() -> zoo.Case:
    """A Llama with adapters and dropout."""
    built = exactness.build("llama", num_layers=offloading.LAYERS, attn_implementation="eager")
    return exactness.lora(built, lora_dropout=0.1)
