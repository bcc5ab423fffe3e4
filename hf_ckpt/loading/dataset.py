"""A recipe's `data` section, turned into what a `Trainer` takes: two data sets, a collator, and counts.

    tokenizer = load_tokenizer(recipe.model, recipe.data, cache_dir=cache_dir)
    prepared = prepare(recipe.data, tokenizer)
    print(prepared.counts.summary())
    print(describe_example(prepared, tokenizer))
    Trainer(train_dataset=prepared.train, eval_dataset=prepared.evaluation, data_collator=prepared.collator, ...)

Where rows come from is in `sources`; what their columns mean and how they become tokens, in `examples`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from datasets import Dataset, Features, List, Value
from torch import Tensor, nn
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_ckpt.errors import DataError
from hf_ckpt.loading.row_formats import DEFAULT_LOSS_ON, IGNORED, Encoder, decode, find_layout
from hf_ckpt.loading.sources import load_splits
from hf_ckpt.loading.tokenizer import complete_tokenizer
from hf_ckpt.recipe.schema import DEFAULT_MAX_LENGTH
from hf_ckpt.upstream.transformers import attention_of, has_chunk_masks_by_document

_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "num_tokens": Value("int32"),
        "num_loss_tokens": Value("int32"),
        "is_truncated": Value("bool"),
    }
)
_SHOWN_LINES = 24
NUM_PROMPTS_LOOKED_AT = 100
_SHORTEST_PROMPT = 8
_MANY_TRUNCATED = 0.5
_NUM_CONVERSATIONS_LOOKED_AT = 20


@dataclass(frozen=True)
class Counts:
    """What became of one split's rows."""

    num_rows: int  # Rows loaded.
    num_empty: int  # Rows without text, left out.
    num_without_loss: int  # Other rows without a token to learn, left out.
    num_truncated: int  # Rows longer than `max_length`, left out or not.
    num_loss_tokens: int  # Tokens that are learned, in the examples that are kept.
    lengths: Sequence[int]  # Tokens of each example that is kept, in their order.

    @property
    def num_examples(self) -> int:
        """Examples that are kept."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(self.lengths, default=0)

    @property
    def share_truncated(self) -> float:
        """Truncated rows over all rows, 0 to 1."""
        return self.num_truncated / self.num_rows

    def summary(self) -> str:
        """Return the counts on one line."""
        left_out = [(self.num_empty, "empty"), (self.num_without_loss, "with nothing to learn")]
        reasons = ", ".join(f"{num:,} {what}" for num, what in left_out if num)
        return (
            f"{self.num_examples:,} examples, {self.num_tokens:,} tokens, {self.num_loss_tokens:,} of them learned, "
            f"longest {self.longest:,}, truncated {self.share_truncated:.1%}"
            + (f"; examples left out: {reasons}" if reasons else "")
        )


@dataclass(frozen=True)
class PreparedData:
    """What a Trainer needs."""

    train: Dataset  # `input_ids` and `labels` (-100 where nothing is learned), one row per example.
    evaluation: Dataset | None  # The same, or None.
    collator: Callable[[list[Any]], dict[str, Any]]
    """Turns a list of examples into a batch: padded to the longest, `input_ids`, `labels` and `attention_mask` [B, S];
    or packed, `input_ids`, `labels` and `position_ids` [1, S]."""
    counts: Counts  # Of the training rows.
    warnings: tuple[str, ...] = ()  # What is probably not meant so, a sentence or two each.


def prepare(section: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """Load and tokenise what a recipe's `data` section names.

    Tokenised rows of stored data sets are cached where `datasets` keeps its own; nothing is written elsewhere.

    `tokenizer`: gets a padding token and `data.chat_template`, in place, where it has none.
    """
    complete_tokenizer(tokenizer, section)
    raw = load_splits(section)
    encoder = _encoder(raw.train.column_names, section, tokenizer)
    train, counts = _tokenise(raw.train, "training", section, encoder)
    evaluation = None
    if raw.evaluation is not None:
        of_evaluation = _encoder(raw.evaluation.column_names, section, tokenizer)
        evaluation, _ = _tokenise(raw.evaluation, "evaluation", section, of_evaluation)
    warnings = (*_of_length(counts, encoder), *_of_template(raw.train, encoder))
    return PreparedData(train, evaluation, collator_of(section, tokenizer), counts, warnings)


def describe_example(prepared: PreparedData, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the first training example as text, each line marked as learned or masked.

    Example:
        First of 866 training examples: 101 tokens, 69 learned
          masked | <s>The "pass" statement
          masked |
          masked | "pass" is a null operation
          learned|  -- when it is executed, nothing happens.</s>
    """
    example = prepared.train[0]
    lines = list(_marked_lines(example["input_ids"], example["labels"], tokenizer))
    if len(lines) > _SHOWN_LINES:
        tail = _SHOWN_LINES // 3
        left_out = f"          ({len(lines) - _SHOWN_LINES:,} lines left out)"
        lines = [*lines[: _SHOWN_LINES - tail], left_out, *lines[-tail:]]
    num_learned = sum(label != IGNORED for label in example["labels"])
    head = (
        f"First of {prepared.counts.num_examples:,} training examples: "
        f"{len(example['input_ids']):,} tokens, {num_learned:,} learned"
    )
    return "\n".join([head, *lines])


