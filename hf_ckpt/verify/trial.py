"""One trial: the recipe's model trained a few steps by the real Trainer, with or without the plan, and recorded.

Note [FSDP on a CPU]. accelerate drops FSDP on a CPU silently and runs DDP (`AcceleratorState` keeps the plugin for
accelerators only). Everything behind that decision works on gloo and a CPU: wrapping, gradient accumulation, clipping,
saving. So the Trainer of a trial takes the decision back, on the instances that it made itself; no class is patched,
and nothing outside `hf-ckpt verify` uses it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from hf_ckpt.callback import HFCkptCallback
from hf_ckpt.errors import PolicyError, StructureError
from hf_ckpt.loading.columns import texts_of
from hf_ckpt.loading.trainer import (
    build_trained_model,
    make_trainer,
    trainer_class,
    training_arguments,
    use_one_thread_if_tiny,
)
from hf_ckpt.patch.tileable_modules import tiled_modules
from hf_ckpt.policy.options import HeadMode
from hf_ckpt.policy.plan import Plan, parse
from hf_ckpt.policy.resolve_rules import resolve
from hf_ckpt.recipe.checkpointing import NO_CHECKPOINTING, Checkpointing
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recovery.accumulation_window import nested_named_tensors
from hf_ckpt.structure.layers import Stack, find_layers
from hf_ckpt.structure.lm_head import find_head, governed_by_other
from hf_ckpt.upstream.accelerate import shared_state
from hf_ckpt.upstream.torch import WRAPPER_NAMES
from hf_ckpt.verify.compare import draws_in_tiles, run_in_same_tiles, tolerance_of
from hf_ckpt.verify.localize import OperatorWatch
from hf_ckpt.verify.record import (
    Record,
    Recorder,
    TrialError,
    WatchedLayer,
    local_shard,
    plain_attributes,
    random_state_digests,
    tensor_digest,
    values_digest,
)
from hf_ckpt.verify.state_checks import UserHooks

MAX_ACCUMULATION = 2  # Micro-batches of an optimizer step; two show that gradients add up, more only take longer.
_PROMPT_TOKENS = 6
_ADAPTER_SCALE = 0.02
_NUM_GENERATED = 6
# An Accelerator with an FSDP plugin sets it for whatever runs next in its process.
_FSDP_VARIABLE = "ACCELERATE_USE_FSDP"
Engine = Literal["one process", "ddp", "fsdp1", "fsdp2", "deepspeed"]


@dataclass(frozen=True, kw_only=True)
class TrialInputs:
    """What all trials of one verification share."""

    recipe: Recipe  # of `reduce_recipe`: with weights in `model.name_or_path`; no evaluation, no reporters
    tokenizer: PreTrainedTokenizerBase
    rows: Sequence[Mapping[str, Any]] | Dataset  # with `input_ids` and `labels`, or the columns that a trainer reads
    collator: Any
    setup: Callable[[nn.Module], None] | None = None  # What the user's own script does to the model once it is built.

    def build(self, seed: int) -> Any:
        """Build the model as the recipe's trainer takes it, the same one at each call."""
        set_seed(seed)
        model = build_trained_model(self.recipe, self.tokenizer)
        use_one_thread_if_tiny(model)
        keep_4bit_weights(model)
        _randomize_zero_adapters(model)
        if self.setup is not None:
            self.setup(model)
        return model

    def arguments(self, folder: Path, num_steps: int, *, save_at: int | None, is_planned: bool) -> TrainingArguments:
        """Return the recipe's own `TrainingArguments`, but for folder, length, saving and logging."""
        own = dict(self.recipe.training)
        changed: dict[str, Any] = {
            "output_dir": str(folder),
            "max_steps": num_steps,
            "gradient_accumulation_steps": min(int(own.get("gradient_accumulation_steps", 1)), MAX_ACCUMULATION),
            "save_strategy": "no" if save_at is None else "steps",
            "save_steps": save_at or 1,
            "logging_strategy": "no",
            "disable_tqdm": True,
        }
        if not is_planned:
            own.pop("gradient_checkpointing", None)
            own.pop("activation_checkpointing", None)
        return training_arguments(replace(self.recipe, training={**own, **changed}))

    def in_float32(self) -> TrialInputs:
        """Return the same in float32."""
        recipe, quantization = self.recipe, self.recipe.quantization
        if quantization is not None:
            quantization = {**quantization, "bnb_4bit_compute_dtype": "float32"}
        training = {**recipe.training, "bf16": False, "fp16": False}
        model = {**recipe.model, "dtype": "float32"}
        return replace(self, recipe=replace(recipe, model=model, training=training, quantization=quantization))

    def prompt(self) -> torch.Tensor:
        """Return the first tokens of the first row, [1, S]."""
        row = self.rows[0]
        # trl tokenises what its trainers read.
        ids = row["input_ids"] if "input_ids" in row else self.tokenizer(next(texts_of(row)))["input_ids"]
        return torch.tensor([list(ids[:_PROMPT_TOKENS])])


