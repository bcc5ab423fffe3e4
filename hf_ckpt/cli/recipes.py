"""`hf-ckpt recipes`: the recipes that come with the package."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from hf_ckpt.cli.common import HOLDS, Command
from hf_ckpt.estimate.tables import wrapped
from hf_ckpt.recipe import shipped


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-ckpt recipes",
        allow_abbrev=False,
        description="List the recipes that come with the package, with the hardware that each is for and what it is "
        "predicted to need there. The other commands take their names, and so does `extends` in a recipe of your own.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _run(options: argparse.Namespace) -> int:
    found = list(shipped.summaries())
    if options.json:
        print(json.dumps({"folder": str(shipped.folder()), "recipes": [asdict(each) for each in found]}, indent=1))
        return HOLDS
    for each in found:
        print(each.name)
        for text in (each.purpose, each.hardware, each.memory):
            print(wrapped(text, indent="  "))
    print(wrapped(f"\nThey lie in {shipped.folder()}."))
    return HOLDS


RECIPES = Command(_parser, _run, "the recipes that come with the package, and what each needs")
