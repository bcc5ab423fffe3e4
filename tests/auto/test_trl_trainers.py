"""Policy `auto` in trl's trainers: their own loss is simulated, with the reference that they have beside."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer

from hf_ckpt import HFCkptCallback
from hf_ckpt.auto.batch_of_forward import batch_of_forward
from hf_ckpt.auto.replan import RunPlanner
from hf_ckpt.auto.trainer_loss import TrainerLoss
from hf_ckpt.auto.trl_trainers import trl_loss
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import CPU, find_device
from hf_ckpt.simulation.layer_reuse import LayerReuse
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Sharding
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory
from hf_ckpt.trainer.other_models import weights_and_buffers
from tests.training import changed, weights

pytest.importorskip("trl", minversion="1.16")

from tests import trl_trainers as runs
from tests.auto import test_more_than_text as images
from tests.trl_trainers import REFERENCES, trainer

# trl 1.16 uses the names that transformers 5.23 gives up.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"),
]

EVERY = [
    *((kind, case) for kind in ("DPO", "KTO") for case in REFERENCES),
    *((kind, "whole") for kind in ("SFT", "Reward")),
    ("SFT", "adapters off"),
]


def auto(budget: str = "1GiB") -> HFCkptCallback:
    return HFCkptCallback("auto", memory_budget=budget)


def planning_of(callback: HFCkptCallback) -> RunPlanner:
    assert callback._planning is not None
    return callback._planning


def predicted_of(callback: HFCkptCallback) -> StepMemory:
    """Return the step as the plan in force was made for it."""
    planning = planning_of(callback)
    assert planning.batch is not None
    return planning.simulator(planning.batch).memory(planning.plan)


def most(memory: StepMemory, category: Category) -> int:
    """Return the most that a category has at any moment."""
    return max(memory.timeline.bytes_by_category.get(category, (0,)))


def assert_alike(predicted: StepMemory, followed: StepMemory) -> None:
    """See that peak, and the most of each category, are within 1 %."""
    assert predicted.peak_bytes == pytest.approx(followed.peak_bytes, rel=0.01)
    for category in Category:
        expected = pytest.approx(most(followed, category), rel=0.01, abs=0.002 * followed.peak_bytes)
        assert most(predicted, category) == expected, category


def logged(run: Trainer) -> list[dict[str, Any]]:
    """Return what a run has logged, but for times: losses, rewards, numbers of tokens."""
    timed = ("runtime", "per_second", "total_flos", "ckpt/")
    return [
        {name: value for name, value in entry.items() if not any(each in name for each in timed)}
        for entry in run.state.log_history
    ]


# --- Predictions. ---


@cache
def followed_in_much_memory(kind: str, case: str) -> tuple[HFCkptCallback, StepMemory]:
    """A run that a budget does not bind: the callback, which has its predictions, and the step that ran."""
    callback = auto()
    with tempfile.TemporaryDirectory() as folder:
        return callback, follow_trainer(trainer(kind, case, Path(folder), callback))


@pytest.mark.parametrize(("kind", "case"), EVERY)
@pytest.mark.sweep(keep=1)
def test_step_is_predicted_as_it_runs(kind: str, case: str) -> None:
    callback, followed = followed_in_much_memory(kind, case)
    assert_alike(predicted_of(callback), followed)
    asks = kind in ("DPO", "KTO") and case != "computed before"
    assert (most(followed, Category.REFERENCE) > 0) == (asks or kind == "KTO")


@pytest.mark.parametrize(
    ("kind", "case"), [("DPO", "separate"), ("DPO", "adapters off"), ("KTO", "separate"), ("SFT", "whole")]
)
@pytest.mark.sweep
def test_step_under_autocast_with_micro_batches_is_predicted_as_it_runs(tmp_path: Path, kind: str, case: str) -> None:
    callback = auto()
    run = trainer(kind, case, tmp_path, callback, bf16=True, gradient_accumulation_steps=2)
    followed = follow_trainer(run)
    assert_alike(predicted_of(callback), followed)


@pytest.mark.parametrize(
    "more",
    [
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        {"loss_type": ["exo_pair"], "label_smoothing": 0.1},
        {"loss_type": ["aot"]},
        {"ld_alpha": 0.5, "use_weighting": True},
        {"f_divergence_type": "alpha_divergence"},
    ],
)
@pytest.mark.sweep(keep=1)
def test_losses_of_dpo_are_predicted_as_they_run(tmp_path: Path, more: dict[str, Any]) -> None:
    callback = auto()
    followed = follow_trainer(trainer("DPO", "separate", tmp_path, callback, **more))
    assert_alike(predicted_of(callback), followed)


def test_packed_rows_of_sft_are_predicted_as_they_run(tmp_path: Path) -> None:
    callback = auto()
    followed = follow_trainer(trainer("SFT", "whole", tmp_path, callback, padding_free=True, max_length=None))
    assert_alike(predicted_of(callback), followed)


@pytest.mark.sweep
def test_larger_reference_takes_what_it_has_more(tmp_path: Path) -> None:
    small, large = runs.model(), runs.model(hidden_size=128, intermediate_size=512)
    found = []
    for reference in (small, large):
        callback = auto()
        followed = follow_trainer(trainer("DPO", "separate", tmp_path, callback, ref_model=reference))
        assert_alike(predicted_of(callback), followed)
        found.append((planning_of(callback).predicted_bytes, most(followed, Category.REFERENCE)))
    sizes = [sum(each.nbytes for each in weights_and_buffers(reference)) for reference in (small, large)]
    assert found[1][0] - found[0][0] == sizes[1] - sizes[0]


def test_rows_with_another_example_s_completion_may_be_longer(tmp_path: Path) -> None:
    # Prompts with a short completion of their own get a long one.
    lengths = [60 if number % 2 else 4 for number in range(16)]
    columns = {
        "prompt": [runs.words(4 if length > 4 else 60, number) for number, length in enumerate(lengths)],
        "completion": [runs.words(length, number) for number, length in enumerate(lengths)],
        "label": [number % 4 < 2 for number in range(16)],
    }
    callback = auto()
    more = {"max_length": 256, "data": Dataset.from_dict(columns)}
    followed = follow_trainer(trainer("KTO", "separate", tmp_path, callback, **more))
    planned = planning_of(callback).batch
    assert planned is not None
    # The tokens that begin and end a text come on top.
    assert planned.length == 66
    loss = planning_of(callback).simulator(planned).step.loss
    assert loss is not None
    inputs = loss.make_inputs(planning_of(callback).simulator(planned).step, runs.model())
    assert inputs["KL_input_ids"].shape == (4, 122)
    assert_alike(predicted_of(callback), followed)


@pytest.mark.sweep
def test_layers_that_are_alike_are_traced_once_for_the_reference_too(tmp_path: Path) -> None:
    callback = auto()
    trainer("KTO", "adapters off", tmp_path, callback).train()
    planning = planning_of(callback)
    assert planning.batch is not None
    simulator = planning.simulator(planning.batch)
    # In a proven step the last layer is held against its original, which sets its neighbour apart too.
    unproven = StepSimulator(simulator.model, replace(simulator.step, is_proven=False), simulator.device)
    for mode in ("none", "full"):
        plan = simulator.plan_of(Policy.parse(mode))
        # Raises where a layer is called in another way than the one like it.
        reuse = LayerReuse.choose(unproven.stacks, plan, unproven._known.signatures)
        unproven._trace(plan, reuse=reuse)
        quick, whole = simulator.simulate(plan), simulator.simulate(plan, traces_all=True)
        assert quick.peak_bytes == whole.peak_bytes
        assert quick.num_flops == whole.num_flops
        assert quick.time.total == pytest.approx(whole.time.total)


def test_kernels_of_cuda_take_no_copies_of_a_tile_of_logits(tmp_path: Path) -> None:
    callback = auto()
    trainer("SFT", "whole", tmp_path, callback).train()
    planning = planning_of(callback)
    assert planning.batch is not None
    on_cpu = planning.simulator(planning.batch)
    makes_copies = []
    for device in (CPU, find_device("rtx4090")):
        memory = StepSimulator(on_cpu.model, on_cpu.step, device).memory(None)
        backward = {place.operator for place in memory.timeline.places if place.phase is Phase.BACKWARD}
        makes_copies.append("aten.exp.default" in backward)
        # One tile of all tokens: trl makes it as wide as those of large vocabularies.
        assert most(memory, Category.LOSS) >= 2 * 51 * 32768 * 4
    assert makes_copies == [True, False]


# --- Plans. ---


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("DPO", "separate"),
        ("DPO", "adapters off"),
        ("DPO", "adapter of its own"),
        ("DPO", "computed before"),
        ("KTO", "adapters off"),
        ("KTO", "synchronised"),
        ("Reward", "whole"),
        ("SFT", "adapters off"),
    ],
)
@pytest.mark.sweep
def test_budget_below_none_is_kept_and_the_run_is_that_without_a_plan(tmp_path: Path, kind: str, case: str) -> None:
    plain = trainer(kind, case, tmp_path)
    plain.train()
    free, found = followed_in_much_memory(kind, case)
    planning = planning_of(free)
    assert planning.batch is not None
    simulator = planning.simulator(planning.batch)
    smallest = simulator.memory(simulator.plan_of(Policy.parse("full"))).peak_bytes
    budget = smallest + (found.peak_bytes - smallest) // 3
    assert smallest < 0.9 * found.peak_bytes
    run = trainer(kind, case, tmp_path, auto(f"{budget}B"))
    assert follow_trainer(run).peak_bytes <= budget
    assert logged(run) == logged(plain)
    assert changed(weights(plain.model), weights(run.model)) == []


def test_step_without_a_bound_is_planned_for_when_it_comes(tmp_path: Path) -> None:
    callback = auto()
    run = trainer("DPO", "adapters off", tmp_path, callback)
    inner = run.data_collator
    run.data_collator = lambda examples: inner(examples)
    followed = follow_trainer(run)
    planned = planning_of(callback)
    assert planned.longest_batch(1, None) is None
    assert planned.batch is not None
    # Two rows of each example.
    assert (planned.batch.rows, planned.batch.length) == (4, 59)
    assert planned.predicted_bytes == pytest.approx(followed.peak_bytes, rel=0.01)


@pytest.mark.sweep
def test_plan_for_a_larger_batch_may_be_made_within_a_step_that_is_followed(tmp_path: Path) -> None:
    # The first step has short rows, the second one long ones.
    columns = {
        name: [runs.words(8 if at < 2 else 40, at) for at in range(16)] for name in ("prompt", "chosen", "rejected")
    }
    more = {"data": Dataset.from_dict(columns), "max_length": 128}
    peaks = []
    for callbacks in ([auto()], []):
        run = trainer("DPO", "separate", tmp_path, *callbacks, **more)
        inner = run.data_collator
        run.data_collator = lambda examples, inner=inner: inner(examples)
        run._get_train_sampler = lambda *given: None  # type: ignore[method-assign]  # in the order of the data
        peaks.append(follow_trainer(run).peak_bytes)
    assert peaks[0] == peaks[1]


def test_evaluation_is_predicted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = Dataset.from_dict(runs.PAIRS)
    more = {"eval_dataset": data.select(range(4)), "eval_strategy": "steps", "eval_steps": 1}
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        trainer("DPO", "separate", tmp_path, auto(), per_device_eval_batch_size=4, **more).train()
    told = [
        entry
        for entry in caplog.messages
        if entry.startswith("Evaluation of 8 sequences of 59 tokens: predicted peak ")
    ]
    assert len(told) == 1


# --- What is said. ---

_OF_DPO = "input_ids, attention_mask, completion_mask"


@pytest.mark.parametrize(
    ("kind", "case", "counted"),
    [
        (
            *("DPO", "separate"),
            f"{_OF_DPO}; LlamaForCausalLM; ref_model (LlamaForCausalLM, 1.1 MiB); DPOTrainer.compute_loss; AdamW;",
        ),
        ("DPO", "adapters off", f"{_OF_DPO}; LlamaForCausalLM; DPOTrainer.compute_loss; AdamW;"),
        (
            *("DPO", "computed before"),
            f"{_OF_DPO}, ref_chosen_logps, ref_rejected_logps; LlamaForCausalLM; DPOTrainer.compute_loss; AdamW;",
        ),
        ("SFT", "whole", "input_ids, labels, attention_mask; LlamaForCausalLM; SFTTrainer.compute_loss; AdamW;"),
    ],
)
def test_what_is_counted_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, case: str, counted: str
) -> None:
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        trainer(kind, case, tmp_path, auto()).train()
    told = [entry.getMessage() for entry in caplog.records if entry.msg.startswith("Counted")]
    assert told[0].endswith("Not counted: nothing that is known.")
    assert told[0].startswith(f"Counted: {counted}")


# --- What is refused. ---


def refusal(run: Trainer) -> str:
    """Return what `auto` says to a run, which it has to refuse before a weight changes."""
    before = weights(run.model)
    with pytest.raises(UnsupportedError) as raised:
        run.train()
    assert changed(before, weights(run.model)) == []
    return str(raised.value)


def test_experimental_trainers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    args = CPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False)
    data = Dataset.from_dict(runs.PAIRS)
    run = CPOTrainer(
        model=runs.model(), args=args, train_dataset=data, processing_class=runs.TOKENIZER, callbacks=[auto()]
    )
    assert "the steps of SFT, DPO, KTO, Reward, GRPO and RLOO are, and that of CPOTrainer is not" in refusal(run)


def test_offloading_of_trl_is_refused(tmp_path: Path) -> None:
    run = trainer("SFT", "whole", tmp_path, auto())
    # On a CPU its constructor asks for a stream of a GPU.
    run.args.activation_offloading = True
    assert "activation_offloading=True copies activations to the host as trl does" in refusal(run)


def test_reference_that_shares_weights_is_refused(tmp_path: Path) -> None:
    made, reference = runs.model(), runs.model()
    reference.model.embed_tokens = made.model.embed_tokens
    run = trainer("DPO", "separate", tmp_path, auto(), model=made, ref_model=reference)
    assert "DPOTrainer.ref_model shares weights with the model that is trained" in refusal(run)


def test_further_model_of_a_trainer_is_refused(tmp_path: Path) -> None:
    run = trainer("DPO", "separate", tmp_path, auto())
    run.teacher = runs.model()  # type: ignore[attr-defined]  # as a subclass has one
    assert "DPOTrainer.teacher (LlamaForCausalLM, 1.1 MiB) is on the device with the model" in refusal(run)


def test_loss_in_the_place_of_trl_s_is_refused_where_a_reference_belongs_to_it(tmp_path: Path) -> None:
    import trl

    class Own(trl.DPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    told = refusal(trainer("DPO", "adapters off", tmp_path, auto(), derived=Own))
    assert "Own.compute_loss replaces the loss of DPOTrainer, which alone is" in told


def test_kto_without_known_lengths_is_refused(tmp_path: Path) -> None:
    run = trainer("KTO", "adapters off", tmp_path, auto())
    inner = run.data_collator
    run.data_collator = lambda examples: inner(examples)
    assert "KTOTrainer reads each prompt with another example's completion too" in refusal(run)


# --- More than text. ---


def with_images(number: int) -> dict[str, Any]:
    torch.manual_seed(number)
    return images.with_images("llava", 12, 2)


def test_sft_of_images_is_planned_for_by_its_own_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = auto()
    run = trainer(
        "SFT",
        "whole",
        tmp_path,
        callback,
        model=images.vision_language("llava"),
        data=Dataset.from_list([{"number": number} for number in range(8)]),
        data_collator=lambda rows: images.collate([with_images(row["number"]) for row in rows]),
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        max_length=None,
    )
    followed = follow_trainer(run)
    assert predicted_of(callback).peak_bytes == pytest.approx(followed.peak_bytes, rel=0.01)
    assert "Not counted" not in caplog.text


def test_pairs_of_images_are_refused(tmp_path: Path) -> None:
    loss = planned_loss(trainer("DPO", "separate", tmp_path))
    batch = batch_of_forward(images.vision_language("llava"), (), images.collate([with_images(0)]))
    assert batch is not None
    with pytest.raises(UnsupportedError, match=r"pixel_values \[.*\], for which DPOTrainer.compute_loss is not"):
        loss.of(batch)


def planned_loss(run: Trainer) -> TrainerLoss:
    loss = trl_loss(run, run.args, run.model, Sharding(), run.train_dataset, run.data_collator)
    assert loss is not None
    return loss
