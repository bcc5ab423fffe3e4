"""What does it bring to let frozen weights wait on the host: peaks, 70B on one small card, longest rows, host time?

OMP_NUM_THREADS=1 python -m benchmarks waiting_weights

Predicted for cards of the device table, with and without in one run, by the rules that hold for both. The host's time
of a layer's fetch is measured on this machine's CPU, with tiny tensors: bookkeeping, and no copy worth its name.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.environment import describe
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, add_out, main
from hf_ckpt.errors import HFCkptError
from hf_ckpt.estimate.max_length_and_batch import largest_of_all
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import subject_of
from hf_ckpt.planner.layer_costs import may_tile
from hf_ckpt.policy.allowances import DEFAULT_ALLOWED, Allowed, allowed_by
from hf_ckpt.policy.options import Offload, Weights
from hf_ckpt.recipe.recipe import load_recipe
from hf_ckpt.simulation.devices import Device, find_device

RECIPES = Path(__file__).parents[1] / "recipes"
CARD, LARGE = "rtx4090", "a100-80gb"
PLAIN: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "segments": {"policy": "full", "segment_size": "sqrt"},
    "nested segments": {"policy": "full", "segment_size": "sqrt", "nested": True},
    "offload": {"policy": "full", "offload": "cpu"},
}
WAYS: dict[str, dict[str, Any]] = {
    "without": {},
    "with": {"weights": "cpu", "embedding": "device"},
    "with_embedding": {"weights": "cpu"},
}
"""What waits: nothing, layers alone, and the embedding too."""
FIXED = {**PLAIN, "none": {"policy": "none"}, "ffn": {"policy": "ffn"}, "selective": {"policy": "selective"}}
BUDGETS = (0.3, 0.4, 0.5, 0.7, 0.9)


def predictor_of(name: str, tokens: int, device: Device, allowed: Allowed = DEFAULT_ALLOWED) -> Predictor:
    """Return what predicts a step of one row of so many tokens of a shipped recipe, on a device."""
    batch = ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=1"]
    recipe = load_recipe(RECIPES / f"{name}.yaml", [f"data.max_length={tokens}", *batch])
    return Predictor(replace(subject_of(recipe), allowed=allowed), device)


def least_bytes(predictor: Predictor, **also: Any) -> dict[str, int]:
    """Return the peak of each fixed plan that recomputes whole layers, with what is added to each."""
    found = {}
    for name, policy in PLAIN.items():
        try:
            found[name] = predictor.memory(predictor.subject.resolve(**policy, **also)).peak_bytes
        except HFCkptError:
            # Segments and waiting weights exclude each other.
            continue
    return found


def peaks() -> dict[str, Any]:
    """Return the least that a step of Llama 3.1 8B QLoRA needs, bitwise and under any plan."""
    bitwise = predictor_of("llama3_8b_qlora", 2048, find_device(CARD))
    short = predictor_of("llama3_8b_qlora", 512, find_device(CARD))
    tiles = all(may_tile(layer, Allowed(tiles=True)) for stack in short.subject.stacks for layer in stack.layers)
    leanest = {"head": "chunked", **({"tiles": "auto"} if tiles else {})}
    plans = (short.subject.resolve("full", offload="cpu", **leanest, **also) for also in WAYS.values())
    return {
        "bitwise, 2,048 tokens": _against(min(least_bytes(bitwise, **also).values()) for also in WAYS.values()),
        "any plan, 512 tokens": _against(short.memory(plan).peak_bytes for plan in plans),
    }


def on_one_card(tokens: int) -> dict[str, Any]:
    """Return a step of Llama 3.1 70B QLoRA on a card of 24 GB, beside one on a card like it without a limit."""
    card, allowed = find_device(CARD), Allowed(exact=True, offload=Offload(), weights=Weights())
    predictor = predictor_of("llama70b_qlora_24gb", tokens, card, allowed)
    plain = predictor_of("llama70b_qlora_24gb", tokens, card, Allowed(exact=True, offload=Offload()))
    planned, unlimited = predictor.planned(predictor.capacity(card)), plain.memory(None)
    try:
        fits_without = bool(plain.planned(plain.capacity(card)))
    except HFCkptError:
        fits_without = False
    return {
        "fits_without": fits_without,
        "peak_bytes": planned.memory.peak_bytes,
        "host_bytes": planned.memory.host_bytes,
        "plan": planned.plan.describe(),
        "seconds": planned.memory.time.total,
        "unlimited_seconds": unlimited.time.total,
        "ratio": round(planned.memory.time.total / unlimited.time.total, 4),
    }


def longest_rows(card: str) -> dict[str, Any]:
    """Return the longest row of Llama 3.1 8B QLoRA on a card, all that saves activations allowed."""
    device, found = find_device(card), []
    for way in WAYS.values():
        options = {"exact": False, "offload": "cpu", "tiles": "auto", "head": "chunked", **way}
        allowed = allowed_by(options)
        predictor = predictor_of("llama3_8b_qlora", 2048, device, allowed)
        found.append(largest_of_all(predictor, predictor.capacity(device), is_length=True).number)
    # No row is longer than the model has positions.
    return {**_against(found), "positions": predictor.subject.longest}


def against_fixed() -> list[dict[str, Any]]:
    """Return the time of `auto` with weights allowed at some budgets, beside the fastest fixed policy that fits."""
    device = find_device(CARD)
    allowed = Allowed(exact=True, weights=Weights())
    predictor, found = predictor_of("llama3_8b_qlora", 2048, device, allowed), []
    for share in BUDGETS:
        capacity = predictor.capacity(device).with_bytes(int(device.memory_bytes * share))
        fixed = {}
        for name, policy in FIXED.items():
            for also in ({}, {"weights": "cpu"}):
                try:
                    plan = predictor.subject.resolve(**policy, **also)
                except HFCkptError:
                    continue
                if predictor.verdict(plan, capacity).fit == "yes":
                    fixed[f"{name}{', weights' if also else ''}"] = predictor.memory(plan).time.total
        try:
            seconds = predictor.planned(capacity).memory.time.total
        except HFCkptError:
            seconds = None
        found.append({"share": share, "auto_seconds": seconds, "fixed_seconds": fixed})
    return found


class _Layer(nn.Module):
    """The seven frozen weights of a decoder layer, tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(7)).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def fetch_microseconds(rounds: int = 300, layers: int = 32) -> float:
    """Return the host's time for the fetch of a layer, the least of many rounds."""
    from hf_ckpt.regions.waiting_weights import LayerWeights, WaitingWeights, owners_of, waiting_tensors

    modules = [_Layer() for _ in range(layers)]
    owners = owners_of(nn.ModuleList(modules))
    waiting = [
        LayerWeights(str(idx), waiting_tensors(module, owners)[0], torch.device("cpu"))
        for idx, module in enumerate(modules)
    ]
    engine = WaitingWeights(Weights(), waiting)
    engine.pack()
    best = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        for idx in range(layers):
            engine.begin_forward(idx)
            engine.end_forward(idx, needs_backward=False)
        best = min(best, time.process_time() - begun)
    return round(best / layers * 1e6, 2)


