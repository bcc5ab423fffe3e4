"""Policy `auto` in trl's trainers that generate what they train on: generation and scoring are counted, too."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import MistralConfig, MistralForCausalLM, Trainer

from hf_ckpt import HFCkptCallback
from hf_ckpt.auto.replan import RunPlanner
from hf_ckpt.auto.trl_trainers import trl_loss
from hf_ckpt.errors import BudgetError, UnsupportedError
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Sharding
from hf_ckpt.simulation.step_memory import StepMemory
from tests.training import arguments, changed, weights

pytest.importorskip("trl", minversion="1.16")

import trl

from tests import trl_trainers as runs

# trl 1.16 uses the names that transformers 5.23 gives up.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"),
]

PROMPT, COMPLETION = 30, 27
KL = {"beta": 0.1}


def auto(budget: str = "1GiB") -> HFCkptCallback:
    return HFCkptCallback("auto", memory_budget=budget)


def letters(completions: list[str], **more: Any) -> list[float]:
    """Reward each completion for its letters."""
    return [float(len(set(each))) for each in completions]


def trainer(
    kind: str,
    folder: Path,
    *callbacks: Any,
    model: Any = None,
    lora: bool = False,
    data: Any = None,
    derived: Any = None,
    prompt: int = PROMPT,
    completion: int = COMPLETION,
    **changes: Any,
) -> Trainer:
    """A run of two steps whose completions are all of the longest length, so that each batch is the largest one."""
    made = runs.model(num_hidden_layers=4) if model is None else model
    if changes.get("beta") and not hasattr(made, "peft_config"):
        # The reference is loaded from there.
        made.save_pretrained(folder)
        made.config._name_or_path = str(folder)
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": completion}
    own = {"bf16": False, "gradient_checkpointing": False, "beta": 0.0, **sizes}
    own["generation_kwargs"] = {"min_new_tokens": completion, **changes.pop("generation_kwargs", {})}
    return (derived or getattr(trl, f"{kind}Trainer"))(  # type: ignore[no-any-return]  # upstream
        model=made,
        reward_funcs=letters,
        args=getattr(trl, f"{kind}Config")(**arguments(folder, **{**own, **changes})),
        train_dataset=Dataset.from_dict({"prompt": runs.column(0, lambda _: prompt)}) if data is None else data,
        processing_class=runs.TOKENIZER,
        peft_config=LoraConfig(**runs.ADAPTER) if lora else None,
        callbacks=list(callbacks),
    )


def planning_of(callback: HFCkptCallback) -> RunPlanner:
    assert callback._planning is not None
    return callback._planning


def simulator_of(callback: HFCkptCallback) -> StepSimulator:
    planning = planning_of(callback)
    assert planning.batch is not None
    return planning.simulator(planning.batch)


def peak_until_the_last_token(memory: StepMemory) -> int:
    """Return the peak until the last token is drawn."""
    timeline = memory.timeline
    last = max(at for at, place in enumerate(timeline.places) if place.operator == "aten.multinomial.default")
    return max(sum(held[at] for held in timeline.bytes_by_category.values()) for at in range(last + 1))


# --- Predictions. ---


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        # As trl has it.
        ("GRPO", {"gradient_checkpointing": True}),
        ("GRPO", {"bf16": True, "lora": True, "gradient_accumulation_steps": 2, **KL}),
        ("GRPO", {"bf16": True, "num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 3, **KL}),
        ("GRPO", {"temperature": 0.7, "top_k": 10, "top_p": 0.9, "repetition_penalty": 1.1, "pad_to_multiple_of": 8}),
        ("GRPO", {"loss_type": "cispo", "importance_sampling_level": "sequence", "steps_per_generation": 2}),
        ("RLOO", {"lora": True, **KL}),
    ],
)
@pytest.mark.sweep(keep=1)
def test_step_is_predicted_as_it_runs(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    callback = auto()
    # With what is used again, the third step is the next to generate.
    at_step = changes.get("max_steps", 2)
    if "steps_per_generation" in changes:
        at_step, changes = 3, {**changes, "max_steps": 3}
    followed = follow_trainer(trainer(kind, tmp_path, callback, **changes), at_step=at_step)
    assert planning_of(callback).predicted_bytes == pytest.approx(followed.peak_bytes, rel=0.01)
    before = simulator_of(callback).prepare()
    assert before is not None
    assert peak_until_the_last_token(before) == pytest.approx(peak_until_the_last_token(followed), rel=0.01)


@pytest.mark.sweep
def test_reference_adapter_of_a_model_with_one_of_its_own_is_counted(tmp_path: Path) -> None:
    callback = auto()
    model = get_peft_model(runs.model(num_hidden_layers=4), LoraConfig(**runs.ADAPTER))
    followed = follow_trainer(trainer("GRPO", tmp_path, callback, model=model, **KL))
    assert planning_of(callback).predicted_bytes == pytest.approx(followed.peak_bytes, rel=0.01)


# Many are generated for one micro-batch.
MANY = {
    "optim": "sgd",
    "steps_per_generation": 64,
    "num_generations": 32,
    "max_steps": 1,
    "prompt": 4,
    "completion": 50,
}


@pytest.mark.sweep
def test_generation_may_be_the_peak(tmp_path: Path) -> None:
    callback = auto()
    model = runs.model(num_hidden_layers=4, hidden_size=128)
    followed = follow_trainer(trainer("GRPO", tmp_path, callback, model=model, **MANY), at_step=1)
    simulator = simulator_of(callback)
    training, before = simulator.memory(None), simulator.prepare()
    assert before is not None
    assert training.peak_bytes < 0.95 * before.peak_bytes
    assert planning_of(callback).predicted_bytes == before.peak_bytes
    assert before.peak_bytes == pytest.approx(followed.peak_bytes, rel=0.01)


def test_budget_below_what_generation_needs_is_refused(tmp_path: Path) -> None:
    told = r"the generation of 256 completions of 50 tokens at a time needs [\d.]+ MiB as predicted, and activation"
    with pytest.raises(BudgetError, match=told):
        trainer("GRPO", tmp_path, auto("24MiB"), **MANY).train()


def test_longest_prompt_is_planned_for(tmp_path: Path) -> None:
    lengths = [8, 60, 20, 30]
    data = Dataset.from_dict({"prompt": [runs.words(length, length) for length in lengths] * 4})
    loss = trl_loss_of(trainer("GRPO", tmp_path, data=data))
    batch = loss.batch.largest(data, None, 4, None)
    # The token that begins a text comes on top.
    assert (batch.rows, batch.length, batch.is_padded) == (4, 61 + COMPLETION, True)
    assert loss.batch.largest(data, None, 4, 50).length == 50
    with pytest.raises(UnsupportedError, match="max_length=27 leaves no prompt before completions of 27 tokens"):
        loss.batch.largest(data, None, 4, 27)


# --- Plans. ---


@pytest.mark.parametrize(("kind", "lora"), [("GRPO", False), ("RLOO", True)])
@pytest.mark.sweep
def test_budget_below_none_is_kept_and_the_run_is_that_without_a_plan(tmp_path: Path, kind: str, lora: bool) -> None:
    more: dict[str, Any] = {"lora": lora, "completion": 8, "prompt": 120, **KL}
    plain = trainer(kind, tmp_path, **more)
    plain.train()
    free = auto()
    found = follow_trainer(trainer(kind, tmp_path, free, **more))
    simulator = simulator_of(free)
    smallest = simulator.memory(simulator.plan_of(Policy.parse("full"))).peak_bytes
    budget = smallest + (found.peak_bytes - smallest) // 3
    assert smallest < 0.9 * found.peak_bytes
    run = trainer(kind, tmp_path, auto(f"{budget}B"), **more)
    assert follow_trainer(run).peak_bytes <= budget
    assert logged(run) == logged(plain)
    assert changed(weights(plain.model), weights(run.model)) == []


def logged(run: Trainer) -> list[dict[str, Any]]:
    """Return what a run has logged, but for times."""
    timed = ("runtime", "per_second", "total_flos", "ckpt/", "step_time")
    return [
        {name: value for name, value in entry.items() if not any(each in name for each in timed)}
        for entry in run.state.log_history
    ]


def test_what_is_counted_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        trainer("GRPO", tmp_path, auto(), max_steps=1, eval_strategy="no", **KL).train()
    told = next(entry.getMessage() for entry in caplog.records if entry.msg.startswith("Counted"))
    assert told.startswith("Counted: prompt_ids, prompt_mask, completion_ids, completion_mask, advantages, num_items")
    assert "ref_model (LlamaForCausalLM, 1.1 MiB); GRPOTrainer.compute_loss; " in told
    assert "generation of 4 completions of 27 tokens at a time" in told
    assert told.endswith("Not counted: what functions that reward completions take.")


# --- What is refused. ---


def trl_loss_of(run: Trainer, sharding: Sharding | None = None) -> Any:
    return trl_loss(run, run.args, run.model, sharding or Sharding(), run.train_dataset, run.data_collator)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cache_implementation": "static"}, "generates with cache_implementation=static, which is not"),
        ({"generation_kwargs": {"num_beams": 2}}, "generates with num_beams=2, which is not"),
        ({"top_entropy_quantile": 0.5}, "has top_entropy_quantile=0.5, which is not"),
        (
            {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
            "generates while gradients are accumulated \\(steps_per_generation=2, num_iterations=1, "
            "gradient_accumulation_steps=4\\), which is not",
        ),
    ],
)
def test_other_generation_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedError, match=f"GRPOTrainer {told}"):
        trl_loss_of(trainer("GRPO", tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "told"),
    [("use_vllm", "generates by vLLM"), ("use_transformers_continuous_batching", "generates by continuous batching")],
)
def test_other_engines_of_generation_are_refused(tmp_path: Path, name: str, told: str) -> None:
    run = trainer("GRPO", tmp_path)
    # Its constructor asks for a GPU, or for a server.
    setattr(run.args, name, True)
    with pytest.raises(UnsupportedError, match=f"GRPOTrainer {told}, which is not"):
        trl_loss_of(run)


def test_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="GRPOTrainer generates under ddp, which is not"):
        trl_loss_of(trainer("GRPO", tmp_path), Sharding(engine="ddp", world_size=2))


def test_generation_of_the_users_own_is_refused(tmp_path: Path) -> None:
    class Own(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            return super()._generate_single_turn(*args, **kwargs)

    with pytest.raises(UnsupportedError, match=r"Own\._generate_single_turn replaces the loss of GRPOTrainer"):
        trl_loss_of(trainer("GRPO", tmp_path, derived=Own))


def test_prompts_without_an_end_are_refused(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": runs.column(0, lambda _: PROMPT)}).to_iterable_dataset()
    with pytest.raises(UnsupportedError, match='prompts whose lengths are known of a data set with a column "prompt"'):
        trl_loss_of(trainer("GRPO", tmp_path, data=data))


def test_other_caches_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MistralConfig(vocab_size=len(runs.TOKENIZER), num_key_value_heads=2, sliding_window=8, **sizes)
    run = trainer("GRPO", tmp_path, auto(), model=MistralForCausalLM(config))
    with pytest.raises(UnsupportedError, match="keeps keys and values in a DynamicSlidingWindowLayer, which is not"):
        run.train()
