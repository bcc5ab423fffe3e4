"""What a command answered before: the key that says all that an answer depends on, and the answer given again.

Answers lie on disk, one JSON file each, by key, the least recently used out. Whatever that folder holds and whoever
writes there, an answer is read whole or not at all; where nothing can be read or written, nothing is remembered, and
nothing is said.

Loads neither torch nor transformers nor numpy: an answer that is there costs the reading of a recipe and of sources.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import constants

from hf_ckpt.errors import BudgetError
from hf_ckpt.loading.config_files import in_hub_cache, known_configs, shaping_recipes
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.devices import may_have_gpu

# Every source counts: models import each other, and all of them are hashed in a tenth of a second.
_SOURCES = ("hf_ckpt", "transformers", "peft", "accelerate", "bitsandbytes")
# What computes, and what transformers takes other kernels from where it is installed.
_VERSIONS = (
    *("torch", "transformers", "peft", "accelerate", "bitsandbytes", "trl", "numpy", "deepspeed", "liger_kernel"),
    *("triton", "kernels", "flash_attn", "flash_attn_3", "flash_linear_attention", "causal_conv1d", "mamba_ssm"),
    *("xformers", "torchao", "torchvision", "timm", "scipy", "einops", "huggingface_hub", "safetensors"),
)
_VARIABLES = (
    *("ACCELERATE_", "ATEN_", "BNB_", "CUBLAS", "CUDA", "CUDNN", "DS_", "FLASH_ATTENTION", "FSDP_", "HF_", "LIGER_"),
    *("LOCAL_WORLD_SIZE", "NVIDIA_", "PYTORCH", "TORCH", "TRANSFORMERS_", "TRITON_", "USE_", "WORLD_SIZE"),
)
"""How the names of the variables begin that change what is computed, and where configs are found."""
_NO_VARIABLES = ("HF_CKPT_CACHE",)
_SECRET = ("TOKEN", "SECRET", "PASSWORD")
# What is asked of the answer, or was read into the recipe.
_NOT_ASKED = ("words", "recipe", "overrides", "json", "verbose", "no_cache", "out", "plot", "html")
_MOST_HASHED_BYTES = 2**20
"""Up to this size files count by their content, above it by size and date: configs, plans and code are smaller."""


def remembered(
    command: str, recipe: Recipe, options: argparse.Namespace, make: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Return the document that a command answers with, and whether it was kept from an earlier time.

    A picture or a page needs more than the document: with `--plot` or `--html` nothing is read, as with `--no-cache`.

    Args:
        command: its name.
        recipe: what was read.
        options: of the command line.
        make: makes the document, of what JSON can hold.

    Raises:
        BudgetError: `make` raised it, now or then.
    """
    # Libraries write into the environment when they are imported.
    environment = dict(os.environ)
    is_wanted = not options.no_cache and options.plot is None and options.html is None
    key = answer_key(command, recipe, options, environment) if is_wanted else None
    kept = None if key is None else read_answer(key)
    # As it will be read: the same types the first time and later.
    document: dict[str, Any] = json.loads(json.dumps(_made(make))) if kept is None else kept
    # Sources may have been edited meanwhile, or a config fetched from the hub.
    if kept is None and key is not None and key == answer_key(command, recipe, options, environment):
        write_answer(key, document)
    if _NOTHING_FITS in document:
        raise BudgetError(document[_NOTHING_FITS])
    return document, kept is not None


_NOTHING_FITS = "nothing_fits"


def _made(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the document; that nothing fits is an answer too, and takes longest to find out."""
    try:
        return make()
    except BudgetError as error:
        return {_NOTHING_FITS: str(error)}


def answer_key(command: str, recipe: Recipe, options: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Return a hash of all that the answer depends on; None where that is not known, and nothing is to be kept.

    It cannot where the answer may be about this machine's GPU (what is free in host memory counts then), or where
    the config has to be fetched from the hub.
    """
    if not options.device and may_have_gpu():
        return None
    asked = {name: value for name, value in vars(options).items() if name not in _NOT_ASKED}
    try:
        recipes = shaping_recipes(recipe)
        model = _model_files(recipes[-1].model)
        if model is None:
            return None
        depends_on = {
            "command": command,
            "options": asked,
            "recipes": [each.to_yaml() for each in recipes],
            # Titles, and what relative paths mean.
            "path": str(recipe.path),
            "folder": str(Path.cwd()),
            "model": model,
            "files": _files(recipes, asked),
            "sources": {name: _package(name) for name in _SOURCES},
            "versions": {name: _version(name) for name in _VERSIONS},
            "machine": _machine(recipe, options),
            "environment": _environment(environment),
        }
    # A file that cannot be read, a package without a spec, a recipe or a YAML file with a mistake in it.
    except (OSError, ValueError, RuntimeError, yaml.YAMLError):
        return None
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode()).hexdigest()


# --- The machine, versions and variables. ---


def _machine(recipe: Recipe, options: argparse.Namespace) -> list[object]:
    """Return what runs the code, and what the device "cpu" is described by where the answer is about it."""
    runs = [sys.version, sys.platform, platform.machine(), may_have_gpu()]
    if not recipe.training.get("use_cpu") and "cpu" not in str(options.device).lower():
        # Virtual machines may be given memory while they run.
        return runs
    return [*runs, os.cpu_count(), os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "" if any(word in name for word in _SECRET) else value
        for name, value in environment.items()
        if name.startswith(_VARIABLES) and name not in _NO_VARIABLES
    }


# --- Files. ---


