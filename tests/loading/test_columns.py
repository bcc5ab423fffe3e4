"""What the columns of a data set are taken to mean."""

from __future__ import annotations

from typing import Any

import pytest

from hf_ckpt.errors import DataError
from hf_ckpt.loading.row_formats import Conversation, PromptCompletion, Text, find_layout

pytestmark = pytest.mark.core

ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3", "text": "all of it"}
SHAREGPT = {"id": 1, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


@pytest.mark.parametrize(
    ("row", "section", "expected"),
    [
        ({"text": "a", "id": 1}, {}, Text("a")),
        ({"prompt": "a", "completion": "b"}, {}, PromptCompletion("a", "b")),
        ({"messages": MESSAGES, "prompt": "Hi"}, {}, Conversation(MESSAGES)),
        # Alpaca and ShareGPT
        (ALPACA, {}, PromptCompletion("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n", "3")),
        ({**ALPACA, "input": ""}, {}, PromptCompletion("### Instruction:\nAdd.\n\n### Response:\n", "3")),
        (
            {"instruction": "Add.", "output": "3"},
            {},
            PromptCompletion("### Instruction:\nAdd.\n\n### Response:\n", "3"),
        ),
        (SHAREGPT, {}, Conversation(MESSAGES)),
        ({"conversations": MESSAGES}, {}, Conversation(MESSAGES)),
        # What the recipe says goes first.
        (ALPACA, {"format": "text"}, Text("all of it")),
        (ALPACA, {"columns": {"text": "output"}}, Text("3")),
        (
            {"question": "a", "answer": "b"},
            {"columns": {"prompt": "question", "completion": "answer"}},
            PromptCompletion("a", "b"),
        ),
        ({"prompt": "a", "answer": "b"}, {"columns": {"completion": "answer"}}, PromptCompletion("a", "b")),
        ({"dialog": SHAREGPT["conversations"]}, {"columns": {"messages": "dialog"}}, Conversation(MESSAGES)),
        ({**ALPACA, "prompt": "a", "completion": "b"}, {}, PromptCompletion("a", "b")),
        # A file of one type of row with gaps
        ({"text": None}, {}, Text("")),
        ({"messages": None}, {}, Conversation([])),
        # Arrow fills the keys that only some messages have.
        (
            {"messages": [{"role": "user", "content": "Hi", "name": None}]},
            {},
            Conversation([{"role": "user", "content": "Hi"}]),
        ),
    ],
)
def test_row_is_read_as(row: dict[str, Any], section: dict[str, Any], expected: object) -> None:
    assert find_layout(list(row), section).read(row) == expected


@pytest.mark.parametrize(
    ("columns", "section", "message"),
    [
        (
            ["question", "answer"],
            {},
            'The data set\'s columns are "question", "answer", and they do not say what to train on. Map them in '
            "data.columns: {text: ...}, or {prompt: ..., completion: ...}, or {messages: ...}.",
        ),
        (["text"], {"format": "messages"}, "they do not say what to train on (data.format is messages)"),
        (["prompt", "answer"], {"columns": {"prompt": "prompt"}}, '(data.columns maps "prompt")'),
        (["a", "b"], {"columns": {"text": "a", "prompt": "b"}}, '(data.columns maps "prompt", "text")'),
        # Alpaca's names do not win over a mapping.
        (["instruction", "output", "other"], {"columns": {"completion": "other"}}, '(data.columns maps "completion")'),
        (
            ["question", "answer"],
            {"columns": {"prompt": "qestion"}},
            'data.columns.prompt is "qestion", but the columns are "question", "answer". Did you mean "question"?',
        ),
    ],
)
def test_unknown_layout_says_what_was_found(columns: list[str], section: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as raised:
        find_layout(columns, section)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": ["a"]}, 'column "text" holds list where text needs text'),
        ({"prompt": "a", "completion": 3}, 'column "completion" holds int where prompt_completion needs text'),
        ({"messages": "Hi"}, 'column "messages" does not hold a list of messages'),
        ({"messages": ["Hi"]}, 'column "messages" does not hold a list of messages'),
        ({"messages": [{"role": "user"}]}, 'a message has the keys "role"; role and content, or from and value'),
        ({"conversations": [{"from": "robot", "value": "Hi"}]}, 'a message is from "robot"; known are "human"'),
    ],
)
def test_value_that_does_not_fit_its_field_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as raised:
        find_layout(list(row), {}).read(row)
    assert message in str(raised.value)


def test_message_with_tool_calls_needs_no_content() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}]
    expected = Conversation([{"role": "assistant", "tool_calls": [{"name": "add"}]}])
    assert find_layout(["messages"], {}).read({"messages": messages}) == expected
