"""Loading rows: local files of each type, the built-in data set, splits, and what cannot be loaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from hf_ckpt.errors import DataError
from hf_ckpt.loading.sources import load_splits

pytestmark = [
    pytest.mark.core,
    # datasets 4.0 leaves CSV files open.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning"),
]

ROWS = [{"prompt": f"p{at}", "completion": f"c{at}"} for at in range(10)]


def write(path: Path, rows: list[dict[str, str]] = ROWS) -> str:
    """Store rows in the format of the path's ending."""
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(rows))
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".parquet":
            Dataset.from_list(rows).to_parquet(path)
        case ".csv":
            path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]))
        case ".txt":
            path.write_text("\n".join(row["prompt"] for row in rows))
    return str(path)


def prompts(rows: Dataset | None, column: str = "prompt") -> list[str]:
    assert rows is not None
    return list(rows[column])


@pytest.mark.parametrize("ending", ["json", "jsonl", "parquet", "csv"])
def test_local_file_is_loaded(tmp_path: Path, ending: str) -> None:
    raw = load_splits({"path": write(tmp_path / f"rows.{ending}")})
    assert raw.train.to_list() == ROWS
    assert raw.evaluation is None


def test_text_file_gives_a_row_per_line(tmp_path: Path) -> None:
    raw = load_splits({"path": write(tmp_path / "rows.txt")})
    assert prompts(raw.train, "text") == [row["prompt"] for row in ROWS]


def test_files_are_joined_in_the_order_given(tmp_path: Path) -> None:
    files = [write(tmp_path / "b.jsonl", ROWS[:3]), write(tmp_path / "a.json", ROWS[3:])]
    assert load_splits({"path": files}).train.to_list() == ROWS


def test_directory_is_loaded_with_the_splits_of_its_file_names(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:7])
    write(tmp_path / "test.jsonl", ROWS[7:])
    raw = load_splits({"path": str(tmp_path), "eval_split": "test"})
    assert prompts(raw.train) == [row["prompt"] for row in ROWS[:7]]
    assert prompts(raw.evaluation) == [row["prompt"] for row in ROWS[7:]]


def test_relative_path_starts_at_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    assert load_splits({"path": "data/rows.jsonl"}).train.num_rows == 10


def test_loading_leaves_no_files_beside_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    load_splits({"path": write(tmp_path / "data" / "rows.jsonl"), "eval_fraction": 0.5})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["data", "rows.jsonl"]


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert load_splits({"path": write(path)}).train.num_rows == 10
    assert load_splits({"path": write(path, ROWS[:4])}).train.num_rows == 4


def test_split_expression_takes_a_part(tmp_path: Path) -> None:
    raw = load_splits({"path": write(tmp_path / "rows.jsonl"), "split": "train[:80%]", "eval_split": "train[80%:]"})
    assert prompts(raw.train) == [row["prompt"] for row in ROWS[:8]]
    assert prompts(raw.evaluation) == [row["prompt"] for row in ROWS[8:]]


def test_eval_path_is_another_file(tmp_path: Path) -> None:
    paths = {"path": write(tmp_path / "a.jsonl", ROWS[:7]), "eval_path": write(tmp_path / "b.csv", ROWS[7:])}
    assert prompts(load_splits(paths).evaluation) == [row["prompt"] for row in ROWS[7:]]


def test_eval_fraction_holds_out_rows_by_seed(tmp_path: Path) -> None:
    section: dict[str, Any] = {"path": write(tmp_path / "rows.jsonl"), "eval_fraction": 0.3}
    raw, again, other = (load_splits({**section, **seed}) for seed in ({}, {"seed": 42}, {"seed": 1}))
    assert len(prompts(raw.evaluation)) == 3
    assert sorted(prompts(raw.train) + prompts(raw.evaluation)) == [row["prompt"] for row in ROWS]
    assert prompts(raw.evaluation) == prompts(again.evaluation)
    assert prompts(raw.evaluation) != prompts(other.evaluation)


