"""`hf-ckpt estimate`: will it fit, in which mode, how fast."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hf_ckpt.cli.model_options import add_model_options, read_recipe_or_model
from hf_ckpt.cli.shared_options import (
    FAILS,
    HOLDS,
    INTERRUPTED,
    STOPPED,
    Command,
    add_cache_option,
    add_html_option,
    add_step_options,
    check_predicting,
    code_of,
    leaving_at_ctrl_c,
    quiet,
    recipe_parser,
    say,
    subject_asked,
)
from hf_ckpt.errors import RecipeError
from hf_ckpt.estimate import tables

if TYPE_CHECKING:
    from hf_ckpt.estimate.estimate import Estimate
    from hf_ckpt.estimate.html_page import Page
    from hf_ckpt.estimate.step_of_recipe import Subject
    from hf_ckpt.recipe.recipe import Recipe
    from hf_ckpt.simulation.devices import Device

_BAR = 20  # Columns of a bar of progress.


class Progress:
    """What goes on, on standard error, and what is found, on standard output as it was when this was made.

    On a terminal the first is a bar below the second, which is taken away when more is found and in the end.
    """

    def __init__(self) -> None:
        self.total = 0
        """Parts of the work; 0 while that is not known."""
        self.done = 0
        self._out = sys.stdout
        self._is_bar = sys.stderr.isatty() and sys.stdout.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def say(self, text: str) -> None:
        """Tell what goes on."""
        if not self._is_bar:
            say(text)
            return
        filled = _BAR * self.done // max(self.total, 1)
        bar = f"[{'#' * filled:<{_BAR}}] {self.done} of {self.total}  " if self.total else ""
        self._write(f"{bar}{text}")

    def show(self, text: str) -> None:
        """Print what was found."""
        self.clear()
        print(text, file=self._out, flush=True)

    def clear(self) -> None:
        """Take the bar away."""
        if self._is_bar:
            self._write("")

    def _write(self, text: str) -> None:
        room = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:room]:<{room}}\r", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = recipe_parser(
        "estimate",
        "Predict the memory and the time of a recipe's optimizer step: whether it fits\n"
        "under its own plan, then a line for that plan, for each mode, and for the\n"
        "fastest plan that fits. Needs no GPU, loads no weights, and trains nothing.",
        epilog="""exit codes: 0 the recipe fits; 1 it does not; 2 wrong input; 3 it fits only
perhaps; 130 Ctrl-C

examples:
  hf-ckpt estimate recipes/llama7b_lora.yaml --device rtx4090
  hf-ckpt estimate recipes/llama7b_lora.yaml --device rtx4090 --quick
  hf-ckpt estimate recipes/llama7b_lora.yaml data.max_length=4096 --plot mem.png
  hf-ckpt estimate recipes/llama7b_full_fsdp.yaml --engine fsdp2 --processes 8
  hf-ckpt estimate recipes/llama3_8b_qlora.yaml --device rtx4090 --max-length""",
    )
    parser.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="such as rtx4090 or a100-80gb; may be given again. This machine's GPU if left out, or, where there is "
        "none, one GPU each with 24, 48 and 80 GB",
    )
    add_step_options(parser)
    parser.add_argument(
        "--quick", action="store_true", help="stop after the recipe's own plan, none, full and the planner's choice"
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="add to each line what fills the peak, and when; say whether the answer was kept from an earlier time",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every figure and version, and no table")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw memory over the step; FILE-frontier.png and FILE-checkpoints.png come along",
    )
    add_html_option(parser)
    add_cache_option(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--grid", action="store_true", help="peaks over sequence lengths and batch sizes")
    what.add_argument("--max-length", action="store_true", help="the longest sequence that fits")
    what.add_argument("--max-batch", action="store_true", help="the largest batch size that fits")
    add_model_options(parser)
    return parser


def _run(options: argparse.Namespace) -> int:
    # A wrong recipe is refused before torch is loaded.
    recipe = read_recipe_or_model(options)
    check_predicting(options, options.device or ())
    if options.html is not None and (options.grid or options.max_length or options.max_batch):
        raise RecipeError("--html shows an estimate. Leave out --html, or --grid, --max-length and --max-batch.")
    # They import huggingface_hub, which no refusal so far has waited for.
    from hf_ckpt.cli.answer_cache import remembered
    from hf_ckpt.loading.config_files import check_config

    # Last, as the hub may take seconds to answer.
    check_config(recipe)

    # What pictures are drawn of: the document has no timelines.
    drawn: list[Estimate] = []
    with Progress() as progress:
        try:
            document, is_kept = remembered(
                "estimate", recipe, options, lambda: _document(recipe, options, progress, drawn)
            )
        except KeyboardInterrupt:
            if not progress.total:
                raise
            progress.clear()
            say(f"{STOPPED.rstrip('.')} after {progress.done} of {progress.total} plans.")
            return INTERRUPTED
        if is_kept and options.verbose:
            say("From cache.")
        progress.show(_text(document, options, is_kept=is_kept))
        with quiet():
            for found in drawn:
                _draw(found, document, options, progress)
    return _code(document, options)


def _document(recipe: Recipe, options: argparse.Namespace, progress: Progress, drawn: list[Estimate]) -> dict[str, Any]:
    """Return what is answered. An estimate's rows are printed as they come, unless all is to be JSON."""
    progress.say("Building the model without weights ...")
    with quiet(), leaving_at_ctrl_c():
        from hf_ckpt.estimate import max_length_and_batch
        from hf_ckpt.estimate.estimate import estimate_as_json
        from hf_ckpt.estimate.predict import Predictor, devices_for

        devices = devices_for(recipe, options.device or ())
        subject = subject_asked(recipe, options)
    with quiet():
        if options.grid:
            return max_length_and_batch.grids(Predictor(subject, devices[0]), progress.say)
        if options.max_length or options.max_batch:
            return max_length_and_batch.fitting_sizes(subject, devices, is_length=options.max_length, say=progress.say)
        drawn.append(_grown(subject, devices, options, progress))
        return estimate_as_json(drawn[0])


