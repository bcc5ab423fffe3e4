"""`hf-ckpt init`: write a recipe for a model, a method and a data set."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from hf_ckpt.cli.estimate import ESTIMATE
from hf_ckpt.cli.model_options import add_model_options, model_of, on_experts, recipe_for, require_for, training_of
from hf_ckpt.cli.shared_options import HOLDS, Command, check_folder, command_parser, say
from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe.recipe import METHODS, Recipe, Training
from hf_ckpt.simulation.devices import find_device

_FILES = (".json", ".jsonl", ".parquet", ".csv", ".txt")
_COLUMNS = "a `text`, a `prompt` and a `completion`, or `messages`"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "init",
        "Write a recipe for a model and a data set, checked as a whole, under policy\n"
        "auto: the fastest plan that fits the GPU it meets. On a terminal, what is left\n"
        "out is asked. With a GPU it is estimated at once.",
        epilog="""exit codes: 0 it is written; 1 it is written and does not fit the GPU; 2 wrong
input, and nothing is written; 3 it is written and fits only perhaps

example:
  hf-ckpt init Qwen/Qwen3-8B --lora 16 --data rows.jsonl --out my_recipe.yaml \\
    --device rtx4090
  hf-ckpt finetune my_recipe.yaml""",
    )
    parser.add_argument("model", nargs="?", help="its id on the hub, or its folder")
    parser.add_argument("--data", metavar="NAME", help="a JSON lines file, a folder or an id on the hub")
    parser.add_argument("--out", type=Path, metavar="FILE.yaml", help="where to write the recipe")
    parser.add_argument("--device", metavar="NAME", help="a GPU to estimate the recipe for, such as rtx4090")
    add_model_options(parser, title="training", text=None)
    return parser


def _run(options: argparse.Namespace) -> int:
    _ask(options)
    path: Path = options.out
    if path.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"--out {path}: recipes are YAML files. Write {path}.yaml.")
    if path.exists():
        raise RecipeError(f"--out {path}: this file is there already. Name another, or remove it.")
    check_folder("--out", path)
    training = replace(training_of(options), data=options.data)
    if options.device is not None and find_device(options.device).is_slow_in_bfloat16:
        training = replace(training, dtype="float16")
        say(f"{options.device} has no matrix units for bfloat16: the recipe computes in float16.")
    recipe = recipe_for(training, model_of(options.model), with_experts=on_experts(options))
    if options.device is not None:
        require_for(recipe)
    path.write_text(recipe_text(recipe, path), encoding="utf-8")
    estimate = "" if options.device is not None else f"hf-ckpt estimate {path}, and "
    say(f"Wrote {path}. Next: {estimate}hf-ckpt finetune {path}.")
    data = Path(options.data).expanduser()
    if data.suffix in _FILES and not data.exists():
        say(f"{options.data} is not there yet. Each row of it has {_COLUMNS}.")
    if options.device is None:
        return HOLDS
    words = ["estimate", str(path), "--device", options.device, "--quick"]
    return ESTIMATE.run(ESTIMATE.parser().parse_intermixed_args(words[1:], argparse.Namespace(words=words)))


def recipe_text(recipe: Recipe, path: Path) -> str:
    """Return the text of a recipe's file."""
    return f"# Launch: hf-ckpt finetune {path}\n\n{recipe.to_yaml()}"


def _ask(options: argparse.Namespace) -> None:
    """Ask for what is left out; where nobody can answer, refuse."""
    questions = {"model": "Model (id on the hub, or folder): ", "data": "Data (JSON lines file, folder or id): "}
    questions["out"] = "Write the recipe to: "
    missing = [name for name in questions if getattr(options, name) is None]
    if missing and not sys.stdin.isatty():
        written = ", ".join("a model" if name == "model" else f"--{name}" for name in missing)
        them = "them" if len(missing) > 1 else "it"
        raise RecipeError(f"init needs {written}. Give {them}, or run it on a terminal, where it asks.")
    if missing and all(getattr(options, method) is None for method in METHODS):
        method = _answer(f"Method ({', '.join(METHODS)}) [{Training.method}]: ") or Training.method
        if method not in METHODS:
            raise RecipeError(f'"{method}" is no method. Choose one of {", ".join(METHODS)}.')
        setattr(options, method, True)
    for name in missing:
        answer = _answer(questions[name])
        if not answer:
            raise RecipeError("init stopped: nothing was answered, and nothing was written.")
        setattr(options, name, Path(answer) if name == "out" else answer)
    if missing and options.device is None:
        options.device = _answer("Card to estimate it for, such as rtx4090 [none]: ") or None


def _answer(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


INIT = Command(_parser, _run, "write a recipe for a model, a method and a data set")
