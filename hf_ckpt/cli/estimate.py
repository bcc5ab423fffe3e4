"""`hf-ckpt estimate`: will it fit, in which mode, how fast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.common import (
    FAILS,
    HOLDS,
    Command,
    add_exact_option,
    add_launch_options,
    check_launch,
    launch_of,
    quiet,
    read_recipe,
    recipe_parser,
    say,
    with_exact,
)

if TYPE_CHECKING:
    from hf_ckpt.estimate.estimate import Estimate
    from hf_ckpt.estimate.subject import Subject
    from hf_ckpt.simulation.devices import Device


def _parser() -> argparse.ArgumentParser:
    parser = recipe_parser(
        "estimate",
        "Predict the memory and the time of a recipe's optimizer step, under its own plan, under each mode, and under\n"
        "the plan that is the fastest one to fit. Needs no GPU, loads no weights, and trains nothing.",
        epilog="""exit codes: 0 the recipe fits; 1 it does not; 2 wrong input

examples:
  hf-ckpt estimate recipes/llama7b_lora.yaml --device rtx4090
  hf-ckpt estimate recipes/llama7b_lora.yaml --device rtx4090 data.max_length=4096 --plot memory.png
  hf-ckpt estimate recipes/llama7b_full_fsdp.yaml --device a100-40gb --engine fsdp2 --processes 8
  hf-ckpt estimate recipes/llama3_8b_qlora.yaml --device rtx4090 --max-length""",
    )
    parser.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="such as rtx4090 or a100-80gb; may be given again. This machine's GPU if left out, or, where there is "
        "none, one card each with 24, 48 and 80 GB",
    )
    add_exact_option(parser)
    add_launch_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with every figure and version, and no table")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw memory over the step; FILE-frontier.png and FILE-checkpoints.png come along",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--grid", action="store_true", help="peaks over row lengths and micro-batches")
    what.add_argument("--max-length", action="store_true", help="the longest row that fits")
    what.add_argument("--max-batch", action="store_true", help="the largest micro-batch that fits")
    return parser


def _run(options: argparse.Namespace) -> int:
    # A wrong recipe is refused before torch is loaded.
    recipe = read_recipe(options)
    check_launch(options)
    say("Building the model without weights ...")
    with quiet():
        from hf_ckpt.estimate.predict import devices_for
        from hf_ckpt.estimate.subject import subject_of

        devices = devices_for(recipe, options.device or ())
        subject = with_exact(subject_of(recipe, launch_of(options)), options)
    if options.grid:
        return _grid(subject, devices[0], options)
    if options.max_length or options.max_batch:
        return _limits(subject, devices, options)
    return _estimate(subject, devices, options)


def _estimate(subject: Subject, devices: tuple[Device, ...], options: argparse.Namespace) -> int:
    with quiet():
        from hf_ckpt.estimate.estimate import estimate
        from hf_ckpt.estimate.tables import as_json, table, to_json

        found = estimate(subject, devices, say)
        if options.plot is not None:
            _plot(found, options.plot)
    print(to_json(as_json(found), options.words) if options.json else table(found))
    return HOLDS if found.fits else FAILS


def _plot(found: Estimate, path: Path) -> None:
    from hf_ckpt.estimate.pictures import draw_all

    for written in draw_all(found, path, say):
        say(f"Wrote {written}")


def _grid(subject: Subject, device: Device, options: argparse.Namespace) -> int:
    with quiet():
        from hf_ckpt.estimate import limits
        from hf_ckpt.estimate.predict import Predictor
        from hf_ckpt.estimate.tables import to_json

        predictor = Predictor(subject, device)
        found = limits.grids(predictor, say)
        read: dict[str, Any] = {"recipe": subject.title, "device": device.name, "grids": limits.grid_as_json(found)}
        text = to_json(read, options.words) if options.json else limits.grid_table(found, predictor)
    print(text)
    return HOLDS


def _limits(subject: Subject, devices: tuple[Device, ...], options: argparse.Namespace) -> int:
    with quiet():
        from hf_ckpt.estimate import limits
        from hf_ckpt.estimate.tables import to_json

        found = limits.fitting_sizes(subject, devices, is_length=options.max_length, say=say)
        text = to_json(limits.sizes_as_json(found), options.words) if options.json else limits.sizes_table(found)
    print(text)
    return HOLDS if any(row.limit.number for row in found.rows) else FAILS


ESTIMATE = Command(_parser, _run, "will it fit, and how fast: every mode's peak and step time; no GPU, no weights")
