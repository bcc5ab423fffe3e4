"""What does it cost to simulate a step? CPU seconds and memory of a fresh process, imports included.

OMP_NUM_THREADS=1 python benchmarks/simulation_cost.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.environment import describe
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, add_out, main


@dataclass(frozen=True)
class Case:
    """A Llama with adapters of rank 16 on all linear layers, 2,048 tokens, 16 micro-batches under bfloat16 autocast."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    policy: str | None


# As the config files of Llama 2 7B and Llama 3.1 70B have them.
_7B = (32, 4096, 11008, 32, 32, 32000)
_70B = (80, 8192, 28672, 64, 8, 128256)
CASES = {
    "7b_none": Case(*_7B, None),
    "7b_full": Case(*_7B, "full"),
    "70b_none": Case(*_70B, None),
    "70b_full": Case(*_70B, "full"),
}


def simulate(case: Case) -> dict[str, Any]:
    """Simulate the step in this process, which has imported nothing yet."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_ckpt.simulation.devices import find_device
    from hf_ckpt.simulation.simulator import simulate_step
    from hf_ckpt.simulation.step import Step

    imported = time.process_time()
    sizes = asdict(case)
    policy = sizes.pop("policy")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)
    adapters = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.05)
    step = Step(seq_length=2048, gradient_accumulation_steps=16, autocast="bfloat16")
    built = get_peft_model(model, adapters, low_cpu_mem_usage=True)
    memory = simulate_step(built, policy, step, find_device("a100-80gb"))
    done = time.process_time()
    return {
        "cpu_seconds": done,
        "cpu_seconds_of_imports": imported,
        "host_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "num_events": len(memory.timeline.places),
        "predicted_peak_gib": memory.peak_bytes / 2**30,
    }


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--simulate", choices=CASES, help="simulate this one and print what it cost")
    add_out(parser, RESULTS / "simulation_cost.json")


def run(options: Namespace) -> None:
    """Measure each case in a process of its own and write the result, or run one."""
    if options.simulate:
        print(json.dumps(simulate(CASES[options.simulate])))
        return
    cases = {}
    for name, case in CASES.items():
        command = [sys.executable, __file__, "--simulate", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        cases[name] = {"case": asdict(case), **json.loads(done.stdout.splitlines()[-1])}
        print(name, cases[name]["cpu_seconds"], cases[name]["host_memory_gib"], flush=True)
    write(options.out, describe() | {"cases": cases})


if __name__ == "__main__":
    sys.exit(main(__name__))
