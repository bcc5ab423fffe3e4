"""Options that say how a recipe is launched: the engine, and on how many processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hf_ckpt.cli.common import count
from hf_ckpt.errors import RecipeError

if TYPE_CHECKING:
    from hf_ckpt.estimate.launch_sharding import Launch


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add `--accelerate-config`, `--engine` and `--processes` to the parser of a command."""
    parser.add_argument(
        "--accelerate-config",
        type=Path,
        metavar="FILE",
        help="the configuration that the run is launched with, such as recipes/accelerate/fsdp2_8gpu.yaml",
    )
    parser.add_argument("--engine", metavar="NAME", help="ddp, fsdp1, fsdp2, zero1, zero2 or zero3, over --processes")
    parser.add_argument("--processes", type=count, metavar="N", help="processes of the run, of all machines together")


def check_launch(options: argparse.Namespace) -> None:
    """Refuse a file that is not there, before torch is loaded.

    Raises:
        RecipeError: the file is not there.
    """
    path: Path | None = options.accelerate_config
    if path is not None and not path.is_file():
        raise RecipeError(f"--accelerate-config: there is no file {path}. Name one, or use --engine and --processes.")


def launch_of(options: argparse.Namespace) -> Launch:
    """Return how the recipe is launched."""
    from hf_ckpt.estimate.launch_sharding import Launch

    return Launch(config=options.accelerate_config, engine=options.engine, num_processes=options.processes)
