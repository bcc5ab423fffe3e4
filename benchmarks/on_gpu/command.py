"""Measures on a GPU what matters most first, keeps what it has at every moment, and goes on where it stopped.

The lean programme takes a quarter of an hour in two runs, the long one (`--all`) hours. `scripts/on_rented_gpu.sh`
runs the lean one on a bare machine.

    python -m benchmarks.on_gpu --out runs/gpu --seconds 570
    python -m benchmarks.on_gpu --out runs/gpu --seconds 190 --resume runs/gpu/results.json
    python -m benchmarks.on_gpu --all --out runs/gpu --seconds 7200 --resume runs/gpu/results.json
    python -m benchmarks.on_gpu --plan --predicts-for h100          # what runs, in which order, for how many seconds
    python -m benchmarks.on_gpu --prepare --predicts-for h100       # plans and predictions, on any machine
    python -m benchmarks.on_gpu --merge runs/gpu/results.json       # file what came home
    python -m benchmarks.on_gpu --device cpu --small --out runs/gpu # all of it with tiny models

`--out` holds `results.json` (rewritten after every entry), `cases.xml` (the tests, as JUnit has them) and `log.txt`.
Exit code 0 if anything was measured, 1 if nothing was or anything could not be prepared, 2 for wrong input.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.on_gpu import junit, prepared, programme
from benchmarks.on_gpu.identity import gpu_name, identity_of
from benchmarks.on_gpu.results import Results
from benchmarks.on_gpu.setting import Prepared, Setting, Stage
from benchmarks.on_gpu.stages import STAGES
from benchmarks.runner import WrongInputError
from hf_ckpt.errors import HFCkptError
from hf_ckpt.simulation.devices import find_device

_FIRST_CALL_S = 585
"""Of the call that benchmarks/README.md gives."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.prog, parser.description, parser.epilog = "python -m benchmarks.on_gpu", __doc__, _questions()
    parser.formatter_class = RawDescriptionHelpFormatter
    names = [stage.name for stage in STAGES]
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=570.0, help="after so long nothing runs any more")
    parser.add_argument("--all", action="store_true", help="the long programme: all stages, and all of each")
    parser.add_argument("--plan", action="store_true", help="print the seconds of each stage, and run nothing")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="a results.json to go on from")
    parser.add_argument("--stage", choices=names, nargs="+", default=None, metavar="NAME", help="only these")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models; the only size that a CPU runs")
    parser.add_argument("--prepared", type=Path, help="plans and predictions, made by --prepare")
    parser.add_argument("--prepare", action="store_true", help="make them; needs no GPU")
    parser.add_argument("--predicts-for", default="h100", metavar="CARD", help="for which card they are made")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="file results, later files over earlier")
    parser.add_argument("--accept", action="store_true", help="with --merge: take what the probe says of the card")
    parser.add_argument("--results", type=Path, default=None, help="with --merge: folder to file them in")
    # When the process started; `on_gpu/__main__.py` knows it better.
    parser.set_defaults(began=time.monotonic())


def run(options: Namespace) -> int:
    """Measure, prepare or merge."""
    # Imported where they are wanted: the process that forks stages must not import what measures.
    if options.merge:
        from benchmarks.on_gpu.merge import merge

        merge(options.merge, STAGES, options.results, _say, accepts=options.accept)
    elif options.prepare:
        from benchmarks.on_gpu import prepare

        path = options.prepared or prepared.path_of(options.predicts_for, is_small=options.small)
        given = {"is_small": options.small, "is_lean": not options.all}
        missing = prepare.write(path, options.predicts_for, **given, say=_say)
        for line in missing:
            _say(f"could not be prepared: {line}")
        return 1 if missing else 0
    elif options.plan:
        _plan(options)
    else:
        return _measure(options, options.began)
    return 0


def _questions() -> str:
    return "stages, in order:\n" + "\n".join(f"  {stage.name:<12} {stage.question}" for stage in STAGES)


