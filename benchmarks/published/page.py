"""docs/accuracy.md, its picture and its tables, from the result of `measure`.

python -m benchmarks published_page
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.pages.drawing import GIB, digest_in, digest_of, figure_of, plain, save
from benchmarks.pages.words import csv_text, table
from benchmarks.published.points import FOLDER, Source, sources
from benchmarks.published.summary import NCCL, group_of, has_run
from benchmarks.runner import RESULTS, add_out, main

RESULT = RESULTS / "published.json"
DOCUMENT = Path(__file__).parents[2] / "docs" / "accuracy.md"
PICTURE = "accuracy.png"
POINTS, SOURCES = "accuracy-points.csv", "accuracy-sources.csv"
"""The tables, in the folder `data` next to the page."""

Record = dict[str, Any]

_LINK = "[published.json](../benchmarks/results/published.json)"
_NUM_WORST = 5
_KERNELS = {"flash_attention_2": "FlashAttention-2", "flash_attention_3": "FlashAttention-3"}
_HEAD = """<!-- Written by benchmarks/published/page.py from benchmarks/results/published.json: make bench-pages -->

# Accuracy

"""
_PICTURE = f"""![Predicted against published memory](images/{PICTURE})

Each mark is a measurement that somebody else published, with a configuration precise enough to build the same step.
Nothing was run on a GPU for this page. What the measured versions of other libraries did differently from the installed
ones is emulated by name, in `benchmarks/published/emulations.py`.

The tables, with every figure in bytes:

- [every point](data/{POINTS}): what was published, what is predicted, both ratios, and why it differs
- [every source](data/{SOURCES}): its hardware, versions, what was measured and how it was configured
- the whole result: {_LINK}
"""
_OTHERS = """## What others state

