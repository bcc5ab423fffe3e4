"""The steps of trl's trainers as `auto` simulates them: whose loss is run, on what batch, with which second model.

trl is not imported: its trainers are known by the modules of their classes, its batches by their columns.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteriaList, TrainingArguments

from hf_ckpt.auto.batch_of_forward import without_adapter
from hf_ckpt.auto.simulation_coverage import refuse
from hf_ckpt.auto.trainer_loss import ModelInputs, TrainerLoss, with_globals
from hf_ckpt.simulation.fake_model import meta_copy
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.trainer.batch import Batch, lengths_in, rounded, stored_columns, tables
from hf_ckpt.trainer.other_models import weights_and_buffers
from hf_ckpt.upstream import trl
from hf_ckpt.upstream.transformers import CACHE, ENDS_GENERATION
from hf_ckpt.upstream.trl import OWN_STEP

_TOKEN = 5
_MODULE = "trl.trainer.{}_trainer"
_LOSSES = ("compute_loss", *OWN_STEP)
_REFERENCE, _PROMPT = "ref_model", "prompt_ids"
_IDS, _MASK, _COMPLETION = "input_ids", "attention_mask", "completion_mask"
_KL = "KL_"


def trl_loss(
    trainer: Any, args: TrainingArguments, model: nn.Module, sharding: Sharding, dataset: Any, collator: Any
) -> TrainerLoss | None:
    """Return the loss of a trainer of trl; None of any other, and where the model's own is simulated in its place.

    Raises `UnsupportedError` where the step of this trainer is not simulated. Nothing is drawn from the data.
    """
    of_trl = next((kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), None)
    if of_trl is None:
        return None
    names = {_MODULE.format(name): name for name in (*_BATCHES, *_GENERATING)}
    if of_trl.__module__ not in names:
        raise refuse(
            "of trl's trainers the steps of SFT, DPO, KTO, Reward, GRPO and RLOO are, and that of "
            f"{of_trl.__name__} is not"
        )
    name = names[of_trl.__module__]
    if getattr(args, "activation_offloading", False):
        raise refuse("activation_offloading=True copies activations to the host as trl does, which is not simulated")
    why = _why_not(trainer, of_trl, sharding)
    if why and name in (*_WITH_REFERENCE, *_GENERATING):
        raise refuse(why)
    if name in _GENERATING:
        return generation_loss(trainer, sharding, dataset, _others(trainer, model), is_rloo=name == "rloo")
    return None if why else TrainerLoss(trainer, _BATCHES[name](trainer, dataset, collator), _others(trainer, model))


def _why_not(trainer: Any, of_trl: type, sharding: Sharding) -> str:
    """Return why the loss of a trainer is not run; empty where it is."""
    mro = type(trainer).__mro__
    derived = mro[: mro.index(of_trl)]
    own = [f"{kind.__name__}.{name}" for kind in derived for name in _LOSSES if name in vars(kind)]
    if getattr(trainer, "compute_loss_func", None) is not None:
        own.append("compute_loss_func")
    if own:
        return f"{own[0]} replaces the loss of {of_trl.__name__}, which alone is"
    if sharding.engine not in ("none", "ddp"):
        return f"the reference of {of_trl.__name__} runs under {sharding.engine} too, which gathers its weights"
    return ""


def _others(trainer: Any, model: nn.Module) -> dict[str, nn.Module]:
    reference = getattr(trainer, _REFERENCE, None)
    if reference is None:
        return {}
    own = {id(tensor) for tensor in weights_and_buffers(model)}
    if any(id(tensor) in own for tensor in weights_and_buffers(reference)):
        raise refuse(f"{type(trainer).__name__}.{_REFERENCE} shares weights with the model that is trained")
    return {_REFERENCE: meta_copy(reference)}


# --- Batches. ---


class _Texts(ModelInputs):
    """What SFT trains on: rows as any language model reads them, always with a mask unless they are packed."""

    def make(self, step: Step, model: nn.Module) -> dict[str, Tensor]:
        inputs = super().make(step, model)
        if not step.is_packed:
            inputs.setdefault(_MASK, torch.ones_like(inputs["input_ids"]))
        return inputs


_Columns = tuple[str, ...]


@dataclass(frozen=True)
class _Preferences(ModelInputs):
    """Rows that are liked or not, and numbers for each example."""

    columns: tuple[_Columns, ...]  # Of each row of an example: the columns that are joined to it.
    # Of each example, such as log-probabilities that were computed before training.
    numbers: tuple[tuple[str, torch.dtype], ...]
    has_completions: bool = True  # Whether the batch says which tokens are completions.
    # Of KTO with an estimate of the KL divergence: the tokens of the longest row, and those of the longest row with
    # another example's completion.
    kl_lengths: tuple[int, int] | None = None

    takes_more_than_text = False

    @property
    def rows_per_example(self) -> int:
        return len(self.columns)

    @classmethod
    def of_dpo(cls, trainer: Any, dataset: Any, collator: Any) -> _Preferences:
        numbers = _reference_columns(trainer, "ref_chosen_logps", "ref_rejected_logps")
        return cls(((_PROMPT, "chosen_ids"), (_PROMPT, "rejected_ids")), numbers)

    @classmethod
    def of_reward(cls, trainer: Any, dataset: Any, collator: Any) -> _Preferences:
        has_margin = "margin" in (getattr(dataset, "column_names", None) or ())
        numbers = (("margin", torch.float32),) if has_margin else ()
        return cls((("chosen_ids",), ("rejected_ids",)), numbers, has_completions=False)

    @classmethod
    def of_kto(cls, trainer: Any, dataset: Any, collator: Any) -> _Preferences:
        columns, kl_columns = (_PROMPT, "completion_ids"), (_PROMPT, "KL_completion_ids")
        if not trainer.calculate_KL:
            return cls((columns,), (("label", torch.bool), *_reference_columns(trainer, "ref_logps")))
        lengths = [_lengths(dataset, collator, (each,)) for each in (columns, kl_columns)]
        if not all(lengths):
            raise refuse(
                f"{type(trainer).__name__} reads each prompt with another example's completion too, whose lengths are "
                "known of a data set with its own collator only"
            )
        numbers = _reference_columns(trainer, "ref_logps", "ref_KL_logps")
        kl_lengths = max(lengths[0]), max(lengths[1])
        return cls((columns,), (("label", torch.bool), *numbers), kl_lengths=kl_lengths)

    def largest(self, dataset: Any, collator: Any, num_examples: int, max_length: int | None) -> Batch | None:
        lengths = _lengths(dataset, collator, self.columns)
        if max_length is None and not lengths:
            return None
        rows = num_examples * self.rows_per_example
        longest = max(lengths) if max_length is None else max_length
        length = rounded(longest, getattr(collator, "pad_to_multiple_of", None) or 1)
        return Batch(rows, length, is_padded=length > min(lengths, default=0))

    def make(self, step: Step, model: nn.Module) -> dict[str, Tensor]:
        inputs = self._rows(step, step.seq_length)
        if self.kl_lengths is not None:
            longest, kl = self.kl_lengths
            # Shorter rows than those of the data are cut, and so are these.
            inputs |= self._rows(step, kl if step.seq_length >= longest else min(kl, step.seq_length), _KL)
        # Every second one is liked.
        numbers = torch.arange(step.batch_size) % 2 == 0
        return inputs | {name: numbers.to(dtype) for name, dtype in self.numbers}

    def _rows(self, step: Step, length: int, prefix: str = "") -> dict[str, Tensor]:
        shape = (step.rows, length)
        mask = torch.ones(shape, dtype=torch.long)
        if step.is_padded:
            # One token of the first row is padding, for code that checks whether there is any.
            mask[0, -1] = 0
        inputs = {_IDS: torch.full(shape, _TOKEN, dtype=torch.long), _MASK: mask}
        if self.has_completions:
            inputs[_COMPLETION] = (torch.arange(length) >= length // 2).long().expand(shape).contiguous()
        return {f"{prefix}{name}": value for name, value in inputs.items()}


def _reference_columns(trainer: Any, *names: str) -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((name, torch.float32) for name in names) if trainer.precompute_ref_logps else ()


def _lengths(dataset: Any, collator: Any, columns: tuple[_Columns, ...]) -> list[int]:
    """Return the tokens of each row; nothing where they are not known without computing examples."""
    needed = sorted({name for row in columns for name in row})
    is_trls = type(collator).__module__.startswith("trl.trainer.")
    if not is_trls or not set(needed) <= set(stored_columns(dataset)):
        return []
    most = getattr(collator, "max_length", None)
    found: list[int] = []
    for table in tables(dataset, needed):
        tokens = {name: list(lengths_in(table[name])) for name in needed}
        for row in columns:
            lengths = map(sum, zip(*(tokens[name] for name in row), strict=True))
            found.extend(length if most is None else min(length, most) for length in lengths)
    return found


_BATCHES: dict[str, Callable[[Any, Any, Any], ModelInputs]] = {
    "sft": lambda trainer, dataset, collator: _Texts(),
    "dpo": _Preferences.of_dpo,
    "kto": _Preferences.of_kto,
    "reward": _Preferences.of_reward,
}
_WITH_REFERENCE = ("dpo", "kto")
_GENERATING = ("grpo", "rloo")


# --- GRPO and RLOO, which generate what they train on, with transformers' own generation. ---

# A step of theirs has phases: completions are generated, with keys and values in a cache that grows by a token at a
# time; they are scored without gradients; then the micro-batches run. The first two know no plan: `TrainerLoss`
# simulates the last one, and `GenerationLoss.prepare` the others.

_TOKEN = 5
_MAX_PROMPTS = 2000
_CACHE_LAYER = "DynamicLayer"


@dataclass(frozen=True)
class Completions(ModelInputs):
    """What GRPO and RLOO train on: prompts with completions, and a few numbers of each token of a completion."""

    trainer: Any
    prompt_lengths: tuple[int, ...]
    """Tokens of the longest prompt and of the shortest one."""
    is_rloo: bool = False

    takes_more_than_text = False

    def largest(self, dataset: Any, collator: Any, num_examples: int, max_length: int | None) -> Batch | None:
        """Return the largest micro-batch: the longest prompt with the longest completion."""
        longest = self._padded(self.completion_length)
        if max_length is not None:
            if max_length <= longest:
                raise refuse(f"max_length={max_length} leaves no prompt before completions of {longest} tokens")
            return Batch(num_examples, max_length, is_padded=True)
        length = self._padded(max(self.prompt_lengths))
        is_padded = length > min(self.prompt_lengths)
        return Batch(num_examples, length + longest, is_padded, more=() if is_padded else ("attention_mask",))

    @property
    def completion_length(self) -> int:
        return int(self.trainer.generation_config.max_new_tokens)

    def lengths_of(self, step: Step) -> tuple[int, int]:
        """Return the tokens of a prompt, and those of a completion; of short rows all but one are the completion's."""
        completion = min(self._padded(self.completion_length), step.seq_length - 1)
        return step.seq_length - completion, completion

    def make(self, step: Step, model: nn.Module) -> dict[str, Tensor]:
        """Return a micro-batch, as it is sliced out of all that is generated at a time."""
        # What several steps use is held as a whole.
        num_windows = max(1, self.trainer.args.steps_per_generation // step.gradient_accumulation_steps)
        made = self.make_rows(step, step.rows * num_windows)
        return {name: value[: step.rows] if value.dim() else value for name, value in made.items()}

    def make_rows(self, step: Step, rows: int) -> dict[str, Tensor]:
        """Return so many rows with everything that the trainer keeps of them."""
        prompt, completion = self.lengths_of(step)
        mask = torch.ones((rows, prompt), dtype=torch.long)
        if step.is_padded and prompt > 1:
            # For code that checks whether there is any padding.
            mask[0, 0] = 0
        made = {
            "prompt_ids": torch.full((rows, prompt), _TOKEN),
            "prompt_mask": mask,
            "completion_ids": torch.full((rows, completion), _TOKEN),
            "completion_mask": torch.ones((rows, completion), dtype=torch.long),
            "advantages": torch.ones(rows),
        }
        if self.is_rloo:
            return made | {"old_logps": torch.zeros(rows)}
        made["num_items_in_batch"] = torch.tensor(rows * completion)
        scores = [name for name, is_there in (("old", self.asks_policy), ("ref", self.asks_reference)) if is_there]
        return made | {f"{name}_per_token_logps": torch.zeros((rows, completion)) for name in scores}

    @property
    def asks_policy(self) -> bool:
        """Whether completions are scored by the model that is trained before it trains on them."""
        every = self.trainer.args.steps_per_generation * self.trainer.num_iterations
        return self.is_rloo or bool(self.trainer.args.gradient_accumulation_steps % every)

    @property
    def asks_reference(self) -> bool:
        """Whether completions are scored by a reference."""
        return bool(self.trainer.beta != 0.0)

    def _padded(self, length: int) -> int:
        return rounded(length, self.trainer.pad_to_multiple_of or 1)


@dataclass(frozen=True, eq=False)
class GenerationLoss(TrainerLoss):
    """The loss of a trainer that generates, and what it does before the first micro-batch."""

    batch: Completions

    def bound_to(self, model: nn.Module, others: Mapping[str, nn.Module], *, is_cuda: bool) -> partial[Any]:
        """See `TrainerLoss`. Its metrics look for numbers that are not known: the same memory without looking."""
        bound = super().bound_to(model, others, is_cuda=is_cuda)
        stand_in = bound.args[0]
        # The Trainer sets it in each step.
        stand_in.current_gradient_accumulation_steps = self.trainer.args.gradient_accumulation_steps
        of_trl: FunctionType = trl.loss_of(type(stand_in))
        names = {"nanmin": torch.min, "nanmax": torch.max}
        vars(stand_in)[trl.LOSS] = MethodType(with_globals(of_trl, names), stand_in)
        return bound

    @property
    def prepares(self) -> str:
        rows = self.trainer.args.per_device_train_batch_size * self.trainer.args.steps_per_generation
        return f"generation of {rows} completions of {self.batch.completion_length:,} tokens at a time"

    def make_prepared(self, step: Step) -> dict[str, Tensor]:
        """Return what was generated and scored the last time: it is replaced when the new is there."""
        return self.batch.make_rows(step, step.rows * self.trainer.args.steps_per_generation)

    def prepare(self, step: Step, model: nn.Module, loss_of: Any) -> None:
        """Generate and score as before the first micro-batch. `loss_of` is what `bound_to` has returned."""
        batch, stand_in = self.batch, loss_of.args[0]
        num_rows = step.rows * self.trainer.args.steps_per_generation
        prompt, completion = batch.lengths_of(step)
        mask = batch.make_rows(step, num_rows)["prompt_mask"]
        with torch.no_grad():
            cache = _generated(model, self.trainer.generation_config, mask, None)
            if completion > 1:
                _lengthen(cache, prompt + completion - 2)
                mask = torch.cat([mask, torch.ones((num_rows, completion - 1), dtype=torch.long)], dim=1)
                _generated(model, self.trainer.generation_config, mask, cache)
            del cache, mask
            made = batch.make_rows(step, num_rows)
            ids, mask = (torch.cat([made[f"prompt_{of}"], made[f"completion_{of}"]], dim=1) for of in ("ids", "mask"))
            # They are scored a micro-batch at a time: this is the last one, and those are the scores of the others.
            scored = torch.zeros((num_rows - step.rows, prompt + completion - 1))
            # With its adapters disabled, or with another one, a model takes no more.
            reference = getattr(stand_in, "ref_model", None) or model
            for is_asked, scoring in ((batch.asks_policy, model), (batch.asks_reference, reference)):
                if is_asked:
                    score = trl.scores_tokens(stand_in)
                    score(scoring, ids[-step.rows :], mask[-step.rows :], completion, batch_size=step.rows)
            del scored, made


def _generated(model: Any, config: Any, mask: Tensor, cache: Any) -> Any:
    """Generate one token of rows that are as long as the mask, and return the cache."""
    config = copy.deepcopy(config)
    config.return_dict_in_generate = True
    # Whether a row has ended depends on the weights.
    bare: Any = without_adapter(model)
    setattr(bare, ENDS_GENERATION, _after_a_token)
    given = {} if cache is None else {CACHE: cache}
    ids = torch.full(tuple(mask.shape), _TOKEN)
    return model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **given)[CACHE]


