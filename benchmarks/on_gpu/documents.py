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
_HEADLINE, _SECOND = (f"side_by_side_{case}_cuda.json" for case in ("llama2_7b_lora_2048", "llama32_1b_full_2048"))
_LONGEST = "longctx_limit_24gib_cuda.json"
_BRACKETS = tuple(f"longctx_bracket_{cap}gib_cuda.json" for cap in (24, 80))
_EXACTNESS, _RECOVERY, _PROOF = "exactness_cuda.json", "recovery_cuda.json", "proof_cuda.json"
_SOURCES = (_EXACTNESS, _RECOVERY, _HEADLINE)


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


def _headline(stages: Sequence[Stage], results: Results) -> str:
    """Return the least that a reader wants to know, in a paragraph."""
    found = results.get(_HEADLINE)
    if found is None or not found.get("budgets"):
        return _paragraph(f"Not yet measured on a GPU: {COMMAND}.")
    (auto,) = _compared(found)
    return _paragraph(
        f"Measured on one {_card(found)}: {auto} ({results.link(_HEADLINE)}). Exactness, recovery, peaks, and what is "
        f"worse than predicted: {_page(results, 'benchmarks/README.md', 'measured-on-a-gpu', 'all of it')}."
    )


def _measured(stages: Sequence[Stage], results: Results) -> str:
    """Return all that was measured, a line for each kind."""
    makers = (_exactness, _recovery, _peaks, _auto, _proof)
    lines = [line for make in makers for line in make(results)]
    if not lines:
        return _paragraph(f"Not yet measured on a GPU: {COMMAND}.")
    cards = dict.fromkeys(card for name in _SOURCES if (found := results.get(name)) and (card := _card(found)))
    head = f"Measured on one {' and one '.join(cards)}:"
    items = [textwrap.indent(_paragraph(line, _WIDTH - 2), "  ").replace("  ", "- ", 1) for line in lines]
    return "\n".join([head, "", *items])


def _exactness(results: Results) -> Iterator[str]:
    found = results.get(_EXACTNESS)
    if found is not None:
        passed, skipped = (found["outcomes"].get(name, 0) for name in ("passed", "skipped"))
        wrong = found["num_cases"] - passed - skipped
        yield (
            f"**Exact:** {passed} of the {passed + wrong} GPU tests that ran passed ({skipped} were skipped). "
            "Most hold loss and gradients of a plan against those of a step without one, to the bit "
            f"({results.link(_EXACTNESS)})."
        )


def _recovery(results: Results) -> Iterator[str]:
    found = results.get(_RECOVERY)
    if found is None:
        return
    cases = [one for one in found["cases"].values() if one.get("ran_out_in")]
    same = sum(bool(one["has_the_losses"] and one["has_the_weights"]) for one in cases)
    phases = [name for name, is_met in found["phases_met"].items() if is_met]
    yield (
        f"**Out of memory:** {same} of {len(cases)} runs that ran out of it (in {_and(phases)}) ended with the losses "
        f"and weights of the run without a limit, to the last bit ({results.link(_RECOVERY)})."
    )


def _peaks(results: Results) -> Iterator[str]:
    found = {name: one for name, one in results.matching("predict_*_cuda.json") if "peak_ratio" in one}
    if found:
        peaks, times = (sorted(found, key=lambda name: found[name][key]) for key in ("peak_ratio", "step_time_ratio"))
        shown = dict.fromkeys((peaks[0], peaks[-1], times[0], times[-1]))
        yield (
            f"**Peaks:** those predicted beforehand for {len(found)} training steps are "
            f"{found[peaks[0]]['peak_ratio']:.3f} to {found[peaks[-1]]['peak_ratio']:.3f} times the measured ones. "
            f"Times are too short: {found[times[0]]['step_time_ratio']:.2f} to "
            f"{found[times[-1]]['step_time_ratio']:.2f} times the measured ones "
            f"({', '.join(map(results.link, shown))}; "
            f"{_page(results, 'docs/memory.md', 'predicted-and-measured', 'all')})."
        )


