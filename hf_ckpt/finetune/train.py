"""A recipe carried out: base, tokenizer, data, model, training, sample, summary.

What can be refused is refused before anything is written: `training.output_dir` does not exist until the first step is
about to run.
"""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import compare_versions
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_ckpt.callback import HFCkptCallback
from hf_ckpt.distributed.store import LaunchedProcesses
from hf_ckpt.errors import DiskFullError, OtherProcessError, RecipeError, cause_chain
from hf_ckpt.estimate.weights import weights_of
from hf_ckpt.finetune.adapter_gradients import AdapterGradients
from hf_ckpt.finetune.micro_batch import check_auto, effective_batch, is_asked, with_micro_batch
from hf_ckpt.finetune.oom_report import explained
from hf_ckpt.finetune.run_report import ProgressLines, RunSummary, measured_peak
from hf_ckpt.loading.adapter_targets import unmatched_untold
from hf_ckpt.loading.columns import (
    PreparedColumns,
    describe_lengths,
    load_columns,
    prepare_columns,
    prompt_of,
    texts_of,
)
from hf_ckpt.loading.dataset import PreparedData, check_packing, describe_example, prepare, sample_prompt_ids
from hf_ckpt.loading.images import load_processor
from hf_ckpt.loading.model import can_be_merged, holds_weights, load_base, rehearse
from hf_ckpt.loading.row_formats import decode
from hf_ckpt.loading.sharding_engine import (
    check_engine_runs,
    check_engine_suits,
    describe_engine,
    gathers_in_forward,
    num_parameters,
    ready_to_generate,
)
from hf_ckpt.loading.sources import load_splits
from hf_ckpt.loading.tokenizer import load_tokenizer
from hf_ckpt.loading.trainer import (
    build_trained_model,
    check_can_be_written,
    make_trainer,
    reward_functions,
    training_arguments,
    use_one_thread_if_tiny,
)
from hf_ckpt.patch.checks import check_engine
from hf_ckpt.recipe.checkpointing import NO_CHECKPOINTING
from hf_ckpt.recipe.recipe import Recipe, Values, load_recipe
from hf_ckpt.recipe.schema import DEFAULT_MAX_LENGTH
from hf_ckpt.recipe.shipped import shown
from hf_ckpt.recipe.trainer_kinds import DEFAULT_COMPLETION
from hf_ckpt.trainer.saved_files import SavedFiles, check_can_be_saved, writes_shards_only
from hf_ckpt.units import format_bytes
from hf_ckpt.upstream import old_names_untold
from hf_ckpt.upstream.transformers import CACHE, on_one_process

_CACHE_DIR = Path(HF_HOME) / "hf_ckpt" / "tokenizers"
_NUM_SAMPLE_TOKENS = 48
_REPETITION_PENALTY = 1.2


