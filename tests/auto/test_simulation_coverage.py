"""Policy `auto` is never blind: what the simulated step does not have is refused before training, or named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset as Table
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    YolosConfig,
    YolosForObjectDetection,
    default_data_collator,
)

from hf_ckpt import HFCkptCallback
from hf_ckpt.auto.batch_of_forward import further_inputs
from hf_ckpt.auto.simulation_coverage import check_run
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.policy.policy import Mode
from hf_ckpt.trainer.batch import Batch, batch_of
from tests import zoo
from tests.training import LENGTH, VOCAB, During, arguments, changed, llama, lora, losses, rows, weights

pytestmark = pytest.mark.slow

Examples = list[dict[str, Any]]


def trainer(
    model: nn.Module, folder: Path, data: Any = None, *, kind: type[Trainer] = Trainer, collator: Any = None, **own: Any
) -> tuple[Trainer, HFCkptCallback]:
    """A run of two steps under `auto` in which everything fits; `own` are arguments of the Trainer."""
    callback = HFCkptCallback("auto", memory_budget="1GiB")
    args = TrainingArguments(**arguments(folder, remove_unused_columns=False))
    data = rows() if data is None else data
    return kind(model, args, collator, train_dataset=data, callbacks=[callback], **own), callback


def refusal(*given: Any, **own: Any) -> str:
    """Return what `auto` says to a run, which it has to refuse before a weight changes."""
    run, _ = trainer(*given, **own)
    before = weights(run.model)
    with pytest.raises(UnsupportedError) as raised:
        run.train()
    assert changed(before, weights(run.model)) == []
    # The next use takes off what a forward that was refused has left.
    run.model.eval()
    assert "_hf_ckpt_applied" not in {name for module in run.model.modules() for name in vars(module)}
    return str(raised.value)


def prediction_error(*given: Any, **own: Any) -> float:
    """Return by which fraction the predicted peak of a run is off the followed one."""
    run, callback = trainer(*given, **own)
    followed = follow_trainer(run)
    assert callback._planning is not None
    return callback._planning.predicted_bytes / followed.peak_bytes - 1


@pytest.fixture(autouse=True)
def _said(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        yield


def coverage(caplog: pytest.LogCaptureFixture) -> tuple[str, int]:
    """Return what was said to be counted, and the level."""
    found = {(entry.getMessage(), entry.levelno) for entry in caplog.records if entry.msg.startswith("Counted")}
    assert len(found) == 1
    return found.pop()


# --- Inputs. ---


def with_input(name: str, value: Tensor) -> Callable[[Examples], dict[str, Any]]:
    """A collator that adds an input."""

    def collate(batch: Examples) -> dict[str, Any]:
        texts = torch.stack([example["input_ids"] for example in batch])
        return {"input_ids": texts, "labels": texts, name: value}

    return collate


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "labels",
            torch.zeros(2).long(),
            "labels are [2], where the loss of LlamaForCausalLM was simulated with [2, 8]",
        ),
        ("past", [{"key": torch.zeros(2)}], "a batch came with tensors inside past"),
        ("output_hidden_states", True, "output_hidden_states=True keeps tensors that the simulated step does not have"),
    ],
)
def test_input_that_is_not_simulated_is_refused(tmp_path: Path, name: str, value: Any, message: str) -> None:
    assert message in refusal(llama(num_hidden_layers=1), tmp_path, collator=with_input(name, value))


def test_list_of_tensors_is_refused(tmp_path: Path) -> None:
    def collate(batch: Examples) -> dict[str, Any]:
        return {
            "pixel_values": torch.stack([each["image"] for each in batch]),
            "labels": [each["box"] for each in batch],
        }

    model = YolosForObjectDetection(YolosConfig(**SIZES, image_size=[8, 8], patch_size=4, num_detection_tokens=2))
    box = {"class_labels": torch.tensor([1]), "boxes": torch.rand(1, 4)}
    data = [{"image": torch.zeros(3, 8, 8), "box": box}] * 4
    assert "a batch came with tensors inside labels" in refusal(model, tmp_path, data, collator=collate)


class Scores(nn.Module):
    """A user's own module, which says nothing of its labels: one for each row."""

    def __init__(self, as_tuple: bool = False) -> None:
        super().__init__()
        self.model = llama(attention_dropout=0.0)
        self.head = nn.Linear(VOCAB, 3)
        self.as_tuple = as_tuple

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        scores = self.head(self.model(input_ids).logits[:, -1])
        loss = nn.functional.cross_entropy(scores, labels)
        return (loss, scores) if self.as_tuple else {"loss": loss, "logits": scores}