def _auto(results: Results) -> Iterator[str]:
    for name in (_HEADLINE, _SECOND):
        found = results.get(name)
        verdict = found.get("verdict") if found else None
        if found is not None and _left_out(found) and not (verdict and verdict["best_ratio_to_today"]):
            yield f"**`auto`**, {found['title']} ({results.link(name)}).{_left_out(found)}"
            continue
        if found is None or not verdict or verdict["best_ratio_to_today"] is None:
            continue
        yield (
            f"**`auto`**, {found['title']}: {next(_compared(found))} ({results.link(name)}).{_left_out(found)}"
            f"{_prepared_for_another(found)}"
        )


def _compared(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield how the plans of `auto` compare with what the Trainer has, in the same memory."""
    against = [_of(row["ratio_to_today"]) for row in result["budgets"] if row["ratio_to_today"]]
    yield (
        f"within {_and([_gib(row) for row in result['budgets']])} a step that `auto` planned takes {_and(against)} of "
        "the time of the best that `Trainer` can set there"
    )


def _left_out(result: Mapping[str, Any]) -> str:
    """Say which plans were timed too early to be compared, what was seen of them, and beside what."""
    records = result.get("contenders", {}).values()
    found = [f"{one['title']} ({_milliseconds(one['times_left_out'])})" for one in records if "times_left_out" in one]
    if not found:
        return ""
    today = [one for one in records if one["group"] == "today" and "step_time_ms" in one]
    fastest = min(today, key=lambda one: one["step_time_ms"]["median"], default=None)
    beside = f" ({fastest['title']}: {_milliseconds(fastest)})" if fastest else ""
    return f" Timed while selective layers still checked what they keep, and not compared: {_and(found)}{beside}."


def _milliseconds(record: Mapping[str, Any]) -> str:
    return f"{record['step_time_ms']['median']:,.0f} ms"


def _of(ratio: float) -> str:
    return f"{ratio:.0%}".replace("%", " %")


def _gib(row: Mapping[str, Any]) -> str:
    return f"{row['budget_bytes'] / GIB:.1f} GiB"


def _rows(results: Results) -> Iterator[str]:
    for name in _BRACKETS:
        found = results.get(name)
        for whose, words in (("hf_ckpt", "ours"), ("transformers", "the Trainer's")):
            tried = (found or {}).get(whose, {}).get("trials", [])
            if found is not None and tried:
                cap = name.removeprefix("longctx_bracket_").partition("gib")[0]
                trials = ", ".join(
                    f"{one['length']:,} tokens ({one['percent']} % of the predicted length) {_OUTCOMES[one['fits']]}"
                    for one in tried
                )
                yield f"**A sequence in {cap} GiB**, {words}: {trials} ({results.link(name)})."


_OUTCOMES = {True: "trained", False: "ran out of memory", None: "failed"}


def _proof(results: Results) -> Iterator[str]:
    found = results.get(_PROOF)
    if found is not None and "full" in found["by_policy"]:
        one = found["by_policy"]["full"]
        yield (
            f"**The proof** adds {one['proof_seconds']:.1f} s to the first step of Llama 2 7B with LoRA under `full` "
            f"({results.link(_PROOF)})."
        )


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _page(results: Results, page: str, anchor: str, words: str) -> str:
    here = os.path.relpath(results.folder.parents[1] / page, results.document.parent)
    return f"[{words}]({here}#{anchor})"


def _longest(stages: Sequence[Stage], results: Results) -> str:
    lines = list(_rows(results))
    found = results.get(_LONGEST)
    if found is not None and found.get("longest"):
        lines.append(
            f"With the allocator capped at 24 GiB a row of {found['longest']:,} tokens trains, where "
            f"{found['predicted']['length']:,} tokens are predicted ({results.link(_LONGEST)})."
            f"{_prepared_for_another(found)}"
        )
    return "\n\n".join(map(_paragraph, lines or [f"Not yet measured on a GPU: {COMMAND}."]))


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
    "headline": _headline,
    "measured": _measured,
    "longest": _longest,
    "accuracy": _accuracy,
    "left": _left,
}


def _paragraph(text: str, width: int = _WIDTH) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _prepared_for_another(result: Mapping[str, Any]) -> str:
    differences = result["environment"].get("prepared_for_another")
    return f" Plans were prepared for another run: {'; '.join(differences)}." if differences else ""


def _card(result: Mapping[str, Any]) -> str:
    return str(result["environment"]["hardware"].get("gpu", "GPU"))
