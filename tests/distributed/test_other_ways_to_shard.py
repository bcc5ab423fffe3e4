"""Other ways to shard: transformers' own, with mixed precision, and by hand without a Trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_ckpt
from hf_ckpt.errors import HFCkptError
from tests import exactness, zoo
from tests.distributed.ranks import has_gpus
from tests.distributed.runs import (
    KINDS,
    Outcome,
    callback,
    engine_arguments,
    fresh_accelerate,
    full_fine_tune,
    local,
    make_trainer,
    train,
)
from tests.distributed.test_same_numbers import MODES
from tests.training import During, changed, losses


@pytest.fixture(scope="module")
def saved_llama() -> Iterator[Path]:
    """A folder with a model that all ranks see."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            full_fine_tune("llama").save_pretrained(folder)
        dist.barrier()
        yield Path(folders[0])
        dist.barrier()


def loaded_sharded(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))


@pytest.fixture(scope="module")
def transformers_alone(saved_llama: Path) -> Outcome:
    return train(loaded_sharded(saved_llama), "none")


# Some modes stand for all: what shards is FSDP2, under which test_same_numbers.py has each.
some_modes = pytest.mark.parametrize("mode", ["full", "ffn", "nested", "mixed"])


@some_modes
@pytest.mark.two("its mesh is of two")
def test_transformers_own_fsdp2_trains_as_without_a_plan(
    saved_llama: Path, transformers_alone: Outcome, mode: str
) -> None:
    got = train(loaded_sharded(saved_llama), "none", callback(mode))
    assert got.engine == transformers_alone.engine == "fsdp2"
    assert got.losses == transformers_alone.losses
    assert changed(transformers_alone.weights, got.weights) == []
    assert got.names == transformers_alone.names


@pytest.fixture(scope="module")
def bf16_alone() -> Outcome:
    return train(full_fine_tune("llama"), "fsdp2", bf16=True)


@some_modes
def test_bf16_mixed_precision_trains_as_without_a_plan(bf16_alone: Outcome, mode: str) -> None:
    dtypes: set[torch.dtype] = set()

    def note_dtype(model: nn.Module) -> None:
        model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(lambda _, args: dtypes.add(args[0].dtype))

    watched = During("on_step_begin", note_dtype, step=0)
    got = train(full_fine_tune("llama"), "fsdp2", callback(mode), watched, bf16=True)
    assert got.engine == bf16_alone.engine == "fsdp2"
    assert dtypes == {torch.bfloat16}
    assert got.losses == bf16_alone.losses
    assert changed(bf16_alone.weights, got.weights) == []


def by_hand_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def by_hand_fsdp1(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpus() else torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)


def by_hand_fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.get_submodule("model.layers"):
        fully_shard(layer)
    return fully_shard(model)


WRAP: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": by_hand_ddp,
    "fsdp1": by_hand_fsdp1,
    "fsdp2": by_hand_fsdp2,
}


def case() -> zoo.Case:
    built = exactness.build("llama")
    device = "cuda" if has_gpus() else "cpu"
    inputs = {name: value.to(device) for name, value in built.inputs.items()}
    return zoo.Case(built.model_type, built.model.to(device), inputs)


def result(wrapped: nn.Module, inputs: dict[str, Tensor]) -> exactness.Result:
    """Loss and gradients of a step, of the second, in which an engine has settled; by parameter name."""
    for _ in range(2):
        loss, gradients = exactness.step(zoo.Case("llama", wrapped, inputs))
    return loss, {name: None if gradient is None else local(gradient) for name, gradient in gradients.items()}


@pytest.mark.parametrize(
    ("order", "mode"), [*(("before", mode) for mode in MODES), *(("after", mode) for mode in ("full", "ffn", "nested"))]
)
@pytest.mark.parametrize("engine", WRAP)
def test_policy_applied_by_hand_is_exact(engine: str, order: str, mode: str) -> None:
    plain, planned = case(), case()
    reference = WRAP[engine](plain.model)
    expected = result(reference, plain.inputs)
    if order == "before":
        exactness.apply(planned.model, mode)
    wrapped = WRAP[engine](planned.model)
    if order == "after":
        exactness.apply(wrapped, mode)
    with exactness.counted_entries(wrapped) as (_, in_backward):
        got = result(wrapped, planned.inputs)
    assert exactness.differences(expected, got) == []
    assert in_backward, "nothing was recomputed"
    assert [name for name, _ in wrapped.named_modules()] == [name for name, _ in reference.named_modules()]


@pytest.mark.parametrize("mode", ["full", "attention", "ffn", "selective", "selective_attention"])
@pytest.mark.two("its mesh is of two")
def test_mode_is_exact_under_tensor_parallelism(saved_llama: Path, mode: str) -> None:
    inputs = exactness.build("llama").inputs
    results = []
    for policy in ("none", mode):
        model = AutoModelForCausalLM.from_pretrained(
            saved_llama, distributed_config=DistributedConfig(tp_size=2)
        ).train()
        hf_ckpt.apply(model, policy)
        results.append(result(model, inputs))
    assert exactness.differences(*results) == []


# --- Adapters under FSDP1. ---


def adapters_in_bf16(prefetch: str, folder: Path, policy: str) -> list[float]:
    asked = {**engine_arguments("fsdp1")["fsdp_config"], "backward_prefetch": prefetch}
    with fresh_accelerate():
        run = make_trainer(KINDS["lora"]("llama"), folder, callback(policy), fsdp=True, fsdp_config=asked, bf16=True)
        run.train()
    return losses(run)


def test_adapters_that_fsdp1_gathers_ahead_in_another_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HFCkptError, match=r"layers\.0\.self_attn\.q_proj before .* BACKWARD_POST, or use FSDP2"):
        adapters_in_bf16("BACKWARD_PRE", tmp_path, "full")


def test_adapters_that_fsdp1_gathers_when_they_run_train_as_without_a_plan(tmp_path: Path) -> None:
    expected = adapters_in_bf16("BACKWARD_POST", tmp_path, "none")
    assert adapters_in_bf16("BACKWARD_POST", tmp_path, "full") == expected
    # Nothing runs again.
    assert adapters_in_bf16("BACKWARD_PRE", tmp_path, "none") == expected
