"""What is wrong with a command, or missing for it, is said in one line with exit code 2 before torch is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

EXTRAS = ("datasets", "bitsandbytes", "deepspeed", "matplotlib", "gradio")
RUNNER = f"""
import contextlib, io, json, os, sys
sys.modules |= dict.fromkeys({EXTRAS})
from hf_ckpt.cli.main import main
import hf_ckpt.cli.plan
hf_ckpt.cli.plan.may_have_gpu = lambda: False
os.execv = lambda *command: print("launched", command, file=sys.stderr)
for words in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue(), "torch" in sys.modules]))
"""


def needs(packages: str, extra: str) -> str:
    are = "which are" if " and " in packages else "which is"
    return f'hf-ckpt needs {packages}, {are} not installed. Run: pip install "{ROOT}[{extra}]"\n'


CASES = {
    "estimate llama3_8b_qlora": needs("bitsandbytes", "qlora"),
    "estimate some/model --qlora 16": needs("bitsandbytes", "qlora"),
    "plan llama3_8b_qlora": needs("bitsandbytes", "qlora"),
    "inspect llama3_8b_qlora": needs("bitsandbytes", "qlora"),
    "verify llama7b_lora": needs("datasets", "finetune"),
    "profile llama3_8b_qlora": needs("datasets and bitsandbytes", "qlora"),
    "finetune llama7b_lora": needs("datasets", "finetune"),
    "finetune llama3_8b_qlora": needs("datasets and bitsandbytes", "qlora"),
    "finetune llama7b_full_zero3 --config-file zero3_8gpu": needs("datasets and deepspeed", "deepspeed"),
    "finetune llama70b_qlora_fsdp --config-file fsdp2_8gpu": needs("datasets and bitsandbytes", "qlora"),
    "estimate llama7b_lora --plot out.png": needs("matplotlib", "plot"),
    "plan llama7b_lora --plot out.png": needs("matplotlib", "plot"),
    "ui": needs("gradio", "ui"),
    "estimate llama7b_lora --device rtx409": 'Did you mean "rtx4090"?\n',
    "plan llama7b_lora --device rtx409": 'Did you mean "rtx4090"?\n',
    "init some/model --data org/rows --out new.yaml --device rtx409": 'Did you mean "rtx4090"?\n',
    "plan llama7b_lora": "Add --device rtx4090, or an amount: --memory-budget 22GiB.\n",
    "plan llama7b_lora --memory-budget 0.9": "Add --device rtx4090, or an amount: --memory-budget 22GiB.\n",
    "estimate llama7b_lora --engine fsdp2": "Add --processes 8, or --accelerate-config",
    "plan llama7b_lora --device rtx4090 --engine fsdp3 --processes 8": 'Did you mean "fsdp2"?\n',
    "estimate llama7b_lora --accelerate-config recipe.yaml": "is no configuration of accelerate, which has a",
    "estimate llama7b_lora --html empty": "--html empty: this is a folder. Name a file in it.\n",
    "estimate llama7b_lora model.attn_implementation=flash_attn_2": 'Did you mean "flash_attention_2"?\n',
    "estimate meta-llama/Llama-3.1-8b": 'Did you mean "meta-llama/Llama-3.1-8B"? Check the name, go online',
    "inspect some/model": "the config of some/model was not found (it is not cached, and the hub",
    "estimate llama7b_lora model.name_or_path=./gone": "there is no folder ./gone.",
    "plan ~/gone --lora 8 --device rtx4090": f"there is no folder {Path.home()}/gone.",
    "estimate broken": "broken/config.json is not valid JSON: ",
    "estimate empty": "empty: this folder holds no config.json, which describes a model.\n",
    "finetune some/model": "If it is a model, write a recipe for it: "
    "hf-ckpt init some/model --data rows.jsonl --out my_recipe.yaml\n",
    "finetune llama7b_full_fsdp training.lr=1 --config-file fsdp2_8gpu": "unknown key of TrainingArguments",
    "estimate": "hf-ckpt estimate: error: the following arguments are required: RECIPE\n",
    "estmate": 'Did you mean "estimate"?\n',
}


def test_every_refusal_is_short_and_early(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "recipe.yaml").write_text("model: {}")
    before = sorted(tmp_path.rglob("*"))
    words = json.dumps([command.split() for command in CASES])
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=words, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (command, expected), (code, said, has_torch) in zip(CASES.items(), answers, strict=True):
        assert expected in said, command
        assert (code, has_torch) == (2, False), command
    assert sorted(tmp_path.rglob("*")) == before