<!-- given: as their authors state it -->
| estimator | stated error of memory |
| --- | --- |
| [LLMem](https://arxiv.org/abs/2404.10933) | 1.6 % on one GPU, 3.0 % on several |
| [estimator for multimodal models](https://arxiv.org/abs/2512.07853) | 8.7 % |
"""
_COMMANDS = """## Run it

No GPU is needed:

```sh
python -m benchmarks published          # predict all points, on one core
python -m benchmarks published_page     # write this page and its tables
```
"""


def render(result: Record) -> str:
    """Return docs/accuracy.md."""
    records = result["points"]
    parts = [
        _HEAD + _finding(result),
        _PICTURE,
        "## What torch allocates",
        f"Peak of `max_memory_allocated`, from {_LINK}:",
        _accuracy_table(result, "ratio"),
        "## What torch reserves",
        f"`max_memory_reserved`, or what nvidia-smi shows, from {_LINK}:",
        _accuracy_table(result, "reserved_ratio"),
        _contexts(result),
        _REPEATED,
        _times(result),
        _attention(),
        _worst(records),
        _held_out(records),
        _OTHERS,
        _sources(records),
        _COMMANDS,
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _finding(result: Record) -> str:
    allocated, reserved = (
        next(each for each in result["summary"] if each["what"] == what and each["group"] == "all")
        for what in ("ratio", "reserved_ratio")
    )
    times, fits = result["times"][-1], result["answers"]
    return (
        f"Predicted peak memory is right within {_percent(allocated['largest_error'])} for each of the "
        f"{allocated['num_points']} published steps and modules that say what torch allocated. What torch reserves is "
        f"harder: half of {reserved['num_points']} points are right within {_percent(reserved['median_error'], 1)}, "
        f"and the worst is wrong by {_percent(reserved['largest_error'], 1)}. On {times['num_points']} points that no "
        f"constant was fitted to, the mean error of a step's time is {_percent(times['mean_error'], 1)}, and the "
        f"largest {_percent(times['largest_error'], 1)}. Of "
        f'{fits["num_ran"]} steps that ran, {fits["num_ran_but_does_not_fit"] or "none"} was answered "does not fit", '
        f'and {fits["num_ran_and_perhaps"]} "perhaps". Of {fits["num_failed"]} that ran out of memory, '
        f'{fits["num_failed_but_fits"] or "none"} was answered "fits" ({_LINK}).'
    )


def _contexts(result: Record) -> str:
    sizes = "; ".join(
        f"{'NCCL, on several GPUs' if name == NCCL else name}: {size / 2**20:,.0f} MiB"
        for name, size in result["context_bytes"].items()
    )
    return (
        "nvidia-smi also shows CUDA's context, and what NCCL takes. These sizes are the only ones that are fitted: "
        f"{sizes} ({_LINK}). They are medians over a quarter of the rows, chosen by the hash of their names; those "
        "rows are not judged. nvidia-smi was read once a second, so it does not see what only the first step holds."
    )


_REPEATED = """
<!-- given: the files of fms-acceleration of two commits, and of three -->
The same step, measured again with other versions, shows what such a figure is worth. Santacoder on one GPU (full, 4 x
2,048) shows 13,953 MiB in one commit of fms-acceleration and 15,116 MiB in another. Mistral 7B (QLoRA, 4 x 4,096, two
GPUs) shows 19,429 and 20,190 MiB. Both allocate the same bytes. Sharded steps repeat themselves to 4 % at best.
"""


def _times(result: Record) -> str:
    """Return what is to be said of times, with a table by GPU."""
    rows = [
        (
            times["card"],
            "fitted" if times["is_fitted"] else "test",
            str(times["num_points"]),
            _percent(times["mean_error"], 1),
            f"{100 * times['mean_difference']:+.1f} %",
            str(times["num_too_short"]),
            _percent(times["largest_error"], 1),
        )
        for times in result["times"]
    ]
    header = ("GPU", "half", "points", "mean error", "mean difference", "predicted too short", "largest error")
    text = f"""## Times of steps

Some constants are fitted to half of the points, chosen by the hash of their names. The other half tests them. Fitted
are the rates that a GPU reaches in matrix products and in memory, the time that the host needs for a unit of FSDP, and
of a source's machine the link between its GPUs and the speed of its host (`sources.yaml` and
`hf_ckpt/simulation/measured_devices.json`). Nothing is fitted to sources that are held out. From {_LINK}:"""
    return f'{text}\n\n<!-- given "GPU": names of GPUs -->\n{table(header, rows)}'


def _attention() -> str:
    """Return the times of steps whose attention runs on a kernel that the model names."""
    found = json.loads((RESULTS / "attention_rates.json").read_text(encoding="utf-8"))
    rows = [
        (
            f"{_KERNELS[group['attention']]}, {group['gpu'].upper()}",
            f"{group['tokens']:,}",
            group["half"],
            str(group["num_points"]),
            _percent(group["mean_error"], 1),
            f"{100 * group['mean_difference']:+.1f} %",
            _percent(group["largest_error"], 1),
        )
        for group in found["groups"]
    ]
    header = ("kernel", "tokens", "half", "points", "mean error", "mean difference", "largest error")
    part, idle = found["fitted"]["part_of_other_operators"], found["fitted"]["idle_seconds"]
    return f"""## Times of steps by attention's kernel

Steps of dense models in prime-rl under `torch.compile`, predicted by `benchmarks/attention_rates.py`. Fitted to half of
them are the rates of FlashAttention-3 on Hopper and of FlashAttention-2 on Blackwell, and two constants of this source
only: the part of all other operators' time that compiling leaves ({part:g}), and the seconds in which a device waits in
reinforcement learning ({idle:g}). So these points are not among those above. Steps of 16,384 tokens are short, and what
else a host does in them is not known. From [attention_rates.json](../benchmarks/results/attention_rates.json):

<!-- given "kernel", "tokens": names of kernels, and lengths of rows -->
{table(header, rows)}"""


def _accuracy_table(result: Record, what: str) -> str:
    rows = [
        (
            summary["group"],
            str(summary["num_points"]),
            _percent(summary["median_error"]),
            *(_percent(summary[f"share_within_{percent}_percent"], 0) for percent in (1, 2, 5)),
            _percent(summary["largest_error"]),
        )
        for summary in result["summary"]
        if summary["what"] == what
    ]
    within = [f"within {percent} %" for percent in (1, 2, 5)]
    note = f"<!-- given {', '.join(map(json.dumps, within))}: names of columns -->"
    return f"{note}\n{table(('what was measured', 'points', 'median error', *within, 'largest error'), rows)}"


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


def _worst(records: Sequence[Record]) -> str:
    """Return the points with the largest errors, and where the reasons are."""
    by_name = sources()
    rows = []
    for name, what in (("reserved_ratio", "reserved"), ("time_ratio", "time")):
        judged = [record for record in records if record.get(name) and not record.get("is_used")]
        for record in sorted(judged, key=lambda each: -abs(each[name] - 1))[:_NUM_WORST]:
            link = f"{by_name[record['source']].link(record['file'])}#L{record['row']}"
            rows.append((what, f"[{record['title']}]({link})", record.get("card", ""), f"{record[name]:.2f}"))
    return (
        "## Where predictions are wrong\n\nThe five largest errors of what is reserved, and of times: predicted over "
        f"published, from {_LINK}. [Every point](data/{POINTS}) that is wrong by more than a hundredth (allocated), a "
        "twentieth (reserved) or a tenth (time) has its reason in the last column, or says `unexplained`.\n\n"
        f'<!-- given "step": names of steps -->\n{table(("what", "step", "GPU", "ratio"), rows)}'
    )


def _held_out(records: Sequence[Record]) -> str:
    num_held_out = sum(record["is_held_out"] for record in records)
    whole = [source.title for source in _sources_of(records) if source.is_held_out]
    more = f" All points of these sources are among them: {'; '.join(whole)}." if whole else ""
    return (
        f"## Held out\n\n{num_held_out} of {len(records)} points were predicted only when the code was final, chosen "
        f"by the hash of their names or by their source.{more} Some of them showed causes that the code did not count, "
        "and the code was changed. From then on they test nothing. "
        "[Which, and what was predicted before](../benchmarks/published/held_out.md), stands by itself."
    )


def _sources(records: Sequence[Record]) -> str:
    rows = [
        (f"[{source.title}]({source.link('')})", source.hardware, str(_count(records, name)))
        for name, source in sources().items()
        if _count(records, name)
    ]
    return (
        f"## Sources\n\nVersions and configurations are in [the table of sources](data/{SOURCES}).\n\n"
        f"<!-- given: what the sources say -->\n{table(('source', 'hardware', 'points'), rows)}"
    )


def _count(records: Sequence[Record], source: str) -> int:
    return sum(record["source"] == source for record in records)


def _sources_of(records: Sequence[Record]) -> list[Source]:
    names = {record["source"] for record in records}
    return [source for name, source in sources().items() if name in names]


# --- The tables. ---


def tables(result: Record) -> dict[str, str]:
    """Return the tables next to the page, by the name of their file, as CSV."""
    return {POINTS: csv_text(_points(result["points"])), SOURCES: csv_text(_rows_of_sources(result["points"]))}


def _points(records: Sequence[Record]) -> Iterator[Record]:
    by_name, why = sources(), dict[str, str]()
    for entry in reasons():
        reason = f"Time: {entry['reason']}" if entry.get("of") == "time" else entry["reason"]
        why |= {name: f"{why[name]} {reason}" if name in why else reason for name in entry["points"]}
    for record in records:
        source, smi = by_name[record["source"]], record.get("published_smi_mib")
        ran_out = "ranks" in record and not has_run(record)
        yield {
            "what": record["title"],
            "group": group_of(record),
            "source": source.title,
            "link": f"{source.link(record['file'])}#L{record['row']}",
            "gpu": record.get("card") or record.get("gpu"),
            "published": "out of memory" if ran_out else "ran",
            "published_allocated_bytes": record["published_bytes"],
            "predicted_allocated_bytes": record["predicted_bytes"],
            "allocated_ratio": _ratio(record["ratio"]),
            "published_reserved_bytes": record.get("published_reserved_bytes"),
            "published_nvidia_smi_bytes": None if smi is None else smi * 2**20,
            "predicted_reserved_bytes": record.get("predicted_reserved_bytes"),
            "reserved_ratio": _ratio(record.get("reserved_ratio")),
            "gives_context": record.get("is_used", False),
            "answer": record.get("fits"),
            "time_ratio": _ratio(record.get("time_ratio")),
            "time_is_fitted": record.get("is_fitted_time", False),
            "is_held_out": record["is_held_out"],
            "why_it_differs": why.get(record["name"]),
        }


def _rows_of_sources(records: Sequence[Record]) -> Iterator[Record]:
    for source in _sources_of(records):
        yield {
            "source": source.title,
            "link": source.link(""),
            "hardware": source.hardware,
            "versions": source.versions,
            "what_was_measured": source.measured,
            "configuration": source.configuration,
            "is_held_out": source.is_held_out,
            "predicted_before_a_change": " ".join(f"{ratio:.3f}" for ratio in source.blind_ratios),
        }


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.4f}"


def reasons() -> list[Record]:
    """Return why points differ: their names, the reason, and `of: time` where it is their time that differs."""
    read: list[Record] = yaml.safe_load((FOLDER / "reasons.yaml").read_text(encoding="utf-8"))
    return read


# --- The picture. ---

_MARKS = {
    "allocated by one module": ("#0072B2", "o"),
    "by a step on one GPU": ("#D55E00", "s"),
    "by a step on several": ("#CC79A7", "^"),
    "reserved, or nvidia-smi": ("#009E73", "x"),
}


def picture_data(result: Record) -> Record:
    """Return what is drawn: [published, predicted] in GiB, by the names of `_MARKS`."""
    drawn: dict[str, list[list[float]]] = {name: [] for name in _MARKS}
    of_module, on_one, on_several, reserved = drawn.values()
    for record in result["points"]:
        ranks = record.get("ranks")
        if record["ratio"] is not None:
            group = of_module if ranks is None else on_one if ranks == 1 else on_several
            group.append([record["published_bytes"] / GIB, record["predicted_bytes"] / GIB])
        if record.get("reserved_ratio") is not None:
            published = record["published_reserved_bytes"] or record["published_smi_mib"] * 2**20
            reserved.append([published / GIB, record["reserved_ratio"] * published / GIB])
    return drawn


def draw(data: Record, path: Path) -> None:
    """Draw what `picture_data` returned."""
    figure = figure_of((8.0, 6.0), "Predicted against published peak memory")
    panel = figure.subplots()
    plain(panel, "published (GiB)", "predicted (GiB)", 12)
    values = [value for points in data.values() for point in points for value in point]
    ends = [min(values), max(values)]
    panel.plot(ends, ends, color="#999999", linewidth=1, zorder=1, label="equal")
    for group, points in data.items():
        colour, marker = _MARKS[group]
        panel.scatter(*zip(*points, strict=True), color=colour, marker=marker, s=36, label=group, alpha=0.8, zorder=2)
    panel.set_xscale("log")
    panel.set_yscale("log")
    ticks = [0.1, 0.3, 1, 3, 10, 30, 100]
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.legend(frameon=False, fontsize=12)
    save(figure, path, data)


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_out(parser, DOCUMENT, "the page")


def run(options: Namespace) -> None:
    """Write the page, its tables and its picture."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    options.out.write_text(render(result), encoding="utf-8")
    folder = options.out.parent / "data"
    folder.mkdir(exist_ok=True)
    for name, text in tables(result).items():
        (folder / name).write_text(text, encoding="utf-8")
    data, picture = picture_data(result), options.out.parent / "images" / PICTURE
    if not picture.is_file() or digest_in(picture) != digest_of(data):
        draw(data, picture)
    print(options.out)


if __name__ == "__main__":
    sys.exit(main(__name__))
