"""What saved files must hold: exactly what PEFT and transformers write from one process, and a word on what is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_shards
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_ckpt.errors import SavedFilesError, UnsupportedError
from hf_ckpt.trainer.saved_files import SavedFiles, check_can_be_saved, writes_shards_only
from tests import training, twins, zoo

ADAPTER = "adapter_model.safetensors"


def adapted(model: nn.Module | None = None, **changes: Any) -> PeftModel:
    settings = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False, "task_type": TaskType.CAUSAL_LM}
    return get_peft_model(model or training.llama(), LoraConfig(**{**settings, **changes}))


def in_4_bit() -> nn.Module:
    storage = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(twins.model("Qwen/Qwen3-8B-Base"), quantization_config=storage)


def shapes(file: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}


def noted(expected: SavedFiles) -> dict[str, tuple[int, ...]]:
    (contents,) = expected.contents
    return {min(names): shape for shape, names in contents.tensors}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "saved"


# --- What one process writes is complete. ---

ADAPTERS: dict[str, Callable[[], PeftModel]] = {
    "lora": adapted,
    "dora": lambda: adapted(use_dora=True),
    "bias": lambda: adapted(training.llama(attention_bias=True), bias="all"),
    "some ranks": lambda: adapted(rank_pattern={r".*layers\.0\..*q_proj": 5}),
    "some layers": lambda: adapted(target_modules=["q_proj"], layers_to_transform=[1, 3]),
    "modules to save": lambda: adapted(modules_to_save=["embed_tokens", "lm_head"]),
    "trained tokens": lambda: adapted(trainable_token_indices=[1, 2]),
    "4-bit base": lambda: adapted(in_4_bit()),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter_file_holds_what_was_noted(kind: str, folder: Path) -> None:
    model = ADAPTERS[kind]()
    expected = SavedFiles.of(model)
    model.save_pretrained(folder)
    expected.check(folder, model)
    assert noted(expected) == shapes(folder / ADAPTER)
    assert expected.verdict() == f"all {len(noted(expected))} tensors are there, as one process would save them"


def test_embeddings_that_peft_adds_are_no_fault(folder: Path) -> None:
    model = adapted(target_modules=["embed_tokens", "q_proj"])
    expected = SavedFiles.of(model)
    with pytest.warns(UserWarning, match="Setting `save_embedding_layers` to `True`"):
        model.save_pretrained(folder)
    expected.check(folder, model)
    assert shapes(folder / ADAPTER).keys() - noted(expected).keys() == {
        "base_model.model.model.embed_tokens.base_layer.weight"
    }


def test_every_adapter_has_its_file(folder: Path) -> None:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=3, target_modules=["q_proj"], task_type=TaskType.CAUSAL_LM))
    expected = SavedFiles.of(model)
    model.save_pretrained(folder)
    expected.check(folder, model)
    (folder / "other" / ADAPTER).unlink()
    with pytest.raises(SavedFilesError, match=re.escape(f"There is no {folder / 'other' / ADAPTER}")):
        expected.check(folder, model)


# Tied weights are saved once; mixtures of experts are saved in other pieces than they are trained in.
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2", "qwen3_moe", "mixtral", "t5", "bart"])
def test_whole_model_holds_what_was_noted(model_type: str, folder: Path) -> None:
    model = zoo.build(model_type).model
    expected = SavedFiles.of(model)
    model.save_pretrained(folder)
    expected.check(folder, model)


def test_model_in_several_files_is_complete(folder: Path) -> None:
    model = training.llama()
    expected = SavedFiles.of(model)
    model.save_pretrained(folder, max_shard_size="10KB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    expected.check(folder, model)
    files[1].unlink()
    with pytest.raises(SavedFilesError, match=r"holds \d+ tensors, but \d+ of the 39 of the model are missing"):
        expected.check(folder, model)


# --- What is lost is told. ---


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> PeftModel:
    """Save an adapter and change what is in its file."""
    model = adapted()
    model.save_pretrained(folder)
    save_file(change(load_file(folder / ADAPTER)), folder / ADAPTER)
    return model


def test_missing_file_is_told(folder: Path) -> None:
    fault = SavedFiles.of(adapted()).fault(folder)
    assert fault is not None
    assert fault.startswith(f"There is no {folder / ADAPTER}: the adapter was not saved. ")


def test_empty_file_is_told(folder: Path) -> None:
    model = rewritten(folder, lambda tensors: {})
    fault = SavedFiles.of(model).fault(folder, model)
    assert fault == (
        f"{folder / ADAPTER} holds 0 tensors, but 56 of the 56 of the adapter are missing or have another shape "
        "(base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, "
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight, "
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight, and 53 more). Something renamed, replaced or "
        "left out these modules while the model was prepared or saved. Compare the names in the file with those of "
        "model.named_parameters()."
    )


def test_wrapped_layers_are_named_as_the_reason(folder: Path) -> None:
    model = adapted()
    expected = SavedFiles.of(model)
    layers = model.base_model.model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    # As accelerate hands it over: torch's own state dict has clean names, but PEFT looks for those of its modules.
    model.save_pretrained(folder, state_dict={})
    fault = expected.fault(folder, model)
    assert fault is not None
    assert "holds 0 tensors" in fault
    assert "Layers are wrapped in CheckpointWrapper" in fault
    assert "fsdp_activation_checkpointing" in fault


@pytest.mark.parametrize("wrapper", ["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"])
def test_names_of_a_wrapper_are_told(wrapper: str, folder: Path) -> None:
    def prefixed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {f"{wrapper}.extra": torch.zeros(1)}

    model = rewritten(folder, prefixed)
    with pytest.raises(SavedFilesError, match=rf"under the names of a wrapper \({wrapper}\.extra\)"):
        SavedFiles.of(model).check(folder, model)


def test_shards_that_were_not_gathered_are_told(folder: Path) -> None:
    model = rewritten(folder, lambda tensors: {name: tensor.new_empty(0) for name, tensor in tensors.items()})
    with pytest.raises(SavedFilesError, match="stage3_gather_16bit_weights_on_model_save: true"):
        SavedFiles.of(model).check(folder, model)


def test_one_other_shape_is_told(folder: Path) -> None:
    name = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    model = rewritten(folder, lambda tensors: tensors | {name: torch.zeros(1, 2)})
    with pytest.raises(SavedFilesError, match=rf"1 of the 56 .* have another shape \({re.escape(name)}\)"):
        SavedFiles.of(model).check(folder, model)


def test_one_weight_of_a_whole_model_is_missed(folder: Path) -> None:
    model = training.llama()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        SavedFilesError, match=r"1 of the 39 of the model .* \(model\.layers\.3\.mlp\.up_proj\.weight\)"
    ):
        SavedFiles.of(model).check(folder, model)


def test_partitioned_parameters_are_noted_with_their_whole_shape() -> None:
    model = training.llama()
    for parameter in model.parameters():
        # As ZeRO-3 does.
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert noted(SavedFiles.of(model)) == noted(SavedFiles.of(training.llama()))


# --- Shards. ---

one_process = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@pytest.fixture
def _shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let accelerate shard, in FSDP2, with checkpoints in shards."""
    plugin = SimpleNamespace(fsdp_version=2, state_dict_type="StateDictType.SHARDED_STATE_DICT")
    monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    writer = FileSystemWriter(folder / "pytorch_model_fsdp_0")
    save_shards({"model": tensors}, storage_writer=writer, no_dist=True)


