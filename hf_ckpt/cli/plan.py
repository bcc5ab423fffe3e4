"""`hf-ckpt plan`: the fastest plan that fits a budget, as text, as JSON, and as a picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.model_options import add_model_options, read_recipe_or_model
from hf_ckpt.cli.shared_options import (
    Command,
    add_cache_option,
    add_html_option,
    add_step_options,
    check_folder,
    check_predicting,
    code_of,
    leaving_at_ctrl_c,
    quiet,
    recipe_parser,
    say,
    subject_asked,
)
from hf_ckpt.errors import RecipeError
from hf_ckpt.estimate import tables
from hf_ckpt.simulation.devices import NO_DEVICE, may_have_gpu
from hf_ckpt.units import Budget, parse_budget

if TYPE_CHECKING:
    from hf_ckpt.estimate.recipe_plan import PlannedRecipe
    from hf_ckpt.recipe.recipe import Recipe


def _parser() -> argparse.ArgumentParser:
    parser = recipe_parser(
        "plan",
        "Choose, layer by layer, the fastest way to checkpoint a recipe's activations\n"
        "that fits a memory budget, and simulate it whole. Needs no GPU and loads no\nweights.",
        epilog="""exit codes: 0 there is a plan; 1 none fits; 2 wrong input; 3 one fits perhaps

examples:
  hf-ckpt plan recipes/llama7b_lora.yaml --memory-budget 22GiB
  hf-ckpt plan recipes/llama7b_lora.yaml --device rtx4090 --memory-budget 0.9 \\
    --out plan.json --plot frontier.png
  accelerate launch scripts/finetune.py recipes/llama7b_lora.yaml \\
    checkpointing.policy=plan.json""",
    )
    parser.add_argument(
        "--memory-budget",
        metavar="AMOUNT",
        help="what the whole step may use, such as 22GiB, or a fraction of the device; the recipe's own, or the "
        "whole device, if left out; CUDA's context is a part of it",
    )
    parser.add_argument("--device", metavar="NAME", help="such as rtx4090; this machine's GPU if left out")
    add_step_options(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="write the plan, for checkpointing.policy=FILE.json"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the frontier of peak against step time")
    add_html_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with every figure and version")
    add_cache_option(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="say whether the answer was kept from before")
    add_model_options(parser)
    return parser


def _run(options: argparse.Namespace) -> int:
    # What is wrong here is refused before torch is loaded.
    recipe = read_recipe_or_model(options)
    budget = None if options.memory_budget is None else parse_budget(options.memory_budget, key="--memory-budget")
    if options.out is not None and options.out.suffix != ".json":
        raise RecipeError(f"--out {options.out}: recipes know a plan's file by its ending. Write {options.out}.json.")
    check_folder("--out", options.out)
    check_predicting(options, [options.device] if options.device else [])
    if options.device is None and not may_have_gpu() and not recipe.training.get("use_cpu"):
        amount = _amount(recipe, budget)
        if amount is None or amount.num_bytes is None:
            # No card can be assumed for it.
            raise RecipeError(NO_DEVICE)
    # They import huggingface_hub, which no refusal so far has waited for.
    from hf_ckpt.cli.answer_cache import remembered
    from hf_ckpt.loading.config_files import check_config

    # Last, as the hub may take seconds to answer.
    check_config(recipe)

    document, is_kept = remembered("plan", recipe, options, lambda: _document(recipe, options, budget))
    if is_kept and options.verbose:
        say("From cache.")
    if options.out is not None:
        options.out.write_text(json.dumps(document["plan"], indent=1) + "\n", encoding="utf-8")
        say(f"Wrote {options.out}. A recipe names it: checkpointing.policy={options.out}")
    print(tables.json_text(document, options.words) if options.json else tables.plan_text(document))
    return code_of([document["verdict"]["fits"]])


def _document(recipe: Recipe, options: argparse.Namespace, budget: Budget | None) -> dict[str, Any]:
    """Return what is answered, and draw it where that is wanted."""
    say("Building the model without weights ...")
    with quiet(), leaving_at_ctrl_c():
        from hf_ckpt.estimate import recipe_plan

        device, assumed = recipe_plan.device_for(recipe, options.device, _amount(recipe, budget))
        subject = subject_asked(recipe, options)
    with quiet():
        with_fixed = options.plot is not None or options.html is not None
        found = recipe_plan.plan_recipe(subject, device, budget, say, with_fixed=with_fixed)
        if options.plot is not None:
            from hf_ckpt.estimate.plots import frontier, frontier_svg, paint, title_of

            drawing = frontier_svg(frontier(found.planned.chain), found.steps(), device)
            say(f"Wrote {paint(drawing, options.plot, title_of(subject, device))}")
        document = recipe_plan.plan_as_json(found, assumed)
        if options.html is not None:
            _write_page(found, document, options)
    return document


def _amount(recipe: Recipe, budget: Budget | None) -> Budget | None:
    """Return the budget to plan for: that of the command, or the recipe's own."""
    own = None if recipe.checkpointing is None else recipe.checkpointing.budget
    return own if budget is None else budget


def _write_page(found: PlannedRecipe, document: dict[str, Any], options: argparse.Namespace) -> None:
    from hf_ckpt.cli.inspect_report import ledger
    from hf_ckpt.estimate.html_page import Page
    from hf_ckpt.policy.policy import AUTO

    page = Page(
        title=f"hf-ckpt plan {found.subject.title}",
        verdict=tables.verdict_on_plan(document),
        device=found.device,
        facts=tables.named_facts(document, [document["card"]]),
        steps=found.steps(),
        decides=AUTO,
        chain=found.planned.chain,
        ledger=ledger(found.planned.memory),
        words=options.words,
        fits={row.name: str(verdict.fit) for row in found.rows for verdict in row.verdicts.values()},
    )
    page.write(options.html)
    say(f"Wrote {options.html}")


PLAN = Command(
    _parser, _run, "the fastest plan that fits a memory budget, as JSON that a recipe can name", only_predicts=True
)
