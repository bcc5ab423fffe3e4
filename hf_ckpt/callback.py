"""The Trainer plugin: events of the Trainer to the parts that do the work."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_ckpt.auto.largest_batch_in_data import Batch, batch_of, largest_text_batch
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
from hf_ckpt.patch.apply import offloaders_of, remove, train_call_of
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
from hf_ckpt.policy.policy import AUTO, Policy
from hf_ckpt.structure.layers import is_sharded
from hf_ckpt.structure.stored import ByModel
from hf_ckpt.trainer import metrics
from hf_ckpt.trainer.accelerates_checkpointing import hold_off_accelerates_checkpointing
from hf_ckpt.trainer.folders import SaveWatch, checkpoint_folder, output_folder, resumed_folder
from hf_ckpt.trainer.messages import Messages, say_who_governs
from hf_ckpt.trainer.saved_files import PLAN_FILE, SavedFiles, check_can_be_saved, check_resumed_plan, write_plan
from hf_ckpt.trainer.training_run import TrainingRun
from hf_ckpt.units import parse_budget
from hf_ckpt.upstream.torch import is_out_of_memory

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_ckpt.auto.auto import Auto
    from hf_ckpt.auto.replan import RunPlanner
    from hf_ckpt.recovery.recovery import Recovery

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
        tiles: see `Rule`. With `"auto"` the planner does so where nothing random lies inside; `"auto"` allows it there
            too, 1 forbids it.
        head: `"chunked"` never holds the logits. With `"auto"` the planner chooses; `"plain"` forbids it.
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
            Costs the device about a third of a forward in such a step, and 16 MiB (ZeRO-3: some two forwards); where
            the host is slower, as with few tokens, several forwards: 0.8 s of a 7B (docs/proof.md).
        strict_resume: refuse to resume from a checkpoint that was written under another plan. A plan changes memory
            and not results, so by default this is only said.
        on_oom: `"escalate"`, the default with `"auto"`: a step that runs out of memory runs again under a leaner plan,
            with the same result (docs/out_of_memory.md; one process, or DDP). `"error"`, otherwise: the run ends.
        quiet_steps: steps without trouble after which a faster plan returns, for batches that there is room for.
        quiet: show nothing on standard error; without it, a line or two of plan and peak as the run begins and ends,
            where `disable_tqdm` is off.

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
    | `ckpt/host_peak_gib` | with `offload`: most host memory that it has held |
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
        self._policy: Policy | Plan | None = None
        self._auto: Auto | None = None
        if policy == AUTO:
            check_no_rule(policy_options)
            budget = None if options["memory_budget"] is None else parse_budget(options["memory_budget"])
            # What simulates a step brings in the Trainer, and peft and bitsandbytes with it.
            from hf_ckpt.auto.auto import Auto

            self._auto = Auto(
                *(budget, options["max_length"], self._structure, allowed_by(options)),
                is_proven=options["prove"] != "off",
                fallback=options["fallback"],
            )
        else:
            _check_no_budget(policy, select(options, AutoOptions))
            self._policy = parse(policy, **policy_options)
        self._options = options
        self._prove = parse_prove(options["prove"])
        self._is_escalated = options["on_oom"] == "escalate" or (options["on_oom"] is None and policy == AUTO)
        self._rungs: dict[str, Any] = {"is_exact": options["exact"] is not False, "quiet_steps": options["quiet_steps"]}
        self._messages = Messages(is_quiet=quiet)
        self._trainer: weakref.ref[Trainer] | None = None
        self._recovery: Recovery | None = None
        self._run: TrainingRun | None = None
        self._before_sharding = ByModel[SavedFiles]()
        self._saved_files: SavedFiles | None = None
        self._saved_in: Path | None = None
        self._report: dict[str, float] = {}
        self._planning: RunPlanner | None = None
        self.plan: Plan | None = None

    @property
    def planned_for(self) -> Batch | None:
        """The largest batch that policy `"auto"` has planned for in the last run; None without one."""
        return None if self._planning is None else self._planning.batch

    @property
    def prediction(self) -> str | None:
        """What the plan of policy `"auto"` is predicted to need, besides plain training and the budget; else None."""
        return None if self._planning is None else self._planning.describe()

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
            from hf_ckpt.recovery.recovery import check_asked

            check_asked(args)
        if args.save_strategy != "no":
            check_can_be_saved(args.device)
        # From here on a process that leaves is noticed by the others.
        watchdog.start()
        if (trainer := trainer_being_built()) is not None:
            hold_off_accelerates_checkpointing(trainer, self)
        model = kwargs.get("model")
        if model is not None:
            call = train_call_of(model)
            # A call of a Trainer that goes on has put its plan on the model.
            is_trained_now = call is not None and call.is_running()
            if not is_trained_now:
                _remove_earlier_plan(model)
            # With them some engines cannot even prepare the model.
            check_wrappers(model)
            if not is_trained_now:
                use_cache.record(model)
            # Before an engine shards the model.
            self._before_sharding.note(model, SavedFiles.of(model))
            if self._auto is not None:
                self._auto.keep_shape(model)

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
        say_who_governs(args)
        with watchdog.watched_training(train_call()) as watch:
            planning, policy, input_gradients = self._planned(args, state, kwargs)
            run = self._run = TrainingRun(
                model, policy, self._structure, self._prove, input_gradients, watch, use_cache=args.use_cache
            )
        try:
            self._recovery = self._begin_recovery(run, args, state)
            if planning is not None or self._recovery is not None:
                run.applied.join_ladder()
            self._begin(run, args, state)
            if planning is not None:
                put_in_force = partial(self._put_in_force, run, args, state)
                run.applied.on_remove(planning.watch(model, put_in_force).remove)
            if planning is not None or run.applied.offloaders:
                _announce_lengths(run, _largest(planning, args, state, kwargs.get("train_dataloader")))
            # Last: its hook comes before theirs.
            run.remove_when_interrupted()
        except BaseException as error:
            self._fail(run, error)
            raise

    def _begin(self, run: TrainingRun, args: TrainingArguments, state: TrainerState) -> None:
        """Say what is in force, and hold it against the plan of the run that is resumed."""
        if not args.auto_find_batch_size:
            # There the Trainer itself handles a forward that runs out of memory.
            run.report_failures(None if self._recovery is None else is_out_of_memory)
        self.plan = run.applied.plan
        if state.global_step:
            check_resumed_plan(self.plan, resumed_folder(args, state), is_strict=self._options["strict_resume"])
        self._messages.begin(args, state, self.plan, output_folder(args) / PLAN_FILE, self.prediction)
        self._announce_plan(args, state, self.plan)
        self._saved_in = None
        run.applied.on_remove(SaveWatch(running_trainer(), partial(self._note_save, state)).remove)

    def _begin_recovery(self, run: TrainingRun, args: TrainingArguments, state: TrainerState) -> Recovery | None:
        if not self._is_escalated:
            return None
        from hf_ckpt.recovery.recovery import begin

        trainer = running_trainer() or (None if self._trainer is None else self._trainer())
        announce = partial(self._announce_plan, args, state)
        recovery = begin(trainer, args, run, announce, self._planning, **self._rungs)
        if recovery is not None and state.global_step:
            recovery.resume(resumed_folder(args, state))
        return recovery

    def _announce_plan(self, args: TrainingArguments, state: TrainerState, plan: Plan) -> None:
        self.plan = plan
        if state.is_world_process_zero:
            write_plan(plan, output_folder(args))

    def _check_alone(self, state: TrainerState, model: nn.Module | None) -> None:
        """Refuse a second callback on one Trainer, which would take the first one's plan for a leftover.

        Each Trainer, and each of its trainings, has a state of its own, which both are given at the same event.
        """
        first: HFCkptCallback | None = getattr(state, _GOVERNED_BY, None)
        setattr(state, _GOVERNED_BY, self)
        if first is None:
            return
        error = PolicyError(
            f"Two HFCkptCallbacks are on this Trainer, with policies {first._describe()} and {self._describe()}, but "
            "one plan governs a model. Pass one of them; different layers are different rules of one policy: "
            'HFCkptCallback([{"layers": "0:8", "mode": "full"}, {"layers": "8:", "mode": "ffn"}]).'
        )
        if first._run is not None:
            first._fail(first._run, error)
        if model is not None:
            use_cache.restore_recorded(model)
        raise error

    def _check_not_training(self) -> None:
        """Refuse to begin a run within another one of this callback, which is told of the events of both."""
        if self._run is not None and self._run.is_under_way():
            raise AlreadyAppliedError(
                "A Trainer was started while another one with the same HFCkptCallback trains, and the callback governs "
                "one run at a time. Give each of them a callback of its own."
            )

    def _describe(self) -> str:
        if isinstance(self._policy, Plan):
            return f"a plan for {self._policy.model_class}"
        return f'"{AUTO}"' if self._policy is None else self._policy.describe()

    def _planned(
        self, args: TrainingArguments, state: TrainerState, given: dict[str, Any]
    ) -> tuple[RunPlanner | None, Policy | Plan, bool | None]:
        """Return the plans of the run under `auto`, the policy to apply, and whether input gradients are asked for."""
        requested, policy = self._options["input_require_grads"], self._policy
        if self._auto is not None:
            policy = self._auto.fallback
            planning = self._planning = self._auto.begin_or_fall_back(
                given["model"],
                args,
                state,
                dataloader=given.get("train_dataloader"),
                optimizer=given.get("optimizer"),
                input_gradients=requested,
            )
            if planning is not None:
                return planning, planning.plan, planning.input_gradients
        assert policy is not None, "a run that is not planned for has one, or a fallback"
        return None, policy, requested

    def _put_in_force(self, run: TrainingRun, args: TrainingArguments, state: TrainerState, plan: Plan) -> None:
        run.change_plan(plan)
        if self._recovery is not None:
            self._recovery.plan_again(plan)
        self._messages.change(plan, self.prediction or "")
        self._announce_plan(args, state, plan)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Switch the cache off and see that the plan is in force."""
        run = self._running()
        try:
            # DeepSpeed changes the weights in the backward of the last micro-batch.
            run.start_step(is_told_before_update=getattr(args, "deepspeed_plugin", None) is None)
        except (PlanMismatchError, UnsupportedError) as error:
            self._fail(run, error)
            raise
        if self._recovery is not None:
            self._recovery.begin_step()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hold what ran against the plan, and what was recomputed against the forward, while gradients are there."""
        run = self._running()
        try:
            run.raise_pending_errors()
        except UnsupportedError as error:
            self._fail(run, error)
            raise
        self._end_micro_batch(run)
        faults = run.faults_of_step(is_compiled=args.torch_compile)
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
        self._end_micro_batch(self._running())

    def _end_micro_batch(self, run: TrainingRun) -> None:
        if self._planning is None:
            return
        try:
            self._planning.end_micro_batch()
        except UnsupportedError as error:
            self._fail(run, error)
            raise

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the step: whatever is recomputed of a forward before it would use other weights."""
        self._running().note_optimizer_step()
        if self._recovery is not None:
            self._recovery.end_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Give the cache back for what comes between steps: evaluation, generation, saving."""
        run = self._running()
        run.end_step()
        if control.should_training_stop:
            # Before on_train_end, in which some reporters end their run.
            self._send_report(run, args, state, control)

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
        if self.plan is not None and state.is_world_process_zero and folder.is_dir():
            write_plan(self.plan, folder)
            if self._recovery is not None:
                self._recovery.save(folder)

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
            self._run.end_watch()
            self._stop(self._run)

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
        self._run = self._recovery = None
        run.applied.remove()

    def _send_report(
        self, run: TrainingRun, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        if run.is_reported:
            return
        run.is_reported = True
        predicted_bytes = 0 if self._planning is None else self._planning.predicted_bytes
        self._report = metrics.run_figures(run.applied, run.peak, run.clock, predicted_bytes)
        if self._recovery is not None:
            self._report |= self._recovery.figures()
        compared = run.peak.compare(predicted_bytes) if predicted_bytes else None
        self._messages.end(compared, self._report)
        metrics.send_to_reporters(self._report, args, state, control, run.model)


def _largest(
    planning: RunPlanner | None, args: TrainingArguments, state: TrainerState, dataloader: Any
) -> Batch | None:
    """Return the largest batch that can come to this process, or None where that is not known."""
    if planning is not None:
        # Without token ids its length says nothing.
        return planning.bound if planning.bound is not None and planning.bound.length else None
    num_rows = state.train_batch_size or args.train_batch_size
    return largest_text_batch(getattr(dataloader, "dataset", None), getattr(dataloader, "collate_fn", None), num_rows)


def _announce_lengths(run: TrainingRun, largest: Batch | None) -> None:
    """Tell what offloads, before each forward, how long the batch is and how long the longest one will be."""
    if largest is not None:
        hook = partial(_announce_length, largest.rows * largest.length)
        run.applied.on_remove(run.model.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _announce_length(most_tokens: int, model: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
    # torch calls a hook without keywords that another hook of the same call has just removed.
    if kwargs is None or torch.compiler.is_compiling() or not model.training:
        return
    batch = batch_of(args, kwargs)
    num_tokens = most_tokens if batch is None else batch.rows * batch.length
    # Asked each time: another plan may be in force, or this may be a copy of the model.
    for offloader in offloaders_of(model):
        # A batch without token ids is taken for one of which nothing is known.
        offloader.expect_batch(num_tokens, most_tokens)


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
    call = train_call_of(model)
    # A Trainer that looks for a batch size begins anew within one call.
    if call is not None and call.is_running() and not call.is_innermost():
        raise AlreadyAppliedError(
            "This Trainer was started while another one with HFCkptCallback trains the same model, under the plan of "
            "that one. Leave HFCkptCallback out of the inner Trainer, or give it another model."
        )
