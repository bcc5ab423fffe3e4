"""What the commands of `hf-ckpt` share: a recipe and its overrides as arguments, what is said where, and exit codes.

Torch and transformers are not loaded here: wrong words and wrong recipes are refused before that.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.errors import RecipeError
from hf_ckpt.estimate.launch_config import Launch
from hf_ckpt.policy.options import TO_CPU, HeadMode, parse_offload, parse_weights
from hf_ckpt.recipe import shipped
from hf_ckpt.recipe.optional_packages import require
from hf_ckpt.simulation.devices import find_device

if TYPE_CHECKING:
    from hf_ckpt.estimate.step_of_recipe import Subject
    from hf_ckpt.recipe.recipe import Recipe

HOLDS, FAILS, WRONG_INPUT, PERHAPS, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 130, 141
"""Exit codes: all is well; a check failed, or nothing fits; wrong input; it fits only perhaps; Ctrl-C; nobody reads
what is printed."""
STOPPED = "Stopped by Ctrl-C."

_CONFIGS = "accelerate"
_LIBRARIES = "transformers peft trl accelerate bitsandbytes datasets DeepSpeed torch huggingface_hub".split()
"""Whose loggers keep to errors in a command that trains nothing."""


@dataclass(frozen=True)
class Command:
    """One command."""

    parser: Callable[[], argparse.ArgumentParser]  # Makes the parser of its arguments.
    run: Callable[[argparse.Namespace], int]  # Carries it out and returns the exit code.
    help: str  # One line for the list of commands.
    only_predicts: bool = False  # Runs nothing that has to be ended in order.


def command_parser(name: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a command, without arguments."""
    return argparse.ArgumentParser(
        prog=f"hf-ckpt {name}",
        allow_abbrev=False,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter if epilog else argparse.HelpFormatter,
    )


def recipe_parser(name: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a command that takes a recipe and overrides."""
    parser = command_parser(name, description, epilog)
    add_recipe_arguments(parser)
    return parser


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe and overrides to the parser of a command."""
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a YAML file, or a name that `hf-ckpt recipes` lists, such as llama7b_lora"
    )
    # With a default, they are not listed among what is required.
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.path=value", help="values to use instead of the recipe's"
    )


def listing_parser(name: str, description: str, verbose: str) -> argparse.ArgumentParser:
    """Return the parser of a command that lists what there is. `verbose`: what more -v says."""
    parser = command_parser(name, description)
    parser.add_argument("-v", "--verbose", action="store_true", help=verbose)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add what a plan may hold, and how the run is launched, to the parser of a command that predicts."""
    parser.add_argument(
        "--exact",
        choices=("prefer", "true", "false"),
        help="prefer: a plan that changes no bit of loss and gradients, if one fits; true: such a plan or none; false: "
        "the fastest plan, which may add sums in another order. The recipe's checkpointing.exact, or prefer, if left "
        "out",
    )
    parser.add_argument(
        "--offload",
        choices=(TO_CPU,),
        help="let the planner's choice keep layers' inputs in host memory. The recipe's checkpointing.offload, or "
        "none, if left out",
    )
    parser.add_argument(
        "--weights",
        choices=(TO_CPU,),
        help="let the planner's choice keep frozen weights in host memory while other layers run. The recipe's "
        "checkpointing.weights, or none, if left out",
    )
    parser.add_argument(
        "--head",
        choices=[mode.value for mode in HeadMode],
        help="chunked lets the planner's choice run head and loss in chunks, whatever --exact says; plain forbids it",
    )
    parser.add_argument(
        "--accelerate-config",
        type=shipped_config,
        metavar="FILE",
        help="the configuration that the run is launched with: fsdp2_8gpu, which comes with the package, or a file",
    )
    parser.add_argument("--engine", metavar="NAME", help="ddp, fsdp1, fsdp2, zero1, zero2 or zero3, over --processes")
    parser.add_argument("--processes", type=count, metavar="N", help="processes of the run, of all machines together")


def subject_asked(recipe: Recipe, options: argparse.Namespace) -> Subject:
    """Return what is predicted: a recipe, launched as the options say, which go before its own `checkpointing`."""
    from hf_ckpt.estimate.step_of_recipe import subject_of

    subject, allowed = subject_of(recipe, _launch(options)), dict[str, Any]()
    if options.exact is not None:
        allowed["exact"] = "prefer" if options.exact == "prefer" else options.exact == "true"
    if options.offload is not None:
        allowed["offload"] = parse_offload(options.offload)
    if options.weights is not None:
        allowed["weights"] = parse_weights(options.weights)
    if options.head is not None:
        allowed["head"] = options.head == HeadMode.CHUNKED
    given = {**subject.command_options, **{name: f"--{name}" for name in allowed}}
    return replace(subject, allowed=replace(subject.allowed, **allowed), command_options=given)


def count(text: str) -> int:
    """Read a whole number of 1 or more, as the type of an argument."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what libraries print and warn of out of the report: nothing is trained, and nobody can act on it."""
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w", encoding="utf-8") as nowhere:
            warnings.simplefilter("ignore")
            # Last added, first asked. Of the module whose line a warning points at.
            warnings.filterwarnings("default", module=r"hf_ckpt(\.|$)")
            with contextlib.redirect_stdout(nowhere):
                yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def say(text: str) -> None:
    """Tell on standard error what goes on."""
    print(text, file=sys.stderr, flush=True)


