"""The `hf-ckpt` command: arguments in, text out.

Torch and transformers are loaded only once the arguments and the recipe have been read.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.errors import HFCkptError, RecipeError
from hf_ckpt.finetune.verify.launch import PROGRESS, Answer, LostProcessError, ask, leave_answer

if TYPE_CHECKING:
    from hf_ckpt.finetune.recipe import Recipe
    from hf_ckpt.finetune.verify.check import Report

_HOLDS, _FAILS, _WRONG_INPUT, _INTERRUPTED = 0, 1, 2, 130
_ENGINES = ("ddp", "fsdp1", "fsdp2")
_COLUMNS = 120
# What the plugin does not need and recipes do.
_OF_EXTRA = ("yaml", "peft", "datasets")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: of the command line; this process's where left out.

    Returns:
        0 when all is well, 1 when a check of `verify` failed, 2 for wrong input.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = _COMMANDS.get(words[0]) if words else None
    if command is None:
        # Prints help or the version, or refuses the word.
        _parser().parse_args(words or ["--help"])
        return _HOLDS
    make, run = command
    options = make().parse_intermixed_args(words[1:])
    try:
        return run(options)
    except LostProcessError as error:
        print(error, file=sys.stderr)
        return _FAILS
    except HFCkptError as error:
        print(error, file=sys.stderr)
        return _WRONG_INPUT
    except ModuleNotFoundError as error:
        if error.name not in _OF_EXTRA:
            raise
        print(f'hf-ckpt needs {error.name}, which is not installed: pip install "hf_ckpt[finetune]"', file=sys.stderr)
        return _WRONG_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED


# --- What the command takes. ---


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-ckpt",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Activation checkpointing per decoder layer: look at a recipe, and prove that its plan is right.",
        epilog="""hf-ckpt COMMAND --help says more. To train: accelerate launch scripts/finetune.py recipe.yaml

exit codes: 0 all is well; 1 a check of verify failed; 2 wrong input

