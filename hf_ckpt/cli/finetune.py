"""Train as a recipe says: what scripts/finetune.py runs in each process, and `hf-ckpt finetune` in one."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from hf_ckpt.cli.common import FAILS, HOLDS, INTERRUPTED, WRONG_INPUT, add_recipe_arguments
from hf_ckpt.cli.model_options import read_recipe
from hf_ckpt.distributed.store import LaunchedProcesses
from hf_ckpt.errors import HFCkptError, OutOfMemoryError, PlanMismatchError, SavedFilesError
from hf_ckpt.finetune.termination import EXIT_CODE, Terminated, sigterm_as_interrupt
from hf_ckpt.recipe.extras import require_for
from hf_ckpt.simulation.garbage_collection import imports_are_no_garbage

FLAGS = ("print", "resume", "merge")
"""The options that are said or not."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code in every process of a run.

    That is 0; 1 where the device's memory was not enough; 2 for wrong input or a full disk; 130 after Ctrl-C, 143 after
    SIGTERM.
    """
    return run(parser("finetune.py").parse_intermixed_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Train; see `main`."""
    try:
        with sigterm_as_interrupt():
            return _run(options)
    except Terminated:
        print("Stopped by SIGTERM.", file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    processes = LaunchedProcesses()
    try:
        with processes:
            _carry_out(options, processes)
    except HFCkptError as error:
        if processes.rank == 0 or not _is_said_by_another(processes, error):
            print(f"{_process(processes)}{error}", file=sys.stderr)
        return FAILS if isinstance(error, OutOfMemoryError) else WRONG_INPUT
    return HOLDS


def _carry_out(options: argparse.Namespace, processes: LaunchedProcesses) -> None:
    with processes.stage("reading the recipe"):
        recipe = read_recipe(options)
    if options.print:
        if processes.rank == 0:
            print(recipe.to_yaml(), end="")
        return
    require_for(recipe, "datasets")
    _quieten(is_first=processes.rank == 0)
    # Only now: a wrong recipe is refused before torch is loaded.
    with imports_are_no_garbage():
        from hf_ckpt.finetune.train import finetune

    finetune(recipe, is_resumed=options.resume, is_merged=options.merge, processes=processes)
    _leave(processes)


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the arguments, under the name of a program."""
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Fine-tune a causal language model as a recipe says, with activation checkpointing per layer.",
        epilog="Example: accelerate launch scripts/finetune.py recipes/tiny_llama_lora.yaml training.max_steps=20",
    )
    add_recipe_arguments(parser)
    parser.add_argument("--print", action="store_true", help="print the resolved recipe and stop")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in training.output_dir")
    parser.add_argument(
        "--merge", action="store_true", help="also write the base model with the adapter merged into it"
    )
    return parser


def _is_said_by_another(processes: LaunchedProcesses, error: HFCkptError) -> bool:
    # What the callback raises of plans and checkpoints, it raises with the same words in all processes.
    return isinstance(error, PlanMismatchError | SavedFilesError) or processes.is_printed_by_another(error)


def _process(processes: LaunchedProcesses) -> str:
    """Return which process speaks, where it is not the first one."""
    return "" if processes.rank == 0 else f"[process {processes.rank}] "


def _leave(processes: LaunchedProcesses) -> None:
    """Leave the process group when all are through, as torch asks for at the end of a program."""
    if processes.size > 1:
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()


def _quieten(*, is_first: bool) -> None:
    """Show what this package says, once, and leave out what libraries say of themselves at every start."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_ckpt").setLevel(logging.INFO if is_first else logging.WARNING)
    if not is_first:
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    # peft imports bitsandbytes where it is installed, which tells on the CPU of kernels that it does not need.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Where DeepSpeed is installed, accelerate imports it, and it tells on standard output that it found no GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator" not in record.getMessage())
    # peft asks transformers 5.2x by the old name whether checkpointing is on.
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)


if __name__ == "__main__":
    sys.exit(main())
