"""Where rows come from: the hub, local files, or the built-in data set (`built_in_data`).

Gives back `datasets.Dataset` objects as they were stored; knows nothing of tokenizers or of what a column means.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from hf_ckpt.errors import DataError, did_you_mean
from hf_ckpt.loading.built_in_data import NAME, splits
from hf_ckpt.loading.log_level import log_level

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
        return _hold_out(train, fraction, section.get("seed", DEFAULT_SEED))
    if "eval_path" in section:
        return RawSplits(train, _load("eval_path", section["eval_path"], None, section.get("eval_split", "train")))
    if "eval_split" in section:
        return RawSplits(train, _load("path", section["path"], name, section["eval_split"]))
    return RawSplits(train, None)


def _hold_out(rows: Dataset, fraction: float, seed: int) -> RawSplits:
    num_eval = round(len(rows) * fraction)
    if not 0 < num_eval < len(rows):
        raise DataError(
            f"data.eval_fraction: {fraction} of {len(rows)} training rows is {num_eval} rows; at least one is needed "
            "on each side. Choose another fraction, or use data.eval_split."
        )
    halves = rows.train_test_split(test_size=num_eval, seed=seed)
    return RawSplits(halves["train"], halves["test"])


def _load(key: str, path: Paths, name: str | None, split: str) -> Dataset:
    rows = _load_built_in(split) if path == NAME else _load_stored(key, path, name, split)
    if len(rows) == 0:
        raise DataError(f'data.{key}: split "{split}" of {_shown(path)} has no rows. Choose another split or file.')
    return rows


def _load_built_in(split: str) -> Dataset:
    rows = splits()
    sizes = {name: len(part) for name, part in rows.items()}
    try:
        (wanted,) = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except ValueError as error:
        raise DataError(
            f'data.split: {NAME} has no split "{split}"; it has "train" and "test" '
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
    return {"path": _builder(key, files), "data_files": [str(file) for file in files]}


def _builder(key: str, files: list[Path]) -> str:
    builders = {BUILDERS.get(file.suffix) for file in files}
    if len(builders) != 1 or (builder := builders.pop()) is None:
        found = ", ".join(sorted({file.suffix or file.name for file in files}))
        raise DataError(f"data.{key}: files of one type are needed ({', '.join(BUILDERS)}), found {found}.")
    return builder


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