def scored() -> Examples:
    return [{"input_ids": row["input_ids"], "labels": number % 3} for number, row in enumerate(rows())]


@pytest.mark.parametrize("as_tuple", [False, True])
def test_labels_of_a_module_of_the_users_are_those_of_its_batches(tmp_path: Path, as_tuple: bool) -> None:
    assert abs(prediction_error(Scores(as_tuple), tmp_path, scored(), collator=default_data_collator)) < 0.001


def test_code_that_fails_without_values_is_refused(tmp_path: Path) -> None:
    class Asserts(Scores):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            if type(self.head.weight.data) is not Tensor:
                raise AssertionError("no such tensor")
            return super().forward(input_ids, labels)

    message = refusal(Asserts(), tmp_path, scored(), collator=default_data_collator)
    assert 'given input_ids and labels, as a simulated step gives them, it raises AssertionError "no such' in message


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize("document", [3, LENGTH])
def test_positions_make_a_mask_which_is_predicted(tmp_path: Path, is_table: bool, document: int) -> None:
    data: Any = [{**row, "position_ids": torch.arange(LENGTH) % document} for row in rows()]
    if is_table:
        data = Table.from_list([{name: value.tolist() for name, value in row.items()} for row in data])
    # Some versions of transformers leave the mask out where each row is one document.
    assert -0.0001 < prediction_error(llama(), tmp_path, data, collator=default_data_collator) < 0.01


def test_few_whole_numbers_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, _ = trainer(llama(num_hidden_layers=1), tmp_path, collator=with_input("seq_idx", torch.zeros(1, 8).int()))
    run.train()
    told = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert told == ["Not counted: seq_idx, 32 B of the batch."]