@old_names_untold()
def finetune(
    recipe: Recipe, *, is_resumed: bool = False, is_merged: bool = False, processes: LaunchedProcesses | None = None
) -> RunSummary:
    """Carry out a recipe and print what a person wants to know of it.

    Writes the adapter or the model, the tokenizer and the plan to `training.output_dir`. The base recipe is carried
    out first where its result is missing. With several processes, all of them call this.

    `processes`: of this run, where somebody has joined them already.
    """
    if processes is None:
        with LaunchedProcesses() as processes:
            return finetune(recipe, is_resumed=is_resumed, is_merged=is_merged, processes=processes)
    with processes.stage("checking the recipe"):
        args = _checked_arguments(recipe, is_merged=is_merged)
        checkpoint = _checkpoint_to_resume(recipe, args) if is_resumed else None
        with on_one_process():
            _check_optimizer(args, rehearse(recipe, _section_with_shape(recipe)))
    processes.set_timeout(args.ddp_timeout)
    processes.check_same(shown(checkpoint) if checkpoint else "none", "The checkpoint to go on from")
    _make_base(recipe, args, processes)
    tokenizer, data = _prepare(recipe, args, processes)
    if is_asked(recipe):
        assert isinstance(data, PreparedData), "the recipe was checked"
        _say(args, "Choosing the micro-batch:")
        with processes.stage("choosing the micro-batch"):
            recipe = with_micro_batch(recipe, args, data, lambda text: _say(args, f"  {text}"))
            args = training_arguments(recipe)
    _say(args, f"Batch: {effective_batch(args)}")
    with processes.stage("building the model"), full_disk_named(Path(HF_HOME)):
        trainer, callback, expected = _trainer(recipe, args, tokenizer, data)
    # Not a stage: a process that fails here must end at once, for the others wait for it in a collective.
    explaining = explained(trainer, recipe, callback, partial(_say, args))
    with _failing_gracefully(args), explaining, full_disk_named(_output_dir(args)):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    with processes.stage("saving the model"), full_disk_named(_output_dir(args)):
        _save(trainer, expected)
    with processes.stage("merging the adapter"), full_disk_named(_output_dir(args)):
        merged = _merge(recipe, args, tokenizer) if is_merged else None
    # Generation leaves FSDP2's outermost weights gathered.
    engine = describe_engine(trainer)
    with processes.stage("writing a sample"):
        # A forward that the first process wants may need all of them.
        takes_part = _is_main(args) or gathers_in_forward(trainer)
        prompt = _prompt(trainer, tokenizer, data) if takes_part else None
        sample = _sample(trainer, tokenizer, prompt) if prompt is not None else ""
    figures, log_history = ({} if callback is None else callback.report()), list(trainer.state.log_history)
    with processes.stage("measuring a step"):
        # Trains on: what was learned is saved.
        measured_bytes = measured_peak(trainer, callback, recipe.checkpointing or NO_CHECKPOINTING)
    summary = RunSummary(
        title=shown(recipe.path),
        plan=None if callback is None else callback.plan,
        figures=figures,
        prediction=None if callback is None else callback.prediction,
        log_history=log_history,
        saved=_output_dir(args),
        is_adapter=recipe.adapter_section is not None,
        merged=merged,
        engine=engine,
        verdict=expected.verdict(),
        batch=effective_batch(args),
        measured_bytes=measured_bytes,
    )
    if _is_main(args):
        if sample:
            _say(args, sample)
        _say(args, summary.table())
    # What follows may read what this run wrote.
    with processes.stage("pushing to the hub"):
        if args.push_to_hub:
            trainer.push_to_hub()
    return summary


def _checked_arguments(recipe: Recipe, *, is_merged: bool) -> TrainingArguments:
    section = recipe.adapter_section
    if is_merged and section is None:
        raise RecipeError("--merge merges an adapter, but this recipe has no lora section. Leave --merge out.")
    if is_merged and section is not None and not can_be_merged(section):
        kind = section["type"]
        raise RecipeError(f"--merge: PEFT cannot merge an adapter of type {kind} into its base. Leave --merge out.")
    if is_merged and "name_or_path" not in recipe.model:
        raise RecipeError(
            "--merge loads the base model again, but model.config makes new weights in each run. Make them with a "
            "recipe of their own, and name its output in model.name_or_path."
        )
    # Their modules are imported before anything is written.
    reward_functions(recipe.reward_funcs, recipe.path.parent)
    args = training_arguments(recipe)
    check_engine_suits(recipe, args)
    if _is_main(args):
        check_can_be_written(_output_dir(args))
    if recipe.checkpointing is not None:
        # The callback asks too, but only once the Trainer has made its folder.
        check_engine(args)
        check_auto(recipe, args)
    return args


def _check_optimizer(args: TrainingArguments, model: Any) -> None:
    try:
        Trainer.get_optimizer_cls_and_kwargs(args, model)
    except (ValueError, ImportError) as error:
        raise RecipeError(f"training.optim: {error}") from error


# --- Checkpoints to go on from. ---


