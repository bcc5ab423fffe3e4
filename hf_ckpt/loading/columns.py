"""What the columns of a data set mean: `text`, `prompt` and `completion`, or `messages`.

Turns a row, as stored, into one of three plain examples. Knows nothing of tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_ckpt.errors import DataError, did_you_mean

FIELDS = {"text": ("text",), "prompt_completion": ("prompt", "completion"), "messages": ("messages",)}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Text:
    """Text to continue, from its first word on."""

    text: str


@dataclass(frozen=True)
class PromptCompletion:
    """A text that is given, and the one that is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and `content`, as chat templates take them."""

    messages: list[dict[str, Any]]


Example = Text | PromptCompletion | Conversation


@dataclass(frozen=True)
class Layout:
    """How one data set's rows are read.

    Attributes:
        format: "text", "prompt_completion" or "messages".
        columns: our field's name -> the data set's column.
        is_alpaca: the prompt is put together from an instruction and an optional input.
    """

    format: str
    columns: Mapping[str, str]
    is_alpaca: bool = False

    def read(self, row: Row) -> Example:
        """Return the row's example.

        Raises:
            DataError: if a column holds something else than its field can be.
        """
        return _READERS[self.format](self, row)

    def _text(self, row: Row, field: str) -> str:
        value = row[self.columns[field]]
        if value is not None and not isinstance(value, str):
            raise DataError(
                f'column "{self.columns[field]}" holds {type(value).__name__} where {self.format} needs text. '
                "Name another column in data.columns, or another data.format."
            )
        return value or ""


def find_layout(columns: Sequence[str], section: Mapping[str, Any]) -> Layout:
    """Decide what the columns of a data set mean.

    `data.columns` and `data.format` go first; then the names are looked at, in this order: conversations (`messages`;
    ShareGPT's `conversations`), `prompt` and `completion`, Alpaca's `instruction` (`input`) `output`, and `text`.

    Args:
        columns: the data set's column names.
        section: the recipe's `data` section.

    Returns:
        The layout.

    Raises:
        DataError: if a named column is missing, or the names are not known.
    """
    mapped: Mapping[str, str] = section.get("columns", {})
    for field, column in mapped.items():
        if column not in columns:
            raise DataError(
                f'data.columns.{field} is "{column}", but the columns are {_listed(columns)}.'
                f"{did_you_mean(column, columns)}"
            )
    wanted = section.get("format")
    for layout in _candidates(columns, mapped):
        if wanted in (None, layout.format) and mapped.items() <= layout.columns.items():
            return layout
    raise DataError(_unknown_layout(columns, mapped, wanted))


def _candidates(columns: Sequence[str], mapped: Mapping[str, str]) -> list[Layout]:
    alpaca = {"instruction": "instruction", "completion": "output"}
    choices = [
        Layout("messages", {"messages": mapped.get("messages", "messages")}),
        Layout("messages", {"messages": "conversations"}),
        Layout("prompt_completion", {field: mapped.get(field, field) for field in FIELDS["prompt_completion"]}),
        Layout("prompt_completion", {**alpaca, "input": "input"}, is_alpaca=True),
        Layout("prompt_completion", alpaca, is_alpaca=True),
        Layout("text", {"text": mapped.get("text", "text")}),
    ]
    return [choice for choice in choices if set(choice.columns.values()) <= set(columns)]


def _unknown_layout(columns: Sequence[str], mapped: Mapping[str, str], wanted: str | None) -> str:
    given = [f"data.columns maps {_listed(sorted(mapped))}"] if mapped else []
    given += [f"data.format is {wanted}"] if wanted else []
    asked = f" ({', '.join(given)})" if given else ""
    return (
        f"The data set's columns are {_listed(columns)}, and they do not say what to train on{asked}. "
        "Map them in data.columns: {text: ...}, or {prompt: ..., completion: ...}, or {messages: ...}."
    )


def _read_text(layout: Layout, row: Row) -> Text:
    return Text(layout._text(row, "text"))


def _read_prompt_completion(layout: Layout, row: Row) -> PromptCompletion:
    if not layout.is_alpaca:
        return PromptCompletion(layout._text(row, "prompt"), layout._text(row, "completion"))
    sections = [("Instruction", layout._text(row, "instruction"))]
    if "input" in layout.columns:
        sections.append(("Input", layout._text(row, "input")))
    prompt = "".join(f"### {title}:\n{text}\n\n" for title, text in sections if text)
    return PromptCompletion(f"{prompt}### Response:\n", layout._text(row, "completion"))


def _read_messages(layout: Layout, row: Row) -> Conversation:
    column = layout.columns["messages"]
    messages = row[column] or []
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f'column "{column}" does not hold a list of messages. Name another column in data.columns.')
    return Conversation([_message(message) for message in messages])


def _message(stored: Mapping[str, Any]) -> dict[str, Any]:
    # Arrow gives every message the keys of all others, with None for those that it lacks.
    message = {key: value for key, value in stored.items() if value is not None}
    if "from" in message and "value" in message:
        return {"role": _role(message["from"]), "content": message["value"]}
    if "role" not in message or not message.keys() & {"content", "tool_calls"}:
        raise DataError(
            f"a message has the keys {_listed(sorted(message))}; role and content, or from and value, are needed."
        )
    return message


def _role(speaker: str) -> str:
    if speaker not in SHAREGPT_ROLES:
        raise DataError(
            f'a message is from "{speaker}"; known are {_listed(SHAREGPT_ROLES)}. '
            "Rename it in the data, or store the conversation as role and content."
        )
    return SHAREGPT_ROLES[speaker]


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"


_READERS: dict[str, Callable[[Layout, Row], Example]] = {
    "text": _read_text,
    "prompt_completion": _read_prompt_completion,
    "messages": _read_messages,
}
