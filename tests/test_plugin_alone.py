"""The plugin trains without the folders of prediction and workshop; asked for them, it says what is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import PACKAGE, PREDICTION, WORKSHOP

TRAIN = """
import json, sys, tempfile
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
import hf_ckpt
from hf_ckpt import HFCkptCallback, UnsupportedError

SIZES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
ROWS = [{"input_ids": [(row * 7 + place) % 64 for place in range(8)]} for row in range(8)]


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def collate(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def losses(*callbacks):
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=3, per_device_train_batch_size=2, logging_steps=1, save_steps=2,
            report_to=[], disable_tqdm=True, use_cpu=True,
        )
        run = Trainer(model=model(), args=args, train_dataset=ROWS, data_collator=collate, callbacks=list(callbacks))
        run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def error_of(function):
    try:
        function()
    except UnsupportedError as error:
        return str(error)


def step_in_a_loop():
    with hf_ckpt.apply(model(), "full") as applied:
        applied.step(lambda: None)


def loss_in_a_loop():
    trained = model()
    with hf_ckpt.apply(trained, "ffn") as applied:
        loss = trained(**collate(ROWS)).loss
        loss.backward()
        return loss.item(), applied.plan.describe()


offloading = HFCkptCallback("full", offload={"to": "cpu", "min_bytes": 1})
found = {
    "none": losses(),
    **{mode: losses(HFCkptCallback(mode)) for mode in ("full", "ffn", "selective")},
    "offload": losses(offloading),
    "offloaded_gib": offloading.report()["ckpt/offloaded_gib"],
    "apply": loss_in_a_loop(),
    "errors": [
        error_of(lambda: HFCkptCallback("auto", memory_budget="1GiB")),
        error_of(lambda: losses(HFCkptCallback("full", on_oom="escalate"))),
        error_of(lambda: hf_ckpt.apply(model(), "auto", batch_size=1, seq_length=8, memory_budget="1GiB")),
        error_of(step_in_a_loop),
    ],
    "from": hf_ckpt.__file__,
    "loaded": sorted(name for name in sys.modules if name.startswith("hf_ckpt")),
}
print(json.dumps(found))
"""


@pytest.mark.core
def test_the_plugin_trains_alone(tmp_path: Path) -> None:
    outside = PREDICTION | WORKSHOP
    package = tmp_path / "hf_ckpt"
    shutil.copytree(
        PACKAGE, package, ignore=lambda folder, names: outside & set(names) | {"__pycache__", "__main__.py"}
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{TRAIN}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["from"]).parent == package
    assert len(found["none"]) == 3
    for mode in ("full", "ffn", "selective", "offload"):
        assert found[mode] == found["none"], mode
    assert found["offloaded_gib"] > 0
    assert found["apply"][1] == "layers: 2 ffn"
    assert {name.split(".")[1] for name in found["loaded"] if "." in name}.isdisjoint(outside)
    asked = ('policy "auto"', 'on_oom="escalate"', 'policy "auto"', "applied.step()")
    missing = ("auto", "recovery", "auto", "recovery")
    assert found["errors"] == [
        f"{what} needs hf_ckpt.{house}, which is not there: this is hf_ckpt's plugin for the Trainer alone. "
        "Install the whole of hf_ckpt, or leave that out."
        for what, house in zip(asked, missing, strict=True)
    ]
