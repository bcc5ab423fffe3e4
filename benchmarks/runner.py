"""The runner of the benchmarks: the one argument parser, and the options that suites share.

    python -m benchmarks modes --case llama_38m      # a suite by its name; its module and its file do the same
    python -m benchmarks --help                      # all suites, and the question that each answers

A suite is a module. Its docstring begins with its question; `add_arguments(parser)` adds what it alone is asked, and
`run(options)` measures, writes the result and returns the exit code, None for success. A file that is run as a script
ends in `sys.exit(main(__name__))` and puts the repository on the path before it imports anything from it.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"

SUITES = {
    "modes": "benchmarks.modes",
    "overhead": "benchmarks.overhead",
    "host_time": "benchmarks.host_time",
    "collectives": "benchmarks.collectives",
    "engines": "benchmarks.engines",
    "offload": "benchmarks.offload",
    "predict": "benchmarks.predict",
    "resident": "benchmarks.resident",
    "budgets": "benchmarks.budgets",
    "verdicts": "benchmarks.verdicts",
    "simulation_cost": "benchmarks.simulation_cost",
    "attention_rates": "benchmarks.attention_rates",
    "answer_time": "benchmarks.answer_time",
    "proof_launches": "benchmarks.proof_launches",
    "eight_bit": "benchmarks.eight_bit",
    "waiting_weights": "benchmarks.waiting_weights",
    "quantized_experts": "benchmarks.quantized_experts",
    "recovery_sweep": "benchmarks.recovery_sweep",
    "recovery_stream": "benchmarks.recovery_stream",
    "late_events": "benchmarks.late_events",
    "published": "benchmarks.published.measure",
    "published_page": "benchmarks.published.page",
    "longctx": "benchmarks.longctx",
    "longctx_predict": "benchmarks.longctx_predict",
    "recipe_figures": "benchmarks.recipe_figures",
    "concept_picture": "benchmarks.concept_picture",
    "side_by_side": "benchmarks.side_by_side.run",
    "side_by_side_predicted": "benchmarks.side_by_side.predicted",
    "side_by_side_suite": "benchmarks.side_by_side.suite",
    "compare": "benchmarks.side_by_side.compare",
    "claims": "benchmarks.claims.measure",
    "claims_predicted": "benchmarks.claims.predicted",
    "claims_page": "benchmarks.claims.page",
    "reentrant_fsdp": "benchmarks.claims.reentrant_fsdp",
    "on_gpu": "benchmarks.on_gpu.command",
}
"""The module of each suite. It is imported when its suite runs: libraries that one suite needs may be absent."""


class WrongInputError(ValueError):
    """Options that are wrong together, or do not suit this machine: says what is true, and what to do."""


def command(words: Sequence[str]) -> int:
    """Run the suite that the first word names, with the words behind it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Runs one suite of the benchmarks. python -m benchmarks SUITE --help says what it can be asked.",
        epilog="suites:\n" + "\n".join(f"  {name:<24}{question_of(module)}" for name, module in SUITES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", choices=SUITES, metavar="SUITE")
    suite = parser.parse_args(words[:1]).suite
    return main(SUITES[suite], words[1:], prog=f"python -m benchmarks {suite}")


def question_of(module: str) -> str:
    """Return the first line of a module's docstring; does not import it."""
    path = FOLDER.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return _first_line(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))


def main(module: str, words: Sequence[str] | None = None, *, prog: str | None = None, **known: Any) -> int:
    """Run a suite and return its exit code.

    Args:
        module: its name, `__main__` for the script that was started.
        words: of the command line; those of this process if left out.
        prog: what the help calls the program; the script's name if left out.
        known: what the options hold that nobody is asked for.
    """
    suite = import_module(module)
    parser = argparse.ArgumentParser(prog=prog, description=_first_line(suite.__doc__))
    suite.add_arguments(parser)
    parser.set_defaults(**known)
    options = parser.parse_args(words)
    try:
        return suite.run(options) or 0
    except WrongInputError as error:
        parser.error(str(error))


def _first_line(doc: str | None) -> str:
    return (doc or "").partition("\n")[0]


# --- Options that suites share. ---


def add_case(parser: argparse.ArgumentParser, cases: Iterable[str], default: str | None, **more: Any) -> None:
    """Add `--case`: one of these."""
    parser.add_argument("--case", choices=cases, default=default, **more)


def add_device(parser: argparse.ArgumentParser, default: str = "cpu") -> None:
    """Add `--device`: `cpu` or `cuda`."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)


def add_out(
    parser: argparse.ArgumentParser, default: Path | None = None, what: str | None = "the result's file"
) -> None:
    """Add `--out`, a path. What a result says of its command leaves it out: see `environment`."""
    parser.add_argument("--out", type=Path, default=default, help=what)
