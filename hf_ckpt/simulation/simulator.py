"""One optimizer step, or one batch of evaluation, on a fake copy of the model: what it needs, without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ckpt.patch.apply import apply, make_plan
from hf_ckpt.policy.options import HeadMode, Prove
from hf_ckpt.policy.plan import LayerPlan, Plan, parse
from hf_ckpt.policy.policy import SELECTIVE_MODES, Mode, Policy
from hf_ckpt.regions.selective.save_rules import OperatorRole
from hf_ckpt.simulation import proof_memory
from hf_ckpt.simulation.constant_folding import ConstantFolding, to_unsupported_error
from hf_ckpt.simulation.cuda import add_workspaces, emulate_cuda
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.fake_model import fake_copy
from hf_ckpt.simulation.layer_reuse import CannotReuseError, LayerReuse
from hf_ckpt.simulation.offload import SimulatedLink, add_copy_waits, peak_host_bytes, resolve_fractions
from hf_ckpt.simulation.op_costs import LaunchQueue, busy_seconds, is_kept_selectively, operator_cost, role_of_operator
from hf_ckpt.simulation.optimizers import host_tensors, make_optimizer
from hf_ckpt.simulation.sharding import Weight, compute_dtype, one_rank_tape, weights_of
from hf_ckpt.simulation.step import Step, make_inputs, prepare_forward, run_step
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory
from hf_ckpt.simulation.tape import Event, Tape, read_tape, sort_frees
from hf_ckpt.simulation.tracker import BLOCK_BYTES, Tracker, parameters_and_buffers, track_modules
from hf_ckpt.structure.layers import Stack, find_layers

Change = Callable[[nn.Module], AbstractContextManager[nn.Module]]
"""Takes a model; what it returns yields the module to call with a batch, and undoes what it did on exit."""


def simulate_step(
    model: nn.Module,
    policy: Policy | Plan | str | None,
    step: Step,
    device: Device,
    *,
    traces_all: bool = False,
    explains: bool = False,
    changed_by: Change | None = None,
    **structure: Any,
) -> StepMemory:
    """Simulate a single step. See `StepSimulator.simulate`, which `traces_all` and the like are passed to."""
    simulator = StepSimulator(model, step, device, structure)
    return simulator.simulate(policy, traces_all=traces_all, explains=explains, changed_by=changed_by)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step that was simulated, event by event."""

    tape: Tape
    """Of all layers."""
    stacks: tuple[Stack, ...]
    """Those of the fake copy."""
    host_bytes: int
    """The most that lies on the host: what is offloaded, and the optimizer's paged state."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What evaluation needs while training goes on."""

    memory: StepMemory
    """Of one batch. The optimizer has its state, gradients are freed."""
    kept_bytes: int
    """What each batch leaves behind where predictions are kept, for `compute_metrics`: logits in the dtype in which the
    model returns them, and labels, of all ranks."""


