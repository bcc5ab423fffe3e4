"""What a command answered before: the key that says all that an answer depends on, and the answer given again.

Answers lie on disk, one JSON file each. Where nothing can be read or written, nothing is remembered, and nothing is
said. Loads neither torch nor transformers: an answer that is there costs the reading of a recipe and of sources.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import constants

from hf_ckpt.errors import BudgetError
from hf_ckpt.loading.config_files import in_hub_cache, known_configs, shaping_recipes
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.devices import may_have_gpu

# Modelling code is edited where it is installed. All of it is hashed in a tenth of a second.
_SOURCES = ("hf_ckpt", "transformers", "peft", "accelerate", "bitsandbytes")
_VARIABLES = (
    *("ACCELERATE_", "ATEN_", "BNB_", "CUBLAS", "CUDA", "CUDNN", "DS_", "FLASH_ATTENTION", "FSDP_", "HF_", "LIGER_"),
    *("LOCAL_WORLD_SIZE", "NVIDIA_", "PYTORCH", "TORCH", "TRANSFORMERS_", "TRITON_", "USE_", "WORLD_SIZE"),
)
"""How the names of the variables begin that change what is computed, and where configs are found."""
# What is asked of the answer, or was read into the recipe.
_NOT_ASKED = ("words", "recipe", "overrides", "json", "verbose", "no_cache", "out", "plot", "html")
_MOST_ANSWERS = 1000
_NOTHING_FITS = "nothing_fits"
# RuntimeError: a user without a home, or brackets in a file that are too deep.
_UNAVAILABLE = (OSError, RuntimeError)


def remembered(
    command: str, recipe: Recipe, options: argparse.Namespace, make: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Return the document that a command answers with, made by `make`, and whether it was kept from an earlier time.

    A picture or a page needs more than the document: with `--plot` or `--html` nothing is read, as with `--no-cache`.
    That nothing fits (`BudgetError`) is an answer too, and takes longest to find out: it is raised now and later.
    """
    # Libraries write into the environment when they are imported. Where answers lie does not count.
    environment = {name: value for name, value in os.environ.items() if name != "HF_CKPT_CACHE"}
    is_wanted = not options.no_cache and options.plot is None and options.html is None
    key = answer_key(command, recipe, options, environment) if is_wanted else None
    document = kept = None if key is None else read_answer(key)
    if document is None:
        try:
            # As it will be read: the same types the first time and later.
            document = json.loads(json.dumps(make()))
        except BudgetError as error:
            document = {_NOTHING_FITS: str(error)}
        # Sources may have been edited meanwhile, or a config fetched from the hub.
        if key is not None and key == answer_key(command, recipe, options, environment):
            write_answer(key, document)
    if _NOTHING_FITS in document:
        raise BudgetError(document[_NOTHING_FITS])
    return document, kept is not None


def answer_key(command: str, recipe: Recipe, options: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Return a hash of all that the answer depends on; None where that is not known, and nothing is to be kept.

    So it is where the answer may be about this machine's GPU, and where the config has to be fetched from the hub.
    """
    if not options.device and may_have_gpu():
        return None
    asked = {name: value for name, value in vars(options).items() if name not in _NOT_ASKED}
    try:
        recipes = shaping_recipes(recipe)
        if (model := _model_files(recipes[-1].model)) is None:
            return None
        specs = filter(None, map(importlib.util.find_spec, _SOURCES))
        folders = [Path(spec.origin).parent for spec in specs if spec.origin]
        depends_on = [
            *(command, asked, [each.to_yaml() for each in recipes], _named_files(recipes, asked), model),
            # Titles, and what relative paths mean.
            *(str(recipe.path), str(Path.cwd())),
            [_hash([*folder.rglob("*.py"), *folder.glob("simulation/*.json")]) for folder in folders],
            # What is installed beside, with versions: kernels of many packages take the place of torch's.
            sorted({path.name for folder in folders for path in folder.parent.glob("*.dist-info")}),
            # The device "cpu" is described by its processors and its memory.
            *(sys.version, os.cpu_count(), os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0),
            {name: value for name, value in environment.items() if name.startswith(_VARIABLES)},
        ]
    # A file that cannot be read, a package without a spec, a recipe or a YAML file with a mistake in it.
    except (*_UNAVAILABLE, ValueError, yaml.YAMLError):
        return None
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode()).hexdigest()


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _model_files(section: Mapping[str, Any]) -> object:
    """Return a hash of the model's config and code, in the place where they will be looked for; None on the hub."""
    if "config" in section:
        return "model.config"
    name = section["name_or_path"]
    folder = Path(name) if Path(name).is_dir() else in_hub_cache(name, section.get("revision"))
    if folder is None:
        # Where the hub gives the config after all, it is in the hub's cache afterwards. A gated one needs a token.
        fields = known_configs().get(name)
        return None if fields is None else [fields, Path(constants.HF_TOKEN_PATH).is_file()]
    config = folder / "config.json"
    if section.get("trust_remote_code") and "--" in str(json.loads(config.read_text("utf-8")).get("auto_map")):
        # Its code is in another repository.
        return None
    return _hash([*folder.glob("*.json"), *folder.rglob("*.py")])


def _named_files(recipes: list[Recipe], asked: Mapping[str, Any]) -> str:
    """Return a hash of the files that recipes and options name, such as plans. Data does not count."""
    names = ("model", "adapter_section", "quantization", "checkpointing", "training")
    texts = [*_texts([getattr(each, name) for each in recipes for name in names]), *_texts(asked)]
    launch: Path | None = asked.get("accelerate_config")
    if launch is not None:
        # It may name DeepSpeed's.
        texts += [str(launch), *_texts(yaml.safe_load(launch.read_text(encoding="utf-8")))]
    return _hash(path for text in texts if (path := Path(os.path.expanduser(text))).is_file())


def _texts(value: object) -> Iterator[str]:
    """Yield every text in nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


# --- Answers on disk. ---


def _folder() -> Path:
    """Return a folder of its own: what is removed there is never the user's."""
    return Path(os.environ.get("HF_CKPT_CACHE") or Path(constants.HF_HOME, "hf_ckpt")).expanduser() / "answers"


def read_answer(key: str) -> dict[str, Any] | None:
    """Return the answer that was written under `key` (a SHA-256 in hex), and note that it was used."""
    document: dict[str, Any] | None = None
    # A file that was cut off, or that is not ours, is none.
    with contextlib.suppress(*_UNAVAILABLE, ValueError, TypeError, KeyError):
        path = _folder() / f"{key}.json"
        document = json.loads(path.read_bytes())[key]
        os.utime(path)
    return document


def write_answer(key: str, document: dict[str, Any]) -> None:
    """Keep an answer, in one move: a reader finds the whole of it or nothing. The least recently used ones go."""
    with contextlib.suppress(*_UNAVAILABLE):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        # In the same folder, else it would be copied and not moved.
        handle, temporary = tempfile.mkstemp(prefix=f"{key}.json.", dir=folder)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({key: document}, file)
            os.replace(temporary, folder / f"{key}.json")
        except OSError:
            os.unlink(temporary)
        # Also what writers that were killed have left. Another process may be first.
        with contextlib.suppress(FileNotFoundError):
            found = sorted(folder.glob(f"{'[0-9a-f]' * 64}.json*"), key=lambda path: -path.stat().st_mtime_ns)
            for path in found[_MOST_ANSWERS:]:
                path.unlink()