examples:
  hf-ckpt verify recipes/llama7b_lora.yaml
  hf-ckpt verify recipes/llama7b_full_fsdp.yaml --processes 2 --engine fsdp2
  hf-ckpt inspect recipes/gemma3_4b_lora.yaml""",
    )
    parser.add_argument("--version", action="version", version=f"hf-ckpt {version('hf_ckpt')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("verify", help="run a recipe a few steps with and without its plan, and compare everything")
    commands.add_parser("inspect", help="layers, parts, and what each mode would do; no weights are loaded")
    return parser


def _command_parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"hf-ckpt {name}", allow_abbrev=False, description=description)
    parser.add_argument("recipe", help="a YAML file, such as recipes/llama7b_lora.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values to use instead of the recipe's")
    return parser


def _verify_parser() -> argparse.ArgumentParser:
    parser = _command_parser(
        "verify",
        "Run a recipe a few steps with and without its plan and compare loss, gradients, weights, counts, names, and "
        "what is saved. The model is reduced to two layers of each kind and small widths; no weights and no data are "
        "loaded.",
    )
    parser.add_argument("--full", action="store_true", help="the real size, and the real weights where they are there")
    parser.add_argument("--json", action="store_true", help="print JSON, with every figure and version, and no table")
    parser.add_argument("--steps", type=_count, metavar="K", help="optimizer steps of each run")
    parser.add_argument("--processes", type=_count, default=1, metavar="N", help="run in N processes on this machine")
    parser.add_argument("--engine", choices=_ENGINES, help="of several processes; the recipe's own if left out, or ddp")
    parser.add_argument(
        "--setup",
        metavar="MODULE:FUNCTION",
        help="called with the model of each run, to put the hooks and patches of your own script on it",
    )
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    return parser


def _inspect_parser() -> argparse.ArgumentParser:
    parser = _command_parser(
        "inspect", "Show the layers of a recipe's model, their parts, and what each mode would do. Loads no weights."
    )
    parser.add_argument("--layers", metavar="PATH", help="dotted path of the layer list, where it is not found")
    parser.add_argument(
        "--attention", metavar="NAME", help="name of the attention in each layer, where it is not found"
    )
    parser.add_argument("--ffn", metavar="NAME", help="name of the ffn in each layer, where it is not found")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


# --- verify. ---


def _verify(options: argparse.Namespace) -> int:
    if options.answers is not None:
        return _verify_as_one_of_many(options)
    if options.engine and options.processes == 1:
        raise RecipeError(f"--engine {options.engine} is for several processes. Add --processes 2.")
    # A wrong recipe is refused before torch is loaded, and before processes are started.
    recipe = _recipe(options)
    setup = _setup(options.setup)
    if options.processes == 1:
        return _show(_verified(recipe, options, setup, _say), options)
    answer = ask(_for_others(options), num_processes=options.processes, say=_say)
    if answer.refusal:
        raise RecipeError(answer.refusal)
    from hf_ckpt.finetune.verify.report import from_json

    return _show(from_json(answer.report), options)


def _recipe(options: argparse.Namespace) -> Recipe:
    from hf_ckpt.finetune.recipe import load_recipe

    return load_recipe(options.recipe, options.overrides)


def _verified(
    recipe: Recipe, options: argparse.Namespace, setup: Callable[[Any], None] | None, say: Callable[[str], None]
) -> Report:
    with _quiet():
        from hf_ckpt.finetune.verify.verify import NUM_STEPS, verify

        return verify(recipe, is_full=options.full, num_steps=options.steps or NUM_STEPS, setup=setup, say=say)


def _show(report: Report, options: argparse.Namespace) -> int:
    from hf_ckpt.finetune.verify.report import table, to_json

    width = shutil.get_terminal_size((_COLUMNS, 0)).columns
    print(to_json(report) if options.json else table(report, width=width))
    return _HOLDS if report.holds else _FAILS


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what libraries print of themselves out of the report."""
    # bitsandbytes tells on the CPU of kernels that it does not need, DeepSpeed of the accelerator it sees.
    for name in ("bitsandbytes", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # peft asks transformers 5.2x by the old name whether checkpointing is on.
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- verify in several processes: the one that asks, and those that answer. ---


def _for_others(options: argparse.Namespace) -> list[str]:
    words = ["verify", options.recipe, *options.overrides]
    words += ["--full"] if options.full else []
    for name in ("steps", "engine", "setup"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return words


def _verify_as_one_of_many(options: argparse.Namespace) -> int:
    try:
        answer, code = Answer(report=_report_of_many(options)), _HOLDS
    except HFCkptError as error:
        # Not 0, so that torchrun ends the others, which may be waiting for this one.
        answer, code = Answer(refusal=str(error)), _WRONG_INPUT
    leave_answer(options.answers, answer)
    from hf_ckpt.finetune.verify.engine import end_process

    end_process(code)


def _report_of_many(options: argparse.Namespace) -> dict[str, Any]:
    recipe = _recipe(options)
    setup = _setup(options.setup)
    with _quiet():
        from hf_ckpt.finetune.verify.engine import join_processes, with_engine
        from hf_ckpt.finetune.verify.report import as_json

        is_first = join_processes()
        report = _verified(
            with_engine(recipe, options.engine), options, setup, _say_onward if is_first else _say_nothing
        )
        return as_json(report)


def _say_onward(text: str) -> None:
    _say(f"{PROGRESS}{text}")


def _say_nothing(text: str) -> None:
    """Leave it to the first process."""


# --- inspect. ---


def _inspect(options: argparse.Namespace) -> int:
    recipe = _recipe(options)
    names = {name: value for name in ("layers", "attention", "ffn") if (value := getattr(options, name)) is not None}
    with _quiet():
        from hf_ckpt.finetune.inspection import inspection

        text = inspection(recipe, names)
    print(text)
    return _HOLDS


_COMMANDS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[argparse.Namespace], int]]] = {
    "verify": (_verify_parser, _verify),
    "inspect": (_inspect_parser, _inspect),
}


if __name__ == "__main__":
    sys.exit(main())
