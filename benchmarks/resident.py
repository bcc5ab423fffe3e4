"""Does a predicted peak show in the memory that the process really takes? On the CPU, with the Trainer.

One process per case trains two steps. glibc is told to give freed tensors back at once (MALLOC_MMAP_THRESHOLD_), so
that resident memory is live memory, and Linux is asked for the most that was resident during the second step.
Compared is what the step takes over what is there before it: weights and optimizer state.

    OMP_NUM_THREADS=1 python benchmarks/resident.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.environment import describe
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, add_out, main
from hf_ckpt import HFCkptCallback
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category

RESULT = RESULTS / "resident_cpu.json"
_STATUS = Path("/proc/self/status")
_VOCAB = 64
_GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
_BEFORE = (Category.PARAMETERS, Category.OPTIMIZER)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step.

    Args:
        model_type: of the model.
        hidden_size: its width; the ffn has three times as much.
        layers: how many.
        batch_size: rows.
        length: tokens of a row.
        policy: None for no plan.
        options: of the policy.
        is_lora: whether adapters are trained only.
        dtype: of the weights.
        bf16: whether the Trainer runs under autocast.
        accumulation: micro-batches.
    """

    model_type: str = "llama"
    hidden_size: int = 128
    layers: int = 8
    batch_size: int = 32
    length: int = 512
    policy: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    is_lora: bool = False
    dtype: str = "float32"
    bf16: bool = False
    accumulation: int = 1

    def model(self) -> nn.Module:
        """Build it, with random weights."""
        sizes = {"hidden_size": self.hidden_size, "intermediate_size": 3 * self.hidden_size, "head_dim": 32}
        config = CONFIG_MAPPING[self.model_type](
            vocab_size=_VOCAB, num_hidden_layers=self.layers, num_attention_heads=4, num_key_value_heads=4, **sizes
        )
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.dtype))
        settings = LoraConfig(r=8, lora_dropout=0.1, target_modules="all-linear")
        return get_peft_model(model, settings) if self.is_lora else model


CASES = {
    "none": Case(batch_size=24),
    "none_lora_autocast": Case(is_lora=True, bf16=True, batch_size=32),
    "none_qwen3_accumulation": Case(model_type="qwen3", accumulation=2, batch_size=28),
    "ffn": Case(policy="ffn", batch_size=40),
    "attention_bfloat16": Case(policy="attention", dtype="bfloat16", batch_size=56),
    "full": Case(policy="full", layers=2, batch_size=144),
    "full_segments": Case(policy="full", options={"segment_size": 2}, layers=4, batch_size=72),
}


# --- The process that trains. ---


class _Resident(TrainerCallback):
    """Reads what Linux says of this process, around the second step."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == 1:
            # Resets the peak.
            Path("/proc/self/clear_refs").write_text("5")
            self.bytes["before"] = _resident("VmRSS")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.bytes["peak"] = _resident("VmHWM")


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    assert found is not None, "Linux has it"
    return int(found[1]) * 1024


def train(case: Case) -> int:
    """Train two steps and return by how much resident memory rose in the second one."""
    torch.manual_seed(0)
    tokens = torch.randint(0, _VOCAB, (2 * case.batch_size * case.accumulation, case.length))
    measure = _Resident()
    plan = [] if case.policy is None else [HFCkptCallback(case.policy, **case.options)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=2,
            bf16=case.bf16,
            per_device_train_batch_size=case.batch_size,
            gradient_accumulation_steps=case.accumulation,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rows: Any = [{"input_ids": row, "labels": row} for row in tokens]
        Trainer(model=case.model(), args=args, train_dataset=rows, callbacks=[*plan, measure]).train()
    return measure.bytes["peak"] - measure.bytes["before"]


# --- The process that predicts, and asks. ---


def predict(case: Case) -> int:
    """Return what the step is predicted to take over weights and optimizer state, in bytes."""
    step = Step(
        batch_size=case.batch_size,
        seq_length=case.length,
        autocast="bfloat16" if case.bf16 else None,
        gradient_accumulation_steps=case.accumulation,
    )
    policy = None if case.policy is None else Policy.parse(case.policy, **case.options)
    memory = simulate_step(case.model(), policy, step, CPU)
    return memory.peak_bytes - sum(memory.by_category.get(category, 0) for category in _BEFORE)


def measure(case: Case) -> int:
    """Train a case in a process of its own, and return by how much its resident memory rose."""
    command = [sys.executable, __file__, "--train", json.dumps(asdict(case))]
    environ = {**os.environ, **_GIVES_BACK}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return int(done.stdout.split()[-1])


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--train", metavar="CASE", help="train this one, given as JSON, and print the bytes")
    add_out(parser, RESULT)


def run(options: Namespace) -> None:
    """Measure all cases and write the result, or train one of them."""
    if options.train:
        print(train(Case(**json.loads(options.train))))
        return
    cases = {}
    for name, case in CASES.items():
        predicted, measured = predict(case), measure(case)
        cases[name] = {
            "case": asdict(case),
            "predicted_bytes": predicted,
            "measured_bytes": measured,
            "predicted_over_measured": predicted / measured,
        }
        print(f"{name:24} {predicted / 2**30:6.3f} GiB predicted {measured / 2**30:6.3f} measured", flush=True)
    write(options.out, describe() | {"cases": cases})


if __name__ == "__main__":
    sys.exit(main(__name__))
