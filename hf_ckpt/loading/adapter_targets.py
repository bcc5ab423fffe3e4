"""Whether a model has all that a recipe's adapter is to be on.

PEFT goes on where some of the names in `target_parameters` or `rank_pattern` match nothing, and warns where none does.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_ckpt.errors import HFCkptError, RecipeError
from hf_ckpt.recipe.recipe import Values
from hf_ckpt.structure.experts import names_of_experts
from hf_ckpt.structure.layers import find_layers
from hf_ckpt.structure.stored import adapted_parameter, path_without_adapters
from hf_ckpt.upstream.peft import UNMATCHED

_BASE = "base_model.model."


def check_parameters(model: nn.Module, section: Values, name: str) -> None:
    """Refuse names in `target_parameters` of an adapter's section that PEFT would find nothing for, or cannot adapt.

    `model`: without the adapter. `name`: of the section in the recipe.
    """
    parameters = dict(model.named_parameters())
    for target in section.get("target_parameters") or ():
        reached = [path for path in parameters if path == target or path.endswith(f".{target}")]
        if not reached:
            raise RecipeError(
                f"{name}.target_parameters: {target} is no parameter of {type(model).__name__}.{_experts_of(model)}"
            )
        parameter = parameters[reached[0]]
        if not parameter.is_floating_point():
            raise RecipeError(
                f"{name}.target_parameters: {reached[0]} is quantised, and PEFT adapts parameters that are not. Name "
                "its module in target_modules."
            )


def _experts_of(model: nn.Module) -> str:
    try:
        found = names_of_experts(find_layers(model))
    except HFCkptError:
        found = ()
    return f" Its experts are {', '.join(found)}." if found else " It has no experts that are one parameter."


def check_matches(adapted: Any, section: Values, name: str) -> None:
    """Refuse names in `target_modules`, `rank_pattern` and `alpha_pattern` of which PEFT has found none.

    `adapted`: the model with the adapter.
    """
    tuner = adapted.base_model
    modules: list[str] | None = getattr(tuner, "targeted_module_names", None)
    if modules is None:
        # Virtual tokens are on no module.
        return
    if section.get("target_modules") and not modules:
        raise RecipeError(
            f"{name}.target_modules: {type(tuner.model).__name__} has no module of these names. Write [] to adapt "
            "target_parameters alone."
        )
    paths = [*modules, *_adapted_parameters(adapted)]
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in section.get(field) or ():
            if not any(re.match(rf"(.*\.)?({pattern})$", path) for path in paths):
                raise RecipeError(f"{name}.{field}: {pattern} matches nothing that the adapter is on.")


def _adapted_parameters(adapted: nn.Module) -> Iterator[str]:
    for path, module in adapted.named_modules():
        if (parameter := adapted_parameter(module)) is not None:
            yield f"{path_without_adapters(path.removeprefix(_BASE))}.{parameter.name}"


@contextmanager
def unmatched_untold() -> Iterator[None]:
    """Leave out what PEFT warns of names without a match: ours are refused, and those that it adds itself do match."""
    with warnings.catch_warnings():
        for message in UNMATCHED:
            warnings.filterwarnings("ignore", message, RuntimeWarning)
        yield
