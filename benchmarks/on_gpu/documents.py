"""The blocks of documents that say what was measured on a GPU: written from the results that are there.

A block stands between `<!-- gpu:NAME -->` and `<!-- /gpu -->`; what is written into it by hand is lost. A test holds
the committed documents against what is written here.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.setting import Stage
from benchmarks.pages.drawing import GIB
from benchmarks.pages.words import table
from benchmarks.pages.write import write as write_pages

PLACES = ("README.md", "benchmarks/README.md", "docs/memory.md", "docs/long_context.md")
"""Documents with blocks."""
COMMAND = "`make bench-gpu`"
_BLOCK = re.compile(r"(?P<start><!-- gpu:(?P<name>[\w-]+) -->).*?(?P<end><!-- /gpu -->)", re.DOTALL)
_WIDTH = 120
_HEADLINE = "side_by_side_llama2_7b_lora_2048_cuda.json"
_LONGEST = "longctx_limit_24gib_cuda.json"


@dataclass(frozen=True)
class Results:
    """The results that are there.

    Args:
        folder: of the JSONs.
        document: that links them.
    """

    folder: Path
    document: Path

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a result; None if it is not there."""
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def matching(self, pattern: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield results by the names of their files."""
        for path in sorted(self.folder.glob(pattern)):
            yield path.name, json.loads(path.read_text(encoding="utf-8"))

    def link(self, name: str, words: str = "result") -> str:
        """Return a link to a result."""
        return f"[{words}]({os.path.relpath(self.folder / name, self.document.parent)})"


def write(stages: Sequence[Stage], folder: Path, root: Path) -> list[Path]:
    """Write all that is written from results: pages, pictures and blocks; return the files.

    Args:
        stages: that there are.
        folder: of the results.
        root: of the documents.
    """
    written = write_pages(folder, root / "docs")
    for place in PLACES:
        path = root / place
        old = path.read_text(encoding="utf-8")
        new = filled(old, stages, Results(folder, path))
        if new != old:
            path.write_text(new, encoding="utf-8")
            written.append(path)
    return written


def filled(text: str, stages: Sequence[Stage], results: Results) -> str:
    """Return a document with its blocks written from results.

    Args:
        text: of the document.
        stages: that there are.
        results: that it links.
    """

    def fill(block: re.Match[str]) -> str:
        return f"{block['start']}\n\n{_BLOCKS[block['name']](stages, results)}\n\n{block['end']}"

    return _BLOCK.sub(fill, text)


def _auto(stages: Sequence[Stage], results: Results) -> str:
    found = results.get(_HEADLINE)
    verdict = found.get("verdict") if found else None
    if found is None or not verdict or verdict["best_gain_over_today"] is None:
        return _paragraph(f"Not yet measured on a GPU: {COMMAND}.")
    return _paragraph(
        f"Measured on one {_card(found)}: `auto` takes up to {verdict['best_gain_over_today']:.0%} less time than the "
        f"best that `Trainer` can set in the same memory, and at worst {verdict['worst_ratio_to_fixed']:.2f} times the "
        f"time of the fastest fixed setting that fits ({results.link(_HEADLINE)}).{_prepared_for_another(found)}"
    )


def _longest(stages: Sequence[Stage], results: Results) -> str:
    found = results.get(_LONGEST)
    if found is None or not found.get("longest"):
        return _paragraph(f"Not yet measured on a GPU: {COMMAND}.")
    return _paragraph(
        f"Measured on one {_card(found)} with the allocator capped at 24 GiB: a row of {found['longest']:,} tokens "
        f"trains, where {found['predicted']['length']:,} tokens are predicted ({results.link(_LONGEST)})."
        f"{_prepared_for_another(found)}"
    )


def _accuracy(stages: Sequence[Stage], results: Results) -> str:
    rows = [
        (
            results.link(name, f"`{result['name']}`"),
            f"{result['predicted']['peak_bytes'] / GIB:.2f}",
            f"{result['measured']['peak_bytes'] / GIB:.2f}",
            f"{result['peak_ratio']:.3f}",
            f"{result['predicted']['step_time_ms']:,.0f}",
            f"{result['measured']['step_time_ms_median']:,.0f}",
            f"{result['step_time_ratio']:.2f}",
            _card(result),
        )
        for name, result in results.matching("predict_*_cuda.json")
        if "peak_ratio" in result
    ]
    if not rows:
        return _paragraph(f"Not yet measured on a GPU: {COMMAND}.")
    header = (
        *("step", "predicted peak, GiB", "measured peak, GiB", "ratio"),
        *("predicted time, ms", "measured time, ms", "ratio", "on"),
    )
    return table(header, rows)


def _left(stages: Sequence[Stage], results: Results) -> str:
    rows = [
        (f"`{stage.name}`", stage.question, f"{len(missing)} of {len(stage.files)}")
        for stage in stages
        if (missing := [name for name in stage.files if not (results.folder / name).is_file()])
    ]
    if not rows:
        return _paragraph("Nothing is left: every stage has its results.")
    # What a stage is about is no figure that was found.
    return "<!-- given: what there is to measure -->\n" + table(("stage", "question", "results to come"), rows)


_BLOCKS: Mapping[str, Callable[[Sequence[Stage], Results], str]] = {
    "auto": _auto,
    "longest": _longest,
    "accuracy": _accuracy,
    "left": _left,
}


def _paragraph(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _prepared_for_another(result: Mapping[str, Any]) -> str:
    differences = result["environment"].get("prepared_for_another")
    return f" Plans were prepared for another run: {'; '.join(differences)}." if differences else ""


def _card(result: Mapping[str, Any]) -> str:
    return str(result["environment"]["hardware"].get("gpu", "GPU"))
