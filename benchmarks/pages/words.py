"""The words of page and pictures: what a case and a run are called, how figures are written."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.pages.results import CPU, CUDA, Run

NOT_YET = "not yet measured on a GPU"
_DEVICES: Mapping[str, str] = {"h100": "an H100", "a100-80gb": "an A100", "rtx4090": "an RTX 4090"}


def case_title(run: Run) -> str:
    """Return what a case is called: model, method and row."""
    return str(run.read.get("title") or run.read.get("model", {}).get("title") or run.case)


def facts_of(run: Run) -> str:
    """Return what is trained in a run, in a sentence; empty where the result does not say."""
    model = run.read.get("model") or {}
    config = model.get("config") or {}
    if not {"batch", "tokens", "method", "attention", "dtype"} <= model.keys():
        return ""
    size = f"{config.get('num_hidden_layers')} layers of width {config.get('hidden_size'):,}" if config else "the model"
    row = f"{model['batch']} x {model['tokens']:,} tokens" if model["batch"] > 1 else f"{model['tokens']:,} tokens"
    method = {"full": "full fine-tune", "lora": "LoRA", "qlora": "QLoRA"}.get(model["method"], model["method"])
    return f"A step: {size}, {row}, {method}, {model['attention']} attention, {model['dtype']} weights."


def device_words(run: Run) -> str:
    """Return where a run was measured, or for what it was predicted."""
    if run.kind == CPU:
        return "small twin on a CPU"
    if run.kind == CUDA:
        return str(run.read["environment"]["hardware"].get("gpu", "a GPU"))
    return _DEVICES.get(run.read["device"], run.read["device"])


def kind_words(run: Run) -> str:
    """Return whether a run is predicted or measured, and on what."""
    return f"predicted for {device_words(run)}" if run.is_predicted else f"measured, {device_words(run)}"


def installed(run: Run) -> str:
    """Return the versions that a run was made with."""
    versions = run.read["environment"]["versions"]
    names = ("torch", "transformers", "accelerate")
    return ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))


def gpu_command(case: str) -> str:
    """Return the command that measures a case."""
    return f"make bench-gpu CASE={case}"


def ratio(number: float | None) -> str:
    """Return a ratio."""
    return "" if number is None else f"{number:.2f}"


def link(name: str) -> str:
    """Return the link of the page to a result."""
    return f"[{name}](../benchmarks/results/{name})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    return "\n".join(_lines(header, rows))


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with the keys of the first as header; None is an empty cell."""
    rows = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def folded(summary: str, *parts: str) -> str:
    """Return a derivation that opens when its summary is asked for."""
    return "\n\n".join((f"<details markdown>\n<summary>{summary}</summary>", *parts, "</details>"))
