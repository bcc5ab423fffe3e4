"""What changes between forward and backward while FSDP shards the weights: noticed by this rank's share of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_ckpt
from hf_ckpt.errors import UnsupportedError
from tests import zoo
from tests.distributed.ranks import has_gpus

pytestmark = pytest.mark.skipif(has_gpus(), reason="shards on the CPU")

# Of the parts that no region reads, torch itself tells.
WRITTEN = "since its forward weights were written to|has been modified by an inplace operation"


def with_fsdp1(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)


def with_fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


every_engine = pytest.mark.parametrize("wrap", [with_fsdp1, with_fsdp2])
every_way = pytest.mark.parametrize("way", ["full", "attention", "segments"])


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(0)
    loss: Tensor = model(**inputs).loss
    return loss


def applied(model: nn.Module, way: str) -> hf_ckpt.patch.apply.Applied:
    if way == "segments":
        return hf_ckpt.apply(model, "full", segment_size=2, prove="off")
    return hf_ckpt.apply(model, way, prove="off")


@every_engine
@every_way
def test_sharded_weights_may_come_and_go_but_not_change(way: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    case = zoo.build("llama")
    model = wrap(case.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with applied(model, way):
        for _ in range(2):
            for _ in range(2):
                loss_of(model, case.inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = loss_of(model, case.inputs)
        with torch.no_grad():
            for parameter in model.parameters():
                # Past the version, as engines' own optimizers and fused ones write.
                parameter.data.mul_(2)
        with pytest.raises((UnsupportedError, RuntimeError), match=WRITTEN):
            loss.backward()


@every_engine
def test_flags_that_change_under_an_engine_raise(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    case = zoo.build("llama")
    model = wrap(case.model)
    with applied(model, "full"):
        loss = loss_of(model, case.inputs)
        model.eval()
        with pytest.raises(UnsupportedError, match="training flags, adapters or requires_grad were changed"):
            loss.backward()
