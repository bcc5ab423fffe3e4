"""One trial: the recipe's model trained a few steps by the real Trainer, with or without the plan, and recorded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_ckpt.callback import HFCkptCallback
from hf_ckpt.errors import PolicyError, StructureError
from hf_ckpt.patch.tileable import tiled_modules
from hf_ckpt.policy.modifiers import HeadMode
from hf_ckpt.policy.plan import Plan, parse, resolve
from hf_ckpt.recipe.recipe import Values
from hf_ckpt.recipe.schema import POLICY_OPTIONS
from hf_ckpt.structure.layers import Stack, find_layers
from hf_ckpt.structure.lm_head import find_head, governed_by_other
from hf_ckpt.trainer.saved_files import WRAPPERS
from hf_ckpt.verify.fingerprints import local, of_random_state, of_tensor, of_values
from hf_ckpt.verify.generation import changes, generated, logits, use_cache_of
from hf_ckpt.verify.hooks import UserHooks
from hf_ckpt.verify.localize import OperatorWatch
from hf_ckpt.verify.record import Failure, Record, WatchedLayer
from hf_ckpt.verify.recorder import Recorder, plain_attributes
from hf_ckpt.verify.subject import Subject
from hf_ckpt.verify.tolerance import draws_in_tiles, leeway_of, slice_alike
from hf_ckpt.verify.trial_engine import VerifyTrainer, engine_of

# Names that wrappers of torch give to what they wrap: activation checkpointing, FSDP1, torch.compile.
_STRUCTURE = ("layers", "attention", "ffn")


def run_trial(
    subject: Subject,
    folder: Path,
    *,
    is_planned: bool,
    num_steps: int,
    save_at: int | None = None,
    resume_from: Path | None = None,
    watch: OperatorWatch | None = None,
) -> Record:
    """Train a few steps and return what was seen.

    An error in training is part of what was seen; it does not leave this function.

    Args:
        subject: the recipe as trials run it.
        folder: where the trial writes.
        is_planned: whether `HFCkptCallback` takes part.
        num_steps: optimizer steps.
        save_at: steps between two checkpoints, if any are to be written.
        resume_from: a checkpoint to go on from.
        watch: an operator watch for one layer.

    Raises:
        PolicyError: the policy does not suit the model.
        StructureError: the layers cannot be found.
    """
    with _environment_put_back():
        return _Trial(subject, folder, is_planned, num_steps, save_at, watch).run(resume_from)


@contextmanager
def _environment_put_back() -> Iterator[None]:
    """Undo what TrainingArguments write into the environment (ACCELERATE_USE_FSDP), which the next trial would obey."""
    found = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(found)


class _Trial:
    def __init__(
        self,
        subject: Subject,
        folder: Path,
        is_planned: bool,
        num_steps: int,
        save_at: int | None,
        watch: OperatorWatch | None,
    ) -> None:
        self.subject = subject
        self.record = Record(folder)
        self.args = subject.arguments(folder / "run", num_steps, save_at=save_at, is_planned=is_planned)
        self.model: Any = subject.build(self.args.seed)
        section = subject.recipe.checkpointing or {}
        stacks = find_layers(self.model, **_chosen(section, _STRUCTURE))
        plan = _expected_plan(section, stacks, type(self.model).__name__)
        self.record.expected_plan, self.record.layers = plan, tuple(_watched_layers(plan, stacks))
        self.record.leeway = leeway_of(plan, stacks, self.model, self.args)
        if not is_planned and draws_in_tiles(plan, stacks):
            slice_alike(plan, stacks)
        self.recorder = Recorder(self.model, stacks, self.record)
        self.callback = WatchedCallback(section) if is_planned else None
        self.watch = watch
        self.user_hooks = UserHooks(self.model)
        self.use_cache = use_cache_of(self.model)
        self.record.names["before"] = names_of(self.model, self.record)
        if watch is not None:
            watch.recorder = self.recorder

    def run(self, resume_from: Path | None) -> Record:
        trainer = None
        try:
            trainer = self._trainer()
            trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        except (PolicyError, StructureError):
            raise
        except Exception as error:  # noqa: BLE001  # whatever ends the run is the verdict on it
            self._note_failure(error)
        self.recorder.stop()
        if self.callback is not None:
            self.record.plan, self.record.callback_faults = self.callback.plan, self.callback.faults
        self.record.hooks = self.user_hooks.finish(self.record.entries)
        if self.record.failure is None and trainer is not None:
            self._finish(trainer)
        return self.record

    def _trainer(self) -> RecordingTrainer:
        callbacks: list[TrainerCallback] = [] if self.callback is None else [self.callback]
        trainer = RecordingTrainer(
            trial=self,
            model=self.model,
            args=self.args,
            train_dataset=self.subject.rows,
            data_collator=self.subject.collator,
            processing_class=self.subject.tokenizer,
            callbacks=callbacks,
        )
        for printer in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printer)
        # Behind the plan's own callback, so that it sees what a user's callback would.
        trainer.add_callback(_BetweenSteps(self, trainer))
        return trainer

    def _note_failure(self, error: Exception) -> None:
        self.record.failure = Failure(error, self.recorder.layer, self.recorder.is_recomputing, self.record.num_steps)
        # The traceback holds the frames, and they the model.
        error.__traceback__ = None

    def start_training(self, trainer: RecordingTrainer) -> None:
        """Place hooks and note weights, when engines and plan are in place."""
        self.record.engine = engine_of(trainer.model_wrapped)
        self._note_head()
        self.record.trainable = tuple(name for name, p in parameters_of(self.model) if p.requires_grad)
        self.record.elsewhere = frozenset(name for name, p in parameters_of(self.model) if not p.numel())
        self.record.tensors_before = _digests(self.model)
        self.recorder.start()

    def _note_head(self) -> None:
        plan = self.record.expected_plan
        if plan is None or plan.head is HeadMode.PLAIN:
            return
        if governed_by_other(self.model) is not None:
            self.record.expected_plan = replace(plan, head=HeadMode.PLAIN)
        elif self.callback is not None:
            self.record.head = _clean(find_head(self.model).path)

    def keep_gradients(self, step: int) -> None:
        """Keep the gradients of an optimizer step, before they are clipped."""
        gradients = {name: _gradient(p) for name, p in parameters_of(self.model) if p.requires_grad}
        self.record.keep_gradients(step, gradients)
        self.record.num_steps = step + 1
        if "during" not in self.record.names:
            self.record.names["during"] = names_of(self.model, self.record)

    def _finish(self, trainer: RecordingTrainer) -> None:
        record, model = self.record, self.model
        record.names["after"] = names_of(model, record)
        record.keep_weights({name: local(p) for name, p in parameters_of(model) if p.requires_grad})
        record.tensors_after = _digests(model)
        record.trained = {name: of_values(p) for name, p in parameters_of(model) if p.requires_grad}
        record.buffers = {_clean(name): of_tensor(buffer) for name, buffer in model.named_buffers()}
        record.attributes = {
            f"{_clean(path)}.{name}".lstrip("."): value
            for path, module in model.named_modules()
            if not path.endswith(WRAPPERS)
            for name, value in plain_attributes(module).items()
        }
        record.use_cache = changes(self.use_cache, use_cache_of(model))
        if not record.is_whole:
            return
        trainer.save_model()
        prompt = self.subject.prompt()
        record.logits = logits(trainer, model, prompt)
        record.generated["after training"] = self.generate(trainer)

    def generate(self, trainer: RecordingTrainer) -> Any:
        """Return what the model writes now, in the mode it is in."""
        if not self.record.is_whole:
            return "FSDP1 has the weights in its wrappers"
        return generated(trainer, self.model, self.subject.prompt(), self.subject.tokenizer.pad_token_id)


class RecordingTrainer(VerifyTrainer):
    """The Trainer, watched from outside: each training step is the Trainer's own."""

    def __init__(self, *, trial: _Trial, **options: Any) -> None:
        self._watched_by = trial
        self._is_started = False
        super().__init__(**options)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run the Trainer's own step and record it."""
        trial = self._watched_by
        if not self._is_started:
            trial.start_training(self)
            self._is_started = True
        with trial.recorder.step() as micro, self._watched():
            loss: Tensor = super().training_step(model, *args, **kwargs)
        micro.loss = loss.item()
        micro.random_state = of_random_state()
        if self.accelerator.sync_gradients:
            trial.keep_gradients(self.state.global_step)
        return loss

    def _watched(self) -> AbstractContextManager[Any]:
        watch = self._watched_by.watch
        number = len(self._watched_by.record.micro_batches) - 1
        return watch if watch is not None and watch.micro_batch == number else nullcontext()