@dataclass(frozen=True, eq=False)
class StepSimulator:
    """Predicts a training step of one model on one device, under one plan after the other.

    The only place where simulated steps are remembered: `memory` simulates a step once for each plan.
    """

    model: nn.Module
    """On `meta` or with its weights, in the dtypes that it trains in, with its adapters. It stays as it is."""
    step: Step
    device: Device
    structure: Mapping[str, Any] = field(default_factory=dict)
    """`layers`, `attention` and `ffn` of `apply`."""
    _known: dict[tuple[Step, Plan | None], StepMemory] = field(default_factory=dict, repr=False)
    """What `memory` has simulated, of all steps of this model on this device."""

    def with_step(self, step: Step) -> StepSimulator:
        """Return the simulator of another step of the same model. The two share what they remember."""
        return replace(self, step=step)

    def plan_of(self, policy: Policy | Plan) -> Plan:
        """Return the plan that `apply` would put in force. Raises what `apply` raises."""
        return make_plan(self.model, policy, **self.structure)

    def stacks_of(self, model: nn.Module) -> tuple[Stack, ...]:
        """Return the layers of the model, or of a copy of it."""
        return find_layers(model, **self.structure)

    def memory(self, plan: Plan | None) -> StepMemory:
        """Return what the step needs under a plan. A plan that does nothing counts as none."""
        key = self.step, None if plan is None or _does_nothing(plan) else plan
        if key not in self._known:
            self._known[key] = self.simulate(key[1])
        return replace(self._known[key], plan=plan)

    def simulate(
        self,
        policy: Policy | Plan | str | None,
        *,
        traces_all: bool = False,
        explains: bool = False,
        changed_by: Change | None = None,
    ) -> StepMemory:
        """Predict memory and time of one optimizer step, from the second one on: the optimizer has its state.

        Nothing is computed. Equal layers are traced once. Nothing is remembered: see `memory`.

        Args:
            policy: what `apply` takes; None for no checkpointing.
            traces_all: trace every layer, those too that another could stand for.
            explains: let the ledger say what each tensor is held for.
            changed_by: what another library than this one does to the model, such as switching on transformers' own
                checkpointing. It gets the fake copy, and every layer is traced.

        Raises:
            UnsupportedError: the model's forward needs values, or its optimizer cannot be simulated.
            PolicyError: the policy does not suit the model.
        """
        plan = None if policy is None else self.plan_of(parse(policy))
        traced = self.trace(plan, traces_all=traces_all, explains=explains, changed_by=changed_by)
        return read_tape(
            traced.tape,
            device=self.device.name,
            plan=plan,
            tokens=self.step.tokens,
            repeats=num_repeats(self.step),
            host_bytes=traced.host_bytes,
        )

    def trace(
        self,
        plan: Plan | None,
        *,
        traces_all: bool = False,
        explains: bool = False,
        changed_by: Change | None = None,
    ) -> TracedStep:
        """Simulate the step event by event. See `simulate`; the plan is one of this model's."""
        traced = partial(self._trace, plan, explains=explains, changed_by=changed_by or nullcontext)
        if not traces_all and changed_by is None:
            try:
                return traced(reuses_layers=True)
            except CannotReuseError:
                pass
        return traced(reuses_layers=False)

    def evaluate(self) -> Evaluation:
        """Predict the memory of one batch of `Trainer.evaluate()`, without gradients and in evaluation mode.

        `step` has the rows and tokens of a batch of evaluation, and the optimizer and engine of the training. The
        model's `use_cache` is taken as it is: with it, keys and values of the batch are held too. Raises
        `UnsupportedError`.
        """
        step, device = self.step, self.device
        fake, mode = fake_copy(self.model, partial(compute_dtype, step), is_cuda=device.is_cuda)
        tracker = Tracker(rounding=BLOCK_BYTES if device.is_cuda else 1)
        with _tracked(fake.train(), mode, self.stacks_of(fake), step, device, tracker):
            kept_bytes = _run_batch(fake.eval(), step, tracker)
        tape = one_rank_tape(tracker.tape, self._weights(), step, device)
        add_workspaces(tape, device, has_trained=True)
        memory = read_tape(tape, device=device.name, plan=None, tokens=step.batch_size * step.seq_length)
        return Evaluation(memory, kept_bytes * step.sharding.world_size)

    def _trace(self, plan: Plan | None, *, explains: bool, reuses_layers: bool, changed_by: Change) -> TracedStep:
        step, device = self.step, self.device
        fake, mode = fake_copy(self.model, partial(compute_dtype, step), is_cuda=device.is_cuda)
        fake.train()
        _turn_cache_off(fake)
        tracker = Tracker(rounding=BLOCK_BYTES if device.is_cuda else 1, costs=partial(_costs, device))
        stacks = self.stacks_of(fake)
        plan = None if plan is None else resolve_fractions(plan)
        reuse = LayerReuse.choose(stacks, plan) if reuses_layers else None
        if plan is not None:
            self._apply(fake, plan if reuse is None else reuse.plan_for_traced(plan), tracker)
        if reuse is not None:
            reuse.skip_layers(fake, tracker)
        hooks = torch.autograd.graph.saved_tensors_hooks(tracker.record_saved, _as_it_is) if explains else nullcontext()
        with _tracked(fake, mode, stacks, step, device, tracker) as optimizer, hooks, changed_by(fake) as changed:
            run_step(changed, step, tracker, optimizer, is_cuda=device.is_cuda)
        if step.optim != "adagrad":
            # It makes its state before it sees a gradient.
            tracker.drop_unused_state()
        tape = tracker.tape if reuse is None else reuse.expand(tracker.tape)
        sort_frees(tape)
        _queue(tape, device, plan)
        add_copy_waits(tape, device)
        tape = one_rank_tape(tape, self._weights(), step, device)
        add_workspaces(tape, device)
        host_bytes = 0 if optimizer is None else sum(tensor.nbytes for tensor in host_tensors(optimizer))
        return TracedStep(tape, stacks, host_bytes + peak_host_bytes(tape))

    def _apply(self, fake: nn.Module, plan: Plan, tracker: Tracker) -> None:
        """Put a plan on the copy; the tracker counts what its proofs and its offload need."""
        prove: Prove = "first_step" if self.step.is_proven else "off"
        applied = apply(fake, plan, prove=prove, **self.structure)
        applied.value_proof.use_call_proofs(partial(proof_memory.simulate_proof, tracker))
        for offloader in applied.offloaders:
            offloader.use_link(SimulatedLink(tracker))

    def _weights(self) -> dict[str, Weight]:
        return weights_of(self.model, self.stacks_of(self.model), self.step)


