"""A tiny model and a tiny run of the Trainer, for the tests of the plugin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.regions.execution_state import is_extra_run
from tests.exactness import POLICIES

VOCAB, LENGTH, LAYERS = 32, 8, 4
PLAN_FILE = "hf_ckpt_plan.json"


def llama(**changes: Any) -> LlamaForCausalLM:
    """A Llama of four layers, always the same one, with dropout and the user's `use_cache=True`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "vocab_size": VOCAB, "attention_dropout": 0.1, **changes}))


def lora(**changes: Any) -> PeftModel:
    """The same Llama, frozen, with adapters on all its linear layers."""
    settings = {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.1, "init_lora_weights": False}
    return get_peft_model(llama(), LoraConfig(**{**settings, **changes}))


def rows(count: int = 16) -> list[dict[str, torch.Tensor]]:
    """Random texts, their own labels."""
    tokens = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a run of two steps that logs every loss and saves nothing."""
    where = {"output_dir": str(folder), "use_cpu": True, "save_strategy": "no", "report_to": "none"}
    length = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    return {**where, **length, "logging_steps": 1, "disable_tqdm": True, **changes}


def trainer(model: nn.Module | None, folder: Path, *callbacks: TrainerCallback, **changes: Any) -> Trainer:
    """A Trainer with these callbacks; `model_init` goes to the Trainer, everything else to its arguments."""
    own = {"model_init": changes.pop("model_init")} if "model_init" in changes else {"model": model}
    args = TrainingArguments(**arguments(folder, **changes))
    return Trainer(**own, args=args, train_dataset=rows(), eval_dataset=rows(4), callbacks=list(callbacks))


def callback(policy: str, **options: Any) -> HFCkptCallback:
    mode, given = POLICIES[policy]
    return HFCkptCallback(mode, **{**given, **options})


def losses(run: Trainer) -> list[float]:
    """Every training and evaluation loss of a run, as logged."""
    return [entry[key] for entry in run.state.log_history for key in ("loss", "eval_loss") if key in entry]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> list[str]:
    """Name the parameters that differ by a bit."""
    assert expected.keys() == got.keys()
    return [name for name, weight in expected.items() if not torch.equal(weight, got[name])]


@contextmanager
def counted(model: nn.Module, part: str) -> Iterator[Counter[int]]:
    """Count the forwards in training mode and with gradients of a Linear in each layer, by `layer_idx`."""
    counts: Counter[int] = Counter()

    def hook(layer_idx: int) -> Callable[..., None]:
        def count(module: nn.Module, args: Any) -> None:
            counts[layer_idx] += module.training and torch.is_grad_enabled() and not is_extra_run()

        return count

    found = [(name, module) for name, module in model.named_modules() if name.endswith(part)]
    layer_of = {name: int(name.rpartition(".layers.")[2].partition(".")[0]) for name, _ in found}
    hooks = [module.register_forward_pre_hook(hook(layer_of[name])) for name, module in found]
    try:
        yield counts
    finally:
        for placed in hooks:
            placed.remove()


class During(TrainerCallback):
    """Calls a function at one event.

    Args:
        event: such as `"on_step_end"`.
        act: is given the event's model.
        step: only when so many steps are done.
    """

    def __init__(self, event: str, act: Callable[[nn.Module], object], step: int | None = None) -> None:
        self._act, self._step = act, step
        setattr(self, event, self._event)

    def _event(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self._step is None or state.global_step == self._step:
            self._act(model)
