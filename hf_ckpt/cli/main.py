"""The `hf-ckpt` command: arguments in, text out.

Torch and transformers are loaded only once the arguments and the recipe have been read.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from hf_ckpt import second_process
from hf_ckpt.cli.completion import completion
from hf_ckpt.cli.devices import DEVICES_COMMAND
from hf_ckpt.cli.env import ENV
from hf_ckpt.cli.estimate import ESTIMATE
from hf_ckpt.cli.finetune import FINETUNE
from hf_ckpt.cli.init import INIT
from hf_ckpt.cli.inspect import INSPECT
from hf_ckpt.cli.models import MODELS
from hf_ckpt.cli.plan import PLAN
from hf_ckpt.cli.profile import PROFILE
from hf_ckpt.cli.recipes import RECIPES
from hf_ckpt.cli.shared_options import FAILS, HOLDS, INTERRUPTED, PIPE_CLOSED, STOPPED, WRONG_INPUT, Command
from hf_ckpt.cli.ui import UI
from hf_ckpt.cli.verify import VERIFY
from hf_ckpt.errors import BudgetError, HFCkptError, did_you_mean
from hf_ckpt.estimate.tables import wrapped
from hf_ckpt.garbage_collection import hold_off_for_good
from hf_ckpt.recipe.optional_packages import EXTRAS, missing_text
from hf_ckpt.simulation.devices import may_have_gpu
from hf_ckpt.verify.processes import LostProcessError

_COMMANDS = {
    "recipes": RECIPES,
    "init": INIT,
    "estimate": ESTIMATE,
    "plan": PLAN,
    "finetune": FINETUNE,
    "verify": VERIFY,
    "inspect": INSPECT,
    "profile": PROFILE,
    "models": MODELS,
    "devices": DEVICES_COMMAND,
    "ui": UI,
    "env": ENV,
}
_COMMANDS["completion"] = completion(dict(_COMMANDS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. `arguments`: of the command line; this process's where left out."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = _command_of(words)
    if command is None:
        # Prints help or the version, or refuses the word.
        parser = _parser()
        if words and not words[0].startswith("-"):
            known = f"the commands are {', '.join(_COMMANDS)}"
            parser.error(f'there is no command "{words[0]}"; {known}.{did_you_mean(words[0], _COMMANDS)}')
        parser.parse_args(words or ["--help"])
        return HOLDS
    options = command.parser().parse_intermixed_args(words[1:], argparse.Namespace(words=words))
    try:
        return command.run(options)
    except (LostProcessError, BudgetError) as error:
        print(_shown(error), file=sys.stderr)
        return FAILS
    except HFCkptError as error:
        print(_shown(error), file=sys.stderr)
        return WRONG_INPUT
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        print(missing_text(error.name), file=sys.stderr)
        return WRONG_INPUT
    except BrokenPipeError:
        # Such as `| head`: nobody reads on. What Python would still write in the end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print(f"\n{STOPPED}", file=sys.stderr)
        return INTERRUPTED


def run() -> NoReturn:
    """Run the command as a program: see `main`."""
    command = _command_of(sys.argv[1:])
    if command is None or not command.only_predicts:
        sys.exit(main())
    # What it imports and simulates is in use until it ends: to search that for garbage would take a second in all.
    hold_off_for_good()
    # Nor is anything compiled: bitsandbytes, which peft imports, would load torch's compiler for a second.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Nor computed: threads would only be in the way of a second process.
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Where there is a GPU, torch's autograd starts threads.
    if not may_have_gpu():
        second_process.allow()
    code = main()
    # Python would go on for a second or two, to take apart what torch and transformers have loaded.
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = PIPE_CLOSED
    os._exit(code)


def _command_of(words: Sequence[str]) -> Command | None:
    return _COMMANDS.get(words[0]) if words else None


def _shown(error: Exception) -> str:
    """Return a message as text, in short lines on a terminal; elsewhere lines are whole, for those who search them."""
    return wrapped(str(error)) if sys.stderr.isatty() else str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-ckpt",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Activation checkpointing per decoder layer: predict what a recipe needs,\n"
        "plan for a budget, and prove that a plan is right.",
        epilog="""hf-ckpt COMMAND --help says more.

exit codes: 0 all is well; 1 a check of verify failed, or nothing fits;
  2 wrong input; 3 it fits only perhaps; 130 Ctrl-C

examples:
  hf-ckpt estimate llama7b_lora --device rtx4090
  hf-ckpt plan llama7b_lora --memory-budget 22GiB --out plan.json
  hf-ckpt finetune llama7b_lora training.learning_rate=1e-4
  hf-ckpt finetune llama7b_full_fsdp --config-file fsdp2_8gpu
  hf-ckpt verify my_recipe.yaml --processes 2 --engine fsdp2
  hf-ckpt inspect gemma3_4b_lora""",
    )
    parser.add_argument("--version", action="version", version=f"hf-ckpt {version('hf_ckpt')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        commands.add_parser(name, help=command.help)
    return parser


if __name__ == "__main__":
    run()
