"""A simulated step needs what the Trainer's own step needs: really run, and followed by the same tracker."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.regions import held_state
from hf_ckpt.simulation.step_memory import Phase, StepMemory
from tests.following import LENGTH, Run, differences

pytestmark = pytest.mark.slow

# The Trainer has a few numbers of its own, of 4 bytes each: its running loss, the count of tokens, a scaled loss.
TOLERANCE = 1e-3

SEGMENTS = {"segment_size": "sqrt"}
NESTED = {"segment_size": "sqrt", "nested": True}
REVOLVE = {"nested": "revolve", "snapshots": 2}
SMALL = {"to": "cpu", "min_bytes": 1}
RUNS = {
    "llama": Run(layers=7),
    "llama-full-autocast-adafactor": Run(policy="full", bf16=True, accumulation=2, more={"optim": "adafactor"}),
    "llama-every2-eager-sgd": Run(
        policy="full",
        options={"every_n_layers": 2},
        attention="eager",
        more={"optim": "sgd", "max_grad_norm": 0.0},
    ),
    "llama-lora-attention-bf16-padded": Run(
        policy="attention", adapters=True, dtype="bfloat16", bf16=True, rows="padded", accumulation=3
    ),
    "llama-lora-4bit-full": Run(policy="full", adapters=True, is_4bit=True, dtype="bfloat16", bf16=True),
    "qwen3-ffn-adamw": Run(model_type="qwen3", policy="ffn", accumulation=3, more={"optim": "adamw_torch"}),
    "qwen3-lora-segments-packed": Run(
        model_type="qwen3", policy="full", options=SEGMENTS, layers=4, adapters=True, rows="packed", attention="eager"
    ),
    "qwen3-nested-bf16": Run(
        model_type="qwen3", policy="full", options=NESTED, layers=4, dtype="bfloat16", accumulation=2
    ),
    "llama-lora-revolve-bf16": Run(
        policy="full", options=REVOLVE, layers=9, adapters=True, bf16=True, accumulation=2, more={"optim": "sgd"}
    ),
    "gemma3-eager-padded": Run(model_type="gemma3_text", attention="eager", rows="padded", bf16=True),
    "gemma3-lora-full": Run(model_type="gemma3_text", policy="full", adapters=True, bf16=True, accumulation=2),
    "mixtral-bf16": Run(model_type="mixtral", dtype="bfloat16"),
    "mixtral-lora-ffn": Run(model_type="mixtral", policy="ffn", adapters=True, rows="packed"),
    "gpt2-attention-eager-8bit": Run(
        model_type="gpt2", policy="attention", attention="eager", accumulation=2, more={"optim": "adamw_bnb_8bit"}
    ),
    "gpt2-lora-full-padded": Run(model_type="gpt2", policy="full", adapters=True, rows="padded", bf16=True),
    "llama-lora-selective-bf16": Run(policy="selective", adapters=True, bf16=True, accumulation=2),
    "qwen3-selective-attention-offload": Run(
        model_type="qwen3", policy="selective_attention", options={"offload": SMALL}, layers=5
    ),
    "mixtral-selective-list": Run(
        model_type="mixtral", policy="selective", options={"save": ["self_attn.*", "mlp.gate"]}, dtype="bfloat16"
    ),
    "llama-lora-full-offload": Run(
        policy="full", options={"offload": SMALL}, layers=6, adapters=True, bf16=True, accumulation=2
    ),
    "llama-half-offload": Run(policy="full", options={"offload": {**SMALL, "fraction": 0.5}}, layers=7),
    "llama-full-tiles-chunked-head": Run(
        policy="full", options={"tiles": 4, "head": "chunked"}, layers=4, more={"optim": "sgd"}
    ),
    "llama-4bit-everything": Run(
        policy="full",
        options={"offload": SMALL, "tiles": 2, "head": "chunked"},
        layers=5,
        adapters=True,
        is_4bit=True,
        dtype="bfloat16",
        bf16=True,
        more={"optim": "sgd"},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_simulated_peak_and_categories_are_those_of_the_step_that_ran(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    followed, simulated = run.followed(tmp_path), run.simulated()
    off = differences(simulated, followed)
    assert {category: value for category, value in off.items() if abs(value) > TOLERANCE} == {}
    assert where(simulated) == where(followed)
    assert simulated.plan == followed.plan
    assert simulated.host_bytes == followed.host_bytes
    assert (followed.host_bytes > 0) == ("offload" in run.options)
    assert simulated.tokens == followed.tokens == run.batch_size * LENGTH * run.accumulation


def test_copies_of_what_layers_hold_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(model_type="deepseek_v3", policy="full", layers=2, more={"optim": "sgd", "max_grad_norm": 0.0})
    simulated = run.simulated()
    # The tracker sees what a real step hides from modes.
    monkeypatch.setattr(held_state, "hidden_from_modes", nullcontext)
    followed = run.followed(tmp_path)
    # Each router holds 256 bytes: a copy for each layer, and one for the recomputation.
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTATION):
        assert 0 <= followed.peak_of(phase) - simulated.peak_of(phase) <= 4


def where(memory: StepMemory) -> tuple[Phase, int | None, str]:
    """Return where the peak is, without the operator: of several, the one with the last four bytes."""
    return memory.peak_at.phase, memory.peak_at.layer_idx, memory.peak_at.part


def test_following_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    run = Run()
    trainer = run.trainer(tmp_path, run.model())
    callbacks = list(trainer.callback_handler.callbacks)
    memory = follow_trainer(trainer, at_step=1)
    assert trainer.callback_handler.callbacks == callbacks
    assert not {"training_step", "get_batch_samples"} & vars(trainer).keys()
    assert trainer.state.global_step == 1
    assert memory.peak_of(Phase.OPTIMIZER) > 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())


def test_a_step_that_never_comes_is_refused(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(ValueError, match="at_step=9 was not reached: training stopped after step 3"):
        follow_trainer(run.trainer(tmp_path, run.model()), at_step=9)
