"""What does it bring to have the experts of a mixture in 4 bits too?

OMP_NUM_THREADS=1 python -m benchmarks quantized_experts

`peaks`: a step, predicted for a card of the device table, with `quantize_experts` and without in one run, each under
the plan that needs least without changing a bit. Without it is what bitsandbytes does by itself: the experts stay in
bfloat16. `published`: bytes of weights that another project measured beside those that are predicted of the same.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from benchmarks.environment import describe
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, add_out, main
from benchmarks.waiting_weights import least_bytes
from hf_ckpt.cli.model_options import recipe_for
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject, subject_of
from hf_ckpt.recipe.recipe import Training
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.structure.four_bit_tensor import FourBitTensor
from hf_ckpt.structure.quantized_experts import experts_in_4_bits

MODELS = ("Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-20b")
CARD = "a100-80gb"
TOKENS = 2048

_SOURCE = "pjordanandrsn/experts4bit-qlora at 6abb0ad123a05d2fea0a36fc14cd9893ce196c8b"
_THEIRS = [
    "quantization.bnb_4bit_use_double_quant=false",
    "quantization.llm_int8_skip_modules=[q_proj,k_proj,v_proj,o_proj,lm_head]",
]
"""They quantise the experts alone, and no statistics."""
# arXiv 2409.02060.
_OLMOE = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "dtype": "bfloat16",
}


def peaks(model: str, *, on_experts: bool) -> dict[str, Any]:
    """Return the least that a step of QLoRA needs, one row long, with adapters on the attention or on experts too."""
    training = Training(method="qlora", length=TOKENS, batch=1)
    found: dict[str, Any] = {}
    for quantizes in (False, True):
        overrides = [f"quantization.quantize_experts={str(quantizes).lower()}"]
        subject = subject_of(recipe_for(training, model, overrides, with_experts=on_experts))
        of_plans = least_bytes(Predictor(subject, find_device(CARD)))
        plan = min(of_plans, key=of_plans.__getitem__)
        found["with" if quantizes else "without"] = {"plan": plan, "peak_bytes": of_plans[plan]}
    found["ratio"] = round(found["with"]["peak_bytes"] / found["without"]["peak_bytes"], 4)
    return found


def published() -> list[dict[str, Any]]:
    """Return measured bytes of weights beside those that are predicted of the same."""
    training = Training(method="qlora", length=64)
    qwen = subject_of(recipe_for(training, "Qwen/Qwen3-30B-A3B", _THEIRS))
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_OLMOE), encoding="utf-8")
        olmoe = subject_of(recipe_for(training, folder, _THEIRS))
    rows = (
        ("Qwen3 30B-A3B, experts", 16_310_000_000, _expert_bytes(qwen)),
        ("OLMoE 1B-7B, experts", 3_620_000_000, _expert_bytes(olmoe)),
        ("OLMoE 1B-7B, loaded", 4_700_000_000, _expert_bytes(olmoe) + _other_bytes(olmoe.model)),
    )
    return [
        {"what": what, "measured_bytes": measured, "predicted_bytes": bytes_, "off": round(bytes_ / measured - 1, 4)}
        for what, measured, bytes_ in rows
    ]


def _expert_bytes(subject: Subject) -> int:
    held = ((each.packed, *each.statistics()) for _, each in experts_in_4_bits(subject.model))
    return sum(tensor.nbytes for tensors in held for tensor in tensors)


def _other_bytes(model: nn.Module) -> int:
    others = (each for name, each in model.named_parameters() if "lora_" not in name)
    return sum(each.nbytes for each in others if not isinstance(each, FourBitTensor))


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_out(parser, RESULTS / "quantized_experts.json")


def run(options: Namespace) -> None:
    """Predict, and write the result after each model."""
    found = {**describe(), "tokens": TOKENS, "card": CARD, "source": _SOURCE, "published": published(), "peaks": {}}
    for model in MODELS:
        found["peaks"][model] = {
            "adapters on the attention": peaks(model, on_experts=False),
            "adapters on experts too": peaks(model, on_experts=True),
        }
        write(options.out, found)


if __name__ == "__main__":
    sys.exit(main(__name__))