class WatchedCallback(HFCkptCallback):
    """The recipe's callback; where its own check of the first step would stop the run, the run goes on and is judged.

    Attributes:
        faults: what that check found.
    """

    def __init__(self, section: Values) -> None:
        self.faults: list[str] = []
        super().__init__(**{**section, "on_mismatch": "warn"})

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep what the callback warns of."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().on_pre_optimizer_step(args, state, control, **kwargs)
        self.faults += [str(warning.message) for warning in caught]


class _BetweenSteps(TrainerCallback):
    """Generates between the first two steps, as a sampling callback of the user would, in both modes."""

    def __init__(self, trial: _Trial, trainer: RecordingTrainer) -> None:
        self._trial, self._trainer = trial, trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step != 1:
            return
        model, trial = self._trial.model, self._trial
        trial.record.generated["between two steps"] = trial.generate(self._trainer)
        model.eval()
        trial.record.generated["between two steps in evaluation mode"] = trial.generate(self._trainer)
        model.train()


def _chosen(section: Values, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: section[key] for key in keys if key in section}


def _expected_plan(section: Values, stacks: Sequence[Stack], model_class: str) -> Plan:
    """Return what the policy means for this model, resolved apart from the callback."""
    policy = parse(section["policy"], **_chosen(section, POLICY_OPTIONS))
    return policy if isinstance(policy, Plan) else resolve(policy, stacks, model_class)


