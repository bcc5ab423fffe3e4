"""`hf-ckpt finetune`: train as a recipe says, in this process or in several that accelerate starts."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hf_ckpt.cli import finetune
from hf_ckpt.cli.common import Command, check_config_file, count, shipped_config
from hf_ckpt.cli.model_options import read_recipe
from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe.extras import require_for


def _parser() -> argparse.ArgumentParser:
    parser = finetune.parser("hf-ckpt finetune")
    parser.add_argument("--processes", type=count, metavar="N", help="start so many processes, one for each GPU")
    parser.add_argument(
        "--config-file",
        type=shipped_config,
        metavar="FILE",
        help="start processes as this configuration of accelerate says, such as fsdp2_8gpu or one of your own",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.processes in (None, 1) and options.config_file is None:
        return finetune.run(options)
    check_config_file("--config-file", options.config_file)
    # What is wrong is said once, here, before processes are started.
    recipe = read_recipe(options)
    if not options.print:
        require_for(recipe, "datasets", *(["deepspeed"] if _is_deepspeed(options.config_file) else []))
    if options.config_file is None:
        _check_gpus(options.processes)
    command = [sys.executable, "-m", "accelerate.commands.launch", *_launch_options(options)]
    command += ["--module", "hf_ckpt.cli.finetune", options.recipe, *options.overrides]
    command += [f"--{name}" for name in finetune.FLAGS if getattr(options, name)]
    # In place of this process: signals and the exit code are the launcher's.
    os.execv(sys.executable, command)


def _launch_options(options: argparse.Namespace) -> Iterator[str]:
    # Else the launcher adds a traceback of its own to what the processes said.
    yield "--quiet"
    path: Path | None = options.config_file
    if path is not None:
        yield from ("--config_file", str(path))
    else:
        # Every option is given, so that accelerate tells of no defaults. Precision is the recipe's.
        yield from ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    if options.processes is not None:
        yield from ("--num_processes", str(options.processes))


def _is_deepspeed(path: Path | None) -> bool:
    """Whether a configuration of accelerate starts DeepSpeed, which must be there before the launcher is."""
    return (
        path is not None and re.search(r"^distributed_type: *DEEPSPEED\b", path.read_text(), re.MULTILINE) is not None
    )


def _check_gpus(num_processes: int) -> None:
    """Refuse more processes than there are GPUs; without one, accelerate starts one process whatever is asked."""
    import torch

    num_gpus = torch.accelerator.device_count()
    if num_processes > num_gpus:
        raise RecipeError(f"--processes {num_processes}: each has a GPU of its own, and this machine has {num_gpus}.")


FINETUNE = Command(_parser, _run, "train as a recipe says")
