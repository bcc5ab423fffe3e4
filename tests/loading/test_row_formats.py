"""Loss masks, token by token, for every format; one EOS at the end, always learned; truncation."""

from __future__ import annotations

from typing import Any

import pytest
from byte_tokenizer import (
    CHATML,
    EOS_AFTER_TURNS,
    MARKED_TURNS,
    REWRITES_EARLIER_TURNS,
    byte_tokenizer,
    learned_text,
)
from transformers import PreTrainedTokenizerBase

from hf_ckpt.errors import DataError
from hf_ckpt.loading.row_formats import DEFAULT_LOSS_ON, Encoder, Layout

pytestmark = pytest.mark.core

LAYOUTS = {
    "text": Layout("text", {"text": "text"}),
    "prompt_completion": Layout("prompt_completion", {"prompt": "prompt", "completion": "completion"}),
    "messages": Layout("messages", {"messages": "messages"}),
}


def encode(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], **options: Any) -> dict[str, Any]:
    layout = next(layout for layout in LAYOUTS.values() if set(layout.columns.values()) == set(row))
    options = {"loss_on": DEFAULT_LOSS_ON[layout.format], "max_length": 1000, **options}
    return Encoder(tokenizer, layout, **options)(row, 0)


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def with_template(template: str, **options: Any) -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer(**options)
    tokenizer.chat_template = template
    return tokenizer


TWO_TURNS = chat(("system", "S"), ("user", "Hi"), ("assistant", "Yes"), ("user", "So?"), ("assistant", "No"))


@pytest.mark.parametrize(
    ("row", "loss_on", "expected"),
    [
        ({"text": "abc"}, "all", "<s>[abc</s>]"),
        ({"prompt": "ab", "completion": " cd"}, "completion", "<s>ab[ cd</s>]"),
        ({"prompt": "ab", "completion": " cd"}, "all", "<s>[ab cd</s>]"),
        ({"prompt": "", "completion": "cd"}, "completion", "<s>[cd</s>]"),
        # Written by hand, EOS is not written twice.
        ({"text": "abc</s>"}, "all", "<s>[abc</s>]"),
        ({"prompt": "ab", "completion": "cd</s>"}, "completion", "<s>ab[cd</s>]"),
        # An EOS inside the prompt belongs to the prompt.
        ({"prompt": "ab</s>", "completion": "cd"}, "completion", "<s>ab</s>[cd</s>]"),
        # White space before EOS is text, and stays.
        ({"text": "abc\n"}, "all", "<s>[abc\n</s>]"),
    ],
)
def test_loss_mask_of_text_and_pairs(row: dict[str, str], loss_on: str, expected: str) -> None:
    tokenizer = byte_tokenizer()
    assert learned_text(tokenizer, encode(tokenizer, row, loss_on=loss_on)) == expected


def test_tokenizer_that_closes_texts_itself_closes_the_example_once() -> None:
    tokenizer = byte_tokenizer(adds_eos=True)
    pair = encode(tokenizer, {"prompt": "ab", "completion": "cd"})
    assert learned_text(tokenizer, pair) == "<s>ab[cd</s>]"
    assert learned_text(tokenizer, encode(tokenizer, {"text": "ab"})) == "<s>[ab</s>]"


def test_tokenizer_without_bos_masks_the_first_token_which_nothing_predicts() -> None:
    tokenizer = byte_tokenizer(adds_bos=False)
    encoded = encode(tokenizer, {"text": "abc"})
    assert learned_text(tokenizer, encoded) == "a[bc</s>]"
    assert encoded["num_loss_tokens"] == 3


def test_completion_continues_the_prompts_own_tokens_when_a_token_would_reach_over() -> None:
    tokenizer = byte_tokenizer(merges=(("b", "c"),))
    straddling = encode(tokenizer, {"prompt": "ab", "completion": "cd"})
    assert tokenizer.convert_ids_to_tokens(straddling["input_ids"]) == ["<s>", "a", "b", "c", "d", "</s>"]
    assert learned_text(tokenizer, straddling) == "<s>ab[cd</s>]"