def _after_a_token(**kwargs: Any) -> StoppingCriteriaList:
    return StoppingCriteriaList([_is_done])


def _is_done(ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
    return torch.ones(ids.shape[0], dtype=torch.bool)


def _lengthen(cache: Any, length: int) -> None:
    for layer in cache.layers:
        if type(layer).__name__ != _CACHE_LAYER:
            raise refuse(f"generation keeps keys and values in a {type(layer).__name__}, which is not")
        for name in ("keys", "values"):
            found = getattr(layer, name)
            setattr(layer, name, found.new_empty((*found.shape[:2], length, found.shape[3])))


# --- What is known of a run before it begins. ---


def generation_loss(
    trainer: Any, sharding: Sharding, dataset: Any, others: Mapping[str, nn.Module], *, is_rloo: bool
) -> GenerationLoss:
    """Return the loss of trl's GRPO, or of its RLOO.

    Raises:
        UnsupportedError: its step is not simulated.
    """
    for is_so, what in _not_simulated(trainer, trainer.args, sharding):
        if is_so:
            raise refuse(f"{type(trainer).__name__} {what}, which is not")
    lengths = _prompt_lengths(trainer, dataset)
    if not lengths:
        raise refuse(
            f"{type(trainer).__name__} generates from prompts whose lengths are known of a data set with a column "
            '"prompt" only'
        )
    return GenerationLoss(trainer, Completions(trainer, lengths, is_rloo), others)


def _not_simulated(trainer: Any, args: Any, sharding: Sharding) -> Iterator[tuple[bool, str]]:
    yield bool(args.use_vllm), "generates by vLLM"
    yield bool(args.use_transformers_continuous_batching), "generates by continuous batching"
    for name in ("tools", "environment_factories", "rollout_func"):
        yield bool(getattr(trainer, name, None)), f"has {name}"
    yield trl.is_of_images(trainer), "reads images"
    config = getattr(trainer, "generation_config", None)
    for name, plain in _PLAIN_GENERATION.items():
        found = getattr(config, name, None)
        yield found not in (None, plain), f"generates with {name}={found}"
    yield sharding.engine != "none", f"generates under {sharding.engine}"
    is_within = (args.steps_per_generation * args.num_iterations) % args.gradient_accumulation_steps
    names = ("steps_per_generation", "num_iterations", "gradient_accumulation_steps")
    sizes = ", ".join(f"{name}={getattr(args, name)}" for name in names)
    is_uneven = args.steps_per_generation % args.gradient_accumulation_steps
    yield bool(is_within or is_uneven), f"generates while gradients are accumulated ({sizes})"
    for name, usual in _PLAIN_STEP.items():
        asked = getattr(args, name, usual)
        yield asked != usual, f"has {name}={asked}"


_PLAIN_GENERATION: dict[str, object] = {
    "cache_implementation": None,
    "num_beams": 1,
    "prefill_chunk_size": None,
    "prompt_lookup_num_tokens": None,
    "use_cache": True,
    "guidance_scale": None,
    "num_return_sequences": 1,
}
# Fields of the trainer's arguments with which its step was not followed: the value with which it was.
_PLAIN_STEP: dict[str, object] = {"top_entropy_quantile": 1.0, "cast_lm_head_to_fp32": False, "sync_ref_model": False}


def _prompt_lengths(trainer: Any, dataset: Any) -> tuple[int, ...]:
    """Return the tokens of the longest prompt, and of the shortest of those that were looked at, as trl writes them."""
    if "prompt" not in stored_columns(dataset):
        return ()
    prompts = dataset.select_columns(["prompt"]).with_format(None)["prompt"][:]
    longest = heapq.nlargest(_MAX_PROMPTS, prompts, key=lambda prompt: len(str(prompt)))
    lengths = sorted(map(len, trl.tokenizes_prompts(trainer)(longest)[0]))
    is_cut = len(prompts) > len(longest)
    return lengths[-1], 0 if is_cut else lengths[0]
