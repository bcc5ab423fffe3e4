"""The tokenizer: trained the same way every time, loaded from its directory, and given what training needs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_ckpt.errors import DataError
from hf_ckpt.loading.tokenizer import MIN_VOCAB_SIZE, complete_tokenizer, load_tokenizer, train_tokenizer

pytestmark = pytest.mark.core

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a naive cafe, na\u00efve caf\u00e9"] * 3
TRAINED = {"tokenizer": {"train": {"vocab_size": 400}}}


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def test_trained_tokenizer_reads_back_every_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(train_tokenizer(TEXTS, vocab_size=280, cache_dir=tmp_path))
    assert len(tokenizer) == 280
    assert tokenizer.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    for text in [*TEXTS, "unseen: \u4f60\u597d\n\ttabs"]:
        assert tokenizer.decode(ids(tokenizer, text)) == f"<s>{text}"
    assert len(ids(tokenizer, "the cat sat")) < len("the cat sat")


@pytest.mark.sweep
def test_trained_tokenizer_is_the_same_in_another_process(tmp_path: Path) -> None:
    code = (
        "import hashlib, pathlib; from hf_ckpt.loading.tokenizer import train_tokenizer;"
        f"path = train_tokenizer({TEXTS!r}, vocab_size=300, cache_dir=pathlib.Path({str(tmp_path / 'there')!r}));"
        "print(path.name, hashlib.sha256((path / 'tokenizer.json').read_bytes()).hexdigest())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    here = train_tokenizer(TEXTS, vocab_size=300, cache_dir=tmp_path / "here")
    digest = hashlib.sha256((here / "tokenizer.json").read_bytes()).hexdigest()
    assert done.stdout.split() == [here.name, digest]


def test_trained_tokenizer_is_used_again_for_the_same_data_and_size(tmp_path: Path) -> None:
    first = train_tokenizer(TEXTS, vocab_size=300, cache_dir=tmp_path)
    written = (first / "tokenizer.json").stat().st_mtime_ns
    assert train_tokenizer(iter(TEXTS), vocab_size=300, cache_dir=tmp_path) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == written
    others = {
        train_tokenizer(TEXTS, vocab_size=301, cache_dir=tmp_path),
        train_tokenizer(TEXTS[1:], vocab_size=300, cache_dir=tmp_path),
        # The same characters, cut into other texts.
        train_tokenizer(["".join(TEXTS[:2]), *TEXTS[2:]], vocab_size=300, cache_dir=tmp_path),
    }
    assert len(others | {first}) == 4
    assert {path.parent for path in others} == {tmp_path}
    assert len(list(tmp_path.iterdir())) == 4


def test_tokenizer_is_trained_on_the_training_rows_only(tmp_path: Path) -> None:
    section = {"path": "pydoc_topics", "split": "train[:20]"}
    tokenizer = load_tokenizer(TRAINED, section, cache_dir=tmp_path)
    with_evaluation = load_tokenizer(TRAINED, {**section, "eval_split": "test"}, cache_dir=tmp_path)
    assert tokenizer.name_or_path == with_evaluation.name_or_path
    assert Path(tokenizer.name_or_path).parent == tmp_path


@pytest.mark.parametrize(
    "model", [{"tokenizer": "NAME"}, {"name_or_path": "NAME"}, {"name_or_path": "x/y", "tokenizer": "NAME"}]
)
def test_tokenizer_is_loaded_from_its_directory(tmp_path: Path, model: dict[str, str]) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    section = {key: value.replace("NAME", str(tmp_path)) for key, value in model.items()}
    tokenizer = load_tokenizer(section, {"path": "unused.jsonl"}, cache_dir=tmp_path)
    assert tokenizer.name_or_path == str(tmp_path)
    assert (tokenizer.pad_token, len(tokenizer)) == ("</s>", 258)


def test_padding_token_of_its_own_is_kept() -> None:
    assert complete_tokenizer(byte_tokenizer(pad_token="<pad>"), {}).pad_token == "<pad>"


def test_chat_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert complete_tokenizer(byte_tokenizer(), {"chat_template": "{{ bos_token }}"}).chat_template == "{{ bos_token }}"
    assert complete_tokenizer(byte_tokenizer(), {"chat_template": str(file)}).chat_template == "{{ messages }}"


def test_chat_template_that_is_no_file_is_named() -> None:
    with pytest.raises(DataError, match=r'^data\.chat_template: "chatml" is read as a path.* cannot be opened'):
        complete_tokenizer(byte_tokenizer(), {"chat_template": "chatml"})


def test_tokenizer_without_eos_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"has no EOS token.*Set model\.tokenizer"):
        complete_tokenizer(tokenizer, {})


@pytest.mark.parametrize("model", [{"tokenizer": "someone/gated-model"}, {"name_or_path": "someone/gated-model"}])
def test_tokenizer_that_cannot_be_loaded_says_what_to_do(tmp_path: Path, model: dict[str, str]) -> None:
    with pytest.raises(DataError) as raised:
        load_tokenizer(model, {"path": "unused.jsonl"}, cache_dir=tmp_path)
    message = str(raised.value)
    assert message.startswith('The tokenizer "someone/gated-model" cannot be loaded: ')
    assert "run `hf auth login`; without a connection, set model.tokenizer or model.name_or_path to a local" in message
    assert "\n" not in message


def test_model_section_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^model\.tokenizer is missing"):
        load_tokenizer({"config": {}}, {"path": "pydoc_topics"}, cache_dir=tmp_path)


def test_vocabulary_too_small_for_the_bytes_is_refused(tmp_path: Path) -> None:
    assert MIN_VOCAB_SIZE == 259
    assert len(AutoTokenizer.from_pretrained(train_tokenizer(TEXTS, vocab_size=259, cache_dir=tmp_path))) == 259
    with pytest.raises(DataError, match=r"^model\.tokenizer\.train\.vocab_size: 258 is too small.*need 259"):
        train_tokenizer(TEXTS, vocab_size=258, cache_dir=tmp_path)


def test_training_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hold no text"):
        train_tokenizer(["", ""], vocab_size=300, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
