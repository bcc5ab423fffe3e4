"""Starts scripts with --help as if the package was not installed, each in a fork of one process that has the libraries.

    python tests/script_starts.py FOLDER < [["path", "benchmarks/x.py"], ["name", "benchmarks.x"], ...]

Prints as JSON what went wrong, by the script; only what scripts put on the path themselves leads to the repository.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import sys
import traceback
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

# Slow to import, and alike in all scripts.
import accelerate  # noqa: F401
import bitsandbytes  # noqa: F401
import datasets  # noqa: F401
import peft  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers import Trainer  # noqa: F401

ROOT = str(Path(__file__).parents[1])
PACKAGES = ("hf_ckpt", "benchmarks")


class NotInstalled:
    """Finds the repository's packages only in places that were not on the path in the beginning."""

    def __init__(self) -> None:
        sys.path[:] = [place for place in sys.path if os.path.realpath(place or ".") != os.path.realpath(ROOT)]
        self._before = list(sys.path)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in PACKAGES:
            return None
        found = PathFinder.find_spec(name, [place for place in sys.path if place not in self._before])
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found


def start(how: str, script: str) -> str:
    """Run a script with --help; return what went wrong."""
    sys.argv = [script, "--help"]
    try:
        if how == "path":
            sys.path.insert(0, str(Path(ROOT, script).parent))
            runpy.run_path(str(Path(ROOT, script)), run_name="__main__")
        else:
            sys.path.insert(0, ROOT)
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return "" if not end.code else f"exit code {end.code}"
    except BaseException:  # noqa: BLE001  # whatever it is, it is what went wrong
        return traceback.format_exc()
    return "it has no --help"


def in_a_fork(how: str, script: str) -> str:
    """Do that in a process of its own."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            wrong = start(how, script)
        os.write(writes, wrong[-4000:].encode())
        os._exit(0)
    os.close(writes)
    with open(reads, encoding="utf-8") as file:
        wrong = file.read()
    os.waitpid(pid, 0)
    return wrong


def main() -> None:
    """Start all of them."""
    assert not [name for name in sys.modules if name.partition(".")[0] in PACKAGES]
    sys.meta_path.insert(0, NotInstalled())
    os.chdir(sys.argv[1])
    # A fork that searches all this for garbage would copy it.
    gc.freeze()
    found = {" ".join(each): in_a_fork(*each) for each in json.load(sys.stdin)}
    # Else nanobind, at exit, takes what is frozen for leaked.
    gc.unfreeze()
    print(json.dumps({words: wrong for words, wrong in found.items() if wrong}))


if __name__ == "__main__":
    main()
