"""`hf-ckpt verify`, in one process and in several: the one that asks, and those that answer."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.model_options import read_recipe, require_for
from hf_ckpt.cli.shared_options import FAILS, HOLDS, WRONG_INPUT, Command, count, quiet, recipe_parser, say
from hf_ckpt.errors import HFCkptError, RecipeError
from hf_ckpt.garbage_collection import imports_are_no_garbage
from hf_ckpt.verify.processes import (
    PROGRESS,
    end_process,
    join_processes,
    run_in_processes,
    with_engine,
    write_result,
)

if TYPE_CHECKING:
    from hf_ckpt.recipe.recipe import Recipe
    from hf_ckpt.verify.report import Report

_ENGINES = ("ddp", "fsdp1", "fsdp2")
_COLUMNS = 120


def _parser() -> argparse.ArgumentParser:
    parser = recipe_parser(
        "verify",
        "Run a recipe a few steps with and without its plan and compare loss, gradients, weights, counts, names, and "
        "what is saved. The model is reduced to two layers of each kind and small widths; no weights and no data are "
        "loaded.",
    )
    parser.add_argument("--full", action="store_true", help="the real size, and the real weights where they are there")
    parser.add_argument("--json", action="store_true", help="print JSON, with every figure and version, and no table")
    parser.add_argument("--steps", type=count, metavar="K", help="optimizer steps of each run")
    parser.add_argument("--processes", type=count, default=1, metavar="N", help="run in N processes on this machine")
    parser.add_argument(
        "--engine", type=_engine, choices=_ENGINES, help="of several processes; the recipe's own if left out, or ddp"
    )
    parser.add_argument(
        "--setup",
        metavar="MODULE:FUNCTION",
        help="called with the model of each run, to put the hooks and patches of your own script on it",
    )
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    return parser


def _engine(written: str) -> str:
    if written == "tp":
        from hf_ckpt.recipe.schema import NO_PARALLELISM

        raise argparse.ArgumentTypeError(f"tensor parallelism was asked for, and {NO_PARALLELISM}")
    return written


def _run(options: argparse.Namespace) -> int:
    if options.answers is not None:
        return _run_as_one_of_many(options)
    if options.engine and options.processes == 1:
        raise RecipeError(f"--engine {options.engine} is for several processes. Add --processes 2.")
    # A wrong recipe is refused before torch is loaded, and before processes are started.
    recipe = read_recipe(options)
    require_for(recipe, "datasets")
    setup = _setup(options.setup)
    if options.processes == 1:
        return _show(_verified(recipe, options, setup, say), options)
    if not recipe.path.is_file():
        raise RecipeError(f"--processes {options.processes}: {recipe.path} can be read once. Write it to a file.")
    words = ["verify", options.recipe, *options.overrides, *(["--full"] if options.full else [])]
    for name in ("steps", "engine", "setup"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name}", str(value)]
    found = run_in_processes(words, num_processes=options.processes, say=say)
    from hf_ckpt.verify.report import Report

    return _show(Report.from_json(found), options)


def _verified(
    recipe: Recipe, options: argparse.Namespace, setup: Callable[[Any], None] | None, tell: Callable[[str], None]
) -> Report:
    with quiet():
        with imports_are_no_garbage():
            from hf_ckpt.verify.run import NUM_STEPS, verify

        return verify(recipe, is_full=options.full, num_steps=options.steps or NUM_STEPS, setup=setup, say=tell)


def _show(report: Report, options: argparse.Namespace) -> int:
    width = shutil.get_terminal_size((_COLUMNS, 0)).columns
    print(report.to_json() if options.json else report.table(width=width))
    return HOLDS if report.holds else FAILS


def _setup(written: str | None) -> Callable[[Any], None] | None:
    """Return the function that `--setup` names."""
    if written is None:
        return None
    module, colon, name = written.partition(":")
    # A console script does not look into the folder that it is started in.
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"--setup {written}: {error}. Write MODULE:FUNCTION, as in my_script:prepare.") from error
    if not colon or not callable(function):
        raise RecipeError(f"--setup {written} is no function. Write MODULE:FUNCTION, as in my_script:prepare.")
    checked: Callable[[Any], None] = function
    return checked


# --- Several processes: the one that asks, and those that answer. ---


def _run_as_one_of_many(options: argparse.Namespace) -> int:
    report, refusal, code = None, "", HOLDS
    try:
        report = _report_of_many(options)
    except HFCkptError as error:
        # Not 0, so that torchrun ends the others, which may be waiting for this one.
        refusal, code = str(error), WRONG_INPUT
    write_result(options.answers, report, refusal)
    end_process(code)


def _report_of_many(options: argparse.Namespace) -> dict[str, Any]:
    recipe = read_recipe(options)
    require_for(recipe, "datasets")
    setup = _setup(options.setup)
    with quiet():
        is_first = join_processes()

        def tell(text: str) -> None:
            if is_first:
                say(f"{PROGRESS}{text}")

        return _verified(with_engine(recipe, options.engine), options, setup, tell).as_json()


VERIFY = Command(_parser, _run, "run a recipe a few steps with and without its plan, and compare everything")
