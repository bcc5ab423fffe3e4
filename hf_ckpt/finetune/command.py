"""The command line of scripts/finetune.py."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from hf_ckpt.errors import HFCkptError
from hf_ckpt.finetune.recipe import load_recipe

_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 2 for wrong input."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        recipe = load_recipe(options.recipe, options.overrides)
        if options.print:
            print(recipe.to_yaml(), end="")
            return 0
        _quieten()
        # Only now: a wrong recipe is refused before torch is loaded.
        from hf_ckpt.finetune.train import finetune

        finetune(recipe, is_resumed=options.resume, is_merged=options.merge)
    except HFCkptError as error:
        print(f"{_process()}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finetune.py",
        allow_abbrev=False,
        description="Fine-tune a causal language model as a recipe says, with activation checkpointing per layer.",
        epilog="Example: accelerate launch scripts/finetune.py recipes/tiny_llama_lora.yaml training.max_steps=20",
    )
    parser.add_argument("recipe", help="a YAML file, such as recipes/tiny_llama_lora.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values to use instead of the recipe's")
    parser.add_argument("--print", action="store_true", help="print the resolved recipe and stop")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in training.output_dir")
    parser.add_argument(
        "--merge", action="store_true", help="also write the base model with the adapter merged into it"
    )
    return parser


def _process() -> str:
    """Return which process speaks, where there are several and it is not the first one."""
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f"[process {rank}] "


def _quieten() -> None:
    """Show what this package says, once, and leave out what libraries say of themselves at every start."""
    is_first = not _process()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_ckpt").setLevel(logging.INFO if is_first else logging.WARNING)
    if not is_first:
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    # peft imports bitsandbytes where it is installed, which tells on the CPU of kernels that it does not need.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # peft asks transformers 5.2x by the old name whether checkpointing is on.
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
