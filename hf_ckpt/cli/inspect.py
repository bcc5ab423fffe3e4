"""`hf-ckpt inspect`: layers, parts, and what each mode would do."""

from __future__ import annotations

import argparse

from hf_ckpt.cli.model_options import add_model_options, read_recipe_or_model
from hf_ckpt.cli.shared_options import HOLDS, Command, quiet, recipe_parser


def _parser() -> argparse.ArgumentParser:
    parser = recipe_parser(
        "inspect", "Show the layers of a recipe's model, their parts, and what each mode would do. Loads no weights."
    )
    parser.add_argument("--layers", metavar="PATH", help="dotted path of the layer list, where it is not found")
    parser.add_argument(
        "--attention", metavar="NAME", help="name of the attention in each layer, where it is not found"
    )
    parser.add_argument("--ffn", metavar="NAME", help="name of the ffn in each layer, where it is not found")
    add_model_options(parser)
    return parser


def _run(options: argparse.Namespace) -> int:
    from hf_ckpt.loading.config_files import check_config

    recipe = read_recipe_or_model(options)
    check_config(recipe)
    names = {name: value for name in ("layers", "attention", "ffn") if (value := getattr(options, name)) is not None}
    with quiet():
        from hf_ckpt.cli.inspect_report import inspect_report

        text = inspect_report(recipe, names)
    print(text)
    return HOLDS


INSPECT = Command(
    _parser, _run, "layers, parts, and what each mode would do; no weights are loaded", only_predicts=True
)
