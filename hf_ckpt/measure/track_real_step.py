"""A step that really runs in a Trainer, followed by the tracker that follows simulated ones, to check those.

Only this code counts, as for a simulated step. The tensors are real, and the Trainer runs the step.

torch's `MemTracker` follows a real step too, and adds up the same bytes. It does not say which layer and operator hold
them, takes for memory of the device what a plan moves off a CPU, and does not know what kernels of CUDA allocate
besides: a prediction is held against all of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_ckpt.patch.apply import offloaders_of, plan_of, waiting_of
from hf_ckpt.simulation.caching_allocator import BLOCK_BYTES
from hf_ckpt.simulation.cuda import add_workspaces, emulate_cuda
from hf_ckpt.simulation.devices import CPU, this_device
from hf_ckpt.simulation.module_hooks import track_modules, track_references
from hf_ckpt.simulation.offload import SimulatedLink, peak_host_bytes
from hf_ckpt.simulation.optimizers import state_tensors
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory
from hf_ckpt.simulation.tape import read_tape
from hf_ckpt.simulation.tracker import Tracker, parameters_and_buffers
from hf_ckpt.structure.layers import find_layers
from hf_ckpt.structure.stored import replaced
from hf_ckpt.trainer.other_models import other_models
from hf_ckpt.upstream.trl import GENERATED


def follow_trainer(trainer: Trainer, *, at_step: int = 2, **structure: Any) -> StepMemory:
    """Train until an optimizer step is done, follow that step, and return what it needed, without times.

    The step takes two to ten times longer than it does alone, and no more memory on the device. The Trainer trains as
    it would without being followed, and stops after step `at_step`, counted from 1. In the first one the optimizer
    makes its state. `structure` is `layers`, `attention` and `ffn` of `apply`, for models that are not of transformers.
    Raises `ValueError` if the Trainer stopped before the step.

    Example:
        >>> follow_trainer(Trainer(model, args, train_dataset=data)).peak_bytes  # doctest: +SKIP
    """
    following = _StepRecorder(trainer, at_step, structure)
    with following.following():
        trainer.train()
    if following.memory is None:
        raise ValueError(
            f"at_step={at_step} was not reached: training stopped after step {trainer.state.global_step}. "
            "Give the run more steps, or follow an earlier one."
        )
    return following.memory


class _Owner:
    """What memory is freed with."""


class _StepRecorder(TrainerCallback):
    """Follows one step of a Trainer."""

    def __init__(self, trainer: Trainer, at_step: int, structure: dict[str, Any]) -> None:
        self.memory: StepMemory | None = None
        self._trainer = trainer
        self._at_step = at_step
        self._structure = structure
        self._entered = ExitStack()
        self._tracker: Tracker | None = None
        self._batches: list[Any] = []
        self._num_done = 0

    @contextmanager
    def following(self) -> Iterator[None]:
        trainer = self._trainer
        self._get_batch_samples, self._training_step = trainer.get_batch_samples, trainer.training_step
        trainer.add_callback(self)
        # The events of a callback do not say where a micro-batch ends and clipping begins. So two methods of the
        # Trainer, on this instance, are replaced by those of this object.
        try:
            with (
                replaced(trainer, "get_batch_samples", self.get_batch_samples),
                replaced(trainer, "training_step", self.training_step),
                closing(self._entered),
            ):
                yield
        finally:
            trainer.remove_callback(self)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`: draw the micro-batches of a step."""
        batches, num_items = self._get_batch_samples(*args, **kwargs)
        self._batches = batches
        return batches, num_items

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`: run a micro-batch."""
        if self._trainer.state.global_step != self._at_step - 1:
            return self._training_step(*args, **kwargs)
        tracker = self._start() if self._tracker is None else self._tracker
        tracker.start_micro_batch(self._num_done)
        loss = self._training_step(*args, **kwargs)
        self._num_done += 1
        if self._num_done == len(self._batches):
            self._entered.enter_context(tracker.phase(Phase.OPTIMIZER))
        return loss

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Read what was followed, and let the Trainer stop."""
        if self._tracker is not None:
            self._entered.close()
            device, waiting = self._trainer.args.device, waiting_of(self._model)
            add_workspaces(self._tracker.tape, this_device() if device.type == "cuda" else CPU)
            self.memory = read_tape(
                self._tracker.tape,
                device=str(device),
                plan=plan_of(self._model),
                tokens=sum(batch["input_ids"].numel() for batch in self._held_batches() if "input_ids" in batch),
                host_bytes=peak_host_bytes(self._tracker.tape) + (0 if waiting is None else waiting.host_bytes),
            )
            control.should_training_stop = True
        return control

    def _held_batches(self) -> list[Mapping[str, Any]]:
        """Return the micro-batches of the step, and what a trainer of trl has generated before it."""
        # Of a trainer that generates, a batch is a list of texts.
        batches = [*self._batches, *(getattr(self._trainer, GENERATED, None) or ())]
        return [batch for batch in batches if isinstance(batch, Mapping)]

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self._trainer.accelerator.unwrap_model(self._trainer.model)
        return model

    def _start(self) -> Tracker:
        """Begin to follow, with what exists before the step."""
        model = self._model
        stacks = find_layers(model, **self._structure)
        is_cuda = self._trainer.args.device.type == "cuda"
        self._tracker = tracker = Tracker(rounding=BLOCK_BYTES if is_cuda else 1)
        waiting = waiting_of(model)
        on_host = set() if waiting is None else {id(tensor) for each in waiting.weights for tensor in each.tensors()}
        there = ((name, tensor) for name, tensor in parameters_and_buffers(model) if id(tensor) not in on_host)
        tracker.record_existing(there, Category.PARAMETERS)
        for each in () if waiting is None else waiting.weights:
            tracker.leave_out(each.memory())
            self._entered.callback(setattr, each, "on_resize", each.on_resize)
            each.on_resize = partial(_follow_weights, tracker, [])
        assert self._trainer.optimizer is not None, "a step is about to run"
        state = state_tensors(self._trainer.optimizer)
        tracker.record_existing((("", tensor) for _, tensor in state), Category.OPTIMIZER)
        others = list(other_models(self._trainer, model, self._trainer.args.device))
        for other in others:
            # Their names may be those of the model's own parameters.
            tracker.record_existing((("", tensor) for tensor in other.tensors), Category.OTHER)
            if other.module is not None:
                weights = (("", tensor) for _, tensor in parameters_and_buffers(other.module))
                tracker.record_existing(weights, Category.REFERENCE)
        for batch in self._held_batches():
            tensors = ((name, value) for name, value in batch.items() if isinstance(value, Tensor))
            tracker.record_existing(tensors, Category.TEMPORARY)
        modules = [other.module for other in others if other.module is not None]
        self._entered.enter_context(tracker)
        self._entered.enter_context(track_modules(model, stacks, tracker))
        self._entered.enter_context(track_references(model, modules, tracker))
        if not is_cuda:
            # Memory that kernels allocate for themselves: not visible on CUDA, shown here.
            self._entered.enter_context(emulate_cuda(Step(), CPU, tracker))
            # What is offloaded counts as memory of the host, which is where a CPU keeps it anyway. The engine goes on
            # as before, over a link whose copies the tracker does not count.
            for offloader in offloaders_of(model):
                offloader.use_link(SimulatedLink(tracker, has_values=True))
        return tracker


def _follow_weights(tracker: Tracker, owners: list[_Owner], num_bytes: int) -> None:
    """Count what a layer's weights take of the device while they are there."""
    owners.clear()
    if num_bytes:
        owners.append(_Owner())
        tracker.record_owned(num_bytes, owners[0], Category.GATHERED)
