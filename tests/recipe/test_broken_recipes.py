"""Recipes with one mistake each, and in which words it is reported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_ckpt.cli.finetune import main
from hf_ckpt.recipe import upstream_fields
from tests.recipe.recipe_texts import (
    CHECKPOINTING,
    adapter,
    checkpointed,
    data,
    evaluated,
    lora,
    made,
    mistakes_in,
    model,
    of_trainer,
    quantized,
    text_of,
    training,
    write,
)

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]


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
    broken(
        lora("lora_dropout: 0.1, target_parameters: [experts.w]"), "lora.lora_dropout = 0.1: an adapter on parameters"
    ),
    broken(lora("use_dora: true, target_parameters: [experts.w]"), "lora.use_dora = true: an adapter on parameters"),
    broken(lora("lora_bias: true, target_parameters: [experts.w]"), "where PEFT cannot do this. Leave it out."),
    broken(
        lora("init_lora_weights: pissa, target_parameters: [experts.w]"), "starts with random numbers. Leave it out."
    ),
    broken(lora("layers_to_transform: [1], target_parameters: [w]"), "does not look at it for lora.target_parameters."),
    broken(lora("target_parameters: experts.w"), "lora.target_parameters"),
    broken(lora("target_modules: [], target_parameters: []"), "lora.target_modules = []: expected names of modules"),
    broken(lora("target_modules: []"), "lora.target_modules = []: expected names of modules"),
    broken(lora("target_modules: 'q_proj, v_proj'"), 'Write ["q_proj", "v_proj"].'),
    broken(quantized("load_in_4bit: true, load_in_8bit: true"), "load_in_4bit is true as well. Keep one."),
    broken(quantized("bnb_4bit_quant_type: nf4"), "quantization: quantises nothing"),
    broken(quantized("load_in_8bit: true, quantize_experts: true"), "experts are quantised in 4 bits only"),
    broken(quantized("load_in_4bit: true, quantise_experts: true"), "quantize_experts"),
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
        f"training.{CHECKPOINTING}_kwargs: has no effect with a checkpointing section",
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
        'lora.task_type = "CAUSAL_LM": trainer classification trains models that score sequences. Write SEQ_CLS',
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
if upstream_fields.trl_version() is not None:
    BROKEN += OF_TRL


@pytest.mark.parametrize(
    ("version", "says"), [(None, "which is not installed"), ((1, 9), "which is installed in version ")]
)
def test_missing_trl_is_one_message(
    version: tuple[int, ...] | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is not None and upstream_fields.trl_version() is None:
        pytest.skip("trl is not installed")
    monkeypatch.setattr(upstream_fields, "trl_version", lambda: version)
    (line,) = mistakes_in(write(tmp_path, of_trainer("dpo", "output_dir: x, beta: 0.2, lr: 3")))
    assert f'trainer = "dpo": is a trainer of trl, {says}' in line
    assert line.endswith(f'Run: pip install "{ROOT}[trl]"')


@pytest.mark.parametrize("case", BROKEN, ids=str)
@pytest.mark.sweep(keep=24)
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
