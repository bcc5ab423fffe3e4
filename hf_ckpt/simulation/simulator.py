"""One optimizer step, or one batch of evaluation, on a fake copy of the model: what it needs, without running it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.garbage_collection import count_as_old, no_cycles_collected
from hf_ckpt.patch.apply import Applied, apply_plan, make_plan
from hf_ckpt.patch.frozen_weights import tables_outside
from hf_ckpt.patch.use_cache import Topic
from hf_ckpt.policy.options import Prove
from hf_ckpt.policy.plan import LayerPlan, Plan, parse, with_entries
from hf_ckpt.policy.policy import Policy
from hf_ckpt.regions.routing import kernels_vary
from hf_ckpt.regions.waiting_weights import owners_of, packed_bytes, waiting_tensors
from hf_ckpt.second_process import Take, may_fork, work_ahead
from hf_ckpt.simulation.caching_allocator import BLOCK_BYTES, Held, held_within, play
from hf_ckpt.simulation.constant_folding import RAISED_BY_MODELS, fold, fold_known, to_unsupported_error
from hf_ckpt.simulation.cuda import add_workspaces, emulate_cuda
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.fake_model import FakeCopy, fake_copy
from hf_ckpt.simulation.fit import Capacity, Verdict, judge, unplayed_bytes
from hf_ckpt.simulation.fsdp_tape import Fsdp1Tape, Fsdp2Tape
from hf_ckpt.simulation.host_and_link_time import queue_operators
from hf_ckpt.simulation.isolation import RealModelReachedError, isolated, random_states_kept
from hf_ckpt.simulation.layer_likeness import number_kinds
from hf_ckpt.simulation.layer_reuse import LayerReuse, held_to_original, run_unlike, shared_layers
from hf_ckpt.simulation.module_hooks import track_modules, track_references
from hf_ckpt.simulation.offload import SimulatedLink, add_copy_waits, peak_host_bytes, resolve_fractions
from hf_ckpt.simulation.op_costs import busy_seconds, operator_cost
from hf_ckpt.simulation.optimizers import OptimizerStep, simulate_optimizer
from hf_ckpt.simulation.proof_memory import SimulatedCallProof
from hf_ckpt.simulation.rank_tape import DdpTape, RankTape, compute_dtype, let_adapters_cast, weights_of
from hf_ckpt.simulation.shared_tensors import has_shared, shapes_found_apart
from hf_ckpt.simulation.step import MICRO_BATCHES, Step, prepare_loss, run_evaluation_batch, run_step
from hf_ckpt.simulation.step_memory import Category, StepMemory
from hf_ckpt.simulation.tape import Places, Storage, Tape, read_tape, sort_frees
from hf_ckpt.simulation.tape_expansion import CannotReuseError
from hf_ckpt.simulation.tracker import Tracker, parameters_and_buffers
from hf_ckpt.simulation.waiting_weights import let_weights_wait, without_waiting_weights
from hf_ckpt.simulation.zero_tape import ZeroTape
from hf_ckpt.structure.layers import Stack, find_layers
from hf_ckpt.structure.stored import stored
from hf_ckpt.upstream.torch import DisableTorchFunction, disable_current_modes

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

    tape: Tape  # Of all layers.
    host_bytes: int  # The most that lies on the host: what is offloaded, and the optimizer's paged state.


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """What a step needs in numbers, which weigh less than a `StepMemory`."""

    peak_bytes: int
    reserved_bytes: int  # The most that torch's allocator holds; the peak on a CPU.
    host_bytes: int


@dataclass(frozen=True, slots=True)
class EvaluationMemory:
    """What evaluation needs while training goes on."""

    memory: StepMemory  # Of one batch. The optimizer has its state, gradients are freed.
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
    structure: Mapping[str, Any] = field(default_factory=dict)  # `layers`, `attention` and `ffn` of `apply`.
    _known: _Known = field(default_factory=lambda: _Known(), repr=False)

    def with_step(self, step: Step) -> StepSimulator:
        """Return the simulator of another step of the same model. The two share what they remember."""
        return replace(self, step=step)

    def without_traces(self, step: Step) -> StepSimulator:
        """Return the simulator of another step that shares the layers and the optimizers, and no simulated steps."""
        # Of a training that goes on: traced steps take hundreds of megabytes, and are free with their simulator.
        shared = replace(self._known, memories={}, needs={}, prepared={}, traces={}, stacks=self.stacks)
        return replace(self, step=step, _known=shared)

    def plan_of(self, policy: Policy | Plan) -> Plan:
        """Return the plan that `apply` would put in force. Raises what `apply` raises."""
        known = self._known.plans
        if policy not in known:
            known[policy] = make_plan(self.model, policy, self.stacks, is_checked=bool(known))
        return known[policy]

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The layers of the model. Raises `UnsupportedError` where the model cannot be simulated."""
        if not self._known.stacks:
            for name, module in self.model.named_modules():
                # Its real kernel holds what a fake one does not.
                if isinstance(module, nn.RNNBase):
                    raise UnsupportedError(
                        f'Module "{name}" cannot be simulated: the kernel of {type(module).__name__} keeps memory of '
                        "its own, which differs from device to device. Measure a step on the device instead; for "
                        "p-tuning, encoder_reparameterization_type: MLP does without it."
                    )
            self._known.stacks = find_layers(self.model, **self.structure)
            shared = shared_layers(self.model, self._known.stacks)
            self._known.signatures.update(number_kinds(self._known.stacks, shared))
        return self._known.stacks

    def layers_like(self, layer: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the layers that are like one, each as the number of its stack and its `layer_idx`; itself too."""
        signatures = self._known.signatures
        kinds = {
            (number, each.layer_idx): signatures[each.outer]
            for number, stack in enumerate(self.stacks)
            for each in stack.layers
        }
        return [key for key, kind in kinds.items() if kind == kinds[layer]]

    def waiting_bytes(self) -> list[tuple[int, int, int]]:
        """Return the bytes of each layer's weights that could wait on the host, behind its stack and `layer_idx`."""
        owners = owners_of(self.model)
        return [
            (number, layer.layer_idx, packed_bytes(each[0] for _, each in waiting_tensors(layer.module, owners)[0]))
            for number, stack in enumerate(self.stacks)
            for layer in stack.layers
        ]

    @property
    def table_bytes(self) -> int:
        """Bytes of the embeddings that could wait on the host."""
        tables = tables_outside(self.model, self.stacks)
        return sum(table.parameter.nbytes for table in tables if table.reason_to_stay is None)

    def memory(self, plan: Plan | None) -> StepMemory:
        """Return what the step needs under a plan. A plan that does nothing counts as none."""
        key = self._key(plan)
        self._take(key)
        if key not in self._known.memories:
            self._known.memories[key], self._known.reserved[*key, False] = self._simulated(key[1])
        return replace(self._known.memories[key], plan=plan)

    def needs(self, plan: Plan | None) -> StepNeeds:
        """Return what the step needs under a plan in numbers, without what comes before it."""
        key = self._key(plan)
        self._take(key)
        if key not in self._known.needs:
            memory = self.memory(plan)
            self._known.needs[key] = StepNeeds(memory.peak_bytes, self._known.reserved[*key, False], memory.host_bytes)
        return self._known.needs[key]

    @contextmanager
    def ahead(self, plans: Iterable[Plan | None], *, in_numbers: bool = False) -> Iterator[None]:
        """Let a second process simulate the step under plans that are asked for inside, in their order.

        `in_numbers`: only `needs` is asked for, also of a simulator of the same step that shares what this one knows.
        """
        if not may_fork() or self._known.take is not _take_nothing:
            yield
            return
        find = self._needs_ahead if in_numbers else self._memory_ahead
        with ExitStack() as entered:

            def begin(key: Hashable) -> Any:
                self._known.take = _take_nothing
                # Where weights wait, that is written into the step without it.
                keys = dict.fromkeys(
                    self._key(None if plan is None else without_waiting_weights(plan)) for plan in plans
                )
                tasks = {each: partial(find, each[1]) for each in keys if self._is_unknown(each)}
                self._known.take = entered.enter_context(work_ahead(tasks, first=self.warm_up))
                return self._known.take(key)

            def begin_later(key: Hashable) -> None:
                self._known.take = begin

            if in_numbers:
                begin(None)
            else:
                # What the first step finds out is of use to both processes.
                self._known.take = begin if self._has_simulated else begin_later
            try:
                yield
            finally:
                self._known.take = _take_nothing

    @property
    def _has_simulated(self) -> bool:
        return bool(self._known.memories or self._known.traces)

    def warm_up(self) -> None:
        """Simulate a step for nothing where none has been simulated: that of a second process is never the first one.

        In the first one of a process, adapters of PEFT that replace a parameter leave a storage alive, which changes
        the prediction by its bytes.
        """
        if not self._has_simulated:
            with no_cycles_collected():
                self._trace_with_reuse(None)

    def _is_unknown(self, key: _Key) -> bool:
        known = self._known
        return key not in known.memories and key not in known.traces and key not in known.needs

    def _memory_ahead(self, plan: Plan | None) -> _FoundAhead:
        memory, traced = self.memory(plan), self.trace(self._checked(plan)) if _is_uniform(plan) else None
        return self.needs(plan), memory, traced

    def _needs_ahead(self, plan: Plan | None) -> _FoundAhead:
        return self.needs(plan), None, None

    def _take(self, key: _Key) -> None:
        """Remember what a second process has found."""
        if not self._is_unknown(key):
            return
        found: _FoundAhead | None = self._known.take(key)
        if found is None:
            return
        needs, memory, traced = found
        self._known.needs[key], self._known.reserved[*key, False] = needs, needs.reserved_bytes
        if memory is not None:
            self._known.memories[key] = memory
        if traced is not None:
            self._known.traced(key, lambda: traced)

    def reserved_bytes(self, plan: Plan | None, *, expands: bool = False) -> int:
        """Return what torch's allocator holds of the device when a training with this step begins.

        `expands`: under `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. On a CPU it holds what is allocated.
        """
        before, peak, is_cuda = self.prepare(), self.needs(plan).peak_bytes, self.device.is_cuda
        if before is not None:
            return max(peak, before.peak_bytes) + (unplayed_bytes(self.device) if is_cuda else 0)
        key = *self._key(plan), expands and is_cuda
        if key not in self._known.reserved:
            self._known.reserved[key] = play(self.trace(self._checked(plan)).tape, expands=expands).reserved_bytes
        return self._known.reserved[key]

    def verdict(self, plan: Plan | None, capacity: Capacity) -> Verdict:
        """Return whether the step fits under a plan, with what comes before it."""
        before = self.prepare()
        peak = max(self.needs(plan).peak_bytes, 0 if before is None else before.peak_bytes)
        return judge(peak, self.reserved_bytes(plan) if peak <= capacity.allocated_bytes else 0, capacity)

    def held_within(self, plan: Plan | None, limit_bytes: int) -> Held:
        """Return what torch's allocator holds of a CUDA device that has so much for it. See `reserved_bytes`."""
        return held_within(self.trace(self._checked(plan)).tape, limit_bytes)

    def _simulated(self, plan: Plan | None) -> tuple[StepMemory, int]:
        with no_cycles_collected():
            checked = self._checked(plan)
            return self.read(self.trace(checked), checked)

    def _checked(self, plan: Plan | None) -> Plan | None:
        """Return a plan as it runs; None for one that does nothing."""
        plan = self._key(plan)[1]
        return None if plan is None else self.plan_of(plan)

    def read(self, traced: TracedStep, plan: Plan | None) -> tuple[StepMemory, int]:
        """Return what a traced step needs, and the bytes that torch reserves for it. `plan` is that of the trace."""
        played = play(traced.tape) if self.device.is_cuda else None
        memory = read_tape(
            traced.tape,
            device=self.device.name,
            plan=plan,
            tokens=self.step.tokens,
            repeats=num_repeats(self.step),
            host_bytes=traced.host_bytes,
            blocks=None if played is None else played.blocks,
        )
        return memory, memory.peak_bytes if played is None else played.reserved_bytes

    def simulate(
        self,
        policy: Policy | Plan | str | None,
        *,
        traces_all: bool = False,
        explains: bool = False,
        changed_by: Change | None = None,
    ) -> StepMemory:
        """Predict memory and time of one optimizer step, from the second one on: the optimizer has its state.

        Nothing is computed. Equal layers, and equal tiles, are traced once. Nothing is remembered: see `memory`.

        Args:
            policy: what `apply` takes; None for no checkpointing.
            traces_all: trace every layer and every tile, those too that another could stand for.
            explains: let the ledger say what each tensor is held for.
            changed_by: what another library than this one does to the model, such as switching on transformers' own
                checkpointing. It gets the fake copy, and every layer is traced.

        Raises:
            UnsupportedError: the model's forward needs values, or its optimizer cannot be simulated.
            PolicyError: the policy does not suit the model.
        """
        with no_cycles_collected():
            plan = None if policy is None else self.plan_of(parse(policy))
            traced = self.trace(plan, traces_all=traces_all, explains=explains, changed_by=changed_by)
            return self.read(traced, plan)[0]

    def trace(
        self,
        plan: Plan | None,
        *,
        traces_all: bool = False,
        explains: bool = False,
        changed_by: Change | None = None,
    ) -> TracedStep:
        """Simulate the step event by event. See `simulate`; the plan is one of this model's."""
        if plan is not None and (bare := without_waiting_weights(plan)) is not plan:
            traced = self.trace(bare, traces_all=traces_all, explains=explains, changed_by=changed_by)
            moved = partial(self._with_waiting_weights, traced, plan)
            return moved() if traces_all or explains or changed_by else self._known.traced(self._key(plan), moved)
        key, plan = self._key(plan), None if plan is None else resolve_fractions(plan)
        if traces_all or changed_by is not None:
            change = changed_by or nullcontext
            return self._trace(plan, reuse=None, explains=explains, reuses_slices=False, changed_by=change)
        if explains:
            return self._trace_with_reuse(plan, explains=True)
        self._take(key)
        return self._known.traced(key, partial(self._trace_with_reuse, plan))

    def evaluate(self, plan: Plan | None = None) -> EvaluationMemory:
        """Predict the memory of one batch of `Trainer.evaluate()`, without gradients and in evaluation mode.

        Of a plan only the weights matter that wait on the host: nothing is recomputed.

        `step` has the rows and tokens of a batch of evaluation, and the optimizer and engine of the training. The
        model's `use_cache` is taken as it is: with it, keys and values of the batch are held too. Raises
        `UnsupportedError`.
        """
        step, device = self.step, self.device
        with no_cycles_collected():
            try:
                tape, num_bytes = self._evaluated(reuses_layers=step.loss is None)
            except (CannotReuseError, RealModelReachedError):
                tape, num_bytes = self._evaluated(reuses_layers=False)
        if plan is not None and without_waiting_weights(plan) is not plan:
            tape, _ = self._let_weights_wait(tape, plan)
        add_workspaces(tape, device, has_trained=True)
        memory = read_tape(tape, device=device.name, plan=None, tokens=step.rows * step.seq_length)
        return EvaluationMemory(memory, num_bytes * step.sharding.world_size)

    def prepare(self) -> StepMemory | None:
        """Predict the memory of what the step's loss does before the first micro-batch, such as generating it.

        None where it does nothing. It is the same under each plan: gradients are freed and none is computed. Raises
        `UnsupportedError`.
        """
        loss = self.step.loss
        if loss is None or not loss.prepares:
            return None
        step, device = self.step, self.device
        if step in self._known.prepared:
            return self._known.prepared[step]
        with no_cycles_collected():
            fake, tracker = self._copied(None), self._tracker(has_costs=False)
            _turn_cache_off(fake.model.train())
            self._record_optimizer(tracker)
            with self._tracked(fake, tracker) as others, track_references(fake.model, others.values(), tracker):
                with tracker.before_step():
                    kept = loss.make_prepared(step)
                tracker.record_existing(kept.items(), Category.TEMPORARY)
                loss.prepare(step, fake.model, prepare_loss(fake.model, step, others, is_cuda=device.is_cuda))
            tape = self._one_rank_tape(tracker.tape)
            add_workspaces(tape, device, has_trained=True)
            found = read_tape(tape, device=device.name, plan=None, tokens=step.tokens)
        self._known.prepared[step] = found
        return found

    def _evaluated(self, *, reuses_layers: bool) -> tuple[Tape, int]:
        """Return the tape of a batch of evaluation, and the bytes of its predictions and labels."""
        unlike = self._known.unlike
        reuse = LayerReuse.choose(self.stacks, None, self._known.signatures, unlike=unlike) if reuses_layers else None
        fake, tracker = self._copied(reuse), self._tracker(has_costs=False)
        if reuse is not None:
            self._skip(reuse, fake, tracker)
        self._record_optimizer(tracker)
        with self._tracked(fake, tracker) as others:
            num_bytes = run_evaluation_batch(fake.model.eval(), self.step, tracker, others, is_cuda=self.device.is_cuda)
        return self._one_rank_tape(tracker.tape, reuse), num_bytes

    def _record_optimizer(self, tracker: Tracker) -> None:
        """Count what the optimizer keeps from step to step."""
        if self.step.optim is not None:
            names = frozenset(name for name, parameter in self.model.named_parameters() if parameter.requires_grad)
            tracker.record_apart(self._optimizer(names).copied_state())

    def _copied(self, reuse: LayerReuse | None) -> FakeCopy:
        fake = fake_copy(
            self.model,
            partial(compute_dtype, self.step),
            is_cuda=self.device.is_cuda,
            stand_ins={} if reuse is None else reuse.stand_ins(),
        )
        let_adapters_cast(fake.model, self.step)
        return fake

    def _skip(self, reuse: LayerReuse, fake: FakeCopy, tracker: Tracker) -> None:
        """Skip layers that others represent, and count the weights of those that the copy does not even have."""
        names, known, layers = self._names(), self._known.tensors, reuse.stand_ins()
        reuse.skip_layers(fake, names, tracker)
        for layer in layers:
            if layer not in known:
                known[layer] = tuple(each for _, each in parameters_and_buffers(layer))
        tensors = {id(each): each for layer in layers for each in known[layer]}
        for tensor in tensors.values():
            if isinstance(tensor, nn.Parameter):
                tracker.record_weight_apart(names[tensor], tensor, compute_dtype(self.step, tensor))
            elif not fake.has_copy_of(tensor):
                tracker.record_weight_apart("", tensor, tensor.dtype)

    def _key(self, plan: Plan | None) -> _Key:
        # A plan that does nothing is none: nothing is recomputed or runs in tiles, and the head is the model's own.
        if plan is None or plan.does_nothing:
            return self.step, None
        # Without what only its reader needs: the model's name, and why an entry is as it is.
        unexplained = with_entries(plan, lambda entry: replace(entry, why="") if entry.why else entry)
        return self.step, replace(unexplained, model_class="")

    def _trace_with_reuse(self, plan: Plan | None, *, explains: bool = False) -> TracedStep:
        unlike, signatures = set(self._known.unlike), self._known.signatures
        held: Collection[tuple[int, int]] = ()
        if plan is not None and self.step.is_proven:
            held = held_to_original(self.stacks, plan, signatures)
        has_segments = any(entry.segment is not None for entry in _entries(plan))
        # Segments are cut first: traced whole, those of 80 layers take half as long again, nested ones twice as long.
        for cuts in (True, False) if has_segments else (False,):
            for _ in range(_MOST_TRIES):
                reuse: LayerReuse | None = None
                try:
                    reuse = LayerReuse.choose(self.stacks, plan, signatures, unlike=unlike, held=held, cuts=cuts)
                    return self._trace(plan, reuse=reuse, explains=explains)
                except CannotReuseError as error:
                    if error.unlike <= unlike:
                        break
                    unlike |= error.unlike
                    if _is_uniform(plan):
                        # It is the model that sets them apart, and not the plan.
                        self._known.unlike |= error.unlike
                except RealModelReachedError:
                    # It may be in a layer that is not copied.
                    return self._trace(plan, reuse=None, explains=explains)
                # Whatever the user's code raises that cannot take what notes an index for a number.
                except Exception:
                    if reuse is None or not reuse.has_indices:
                        raise
                    return self._trace(plan, reuse=None, explains=explains)
        return self._trace(plan, reuse=None, explains=explains)

    def _trace(
        self,
        plan: Plan | None,
        *,
        reuse: LayerReuse | None,
        explains: bool = False,
        reuses_slices: bool = True,
        changed_by: Change = nullcontext,
    ) -> TracedStep:
        step, device = self.step, self.device
        # The proof looks at all new objects for each region (`is_held_elsewhere`): earlier traces made millions.
        count_as_old()
        fake, tracker = self._copied(reuse), self._tracker(has_costs=True)
        _turn_cache_off(fake.model.train())
        if plan is not None:
            applied = self._apply(fake, plan if reuse is None else reuse.plan_for_traced(plan), tracker)
            for tiling in (each for each in applied.tilings if reuses_slices and each.recomputes):
                tiling.slices_to_run = partial(run_unlike, tracker)
        if reuse is not None:
            self._skip(reuse, fake, tracker)
            reuse.note_indices(fake)
        hooks = (
            torch.autograd.graph.saved_tensors_hooks(tracker.record_saved, lambda saved: saved)
            if explains
            else nullcontext()
        )
        then = None if step.optim is None else partial(self._step_optimizer, tracker)
        with (
            self._tracked(fake, tracker) as others,
            hooks,
            track_references(fake.model, others.values(), tracker),
            kernels_vary() if device.is_cuda else nullcontext(),
            changed_by(fake.model) as changed,
        ):
            run_step(changed, step, tracker, then, others, is_cuda=device.is_cuda)
        host_bytes = 0 if step.optim is None else self._optimizer(frozenset(tracker.names_with_gradient)).host_bytes
        tape = self._one_rank_tape(tracker.tape, reuse, plan)
        queue_operators(tape, device, plan, limits_units=step.sharding.engine == "fsdp1")
        add_copy_waits(tape, device)
        add_workspaces(tape, device)
        return TracedStep(tape, host_bytes + peak_host_bytes(tape))

    def _with_waiting_weights(self, traced: TracedStep, plan: Plan) -> TracedStep:
        tape, host_bytes = self._let_weights_wait(traced.tape, plan)
        add_copy_waits(tape, self.device)
        return TracedStep(tape, traced.host_bytes + host_bytes)

    def _let_weights_wait(self, tape: Tape, plan: Plan) -> tuple[Tape, int]:
        if self.device.shares_host_memory:
            # What waits takes as much of it.
            return tape, 0
        return let_weights_wait(tape, plan, self.model, self.stacks, rounding=self._rounding)

    @property
    def _rounding(self) -> int:
        """Bytes of which the device's allocator gives whole multiples."""
        return BLOCK_BYTES if self.device.is_cuda else 1

    def _step_optimizer(self, tracker: Tracker) -> None:
        optimizer = self._optimizer(frozenset(tracker.names_with_gradient))
        tracker.tape.before.extend(optimizer.copied_state())
        tracker.tape.events.extend(optimizer.copied_events())

    def _one_rank_tape(self, tape: Tape, reuse: LayerReuse | None = None, plan: Plan | None = None) -> Tape:
        """Return one rank's tape of the whole model's step, made of that of the layers that were traced."""
        step = self.step
        if reuse is not None:
            tape = reuse.expanded(tape)
            # What torch reserves depends on the order of the weights: those of layers that are not copied came last.
            places = {name: place for place, name in enumerate(self._names().values())}
            tape.before.sort(key=lambda storage: places.get(storage.parameter, len(places)))
        sort_frees(tape)
        engine, is_alone = step.sharding.engine, step.sharding.world_size == 1
        # FSDP and ZeRO keep weights in float32 for one process too.
        if engine in ("none", "tp") or (engine == "ddp" and is_alone):
            return tape
        weights = weights_of(self.model, self.stacks, step)
        return _ENGINES[engine](tape, weights, step, self.device, plan).tape()

    def _tracker(self, *, has_costs: bool) -> Tracker:
        costs = partial(_costs, self.device) if has_costs else None
        run = fold_known if self.step.tensors or self.step.loss is not None else fold
        tracker = Tracker(rounding=self._rounding, costs=costs, run=run)
        tracker.tape.places = self._known.places
        return tracker

    def _apply(self, fake: FakeCopy, plan: Plan, tracker: Tracker) -> Applied:
        """Put a plan on the copy; the tracker counts what its proofs and its offload need."""
        prove: Prove = "first_step" if self.step.is_proven else "off"
        applied = apply_plan(fake.model, plan, fake.stacks(self.stacks), prove=prove)
        applied.leave_unsaid(Topic)
        applied.value_proof.make_call_proof = partial(SimulatedCallProof, tracker)
        for offloader in applied.offloaders:
            offloader.use_link(SimulatedLink(tracker, shares_memory=self.device.shares_host_memory))
        return applied

    @contextmanager
    def _tracked(self, fake: FakeCopy, tracker: Tracker) -> Iterator[dict[str, nn.Module]]:
        """Run what is inside on a fake copy, as on the device, and track it.

        Yields copies, for the same step, of the models that the step's loss asks.
        """
        asked, is_cuda = {} if self.step.loss is None else self.step.loss.others, self.device.is_cuda
        others = {name: fake_copy(other, is_cuda=is_cuda, mode=fake.mode).model for name, other in asked.items()}
        code = () if self.step.loss is None else self.step.loss.code
        with ExitStack() as entered:
            models = (self.model, *asked.values()), (fake.model, *others.values())
            tracker.real = entered.enter_context(isolated(*models, code))
            for context in (random_states_kept(), fake.mode, tracker):
                entered.enter_context(context)
            entered.enter_context(_explained(tracker, self.step))
            if has_shared(fake.model):
                entered.enter_context(shapes_found_apart())
            tracker.record_existing(parameters_and_buffers(fake.model), Category.PARAMETERS)
            beside = self.step.beside_bytes
            tracker.record_apart([Storage(beside, category=Category.OTHER)] if beside else ())
            entered.enter_context(track_modules(fake.model, fake.stacks(self.stacks), tracker))
            for other in others.values():
                # Their names may be those of the model's own parameters.
                tracker.record_existing(
                    (("", tensor) for _, tensor in parameters_and_buffers(other)), Category.REFERENCE
                )
                entered.enter_context(track_modules(other, (), tracker))
            entered.enter_context(emulate_cuda(self.step, self.device, tracker))
            yield others

    def _optimizer(self, names: frozenset[str]) -> OptimizerStep:
        """Return the optimizer's state and step where the parameters with these names get a gradient."""
        step = replace(
            self.step,
            batch_size=1,
            seq_length=1,
            is_padded=False,
            is_packed=False,
            more_inputs=(),
            tensors=(),
            settings=(),
            is_proven=False,
            gradient_accumulation_steps=min(self.step.gradient_accumulation_steps, MICRO_BATCHES),
        )
        key = step, names
        if key not in self._known.optimizers:
            tracker, is_cuda = self._tracker(has_costs=True), self.device.is_cuda
            # Nothing in it is replaced, and a function mode would see each device that it asks for.
            with disable_current_modes(), DisableTorchFunction():
                self._known.optimizers[key] = simulate_optimizer(
                    self.model, step, names, tracker, is_cuda=is_cuda, pages=not self.device.shares_host_memory
                )
        return self._known.optimizers[key]

    def _names(self) -> dict[nn.Parameter, str]:
        if not self._known.names:
            self._known.names.update((parameter, name) for name, parameter in self.model.named_parameters())
        return self._known.names


_Key = tuple[Step, Plan | None]
# What a second process has found: in numbers, whole, and the step itself if it is one that the planner reads.
_FoundAhead = tuple[StepNeeds, StepMemory | None, TracedStep | None]


def _take_nothing(key: Hashable) -> None:
    return None


_ENGINES: Mapping[str, type[RankTape]] = {
    "ddp": DdpTape,
    "fsdp1": Fsdp1Tape,
    "fsdp2": Fsdp2Tape,
    **dict.fromkeys(("zero1", "zero2", "zero3"), ZeroTape),
}
_MOST_TRIES = 4  # To find the layers that are like no other.
# Of the traced steps that are kept: some 200 MB, and as much again of those that the planner has read.
_MAX_EVENTS = 1_500_000


@dataclass
class _Known:
    """What was found out of one model on one device, for all steps."""

    plans: dict[Policy | Plan, Plan] = field(default_factory=dict)
    memories: dict[_Key, StepMemory] = field(default_factory=dict)  # Of `memory`.
    needs: dict[_Key, StepNeeds] = field(default_factory=dict)  # Of `needs`.
    prepared: dict[Step, StepMemory] = field(default_factory=dict)  # Of `prepare`.
    # The last ones, and those of the modes: the planner reads them layer by layer.
    traces: dict[_Key, TracedStep] = field(default_factory=dict)
    reserved: dict[tuple[Step, Plan | None, bool], int] = field(default_factory=dict)  # Of `reserved_bytes`.
    places: Places = field(default_factory=Places)  # Of all traces: most are in each of them.
    optimizers: dict[tuple[Step, frozenset[str]], OptimizerStep] = field(default_factory=dict)
    names: dict[nn.Parameter, str] = field(default_factory=dict)
    stacks: tuple[Stack, ...] = ()
    signatures: dict[nn.Module, Hashable] = field(default_factory=dict)  # By layer.
    unlike: set[tuple[int, int]] = field(default_factory=set)  # Layers that are like no other. See `CannotReuseError`.
    take: Take = _take_nothing  # Of `ahead`.
    # What a layer holds on the device, by layer.
    tensors: dict[nn.Module, tuple[Tensor, ...]] = field(default_factory=dict)

    def traced(self, key: _Key, trace: Callable[[], TracedStep]) -> TracedStep:
        """Return the traced step of a plan, and keep it for a while."""
        found = self.traces.pop(key, None)
        with no_cycles_collected():
            self.traces[key] = found or trace()
        while len(self.traces) > 1 and sum(len(each.tape.columns) for each in self.traces.values()) > _MAX_EVENTS:
            *others, _ = self.traces
            # Those with one entry for all layers are what the planner reads.
            del self.traces[next((other for other in others if not _is_uniform(other[1])), others[0])]
        return self.traces[key]


def num_repeats(step: Step) -> int:
    """Return how often the last simulated micro-batch runs in a step."""
    return max(1, step.gradient_accumulation_steps - 1)


def _entries(plan: Plan | None) -> set[LayerPlan]:
    return set() if plan is None else {layer for stack in plan.stacks for layer in stack.layers}


def _is_uniform(plan: Plan | None) -> bool:
    return len(_entries(plan)) <= 1


def _costs(device: Device, function: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, int]:
    cost = operator_cost(function, args, kwargs, output)
    return busy_seconds(cost, device), cost.num_flops


def _turn_cache_off(model: nn.Module) -> None:
    for module in model.modules():
        config: Any = stored(module, "config")
        if hasattr(config, "use_cache"):
            if "config" not in vars(module):
                # The class's own, which the real model reads too.
                config = module.config = copy.copy(config)
            config.use_cache = False


@contextmanager
def _explained(tracker: Tracker, step: Step) -> Iterator[None]:
    """Say what a step that cannot be simulated needs."""
    named = [each.name for each in step.tensors] or ["input_ids", "labels"]
    unknown = [each.name for each in step.tensors if each.values is None]
    try:
        yield
    except RAISED_BY_MODELS as error:
        outside = "The model" if step.loss is None else step.loss.name
        unsupported = to_unsupported_error(error, tracker.module, named, unknown, outside)
        if unsupported is None:
            raise
        raise unsupported from error
