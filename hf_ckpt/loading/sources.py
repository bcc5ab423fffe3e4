"""Where rows come from: the hub, local files, or the built-in data set (`pydoc_topics`).

Gives back `datasets.Dataset` objects as they were stored; knows nothing of tokenizers or of what a column means.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from hf_ckpt.errors import DataError, did_you_mean

BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
DEFAULT_SEED = 42

Paths = str | list[str]


@dataclass(frozen=True)
class RawSplits:
    """The rows to train on and, if the recipe asks for them, to evaluate on."""

    train: Dataset
    evaluation: Dataset | None

    def map(self, change: Callable[[Dataset], Dataset]) -> RawSplits:
        """Return what `change` makes of each."""
        return RawSplits(change(self.train), None if self.evaluation is None else change(self.evaluation))


def load_splits(section: Mapping[str, Any]) -> RawSplits:
    """Load what a recipe's `data` section names.

    `max_examples` takes the first rows of the training split before `eval_fraction` holds some of them out.

    `section`: the `data` section; `path` is a hub id, a local file, a list of local files of one type, a directory, or
    `pydoc_topics`. The training rows, and the evaluation rows if `eval_path`, `eval_split` or `eval_fraction` is given.
    """
    name, split = section.get("name"), section.get("split", "train")
    train = _load("path", section["path"], name, split)
    if (limit := section.get("max_examples")) is not None:
        train = train.select(range(min(limit, len(train))))
    if (fraction := section.get("eval_fraction")) is not None:
        num_eval = round(len(train) * fraction)
        if not 0 < num_eval < len(train):
            raise DataError(
                f"data.eval_fraction: {fraction} of {len(train)} training rows is {num_eval} rows; at least one is "
                "needed on each side. Choose another fraction, or use data.eval_split."
            )
        halves = train.train_test_split(test_size=num_eval, seed=section.get("seed", DEFAULT_SEED))
        return RawSplits(halves["train"], halves["test"])
    if "eval_path" in section:
        return RawSplits(train, _load("eval_path", section["eval_path"], None, section.get("eval_split", "train")))
    if "eval_split" in section:
        return RawSplits(train, _load("path", section["path"], name, section["eval_split"]))
    return RawSplits(train, None)


def _load(key: str, path: Paths, name: str | None, split: str) -> Dataset:
    rows = _load_built_in(split) if path == BUILT_IN else _load_stored(key, path, name, split)
    if len(rows) == 0:
        raise DataError(f'data.{key}: split "{split}" of {_shown(path)} has no rows. Choose another split or file.')
    return rows


def _load_built_in(split: str) -> Dataset:
    rows = built_in_splits()
    sizes = {name: len(part) for name, part in rows.items()}
    try:
        (wanted,) = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except ValueError as error:
        raise DataError(
            f'data.split: {BUILT_IN} has no split "{split}"; it has "train" and "test" '
            f'(a part of one is written "train[:50%]").{did_you_mean(split, sizes)}'
        ) from error
    return Dataset.from_list(rows[wanted.splitname][wanted.from_ : wanted.to])


def _load_stored(key: str, path: Paths, name: str | None, split: str) -> Dataset:
    arguments = _builder_arguments(key, path, name)
    try:
        # The readers of files log nothing: what they raise says the same once more.
        with log_level("datasets.packaged_modules", logging.CRITICAL + 1):
            return datasets.load_dataset(**arguments, split=split)
    # OSError: the hub's and the file system's errors; ValueError: unknown split, configuration or file type;
    # StopIteration: datasets 5.2, of a JSON lines file without a row.
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        is_local = "data_files" in arguments or Path(str(arguments["path"])).exists()
        raise DataError(_loading_failed(key, path, split, error, is_local=is_local)) from error


def _builder_arguments(key: str, path: Paths, name: str | None) -> dict[str, Any]:
    files = [Path(item).expanduser() for item in ([path] if isinstance(path, str) else path)]
    is_local = isinstance(path, list) or files[0].suffix in BUILDERS or path.startswith((".", "/", "~"))
    if not is_local and not files[0].exists():
        return {"path": path, "name": name}
    for file in files:
        if not file.exists():
            raise DataError(f"data.{key}: there is no file or directory {str(file)!r} in {str(Path.cwd())!r}.")
    if len(files) == 1 and files[0].is_dir():
        return {"path": str(files[0]), "name": name}
    builders = {BUILDERS.get(file.suffix) for file in files}
    if len(builders) != 1 or None in builders:
        found = ", ".join(sorted({file.suffix or file.name for file in files}))
        raise DataError(f"data.{key}: files of one type are needed ({', '.join(BUILDERS)}), found {found}.")
    return {"path": builders.pop(), "data_files": [str(file) for file in files]}


def _loading_failed(key: str, path: Paths, split: str, error: Exception, *, is_local: bool) -> str:
    # The builder wraps the error that says what is wrong with the file.
    reason = str(error.__cause__ or error).strip().split("\n")[0] or "there are no rows"
    asked = f'data.{key}: {_shown(path)} (split "{split}") cannot be loaded: {reason.rstrip(".!")}.'
    if is_local:
        return f"{asked} Check the file and the split's name."
    return (
        f"{asked} If the data set is private or gated, accept its terms on its page and run `hf auth login`; "
        f"without a connection, set data.{key} to a local file or directory."
    )


def _shown(path: Paths) -> str:
    return f'"{path}"' if isinstance(path, str) else ", ".join(f'"{item}"' for item in path)


@contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Set the level of a logger while this is entered."""
    logger = logging.getLogger(name)
    found = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(found)


