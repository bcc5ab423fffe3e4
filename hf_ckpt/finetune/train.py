"""A recipe carried out: tokenizer, data, model, training, sample, summary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed

from hf_ckpt.callback import HFCkptCallback
from hf_ckpt.errors import RecipeError
from hf_ckpt.finetune.data import PreparedData, describe_example, prepare, sample_prompt_ids
from hf_ckpt.finetune.model import build_model, load_base
from hf_ckpt.finetune.packing import check_packing
from hf_ckpt.finetune.recipe import Recipe, load_recipe
from hf_ckpt.finetune.report import RunSummary
from hf_ckpt.finetune.tokenizer import load_tokenizer

_CACHE_DIR = Path(HF_HOME) / "hf_ckpt" / "tokenizers"
_NUM_SAMPLE_TOKENS = 48


def finetune(recipe: Recipe, *, is_resumed: bool = False, is_merged: bool = False) -> RunSummary:
    """Carry out a recipe and print what a person wants to know of it.

    Writes the adapter or the model, the tokenizer and the plan to `training.output_dir`. The base recipe is carried
    out first where its result is missing.

    Args:
        recipe: the recipe.
        is_resumed: go on from the newest complete checkpoint in `training.output_dir`.
        is_merged: write the base model with the adapter merged into it to `<output_dir>/merged` as well.

    Returns:
        What the run did.

    Raises:
        RecipeError: the recipe does not suit this machine, its model or its output folder.
        DataError: the data cannot be used.
    """
    if is_merged and recipe.lora is None:
        raise RecipeError("--merge merges an adapter, but this recipe has no lora section. Leave --merge out.")
    args = _training_arguments(recipe)
    checkpoint = _newest_checkpoint(args) if is_resumed else None
    _make_base(recipe, args)
    set_seed(args.seed)
    tokenizer = load_tokenizer(recipe.model, recipe.data, cache_dir=_CACHE_DIR)
    data = prepare(recipe.data, tokenizer)
    _say(args, f"Training data: {data.counts.summary()}")
    _say(args, describe_example(data, tokenizer))
    trainer, callback = _trainer(recipe, args, tokenizer, data)
    with _failing_gracefully(args):
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    merged = _merge(recipe, args, tokenizer) if is_merged else None
    _say_sample(trainer, tokenizer, data)
    summary = RunSummary(
        title=str(recipe.path),
        plan=None if callback is None else callback.plan,
        figures={} if callback is None else callback.report(),
        log_history=trainer.state.log_history,
        saved=_output_dir(args),
        is_adapter=recipe.lora is not None,
        merged=merged,
    )
    _say(args, summary.table())
    if args.push_to_hub:
        trainer.push_to_hub()
    return summary


def _training_arguments(recipe: Recipe) -> TrainingArguments:
    _check_bf16(recipe)
    try:
        return TrainingArguments(**recipe.training)
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(f"training does not make TrainingArguments: {error}") from error


def _check_bf16(recipe: Recipe) -> None:
    uses_cuda = torch.cuda.is_available() and not recipe.training.get("use_cpu", False)
    if recipe.training.get("bf16") and uses_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise RecipeError(
            f"training.bf16 is true, but {torch.cuda.get_device_name()} has no bfloat16. Use float16 instead: "
            "training.bf16=false training.fp16=true model.dtype=float32"
        )


def _newest_checkpoint(args: TrainingArguments) -> str:
    """Return the checkpoint written last; one without trainer_state.json was not written to its end."""
    complete = [path.parent for path in _output_dir(args).glob("checkpoint-*/trainer_state.json")]
    if not complete:
        raise RecipeError(
            f"--resume: {args.output_dir} holds no complete checkpoint. Start without --resume, or name the output folder "
            "of the run to go on with (training.output_dir=...)."
        )
    return str(max(complete, key=lambda path: (path / "trainer_state.json").stat().st_mtime_ns))


def _make_base(recipe: Recipe, args: TrainingArguments) -> None:
    """Carry out the base recipe where the weights that it makes are missing."""
    base = recipe.model.get("base_recipe")
    if base is None or (Path(recipe.model["name_or_path"]) / "config.json").is_file():
        return
    base_recipe = load_recipe(base)
    made = base_recipe.training["output_dir"]
    if Path(made).resolve() != Path(recipe.model["name_or_path"]).resolve():
        raise RecipeError(
            f"model.base_recipe {base} writes to {made}, but model.name_or_path is {recipe.model['name_or_path']}. Make "
            "them the same folder."
        )
    _say(args, f"{made} is not there yet: training it first with {base}.")
    # One process makes it, the others wait for its end.
    with args.main_process_first(desc="training the base model"):
        if not (Path(made) / "config.json").is_file():
            finetune(base_recipe)


def _trainer(
    recipe: Recipe, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase, data: PreparedData
) -> tuple[Trainer, HFCkptCallback | None]:
    model = build_model(recipe, tokenizer)
    if recipe.data.get("packing", False):
        check_packing(model)
    callback = HFCkptCallback(**recipe.checkpointing) if recipe.checkpointing is not None else None
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        data_collator=data.collator,
        processing_class=tokenizer,
        callbacks=[] if callback is None else [callback],
    )
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    _say(args, f"Model: {total:,} parameters, {trainable:,} of them trained ({trainable / total:.2%})")
    return trainer, callback


@contextmanager
def _failing_gracefully(args: TrainingArguments) -> Iterator[None]:
    """Say how to go on when the user stops the run."""
    try:
        yield
    except KeyboardInterrupt:
        _say(args, f"\nStopped. --resume goes on from the newest checkpoint in {args.output_dir}.")
        raise


def _merge(recipe: Recipe, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase) -> Path | None:
    """Write the base model with the adapter merged into it; a quantised base is loaded again, unquantised."""
    if not args.should_save:
        return None
    from peft import PeftModel

    folder = _output_dir(args) / "merged"
    base = load_base(recipe, is_quantized=False)
    merged = PeftModel.from_pretrained(base, str(args.output_dir)).merge_and_unload()
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _say_sample(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, data: PreparedData) -> None:
    if not trainer.is_world_process_zero():
        return
    prompt = sample_prompt_ids(data)
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    model.eval()
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad(), trainer.autocast_smart_context_manager():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_NUM_SAMPLE_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    written = tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)
    print(f"Sample:\n  {_indented(tokenizer.decode(prompt, skip_special_tokens=True))} [...]{_indented(written)}")


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")


def _output_dir(args: TrainingArguments) -> Path:
    return Path(args.output_dir or "trainer_output")


def _say(args: TrainingArguments, text: str) -> None:
    if args.process_index == 0:
        print(text, flush=True)
