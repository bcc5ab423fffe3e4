"""Generation after a sharded run: all processes take part, and write what an unsharded model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_ckpt.loading.sharding_engine import describe_engine, gathers_in_forward, ready_to_generate
from tests.distributed import runs
from tests.distributed.runs import KINDS, engine_arguments, engine_of, fresh_accelerate, make_trainer, whole

DESCRIBED = {
    "ddp": "DDP on 2 processes; sharded: nothing, each holds the whole model",
    "fsdp1": "FSDP1 on 2 processes; sharded: ",
    "fsdp2": "FSDP2 on 2 processes; sharded: ",
}
PROMPT = [[5, 9, 7, 12]]


def written(model: Any, prompt: Tensor, **options: Any) -> list[int]:
    tokens = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, **options
    )
    return tokens[0].tolist()


def unsharded(kind: str, weights: dict[str, Tensor]) -> nn.Module:
    model = KINDS[kind]("llama")
    model.load_state_dict(weights, strict=False)
    return model.eval()


@pytest.mark.parametrize(("kind", "precision"), [*((kind, "float32") for kind in KINDS), ("full", "bfloat16")])
@pytest.mark.parametrize("engine", runs.ENGINES)
@pytest.mark.two("it is read that two were there")
def test_sharded_model_writes_as_an_unsharded_one(engine: str, kind: str, precision: str, tmp_path: Path) -> None:
    is_bfloat16 = precision == "bfloat16"
    with fresh_accelerate():
        given = engine_arguments(engine) | {"bf16": is_bfloat16, "max_steps": 1}
        trainer = make_trainer(KINDS[kind]("llama"), tmp_path, **given)
        trainer.train()
        trainer.model_wrapped.eval()
        assert engine_of(trainer.model_wrapped) == engine
        assert gathers_in_forward(trainer) is (engine != "ddp")
        assert describe_engine(trainer).startswith(DESCRIBED[engine])
        prompt = torch.tensor(PROMPT, device=trainer.args.device)
        with torch.no_grad(), ready_to_generate(trainer) as model:
            got = written(model, prompt, synced_gpus=gathers_in_forward(trainer))
        weights = whole(trainer.model_wrapped)
    assert len(got) == len(PROMPT[0]) + 8
    # In bfloat16 FSDP computes otherwise than autocast does: that it writes at all is what is shown there.
    if not is_bfloat16:
        assert got == written(unsharded(kind, weights).to(prompt.device), prompt)