def keep_4bit_weights(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights anew in evaluation, as it does on a CPU with AVX512-BF16.

    It rounds their scales to bfloat16 in place: a run that evaluates or generates trains on other weights afterwards.
    On a GPU this does not happen.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # an attribute of Linear4bit


@torch.no_grad()
def _randomize_zero_adapters(model: nn.Module) -> None:
    """Give adapters that start as zeros small random values.

    A LoRA matrix B of zeros hides faults: its matrix A gets no gradient before the second step, and an adapter that
    was never loaded gives the same logits as one that was.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dim() >= 2 and not parameter.any():
            parameter.normal_(std=_ADAPTER_SCALE)


def run_trial(
    inputs: TrialInputs,
    folder: Path,
    *,
    is_planned: bool,
    num_steps: int,
    save_at: int | None = None,
    resume_from: Path | None = None,
    watch: OperatorWatch | None = None,
) -> Record:
    """Train some optimizer steps, with `HFCkptCallback` if `is_planned`, and return the record.

    An error in training becomes part of the record; only PolicyError and StructureError are raised. The trial writes
    to `folder`, and a checkpoint every `save_at` steps.
    """
    found = dict(os.environ)
    try:
        args = inputs.arguments(folder / "run", num_steps, save_at=save_at, is_planned=is_planned)
        return _Trial(inputs, folder, args, is_planned, watch).run(resume_from)
    finally:
        # What TrainingArguments write into the environment: the next trial would obey ACCELERATE_USE_FSDP.
        os.environ.clear()
        os.environ.update(found)


class _Trial:
    def __init__(
        self, inputs: TrialInputs, folder: Path, args: TrainingArguments, is_planned: bool, watch: OperatorWatch | None
    ) -> None:
        self.inputs, self.args = inputs, args
        self.record = Record(folder)
        self.section = inputs.recipe.checkpointing or NO_CHECKPOINTING
        self.callback = NonStoppingCallback(self.section) if is_planned else None
        self.watch = watch
        self.model: Any = inputs.build(self.args.seed)
        self._is_begun = False
        self._begun: tuple[int, int, list[list[int]]] = -1, 0, []
        """Steps that were done, micro-batches before them, and the tensors of those that have begun since."""
        if not inputs.recipe.kind.of_trl:
            self.begin(self.model)

    def begin(self, model: Any) -> None:
        """Look at the model before a plan or an engine does: trl's trainers put the adapter on it."""
        if self._is_begun:
            return
        self._is_begun, self.model, section = True, model, self.section
        if self.inputs.recipe.kind.of_trl:
            _randomize_zero_adapters(model)
        stacks = find_layers(self.model, **section.structure)
        # What the policy means for this model, independently of the callback.
        plan = parse(section.policy, **section.policy_options)
        plan = plan if isinstance(plan, Plan) else resolve(plan, stacks, type(self.model).__name__)
        self.record.expected_plan, self.record.layers = plan, tuple(_watched_layers(plan, stacks))
        self.record.tolerance = tolerance_of(plan, stacks, self.model, self.args)
        if self.callback is None and draws_in_tiles(plan, stacks):
            run_in_same_tiles(plan, stacks)
        self.recorder = Recorder(self.model, stacks, self.record)
        self.user_hooks = UserHooks(self.model)
        self.use_cache = use_cache_of(self.model)
        self.record.names["before"] = names_of(self.model, self.record)
        if self.watch is not None:
            self.watch.recorder = self.recorder

    def run(self, resume_from: Path | None) -> Record:
        trainer = None
        try:
            trainer = self._trainer()
            trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        except (PolicyError, StructureError):
            raise
        except Exception as error:  # noqa: BLE001  # whatever ends the run is the verdict on it
            self._note_failure(error)
        if not self._is_begun:
            return self.record
        self.recorder.stop()
        if self.callback is not None:
            self.record.plan, self.record.callback_faults = self.callback.plan, self.callback.faults
            self.record.num_recovered = int(self.callback.report().get("ckpt/oom_recovered", 0))
        self.record.hooks = self.user_hooks.finish(self.record.recomputations)
        if self.record.failure is None and trainer is not None:
            self._finish(trainer)
        return self.record

    def _trainer(self) -> RecordingTrainer:
        recipe, inputs = self.inputs.recipe, self.inputs
        callbacks: list[TrainerCallback] = [_BeginTrial(self)]
        callbacks += [] if self.callback is None else [self.callback]
        data = SimpleNamespace(train=inputs.rows, evaluation=None, collator=inputs.collator)
        # The class that the recipe names, recorded from outside.
        of_recipe = trainer_class(recipe) if recipe.kind.of_trl else Trainer
        kind = type(of_recipe.__name__, (RecordingTrainer, of_recipe), {"_recorded_by": self})
        made = make_trainer(
            recipe, self.model, self.args, inputs.tokenizer, data, callbacks, made_of=cast(type[Trainer], kind)
        )
        trainer = cast(RecordingTrainer, made)
        trainer.remove_callback(PrinterCallback)
        # After the plan's own callback, so that it sees what a user's callback would.
        trainer.add_callback(_GenerateBetweenSteps(self, trainer))
        return trainer

    def _note_failure(self, error: Exception) -> None:
        where, is_recomputing = "", False
        if self._is_begun:
            where, is_recomputing = self.recorder.current_layer, self.recorder.is_recomputing
        self.record.failure = TrialError(error, where, is_recomputing)
        # The traceback holds the frames, and they the model.
        error.__traceback__ = None

    def start_training(self, trainer: RecordingTrainer) -> None:
        """Place hooks and note weights, once engine and plan are in place; a second call does nothing."""
        if self.record.engine:
            return
        self.record.engine = engine_of(trainer.model_wrapped)
        self._note_head()
        self.record.trainable = tuple(name for name, p in parameters_of(self.model) if p.requires_grad)
        self.record.on_other_ranks = frozenset(name for name, p in parameters_of(self.model) if not p.numel())
        self.record.tensors_before = _digests(self.model)
        self.recorder.start()

    def number_of(self, inputs: Any, num_steps: int) -> int:
        """Return the number of a micro-batch: that of its first run where it runs again, as memory has run out.

        Not kept on the Trainer, whose attributes are brought back then.
        """
        if num_steps != self._begun[0]:
            self._begun = num_steps, len(self.record.micro_batches), []
        _, first, batches = self._begun
        tensors = [id(tensor) for _, tensor in nested_named_tensors(inputs)]
        if tensors in batches:
            del batches[batches.index(tensors) :]
        batches.append(tensors)
        return first + len(batches) - 1

    def _note_head(self) -> None:
        plan = self.record.expected_plan
        if plan is None or plan.head is HeadMode.PLAIN:
            return
        if governed_by_other(self.model) is not None:
            self.record.expected_plan = replace(plan, head=HeadMode.PLAIN)
        elif self.callback is not None:
            self.record.head = _without_wrappers(find_head(self.model).path)

    def keep_gradients(self, step: int) -> None:
        """Record the gradients of an optimizer step, before they are clipped."""
        trainable = ((name, p) for name, p in parameters_of(self.model) if p.requires_grad)
        gradients = {name: None if p.grad is None else local_shard(p.grad) for name, p in trainable}
        self.record.keep_gradients(step, gradients)
        self.record.num_steps = step + 1
        if "during" not in self.record.names:
            self.record.names["during"] = names_of(self.model, self.record)

    def _finish(self, trainer: RecordingTrainer) -> None:
        record, model = self.record, self.model
        record.names["after"] = names_of(model, record)
        record.keep_weights({name: local_shard(p) for name, p in parameters_of(model) if p.requires_grad})
        record.tensors_after = _digests(model)
        record.trained = {name: values_digest(p) for name, p in parameters_of(model) if p.requires_grad}
        record.buffers = {_without_wrappers(name): tensor_digest(buffer) for name, buffer in model.named_buffers()}
        record.attributes = {
            f"{_without_wrappers(path)}.{name}".lstrip("."): value
            for path, module in model.named_modules()
            if not path.endswith(WRAPPER_NAMES)
            for name, value in plain_attributes(module).items()
        }
        record.use_cache = changed_values(self.use_cache, use_cache_of(model))
        if not record.can_save_model:
            return
        trainer.save_model()
        ids, autocast = self.inputs.prompt().to(trainer.args.device), trainer.autocast_smart_context_manager()
        record.logits = prompt_logits(model, ids, autocast)
        record.generated["after training"] = self.generate(trainer)

    def generate(self, trainer: RecordingTrainer) -> tuple[int, ...] | str:
        """Generate a fixed number of tokens greedily with the model as it is, in training or evaluation mode.

        Leaves the run's random state alone. Where it cannot, returns why.
        """
        if not self.record.can_save_model:
            return "FSDP1 has the weights in its wrappers"
        ids = self.inputs.prompt().to(trainer.args.device)
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices), trainer.autocast_smart_context_manager():
            try:
                output = self.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=_NUM_GENERATED,
                    min_new_tokens=_NUM_GENERATED,
                    do_sample=False,
                    pad_token_id=self.inputs.tokenizer.pad_token_id,
                )
            except Exception as error:  # noqa: BLE001  # any model's own code; the reference shows whose fault it is
                return f"{type(error).__name__}: {error}"
        return tuple(output[0, ids.shape[1] :].tolist())


