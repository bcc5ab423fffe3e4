"""`hf-ckpt recipes`: the recipes that come with the package."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from hf_ckpt.cli.shared_options import HOLDS, Command, listing_parser
from hf_ckpt.estimate.tables import columns, wrapped
from hf_ckpt.recipe import shipped


def _parser() -> argparse.ArgumentParser:
    return listing_parser(
        "recipes",
        "List the recipes that come with the package, with the hardware that each is for and what it is "
        "predicted to need there. The other commands take their names, and so does `extends` in a recipe of your own.",
        "say what each is for, and all that it needs",
    )


def _run(options: argparse.Namespace) -> int:
    found = list(shipped.summaries())
    if options.json:
        print(json.dumps({"folder": str(shipped.folder()), "recipes": [asdict(each) for each in found]}, indent=1))
        return HOLDS
    where = f"\nThey lie in {shipped.folder()}."
    if options.verbose:
        for each in found:
            print(each.name)
            for text in (each.purpose, each.hardware, each.memory):
                print(wrapped(text, indent="  "))
    else:
        cells = [(each.name, each.gpus or "CPU", each.peak, each.longest_row) for each in found]
        print(*columns([("recipe", "GPUs", "peak of each", "longest sequence"), *cells], numeric=(2, 3)), sep="\n")
        where += " What each is for: hf-ckpt recipes -v"
    print(wrapped(where))
    return HOLDS


RECIPES = Command(_parser, _run, "the recipes that come with the package, and what each needs")
