"""The built-in data set: real text, the same every time, and no evaluation text in training."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from hf_ckpt.loading import sources


def words_in_eights(row: dict[str, str]) -> set[tuple[str, ...]]:
    words = (row["prompt"] + row["completion"]).split()
    return {tuple(words[at : at + 8]) for at in range(len(words) - 7)}


def test_splits_are_large_enough_to_learn_from() -> None:
    splits = sources.built_in_splits()
    assert list(splits) == ["train", "test"]
    assert len(splits["train"]) > 500
    assert 0.05 < len(splits["test"]) / len(splits["train"]) < 0.2


def test_every_row_is_a_prompt_with_its_continuation() -> None:
    for rows in sources.built_in_splits().values():
        for row in rows:
            heading, _, beginning = row["prompt"].partition("\n\n")
            assert heading.strip()
            assert beginning.strip()
            assert row["completion"][0].isspace()
            assert row["completion"].strip()
            assert len(beginning + row["completion"]) <= sources.PASSAGE_CHARS


def test_evaluation_text_is_not_trained_on() -> None:
    splits = sources.built_in_splits()
    trained = set().union(*map(words_in_eights, splits["train"]))
    evaluated = [eight for row in splits["test"] for eight in words_in_eights(row)]
    # The documentation repeats a phrase now and then; its repeated paragraphs (a fifth of all text) are gone.
    assert sum(eight in trained for eight in evaluated) / len(evaluated) < 0.03


def test_no_text_is_repeated() -> None:
    completions = [row["completion"] for rows in sources.built_in_splits().values() for row in rows]
    assert len(set(completions)) == len(completions)


def test_splits_are_the_same_in_another_process() -> None:
    code = (
        "import hashlib; from hf_ckpt.loading.sources import built_in_splits;"
        "print(hashlib.sha256(repr(built_in_splits()).encode()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == hashlib.sha256(repr(sources.built_in_splits()).encode()).hexdigest()
