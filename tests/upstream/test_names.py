"""Private names of other libraries stand in `hf_ckpt.upstream` alone. One that is gone takes one feature with it."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import upstream
from hf_ckpt.errors import UnsupportedError

PACKAGE = Path(upstream.__file__).parents[1]
DOOR = PACKAGE / "upstream"
LIBRARIES = {*upstream.LIBRARIES, "liger_kernel", "datasets", "safetensors", "tokenizers"}

# --- Nothing else reads one. ---

EXEMPT = re.compile(
    # Of tensors and modules, in use everywhere, and dictionaries of hooks.
    r"_version|_parameters|_modules|_buffers|_\w*hooks\w*"
    # Of Python and numpy: named tuples, frames, processes, notebooks, parsers, generators.
    r"|_replace|_make|_fields|_getframe|_current_frames|_exit|_run_exitfuncs|_repr_html_|_actions|_inst|_rand"
    # Marks of our own on objects of others.
    r"|_hf_ckpt\w*"
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and len(name) > 1 and not EXEMPT.fullmatch(name)


@cache
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")
    }


@cache
def outside() -> list[tuple[str, ast.AST]]:
    """Return the nodes of all files but those of names, each with its file."""
    return [
        (path, node) for path, tree in trees().items() if Path(path).parts[0] != DOOR.name for node in ast.walk(tree)
    ]


@cache
def own_names() -> frozenset[str]:
    """Names that the package gives itself: of functions and classes, and of what it assigns."""
    found = {node.id for _, node in outside() if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found |= {node.name for _, node in outside() if isinstance(node, kinds)}
    found |= {
        node.attr
        for _, node in outside()
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    }
    slots = (
        node.value
        for _, node in outside()
        if isinstance(node, ast.Assign) and "__slots__" in map(ast.unparse, node.targets)
    )
    return frozenset(
        found | {each.value for slot in slots for each in ast.walk(slot) if isinstance(each, ast.Constant)}
    )


def test_nothing_else_imports_a_private_name() -> None:
    found = []
    for path, node in outside():
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            library, *rest = module.split(".")
            if library in LIBRARIES and any(map(is_private, rest)):
                found.append(f"{path}:{node.lineno} {module}")
    assert found == []


def test_nothing_else_reads_a_private_attribute() -> None:
    """Also of objects, such as a trainer or a tensor, where the package has no attribute of that name itself."""
    libraries = {
        (path, alias.asname or alias.name.partition(".")[0])
        for path, node in outside()
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (node.module if isinstance(node, ast.ImportFrom) else alias.name or "").partition(".")[0] in LIBRARIES
    }
    found = []
    for path, node in outside():
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = ast.unparse(node).partition(".")[0]
            if (path, root) in libraries or node.attr not in own_names():
                found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    assert found == []


def test_nothing_else_writes_one_as_text() -> None:
    names = {name for _, name in private_names()}
    found = [
        f"{path}:{node.lineno} {node.value}"
        for path, node in outside()
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
        if node.value not in own_names()
    ]
    assert found == []


# --- Each name taken away in turn. ---


@cache
def private_names() -> tuple[tuple[str, str], ...]:
    """The private names in each file of names, and what is imported from private modules."""
    found: dict[tuple[str, str], None] = {}
    for library in upstream.LIBRARIES:
        for node in ast.walk(ast.parse((DOOR / f"{library}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in LIBRARIES:
                is_inside = any(map(is_private, str(node.module).split(".")))
                names = [alias.name for alias in node.names if is_inside or is_private(alias.name)]
            elif isinstance(node, ast.Attribute):
                names = [node.attr] if is_private(node.attr) else []
            else:
                names = [str(node.value)] if isinstance(node, ast.Constant) else []
                names = [name for name in names if name.isidentifier() and is_private(name)]
            found |= {(library, name): None for name in names}
    return tuple(found)


# Of some versions only: without them things are as they were before, or as they are after.
OF_SOME_VERSIONS = {
    "_fsdp_param_groups",
    "_fsdp_param_group",
    "_can_checkpoint_with_cache",
    "_experts_implementation",
    "_loss_shifts_labels",
    "_pp_stage",
}
MODULES = {
    "_C",
    "_autograd",
    "_functions",
    "_distributed_c10d",
    "_c10d_functional",
    "_python_dispatch",
    "_execution_engine",
}
TAKEN = [(library, name) for library, name in private_names() if name not in MODULES]
ALWAYS = ("full", "ffn", "callback")


@pytest.fixture(scope="module")
def take_away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], dict[str, Any]]]:
    """Returns what comes of the package without a name."""
    pytest.importorskip("datasets")
    words = [sys.executable, str(Path(__file__).with_name("taken_away.py")), str(tmp_path_factory.mktemp("runs"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, text=True, bufsize=1, cwd=PACKAGE.parent, **pipes) as process:  # type: ignore[call-overload]

        def ask(library: str, name: str) -> dict[str, Any]:
            process.stdin.write(f"{library} {name}\n")
            answer = next(line for line in process.stdout if line.startswith("@"))
            return json.loads(answer[1:])

        yield ask
        process.stdin.close()


@pytest.mark.core
def test_nothing_is_missing_here(take_away: Callable[[str, str], dict[str, Any]]) -> None:
    whole = take_away("torch", "")
    assert set(whole["outcomes"].values()) == {"exact"}
    assert whole["missing"] == []
    assert whole["logged"] == []


@pytest.mark.core
@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize(("library", "name"), TAKEN, ids=[" ".join(each) for each in TAKEN])
def test_a_name_that_is_gone_takes_one_feature_with_it(
    library: str, name: str, take_away: Callable[[str, str], dict[str, Any]]
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    found = take_away(library, name)
    assert {use: found["outcomes"].get(use) for use in ALWAYS} == dict.fromkeys(ALWAYS, "exact")
    messages = [text for text in found["outcomes"].values() if text != "exact"] + found["logged"]
    assert [text for text in messages if f"{name}_of_a_later_version" not in text] == []
    if name not in OF_SOME_VERSIONS:
        # Of operators, and of units of FSDP1, which have nothing to do with each other.
        assert len(found["missing"]) == (2 if name == "_handle" else 1)
    for feature, gone, message in found["missing"]:
        assert f"{name}_of_a_later_version" in gone
        assert message.startswith(f"{feature} needs {gone}, which {library}")


# --- The blocks. ---


@pytest.mark.core
def test_a_block_ends_where_a_name_is_gone_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_FEATURES", [])
    with upstream.Feature("Flying", seen="torch 2.11", instead="Walk.") as feature:
        from torch import _no_such_name as fly  # noqa: F401
    message = str(feature.error())
    assert feature.gone == "torch._no_such_name"
    assert message.startswith("Flying needs torch._no_such_name, which torch 2.")
    assert message.endswith(" does not have; hf_ckpt has seen it in torch 2.11. Walk.")
    assert list(feature.names_gone()) == ["torch._no_such_name"]


@pytest.mark.core
def test_what_reads_an_object_names_the_attribute_that_is_gone() -> None:
    feature = upstream.Feature("Flying", seen="torch 2.11", instead="Walk.")
    try:

        @feature
        def wings(bird: Any) -> Any:
            return bird._wings

        with pytest.raises(UnsupportedError, match=r"Flying needs object\._wings, which torch"):
            wings(object())
    finally:
        upstream._FEATURES.remove(feature)
