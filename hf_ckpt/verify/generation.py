"""What a model writes and thinks: greedy generation and logits, drawn without touching the run's random state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

_NUM_TOKENS = 6


def generated(trainer: Trainer, model: Any, prompt: Tensor, pad_token_id: int | None) -> tuple[int, ...] | str:
    """Return the tokens that a model goes on with, greedily and always as many; or why it cannot."""
    ids = prompt.to(trainer.args.device)
    with torch.no_grad(), _random_state_kept(), trainer.autocast_smart_context_manager():
        try:
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=_NUM_TOKENS,
                min_new_tokens=_NUM_TOKENS,
                do_sample=False,
                pad_token_id=pad_token_id,
            )
        except Exception as error:  # noqa: BLE001  # any model's own code; the reference tells whether it is the plan
            return f"{type(error).__name__}: {error}"
    return tuple(output[0, ids.shape[1] :].tolist())


def logits(trainer: Trainer, model: nn.Module, prompt: Tensor) -> Tensor:
    """Return the logits of a prompt, [1, S, V], in float32 on the CPU; the model is left in evaluation mode."""
    ids = prompt.to(trainer.args.device)
    model.eval()
    with torch.no_grad(), trainer.autocast_smart_context_manager():
        found: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return found.float().cpu()


def use_cache_of(model: nn.Module) -> dict[str, object]:
    """Return the `use_cache` values of a model's configs, by where they are."""
    found: dict[str, object] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name in ("config", "generation_config"):
            values = vars(module).get(name)
            # Layers share the config of their model.
            if values is not None and "use_cache" in vars(values) and id(values) not in seen:
                seen.add(id(values))
                found[f"{path}.{name}".lstrip(".")] = vars(values)["use_cache"]
    return found


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return the values that differ, as (before, after)."""
    names = before.keys() | after.keys()
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


@contextmanager
def _random_state_kept() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
