"""Run a notebook's cells in order in one namespace, and write what they show into it.

    python scripts/run_notebook.py notebooks/qlora_on_a_free_gpu.ipynb [--write]

Stands in for Jupyter, which nothing else here needs: text on standard output, and the value of a cell's last line.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

_LONGEST = 6000
"""Characters of an output that are kept."""


def run(path: Path, *, is_written: bool) -> None:
    """Run the cells of a notebook.

    Args:
        path: of the notebook.
        is_written: store the outputs in it.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate([cell for cell in notebook["cells"] if cell["cell_type"] == "code"], start=1):
        print(f"[cell {number}]", flush=True)
        cell["outputs"], cell["execution_count"] = list(_outputs("".join(cell["source"]), number, names)), number
    if is_written:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


def _outputs(text: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(text)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    name, printed, value = f"cell {number}", io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if shown := printed.getvalue()[:_LONGEST]:
        print(shown, end="", flush=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": shown.splitlines(keepends=True)})
    if value is not None:
        shown = repr(value)[:_LONGEST]
        print(shown, flush=True)
        data = {"text/plain": shown.splitlines(keepends=True)}
        outputs.append({"output_type": "execute_result", "execution_count": number, "data": data, "metadata": {}})
    return outputs


def main() -> None:
    """Run the notebook that the command line names."""
    parser = argparse.ArgumentParser(description="Run the cells of a notebook in order.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true", help="store the outputs in the notebook")
    options = parser.parse_args()
    # As a notebook's own kernel: what lies next to this script is not importable.
    sys.path[0] = ""
    run(options.notebook, is_written=options.write)


if __name__ == "__main__":
    main()