def _against(figures: Iterable[int]) -> dict[str, Any]:
    """Return the figures by their way of `WAYS`, and their ratios to the first."""
    found = dict(zip(WAYS, figures, strict=True))
    return {**found, "ratios": {name: round(each / found["without"], 4) for name, each in found.items()}}


SECTIONS: dict[str, Callable[[], Any]] = {
    "host_microseconds_of_a_fetch": fetch_microseconds,
    "peaks": peaks,
    "llama_70b_on_24_gb": lambda: {str(tokens): on_one_card(tokens) for tokens in (2048, 512)},
    "longest": lambda: {card: longest_rows(card) for card in (CARD, LARGE)},
    "fixed": against_fixed,
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--only", choices=SECTIONS, action="append", help="one part of it; may be given again")
    add_out(parser, RESULTS / "waiting_weights.json")


def run(options: Namespace) -> None:
    """Predict and measure, and write the result after each part. Parts that are not asked for stay as they were."""
    before = json.loads(options.out.read_text()) if options.only and options.out.is_file() else {}
    found = {**before, **describe()}
    commits = found["commits"] = dict.fromkeys(SECTIONS.keys() & before.keys(), before.get("commit")) | before.get(
        "commits", {}
    )
    for name in options.only or SECTIONS:
        found[name], commits[name] = SECTIONS[name](), found["commit"]
        write(options.out, found)


if __name__ == "__main__":
    sys.exit(main(__name__))
