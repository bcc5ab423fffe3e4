"""Imports run downward only (`ORDER`), no two files import each other, and importing the package changes nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_ckpt"

# The folders and files of the package from the bottom up: each may import those before it, and itself.
# `__init__` hands out everything and may import all.
ORDER = (
    "errors",
    "units",
    "upstream",
    "garbage_collection",
    "second_process",
    "policy",
    "html_svg",
    "structure",
    "regions",
    "distributed",
    "patch",
    "trainer",
    "own_loop",
    "callback",
    "simulation",
    "planner",
    "measure",
    "auto",
    "recovery",
    "integrations",
    "recipe",
    "loading",
    "estimate",
    "finetune",
    "verify",
    "cli",
    "__main__",
)
# Three houses. The plugin stands alone; the prediction stands on it; the workshop, which is the rest, on both.
PREDICTION = {"simulation", "planner", "measure", "auto", "recovery"}
WORKSHOP = {"integrations", "recipe", "loading", "estimate", "finetune", "verify", "cli", "__main__"}
PLUGIN = set(ORDER) - PREDICTION - WORKSHOP
PURE_PYTHON = {"errors", "units", "html_svg", "policy"}
# The only ones that know YAML, data sets and tokenizers.
RECIPES = {"recipe", "loading", "estimate", "finetune", "verify", "cli", "__main__"}
# Read other trainers' interfaces where those are installed.
GUARDED = {"integrations"}
CORE = set(ORDER) - RECIPES - GUARDED
# Packs a mixture's experts in 4 bits as bitsandbytes does; simulates its layers and optimizers where they are
# installed, and draws.
WITH_OPTIONAL = {"upstream", "simulation"}

CORE_REQUIREMENTS = {"torch", "transformers", "accelerate"}
OPTIONAL = {"bitsandbytes", "gradio", "liger_kernel", "matplotlib", "trl"}
FINETUNE_ONLY = {"datasets", "tokenizers", "yaml"}


@dataclass(frozen=True)
class Import:
    """One imported module, and the part and line that import it."""

    part: str
    module: str
    where: str
    runs_on_import: bool

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]

    @property
    def target_part(self) -> str | None:
        """The part of the package that is imported, or None for another package."""
        return part_of(self.module) if self.root == "hf_ckpt" else None


def part_of(module: str) -> str:
    return module.removeprefix("hf_ckpt").lstrip(".").partition(".")[0] or "__init__"


def module_name(path: Path) -> str:
    return ".".join(("hf_ckpt", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def imported_modules(node: ast.AST, importer: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, f"{importer}, line {node.lineno}: write imports absolute"
    assert node.module is not None
    if node.module == "hf_ckpt":
        return [f"hf_ckpt.{alias.name}" for alias in node.names]
    return [node.module]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def deferred_nodes(tree: ast.Module) -> set[ast.AST]:
    """Nodes that importing the module does not run: bodies of functions, and what only type checkers read."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    deferred = [node for node in ast.walk(tree) if isinstance(node, functions) or is_type_checking(node)]
    return {inner for node in deferred for inner in ast.walk(node)}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def all_imports() -> Iterator[Import]:
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = tree_of(path)
        importer, deferred = module_name(path), deferred_nodes(tree)
        for node in ast.walk(tree):
            for module in imported_modules(node, importer):
                where = f"{path.relative_to(PACKAGE.parent)}:{node.lineno} imports {module}"
                yield Import(part_of(importer), module, where, node not in deferred)


@cache
def imports() -> list[Import]:
    """Not read when tests are collected, which each process does."""
    return [found for found in all_imports() if found.part != "__init__"]


def test_every_part_has_its_place() -> None:
    parts = {part_of(module_name(path)) for path in PACKAGE.rglob("*.py")}
    assert parts - {"__init__"} == set(ORDER)


def test_imports_run_downward_only() -> None:
    upward = [
        found.where
        for found in imports()
        if found.target_part is not None and ORDER.index(found.target_part) > ORDER.index(found.part)
    ]
    assert upward == []


def test_the_plugin_imports_neither_prediction_nor_workshop() -> None:
    """Not even from inside a function, or for a type: what it needs of them is found by name (`trainer/part.py`)."""
    outside = PREDICTION | WORKSHOP
    assert [found.where for found in imports() if found.part in PLUGIN and found.target_part in outside] == []


def test_the_prediction_knows_nothing_of_the_workshop() -> None:
    assert [found.where for found in imports() if found.part in PREDICTION and found.target_part in WORKSHOP] == []


def test_no_files_import_each_other() -> None:
    """Not even from inside a function: what needs each other belongs in one file."""
    names = {module_name(path) for path in PACKAGE.rglob("*.py")} - {"hf_ckpt"}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module and module_name(path) in names:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & names
                graph[module_name(path)] |= submodules or {node.module} & names
    sorter = TopologicalSorter(graph)
    sorter.prepare()  # raises CycleError, which names the files


def loaded_by(names: set[str]) -> set[str]:
    """The files of the package that importing `names` runs, by name; bodies of functions are not run."""
    paths = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    loaded: set[str] = set()
    while names := names & set(paths) - loaded:
        loaded |= names
        trees = [(name, tree_of(paths[name])) for name in names]
        names = {
            found
            for name, tree in trees
            for node in set(ast.walk(tree)) - deferred_nodes(tree)
            for found in (*imported_modules(node, name), *submodules_of(node))
        }
    return loaded