def test_completion_is_tokenised_with_its_prompt_when_the_boundary_is_kept() -> None:
    tokenizer = byte_tokenizer(merges=(("b", "c"),))
    encoded = encode(tokenizer, {"prompt": "a", "completion": "bcd"})
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == ["<s>", "a", "bc", "d", "</s>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML,
            "<system>S</system>\n<user>Hi</user>\n<assistant>[Yes</assistant>\n]<user>So?</user>\n<assistant>"
            "[No</assistant>\n</s>]",
        ),
        # The template's own EOS is the last token: the line break after it is cut, and no second EOS is written.
        (EOS_AFTER_TURNS, "<system>S</s>\n<user>Hi</s>\n<assistant>[Yes</s>\n]<user>So?</s>\n<assistant>[No</s>]"),
        (MARKED_TURNS, "<system>S|<user>Hi|<assistant>[Yes]|<user>So?|<assistant>[No]|[</s>]"),
    ],
)
def test_assistant_turns_alone_are_learned(template: str, expected: str) -> None:
    tokenizer = with_template(template)
    assert learned_text(tokenizer, encode(tokenizer, TWO_TURNS)) == expected


def test_whole_conversation_is_learned_on_request() -> None:
    tokenizer = with_template(EOS_AFTER_TURNS)
    row = chat(("user", "Hi"), ("assistant", "Yes"), ("user", "So"))
    assert (
        learned_text(tokenizer, encode(tokenizer, row, loss_on="all"))
        == "<[user>Hi</s>\n<assistant>Yes</s>\n<user>So</s>]"
    )


def test_messages_after_the_last_assistant_turn_are_left_out() -> None:
    tokenizer = with_template(EOS_AFTER_TURNS)
    row = chat(("user", "Hi"), ("assistant", "Yes"), ("user", "So?"))
    assert learned_text(tokenizer, encode(tokenizer, row)) == "<user>Hi</s>\n<assistant>[Yes</s>]"


def test_conversation_opened_by_the_assistant_is_learned_from_its_start() -> None:
    tokenizer = with_template(EOS_AFTER_TURNS)
    row = chat(("assistant", "Hi"), ("user", "So"), ("assistant", "Yes"))
    assert learned_text(tokenizer, encode(tokenizer, row)) == "<[assistant>Hi</s>\n]<user>So</s>\n<assistant>[Yes</s>]"


def test_template_that_rewrites_earlier_turns_is_refused_with_the_place() -> None:
    tokenizer = with_template(REWRITES_EARLIER_TURNS)
    with pytest.raises(DataError) as raised:
        encode(tokenizer, TWO_TURNS)
    message = str(raised.value)
    assert message.startswith("Row 0: the assistant's turns cannot be distinguished from the rest")
    assert "<assistant><think></think>Yes'... at first" in message
    assert "<assistant>Yes<user>So?" in message
    assert "data.chat_template" in message
    assert "data.loss_on to all" in message


def test_template_that_prompts_for_what_the_answer_lacks_is_refused() -> None:
    tokenizer = with_template(CHATML.replace("prompt %}<assistant>", "prompt %}<assistant><think>"))
    with pytest.raises(DataError, match="cannot be distinguished from the rest"):
        encode(tokenizer, TWO_TURNS)


def test_refusal_of_the_template_itself_names_the_roles() -> None:
    tokenizer = with_template("{{ raise_exception('No system, please') }}")
    with pytest.raises(
        DataError, match=r"Row 0: the chat template refuses the conversation: No system, please\. .*system"
    ):
        encode(tokenizer, TWO_TURNS)


@pytest.mark.parametrize("num_tokens", [1, 3, 6, 7])
def test_truncation_keeps_the_head_and_no_eos(num_tokens: int) -> None:
    tokenizer = byte_tokenizer()
    encoded = encode(tokenizer, {"prompt": "ab", "completion": "cde"}, max_length=num_tokens)
    whole = encode(tokenizer, {"prompt": "ab", "completion": "cde"})
    assert encoded["input_ids"] == whole["input_ids"][:num_tokens]
    assert encoded["labels"] == whole["labels"][:num_tokens]
    assert encoded["is_truncated"] is (num_tokens < 7)
    assert encoded["num_loss_tokens"] == max(0, num_tokens - 3)


@pytest.mark.parametrize(
    "row",
    [
        {"text": ""},
        {"text": " \n"},
        {"text": None},
        {"prompt": "ab", "completion": ""},
        {"prompt": "ab", "completion": None},
        {"messages": []},
        {"messages": None},
        chat(("user", "Hi")),
    ],
)
def test_row_with_nothing_to_learn_has_no_tokens(row: dict[str, Any]) -> None:
    tokenizer = with_template(CHATML)
    encoded = encode(tokenizer, row)
    assert encoded == {"input_ids": [], "labels": [], "num_tokens": 0, "num_loss_tokens": 0, "is_truncated": False}


def test_error_in_a_row_has_its_number() -> None:
    encoder = Encoder(byte_tokenizer(), LAYOUTS["text"], "all", 10)
    with pytest.raises(DataError, match=r'^Row 7: column "text" holds int where text needs text'):
        encoder({"text": 3}, 7)
