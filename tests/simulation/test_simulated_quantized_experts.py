"""Mixtures whose experts are in 4 bits: real steps followed, and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from tests.following import Run, differences

pytest.importorskip("bitsandbytes")

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_TARGETS = {"deepseek_v3": ["q_b_proj", "kv_b_proj", "o_proj"], "qwen3_next": [*_ATTENTION, "in_proj_qkvz", "out_proj"]}
_KINDS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "qwen3_next")
_POLICIES = ("none", "full", "attention", "ffn", "selective")


def run(kind: str, **changes: Any) -> Run:
    adapters = LoraConfig(r=4, target_modules=_TARGETS.get(kind, _ATTENTION))
    layers = 4 if kind == "qwen3_next" else 3
    given = {"attention": "eager"} if kind == "gpt_oss" else {}
    options: dict[str, Any] = {"adapters": adapters, "layers": layers, "dtype": "bfloat16", "bf16": True, **given}
    return Run(model_type=kind, is_4bit=True, **{"quantizes_experts": True, **options, **changes})


@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_step_needs_what_was_predicted(kind: str, policy: str, tmp_path: Path) -> None:
    step = run(kind, policy=policy)
    off = differences(step.simulated(), step.followed(tmp_path))
    # A table of positions that a step makes once is held by the model in one and by its first use in the other.
    assert abs(off["peak"]) < 0.01, off
