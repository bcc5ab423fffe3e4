"""Activation (gradient) checkpointing for the HuggingFace Trainer, chosen per decoder layer.

The names below are the whole public surface. They are loaded on first use: importing the package loads neither torch
nor transformers, and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_ckpt.callback import HFCkptCallback
    from hf_ckpt.errors import (
        AlreadyAppliedError,
        BudgetError,
        DataError,
        DiskFullError,
        HFCkptError,
        HostMemoryError,
        OffloadError,
        OtherProcessError,
        OutOfMemoryError,
        PlanMismatchError,
        PolicyError,
        RecipeError,
        SavedFilesError,
        StructureError,
        UnsupportedError,
    )
    from hf_ckpt.estimate.api import max_length, plan, simulate
    from hf_ckpt.own_loop import apply
    from hf_ckpt.patch.apply import remove
    from hf_ckpt.policy.plan import Plan
    from hf_ckpt.policy.policy import Policy
    from hf_ckpt.recipe.recipe import load_recipe
    from hf_ckpt.structure.layers import find_layers
    from hf_ckpt.verify.run import verify

__version__ = "0.1.0"

__all__ = [
    "AlreadyAppliedError",
    "BudgetError",
    "DataError",
    "DiskFullError",
    "HFCkptCallback",
    "HFCkptError",
    "HostMemoryError",
    "OffloadError",
    "OtherProcessError",
    "OutOfMemoryError",
    "Plan",
    "PlanMismatchError",
    "Policy",
    "PolicyError",
    "RecipeError",
    "SavedFilesError",
    "StructureError",
    "UnsupportedError",
    "__version__",
    "apply",
    "find_layers",
    "load_recipe",
    "max_length",
    "plan",
    "remove",
    "simulate",
    "verify",
]

_HOMES = {
    "HFCkptCallback": "hf_ckpt.callback",
    "Plan": "hf_ckpt.policy.plan",
    "Policy": "hf_ckpt.policy.policy",
    "apply": "hf_ckpt.own_loop",
    "find_layers": "hf_ckpt.structure.layers",
    "load_recipe": "hf_ckpt.recipe.recipe",
    "max_length": "hf_ckpt.estimate.api",
    "plan": "hf_ckpt.estimate.api",
    "remove": "hf_ckpt.patch.apply",
    "simulate": "hf_ckpt.estimate.api",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "verify":
        # A package that can be called.
        return importlib.import_module("hf_ckpt.verify")
    home = _HOMES.get(name, "hf_ckpt.errors")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
