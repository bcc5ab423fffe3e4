"""A plan in a loop of one's own: chosen for its step, put in force, and left for a leaner one where memory runs out.

A closure holds the whole window of a step: gradients set to None, and forward and backward of each micro-batch. It is
undone as a whole and runs again as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_ckpt.auto.largest_batch_in_data import batch_of
from hf_ckpt.distributed import deepspeed, store
from hf_ckpt.errors import PlanMismatchError, PolicyError
from hf_ckpt.patch import apply as patch
from hf_ckpt.patch.apply import Applied
from hf_ckpt.policy.allowances import allowed_by, check_no_rule
from hf_ckpt.policy.options import (
    ApplyOptions,
    LoopOptions,
    PolicyOptions,
    ProofOptions,
    Prove,
    StructureOptions,
    parse_count,
    select,
    takes,
    types_of,
)
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.recovery.accumulation_window import (
    Buffers,
    Gradients,
    GradientsOfOthers,
    SavedBuffers,
    StepParameters,
    describe_tensors,
    nested_named_tensors,
    one_of_each_device,
)
from hf_ckpt.recovery.attribute_snapshots import Attributes, AttributeSnapshots
from hf_ckpt.recovery.escalation import Escalation, Failed, rung_after
from hf_ckpt.recovery.ladder import Ladder, Room, Rung, Size
from hf_ckpt.recovery.out_of_memory import Failure
from hf_ckpt.recovery.replay_proof import ReplayProof, names_of
from hf_ckpt.regions.execution_state import RandomState, is_compiled
from hf_ckpt.structure.layers import is_sharded
from hf_ckpt.trainer.device_peak import DevicePeak
from hf_ckpt.trainer.first_step import FirstStep
from hf_ckpt.trainer.other_models import trained_beside
from hf_ckpt.units import parse_budget

if TYPE_CHECKING:
    from hf_ckpt.auto.replan import RunPlanner

logger = logging.getLogger(__name__)

Returned = TypeVar("Returned")

_OF_EVERY_POLICY = {*types_of(ApplyOptions), "exact", "quiet_steps"}


class AppliedInLoop(Applied):
    """A plan in force on a model that a loop of one's own trains; also a context manager that removes it on exit.

    Attributes:
        plan: what is in force.
        stacks: the stacks of the model that the plan is in force on.
        value_proof: whether recomputation gives what the forward gave.
    """

    def __init__(
        self, applied: Applied, model: nn.Module, planning: RunPlanner | None, options: Mapping[str, Any]
    ) -> None:
        self.adopt(applied)
        self._model = model
        self._planning = planning
        self._prove = options["prove"]
        self._is_exact = options["exact"] is not False
        self._quiet_steps = options["quiet_steps"]
        self._proven: list[Plan] = []
        self._steps: _ClosureSteps | None = None
        self._watch_first_step()

    def _watch_first_step(self) -> None:
        self._first_step = FirstStep(self._model, self.plan, self.stacks)
        self._first_step.start_with_forward()
        self.on_remove(self._first_step.stop)

    @property
    def num_recovered(self) -> int:
        """How many steps went on after they had run out of memory."""
        return 0 if self._steps is None else self._steps.escalation.num_recovered

    def step(self, closure: Callable[[], Returned], batch: object = None, *, undo: Sequence[object] = ()) -> Returned:
        """Run the forwards and backwards of a step; if memory runs out, again, under a leaner plan, to the same result.

        Random states, buffers, attributes of the model's modules and what `undo` names are brought back, and new
        gradients dropped, before the closure is called again. Nothing else is undone. What the closure runs then is
        held, bit by bit, against what it ran before. In one process, for a model that is neither sharded nor compiled;
        elsewhere the closure is called once, and its error raised.

        Args:
            closure: sets gradients to None (`optimizer.zero_grad()`), and runs forward and backward of all
                micro-batches. It does not step the optimizer, and may be called more than once.
            batch: what the closure trains on: a tensor, or mappings and sequences of them. Leaner plans are then kept
                for batches as large as the one that failed; without it, for all that follow.
            undo: what else the closure changes: objects whose attributes are brought back, such as a gradient scaler,
                containers, generators, and modules that are not the model's.

        Returns:
            What the closure returns.

        Raises:
            OutOfMemoryError: there is no leaner plan, or the closure cannot be undone: says why.
            PlanMismatchError: the plan was removed; or what ran again was not the same computation: says what differs.

        Example:
            ```python
            def closure():
                optimizer.zero_grad()
                loss = model(**batch).loss
                loss.backward()
                return loss.detach()

            loss = applied.step(closure, batch)
            optimizer.step()
            ```
        """
        if self.is_removed:
            raise PlanMismatchError("step() was called, but the plan was removed. Apply it again.")
        if self._steps is None:
            why = _why_not(self._model)
            if why is not None:
                logger.warning("applied.step() calls its closure once: %s. Running out of memory is an error.", why)
            room = Room(self._planning, DevicePeak(next(self._model.parameters()).device))
            ladder = Ladder(self.plan, self._quiet_steps, room)
            escalation = Escalation(ladder, self._next_rung, self._put_in_force)
            if why is None:
                self.join_ladder()
            self._steps = _ClosureSteps(self._model, escalation, is_undone=why is None)
        returned: Returned = self._steps.run(closure, batch, undo)
        if self.plan not in self._proven:
            self._proven.append(self.plan)
        return returned

    def _next_rung(self, plan: Plan, failure: Failure, rerun: int) -> Rung | None:
        given = plan, failure, self, self._model, self._planning
        return rung_after(*given, is_exact=self._is_exact, rerun=rerun)

    def _put_in_force(self, rung: Rung) -> None:
        is_proven = self._prove == "first_step" and rung.plan in self._proven
        prove: Prove = "off" if is_proven else self._prove
        is_watched = not self._first_step.is_over
        self._first_step.stop()
        self.adopt(self.exchange(lambda: patch.apply_plan(self._model, rung.plan, self.stacks, prove=prove)))
        if is_watched:
            # The step that failed is held against the plan that it runs again under.
            self._watch_first_step()
        if self._planning is not None:
            self._planning.adopt(rung.plan)


@takes(LoopOptions)
def apply(model: nn.Module, policy: object, **options: Unpack[LoopOptions]) -> AppliedInLoop:
    """Put a policy in force on a model, in place.

    Loss and gradients do not change by a bit, but for sums in another order with `tiles` and `head` (within 1e-6 in
    float32); module and parameter names stay. Activation (gradient) checkpointing costs up to one more forward of the
    layers it reaches.

    With `"auto"` the step is simulated first, and the fastest plan that fits `memory_budget` is taken.

    Args:
        model: any transformers model, or another with layers that can be found; PEFT, DDP, FSDP or DeepSpeed may stand
            around it or its layers.
        policy: a mode name, a rule, a list of rules, a `Policy`, or a `Plan` made for this model; or `"auto"`, for one
            process that has the whole model.
        every_n_layers: see `Rule`.
        segment_size: see `Rule`.
        nested: see `Rule`.
        snapshots: see `Rule`.
        save: see `Rule`.
        offload: see `Rule`: `"cpu"`, or a mapping with the fields of `Offload`. With `"auto"`, as for
            `HFCkptCallback`; so are `tiles` and `head`.
        tiles: see `Rule`.
        head: `"chunked"` computes logits and loss for some tokens at a time, so that the logits are never held.
        skip_frozen: leave alone the layers that need no gradient.
        layers: dotted path of the layer list, or several, where they cannot be found by structure.
        attention: attribute name, in each layer, of the attention.
        ffn: attribute name, in each layer, of the ffn.
        prove: which calls of a recomputed region are proven, bit by bit, to be repeated by its recomputation:
            `"first_step"` the first that has a backward, n every n-th as well, `"off"` none. Costs the
            device about a third of a forward, and 16 MiB; more where the host is slower (see `HFCkptCallback`).
        memory_budget: with `"auto"`, what a whole step may use of the device: `"22GiB"`, or a fraction such as 0.9,
            CUDA's context and torch's cache among it. What is free of the GPU if left out.
        exact: with `"auto"`, see `HFCkptCallback`. With any policy, False lets `step` chunk the head and run layers in
            tiles, where nothing else is leaner.
        batch_size: with `"auto"`, sequences of the largest micro-batch.
        seq_length: with `"auto"`, tokens of its sequences, padding included.
        is_padded: with `"auto"`, whether sequences may hold padding, so that the model gets a mask.
        gradient_accumulation_steps: with `"auto"`, micro-batches of a step; 1 if left out.
        autocast: with `"auto"`, `"bfloat16"` or `"float16"` where the forward runs under autocast.
        optimizer: with `"auto"`, the optimizer of the model; AdamW is counted if left out.
        quiet_steps: calls of `step` without trouble after which a faster plan returns, for batches that there is room
            for.
        **options: names and types of all these options (`LoopOptions`).

    Returns:
        A handle with `summary()`, `step()` and `remove()`; as a context manager it removes the plan on exit.

    Raises:
        PolicyError: the policy cannot be read or does not suit the model; or `"auto"` does not know the step.
        BudgetError: with `"auto"`: no plan fits; says what would.
        StructureError: the layers cannot be found.
        UnsupportedError: a mode could not be exact on a layer, or a step cannot be simulated.
        AlreadyAppliedError: the model carries a plan already.
        PlanMismatchError: from a backward that is proven: a recomputation gave something else than the forward; from
            the first one: a layer was not recomputed as planned.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import hf_ckpt
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=4, num_attention_heads=2)
        >>> with hf_ckpt.apply(LlamaForCausalLM(config), "full", every_n_layers=2) as applied:
        ...     print(applied.summary())
        model.layers: 4 layers
          0            full
          1            none
          2            full
          3            none
    """
    parse_count("quiet_steps", options["quiet_steps"])
    planning = None
    asked: object = policy
    for_apply = select(options, ApplyOptions)
    if policy == AUTO and options["batch_size"] is not None and options["seq_length"] is not None:
        check_no_rule(select(options, PolicyOptions))
        planning = _planning(model, options)
        asked = planning.plan
        for_apply = select(options, StructureOptions) | select(options, ProofOptions)
    else:
        _check_no_step(policy, options)
    return AppliedInLoop(patch.apply(model, asked, **for_apply), model, planning, options)


def _planning(model: nn.Module, options: LoopOptions) -> RunPlanner:
    # What simulates a step brings in the Trainer, and peft and bitsandbytes with it.
    from hf_ckpt.auto.auto import plan_own_step
    from hf_ckpt.simulation.step import Step

    names = ("batch_size", "seq_length", "is_padded", "gradient_accumulation_steps", "autocast")
    given: dict[str, Any] = {name: options[name] for name in names if options[name] is not None}  # type: ignore[literal-required]
    step = Step(is_proven=options["prove"] != "off", **given)
    budget = None if options["memory_budget"] is None else parse_budget(options["memory_budget"])
    return plan_own_step(
        model, step, budget, allowed_by(options), select(options, StructureOptions), options["optimizer"]
    )


def _check_no_step(policy: object, options: LoopOptions) -> None:
    """Refuse what describes a step where none is planned for."""
    given = [name for name, value in options.items() if name not in _OF_EVERY_POLICY and value not in (None, False)]
    if given and policy != AUTO:
        raise PolicyError(
            f'{", ".join(given)} was given, but only policy "{AUTO}" plans for a step, and the policy is {policy}. '
            "Leave it out."
        )


def _why_not(model: nn.Module) -> str | None:
    """Return why no step of a model is repeated; None if steps are."""
    if store.num_processes() > 1:
        return "there is more than one process, and no step is repeated in one of them alone"
    modules = list(model.modules())
    if is_sharded(model) or deepspeed.is_sharded(model):
        return "the model is sharded by an engine"
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        return "DistributedDataParallel is around the model, which cannot stop a step half-way"
    if any(map(is_compiled, modules)):
        return "the model is compiled, and a plan is not changed inside of it"
    return None


# --- Steps that go on after they have run out of memory. ---

_TO_DO = (
    "Keep it as an attribute of a module of the model, or name its owner in `undo`; draw batches before the closure."
)
_version = attrgetter("_version")


class _ClosureSteps:
    """Runs the steps of one loop.

    Args:
        model: that the closures train.
        escalation: puts leaner plans in force.
        is_undone: whether steps can be; else each runs once.
    """

    def __init__(self, model: nn.Module, escalation: Escalation, *, is_undone: bool) -> None:
        self.escalation = escalation
        self._is_undone = is_undone
        self._model = model
        self._num_steps = 0
        self._buffers = Buffers()
        self._undo: Sequence[object] = ()
        self._snapshots = AttributeSnapshots(("", model))
        self._parameters = StepParameters(model)
        self._on_devices = one_of_each_device(model)

    def run(self, closure: Callable[[], Any], batch: Any, undo: Sequence[object]) -> Any:
        """Return what a closure returns, under a leaner plan where need be. See `AppliedInLoop.step`.

        Raises:
            OutOfMemoryError: there is no leaner plan, or the closure cannot be undone.
            PlanMismatchError: what ran again was not the same computation.
        """
        if not self._is_undone:
            return closure()
        escalation, ladder = self.escalation, self.escalation.ladder
        escalation.begin_step()
        self._num_steps += 1
        inputs = list(nested_named_tensors(batch))
        size = Size.of(inputs)
        shapes = describe_tensors(inputs) if inputs else "a batch that applied.step() was not given"
        # The planner of a loop sees no forward.
        planned = batch_of((), batch) if isinstance(batch, Mapping) else None
        named = [*((f"undo[{number}]", each) for number, each in enumerate(undo)), *trained_beside(closure)]
        found = [each for _, each in named]
        if len(found) != len(self._undo) or not all(map(is_, found, self._undo)):
            self._undo = found
            self._snapshots = AttributeSnapshots(("", self._model), *named)
        if inputs:
            escalation.stand_on(ladder.level_for(size))
        attributes, modules = self._snapshots.now(), self._snapshots.modules
        parameters = self._parameters.of(modules, self._snapshots.parameters)
        proof = ReplayProof(f"Step {self._num_steps}", "forward", self._model.parameters, _TO_DO)
        noted = attributes, self._buffers.of(modules), RandomState.of(*self._on_devices)
        window = _ClosureWindow(*parameters, inputs, noted)

        def attempt() -> tuple[Any, Failed | None]:
            with _forwards_noted(self._model, proof, ladder):
                returned, failure = escalation.attempt(closure)
            return returned, None if failure is None else Failed(failure, self._num_steps, size, shapes, planned)

        def run_again() -> tuple[Any, Failed | None]:
            window.undo()
            generators = RandomState.of(*self._on_devices).others_than(window.randomness)
            proof.check_start(generators, names_of(window.new_gradients(), self._model))
            proof.begin_replay()
            returned, failed = attempt()
            if failed is None:
                proof.end_replay()
            return returned, failed

        returned, failed = attempt()
        if failed is not None:
            returned = escalation.recover(failed, window.fault, run_again)
        self._buffers.learn(window.buffers)
        ladder.passed(size, planned)
        ladder.end_step()
        return returned


@contextmanager
def _forwards_noted(model: nn.Module, proof: ReplayProof, ladder: Ladder) -> Iterator[None]:
    """Let a proof see the forwards of a model while the block runs: a closure shows nothing else of its losses."""

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            proof.begin_micro_batch(nested_named_tensors([args, kwargs]), ladder.rung.plan)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            proof.note_loss(output)

    hooks = model.register_forward_pre_hook(begin, with_kwargs=True), model.register_forward_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _ClosureWindow:
    """What things were like before a closure, and what brings that back."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        inputs: Sequence[tuple[str, Tensor]],
        noted: tuple[Attributes, SavedBuffers, RandomState],
    ) -> None:
        self._attributes, self.buffers, self.randomness = noted
        self._parameters = [*parameters, *others]
        self._versions = list(map(_version, self._parameters))
        self._gradients = Gradients(parameters)
        self._gradients_of_others = GradientsOfOthers(others)
        self._inputs = [(name, tensor, tensor._version) for name, tensor in inputs]

    def fault(self) -> str | None:
        """Return why the closure cannot be undone; None if it can."""
        if list(map(_version, self._parameters)) != self._versions:
            return "weights have changed since it began: the optimizer's step belongs behind applied.step()"
        if self._gradients.are_written():
            return (
                "it has added to gradients that were there before, or set them to zero in place. Let it begin with "
                "optimizer.zero_grad(), which sets them to None"
            )
        if fault := self._gradients_of_others.fault():
            return fault
        if written := [name for name, tensor, version in self._inputs if tensor._version != version]:
            return f"it has written to its batch: {', '.join(written)}"
        large = "it has written to large tensors among what it is to undo"
        return self._attributes.describe_lost(large) or self.buffers.describe_lost()

    def undo(self) -> None:
        """Bring everything back; gradients that are new are dropped."""
        self._gradients.drop_new()
        self._gradients_of_others.restore()
        # Casts of weights that the failed forward has left hold its graph.
        torch.clear_autocast_cache()
        self._attributes.restore()
        self.buffers.restore()
        self.randomness.restore()

    def new_gradients(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient which was not there."""
        return [*self._gradients.new(), *self._gradients_of_others.new()]
