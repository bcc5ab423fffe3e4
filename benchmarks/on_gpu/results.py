"""The file that holds what has been measured: rewritten whole after each entry, gone on from in a later run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.journal import NO_FIGURES, Entry, replace_text
from benchmarks.on_gpu.identity import differences
from benchmarks.runner import WrongInputError

FORMAT = 1
MOST_DEATHS = 2
"""So often may an entry take its process with it before it is left out."""
MOST_CUTS = 3
"""So often may the whole programme be killed while an entry is measured before that is held against the entry."""
_START = "(start)"
# In the place of a key: no entry had begun.


class Results:
    """What the stages have found.

    Args:
        path: of the file, which is rewritten after every change.
        identity: of this run; see `identity.identity_of`.

    Attributes:
        num_measured: how many entries with figures this run has added.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.num_measured = 0
        self._document: dict[str, Any] = {"format": FORMAT, "identity": identity, "slices": [], "stages": {}}

    @staticmethod
    def resumed(path: Path, found: Path, identity: dict[str, Any]) -> Results:
        """Return results that go on from those of a file.

        What was being measured when that run was killed counts as cut off once more.

        Args:
            path: of the new file; may be the same.
            found: the file to go on from.
            identity: of this run.

        Raises:
            WrongInputError: it cannot be gone on from; says why.
        """
        document = read(found)
        differing = differences(document["identity"], identity)
        if differing:
            raise WrongInputError(
                f"{found} was measured with {'; '.join(differing)}. Figures of both cannot stand in one "
                "result: file it with --merge and begin anew in another --out (make bench-gpu OUT=..., "
                "scripts/on_rented_gpu.sh STATE=...), or go back to what it was measured with."
            )
        results = Results(path, identity)
        results._document = document
        for stage in document["stages"].values():
            # What kept a stage from beginning may be over.
            stage["deaths"].pop(_START, None)
            for key in stage.pop("in_flight", ()):
                stage["cuts"][key] = stage["cuts"].get(key, 0) + 1
        results._leave_out()
        return results

    # --- What is there. ---

    def entries(self, stage: str) -> dict[str, Entry]:
        """Return the entries of a stage by key."""
        return dict(self._stage(stage)["entries"])

    def is_finished(self, stage: str, *, is_lean: bool = False) -> bool:
        """Whether a stage has nothing left to do.

        Args:
            stage: its name.
            is_lean: in the lean programme; what that leaves out of a stage is left for the long one.
        """
        record = self._stage(stage)
        return bool(record["is_finished"]) and (is_lean or not record.get("is_lean", False))

    def has_given_up(self, stage: str) -> bool:
        """Whether the process of a stage keeps ending before it measures anything."""
        return len(self._stage(stage)["deaths"].get(_START, ())) >= MOST_DEATHS

    # --- What happens. ---

    def begin_slice(self, facts: dict[str, Any]) -> None:
        """Note a run of the programme."""
        self._document["slices"].append(facts)
        self._write()

    def note_machine(self, machine: dict[str, Any]) -> None:
        """Note what a stage's process says of the machine; once for each run."""
        self._document["slices"][-1].setdefault("environment", machine)
        self._write()

    def begin(self, stage: str, key: str) -> None:
        """An entry is being measured."""
        self._stage(stage).setdefault("in_flight", []).append(key)
        self._write()

    def end(self, stage: str, key: str, found: Entry) -> None:
        """It is there. What never began was not measured here, but prepared."""
        if self._land(stage, [key]) and NO_FIGURES.isdisjoint(found):
            self.num_measured += 1
        self._stage(stage)["entries"][key] = found
        self._write()

    def died(self, stage: str, why: str) -> None:
        """The process of a stage has ended in the middle of what it measured."""
        record = self._stage(stage)
        for key in self._land(stage, list(record.get("in_flight", ()))) or [_START]:
            record["deaths"].setdefault(key, []).append(why)
        self._leave_out()
        self._write()

    def stop(self, stage: str) -> None:
        """The process of a stage was ended because time is over; nothing is held against what it measured."""
        self._land(stage, list(self._stage(stage).get("in_flight", ())))
        self._write()

    def finish(self, stage: str, *, is_lean: bool = False) -> None:
        """A stage has nothing left to do, in the lean programme or at all."""
        self._stage(stage).update(is_finished=True, is_lean=is_lean)
        self._write()

    def note(self, stage: str, facts: dict[str, Any]) -> None:
        """Note something about a whole stage."""
        self._stage(stage).setdefault("notes", {}).update(facts)
        self._write()

    # --- Inside. ---

    def _stage(self, stage: str) -> dict[str, Any]:
        blank = {"is_finished": False, "entries": {}, "deaths": {}, "cuts": {}}
        record: dict[str, Any] = self._document["stages"].setdefault(stage, blank)
        return record

    def _land(self, stage: str, keys: Iterable[str]) -> list[str]:
        record = self._stage(stage)
        landed = [key for key in keys if key in record.get("in_flight", ())]
        left = [key for key in record.pop("in_flight", ()) if key not in landed]
        if left:
            record["in_flight"] = left
        return landed

    def _leave_out(self) -> None:
        """Give an entry to what has died or was cut off too often, so that the others have their turn."""
        for stage in self._document["stages"].values():
            for key, reasons in stage["deaths"].items():
                if key != _START and len(reasons) >= MOST_DEATHS:
                    stage["entries"].setdefault(key, {"died": reasons[-1]})
            for key, times in stage["cuts"].items():
                if times >= MOST_CUTS:
                    why = f"the programme was killed {times} times while this was measured"
                    stage["entries"].setdefault(key, {"died": why})

    def _write(self) -> None:
        replace_text(self.path, json.dumps(self._document, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Return the document of a result file.

    Args:
        path: of the file.

    Raises:
        WrongInputError: there is none, or it is none of this programme's.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WrongInputError(f"{path} does not exist. Name a results.json that this programme has written.") from None
    except (OSError, ValueError) as error:
        raise WrongInputError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict) or not {"identity", "slices", "stages"} <= set(document):
        raise WrongInputError(f"{path} is no result of this programme: name a results.json that it has written.")
    if document.get("format") != FORMAT:
        raise WrongInputError(f"{path} has format {document.get('format')}, and this programme writes {FORMAT}.")
    return document