def _checkpoint_to_resume(recipe: Recipe, args: TrainingArguments) -> Path:
    if recipe.has_virtual_tokens:
        raise RecipeError("--resume: PEFT trains virtual tokens that were saved no further. Start without --resume.")
    checkpoint = _newest_checkpoint(args)
    if checkpoint is None:
        raise RecipeError(
            f"--resume: {args.output_dir} holds no complete checkpoint. Start without --resume, or name the folder of "
            "the run to go on with (training.output_dir=...)."
        )
    _say(args, f"Going on from {checkpoint}.")
    return checkpoint


def _newest_checkpoint(args: TrainingArguments) -> Path | None:
    """Return the complete checkpoint that was written last."""
    states = [path for path in _output_dir(args).glob("checkpoint-*/trainer_state.json") if _is_whole(path)]
    return max(states, key=lambda path: path.stat().st_mtime_ns).parent if states else None


def _is_whole(state: Path) -> bool:
    """Tell whether a checkpoint's state can be read; the Trainer writes it last."""
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


# --- The recipe that makes the weights. ---


def _missing_base(recipe: Recipe) -> Recipe | None:
    """Return the recipe that makes the weights of this one, where they are not there yet."""
    path = recipe.model.get("base_recipe")
    if path is None or holds_weights(Path(recipe.model["name_or_path"])):
        return None
    base, wanted = load_recipe(path), recipe.model["name_or_path"]
    made = base.training["output_dir"]
    if Path(made).resolve() != Path(wanted).resolve():
        raise RecipeError(
            f"model.base_recipe {path} writes to {made}, but model.name_or_path is {wanted}. Make them the same folder."
        )
    if base.adapter_section is not None:
        raise RecipeError(f"model.base_recipe {path} makes an adapter. Name a recipe without a lora section.")
    return base


def _section_with_shape(recipe: Recipe) -> Values:
    """Return the `model` section that tells the shape of the model, before its weights are made."""
    base = _missing_base(recipe)
    return recipe.model if base is None else _section_with_shape(base)


def _make_base(recipe: Recipe, args: TrainingArguments, processes: LaunchedProcesses) -> None:
    """Carry out the base recipe where its weights are missing. With several processes, all of them do so together."""
    with processes.stage("looking for the base model"), full_disk_named(Path(HF_HOME)):
        base = _missing_base(recipe)
        if base is not None:
            # Data that cannot be had is reported now, not when the base is done.
            load_splits(recipe.data)
    processes.check_same("there" if base is None else "not there", str(recipe.model.get("name_or_path")))
    if base is None:
        return
    wanted, steps = recipe.model["name_or_path"], base.training.get("max_steps", 0)
    epochs = base.training.get("num_train_epochs", 3)
    long = f"{steps:,} steps" if steps > 0 else "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
    _say(args, f"{wanted} is not there yet: training it first with {shown(base.path)} ({long}, random weights).")
    _say(args, "How long that takes is said once its first steps have run. Ctrl-C stops it.")
    finetune(base, processes=processes)
    _say(args, f"Now {shown(recipe.path)}.")


# --- From data to a trained model. ---


_Data = PreparedData | PreparedColumns


def _prepare(
    recipe: Recipe, args: TrainingArguments, processes: LaunchedProcesses
) -> tuple[PreTrainedTokenizerBase, _Data]:
    is_first = args.local_process_index == 0
    prepared: tuple[PreTrainedTokenizerBase, _Data] | None = None
    # One process of each machine fills the caches, the others read them.
    for is_turn in (is_first, not is_first):
        with processes.stage("preparing the data"), full_disk_named(Path(HF_HOME)):
            if is_turn:
                prepared = _tokenizer_and_data(recipe)
    assert prepared is not None, "it is every process's turn once"
    tokenizer, data = prepared
    if isinstance(data, PreparedColumns):
        _say(args, data.describe())
        return prepared
    for warning in data.warnings:
        _say(args, f"Warning: {warning}")
    _say(args, f"Training data: {data.counts.summary()}")
    _say(args, describe_example(data, tokenizer))
    return prepared


