"""Training steps of a Trainer that go on after their forward or backward has run out of memory.

The window of micro-batches is undone, a leaner plan put in force, and the window run again from its first micro-batch,
with the same inputs and the same random numbers: to the bit what that plan would have given at once. `ReplayProof`
holds it against the attempt that failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_ckpt.recovery.accumulation_window import (
    Buffers,
    MicroBatch,
    StepParameters,
    TrainerCall,
    Window,
    describe_inputs,
    nested_named_tensors,
    one_of_each_device,
)
from hf_ckpt.recovery.attribute_snapshots import AttributeSnapshots
from hf_ckpt.recovery.data_parallel import DataParallel
from hf_ckpt.recovery.escalation import Escalation, Failed
from hf_ckpt.recovery.failed_examples import describe_examples
from hf_ckpt.recovery.out_of_memory import Failure
from hf_ckpt.recovery.replay_proof import ReplayProof, names_of
from hf_ckpt.regions.execution_state import RandomState
from hf_ckpt.trainer.other_models import trained_beside
from hf_ckpt.upstream.accelerate import set_sync_gradients

if TYPE_CHECKING:
    from hf_ckpt.auto.replan import RunPlanner
    from hf_ckpt.trainer.batch import Batch

_LOOKS_BESIDE = 3
"""Steps that begin with a look for what a loss has made of its own: most do so in the first one."""
_TO_DO = (
    "Keep it as an attribute of the Trainer, of an object on it or of a module, and not in a global, a closure or a "
    'class; or set on_oom="error".'
)


class TrainingSteps:
    """Runs the training steps of one run.

    Args:
        trainer: whose steps they are.
        model: that it trains.
        escalation: puts leaner plans in force.
        planning: of policy `auto`, which sees what the model is given.
        counters: what else counts in a micro-batch, in its attributes.
        data_parallel: what this process sends to others, where there are some.
    """

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        escalation: Escalation,
        planning: RunPlanner | None,
        counters: Sequence[object],
        data_parallel: DataParallel | None = None,
    ) -> None:
        self._trainer = trainer
        self._escalation = escalation
        self._planning = planning
        self._data_parallel = data_parallel
        self._model = model
        self._buffers = Buffers(are_sent=data_parallel is not None)
        named = [(type(counter).__name__, counter) for counter in counters]
        self._owners: list[tuple[str, object]] = [("", trainer), ("state", trainer.state), ("model", model), *named]
        self._beside: list[object] = []
        self._num_looks = 0
        self._snapshots = AttributeSnapshots(*self._owners)
        self._parameters = StepParameters(model, trainer.optimizer)
        self._on_devices = one_of_each_device(model)
        self._window: Window | None = None
        self._is_running = False

    def begin_step(self) -> None:
        """A window of micro-batches begins."""
        self._escalation.begin_step()
        if self._num_looks < _LOOKS_BESIDE:
            self._num_looks += 1
            self._look_beside()
        if not self._goes_on():
            step = f"Step {int(self._trainer.state.global_step) + 1}"
            is_mixed = self._trainer.accelerator.mixed_precision != "no"
            proof = ReplayProof(step, "micro-batch", self._model.parameters, _TO_DO, is_mixed=is_mixed)
            self._window = Window(proof)
        if self._data_parallel is not None:
            self._data_parallel.begin_window()

    def _look_beside(self) -> bool:
        """Look for losses with weights or buffers in closures and globals. Returns whether there are others now."""
        found = trained_beside(self._trainer)
        is_other = list(map(id, self._beside)) != [id(each) for _, each in found]
        if is_other:
            self._beside = [each for _, each in found]
            self._snapshots = AttributeSnapshots(*self._owners, *found)
        return is_other

    def _goes_on(self) -> bool:
        """Whether a window that no optimizer step has ended goes on: the end of a stream may have cut it short."""
        has_begun = self._window is not None and bool(self._window.micro_batches) and self._data_parallel is None
        return has_begun and any(parameter.grad is not None for parameter in self._model.parameters())

    def undo(self) -> bool:
        """Bring back what the step began with, for it to be saved. Returns whether that is so."""
        window = self._window
        if window is None or not window.micro_batches or window.has_written_weights:
            return False
        if self._data_parallel is not None and window.micro_batches[0].buffers.with_other_values():
            # What they were like is known of the run's first step only.
            return False
        window.undo()
        window.micro_batches[0].attributes.restore()
        window.micro_batches[0].randomness.restore()
        return True

    def end_step(self) -> None:
        """The weights have changed: the window cannot be undone any longer, and need not be."""
        self._window = None
        self._escalation.ladder.end_step()

    def run(self, call: TrainerCall) -> Any:
        """Run a micro-batch, and the whole window again for as long as memory runs out and there is a leaner plan.

        Raises:
            OutOfMemoryError: there is none, or the window cannot be undone.
            PlanMismatchError: what ran again was not the same computation.
        """
        window, escalation = self._window, self._escalation
        if window is None:
            # Somebody runs a step by hand.
            return call()
        micro_batch = self._begin(window, call)
        escalation.stand_on(escalation.ladder.level_for(micro_batch.size))
        returned, failure = self._attempt(window, call)
        if failure is not None:
            failed = self._failed(window, len(window.micro_batches) - 1, failure)
            returned = escalation.recover(failed, partial(self._fault, window), partial(self._replay, window))
        self._buffers.learn(micro_batch.buffers)
        escalation.ladder.passed(micro_batch.size, self._batch)
        return returned

    def run_once(self, call: TrainerCall) -> Any:
        """Run a micro-batch that is not run again, and note what `undo` needs."""
        micro_batch = None if self._window is None else self._begin(self._window, call)
        returned = call()
        if micro_batch is not None:
            self._buffers.learn(micro_batch.buffers)
        return returned

    def note_loss(self, loss: Any) -> None:
        """The forward of the micro-batch that runs has ended: its backward begins."""
        # Somebody may run a backward by hand, between micro-batches.
        if self._window is not None and self._is_running:
            self._window.proof.note_loss(loss)

    def _attempt(self, window: Window, call: TrainerCall) -> tuple[Any, Failure | None]:
        return self._escalation.attempt(partial(self._proven, window.proof, call))

    def _proven(self, proof: ReplayProof, call: TrainerCall) -> Any:
        proof.begin_micro_batch(nested_named_tensors(call.inputs), self._escalation.ladder.rung.plan)
        self._is_running = True
        try:
            returned = call()
        finally:
            self._is_running = False
        proof.end_micro_batch(returned)
        return returned

    @property
    def _batch(self) -> Batch | None:
        return None if self._planning is None else self._planning.seen

    def _fault(self, window: Window) -> str | None:
        fault = window.fault()
        if fault is None and self._look_beside():
            fault = (
                "modules or weights beside the model, of a loss, were made since the run began, and nothing noted them"
            )
        return self._data_parallel.fault(window) if fault is None and self._data_parallel is not None else fault

    def _begin(self, window: Window, call: TrainerCall) -> MicroBatch:
        trainer, others = self._trainer, self._data_parallel
        if others is not None:
            others.begin_micro_batch()
        attributes = self._snapshots.now(is_later=bool(window.micro_batches))
        modules = self._snapshots.modules
        if not window.micro_batches:
            window.begin(*self._parameters.of(modules, self._snapshots.parameters))
        elif others is None:
            # The replay of those before it gives them.
            attributes = attributes.without_large_tensors()
        micro_batch = MicroBatch(
            call,
            RandomState.of(*self._on_devices),
            attributes,
            self._buffers.of(modules),
            trainer.accelerator.gradient_state.sync_gradients,
            others is not None and others.syncs,
        )
        window.micro_batches.append(micro_batch)
        return micro_batch

    def _failed(self, window: Window, number: int, failure: Failure) -> Failed:
        step, micro_batch = int(self._trainer.state.global_step) + 1, window.micro_batches[number]
        examples = partial(describe_examples, self._trainer, number, micro_batch.call.inputs)
        inputs = describe_inputs(micro_batch.call.inputs)
        return Failed(failure, step, micro_batch.size, inputs, self._batch, examples)

    def _replay(self, window: Window) -> tuple[Any, Failed | None]:
        """Run the window's micro-batches again, or the last one, until one fails."""
        gradient_state, others = self._trainer.accelerator.gradient_state, self._data_parallel
        syncs = gradient_state.sync_gradients
        first = 0 if others is None else others.begin_replay()
        if first == 0:
            window.undo()
        else:
            window.micro_batches[first].buffers.restore()
        returned: Any = None
        window.proof.begin_replay(first)
        try:
            for number, micro_batch in enumerate(window.micro_batches[first:], first):
                micro_batch.attributes.restore()
                micro_batch.randomness.restore()
                generators = RandomState.of(*self._on_devices).others_than(micro_batch.randomness)
                kept = names_of(window.kept_gradients(), self._model) if number == 0 else []
                window.proof.check_start(generators, kept)
                set_sync_gradients(gradient_state)(micro_batch.syncs_gradients)
                if others is not None:
                    others.begin_again(syncs=micro_batch.sends_gradients)
                if self._planning is not None:
                    self._planning.start_micro_batch_again()
                returned, failure = self._attempt(window, micro_batch.again())
                if failure is not None:
                    return None, self._failed(window, number, failure)
        finally:
            set_sync_gradients(gradient_state)(syncs)
        window.proof.end_replay()
        return returned, None
