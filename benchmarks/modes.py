"""What each policy costs and frees: floating-point operations of a step, and bytes held between forward and backward.

Both are counted, exactly and the same on every machine; times are not measured here.

    python benchmarks/modes.py --case llama_38m
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import hf_ckpt
from benchmarks.cases import CASES, build, step
from benchmarks.counts import flops, held_bytes
from benchmarks.environment import describe

RESULTS = Path(__file__).parent / "results"
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
    model, inputs = build(CASES[case], "cpu", attn_implementation)
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


def main() -> None:
    """Count and write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, default="llama_38m")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"environment": describe(), "case": options.case}
    for attn_implementation in ("sdpa", "eager"):
        result[attn_implementation] = measure(options.case, attn_implementation)
    out = options.out or RESULTS / f"modes_{options.case}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    for attn_implementation in ("sdpa", "eager"):
        print(attn_implementation)
        for name, figures in result[attn_implementation].items():
            print(f"  {name:<36} FLOPs x {figures['flops_ratio']:.2f}, held {figures['held_ratio']:.0%}")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