def _launch(options: argparse.Namespace) -> Launch:
    return Launch(config=options.accelerate_config, engine=options.engine, num_processes=options.processes)


def check_predicting(options: argparse.Namespace, devices: Sequence[str]) -> None:
    """Refuse a launch and devices that nobody knows, and files that could not be written, before torch is loaded."""
    check_config_file("--accelerate-config", options.accelerate_config, or_use="--engine and --processes")
    _launch(options).check()
    check_folder("--html", options.html)
    check_devices(devices)
    _check_times(options, devices)
    if options.plot is not None:
        require("matplotlib")
        check_folder("--plot", options.plot)


def shipped_config(name: str) -> Path:
    """Return the configuration of accelerate that an argument names: a file, or one that comes with the package."""
    path = Path(name)
    return path if path.is_file() else shipped.named(path, _CONFIGS) or path


def check_config_file(option: str, path: Path | None, or_use: str = "--processes") -> None:
    """Refuse a configuration of accelerate that is not there."""
    if path is not None and not path.is_file():
        known = ", ".join(shipped.names(_CONFIGS))
        raise RecipeError(f"{option}: there is no file {path}. Name one or one of {known}, or use {or_use}.")


def check_devices(names: Sequence[str]) -> None:
    """Refuse devices that nobody knows, before torch is loaded."""
    for name in names:
        find_device(name)


def _check_times(options: argparse.Namespace, devices: Sequence[str]) -> None:
    """Refuse pictures of time against memory where no times are known."""
    asked = [f"--{option}" for option in ("html", "plot") if getattr(options, option) is not None]
    if asked and devices and not (device := find_device(devices[0])).is_timed:
        raise RecipeError(
            f"{asked[0]} shows time against memory, and of --device {devices[0]} no times are known "
            f"({device.title}). Name a card of hf-ckpt devices that has rates, or leave {asked[0]} out."
        )


def add_cache_option(parser: argparse.ArgumentParser) -> None:
    """Add `--no-cache` to the parser of a command whose answers are remembered."""
    parser.add_argument(
        "--no-cache", action="store_true", help="work the answer out anew, and do not keep it (HF_CKPT_CACHE: where)"
    )


def add_html_option(parser: argparse.ArgumentParser) -> None:
    """Add `--html` to the parser of a command whose answer can be written as a page."""
    parser.add_argument(
        "--html", type=Path, metavar="FILE.html", help="write the answer as one page to share, with pictures"
    )


def check_folder(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written where it is, before what goes in it is worked out."""
    if path is None:
        return
    if path.is_dir():
        raise RecipeError(f"{option} {path}: this is a folder. Name a file in it.")
    if not path.absolute().parent.is_dir():
        raise RecipeError(f"{option} {path}: there is no folder {path.absolute().parent}.")


# --- How commands end. ---


def code_of(fits: Iterable[str]) -> int:
    """Return the code for what fits on one device or another; see `simulation.fit.Fit`."""
    found = set(fits)
    return HOLDS if "yes" in found else PERHAPS if "perhaps" in found else FAILS


@contextlib.contextmanager
def leaving_at_ctrl_c() -> Iterator[None]:
    """Leave at once on Ctrl-C: during transformers' imports it comes out as another error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        say(f"\n{STOPPED}")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
