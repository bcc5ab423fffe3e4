"""The tokenizer of a run: loaded, or trained on the run's own data; with EOS, padding and a chat template in place."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_ckpt.errors import DataError
from hf_ckpt.loading.config_files import source_options
from hf_ckpt.loading.row_formats import Conversation, PromptCompletion, Text, find_layout

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
# 256 bytes and the three special tokens.
MIN_VOCAB_SIZE = 259
# Goes into the cache key: raise it when training changes, so that no older tokenizer is taken for the new one.
_TRAINING_VERSION = 1


def load_tokenizer(
    model_section: Mapping[str, Any],
    data_section: Mapping[str, Any],
    *,
    cache_dir: Path,
    texts: Callable[[Mapping[str, Any]], Iterable[str]] | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a recipe names, or train it on the recipe's training rows.

    `model_section`: the `model` section. `tokenizer` is an id, a directory or `{train: {vocab_size: N}}`; without it
    the tokenizer is that of `name_or_path`. `revision` and `trust_remote_code` are passed on. `cache_dir`: where
    trained tokenizers are kept, one directory per data and settings. `texts`: what to train on of the `data` section;
    left out, what its layout says.
    """
    wanted = model_section.get("tokenizer", model_section.get("name_or_path"))
    if wanted is None:
        raise DataError("model.tokenizer is missing, and there is no model.name_or_path to take it from. Set one.")
    if isinstance(wanted, str):
        tokenizer = _load(wanted, source_options(model_section, "revision"))
    else:
        read = (texts or _texts)(data_section)
        directory = train_tokenizer(read, vocab_size=wanted["train"]["vocab_size"], cache_dir=cache_dir)
        tokenizer = _load(str(directory), {})
    return complete_tokenizer(tokenizer, data_section)


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase, section: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Give a tokenizer, in place, a padding token and the recipe's chat template.

    The padding token is EOS where there is none, so no embedding is added; labels and attention mask are made from
    lengths, so EOS is still learned and seen.

    `section`: the `data` section; `chat_template` is a template's text, or the path of a file that holds it. The same
    tokenizer.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            f'The tokenizer "{tokenizer.name_or_path}" has no EOS token, so a model cannot learn where an example '
            "ends. Set model.tokenizer to one that has it."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if (template := section.get("chat_template")) is not None:
        tokenizer.chat_template = _template_text(template)
    return tokenizer


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, cache_dir: Path) -> Path:
    """Train a byte-level BPE tokenizer, unless one from the same texts and settings is in the cache.

    `texts`: what to train on; the result depends on nothing but these and the size. `vocab_size`: tokens at most, with
    the 256 bytes and `<s>`, `</s>`, `<pad>`; few texts give fewer.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"model.tokenizer.train.vocab_size: {vocab_size} is too small; 256 bytes and {BOS}, {EOS}, {PAD} "
            f"need {MIN_VOCAB_SIZE}. Choose that or more."
        )
    texts = [text for text in texts if text]
    if not texts:
        raise DataError("model.tokenizer.train: the training rows hold no text to train a tokenizer on.")
    directory = cache_dir / f"tokenizer-{_key(texts, vocab_size)}"
    if not directory.exists():
        _save(_train(texts, vocab_size), directory)
    return directory


def _load(name: str, options: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
    # OSError: the hub's and the file system's errors; ValueError: no tokenizer of a known kind.
    except (OSError, ValueError) as error:
        raise DataError(
            f'The tokenizer "{name}" cannot be loaded: {str(error).strip().splitlines()[0].rstrip(".")}. If it is '
            "private or gated, accept its terms on its page and run `hf auth login`; without a connection, set "
            "model.tokenizer or model.name_or_path to a local directory."
        ) from error
    return tokenizer


def _template_text(template: str) -> str:
    if "{" in template or "\n" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f'data.chat_template: "{template}" is read as a path, since it has no braces, and cannot be opened '
            f"({error.strerror}). Give a file that exists, or the template itself."
        ) from error


def _texts(section: Mapping[str, Any]) -> Iterator[str]:
    # `inspect` and `--html`, which come here for names alone, do without datasets.
    from hf_ckpt.loading.sources import load_splits

    rows = load_splits(section).train
    layout = find_layout(rows.column_names, section)
    for row in rows:
        match layout.read(row):
            case Text(text):
                yield text
            case PromptCompletion(prompt, completion):
                yield prompt + completion
            case Conversation(messages):
                yield "\n".join(message["content"] for message in messages if isinstance(message.get("content"), str))


def _key(texts: list[str], vocab_size: int) -> str:
    digest = hashlib.sha256(f"{_TRAINING_VERSION} {vocab_size}".encode())
    for text in texts:
        encoded = text.encode()
        digest.update(f" {len(encoded)} ".encode() + encoded)
    return digest.hexdigest()[:16]


def _train(texts: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A {BOS} $B", [bos])
    special_tokens = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)  # type: ignore[no-untyped-call]  # upstream


def _save(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write all files elsewhere first: another process may look for the directory at the same time."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent))
    tokenizer.save_pretrained(scratch)
    try:
        os.replace(scratch, directory)
    except OSError:
        if not directory.exists():
            raise
        shutil.rmtree(scratch)  # the other process was first, with the same tokenizer
