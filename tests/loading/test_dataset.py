"""`prepare`: counts, batches, the printed example, the sample prompt, and data with nothing to learn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import CHATML, EOS_AFTER_TURNS, MARKED_TURNS, byte_tokenizer, learned_text
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_ckpt.errors import DataError
from hf_ckpt.loading import row_formats
from hf_ckpt.loading.dataset import PreparedData, describe_example, prepare, sample_prompt_ids
from hf_ckpt.loading.row_formats import decode

pytestmark = pytest.mark.core

PAIRS = [
    {"prompt": "ab", "completion": "cd"},
    {"prompt": "ab", "completion": ""},
    {"prompt": "abcdefgh", "completion": "i"},
    {"prompt": "a", "completion": "bcdefghi"},
]
CHAT = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}]


@pytest.fixture
def section_of(tmp_path: Path) -> Any:
    """Return a function that stores rows and makes a `data` section for them."""

    def build(rows: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": str(path), **keys}

    return build


def texts(prepared: PreparedData) -> list[str]:
    tokenizer = byte_tokenizer()
    return [learned_text(tokenizer, row) for row in prepared.train]


def test_counts_of_a_data_set_in_which_every_fate_occurs(section_of: Any) -> None:
    prepared = prepare(section_of(PAIRS, max_length=8), byte_tokenizer())
    counts = prepared.counts
    assert texts(prepared) == ["<s>ab[cd</s>]", "<s>a[bcdefg]"]
    assert (counts.num_rows, counts.num_examples, counts.num_empty, counts.num_without_loss) == (4, 2, 1, 1)
    assert (counts.num_tokens, counts.num_loss_tokens, counts.longest) == (14, 9, 8)
    assert (counts.num_truncated, counts.share_truncated) == (2, 0.5)
    assert counts.lengths == [6, 8]
    assert counts.summary() == (
        "2 examples, 14 tokens, 9 of them learned, longest 8, truncated 50.0%; "
        "examples left out: 1 empty, 1 with nothing to learn"
    )


def test_data_sets_hold_tokens_and_labels_only(section_of: Any) -> None:
    prepared = prepare(section_of(PAIRS, eval_split="train[:1]"), byte_tokenizer())
    assert prepared.train.column_names == ["input_ids", "labels"]
    assert prepared.evaluation is not None
    assert prepared.evaluation.to_list() == prepared.train.select([0]).to_list()
    (labels,) = prepared.evaluation["labels"]
    assert sum(label != -100 for label in labels) == 3


def test_evaluation_is_absent_when_the_recipe_names_none(section_of: Any) -> None:
    prepared = prepare(section_of(PAIRS), byte_tokenizer())
    assert prepared.evaluation is None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad_token", [None, "<pad>"])
def test_padded_batch_learns_eos_and_masks_padding(section_of: Any, side: str, pad_token: str | None) -> None:
    tokenizer = byte_tokenizer(pad_token=pad_token)
    tokenizer.padding_side = side
    prepared = prepare(section_of([PAIRS[0], PAIRS[3]]), tokenizer)
    batch = prepared.collator([prepared.train[0], prepared.train[1]])
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert (pad == eos) is (pad_token is None)
    # Padding is on the right whatever generation wants, since positions are counted from the row's start.
    assert batch["input_ids"][0, 5:].tolist() == [eos] + [pad] * 5
    assert batch["labels"][0].tolist() == [-100] * 3 + batch["input_ids"][0, 3:5].tolist() + [eos] + [-100] * 5
    assert batch["attention_mask"].tolist() == [[1] * 6 + [0] * 5, [1] * 11]
    assert batch["labels"][1, -1] == eos
    assert tokenizer.padding_side == side


def test_packed_batch_is_one_row_with_restarting_positions(section_of: Any) -> None:
    prepared = prepare(section_of([PAIRS[0], PAIRS[2]], packing=True), byte_tokenizer())
    batch = prepared.collator([prepared.train[0], prepared.train[1]])
    assert batch["position_ids"].tolist() == [[*range(6), *range(11)]]
    assert batch["input_ids"].tolist() == [prepared.train[0]["input_ids"] + prepared.train[1]["input_ids"]]
    assert batch["labels"].tolist() == [prepared.train[0]["labels"] + prepared.train[1]["labels"]]
    assert "attention_mask" not in batch


def test_trainer_has_the_same_losses_packed_and_padded(section_of: Any, tmp_path: Path) -> None:
    def losses(*, packing: bool) -> list[float]:
        rows = [{"prompt": "ab" * (at % 3), "completion": "xyz" * (at % 4 + 1)} for at in range(12)]
        tokenizer = byte_tokenizer()
        prepared = prepare(section_of(rows, eval_split="train[:5]", packing=packing), tokenizer)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=3,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=5,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            LlamaForCausalLM(config),
            arguments,
            data_collator=prepared.collator,
            train_dataset=prepared.train,
            eval_dataset=prepared.evaluation,
        )
        trainer.train()
        trainer.model.config.use_cache = True
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*logged, trainer.evaluate()["eval_loss"]]

    padded, packed = losses(packing=False), losses(packing=True)
    assert len(packed) == 4
    # The same sums over rows of other lengths: float32 rounding, three steps of it.
    assert packed == pytest.approx(padded, rel=1e-4)


def test_chat_is_learned_by_the_recipes_template(section_of: Any) -> None:
    prepared = prepare(section_of(CHAT, chat_template=EOS_AFTER_TURNS), byte_tokenizer())
    assert texts(prepared) == ["<user>Hi</s>\n<assistant>[Yes</s>]"]


def test_conversations_without_a_chat_template_are_refused(section_of: Any) -> None:
    with pytest.raises(DataError, match=r"has no chat template\. Set data\.chat_template to a template or the path"):
        prepare(section_of(CHAT), byte_tokenizer())


@pytest.mark.parametrize(
    ("rows", "loss_on", "message"),
    [
        (
            [{"text": "a"}],
            "completion",
            "data.loss_on is completion, but the data set holds text (columns text). Use all.",
        ),
        (PAIRS, "assistant", "holds prompt_completion (columns prompt, completion). Use all or completion."),
        (CHAT, "completion", "holds messages (columns messages). Use all or assistant."),
    ],
)
def test_loss_on_what_the_data_does_not_have_is_refused(section_of: Any, rows: Any, loss_on: str, message: str) -> None:
    with pytest.raises(DataError) as raised:
        prepare(section_of(rows, loss_on=loss_on, chat_template=CHATML), byte_tokenizer())
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        ([{"text": ""}, {"text": " "}], {}, "None of the 2 training examples has a token to learn: 2 are empty."),
        ([PAIRS[1]], {}, "None of the 1 training examples has a token to learn: 1 are empty."),
        ([{"messages": CHAT[0]["messages"][:1]}], {}, "1 are empty."),
        (
            PAIRS[2:3],
            {"max_length": 5},
            "1 have nothing for data.loss_on completion; 1 are truncated at data.max_length 5. "
            "Check data.columns and data.loss_on, or raise data.max_length.",
        ),
        (
            [{"text": "abc"}],
            {"max_length": 1},
            "1 have nothing for data.loss_on all; 1 are truncated at data.max_length 1.",
        ),
    ],
)
def test_data_with_nothing_to_learn_from_is_refused(section_of: Any, rows: Any, keys: Any, message: str) -> None:
    with pytest.raises(DataError) as raised:
        prepare(section_of(rows, chat_template=CHATML, **keys), byte_tokenizer())
    assert message in str(raised.value)


def test_evaluation_with_nothing_to_learn_from_is_refused(section_of: Any) -> None:
    with pytest.raises(DataError, match=r"^None of the 1 evaluation examples has a token to learn"):
        prepare(section_of(PAIRS, eval_split="train[1:2]"), byte_tokenizer())


def test_error_in_a_row_reaches_the_caller_with_its_number(section_of: Any) -> None:
    rows = [{"conversations": [{"from": speaker, "value": "Hi"}]} for speaker in ("human", "gpt", "robot")]
    with pytest.raises(DataError, match=r'^Row 2: a message is from "robot"'):
        prepare(section_of(rows, chat_template=CHATML), byte_tokenizer())


def test_tokenised_rows_are_found_again(section_of: Any) -> None:
    tokenizer = byte_tokenizer()
    section = section_of(PAIRS)
    first = prepare(section, tokenizer)
    # Using a tokenizer changes its state, which must not change what is found.
    tokenizer(["abc", "d"], padding=True, truncation=True, max_length=2)
    again = prepare(section, tokenizer)
    assert first.train.cache_files == again.train.cache_files != []
    shorter = prepare({**section, "max_length": 5}, tokenizer)
    assert shorter.train.cache_files != first.train.cache_files


def test_rows_tokenised_by_other_code_are_not_found(section_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    section = section_of(PAIRS)
    first = prepare(section, byte_tokenizer())
    monkeypatch.setattr(row_formats.Path, "read_bytes", lambda _path: b"changed")
    assert prepare(section, byte_tokenizer()).train.cache_files != first.train.cache_files


def test_preparing_leaves_no_files_in_the_working_directory(
    section_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(section_of(PAIRS, eval_fraction=0.5), byte_tokenizer())
    assert [path.name for path in tmp_path.rglob("*")] == ["rows.jsonl"]


def test_rows_are_tokenised_by_several_processes(section_of: Any) -> None:
    section = section_of(PAIRS, max_length=8)
    alone = prepare(section, byte_tokenizer())
    assert prepare({**section, "num_proc": 2, "split": "train[:4]"}, byte_tokenizer()).counts == alone.counts


def test_described_example_marks_every_line(section_of: Any) -> None:
    tokenizer = byte_tokenizer()
    prepared = prepare(section_of([{"prompt": "Q: why\nA:", "completion": " so\nit is"}]), tokenizer)
    assert describe_example(prepared, tokenizer) == (
        "First of 1 training examples: 20 tokens, 10 learned\n"
        "  masked | <s>Q: why\n"
        "  masked | A:\n"
        "  learned|  so\n"
        "  learned| it is</s>"
    )


def test_described_example_that_is_learned_whole_is_not_cut_at_its_first_token(section_of: Any) -> None:
    tokenizer = byte_tokenizer()
    prepared = prepare(section_of([{"text": "abc"}]), tokenizer)
    assert describe_example(prepared, tokenizer).splitlines()[1:] == ["  learned| <s>abc</s>"]


def test_described_example_is_shortened(section_of: Any) -> None:
    tokenizer = byte_tokenizer()
    prepared = prepare(section_of([{"text": "\n".join(map(str, range(100)))}]), tokenizer)
    lines = describe_example(prepared, tokenizer).splitlines()
    assert len(lines) == 26
    assert lines[17] == "          (76 lines left out)"
    assert (lines[16], lines[18], lines[-1]) == ("  learned| 15", "  learned| 92", "  learned| 99</s>")


@pytest.mark.parametrize(
    ("rows", "keys", "expected"),
    [
        ([PAIRS[0], PAIRS[3]], {"eval_split": "train[1:]"}, "<s>a"),
        ([PAIRS[0]], {}, "<s>ab"),
        (CHAT, {"chat_template": CHATML}, "<user>Hi</user>\n<assistant>"),
        # All is learned: the first quarter of ten tokens.
        ([{"text": "abcdefgh"}], {}, "<s>a"),
        (PAIRS[:1], {"loss_on": "all"}, "<s>"),
    ],
)
def test_sample_prompt_ends_where_learning_begins(section_of: Any, rows: Any, keys: Any, expected: str) -> None:
    tokenizer = byte_tokenizer()
    prepared = prepare(section_of(rows, **keys), tokenizer)
    assert decode(tokenizer, sample_prompt_ids(prepared)) == expected
    assert tokenizer.decode(sample_prompt_ids(prepared)) == expected


def test_sample_prompt_is_a_short_one(section_of: Any) -> None:
    tokenizer = byte_tokenizer()
    rows = [{"prompt": "x" * length, "completion": "y"} for length in (20, 12, 3, 9, 15)]
    # Three letters would say nothing.
    assert decode(tokenizer, sample_prompt_ids(prepare(section_of(rows), tokenizer))) == "<s>" + "x" * 9


def test_built_in_data_set_is_prepared() -> None:
    section = {"path": "pydoc_topics", "split": "train[:50]", "eval_split": "test[:5]", "max_length": 400}
    prepared = prepare(section, byte_tokenizer())
    assert (prepared.counts.num_examples, prepared.counts.num_empty, prepared.counts.num_without_loss) == (50, 0, 0)
    assert 0.5 < prepared.counts.num_loss_tokens / prepared.counts.num_tokens < 0.8
    assert 0 < prepared.counts.share_truncated < 1


# --- What is probably not meant so. ---

MARKS_ALL = (
    "{% for message in messages %}<{{ message['role'] }}>{% generation %}{{ message['content'] }}{% endgeneration %}|"
    "{% endfor %}"
)


@pytest.mark.parametrize(("max_length", "warned"), [(100, False), (7, False), (5, True)])
def test_rows_that_are_mostly_truncated_are_warned_of(section_of: Any, max_length: int, warned: bool) -> None:
    prepared = prepare(section_of([PAIRS[0], PAIRS[3]], max_length=max_length), byte_tokenizer())
    text = (
        "100% of the training examples are longer than data.max_length 5 and are cut there: what follows is not seen, "
        "nor is how an example ends. Raise data.max_length (hf-ckpt estimate says what fits), or split them."
    )
    assert prepared.warnings == ((text,) if warned else ())


@pytest.mark.parametrize(
    ("template", "loss_on", "roles"),
    [
        (MARKED_TURNS, "assistant", ""),
        (CHATML, "assistant", ""),
        (MARKS_ALL, "all", ""),
        (MARKS_ALL, "assistant", "system and user"),
        (
            MARKS_ALL.replace("{% generation %}", "{% if message.role != 'system' %}{% generation %}").replace(
                "{% endgeneration %}", "{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
            ),
            "assistant",
            "user",
        ),
    ],
)
def test_generation_block_around_the_turns_of_others_is_warned_of(
    section_of: Any, template: str, loss_on: str, roles: str
) -> None:
    turns = [{"role": "system", "content": "Be kind"}, *CHAT[0]["messages"]]
    section = section_of([{"messages": turns}], chat_template=template, loss_on=loss_on)
    prepared = prepare(section, byte_tokenizer())
    starts = (
        [f"The chat template's {{% generation %}} block takes in the turns of {roles}, so that they"] if roles else []
    )
    assert [warning[: len(start)] for warning, start in zip(prepared.warnings, starts, strict=True)] == starts
