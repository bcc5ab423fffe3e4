"""Seeded weights for a config, tried for one step and saved where the recipe will load them from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe.recipe import Values

_ROWS, _TOKENS = 2, 24
_WHERE_ZERO = 0.02


def make_weights(section: Values, tokenizer: PreTrainedTokenizerBase, seed: int) -> int:
    """Make seeded weights for the config in a folder, run them for a step, and save them and the tokenizer beside it.

    Weights that a config starts as zeros, as gates and biases are, get small values: behind a closed gate no gradient
    would flow, and no fault be seen.

    Args:
        section: a `model` section; `name_or_path` is the folder.
        tokenizer: tells which tokens are text.
        seed: of the weights.

    Returns:
        How many parameters the model has.

    Raises:
        RecipeError: the model cannot be built, or cannot be trained on text.
    """
    folder = Path(section["name_or_path"])
    is_trusted = section.get("trust_remote_code", False)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=is_trusted)
        torch.manual_seed(seed)
        options = {key: section[key] for key in ("attn_implementation",) if key in section}
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=is_trusted, **options)  # type: ignore[no-untyped-call]  # upstream
        _fill_zeros(model)
        _try(model, tokenizer)
    except Exception as error:  # a model of unusual sizes may raise anything
        raise RecipeError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
    model.to(_dtype(section.get("dtype", "auto"), config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def _fill_zeros(model: nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=_WHERE_ZERO)


def _try(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Run the model forward and backward on text.

    Raises:
        ValueError: its loss is no number.
    """
    first = len(tokenizer) - 256
    ids = torch.randint(first, len(tokenizer), (_ROWS, _TOKENS))
    model.float().train()
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    if not loss.isfinite():
        raise ValueError(f"its loss on text is {loss.item()}")


def _dtype(name: str, config: Any) -> torch.dtype:
    wanted = (getattr(config, "dtype", None) or torch.float32) if name == "auto" else getattr(torch, name)
    assert isinstance(wanted, torch.dtype)  # recipes are checked, and configs hold dtypes
    return wanted