def bert(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {"vocab_size": VOCAB, "max_position_embeddings": 8, **sizes, **changes}


def test_type_of_each_token_is_simulated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Gemma 3 makes a mask of them, which is more than their own bytes.
    case = zoo.build("gemma3", num_layers=1)
    data = [{"input_ids": row, "labels": row, "token_type_ids": torch.zeros_like(row)} for row in rows_of(case)]
    assert abs(prediction_error(case.model, tmp_path, data)) < 0.01
    assert "Planning for 2 sequences of 64 tokens with token_type_ids within" in caplog.text
    assert coverage(caplog)[0].startswith("Counted: input_ids, labels, token_type_ids; Gemma3ForConditionalGeneration;")


def rows_of(case: zoo.Case, length: int = 64) -> list[Tensor]:
    row = case.inputs["input_ids"][0]
    return [row[:1].expand(length).clone() for _ in range(8)]


def test_type_that_the_collator_adds_is_planned_for_when_it_comes(tmp_path: Path) -> None:
    model = BertForSequenceClassification(BertConfig(**bert()))
    torch.manual_seed(0)
    data = [{"input_ids": row["input_ids"], "labels": 1} for row in rows()]

    def collate(batch: Examples) -> dict[str, Tensor]:
        ids = torch.stack([example["input_ids"] for example in batch])
        return {"input_ids": ids, "token_type_ids": ids % 2, "labels": torch.ones(len(batch)).long()}

    run, callback = trainer(model, tmp_path, data, collator=collate)
    run.train()
    assert callback.planned_for == Batch(2, 8, more=("token_type_ids",))


def test_forward_s_further_inputs_are_read_off_its_arguments() -> None:
    ids = torch.zeros(2, 8).long()
    given = {"input_ids": ids, "attention_mask": ids, "position_ids": ids, "shift_labels": ids, "labels": ids}
    assert batch_of((), {**given, "score": ids.float(), "few": ids[0]}) == Batch(
        2, 8, is_padded=True, more=("position_ids", "shift_labels")
    )
    assert batch_of((), {"input_ids": ids, "position_ids": ids}) == Batch(2, 8, is_packed=True)


LIST: Any = [{"input_ids": [1, 2], "token_type_ids": [0, 1], "labels": [1, 2], "name": "a", "score": [0.5, 1.0]}]


@pytest.mark.parametrize(
    "data",
    [LIST, Table.from_list(LIST), Subset(LIST, [0]), ConcatDataset([Table.from_list(LIST)])],  # type: ignore[list-item]  # upstream
)
def test_further_inputs_are_read_off_the_data(data: Any) -> None:
    assert further_inputs(data, {"input_ids", "token_type_ids", "labels", "name", "score"}) == ("token_type_ids",)
    assert further_inputs(data, {"input_ids", "labels"}) == ()


# --- Models. ---

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
HEADS: dict[str, tuple[type[PreTrainedModel], dict[str, Any], Any]] = {
    "class": (LlamaForSequenceClassification, {"num_labels": 3}, 2),
    "score": (LlamaForSequenceClassification, {"num_labels": 1}, 0.5),
    "scores": (LlamaForSequenceClassification, {"num_labels": 2, "problem_type": "regression"}, [0.5, 1.0]),
    "several classes": (
        LlamaForSequenceClassification,
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        [1.0, 0.0, 1.0],
    ),
    "class of each token": (LlamaForTokenClassification, {"num_labels": 3}, [1] * 8),
}


@pytest.mark.parametrize("head", HEADS)
def test_classification_is_predicted_as_it_runs(tmp_path: Path, head: str) -> None:
    kind, changes, label = HEADS[head]
    data = [{**row, "labels": torch.tensor(label)} for row in rows()]
    assert abs(prediction_error(kind(LlamaConfig(**{**SIZES, **changes})), tmp_path, data)) < 0.01


def test_classification_of_bert_is_predicted_as_it_runs(tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"], "labels": 1} for row in rows()]
    model = BertForSequenceClassification(BertConfig(**bert()))
    assert abs(prediction_error(model, tmp_path, data)) < 0.01


@pytest.mark.sweep
def test_classification_keeps_a_budget_below_none(tmp_path: Path) -> None:
    data = [{"input_ids": torch.ones(256).long(), "labels": 1}] * 8
    run, _ = trainer(LlamaForSequenceClassification(LlamaConfig(**SIZES)), tmp_path, data)
    budget = int(0.6 * follow_trainer(run).peak_bytes)
    callback = HFCkptCallback("auto", memory_budget=f"{budget}B")
    args = TrainingArguments(**arguments(tmp_path))
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES))
    found = follow_trainer(Trainer(model, args, train_dataset=data, callbacks=[callback]))  # type: ignore[arg-type]  # upstream
    assert found.peak_bytes <= budget
    assert callback.plan is not None
    assert callback.plan.count(Mode.NONE) < 2


def test_labels_of_another_problem_are_refused(tmp_path: Path) -> None:
    data = [{**row, "labels": torch.tensor([1.0, 0.0, 1.0])} for row in rows()]
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=3))
    assert "labels are [2, 3], where the loss of LlamaForSequenceClassification was simulated with [2]" in refusal(
        model, tmp_path, data
    )