def _watched_layers(plan: Plan, stacks: Sequence[Stack]) -> Iterator[WatchedLayer]:
    for stack_plan, stack in zip(plan.stacks, stacks, strict=True):
        for entry, layer in zip(stack_plan.layers, stack.layers, strict=True):
            path = f"{stack.path}.{layer.layer_idx}"
            yield WatchedLayer(
                path=path,
                entry=entry,
                attention=tuple(f"{path}.{name}" for name in layer.attention),
                ffn=tuple(f"{path}.{name}" for name in layer.ffn),
                recomputes_itself=hasattr(layer.module, "backward_pass"),
                tiled=tuple(f"{path}.{name}" for name in tiled_modules(layer)) if entry.tiles is not None else (),
            )


def names_of(model: nn.Module, record: Record) -> tuple[str, ...]:
    """Return the names of modules and of the keys of the state dict, each with what it is."""
    modules = tuple(f"module {name}" for name, _ in model.named_modules())
    return (*modules, *(f"key {name}" for name in model.state_dict())) if record.is_whole else modules


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model under the names that they have without wrappers.

    That a wrapper renames them is told by the check of names; everything else is compared all the same.
    """
    for name, parameter in model.named_parameters():
        yield _clean(name), parameter


def _clean(path: str) -> str:
    for wrapper in WRAPPERS:
        path = path.replace(f"{wrapper}.", "")
    return path


def _digests(model: nn.Module) -> dict[str, str]:
    return {name: of_tensor(parameter) for name, parameter in parameters_of(model)}


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else local(parameter.grad).detach()