@pytest.mark.parametrize(("limit", "num_train"), [(4, 2), (100, 5)])
def test_max_examples_takes_the_first_rows_before_some_are_held_out(tmp_path: Path, limit: int, num_train: int) -> None:
    raw = load_splits({"path": write(tmp_path / "rows.jsonl"), "max_examples": limit, "eval_fraction": 0.5})
    assert len(prompts(raw.train)) == num_train
    assert set(prompts(raw.train) + prompts(raw.evaluation)) == {row["prompt"] for row in ROWS[:limit]}


def test_built_in_data_set_has_splits() -> None:
    raw = load_splits({"path": "pydoc_topics", "split": "train[:40]", "eval_split": "test"})
    assert raw.train.num_rows == 40
    assert raw.train.column_names == ["prompt", "completion"]
    assert raw.evaluation is not None
    assert not set(prompts(raw.train, "completion")) & set(prompts(raw.evaluation, "completion"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        # The hub is out of reach in the tests, which is one of the three reasons that the message covers.
        (
            {"path": "someone/gated-set"},
            r'^data\.path: "someone/gated-set" \(split "train"\) cannot be loaded: .*run `hf auth login`; without a '
            r"connection, set data\.path to a local file or directory\.$",
        ),
        ({"path": "rows.jsonl", "eval_path": "someone/other"}, r'^data\.eval_path: "someone/other" .*hf auth login'),
        ({"path": "gone.jsonl"}, r"^data\.path: there is no file or directory 'gone\.jsonl' in '.*'\.$"),
        ({"path": "./gone"}, r"^data\.path: there is no file or directory 'gone' in"),
        ({"path": ["rows.jsonl", "gone.jsonl"]}, r"^data\.path: there is no file or directory 'gone\.jsonl'"),
        (
            {"path": ["rows.jsonl", "rows.csv"]},
            r"^data\.path: files of one type are needed \(\.json, .*\), found \.csv, \.jsonl\.$",
        ),
        ({"path": "rows.xml"}, r"^data\.path: files of one type are needed .* found \.xml\.$"),
        (
            {"path": "broken.jsonl"},
            r'^data\.path: "broken\.jsonl" \(split "train"\) cannot be loaded: .*Check the file',
        ),
        (
            {"path": "rows.jsonl", "split": "test"},
            r'cannot be loaded: Unknown split "test".*Check the file and the split',
        ),
        ({"path": "rows.jsonl", "eval_split": "test"}, r'cannot be loaded: Unknown split "test"'),
        (
            {"path": "rows.jsonl", "split": "train[:0]"},
            r'cannot be loaded: Instruction "train\[:0\]" corresponds to no data\. Check',
        ),
        ({"path": "empty.jsonl"}, r'^data\.path: "empty\.jsonl" .* cannot be loaded: '),
        ({"path": "empty.csv"}, r'^data\.path: "empty\.csv" .* cannot be loaded: '),
        (
            {"path": "pydoc_topics", "split": "train[:0]"},
            r'^data\.path: split "train\[:0\]" of "pydoc_topics" has no rows',
        ),
        ({"path": "rows.jsonl", "eval_fraction": 0.01}, r"^data\.eval_fraction: 0\.01 of 10 training rows is 0 rows"),
        ({"path": "rows.jsonl", "max_examples": 1, "eval_fraction": 0.9}, r"^data\.eval_fraction: 0\.9 of 1 training"),
        (
            {"path": "pydoc_topics", "split": "tset"},
            r'no split "tset"; it has "train" and "test".*Did you mean "test"\?',
        ),
        ({"path": "pydoc_topics", "split": "train[:"}, r'has no split "train\[:"; it has "train" and "test"'),
    ],
)
def test_what_cannot_be_loaded_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "rows.csv"):
        write(tmp_path / name)
    (tmp_path / "rows.xml").write_text("<rows/>")
    for name in ("empty.jsonl", "empty.csv"):
        (tmp_path / name).touch()
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(DataError, match=message) as raised:
        load_splits(section)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "content"), [("bad.jsonl", '{"text": "a"}\n{"text": oops}\n'), ("bad.parquet", "no")])
def test_what_is_wrong_with_a_file_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    # The loggers of datasets do not propagate to the root.
    logger = logging.getLogger("datasets")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(DataError, match="cannot be loaded: "):
            load_splits({"path": str(tmp_path / name)})
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert logging.getLogger("datasets.packaged_modules").level == logging.NOTSET
