"""Does a training stay exact, or stop with a reason, whatever changes from some step on? Events and plans by chance.

Each seed gives a tiny model, an event (a hook, a write, longer batches, another operator, freezing, an adapter, a mode,
an exception), the step of five that begins with it, a plan, and a loop. The training runs with the plan and without;
losses, gradients, weights, buffers, attributes, random states and calls of hooks are compared to the bit after each
step. `tests/attack` has the events, and what the verdicts mean.

    python -m benchmarks late_events --seeds 0:3000
    python -m benchmarks late_events --seed 17          # one of them: what it is, what became of it, and its error
"""

from __future__ import annotations

import gc
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.journal import Entry, Journal
from benchmarks.result_files import carry_out
from benchmarks.runner import RESULTS, WrongInputError, add_out, main
from tests.attack.combinations import Combination
from tests.attack.verdicts import FAULTS, Verdict, outcome_of

_CHUNK = 100
_SHOWN = (*FAULTS, Verdict.UNPROVEN, Verdict.NEEDLESS, Verdict.UNDEFINED)
_MOST_OF_A_REASON = 300


def tried(seeds: range) -> Entry:
    """Try these seeds; what is not equal and not plainly refused is returned with its reason."""
    outcomes = [outcome_of(Combination.of(seed)) for seed in seeds]
    shown = [each for each in outcomes if each.verdict in _SHOWN]
    for each in shown:
        if each.verdict in FAULTS:
            print(each.describe()[:_MOST_OF_A_REASON], flush=True)
    return {
        "verdicts": Counter(each.verdict.value for each in outcomes),
        "by_trainer": sum(each.combination.by_trainer for each in outcomes),
        "events": Counter(each.combination.event for each in outcomes),
        "shown": [_as_json(each.combination, each.verdict, each.why) for each in shown],
    }


def _as_json(combination: Combination, verdict: Verdict, why: str) -> dict[str, Any]:
    named = {"seed": combination.seed, "verdict": verdict.value, "event": combination.event}
    return named | {"combination": combination.describe(), "why": why[:_MOST_OF_A_REASON]}


def collect(journal: Journal, seeds: range) -> None:
    """Try all seeds, so many at a time."""
    # What torch and transformers have made is not searched in each run of the Trainer.
    gc.collect()
    gc.freeze()
    for first in range(seeds.start, seeds.stop, _CHUNK):
        some = range(first, min(first + _CHUNK, seeds.stop))
        journal.entry(f"{some.start}:{some.stop}", partial(tried, some), limit_s=3600.0)


def assemble(journal: Journal, seeds: range) -> dict[str, Any]:
    """Return the result of the entries that are there."""
    whole = [entry for entry in journal.entries.values() if "verdicts" in entry]
    verdicts, events = Counter[str](), Counter[str]()
    for entry in whole:
        verdicts.update(entry["verdicts"])
        events.update(entry["events"])
    return {
        "seeds": f"{seeds.start}:{seeds.stop}",
        "num_tried": verdicts.total(),
        "num_by_trainer": sum(entry["by_trainer"] for entry in whole),
        "verdicts": {verdict.value: verdicts[verdict.value] for verdict in Verdict},
        "num_tried_by_event": dict(sorted(events.items())),
        "shown": [each for entry in whole for each in entry["shown"]],
        "failed": {key: entry for key, entry in journal.entries.items() if "verdicts" not in entry},
    }


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--seeds", default="0:3000", metavar="FIRST:END", help="which; 0:3000 if left out")
    parser.add_argument("--seed", type=int, help="one of them; its verdict is shown, and nothing written")
    parser.add_argument("--seconds", type=float, help="after which no hundred begins; the same command goes on")
    add_out(parser)


def run(asked: Namespace) -> int:
    """Try the seeds and write one JSON; the exit code says whether any was silently wrong or failed oddly."""
    if asked.seed is not None:
        outcome = outcome_of(Combination.of(asked.seed))
        print(outcome.describe())
        return int(outcome.verdict in FAULTS)
    first, _, end = asked.seeds.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise WrongInputError(f"--seeds is {asked.seeds}. Use the first and the one behind the last, as in 0:3000.")
    seeds = range(int(first), int(end))
    out = asked.out or RESULTS / "late_events.json"
    result = carry_out(out, partial(collect, seeds=seeds), partial(assemble, seeds=seeds), asked.seconds)
    print(f"{result['verdicts']}; written to {out}")
    return int(bool(result["failed"]) or any(result["verdicts"][verdict.value] for verdict in FAULTS))


if __name__ == "__main__":
    sys.exit(main(__name__))
