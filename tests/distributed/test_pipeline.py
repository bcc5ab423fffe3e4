"""A plan on each stage of `torch.distributed.pipelining`: gradients are those without a plan, bit by bit."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import hf_ckpt
from hf_ckpt.errors import UnsupportedError
from tests import exactness
from tests.distributed.ranks import has_gpus
from tests.training import VOCAB, llama

ROWS, LENGTH, MICRO_BATCHES, STEPS = 8, 12, 4, 2
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: exactness.POLICIES[name] for name in ("full", "attention", "ffn", "every_2", "segments_2", "mixed")},
    "selective": ("selective", {}),
    "offload": ("full", {"offload": "cpu"}),
    "every micro-batch proven": ("full", {"prove": 1}),
}


class Half(nn.Module):
    """A stage of a Llama: its first layers with the embeddings, or its last ones with the head."""

    def __init__(self, model: LlamaForCausalLM, rank: int) -> None:
        super().__init__()
        self.is_first = rank == 0
        layers = model.model.layers
        model.model.layers = layers[:2] if self.is_first else layers[2:]
        if self.is_first:
            model.lm_head = model.model.norm = nn.Identity()
        else:
            model.model.embed_tokens = nn.Identity()
        self.model = model

    def forward(self, hidden: Tensor) -> Tensor:
        if self.is_first:
            return self.model.model(input_ids=hidden, use_cache=False).last_hidden_state
        return self.model(inputs_embeds=hidden, use_cache=False).logits


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if has_gpus() else torch.device("cpu")


def half() -> Half:
    return Half(llama(attn_implementation="eager"), dist.get_rank()).to(device()).train()


def trained(stage: Half, kind: type[Any]) -> list[Tensor]:
    """Run a few steps under a schedule, and return the losses, and the gradients of each step."""
    schedule = kind(PipelineStage(stage, dist.get_rank(), 2, device()), MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    torch.manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator).to(device())
        if stage.is_first:
            schedule.step(tokens)
        else:
            losses: list[Tensor] = []
            schedule.step(target=tokens, losses=losses)
            found += losses
        found += [parameter.grad.clone() for parameter in stage.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in found]


@pytest.fixture(scope="module", params=[Schedule1F1B, ScheduleGPipe], ids=["1F1B", "GPipe"])
def alone(request: pytest.FixtureRequest) -> tuple[type[Any], list[Tensor]]:
    return request.param, trained(half(), request.param)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.two("the model is cut into two stages")
def test_gradients_are_those_without_a_plan(alone: tuple[type[Any], list[Tensor]], way: str) -> None:
    kind, expected = alone
    policy, options = WAYS[way]
    stage = half()
    with hf_ckpt.apply(stage, policy, **options) as applied, exactness.counted_entries(stage) as (_, backward):
        found = trained(stage, kind)
    num_losses = 0 if stage.is_first else MICRO_BATCHES
    assert len(found) == len(expected) == STEPS * (num_losses + len(list(stage.parameters())))
    assert all(map(torch.equal, found, expected))
    (planned,) = applied.plan.stacks
    product = "mlp.up_proj" if way == "ffn" else "self_attn.q_proj"
    again = [backward[f"model.model.layers.{idx}.{product}"] for idx in range(2)]
    # The last stage runs a backward of its own as well, before the first step: it looks at shapes.
    expected_times = {0} | {STEPS * MICRO_BATCHES + of_shapes for of_shapes in (0, 1)}
    assert set(again) <= expected_times
    assert [bool(times) for times in again] == [entry.mode != "none" for entry in planned.layers]


@pytest.mark.two("the model is cut into two stages")
def test_transformers_own_stages_are_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            llama().save_pretrained(folders[0])
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(folders[0], distributed_config=DistributedConfig(pp_size=2))
        dist.barrier()
    with pytest.raises(UnsupportedError, match="what a stage receives has no way back for gradients"):
        hf_ckpt.apply(model, "full")
