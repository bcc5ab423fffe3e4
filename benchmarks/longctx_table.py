"""The tables of docs/long_context.md, from the result of longctx_predict.py. Text in, text out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.pages.words import table

GIB = 2**30
_SHOWN = 0.003
"""Share of the peak from which on storages have a line of their own."""
_MARKED = re.compile(r"(<!-- (?P<name>\w+): written by [\w/.]+ -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)

Result = Mapping[str, Any]


def with_tables(text: str, result: Result) -> str:
    """Return a document with its tables written anew, between the comments that name them.

    Args:
        text: the document.
        result: of `longctx_predict.predict`.

    Raises:
        KeyError: the document names a table that there is not.
    """
    return _MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found['name']](result)}\n\n{found[3]}", text)


def names_in(text: str) -> list[str]:
    """Return the names of the tables of a document."""
    return [found["name"] for found in _MARKED.finditer(text)]


def longest(result: Result) -> str:
    """Return the longest rows: one row for each budget, one column for each contender."""
    published = result["published"]
    header = (
        *("memory", "hf_ckpt, `auto`", "host memory", "transformers, full", "transformers, full, `offload`"),
        *("Unsloth (published)", "transformers + FA2 (published)"),
    )
    rows = []
    for row in result["budgets"]:
        size = str(row["budget_gib"])
        rows.append(
            (
                f"{size} GiB",
                f"**{_tokens(row['hf_ckpt']['length'])}**",
                _gib(row["hf_ckpt"]["host_bytes"]),
                _tokens(row["transformers"]["length"]),
                _tokens(row["transformers_offload"]["length"]),
                _tokens(published["unsloth"][size]),
                _tokens(published["transformers_fa2"][size]),
            )
        )
    return table(header, rows)


def peak(result: Result) -> str:
    """Return what the peak is made of at the longest row of each budget."""
    rows = [row["hf_ckpt"] for row in result["budgets"]]
    categories = dict.fromkeys(category for row in rows for category in row["by_category"])
    header = ("at the peak", *(f"{row['budget_gib']} GiB" for row in result["budgets"]))
    body = [("tokens", *(_tokens(row["length"]) for row in rows))]
    body += [(category, *(_gib(row["by_category"].get(category, 0)) for row in rows)) for category in categories]
    body += [("**all of it**", *(f"**{_gib(row['peak_bytes'])}**" for row in rows))]
    return table(header, body)


def ledger(result: Result) -> str:
    """Return the storages that are alive at the peak of one step, the largest first; together they are the peak."""
    found = result["ledger"]
    header = ("bytes", "storages", "category", "made by", "each")
    shown = [item for item in found["storages"] if item["num_bytes"] >= _SHOWN * found["peak_bytes"]]
    rest = [item for item in found["storages"] if item["num_bytes"] < _SHOWN * found["peak_bytes"]]
    rows = [
        (_exact(item["num_bytes"]), f"{item['count']:,}", item["category"], item["made_by"], item["each"])
        for item in shown
    ]
    num_rest = sum(item["count"] for item in rest)
    rows.append((_exact(sum(item["num_bytes"] for item in rest)), f"{num_rest:,}", "smaller ones", "", ""))
    rows.append((f"**{_exact(found['peak_bytes'])}**", "", "", "", ""))
    return table(header, rows)


def stages(result: Result) -> str:
    """Return what each stage reaches, and what it costs."""
    header = ("layers, and what is added", f"longest sequence in {_stages_gib(result)} GiB", *_of_step(result))
    first = result["stages"][0]["seconds"]
    rows = [
        (
            stage["stage"],
            _tokens(stage["longest"]["length"]),
            _gib(stage["peak_bytes"]),
            _gib(stage["host_bytes"]),
            f"{stage['seconds']:.2f} s ({stage['seconds'] / first - 1:+.1%})",
        )
        for stage in result["stages"]
    ]
    return table(header, rows)


TABLES: Mapping[str, Callable[[Result], str]] = {
    "longest": longest,
    "peak": peak,
    "ledger": ledger,
    "stages": stages,
}
"""What writes each table, by the name in the document's comments."""


def _stages_gib(result: Result) -> int:
    return int(result["stages_gib"])


def _of_step(result: Result) -> tuple[str, str, str]:
    at = f"at {_tokens(result['stages'][0]['at_length'])} tokens"
    return f"peak {at}", "host memory", f"step {at}, predicted"


def _tokens(number: int | None) -> str:
    return f"{number:,}" if number else "none"


def _exact(num_bytes: int) -> str:
    return f"{num_bytes:,}"


def _gib(num_bytes: int) -> str:
    if num_bytes >= GIB / 20:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes else "-"
