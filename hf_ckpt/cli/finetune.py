"""`hf-ckpt finetune`: train as a recipe says, in this process or in several that accelerate starts.

`main` is what scripts/finetune.py and each of these processes run.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hf_ckpt.cli.model_options import read_recipe, require_for
from hf_ckpt.cli.shared_options import (
    FAILS,
    HOLDS,
    INTERRUPTED,
    WRONG_INPUT,
    Command,
    add_recipe_arguments,
    check_config_file,
    count,
    shipped_config,
)
from hf_ckpt.distributed.store import LaunchedProcesses
from hf_ckpt.errors import HFCkptError, OutOfMemoryError, PlanMismatchError, RecipeError, SavedFilesError
from hf_ckpt.garbage_collection import imports_are_no_garbage
from hf_ckpt.upstream import OLD_NAMES

_FLAGS = ("print", "resume", "merge")  # The options that are said or not.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code in every process of a run.

    That is 0; 1 where the device's memory was not enough; 2 for wrong input or a full disk; 130 after Ctrl-C, 143 after
    SIGTERM.
    """
    return _run(_parser("finetune.py").parse_intermixed_args(arguments))


def _run(options: argparse.Namespace) -> int:
    try:
        with sigterm_as_interrupt():
            return _train(options)
    except Terminated:
        print("Stopped by SIGTERM.", file=sys.stderr)
        return _TERMINATED
    except KeyboardInterrupt:
        return INTERRUPTED


def _train(options: argparse.Namespace) -> int:
    processes = LaunchedProcesses()
    try:
        with processes:
            _carry_out(options, processes)
    except HFCkptError as error:
        # What the callback raises of plans and checkpoints, it raises with the same words in all processes.
        is_said = isinstance(error, PlanMismatchError | SavedFilesError) or processes.is_printed_by_another(error)
        if processes.rank == 0 or not is_said:
            speaker = "" if processes.rank == 0 else f"[process {processes.rank}] "
            print(f"{speaker}{error}", file=sys.stderr)
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
    if processes.size > 1:
        from torch import distributed

        # When all are through, as torch asks for at the end of a program.
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _parser(prog: str) -> argparse.ArgumentParser:
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


def _quieten(*, is_first: bool) -> None:
    """Show what this package says, once, and leave out what libraries say of themselves at every start."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_ckpt").setLevel(logging.INFO if is_first else logging.WARNING)
    if not is_first:
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    if not sys.stderr.isatty():
        # Before the libraries are imported, which read it then.
        for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    # peft imports bitsandbytes where it is installed, which tells on the CPU of kernels that it does not need.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", OLD_NAMES, FutureWarning)
    # Where DeepSpeed is installed, accelerate imports it, and it tells on standard output that it found no GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator" not in record.getMessage())


# --- SIGTERM ends a run as Ctrl-C does. Only a command may say so: signals belong to the program. ---


_DEADLINE_S = 20.0
"""How long the run may take to end, in seconds. Launchers kill what has not ended 30 s after SIGTERM."""
_TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """Raised in the main thread on SIGTERM."""


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, after the handler that was there; in the end put that one back.

    A handler that is set within governs, such as the Trainer's with `enable_jit_checkpoint`.
    """
    found = signal.getsignal(signal.SIGTERM)
    # Only the main thread may set a handler. None: one that is not Python's.
    if threading.current_thread() is not threading.main_thread() or found in (signal.SIG_IGN, None):
        yield
        return
    process, deadline = os.getpid(), threading.Timer(_DEADLINE_S, os._exit, [_TERMINATED])
    deadline.daemon = True

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            # A forked child, such as one that reads data, has its parent's handlers.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if callable(found):
            found(number, frame)
        # Once: the run is ending, and must not be interrupted in that.
        if deadline.ident is None:
            deadline.start()
            raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, found)
        deadline.cancel()


# --- The command, which may start several processes. ---


def _command_parser() -> argparse.ArgumentParser:
    parser = _parser("hf-ckpt finetune")
    parser.add_argument("--processes", type=count, metavar="N", help="start so many processes, one for each GPU")
    parser.add_argument(
        "--config-file",
        type=shipped_config,
        metavar="FILE",
        help="start processes as this configuration of accelerate says, such as fsdp2_8gpu or one of your own",
    )
    return parser


def _run_or_launch(options: argparse.Namespace) -> int:
    if options.processes in (None, 1) and options.config_file is None:
        return _run(options)
    check_config_file("--config-file", options.config_file)
    # What is wrong is said once, here, before processes are started.
    recipe = read_recipe(options)
    if not options.print:
        require_for(recipe, "datasets", *(["deepspeed"] if _is_deepspeed(options.config_file) else []))
    if options.config_file is None:
        import torch

        # Without a GPU, accelerate would start one process whatever is asked.
        if (wanted := options.processes) > (num_gpus := torch.accelerator.device_count()):
            raise RecipeError(f"--processes {wanted}: each has a GPU of its own, and this machine has {num_gpus}.")
    command = [sys.executable, "-m", "accelerate.commands.launch", *_launch_options(options)]
    command += ["--module", "hf_ckpt.cli.finetune", options.recipe, *options.overrides]
    command += [f"--{name}" for name in _FLAGS if getattr(options, name)]
    # In place of this process: signals and the exit code are the launcher's.
    os.execv(sys.executable, command)


def _launch_options(options: argparse.Namespace) -> Iterator[str]:
    # Else the launcher adds a traceback of its own to what the processes said.
    yield "--quiet"
    if options.config_file is not None:
        yield from ("--config_file", str(options.config_file))
    else:
        # Every option is given, so that accelerate names no defaults. Precision is the recipe's.
        yield from ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    if options.processes is not None:
        yield from ("--num_processes", str(options.processes))


def _is_deepspeed(path: Path | None) -> bool:
    """Whether a configuration of accelerate starts DeepSpeed, which must be there before the launcher is."""
    return (
        path is not None and re.search(r"^distributed_type: *DEEPSPEED\b", path.read_text(), re.MULTILINE) is not None
    )


FINETUNE = Command(_command_parser, _run_or_launch, "train as a recipe says")


if __name__ == "__main__":
    sys.exit(main())
