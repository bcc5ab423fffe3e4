"""Results run anew against the committed ones: counts equal, predictions and other figures within 2 %, times shown.

    python -m benchmarks.side_by_side.compare /tmp/anew
    python -m benchmarks.side_by_side.compare /tmp/anew --committed benchmarks/results --times

Files of the same name are compared. The exit code is 0 when all that is judged is reproduced, 1 when something differs,
and 2 when there is nothing to compare.

Whole numbers are counts (operations, bytes, layers) and have to be equal; where they are predicted, or were measured on
a GPU or by the operating system, they have to be within 2 %, as all other numbers. Measured times belong to a machine:
they are not judged, nor is what follows from them, such as which contender was fastest.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.runner import RESULTS, main

CLOSE = 0.02
"""Of the committed value: how far another one may be away."""

Steps = tuple[str | int, ...]
"""Keys and indices that lead to a value."""

_PLACES = ("cpu", "cuda")
"""The `device` of what was measured; that of a prediction is the name of a card."""
_MEASURED_BY_THE_SYSTEM = ("measured", "resident", "reserved")
_TIMED = ("budgets", "verdict")
"""Compare contenders by their measured times. Missing where nothing was timed."""
_FOLLOWS_FROM_TIMES = ("best_", "ratio_to_", "worst_", "num_where_", "step_time_ratio")
_EFFORT = ("effort", "num_warmup", "num_steps", "num_rounds")
_AFTER_THE_LAST_STEP = ("loss", "grad_norm")
_OPTIONAL = ("elsewhere", "compiled")
"""Groups of contenders that need more than this library's own environment."""
_ABSENT = object()


class BadInputError(Exception):
    """There is nothing to compare; the text says why."""


class Judged(StrEnum):
    """How a value is held against the committed one."""

    EQUAL = "equal"
    CLOSE = "close"
    SHOWN = "shown"


@dataclass(frozen=True)
class Finding:
    """Two values of one place.

    Args:
        steps: the place.
        committed: the value there.
        anew: and the other one.
        judged: how they are held against each other.
        is_same: whether they are the same, as far as they are judged.
    """

    steps: Steps
    committed: Any
    anew: Any
    judged: Judged
    is_same: bool

    def describe(self) -> str:
        """Return the place in JSON's words, both values, and the relative difference of numbers."""
        text = f"{_path(self.steps)}: {_shown(self.committed)} committed, {_shown(self.anew)} anew"
        if _is_number(self.committed) and _is_number(self.anew):
            text += f" ({_relative(self.committed, self.anew):+.2%})"
        return text


