"""What the literature claims, measured on the CPU: operations and bytes, which are exact, and what happens or does not.

python -m benchmarks.claims.measure --out benchmarks/results/claims_cpu.json
"""

from __future__ import annotations

import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.claims import behaviours, chains, formulas, overhead, parts, switches
from benchmarks.environment import describe
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, add_out, main

RESULT = RESULTS / "claims_cpu.json"

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


def run_experiments(experiments: Iterable[Experiment], say: Callable[[str], object] = print) -> dict[str, Any]:
    """Return what each experiment found, by its name."""
    found: dict[str, Any] = {}
    for experiment in experiments:
        began = time.process_time()
        found[experiment.__name__] = experiment()
        say(f"{experiment.__name__} ({time.process_time() - began:.1f} s of CPU)")
    return found


def add_claims(parser: ArgumentParser, module: str, experiments: Iterable[Experiment], path: Path) -> None:
    """Add what a suite of claims is asked.

    Args:
        module: that is run.
        experiments: that it has.
        path: of the result, where no other is asked for.
    """
    parser.prog = f"python -m {module}"
    names = [experiment.__name__ for experiment in experiments]
    parser.add_argument("--only", nargs="+", choices=names, help="these claims; all if left out")
    add_out(parser, path, None)
    parser.set_defaults(module=module)


def run_claims(options: Namespace, experiments: Iterable[Experiment], *, is_predicted: bool) -> None:
    """Run experiments, all or those that are asked for, and write one JSON.

    Args:
        options: as `add_claims` has them.
        experiments: likewise.
        is_predicted: whether they are simulations.
    """
    by_name = {experiment.__name__: experiment for experiment in experiments}
    # More threads make steps as small as these slower.
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    # Run with -m, the first argument is a path of this machine.
    environment = describe() | {"command": " ".join(["python -m", options.module, *sys.argv[1:]])}
    found = run_experiments(by_name[name] for name in options.only or by_name)
    write(options.out, {"environment": environment, "is_predicted": is_predicted, **found})
    print(options.out)


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_claims(parser, "benchmarks.claims.measure", EXPERIMENTS, RESULT)


def run(options: Namespace) -> None:
    """Measure the claims."""
    run_claims(options, EXPERIMENTS, is_predicted=False)


if __name__ == "__main__":
    sys.exit(main(__name__))