def _text(document: tables.Document, options: argparse.Namespace, *, is_kept: bool) -> str:
    """Return what is still to be printed."""
    if options.json:
        return tables.json_text(document, options.words)
    if options.grid:
        return tables.grid_table(document)
    if options.max_length or options.max_batch:
        return tables.sizes_table(document)
    return (tables.estimate_table if is_kept else tables.closing)(document, is_verbose=options.verbose)


def _code(document: tables.Document, options: argparse.Namespace) -> int:
    if options.grid:
        return HOLDS
    if options.max_length or options.max_batch:
        return HOLDS if any(row["number"] for row in document["rows"]) else FAILS
    return code_of(found["fits"] for found in document["verdicts"])


def _grown(subject: Subject, devices: tuple[Device, ...], options: argparse.Namespace, progress: Progress) -> Estimate:
    """Return the estimate, whose rows were printed as they came, unless all is to be JSON."""
    from hf_ckpt.estimate import estimate as estimates
    from hf_ckpt.estimate.estimate import estimate_as_json, row_as_json

    names = _quick(options) if options.quick else ()
    progress.total = estimates.num_estimate_rows(subject, devices, names)
    opening: dict[str, Any] = {}
    for found in estimates.growing(subject, devices, progress.say, names):
        if not options.json:
            if not opening:
                opening = estimate_as_json(found)
                progress.show(tables.opening(opening))
            for row in found.rows[progress.done :]:
                text = tables.row_text(opening, row_as_json(row), is_verbose=options.verbose)
                if text:
                    progress.show(text)
        progress.done = len(found.rows)
    return found


def _quick(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the policies that a quick estimate has, with those of what is allowed besides modes."""
    from hf_ckpt.estimate.estimate import LEAST, QUICK, SENT, WAITING

    allowed = () if options.offload is None else (SENT, LEAST) if options.head == "chunked" else (SENT,)
    return (*QUICK, *allowed, *(() if options.weights is None else (WAITING,)))


def _draw(found: Estimate, document: dict[str, Any], options: argparse.Namespace, progress: Progress) -> None:
    """Write the pictures and the page that are asked for."""
    if options.plot is not None:
        from hf_ckpt.estimate.plots import draw_all

        for written in draw_all(found, options.plot, progress.say):
            progress.clear()
            say(f"Wrote {written}")
    if options.html is not None:
        page_of(found, document, options.words).write(options.html)
        progress.clear()
        say(f"Wrote {options.html}")


def page_of(found: Estimate, document: dict[str, Any], words: Sequence[str]) -> Page:
    """Return what was found for the first device as a page; `words`: of the command that gives it."""
    from hf_ckpt.cli.inspect_report import ledger
    from hf_ckpt.estimate.html_page import Page

    device, steps = found.devices[0], found.steps()
    decides = found.decides if found.decides in steps else next(iter(steps))
    return Page(
        title=f"hf-ckpt estimate {found.subject.title}",
        verdict=" ".join(
            [tables.verdict(document), *tables.on_exactness(document), *tables.on_cached_blocks(document)]
        ),
        device=device,
        facts=tables.named_facts(document, document["devices"][:1]),
        steps=steps,
        decides=decides,
        chain=found.predictor.chain,
        ledger=ledger(steps[decides]),
        words=words,
        fits={row["name"]: row["fits"][device.name] for row in document["rows"] if device.name in row.get("fits", {})},
    )


ESTIMATE = Command(
    _parser, _run, "will it fit, and how fast: every mode's peak and step time; no GPU, no weights", only_predicts=True
)