def submodules_of(node: ast.AST) -> list[str]:
    return [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def test_what_the_base_installs_is_enough_for_all_commands_that_do_not_train() -> None:
    commands = {
        f"hf_ckpt.cli.{name}" for name in ("answer_cache", "estimate", "init", "inspect", "plan", "recipes", "ui")
    }
    bodies = [ast.walk(ast.parse((PACKAGE / f"cli/{name.rpartition('.')[2]}.py").read_text())) for name in commands]
    imported = {
        found
        for nodes in bodies
        for node in nodes
        for found in (*imported_modules(node, "hf_ckpt.cli"), *submodules_of(node))
    }
    loaded = loaded_by(imported)
    assert {
        "hf_ckpt.estimate.max_length_and_batch",
        "hf_ckpt.cli.inspect_report",
        "hf_ckpt.loading.model",
    } <= loaded
    paths = {str(Path(*name.split(".")).with_suffix(".py")) for name in loaded}
    needed = [
        f.where for f in imports() if f.runs_on_import and f.root == "datasets" and f.where.split(":")[0] in paths
    ]
    assert needed == []


def test_pure_parts_import_the_standard_library_only() -> None:
    foreign = [
        found.where
        for found in imports()
        if found.part in PURE_PYTHON and found.root not in sys.stdlib_module_names | {"hf_ckpt"}
    ]
    assert foreign == []


def test_core_needs_its_requirements_only() -> None:
    # numpy comes with transformers.
    allowed = sys.stdlib_module_names | CORE_REQUIREMENTS | {"hf_ckpt", "numpy"}
    foreign = [f.where for f in imports() if f.part in CORE and f.runs_on_import and f.root not in allowed]
    assert foreign == []


def test_core_never_imports_optional_or_fine_tuning_libraries() -> None:
    parts = CORE - WITH_OPTIONAL
    assert [f.where for f in imports() if f.part in parts and f.root in OPTIONAL | FINETUNE_ONLY] == []
    assert [f.where for f in imports() if f.part in WITH_OPTIONAL and f.root in FINETUNE_ONLY] == []


def test_optional_libraries_are_imported_where_they_are_used() -> None:
    assert [f.where for f in imports() if f.runs_on_import and f.root in OPTIONAL] == []


EFFECTS_OF_IMPORT = """
import json, logging, os, sys, warnings
before = dict(os.environ), list(warnings.filters), list(logging.getLogger().handlers), sys.excepthook
import {module}
after = dict(os.environ), list(warnings.filters), list(logging.getLogger().handlers), sys.excepthook
imported = sorted({{name.partition(".")[0] for name in sys.modules}})
print(json.dumps({{"unchanged": before == after, "imported": imported}}))
"""


# transformers' TrainerCallback brings in peft, and peft bitsandbytes, which says this of itself.
NOT_OURS = "Failed to load CPU gemm_4bit_forward"


def output_of(code: str) -> str:
    """What `code` prints in a fresh interpreter; anything of ours on its standard error is a failure."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    ours = [line for line in done.stderr.splitlines() if not line.startswith(NOT_OURS)]
    assert (done.returncode, ours) == (0, [])
    return done.stdout


@pytest.mark.core
@pytest.mark.parametrize("module", ["hf_ckpt", "hf_ckpt.policy.policy", "hf_ckpt.policy.plan", "hf_ckpt.recipe.recipe"])
def test_import_has_no_side_effect_and_loads_nothing_heavy(module: str) -> None:
    effects = json.loads(output_of(EFFECTS_OF_IMPORT.format(module=module)))
    assert effects["unchanged"] is True
    heavy = CORE_REQUIREMENTS | OPTIONAL | {"datasets", "tokenizers", "peft", "numpy"}
    assert heavy.isdisjoint(effects["imported"])


@pytest.mark.core
@pytest.mark.sweep
def test_importing_every_core_module_touches_no_device() -> None:
    modules = [module_name(path) for path in sorted(PACKAGE.rglob("*.py")) if part_of(module_name(path)) in CORE]
    code = f"import {', '.join(modules)}; import torch; print(torch.cuda.is_initialized())"
    assert output_of(code) == "False\n"


def test_the_callback_loads_what_every_run_needs_and_no_more() -> None:
    """Who fails to import, for want of a name of another library, say, is to fail in the runs that ask for it."""
    rarely = ("hf_ckpt.recovery", "hf_ckpt.distributed.fsdp", "hf_ckpt.auto.trl_", "hf_ckpt.upstream.trl")
    assert [name for name in sorted(loaded_by({"hf_ckpt.callback"})) if name.startswith(rarely)] == []


def test_a_loop_without_a_trainer_loads_none() -> None:
    """Importing it takes seconds, and brings in peft and bitsandbytes."""
    paths = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    trees = {name: tree_of(paths[name]) for name in loaded_by({"hf_ckpt.own_loop"})}
    found = {
        f"{name} imports {alias.name}"
        for name, tree in trees.items()
        for node in set(ast.walk(tree)) - deferred_nodes(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "transformers"
        for alias in node.names
        if alias.name.startswith(("Train", "Seq2SeqTrain"))
    }
    assert "hf_ckpt.trainer.part" in trees
    assert found == set()