def _package(name: str) -> str:
    """Return a hash of a package's sources, without importing it."""
    spec = importlib.util.find_spec(name)
    return "absent" if spec is None or spec.origin is None else _tree(Path(spec.origin).parent)


def _tree(folder: Path) -> str:
    """Return a hash of all sources and JSON files under a folder."""
    digest = hashlib.sha256()
    for where, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        for name in sorted(names):
            if name.endswith((".py", ".json")):
                path = os.path.join(where, name)
                digest.update(f"{os.path.relpath(path, folder)} {_file(path)}\n".encode())
    return digest.hexdigest()


def _unreadable(error: OSError) -> None:
    # A folder inside of a zip file, for one: what lies there is not known.
    raise error


def _file(path: str) -> str:
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_size > _MOST_HASHED_BYTES:
            return f"{found.st_size} {found.st_mtime_ns}"
        return hashlib.sha256(file.read()).hexdigest()


def _model_files(section: Mapping[str, Any]) -> object:
    """Return hashes of the model's config and code, in the place where they will be looked for; None on the hub."""
    if "config" in section:
        return "model.config"
    name = section["name_or_path"]
    folder = Path(name)
    if not folder.is_dir():
        found = in_hub_cache(name, section.get("revision"))
        if found is None:
            return _known(name)
        folder = found
    if section.get("trust_remote_code"):
        return [_tree(folder), *map(_tree, _other_code(folder))]
    return {path.name: _file(str(path)) for path in folder.glob("*.json")}


def _known(name: str) -> object:
    """Return that the package knows the config of a hub model, and whether its user may be given a gated one."""
    # Where the hub gives the config after all, the key is another one afterwards: it is in the hub's cache.
    fields = known_configs().get(name)
    return None if fields is None else [fields, Path(constants.HF_TOKEN_PATH).is_file()]


def _other_code(folder: Path) -> Iterator[Path]:
    """Yield the other repositories whose code a config names, as in `org/repository--modeling.Class`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for repository in sorted({text.split("--")[0] for text in _texts(config.get("auto_map")) if "--" in text}):
        found = in_hub_cache(repository, None)
        if found is None:
            raise FileNotFoundError(repository)
        yield found


def _files(recipes: list[Recipe], asked: Mapping[str, Any]) -> dict[str, str]:
    """Return hashes of the files that recipes and options name, such as plans. Data does not count."""
    sections = [
        [each.model, each.adapter_section, each.quantization, each.checkpointing, each.training] for each in recipes
    ]
    texts = [*_texts(sections), *_texts(asked)]
    launch: Path | None = asked.get("accelerate_config")
    if launch is not None:
        # It may name DeepSpeed's.
        texts += [str(launch), *_texts(yaml.safe_load(launch.read_text(encoding="utf-8")))]
    return {text: _file(os.path.expanduser(text)) for text in texts if os.path.isfile(os.path.expanduser(text))}


def _texts(value: object) -> Iterator[str]:
    """Yield every text in nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


# --- Answers on disk. ---


MAX_BYTES = 256 * 2**20
"""Of all answers together."""
_ABANDONED_S = 3600.0
"""Age from which a temporary file is taken for that of a writer that was killed."""
_ANSWER = re.compile(r"[0-9a-f]{64}\.json")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.\w+\.tmp")
_UNAVAILABLE = (OSError, RuntimeError)
"""RuntimeError: a user without a home."""


def read_answer(key: str) -> dict[str, Any] | None:
    """Return the answer that was written under `key` (a SHA-256 in hex), and note that it was used."""
    try:
        path = _folder() / f"{key}.json"
        content = path.read_bytes()
    except _UNAVAILABLE:
        return None
    document = _checked(key, content)
    with contextlib.suppress(OSError):
        if document is None:
            path.unlink()
        else:
            os.utime(path)
    return document


def write_answer(key: str, document: dict[str, Any]) -> None:
    """Keep an answer, in one move: a reader finds the whole of it or nothing. Others go until there is room."""
    content = json.dumps({"key": key, "sha256": _digest(document), "document": document}).encode()
    with contextlib.suppress(*_UNAVAILABLE):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        _make_room(folder, len(content))
        # In the same folder, else it would be copied and not moved.
        handle, temporary = tempfile.mkstemp(prefix=f"{key}.", suffix=".tmp", dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, folder / f"{key}.json")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _folder() -> Path:
    # A folder of its own: what is removed there is never the user's.
    own = os.environ.get("HF_CKPT_CACHE")
    if own:
        return Path(own).expanduser() / "answers"
    general = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(general) if os.path.isabs(general) else Path.home() / ".cache") / "hf_ckpt" / "answers"


def _digest(document: object) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _checked(key: str, content: bytes) -> dict[str, Any] | None:
    """Return the document of a file, or nothing where it is not what `write_answer` wrote under this key."""
    try:
        read = json.loads(content)
        document: dict[str, Any] = read["document"]
        is_whole = read["key"] == key and read["sha256"] == _digest(document)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return document if is_whole else None


def _make_room(folder: Path, num_bytes: int) -> None:
    """Remove the answers used least recently until `num_bytes` more fit, and what killed writers left."""
    answers: list[tuple[int, int, Path]] = []
    for path in folder.iterdir():
        # Another process may remove it first.
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if _ANSWER.fullmatch(path.name):
                answers.append((found.st_mtime_ns, found.st_size, path))
            elif _TEMPORARY.fullmatch(path.name) and time.time() - found.st_mtime > _ABANDONED_S:
                path.unlink()
    excess = sum(size for _, size, _ in answers) + num_bytes - MAX_BYTES
    for _, size, path in sorted(answers):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size