@dataclass
class Comparison:
    """One result compared with the committed one.

    Args:
        name: of the file.
        findings: of all values that both have, or that one lacks.
        notes: what should be known: other versions, other hardware, contenders that did not run.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def differences(self) -> list[Finding]:
        """What is not reproduced."""
        return [finding for finding in self.findings if not finding.is_same]

    @property
    def time_ratios(self) -> list[Finding]:
        """Ratios of measured times, which are shown and not judged."""
        return [
            finding
            for finding in self.findings
            if finding.judged is Judged.SHOWN and "ratio" in _path(finding.steps) and _is_number(finding.committed)
        ]

    def describe(self, *, lists_times: bool = False) -> str:
        """Return one line for the file, and one for each note and difference.

        Args:
            lists_times: one for each ratio of times as well, and not one for all of them.
        """
        numbers = Counter(finding.judged for finding in self.findings if finding.is_same)
        verdict = f"{len(self.differences)} differ" if self.differences else "reproduced"
        line = (
            f"{self.name}: {verdict} ({numbers[Judged.EQUAL]} equal, {numbers[Judged.CLOSE]} within {CLOSE:.0%}, "
            f"{numbers[Judged.SHOWN]} not judged)"
        )
        return "\n".join(
            [
                line,
                *(f"  note: {note}" for note in self.notes),
                *(f"  differs: {finding.describe()}" for finding in self.differences),
                *(f"  not judged: {text}" for text in self._times(lists_times)),
            ]
        )

    def _times(self, lists_all: bool) -> Iterator[str]:
        found = [finding for finding in self.time_ratios if finding.committed and _is_number(finding.anew)]
        if lists_all:
            yield from (finding.describe() for finding in found)
        elif found:
            shares = sorted(finding.anew / finding.committed for finding in found)
            yield (
                f"ratios of times ({len(found)}): {shares[0]:.2f} to {shares[-1]:.2f} of the committed ones, median "
                f"{statistics.median(shares):.2f}; --times lists them"
            )


# --- Comparing. ---


def compare(name: str, committed: Mapping[str, Any], anew: Mapping[str, Any]) -> Comparison:
    """Hold a result against the committed one.

    Args:
        name: of the file.
        committed: what it holds.
        anew: what was found now.
    """
    comparison = Comparison(name, notes=list(_other_surroundings(committed, anew)))
    rules = _Rules.of(name, committed, anew)
    if not rules.is_same_effort:
        comparison.notes.append(
            "another number of steps: the loss and the gradient norm after the last one are not judged"
        )
    left, right = ({key: value for key, value in each.items() if key != "environment"} for each in (committed, anew))
    comparison.findings.extend(_walk((), left, right, rules, comparison.notes))
    return comparison


@dataclass(frozen=True)
class _Rules:
    """What decides how the values of one file are judged.

    Args:
        is_predicted: the whole file, times too.
        is_counted: bytes were counted, not read from a device's allocator.
        is_same_effort: both runs took the same number of steps.
    """

    is_predicted: bool
    is_counted: bool
    is_same_effort: bool

    @classmethod
    def of(cls, name: str, committed: Mapping[str, Any], anew: Mapping[str, Any]) -> _Rules:
        below = (value for value in committed.values() if isinstance(value, dict))
        devices = {each["device"] for each in (committed, *below) if isinstance(each.get("device"), str)}
        is_predicted = "predicted" in Path(name).stem or bool(devices.difference(_PLACES))
        efforts = [[each.get(key) for key in _EFFORT] for each in (committed, anew)]
        return cls(is_predicted, "cuda" not in devices, efforts[0] == efforts[1])

    def judge(self, steps: Steps, *values: Any) -> Judged:
        """Say how the values of a place are held against each other."""
        keys = [key for key in steps if isinstance(key, str)]
        last = keys[-1] if keys else ""
        if _is_of_this_run(keys) or (last in _AFTER_THE_LAST_STEP and not self.is_same_effort):
            return Judged.SHOWN
        is_predicted = self.is_predicted or any("predicted" in key for key in keys)
        if not is_predicted and (_is_time(keys) or _follows_from_times(keys)):
            return Judged.SHOWN
        is_rounded = is_predicted or not self.is_counted or any(word in last for word in _MEASURED_BY_THE_SYSTEM)
        are_numbers = all(map(_is_number, values))
        if are_numbers and (is_rounded or any(isinstance(value, float) for value in values)):
            return Judged.CLOSE
        return Judged.EQUAL


def _is_of_this_run(keys: Sequence[str]) -> bool:
    """Whether a value says how the run was made, and what it took to make it."""
    is_cost = any(key.startswith(("seconds_to_", "cpu_seconds")) for key in keys)
    return is_cost or any(key in _EFFORT for key in keys)


def _is_time(keys: Sequence[str]) -> bool:
    return any(
        key.endswith("_ms")
        or "seconds" in key
        or "step_time" in key
        or "time_ratio" in key
        or key == "page_faults"
        or "_per_sec" in key
        for key in keys
    )


def _follows_from_times(keys: Sequence[str]) -> bool:
    return bool(keys) and keys[0] in _TIMED and any(key.startswith(_FOLLOWS_FROM_TIMES) for key in keys[1:])


def _walk(steps: Steps, committed: Any, anew: Any, rules: _Rules, notes: list[str]) -> Iterator[Finding]:
    """Yield a finding for each value below a place."""
    if isinstance(committed, dict) and isinstance(anew, dict):
        if _did_run(steps, committed, anew, notes):
            for key in (*committed, *(key for key in anew if key not in committed)):
                below = committed.get(key, _ABSENT), anew.get(key, _ABSENT)
                yield from _walk((*steps, key), *below, rules, notes)
        elif not committed.get("not_run") and committed.get("group") not in _OPTIONAL:
            yield Finding((*steps, "not_run"), None, anew["not_run"], Judged.EQUAL, False)
    elif isinstance(committed, list) and isinstance(anew, list):
        if len(committed) != len(anew):
            yield from _leaf((*steps, "length"), len(committed), len(anew), rules)
        for index, values in enumerate(zip(committed, anew, strict=False)):
            yield from _walk((*steps, index), *values, rules, notes)
    elif _ABSENT in (committed, anew) and steps[0] in _TIMED and len(steps) == 1 and not rules.is_predicted:
        notes.append(f"{steps[0]}: nothing was timed in one of the runs")
    else:
        yield from _leaf(steps, committed, anew, rules)


def _did_run(steps: Steps, committed: Mapping[str, Any], anew: Mapping[str, Any], notes: list[str]) -> bool:
    """Whether both are no records of a contender that did not run. What only one of the runs had is noted."""
    left, right = committed.get("not_run"), anew.get("not_run")
    if right and not left:
        notes.append(f"{_path(steps)} did not run anew: {right}")
    elif left and not right:
        notes.append(f"{_path(steps)} runs anew, and did not in the committed result: {left}")
    return not left and not right


def _leaf(steps: Steps, committed: Any, anew: Any, rules: _Rules) -> Iterator[Finding]:
    judged = rules.judge(steps, committed, anew)
    match judged:
        case Judged.SHOWN:
            is_same = True
        case Judged.CLOSE:
            is_same = abs(_relative(committed, anew)) <= CLOSE
        case Judged.EQUAL:
            # A flag is no number, though True == 1.
            is_same = committed == anew and isinstance(committed, bool) == isinstance(anew, bool)
    yield Finding(steps, committed, anew, judged, is_same)


def _other_surroundings(committed: Mapping[str, Any], anew: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs in versions and hardware, and which of the runs had changes that were not committed."""
    environments = [each.get("environment") or {} for each in (committed, anew)]
    for kind in ("versions", "hardware"):
        left, right = (environment.get(kind) or {} for environment in environments)
        for key in (*left, *(key for key in right if key not in left)):
            if left.get(key) != right.get(key):
                yield f"{kind}: {key} was {_shown(left.get(key))}, is {_shown(right.get(key))}"
    for environment, which in zip(environments, ("committed result", "new result"), strict=True):
        if environment.get("is_dirty"):
            yield f"the {which} was made with changes that are in no commit"