def _tokenizer_and_data(recipe: Recipe) -> tuple[PreTrainedTokenizerBase, _Data]:
    kind = recipe.kind
    if kind.is_text:
        tokenizer = load_tokenizer(recipe.model, recipe.data, cache_dir=_CACHE_DIR)
        return tokenizer, prepare(recipe.data, tokenizer)

    def texts(section: Values) -> Iterator[str]:
        return (text for row in load_columns(section, kind).train for text in texts_of(row))

    if kind.reads_images:
        processor = load_processor(recipe.model, recipe.data)
        return processor, prepare_columns(recipe.data, processor, kind)
    tokenizer = load_tokenizer(recipe.model, recipe.data, cache_dir=_CACHE_DIR, texts=texts)
    completion = recipe.training.get("max_completion_length", DEFAULT_COMPLETION)
    max_prompt = recipe.data.get("max_length", DEFAULT_MAX_LENGTH) - completion
    num_labels = recipe.model.get("num_labels", 1)
    return tokenizer, prepare_columns(recipe.data, tokenizer, kind, num_labels=num_labels, max_prompt=max_prompt)


def _trainer(
    recipe: Recipe, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase, data: _Data
) -> tuple[Trainer, HFCkptCallback | None, SavedFiles]:
    # Only now, so that adapters start the same in all processes, whatever each of them had to prepare.
    set_seed(args.seed)
    model: Any = build_trained_model(recipe, tokenizer)
    use_one_thread_if_tiny(model)
    if recipe.data.get("packing", False):
        check_packing(model)
    # What it would show is in the log, which this command prints, and in the summary.
    section = recipe.checkpointing
    callback = None if section is None else HFCkptCallback(**section.callback_options, quiet=True)
    rewards = reward_functions(recipe.reward_funcs, recipe.path.parent)
    callbacks: list[TrainerCallback] = [] if callback is None else [callback]
    # Bars would write a line for each step into a file or a pipe.
    has_lines = not sys.stderr.isatty() and recipe.training.get("disable_tqdm") is None
    args.disable_tqdm = args.disable_tqdm or has_lines
    callbacks.append(ProgressLines(partial(_say, args), is_periodic=has_lines))
    if recipe.adapter_section is not None:
        callbacks.append(AdapterGradients(partial(_say, args)))
    trainer = make_trainer(recipe, model, args, tokenizer, data, callbacks, reward_funcs=rewards)
    model = trainer.model
    # It is sharded when training begins.
    expected = SavedFiles.of(model)
    if isinstance(data, PreparedColumns):
        max_length = recipe.data.get("max_length", DEFAULT_MAX_LENGTH)
        for line in describe_lengths(trainer.train_dataset, data.num_rows, recipe.kind, max_length):
            _say(args, line)
    check_engine_runs(trainer)
    check_can_be_saved(args.device)
    for name, text in weights_of(model).rows():
        _say(args, f"{name.capitalize()}: {text}")
    num_trained, num_all = num_parameters(model, only_trainable=True), num_parameters(model)
    _say(args, f"Model: {num_all:,} parameters, {num_trained:,} of them trained ({num_trained / num_all:.2%})")
    return trainer, callback, expected


@contextmanager
def _failing_gracefully(args: TrainingArguments) -> Iterator[None]:
    """Say how to go on when the user stops the run."""
    try:
        yield
    except KeyboardInterrupt:
        checkpoint = _newest_checkpoint(args)
        how = "There is no checkpoint to go on from." if checkpoint is None else f"--resume goes on from {checkpoint}."
        _say(args, f"\nStopped. {how}")
        raise


def _save(trainer: Trainer, expected: SavedFiles) -> None:
    """Write the adapter or the model as one process would, gathered from all, and see that it is whole."""
    if writes_shards_only():
        # Checkpoints are for resuming, and may be shards; what a run leaves behind is for use.
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    if trainer.args.should_save:
        expected.check(_output_dir(trainer.args), trainer.model)


