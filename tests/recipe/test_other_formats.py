"""YAML of axolotl, LLaMA-Factory and trl is recognised, in one line that leads to the page on coming from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_ckpt import RecipeError, load_recipe
from hf_ckpt.cli.main import main

ROOT = Path(__file__).parents[2]

AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_4bit: true
adapter: qlora
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
val_set_size: 0.05
sequence_len: 2048
sample_packing: true
lora_r: 32
lora_target_linear: true
micro_batch_size: 2
gradient_checkpointing: true
output_dir: ./outputs/out
"""
LLAMA_FACTORY = """
### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_target: all

### dataset
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048

### train
output_dir: saves/llama3-8b/lora/sft
per_device_train_batch_size: 1
learning_rate: 1.0e-4
"""
TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: stanfordnlp/imdb
report_to: none
learning_rate: 0.0001
use_peft: true
output_dir: out
"""
TRL_MIXTURE = """
model_name_or_path: Qwen/Qwen2.5-0.5B
datasets:
  - path: trl-lib/tldr
max_length: 2048
"""
FORMATS = {"axolotl": AXOLOTL, "LLaMA-Factory": LLAMA_FACTORY, "trl": TRL, "trl ": TRL_MIXTURE}


@pytest.mark.parametrize("name", FORMATS)
def test_configuration_of_another_trainer_is_recognised(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FORMATS[name])
    trainer = name.strip()
    for overrides in ([], ["training.max_steps=1"]):
        with pytest.raises(RecipeError) as refused:
            load_recipe(path, overrides)
        assert str(refused.value) == (
            f"{path}: this is a configuration of {trainer}, and no recipe. Read docs/coming_from.md#{trainer.lower()}: "
            f"it says how to keep {trainer}, and how to write a recipe."
        )


@pytest.mark.parametrize("command", ["estimate", "plan", "finetune", "verify", "inspect", "profile"])
def test_every_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(AXOLOTL)
    assert main([command, str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{path}: this is a configuration of axolotl, and no recipe.")
    assert said.count("\n") == 1


def test_page_has_a_section_for_each() -> None:
    text = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    assert [name for name in FORMATS if f"\n## {name.strip()}\n" not in text] == []


def test_recipe_with_a_mistake_is_no_other_format(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name_or_path: some/model\noutput_dir: out\ndata: {path: x}\ntraining: {output_dir: out}\n")
    with pytest.raises(RecipeError, match="unknown section"):
        load_recipe(path)