# --- The data set that needs no network: passages of Python's own documentation, `pydoc_topics`. ---


BUILT_IN = "pydoc_topics"
EVAL_SHARE = 0.1
PASSAGE_CHARS = 480
MIN_PASSAGE_CHARS = 120
PROMPT_SHARE = 0.3

_UNDERLINE = re.compile(r"[*=\-~^]{3,}")


@dataclass(frozen=True)
class Passage:
    """A few consecutive paragraphs under one heading."""

    topic: str
    heading: str
    text: str


def built_in_splits() -> dict[str, list[dict[str, str]]]:
    """Return the data set's two splits, `train` and `test`, as rows of `prompt` and `completion`.

    The test rows come from topics of their own (about a tenth of the text). The documentation repeats whole paragraphs
    in several topics; each paragraph is used once, so no paragraph is in both splits. Rows are in a fixed random order.
    """
    from pydoc_data.topics import topics

    passages = list(_passages(topics))
    test_topics = _held_out(passages)
    rows: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for passage in passages:
        rows["test" if passage.topic in test_topics else "train"].append(_pair(passage))
    for split in rows.values():
        random.Random(0).shuffle(split)
    return rows


def _passages(topics: Mapping[str, str]) -> Iterator[Passage]:
    seen: set[str] = set()
    # Short topics first: the long ones quote them, and it is the quotation that has to go.
    for topic in sorted(topics, key=lambda name: (len(topics[name]), name)):
        yield from _cut(topic, _new_blocks(topics[topic], seen))


def _new_blocks(text: str, seen: set[str]) -> Iterator[tuple[bool, str]]:
    """Yield (is it a heading, block) for the blocks of a topic that no earlier topic had."""
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.split("\n")
        if len(lines) == 2 and _UNDERLINE.fullmatch(lines[1]):
            yield True, lines[0].strip()
        elif (words := " ".join(block.split())) not in seen and not words.startswith("Related help topics"):
            seen.add(words)
            yield False, block


def _cut(topic: str, blocks: Iterator[tuple[bool, str]]) -> Iterator[Passage]:
    heading, parts = topic, list[str]()
    for is_heading, block in blocks:
        for part in [] if is_heading else _pieces(block):
            if parts and len("\n\n".join([*parts, part])) > PASSAGE_CHARS:
                yield from _passage(topic, heading, parts)
                parts = []
            parts.append(part)
        if is_heading:
            yield from _passage(topic, heading, parts)
            heading, parts = block, []
    yield from _passage(topic, heading, parts)


def _pieces(block: str) -> Iterator[str]:
    """Cut a paragraph longer than a passage between two lines."""
    lines: list[str] = []
    for line in block.split("\n"):
        if lines and len("\n".join([*lines, line])) > PASSAGE_CHARS:
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def _passage(topic: str, heading: str, parts: list[str]) -> Iterator[Passage]:
    text = "\n\n".join(parts)
    if len(text) >= MIN_PASSAGE_CHARS:
        yield Passage(topic=topic, heading=heading, text=text)


def _held_out(passages: list[Passage]) -> set[str]:
    """Choose the test topics by a hash of their names, so that another Python version chooses nearly the same."""
    sizes: Counter[str] = Counter()
    for passage in passages:
        sizes[passage.topic] += len(passage.text)
    room = EVAL_SHARE * sum(sizes.values())
    chosen: set[str] = set()
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        if sizes[name] <= room:
            chosen.add(name)
            room -= sizes[name]
    return chosen


def _pair(passage: Passage) -> dict[str, str]:
    """Split a passage after about a third, before a space: the space begins the completion, as it begins tokens."""
    spaces = [match.start() for match in re.finditer(r"(?<=\S)\s", passage.text)]
    cut = min(spaces, key=lambda at: abs(at - PROMPT_SHARE * len(passage.text)))
    return {"prompt": f"{passage.heading}\n\n{passage.text[:cut]}", "completion": passage.text[cut:]}