@one_process
@pytest.mark.usefixtures("_shards")
def test_checkpoint_in_shards_is_complete(folder: Path) -> None:
    model = training.llama()
    write_shards(folder, dict(model.named_parameters()))
    assert writes_shards_only()
    assert SavedFiles.of(model).fault_of_checkpoint(folder, model) is None


@one_process
@pytest.mark.usefixtures("_shards")
def test_checkpoint_in_shards_without_the_model_is_told(folder: Path) -> None:
    model = adapted()
    write_shards(folder, {})
    fault = SavedFiles.of(model).fault_of_checkpoint(folder, model)
    assert fault is not None
    assert fault.startswith(f"{folder / 'pytorch_model_fsdp_0'} holds 0 tensors, but 56 of the 56 of the adapter are")


@pytest.mark.usefixtures("_shards")
def test_shards_are_no_adapter(folder: Path) -> None:
    model = adapted()
    with pytest.raises(SavedFilesError, match="SHARDED_STATE_DICT the Trainer writes shards only"):
        SavedFiles.of(model).check(folder, model)


def test_without_fsdp_nothing_is_in_shards() -> None:
    assert not writes_shards_only()


def test_fsdp1_on_a_cpu_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SimpleNamespace(fsdp_version=1, state_dict_type="StateDictType.FULL_STATE_DICT")
    monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
    check_can_be_saved(torch.device("cuda"))
    with pytest.raises(UnsupportedError) as refused:
        check_can_be_saved(torch.device("cpu"))
    assert str(refused.value) == (
        "This run would save a model that FSDP1 shards on a CPU. There torch's full state dict ends the process, and "
        "accelerate's sharded one loses the adapter and the optimizer's state. Use FSDP2 (fsdp_version: 2), or save "
        'nothing (save_strategy: "no").'
    )
