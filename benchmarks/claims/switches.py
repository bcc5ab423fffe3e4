"""Switches that are said to exist in transformers: each is tried on the installed version."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks.claims.small import batch

LAYERS = 4
_SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}

Try = Callable[[], list[int]]
"""Trains a step, and returns how often the attention of each layer ran."""


def _model(**fields: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**_SIZES, num_hidden_layers=LAYERS, **fields)).train()


def _trained(**arguments: Any) -> list[int]:
    """Train a step with the Trainer."""
    model = _model()
    rows: Any = [{name: ids[0] for name, ids in batch(1, 8).items()}]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **arguments,
        )
        # It prints its figures.
        with redirect_stdout(StringIO()):
            return _forwards(model, Trainer(model=model, args=args, train_dataset=rows).train)


def _enabled(*given: Any, **named: Any) -> list[int]:
    """Switch checkpointing on with these arguments, and run a step."""
    model = _model()
    model.gradient_checkpointing_enable(*given, **named)
    return _stepped(model)


def _with_config() -> list[int]:
    return _stepped(_model(gradient_checkpointing=True))


def _with_attributes() -> list[int]:
    model = _model()
    for layer in model.model.layers:
        layer.self_attn.gradient_checkpointing = True
    return _stepped(model)


def _stepped(model: Any) -> list[int]:
    return _forwards(model, lambda: model(**batch(1, 8))["loss"].backward())


def _forwards(model: Any, run: Callable[[], object]) -> list[int]:
    counts = [0] * LAYERS

    def count(layer_idx: int) -> Callable[[nn.Module, Any], None]:
        def add(module: nn.Module, args: Any) -> None:
            counts[layer_idx] += 1

        return add

    for layer_idx, layer in enumerate(model.model.layers):
        # What lies in the middle of a layer runs again as often as the layer does.
        layer.self_attn.o_proj.register_forward_pre_hook(count(layer_idx))
    run()
    return counts


TRIES: dict[str, tuple[str, Try]] = {
    "true": ("TrainingArguments(gradient_checkpointing=True)", lambda: _trained(gradient_checkpointing=True)),
    "auto": ('TrainingArguments(gradient_checkpointing="auto")', lambda: _trained(gradient_checkpointing="auto")),
    "any_text": ('TrainingArguments(gradient_checkpointing="no")', lambda: _trained(gradient_checkpointing="no")),
    "kwargs_modules": (
        'TrainingArguments(gradient_checkpointing=True, gradient_checkpointing_kwargs={"modules": ["self_attn"]})',
        lambda: _trained(gradient_checkpointing=True, gradient_checkpointing_kwargs={"modules": ["self_attn"]}),
    ),
    "kwargs_modules_non_reentrant": (
        "TrainingArguments(gradient_checkpointing=True, "
        'gradient_checkpointing_kwargs={"modules": ["self_attn"], "use_reentrant": False})',
        lambda: _trained(
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"modules": ["self_attn"], "use_reentrant": False},
        ),
    ),
    "kwargs_layers_non_reentrant": (
        "TrainingArguments(gradient_checkpointing=True, "
        'gradient_checkpointing_kwargs={"layers": [0, 1], "use_reentrant": False})',
        lambda: _trained(
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"layers": [0, 1], "use_reentrant": False}
        ),
    ),
    "ratio": (
        "TrainingArguments(gradient_checkpointing_ratio=0.5)",
        lambda: _trained(gradient_checkpointing_ratio=0.5),
    ),
    "policy": (
        'TrainingArguments(gradient_checkpointing_policy="selective")',
        lambda: _trained(gradient_checkpointing_policy="selective"),
    ),
    "enable_auto": ('model.gradient_checkpointing_enable("auto")', lambda: _enabled("auto")),
    "enable_modules": (
        'model.gradient_checkpointing_enable(modules=["self_attn"])',
        lambda: _enabled(modules=["self_attn"]),
    ),
    "enable_every_n_layers": (
        "model.gradient_checkpointing_enable(every_n_layers=2)",
        lambda: _enabled(every_n_layers=2),
    ),
    "config": ("LlamaConfig(gradient_checkpointing=True)", _with_config),
    "module_attribute": ("layer.self_attn.gradient_checkpointing = True", _with_attributes),
}
"""What a user would write, and how it is tried. `true`, `enable_every_n_layers` and `config` do what they say."""


def transformers_switches() -> dict[str, Any]:
    """Claim: transformers has `gradient_checkpointing="auto"` and keywords for each module."""
    return {
        "case": f"Llama of {LAYERS} layers, one step on the CPU. outcome: refused (with the message), ignored (no "
        "layer is recomputed), all layers (as True does), or some layers",
        "transformers": transformers.__version__,
        "switches": {name: outcome_of(name) for name in TRIES},
    }


def outcome_of(name: str) -> dict[str, Any]:
    """Try a switch and return what became of it.

    Args:
        name: one of `TRIES`.
    """
    switch, attempt = TRIES[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forwards = attempt()
    except (TypeError, ValueError, AttributeError) as error:
        refused = {"outcome": "refused", "message": f"{type(error).__name__}: {error}", "layers_recomputed": []}
        return {"switch": switch, **refused}
    recomputed = [layer_idx for layer_idx, count in enumerate(forwards) if count > 1]
    outcome = {(): "ignored", tuple(range(LAYERS)): "all layers"}.get(tuple(recomputed), "some layers")
    return {"switch": switch, "outcome": outcome, "message": None, "layers_recomputed": recomputed}
