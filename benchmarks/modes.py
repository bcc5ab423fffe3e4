"""What each policy costs and frees: floating-point operations of a step, and bytes held between forward and backward.

Both are counted, exactly and the same on every machine; times are not measured here.

    python benchmarks/modes.py --case llama_38m
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import hf_ckpt
from benchmarks.cases import LLAMAS, build_llama
from benchmarks.result_files import write_result
from benchmarks.runner import RESULTS, add_case, add_out, main
from benchmarks.step_costs import flops, held_bytes, step

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "full": ("full", {}),
    "full, every_n_layers=2": ("full", {"every_n_layers": 2}),
    "attention": ("attention", {}),
    "ffn": ("ffn", {}),
    "selective": ("selective", {}),
    "selective_attention": ("selective_attention", {}),
    'full, head="chunked"': ("full", {"head": "chunked"}),
    'full, segment_size="sqrt"': ("full", {"segment_size": "sqrt"}),
    'full, segment_size="sqrt", nested': ("full", {"segment_size": "sqrt", "nested": True}),
}


def measure(case: str, attn_implementation: str) -> dict[str, dict[str, Any]]:
    """Count every policy on one model."""
    model, inputs = build_llama(LLAMAS[case], "cpu", attn_implementation)
    counted: dict[str, dict[str, Any]] = {}
    for name, (mode, options) in POLICIES.items():
        with hf_ckpt.apply(model, mode, prove="off", **options):
            counted[name] = {
                "flops": flops(model, inputs),
                "held_bytes": held_bytes(model, inputs),
                "loss": step(model, inputs),
            }
        print(f"{attn_implementation}: {name}", file=sys.stderr, flush=True)
    base = counted["none"]
    for figures in counted.values():
        figures["flops_ratio"] = figures["flops"] / base["flops"]
        figures["held_ratio"] = figures["held_bytes"] / base["held_bytes"]
    return counted


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_case(parser, LLAMAS, "llama_38m")
    add_out(parser, what=None)


def run(options: Namespace) -> None:
    """Count and write one JSON."""
    attentions = ("sdpa", "eager")
    found = {attention: measure(options.case, attention) for attention in attentions}
    for attention in attentions:
        print(attention)
        for name, figures in found[attention].items():
            print(f"  {name:<36} FLOPs x {figures['flops_ratio']:.2f}, held {figures['held_ratio']:.0%}")
    write_result(options.out or RESULTS / f"modes_{options.case}.json", {"case": options.case, **found})


if __name__ == "__main__":
    sys.exit(main(__name__))