def _merge(recipe: Recipe, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase) -> Path | None:
    """Write the base model with the adapter merged into it; a quantised base is loaded again, unquantised."""
    if not args.should_save:
        return None
    from peft import PeftModel

    folder = _output_dir(args) / "merged"
    with on_one_process(), unmatched_untold():
        base = load_base(recipe, is_quantized=False)
        merged = PeftModel.from_pretrained(base, str(args.output_dir)).merge_and_unload()
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _prompt(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, data: _Data) -> list[int] | None:
    """Return a prompt to try the model on; None for one that writes nothing."""
    if isinstance(data, PreparedData):
        return sample_prompt_ids(data)
    if data.kind.scores_rows or data.kind.reads_images:
        return None
    rows: Any = trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset
    return prompt_of(rows, tokenizer)


def _sample(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> str:
    """Return a prompt of the evaluation data and how the trained model goes on."""
    adapter = getattr(trainer.model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False) and CACHE == "cache" and compare_versions("peft", "<", "0.22"):
        # It looks for the cache by its old name: a prefix is left out, a prompt inserted before each token.
        return "No sample: this version of PEFT loses virtual tokens when transformers 5.24 generates (hf-ckpt env)."
    trainer.model_wrapped.eval()
    ids = torch.tensor([prompt], device=trainer.args.device)
    with torch.no_grad(), ready_to_generate(trainer) as model:
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_NUM_SAMPLE_TOKENS,
            do_sample=False,
            # A small model would say the same thing again and again.
            repetition_penalty=_REPETITION_PENALTY,
            pad_token_id=tokenizer.pad_token_id,
            # No process stops before the others: each holds weights that all need.
            synced_gpus=trainer.args.world_size > 1 and gathers_in_forward(trainer),
        )
    given, written = (decode(tokenizer, ids) for ids in (prompt, output[0, len(prompt) :].tolist()))
    lines = f"{given} ==>{written.rstrip()}".split("\n")
    return "\n  ".join(["Sample, a prompt of the data ==> what the model writes:", *lines])


# --- A full disk. ---


_FULL = (errno.ENOSPC, errno.EDQUOT)
# safetensors, pyarrow and tokenizers hand on the system's words in errors of their own.
_WORDS = ("No space left on device", "Disk quota exceeded")
_TORCHS_WRITER = "inline_container.cc"
_NEXT_TO_NOTHING = 16 * 2**20


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Raise errors of a full disk as what they are.

    `folder`: of the run; named where the error does not say which file could not be written.
    """
    try:
        yield
    # Said already; what another process says is not of this one's disk.
    except (DiskFullError, OtherProcessError):
        raise
    except Exception as error:
        found = next((link for link in cause_chain(error) if _is_full(link, folder)), None)
        if found is None:
            raise
        named_file = getattr(found, "filename", None)
        where = Path(str(named_file)) if named_file else folder
        raise DiskFullError(
            f"The disk is full: {where} cannot be written ({found}), and {format_bytes(_free_bytes(where))} are free "
            "there. What was being written is not whole. Free space, or name another folder (training.output_dir; "
            "HF_HOME for caches); checkpoints take less with training.save_total_limit or "
            "training.save_only_model=true."
        ) from error


def _is_full(error: BaseException, folder: Path) -> bool:
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    text = str(error)
    # torch.save does not hand on why it cannot write.
    return any(word in text for word in _WORDS) or (_TORCHS_WRITER in text and _free_bytes(folder) < _NEXT_TO_NOTHING)


def _free_bytes(path: Path) -> int:
    nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(nearest).free


# --- Words. ---


def _output_dir(args: TrainingArguments) -> Path:
    # The Trainer's own default, where the annotation of the field is wider.
    return Path(args.output_dir or "trainer_output")


def _is_main(args: TrainingArguments) -> bool:
    index: int = args.process_index
    return index == 0


def _say(args: TrainingArguments, text: str) -> None:
    if _is_main(args):
        print(text, flush=True)
