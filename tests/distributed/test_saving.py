"""What a run on two processes leaves behind: the adapter or model of one process, and checkpoints to go on from."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from hf_ckpt import DataError, RecipeError, UnsupportedError, load_recipe
from hf_ckpt.cli.finetune import main
from hf_ckpt.errors import OtherProcessError, SavedFilesError
from hf_ckpt.finetune import train
from hf_ckpt.finetune.run_report import RunSummary
from hf_ckpt.loading.model import build_model
from hf_ckpt.loading.tokenizer import load_tokenizer
from tests import small_recipes, twins
from tests.distributed import runs
from tests.distributed.launching import launched, made_by_first, share_twins
from tests.finetune.test_finetune import assert_same_answers

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
LAUNCHES: dict[str, tuple[str, ...]] = {
    "ddp": ("ddp_8gpu",),
    "fsdp2 full": ("fsdp2_8gpu",),
    "fsdp2 sharded": ("fsdp2_8gpu", "--fsdp_state_dict_type", "SHARDED_STATE_DICT"),
}
WITH_EVERYTHING = {
    **small_recipes.LORA,
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 2},
}
KINDS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": small_recipes.LORA,
    "lora with everything": WITH_EVERYTHING,
}
SHORT = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 1}


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_NUM_SAMPLE_TOKENS", 4)
    share_twins(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made_by_first(lambda: tmp_path)


def recipe_in(folder: Path, kind: str, **training: Any) -> Path:
    weights = twins.model(LLAMA)
    sections = {"model": small_recipes.on_weights(weights), "lora": KINDS[kind], "training": SHORT | training}
    return made_by_first(lambda: small_recipes.write(folder, **sections))


def carry_out(recipe: Path, launch: tuple[str, ...], to: Path, **options: bool) -> RunSummary:
    with launched(*launch):
        return train.finetune(load_recipe(recipe, [f"training.output_dir={to}"]), **options)


@functools.cache
def whole(launch: str, kind: str) -> tuple[Path, RunSummary]:
    """Carry out a recipe that is stopped by nothing, once for all tests; return the recipe too."""
    # In the cache of the tests, which goes away with them.
    folder = made_by_first(lambda: Path(tempfile.mkdtemp(dir=os.environ["HF_HOME"])))
    recipe = recipe_in(folder, kind)
    return recipe, carry_out(recipe, LAUNCHES[launch], folder / "run")


def losses(run: RunSummary) -> list[float]:
    return [entry["loss"] for entry in run.log_history if "loss" in entry]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def unequal(expected: Any, got: Any, at: str = "") -> Iterator[str]:
    """Name the places at which two states differ."""
    if isinstance(expected, torch.Tensor):
        if not torch.equal(expected, got):
            yield at
    elif isinstance(expected, dict):
        assert expected.keys() == got.keys()
        for key, value in expected.items():
            yield from unequal(value, got[key], f"{at}/{key}")
    elif isinstance(expected, list | tuple):
        # A state that was loaded has lists where a new one has tuples.
        for number, (value, other) in enumerate(zip(expected, got, strict=True)):
            yield from unequal(value, other, f"{at}/{number}")
    elif expected != got:
        yield at


def optimizer_state(checkpoint: Path) -> Any:
    (file,) = [checkpoint / name for name in ("optimizer.pt", "optimizer.bin") if (checkpoint / name).is_file()]
    return torch.load(file, weights_only=True)


# --- Going on. ---


@pytest.mark.parametrize(
    ("launch", "kind"), [("ddp", "lora"), ("fsdp2 full", "full"), ("fsdp2 sharded", "full"), ("fsdp2 sharded", "lora")]
)
def test_resumed_run_is_the_run_that_was_never_stopped(launch: str, kind: str, folder: Path) -> None:
    recipe, expected = whole(launch, kind)
    made_by_first(lambda: Path(shutil.copytree(expected.saved / "checkpoint-2", folder / "checkpoint-2")))
    got = carry_out(recipe, LAUNCHES[launch], folder, is_resumed=True)

    assert len(losses(expected)) == 4
    assert losses(got) == losses(expected)
    assert list(unequal(saved(expected.saved), saved(folder))) == []
    if launch != "fsdp2 sharded":
        states = [optimizer_state(place / "checkpoint-4") for place in (expected.saved, folder)]
        assert list(unequal(*states)) == []
        assert any(tensor.any() for tensor in states[0]["state"].popitem()[1].values())


# --- What is left at the end. ---


@pytest.mark.parametrize(
    ("launch", "kind"), [*((launch, "lora with everything") for launch in LAUNCHES), ("fsdp2 full", "lora")]
)
def test_adapter_is_that_of_one_process(launch: str, kind: str, folder: Path) -> None:
    recipe = recipe_in(folder, kind, save_strategy="no")
    run = carry_out(recipe, LAUNCHES[launch], folder / "run", is_merged=True)

    parts = load_recipe(recipe)
    alone = get_peft_model_state_dict(build_model(parts, load_tokenizer(parts.model, parts.data, cache_dir=folder)))
    assert {name: tensor.shape for name, tensor in saved(run.saved).items()} == {
        name: tensor.shape for name, tensor in alone.items()
    }
    assert run.verdict == f"all {len(alone)} tensors are there, as one process would save them"
    assert_same_answers(twins.model(LLAMA), run.saved, run.saved / "merged")


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_shards_end_in_the_same_file_as_a_full_state_dict(kind: str) -> None:
    full, sharded = (whole(launch, kind)[1].saved for launch in ("fsdp2 full", "fsdp2 sharded"))
    assert list(unequal(saved(full), saved(sharded))) == []
    checkpoint = sharded / "checkpoint-4"
    assert list(checkpoint.glob("*.safetensors")) == []
    assert (checkpoint / "pytorch_model_fsdp_0" / ".metadata").is_file()


OWN_CHECKPOINTING = (*LAUNCHES["fsdp2 full"], "--fsdp_activation_checkpointing", "true")


def test_adapter_that_accelerates_own_checkpointing_empties_ends_the_run(folder: Path) -> None:
    recipe = recipe_in(folder, "lora", save_strategy="no")
    with launched(*OWN_CHECKPOINTING), pytest.raises((SavedFilesError, OtherProcessError)) as failed:
        train.finetune(load_recipe(recipe, ["checkpointing=null"]))
    text = str(failed.value)
    assert text.startswith("Process 0 failed while saving the model: " if dist.get_rank() else str(folder / "run"))
    assert "adapter_model.safetensors holds 0 tensors, but 56 of the 56 of the adapter are missing" in text
    assert "Layers are wrapped in CheckpointWrapper" in text


def test_policy_governs_and_keeps_the_adapter(folder: Path) -> None:
    recipe, not_asked = whole("fsdp2 full", "lora")
    carry_out(recipe, OWN_CHECKPOINTING, folder)
    for part in (".", "checkpoint-2", "checkpoint-4"):
        assert list(unequal(saved(folder / part), saved(not_asked.saved / part))) == []


# --- What cannot be done is said, in both processes. ---


def test_fsdp1_on_a_cpu_is_refused_before_it_trains(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("FSDP1 saves on GPUs")
    recipe = recipe_in(folder, "lora")
    # FSDP1 cannot send weights to other processes on a CPU.
    launch = ("fsdp1_8gpu", "--fsdp_cpu_ram_efficient_loading", "false", "--fsdp_sync_module_states", "false")
    with pytest.raises(UnsupportedError, match="FSDP1 shards on a CPU"):
        carry_out(recipe, launch, folder / "run")
    assert list((folder / "run").iterdir()) == []


def test_fsdp_that_accelerate_leaves_out_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("accelerate leaves FSDP out on CPUs only")
    recipe = recipe_in(folder, "lora")
    monkeypatch.setattr(runs, "fsdp_on_a_cpu", nullcontext)
    with pytest.raises(RecipeError, match="would go on with DDP here without a word"):
        carry_out(recipe, LAUNCHES["fsdp2 full"], folder / "run")


def test_data_that_is_missing_in_one_process_ends_both(folder: Path) -> None:
    recipe = recipe_in(folder, "lora")
    path = str(folder / "sentences.jsonl") if dist.get_rank() == 0 else str(folder / "elsewhere.jsonl")
    with launched("ddp_8gpu"), pytest.raises((DataError, OtherProcessError)) as failed:
        train.finetune(load_recipe(recipe, [f"data.path={path}"]))
    own = f"data.path: there is no file or directory {str(folder / 'elsewhere.jsonl')!r} in {str(Path.cwd())!r}."
    if dist.get_rank() == 0:
        assert str(failed.value) == f"Process 1 failed while preparing the data: {own}"
    else:
        assert str(failed.value) == own
    assert not (folder / "run").exists()


def test_command_tells_of_missing_data_once_and_ends_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_in(folder, "lora")
    with launched("ddp_8gpu"):
        assert main([str(recipe), "data.path=nowhere.jsonl"]) == 2
    is_told = "there is no file or directory 'nowhere.jsonl'" in capsys.readouterr().err
    assert is_told is (dist.get_rank() == 0)
    assert not (folder / "run").exists()
