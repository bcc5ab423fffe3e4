"""`hf-ckpt profile`: a recipe's step measured on this machine."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from hf_ckpt.cli.model_options import read_recipe, require_for
from hf_ckpt.cli.shared_options import HOLDS, Command, count, quiet, recipe_parser, say


def _parser() -> argparse.ArgumentParser:
    parser = recipe_parser(
        "profile",
        "Run a recipe's step a few times on this machine, with random weights and one\n"
        "micro-batch. Print the time of forward, backward and recomputation, the memory\n"
        "after each, and what was predicted.",
        epilog="""examples:
  hf-ckpt profile tiny_llama_lora
  hf-ckpt profile llama7b_lora --trace trace.json checkpointing.policy=full""",
    )
    parser.add_argument("--steps", type=count, default=5, metavar="N", help="steps to measure (5)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write a trace of one step, with a range for each layer and each recomputation",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every figure and version")
    return parser


def _run(options: argparse.Namespace) -> int:
    recipe = read_recipe(options)
    require_for(recipe, "datasets")
    say("Building the model without weights ...")
    with quiet(), tempfile.TemporaryDirectory(prefix="hf_ckpt-profile-") as folder:
        from hf_ckpt.estimate import profiled_recipe
        from hf_ckpt.estimate.tables import json_text

        found = profiled_recipe.measure(recipe, say, num_steps=options.steps, trace=options.trace, folder=Path(folder))
    print(
        json_text(profiled_recipe.profile_as_json(found), options.words)
        if options.json
        else profiled_recipe.text(found)
    )
    return HOLDS


PROFILE = Command(_parser, _run, "run a step here: time of forward, backward and recomputation, memory, a trace")
