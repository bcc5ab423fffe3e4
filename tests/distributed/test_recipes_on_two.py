"""The recipes for many GPUs on two processes, key by key, under the accelerate configuration that each names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_ckpt.finetune import train
from hf_ckpt.structure.four_bit_tensor import FourBitTensor
from tests.distributed.launching import launched, made_by_first, share_twins
from tests.docs.test_shipped_recipes import (
    ON_MANY,
    RECIPES,
    Run,
    carry_out,
    check_adapter_is_whole,
    check_losses,
    check_merged_model,
    check_plan,
    check_weights_are_those_without_the_plan,
    shipped,
)

ENGINES = {
    "llama7b_lora_ddp": "DDP on 2 processes; sharded: nothing, each holds the whole model",
    # Layers, embeddings, norm with head, and the model around them.
    "llama7b_full_fsdp": "FSDP2 on 2 processes; sharded: 8 modules, 100% of the weights",
    "llama70b_qlora_fsdp": "FSDP2 on 2 processes; sharded: 7 modules, 100% of the weights",
    "qwen3_32b_lora_fsdp": "FSDP2 on 2 processes; sharded: 7 modules, 100% of the weights",
}


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_NUM_SAMPLE_TOKENS", 4)
    share_twins(monkeypatch)


def config_of(stem: str) -> str:
    """The accelerate configuration that the header of a recipe launches it with."""
    text = (RECIPES / f"{stem}.yaml").read_text(encoding="utf-8")
    found = re.search(
        rf"^# Launch: +accelerate launch --config_file recipes/accelerate/(\w+)\.yaml scripts/finetune\.py "
        rf"recipes/{stem}\.yaml$",
        text,
        re.MULTILINE,
    )
    assert found is not None
    return found[1]


def on_two(stem: str, folder: Path, *more: str, is_merged: bool = False) -> Run:
    with launched(config_of(stem)):
        return carry_out(stem, folder, *more, is_merged=is_merged)


def test_every_recipe_for_many_gpus_is_carried_out_on_two() -> None:
    # The last one in test_deepspeed_recipe.py.
    assert sorted([*ENGINES, "llama7b_full_zero3"]) == ON_MANY


@pytest.mark.parametrize("stem", ENGINES)
@pytest.mark.two("it is read that two were there")
def test_recipe_trains_on_two_as_without_its_plan(
    stem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made_by_first(lambda: tmp_path)
    has_adapter = shipped(stem).lora is not None
    run = on_two(stem, folder / "planned", is_merged=has_adapter)
    printed = capsys.readouterr().out
    plain = on_two(stem, folder / "plain", "checkpointing=null")

    assert run.summary.engine == plain.summary.engine == ENGINES[stem]
    check_losses(run, plain)
    check_plan(run)
    check_weights_are_those_without_the_plan(run, plain)
    if has_adapter:
        check_adapter_is_whole(run)
    if has_adapter and dist.get_rank() == 0:
        check_merged_model(run)
    check_words(run, printed)


# A preference loss is not simulated under FSDP: the recipe's fallback is in force there.
FALLBACKS = {"llama3_8b_dpo_lora": ["base_model.model.model.layers: 4 layers", "  0 to 3       full"]}


@pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning")
@pytest.mark.parametrize(("stem", "config"), [("llama3_8b_dpo_lora", "fsdp2_8gpu"), ("llama3_8b_reward", "ddp_8gpu")])
def test_trainers_of_trl_train_on_two_as_without_their_plan(stem: str, config: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16")
    folder = made_by_first(lambda: tmp_path)
    with launched(config):
        planned = carry_out(stem, folder / "planned")
        plain = carry_out(stem, folder / "plain", "checkpointing=null")
    assert str(planned.summary.engine).startswith("FSDP2" if "fsdp2" in config else "DDP")
    check_losses(planned, plain)
    check_plan(planned, FALLBACKS.get(stem, ()))


def check_words(run: Run, printed: str) -> None:
    """Hold that one process speaks for both."""
    # DeepSpeed, where it is installed, tells each process of the devices that it found.
    lines = [line for line in printed.splitlines() if "real_accelerator.py" not in line]
    if dist.get_rank():
        assert lines == []
        return
    assert run.summary.table() in printed
    assert f"all {len(run.weights)} tensors are there, as one process would save them" in printed
    assert sum(line.startswith("Sample, ") for line in lines) == 1


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
def test_experts_in_4_bits_train_on_two_as_without_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap, values, unpacked = DistributedDataParallel.__init__, FourBitTensor.values, list[str]()

    def wrapped(*args: Any, **options: Any) -> None:
        # DDP compares and sends all parameters but those that it is told to leave: whole, and of all layers.
        with monkeypatch.context() as patched:
            patched.setattr(FourBitTensor, "values", lambda weight: unpacked.append(str(weight)) or values(weight))
            wrap(*args, **options)

    monkeypatch.setattr(DistributedDataParallel, "__init__", wrapped)
    folder, stem = made_by_first(lambda: tmp_path), "gpt_oss_20b_lora_24gb"
    with launched("ddp_8gpu"):
        left_out = (f"checkpointing.{key}=null" for key in ("memory_budget", "exact", "fallback"))
        run = carry_out(stem, folder / "planned", "checkpointing.policy=full", *left_out)
        plain = carry_out(stem, folder / "plain", "checkpointing=null")
    assert run.summary.engine == "DDP on 2 processes; sharded: nothing, each holds the whole model"
    assert unpacked == []
    check_losses(run, plain)
    check_weights_are_those_without_the_plan(run, plain)
