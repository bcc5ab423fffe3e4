"""The Trainer plugin: events of the Trainer to the parts that do the work."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_ckpt.auto.batch_bounds import Batch, batch_of, largest_batch
from hf_ckpt.auto.measured import TrainingPeak
from hf_ckpt.distributed import fsdp, watchdog
from hf_ckpt.errors import AlreadyAppliedError, PlanMismatchError, PolicyError, SavedFilesError, as_written
from hf_ckpt.patch import use_cache
from hf_ckpt.patch.apply import Applied, offloaders_of, remove, train_call_of
from hf_ckpt.patch.checks import check_compiler, check_engine
from hf_ckpt.patch.leftover import look_out
from hf_ckpt.patch.stack_patch import LEFTOVER
from hf_ckpt.patch.train_call import train_call
from hf_ckpt.patch.use_cache import UseCache
from hf_ckpt.policy.allowances import ALLOWANCES, Exact, allowed_by
from hf_ckpt.policy.modifiers import Prove, Tiles, parse_prove
from hf_ckpt.policy.plan import Plan, parse
from hf_ckpt.policy.policy import AUTO, Mode, Policy, SegmentSize
from hf_ckpt.regions import value_proof
from hf_ckpt.regions.module_state import STATE, ModuleState
from hf_ckpt.trainer import ranks, reporters
from hf_ckpt.trainer.first_step import FirstStep
from hf_ckpt.trainer.input_gradients import InputGradients, choose
from hf_ckpt.trainer.metrics import GIB, StepClock, offload_figures, peak_memory, recomputed_share
from hf_ckpt.trainer.saved_files import SavedFiles, check_can_be_saved
from hf_ckpt.units import parse_budget

if TYPE_CHECKING:
    from hf_ckpt.auto.auto import Auto
    from hf_ckpt.auto.replan import Planning

logger = logging.getLogger(__name__)

PLAN_FILE = "hf_ckpt_plan.json"
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
        memory_budget: with `"auto"`, what a whole step may use of the device: `"22GiB"`, or a fraction such as 0.9. The
            free memory of the GPU less a reserve if left out.
        max_length: with `"auto"`, tokens that no example exceeds. Looked up in the training data if left out; where
            that tells no lengths, a plan is made for the batches as they come.
        exact: with `"auto"`, whether the plan must be bitwise. `"prefer"`, the default: if such a plan fits. True: or
            the run is refused. False: the fastest plan, which may run the head in chunks and layers in tiles, and is
            then within 1e-6 in float32. What `head` and `tiles` say goes first.
        every_n_layers: see `Rule`.
        segment_size: see `Rule`.
        nested: see `Rule`.
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
        on_mismatch: `"error"` stops the run when the first step shows another recomputation than planned or a lost
            gradient, or a checkpoint lacks a part of the adapter; `"warn"` warns.
        prove: `"first_step"` proves in the first micro-batch of the first step under each plan, bit by bit, that each
            recomputation gives what the forward gave; n does so in steps 1, 1 + n, 1 + 2n and so on; `"off"` never.
            Costs less than a forward more in such a step, and 16 MiB.
        strict_resume: refuse to resume from a checkpoint that was written under another plan. A plan changes memory
            and not results, so by default this is only said.

    Raises:
        PolicyError: the policy or the budget cannot be read.

    Example:
        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[HFCkptCallback("full")])

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
    | `ckpt/offloaded_share` | with `offload`: share of the layers asked to that do so, as measured or as told |
    | `ckpt/tokens_per_sec` | tokens per second of this process, padding included, without the first step |
    """

    def __init__(
        self,
        policy: object,
        *,
        memory_budget: str | float | None = None,
        max_length: int | None = None,
        exact: Exact | None = None,
        every_n_layers: int | None = None,
        segment_size: SegmentSize | None = None,
        nested: bool | None = None,
        save: Sequence[str] | str | None = None,
        offload: object = None,
        tiles: Tiles | None = None,
        head: str | None = None,
        skip_frozen: bool = False,
        layers: str | Sequence[str] | None = None,
        attention: str | None = None,
        ffn: str | None = None,
        input_require_grads: bool | None = None,
        on_mismatch: Literal["error", "warn"] = "error",
        strict_resume: bool = False,
        prove: Prove = "first_step",
    ) -> None:
        if on_mismatch not in ("error", "warn"):
            raise PolicyError(f'on_mismatch is "{on_mismatch}". Use "error" or "warn".')
        if input_require_grads not in (None, True, False):
            raise PolicyError(f"input_require_grads is {as_written(input_require_grads)}. Use true or false.")
        if strict_resume not in (True, False):
            raise PolicyError(f"strict_resume is {as_written(strict_resume)}. Use true or false.")
        shorthand: dict[str, Any] = {
            "every_n_layers": every_n_layers,
            "segment_size": segment_size,
            "nested": nested,
            "save": save,
            "offload": offload,
            "tiles": tiles,
            "head": head,
            "skip_frozen": skip_frozen,
        }
        self._structure: dict[str, Any] = {"layers": layers, "attention": attention, "ffn": ffn}
        self._policy: Policy | Plan | None = None
        self._auto: Auto | None = None
        if policy == AUTO:
            _check_alone(shorthand)
            allowed = allowed_by({**shorthand, "exact": exact})
            budget = None if memory_budget is None else parse_budget(memory_budget)
            # What simulates a step brings in the Trainer, and peft and bitsandbytes with it.
            from hf_ckpt.auto.auto import Auto

            self._auto = Auto(budget, max_length, self._structure, allowed, is_proven=prove != "off")
        else:
            _check_for_auto(policy, memory_budget=memory_budget, max_length=max_length, exact=exact)
            self._policy = parse(policy, **shorthand)
        self._input_require_grads = input_require_grads
        self._on_mismatch = on_mismatch
        self._strict_resume = strict_resume
        self._prove = parse_prove(prove)
        self._run: _Run | None = None
        self._put_back_accelerates_own: Callable[[], None] | None = None
        self._saved_files: SavedFiles | None = None
        self._report: dict[str, float] = {}
        self._planning: Planning | None = None
        self.plan: Plan | None = None

    @property
    def planned_for(self) -> Batch | None:
        """The largest batch that policy `"auto"` has planned for in the last run; None without one."""
        return None if self._planning is None else self._planning.batch

    def report(self) -> dict[str, float]:
        """Return the figures of the last run by their `ckpt/...` names; empty before one has ended."""
        return dict(self._report)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the user's `use_cache`: the Trainer overwrites it right after this event."""
        self._check_alone(state, kwargs.get("model"))
        check_engine(args)
        check_compiler(args)
        if args.save_strategy != "no":
            check_can_be_saved(args.device)
        # From here on a process that is killed is noticed by the others.
        watchdog.start()
        # Only now is it in time: accelerate wraps layers when it prepares the model.
        self._put_back_accelerates_own = fsdp.switch_off_accelerates_own()
        model = kwargs.get("model")
        if model is not None:
            is_trained_now = _is_trained_now(model)
            if not is_trained_now:
                _remove_leftover(model)
            # With them some engines cannot even prepare the model.
            fsdp.check_wrappers(model)
            if not is_trained_now:
                use_cache.record(model)
            # Before an engine shards the model.
            self._saved_files = SavedFiles.of(model)
            if self._auto is not None:
                self._auto.see(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the policy to the model as it will be trained."""
        self._check_alone(state, kwargs["model"])
        # Asked again: a callback that is added to a Trainer later has not seen on_init_end.
        check_engine(args)
        check_compiler(args)
        model: nn.Module = kwargs["model"]
        _check_not_trained_now(model)
        _remove_leftover(model)
        use_cache.bring_back(model)
        _say_who_governs(args)
        with watchdog.beginning() as watching:
            planning, policy, is_asked = self._planned(args, state, kwargs)
            run = self._run = _Run(model, policy, self._structure, self._prove, is_asked, planning, watching)
        try:
            self._begin(run, args, state)
            if planning is not None:
                run.watch_batches(model, partial(self._put_in_force, run, args, state))
            run.foresee(model, lambda: _largest(planning, args, state, kwargs.get("train_dataloader")))
            # Last: its hook comes before theirs.
            run.look_out()
        except BaseException as error:
            self._fail(run, error)
            raise

    def _begin(self, run: _Run, args: TrainingArguments, state: TrainerState) -> None:
        """Say what is in force, and hold it against the plan of the run that is resumed."""
        if not args.auto_find_batch_size:
            # There the Trainer itself handles a forward that runs out of memory.
            run.report_failures()
        if self._put_back_accelerates_own is not None:
            run.applied.on_remove(self._put_back_accelerates_own)
        self.plan = run.applied.plan
        self._compare_with_checkpoint(args, state)
        if state.is_world_process_zero:
            logger.info("Activation checkpointing is in force.\n%s", self.plan.summary())
            _write_plan(self.plan, _output_folder(args))

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
        first._put_back()
        if model is not None:
            use_cache.bring_back(model)
        raise error

    def _describe(self) -> str:
        if isinstance(self._policy, Plan):
            return f"a plan for {self._policy.model_class}"
        return f'"{AUTO}"' if self._policy is None else self._policy.describe()

    def _planned(
        self, args: TrainingArguments, state: TrainerState, given: dict[str, Any]
    ) -> tuple[Planning | None, Policy | Plan, bool | None]:
        """Return the plans of the run under `auto`, the policy to apply, and whether input gradients are asked for."""
        if self._auto is None:
            assert self._policy is not None, "one of the two is there"
            return None, self._policy, self._input_require_grads
        planning = self._auto.begin(
            given["model"],
            args,
            state,
            dataloader=given.get("train_dataloader"),
            optimizer=given.get("optimizer"),
            input_gradients=self._input_require_grads,
        )
        self._planning = planning
        return planning, planning.plan, planning.input_gradients

    def _put_in_force(self, run: _Run, args: TrainingArguments, state: TrainerState, plan: Plan) -> None:
        run.change_plan(plan)
        self.plan = plan
        if state.is_world_process_zero:
            logger.info("Another plan is in force from here on, for larger batches.\n%s", plan.summary())
            _write_plan(plan, _output_folder(args))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Switch the cache off and see that the plan is in force."""
        run = self._running()
        try:
            run.start_step()
        except PlanMismatchError as error:
            self._fail(run, error)
            raise

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hold what ran against the plan, and what was recomputed against the forward, while gradients are there."""
        run = self._running()
        faults = run.faults_of_step(is_compiled=args.torch_compile)
        if not faults:
            return
        message = "\n".join(faults)
        if self._on_mismatch == "warn":
            warnings.warn(message, stacklevel=2)
            return
        if getattr(args, "deepspeed", None):
            message += "\nDeepSpeed has taken this step already: the weights are no longer those of before it."
        error = PlanMismatchError(f'{message}\nWith on_mismatch="warn" the run goes on all the same.')
        self._fail(run, error)
        raise error

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the step: whatever is recomputed of a forward before it would use other weights."""
        self._running().note_optimizer_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Give the cache back for what comes between steps: evaluation, generation, saving."""
        run = self._running()
        run.end_step()
        if control.should_training_stop:
            # Before on_train_end, in which some reporters end their run.
            self._send_report(run, args, state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the plan into the checkpoint, and see that the adapter in it is whole."""
        folder = _checkpoint_folder(args, state)
        if self.plan is not None and state.is_world_process_zero and folder.is_dir():
            _write_plan(self.plan, folder)
        self._check_adapter(folder, kwargs["model"], args.ddp_timeout)

    def _check_adapter(self, folder: Path, model: nn.Module, timeout_s: float) -> None:
        expected = self._saved_files
        if expected is None or not expected.has_adapter:
            return
        fault = ranks.told_by_rank_0(lambda: expected.fault_of_checkpoint(folder, model), timeout_s)
        if fault is None:
            return
        if self._on_mismatch == "warn":
            warnings.warn(fault, stacklevel=2)
            return
        error = SavedFilesError(f'{fault}\nWith on_mismatch="warn" the run goes on all the same.')
        if self._run is not None:
            self._fail(self._run, error)
        raise error

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the model back as it was found."""
        if self._run is not None:
            self._send_report(self._run, args, state, control)
            self._run.say_farewell()
            self._stop(self._run)

    def _running(self) -> _Run:
        if self._run is None or self._run.is_removed:
            raise PlanMismatchError(
                "A training event came, but no plan is in force: it was removed while training ran, or this callback "
                "was added after training had begun. Pass HFCkptCallback to the Trainer before train()."
            )
        return self._run

    def _fail(self, run: _Run, error: BaseException) -> None:
        run.tell_others(error)
        self._stop(run)

    def _stop(self, run: _Run) -> None:
        self._run = None
        run.remove()
        self._put_back()

    def _put_back(self) -> None:
        if self._put_back_accelerates_own is not None:
            self._put_back_accelerates_own()
            self._put_back_accelerates_own = None

    def _send_report(self, run: _Run, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if run.is_reported:
            return
        run.is_reported = True
        self._report = run.figures()
        reporters.send(self._report, args, state, control, run.model)

    def _compare_with_checkpoint(self, args: TrainingArguments, state: TrainerState) -> None:
        if not state.global_step:
            return
        saved = _resumed_folder(args, state) / PLAN_FILE
        try:
            if Plan.from_file(saved) == self.plan:
                return
            message = f"{saved} was written under another plan."
        except PolicyError as error:
            is_missing = isinstance(error.__cause__, FileNotFoundError)
            message = f"There is no {saved}." if is_missing else str(error)
            if not self._strict_resume:
                if not is_missing:
                    logger.warning("%s It is left aside: results do not depend on it.", message)
                return
        if self._strict_resume:
            raise PlanMismatchError(
                f"strict_resume asks for the plan of the run that is resumed. {message} Use the policy of that run, "
                "or leave strict_resume out."
            )
        logger.info("%s Results do not change, memory does.", message)


class _Run:
    """What is in force from on_train_begin to on_train_end."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | Plan,
        structure: dict[str, Any],
        prove: Prove,
        input_require_grads: bool | None,
        planning: Planning | None = None,
        watching: watchdog.Watch | None = None,
    ) -> None:
        self.model = model
        self._structure = structure
        self._prove = prove
        self._planning = planning
        self._peak = TrainingPeak()
        self.is_reported = False
        self.is_removed = False
        self._watch = watching
        self._call = train_call()
        self.applied: Applied = ranks.apply_on_all(model, policy, structure, prove)
        if self._call is not None:
            # At once: an exception from here on leaves the plan to whoever uses the model next.
            self.applied.belongs_to(self._call)
        self._first_step: FirstStep | None = FirstStep(model, self.applied.plan, self.applied.stacks)
        self._is_checked_again = False
        self._use_cache = UseCache(model)
        self._is_use_cache_ours = True
        self._clock = StepClock(model)
        # The plan's own removal, which needs no handle, undoes all of it.
        for undo in (self._note_removal, self._first_step.stop, self._restore_use_cache, self._clock.restore):
            self.applied.on_remove(undo)
        is_on = choose(model, self.applied.stacks, input_require_grads)
        if is_on is not None:
            self.applied.on_remove(InputGradients(model, is_on).restore)

    def watch_batches(self, model: nn.Module, put_in_force: Callable[[Plan], None]) -> None:
        """Let a plan be made for each batch that is larger than those before."""
        assert self._planning is not None, "there is a budget"
        self.applied.on_remove(self._planning.watch(model, put_in_force).remove)

    def foresee(self, model: nn.Module, find_largest: Callable[[], Batch | None]) -> None:
        """Tell what offloads, before each forward, how long the batch is and how long the longest one will be.

        Args:
            model: that the Trainer calls, or the one that an engine's wrapper calls.
            find_largest: returns the largest batch that can come, or None where that is not known.
        """
        if not self.applied.offloaders and self._planning is None:
            return
        largest = find_largest()
        if largest is not None:
            hook = partial(_foresee, largest.rows * largest.length)
            self.applied.on_remove(model.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def look_out(self) -> None:
        """Have the plan taken off when an exception has ended the call of the Trainer that it is put on in."""
        if self._call is not None:
            look_out(self.applied, self.model, self._call, self._leave_use_cache)

    def change_plan(self, plan: Plan) -> None:
        """Put another plan in force, before a forward. What the old one's removal would undo, this one's does."""
        undos = self.applied.make_way()
        try:
            self.applied = ranks.apply_on_all(self.model, plan, self._structure, self._prove)
        except BaseException:
            for undo in undos:
                undo()
            raise
        for undo in undos:
            self.applied.on_remove(undo)
        if self._call is not None:
            self.applied.belongs_to(self._call)
        if self._first_step is not None:
            # Part of the step may have run under the old plan: the next one is held against the new plan.
            self._first_step.stop()
            self._first_step = None
            self._is_checked_again = True

    def report_failures(self) -> None:
        """Let the other processes know when a forward raises in this one."""
        if self._watch is not None:
            self.applied.on_remove(watchdog.report_failures(self._watch, self.model))

    def tell_others(self, error: BaseException) -> None:
        if self._watch is not None:
            self._watch.fail(str(error))

    def say_farewell(self) -> None:
        """Let the other processes know that training has come to its end here, not before it."""
        if self._watch is not None:
            self._watch.end()

    def start_step(self) -> None:
        self._use_cache.off()
        self.applied.assert_in_force()
        if self._is_checked_again:
            self._is_checked_again = False
            self._first_step = FirstStep(self.model, self.applied.plan, self.applied.stacks)
            self.applied.on_remove(self._first_step.stop)
        if self._first_step is not None:
            self._first_step.start()
        self.applied.value_proof.begin_step()
        self._clock.start_step()

    def faults_of_step(self, *, is_compiled: bool) -> list[str]:
        if self._first_step is not None and self._prove != "off":
            self._say_what_is_not_proven(is_compiled=is_compiled)
        return [*self._faults_of_first_step(), *self.applied.value_proof.take_faults()]

    def _say_what_is_not_proven(self, *, is_compiled: bool) -> None:
        unseen = self.applied.value_proof.unseen
        if unseen and (is_compiled or any(map(value_proof.is_compiled, self.model.modules()))):
            logger.info(
                "%s%s: compiled, so that the first step does not prove what is recomputed there. A first step without "
                "torch.compile, or hf-ckpt verify, does.",
                unseen[0],
                f" (and {len(unseen) - 1} more)" if len(unseen) > 1 else "",
            )

    def _faults_of_first_step(self) -> list[str]:
        first_step, self._first_step = self._first_step, None
        if first_step is None:
            return []
        for offloader in self.applied.offloaders:
            for fault in offloader.faults():
                # Short rows may be all there is in the first step: nothing is wrong, but for the memory.
                warnings.warn(fault, stacklevel=2)
        return first_step.finish()

    def note_optimizer_step(self) -> None:
        for module in self.model.modules():
            if isinstance(state := vars(module).get(STATE), ModuleState):
                state.num_steps += 1

    def end_step(self) -> None:
        self._clock.end_step()
        self._use_cache.restore()

    def figures(self) -> dict[str, float]:
        plan = self.applied.plan
        figures: dict[str, float] = {f"num_layers_{mode}": plan.count(mode) for mode in Mode if plan.count(mode)}
        figures["recomputed_share"] = recomputed_share(plan, self.applied.stacks)
        stats = [offloader.stats for offloader in self.applied.offloaders]
        figures.update(peak_memory(stats))
        figures.update(offload_figures(stats))
        if self._planning is not None and self._planning.predicted_bytes:
            figures["predicted_peak_gib"] = self._planning.predicted_bytes / GIB
            logger.info("%s", self._peak.beside(self._planning.predicted_bytes))
        if (speed := self._clock.tokens_per_sec()) is not None:
            figures["tokens_per_sec"] = speed
        return {f"ckpt/{name}": value for name, value in figures.items()}

    def remove(self) -> None:
        self.applied.remove()

    def _restore_use_cache(self) -> None:
        if self._is_use_cache_ours:
            self._use_cache.restore()

    def _leave_use_cache(self) -> None:
        self._is_use_cache_ours = False

    def _note_removal(self) -> None:
        self.is_removed = True


def _largest(planning: Planning | None, args: TrainingArguments, state: TrainerState, dataloader: Any) -> Batch | None:
    """Return the largest batch that can come to this process, or None where that is not known."""
    if planning is not None:
        return planning.bound
    num_rows = state.train_batch_size or args.train_batch_size
    return largest_batch(getattr(dataloader, "dataset", None), getattr(dataloader, "collate_fn", None), num_rows)


def _foresee(most_tokens: int, model: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
    # torch calls a hook without keywords that another hook of the same call has just removed.
    if kwargs is None or torch.compiler.is_compiling() or not model.training:
        return
    batch = batch_of(args, kwargs)
    num_tokens = most_tokens if batch is None else batch.rows * batch.length
    # Asked each time: another plan may be in force, or this may be a copy of the model.
    for offloader in offloaders_of(model):
        # A batch without token ids is taken for one of which nothing is known.
        offloader.foresee(num_tokens, most_tokens)


def _check_alone(shorthand: dict[str, Any]) -> None:
    given = [name for name, value in shorthand.items() if value not in (None, False) and name not in ALLOWANCES]
    if given:
        raise PolicyError(
            f'{", ".join(given)} was given beside policy "{AUTO}", which chooses for each layer. Leave it out.'
        )


def _check_for_auto(policy: object, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise PolicyError(
                f'{name} is {value}, but only policy "{AUTO}" plans for a budget, and the policy is {policy}. Use '
                f'HFCkptCallback("{AUTO}", {name}={value!r}), or leave {name} out.'
            )


def _remove_leftover(model: nn.Module) -> None:
    if remove(model):
        logger.info(LEFTOVER)


def _is_trained_now(model: nn.Module) -> bool:
    """Whether a call of a Trainer that goes on has put its plan on the model."""
    call = train_call_of(model)
    return call is not None and call.is_running()


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


def _say_who_governs(args: TrainingArguments) -> None:
    # transformers 5.2x has the new name, earlier versions the old one only.
    if getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None):
        logger.info(
            "The training arguments ask for activation checkpointing too; the policy of HFCkptCallback governs."
        )


def _output_folder(args: TrainingArguments) -> Path:
    # Trainer itself sets the default; the annotation of the field is wider.
    return Path(args.output_dir or "trainer_output")


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    return _output_folder(args) / f"checkpoint-{state.global_step}"


def _resumed_folder(args: TrainingArguments, state: TrainerState) -> Path:
    # An argument of Trainer.train() is not passed on to callbacks; without it the usual place is looked at.
    named = args.resume_from_checkpoint
    return Path(named) if named and Path(named).is_dir() else _checkpoint_folder(args, state)


def _write_plan(plan: Plan, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # A run that is killed here must not leave half a plan, which would stop the next one.
    half = folder / f"{PLAN_FILE}.part"
    half.write_text(plan.to_json() + "\n")
    half.replace(folder / PLAN_FILE)
