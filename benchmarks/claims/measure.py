"""What the literature claims, measured on the CPU: operations and bytes, which are exact, and what happens or does not.

python -m benchmarks.claims.measure --out benchmarks/results/claims_cpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.claims import behaviours, chains, formulas, overhead, parts, switches
from benchmarks.environment import describe

RESULT = Path(__file__).parents[1] / "results" / "claims_cpu.json"

Experiment = Callable[[], dict[str, Any]]

EXPERIMENTS: tuple[Experiment, ...] = (
    overhead.extra_forward,
    overhead.backward_over_forward,
    chains.sqrt_is_optimal,
    chains.sqrt_table,
    overhead.every_n,
    parts.attention_only,
    parts.ffn_only_with_flash,
    parts.full_saves,
    formulas.llama_7b_activations,
    formulas.attention_scores,
    behaviours.fsdp_all_gathers,
    behaviours.reentrant_fsdp,
    behaviours.batch_norm,
    behaviours.recompute_or_store,
    parts.attention_or_ffn_first,
    parts.attention_logits,
    parts.norms_left_out,
    switches.transformers_switches,
    formulas.eager_attention_100_gb,
    formulas.kv_cache_70b,
)
"""One for each claim that a CPU can say something about, named for it."""


def run(experiments: Iterable[Experiment], say: Callable[[str], object] = print) -> dict[str, Any]:
    """Return what each experiment found, by its name."""
    found: dict[str, Any] = {}
    for experiment in experiments:
        began = time.process_time()
        found[experiment.__name__] = experiment()
        say(f"{experiment.__name__} ({time.process_time() - began:.1f} s of CPU)")
    return found


def write(module: str, experiments: Iterable[Experiment], path: Path, *, is_predicted: bool) -> None:
    """Run experiments, all or those that are asked for, and write one JSON.

    Args:
        module: that is run.
        experiments: that it has.
        path: of the result, where no other is asked for.
        is_predicted: whether they are simulations.
    """
    by_name = {experiment.__name__: experiment for experiment in experiments}
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--only", nargs="+", choices=by_name, help="these claims; all if left out")
    parser.add_argument("--out", type=Path, default=path)
    options = parser.parse_args()
    # More threads make steps as small as these slower.
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    # Run with -m, the first argument is a path of this machine.
    environment = describe() | {"command": " ".join(["python -m", module, *sys.argv[1:]])}
    found = run(by_name[name] for name in options.only or by_name)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": environment, "is_predicted": is_predicted, **found}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(options.out)


if __name__ == "__main__":
    write("benchmarks.claims.measure", EXPERIMENTS, RESULT, is_predicted=False)