# --- Values. ---


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _relative(committed: float, anew: float) -> float:
    """Return by which fraction of the committed value the other one is off."""
    if committed == anew or (math.isnan(committed) and math.isnan(anew)):
        return 0.0
    difference = (anew - committed) / abs(committed) if committed else math.inf
    return math.inf if math.isnan(difference) else difference


def _path(steps: Steps) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".")


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, dict | list):
        return "{...}" if isinstance(value, dict) else "[...]"
    if _is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return json.dumps(value)


# --- Files. ---


def compare_folders(anew: Path, committed: Path) -> tuple[list[Comparison], list[str]]:
    """Hold each result of a folder against the committed one of its name.

    Returns:
        The comparisons, and the names of results that nothing is committed for.

    Raises:
        BadInputError: a folder is not there, or they have no file in common, or one cannot be read.
    """
    for option, folder in (("ANEW", anew), ("--committed", committed)):
        if not folder.is_dir():
            raise BadInputError(f"{option} is {folder}, which is no folder. Name one that holds results as JSON.")
    if anew.resolve() == committed.resolve():
        raise BadInputError(
            f"ANEW and --committed are the same folder, {anew}. Write the new results to another one, with --out."
        )
    names = sorted(path.name for path in anew.glob("*.json"))
    common = [name for name in names if (committed / name).is_file()]
    if not common:
        raise BadInputError(
            f"No JSON of {anew} ({', '.join(names) or 'there is none'}) has the name of one in {committed}. Run "
            "a benchmark under its own name, such as python -m benchmarks.side_by_side.run --out ANEW."
        )
    comparisons = [compare(name, _read(committed / name), _read(anew / name)) for name in common]
    return comparisons, [name for name in names if name not in common]


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} cannot be read as JSON: {error}. Run its benchmark again.") from error
    if not isinstance(result, dict):
        raise BadInputError(f"{path} holds no JSON object, so that it is no result. Leave it out of the folder.")
    return result


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.prog = "python -m benchmarks.side_by_side.compare"
    parser.add_argument("anew", type=Path, metavar="ANEW", help="folder of the new results")
    parser.add_argument("--committed", type=Path, default=RESULTS, help="folder of the committed ones (%(default)s)")
    parser.add_argument("--times", action="store_true", help="list each ratio of measured times, which are not judged")


def run(options: Namespace) -> int:
    """Compare, print, and return the exit code."""
    try:
        comparisons, others = compare_folders(options.anew, options.committed)
    except BadInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for comparison in comparisons:
        print(comparison.describe(lists_times=options.times))
    for name in others:
        print(f"{name}: nothing is committed under this name")
    num_all = len(list(options.committed.glob("*.json")))
    num_same = sum(not comparison.differences for comparison in comparisons)
    print(f"{num_same} of {len(comparisons)} reproduced; {num_all} results are committed")
    return 0 if num_same == len(comparisons) else 1


if __name__ == "__main__":
    sys.exit(main(__name__))
