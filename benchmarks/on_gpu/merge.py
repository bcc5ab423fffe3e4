"""Files what came home: results under benchmarks/results/, and all that is written from them.

A run leaves one file of raw entries. Each stage makes of its entries the results that documents link, in the form in
which its own script writes them. Then pages, pictures and the generated blocks of the documents are written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.journal import Entry, ReadJournal, replace_text
from benchmarks.on_gpu import constants, documents
from benchmarks.on_gpu.identity import ROOT, commit_with
from benchmarks.on_gpu.results import read
from benchmarks.on_gpu.setting import Setting, Stage
from benchmarks.result_files import text_of
from benchmarks.runner import WrongInputError

RESULTS = ROOT / "benchmarks" / "results"

Say = Callable[[str], None]


def merge(
    files: Sequence[Path], stages: Sequence[Stage], folder: Path | None, say: Say, *, accepts: bool = False
) -> None:
    """File results.

    Args:
        files: that the programme has written; of a stage that several hold, the entries of later files come last.
        stages: that there are.
        folder: to file them in; `benchmarks/results` if left out, and then documents are written anew.
        say: is called with what is written.
        accepts: take what the probe says of its card into the table of devices.

    Raises:
        WrongInputError: a file is no result, or one of small twins is to be filed with those of full size.
    """
    documents_read = [read(path) for path in files]
    is_small = any(document["identity"]["is_small"] for document in documents_read)
    if is_small and folder is None:
        raise WrongInputError(
            "A result of small twins cannot stand in benchmarks/results: name another folder with --results, or leave "
            "the file out."
        )
    place = folder or RESULTS
    merged = {stage.name: _merged(documents_read, stage.name) for stage in stages}
    for stage in stages:
        entries, document = merged[stage.name]
        if not entries:
            continue
        for name, result in _assembled(stage, entries, document):
            replace_text(place / name, text_of(result))
            say(f"wrote {place / name}")
    if folder is None:
        for path in documents.write(stages, RESULTS, ROOT):
            say(f"wrote {path}")
    _propose(merged["probe"][0], say, accepts=accepts)


def _propose(entries: Mapping[str, Entry], say: Say, *, accepts: bool) -> None:
    """Say what the probe says of its card and what is in force, and take it if that is wanted."""
    proposals = constants.propose(entries)
    for line in constants.lines(proposals):
        say(line)
    if not proposals:
        return
    source = f"probe_{'cuda' if proposals[0].device.is_cuda else 'cpu'}.json"
    for changed in constants.changed_predictions(*constants.before_and_after(proposals, source)):
        say(
            f"{changed.recipe} on {proposals[0].device.name}, {changed.policy or 'no policy'}: "
            f"{changed.old_s:.2f} -> {changed.new_s:.2f} s a step"
        )
    if not accepts:
        say("--accept takes what can be taken")
        return
    constants.accept(proposals, source)
    for name in constants.results_that_predict(proposals[0].device.name):
        say(f"{name} holds predictions for this card: make it anew")


def _merged(read_files: Sequence[dict[str, Any]], stage: str) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Return the entries of a stage, and the document that says where they were made.

    Entries are put together only if code, versions and device were the same; else the last file's stand alone.
    """
    entries: dict[str, Entry] = {}
    source: dict[str, Any] = {}
    for document in read_files:
        found = document["stages"].get(stage, {}).get("entries", {})
        if not found:
            continue
        if source and source["identity"] != document["identity"]:
            entries = {}
        entries |= found
        source = document
    return entries, source


def _assembled(
    stage: Stage, entries: Mapping[str, Entry], document: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results of a stage, by the names of their files."""
    identity = document["identity"]
    # What was measured in the lean programme is a part of what there is.
    setting = Setting(
        device="cpu" if identity["device"] == "cpu" else "cuda", is_small=identity["is_small"], is_lean=False
    )
    head = {"environment": environment_of(document), "entries_left_out": _without_figures(entries)}
    for name, result in stage.assemble(ReadJournal(entries), setting):
        yield name, head | result


def environment_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return command, versions, commit and hardware of a result file, as `benchmarks.environment` has them.

    Args:
        document: of the file.
    """
    measured = next(
        (one["environment"] for one in reversed(document["slices"]) if "environment" in one), {"hardware": {}}
    )
    identity = document["identity"]
    # A machine that a tree was copied to may not know its commit, or know one that the tree was changed from.
    commit = commit_with(identity["code"])
    return measured | {
        "command": "python -m benchmarks.on_gpu",
        "commit": commit or identity["commit"],
        "is_dirty": commit is None and measured.get("is_dirty", True),
        "code": identity["code"],
        "prepared_for_another": document["slices"][-1].get("prepared_for_another", []) if document["slices"] else [],
    }


def _without_figures(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return why entries have no figures."""
    return {
        key: f"{reason}: {found[reason]}"
        for key, found in entries.items()
        for reason in ("out_of_memory", "failed", "died")
        if reason in found
    }