def num_repeats(step: Step) -> int:
    """Return how often the last simulated micro-batch runs in a step."""
    return max(1, step.gradient_accumulation_steps - 1)


def _does_nothing(plan: Plan) -> bool:
    """Whether a plan is no plan: nothing is recomputed, nothing runs in tiles, and the head is the model's own."""
    entries = {replace(layer, why="") for stack in plan.stacks for layer in stack.layers}
    return entries <= {LayerPlan()} and plan.head is HeadMode.PLAIN


@contextmanager
def _tracked(
    fake: nn.Module, mode: FakeTensorMode, stacks: Sequence[Stack], step: Step, device: Device, tracker: Tracker
) -> Iterator[torch.optim.Optimizer | None]:
    """Run what is inside on a fake copy (of `fake_copy`, in training mode), as on the device, and track it.

    Yields the optimizer, with its state. Random numbers that are drawn for real are drawn again afterwards.
    """
    with ExitStack() as entered:
        for context in (torch.random.fork_rng(devices=[]), mode, ConstantFolding(), tracker, _explained(tracker)):
            entered.enter_context(context)
        optimizer = _prepare(fake, step, tracker, is_cuda=device.is_cuda)
        entered.enter_context(track_modules(fake, stacks, tracker))
        entered.enter_context(emulate_cuda(step, device))
        yield optimizer


def _prepare(model: nn.Module, step: Step, tracker: Tracker, *, is_cuda: bool) -> torch.optim.Optimizer | None:
    """Make the optimizer, let it make its state, and count what is there before the step."""
    tracker.record_existing(parameters_and_buffers(model), Category.PARAMETERS)
    if step.optim is None:
        return None
    with tracker.before_step():
        optimizer = make_optimizer(model, step, is_cuda=is_cuda)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        model.zero_grad()
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tracker.record_existing(_state_of(optimizer, names), Category.OPTIMIZER)
    return optimizer


def _state_of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    elsewhere = {id(tensor) for tensor in host_tensors(optimizer)}
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor) and id(value) not in elsewhere:
                yield names[parameter], value


def _costs(device: Device, function: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, int]:
    cost = operator_cost(function, args, kwargs, output)
    return busy_seconds(cost, device), cost.num_flops


def _queue(tape: Tape, device: Device, plan: Plan | None) -> None:
    """Let operators wait for the host where it is slower than the device: in the order of the whole step."""
    queue = LaunchQueue(device)
    modes: dict[tuple[str, int | None], Mode] = {
        (stack.path, layer_idx): entry.mode
        for stack in (() if plan is None else plan.stacks)
        for layer_idx, entry in enumerate(stack.layers)
        if entry.mode in SELECTIVE_MODES
    }
    has_kernel = {
        _layer(event) for event in tape.events if role_of_operator(event.place.operator) is OperatorRole.ATTENTION
    }
    for event in tape.events:
        if event.seconds:
            mode = modes.get(_layer(event))
            is_recorded = event.place.phase in (Phase.FORWARD, Phase.RECOMPUTATION)
            if mode is Mode.SELECTIVE_ATTENTION and _layer(event) not in has_kernel:
                # Its probabilities are followed from operator to operator.
                is_intercepted = is_recorded
            else:
                is_intercepted = mode is not None and is_kept_selectively(event)
            event.seconds = queue.take(event.seconds, records_graph=is_recorded, is_intercepted=is_intercepted)


def _layer(event: Event) -> tuple[str, int | None]:
    return event.place.stack, event.place.layer_idx


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _turn_cache_off(model: nn.Module) -> None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False


@contextmanager
def _explained(tracker: Tracker) -> Iterator[None]:
    """Say what a step that cannot be simulated needs."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        unsupported = to_unsupported_error(error, tracker.module)
        if unsupported is None:
            raise
        raise unsupported from error


def _run_batch(model: nn.Module, step: Step, tracker: Tracker) -> int:
    """Run a forward and return the bytes of its predictions and labels."""
    with tracker.before_step():
        inputs = make_inputs(step)
    tracker.record_existing(inputs.items(), Category.TEMPORARY)
    with torch.no_grad():
        output = prepare_forward(model, step)(**inputs)
    logits: Tensor = output["logits"]
    return logits.nbytes + inputs["labels"].nbytes
