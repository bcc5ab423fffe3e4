"""What share of a card's rate does attention reach in the published steps of prime-rl? Fitted to half of them.

python -m benchmarks attention_rates

`published/attention_steps.csv` has the dense models of PrimeIntellect-ai/prime-rl at 559b447, benchmarks/baselines:
two rows a step, every layer recomputed, under torch.compile. A step takes the time of its products, a part of that of
all other operators (what compiling leaves of it), that of attention at the share that is looked for, and, in
reinforcement learning, some seconds in which the device has nothing to do.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.result_files import write_result
from benchmarks.runner import RESULTS, add_out, main

STEPS = Path(__file__).parent / "published" / "attention_steps.csv"
_SHARES = 0.25, 0.5
_NO_TIME = 1e6
Row = dict[str, Any]

# What is tried: the part of other operators, the idle seconds, and the share of each kernel.
_PARTS = [each / 20 for each in range(17)]
_IDLE = [each / 10 for each in range(41)]
_OF_KERNELS = {
    ("h100", "flash_attention_3"): [each / 100 for each in range(40, 72)],
    ("b200", "flash_attention_2"): [each / 1000 for each in range(100, 205, 5)],
}
# FlashAttention-2 on an H100 (Shah et al. 2024): no row of the fitted half has it.
_KNOWN = {("h100", "flash_attention_2"): 0.35}


def rows() -> list[Row]:
    """Return the published steps."""
    with STEPS.open(encoding="utf-8", newline="") as file:
        return [
            {
                **row,
                "tokens": int(row["tokens"]),
                "seconds": float(row["seconds"]),
                "is_fitted": _is_fitted(row["file"]),
            }
            for row in csv.DictReader(file)
        ]


def _is_fitted(name: str) -> bool:
    # As `published.points.is_fitted_time` does.
    return hashlib.sha256(name.encode()).digest()[2] % 2 == 0


@cache
def parts(gpu: str, kind: str, model: str, lora_rank: str, tokens: int) -> tuple[float, float, float]:
    """Return the seconds of a step's products, of its other operators, and of its attention at the full rate."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from hf_ckpt.loading.model import known_config
    from hf_ckpt.policy.policy import Policy
    from hf_ckpt.simulation.devices import find_device
    from hf_ckpt.simulation.simulator import simulate_step
    from hf_ckpt.simulation.step import Step

    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(known_config(model), dtype=torch.bfloat16)
    if lora_rank:
        adapters = LoraConfig(r=int(lora_rank), target_modules="all-linear")
        made = get_peft_model(made, adapters, low_cpu_mem_usage=True)
    policy = Policy.parse("full", head="chunked" if kind == "rl" else None)
    step, card = Step(seq_length=tokens, gradient_accumulation_steps=2), find_device(gpu)
    slow, fast = (
        simulate_step(made, policy, step, replace(card, prefers_cudnn=False, attention_efficiency=share)).time.total
        for share in _SHARES
    )
    free = replace(
        card,
        prefers_cudnn=False,
        attention_efficiency=_SHARES[1],
        memory_bandwidth=card.memory_bandwidth * _NO_TIME,
        kernel_seconds=0.0,
    )
    without_others = simulate_step(made, policy, step, free).time.total
    attention = (slow - fast) / (1 / _SHARES[0] - 1 / _SHARES[1])
    return without_others - attention / _SHARES[1], fast - without_others, attention


def predicted(row: Row, part: float, idle: float, share: float) -> float:
    """Return the seconds of a step."""
    names = ("gpu", "kind", "model", "lora_rank", "tokens")
    products, others, attention = parts(*(row[name] for name in names))
    return products + part * others + attention / share + (idle if row["kind"] == "rl" else 0.0)


def fitted(found: list[Row]) -> dict[str, Any]:
    """Return the constants with the least sum of squares of seconds over the half that may be fitted.

    Of seconds, so that long rows count most: their time is attention's.
    """
    of_kernel = {key: [row for row in found if row["is_fitted"] and _kernel(row) == key] for key in _OF_KERNELS}
    best: tuple[float, dict[str, Any]] = (float("inf"), {})
    for part, idle in product(_PARTS, _IDLE):
        total, shares = 0.0, {}
        for key, members in of_kernel.items():
            sums = {
                share: sum(_seconds_off(row, part, idle, share) ** 2 for row in members) for share in _OF_KERNELS[key]
            }
            shares[" ".join(key)] = least = min(sums, key=lambda share: sums[share])
            total += sums[least]
        if total < best[0]:
            best = total, {"part_of_other_operators": part, "idle_seconds": idle, "shares": shares}
    return best[1]


def _kernel(row: Row) -> tuple[str, str]:
    return row["gpu"], row["attention"]


def _seconds_off(row: Row, part: float, idle: float, share: float) -> float:
    return float(predicted(row, part, idle, share) - row["seconds"])


def _off(row: Row, part: float, idle: float, share: float) -> float:
    return predicted(row, part, idle, share) / row["seconds"] - 1


def groups(found: list[Row]) -> list[Row]:
    """Return the errors of each kernel, length and half."""
    of_group: dict[tuple[str, str, int, bool], list[float]] = {}
    for row in found:
        of_group.setdefault((*_kernel(row), row["tokens"], row["is_fitted"]), []).append(row["ratio"] - 1)
    return [
        {
            "gpu": gpu,
            "attention": attention,
            "tokens": tokens,
            "half": "fitted" if is_fitted else "test",
            "num_points": len(errors),
            "mean_error": mean(map(abs, errors)),
            "mean_difference": mean(errors),
            "largest_error": max(map(abs, errors)),
        }
        for (gpu, attention, tokens, is_fitted), errors in sorted(of_group.items())
    ]


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_out(parser, RESULTS / "attention_rates.json")


def run(options: Namespace) -> None:
    """Fit the shares and write them, with each step as it is predicted then."""
    found = rows()
    constants = fitted(found)
    for row in found:
        share = _KNOWN.get(_kernel(row)) or constants["shares"][" ".join(_kernel(row))]
        row["ratio"] = 1 + _off(row, constants["part_of_other_operators"], constants["idle_seconds"], share)
    halves = {
        name: {
            "points": len(members),
            "mean_error": mean(abs(row["ratio"] - 1) for row in members),
            "mean_difference": mean(row["ratio"] - 1 for row in members),
        }
        for name, members in {
            "fitted": [row for row in found if row["is_fitted"]],
            "test": [row for row in found if not row["is_fitted"]],
            "test, 65,536 tokens": [row for row in found if not row["is_fitted"] and row["tokens"] == 65536],
        }.items()
    }
    write_result(options.out, {"fitted": constants, "halves": halves, "groups": groups(found), "steps": found})


if __name__ == "__main__":
    sys.exit(main(__name__))
