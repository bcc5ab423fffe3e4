"""Recipes for `hf-ckpt verify` that take seconds, and what its tests ask of a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from hf_ckpt.recipe.recipe import load_recipe
from hf_ckpt.verify.report import Check, Report
from hf_ckpt.verify.run import verify
from tests import small_recipes

Setup = Callable[[nn.Module], None]

ALL = {
    *("run", "forward counts", "plan in force", "repeatability", "loss", "gradients", "trainable parameters"),
    *("weights", "random numbers", "buffers", "names", "training flags", "autocast", "hooks", "use_cache"),
    *("generation", "resume"),
}
"""Names of the checks of every recipe; adapters and full fine-tunes have some of their own."""
OF_ADAPTER = {"adapter file", "reload", "merge"}
OF_FULL = {"saved model"}


def report(
    folder: Path, *, setup: Setup | None = None, num_steps: int = 2, **sections: dict[str, Any] | None
) -> Report:
    """Verify a small Llama of four layers with dropout; sections are laid on as in `small_recipes.write`."""
    recipe = load_recipe(small_recipes.write(folder, **sections))
    return verify(recipe, setup=setup, num_steps=num_steps, say=lambda line: None)


def of(report: Report, name: str) -> Check:
    """Return the one check with this name."""
    (check,) = (check for check in report.checks if check.name == name)
    return check


def failed(report: Report) -> dict[str, str]:
    """Return the details of the checks that failed, by name; that the report does not hold then is asserted here."""
    details = {check.name: check.detail for check in report.checks if check.verdict == "fail"}
    assert report.holds is not bool(details)
    return details