class RecordingTrainer(Trainer):
    """A trainer, recorded from outside: each training step is its own. Shards on a CPU too: Note [FSDP on a CPU].

    To be put before the recipe's own trainer.
    """

    _recorded_by: _Trial

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and give back the FSDP plugin that it dropped on a CPU."""
        launched = os.environ.get(_FSDP_VARIABLE)
        super().create_accelerator_and_postprocess()
        if launched is None:
            os.environ.pop(_FSDP_VARIABLE, None)
        state = self.accelerator.state
        if self.args.fsdp_plugin_args is None or state.distributed_type != DistributedType.MULTI_CPU:
            return
        _shard(state, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
        self.is_fsdp_enabled = True

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run the Trainer's own step and record it."""
        trial = self._recorded_by
        trial.start_training(self)
        inputs = args[0] if args else kwargs["inputs"]
        with trial.recorder.step(trial.number_of(inputs, self.state.global_step)) as micro, self._watched():
            loss: Tensor = super().training_step(model, *args, **kwargs)
        micro.loss = loss.item()
        micro.random_state = random_state_digests()
        if self.accelerator.sync_gradients:
            trial.keep_gradients(self.state.global_step)
        return loss

    def _watched(self) -> AbstractContextManager[Any]:
        watch = self._recorded_by.watch
        number = len(self._recorded_by.record.micro_batches) - 1
        return watch if watch is not None and watch.micro_batch == number else nullcontext()


