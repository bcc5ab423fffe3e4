"""What the shipped recipes are predicted to need: their headers, what documents quote of them, and exact figures.

    python -m benchmarks.recipe_figures            # write all of it anew; simulates for a quarter of an hour or more
    python -m benchmarks.recipe_figures --recipe qwen3_8b_lora    # the header of one recipe, and all exact figures
    python -m benchmarks.recipe_figures --check    # one step of each recipe: which figures the code has moved

The exact figures are what a check holds the code against: a header rounds, and a search for the longest row takes long.
A recipe's own plan is simulated; for policy `auto`, which would have to be planned first, one that needs least.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.recipe_headers import needs_of, on_hardware, plans_on_cards, with_cards, with_needs
from benchmarks.runner import RESULTS, main
from hf_ckpt.cli.main import main as hf_ckpt
from hf_ckpt.estimate.max_length_and_batch import leanest_plans
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import is_auto
from hf_ckpt.estimate.tables import format_seconds, versions
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.units import format_bytes

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
FIGURES, ESTIMATE = RESULTS / "recipe_figures.json", RESULTS / "estimate_llama7b_lora.json"
ESTIMATED = "llama7b_lora"
"""The recipe that documents quote."""
HELD = ("none", "full")
"""The rows of its estimate that are held against the code, as documents show them: rounded. What the planner chooses
would have to be planned again."""

# What figures hold for; other packages do not move them.
_VERSIONS = ("torch", "transformers", "peft", "bitsandbytes")
# Sums of seconds may be added up in another order.
_SAME = 1e-9

Figure = dict[str, Any]


def shipped() -> list[Path]:
    """Return the shipped recipes."""
    return sorted(RECIPES.glob("*.yaml"))


def figure_of(path: Path) -> Figure:
    """Simulate a step of a recipe on the hardware that its header names."""
    predictor = on_hardware(path)
    subject = predictor.subject
    plan = next(leanest_plans(subject)) if is_auto(subject.recipe) else subject.plan
    return {"inputs": inputs_of(path), "device": predictor.device.name, **_exactly(predictor.memory(plan))}


def inputs_of(path: Path) -> str:
    """Return a digest of what a recipe says, comments aside."""
    said = yaml.safe_load(path.read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def rows_of_estimate(recorded: Mapping[str, Any], predictor: Predictor) -> Iterator[tuple[str, Figure, Figure]]:
    """Yield the name of each row of the estimate that is held, what it says, and what is predicted now."""
    rows = {row["name"]: row for row in recorded["rows"]}
    for name in HELD:
        now = predictor.memory(predictor.subject.resolve(name))
        said = _shown(rows[name]["peak_bytes"], rows[name]["seconds"]["total"])
        yield name, said, _shown(now.peak_bytes, now.time.total)


def moved(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return which figures of one recipe are not what was recorded, in words."""
    return [
        f"{key} was {recorded.get(key)}, is {value}"
        for key, value in found.items()
        if recorded.get(key) != value
        and not (key == "seconds" and math.isclose(value, recorded.get(key, 0.0), rel_tol=_SAME))
    ]


def of_versions(recorded: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of those packages that figures depend on."""
    return {name: number.partition("+")[0] for name, number in recorded["versions"].items() if name in _VERSIONS}


def write(say: Callable[[str], None] = print) -> None:
    """Write headers, the estimate with its pictures, and the exact figures."""
    for path in shipped():
        write_header(path, say)
    write_estimate()
    write_figures()


def write_header(path: Path, say: Callable[[str], None] = print) -> None:
    """Write what a recipe's header says of its needs."""
    needs, cards = needs_of(path), plans_on_cards(on_hardware(path))
    text = with_needs(path.read_text(encoding="utf-8"), needs)
    path.write_text(with_cards(text, cards), encoding="utf-8")
    say("\n  ".join([f"{path.stem}: {needs.describe()}", *cards]))


def write_estimate() -> None:
    """Run the command that the committed estimate names, which draws the pictures too."""
    words = ["estimate", f"recipes/{ESTIMATED}.yaml", "--device", "rtx4090", "--json"]
    text = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(text):
        hf_ckpt([*words, "--plot", f"docs/images/{ESTIMATED}.png"])
    ESTIMATE.write_text(text.getvalue(), encoding="utf-8")


def write_figures() -> None:
    """Simulate a step of each recipe, and write what it needs."""
    recipes = {path.stem: figure_of(path) for path in shipped()}
    read = {"command": "python -m benchmarks.recipe_figures", "versions": versions(), "recipes": recipes}
    FIGURES.write_text(json.dumps(read, indent=1) + "\n", encoding="utf-8")


def check(say: Callable[[str], None] = print) -> int:
    """Say which figures the code has moved; return how many recipes have one."""
    if not FIGURES.is_file():
        raise SystemExit(f"There is no {FIGURES}. Write it: python -m benchmarks.recipe_figures --exact")
    recorded = json.loads(FIGURES.read_text(encoding="utf-8"))
    if of_versions(recorded) != of_versions({"versions": versions()}):
        say(f"The figures hold for {of_versions(recorded)}; other versions may move them.")
    found = {path.stem: moved(recorded["recipes"].get(path.stem, {}), figure_of(path)) for path in shipped()}
    rows = rows_of_estimate(json.loads(ESTIMATE.read_text()), on_hardware(RECIPES / f"{ESTIMATED}.yaml"))
    found |= {f"{ESTIMATE.name}, {name}": moved(said, now) for name, said, now in rows}
    for name, what in found.items():
        say(f"{name}: {'; '.join(what) or 'as recorded'}")
    num_moved = sum(map(bool, found.values()))
    if num_moved:
        say(f"{num_moved} moved. Write them anew: make figures")
    return num_moved


def _exactly(memory: StepMemory) -> Figure:
    return {
        "peak_bytes": memory.peak_bytes,
        "host_bytes": memory.host_bytes,
        "seconds": memory.time.total,
        "num_flops": sum(memory.num_flops.values()),
    }


def _shown(peak_bytes: int, seconds: float) -> Figure:
    return {"peak": format_bytes(peak_bytes), "step": format_seconds(seconds)}


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.description, parser.formatter_class = __doc__, RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say what the code has moved, and write nothing")
    what.add_argument("--exact", action="store_true", help="write the exact figures only: neither headers nor estimate")
    what.add_argument("--recipe", action="append", metavar="NAME", help="a header to write; may be given several times")


def run(options: Namespace) -> int:
    """Write, or check."""
    if options.check:
        return min(1, check())
    for name in options.recipe or ():
        write_header(RECIPES / f"{name}.yaml")
    write_figures() if options.exact or options.recipe else write()
    return 0


if __name__ == "__main__":
    sys.exit(main(__name__))
