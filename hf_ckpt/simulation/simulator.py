"""One optimizer step, simulated on a fake copy of the model: followed, and told as `StepMemory`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ckpt.patch.apply import apply, make_plan
from hf_ckpt.policy.modifiers import Prove
from hf_ckpt.policy.plan import Plan, parse
from hf_ckpt.policy.policy import SELECTIVE_MODES, Mode, Policy
from hf_ckpt.regions.selective.operators import Role
from hf_ckpt.simulation import proof_memory
from hf_ckpt.simulation.constant_folding import Concrete
from hf_ckpt.simulation.cuda import as_on_cuda
from hf_ckpt.simulation.cuda.cublas import add_workspaces
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.fake_kernels import explain
from hf_ckpt.simulation.fake_model import fake_twin
from hf_ckpt.simulation.layer_reuse import CannotCopyError, Copies
from hf_ckpt.simulation.offload import CountedLink, add_waits, as_it_runs, host_bytes_of
from hf_ckpt.simulation.op_costs import Queue, is_kept_selectively, operator_cost, role_of_operator, seconds_of
from hf_ckpt.simulation.optimizers import host_tensors, make_optimizer
from hf_ckpt.simulation.reading import read
from hf_ckpt.simulation.run_step import run_step
from hf_ckpt.simulation.sharding import computes_in, on_one_rank, weights_of
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory
from hf_ckpt.simulation.tape import Event, Tape, settle
from hf_ckpt.simulation.tracker import BLOCK_BYTES, Tracker, parameters_and_buffers
from hf_ckpt.simulation.watching import watch
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
    """Predict memory and time of one optimizer step, from the second one on: the optimizer has its state.

    Nothing is computed, and the model stays as it is. Equal layers are traced once.

    Args:
        model: on `meta` or with its weights, in the dtypes that it trains in, with its adapters.
        policy: what `apply` takes; None for no checkpointing.
        step: what the Trainer runs.
        device: where it runs.
        traces_all: trace every layer, those too that another could stand for.
        explains: let the ledger say what each tensor is held for.
        changed_by: what another than this library does to the model, such as switching on transformers' own
            checkpointing. It gets the fake copy, and every layer is traced.
        structure: `layers`, `attention` and `ffn` of `apply`.

    Raises:
        UnsupportedError: the model's forward needs values, or its optimizer cannot be simulated.
        PolicyError: the policy does not suit the model.
    """
    plan = None if policy is None else make_plan(model, parse(policy), **structure)
    options: dict[str, Any] = {"traces_all": traces_all, "explains": explains, "changed_by": changed_by}
    simulated = trace_step(model, plan, step, device, **options, **structure)
    return read(
        simulated.tape,
        device=device.name,
        plan=plan,
        tokens=step.tokens,
        repeats=num_repeats(step),
        host_bytes=simulated.host_bytes,
    )


@dataclass(frozen=True, slots=True)
class Traced:
    """A step that was simulated, event by event.

    Args:
        tape: all layers are in it.
        stacks: those of the fake copy.
        host_bytes: the most that lies on the host: what is offloaded, and the optimizer's paged state.
    """

    tape: Tape
    stacks: tuple[Stack, ...]
    host_bytes: int


def trace_step(
    model: nn.Module,
    plan: Plan | None,
    step: Step,
    device: Device,
    *,
    traces_all: bool = False,
    explains: bool = False,
    changed_by: Change | None = None,
    **structure: Any,
) -> Traced:
    """Simulate a step and return what happened. See `simulate_step`.

    Args:
        model: see there.
        plan: made for this model.
        step: see there.
        device: see there.
        traces_all: see there.
        explains: see there.
        changed_by: see there.
        structure: see there.
    """
    traced = partial(
        _traced, model, plan, step, device, structure, explains=explains, changed_by=changed_by or nullcontext
    )
    if not traces_all and changed_by is None:
        try:
            return traced(copies_layers=True)
        except CannotCopyError:
            pass
    return traced(copies_layers=False)


def num_repeats(step: Step) -> int:
    """Return how often the last simulated micro-batch runs in a step."""
    return max(1, step.gradient_accumulation_steps - 1)


def _traced(
    model: nn.Module,
    plan: Plan | None,
    step: Step,
    device: Device,
    structure: Any,
    *,
    explains: bool,
    copies_layers: bool,
    changed_by: Change,
) -> Traced:
    twin, mode = fake_twin(model, partial(computes_in, step), is_cuda=device.is_cuda)
    twin.train()
    _turn_cache_off(twin)
    tracker = Tracker(rounding=BLOCK_BYTES if device.is_cuda else 1, costs=partial(_costs, device))
    stacks = find_layers(twin, **structure)
    plan = None if plan is None else as_it_runs(plan)
    copies = Copies.choose(stacks, plan) if copies_layers else None
    if plan is not None:
        prove: Prove = "first_step" if step.is_proven else "off"
        applied = apply(twin, plan if copies is None else copies.without(plan), prove=prove, **structure)
        applied.value_proof.use(partial(proof_memory.simulated, tracker))
        for offloader in applied.offloaders:
            offloader.use_link(CountedLink(tracker))
    if copies is not None:
        copies.pass_through(twin, tracker)
    hooks = torch.autograd.graph.saved_tensors_hooks(tracker.note_saved, _as_it_is) if explains else nullcontext()
    with followed(twin, mode, stacks, step, device, tracker) as optimizer, hooks, changed_by(twin) as changed:
        run_step(changed, step, tracker, optimizer, is_cuda=device.is_cuda)
    if step.optim != "adagrad":
        # It makes its state before it sees a gradient.
        tracker.forget_unused_state()
    tape = tracker.tape if copies is None else copies.fill_up(tracker.tape)
    settle(tape)
    _queue(tape, device, plan)
    add_waits(tape, device)
    tape = on_one_rank(tape, weights_of(model, find_layers(model, **structure), step), step, device)
    add_workspaces(tape, device)
    host_bytes = 0 if optimizer is None else sum(tensor.nbytes for tensor in host_tensors(optimizer))
    return Traced(tape, stacks, host_bytes + host_bytes_of(tape))


@contextmanager
def followed(
    twin: nn.Module, mode: FakeTensorMode, stacks: Sequence[Stack], step: Step, device: Device, tracker: Tracker
) -> Iterator[torch.optim.Optimizer | None]:
    """Let what runs inside run on a fake copy, as on the device, and be followed. Yields the optimizer, with its state.

    Args:
        twin: of `fake_twin`, in training mode.
        mode: of `fake_twin`.
        stacks: the copy's layers.
        step: names the optimizer.
        device: where.
        tracker: follows it; random numbers that are drawn for real are drawn again afterwards.
    """
    with ExitStack() as entered:
        for context in (torch.random.fork_rng(devices=[]), mode, Concrete(), tracker, _explained(tracker)):
            entered.enter_context(context)
        optimizer = _prepare(twin, step, tracker, is_cuda=device.is_cuda)
        entered.enter_context(watch(twin, stacks, tracker))
        entered.enter_context(as_on_cuda(step, device))
        yield optimizer


def _prepare(model: nn.Module, step: Step, tracker: Tracker, *, is_cuda: bool) -> torch.optim.Optimizer | None:
    """Make the optimizer, let it make its state, and count what is there before the step.

    Args:
        model: with fake tensors.
        step: names the optimizer.
        tracker: is entered.
        is_cuda: see `make_optimizer`.
    """
    tracker.know(parameters_and_buffers(model), Category.PARAMETERS)
    if step.optim is None:
        return None
    with tracker.silence():
        optimizer = make_optimizer(model, step, is_cuda=is_cuda)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        model.zero_grad()
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tracker.know(_state_of(optimizer, names), Category.OPTIMIZER)
    return optimizer


def _state_of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    elsewhere = {id(tensor) for tensor in host_tensors(optimizer)}
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor) and id(value) not in elsewhere:
                yield names[parameter], value


def _costs(device: Device, function: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, int]:
    cost = operator_cost(function, args, kwargs, output)
    return seconds_of(cost, device), cost.num_flops


def _queue(tape: Tape, device: Device, plan: Plan | None) -> None:
    """Let operators wait for the host where it is slower than the device: in the order of the whole step."""
    queue = Queue(device)
    modes: dict[tuple[str, int | None], Mode] = {
        (stack.path, layer_idx): entry.mode
        for stack in (() if plan is None else plan.stacks)
        for layer_idx, entry in enumerate(stack.layers)
        if entry.mode in SELECTIVE_MODES
    }
    has_kernel = {_layer(event) for event in tape.events if role_of_operator(event.place.operator) is Role.ATTENTION}
    for event in tape.events:
        if event.seconds:
            mode = modes.get(_layer(event))
            is_recorded = event.place.phase in (Phase.FORWARD, Phase.RECOMPUTATION)
            if mode is Mode.SELECTIVE_ATTENTION and _layer(event) not in has_kernel:
                # Its probabilities are followed from operator to operator.
                is_looked_at = is_recorded
            else:
                is_looked_at = mode is not None and is_kept_selectively(event)
            event.seconds = queue.take(event.seconds, records_graph=is_recorded, is_looked_at=is_looked_at)


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
        told = explain(error, tracker.module)
        if told is None:
            raise
        raise told from error