def _shard(state: AcceleratorState, plugin: FullyShardedDataParallelPlugin) -> None:
    """Do to the state of a CPU what `AcceleratorState` does to that of GPUs."""
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = DistributedType.FSDP
    shared_state(PartialState)["distributed_type"] = DistributedType.FSDP


def engine_of(model: nn.Module) -> Engine:
    """Return the engine that runs a model, by the type of `trainer.model_wrapped` once training has begun."""
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if isinstance(model, FullyShardedDataParallel):
        return "fsdp1"
    if isinstance(model, FSDPModule):
        return "fsdp2"
    # Named and not imported: DeepSpeed is optional.
    is_deepspeed = any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__)
    return "deepspeed" if is_deepspeed else "one process"


class NonStoppingCallback(HFCkptCallback):
    """The recipe's callback, which goes on where its own check of the first step would stop the run."""

    def __init__(self, section: Checkpointing) -> None:
        self.faults: list[str] = []
        """What that check found."""
        super().__init__(**{**section, "on_mismatch": "warn"})

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collect what the callback warns of."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().on_pre_optimizer_step(args, state, control, **kwargs)
        self.faults += [str(warning.message) for warning in caught]


class _BeginTrial(TrainerCallback):
    """Lets a trial look at the model when the trainer has it whole, before the plan's own callback does."""

    def __init__(self, trial: _Trial) -> None:
        self._trial = trial

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trial.begin(kwargs["model"])


class _GenerateBetweenSteps(TrainerCallback):
    """Generates after the first step, in training and in evaluation mode, as a sampling callback of the user would."""

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


# --- What the plan should do, and names without wrappers. ---


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
    """Return the names of modules and the keys of the state dict, as "module ..." and "key ..."."""
    modules = tuple(f"module {name}" for name, _ in model.named_modules())
    return (*modules, *(f"key {name}" for name in model.state_dict())) if record.can_save_model else modules


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model under the names that they have without wrappers.

    The check of names reports wrappers that rename; everything else is compared all the same.
    """
    for name, parameter in model.named_parameters():
        yield _without_wrappers(name), parameter


def _without_wrappers(path: str) -> str:
    for wrapper in WRAPPER_NAMES:
        path = path.replace(f"{wrapper}.", "")
    return path


def _digests(model: nn.Module) -> dict[str, str]:
    return {name: tensor_digest(parameter) for name, parameter in parameters_of(model)}


# --- Logits and use_cache. ---


def prompt_logits(model: nn.Module, ids: Tensor, autocast: AbstractContextManager[Any]) -> Tensor:
    """Return the logits of a prompt, [1, S, V], in float32 on the CPU; leaves the model in evaluation mode."""
    model.eval()
    with torch.no_grad(), autocast:
        logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits.float().cpu()


def use_cache_of(model: nn.Module) -> dict[str, object]:
    """Return the `use_cache` values of a model's configs, by where they are."""
    found: dict[int, tuple[str, object]] = {}
    for path, module in model.named_modules():
        for name in ("config", "generation_config"):
            values = vars(module).get(name)
            if values is not None and "use_cache" in vars(values):
                # Layers share the config of their model.
                found.setdefault(id(values), (f"{path}.{name}".lstrip("."), vars(values)["use_cache"]))
    return dict(found.values())


def changed_values(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return the values that differ, as (before, after)."""
    names = before.keys() | after.keys()
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