def test_model_that_is_given_no_labels_is_refused(tmp_path: Path) -> None:
    text = {**SIZES, "eos_token_id": 2, "bos_token_id": 1}
    vision = {**SIZES, "image_size": 8, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    data = [{"input_ids": row["input_ids"], "pixel_values": torch.zeros(3, 8, 8)} for row in rows()]
    assert "given input_ids, pixel_values, the model's forward returns no loss." in refusal(model, tmp_path, data)


def test_compiled_part_is_refused(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)
    # As `compile()` sets it, which takes seconds.
    model.model.layers[0].mlp._compiled_call_impl = model.model.layers[0].mlp.forward
    assert "LlamaMLP is compiled" in refusal(model, tmp_path)


# --- Steps. ---


class Pairs(Trainer):
    """Runs the model once for each text of a pair, as sentence-transformers and reward trainers do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        halves = (half.contiguous() for half in inputs["input_ids"].chunk(2, dim=1))
        first, second = (model(input_ids=half).logits.mean(dim=(1, 2)) for half in halves)
        return (first - second).square().mean()


class Inner(Trainer):
    """Runs a part of the model instead of the model."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model.model(input_ids=inputs["input_ids"]).last_hidden_state.mean()


class Embeds(Trainer):
    """Runs the model on what was computed outside of it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]), labels=inputs["labels"]).loss


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Pairs, "the model's forward came twice in one micro-batch"),
        (Inner, "a micro-batch ran without a training forward of the model that the Trainer has"),
        (Embeds, "a batch came with inputs_embeds that was computed with gradients, outside of the model's forward"),
    ],
)
def test_step_that_is_not_the_simulated_one_is_refused(tmp_path: Path, kind: type[Trainer], message: str) -> None:
    assert message in refusal(llama(num_hidden_layers=1), tmp_path, kind=kind)


@pytest.mark.parametrize(
    "event",
    [
        *("on_train_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"),
        *("on_step_end", "on_log"),
    ],
)
@pytest.mark.sweep(keep=3)
def test_forward_of_a_callback_is_none_of_the_step(tmp_path: Path, event: str) -> None:
    def look(model: nn.Module) -> None:
        # Larger than any batch, and with gradients.
        ids = torch.stack([row["input_ids"] for row in rows(5)])
        assert model.training
        model(input_ids=ids, labels=ids)

    found = []
    for callbacks in ([], [During(event, look)]):
        callbacks += [HFCkptCallback("auto", memory_budget="1GiB")]
        args = TrainingArguments(**arguments(tmp_path, gradient_accumulation_steps=2))
        model = llama(num_hidden_layers=1, attention_dropout=0.0)
        trainer = Trainer(model, args, train_dataset=rows(), callbacks=callbacks)  # type: ignore[arg-type]  # upstream
        trainer.train()
        found.append((losses(trainer), callbacks[-1].planned_for))  # type: ignore[attr-defined]
    assert found[0] == found[1]


def test_step_without_a_forward_is_refused_in_its_first_micro_batch(tmp_path: Path) -> None:
    callback = HFCkptCallback("auto", memory_budget="1GiB")
    args = TrainingArguments(**arguments(tmp_path, gradient_accumulation_steps=4))
    seen: list[int] = []

    class Counted(Inner):
        def training_step(self, *given: Any, **more: Any) -> Tensor:
            seen.append(1)
            return super().training_step(*given, **more)

    with pytest.raises(UnsupportedError, match="without a training forward"):
        Counted(llama(num_hidden_layers=1), args, train_dataset=rows(), callbacks=[callback]).train()  # type: ignore[arg-type]  # upstream
    assert seen == [1]


class OfFeatures(nn.Module):
    """A model that takes its inputs in one dictionary, as sentence-transformers' does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama(num_hidden_layers=1)

    def forward(self, features: dict[str, Tensor], **kwargs: Any) -> Any:
        return self.inner(**features)


def test_model_that_takes_a_dictionary_is_refused(tmp_path: Path) -> None:
    told = refusal(OfFeatures(), tmp_path)
    assert "OfFeatures.forward cannot be called so: missing a required argument: 'features'." in told


class Watched(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


def test_step_of_a_trainer_of_the_user_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(llama(num_hidden_layers=1), tmp_path, kind=Watched)[0].train()
    told, level = coverage(caplog)
    assert told.endswith(
        "Not counted: what Watched.training_step does besides the model's own forward and loss, which were simulated."
    )
    assert level == logging.WARNING


def test_run_of_which_everything_is_counted_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(lora(), tmp_path)[0].train()
    assert coverage(caplog) == (
        "Counted: input_ids, labels; LlamaForCausalLM; AdamW; one process. Not counted: nothing that is known.",
        logging.INFO,
    )


# --- Other models. ---


class Teacher(TrainerCallback):
    def __init__(self, teacher: nn.Module) -> None:
        self.teachers = [teacher]


def test_another_model_is_refused(tmp_path: Path) -> None:
    run, _ = trainer(llama(num_hidden_layers=1), tmp_path)
    run.ref_model = llama(num_hidden_layers=1)  # type: ignore[attr-defined]  # as trl does
    with pytest.raises(UnsupportedError) as raised:
        run.train()
    assert "Trainer.ref_model (LlamaForCausalLM, 12.7 KiB) is on the device with the model that is" in str(raised.value)


def test_another_model_of_a_callback_is_refused(tmp_path: Path) -> None:
    run, _ = trainer(llama(num_hidden_layers=1), tmp_path)
    run.add_callback(Teacher(llama(num_hidden_layers=1)))
    with pytest.raises(UnsupportedError, match=r"Teacher.teachers \(LlamaForCausalLM, "):
        run.train()


def test_small_module_is_named_and_a_part_of_the_model_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = trainer(llama(num_hidden_layers=1), tmp_path)
    run.part = run.model.model  # type: ignore[attr-defined]  # as trainers keep one
    run.meters = {"loss": nn.BatchNorm1d(1)}  # type: ignore[attr-defined]  # as above
    run.train()
    assert coverage(caplog)[0].endswith("Not counted: Trainer.meters (BatchNorm1d, 24 B).")


def test_generation_is_refused_or_named(tmp_path: Path) -> None:
    run, _ = trainer(llama(num_hidden_layers=1), tmp_path)
    run.num_generations = 4  # type: ignore[attr-defined]  # as trl's GRPOTrainer
    with pytest.raises(UnsupportedError, match="Trainer generates in each step, and trains on what comes out"):
        run.train()
    del run.num_generations  # type: ignore[attr-defined]  # as above
    args = Seq2SeqTrainingArguments(**arguments(tmp_path, predict_with_generate=True))
    found = check_run(run, args, run.model, "AdamW")
    assert found.not_counted == ("generation in evaluation (predict_with_generate)",)


# --- Engines. ---


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"cp_size": 2, "dp_shard_size": 2},
            "cp_size=2 shares each row among ranks, which is not simulated. Use a fixed",
        ),
        ({"sp_size": 4, "sp_backend": "deepspeed"}, "sp_size=4 shares each row among ranks"),
        (
            {"tp_size": 2},
            "tp_size=2 shares each matrix among ranks, and the model was not loaded so. Use a fixed policy, such as "
            'HFCkptCallback("full"): none, full, attention, ffn, selective and selective_attention are exact to the',
        ),
    ],
)
def test_ranks_that_share_rows_or_matrices_are_refused(tmp_path: Path, sizes: dict[str, Any], message: str) -> None:
    # The oldest accelerate has none.
    from accelerate import ParallelismConfig

    run, _ = trainer(llama(num_hidden_layers=1), tmp_path)
    # accelerate refuses these sizes for one process, when it is made.
    run.args.parallelism_config = ParallelismConfig(**sizes)
    with pytest.raises(UnsupportedError) as raised:
        run.train()
    assert message in str(raised.value)


