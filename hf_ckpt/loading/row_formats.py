"""Formats of rows (text, prompt and completion, conversation), and their tokens: what is learned, and where one ends.

Notes, cited where they matter:

[boundary] A prompt is tokenised as it is when the model is asked to continue it. If the tokens of prompt and completion
together begin with exactly those, they are used; where a token would reach over the boundary, the completion is
tokenised on its own. Either way each token belongs to one side, so the loss mask is exact, and the model is trained on
the prompt it will see. Offsets are not used: a token may start after the boundary and still depend on what follows it.

[end] An example ends with one EOS, which is always learned. A truncated one does not: it did not end there.

[first] No position predicts the first token. Its label is -100, so that counting labels counts predictions.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_ckpt.errors import DataError, did_you_mean

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
    """How one data set's rows are read."""

    format: str  # "text", "prompt_completion" or "messages".
    columns: Mapping[str, str]  # Our field's name -> the data set's column.
    is_alpaca: bool = False  # The prompt is put together from an instruction and an optional input.

    def read(self, row: Row) -> Example:
        """Return the row's example."""
        if self.format == "text":
            return Text(self._text(row, "text"))
        return self._conversation(row) if self.format == "messages" else self._prompt_completion(row)

    def _prompt_completion(self, row: Row) -> PromptCompletion:
        if not self.is_alpaca:
            return PromptCompletion(self._text(row, "prompt"), self._text(row, "completion"))
        sections = [("Instruction", self._text(row, "instruction"))]
        if "input" in self.columns:
            sections.append(("Input", self._text(row, "input")))
        prompt = "".join(f"### {title}:\n{text}\n\n" for title, text in sections if text)
        return PromptCompletion(f"{prompt}### Response:\n", self._text(row, "completion"))

    def _conversation(self, row: Row) -> Conversation:
        column = self.columns["messages"]
        messages = row[column] or []
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise DataError(f'column "{column}" does not hold a list of messages. Name another column in data.columns.')
        return Conversation([_message(message) for message in messages])

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
    """
    mapped: Mapping[str, str] = section.get("columns", {})
    for name, column in mapped.items():
        if column not in columns:
            raise DataError(
                f'data.columns.{name} is "{column}", but the columns are {_listed(columns)}.'
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
        Layout("prompt_completion", {field: mapped.get(field, field) for field in ("prompt", "completion")}),
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


IGNORED = -100
DEFAULT_LOSS_ON = {"text": "all", "prompt_completion": "completion", "messages": "assistant"}

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Tokens:
    """Token ids, and which of them are learned; both of length S."""

    ids: list[int]
    is_learned: list[bool]

    def then(self, ids: list[int], is_learned: bool) -> Tokens:
        """Return these tokens, extended to `ids`, which begin with them."""
        return Tokens(ids, self.is_learned + [is_learned] * (len(ids) - len(self.ids)))


_NONE = Tokens([], [])


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of token ids exactly as it is, special tokens included."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)  # a list only for a list of lists
    return text


def _code_hash() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@dataclass(frozen=True)
class Encoder:
    """Turns rows into token ids and labels; given to `Dataset.map`."""

    tokenizer: PreTrainedTokenizerBase  # Has an EOS token, and a chat template if the layout is messages.
    layout: Layout  # How the rows are read.
    loss_on: str  # "completion", "assistant" or "all".
    max_length: int  # Tokens kept of an example, from its head.
    code: str = field(default_factory=_code_hash, init=False)
    """Hash of the code that encodes. `datasets` finds cached rows by the pickled encoder, which names its class and
    does not hold it; rows encoded by other code must not be found."""

    def __call__(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Encode one row.

        `input_ids` and `labels` of length S <= max_length, `num_tokens`, `num_loss_tokens`, and `is_truncated`. An
        empty example has no tokens.
        """
        try:
            tokens = self._encode(self.layout.read(row))
        except DataError as error:
            raise DataError(f"Row {index}: {error}") from error
        ids = tokens.ids[: self.max_length]
        labels = [id_ if learned else IGNORED for id_, learned in zip(ids, tokens.is_learned, strict=False)]
        labels[:1] = [IGNORED] * len(labels[:1])  # note [first]
        return {
            "input_ids": ids,
            "labels": labels,
            "num_tokens": len(ids),
            "num_loss_tokens": sum(label != IGNORED for label in labels),
            "is_truncated": len(ids) < len(tokens.ids),
        }

    def learned_roles(self, row: Mapping[str, Any]) -> list[str]:
        """Return who else than the assistant is learned from, in a row where the chat template marks what is.

        What they say is replaced by words that stand nowhere else, and those are looked for in what is learned.
        """
        example = self.layout.read(row)
        if not isinstance(example, Conversation) or self.loss_on == "all" or not self._marks_turns():
            return []
        roles = {message["role"] for message in example.messages} - {"assistant"}
        words = {role: f"zebras count {number} clouds" for number, role in enumerate(sorted(roles))}
        said = [{**message, "content": words.get(message["role"], "yes")} for message in example.messages]
        try:
            tokens = self._encode_conversation(Conversation(said))
        except DataError:
            # A template that looks into what is said.
            return []
        learned = decode(
            self.tokenizer, [id_ for id_, is_learned in zip(tokens.ids, tokens.is_learned, strict=True) if is_learned]
        )
        return [role for role, text in words.items() if text in learned]

    def _encode(self, example: Example) -> Tokens:
        if isinstance(example, Text):
            return self._end(_NONE.then(self._ids(example.text), True)) if example.text.strip() else _NONE
        if isinstance(example, PromptCompletion):
            return self._encode_prompt_completion(example)
        return self._encode_conversation(example)

    def _encode_prompt_completion(self, example: PromptCompletion) -> Tokens:
        if not example.completion.strip():
            return _NONE
        prompt = _NONE.then(self._ids(example.prompt), self.loss_on == "all")
        whole = self._extend(prompt.ids, example.prompt, example.completion, add_special_tokens=True)
        return self._end(prompt.then(whole, True))

    def _encode_conversation(self, example: Conversation) -> Tokens:
        messages = example.messages
        if self.loss_on == "all":
            if not messages:
                return _NONE
            return self._end(_NONE.then(list(self._apply_template(messages, return_dict=True)["input_ids"]), True))
        # What follows the last assistant turn is neither learned nor seen by anything that is.
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        if not messages:
            return _NONE
        if not self._marks_turns():
            return self._end(self._grown_turns(messages))
        encoded = self._apply_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return self._end(Tokens(list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]))

    def _marks_turns(self) -> bool:
        return _GENERATION_BLOCK.search(self.tokenizer.get_chat_template()) is not None

    def _grown_turns(self, messages: list[dict[str, Any]]) -> Tokens:
        """Find the assistant's turns by rendering the conversation up to each one, and with it."""
        tokens, text = _NONE, ""
        for rendered, is_learned in self._prefixes(messages):
            if not rendered.startswith(text):
                raise DataError(_prefixes_disagree(text, rendered))
            ids = self._extend(tokens.ids, text, rendered[len(text) :], add_special_tokens=False)
            tokens, text = tokens.then(ids, is_learned), rendered
        return tokens

    def _prefixes(self, messages: list[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                # A conversation that the assistant opens has nothing before it to render.
                if at:
                    yield self._apply_template(messages[:at], tokenize=False, add_generation_prompt=True), False
                yield self._apply_template(messages[: at + 1], tokenize=False), True

    def _apply_template(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except TemplateError as error:
            raise DataError(
                f"the chat template refuses the conversation: {error}. Its roles are "
                f"{', '.join(message['role'] for message in messages)}. Change the data, or set data.chat_template."
            ) from error

    def _extend(self, ids: list[int], text: str, addition: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text and its continuation; they begin with the text's own `ids`, note [boundary]."""
        together = self._ids(text + addition, add_special_tokens=add_special_tokens)
        if together[: len(ids)] == ids:
            return together
        return ids + self._ids(addition, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        eos = self.tokenizer.eos_token_id
        # A tokenizer may add EOS by itself, to a prompt too. An empty text would not tell BOS from EOS.
        if add_special_tokens and ids[-1:] == [eos] and self.tokenizer.encode("a")[-1] == eos:
            return ids[:-1]
        return ids

    def _end(self, tokens: Tokens) -> Tokens:
        """Close an example with one learned EOS, note [end].

        Templates often write EOS and a line break after each turn; the line break is cut.
        """
        ids, eos = tokens.ids, self.tokenizer.eos_token_id
        last = len(ids)
        while last and ids[last - 1] != eos and not decode(self.tokenizer, ids[last - 1 : last]).strip():
            last -= 1
        if not last or ids[last - 1] != eos:
            return tokens.then([*ids, eos], True)
        return Tokens(ids[:last], [*tokens.is_learned[: last - 1], True])


def _prefixes_disagree(shorter: str, longer: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    around = slice(max(0, at - 20), at + 40)
    return (
        "the assistant's turns cannot be distinguished from the rest: the chat template writes the same messages as "
        f"...{shorter[around]!r}... at first, and as ...{longer[around]!r}... when more follows. "
        "Set data.chat_template to one that marks them with {% generation %}, or data.loss_on to all."
    )
