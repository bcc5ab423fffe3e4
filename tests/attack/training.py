"""A training with a late event, under a plan or under none, and what it leaves after each step."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import hf_ckpt
from tests.attack import models
from tests.attack.combinations import Combination
from tests.attack.events import EVENTS
from tests.attack.layer_events import EventError
from tests.attack.models import VOCAB, WIDTH, Ground, layers_of
from tests.attack.plans import Asked
from tests.training import arguments

Left = dict[str, Any]
"""What a step left, by name: tensors and plain values."""


class Training:
    """Trains a combination's model for up to five steps; an event changes what is public here.

    Attributes:
        behind_forward: called with each step's loss, before its backward.
        begins_step: called with the number of each step that follows.
        counts: how often an event's gradient hooks ran.
        kept: whatever an event keeps for later.
        left: what each step left, as far as it came.
    """

    def __init__(self, combination: Combination) -> None:
        self.combination = combination
        torch.manual_seed(combination.seed)
        np.random.seed(combination.seed % 2**31)
        random.seed(combination.seed)
        self.model, self.grounds = models.build(combination.model, combination.place)
        # There from the beginning, so that an event can take it away.
        self.early_hook = layers_of(self.model)[-1].register_forward_hook(_nothing)
        self.optimizer = torch.optim.SGD([each for each in self.model.parameters() if each.requires_grad], lr=0.1)
        self.counts: Counter[str] = Counter()
        self.kept: dict[str, Any] = {}
        self.left: list[Left] = []
        self.begins_step: list[Callable[[int], object]] = []
        self.behind_forward: list[Callable[[Tensor], object]] = []
        self.losses: list[Callable[[Tensor], Tensor]] = []
        self.around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.between_forwards: Callable[[], object] = lambda: None
        self.autocast: torch.dtype | None = None
        self.forwards = self.micro_batches = self.backwards = 1
        self.rows = 1 if combination.by_trainer else 2
        self.by_grad = self.is_padded = self.is_packed = self.gives_embeddings = False
        self.sets_to_none = True

    def add_to_optimizer(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let the optimizer step these too, as a loop does that trains what is new."""
        known = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
        new = [each for each in parameters if each.requires_grad and id(each) not in known]
        self.optimizer.param_groups[0]["params"].extend(new)

    # --- A step. ---

    def inputs(self, step: int) -> dict[str, Tensor]:
        """Return the batch of a step, the same one in each run."""
        rng = torch.Generator().manual_seed(100 * self.combination.seed + step)
        shape = (self.rows, self.combination.lengths[step])
        ids = torch.randint(3, VOCAB, shape, generator=rng)
        return self._with_more({"input_ids": ids, "labels": ids}, rng)

    def _with_more(self, batch: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        ids = batch["input_ids"]
        if self.is_padded:
            mask = torch.ones_like(ids)
            mask[-1, -2:] = 0
            batch["attention_mask"] = mask
        if self.is_packed:
            batch["position_ids"] = torch.arange(ids.shape[1]).remainder(ids.shape[1] // 2).expand_as(ids)
        if self.gives_embeddings:
            given = torch.randn(*ids.shape, WIDTH, generator=rng).requires_grad_()
            self.kept["embeddings"] = given
            batch = {"inputs_embeds": given} | {name: value for name, value in batch.items() if name != "input_ids"}
        return batch

    def begin(self, step: int) -> None:
        """Begin a step: with the event, where it is its turn."""
        self.kept.pop("embeddings", None)
        if step == self.combination.step:
            EVENTS[self.combination.event].happen(self, random.Random(self.combination.seed))
        for act in self.begins_step:
            act(step)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch: of one forward or of several."""
        total: Any = 0.0
        for number in range(self.forwards):
            if number:
                self.between_forwards()
            cast = nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast)
            with self.around_forward(), cast:
                out = self.model(**batch)
            total = total + (out["loss"] if isinstance(out, dict) else out.loss)
        for change in self.losses:
            total = change(total)
        for act in self.behind_forward:
            act(total)
        return total

    def note(self, loss: Tensor) -> None:
        """Note a step's loss and gradients, before the optimizer's step."""
        self.left.append({"loss": loss.detach().clone()})
        gradients = ((name, each.grad) for name, each in self.model.named_parameters())
        self.left[-1] |= {f"gradient of {name}": None if grad is None else grad.clone() for name, grad in gradients}
        if "embeddings" in self.kept:
            self.left[-1]["gradient of embeddings"] = self.kept["embeddings"].grad

    def end(self) -> None:
        """Note what else the step left."""
        state = {f"weight {name}": each.detach().clone() for name, each in self.model.named_parameters()}
        state |= {f"buffer {name}": each.clone() for name, each in self.model.named_buffers()}
        for number, ground in enumerate(self.grounds):
            state |= {f"attribute of ground {number}: {name}": value for name, value in _plain_attributes(ground)}
        state |= {f"calls of {name}": number for name, number in self.counts.items()}
        state["torch's generator"], state["Python's generator"] = torch.get_rng_state(), random.getstate()
        state["numpy's generator"] = str(np.random.get_state(legacy=False))
        self.left[-1] |= state

    # --- Runs. ---

    def run(self, asked: Asked | None) -> None:
        """Train under a plan, or under none."""
        if self.combination.by_trainer:
            self._run_trainer(asked)
        elif asked is None:
            self._run_loop()
        else:
            with hf_ckpt.apply(self.model, asked.policy, **asked.options, **self._structure()):
                self._run_loop()

    def run_torch(self) -> None:
        """Train with torch's own checkpointing, non-reentrant, of every layer."""
        for layer in layers_of(self.model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if self.combination.by_trainer:
            self._run_trainer(None)
        else:
            self._run_loop()

    def _structure(self) -> dict[str, Any]:
        """Say where attention and ffn are: a ground in their place hides what they are found by."""
        names = dict(layers_of(self.model)[0].named_children())
        of_stack = {} if isinstance(self.model, PreTrainedModel | PeftModel) else {"layers": "layers"}
        return of_stack | {"attention": "attn" if "attn" in names else "self_attn", "ffn": "mlp"}

    def _run_loop(self) -> None:
        for step in range(len(self.combination.lengths)):
            self.begin(step)
            try:
                loss = self._gradients(step)
            except EventError:
                # As a loop that skips a bad batch.
                loss = torch.zeros(())
                self.optimizer.zero_grad()
            self.note(loss)
            self.optimizer.step()
            self.end()
            self.optimizer.zero_grad(set_to_none=self.sets_to_none)

    def _gradients(self, step: int) -> Tensor:
        losses = []
        for _ in range(self.micro_batches):
            loss = self.loss(self.inputs(step))
            losses.append(loss.detach())
            if self.by_grad:
                trained = [each for each in self.model.parameters() if each.requires_grad]
                for each, grad in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
                    each.grad = grad
            else:
                for number in range(self.backwards):
                    loss.backward(retain_graph=number + 1 < self.backwards)
        return torch.stack(losses).sum()

    def _run_trainer(self, asked: Asked | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            num_steps = len(self.combination.lengths)
            settings = {"max_steps": num_steps, "per_device_train_batch_size": 1, "max_grad_norm": 0.0}
            given = arguments(Path(folder), **settings, logging_strategy="no", lr_scheduler_type="constant")
            callbacks: list[TrainerCallback] = [_Events(self)]
            if asked is not None:
                options = asked.options | self._structure()
                callbacks.insert(0, hf_ckpt.HFCkptCallback(asked.policy, quiet=True, **options))
            trainer = _Trainer(
                model=self.model,
                args=TrainingArguments(**given),
                train_dataset=[{name: row[0] for name, row in self.inputs(step).items()} for step in range(num_steps)],
                optimizers=(self.optimizer, None),
                callbacks=callbacks,
            )
            trainer.remove_callback(PrinterCallback)
            vars(trainer)["training"] = self
            trainer.train()


class _Events(TrainerCallback):
    def __init__(self, training: Training) -> None:
        self._training = training

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.end()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.note(self._training.kept["loss"])


class _Trainer(Trainer):
    """Takes the rows in order, the loss from its `training`, and skips a batch in which an event raised."""

    training: Training

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return self.training.loss(self.training.inputs(self.state.global_step))

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        except EventError:
            loss = torch.zeros(())
            model.zero_grad()
        self.training.kept["loss"] = loss
        return loss


def _nothing(module: nn.Module, args: Any, out: Any) -> None:
    """A forward hook that changes nothing."""


def _plain_attributes(ground: Ground) -> Iterator[tuple[str, Any]]:
    for name in ("statistic", "count", "scale", "total"):
        if hasattr(ground, name):
            yield name, _copied(getattr(ground, name))
    yield from ((f"memory {path}", _copied(value)) for path, value in _leaves("", ground.memory))
    if "generator" in ground.memory:
        yield "generator", ground.memory["generator"].get_state()


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, Tensor | int | float):
        yield path, value


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
