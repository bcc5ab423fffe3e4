"""Each of two processes names the examples of its own share of the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.runs import fresh_accelerate
from tests.recovery.test_failed_examples import asked, named


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.two("rows are given out to two")
def test_each_process_names_its_own_examples(accumulation: int, tmp_path: Path) -> None:
    with fresh_accelerate():
        found = asked(tmp_path, max_steps=8, gradient_accumulation_steps=accumulation)
        everywhere: list[Any] = [None, None]
        dist.all_gather_object(everywhere, found.really)
    assert found.said == [named(indices) for indices in found.really]
    assert everywhere[0] != everywhere[1]
