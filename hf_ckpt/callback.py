"""The Trainer plugin: events of the Trainer to the parts that do the work."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_ckpt.distributed import deepspeed, store, watchdog
from hf_ckpt.errors import (
    AlreadyAppliedError,
    HFCkptError,
    PlanMismatchError,
    PolicyError,
    SavedFilesError,
    UnsupportedError,
)
from hf_ckpt.patch import use_cache
from hf_ckpt.patch.apply import remove, train_call_of
from hf_ckpt.patch.checks import check_engine, check_wrappers
from hf_ckpt.patch.interrupted_run import running_trainer, train_call, trainer_being_built
from hf_ckpt.patch.stack_patch import LEFTOVER
from hf_ckpt.policy.allowances import allowed_by, check_no_rule
from hf_ckpt.policy.options import (
    AutoOptions,
    CallbackOptions,
    PolicyOptions,
    StructureOptions,
    check_run_options,
    parse_prove,
    select,
    takes,
)
from hf_ckpt.policy.plan import Plan, parse
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.structure.layers import is_sharded
from hf_ckpt.structure.stored import ByModel
from hf_ckpt.trainer import metrics
from hf_ckpt.trainer.batch import Batch
from hf_ckpt.trainer.input_gradients import choose_input_gradients, switch_input_gradients
from hf_ckpt.trainer.messages import Messages
from hf_ckpt.trainer.overruled_checkpointing import hold_off_accelerates_checkpointing, say_who_governs
from hf_ckpt.trainer.part import Part, Planning, PolicySource, load
from hf_ckpt.trainer.saved_files import (
    PLAN_FILE,
    PlanFile,
    SavedFiles,
    SaveWatch,
    check_can_be_saved,
    check_resumed_plan,
    checkpoint_folder,
    output_folder,
    resumed_folder,
)
from hf_ckpt.trainer.training_run import BatchLengths, CacheOff, Regions, StepProof, TrainingRun
from hf_ckpt.units import parse_budget
from hf_ckpt.upstream.torch import is_out_of_memory

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)

_GOVERNED_BY = "_hf_ckpt_governed_by"


class HFCkptCallback(TrainerCallback):
    """Trains under an activation-checkpointing policy; everything is put back when training ends.

    Works with `Trainer`, with PEFT models, and with trl's trainers; in one process and in many (DDP, FSDP, DeepSpeed),
    where all train under one plan and an error in one ends all. Where `TrainingArguments` or accelerate's FSDP settings
    ask for activation (gradient) checkpointing too, this policy governs.

    Args:
        policy: a mode name, a rule, a list of rules, a `Policy`, a `Plan` made for this model or the name of its JSON
            file; or `"auto"`, which simulates the largest batch before the first step and takes the fastest plan that
            fits `memory_budget`.
        memory_budget: with `"auto"`, what a whole step may use of the device: `"22GiB"`, or a fraction such as 0.9,
            CUDA's context and torch's cache among it. What is free of the GPU if left out.
        max_length: with `"auto"`, tokens that no example exceeds. Looked up in the training data if left out; where
            that tells no lengths, a plan is made for the batches as they come.
        exact: with `"auto"`, whether the plan must be bitwise. `"prefer"`, the default: if such a plan fits. True: or
            the run is refused. False: the fastest plan, which may run the head in chunks and layers in tiles, and is
            then within 1e-6 in float32. What `head` and `tiles` say goes first.
        fallback: with `"auto"`, the mode of all layers where a run cannot be planned for; without one it is refused.
        every_n_layers: see `Rule`.
        segment_size: see `Rule`.
        nested: see `Rule`.
        snapshots: see `Rule`.
        save: see `Rule`.
        offload: see `Rule`: `"cpu"`, or a mapping with the fields of `Offload`. With `"auto"`, allows the planner to
            do so; left out, it does not.
        weights: see `Rule`: `"cpu"`, or a mapping with the fields of `Weights`. With `"auto"`, allows the planner to
            let frozen weights wait there.
        tiles: see `Rule`. With `"auto"` the planner does so where nothing random lies inside; `"auto"` allows it there
            too, 1 forbids it.
        head: `"chunked"` never holds the logits. With `"auto"` the planner chooses; `"plain"` forbids it.
        embedding: `"cpu"` keeps a frozen input embedding in host memory, `"device"` on the device. Left out, it follows
            `weights`, if it can.
        skip_frozen: leave alone the layers that need no gradient.
        layers: dotted path of the layer list, or several, where they cannot be found by structure.
        attention: attribute name, in each layer, of the attention.
        ffn: attribute name, in each layer, of the ffn.
        input_require_grads: whether the embeddings' output requires gradients; None decides for PEFT models: on,
            unless it would only cost.
        on_mismatch: `"error"` stops the run when the first step shows another recomputation than planned, or a
            checkpoint lacks a part of the adapter; `"warn"` warns.
        prove: `"first_step"` proves in the first micro-batch of the first step under each plan, bit by bit, that each
            recomputation gives what the forward gave; n does so in steps 1, 1 + n, 1 + 2n and so on; `"off"` never.
            Costs the device about a third of a forward in such a step, and 16 MiB (ZeRO-3: some four forwards); where
            the host is slower, as with few tokens, several forwards: 0.8 s of a 7B (docs/proof.md).
        strict_resume: refuse to resume from a checkpoint that was written under another plan. A plan changes memory
            and not results, so by default this is only said.
        on_oom: `"escalate"`, the default with `"auto"`: a step that runs out of memory runs again under a leaner plan,
            with the same result (docs/out_of_memory.md; one process, or DDP). `"error"`, otherwise: the run ends.
        quiet_steps: steps without trouble after which a faster plan returns, for batches that there is room for.
        quiet: show nothing on standard error. Without it, a line or two of plan and peak are shown as the run begins
            and ends, where `disable_tqdm` is off; and a line where the policy overrules other checkpointing.

    Raises:
        PolicyError: the policy or the budget cannot be read.

    Example:
        ```python
        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[HFCkptCallback("full")])
        ```

    The run's reporters get, when training ends:

    | key | value |
    | --- | --- |
    | `ckpt/num_layers_<mode>` | layers with this mode |
    | `ckpt/recomputed_share` | share of the layers' weights whose forward runs again in backward |
    | `ckpt/peak_allocated_gib` or `ckpt/peak_resident_gib` | highest memory of the device, or of the process |
    | `ckpt/predicted_peak_gib` | with `"auto"`: highest predicted memory of a training step |
    | `ckpt/host_peak_gib` | with `offload` or `weights`: most host memory that they have held |
    | `ckpt/waiting_weights_gib` | with `weights`: what waits in host memory |
    | `ckpt/offloaded_gib` | with `offload`: copied away in all, under the plan that is in force at the end |
    | `ckpt/offload_wait_s` | with `offload`: seconds for which the host waited for copies |
    | `ckpt/offloaded_share` | with `offload`: share of the layers asked to that do so, as measured or as set |
    | `ckpt/tokens_per_sec` | tokens per second of this process, padding included, without the first step |
    | `ckpt/oom_recovered` | with `on_oom="escalate"`: how often memory ran out and the run went on |
    | `ckpt/plan_switches` | with `on_oom="escalate"`: how often another plan was put in force |
    """

    @takes(CallbackOptions)
    def __init__(self, policy: object, *, quiet: bool = False, **options: Unpack[CallbackOptions]) -> None:
        check_run_options(options)
        policy_options = select(options, PolicyOptions)
        self._structure = select(options, StructureOptions)
        self._source: PolicySource
        if policy == AUTO:
            check_no_rule(policy_options)
            budget = None if options["memory_budget"] is None else parse_budget(options["memory_budget"])
            # What simulates a step brings in the Trainer, and peft and bitsandbytes with it.
            self._source = load("auto.auto", f'policy "{AUTO}"').Auto(
                *(budget, options["max_length"], self._structure, allowed_by(options)),
                is_proven=options["prove"] != "off",
                fallback=options["fallback"],
            )
        else:
            _check_no_budget(policy, select(options, AutoOptions))
            self._source = PolicySource(parse(policy, **policy_options))
        self._options = options
        self._prove = parse_prove(options["prove"])
        self._is_escalated = options["on_oom"] == "escalate" or (options["on_oom"] is None and policy == AUTO)
        self._messages = Messages(is_quiet=quiet)
        self._trainer: weakref.ref[Trainer] | None = None
        self._run: TrainingRun | None = None
        self._parts: list[Part] = []
        self._before_sharding = ByModel[SavedFiles]()
        self._saved_files: SavedFiles | None = None
        self._saved_in: Path | None = None
        self._report: dict[str, float] = {}
        self._planning = Planning()
        self.plan: Plan | None = None

    @property
    def planned_for(self) -> Batch | None:
        """The largest batch that policy `"auto"` has planned for in the last run; None without one."""
        return self._planning.batch

    @property
    def prediction(self) -> str | None:
        """What the plan of policy `"auto"` is predicted to need, besides plain training and the budget; else None."""
        return self._planning.describe()

    def report(self) -> dict[str, float]:
        """Return the figures of the last run by their `ckpt/...` names; empty before one has ended."""
        return dict(self._report)

    def attach(self, trainer: Trainer) -> None:
        """Name the Trainer whose steps `on_oom` is to recover, where it is none of the callers of `on_train_begin`."""
        self._trainer = weakref.ref(trainer)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the user's `use_cache`: the Trainer overwrites it right after this event."""
        self._check_alone(state, kwargs.get("model"))
        check_engine(args)
        if self._options["on_oom"] == "escalate":
            _recovery().check_asked(args)
        if args.save_strategy != "no":
            check_can_be_saved(args.device)
        # From here on a process that leaves is noticed by the others.
        watchdog.start()
        if (trainer := trainer_being_built()) is not None:
            hold_off_accelerates_checkpointing(trainer, self, is_quiet=self._messages.is_quiet)
        model = kwargs.get("model")
        if model is not None:
            # A call of a Trainer that goes on has put its plan on the model.
            is_trained_now = train_call_of(model).is_running()
            if not is_trained_now:
                _remove_earlier_plan(model)
            # With them some engines cannot even prepare the model.
            check_wrappers(model)
            if not is_trained_now:
                use_cache.record(model)
            # Before an engine shards the model.
            self._before_sharding.note(model, SavedFiles.of(model))
            self._source.keep_shape(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the policy to the model as it will be trained."""
        self._check_alone(state, kwargs["model"])
        # Asked again: a callback that is added to a Trainer later has not seen on_init_end.
        check_engine(args)
        model: nn.Module = kwargs["model"]
        _check_not_trained_now(model)
        self._check_not_training()
        _remove_earlier_plan(model)
        is_whole = not is_sharded(model) and not deepspeed.is_sharded(model)
        # In a search for hyperparameters each trial may have another model, which on_init_end has not seen.
        self._saved_files = SavedFiles.of(model) if is_whole else self._before_sharding.of(model)
        use_cache.restore_recorded(model)
        say_who_governs(args, model, is_quiet=self._messages.is_quiet)
        dataloader = kwargs.get("train_dataloader")
        with watchdog.watched_training(train_call()) as watch:
            given = {"dataloader": dataloader, "optimizer": kwargs.get("optimizer")}
            self._planning, policy, is_on = self._source.begin_run(
                model, args, state, **given, input_gradients=self._options["input_require_grads"]
            )
            run = self._run = TrainingRun(model, policy, self._structure, self._prove, watch)
        try:
            self._begin(run, args, state, is_on, dataloader)
        except BaseException as error:
            self._fail(run, error)
            raise

    def _begin(
        self, run: TrainingRun, args: TrainingArguments, state: TrainerState, input_gradients: bool | None, data: Any
    ) -> None:
        """Make the parts of a run, say what is in force, and hold it against the plan of the run that is resumed."""
        planning = self._planning
        cache = CacheOff(run, of_trainer=args.use_cache)
        is_on = choose_input_gradients(run.model, run.applied.stacks, input_gradients)
        _place(run, switch_input_gradients(run.model, is_on))
        # The order counts. The cache is off before anything looks at the model. What regions have found is raised
        # before planning says that a forward did not run, and both before a step is held against its plan, which may
        # have failed for these reasons. The clock starts once the hooks of the first step are placed. What recovery
        # notes of a step comes last: nothing may change between that and the first micro-batch.
        self._parts = [
            cache,
            # DeepSpeed changes the weights in the backward of the last micro-batch.
            Regions(run, is_told_before_update=getattr(args, "deepspeed_plugin", None) is None),
            planning,
            StepProof(run, is_proven=self._prove != "off", is_compiled=args.torch_compile),
            run.clock,
        ]
        recovery = self._begin_recovery(run, args, state)
        self._parts += recovery
        if any(part.changes_plans for part in self._parts):
            run.applied.join_ladder()
        if run.watch is not None and not args.auto_find_batch_size:
            # There the Trainer itself handles a forward that runs out of memory.
            _place(run, run.watch.report_failures(run.model, is_out_of_memory if recovery else None))
        self.plan = run.applied.plan
        if state.global_step:
            check_resumed_plan(self.plan, resumed_folder(args, state), is_strict=self._options["strict_resume"])
        folder = output_folder(args)
        self._messages.begin(args, state, self.plan, folder / PLAN_FILE, self.prediction)
        self._parts.append(PlanFile(self.plan, folder, is_written=state.is_world_process_zero))
        self._saved_in = None
        run.applied.on_remove(SaveWatch(running_trainer(), partial(self._note_save, state)).remove)
        if planning.changes_plans or run.applied.offloaders:
            num_rows = state.train_batch_size or args.train_batch_size
            self._parts.append(BatchLengths(planning.longest_batch(num_rows, data)))
        for part in self._parts:
            _place(run, part.place_hooks(run.model, partial(self._change_plan, run)))
        if run.call.is_running():
            # Last: its hook comes before theirs.
            run.applied.remove_on_use_after(run.call, run.model, cache.leave)

    def _begin_recovery(self, run: TrainingRun, args: TrainingArguments, state: TrainerState) -> list[Part]:
        """Return the part that recovers steps; none where that is not asked for, or cannot be."""
        if not self._is_escalated:
            return []
        trainer = running_trainer() or (None if self._trainer is None else self._trainer())
        recovery = _recovery().begin(
            *(trainer, args, run, partial(self._change_plan, run), self._planning),
            is_exact=self._options["exact"] is not False,
            quiet_steps=self._options["quiet_steps"],
        )
        if recovery is None:
            return []
        if state.global_step:
            recovery.resume(resumed_folder(args, state))
        return [recovery]

    def _change_plan(self, run: TrainingRun, by: Part, plan: Plan) -> None:
        """Put another plan in force that a part asks for, and let the other parts know."""
        run.change_plan(plan, is_alone=by.is_alone)
        self.plan = plan
        for part in self._parts:
            if part is not by:
                part.change_plan(plan)
        if by is self._planning:
            # Recovery says itself what it has done, and why.
            self._messages.change_plan(plan, self.prediction or "")

    def _check_alone(self, state: TrainerState, model: nn.Module | None) -> None:
        """Refuse a second callback on one Trainer, which would take the first one's plan for a leftover.

        Each Trainer, and each of its trainings, has a state of its own, which both are given at the same event.
        """
        first: HFCkptCallback | None = getattr(state, _GOVERNED_BY, None)
        setattr(state, _GOVERNED_BY, self)
        if first is None:
            return
        error = PolicyError(
            f"Two HFCkptCallbacks are on this Trainer, with policies {first._source.describe()} and "
            f"{self._source.describe()}, but one plan governs a model. Pass one of them; different layers are "
            "different rules of one policy: "
            'HFCkptCallback([{"layers": "0:8", "mode": "full"}, {"layers": "8:", "mode": "ffn"}]).'
        )
        if first._run is not None:
            first._fail(first._run, error)
        if model is not None:
            use_cache.restore_recorded(model)
        raise error

    def _check_not_training(self) -> None:
        """Refuse to begin a run within another one of this callback, which is told of the events of both."""
        if self._run is not None and self._run.call.is_around_another():
            raise AlreadyAppliedError(
                "A Trainer was started while another one with the same HFCkptCallback trains, and the callback governs "
                "one run at a time. Give each of them a callback of its own."
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Switch the cache off and see that the plan is in force."""
        with self._event() as parts:
            for part in parts:
                part.begin_step()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hold what ran against the plan, and what was recomputed against the forward, while gradients are there."""
        with self._event() as parts:
            faults = [fault for part in parts for fault in part.faults_of_step()]
        if faults:
            taken = "\nDeepSpeed has taken this step already: the weights are no longer those of before it."
            self._warn_or_raise(PlanMismatchError, "\n".join(faults), taken if getattr(args, "deepspeed", None) else "")

    def _warn_or_raise(self, kind: type[HFCkptError], fault: str, consequence: str = "") -> None:
        """Do what `on_mismatch` says."""
        if self._options["on_mismatch"] == "warn":
            warnings.warn(fault, stacklevel=3)
            return
        error = kind(f'{fault}{consequence}\nWith on_mismatch="warn" the run goes on all the same.')
        if self._run is not None:
            self._fail(self._run, error)
        raise error

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See, under `auto`, that what was planned for has run."""
        with self._event() as parts:
            for part in parts:
                part.end_micro_batch()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the step: whatever is recomputed of a forward before it would use other weights."""
        with self._event() as parts:
            for part in parts:
                part.end_optimizer_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Give the cache back for what comes between steps: evaluation, generation, saving."""
        with self._event() as parts:
            for part in parts:
                part.end_step()
        if control.should_training_stop:
            # Before on_train_end, in which some reporters end their run.
            self._send_report(self._running(), args, state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the plan into the checkpoint, and see that the adapter in it is whole."""
        folder, self._saved_in = self._saved_in, None
        if folder is None:
            folder = checkpoint_folder(args, state)
            self._write_into(folder, state)
        self._check_adapter(folder, kwargs["model"], args.ddp_timeout)

    def _note_save(self, state: TrainerState, folder: Path) -> None:
        self._saved_in = folder
        self._write_into(folder, state)

    def _write_into(self, folder: Path, state: TrainerState) -> None:
        if state.is_world_process_zero and folder.is_dir():
            for part in self._parts:
                part.save(folder)

    def _check_adapter(self, folder: Path, model: nn.Module, timeout_s: float) -> None:
        expected = self._saved_files
        if expected is None or not expected.has_adapter:
            return

        def fault_there() -> str | None:
            # Without its folder there is no checkpoint: this Trainer writes something of its own, elsewhere.
            return expected.fault_of_checkpoint(folder, model) if folder.is_dir() else None

        fault = store.broadcast_result(fault_there, timeout_s, "looking at what was saved")
        if fault is not None:
            self._warn_or_raise(SavedFilesError, fault)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the model back as it was found."""
        if self._run is not None:
            self._send_report(self._run, args, state, control)
            if self._run.watch is not None:
                self._run.watch.end()
            self._stop(self._run)

    @contextmanager
    def _event(self) -> Iterator[list[Part]]:
        """Yield the parts of the run, in their order. What they find wrong ends it, in all processes."""
        run = self._running()
        try:
            yield self._parts
        except (PlanMismatchError, UnsupportedError) as error:
            self._fail(run, error)
            raise

    def _running(self) -> TrainingRun:
        if self._run is None or self._run.is_removed:
            raise PlanMismatchError(
                "A training event came, but no plan is in force: it was removed while training ran, or this callback "
                "was added after training had begun. Pass HFCkptCallback to the Trainer before train()."
            )
        return self._run

    def _fail(self, run: TrainingRun, error: BaseException) -> None:
        run.report_error(error)
        self._stop(run)

    def _stop(self, run: TrainingRun) -> None:
        self._run, self._parts = None, []
        run.applied.remove()

    def _send_report(
        self, run: TrainingRun, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        if run.is_reported:
            return
        run.is_reported = True
        predicted_bytes = self._planning.predicted_bytes
        self._report = metrics.run_figures(run.applied, run.peak, run.clock, predicted_bytes)
        for part in self._parts:
            self._report |= part.figures()
        compared = run.peak.compare(predicted_bytes) if predicted_bytes else None
        self._messages.end(compared, self._report)
        metrics.send_to_reporters(self._report, args, state, control, run.model)


def _recovery() -> Any:
    return load("recovery.recovery", 'on_oom="escalate"')


def _place(run: TrainingRun, hooks: Iterable[RemovableHandle]) -> None:
    """Let hooks stand until the plan is removed."""
    for hook in hooks:
        run.applied.on_remove(hook.remove)


def _check_no_budget(policy: object, options: Mapping[str, object]) -> None:
    """Refuse options of `auto` with another policy."""
    for name, value in options.items():
        if value is not None:
            raise PolicyError(
                f'{name} is {value}, but only policy "{AUTO}" plans for a budget, and the policy is {policy}. Use '
                f'HFCkptCallback("{AUTO}", {name}={value!r}), or leave {name} out.'
            )


def _remove_earlier_plan(model: nn.Module) -> None:
    if remove(model):
        logger.info(LEFTOVER)


def _check_not_trained_now(model: nn.Module) -> None:
    """Refuse to put a plan in the place of another run's, which goes on around this one.

    Raises:
        AlreadyAppliedError: there is one.
    """
    # A Trainer that looks for a batch size begins anew within one call.
    if train_call_of(model).is_around_another():
        raise AlreadyAppliedError(
            "This Trainer was started while another one with HFCkptCallback trains the same model, under the plan of "
            "that one. Leave HFCkptCallback out of the inner Trainer, or give it another model."
        )
