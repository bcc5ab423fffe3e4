"""What a run of two processes shows: once, in the first one."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hf_ckpt import HFCkptCallback
from tests.distributed.runs import full_fine_tune, train
from tests.trainer.test_messages import shown


@pytest.mark.two("rows are given out to two")
def test_only_the_first_rank_shows_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    train(full_fine_tune("llama"), "ddp", HFCkptCallback("full"), disable_tqdm=False)
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(shown(capsys)))
    assert counts == [2, 0]