def sample_prompt_ids(prepared: PreparedData) -> list[int]:
    """Return the tokens of a prompt to try the model on, as it saw prompts in training.

    A short one, which is read at a glance, of the first evaluation examples (training examples, if there are none): up
    to what is learned of it, or its first quarter if all of it is learned.
    """
    rows = prepared.train if prepared.evaluation is None else prepared.evaluation
    prompts = []
    for row in rows.select(range(min(len(rows), NUM_PROMPTS_LOOKED_AT))):
        ids = row["input_ids"]
        given = next(at for at, label in enumerate(row["labels"]) if label != IGNORED)
        # Only the first token is masked in an example that is learned whole.
        prompts.append(ids[: given if given > 1 else max(1, len(ids) // 4)])
    return shortest_prompt(prompts)


def shortest_prompt(prompts: Sequence[list[int]]) -> list[int]:
    """Return the shortest of some prompts that says something; the first one where none does."""
    return min((prompt for prompt in prompts if len(prompt) >= _SHORTEST_PROMPT), key=len, default=prompts[0])


def _tokenise(rows: Dataset, split: str, section: Mapping[str, Any], encoder: Encoder) -> tuple[Dataset, Counts]:
    # `datasets` finds cached rows by a hash of the tokenizer; this call undoes the padding that an earlier use left.
    encoder.tokenizer.encode("")
    encoded = rows.map(
        encoder,
        with_indices=True,
        remove_columns=rows.column_names,
        features=_FEATURES,
        num_proc=section.get("num_proc"),
        desc=f"Tokenising {split} data",
    )
    kept = [at for at, num in enumerate(encoded["num_loss_tokens"][:]) if num]
    lengths: list[int] = encoded["num_tokens"][:]
    num_empty = lengths.count(0)
    counts = Counts(
        num_rows=len(lengths),
        num_empty=num_empty,
        num_without_loss=len(lengths) - num_empty - len(kept),
        num_truncated=sum(encoded["is_truncated"][:]),
        num_loss_tokens=sum(encoded["num_loss_tokens"][:]),
        lengths=[lengths[at] for at in kept],
    )
    if not kept:
        found = [f"{counts.num_empty:,} are empty"] if counts.num_empty else []
        if counts.num_without_loss:
            found.append(f"{counts.num_without_loss:,} have nothing for data.loss_on {encoder.loss_on}")
        if counts.num_truncated:
            found.append(f"{counts.num_truncated:,} are truncated at data.max_length {encoder.max_length}")
        raise DataError(
            f"None of the {counts.num_rows:,} {split} examples has a token to learn: {'; '.join(found)}. "
            "Check data.columns and data.loss_on, or raise data.max_length."
        )
    examples = encoded.select_columns(["input_ids", "labels"])
    return (examples if len(kept) == len(rows) else examples.select(kept)), counts


def _encoder(columns: list[str], section: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Encoder:
    layout = find_layout(columns, section)
    loss_on = section.get("loss_on", DEFAULT_LOSS_ON[layout.format])
    if loss_on not in ("all", DEFAULT_LOSS_ON[layout.format]):
        raise DataError(
            f"data.loss_on is {loss_on}, but the data set holds {layout.format} (columns {', '.join(columns)}). "
            f"Use {' or '.join(sorted({'all', DEFAULT_LOSS_ON[layout.format]}))}."
        )
    if layout.format == "messages":
        check_chat_template(tokenizer)
    return Encoder(tokenizer, layout, loss_on, section.get("max_length", DEFAULT_MAX_LENGTH))


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that conversations cannot be written with."""
    try:
        tokenizer.get_chat_template()
    except ValueError as error:  # there is none, or several of which none is the default
        raise DataError(
            f'The data set holds conversations, and the tokenizer "{tokenizer.name_or_path}" has no chat template. '
            "Set data.chat_template to a template or the path of one, or use the tokenizer of a chat model."
        ) from error


def _of_length(counts: Counts, encoder: Encoder) -> Iterator[str]:
    if counts.share_truncated > _MANY_TRUNCATED:
        yield (
            f"{counts.share_truncated:.0%} of the training examples are longer than data.max_length "
            f"{encoder.max_length} and are cut there: what follows is not seen, nor is how an example ends. Raise "
            "data.max_length (hf-ckpt estimate says what fits), or split them."
        )


def _of_template(rows: Dataset, encoder: Encoder) -> Iterator[str]:
    looked_at = rows.select(range(min(len(rows), _NUM_CONVERSATIONS_LOOKED_AT)))
    roles = dict.fromkeys(role for row in looked_at for role in encoder.learned_roles(row))
    if roles:
        yield (
            f"The chat template's {{% generation %}} block takes in the turns of {' and '.join(roles)}, so that they "
            "are learned like the assistant's. Set data.chat_template to one whose block holds nothing but what the "
            "assistant writes; or, if all is to be learned, data.loss_on to all."
        )


def _marked_lines(ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    masks = [label == IGNORED for label in labels]
    # The first token is never learned; in an example that is learned whole it goes with the rest.
    masks[:1] = masks[1:2]
    for is_masked, run in groupby(zip(masks, ids, strict=True), key=lambda pair: pair[0]):
        for line in decode(tokenizer, [id_ for _, id_ in run]).split("\n"):
            yield f"  {'masked ' if is_masked else 'learned'}| {line}"


# --- Several documents in a row. ---


_DOCUMENT_LENGTH = 6


class PackingCollator(DataCollatorWithFlattening):
    """Flattens a batch into one row [1, S] with `position_ids`, and asks the model for no cache.

    transformers looks for documents in `position_ids` only when there is no cache. With `use_cache` true, as it may be
    in evaluation, they would see each other, silently: loss and predictions are then those of one long text.
    """

    def __call__(self, features: list[dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return `input_ids`, `labels` and `position_ids`, each [1, S], and `use_cache` False."""
        batch: dict[str, Any] = super().__call__(features, *args, **kwargs)  # type: ignore[no-untyped-call]  # upstream
        return {**batch, "use_cache": False}


def collator_of(
    section: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> PackingCollator | DataCollatorForSeq2Seq:
    """Return what makes a batch of examples with `input_ids` and `labels`.

    That is one row, where a `data` section packs, or rows that are padded on the right to the longest.
    """
    if section.get("packing", False):
        return PackingCollator()  # type: ignore[no-untyped-call]  # upstream
    # Padding on the left would shift the positions that models count from the row's start.
    padding_tokenizer = copy.copy(tokenizer)
    padding_tokenizer.padding_side = "right"
    return DataCollatorForSeq2Seq(padding_tokenizer, label_pad_token_id=IGNORED)


def check_packing(model: nn.Module) -> None:
    """Make sure that documents packed into one row do not see each other in this model.

    Runs two documents of six tokens forward and asks for the gradient of the second one's logits at the first one's
    embeddings. A masked position gives exactly zero, whatever the dtype or kernel. A model on `meta` is not asked; one
    on the CPU is asked with eager attention where its own (flash, flex) needs a GPU, so ask it on its device.

    `model`: a causal language model of transformers, with adapters or not, on its device and not yet wrapped. Modes and
    gradients are left as they were.
    """
    causal_lm = cast(PreTrainedModel, model)  # PEFT's wrapper hands on what it does not have itself
    layer_types = getattr(causal_lm.config.get_text_config(), "layer_types", None) or []
    if "chunked_attention" in layer_types and not has_chunk_masks_by_document():
        reason = "chunks of its attention are counted from the start of the sequence"
    elif causal_lm.device.type == "meta" or (leaked := _leaked_gradient(causal_lm)) == 0:
        return
    else:
        attention = attention_of(causal_lm.config.get_text_config())
        seen = f"with {attention} attention, tokens depend on the document before theirs"
        reason = f"{seen} (gradient {leaked:.1e}, not 0)"
    raise DataError(
        f"data.packing: {type(model).__name__} cannot keep packed documents apart: {reason}. Set data.packing to false."
    )


def _leaked_gradient(model: PreTrainedModel) -> float:
    embedded: list[Tensor] = []

    def keep_output(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = model.get_input_embeddings().register_forward_hook(keep_output)
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.enable_grad(), _attention_that_runs(model):
            logits = model.eval()(**_two_documents(model)).logits  # type: ignore[no-untyped-call]  # upstream
            of_second = logits[:, _DOCUMENT_LENGTH:].float().square().sum()
            (gradient,) = torch.autograd.grad(of_second, embedded[:1])
    finally:
        handle.remove()
        for module, mode in modes:
            module.training = mode
    return float(gradient[:, :_DOCUMENT_LENGTH].abs().max())


@contextmanager
def _attention_that_runs(model: PreTrainedModel) -> Iterator[None]:
    configs = {"": model.config, **{name: getattr(model.config, name) for name in model.config.sub_configs}}
    found = {name: attention_of(config) for name, config in configs.items() if config is not None}
    if model.device.type != "cpu" or set(found.values()) <= {"eager", "sdpa"}:
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(found)


def _two_documents(model: PreTrainedModel) -> dict[str, Any]:
    vocab_size: int = model.config.get_text_config().vocab_size
    tokens = [(7 * at + 3) % vocab_size for at in range(_DOCUMENT_LENGTH)]
    collate = PackingCollator()  # type: ignore[no-untyped-call]  # upstream
    batch = collate([{"input_ids": tokens}, {"input_ids": tokens[::-1]}])
    del batch["labels"]
    return {key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()}