def _measure(options: Namespace, began: float) -> int:
    """Run the stages; return the exit code."""
    if options.device == "cpu" and not options.small:
        raise WrongInputError("A CPU cannot run models of full size: add --small, or leave --device cpu out.")
    card = gpu_name() if options.device == "cuda" else "cpu"
    if card is None:
        raise WrongInputError(
            "No CUDA device was found (nvidia-smi names none). Run this on a machine that has one, or try the whole "
            "programme with tiny models: --device cpu --small."
        )
    if options.out is None:
        raise WrongInputError("--out is missing: name a folder for results.json, cases.xml and log.txt.")
    identity = identity_of(card, is_small=options.small)
    path = options.out / "results.json"
    results = Results.resumed(path, options.resume, identity) if options.resume else Results(path, identity)
    beforehand = _prepared(options, identity)
    stages = _chosen(options)
    options.out.mkdir(parents=True, exist_ok=True)
    for line in beforehand.differences:
        _say(f"plans and predictions were prepared for another run: {line}")
    facts: dict[str, Any] = {"seconds": options.seconds, "stages": [stage.name for stage in stages]}
    results.begin_slice(facts | {"prepared": beforehand.facts, "prepared_for_another": beforehand.differences})
    with (
        (options.out / "log.txt").open("ab", buffering=0) as log,
        tempfile.TemporaryDirectory(prefix="hf_ckpt_gpu_") as scratch,
    ):
        setting = Setting(
            device=options.device,
            is_small=options.small,
            prepared=beforehand,
            scratch=Path(scratch),
            is_lean=not options.all,
        )
        was_all_there = all(results.is_finished(stage.name, is_lean=setting.is_lean) for stage in stages)
        left = programme.run(stages, setting, results, began + options.seconds, log, _say)
    junit.write(results.entries("exactness"), options.out / "cases.xml")
    _tell(left, results, path, stages)
    return 0 if results.num_measured or was_all_there else 1


def _chosen(options: Namespace) -> list[Stage]:
    """Return the stages that were asked for, in their order: by name, all, or those of the lean programme."""
    if options.stage is not None:
        return [stage for stage in STAGES if stage.name in options.stage]
    return [stage for stage in STAGES if options.all or stage.share_s is not None]


def _plan(options: Namespace) -> None:
    """Print the seconds of each stage of the lean programme, and when each has ended."""
    from benchmarks.on_gpu.seconds import planned

    path = options.prepared or prepared.path_of(options.predicts_for, is_small=False)
    if not path.is_file():
        raise WrongInputError(f"There are no plans for {options.predicts_for} at {path}. Make them with --prepare.")
    beforehand = prepared.read(path, identity_of(options.predicts_for, is_small=False), options.predicts_for)
    for line in beforehand.differences:
        _say(f"plans and predictions were prepared for another run, make them with --prepare: {line}")
    ended = 0.0
    for name, (seconds, source) in planned(_chosen(options), beforehand).items():
        if ended <= _FIRST_CALL_S < ended + seconds:
            print(f"-- a call of {_FIRST_CALL_S} s ends here; what follows is for a second one, and what is left of it")
        ended += seconds
        print(f"{name:<36} {seconds:5.0f} s, ended after {ended:5.0f} s  ({source})")


def _prepared(options: Namespace, identity: dict[str, Any]) -> Prepared:
    """Read the plans and predictions that there are."""
    card = "cpu" if options.small else _in_the_table(identity["device"])
    path = options.prepared or prepared.path_of(card, is_small=options.small)
    if options.prepared is None and not path.is_file():
        another = None if options.small else prepared.path_for_another()
        if another is None:
            _say(f"no plans and predictions at {path}: make them with --prepare; auto and the longest row are left out")
            return Prepared()
        path = another
    return prepared.read(path, identity, card)


def _in_the_table(card: str) -> str:
    """Return a card's name in the words of the device table; as it is where it is not there."""
    try:
        return find_device(card).name
    except HFCkptError:
        return card


def _tell(left: list[str], results: Results, path: Path, stages: list[Stage]) -> None:
    if left:
        _say(f"unfinished: {', '.join(left)}; go on with --resume {path}")
    else:
        _say(f"all {len(stages)} stages are finished")
    _say(f"{results.num_measured} entries with figures are new in {path}")


def _say(text: str) -> None:
    # Whoever read this may be gone; what is measured is kept all the same.
    with suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)
