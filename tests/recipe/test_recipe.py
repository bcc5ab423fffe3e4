"""Recipes: what loads, what is refused and in which words, and the recipes that ship."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from hf_ckpt.cli.finetune import main
from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe import document, field_types
from hf_ckpt.recipe.recipe import load_recipe
from tests.small_recipes import can_be_loaded

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
LOADABLE = list(filter(can_be_loaded, SHIPPED))

MINIMAL = {"model": "{name_or_path: some/model}", "data": "{path: some/data}", "training": "{output_dir: runs/x}"}
# A name that exists in one of the two and is new or gone in the other.
CHECKPOINTING = "activation_checkpointing"
if CHECKPOINTING not in field_types.training_keys():
    CHECKPOINTING = "gradient_checkpointing"


def text_of(**sections: str) -> str:
    """A recipe, one section on each line: what is minimal, and what is given instead or besides."""
    return "".join(f"{name}: {value}\n" for name, value in {**MINIMAL, **sections}.items())


def model(keys: str) -> str:
    return text_of(model=f"{{name_or_path: some/model, {keys}}}")


def made(keys: str = "", tokenizer: str = "some/tokenizer", more: str = "") -> str:
    return text_of(model=f"{{config: {{model_type: llama, {keys}}}, tokenizer: {tokenizer}, {more}}}")


def data(keys: str) -> str:
    return text_of(data=f"{{path: some/data, {keys}}}")


def training(keys: str, more: str = "{path: some/data}") -> str:
    return text_of(training=f"{{output_dir: runs/x, {keys}}}", data=more)


def evaluated(keys: str) -> str:
    return training(keys, more="{path: some/data, eval_fraction: 0.1}")


def lora(keys: str) -> str:
    return text_of(lora=f"{{{keys}}}")


def adapter(keys: str) -> str:
    return text_of(adapter=f"{{{keys}}}")


def quantized(keys: str) -> str:
    return text_of(lora="{r: 8}", quantization=f"{{{keys}}}")


def checkpointed(keys: str) -> str:
    return text_of(checkpointing=f"{{{keys}}}")


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def mistakes_in(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).splitlines()


@dataclass(frozen=True)
class Broken:
    """A recipe with one mistake, and what its one line has to say."""

    text: str
    says: tuple[str, ...]

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", self.says[0]).strip("-")


def broken(text: str, *says: str) -> Broken:
    return Broken(text, says)


def _alias_bomb() -> str:
    """Ten levels of nine aliases each: three thousand million values in a few hundred bytes."""
    levels = (f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(10))
    return f"a: &a [{', '.join('x' * 9)}]\n" + "".join(levels)


BROKEN = [
    # What is no YAML, or no recipe.
    broken("", "a recipe is a mapping with the sections model, data and training"),
    broken("- model\n", "a recipe is a mapping with the sections model, data and training"),
    broken("just text\n", "a recipe is a mapping with the sections model, data and training"),
    broken(text_of(data="{path: [a"), ":3: not valid YAML"),
    broken(text_of(checkpointing="{policy: {mode: full, layers: -4:}}"), ":4: not valid YAML"),
    broken("model:\n  a: b: c\n", ":2: not valid YAML: mapping values are not allowed here", 'holds ":" in quotes'),
    broken("model:\n\tname_or_path: x\n", ":2: not valid YAML", "Indent with spaces"),
    broken(text_of() + "---\n" + text_of(), ":4: not valid YAML"),
    broken(training("seed: !!python/name:os.getcwd ''"), "training.seed: a recipe holds plain values only"),
    broken(training("run_name: !!timestamp 2024-01-01"), "plain values only", "!!timestamp"),
    broken(training("max_steps: !!int ten"), "training.max_steps: invalid literal"),
    broken(training("lr_scheduler_kwargs: &a {b: *a}"), "training.lr_scheduler_kwargs.b: refers to itself"),
    broken(training("[1]: 2"), "training: a key has to be a plain word"),
    broken(training("seed: 1, bf16: true, seed: 2"), ":3: training.seed: given twice, first at recipe.yaml:3"),
    broken(
        text_of() + "model: {name_or_path: other/model}\n", ":4: model: given twice, first at recipe.yaml:1. Keep one."
    ),
    broken(
        text_of(checkpointing="{policy: full, fallback: full}"), "checkpointing.fallback", "belongs to policy: auto"
    ),
    broken(text_of(checkpointing="{policy: auto, fallback: ful}"), "checkpointing.fallback", 'Did you mean "full"?'),
    broken(training("run_name: "), "training.run_name: has no value. Write null"),
    broken(training(r'run_name: "a\0"'), "training.run_name: holds a null character"),
    # What would take long to read, or for ever.
    broken(_alias_bomb(), "more than 5,000 keys and values, which no recipe has"),
    broken(text_of(**{f"k{n:x}": "1" for n in range(200_000)}), "it holds more than 1 MiB"),
    broken(text_of(lora="{" + ",".join(f"{n:x}" for n in range(150_000)) + "}"), ":4: more than 5,000 keys and values"),
    broken("model: " + "[" * 500_000, ":1: nested deeper than 64, which no recipe is"),
    broken("- " * 500_000, ":1: nested deeper than 64"),
    broken("".join(" " * depth + "a:\n" for depth in range(1000)), ":65: nested deeper than 64"),
    broken(text_of(lora='{? "' + "k" * 201 + '" : 1}'), ":4: lora: a key has to be a plain word"),
    broken("%FOO bar\n" * 100_000 + "--- x\n", ":1: not valid YAML: found unknown directive name"),
    broken('model: "' + " " * 500_000, ":1: not valid YAML"),
    broken("extends: " + "x" * 5_000 + "\n", ":1: extends = ", "no file has this name: File name too long"),
    broken(
        checkpointed("policy: full, prove: 0"), 'checkpointing.prove = 0: prove is 0. Use "first_step", "off", or a'
    ),
    broken(checkpointed("policy: full, prove: -3"), "checkpointing.prove = -3: prove is -3"),
    # Words that would steer a terminal.
    broken(text_of(**{r'"\e[31mx\u009b"': "1"}), r":4: \u001b[31mx\u009b = 1: unknown section"),
    broken(lora(r'"r\e]0;x\a": 8'), r"lora.r\u001b]0;x\u0007 = 8: unknown key of LoraConfig"),
    broken(training(r'"\u202ekey": 1'), r"training.\u202ekey = 1: unknown key of TrainingArguments"),
    # Sections.
    broken(text_of(dta="{}"), ":4: dta: unknown section", 'Did you mean "data"?'),
    broken(text_of(learning_rate="1e-4"), "learning_rate = 0.0001: unknown section", '"training.learning_rate"'),
    broken(text_of(extend="other.yaml"), "extend =", 'Did you mean "extends"?'),
    broken(text_of(model="null"), "model = null: the section is missing", "name_or_path"),
    broken(text_of(data="null"), "data = null: the section is missing"),
    broken(text_of(checkpointing="full"), 'checkpointing = "full": expected a mapping. Write checkpointing: {policy: '),
    broken(text_of(lora="true"), "lora = true: expected a mapping. Write lora: {r: 16"),
    broken(text_of(extends="[a.yaml, b.yaml]"), "extends =", "expected the path of one recipe"),
    broken(text_of(extends="nowhere.yaml"), "extends =", "there is no file"),
    # Keys of each section.
    broken(model("dtypo: float32"), 'model.dtypo = "float32": unknown key of the model section', '"dtype"'),
    broken(model("torch_dtype: float32"), "model.torch_dtype", 'Did you mean "dtype"?'),
    broken(model("load_in_4bit: true"), 'Did you mean "quantization.load_in_4bit"?'),
    broken(model("device_map: auto"), 'model.device_map = "auto": unknown key of the model section.'),
    broken(model("use_kernels: true"), "model.use_kernels = true: unknown key of the model section."),
    broken(lora("rank: 8"), "lora.rank = 8: unknown key of LoraConfig (peft", 'Did you mean "r"?'),
    broken(lora("lora_alfa: 8"), 'Did you mean "lora_alpha"?'),
    broken(quantized("load_in_4bits: true, load_in_8bit: true"), "BitsAndBytesConfig", '"load_in_4bit"'),
    broken(data("max_lenght: 5"), "data.max_lenght = 5: unknown key of the data section", '"max_length"'),
    broken(data("max_seq_length: 5"), 'Did you mean "max_length"?'),
    broken(data("columns: {promt: a}"), 'data.columns.promt = "a": unknown key', 'Did you mean "prompt"?'),
    broken(training("learnig_rate: 1"), "training.learnig_rate = 1: unknown key of TrainingArguments (transformers"),
    broken(training("evaluation_strategy: steps"), 'Did you mean "eval_strategy"?'),
    broken(training("max_length: 5"), "training.max_length = 5: unknown key", 'Did you mean "data.max_length"?'),
    broken(checkpointed("policy: full, every_n_layer: 2"), "unknown key of HFCkptCallback", '"every_n_layers"'),
    broken(made("hiden_size: 64"), "model.config.hiden_size = 64: unknown key of LlamaConfig", '"hidden_size"'),
    broken(
        made(tokenizer="{trian: {}}, dtype: float32").replace("{trian: {}}", "{train: {vocab_size: 300, x: 1}}"),
        "model.tokenizer.train.x = 1: unknown key of a tokenizer's training",
    ),
    # What is missing.
    broken(text_of(training="{seed: 1}"), ":3: training.output_dir: missing. Write training: {output_dir: runs/NAME}"),
    broken(text_of(data="{split: train}"), "data.path: missing"),
    broken(text_of(data="{path: null}"), "data.path = null: missing"),
    broken(checkpointed("every_n_layers: 2"), "checkpointing.policy: missing. Write checkpointing: {policy: full}"),
    broken(text_of(model="{dtype: float32}"), "model: has neither name_or_path (weights to load) nor config"),
    broken(text_of(model="{config: {hidden_size: 64}, tokenizer: x}"), "model.config.model_type: missing"),
    broken(text_of(model="{config: {model_type: llama}}"), "model.tokenizer: missing, and model.config brings none"),
    broken(made(tokenizer="{}"), "model.tokenizer.train: missing. Write a hub id"),
    broken(training("seed: 1").replace("runs/x", "''"), 'training.output_dir = "": is empty'),
    broken(text_of(data="{path: []}"), "data.path = []: is empty"),
    # Values of another type.
    broken(training("bf16: yes"), 'training.bf16 = "yes": expected true or false. Write true.'),
    broken(training("bf16: off"), 'training.bf16 = "off": expected true or false. Write false.'),
    broken(training("bf16: 1"), "training.bf16 = 1: expected true or false."),
    broken(training("learning_rate: fast"), 'training.learning_rate = "fast": expected a number.'),
    broken(training("learning_rate: '1e-4'"), 'training.learning_rate = "1e-4": expected a number. Write 0.0001.'),
    broken(training("learning_rate: .nan"), "training.learning_rate = NaN: expected a number."),
    broken(training("learning_rate: true"), "training.learning_rate = true: expected a number."),
    broken(training("max_steps: 1e3"), "training.max_steps = 1000.0: expected a whole number. Write 1000."),
    broken(training("max_steps: 1_000"), 'training.max_steps = "1_000": expected a whole number. Write 1000.'),
    broken(training("max_steps: null"), "training.max_steps = null: expected a whole number."),
    broken(training("run_name: 2024"), "training.run_name = 2024: expected text or null. Write it in quotes, as text."),
    broken(training("run_name: None"), 'training.run_name = "None": expected text or null. Write null.'),
    broken(training("label_names: labels"), 'expected a list of texts or null. Write ["labels"].'),
    broken(training("lr_scheduler_type: cosin"), 'training.lr_scheduler_type = "cosin"', 'Did you mean "cosine"?'),
    broken(training("optim: adamw_hf_torch"), 'training.optim = "adamw_hf_torch": expected one of "adamw_torch"'),
    broken(training("save_strategy: epochs"), 'expected one of "no", "steps", "epoch", "best". Did you mean "epoch"?'),
    broken(
        training("parallelism_config: {tp_size: 2}"),
        "parallelism_config: a recipe's model is loaded whole in each process, or shared by FSDP or DeepSpeed",
    ),
    broken(training("log_level: loud"), 'training.log_level = "loud": expected one of "detail", "debug"'),
    broken(model("dtype: bf16"), 'model.dtype = "bf16": expected one of "auto"', 'Did you mean "bfloat16"?'),
    broken(model("revision: 123456"), "model.revision = 123456: expected text or null. Write it in quotes, as text."),
    broken(lora("r: eight"), 'lora.r = "eight": expected a whole number.'),
    broken(lora("bias: lora"), 'lora.bias = "lora": expected one of "none", "all", "lora_only".'),
    broken(lora("init_lora_weights: pisa"), 'Did you mean "pissa"?'),
    broken(text_of(adapter="ia3"), 'adapter = "ia3": expected a mapping. Write adapter: {type: ia3}'),
    broken(adapter("r: 8"), "adapter.type: missing. Write adapter: {type: ia3}"),
    broken(adapter("type: [ia3]"), 'adapter.type = ["ia3"]: peft', "has no such adapter."),
    broken(adapter("type: IA3, r: 8"), 'adapter.type = "IA3": peft', 'has no such adapter. Did you mean "ia3"? It has'),
    broken(adapter("type: promt_tuning"), 'Did you mean "prompt_tuning"?', "ln_tuning, loha, lokr, lora, "),
    broken(adapter("type: ia3, r: 8"), "adapter.r = 8: unknown key of IA3Config (peft", 'Did you mean "lora.r"?'),
    broken(adapter("type: oft, block_size: 8"), "unknown key of OFTConfig", 'Did you mean "oft_block_size"?'),
    broken(adapter("type: vera, r: four"), 'adapter.r = "four": expected a whole number.'),
    broken(
        adapter("type: prompt_tuning, num_virtual_tokens: 4, prompt_tuning_init: WORDS"),
        'adapter.prompt_tuning_init = "WORDS": expected one of "TEXT", "SAMPLE_VOCAB", "RANDOM".',
    ),
    broken(lora("modules_to_save: lm_head"), 'Write ["lm_head"].'),
    broken(quantized("load_in_4bit: true, bnb_4bit_quant_type: nf8"), 'one of "fp4", "nf4". Did you mean "nf4"?'),
    broken(quantized("load_in_4bit: true, bnb_4bit_compute_dtype: half"), 'one of "float32", "bfloat16", "float16"'),
    broken(
        quantized("load_in_4bit: true, prepare_model_for_kbit_training: yes"),
        'quantization.prepare_model_for_kbit_training = "yes": expected true or false. Write true.',
    ),
    broken(quantized("prepare_model_for_kbit_training: true"), "quantization: quantises nothing"),
    broken(data("format: text_only"), 'data.format = "text_only": expected one of "text", "prompt_completion"'),
    broken(data("loss_on: completions"), 'Did you mean "completion"?'),
    broken(data("packing: sometimes"), 'data.packing = "sometimes": expected true or false.'),
    broken(data("columns: {prompt: 1}"), "data.columns.prompt = 1: expected text. Write it in quotes, as text."),
    broken(
        made("model_type: lama").replace("model_type: llama, ", ""),
        'model.config.model_type = "lama": transformers has no causal language model of this type',
        '"llama"',
    ),
    broken(checkpointed("policy: full, on_mismatch: ignore"), 'expected one of "error", "warn"'),
    broken(checkpointed("policy: full, strict_resume: always"), "checkpointing.strict_resume"),
    # Values out of bounds.
    broken(lora("r: 0"), "lora.r = 0: expected a number of at least 1."),
    broken(adapter("type: lora, r: 0"), "adapter.r = 0: expected a number of at least 1."),
    broken(adapter("type: p_tuning, num_virtual_tokens: 0"), "adapter.num_virtual_tokens = 0: expected a number of at"),
    broken(lora("lora_dropout: 1.0"), "lora.lora_dropout = 1.0: expected a number of at least 0 and below 1."),
    broken(data("max_length: 0"), "data.max_length = 0: expected a number of at least 2."),
    broken(data("eval_fraction: 1.5"), "data.eval_fraction = 1.5: expected a number above 0 and below 1."),
    broken(data("max_examples: -5"), "data.max_examples = -5: expected a number of at least 1."),
    broken(training("learning_rate: -1e-4"), "training.learning_rate = -0.0001: expected a number of at least 0."),
    broken(training("gradient_accumulation_steps: 0"), "training.gradient_accumulation_steps = 0"),
    broken(training("per_device_train_batch_size: 0"), "training.per_device_train_batch_size = 0"),
    broken(training("num_train_epochs: 0"), "training.num_train_epochs = 0: expected a number above 0."),
    broken(training("max_steps: 0"), "training.max_steps = 0: expected a whole number of at least 1, or -1"),
    broken(training("save_steps: 1.5"), "training.save_steps = 1.5: expected a whole number of steps, or a share"),
    broken(training("logging_steps: 0"), "training.logging_steps = 0: expected a number above 0."),
    broken(made("num_hidden_layers: 0"), "model.config.num_hidden_layers = 0: expected a number of at least 1."),
    broken(made(tokenizer="{train: {vocab_size: 100}}"), "model.tokenizer.train.vocab_size = 100", "at least 259"),
    # Contradictions.
    broken(model("config: {model_type: llama}"), "model.config: given with model.name_or_path"),
    broken(model("tokenizer: {train: {vocab_size: 512}}"), "would not fit the weights of model.name_or_path"),
    broken(made(more="revision: main"), 'model.revision = "main": belongs to model.name_or_path'),
    broken(made(more="dtype: auto"), 'model.dtype = "auto": is the dtype of saved weights', "Write float32."),
    broken(
        made("vocab_size: 300", tokenizer="{train: {vocab_size: 400}}"), "is more than model.config.vocab_size = 300"
    ),
    broken(made("hidden_size: 100, num_attention_heads: 3"), "is not a multiple of num_attention_heads = 3"),
    broken(
        text_of(
            model="{config: {model_type: llama, max_position_embeddings: 64}, tokenizer: x}",
            data="{path: x, max_length: 128}",
        ),
        "data.max_length = 128: is more than model.config",
    ),
    broken(made() + "lora: {r: 8}\nquantization: {load_in_4bit: true}\n", "weights are quantised as they are loaded"),
    broken(lora("inference_mode: true"), "the adapter would be frozen, and nothing trained"),
    broken(lora("task_type: SEQ_CLS"), 'lora.task_type = "SEQ_CLS": recipes train causal language models'),
    broken(lora("peft_type: IA3"), 'lora.peft_type = "IA3": the lora section is a LoraConfig'),
    broken(
        text_of(lora="{r: 8}", adapter="{type: ia3}"),
        "adapter: given with a lora section, which is short for adapter: {type: lora}. Set one of them to null.",
    ),
    broken(adapter("type: ia3, peft_type: VERA"), 'adapter.peft_type = "VERA": adapter.type is "ia3". Leave it out.'),
    broken(adapter("type: vera, task_type: SEQ_CLS"), 'adapter.task_type = "SEQ_CLS": recipes train causal language'),
    broken(adapter("type: vera, target_modules: [all-linear]"), "adapter.target_modules", "(not in a list)"),
    broken(adapter("type: adalora"), "adapter.type", "moves its ranks in update_and_allocate, which the Trainer does"),
    broken(adapter("type: poly"), "adapter.type", "needs task_ids in each batch"),
    broken(adapter("type: prompt_tuning"), "adapter.num_virtual_tokens: missing. Write how many tokens to train"),
    broken(
        text_of(adapter="{type: p_tuning, num_virtual_tokens: 4}", data="{path: x, packing: true}"),
        "data.packing = true: with p_tuning PEFT drops the positions that keep documents apart.",
    ),
    broken(
        text_of(adapter="{type: prefix_tuning, num_virtual_tokens: 4}", checkpointing="{policy: full}"),
        'checkpointing.policy = "full": recomputed layers can neither read nor fill the key/value cache of',
    ),
    broken(
        text_of(
            adapter="{type: prefix_tuning, num_virtual_tokens: 4}",
            training="{output_dir: x, gradient_checkpointing: true}",
        ),
        "training.gradient_checkpointing = true: recomputed layers can neither read nor fill",
    ),
    broken(lora("target_modules: all_linear"), 'Did you mean "all-linear"?'),
    broken(lora("target_modules: [all-linear]"), "or all-linear by itself (not in a list)"),
    broken(lora("target_modules: []"), "lora.target_modules = []: expected names of modules"),
    broken(lora("target_modules: 'q_proj, v_proj'"), 'Write ["q_proj", "v_proj"].'),
    broken(quantized("load_in_4bit: true, load_in_8bit: true"), "load_in_4bit is true as well. Keep one."),
    broken(quantized("bnb_4bit_quant_type: nf4"), "quantization: quantises nothing"),
    broken(
        text_of(quantization="{load_in_4bit: true}"), "quantised weights cannot be trained by themselves. Add a lora"
    ),
    broken(data("format: text, loss_on: completion"), "plain text has no completion"),
    broken(data("format: messages, loss_on: completion"), "messages have turns; use assistant"),
    broken(data("eval_fraction: 0.1, eval_split: test"), "data.eval_fraction = 0.1: given with data.eval_split"),
    broken(training("eval_strategy: steps"), "there is nothing to evaluate on. Add data.eval_fraction"),
    broken(training("do_eval: true"), "training.do_eval = true: there is nothing to evaluate on"),
    broken(training("bf16: true, fp16: true"), "training.fp16 = true: training.bf16 is true as well. Keep one."),
    broken(
        text_of(model="{name_or_path: x, dtype: float16}", training="{output_dir: x, fp16: true}"),
        "training.fp16 = true: needs float32 weights to scale gradients",
    ),
    broken(training("load_best_model_at_end: true"), "needs training.eval_strategy: steps or epoch"),
    broken(training("save_strategy: best"), 'training.save_strategy = "best": needs training.eval_strategy'),
    broken(training("lr_scheduler_type: reduce_lr_on_plateau"), "needs training.eval_strategy"),
    broken(
        evaluated("load_best_model_at_end: true, eval_strategy: epoch"),
        'needs equal strategies, but eval_strategy is "epoch" and save_strategy "steps"',
    ),
    broken(
        evaluated("load_best_model_at_end: true, eval_strategy: steps, eval_steps: 30, save_steps: 50"),
        "needs save_steps = 50 to be a multiple of eval_steps = 30",
    ),
    broken(training("dataloader_prefetch_factor: 2"), "needs training.dataloader_num_workers of at least 1"),
    broken(
        text_of(checkpointing="{policy: full}", training=f"{{output_dir: x, {CHECKPOINTING}: true}}"),
        f"training.{CHECKPOINTING} = true: given with a checkpointing section, which governs",
    ),
    broken(
        text_of(
            checkpointing="{policy: full}",
            training=f"{{output_dir: x, {CHECKPOINTING}_kwargs: {{use_reentrant: false}}}}",
        ),
        f"training.{CHECKPOINTING}_kwargs: has no effect beside a checkpointing section",
    ),
    broken(
        training("fsdp: true, deepspeed: zero3.json"),
        'training.deepspeed = "zero3.json": training.fsdp is given as well, and both shard the model. Keep one.',
    ),
    broken(
        training("fsdp_config: {version: 2}"), "training.fsdp_config: has no effect without training.fsdp=true. Add"
    ),
    broken(
        text_of(
            checkpointing="{policy: full}",
            training="{output_dir: x, fsdp: true, fsdp_config: {activation_checkpointing: true}}",
        ),
        "training.fsdp_config.activation_checkpointing = true: given with a checkpointing section, which governs.",
    ),
    # Policies.
    broken(checkpointed("policy: ful"), 'checkpointing.policy = "ful": Unknown mode "ful"', 'Did you mean "full"?'),
    broken(checkpointed("policy: 5"), "checkpointing.policy = 5: expected text or a mapping or a list of mappings."),
    broken(checkpointed("policy: []"), "checkpointing.policy = []:"),
    broken(checkpointed("policy: {layers: '0:4'}"), "checkpointing.policy:", "has no mode"),
    broken(checkpointed("policy: {mode: full, layer: '0:4'}"), "checkpointing.policy:", 'Did you mean "layers"?'),
    broken(checkpointed("policy: {mode: full, layers: first}"), 'layers is "first"', "Python slice"),
    broken(checkpointed("policy: [{mode: full, layers: '::0'}]"), "a step of 0 reaches nothing"),
    broken(checkpointed("policy: full, every_n_layers: 0"), "every_n_layers is 0"),
    broken(checkpointed("policy: full, segment_size: 0"), "segment_size is 0"),
    broken(checkpointed("policy: full, segment_size: squrt"), "checkpointing.segment_size", '"sqrt"'),
    broken(checkpointed("policy: attention, segment_size: 4"), "Only whole layers can share a saved input"),
    broken(checkpointed("policy: full, nested: true"), "Add segment_size: sqrt."),
    broken(checkpointed("policy: full, every_n_layers: 2, segment_size: 2"), "use one of them"),
    broken(checkpointed("policy: {mode: full}, every_n_layers: 2"), "Write it inside the rule."),
    # What is added to a policy.
    broken(checkpointed("policy: full, tiles: 0"), "checkpointing.tiles = 0: tiles is 0", '"auto"'),
    broken(checkpointed("policy: full, tiles: 1.5"), "checkpointing.tiles = 1.5: expected a whole number"),
    broken(checkpointed("policy: full, offload: gpu"), "checkpointing.offload", 'Use "cpu" (host memory) or "disk".'),
    broken(checkpointed("policy: full, offload: disk"), "checkpointing.offload", "has no path. Name a directory"),
    broken(checkpointed("policy: full, offload: {too: cpu}"), 'Unknown key "too"', 'Did you mean "to"?'),
    broken(checkpointed("policy: full, offload: {to: cpu, host_memory: 0.5}"), "Write an amount"),
    broken(checkpointed("policy: full, offload: {to: cpu, fraction: 2}"), "Use a number above 0 and at most 1."),
    broken(checkpointed("policy: none, offload: cpu"), 'has offload with mode "none"'),
    broken(checkpointed("policy: full, segment_size: 2, tiles: 2"), "has both segment_size and tiles"),
    broken(checkpointed("policy: selective, tiles: 2"), 'has tiles with mode "selective"'),
    broken(checkpointed("policy: full, save: [aten.mm]"), 'Only mode "selective" chooses what is kept'),
    broken(checkpointed("policy: selective, save: []"), "checkpointing.save", "Use a list of operators"),
    broken(checkpointed("policy: full, head: chunk"), 'checkpointing.head = "chunk"', 'Did you mean "chunked"?'),
    broken(checkpointed("policy: [{mode: full}], offload: cpu"), "Write it inside the rule."),
    # Beside policy auto they say what it may choose among.
    broken(checkpointed("policy: auto, save: [aten.mm]"), "checkpointing.save", "which chooses for each layer"),
    broken(checkpointed("policy: auto, tiles: 8"), "checkpointing.tiles = 8", '"auto" to allow tiles'),
    broken(checkpointed("policy: auto, offload: {to: cpu, fraction: 0.5}"), "Leave fraction out."),
]


def of_trainer(name: str, keys: str = "output_dir: x", more: str = "path: x", **sections: str) -> str:
    return text_of(trainer=name, training=f"{{{keys}}}", data=f"{{{more}}}", **sections)


# What is known without trl.
BROKEN += [
    broken(of_trainer("ppo"), 'trainer = "ppo": expected one of sft, dpo, kto, reward, grpo, classification.'),
    broken(of_trainer("Reward"), 'trainer = "Reward": expected one of', 'Did you mean "reward"?'),
    broken(of_trainer("{type: dpo}"), ":4: trainer: expected one of sft, dpo"),
    broken(of_trainer("rloo", "output_dir: x, num_generations: 2"), 'trainer = "rloo": generates in each step and'),
    broken(text_of(reward_funcs="[a.b]"), 'reward_funcs = ["a.b"]: belongs to trainer: grpo.'),
    broken(data("format: images"), 'data.format = "images": images are read by trl\'s SFTTrainer. Write trainer: sft.'),
    broken(text_of(trainr="dpo"), 'trainr = "dpo": unknown section', 'Did you mean "trainer"?'),
    broken(of_trainer("classification"), "model.num_labels: missing. Write how many classes there are"),
    broken(model("num_labels: 2"), "model.num_labels = 2: belongs to trainer: classification."),
    broken(
        of_trainer("classification", more="path: x, loss_on: all", model="{name_or_path: x, num_labels: 2}"),
        'data.loss_on = "all": belongs to plain text, and trainer classification reads the columns text, label.',
    ),
    broken(
        of_trainer("classification", model="{name_or_path: x, num_labels: 2}", lora="{task_type: CAUSAL_LM}"),
        'lora.task_type = "CAUSAL_LM": trainer classification trains models that score rows. Write SEQ_CLS',
    ),
    broken(
        of_trainer("classification", model="{config: {model_type: whisper}, tokenizer: x, num_labels: 2}"),
        "transformers has no sequence classification model of this type.",
    ),
    broken(
        of_trainer(
            "classification",
            model="{name_or_path: x, num_labels: 2}",
            checkpointing="{policy: auto, micro_batch: auto}",
        ),
        'checkpointing.micro_batch = "auto": is chosen for plain text, not for trainer classification.',
    ),
]

OF_TRL = [
    broken(
        of_trainer("sft", more="path: x, format: images", model="{config: {model_type: llama}, tokenizer: x}"),
        "model.config: images are read by the processor of trained weights. Write model.name_or_path.",
    ),
    broken(of_trainer("dpo", more="path: x, format: images"), 'data.format = "images": belongs to plain text'),
    broken(of_trainer("sft", "output_dir: x, beta: 0.2"), "training.beta = 0.2: unknown key of SFTConfig (trl", "dpo"),
    broken(
        training("beta: 0.2"),
        "unknown key of TrainingArguments (transformers",
        "It belongs to trainer: dpo, kto or grpo.",
    ),
    broken(of_trainer("dpo", "output_dir: x, bta: 0.2"), "unknown key of DPOConfig (trl", 'Did you mean "beta"?'),
    broken(of_trainer("dpo", "output_dir: x, beta: high"), 'training.beta = "high": expected a number.'),
    broken(of_trainer("dpo", "output_dir: x, loss_type: sigmiod"), 'one of "sigmoid", "hinge"', 'you mean "sigmoid"?'),
    broken(of_trainer("dpo", "output_dir: x, loss_type: [ipo, hing]"), "or a list of one of"),
    broken(of_trainer("dpo", "output_dir: x, f_divergence_type: kl"), 'one of "reverse_kl", "forward_kl"'),
    broken(of_trainer("kto", "output_dir: x, loss_type: kot"), 'one of "kto", ', 'Did you mean "kto"?'),
    broken(of_trainer("dpo", "output_dir: x, max_length: 9"), "training.max_length = 9: a recipe says this in data."),
    broken(of_trainer("grpo"), "reward_funcs: expected a list of names. Write reward_funcs: [think_format_reward]"),
    broken(of_trainer("grpo", reward_funcs="[1]"), "reward_funcs = [1]: expected a list of names."),
    broken(
        of_trainer("grpo", "output_dir: x, max_completion_length: 1024", reward_funcs="[a.b]"),
        "data.max_length: is of a prompt with its completion, and training.max_completion_length = 1024 leaves none",
    ),
    broken(
        of_trainer("grpo", "output_dir: x, max_completion_length: null", reward_funcs="[a.b]"),
        "training.max_completion_length = null: expected tokens",
    ),
    broken(of_trainer("grpo", "output_dir: x, beta: 0.1", reward_funcs="[a.b]"), "training.beta = 0.1: without an"),
    broken(of_trainer("reward", more="path: x, packing: true"), "data.packing = true: belongs to plain text"),
    broken(of_trainer("dpo", more="path: x, columns: {promt: x}"), "data.columns.promt", 'Did you mean "prompt"?'),
    broken(
        of_trainer("dpo", "output_dir: x, sync_ref_model: true", lora="{r: 4}"),
        "training.sync_ref_model = true: with an adapter the reference is the model without it.",
    ),
]
if field_types.trl_version() is not None:
    BROKEN += OF_TRL


@pytest.mark.parametrize(
    ("version", "says"), [(None, "which is not installed"), ((1, 9), "which is installed in version ")]
)
def test_missing_trl_is_one_message(
    version: tuple[int, ...] | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is not None and field_types.trl_version() is None:
        pytest.skip("trl is not installed")
    monkeypatch.setattr(field_types, "trl_version", lambda: version)
    (line,) = mistakes_in(write(tmp_path, of_trainer("dpo", "output_dir: x, beta: 0.2, lr: 3")))
    assert f'trainer = "dpo": is a trainer of trl, {says}' in line
    assert line.endswith('Run: pip install "hf_ckpt[trl]"')


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "Reward"])
def test_keys_of_a_trainer_are_the_fields_of_its_arguments(name: str) -> None:
    trl = pytest.importorskip("trl", minversion="1.16")
    config = getattr(trl, f"{name}Config")
    assert set(field_types.trl_keys(name)) == {field.name for field in dataclasses.fields(config) if field.init}


def test_losses_of_dpo_are_those_that_trl_computes() -> None:
    trl = pytest.importorskip("trl", minversion="1.16")
    computed = re.findall(r'loss_type == "(\w+)"', inspect.getsource(sys.modules[trl.DPOTrainer.__module__]))
    assert len(computed) > 10
    assert set(computed) == set(field_types.trl_keys("DPO")["loss_type"].type.words())


@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="libyaml is not installed")
@pytest.mark.parametrize("text", ["# a comment\n", "\n", "%FOO bar\n", "x\n"])
def test_long_text_is_read_by_libyaml_alone(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "_Reader", None)
    path = write(tmp_path, text * 200_000)
    assert len(mistakes_in(path)) == 1


@pytest.mark.parametrize("name", ["x" * 5_000, "null\0.yaml"])
def test_name_that_no_file_can_have_is_one_message(name: str) -> None:
    (line,) = mistakes_in(Path(name))
    assert "no file can be read by this name: " in line
    assert len(line) < 400


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_mistake_is_one_line_that_says_what_to_do(
    case: Broken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, case.text)
    assert main([path.name]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("recipe.yaml:")
    assert [fragment for fragment in case.says if fragment not in said.err] == []
    assert list(tmp_path.iterdir()) == [path]


# Through the script itself: one of each kind.
KINDS = {
    "3-not-valid-YAML",
    "training-bf16-yes-expected-true-or-false-Write-true",
    "lora-r-0-expected-a-number-of-at-least-1",
}
KINDS |= {"checkpointing-policy-ful-Unknown-mode-ful"}
STARTED = [case for case in BROKEN if str(case) in KINDS]


@pytest.mark.parametrize("case", STARTED, ids=str)
def test_script_ends_with_code_2_and_writes_nothing(case: Broken, tmp_path: Path) -> None:
    path = write(tmp_path, case.text)
    command = [sys.executable, str(ROOT / "scripts" / "finetune.py"), path.name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert [fragment for fragment in case.says if fragment not in done.stderr] == []
    assert list(tmp_path.iterdir()) == [path]


def test_one_of_each_kind_is_started() -> None:
    assert {str(case) for case in STARTED} == KINDS


# --- Several mistakes, and where they are. ---


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    write(tmp_path, "lora: {r: 0}\ntraining:\n  bf16: yes\n  max_step: 5\n", "base.yaml")
    path = write(tmp_path, text_of(extends="base.yaml", checkpointing="{policy: ful}", data="{path: x, max_length: 0}"))
    lines = mistakes_in(path, "training.optim=adam", "seed=1", "training.seed=1=2")
    assert {line.split(": ")[0] for line in lines} == {
        f"{tmp_path / 'base.yaml'}:1",
        f"{tmp_path / 'base.yaml'}:3",
        f"{tmp_path / 'base.yaml'}:4",
        f"{path}:2",
        f"{path}:5",
        'override "training.optim=adam"',
        'override "seed=1"',
        'override "training.seed=1=2"',
    }
    assert len(lines) == 8


def test_unreadable_file_hides_no_other_mistake(tmp_path: Path) -> None:
    lines = mistakes_in(write(tmp_path, "extends: nowhere.yaml\ntraining: {bf16: yes, seeds: 1}\n"))
    assert [line.split(": ")[1].split(" =")[0] for line in lines] == ["extends", "training.bf16", "training.seeds"]


def test_value_without_content_is_not_called_missing_too(tmp_path: Path) -> None:
    path = write(tmp_path, "model:\ndata: {path: }\ntraining: {output_dir: x}\nlora:\n")
    assert mistakes_in(path) == [
        f"{path}:1: model: has no value. Write null if there is to be none.",
        f"{path}:2: data.path: has no value. Write null if there is to be none.",
        f"{path}:4: lora: has no value. Write null if there is to be none.",
    ]


def test_missing_file_names_the_nearest_recipe(tmp_path: Path) -> None:
    write(tmp_path, text_of(), "llama.yaml")
    path = tmp_path / "lama.yaml"
    assert mistakes_in(path) == [f'{path}: there is no file {path}. Did you mean "llama.yaml"?']


def test_folder_is_no_recipe(tmp_path: Path) -> None:
    (line,) = mistakes_in(tmp_path)
    assert line.startswith(f"{tmp_path}: a recipe is a YAML file in UTF-8, and this cannot be read:")


def test_text_has_to_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes("model: {name_or_path: caf\u00e9}".encode("latin-1"))
    (line,) = mistakes_in(path)
    assert "UTF-8" in line


# --- Values. ---


@pytest.mark.parametrize(
    ("written", "value"),
    [
        # As YAML 1.2 has it, and not as YAML 1.1.
        ("no", "no"),
        ("off", "off"),
        ("y", "y"),
        ("8:24", "8:24"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0x1F", "0x1F"),
        ("1e-4", 1e-4),
        ("2E5", 2e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("010", 10),
        ("-3", -3),
        ("true", True),
        ("False", False),
        ("~", None),
        ("'1e-4'", "1e-4"),
        ("!!str 5", "5"),
        ("[1, [a, {b: null}]]", [1, ["a", {"b": None}]]),
    ],
)
def test_yaml_value_is_read_as(written: str, value: object, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, training(f"lr_scheduler_kwargs: {{x: {written}}}")))
    read = recipe.training["lr_scheduler_kwargs"]["x"]
    assert (type(read), read) == (type(value), value)


def test_word_no_turns_a_strategy_off(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, training("save_strategy: no"))).training["save_strategy"] == "no"


def test_anchors_repeat_values(tmp_path: Path) -> None:
    text = text_of(checkpointing='{policy: [&rule {mode: full, layers: "0:2"}, *rule]}')
    first, second = load_recipe(write(tmp_path, text)).checkpointing["policy"]
    assert first == second == {"mode": "full", "layers": "0:2"}


def test_infinite_clipping_is_allowed(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, training("max_grad_norm: .inf"))).training["max_grad_norm"] == float("inf")


def test_checkpointing_of_transformers_is_allowed_without_ours(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, training(f"{CHECKPOINTING}: true")))
    assert (recipe.training[CHECKPOINTING], recipe.checkpointing) == (True, None)


def test_name_of_the_other_version_is_suggested(tmp_path: Path) -> None:
    other = {"activation_checkpointing", "gradient_checkpointing"} - set(field_types.training_keys())
    for name in other:
        (line,) = mistakes_in(write(tmp_path, training(f"{name}: true")))
        assert f'Did you mean "{CHECKPOINTING}"?' in line


# --- What comes out. ---


def test_recipe_holds_plain_values(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, text_of(lora="{r: 4, rank_pattern: {q_proj: 2}}")))
    assert recipe.model == {"name_or_path": "some/model"}
    assert (recipe.lora, recipe.quantization, recipe.checkpointing) == (
        {"r": 4, "rank_pattern": {"q_proj": 2}},
        None,
        None,
    )
    assert type(recipe.lora["rank_pattern"]) is dict
    assert recipe.path == tmp_path / "recipe.yaml"


def test_recipe_cannot_be_changed(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, text_of()))
    with pytest.raises(TypeError, match="item assignment"):
        recipe.training["seed"] = 1  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.lora = {}  # type: ignore[misc]


def test_null_takes_an_own_key_away(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, data("eval_split: null, columns: {text: body, prompt: null}")))
    assert recipe.data == {"path": "some/data", "columns": {"text": "body"}}


TRICKY = [
    "no",
    "1e-4",
    "8:24",
    "null",
    "~",
    "",
    "2024-01-01",
    "1_000",
    "0x1F",
    "=",
    "<<",
    "true",
    " a ",
    "a: b",
    "#c",
    "\n\t{{ x }}",
]


@pytest.mark.parametrize("value", [*TRICKY, 1e-4, 1e22, 3, True, None, float("inf"), [1, "no"], {"a": {"b": "off"}}])
def test_printed_recipe_loads_as_the_same(value: object, tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, training(f"lr_scheduler_kwargs: {{x: {json.dumps(value)}}}".replace("Infinity", ".inf")))
    )
    again = load_recipe(write(tmp_path, recipe.to_yaml(), "again.yaml"))
    assert dataclasses.replace(again, path=recipe.path) == recipe
    assert again.training["lr_scheduler_kwargs"] == {"x": value}


def test_print_shows_what_load_recipe_resolves(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "recipes" / "llama7b_qlora_24gb.yaml"
    assert main([str(path), "training.learning_rate=1e-5", "--print"]) == 0
    printed = capsys.readouterr().out
    assert printed == load_recipe(path, ["training.learning_rate=1e-5"]).to_yaml()
    assert "learning_rate: 1.0e-05\n" in printed
    assert "extends" not in printed


# --- Overrides. ---


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.learning_rate=1e-4", "training.learning_rate", 1e-4),
        ("training.run_name='7'", "training.run_name", "7"),
        ("training.run_name=a=b", "training.run_name", "a=b"),
        ("lora.r=4", "lora", {"r": 4}),
        ("lora={r: 4, lora_alpha: 8}", "lora", {"r": 4, "lora_alpha": 8}),
        ("checkpointing.policy=[{mode: ffn}]", "checkpointing.policy", [{"mode": "ffn"}]),
        ("checkpointing=null", "checkpointing", None),
        ("checkpointing.policy.mode=ffn", "checkpointing.policy", {"mode": "ffn"}),
        ("data.columns.text=body", "data.columns", {"text": "body"}),
    ],
)
def test_override_sets(override: str, path: str, value: object, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, checkpointed("policy: full")), [override])
    section, _, key = path.partition(".")
    assert (getattr(recipe, section)[key] if key else getattr(recipe, section)) == value


def test_another_policy_takes_along_what_was_said_for_auto(tmp_path: Path) -> None:
    base = write(tmp_path, checkpointed("policy: auto, exact: true, memory_budget: 1GiB, offload: cpu"))
    assert load_recipe(base, ["checkpointing.policy=full"]).checkpointing == {"policy": "full", "offload": "cpu"}
    over = write(tmp_path, f"extends: {base.name}\ncheckpointing: {{policy: selective}}\n", "over.yaml")
    assert load_recipe(over).checkpointing == {"policy": "selective", "offload": "cpu"}
    assert load_recipe(base, ["checkpointing.policy=auto"]).checkpointing == load_recipe(base).checkpointing
    own = ["checkpointing.policy=full", "checkpointing.exact=true"]
    for overrides in (own, own[::-1]):
        with pytest.raises(RecipeError, match="belongs to policy: auto"):
            load_recipe(base, overrides)


def test_last_override_wins(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, text_of()), ["training.seed=1", "training.seed=2"])
    assert recipe.training["seed"] == 2


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.seed", "expected key.path=value, such as training.learning_rate=1e-4."),
        ("=3", "expected key.path=value"),
        ("training..seed=3", "expected key.path=value"),
        ("training.seed=", "training.seed: has no value. Write null if there is to be none."),
        ("training.seed=[1", "not valid YAML: expected ',' or ']'"),
        ("training.sed=1", "training.sed = 1: unknown key of TrainingArguments"),
        ("training={seed: 1, seed: 2}", "training.seed: given twice"),
        ("checkpointing.policy.0.mode=ffn", "checkpointing.policy is a list. Give the whole list, in YAML."),
        ("extends=other.yaml", 'extends = "other.yaml": unknown section'),
    ],
)
def test_override_is_refused(override: str, says: str, tmp_path: Path) -> None:
    (line,) = mistakes_in(write(tmp_path, checkpointed("policy: [{mode: full}]")), override)
    assert line.startswith(f'override "{override}": ')
    assert says in line


# --- extends. ---


def test_extending_recipe_is_laid_on_its_base(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    write(
        tmp_path,
        text_of(lora="{r: 4, target_modules: [a, b]}", quantization="{load_in_4bit: true}"),
        "bases/first.yaml",
    )
    write(tmp_path, "extends: first.yaml\ntraining: {seed: 1, bf16: true}\n", "bases/second.yaml")
    text = "extends: bases/second.yaml\nlora: {target_modules: [c]}\nquantization: null\ntraining: {seed: 2}\n"
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.lora == {"r": 4, "target_modules": ["c"]}
    assert recipe.quantization is None
    assert recipe.training == {"output_dir": "runs/x", "seed": 2, "bf16": True}


def test_weights_to_load_give_way_to_weights_to_make(tmp_path: Path) -> None:
    write(tmp_path, text_of(), "base.yaml")
    text = "extends: base.yaml\nmodel: {name_or_path: null, config: {model_type: llama}, tokenizer: x}\n"
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.model == {"config": {"model_type": "llama"}, "tokenizer": "x"}


def test_recipes_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "extends: second.yaml\n", "first.yaml")
    write(tmp_path, "extends: first.yaml\n", "second.yaml")
    (line,) = mistakes_in(tmp_path / "first.yaml")
    circle = "first.yaml -> second.yaml -> first.yaml"
    assert line == f'{tmp_path / "second.yaml"}:1: extends = "first.yaml": a circle, {circle}. Break it.'


# --- base_recipe. ---


def test_base_recipe_is_found_beside_the_recipe(tmp_path: Path) -> None:
    write(tmp_path, text_of(), "base.yaml")
    (tmp_path / "more").mkdir()
    recipe = load_recipe(write(tmp_path, model("base_recipe: ../base.yaml"), "more/recipe.yaml"))
    assert recipe.model["base_recipe"] == str(tmp_path / "base.yaml")


def test_mistakes_of_the_base_recipe_are_reported_too(tmp_path: Path) -> None:
    base = write(tmp_path, training("seeds: 1"), "base.yaml")
    path = write(tmp_path, text_of(model="{name_or_path: x, base_recipe: base.yaml, dtyp: x}"))
    own, of_base = mistakes_in(path)
    assert own.startswith(f"{path}:1: model.dtyp")
    assert of_base.startswith(f"{base}:3: training.seeds")


def test_missing_base_recipe_is_refused(tmp_path: Path) -> None:
    write(tmp_path, text_of(), "base.yaml")
    path = write(tmp_path, model("base_recipe: bas.yaml"))
    missing = tmp_path / "bas.yaml"
    assert mistakes_in(path) == [
        f'{path}:1: model.base_recipe = "bas.yaml": there is no file {missing}. Did you mean "base.yaml"?'
    ]


def test_recipes_that_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, model("base_recipe: recipe.yaml"))
    assert mistakes_in(path) == [
        f'{path}:1: model.base_recipe = "recipe.yaml": recipes wait for each other\'s weights. Break the circle.'
    ]


# --- Keys, as the installed libraries have them. ---


def test_keys_of_training_are_the_fields_of_training_arguments() -> None:
    from transformers import TrainingArguments

    assert set(field_types.training_keys()) == {
        field.name for field in dataclasses.fields(TrainingArguments) if field.init
    }


def test_keys_of_lora_are_the_fields_of_lora_config() -> None:
    from peft import LoraConfig

    assert set(field_types.adapter_keys("lora")) == {
        field.name for field in dataclasses.fields(LoraConfig) if field.init
    }


def test_keys_of_each_adapter_are_the_fields_of_its_config() -> None:
    from peft import PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    expected = {
        kind.value.lower(): {field.name for field in dataclasses.fields(config) if field.init}
        for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    }
    assert {kind: set(field_types.adapter_keys(kind)) for kind in field_types.adapter_classes()} == expected
    with_tokens = {
        kind.value.lower()
        for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
        if issubclass(config, PromptLearningConfig)
    }
    assert {kind for kind in expected if field_types.has_virtual_tokens(kind)} == with_tokens


def test_lora_is_short_for_an_adapter_of_type_lora(tmp_path: Path) -> None:
    short, long = (
        load_recipe(write(tmp_path, text, name))
        for text, name in ((lora("r: 4"), "short.yaml"), (adapter("type: lora, r: 4"), "long.yaml"))
    )
    assert short.adapter_section == long.adapter_section == {"type": "lora", "r": 4}
    assert load_recipe(write(tmp_path, long.to_yaml(), "again.yaml")).adapter == long.adapter
    assert load_recipe(write(tmp_path, text_of(), "none.yaml")).adapter_section is None


def test_keys_of_quantization_are_the_parameters_of_bits_and_bytes_config() -> None:
    from transformers import BitsAndBytesConfig

    parameters = set(inspect.signature(BitsAndBytesConfig.__init__).parameters) - {"self", "kwargs"}
    assert set(field_types.quantization_keys()) == parameters


def test_defaults_of_training_arguments_are_accepted() -> None:
    from transformers import TrainingArguments

    plain = (bool, int, float, str)
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments) if field.init}
    keys = field_types.training_keys()
    assert [
        n for n, default in defaults.items() if isinstance(default, plain) and not keys[n].type.accepts(default)
    ] == []


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "qwen3_moe", "mamba", "gpt_neox", "phi3"])
def test_keys_of_a_config_are_those_of_its_class(model_type: str) -> None:
    from transformers import AutoConfig

    found = field_types.config_keys(model_type)
    config = AutoConfig.for_model(model_type)
    assert found is not None
    assert found.class_name == type(config).__name__
    saved = {key for key in config.to_dict() if not key.startswith("_")} - {"ignore_keys_at_rope_validation"}
    assert saved <= set(found.keys)


# --- The recipes that ship. ---


def test_recipes_ship() -> None:
    assert [path.stem for path in SHIPPED] == [
        "gemma3_4b_lora",
        "llama32_3b_qlora_t4",
        "llama3_8b_dpo_lora",
        "llama3_8b_qlora",
        "llama3_8b_qlora_longctx",
        "llama3_8b_reward",
        "llama70b_qlora_fsdp",
        "llama7b_full_fsdp",
        "llama7b_full_zero3",
        "llama7b_lora",
        "llama7b_lora_ddp",
        "llama7b_qlora_24gb",
        "mistral7b_full_bf16",
        "qwen3_32b_lora_fsdp",
        "qwen3_4b_grpo_lora",
        "qwen3_8b_lora",
        "qwen3_vl_8b_lora",
        "tiny_llama_base",
        "tiny_llama_dpo_lora",
        "tiny_llama_lora",
    ]


@pytest.mark.parametrize("path", LOADABLE, ids=lambda path: path.stem)
def test_shipped_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.training["output_dir"] == f"runs/{path.stem}"
    assert recipe.checkpointing is not None
    assert (recipe.lora is None) == ("lora" not in path.stem)
    assert (recipe.quantization is not None) == ("qlora" in path.stem)


@pytest.mark.parametrize("path", LOADABLE, ids=lambda path: path.stem)
def test_shipped_recipe_prints_and_loads_again(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    again = load_recipe(write(tmp_path, recipe.to_yaml()))
    assert dataclasses.replace(again, path=path) == recipe


@pytest.mark.parametrize("path", LOADABLE, ids=lambda path: path.stem)
def test_header_says_purpose_hardware_launch_and_override(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    header = [line for line in text.split("\n\n")[0].splitlines() if line.startswith("#")]
    said = dict(re.findall(r"^# (\w+): +(\S.*)$", "\n".join(header), re.MULTILINE))
    assert {"Purpose", "Hardware", "Launch", "Override"} <= set(said)
    launch = rf"accelerate launch (?:--config_file (\S+) )?scripts/finetune\.py recipes/{path.name}"
    found = re.fullmatch(launch, said["Launch"])
    assert found is not None
    assert found[1] is None or (ROOT / found[1]).is_file()
    command, launch, overrides = said["Override"].replace("--num_processes 4 ", "").partition(said["Launch"])
    assert (command, launch) == ("", said["Launch"])
    assert load_recipe(path, overrides.split()) != load_recipe(path)


# --- Nothing heavy. ---

LOAD_AND_LIST = """
import json, sys, hf_ckpt
for path in sys.argv[1:]:
    try:
        hf_ckpt.load_recipe(path).to_yaml()
    except hf_ckpt.RecipeError:
        pass
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_loading_imports_nothing_heavy(tmp_path: Path) -> None:
    refused = write(tmp_path, text_of(lora="{r: 0}"))
    command = [sys.executable, "-c", LOAD_AND_LIST, *map(str, SHIPPED), str(refused)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    heavy = {"trl", "torch", "transformers", "peft", "datasets", "accelerate", "tokenizers", "numpy", "bitsandbytes"}
    assert heavy.isdisjoint(json.loads(done.stdout))
    assert "yaml" in json.loads(done.stdout)


@pytest.mark.parametrize("policy", ["[{mode: full, layers: '0:2'}]", "{mode: full, layers: '0'}"])
def test_rules_beside_trained_keys_and_values_are_left_to_the_layers(policy: str, tmp_path: Path) -> None:
    text = text_of(adapter="{type: prefix_tuning, num_virtual_tokens: 4}", checkpointing=f"{{policy: {policy}}}")
    assert load_recipe(write(tmp_path, text)).checkpointing is not None
