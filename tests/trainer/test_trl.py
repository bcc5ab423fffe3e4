"""HFCkptCallback in trl's trainers, whose configs ask for activation checkpointing of every layer by default."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_ckpt import HFCkptCallback, remove
from tests import modes
from tests.byte_tokenizer import byte_tokenizer
from tests.exactness import POLICIES
from tests.training import arguments, changed, counted, llama, losses, weights

trl = pytest.importorskip("trl")
# trl 1.16 uses the names that transformers 5.23 gives up.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"),
]

GOVERNS = (
    "Gradient (activation) checkpointing of the training arguments is overruled: the policy of HFCkptCallback governs."
)
TOKENIZER = byte_tokenizer(pad_token="<pad>")
TEXTS = ["the cat sat", "a dog ran", "it is late", "we go home"]
DATA = {
    "sft": Dataset.from_dict({"text": TEXTS}),
    "dpo": Dataset.from_dict({"prompt": TEXTS, "chosen": [" yes"] * 4, "rejected": [" no", " never", " not", " nay"]}),
}
ADAPTER = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False)
# Forwards with gradients of two steps, by layer.
FORWARDS = {"none": [2, 2, 2, 2], "full": [4, 4, 4, 4], "every_2": [4, 2, 4, 2], "mixed": [4, 2, 2, 4]}


def model() -> nn.Module:
    return llama(vocab_size=len(TOKENIZER), pad_token_id=TOKENIZER.pad_token_id)


def sft(folder: Path, *callbacks: TrainerCallback, peft: LoraConfig | None = None, **changes: Any) -> Trainer:
    args = trl.SFTConfig(**arguments(folder, dataset_text_field="text", max_length=16, bf16=False, **changes))
    return trl.SFTTrainer(
        model=model(),
        args=args,
        train_dataset=DATA["sft"],
        processing_class=TOKENIZER,
        peft_config=peft,
        callbacks=list(callbacks),
    )


def dpo(folder: Path, *callbacks: TrainerCallback, peft: LoraConfig | None = ADAPTER, **changes: Any) -> Trainer:
    args = trl.DPOConfig(**arguments(folder, max_length=32, bf16=False, **changes))
    return trl.DPOTrainer(
        model=model(),
        ref_model=None if peft else model(),
        args=args,
        train_dataset=DATA["dpo"],
        processing_class=TOKENIZER,
        peft_config=peft,
        callbacks=list(callbacks),
    )


TRAINERS: dict[str, Callable[..., Trainer]] = {
    "sft": sft,
    "sft with peft": lambda *given, **changes: sft(*given, peft=ADAPTER, **changes),
    "dpo with peft": dpo,
    "dpo": lambda *given, **changes: dpo(*given, peft=None, **changes),
}


@pytest.fixture(scope="module")
def without_callback(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[float], dict[str, Any]]]:
    """Losses and weights of runs without the callback, with what trl does by default, by trainer."""
    known: dict[str, tuple[list[float], dict[str, Any]]] = {}

    def get(kind: str) -> tuple[list[float], dict[str, Any]]:
        if kind not in known:
            run = TRAINERS[kind](tmp_path_factory.mktemp("without"))
            run.train()
            known[kind] = losses(run), weights(run.model)
        return known[kind]

    return get


@pytest.mark.parametrize("policy", FORWARDS)
@pytest.mark.parametrize("kind", TRAINERS)
def test_plan_governs_and_the_losses_are_those_without_the_callback(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    without_callback: Callable[[str], tuple[list[float], dict[str, Any]]],
    kind: str,
    policy: str,
) -> None:
    expected_losses, expected_weights = without_callback(kind)
    mode, options = POLICIES[policy]
    run = TRAINERS[kind](tmp_path, HFCkptCallback(mode, **options))
    part = "q_proj.base_layer" if "peft" in kind else "q_proj"
    with counted(run.model, part) as counts, caplog.at_level(logging.INFO, logger="hf_ckpt"):
        run.train()
    assert [counts[idx] for idx in range(4)] == FORWARDS[policy]
    assert caplog.messages.count(GOVERNS) == 1
    assert losses(run) == expected_losses
    assert changed(expected_weights, weights(run.model)) == []
    assert run.model.config.use_cache is True
    assert not remove(run.model)


@pytest.mark.parametrize("policy", ["segments_2", "nested", "attention", "ffn"])
def test_dpo_is_exact_under_every_other_policy_too(
    tmp_path: Path, without_callback: Callable[[str], tuple[list[float], dict[str, Any]]], policy: str
) -> None:
    mode, options = POLICIES[policy]
    run = dpo(tmp_path, HFCkptCallback(mode, **options))
    run.train()
    expected_losses, expected_weights = without_callback("dpo with peft")
    assert losses(run) == expected_losses
    assert changed(expected_weights, weights(run.model)) == []


@pytest.mark.parametrize("policy", ["every_2", "mixed"])
def test_round_trip_for_the_reference_model_keeps_the_layers_of_none_as_they_are(tmp_path: Path, policy: str) -> None:
    mode, options = POLICIES[policy]
    run = dpo(tmp_path, HFCkptCallback(mode, **options), gradient_checkpointing=False)
    with counted(run.model, "q_proj.base_layer") as counts:
        run.train()
    assert [counts[idx] for idx in range(4)] == FORWARDS[policy]


@pytest.mark.parametrize("policy", ["every_2", "attention"])
def test_generation_inside_a_step_is_right_and_the_plan_is_back_after_it(tmp_path: Path, policy: str) -> None:
    class Generates(trl.SFTTrainer):
        """Samples in the middle of a step, as GRPO does."""

        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            with trl.models.unwrap_model_for_generation(model, self.accelerator) as unwrapped, torch.no_grad():
                tokens.append(unwrapped.generate(prompt, **short))
            return super().compute_loss(model, inputs, *args, **kwargs)

    tokens: list[torch.Tensor] = []
    prompt = torch.tensor([[5, 6, 7]])
    short = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": TOKENIZER.pad_token_id}
    made = model()
    expected = made.eval().generate(prompt, **short)
    mode, options = POLICIES[policy]
    run = Generates(
        model=made,
        args=trl.SFTConfig(**arguments(tmp_path, dataset_text_field="text", max_length=16, bf16=False)),
        train_dataset=DATA["sft"],
        processing_class=TOKENIZER,
        callbacks=[HFCkptCallback(mode, **options)],
    )
    # Generation in training mode: without dropout, as it would draw random numbers.
    for layer in made.model.layers:
        layer.self_attn.attention_dropout = 0.0
    with counted(made, "q_proj") as counts:
        run.train()
    assert torch.equal(tokens[0], expected)
    assert [counts[idx] for idx in range(4)] == ([4, 2, 4, 2] if policy == "every_2" else [4, 4, 4, 4])


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("sft", "head"),
        ("sft", "none_tiles"),
        ("sft with peft", "selective_offload"),
        ("dpo", "head"),
        ("dpo", "offload"),
    ],
)
def test_finer_modes_train_as_without_a_plan(kind: str, mode: str, tmp_path: Path) -> None:
    policy, options = modes.MODES[mode]
    # Adam takes a step of full size for the rounding error of a gradient that should be zero.
    by_sgd = {"optim": "sgd", "learning_rate": 0.1}
    expected = TRAINERS[kind](tmp_path, **by_sgd)
    expected.train()
    got = TRAINERS[kind](tmp_path, HFCkptCallback(policy, **options), **by_sgd)
    got.train()
    if modes.is_bitwise(mode):
        assert losses(got) == losses(expected)
        assert changed(weights(expected.model), weights(got.model)) == []
    else:
        assert losses(got) == pytest.approx(losses(expected), rel=modes.CLOSE)


@pytest.mark.parametrize("name", TRAINERS)
def test_auto_plans_around_the_forward_that_trl_puts_on_the_model(
    name: str,
    tmp_path: Path,
    without_callback: Callable[[str], tuple[list[float], dict[str, Any]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = TRAINERS[name](tmp_path, HFCkptCallback("auto", memory_budget="1GiB"), gradient_checkpointing=False)
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        run.train()
    assert f"{type(run).__name__}.compute_loss; AdamW; one process. Not counted: nothing that is known." in caplog.text
    assert '"mode": "none"' in (tmp_path / "hf_ckpt_plan.json").read_text(encoding="utf-8")
    # What the simulated step left on the model itself would be in the first gradients.
    found, expected = without_callback(name)
    assert losses(run) == found
    assert changed(weights(run.model), expected) == []
