"""Recipes for mixtures whose experts are in 4 bits: loaded, trained, saved, loaded again, verified; and refused."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_ckpt import RecipeError, load_recipe
from hf_ckpt.cli.main import main
from hf_ckpt.finetune import train
from hf_ckpt.loading.model import load_base
from hf_ckpt.structure.four_bit_tensor import FourBitTensor
from hf_ckpt.structure.quantized_experts import experts_in_4_bits
from tests import small_recipes

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", **_SIZES, "moe_intermediate_size": 64, "num_experts": 4}
    | {"num_experts_per_tok": 2},
    "gpt_oss": {"model_type": "gpt_oss", **_SIZES, "intermediate_size": 64, "head_dim": 32, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "sliding_window": 16},
    "mixtral": {"model_type": "mixtral", **_SIZES, "intermediate_size": 64, "num_local_experts": 4},
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
QUANTIZATION = {**NF4, "bnb_4bit_compute_dtype": "bfloat16", "quantize_experts": True}


def recipe_of(folder: Path, base: Path, **sections: Any) -> Path:
    model = {**small_recipes.on_weights(base), "dtype": "bfloat16"}
    given = {"model": model, "lora": LORA, "quantization": QUANTIZATION, "checkpointing": {"policy": "full"}}
    return small_recipes.write(folder, **{**given, **sections})


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=torch.arange(3, 19)[None]).logits
    return found


@pytest.mark.parametrize("name", MIXTURES)
def test_only_one_layers_experts_are_whole_while_loading(
    name: str, tmp_path: Path, bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize, seen = FourBitTensor.quantized, list[weakref.ref[Tensor]]()

    def quantized(values: Tensor, **options: Any) -> FourBitTensor:
        assert not [each for each in seen if each() is not None]
        seen.append(weakref.ref(values))
        return quantize(values, **options)

    monkeypatch.setattr(FourBitTensor, "quantized", quantized)
    model = load_base(load_recipe(recipe_of(tmp_path, bases[name])), is_quantized=True)
    assert len(seen) == len(dict(experts_in_4_bits(model))) == 4
    assert {type(part).__name__ for part in model.modules() if "Linear" in type(part).__name__} >= {"Linear4bit"}


@pytest.mark.parametrize("on_experts", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.sweep(keep=2)
def test_the_adapter_that_was_trained_is_the_one_that_is_loaded(
    name: str, on_experts: bool, tmp_path: Path, bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = dict[str, Any]()
    make = train.make_trainer

    def kept(*args: Any, **kwargs: Any) -> Any:
        # A summary's further steps would train on.
        monkeypatch.setattr(train, "measured_peak", lambda *args: None)
        trainer = make(*args, **kwargs)
        trained["model"] = trainer.model
        return trainer

    monkeypatch.setattr(train, "make_trainer", kept)
    lora = {**LORA, "target_parameters": EXPERTS} if on_experts else LORA
    recipe = load_recipe(recipe_of(tmp_path, bases[name], lora=lora))
    train.finetune(recipe)
    saved = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert len(saved) == (16 if on_experts else 8)
    assert all(saved[key].any() for key in saved if "lora_B" in key)
    reloaded = PeftModel.from_pretrained(load_base(recipe, is_quantized=True), tmp_path / "run")
    assert torch.equal(logits_of(reloaded), logits_of(trained["model"]))


@pytest.mark.parametrize("lora", [LORA, {**LORA, "target_parameters": EXPERTS}], ids=["attention", "experts"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.sweep(keep=1)
def test_verify_holds(
    name: str, lora: Any, tmp_path: Path, bases: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_of(tmp_path, bases[name], lora=lora, checkpointing={"policy": "selective"})
    assert main(["verify", str(path)]) == 0
    lines = {line.split("  ")[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert all("pass" in lines[check] for check in ("adapter file", "reload", "merge", "resume", "gradients"))


def test_the_other_weights_can_be_prepared_as_peft_does(tmp_path: Path, bases: dict[str, Path]) -> None:
    section = {**QUANTIZATION, "prepare_model_for_kbit_training": True}
    model = load_base(load_recipe(recipe_of(tmp_path, bases["mixtral"], quantization=section)), is_quantized=True)
    experts = dict(experts_in_4_bits(model))
    assert {each.dtype for each in experts.values()} == {torch.bfloat16}
    others = [each for name, each in model.named_parameters() if name not in experts and each.is_floating_point()]
    assert {each.dtype for each in others} == {torch.float32}


def test_the_base_cannot_be_saved(tmp_path: Path, bases: dict[str, Path]) -> None:
    model = load_base(load_recipe(recipe_of(tmp_path, bases["mixtral"])), is_quantized=True)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")


@pytest.fixture(scope="module")
def stored_in_mxfp4(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a gpt-oss whose experts are stored as those of the released one."""
    folder, base = tmp_path_factory.mktemp("mxfp4"), bases["gpt_oss"]
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for key in [key for key in weights if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = weights.pop(key).shape
        shape = (experts, columns, rows // 32)
        weights[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        # Powers of two, as their exponents plus 127.
        weights[f"{key}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    for file in base.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file({key: each.contiguous() for key, each in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_experts_stored_in_mxfp4_are_dequantised_layer_by_layer(stored_in_mxfp4: Path, tmp_path: Path) -> None:
    def experts(**sections: Any) -> dict[str, Tensor]:
        model = load_base(load_recipe(recipe_of(tmp_path, stored_in_mxfp4, **sections)), is_quantized=True)
        return {name: each for name, each in model.named_parameters() if each.dim() == 3}

    plain = experts(quantization=None)
    assert len(plain) == 4
    assert {type(each) for each in plain.values()} == {nn.Parameter}
    left = experts(quantization={**QUANTIZATION, "quantize_experts": False})
    assert all(torch.equal(left[name], each) for name, each in plain.items())
    for name, each in experts().items():
        assert isinstance(each, FourBitTensor)
        assert torch.equal(each.values(), each.requantized(plain[name].to(each.dtype)).values())


def test_a_recipe_trains_what_is_stored_in_mxfp4(
    stored_in_mxfp4: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="hf_ckpt"):
        train.finetune(load_recipe(recipe_of(tmp_path, stored_in_mxfp4)))
    assert "its experts are stored in MXFP4, which does not train. They are dequantised." in caplog.text
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


def test_experts_in_8_bits_are_refused(tmp_path: Path) -> None:
    section = {"load_in_8bit": True, "quantize_experts": True}
    with pytest.raises(RecipeError, match="experts are quantised in 4 bits only"):
        load_recipe(recipe_of(tmp_path, tmp_path, quantization=section))