def test_transformers_own_sharding_of_experts_is_refused(tmp_path: Path) -> None:
    run, _ = trainer(llama(num_hidden_layers=1), tmp_path)
    run.model.config.distributed_config = SimpleNamespace(ep_size=2)
    with pytest.raises(UnsupportedError, match="ep_size=2 shares the experts among ranks"):
        check_run(run, run.args, run.model, "AdamW")


def test_transformers_own_pipeline_is_refused_under_any_policy(tmp_path: Path) -> None:
    run, _ = trainer(llama(num_hidden_layers=1), tmp_path)
    # As its loading leaves it.
    run.model._pp_stage = SimpleNamespace()  # type: ignore[union-attr]  # upstream
    with pytest.raises(UnsupportedError, match="what a stage receives has no way back for gradients"):
        check_run(run, run.args, run.model, "AdamW")


def test_precision_that_accelerate_alone_is_launched_with_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trainer(llama(num_hidden_layers=1), tmp_path)
    for precision in ("bf16", "fp8"):
        monkeypatch.setattr(run.accelerator.state, "_mixed_precision", precision)
        with pytest.raises(UnsupportedError, match=f"accelerate was launched with mixed precision {precision}, and"):
            check_run(run, run.args, run.model, "AdamW")


def test_layers_on_several_devices_are_refused(tmp_path: Path) -> None:
    run, _ = trainer(llama(num_hidden_layers=1), tmp_path)
    run.is_model_parallel = True
    with pytest.raises(UnsupportedError, match="the model's layers lie on several devices, and one is simulated"):
        check_run(run, run.args, run.model, "AdamW")


def test_offloading_of_an_engine_is_refused(tmp_path: Path) -> None:
    run, _ = trainer(llama(num_hidden_layers=1), tmp_path)
    run.args.deepspeed_plugin = SimpleNamespace(offload_optimizer_device="cpu")
    with pytest.raises(UnsupportedError, match="DeepSpeed's offloading to the host is not simulated"):
        check_run(run, run.args, run.model, "AdamW")
