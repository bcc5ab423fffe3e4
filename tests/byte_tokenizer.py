"""Tokenizers built in code: one token per byte, so that a test reads a loss mask as text."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"

CHATML = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</{{ message['role'] }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Like Llama 2 and Qwen: the turn's end is EOS; Qwen writes a line break after it.
EOS_AFTER_TURNS = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED_TURNS = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}|{% endfor %}"
)
# Like Qwen 3: only the last turn shows that nothing was thought.
REWRITES_EARLIER_TURNS = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if loop.last and message['role'] == 'assistant' %}<think></think>{% endif %}{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(
    *,
    merges: tuple[tuple[str, str], ...] = (),
    adds_bos: bool = True,
    adds_eos: bool = False,
    pad_token: str | None = None,
) -> PreTrainedTokenizerBase:
    """One token per byte, BOS and EOS; `merges` adds tokens of two or more characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [BOS, EOS, *([pad_token] if pad_token else []), *letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=list(merges)))
    # Not split into words, so that a merge may reach over a space.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    single = f"{f'{BOS} ' if adds_bos else ''}$A{f' {EOS}' if adds_eos else ''}"
    backend.post_processor = processors.TemplateProcessing(single, "$A $B", [(BOS, 0), (EOS, 1)])
    special_tokens = {"bos_token": BOS, "eos_token": EOS, "pad_token": pad_token}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)


def learned_text(tokenizer: PreTrainedTokenizerBase, row: dict[str, list[int]]) -> str:
    """The row's tokens as text, with `[` and `]` around each run that is learned."""
    text, was_learned = "", False
    for id_, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (-100, id_)
        is_learned = label != -100
        text += "[" if is_learned and not was_learned else "]" if was_learned and not is_learned else ""
        text += tokenizer.decode([id_])
        was_learned = is_learned
    return text + "]" * was_learned
